//! `moejob crd`: the CustomResourceDefinition, for `kubectl apply -f -`.

use std::io::Write;
use std::process::ExitCode;

pub fn run() -> ExitCode {
    // A reader that has gone away (`| head`) is no failure of ours.
    let _ = std::io::stdout().write_all(moejob_plan::crd::yaml().as_bytes());
    ExitCode::SUCCESS
}
