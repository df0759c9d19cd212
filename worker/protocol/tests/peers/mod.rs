//! How others place experts, written from their publications: what ours is measured against.

use std::cmp::Reverse;

/// Tokens of the fullest rank by DeepSeek's EPLB (`replicate_experts`, then `balanced_packing`, one
/// group on one node) with `spare` slots a rank. It is decided by `history` and has `loads`, both
/// `[E]`. EPLB places owners as well; `owners`, `[E]`, are those who must stay.
pub fn eplb(
    history: &[u64],
    loads: &[u64],
    ranks: u32,
    spare: u32,
    owners: Option<&[u32]>,
) -> f64 {
    let (experts, ranks) = (history.len(), ranks as usize);
    let mut copies = vec![1.0; experts];
    let mut physical: Vec<usize> = (0..experts).collect();
    for _ in 0..ranks * spare as usize {
        let share = |expert: &usize| history[*expert] as f64 / copies[*expert];
        let by_share = |a: &usize, b: &usize| share(a).total_cmp(&share(b)).then(b.cmp(a));
        let heaviest = (0..experts).max_by(by_share).expect("an expert");
        copies[heaviest] += 1.0;
        physical.push(heaviest);
    }
    let share = |loads: &[u64], expert: usize| loads[expert] as f64 / copies[expert];
    let (mut decided, mut had) = (vec![0.0; ranks], vec![0.0; ranks]);
    if let Some(owners) = owners {
        for (expert, owner) in owners.iter().enumerate() {
            decided[*owner as usize] += share(history, expert);
            had[*owner as usize] += share(loads, expert);
        }
        physical.drain(..experts);
    }
    let room = physical.len() / ranks;
    let mut held = vec![0; ranks];
    physical.sort_by(|a, b| share(history, *b).total_cmp(&share(history, *a)));
    for expert in physical {
        let open = (0..ranks).filter(|rank| held[*rank] < room);
        let least = open.min_by(|a, b| decided[*a].total_cmp(&decided[*b])).expect("a rank");
        decided[least] += share(history, expert);
        had[least] += share(loads, expert);
        held[least] += 1;
    }
    had.into_iter().fold(0.0, f64::max)
}

/// Owners by SmartMoE's greedy placement (ATC'23, section 5): each expert, from the most loaded on,
/// to the rank with least so far that has room.
pub fn smartmoe(loads: &[u64], ranks: u32) -> Vec<u32> {
    let room = loads.len().div_ceil(ranks as usize);
    let mut owners = vec![0; loads.len()];
    let mut sums = vec![(0, 0); ranks as usize];
    let mut by_load: Vec<usize> = (0..loads.len()).collect();
    by_load.sort_by_key(|expert| Reverse(loads[*expert]));
    for expert in by_load {
        let open = (0..ranks).filter(|rank| sums[*rank as usize].1 < room);
        let least = open.min_by_key(|rank| sums[*rank as usize].0).expect("a rank");
        let (sum, held) = &mut sums[least as usize];
        (*sum, *held) = (*sum + loads[expert], *held + 1);
        owners[expert] = least;
    }
    owners
}
