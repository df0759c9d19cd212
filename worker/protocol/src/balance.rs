//! When experts move: a function of the loads so far and of what a move costs.
//!
//! ```text
//! counts of a step --advance()--> 16 steps are a window --a window's end--> changes, or none
//! ```
//! At the end of a window each layer is judged. Replicas are chosen anew by its loads. Owners move
//! last, and only where replicas leave the fullest rank above the rest. A change must save a
//! twentieth of what the layer's experts take, more than chance makes of the loads, and in the
//! steps that are left more time than it costs (SmartMoE, ATC'23, section 5). Two windows in
//! succession must find so. The first may hold a shift's beginning; the second has nothing but what
//! lasts, and is what replicas are chosen by. So stationary loads move nothing, and a lasting shift
//! moves once.
//!
//! All that decides is in [`Balance`]: a run that goes on from one, with the same loads, makes the
//! same changes at the same steps.

use crate::by_load::{self, Loads};
use crate::canonical::canonical_hash;
use crate::replicas::Replicas;
use serde::{Deserialize, Serialize};

/// Steps of a window. The noise of its mean is a quarter of a step's, and a shift is answered
/// within three windows.
pub const WINDOW_STEPS: u64 = 16;

/// One part in so many that a change must save. Less is lost among the other reasons for which one
/// step takes longer than another.
const HYSTERESIS: u128 = 20;

/// Standard deviations of the fullest rank's tokens that a change must save. Loads are judged
/// thousands of times, in each of tens of layers, and none of these may move by chance.
const DEVIATIONS: u64 = 4;

/// The cost of tokens, replicas and moves. It is fixed for a run, as decisions depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Price {
    /// Picoseconds that one more token of the fullest rank adds to a step, forward and backward.
    /// Tokens are those of all expert groups.
    pub token_ps: u64,
    /// Picoseconds that a replica adds to a step: its weights arrive, its gradient leaves.
    pub replica_ps: u64,
    /// Bytes of an expert's weights in one layer. A new replica gets them.
    pub replica_bytes: u64,
    /// Bytes of an expert's weights, masters and moments in one layer. A new owner gets them.
    pub owner_bytes: u64,
    /// Bytes that reach a rank in a second.
    pub rate: u64,
}

/// One layer: where its experts lie, and what is known of its loads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LayerBalance {
    pub replicas: Replicas,
    /// `[E]`, tokens of each expert in this window.
    pub loads: Vec<u64>,
    /// A change would have paid by the loads of the window before.
    pub pending: bool,
}

/// The history and the placement of all mixture layers of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Balance {
    /// Steps that have been counted, and steps of the job.
    pub step: u64,
    pub steps: u64,
    pub price: Price,
    pub layers: Vec<LayerBalance>,
}

/// A layer's placement from `step` on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Change {
    pub step: u64,
    /// Which of the mixture layers it is.
    pub layer: u32,
    pub replicas: Replicas,
    pub reason: String,
}

impl Balance {
    /// No replicas yet. `orders` say who owns what, as in [`crate::layout::Placement::Ordered`].
    pub fn new(orders: &[Vec<u32>], ranks: u32, spare: u32, steps: u64, price: Price) -> Balance {
        let layer = |order: &Vec<u32>| LayerBalance {
            replicas: Replicas::none(&by_load::owners(order, ranks), ranks, spare),
            loads: vec![0; order.len()],
            pending: false,
        };
        Balance { step: 0, steps, price, layers: orders.iter().map(layer).collect() }
    }

    /// Every layer has valid replicas, and loads that can be summed. A file's state is checked by
    /// this first.
    pub fn is_valid(&self) -> bool {
        self.layers.iter().all(|layer| {
            let sum = layer.loads.iter().try_fold(0_u64, |sum, load| sum.checked_add(*load));
            layer.replicas.is_valid()
                && layer.loads.len() == layer.replicas.owners.len()
                && sum.is_some_and(|sum| sum < u64::MAX / 2)
        })
    }

    /// BLAKE3 of all of it, hex. Ranks that have the same state have the same digest.
    pub fn digest(&self) -> String {
        canonical_hash(&serde_json::json!(self), &[])
    }

    /// Counts a step, and says what changes before the next one. `counts` are the tokens of all
    /// ranks by layer and expert, `[L, E]`.
    pub fn advance(&mut self, counts: &[u64]) -> Vec<Change> {
        let known = self.layers.iter().map(|layer| layer.loads.len()).sum::<usize>();
        assert_eq!(counts.len(), known, "tokens by layer and expert");
        let mut rest = counts;
        for layer in &mut self.layers {
            let (row, after) = rest.split_at(layer.loads.len());
            layer.loads.iter_mut().zip(row).for_each(|(sum, count)| *sum += count);
            rest = after;
        }
        self.step += 1;
        if !self.step.is_multiple_of(WINDOW_STEPS) {
            return Vec::new();
        }
        let left = self.steps.saturating_sub(self.step);
        let mut changes = Vec::new();
        for (number, layer) in (0..).zip(&mut self.layers) {
            let found = layer.better(&self.price, left);
            let lasts = found.is_some() && layer.pending;
            layer.pending = found.is_some() && !lasts;
            if let (Some((replicas, reason)), true) = (found, lasts) {
                layer.replicas = replicas.clone();
                let reason = format!("layer {number}: {reason}");
                changes.push(Change { step: self.step, layer: number, replicas, reason });
            }
            layer.loads.fill(0);
        }
        changes
    }
}

