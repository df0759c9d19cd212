//! Attention over keys and values that are kept. Many blocks share the keys of a query, since there
//! may be one query alone; their parts are joined in a fixed order.

use super::device::CudaDevice;
use super::driver::{Launch, parameters};
use super::step_ops::{Unit, SCRATCH_BYTES};
use crate::attention::CachedAttention;
use crate::buffer::{ArenaPlan, DType};

/// Keys of a part, as cached_attention.cu has it.
const PART: usize = 256;
const THREADS: u32 = 128;
/// Blocks of a launch in its second and third dimension.
const GRID_MAX: usize = 65_535;

impl CudaDevice {
    pub(crate) fn cached_attention(&mut self, op: &CachedAttention) {
        self.enqueue(|to| {
            let CachedAttention { queries, past, capacity, heads, kv_heads, head_dim, .. } = *op;
            let element = op.o.dtype();
            let (wide, width) = (heads * head_dim, kv_heads * head_dim);
            let [q, o] = [op.q, op.o].map(|of| to.of(of, element, queries * wide));
            let [k, v] = [op.k, op.v].map(|of| to.of(of, element, queries * width));
            let [keys, values] =
                [op.keys, op.values].map(|of| to.of(of, element, capacity * width));
            assert!(past + queries <= capacity && capacity <= PART * GRID_MAX, "{op:?}");
            let unit = Unit::CachedAttention { element, head_dim };
            let parts = (past + queries).div_ceil(PART);
            // Queries whose parts the scratch has room for.
            let words = heads * parts * (head_dim + 2);
            let at_once = (SCRATCH_BYTES / 4 / words).clamp(1, queries.min(GRID_MAX));
            let mut plan = ArenaPlan::new();
            let scratch = plan.alloc(DType::F32, at_once * words);
            let scratch = to.scratch(&plan)?.at(scratch);
            let word = |number: usize| number as i32;
            let (scale, group) = (op.scale as f32, word(heads / kv_heads));
            let [rows, columns, past, capacity, all] =
                [queries, width, past, capacity, parts].map(word);
            let append = Launch::new((queries * width).div_ceil(256), 256);
            let parameters = parameters![k, v, keys, values, rows, columns, past, capacity];
            // SAFETY: the parameters are those of `cache_append`, the lengths were checked.
            unsafe { to.launch((unit, "cache_append"), append, parameters)? };
            for first in (0..queries).step_by(at_once) {
                let count = (queries - first).min(at_once) as u32;
                let mut attend = Launch::new(heads, THREADS);
                (attend.grid[1], attend.grid[2]) = (parts as u32, count);
                let mut join = Launch::new(heads, THREADS);
                join.grid[1] = count;
                let first = word(first);
                let of_parts =
                    parameters![q, keys, values, scratch, scale, group, past, capacity, first];
                let of_all = parameters![scratch, o, all, past, first];
                // SAFETY: the parameters are those of each kernel, the lengths were checked, and
                // the scratch has room for the parts of `at_once` queries.
                unsafe {
                    to.launch((unit, "cached_attention"), attend, of_parts)?;
                    to.launch((unit, "cached_join"), join, of_all)?;
                }
            }
            Ok(())
        });
    }
}
