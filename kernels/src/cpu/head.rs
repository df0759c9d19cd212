//! See [`crate::HeadLoss`]: the ops it is made of, chunk by chunk.

use super::Float;
use super::gemm::GemmFloat;
use super::moe::held;
use crate::device::Device;
use crate::head::{HeadDesc, HeadGradient, HeadLoss, head_numbers};
use crate::loss::{CrossEntropy, IGNORE};
use crate::matmul::{Layout, Matmul};

pub(crate) fn loss<T: Float + GemmFloat>(device: &mut Device, op: &HeadLoss) {
    let HeadDesc { tokens, dim, vocab, .. } = op.desc;
    let plan = device.head_plan(&op.desc);
    let parts = op.parts(&plan);
    if let (0, Some(HeadGradient { dtable, accumulate: false, .. })) = (tokens, op.gradient) {
        device.fill_zero(dtable);
    }
    let read = |device: &Device, scale| f64::from(held::<f32>(device, scale)[0]);
    let loss_scale = op.loss_scale.map_or(1.0, |scale| read(device, scale));
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
        device.matmul(&product(Layout::Nt, [count, vocab, dim], false, all));
        device.cross_entropy(&CrossEntropy {
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
        device.matmul(&product(Layout::Nn, [count, dim, vocab], false, all));
        let accumulate = accumulate || first > 0;
        let all = [logits, x, dtable];
        device.matmul(&product(Layout::Tn, [vocab, dim, count], accumulate, all));
    }
    let Some(cpu) = device.as_cpu_mut() else { unreachable!("`loss` is of a CPU") };
    // In the order of tokens.
    let sum = cpu.slice::<f64>(parts.losses).iter().fold(0.0, |sum, x| sum + x);
    let targets = cpu.slice::<u32>(op.targets);
    let valid = targets.iter().filter(|target| **target != IGNORE).count();
    debug_assert!(valid <= tokens, "{op:?}");
    let numbers = cpu.slice_mut::<f64>(op.numbers);
    numbers[head_numbers::LOSS_SUM] += sum;
    numbers[head_numbers::VALID] += valid as f64;
}
