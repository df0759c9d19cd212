//! Operands rearranged so that a tile reads them in the order of its loop.

use std::ops::Range;

use super::Operand;
use crate::cpu::exec::Isa;
use crate::cpu::float::Float;

/// Memory for packed panels of either float type, aligned to a cache line.
#[derive(Default)]
pub(crate) struct Panels {
    lines: Vec<Line>,
}

/// A cache line; only its size and its alignment matter.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _bytes: [u8; 64],
}

impl Panels {
    pub(crate) fn take<T: Float>(&mut self, len: usize) -> &mut [T] {
        let lines = (len * size_of::<T>()).div_ceil(64);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line { _bytes: [0; 64] });
        }
        // SAFETY: the lines hold at least `len` elements, are initialised and aligned beyond T's
        // need, and floats have no invalid bit pattern.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), len) }
    }
}

/// Packs the elements `ks` x `others` (rows of A, columns of B) into panels of `width` others:
/// panel p holds, for each k, others p * width .. (p + 1) * width side by side, zero beyond the
/// last. A tile computes on those zeros and stores nothing of it.
pub(crate) fn pack<'p, T: Float>(
    isa: Isa,
    from: &Operand<'_, T>,
    ks: Range<usize>,
    others: Range<usize>,
    width: usize,
    panels: &'p mut Panels,
) -> &'p [T] {
    let panel_len = width * ks.len();
    let packed = panels.take::<T>(others.len().div_ceil(width) * panel_len);
    for (panel, first) in packed.chunks_exact_mut(panel_len).zip(others.clone().step_by(width)) {
        let count = width.min(others.end - first);
        if from.k_major {
            copy_rows(from, ks.clone(), first, count, width, panel);
        } else {
            transpose(isa, from, ks.clone(), first, count, width, panel);
        }
    }
    packed
}

/// Stored rows run along k: each gives `count` neighbours of one row of the panel.
fn copy_rows<T: Float>(
    from: &Operand<'_, T>,
    ks: Range<usize>,
    first: usize,
    count: usize,
    width: usize,
    panel: &mut [T],
) {
    for (to, k) in panel.chunks_exact_mut(width).zip(ks) {
        let start = from.start(k) + first;
        to[..count].copy_from_slice(&from.data[start..start + count]);
        to[count..].fill(T::ZERO);
    }
}

/// Stored rows run along m or n: each gives one column of the panel.
fn transpose<T: Float>(
    _isa: Isa,
    from: &Operand<'_, T>,
    ks: Range<usize>,
    first: usize,
    count: usize,
    width: usize,
    panel: &mut [T],
) {
    for column in 0..width {
        if column < count {
            let start = from.start(first + column) + ks.start;
            let row = &from.data[start..start + ks.len()];
            for (k, value) in row.iter().enumerate() {
                panel[k * width + column] = *value;
            }
        } else {
            for k in 0..ks.len() {
                panel[k * width + column] = T::ZERO;
            }
        }
    }
}
