//! The ops beside a router's choice: balance, entropies, counts, and the cosine gate.

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::compile::FP32;
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Launch, parameters};
use crate::cuda::enqueue::{Text, Unit};
use crate::ops::bucket::cuda::numbers_unit;
use crate::ops::elementwise::cuda as elementwise;
use crate::ops::elementwise::op::Add;
use crate::ops::router::balance::row;
use crate::ops::router::op::{
    AddRouting, BalanceLosses, Mask, MaskRows, MoveCorrections, NormalizeRows,
    NormalizeRowsBackward, RouteEntropy, SumRows, Temper, TemperBackward, tally,
};
use crate::philox::Site;
use crate::types::Scoring;

static ROUTER: Text = Text {
    name: "router",
    macros: &[],
    constants: &[("ELEMENT", FP32)],
    parts: &[include_str!("router.cu")],
};

pub(crate) fn unit() -> Unit {
    ROUTER.unit([])
}

const THREADS: u32 = 256;
/// Rows that a block has a warp for.
const ROWS: usize = 8;
/// Blocks whose sums the last one adds: two a multiprocessor of an H200. Fixed, because the sums
/// are by block.
const BLOCKS_MAX: usize = 264;

fn kernel(name: &'static str) -> (Unit, &'static str) {
    (unit(), name)
}

impl CudaDevice {
    pub(crate) fn balance_losses(&mut self, op: &BalanceLosses) {
        let BalanceLosses { loss, tokens, experts, stats, value, gradient } = *op;
        let segments = stats.len() / (row::COUNT * experts);
        self.enqueue(|to| {
            let stats = to.of(stats, DType::F64, segments * row::COUNT * experts);
            let value = to.of(value, DType::F64, 1);
            let (into, factor) = gradient.map_or((0, 0.0), |(into, factor)| {
                (to.of(into, DType::F64, segments * 3 * experts), factor)
            });
            let (segments, experts, loss) = (segments as i32, experts as i32, loss as i32);
            let tokens = tokens as f64;
            let parameters = parameters![
                stats, segments, tokens, experts, loss, factor, value, into
            ];
            // SAFETY: the parameters are those of `balance_losses`, the lengths were checked.
            unsafe { to.launch(kernel("balance_losses"), Launch::new(1, 1024), parameters) }
        });
    }

    pub(crate) fn route_entropy(&mut self, op: &RouteEntropy) {
        let RouteEntropy { experts, scoring, logits, lse, entropy, .. } = *op;
        let tokens = lse.len();
        self.enqueue(|to| {
            let (blocks, plan, parts) = block_sums(tokens.div_ceil(ROWS));
            let (parts, ticket) = (to.scratch(&plan)?.at(parts), to.ticket()?);
            let logits = to.of(logits, DType::F32, tokens * experts);
            let (lse, entropy) = (to.of(lse, DType::F32, tokens), to.of(entropy, DType::F64, 1));
            let softmax = i32::from(scoring == Scoring::Softmax);
            let (tokens, experts) = (tokens as i32, experts as i32);
            let parameters = parameters![
                logits, lse, tokens, experts, softmax, parts, ticket, entropy
            ];
            // SAFETY: the parameters are those of `route_entropy`, the lengths were checked.
            unsafe { to.launch(kernel("route_entropy"), blocks, parameters) }
        });
    }

