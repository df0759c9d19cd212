//! `moejob crd`: the CustomResourceDefinition, for `kubectl apply -f -`. `moejob schema`: the JSON
//! schema of a manifest, for editors and programs.

use moejob_manifest::crd;
use std::process::ExitCode;

pub fn run() -> ExitCode {
    print!("{}", crd::yaml());
    ExitCode::SUCCESS
}

pub fn schema() -> ExitCode {
    println!("{:#}", crd::manifest_schema());
    ExitCode::SUCCESS
}
