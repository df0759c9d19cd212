//! The memory of routers: how large each buffer is, in the order in which they are laid out.

use super::Plan;
use crate::buffers::{Cosine, Gate, GateScratch, Router, RouterScratch};
use crate::memory::{Planner, STATISTICS};
use crate::model::RouterKind;

impl<B: Copy, P: Planner<Buffer = B>> Plan<'_, P> {
    /// A router with statistics of each of so many segments. Processors and gates have memory for
    /// all scores; a GPU that chooses in one op keeps none.
    pub(super) fn router(&mut self, segments: u64, gate: bool) -> Router<B> {
        let t = self.shape.tokens;
        let (e, k) = (u64::from(self.model.experts.count), u64::from(self.model.slots()));
        let scored = if self.shape.on_cpu || gate { t } else { 0 };
        Router {
            logits: self.statistics(t, e),
            probs: self.statistics(scored, e),
            lse: self.statistics(t, 1),
            ids: self.words(t, k),
            weights: self.statistics(t, k),
            counts: self.words(e, 1),
            prob_sums: self.doubles(segments * e),
            losses: self.doubles(3),
            gate: gate.then(|| self.gate()),
        }
    }

    fn gate(&mut self) -> Gate<B> {
        let (t, router) = (self.shape.tokens, &self.model.router);
        let (e, k) = (u64::from(self.model.experts.count), u64::from(self.model.slots()));
        let learned = router.kind == RouterKind::NoisyTopK;
        let width = router.cosine.as_ref().map(|cosine| u64::from(cosine.projection_size));
        let segments = self.shape.segments;
        Gate {
            noisy: self.statistics(t, e),
            raw: learned.then(|| self.statistics(t, e)),
            chosen: self.words(t, k),
            first: self.words(t, 1),
            dropped: self.words(e, 1),
            stats: self.doubles(segments * STATISTICS * e),
            cosine: width.map(|width| Cosine {
                projected: self.statistics(t, width),
                normed: self.statistics(t, width),
                norm: self.doubles(t),
                similarity: self.statistics(e, width),
                similarity_norm: self.doubles(e),
            }),
        }
    }

    pub(super) fn router_scratch(&mut self) -> RouterScratch<B> {
        let t = self.shape.tokens;
        let [e, k] = [self.model.experts.count, self.model.slots()].map(u64::from);
        RouterScratch {
            dlogits: self.statistics(t, e),
            dweights: self.statistics(t, k),
            gate: self.gate_scratch(),
        }
    }

    fn gate_scratch(&mut self) -> GateScratch<B> {
        let (t, d) = (self.shape.tokens, u64::from(self.model.hidden_size));
        let (e, router) = (u64::from(self.model.experts.count), &self.model.router);
        let learned = router.kind == RouterKind::NoisyTopK;
        let width = router.cosine.as_ref().map(|cosine| u64::from(cosine.projection_size));
        let (segments, types) = (self.shape.segments, self.shape.types);
        let sees = router.kind != RouterKind::Hash && types.element != types.statistic;
        GateScratch {
            dropped: (router.input_dropout > 0.0).then(|| self.floats(t, d)),
            input: (router.jitter > 0.0 || sees).then(|| self.statistics(t, d)),
            d_raw: learned.then(|| self.statistics(t, e)),
            dstats: self.doubles(segments * 3 * e),
            cosine: width.map(|width| [t, t, e].map(|rows| self.statistics(rows, width))),
        }
    }
}
