//! What a round leaves of its routing, beside activations: statistics, losses, loads, switches.

use crate::engine::forward::Pass;
use crate::engine::model::Model;
use crate::engine::round::Aim;
use moejob_kernels::balance::row;
use moejob_kernels::numbers::record;
use moejob_kernels::{Add, AddRouting, RouteEntropy, SumRows};
use moejob_protocol::model::AuxLossScope;

impl Model {
    /// Under the scope `hf` the layers are one: the loads of a layer's auxiliary loss are those of
    /// all layers together.
    pub(crate) fn has_one_balance(&self) -> bool {
        self.config.router.aux_loss_scope == AuxLossScope::Hf && !self.mixture.is_empty()
    }
}

impl Pass<'_> {
    /// What the round's aim keeps of the routing of a layer.
    pub(crate) fn record_routing(&mut self, layer: usize, t: usize) {
        if self.model.has_one_balance() && !self.again {
            self.keep_statistics(layer, t, self.model.mixture_place(layer));
        }
        match self.round.aim {
            _ if self.again => {}
            Aim::Activations => {}
            Aim::Statistics(at) => {
                let (count, layers) = (self.model.shape.micro_batches, self.model.mixture.len());
                let first = self.model.layout.mesh.micro_batches(self.model.rank, count).start;
                let place = (first as usize + at) * layers + self.model.mixture_place(layer);
                self.keep_statistics(layer, t, place);
            }
            Aim::Record => self.add_routing(layer, t),
        }
    }

    /// What depends on all layers of the round's own micro-batch: their balance, from the
    /// statistics of each, counts once a layer.
    pub(crate) fn record_all_layers(&mut self) {
        if self.round.aim != Aim::Record || !self.model.has_one_balance() {
            return;
        }
        let model = &mut *self.model;
        let Some(balance) = model.buffers.numbers.balance.clone() else { return };
        let (t, layers) = (self.round.tokens, model.mixture.clone());
        if t == 0 {
            return;
        }
        model.device.sum_rows(&SumRows { x: balance.parts, out: balance.sum });
        let a = model.buffers.numbers.record.slice(record::AUX, 1);
        let op = model.balance_op(layers[0], t, None);
        model.device.balance_losses(&op);
        layers.iter().for_each(|_| model.device.add(&Add { a, b: op.value }));
    }

    /// Of a layer, at a place among those that are summed.
    fn keep_statistics(&mut self, layer: usize, t: usize, place: usize) {
        let model = &mut *self.model;
        let Some(balance) = &model.buffers.numbers.balance else { return };
        let width = row::COUNT * model.expert_count();
        let into = balance.parts.slice(place * width, width);
        let stats = model.gate_op(layer, t).stats;
        model.device.copy(stats, into);
    }

    /// Losses of the layer, and all that is counted.
    fn add_routing(&mut self, layer: usize, t: usize) {
        let model = &mut *self.model;
        let (experts, top_k) = (model.expert_count(), model.top_k());
        let kept = model.router(layer);
        if model.plain {
            model.device.route_entropy(&RouteEntropy {
                experts,
                scoring: model.config.router.scoring,
                probs: kept.probs.slice(0, kept.probs.len().min(t * experts)),
                logits: kept.logits.slice(0, t * experts),
                lse: kept.lse.slice(0, t),
                entropy: kept.losses.slice(2, 1),
            });
        } else if model.has_one_balance() {
            // It is known when all layers are.
            model.device.fill_zero(kept.losses.slice(0, 1));
        } else {
            let op = model.balance_op(layer, t, None);
            model.device.balance_losses(&op);
        }
        let ids = kept.ids.slice(0, t * top_k);
        let gate = kept.gate.as_ref();
        let [loads, drops] = model.load_counts(model.mixture_place(layer));
        let op = AddRouting {
            top_k,
            losses: kept.losses,
            counts: kept.counts,
            dropped: gate.map(|gate| gate.dropped),
            chosen: gate.map_or(ids, |gate| gate.chosen.slice(0, t * top_k)),
            ids,
            positions: model.buffers.batch.positions.slice(0, t),
            record: model.buffers.numbers.record.slice(record::AUX, record::COUNT - record::AUX),
            tally: model.tally(),
            loads,
            drops,
        };
        model.device.add_routing(&op);
    }
}
