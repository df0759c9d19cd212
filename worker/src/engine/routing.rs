//! What a user can watch of the routing: losses, loads, drops, entropy, churn.

use crate::engine::dispatch::Round;
use crate::engine::model::Model;
use moejob_kernels::{Buffer, CpuDevice, Float, NO_EXPERT};
use moejob_protocol::model::{AuxLossScope, Scoring};

/// Whole numbers of all micro-batches of a rank; sums of them do not depend on who counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// `[mixture layer][expert]`: choices of each expert.
    pub counts: Vec<u64>,
    /// The same: choices that were dropped, since the expert was full; empty for routers that drop
    /// none.
    pub dropped: Vec<u64>,
    /// Tokens without any expert, over all layers.
    pub unrouted: u64,
    /// Choices, over all layers, of tokens that stand behind another in their sequence and
    /// document, and those of them that the token before did not choose. Of what the CPU routes.
    pub followed: u64,
    pub switched: u64,
}

impl Model {
    /// Auxiliary loss, z loss and mean entropy of the scores of the loaded micro-batch, each summed
    /// over the layers; its choices are added to `tally`.
    pub fn routing(&self, round: &Round, tally: &mut Tally) -> [f64; 3] {
        let mut sums = [0.0; 3];
        let experts = self.expert_count();
        if round.tokens == 0 {
            return sums;
        }
        let drops = !self.plain;
        tally.counts.resize(self.mixture_layers().count() * experts, 0);
        tally.dropped.resize(if drops { tally.counts.len() } else { 0 }, 0);
        for (at, layer) in self.mixture_layers().enumerate() {
            let losses = match self.plain {
                true => self.plain_losses(layer, round.tokens),
                false => self.gate_losses(layer, round.tokens),
            };
            sums.iter_mut().zip(losses).for_each(|(sum, loss)| *sum += loss);
            let moe = self.moe(layer);
            let add = |sums: &mut [u64], buffer: Buffer| {
                let counts: Vec<u32> = self.device.read_vec(buffer);
                let sums = sums[at * experts..].iter_mut().zip(counts);
                sums.for_each(|(sum, count)| *sum += u64::from(count));
            };
            add(&mut tally.counts, moe.counts);
            let chosen = moe.gate.as_ref().map_or(moe.ids, |gate| gate.chosen);
            self.count_switches(chosen, round.tokens, tally);
            if let Some(gate) = &moe.gate {
                add(&mut tally.dropped, gate.dropped);
                let slots = round.tokens * self.top_k();
                let ids: Vec<u32> = self.device.read_vec(moe.ids.slice(0, slots));
                let tokens = ids.chunks_exact(self.top_k());
                let empty = tokens.filter(|ids| ids.iter().all(|id| *id == NO_EXPERT));
                tally.unrouted += empty.count() as u64;
            }
        }
        if self.config.router.aux_loss_scope == AuxLossScope::Hf {
            sums[0] = self.concatenated_aux_loss(round.tokens);
        }
        sums
    }

    /// Adds a layer's choices, `chosen` [T, K], to those that switch along the text.
    fn count_switches(&self, chosen: Buffer, t: usize, tally: &mut Tally) {
        // Elsewhere choices stay on their device.
        let Some(cpu) = self.device.as_cpu() else { return };
        let k = self.top_k();
        let positions = cpu.slice::<u32>(self.buffers.batch.positions.slice(0, t));
        let tokens = cpu.slice::<u32>(chosen.slice(0, t * k)).chunks_exact(k);
        let pairs = tokens.clone().zip(tokens.skip(1)).zip(&positions[1..]);
        for ((before, now), _) in pairs.filter(|(_, position)| **position != 0) {
            for id in now.iter().filter(|id| **id != NO_EXPERT) {
                tally.followed += 1;
                tally.switched += u64::from(!before.contains(id));
            }
        }
    }

