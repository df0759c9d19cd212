//! Batches that are made up.

use moe_worker::data::{Batch, Batches, DataError};
use moejob_protocol::config::TrainingConfig;
use moejob_protocol::model::ModelConfig;

/// Tokens that follow from each other, so that there is something to learn.
pub struct Made {
    batch: Batch,
    vocabulary: u32,
    sequence: usize,
}

impl Made {
    pub fn new(model: &ModelConfig, training: &TrainingConfig) -> Made {
        let sequence = training.sequence_length as usize;
        let tokens = training.micro_batch_size as usize * sequence;
        Made { batch: Batch::new(tokens), vocabulary: model.vocab_size, sequence }
    }
}

impl Batches for Made {
    fn micro_batch(&mut self, step: u64, index: u32) -> Result<&Batch, DataError> {
        let mut state = (step * 1009 + u64::from(index) * 31 + 7) as u32;
        let mut next = |before: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let jump = if state >> 28 == 0 { state >> 8 } else { 1 };
            (before.wrapping_mul(5).wrapping_add(jump)) % self.vocabulary
        };
        let rows = self.batch.ids.len() / self.sequence;
        for row in 0..rows {
            let mut token = next(row as u32);
            for at in row * self.sequence..(row + 1) * self.sequence {
                self.batch.ids[at] = token;
                token = next(token);
                self.batch.targets[at] = token;
            }
        }
        Ok(&self.batch)
    }
}
