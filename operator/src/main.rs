//! The command line. `moejob run FILE` is the whole product on one machine.

use std::process::ExitCode;

fn main() -> ExitCode {
    moejob::cli::main()
}
