//! Who joins the next attempt, and which state it starts from.

use super::index::Index;
use crate::observed::{Observed, Worker};
use moejob_protocol::config::{Resume, ShardSource};
use moejob_protocol::layout::Layout;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

pub(super) struct Start<'o> {
    /// In rank order.
    pub chosen: Vec<&'o Worker>,
    pub resume: Resume,
    /// For a person.
    pub source: String,
}

/// A snapshot that is somewhere in memory, whole or not.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Snapshot {
    step: u64,
    attempt: u32,
}

/// Takes `count` of the candidates, so that the newest state that they or the storage have whole
/// can be resumed from.
pub(super) fn choose<'o>(
    observed: &'o Observed,
    index: &Index,
    candidates: &[&'o Worker],
    count: usize,
) -> Start<'o> {
    // On nodes that stay, with state, in the order of the nodes: ranks that are close in number
    // are close in the network, and a worker that replaces another on its node gets its rank.
    let place = |worker: &Worker| index.place(&worker.node);
    let mut preferred = candidates.to_vec();
    preferred.sort_by_cached_key(|worker| {
        (!index.is_usable(&worker.node), worker.held.is_empty(), place(worker))
    });
    let stored = observed.stored.as_ref();
    let mut found = None;
    for (snapshot, mut holders) in snapshots(&preferred).into_iter().rev() {
        let Some(layout) = observed.layout_of(snapshot.attempt) else {
            continue;
        };
        // What the storage has as well is no reason to take another worker.
        match stored.map(|stored| stored.step.cmp(&snapshot.step)) {
            Some(std::cmp::Ordering::Greater) => break,
            Some(std::cmp::Ordering::Equal) => drop(holders.split_off(&count)),
            _ => {}
        }
        if let Some(holders) = cover(layout, holders, count) {
            found = Some((snapshot, layout, holders));
            break;
        }
    }
    let holders = found.as_ref().map(|(.., holders)| holders.clone()).unwrap_or_default();
    let held: BTreeSet<usize> = holders.iter().copied().collect();
    let others = (0..preferred.len()).filter(|index| !held.contains(index));
    let mut chosen: Vec<&Worker> =
        (holders.iter().copied().chain(others)).take(count).map(|index| preferred[index]).collect();
    chosen.sort_by_cached_key(|worker| place(worker));
    let chosen = seated(observed, chosen);
    let (resume, source) = match (found, stored) {
        (Some((snapshot, layout, _)), _) => {
            let Snapshot { step, attempt } = snapshot;
            let ranks = observed.template.ranks;
            let same = u64::from(layout.mesh.world()) == u64::from(ranks) * count as u64;
            let sources = sources(layout, snapshot, &chosen, (ranks, same));
            let layout = layout.clone();
            let source = format!("the memory of attempt {attempt}");
            (Resume::Memory { step, attempt, layout, sources }, source)
        }
        (None, Some(stored)) => {
            let (step, name) = (stored.step, stored.name.clone());
            let source = format!("checkpoint {name}");
            (Resume::Checkpoint { step, name }, source)
        }
        (None, None) => (Resume::Fresh, "initial weights".to_string()),
    };
    Start { chosen, resume, source }
}

/// After a loss as few as possible change their ranks: members keep their seats, and others, in
/// their order, take those that are free. A gang that grows is seated anew, by its places.
fn seated<'o>(observed: &'o Observed, chosen: Vec<&'o Worker>) -> Vec<&'o Worker> {
    let members = observed.record.gang.as_ref().map(|gang| &gang.members[..]).unwrap_or_default();
    if members.len() < chosen.len() {
        return chosen;
    }
    let mut seats: Vec<Option<&Worker>> = vec![None; members.len()];
    let (mut own, mut on_node) = (BTreeMap::new(), BTreeMap::new());
    for (seat, member) in members.iter().enumerate() {
        own.entry(member.worker.as_str()).or_insert(seat);
        on_node.entry(member.node.as_str()).or_insert(seat);
    }
    let mut others = Vec::new();
    for worker in chosen {
        match own.get(worker.name.as_str()) {
            Some(seat) => seats[*seat] = Some(worker),
            None => others.push(worker),
        }
    }
    // On a member's node its replacement is as near to the others as it was.
    others.retain(|worker| {
        let seat = on_node.get(worker.node.as_str());
        let free = seat.filter(|seat| seats[**seat].is_none());
        free.inspect(|seat| seats[**seat] = Some(worker)).is_none()
    });
    let mut others = others.into_iter();
    for seat in &mut seats {
        if seat.is_none() {
            *seat = others.next();
        }
    }
    seats.into_iter().flatten().collect()
}

