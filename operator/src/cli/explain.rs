//! `moejob explain FIELD`.

use super::validate::Output;
use clap::Args;
use moejob_manifest::explain;
use std::process::ExitCode;

#[derive(Args)]
pub struct ExplainArgs {
    /// A field of the manifest, such as training.steps or model.router, or the code of a refusal,
    /// such as E0204; without one the first fields.
    #[arg(default_value = "")]
    pub field: String,
    /// Every field, as docs/manifest.md has them.
    #[arg(long, conflicts_with_all = ["field", "output"])]
    pub markdown: bool,
    /// How it is written; json is a list: the field itself, then those in it.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

pub fn run(args: &ExplainArgs) -> ExitCode {
    if args.markdown {
        print!("{}", explain::markdown());
        return ExitCode::SUCCESS;
    }
    let explained = match args.output {
        Output::Text => explain::explain(&args.field),
        Output::Json => explain::json(&args.field).map(|value| format!("{value}\n")),
    };
    match explained {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("moejob: {}", moejob_manifest::problem::printable(&why));
            ExitCode::from(2)
        }
    }
}
