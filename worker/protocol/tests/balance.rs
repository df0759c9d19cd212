//! When experts move.

mod drawn;

use drawn::Draw;
use moejob_protocol::balance::{Balance, Change, Price, WINDOW_STEPS};
use moejob_protocol::by_load;
use moejob_protocol::replicas::Replicas;

/// Experts of 100 MB, of OLMoE's size, on GPUs of 400 TFLOP/s with 25 GB/s each.
const PRICE: Price = Price {
    token_ps: 90_000,
    replica_ps: 0,
    replica_bytes: 12_600_000,
    owner_bytes: 100_000_000,
    rate: 25_000_000_000,
};

/// Loads of experts by a power of their rank in popularity, which `first` rotates.
fn zipf(experts: usize, power: f64, first: usize) -> Vec<f64> {
    let place = |at: usize| ((at + first) % experts + 1) as f64;
    let weights: Vec<f64> = (0..experts).map(|at| place(at).powf(-power)).collect();
    let all: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / all).collect()
}

/// A step in which each of `tokens` chooses an expert by `weights`.
fn step(draw: &mut Draw, weights: &[f64], tokens: u64) -> Vec<u64> {
    let mut ends = weights.to_vec();
    (1..ends.len()).for_each(|at| ends[at] += ends[at - 1]);
    let mut counts = vec![0; weights.len()];
    for _ in 0..tokens {
        let at = draw.below(1 << 30) as f64 / f64::from(1 << 30);
        counts[ends.partition_point(|end| *end <= at).min(weights.len() - 1)] += 1;
    }
    counts
}

fn balance(experts: usize, ranks: u32, spare: u32, steps: u64, price: Price) -> Balance {
    Balance::new(&[(0..experts as u32).collect()], ranks, spare, steps, price)
}

/// Changes of `steps` steps in which each of `tokens` chooses an expert by `weights`.
fn changes(
    balance: &mut Balance,
    draw: &mut Draw,
    weights: &[f64],
    (steps, tokens): (u64, u64),
) -> Vec<Change> {
    (0..steps).flat_map(|_| balance.advance(&step(draw, weights, tokens))).collect()
}

#[test]
fn stationary_loads_move_nothing_after_the_first_choice() {
    for (seed, (experts, ranks, power, tokens)) in
        (0..).zip([(16, 2, 0.6, 200), (32, 4, 1.0, 800), (32, 8, 0.8, 100), (64, 16, 1.0, 400)])
    {
        let mut draw = Draw::new(seed);
        let mut balance = balance(experts, ranks, 1, 1_000_000, PRICE);
        let weights = zipf(experts, power, 0);
        let first = changes(&mut balance, &mut draw, &weights, (3 * WINDOW_STEPS, tokens));
        let steps: Vec<u64> = first.iter().map(|change| change.step).collect();
        assert_eq!(steps, [2 * WINDOW_STEPS], "{first:?}");
        let later = changes(&mut balance, &mut draw, &weights, (1000, tokens));
        assert_eq!(later, [], "EP {ranks}");
    }
}

#[test]
fn even_loads_move_nothing() {
    for tokens in [64, 512] {
        let mut balance = balance(32, 8, 1, 1_000_000, PRICE);
        let mut draw = Draw::new(tokens);
        let found = changes(&mut balance, &mut draw, &zipf(32, 0.0, 0), (1000, tokens));
        assert_eq!(found, [], "{tokens}");
    }
}

#[test]
fn a_lasting_shift_moves_once_and_a_short_one_never() {
    let lasting = (10 * WINDOW_STEPS, 500);
    for begin in [0, 7, 15] {
        let mut draw = Draw::new(begin);
        let mut balance = balance(32, 8, 1, 1_000_000, PRICE);
        let (before, after) = (zipf(32, 0.9, 0), zipf(32, 0.9, 13));
        assert_eq!(changes(&mut balance, &mut draw, &before, lasting).len(), 1);
        assert_eq!(changes(&mut balance, &mut draw, &before, (begin, 500)), []);
        // Half a window of other loads is over before a second window could be full of them.
        let short = (WINDOW_STEPS / 2, 500);
        assert_eq!(changes(&mut balance, &mut draw, &after, short), [], "{begin}");
        assert_eq!(changes(&mut balance, &mut draw, &before, lasting), [], "{begin}");
        let shift = balance.step;
        let found = changes(&mut balance, &mut draw, &after, lasting);
        assert_eq!(found.len(), 1, "{begin}: {found:?}");
        assert!(found[0].step <= shift + 3 * WINDOW_STEPS);
    }
}

/// Two windows of equal steps with `counts`: the reason of each change.
fn reasons(mut balance: Balance, counts: &[u64]) -> String {
    let changes = (0..2 * WINDOW_STEPS).flat_map(|_| balance.advance(counts));
    changes.map(|change| change.reason).collect::<Vec<_>>().join("\n")
}

