//! What fused mixture layers need.

use super::Plan;
use crate::buffers::{Fused, Leaving, Needed, OwnChoices, Relay, Spread, SpreadScratch};
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
    fn travelling(&mut self, kind: Kind, rows: Rows, width: u64) -> B {
        match self.shape.reads_in_place() {
            true => self.planner.alloc_shared(kind, rows, width),
            false => self.planner.alloc(kind, rows, width),
        }
    }

    /// Rows of tokens of an expert group at this rank.
    fn tokens_here(&self) -> Rows {
        match self.shape.by_need() {
            true => Rows::Arrived,
            false => Rows::Fixed(self.shape.tokens * self.shape.expert_parallel),
        }
    }

    pub(super) fn spread(&mut self) -> Spread<B> {
        let slices = self.model.slices();
        let (e, k) = (u64::from(slices.count), u64::from(slices.slots));
        let here = e.div_ceil(self.shape.expert_parallel);
        let (element, statistic) = (self.shape.types.element, self.shape.types.statistic);
        let all = self.tokens_here();
        let need = self.needed();
        Spread {
            x: self.travelling(element, all, self.model.hidden_size.into()),
            ids: self.travelling(Kind::U32, all, k),
            weights: self.travelling(statistic, all, k),
            places: self.shape.shuffled.then(|| self.words(e, 1)),
            need,
            offsets: self.words(here + 1, 1),
            order: self.words(if self.shape.on_cpu { 0 } else { here }, 1),
            rows: self.planner.alloc(Kind::U32, Rows::Routed, 1),
            pos: self.planner.alloc(Kind::U32, all, k),
            row_weights: self.planner.alloc(self.shape.types.statistic, Rows::Routed, 1),
        }
    }

    fn needed(&mut self) -> Vec<Needed<B>> {
        let (k, ranks) = (u64::from(self.model.slices().slots), self.shape.expert_parallel);
        let hops = self.shape.hops();
        let of_hop = |plan: &mut Self, at: usize| {
            let (first, last) = (at == 0, at + 1 == hops);
            let mut words = |rows| plan.planner.alloc(Kind::U32, rows, 1);
            Needed {
                starts: words(Rows::Fixed(if last { ranks + 1 } else { 0 })),
                sent: words(if first { Rows::Chosen } else { Rows::RelayedChoices }),
                back: words(Rows::Fixed(if first { plan.shape.tokens * k } else { 0 })),
                choices: words(if last { Rows::Routed } else { Rows::RelayedChoices }),
                sums: match (plan.shape.formats.returns_each(), first) {
                    (true, _) => words(Rows::Fixed(0)),
                    (false, true) => words(Rows::Fixed(plan.shape.tokens * k)),
                    (false, false) => plan.planner.alloc(Kind::U32, Rows::Relayed, k),
                },
            }
        };
        (0..hops).map(|at| of_hop(self, at)).collect()
    }

    pub(super) fn spread_scratch(&mut self) -> SpreadScratch<B> {
        let slices = self.model.slices();
        let (t, k) = (self.shape.tokens, u64::from(slices.slots));
        let (all, d) = (t * self.shape.expert_parallel, u64::from(self.model.hidden_size));
        let formats = self.shape.formats;
        // Rows of each expert do not fit in `dout`.
        let packs = formats.returns_each() && formats.sums != formats.written;
        let rows = Rows::Fixed(all * formats.rows_back);
        let (element, statistic) = (self.shape.types.element, self.shape.types.statistic);
        let by_need = self.shape.by_need();
        let [back, of_choices] = match by_need {
            true if formats.returns_each() => [(Rows::Routed, d), (Rows::Routed, 1)],
            true => [(Rows::Arrived, d), (Rows::Routed, 1)],
            false => [(rows, d), (Rows::Fixed(all), k)],
        };
        let partial = self.travelling(formats.written, back.0, back.1);
        let packed = if packs { rows } else { Rows::Fixed(0) };
        let packed = self.planner.alloc(formats.sums, packed, d);
        let here = self.tokens_here();
        SpreadScratch {
            dout: self.travelling(element, here, d),
            partial,
            packed,
            ds: self.travelling(statistic, of_choices.0, of_choices.1),
            slots: self.words(t, k),
            own: by_need.then(|| self.own_choices(k)),
            relay: (self.shape.hops() > 1).then(|| self.relay()),
            choice_ds: (slices.each > 1)
                .then(|| self.statistics(t, self.model.slots().into())),
        }
    }

    fn own_choices(&mut self, k: u64) -> OwnChoices<B> {
        let t = self.shape.tokens;
        OwnChoices {
            ids: self.words(t, k),
            weights: self.statistics(t, k),
            leaving: self.leaving(Rows::Chosen),
            ds: self.statistics(t, k),
        }
    }

    fn leaving(&mut self, rows: Rows) -> Leaving<B> {
        let types = self.shape.types;
        Leaving {
            rows: self.planner.alloc(types.element, rows, self.model.hidden_size.into()),
            ds: self.planner.alloc(types.statistic, rows, 1),
        }
    }

    fn relay(&mut self) -> Relay<B> {
        let (types, d) = (self.shape.types, u64::from(self.model.hidden_size));
        Relay {
            x: self.planner.alloc(types.element, Rows::Relayed, d),
            leaving: self.leaving(Rows::RelayedChoices),
            returned: self.leaving(Rows::RelayedChoices),
        }
    }
}