impl LayerBalance {
    /// A placement that pays in `left` steps by the loads of this window, and why.
    fn better(&self, price: &Price, left: u64) -> Option<(Replicas, String)> {
        let Replicas { ranks, owners, .. } = &self.replicas;
        let (ranks, spare) = (*ranks, self.replicas.spare());
        let mean = self.loads.iter().sum::<u64>().div_ceil(u64::from(ranks));
        let before = Outlook::new(self.replicas.clone(), &self.replicas, &self.loads, price);
        let mut best: Option<Outlook> = None;
        let chosen = Replicas::choose(&self.loads, owners, ranks, spare).seated(&self.replicas);
        let chosen = Outlook::new(chosen, &self.replicas, &self.loads, price);
        if chosen.pays(&before, price, left) {
            best = Some(chosen);
        }
        let now = best.as_ref().unwrap_or(&before);
        if now.level > mean {
            let loads = Loads { counts: &self.loads, experts: self.loads.len() };
            let order = loads.order(ranks, &[self.replicas.order()]).pop().unwrap_or_default();
            let owners = by_load::owners(&order, ranks);
            let moved = Replicas::choose(&self.loads, &owners, ranks, spare);
            let moved =
                Outlook::new(moved.seated(&self.replicas), &self.replicas, &self.loads, price);
            if moved.pays(now, price, left) {
                best = Some(moved);
            }
        }
        let best = best?;
        let ratio = |level: u64| level as f64 / mean as f64;
        let saved = (before.cost - best.cost) / u128::from(WINDOW_STEPS);
        let saved = saved.saturating_mul(left.into());
        let seconds = |ps: u128| ps as f64 / 1e12;
        let reason = format!(
            "fullest rank {:.2} -> {:.2} of the mean; new replicas: {}, new owners: {}; \
             takes {:.3} s, saves {:.3} s in {left} steps",
            ratio(before.level), ratio(best.level), best.new_replicas, best.new_owners,
            seconds(best.move_ps), seconds(saved),
        );
        Some((best.replicas, reason))
    }
}

/// The cost of a placement by the loads of a window, and that of getting there.
struct Outlook {
    replicas: Replicas,
    /// Tokens of the fullest rank.
    level: u64,
    /// Picoseconds of the window.
    cost: u128,
    move_ps: u128,
    new_replicas: u32,
    new_owners: u32,
}

impl Outlook {
    fn new(replicas: Replicas, before: &Replicas, loads: &[u64], price: &Price) -> Outlook {
        let ranks = replicas.ranks as usize;
        let (mut held, mut bytes) = (vec![0_u64; ranks], vec![0_u128; ranks]);
        let (mut new_replicas, mut new_owners) = (0, 0);
        let holds = |rank: u32, expert: u32| {
            before.owners[expert as usize] == rank
                || before.pairs().any(|pair| pair == (rank, expert))
        };
        for (rank, expert) in replicas.pairs() {
            held[rank as usize] += 1;
            if !holds(rank, expert) {
                bytes[rank as usize] += u128::from(price.replica_bytes);
                new_replicas += 1;
            }
        }
        for (owner, before) in replicas.owners.iter().zip(&before.owners) {
            if owner != before {
                bytes[*owner as usize] += u128::from(price.owner_bytes);
                new_owners += 1;
            }
        }
        let most = held.into_iter().max().unwrap_or(0);
        let level = replicas.level(loads);
        let slots = u128::from(most * WINDOW_STEPS) * u128::from(price.replica_ps);
        let cost = (u128::from(level) * u128::from(price.token_ps)).saturating_add(slots);
        let bytes = bytes.into_iter().max().unwrap_or(0);
        let move_ps = bytes * 1_000_000_000_000 / u128::from(price.rate.max(1));
        Outlook { replicas, level, cost, move_ps, new_replicas, new_owners }
    }

    /// In `left` steps this saves more than it costs beyond `before`, by more than chance.
    fn pays(&self, before: &Outlook, price: &Price, left: u64) -> bool {
        let saved = before.cost.saturating_sub(self.cost);
        let chance = u128::from(DEVIATIONS * before.level.isqrt()) * u128::from(price.token_ps);
        let more = self.move_ps.saturating_sub(before.move_ps);
        saved > (before.cost / HYSTERESIS).saturating_add(chance)
            && saved.saturating_mul(left.into()) > more.saturating_mul(WINDOW_STEPS.into())
    }
}
