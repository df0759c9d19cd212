//! Token embeddings. The gradient of a row is added in the order of its tokens by one block: tokens
//! are put in order by id first, on the device, with atomics on whole numbers alone.

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::compile::element_macro;
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Launch, parameters};
use crate::cuda::enqueue::{ELEMENTS, Enqueue, Text, Unit, all_whole};
use crate::cuda::error::CudaError;
use crate::ops::embed::op::{Embed, EmbedBackward};

static EMBED: Text = Text {
    name: "embedding",
    macros: &["ELEMENT", "TABLE"],
    constants: &[],
    parts: &[ELEMENTS, include_str!("embed.cu")],
};

pub(crate) fn unit(element: DType, table: DType) -> Unit {
    EMBED.unit([element, table].map(element_macro))
}

/// Columns that a block of `embed_add` adds: 256 a warp, four warps.
const COLUMNS: usize = 1024;

/// Elements of rows, and what the table is of.
fn unit_of(rows: Buffer, table: Buffer) -> Unit {
    let (element, table) = (rows.dtype(), table.dtype());
    assert!(table == element || table == DType::F32, "a table of {table:?} for {element:?}");
    unit(element, table)
}

/// Whether rows are whole chunks of 16 bytes.
fn whole_rows(element: DType, dim: usize, addresses: &[u64]) -> i32 {
    let whole = dim.is_multiple_of(16 / element.size());
    if whole { all_whole(addresses) } else { 0 }
}

impl CudaDevice {
    pub(crate) fn embed(&mut self, op: &Embed) {
        let Embed { tokens, dim, vocab, ids, table, x } = *op;
        self.enqueue(|to| {
            let unit = unit_of(x, table);
            let same = table.dtype() == x.dtype();
            let ids = to.of(ids, DType::U32, tokens);
            let table = to.of(table, table.dtype(), vocab * dim);
            let rows = to.of(x, x.dtype(), tokens * dim);
            let whole = whole_rows(x.dtype(), dim, &[table, rows]) * i32::from(same);
            let (dim, vocab) = (dim as i32, vocab as i32);
            let launch = Launch::new(tokens, 256);
            let parameters = parameters![ids, table, rows, dim, vocab, whole];
            // SAFETY: the parameters are those of `embed`, the lengths were checked.
            unsafe { to.launch((unit, "embed"), launch, parameters) }
        });
    }

    pub(crate) fn embed_backward(&mut self, op: &EmbedBackward) {
        self.enqueue(|to| embed_backward(to, op));
    }
}

fn embed_backward(to: &mut Enqueue<'_>, op: &EmbedBackward) -> Result<(), CudaError> {
    let EmbedBackward { tokens, dim, vocab, ids, dx, dtable } = *op;
    let unit = unit_of(dx, dtable);
    let ids = to.of(ids, DType::U32, tokens);
    let rows = to.of(dx, dx.dtype(), tokens * dim);
    let table = to.of(dtable, dtable.dtype(), vocab * dim);
    let whole = whole_rows(dx.dtype(), dim, &[rows]);
    let mut plan = ArenaPlan::new();
    // The first two are zeroed together.
    let counters = plan.alloc(DType::U32, vocab + 1);
    let [starts, used] = [(); 2].map(|()| plan.alloc(DType::U32, vocab));
    let [slots, ordered] = [(); 2].map(|()| plan.alloc(DType::U32, tokens));
    let scratch = to.scratch(&plan)?;
    to.zero_scratch(counters)?;
    let (counts, cursor) = (scratch.at(counters), scratch.at(counters.slice(vocab, 1)));
    let [starts, used, slots, ordered] =
        [starts, used, slots, ordered].map(|buffer| scratch.at(buffer));
    let each = |len: usize| Launch::new(len.div_ceil(256), 256);
    let mut add = Launch::new(tokens, 128);
    add.grid[1] = dim.div_ceil(COLUMNS) as u32;
    let (t, v, d) = (tokens as i32, vocab as i32, dim as i32);
    // SAFETY: the parameters are those of each kernel; ids outside of the table are passed over,
    // and slots of others are below the number of tokens.
    unsafe {
        to.launch((unit, "embed_count"), each(tokens), parameters![ids, counts, t, v])?;
        let ranges = parameters![counts, starts, used, cursor, v];
        to.launch((unit, "embed_ranges"), each(vocab), ranges)?;
        let place = parameters![ids, starts, used, slots, t, v];
        to.launch((unit, "embed_place"), each(tokens), place)?;
        let order = parameters![ids, starts, counts, slots, ordered, cursor];
        to.launch((unit, "embed_order"), each(tokens), order)?;
        let parameters =
            parameters![ids, starts, counts, ordered, cursor, rows, table, d, whole];
        to.launch((unit, "embed_add"), add, parameters)
    }
}
