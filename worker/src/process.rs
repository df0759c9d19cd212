//! The process of a worker: `moe-worker`, and the same code as `moejob worker`.

use crate::comm::Comm;
use crate::run::{Attempt, from_stdin};
use crate::trainer::Trainer;
use crate::trainer_api::{AttemptEnd, Control, TrainerEvent};
use moejob_protocol::WorkerConfig;
use std::process::ExitCode;

impl Attempt for Trainer {
    fn run_attempt(
        &mut self,
        config: &WorkerConfig,
        comm: Comm,
        control: &Control,
        out: &mut dyn FnMut(TrainerEvent),
    ) -> AttemptEnd {
        Trainer::run_attempt(self, config, comm, control, out)
    }
}

/// Runs the worker whose bootstrap line comes on standard input.
pub fn main() -> ExitCode {
    from_stdin(Trainer::new)
}
