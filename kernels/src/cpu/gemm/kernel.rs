//! The innermost loop: a tile of C in registers.

use crate::cpu::exec::Isa;
use crate::cpu::float::Float;

/// The most rows that a tile has.
pub(crate) const MR_MAX: usize = 8;

/// A tile of C [rows, columns] (+)= A [rows, k] B [k, NR], one chunk of k.
pub(crate) struct Tile<T> {
    pub(crate) rows: usize,
    /// Columns of C to store; B's panel has NR.
    pub(crate) columns: usize,
    pub(crate) k: usize,
    /// Where each row of A starts.
    pub(crate) a: [*const T; MR_MAX],
    /// Elements from one k to the next in A.
    pub(crate) a_step: usize,
    pub(crate) b: *const T,
    pub(crate) c: *mut T,
    pub(crate) ldc: usize,
    /// Whether this chunk is C's first and nothing is added to.
    pub(crate) overwrite: bool,
}

/// A kernel and the size of its tiles.
pub(crate) struct Kernel<T> {
    pub(crate) mr: usize,
    pub(crate) nr: usize,
    pub(crate) run: unsafe fn(&Tile<T>),
}

/// Floats that have kernels.
pub(crate) trait GemmFloat: Float {
    fn kernel(isa: Isa) -> Kernel<Self>;
}

impl GemmFloat for f32 {
    fn kernel(_isa: Isa) -> Kernel<f32> {
        Kernel { mr: 4, nr: 16, run: scalar::<f32> }
    }
}

impl GemmFloat for f64 {
    fn kernel(_isa: Isa) -> Kernel<f64> {
        Kernel { mr: 4, nr: 16, run: scalar::<f64> }
    }
}

/// The definition of a tile, four rows by sixteen columns.
///
/// # Safety
/// The pointers of the tile cover what its sizes say.
unsafe fn scalar<T: Float>(tile: &Tile<T>) {
    const NR: usize = 16;
    let mut sums = [[T::ZERO; NR]; 4];
    for k in 0..tile.k {
        for (row, sums) in sums.iter_mut().enumerate().take(tile.rows) {
            // SAFETY: the caller promises `rows` x `k` elements of A and `k` x NR of B.
            unsafe {
                let a = *tile.a[row].add(k * tile.a_step);
                for (column, sum) in sums.iter_mut().enumerate() {
                    *sum = a.fma(*tile.b.add(k * NR + column), *sum);
                }
            }
        }
    }
    for (row, sums) in sums.iter().enumerate().take(tile.rows) {
        for (column, sum) in sums.iter().enumerate().take(tile.columns) {
            // SAFETY: the caller promises `rows` x `columns` elements of C.
            unsafe {
                let c = tile.c.add(row * tile.ldc + column);
                *c = if tile.overwrite { *sum } else { *c + *sum };
            }
        }
    }
}
