//! Replicas of experts, and the division of tokens among holders.

mod drawn;
mod peers;

use drawn::Draw;
use moejob_protocol::by_load;
use moejob_protocol::replicas::Replicas;
use moejob_protocol::shares::{Shares, Unit};

fn contiguous(experts: usize, ranks: u32) -> Vec<u32> {
    by_load::owners(&(0..experts as u32).collect::<Vec<_>>(), ranks)
}

/// Loads of experts, and their owners, of `9 1 / 4 2`: by rank.
fn read(text: &str) -> (Vec<u64>, Vec<u32>, u32) {
    let rows: Vec<Vec<u64>> = text
        .split('/')
        .map(|row| row.split_whitespace().map(|word| word.parse().expect("a number")).collect())
        .collect();
    let owners = (0..).zip(&rows).flat_map(|(rank, row)| row.iter().map(move |_| rank)).collect();
    (rows.concat(), owners, rows.len() as u32)
}

fn told(replicas: &Replicas) -> String {
    let pairs = replicas.pairs().map(|(rank, expert)| format!("{expert} on {rank}"));
    pairs.collect::<Vec<_>>().join(", ")
}

/// The fullest rank before and after, and which expert has a replica on which rank.
fn chosen(loads: &str, spare: u32) -> String {
    let (loads, owners, ranks) = read(loads);
    let replicas = Replicas::choose(&loads, &owners, ranks, spare);
    assert!(replicas.is_valid());
    let before = Replicas::none(&owners, ranks, spare).level(&loads);
    format!("{before} -> {}: {}", replicas.level(&loads), told(&replicas)).trim().to_string()
}

#[test]
fn replicas_of_few_experts() {
    assert_eq!(chosen("9 1 / 1 1", 1), "10 -> 6: 0 on 1");
    // Each rank has its share, so no slot is used.
    assert_eq!(chosen("3 3 / 3 3", 1), "6 -> 6:");
    assert_eq!(chosen("0 0 / 0 0", 1), "0 -> 0:");
    assert_eq!(chosen("7 5", 1), "12 -> 12:");
    // No expert has 4 tokens, so two replicas are needed, and one slot is not enough.
    assert_eq!(chosen("3 3 3 3 / 2 2", 1), "12 -> 9: 0 on 1");
    assert_eq!(chosen("3 3 3 3 / 2 2", 2), "12 -> 8: 0 on 1, 1 on 1");
    // One expert has the tokens of four ranks.
    assert_eq!(chosen("16 / 0 / 0 / 0", 1), "16 -> 4: 0 on 1, 0 on 2, 0 on 3");
    // Rank 2 fills both others from its expert, falls below the mean itself, and gets from rank 1
    // what that has too much.
    assert_eq!(chosen("1 / 14 / 24 / 1", 1), "24 -> 10: 2 on 0, 1 on 2, 2 on 3");
    assert_eq!(chosen("5 5 / 1 1", 0), "10 -> 10:");
}

/// `0 on 1`, in a group in which rank i owns expert i.
fn replicas(text: &str, ranks: u32, spare: u32) -> Replicas {
    let owners: Vec<u32> = (0..ranks).collect();
    let mut replicas = Replicas::none(&owners, ranks, spare);
    for pair in text.split(", ").filter(|pair| !pair.is_empty()) {
        let (expert, rank) = pair.split_once(" on ").expect("a pair");
        let first = rank.parse::<usize>().expect("a rank") * spare as usize;
        let mut slots = replicas.slots[first..first + spare as usize].iter_mut();
        let slot = slots.find(|slot| slot.is_none()).expect("a free slot");
        *slot = Some(expert.parse().expect("an expert"));
    }
    assert!(replicas.is_valid());
    replicas
}

/// `6 0 / 6 4` are counts by source and expert. For each source: tokens that go to each rank.
fn divided(counts: &str, held: &str, nodes: &[u32], unit: Unit) -> String {
    let (counts, _, ranks) = read(counts);
    let counts: Vec<u32> = counts.into_iter().map(|count| count as u32).collect();
    let shares = Shares::split(&counts, &replicas(held, ranks, 1), nodes, unit);
    let rows = shares.tokens.chunks(shares.copies.ranks.len()).map(|row| {
        let to = |rank: u32| {
            let held = shares.copies.ranks.iter().zip(row).filter(|(at, _)| **at == rank);
            held.map(|(_, tokens)| tokens).sum::<u32>().to_string()
        };
        (0..ranks).map(to).collect::<Vec<_>>().join(" ")
    });
    rows.collect::<Vec<_>>().join(" / ")
}

