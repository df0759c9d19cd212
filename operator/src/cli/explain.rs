//! `moejob explain FIELD` and `moejob init`.

use super::args::word;
use super::validate::Output;
use crate::cli::out::io;
use clap::Args;
use moejob_manifest::{edit, explain};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
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
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("{}.yaml", args.name)));
    let called = match out.as_os_str() == "-" {
        true => word(Path::new(&format!("{}.yaml", args.name))),
        false => word(&out),
    };
    let first = match edit::first(&args.name, args.preset.as_deref(), &called) {
        Ok(first) => first,
        Err(why) => {
            eprintln!("moejob: {}", moejob_manifest::problem::printable_lines(&why));
            return ExitCode::from(2);
        }
    };
    if out.as_os_str() == "-" {
        print!("{}", first.text);
        return ExitCode::SUCCESS;
    }
    let made = OpenOptions::new().write(true).create_new(true).open(&out);
    match made.and_then(|mut file| file.write_all(first.text.as_bytes())) {
        Ok(()) => {
            let (out, typed) = (out.display(), word(&out));
            for why in &first.unsupported {
                eprintln!("{out}: {why}");
            }
            match first.unsupported.is_empty() {
                true => println!("{out}: put your text where it says, then: moejob run {typed}"),
                false => println!("{out}: `moejob plan {typed}` shows it; it cannot run yet"),
            }
            ExitCode::SUCCESS
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            eprintln!("moejob: {} is there already: give another name, or --out", out.display());
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("moejob: {} cannot be written: {}", out.display(), io(&error));
            eprintln!("  name a file in a folder that is there");
            ExitCode::from(2)
        }
    }
}
