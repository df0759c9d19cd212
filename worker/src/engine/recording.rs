//! What a round leaves of its routing, beside activations: statistics, losses, loads, switches.

use crate::engine::forward::Pass;
use crate::engine::round::Aim;
use moejob_kernels::balance::row;
use moejob_kernels::numbers::record;
use moejob_kernels::{AddRouting, Buffer, ConcatenatedBalance, RouteEntropy};
use moejob_protocol::model::Scoring;

impl Pass<'_> {
    /// What the round's aim keeps of the routing of a layer.
    pub(crate) fn record_routing(&mut self, layer: usize, t: usize) {
        match self.round.aim {
            _ if self.again => {}
            Aim::Activations => {}
            Aim::Statistics(at) => self.keep_statistics(layer, t, at),
            Aim::Record(at) => self.add_routing(layer, t, at),
        }
    }

    /// What depends on all layers of the round's own micro-batch.
    pub(crate) fn record_all_layers(&mut self) {
        let Aim::Record(at) = self.round.aim else { return };
        if !self.model.has_one_balance() {
            return;
        }
        let model = &mut *self.model;
        let sums: Vec<Buffer> =
            model.mixture.iter().map(|layer| model.moe(*layer).prob_sums).collect();
        let value = model.record(at).slice(record::AUX, 1);
        let (tokens, counts) = (self.round.tokens, model.all_counts());
        let op = ConcatenatedBalance { tokens, counts: &counts, prob_sums: &sums, value };
        model.device.concatenated_balance(&op);
    }

    fn keep_statistics(&mut self, layer: usize, t: usize, at: usize) {
        let model = &mut *self.model;
        let Some(balance) = &model.buffers.numbers.balance else { return };
        let width = row::COUNT * model.expert_count();
        let count = model.shape.micro_batches;
        let first = model.layout.mesh.micro_batches(model.rank, count).start as usize;
        let place = (first + at) * model.mixture.len() + model.mixture_place(layer);
        let into = balance.micro_batches.slice(place * width, width);
        let stats = model.gate_op(layer, t).stats;
        model.device.copy(stats, into);
    }

    /// Losses of the layer, and all that is counted.
    fn add_routing(&mut self, layer: usize, t: usize, at: usize) {
        let model = &mut *self.model;
        let (experts, top_k) = (model.expert_count(), model.top_k());
        let moe = model.moe(layer);
        if model.plain {
            model.device.route_entropy(&RouteEntropy {
                experts,
                softmax: model.config.router.scoring == Scoring::Softmax,
                probs: moe.probs.slice(0, t * experts),
                logits: moe.logits.slice(0, t * experts),
                lse: moe.lse.slice(0, t),
                entropy: moe.losses.slice(2, 1),
            });
        } else {
            let op = model.balance_op(layer, t, None);
            model.device.balance_losses(&op);
        }
        let ids = moe.ids.slice(0, t * top_k);
        let gate = moe.gate.as_ref();
        let [loads, drops] = model.load_counts(model.mixture_place(layer));
        let op = AddRouting {
            top_k,
            losses: moe.losses,
            counts: moe.counts,
            dropped: gate.map(|gate| gate.dropped),
            chosen: gate.map_or(ids, |gate| gate.chosen.slice(0, t * top_k)),
            ids,
            positions: model.buffers.batch.positions.slice(0, t),
            record: model.record(at).slice(record::AUX, record::COUNT - record::AUX),
            tally: model.tally(),
            loads,
            drops,
        };
        model.device.add_routing(&op);
    }
}
