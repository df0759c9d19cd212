//! Where experts lie so that all ranks of a group have as many tokens as they can.
//!
//! Each step waits, in each layer, for the rank whose experts were chosen most often. How often
//! each was chosen changes slowly, so a placement by what was counted evens out what comes. Experts
//! are given to ranks from the most loaded to the least, each to the rank with least so far (LPT:
//! Graham 1969, "Bounds on Multiprocessing Timing Anomalies"), but a rank holds no more of them
//! than another: so its memory stays as planned. Then experts of the fullest and of the emptiest
//! rank change places as long as that helps.
//!
//! All functions of counts alone: ranks that know the same decide the same.

use crate::mesh::split;
use std::cmp::Reverse;

/// Counts of tokens by MoE layer and expert.
#[derive(Clone, Copy, Debug)]
pub struct Loads<'a> {
    /// `[layer, expert]`
    pub counts: &'a [u64],
    pub experts: usize,
}

impl<'a> Loads<'a> {
    fn layers(&self) -> impl Iterator<Item = &'a [u64]> + use<'a> {
        self.counts.chunks_exact(self.experts.max(1))
    }

    /// Ids in order, for each layer: what [`crate::layout::Placement::Contiguous`] means.
    pub fn in_order(&self) -> Vec<Vec<u32>> {
        self.layers().map(|_| (0..self.experts as u32).collect()).collect()
    }

    /// Tokens of the fullest of `ep` ranks over the mean, the mean of all layers: how much longer
    /// products of experts take than they would if experts lay evenly. `order` is as in
    /// [`crate::layout::Placement::Ordered`].
    pub fn unevenness(&self, ep: u32, order: &[Vec<u32>]) -> f64 {
        let of_layer = |(counts, order): (&[u64], &Vec<u32>)| {
            let sums = runs(order.len(), ep).map(|run| sum(counts, &order[run]));
            let (most, all) = sums.fold((0, 0), |(most, all), sum| (sum.max(most), all + sum));
            if all == 0 { 1.0 } else { most as f64 * f64::from(ep) / all as f64 }
        };
        let found: Vec<f64> = self.layers().zip(order).map(of_layer).collect();
        found.iter().sum::<f64>() / found.len().max(1) as f64
    }

    /// The order in which `ep` ranks have as many tokens as they can. Which rank has which of the
    /// runs is chosen so that most experts stay where they lie `before`.
    pub fn order(&self, ep: u32, before: &[Vec<u32>]) -> Vec<Vec<u32>> {
        let of_layer = |(counts, before): (&[u64], &Vec<u32>)| {
            let mut ranks = packed(counts, ep);
            while swapped(counts, &mut ranks) {}
            let mut order = Vec::with_capacity(counts.len());
            for mut held in seated(ranks, ep, before) {
                held.sort_unstable();
                order.append(&mut held);
            }
            order
        };
        self.layers().zip(before).map(of_layer).collect()
    }
}

/// The rank that each expert has by its place in an order, `[E]`.
pub fn owners(order: &[u32], ep: u32) -> Vec<u32> {
    let mut owners = vec![0; order.len()];
    for (rank, run) in (0..).zip(runs(order.len(), ep)) {
        order[run].iter().for_each(|expert| owners[*expert as usize] = rank);
    }
    owners
}

/// Experts of each rank, by place in an order.
fn runs(experts: usize, ep: u32) -> impl Iterator<Item = std::ops::Range<usize>> {
    let run = move |at| split(experts as u32, ep, at);
    (0..ep).map(run).map(|run| run.start as usize..run.end as usize)
}

fn sum(counts: &[u64], held: &[u32]) -> u64 {
    held.iter().map(|expert| counts[*expert as usize]).sum()
}

/// Each expert, from the most loaded on, to the rank that has least and has room.
fn packed(counts: &[u64], ep: u32) -> Vec<Vec<u32>> {
    let room: Vec<usize> = runs(counts.len(), ep).map(|run| run.len()).collect();
    let mut ranks = vec![(0, Vec::new()); ep as usize];
    let mut by_load: Vec<u32> = (0..counts.len() as u32).collect();
    by_load.sort_by_key(|expert| (Reverse(counts[*expert as usize]), *expert));
    for expert in by_load {
        let open = (0..ranks.len()).filter(|at| ranks[*at].1.len() < room[*at]);
        let Some(least) = open.min_by_key(|at| (ranks[*at].0, *at)) else { break };
        ranks[least].0 += counts[expert as usize];
        ranks[least].1.push(expert);
    }
    ranks.into_iter().map(|(_, held)| held).collect()
}

/// The two experts of the fullest and the emptiest rank that even these out best change places;
/// false where none do. Each time the difference of the two gets smaller, so this ends.
fn swapped(counts: &[u64], ranks: &mut [Vec<u32>]) -> bool {
    let sums = || ranks.iter().map(|held| sum(counts, held)).zip(0..);
    let (Some((most, full)), Some((least, empty))) = (sums().max(), sums().min()) else {
        return false;
    };
    let apart = most - least;
    let mut best: Option<(u64, usize, usize)> = None;
    for (at, expert) in ranks[full].iter().enumerate() {
        for (other_at, other) in ranks[empty].iter().enumerate() {
            let more = counts[*expert as usize].saturating_sub(counts[*other as usize]);
            let left = apart.abs_diff(2 * more);
            if more > 0 && left < best.map_or(apart, |(left, ..)| left) {
                best = Some((left, at, other_at));
            }
        }
    }
    let Some((_, at, other_at)) = best else { return false };
    let (expert, other) = (ranks[full][at], ranks[empty][other_at]);
    (ranks[full][at], ranks[empty][other_at]) = (other, expert);
    true
}

/// The sets of experts in an order in which many of them stay where they lie `before`: those that
/// have most in common with a run of as many are given its place first.
fn seated(sets: Vec<Vec<u32>>, ep: u32, before: &[u32]) -> Vec<Vec<u32>> {
    let mut lay = vec![0; before.len()];
    let mut room = Vec::new();
    for (place, run) in runs(before.len(), ep).enumerate() {
        room.push(run.len());
        before[run].iter().for_each(|expert| lay[*expert as usize] = place);
    }
    let mut common = Vec::new();
    for (at, held) in sets.iter().enumerate() {
        let mut by_place = vec![0_u32; room.len()];
        held.iter().for_each(|expert| by_place[lay[*expert as usize]] += 1);
        let fitting = by_place.into_iter().enumerate();
        let fitting = fitting.filter(|(place, _)| room[*place] == held.len());
        common.extend(fitting.map(|(place, shared)| (Reverse(shared), at, place)));
    }
    common.sort_unstable();
    let mut seats: Vec<Option<usize>> = vec![None; room.len()];
    let mut seen = vec![false; sets.len()];
    for (_, at, place) in common {
        if !seen[at] && seats[place].is_none() {
            (seen[at], seats[place]) = (true, Some(at));
        }
    }
    let mut sets = sets;
    seats.into_iter().flatten().map(|at| std::mem::take(&mut sets[at])).collect()
}