    pub(crate) fn add_routing(&mut self, op: &AddRouting) {
        let (tokens, experts) = (op.positions.len(), op.counts.len());
        let (slots, top_k) = (tokens * op.top_k, op.top_k as i32);
        self.enqueue(|to| {
            let [chosen, ids] = [op.chosen, op.ids].map(|of| to.of(of, DType::U32, slots));
            let positions = to.of(op.positions, DType::U32, tokens);
            let counts = to.of(op.counts, DType::U32, experts);
            let dropped = op.dropped.map_or(0, |of| to.of(of, DType::U32, experts));
            let [losses, record] = [op.losses, op.record].map(|of| to.of(of, DType::F64, 3));
            let tally = to.of(op.tally, DType::F64, tally::ROUTED);
            let [loads, drops] = [op.loads, op.drops].map(|of| to.of(of, DType::F64, experts));
            let (tokens, experts) = (tokens as i32, experts as i32);
            let parameters = parameters![
                chosen, ids, positions, tokens, top_k, experts, losses, counts, dropped, record,
                tally, loads, drops
            ];
            let blocks = slots.div_ceil(THREADS as usize).clamp(1, BLOCKS_MAX);
            let launch = Launch::new(blocks, THREADS);
            // SAFETY: the parameters are those of `add_routing`, the lengths were checked.
            unsafe { to.launch(kernel("add_routing"), launch, parameters) }
        });
    }

    pub(crate) fn normalize_rows(&mut self, op: &NormalizeRows) {
        let NormalizeRows { rows, dim, x, y, norm } = *op;
        self.enqueue(|to| {
            let [x, y] = [x, y].map(|of| to.of(of, DType::F32, rows * dim));
            let norm = to.of(norm, DType::F64, rows);
            let launch = Launch::new(rows.div_ceil(ROWS), THREADS);
            let (rows, dim) = (rows as i32, dim as i32);
            let parameters = parameters![x, rows, dim, y, norm];
            // SAFETY: the parameters are those of `normalize_rows`, the lengths were checked.
            unsafe { to.launch(kernel("normalize_rows"), launch, parameters) }
        });
    }

    pub(crate) fn normalize_rows_backward(&mut self, op: &NormalizeRowsBackward) {
        let NormalizeRowsBackward { rows, dim, accumulate, y, norm, dy, dx } = *op;
        self.enqueue(|to| {
            let [y, dy, dx] = [y, dy, dx].map(|of| to.of(of, DType::F32, rows * dim));
            let norm = to.of(norm, DType::F64, rows);
            let launch = Launch::new(rows.div_ceil(ROWS), THREADS);
            let (rows, dim, accumulate) = (rows as i32, dim as i32, i32::from(accumulate));
            let parameters = parameters![y, norm, dy, rows, dim, accumulate, dx];
            // SAFETY: the parameters are those of the kernel, the lengths were checked.
            unsafe { to.launch(kernel("normalize_rows_backward"), launch, parameters) }
        });
    }

    pub(crate) fn temper(&mut self, op: &Temper) {
        let Temper { temperature, x } = *op;
        self.enqueue(|to| {
            let len = x.len();
            let (temperature, x) = (to.of(temperature, DType::F32, 1), to.of(x, DType::F32, len));
            let blocks = len.div_ceil(THREADS as usize).clamp(1, BLOCKS_MAX);
            let (launch, len) = (Launch::new(blocks, THREADS), len as u64);
            // SAFETY: the parameters are those of `temper`, the lengths were checked.
            unsafe { to.launch(kernel("temper"), launch, parameters![temperature, x, len]) }
        });
    }

    pub(crate) fn temper_backward(&mut self, op: &TemperBackward) {
        let TemperBackward { accumulate, temperature, x, dx, d_temperature } = *op;
        self.enqueue(|to| {
            let len = x.len();
            let (blocks, plan, parts) = block_sums(len.div_ceil(THREADS as usize));
            let (parts, ticket) = (to.scratch(&plan)?.at(parts), to.ticket()?);
            let [x, dx] = [x, dx].map(|of| to.of(of, DType::F32, len));
            let [temperature, d_temperature] =
                [temperature, d_temperature].map(|of| to.of(of, DType::F32, 1));
            let (len, accumulate) = (len as u64, i32::from(accumulate));
            let parameters = parameters![
                temperature, x, dx, len, accumulate, parts, ticket, d_temperature
            ];
            // SAFETY: the parameters are those of `temper_backward`, the lengths were checked.
            unsafe { to.launch(kernel("temper_backward"), blocks, parameters) }
        });
    }

