//! The command line. `moejob run FILE` is the whole product on one machine.

use clap::Parser;
use moejob::cli::{Cli, dispatch};
use std::process::ExitCode;

fn main() -> ExitCode {
    dispatch(Cli::parse())
}