/// Of each snapshot the shards that workers hold, by the workers' places in the list. One walk over
/// all that they hold: workers of hostile images tell of thousands of snapshots, each its own.
fn snapshots(workers: &[&Worker]) -> BTreeMap<Snapshot, BTreeMap<usize, BTreeSet<u32>>> {
    let mut all: BTreeMap<Snapshot, BTreeMap<usize, BTreeSet<u32>>> = BTreeMap::new();
    for (index, worker) in workers.iter().enumerate() {
        for held in &worker.held {
            let snapshot = Snapshot { step: held.step, attempt: held.attempt };
            let shards = all.entry(snapshot).or_default().entry(index).or_default();
            shards.extend(&held.shards);
        }
    }
    all
}

/// Shards of the snapshot that this worker holds.
fn shards(worker: &Worker, snapshot: Snapshot) -> BTreeSet<u32> {
    let of = worker.held.iter();
    let of = of.filter(|held| (held.step, held.attempt) == (snapshot.step, snapshot.attempt));
    of.flat_map(|held| held.shards.iter().copied()).collect()
}

/// At most `count` workers that hold every shard together: again and again the one that adds the
/// most, of equals the preferred. Greedy, so it may miss a cover that is just small enough. `adds`
/// has the shards that each of them holds, by its place.
fn cover(
    layout: &Layout,
    mut adds: BTreeMap<usize, BTreeSet<u32>>,
    count: usize,
) -> Option<Vec<usize>> {
    let world = layout.mesh.world();
    // Most snapshots that cannot be whole have too few shards to be looked at one by one.
    if adds.values().map(BTreeSet::len).sum::<usize>() < world as usize {
        return None;
    }
    adds.values_mut().for_each(|of| of.retain(|shard| *shard < world));
    let mut missing: BTreeSet<u32> = (0..world).collect();
    let mut holders: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (index, of) in &adds {
        of.iter().for_each(|shard| holders.entry(*shard).or_default().push(*index));
    }
    // The last is the first of those that add the most.
    let order = adds.iter().map(|(index, of)| (of.len(), Reverse(*index)));
    let mut order: BTreeSet<(usize, Reverse<usize>)> = order.collect();
    let mut taken = Vec::new();
    while !missing.is_empty() {
        let (most, Reverse(best)) = order.pop_last()?;
        if most == 0 || taken.len() == count {
            return None;
        }
        for shard in adds.remove(&best).unwrap_or_default() {
            missing.remove(&shard);
            for index in &holders[&shard] {
                let Some(of) = adds.get_mut(index) else { continue };
                let before = of.len();
                if of.remove(&shard) {
                    order.remove(&(before, Reverse(*index)));
                    order.insert((before - 1, Reverse(*index)));
                }
            }
        }
        taken.push(best);
    }
    Some(taken)
}

/// Who sends each shard: of those that hold it, the one that sends the fewest so far.
/// All ranks of a worker reach what it holds, so they take turns. Where there are as many ranks as
/// before (`same`), a shard is sent by the rank of its number if that one's worker has it: then it
/// travels nowhere, and a worker's shards are one run of the configuration.
fn sources(
    layout: &Layout,
    snapshot: Snapshot,
    chosen: &[&Worker],
    (ranks, same): (u32, bool),
) -> Vec<ShardSource> {
    let mut holders: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (index, worker) in chosen.iter().enumerate() {
        let of = shards(worker, snapshot);
        of.into_iter().for_each(|shard| holders.entry(shard).or_default().push(index));
    }
    let mut sends = vec![0u32; chosen.len()];
    (0..layout.mesh.world())
        .filter_map(|shard| {
            let holders = holders.get(&shard)?;
            let own = (shard / ranks.max(1)) as usize;
            if same && holders.contains(&own) {
                sends[own] += 1;
                return Some(ShardSource { shard, from: shard });
            }
            let index = *holders.iter().min_by_key(|index| sends[**index])?;
            let from = index as u32 * ranks + sends[index] % ranks.max(1);
            sends[index] += 1;
            Some(ShardSource { shard, from })
        })
        .collect()
}
