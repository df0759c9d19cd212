//! `moejob crd`: the CustomResourceDefinition, for `kubectl apply -f -`.

use std::process::ExitCode;

pub fn run() -> ExitCode {
    print!("{}", moejob_manifest::crd::yaml());
    ExitCode::SUCCESS
}