#[test]
fn tokens_of_few_sources() {
    let one_node = [0; 2];
    // Source 1 keeps of expert 0 what leaves both ranks 8 tokens.
    assert_eq!(divided("6 0 / 6 4", "0 on 1", &one_node, Unit::Token), "6 0 / 2 8");
    // In whole, 6 tokens here or there: 10 are fewer than 12.
    assert_eq!(divided("6 0 / 6 4", "0 on 1", &one_node, Unit::Source), "6 0 / 0 10");
    // Where nothing has too much, each source keeps its tokens, and no byte travels.
    assert_eq!(divided("5 0 / 5 0", "0 on 1", &one_node, Unit::Token), "5 0 / 0 5");
    assert_eq!(divided("0 0 / 9 1", "0 on 1", &one_node, Unit::Token), "0 0 / 5 5");
    // Without replicas tokens go to the owners.
    assert_eq!(divided("3 4 / 5 6", "", &one_node, Unit::Token), "3 4 / 5 6");
    // Ranks 2 and 3 are another node: what its sources have for expert 0 stays there.
    let counts = "4 0 0 0 / 4 0 0 0 / 4 0 0 0 / 4 0 0 0";
    let two_nodes = [0, 0, 1, 1];
    let stays = "4 0 0 0 / 4 0 0 0 / 0 0 4 0 / 0 0 4 0";
    assert_eq!(divided(counts, "0 on 2", &two_nodes, Unit::Token), stays);
    assert_eq!(divided(counts, "0 on 2", &two_nodes, Unit::Source), stays);
    // Rank 1 has nothing, and gets from rank 0 through no replica of its own: it stays empty.
    assert_eq!(divided("8 0 / 0 0", "1 on 0", &one_node, Unit::Token), "8 0 / 0 0");
    // Rank 0 passes tokens of expert 0 to rank 1, which passes as many of expert 1 to rank 2.
    let chain = "8 4 0 / 0 0 0 / 0 0 0";
    assert_eq!(divided(chain, "0 on 1, 1 on 2", &[0, 1, 2], Unit::Token), "4 4 4 / 0 0 0 / 0 0 0");
}

/// The level by Hall's condition: tokens of every set of experts over their holders.
fn level_by_sets(replicas: &Replicas, loads: &[u64]) -> u64 {
    let holders: Vec<u64> = (0..loads.len())
        .map(|expert| {
            let copies = replicas.pairs().filter(|pair| pair.1 as usize == expert);
            copies.fold(1 << replicas.owners[expert], |set, pair| set | 1 << pair.0)
        })
        .collect();
    let of = |set: u64| {
        let within = (0..loads.len()).filter(|expert| set >> expert & 1 == 1);
        let (tokens, ranks) =
            within.fold((0, 0_u64), |(sum, ranks), at| (sum + loads[at], ranks | holders[at]));
        tokens.div_ceil(u64::from(ranks.count_ones().max(1)))
    };
    let mean = loads.iter().sum::<u64>().div_ceil(u64::from(replicas.ranks));
    (0..1_u64 << loads.len()).map(of).max().unwrap_or(0).max(mean)
}

/// The lowest level of all choices, one slot a rank.
fn best_of_all(loads: &[u64], owners: &[u32], ranks: u32) -> u64 {
    let mut replicas = Replicas::none(owners, ranks, 1);
    let choices = loads.len() as u32 + 1;
    let mut best = u64::MAX;
    for mut code in 0..choices.pow(ranks) {
        for slot in &mut replicas.slots {
            *slot = (code % choices).checked_sub(1);
            code /= choices;
        }
        if replicas.is_valid() {
            best = best.min(replicas.level(loads));
        }
    }
    best
}