    /// The same of one layer of dropless top-k.
    fn plain_losses(&self, layer: usize, t: usize) -> [f64; 3] {
        let moe = self.moe(layer);
        let mut losses = [0.0; 2];
        self.device.read(moe.losses, &mut losses);
        // Elsewhere scores stay on their device.
        let entropy = self.device.as_cpu().map_or(0.0, |cpu| {
            let size = t * self.expert_count();
            let (probs, logits) = (moe.probs.slice(0, size), moe.logits.slice(0, size));
            let softmax = self.config.router.scoring == Scoring::Softmax;
            let parts = Scores { probs, logits, lse: moe.lse.slice(0, t), softmax };
            match self.shape.float_bytes {
                8 => parts.entropy::<f64>(cpu, self.expert_count()),
                _ => parts.entropy::<f32>(cpu, self.expert_count()),
            }
        });
        [losses[0], losses[1], entropy]
    }

    /// The favourite expert of each held-out token, by mixture layer: that of its largest weight,
    /// ties to the lowest id.
    pub(crate) fn favourites_now(&self, t: usize) -> Vec<u32> {
        let k = self.top_k();
        let mut favourites = Vec::new();
        for layer in self.mixture_layers() {
            let moe = self.moe(layer);
            let ids: Vec<u32> = self.device.read_vec(moe.ids.slice(0, t * k));
            let weights = moe.weights.slice(0, t * k);
            let weights: Vec<f64> = match self.shape.float_bytes {
                8 => self.device.read_vec(weights),
                _ => self.device.read_vec::<f32>(weights).into_iter().map(f64::from).collect(),
            };
            for (ids, weights) in ids.chunks_exact(k).zip(weights.chunks_exact(k)) {
                let slots = ids.iter().zip(weights).filter(|(id, _)| **id != NO_EXPERT);
                let best = slots.reduce(|best, slot| if slot.1 > best.1 { slot } else { best });
                favourites.push(best.map_or(NO_EXPERT, |(id, _)| *id));
            }
        }
        favourites
    }

    /// Compares the favourites of a held-out micro-batch with those of the last time: how many
    /// changed, of how many; (0, 0) the first time.
    pub(crate) fn churn(&mut self, micro_batch: u32, t: usize) -> (u64, u64) {
        let now = self.favourites_now(t);
        let before = self.favourites.insert(micro_batch, now.clone());
        match before.filter(|before| before.len() == now.len()) {
            None => (0, 0),
            Some(before) => {
                let changed = before.iter().zip(&now).filter(|(before, now)| before != now);
                (changed.count() as u64, now.len() as u64)
            }
        }
    }
}

/// The scores of one layer.
struct Scores {
    /// [T, E]
    probs: Buffer,
    logits: Buffer,
    /// [T]
    lse: Buffer,
    softmax: bool,
}

impl Scores {
    /// mean_t -sum_e q ln q, q = p / sum p, in token order. Of a softmax that is lse - <p, logits>.
    fn entropy<T: Float>(&self, cpu: &CpuDevice, experts: usize) -> f64 {
        let (probs, logits) = (cpu.slice::<T>(self.probs), cpu.slice::<T>(self.logits));
        let lse = cpu.slice::<T>(self.lse);
        let rows = probs.chunks_exact(experts).zip(logits.chunks_exact(experts)).zip(lse);
        let sum = rows.fold(0.0, |sum, ((probs, logits), lse)| {
            let of_softmax = || {
                let slots = probs.iter().zip(logits);
                let mean = slots.fold(0.0, |sum, (p, x)| p.wide().mul_add(x.wide(), sum));
                lse.wide() - mean
            };
            sum + if self.softmax { of_softmax() } else { of_shares(probs) }
        });
        sum / lse.len() as f64
    }
}

fn of_shares<T: Float>(scores: &[T]) -> f64 {
    let total = scores.iter().fold(0.0, |sum, p| sum + p.wide());
    scores.iter().fold(0.0, |sum, p| {
        let share = p.wide() / total.max(1e-20);
        sum - share * Float::ln(share.max(1e-300))
    })
}