    pub(crate) fn sum_rows(&mut self, op: &SumRows) {
        self.enqueue(|to| {
            let (x, out) = (to.at(op.x), to.at(op.out));
            let width = op.out.len();
            let (rows, columns) = ((op.x.len() / width.max(1)) as u64, width as u64);
            let kernel = (numbers_unit(DType::F32), "sum_rows");
            let parameters = parameters![x, out, rows, columns];
            let launch = Launch::new(width.div_ceil(256).max(1), 256);
            // SAFETY: the parameters are those of `sum_rows`, `x` has that many whole rows.
            unsafe { to.launch(kernel, launch, parameters) }
        });
    }

    pub(crate) fn move_corrections(&mut self, op: &MoveCorrections) {
        self.enqueue(|to| {
            let bias = to.of(op.bias, DType::F32, op.loads.len());
            let numbers = to.of(op.numbers, DType::F64, op.numbers.len());
            assert!(op.loads.end <= op.numbers.len(), "{op:?}");
            let (loads, experts, rate) = (op.loads.start as i32, op.loads.len() as i32, op.rate);
            let kernel = (numbers_unit(DType::F32), "move_corrections");
            let parameters = parameters![numbers, bias, rate, loads, experts];
            // SAFETY: the parameters are those of `move_corrections`, the lengths were checked.
            unsafe { to.launch(kernel, Launch::new(1, 256), parameters) }
        });
    }

    pub(crate) fn mask_rows(&mut self, op: &MaskRows) {
        let MaskRows { rows, dim, mask, draw, accumulate, x, y } = *op;
        // One of the two may be fp32 beside elements.
        let element = if x.dtype() == DType::F32 { y.dtype() } else { x.dtype() };
        self.enqueue(|to| {
            let [(x, wide_x), (y, wide_y)] =
                [x, y].map(|buffer| to.either(buffer, element, rows * dim));
            let (site, p) = match mask {
                Mask::Jitter { eps } => (Site::Jitter, eps),
                Mask::Dropout { p } => (Site::Dropout, p),
            };
            let dropout = i32::from(site == Site::Dropout);
            let (place, step, token) = draw.counter(site, 0);
            let launch = Launch::new((rows * dim.div_ceil(4)).div_ceil(THREADS as usize), THREADS);
            let (rows, dim, seed) = (rows as i32, dim as i32, draw.seed);
            let (kernel, accumulate) =
                ((elementwise::unit(element), "mask_rows"), i32::from(accumulate));
            let parameters = parameters![
                x, wide_x, y, wide_y, rows, dim, dropout, p, seed, place, step, token,
                accumulate
            ];
            // SAFETY: the parameters are those of `mask_rows`, the lengths were checked.
            unsafe { to.launch(kernel, launch, parameters) }
        });
    }

    /// Sums of F64.
    pub(crate) fn add_doubles(&mut self, op: &Add) {
        let len = op.a.len();
        self.enqueue(|to| {
            let [a, b] = [op.a, op.b].map(|of| to.of(of, DType::F64, len));
            let launch = Launch::new(len.div_ceil(THREADS as usize).max(1), THREADS);
            let len = len as u64;
            // SAFETY: the parameters are those of `add_doubles`, the lengths were checked.
            unsafe { to.launch(kernel("add_doubles"), launch, parameters![a, b, len]) }
        });
    }
}

/// A launch of so many blocks, or as many as there are at most, and room for a sum of each.
fn block_sums(blocks: usize) -> (Launch, ArenaPlan, Buffer) {
    let blocks = blocks.clamp(1, BLOCKS_MAX);
    let mut plan = ArenaPlan::new();
    let parts = plan.alloc(DType::F64, blocks);
    (Launch::new(blocks, THREADS), plan, parts)
}
