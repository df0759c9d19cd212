//! Loads of a real router, balanced: the fullest rank over the mean, and what a decision takes.
//!
//! ```sh
//! ROUTING=routing_u16 cargo run --release -p moejob-protocol --example balance
//! ```
//! The file has little-endian u16: tokens by [21 iterations, 16 ranks, 24 layers, 4 micro-batches,
//! 32 experts], every 250th iteration of the published logs of SmartMoE's artifact
//! (thu-pacman/SmartMoE-AE, data of figure 13). Every rank has one spare slot.

use moejob_protocol::by_load;
use moejob_protocol::replicas::Replicas;
use moejob_protocol::shares::{Shares, Unit};
use std::time::Instant;

#[path = "../tests/peers/mod.rs"]
mod peers;

const ITERATIONS: usize = 21;
const RANKS: usize = 16;
const LAYERS: usize = 24;
const MICRO_BATCHES: usize = 4;
const EXPERTS: usize = 32;

/// Tokens of `routing` by rank and expert, of one layer in some micro-batches of an iteration.
fn counts(routing: &[u32], iteration: usize, layer: usize, micros: &[usize]) -> Vec<u32> {
    let count = |rank: usize, micro: usize, expert: usize| {
        let row = ((iteration * RANKS + rank) * LAYERS + layer) * MICRO_BATCHES + micro;
        routing[row * EXPERTS + expert]
    };
    let cells = (0..RANKS * EXPERTS).map(|at| (at / EXPERTS, at % EXPERTS));
    let sum = |(rank, expert)| micros.iter().map(|micro| count(rank, *micro, expert)).sum();
    cells.map(sum).collect()
}

fn by_expert(counts: &[u32]) -> Vec<u64> {
    let column = |expert| counts.iter().skip(expert).step_by(EXPERTS);
    (0..EXPERTS).map(|expert| column(expert).map(|count| u64::from(*count)).sum()).collect()
}

/// Sums by column, and the number of rows.
#[derive(Default)]
struct Means(Vec<f64>, f64);

impl Means {
    fn add<const N: usize>(&mut self, row: [f64; N]) {
        self.0.resize(N, 0.0);
        self.0.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
        self.1 += 1.0;
    }

    fn print(&self, name: &str) {
        let cells = self.0.iter().map(|sum| format!("{:>10.4}", sum / self.1));
        println!("  {name:<28}{}", cells.collect::<String>());
    }
}

/// Columns: no replicas, replicas, and owners placed as well; EPLB with these owners and with its
/// own; SmartMoE's owners. All are decided by `history`, and have `loads`.
fn compared(history: &[u64], loads: &[u64], owners: &[u32], ranks: u32) -> [f64; 6] {
    let mean = loads.iter().sum::<u64>() as f64 / f64::from(ranks);
    let over = |replicas: &Replicas| replicas.level(loads) as f64 / mean;
    let placed = peers::smartmoe(history, ranks);
    [
        over(&Replicas::none(owners, ranks, 1)),
        over(&Replicas::choose(history, owners, ranks, 1)),
        over(&Replicas::choose(history, &placed, ranks, 1)),
        peers::eplb(history, loads, ranks, 1, Some(owners)) / mean,
        peers::eplb(history, loads, ranks, 1, None) / mean,
        over(&Replicas::none(&placed, ranks, 1)),
    ]
}

/// The share of tokens that leave their node.
fn crossing(shares: &Shares, nodes: &[u32]) -> f64 {
    let (mut cross, mut all) = (0.0, 0.0);
    for (at, tokens) in shares.tokens.iter().enumerate() {
        let (source, copy) = (at / shares.copies.ranks.len(), at % shares.copies.ranks.len());
        let leaves = nodes[source] != nodes[shares.copies.ranks[copy] as usize];
        all += f64::from(*tokens);
        cross += f64::from(*tokens) * f64::from(u8::from(leaves));
    }
    cross / all
}

/// The outcome of `decision`, and its least microseconds of five times: other programs take the
/// rest.
fn timed<T>(decision: impl Fn() -> T) -> (T, f64) {
    let once = |_| {
        let start = Instant::now();
        std::hint::black_box(decision());
        start.elapsed().as_secs_f64() * 1e6
    };
    let least = (0..5).map(once).fold(f64::MAX, f64::min);
    (decision(), least)
}

fn main() {
    let path = std::env::var("ROUTING").expect("ROUTING is the file's path");
    let bytes = std::fs::read(path).expect("the file");
    let pairs = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    let routing: Vec<u32> = pairs.map(u32::from).collect();
    assert_eq!(routing.len(), ITERATIONS * RANKS * LAYERS * MICRO_BATCHES * EXPERTS);
    let names = ["none", "replicas", "+ owners", "EPLB here", "EPLB", "SmartMoE"];
    println!("{:30}{}", "", names.map(|name| format!("{name:>10}")).concat());
    for ranks in [2_u32, 4, 8, 16] {
        let owners = by_load::owners(&(0..EXPERTS as u32).collect::<Vec<_>>(), ranks);
        let nodes: Vec<u32> = (0..ranks).map(|rank| rank * 2 / ranks).collect();
        let [mut step, mut micro, mut past, mut divided, mut crossed, mut time] =
            std::array::from_fn(|_| Means::default());
        let mut worse = 0;
        for (iteration, layer) in (0..ITERATIONS * LAYERS).map(|at| (at / LAYERS, at % LAYERS)) {
            let counted = |iteration, micros: &[usize]| counts(&routing, iteration, layer, micros);
            let sources = counted(iteration, &[0, 1, 2, 3]);
            let loads = by_expert(&sources);
            let row = compared(&loads, &loads, &owners, ranks);
            worse += u32::from(row[1] > row[3] + 1e-3 || row[2] > row[4] + 1e-3);
            step.add(row);
            for at in 1..MICRO_BATCHES {
                let before = by_expert(&counted(iteration, &[at - 1]));
                let loads = by_expert(&counted(iteration, &[at]));
                micro.add(compared(&before, &loads, &owners, ranks));
            }
            if iteration > 0 {
                let before = by_expert(&counted(iteration - 1, &[0, 1, 2, 3]));
                past.add(compared(&before, &loads, &owners, ranks));
            }
            let (replicas, choice) = timed(|| Replicas::choose(&loads, &owners, ranks, 1));
            for group in sources.chunks_exact(ranks as usize * EXPERTS) {
                let loads = by_expert(group);
                let mean = loads.iter().sum::<u64>() as f64 / f64::from(ranks);
                let of = |unit| timed(|| Shares::split(group, &replicas, &nodes, unit));
                let most = |shares: &Shares| shares.loads().into_iter().max().unwrap_or(0) as f64;
                let ((token, cut), (source, whole)) = (of(Unit::Token), of(Unit::Source));
                let optimum = replicas.level(&loads) as f64;
                divided.add([optimum / mean, most(&token) / mean, most(&source) / mean]);
                let none = Replicas::none(&owners, ranks, 1);
                let none = Shares::split(group, &none, &nodes, Unit::Token);
                crossed.add([&none, &token, &source].map(|shares| crossing(shares, &nodes)));
                time.add([choice, cut, whole]);
            }
        }
        println!("EP {ranks}: worse than EPLB in {worse} of {}", ITERATIONS * LAYERS);
        step.print("by this step's loads");
        micro.print("by the micro-batch before");
        past.print("by 250 iterations before");
        divided.print("optimum, tokens, sources");
        crossed.print("leave: none, tokens, sources");
        time.print("us: choice, tokens, sources");
    }
}
