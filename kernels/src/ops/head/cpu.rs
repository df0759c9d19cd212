//! See [`crate::HeadLoss`]: the ops it is made of, chunk by chunk.

use crate::buffer::Buffer;
use crate::cpu::{CpuDevice, ROWS_PER_JOB, lanes};
use crate::cpu::exec::lanes_fn;
use crate::cpu::float::Float;
use crate::cpu::gemm::kernel::GemmFloat;
use crate::cpu::isa::Isa;
use crate::ops::head::op::{HeadDesc, HeadGradient, HeadLoss, HeadPlan, IGNORE, head_numbers};
use crate::ops::matmul::op::Matmul;
use crate::types::Layout;

/// loss[t] = ln sum_v e^logits[t, v] - logits[t, targets[t]], unscaled, 0 where ignored.
/// With `gradient`, logits[t, v] becomes scale * (softmax(logits[t])[v] - (v == targets[t])), or 0
/// where ignored; without it the logits are left as scratch, to be used no more.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy {
    pub tokens: usize,
    pub vocab: usize,
    /// 1 / the number of valid targets of the step, known from the data
    pub scale: f64,
    pub gradient: bool,
    /// Overwritten: [T, V]
    pub logits: Buffer,
    /// u32 [T], below V or IGNORE
    pub targets: Buffer,
    /// Output F64 [T]
    pub loss: Buffer,
}

impl CpuDevice {
    pub(crate) fn head_loss<T: GemmFloat>(&mut self, op: &HeadLoss) {
        let HeadDesc { tokens, dim, vocab, .. } = op.desc;
        let plan = HeadPlan::cpu(&op.desc);
        let parts = op.parts(&plan);
        if let (0, Some(HeadGradient { dtable, accumulate: false, .. })) = (tokens, op.gradient) {
            self.fill_zero(dtable);
        }
        let loss_scale =
            op.loss_scale.map_or(1.0, |scale| f64::from(self.slice::<f32>(scale)[0]));
        for (first, count) in op.chunks(&plan) {
            let x = op.x.slice(first * dim, count * dim);
            let logits = parts.logits.slice(0, count * vocab);
            let product = |layout, [m, n, k]: [usize; 3], accumulate, [a, b, c]: [_; 3]| Matmul {
                layout,
                m,
                n,
                k,
                accumulate,
                a,
                b,
                c,
            };
            let all = [x, op.table, logits];
            self.matmul::<T>(&product(Layout::Nt, [count, vocab, dim], false, all));
            self.cross_entropy::<T>(&CrossEntropy {
                tokens: count,
                vocab,
                scale: op.scale * loss_scale,
                gradient: op.gradient.is_some(),
                logits,
                targets: op.targets.slice(first, count),
                loss: parts.losses.slice(first, count),
            });
            let Some(HeadGradient { dx, dtable, accumulate }) = op.gradient else { continue };
            let dx = dx.slice(first * dim, count * dim);
            let all = [logits, op.table, dx];
            self.matmul::<T>(&product(Layout::Nn, [count, dim, vocab], false, all));
            let accumulate = accumulate || first > 0;
            let all = [logits, x, dtable];
            self.matmul::<T>(&product(Layout::Tn, [vocab, dim, count], accumulate, all));
        }
        // In the order of tokens.
        let sum = self.slice::<f64>(parts.losses).iter().fold(0.0, |sum, x| sum + x);
        let targets = self.slice::<u32>(op.targets);
        let valid = targets.iter().filter(|target| **target != IGNORE).count();
        debug_assert!(valid <= tokens, "{op:?}");
        let numbers = self.slice_mut::<f64>(op.numbers);
        numbers[head_numbers::LOSS_SUM] += sum;
        numbers[head_numbers::VALID] += valid as f64;
    }
}

impl CpuDevice {
    pub fn cross_entropy<T: Float>(&mut self, op: &CrossEntropy) {
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
    crate::cpu::float::ln(sum.wide()) + (max.wide() - logit.wide())
}
}
