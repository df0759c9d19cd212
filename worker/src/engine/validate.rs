//! Measuring on held-out sequences, between steps: the host reads as it goes.

use crate::data::{Batch, Corpus, DataError};
use crate::engine::forward::Pass;
use crate::engine::model::Model;
use crate::engine::round::{Aim, Schedule};
use crate::engine::step::{Engine, StepError};
use crate::gang::comm::CommError;
use crate::state::rank::DeviceError;
use moejob_kernels::{DType, NO_EXPERT};
use moejob_protocol::buffers::Router;
use std::collections::BTreeMap;

/// Where held-out sequences come from.
pub trait HeldOut {
    /// How many there are, `most` at most.
    fn sequences(&self, most: u32) -> u32;

    /// Fills `batch` with the sequences `first ..`.
    ///
    /// # Errors
    /// A file changed or cannot be read.
    fn fill(&mut self, first: u32, batch: &mut Batch) -> Result<(), DataError>;
}

impl HeldOut for Corpus {
    fn sequences(&self, most: u32) -> u32 {
        self.held_out_sequences(most)
    }

    fn fill(&mut self, first: u32, batch: &mut Batch) -> Result<(), DataError> {
        self.fill_held_out(first, batch)
    }
}

/// What was measured on held-out sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Validation {
    /// Mean cross-entropy.
    pub loss: f64,
    /// Share of tokens whose favourite expert is another than at the last validation of this
    /// attempt, over all layers; none the first time.
    pub churn: Option<f64>,
}

/// First choices of the held-out tokens when they were last looked at, by micro-batch.
#[derive(Clone, Debug, Default)]
pub(crate) struct Favourites(BTreeMap<u32, Vec<u32>>);

/// What a rank found: sums of cross-entropies of its micro-batches, ascending, and favourites that
/// changed, of how many.
#[derive(Clone, Debug, Default, PartialEq)]
struct Found {
    losses: Vec<f64>,
    /// Targets of them that count.
    targets: u64,
    changed: u64,
    compared: u64,
    /// How often routed rows found no room: then the losses say nothing.
    overflows: u64,
}

impl Engine {
    /// Measures on the first held-out sequences, without noise; none when there are none.
    ///
    /// # Errors
    /// A peer is lost, or the data changed.
    pub fn validate(
        &mut self,
        held_out: &mut impl HeldOut,
        sequences_max: u32,
    ) -> Result<Option<Validation>, StepError> {
        let sequences = held_out.sequences(sequences_max);
        if sequences == 0 {
            return Ok(None);
        }
        self.model.set_noise(None);
        self.model.device.await_marks();
        loop {
            let (found, now) = self.held_out(held_out, sequences)?;
            if found.iter().all(|of_rank| of_rank.overflows == 0) {
                self.favourites.0.extend(now.0);
                return Ok(Some(self.mean(&found)));
            }
            if !self.grow_routed()? {
                let reason = "routed rows found no room in the worst case's".to_string();
                return Err(DeviceError::Failed(reason).into());
            }
        }
    }

    /// What all ranks find in the first `sequences`, and the favourites of this one's tokens.
    fn held_out(
        &mut self,
        from: &mut impl HeldOut,
        sequences: u32,
    ) -> Result<(Vec<Found>, Favourites), StepError> {
        let Engine { model, links, favourites, .. } = self;
        let (sequences_each, length) = (model.shape.batch as u32, model.sequence());
        let count = sequences.div_ceil(sequences_each);
        let left = |leaf: u32| sequences - leaf * sequences_each;
        let of_batch = |leaf: u32| left(leaf).min(sequences_each) as usize * length;
        let (mut own, mut now) = (Found::default(), Favourites::default());
        model.device.fill_zero(model.routed_overflows());
        for round in 0..model.layout.mesh.rounds(count) {
            let tokens = |leaf: u32| model.computed_together(of_batch(leaf));
            let schedule = Schedule::new(model, round, count, |_| Aim::Activations, tokens);
            let mut counted = 0;
            if let Some(leaf) = schedule.own {
                let mut batch = Batch::new(of_batch(leaf));
                from.fill(leaf * sequences_each, &mut batch)?;
                model.load_documents(&batch.ids, &batch.targets, batch.starts.as_deref());
                counted = batch.counted();
            }
            // A kernel waits for a peer within a limit, and the peer may wait for its data.
            if links.world() > 1 && model.device.as_cuda().is_some() {
                links.comm().gather_all(&[], 0)?;
            }
            let mut pass = Pass::new(model, links, &schedule.round);
            pass.forward();
            pass.loss(None);
            links.check()?;
            if let Some(leaf) = schedule.own {
                own.losses.push(model.read_loss());
                own.targets += counted;
                let chosen = model.favourites(of_batch(leaf));
                let (more, of) = favourites.churn(leaf, &chosen);
                (own.changed, own.compared) = (own.changed + more, own.compared + of);
                now.0.insert(leaf, chosen);
            }
        }
        own.overflows = model.device.read_vec::<f64>(model.routed_overflows())[0] as u64;
        let all = links.comm().gather_all(&own.encode(), 32 + 8 * count as usize)?;
        let found = all.iter().zip(0..).map(|(bytes, rank)| Found::decode(rank, bytes));
        Ok((found.collect::<Result<Vec<Found>, CommError>>()?, now))
    }

