//! `moejob run FILE`.

use super::complain;
use crate::local::{self, LocalJob};
use clap::Args;
use moejob_plan::job::Job;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

#[derive(Args)]
pub struct RunArgs {
    /// The MoeJob manifest.
    pub file: PathBuf,
    /// Where runs lie: this one in DIR/NAME.
    #[arg(long, default_value = "runs")]
    pub dir: PathBuf,
    /// Worker processes, in place of nodes.max (and of nodes.min, if that is larger).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub workers: Option<u32>,
    /// Kernel threads of each worker; by default the cores are shared out evenly.
    #[arg(long, default_value_t = 0)]
    pub threads: u32,
}

pub fn run(args: &RunArgs) -> ExitCode {
    let job = match super::validate::read_job(&args.file) {
        Ok(job) => job,
        Err(code) => return code,
    };
    let job = match local_job(&job, args) {
        Ok(job) => job,
        Err(code) => return code,
    };
    match local::run(job, args.dir.clone()) {
        Ok(code) => ExitCode::from(code as u8),
        Err(error) => {
            complain(&error);
            ExitCode::from(error.exit_code() as u8)
        }
    }
}
