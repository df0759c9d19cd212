//! What a micro-batch trains on.

use super::{DataError, Stream};
use moejob_kernels::IGNORE;

/// Sequences for the model: [sequences, S] each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    pub ids: Vec<u32>,
    pub targets: Vec<u32>,
    /// For each token where its document begins in its sequence, if documents are kept apart.
    pub starts: Option<Vec<u32>>,
    /// How many targets of the whole step count, where it is not all of them.
    pub step_targets: Option<u64>,
}

impl Batch {
    pub fn new(tokens: usize) -> Batch {
        Batch { ids: vec![0; tokens], targets: vec![0; tokens], ..Batch::default() }
    }

    /// Its targets that count.
    pub fn counted(&self) -> u64 {
        self.targets.iter().filter(|target| **target != IGNORE).count() as u64
    }

    pub(super) fn resize(&mut self, tokens: usize) {
        self.ids.resize(tokens, 0);
        self.targets.resize(tokens, 0);
    }

    pub(super) fn keep_apart(&mut self, apart: bool) {
        let starts = self.starts.take();
        self.starts = apart.then(|| {
            let mut starts = starts.unwrap_or_default();
            starts.resize(self.ids.len(), 0);
            starts
        });
    }

    pub(super) fn row(
        &mut self,
        stream: &mut Stream,
        at: u64,
        row: usize,
        sequence: usize,
    ) -> Result<(), DataError> {
        let range = row * sequence..(row + 1) * sequence;
        let starts = self.starts.as_mut().map(|starts| &mut starts[range.clone()]);
        stream.window(at, &mut self.ids[range.clone()], &mut self.targets[range], starts)
    }
}