#[test]
fn of_three_ranks_no_choice_is_better() {
    let mut uneven = 0;
    for seed in 0..300 {
        let mut draw = Draw::new(seed);
        let (ranks, experts) = (2 + draw.below(2) as u32, 4 + draw.below(5) as usize);
        let least = 20 * draw.below(3);
        let load = |draw: &mut Draw| least + draw.below(30) * draw.below(30) / 8;
        let loads: Vec<u64> = (0..experts).map(|_| load(&mut draw)).collect();
        let owners: Vec<u32> = (0..experts).map(|_| draw.below(ranks.into()) as u32).collect();
        let ours = Replicas::choose(&loads, &owners, ranks, 1);
        let level = ours.level(&loads);
        assert_eq!(level, level_by_sets(&ours, &loads), "{loads:?} {owners:?}");
        assert_eq!(level, best_of_all(&loads, &owners, ranks), "{loads:?} {owners:?}");
        uneven += u32::from(level > loads.iter().sum::<u64>().div_ceil(ranks.into()));
    }
    assert!(uneven > 50, "{uneven}");
}

/// A layer of an expert group with drawn counts, some experts far busier than others.
fn drawn(seed: u64) -> (Vec<u32>, Vec<u32>, u32, u32) {
    let mut draw = Draw::new(seed);
    let ranks = 1 + draw.below(16) as u32;
    let experts = ranks as usize + draw.below(40) as usize;
    let busy: Vec<u64> = (0..experts).map(|_| 1 + draw.below(40).pow(2)).collect();
    let count = |at: usize| draw.below(busy[at % experts]) as u32;
    let counts = (0..ranks as usize * experts).map(count).collect();
    (counts, contiguous(experts, ranks), ranks, 1 + draw.below(2) as u32)
}

fn by_expert(counts: &[u32], experts: usize) -> Vec<u64> {
    let column = |expert| counts.iter().skip(expert).step_by(experts);
    (0..experts).map(|expert| column(expert).map(|count| u64::from(*count)).sum()).collect()
}

#[test]
fn every_token_goes_to_one_holder_and_no_rank_gets_more_than_without_replicas() {
    for seed in 0..400 {
        let (counts, owners, ranks, spare) = drawn(seed);
        let experts = owners.len();
        let loads = by_expert(&counts, experts);
        let replicas = Replicas::choose(&loads, &owners, ranks, spare);
        assert!(replicas.is_valid(), "{seed}");
        let before = Replicas::none(&owners, ranks, spare).level(&loads);
        let nodes: Vec<u32> = (0..ranks).map(|rank| rank / 4).collect();
        for unit in [Unit::Token, Unit::Source] {
            let shares = Shares::split(&counts, &replicas, &nodes, unit);
            for (at, count) in counts.iter().enumerate() {
                let row = at / experts * shares.copies.ranks.len();
                let copies = shares.copies.of(at % experts);
                let tokens = &shares.tokens[row + copies.start..row + copies.end];
                assert_eq!(tokens.iter().sum::<u32>(), *count, "{seed} {at}");
                let holders = tokens.iter().filter(|tokens| **tokens > 0).count();
                assert!(unit == Unit::Token || holders <= 1, "{seed} {at}");
            }
            let most = shares.loads().into_iter().max().expect("a rank");
            assert!(most <= before, "{seed} {unit:?}: {most} of {before}");
            assert!(unit == Unit::Source || most == replicas.level(&loads), "{seed}");
        }
    }
}

#[test]
fn an_expert_that_stays_keeps_its_slot() {
    let before = replicas("2 on 0, 1 on 0", 3, 2);
    let after = replicas("0 on 1, 1 on 0, 2 on 0", 3, 2).seated(&before);
    assert_eq!(after.slots, [Some(2), Some(1), Some(0), None, None, None]);
    let after = replicas("1 on 0", 3, 2).seated(&before);
    assert_eq!(after.slots, [None, Some(1), None, None, None, None]);
}

