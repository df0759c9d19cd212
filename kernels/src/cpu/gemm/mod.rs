//! Matrix products with one order of summation.
//!
//! C[i, j] = sum over chunks of 256 of k, in order, of one chain of fused multiply-adds that starts
//! at zero and ascends in k. Nothing else enters: not the shape, the blocking, the threads or the
//! instruction set, so a row of a product has the same bits alone and among a thousand.
//!
//! ```text
//! Product -> cut into (rows, columns) tasks -> per chunk of k: pack B -> tiles of MR x NR
//! ```
//! Rows of either operand may be picked by an index: that fuses the gather of routed tokens.

pub(crate) mod kernel;
pub(crate) mod pack;

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use crate::cpu::exec::Exec;
use crate::cpu::float::Float;
use crate::cpu::gemm::kernel::{GemmFloat, Kernel, MR_MAX, Tile};
use crate::cpu::gemm::pack::Panels;
use crate::cpu::isa::Isa;

/// Elements of k that one chain covers. Part of the definition of every product: never change it.
pub(crate) const K_CHUNK: usize = 256;

/// Columns of B packed at a time: 256 x 256 f32 are 256 KiB, a part of any second-level cache.
const COLUMNS_PACKED: usize = 256;

/// Rows of A that meet one packed panel of B before the next: 256 KiB of f32.
const ROWS_BLOCKED: usize = 256;

/// A matrix as it lies in memory.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a, T> {
    pub(crate) data: &'a [T],
    /// Elements from one stored row to the next.
    pub(crate) ld: usize,
    /// Which stored row is the i-th one; None: the i-th.
    pub(crate) rows: Option<&'a [u32]>,
    /// Whether a stored row is an element of k (TN's A; NN's and TN's B), else one of m or n.
    pub(crate) k_major: bool,
}

impl<'a, T> Operand<'a, T> {
    /// Stored rows run along m (of A) or n (of B): each holds all of k.
    pub(crate) fn rows(data: &'a [T], ld: usize) -> Operand<'a, T> {
        Operand { data, ld, rows: None, k_major: false }
    }

    /// Stored rows run along k.
    pub(crate) fn columns(data: &'a [T], ld: usize) -> Operand<'a, T> {
        Operand { data, ld, rows: None, k_major: true }
    }

    pub(crate) fn gathered(self, rows: &'a [u32]) -> Operand<'a, T> {
        Operand { rows: Some(rows), ..self }
    }

    /// Where the stored row `i` starts.
    #[inline(always)]
    fn start(&self, i: usize) -> usize {
        self.rows.map_or(i, |rows| rows[i] as usize) * self.ld
    }

    /// Asserts that `outer` stored rows of `inner` elements exist.
    fn check(&self, outer: usize, inner: usize) {
        assert!(outer <= 1 || inner <= self.ld, "rows of {inner} in steps of {}", self.ld);
        let last = match self.rows {
            None => outer.checked_sub(1),
            Some(rows) => rows[..outer].iter().max().map(|row| *row as usize),
        };
        let end = last.map_or(0, |row| row * self.ld + inner);
        assert!(end <= self.data.len(), "an operand ends at {end} of {}", self.data.len());
    }
}

/// A rectangle of somebody's memory that may be written: [rows, columns], `ld` apart. It can be
/// cut into disjoint rectangles, which slices cannot.
pub(crate) struct Target<'a, T> {
    start: *mut T,
    rows: usize,
    columns: usize,
    ld: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a kind of `&mut [T]`.
unsafe impl<T: Send> Send for Target<'_, T> {}

impl<'a, T> Target<'a, T> {
    pub(crate) fn new(data: &'a mut [T], rows: usize, columns: usize) -> Target<'a, T> {
        assert!(rows * columns <= data.len(), "[{rows}, {columns}] of {}", data.len());
        Target { start: data.as_mut_ptr(), rows, columns, ld: columns, life: PhantomData }
    }

    /// The columns before `at` and the others.
    pub(crate) fn split_columns(self, at: usize) -> (Target<'a, T>, Target<'a, T>) {
        assert!(at <= self.columns, "column {at} of {}", self.columns);
        let start = if self.rows == 0 {
            self.start
        } else {
            // SAFETY: inside of the first row, or at its end.
            unsafe { self.start.add(at) }
        };
        let right = Target { start, columns: self.columns - at, ..self };
        (Target { columns: at, ..self }, right)
    }

    /// The rows before `at` and the others.
    pub(crate) fn split_rows(self, at: usize) -> (Target<'a, T>, Target<'a, T>) {
        assert!(at <= self.rows, "row {at} of {}", self.rows);
        let start = if at == self.rows {
            self.start
        } else {
            // SAFETY: the row `at` lies in the rectangle.
            unsafe { self.start.add(at * self.ld) }
        };
        let below = Target { start, rows: self.rows - at, ..self };
        (Target { rows: at, ..self }, below)
    }

    /// Cuts into bands of `rows` rows, the last one shorter.
    pub(crate) fn row_bands(self, rows: usize) -> Vec<Target<'a, T>> {
        let mut bands = Vec::with_capacity(self.rows.div_ceil(rows));
        let mut rest = self;
        while rest.rows > 0 {
            let count = rows.min(rest.rows);
            let (band, below) = rest.split_rows(count);
            bands.push(band);
            rest = below;
        }
        bands
    }

    /// Cuts into bands of `columns` columns, the last one narrower.
    pub(crate) fn column_bands(self, columns: usize) -> Vec<Target<'a, T>> {
        let mut bands = Vec::with_capacity(self.columns.div_ceil(columns));
        let mut rest = self;
        while rest.columns > 0 {
            let count = columns.min(rest.columns);
            let (band, right) = rest.split_columns(count);
            bands.push(band);
            rest = right;
        }
        bands
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn row_mut(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: the row lies in the rectangle, which nobody else sees.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(i * self.ld), self.columns) }
    }

    /// The same rectangle for a shorter time.
    pub(crate) fn reborrow(&mut self) -> Target<'_, T> {
        Target { life: PhantomData, ..*self }
    }
}

