//! What fused mixture layers need.

use super::Plan;
use crate::buffers::{Fused, Spread, SpreadScratch};
use crate::memory::{Kind, Planner, Rows};

impl<B: Copy, P: Planner<Buffer = B>> Plan<'_, P> {
    /// Rows of experts are those of a group's ranks, or of slices.
    pub(super) fn shares_out(&self) -> bool {
        self.shape.expert_parallel > 1 || self.model.slices().each > 1
    }

    /// Where a CPU computes what a GPU does, its op keeps scores and A, too. `shared`: hidden rows
    /// that are computed again.
    pub(super) fn fused(&mut self, shared: Option<[B; 2]>) -> Fused<B> {
        let (t, experts, types) = (self.shape.tokens, &self.model.experts, self.shape.types);
        let (e, k) = (u64::from(experts.count), u64::from(self.model.slots()));
        let (f, d) = (u64::from(self.model.slices().width), u64::from(self.model.hidden_size));
        let cpu = self.shape.on_cpu;
        let halves = if types.element == types.statistic { 0 } else { 2 };
        let segments = self.shape.segments;
        let [h, a] = shared.unwrap_or_else(|| {
            [self.routed(2 * f), if cpu { self.routed(f) } else { self.floats(0, f) }]
        });
        let router = self.router(segments, !self.model.router.is_of_one_op());
        Fused {
            router,
            h,
            a,
            offsets: self.words(e + 1, 1),
            order: self.words(if cpu { 0 } else { e }, 1),
            rows: self.words(t, k),
            pos: self.words(t, k),
            row_weights: self.statistics(t, k),
            segment_counts: self.words(segments, e),
            router_halves: self.floats(halves * e, d),
            spread: self.shares_out().then(|| self.spread()),
        }
    }

    /// What the others of an expert group need.
    fn travelling(&mut self, kind: Kind, rows: u64, width: u64) -> B {
        let rows = Rows::Fixed(rows);
        match self.shape.reads_in_place() {
            true => self.planner.alloc_shared(kind, rows, width),
            false => self.planner.alloc(kind, rows, width),
        }
    }

    pub(super) fn spread(&mut self) -> Spread<B> {
        let slices = self.model.slices();
        let (e, k) = (u64::from(slices.count), u64::from(slices.slots));
        let all = self.shape.tokens * self.shape.expert_parallel;
        let (here, chunks) = (e.div_ceil(self.shape.expert_parallel), self.shape.chunks);
        let (element, statistic) = (self.shape.types.element, self.shape.types.statistic);
        Spread {
            x: self.travelling(element, all, self.model.hidden_size.into()),
            ids: self.travelling(Kind::U32, all, k),
            weights: self.travelling(statistic, all, k),
            places: self.shape.shuffled.then(|| self.words(e, 1)),
            offsets: self.words(here + 1, chunks),
            order: self.words(if self.shape.on_cpu { 0 } else { here }, chunks),
            rows: self.planner.alloc(Kind::U32, Rows::Routed, 1),
            pos: self.words(all, k),
            row_weights: self.planner.alloc(self.shape.types.statistic, Rows::Routed, 1),
        }
    }

    pub(super) fn spread_scratch(&mut self) -> SpreadScratch<B> {
        let slices = self.model.slices();
        let (t, k) = (self.shape.tokens, u64::from(slices.slots));
        let (all, d) = (t * self.shape.expert_parallel, u64::from(self.model.hidden_size));
        let formats = self.shape.formats;
        // Rows of each expert do not fit in `dout`.
        let packs = formats.returns_each() && formats.sums != formats.written;
        let rows = all * formats.rows_back;
        let (element, statistic) = (self.shape.types.element, self.shape.types.statistic);
        let partial = self.travelling(formats.written, rows, d);
        let packed = if packs { rows } else { 0 };
        let packed = self.planner.alloc(formats.sums, Rows::Fixed(packed), d);
        SpreadScratch {
            dout: self.travelling(element, all, d),
            partial,
            packed,
            ds: self.travelling(statistic, all, k),
            own_ds: self.statistics(if self.shape.chunks > 1 { t } else { 0 }, k),
            slots: self.words(t, k),
            choice_ds: (slices.each > 1)
                .then(|| self.statistics(t, self.model.slots().into())),
        }
    }
}
