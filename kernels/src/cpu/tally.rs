//! See [`crate::TallyLoss`].

use super::CpuDevice;
use crate::loss::IGNORE;
use crate::step_numbers::StepNumbers;
use crate::tally::{TallyLayer, TallyLoss};

impl CpuDevice {
    pub(crate) fn tally_loss(&mut self, op: &TallyLoss) {
        let (mut views, _) = self.split();
        let loss: &[f64] = views.read(op.loss);
        let targets: &[u32] = views.read(op.targets);
        let numbers: &mut [f64] = views.write(op.numbers);
        numbers[StepNumbers::LOSS] += loss.iter().fold(0.0, |sum, loss| sum + loss);
        let valid = targets.iter().filter(|target| **target != IGNORE).count();
        numbers[StepNumbers::VALID_TARGETS] += valid as f64;
    }

    pub(crate) fn tally_layer(&mut self, op: &TallyLayer) {
        let (mut views, _) = self.split();
        let losses: &[f64] = views.read(op.losses);
        let counts: &[u32] = views.read(op.counts);
        let numbers: &mut [f64] = views.write(op.numbers);
        numbers[StepNumbers::AUX_LOSS] += losses[0];
        numbers[StepNumbers::Z_LOSS] += losses[1];
        let loads = &mut numbers[op.layout.loads_of(op.moe_layer)];
        for (load, count) in loads.iter_mut().zip(counts) {
            *load += f64::from(*count);
        }
    }
}