/// What a causal mask spares of a product. It leaves out multiplications by zero and elements that
/// nobody reads, so it changes no result.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Causal {
    /// Nothing.
    None,
    /// C [i, j] is not needed, and may stay as it was, for j > i + offset.
    Scores(usize),
    /// A [i, l] is zero for l > i + offset.
    Weights(usize),
    /// A [i, l] is zero for i > l + offset.
    WeightsTransposed(usize),
}

impl Causal {
    /// The part of `ks` that a tile needs; None if the tile is not needed at all.
    fn limit(
        self,
        rows: Range<usize>,
        columns: Range<usize>,
        ks: Range<usize>,
    ) -> Option<Range<usize>> {
        let needed = match self {
            Causal::None => ks.clone(),
            Causal::Scores(offset) if columns.start >= rows.end + offset => return None,
            Causal::Scores(_) => ks.clone(),
            Causal::Weights(offset) => ks.start..ks.end.min(rows.end + offset),
            Causal::WeightsTransposed(offset) => {
                ks.start.max(rows.start.saturating_sub(offset))..ks.end
            }
        };
        Some(if needed.is_empty() { ks.start..ks.start } else { needed })
    }
}

/// C [m, n] = A [m, k] B [k, n], or += with `accumulate` (C is then what chunk 0 is added to).
/// C's rectangle gives m and n.
pub(crate) struct Product<'a, T> {
    pub(crate) k: usize,
    pub(crate) a: Operand<'a, T>,
    pub(crate) b: Operand<'a, T>,
    pub(crate) c: Target<'a, T>,
    pub(crate) accumulate: bool,
    pub(crate) causal: Causal,
}

impl<T> Product<'_, T> {
    fn work(&self) -> usize {
        2 * self.c.rows * self.c.columns * self.k
    }
}

/// What one thread computes at a time: a rectangle of one product.
struct Task<'a, T> {
    k: usize,
    a: Operand<'a, T>,
    b: Operand<'a, T>,
    c: *mut T,
    ldc: usize,
    accumulate: bool,
    causal: Causal,
    rows: Range<usize>,
    columns: Range<usize>,
}

// SAFETY: tasks of one product write disjoint rectangles of C, and the operands are shared slices.
unsafe impl<T: Send + Sync> Send for Task<'_, T> {}

/// Computes products that do not depend on each other, each over disjoint outputs.
pub(crate) fn products<T: GemmFloat>(exec: &Exec, products: Vec<Product<'_, T>>) {
    let kernel = T::kernel(exec.isa);
    let work: usize = products.iter().map(Product::work).sum();
    let wanted = if exec.threads == 1 { 1 } else { 2 * exec.threads };
    let tasks = products.into_iter().flat_map(|p| cut(p, kernel.nr, work / wanted)).collect();
    // A product does about eight times as many operations a nanosecond as other loops.
    exec.run(tasks, work / 8, |task| compute(exec.isa, &kernel, &task));
}

/// One product on this thread alone.
pub(crate) fn product<T: GemmFloat>(isa: Isa, product: Product<'_, T>) {
    let kernel = T::kernel(isa);
    for task in cut(product, kernel.nr, usize::MAX) {
        compute(isa, &kernel, &task);
    }
}

/// Cuts a product into rectangles of about `work` operations: columns first, since tasks that
/// share columns would each pack them.
fn cut<'a, T: Float>(p: Product<'a, T>, nr: usize, work: usize) -> Vec<Task<'a, T>> {
    let (m, n, k) = (p.c.rows, p.c.columns, p.k);
    let stored = |k_major: bool, other: usize| if k_major { (k, other) } else { (other, k) };
    let (outer, inner) = stored(p.a.k_major, m);
    p.a.check(outer, inner);
    let (outer, inner) = stored(p.b.k_major, n);
    p.b.check(outer, inner);
    if m == 0 || n == 0 {
        return Vec::new();
    }
    let parts = (p.work() / work.max(1)).max(1);
    let columns_step = n.div_ceil(parts).next_multiple_of(nr).min(n);
    let columns_parts = n.div_ceil(columns_step);
    let rows_parts = parts.div_ceil(columns_parts);
    let rows_step = m.div_ceil(rows_parts).next_multiple_of(MR_MAX * 2).min(m);
    let mut tasks = Vec::with_capacity(columns_parts * rows_parts);
    for row in (0..m).step_by(rows_step) {
        for column in (0..n).step_by(columns_step) {
            tasks.push(Task {
                k,
                a: p.a,
                b: p.b,
                c: p.c.start,
                ldc: p.c.ld,
                accumulate: p.accumulate,
                causal: p.causal,
                rows: row..m.min(row + rows_step),
                columns: column..n.min(column + columns_step),
            });
        }
    }
    tasks
}