#[test]
fn replicas_that_cannot_be_are_recognised() {
    let valid = |owners: &[u32], ranks, slots: &[Option<u32>]| {
        Replicas { ranks, owners: owners.to_vec(), slots: slots.to_vec() }.is_valid()
    };
    assert!(valid(&[0, 1], 2, &[Some(1), None]));
    assert!(valid(&[0, 1], 2, &[]));
    // A rank that is not there, an expert that is not there, its own expert, and one expert twice.
    assert!(!valid(&[0, 2], 2, &[None, None]));
    assert!(!valid(&[0, 1], 2, &[Some(2), None]));
    assert!(!valid(&[0, 1], 2, &[Some(0), None]));
    assert!(!valid(&[0, 1], 2, &[Some(1), Some(1), None, None]));
    assert!(!valid(&[0, 1], 2, &[None, None, None]));
    assert!(!valid(&[], 0, &[]));
}

/// Loads of experts as unequal as those of a router without a loss of balance: from some tokens to
/// tens of thousands.
fn skewed(draw: &mut Draw, experts: usize) -> Vec<u64> {
    let mut load = || {
        let scale = 1 << draw.below(16);
        scale + draw.below(scale)
    };
    (0..experts).map(|_| load()).collect()
}

/// The mean over layers of the fullest rank over the mean, one spare slot. At EP 2 one replica is
/// all that helps, and its choice is the best there is.
#[test]
fn skewed_routing_is_levelled() {
    let mut draw = Draw::new(7);
    let layers: Vec<Vec<u64>> = (0..24).map(|_| skewed(&mut draw, 32)).collect();
    for (ranks, bar) in [(2, 1.03), (4, 1.07), (8, 1.16), (16, 1.33)] {
        let (mut ours, mut moved, mut eplb, mut smart) = (0.0, 0.0, 0.0, 0.0);
        for loads in &layers {
            let mean = loads.iter().sum::<u64>() as f64 / f64::from(ranks);
            let over = |replicas: &Replicas| replicas.level(loads) as f64 / mean;
            let owners = contiguous(loads.len(), ranks);
            let stays = over(&Replicas::choose(loads, &owners, ranks, 1));
            let fixed = peers::eplb(loads, loads, ranks, 1, Some(&owners)) / mean;
            assert!(stays <= fixed + 1e-3, "EP {ranks}: {stays}, EPLB {fixed}");
            // Both EPLB and ours place owners.
            let placed = peers::smartmoe(loads, ranks);
            let moves = over(&Replicas::choose(loads, &placed, ranks, 1));
            let free = peers::eplb(loads, loads, ranks, 1, None) / mean;
            assert!(moves <= free + 1e-3, "EP {ranks}: {moves}, EPLB {free}");
            ours += stays / 24.0;
            moved += moves / 24.0;
            eplb += free / 24.0;
            smart += over(&Replicas::none(&placed, ranks, 1)) / 24.0;
        }
        assert!(ours <= bar, "EP {ranks}: {ours}");
        assert!(moved <= 1.001 && moved <= eplb && moved <= smart, "EP {ranks}: {moved} {eplb}");
    }
}

/// Replicas of all ranks' loads, tokens of each expert group by its own counts.
#[test]
fn groups_of_ranks_divide_their_tokens() {
    let mut draw = Draw::new(11);
    for _ in 0..8 {
        let loads = skewed(&mut draw, 32);
        // Each rank has a sixteenth, give or take a quarter of that.
        let mut of_rank = |load: &u64| (load / 16 + draw.below(load / 32 + 1)) as u32;
        let counts: Vec<u32> = loads.repeat(16).iter().map(&mut of_rank).collect();
        for (ranks, token_bar, source_bar) in [(2, 1.1, 1.25), (4, 1.1, 1.25), (16, 1.01, 1.25)] {
            let owners = contiguous(32, ranks);
            let replicas = Replicas::choose(&by_expert(&counts, 32), &owners, ranks, 1);
            for group in counts.chunks_exact(ranks as usize * 32) {
                let loads = by_expert(group, 32);
                let mean = loads.iter().sum::<u64>() as f64 / f64::from(ranks);
                for (unit, bar) in [(Unit::Token, token_bar), (Unit::Source, source_bar)] {
                    let shares = Shares::split(group, &replicas, &vec![0; ranks as usize], unit);
                    let most = shares.loads().into_iter().max().expect("a rank") as f64;
                    println!("EP {ranks} {unit:?}: {}", most / mean);
                    assert!(most <= mean * bar + 1.0, "EP {ranks} {unit:?}: {}", most / mean);
                }
            }
        }
    }
}
