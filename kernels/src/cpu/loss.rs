//! See [`crate::CrossEntropy`].

use super::exec::{Isa, lanes_fn};
use super::{CpuDevice, Float, ROWS_PER_JOB, lanes};
use crate::loss::{CrossEntropy, IGNORE};

impl CpuDevice {
    pub(crate) fn cross_entropy<T: Float>(&mut self, op: &CrossEntropy) {
        let (mut views, exec) = self.split();
        let targets: &[u32] = views.read(op.targets);
        let logits: &mut [T] = views.write(op.logits);
        let loss: &mut [f64] = views.write(op.loss);
        assert_eq!((targets.len(), loss.len()), (op.tokens, op.tokens), "{op:?}");
        assert_eq!(logits.len(), op.tokens * op.vocab, "{op:?}");
        let work = 24 * logits.len();
        let jobs = logits
            .chunks_mut(ROWS_PER_JOB * op.vocab)
            .zip(targets.chunks(ROWS_PER_JOB))
            .zip(loss.chunks_mut(ROWS_PER_JOB));
        exec.run(jobs.collect(), work, |((logits, targets), loss)| {
            let rows = logits.chunks_exact_mut(op.vocab).zip(targets).zip(loss);
            for ((row, target), loss) in rows {
                *loss = token::<T>(exec.isa, row, *target, op.gradient, T::of(op.scale));
            }
        });
    }
}

lanes_fn! {
/// The loss of one token; its logits become their gradients.
fn token<T: Float>(row: &mut [T], target: u32, gradient: bool, scale: T) -> f64 {
    if target == IGNORE {
        row.fill(T::ZERO);
        return 0.0;
    }
    let target = target as usize;
    let logit = row[target];
    let (max, sum) = lanes::exponentials(row, T::ONE);
    if gradient {
        let factor = scale / sum;
        for p in row.iter_mut() {
            *p = *p * factor;
        }
        row[target] = row[target] - scale;
    }
    super::ln(sum.wide()) + (max.wide() - logit.wide())
}
}