/// The packed operands of one thread; they keep their memory from product to product.
#[derive(Default)]
struct Scratch {
    a: Panels,
    b: Panels,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

fn compute<T: GemmFloat>(isa: Isa, kernel: &Kernel<T>, task: &Task<'_, T>) {
    if task.k == 0 {
        return clear(task);
    }
    SCRATCH.with_borrow_mut(|scratch| {
        for j in task.columns.clone().step_by(COLUMNS_PACKED) {
            let columns = j..task.columns.end.min(j + COLUMNS_PACKED);
            for k in (0..task.k).step_by(K_CHUNK) {
                let ks = k..task.k.min(k + K_CHUNK);
                chunk(isa, kernel, task, scratch, ks, columns.clone());
            }
        }
    });
}

/// A product over no k is zero; added to something it changes nothing.
fn clear<T: Float>(task: &Task<'_, T>) {
    if task.accumulate {
        return;
    }
    for i in task.rows.clone() {
        for j in task.columns.clone() {
            // SAFETY: the task's rows and columns lie in C's rectangle.
            unsafe { *task.c.add(i * task.ldc + j) = T::ZERO };
        }
    }
}

/// Adds one chunk of k to the columns `columns` of the task's rows.
fn chunk<T: GemmFloat>(
    isa: Isa,
    kernel: &Kernel<T>,
    task: &Task<'_, T>,
    scratch: &mut Scratch,
    ks: Range<usize>,
    columns: Range<usize>,
) {
    let overwrite = ks.start == 0 && !task.accumulate;
    let b = pack::pack(isa, &task.b, ks.clone(), columns.clone(), kernel.nr, &mut scratch.b);
    for i in task.rows.clone().step_by(ROWS_BLOCKED) {
        let rows = i..task.rows.end.min(i + ROWS_BLOCKED);
        let packed = worth_packing(&task.a, rows.len(), columns.len(), kernel.nr);
        let a = packed.then(|| {
            pack::pack(isa, &task.a, ks.clone(), rows.clone(), kernel.mr, &mut scratch.a)
        });
        let a_step = match (packed, task.a.k_major) {
            (true, _) => kernel.mr,
            (false, true) => task.a.ld,
            (false, false) => 1,
        };
        let mut starts = [std::ptr::null(); ROWS_BLOCKED];
        for (row, (start, i)) in starts.iter_mut().zip(rows.clone()).enumerate() {
            *start = match a {
                Some(a) => a[row / kernel.mr * kernel.mr * ks.len() + row % kernel.mr..].as_ptr(),
                None if task.a.k_major => task.a.data[ks.start * task.a.ld + i..].as_ptr(),
                None => task.a.data[task.a.start(i) + ks.start..].as_ptr(),
            };
        }
        for (panel, j) in columns.clone().step_by(kernel.nr).enumerate() {
            let b = &b[panel * kernel.nr * ks.len()..][..kernel.nr * ks.len()];
            let columns = j..columns.end.min(j + kernel.nr);
            for i in rows.clone().step_by(kernel.mr) {
                let tile_rows = i..rows.end.min(i + kernel.mr);
                let limit = task.causal.limit(tile_rows.clone(), columns.clone(), ks.clone());
                let Some(part) = limit else { continue };
                let skipped = part.start - ks.start;
                let tile = Tile {
                    rows: tile_rows.len(),
                    columns: columns.len(),
                    k: part.len(),
                    a: starts[i - rows.start..].as_ptr(),
                    a_first: skipped * a_step,
                    a_step,
                    b: b[skipped * kernel.nr..].as_ptr(),
                    // SAFETY: the task's rows and columns lie in C's rectangle.
                    c: unsafe { task.c.add(i * task.ldc + j) },
                    ldc: task.ldc,
                    overwrite,
                };
                // SAFETY: the pointers cover `rows` x `k` of A, `k` x NR of the packed panel and
                // `rows` x `columns` of C, which no other task writes; the device has the
                // kernel's instruction set.
                unsafe { (kernel.run)(&tile) };
            }
        }
    }
}

/// Whether to rearrange A. It costs a pass over A, and each panel of columns then reads it in
/// order; small and narrow products do as well with A where it lies. What must be packed is
/// picked columns, which no constant step runs through.
fn worth_packing<T>(a: &Operand<'_, T>, rows: usize, columns: usize, nr: usize) -> bool {
    if a.k_major { a.rows.is_some() || columns > nr } else { columns * rows > 128 * 128 }
}