    fn mean(&self, found: &[Found]) -> Validation {
        let model = &self.model;
        let in_order = model.layout.mesh.data_group(model.rank);
        let in_order = || in_order.iter().map(|rank| &found[*rank as usize]);
        let losses = in_order().flat_map(|found| &found.losses);
        let sum = losses.fold(0.0, |sum, loss| sum + loss);
        let changed: u64 = found.iter().map(|found| found.changed).sum();
        let compared: u64 = found.iter().map(|found| found.compared).sum();
        let targets: u64 = in_order().map(|found| found.targets).sum();
        Validation {
            loss: sum / targets.max(1) as f64,
            churn: (compared > 0).then(|| changed as f64 / compared as f64),
        }
    }
}

impl Found {
    fn encode(&self) -> Vec<u8> {
        let losses = self.losses.iter().map(|loss| loss.to_bits());
        let numbers = [self.targets, self.changed, self.compared, self.overflows];
        let numbers = numbers.into_iter().chain(losses);
        numbers.flat_map(u64::to_le_bytes).collect()
    }

    fn decode(rank: u32, bytes: &[u8]) -> Result<Found, CommError> {
        let (words, rest) = bytes.as_chunks::<8>();
        let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
        let mut next = || words.next();
        match [next(), next(), next(), next()] {
            [Some(targets), Some(changed), Some(compared), Some(overflows)] if rest.is_empty() => {
                let losses = words.map(f64::from_bits).collect();
                Ok(Found { losses, targets, changed, compared, overflows })
            }
            _ => Err(CommError::Protocol {
                rank,
                found: format!("{} bytes that are no measurement", bytes.len()),
                expected: "losses of held-out sequences".to_string(),
            }),
        }
    }
}

impl Favourites {
    /// Compares the favourites of a held-out micro-batch with those of the last time: how many
    /// changed, of how many; (0, 0) the first time.
    fn churn(&self, micro_batch: u32, now: &[u32]) -> (u64, u64) {
        let before = self.0.get(&micro_batch);
        match before.filter(|before| before.len() == now.len()) {
            None => (0, 0),
            Some(before) => {
                let changed = before.iter().zip(now).filter(|(before, now)| before != now);
                (changed.count() as u64, now.len() as u64)
            }
        }
    }
}

impl Model {
    /// The favourite expert of each of `t` tokens, by mixture layer: that of its largest weight,
    /// ties to the lowest id.
    fn favourites(&self, t: usize) -> Vec<u32> {
        let k = self.top_k();
        let mut favourites = Vec::new();
        for layer in &self.mixture {
            let Router { ids, weights, .. } = self.router(*layer);
            let ids: Vec<u32> = self.device.read_vec(ids.slice(0, t * k));
            let weights = weights.slice(0, t * k);
            let weights: Vec<f64> = match weights.dtype() {
                DType::F64 => self.device.read_vec(weights),
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_travels_whole() {
        let losses = vec![1.5, -0.0, f64::INFINITY];
        let found = Found { losses, targets: 9, changed: 7, compared: u64::MAX, overflows: 2 };
        let bytes = found.encode();
        assert_eq!(Found::decode(1, &bytes), Ok(found));
        for len in [0, 8, 15, 16, 24, 31, 33, bytes.len() - 1] {
            assert!(Found::decode(1, &bytes[..len]).is_err(), "{len} bytes were taken");
        }
    }
}