#[test]
fn reasons_say_what_a_change_saves_and_costs() {
    // A token of the fullest rank takes a microsecond, a replica moves in a second, an owner in 10.
    let price = Price {
        token_ps: 1_000_000,
        replica_ps: 0,
        replica_bytes: 1000,
        owner_bytes: 10_000,
        rate: 1000,
    };
    let of = |spare, steps, counts: &[u64]| reasons(balance(4, 2, spare, steps, price), counts);
    let hot = [900_000, 100_000, 100_000, 100_000];
    // 0.4 s a step are saved, from step 32 on.
    assert_eq!(
        of(1, 132, &hot),
        "layer 0: fullest rank 1.67 -> 1.00 of the mean; new replicas: 1, new owners: 0; \
         takes 1.000 s, saves 40.000 s in 100 steps"
    );
    // Two steps are left, which do not repay it.
    assert_eq!(of(1, 34, &hot), "");
    // Without a spare slot owners move, and the hot expert stays too much for a rank.
    assert_eq!(
        of(0, 1032, &[600_000, 400_000, 100_000, 100_000]),
        "layer 0: fullest rank 1.67 -> 1.17 of the mean; new replicas: 0, new owners: 2; \
         takes 10.000 s, saves 300.000 s in 1000 steps"
    );
    // Replicas level it as well, so no owner moves.
    assert_eq!(
        of(1, 1032, &[600_000, 400_000, 100_000, 100_000]),
        "layer 0: fullest rank 1.67 -> 1.00 of the mean; new replicas: 1, new owners: 0; \
         takes 1.000 s, saves 400.000 s in 1000 steps"
    );
    // Many small experts: one replica carries too little, so owners move in the end.
    let small = [300_000, 300_000, 300_000, 300_000, 10_000, 10_000, 10_000, 10_000];
    assert_eq!(
        reasons(balance(8, 2, 1, 10_032, price), &small),
        "layer 0: fullest rank 1.94 -> 1.00 of the mean; new replicas: 0, new owners: 4; \
         takes 20.000 s, saves 5800.000 s in 10000 steps"
    );
    // Four percent are not worth a move.
    assert_eq!(of(1, 1_000_000, &[520_000, 0, 240_000, 240_000]), "");
    // A replica that costs a step more than it saves stays where its owner is.
    let dear = Price { replica_ps: 500_000_000_000, ..price };
    assert_eq!(reasons(balance(4, 2, 1, 1_000_000, dear), &hot), "");
}

#[test]
fn a_replica_that_is_not_needed_any_more_leaves_its_slot() {
    let price = Price { replica_ps: 200_000_000_000, ..PRICE };
    let price = Price { token_ps: 1_000_000, ..price };
    let mut balance = balance(4, 2, 1, 1_000_000, price);
    for _ in 0..2 * WINDOW_STEPS {
        balance.advance(&[900_000, 100_000, 100_000, 100_000]);
    }
    assert_eq!(balance.layers[0].replicas.slots, [None, Some(0)]);
    let even = (0..2 * WINDOW_STEPS).flat_map(|_| balance.advance(&[300_000; 4]));
    assert_eq!(even.count(), 1);
    assert_eq!(balance.layers[0].replicas.slots, [None, None]);
}

#[test]
fn a_run_that_goes_on_from_its_record_makes_the_same_changes() {
    let orders = vec![(0..32).collect(), (0..32).rev().collect()];
    let mut whole = Balance::new(&orders, 8, 1, 500, PRICE);
    assert_eq!(whole.layers[1].replicas.owners, by_load::owners(&orders[1], 8));
    let loads = |at: u64| {
        let first = if at < 200 { 0 } else { 11 };
        let mut draw = Draw::new(at);
        let first = step(&mut draw, &zipf(32, 1.0, first), 1000);
        [first, step(&mut draw, &zipf(32, 0.7, 5), 1000)].concat()
    };
    let mut kept = None;
    let mut placement: Vec<Replicas> = whole.layers.iter().map(|at| at.replicas.clone()).collect();
    let mut record = Vec::new();
    for at in 0..400 {
        if at == 203 {
            kept = Some((serde_json::to_string(&whole).expect("its record"), record.len()));
        }
        record.extend(whole.advance(&loads(at)));
    }
    let (text, before) = kept.expect("step 203");
    let mut resumed: Balance = serde_json::from_str(&text).expect("its record");
    assert!(resumed.is_valid());
    let again: Vec<Change> = (203..400).flat_map(|at| resumed.advance(&loads(at))).collect();
    assert_eq!(again, record[before..]);
    assert!(again.iter().any(|change| change.layer == 0), "{record:?}");
    assert_eq!(resumed.digest(), whole.digest());
    // The changes alone give the placement.
    for change in &record {
        placement[change.layer as usize] = change.replicas.clone();
    }
    let now: Vec<Replicas> = whole.layers.iter().map(|at| at.replicas.clone()).collect();
    assert_eq!(placement, now);
    // One token more is another state.
    resumed.layers[1].loads[31] += 1;
    assert_ne!(resumed.digest(), whole.digest());
    resumed.layers[1].loads.pop();
    assert!(!resumed.is_valid());
}
