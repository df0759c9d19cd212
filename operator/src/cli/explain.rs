//! `moejob explain FIELD` and `moejob init`.

use clap::Args;
use moejob_plan::{edit, explain};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
pub struct ExplainArgs {
    /// A field of the manifest, such as training.steps or model.router; without one the first ones.
    #[arg(default_value = "")]
    pub field: String,
    /// Every field, as docs/manifest.md has them.
    #[arg(long, conflicts_with = "field")]
    pub markdown: bool,
}

pub fn run(args: &ExplainArgs) -> ExitCode {
    if args.markdown {
        print!("{}", explain::markdown());
        return ExitCode::SUCCESS;
    }
    match explain::explain(&args.field) {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("moejob: {}", moejob_plan::problem::printable(&why));
            ExitCode::from(2)
        }
    }
}

#[derive(Args)]
pub struct InitArgs {
    /// The job's name; the manifest is NAME.yaml.
    #[arg(default_value = "my-job")]
    pub name: String,
    /// A well-known model in place of a small one; `moejob explain model.preset` lists them.
    #[arg(long)]
    pub preset: Option<String>,
    /// The file to make; `-` is standard output. Default: NAME.yaml.
    #[arg(short, long)]
    pub out: Option<PathBuf>,
}

/// Writes a manifest to begin with; one that is there stays.
pub fn init(args: &InitArgs) -> ExitCode {
    let text = match edit::first(&args.name, args.preset.as_deref()) {
        Ok(text) => text,
        Err(why) => {
            eprintln!("moejob: {}", moejob_plan::problem::printable_lines(&why));
            return ExitCode::from(2);
        }
    };
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("{}.yaml", args.name)));
    if out.as_os_str() == "-" {
        print!("{text}");
        return ExitCode::SUCCESS;
    }
    let made = OpenOptions::new().write(true).create_new(true).open(&out);
    match made.and_then(|mut file| file.write_all(text.as_bytes())) {
        Ok(()) => {
            let out = out.display();
            println!("{out}: put your text where it says, then: moejob run {out}");
            ExitCode::SUCCESS
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            eprintln!("moejob: {} is there already: give another name, or --out", out.display());
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("moejob: {} cannot be written: {error}", out.display());
            ExitCode::FAILURE
        }
    }
}
