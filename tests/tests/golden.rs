//! The bits of training on processors, pinned.
//!
//! Every case is a manifest of a few steps. `tests/golden/CASE.txt` holds the bits of every loss,
//! norm and held-out loss, and a hash of all weights and moments of the last checkpoint. A change
//! of the engine keeps them, for any number of workers and of engines a worker. Each case runs on
//! three or four of these; `MOEJOB_GOLDEN=all` runs each on all that it has micro-batches for.
//! `MOEJOB_GOLDEN=write` writes the files anew, which only a change that is meant to change the
//! bits may do.

mod cases;

use cases::{Case, NODES, all, parts};
use moejob_tests::{Bench, root};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);

/// How many workers, and engines of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    workers: u32,
    engines: u32,
}

const ONE: Shape = Shape { workers: 1, engines: 1 };

impl Shape {
    fn ranks(self) -> u32 {
        self.workers * self.engines
    }

    /// All that the bits are promised for.
    fn all() -> Vec<Shape> {
        let of = |workers| [1, 2, 4].map(|engines| Shape { workers, engines });
        (1..=4).flat_map(of).collect()
    }

    /// What a manifest says of its nodes: every other case says it as a machine of its own.
    fn nodes(self, case: usize) -> String {
        let Shape { workers, engines } = self;
        match (engines, case % 2) {
            (1, _) => NODES.to_string(),
            (_, 0) => format!("profile: cpu, devicesPerNode: {engines}, min: 1, max: {workers}"),
            _ => format!(
                "profile: custom, custom: {{ devices: {engines}, backend: cpu, \
                 deviceMemory: 2Gi }}, min: 1, max: {workers}"
            ),
        }
    }
}

/// What each case runs on, in the order of the cases: one rank, three or four workers, and one
/// shape more, two where there is work for sixteen ranks. Of those that a case has work for it gets
/// the one that the cases before have had least often; of these the largest.
fn shapes(ranks_max: &[u32]) -> Vec<Vec<Shape>> {
    let mut used: BTreeMap<Shape, u32> = BTreeMap::new();
    let mut of_case = |(at, most): (usize, &u32)| {
        let several = Shape { workers: 3 + at as u32 % 2, engines: 1 };
        let mut chosen = vec![ONE, several];
        *used.entry(several).or_default() += 1;
        for _ in 0..1 + u32::from(*most >= 16) {
            let fits = |shape: &Shape| shape.ranks() <= *most && !chosen.contains(shape);
            let free = Shape::all().into_iter().filter(fits);
            let rarest = free.min_by_key(|shape| {
                (used.get(shape).copied().unwrap_or(0), u32::MAX - shape.ranks())
            });
            chosen.extend(rarest);
            rarest.into_iter().for_each(|shape| *used.entry(shape).or_default() += 1);
        }
        chosen
    };
    ranks_max.iter().enumerate().map(&mut of_case).collect()
}

#[test]
fn every_shape_is_some_cases() {
    let most: Vec<u32> = all().iter().map(|case| case.ranks_max).collect();
    let chosen = shapes(&most);
    for shape in Shape::all() {
        assert!(chosen.iter().flatten().any(|of| *of == shape), "{shape:?}: {chosen:?}");
    }
    let has_work = |(most, of): (&u32, &Vec<Shape>)| of.iter().all(|shape| shape.ranks() <= *most);
    assert!(most.iter().zip(&chosen).all(has_work), "{chosen:?}");
}

#[test]
fn losses_and_weights_are_the_pinned_ones() {
    let what = std::env::var("MOEJOB_GOLDEN").unwrap_or_default();
    let only = std::env::var("MOEJOB_GOLDEN_CASE").ok();
    let cases = all();
    let most: Vec<u32> = cases.iter().map(|case| case.ranks_max).collect();
    let chosen = shapes(&most);
    let mut wrong = Vec::new();
    for (at, case) in cases.iter().enumerate() {
        if only.as_ref().is_some_and(|only| only != case.name) {
            continue;
        }
        let file = root().join("tests/golden").join(format!("{}.txt", case.name));
        let of_case = match what.as_str() {
            "write" => {
                std::fs::write(&file, bits(case, at, ONE)).expect("a writable checkout");
                continue;
            }
            "all" => {
                let fits = |shape: &Shape| shape.ranks() <= case.ranks_max;
                Shape::all().into_iter().filter(fits).collect()
            }
            _ => chosen[at].clone(),
        };
        let expected = std::fs::read_to_string(&file).expect("the case's bits");
        for shape in of_case {
            let found = bits(case, at, shape);
            if found != expected {
                let differs = expected.lines().zip(found.lines()).find(|(a, b)| a != b);
                wrong.push(format!("{} on {shape:?}: {differs:?}", case.name));
            }
        }
    }
    assert!(wrong.is_empty(), "expected and found: {wrong:#?}");
}

/// What a run of the case, the one with this number, leaves behind, as text.
fn bits(case: &Case, at: usize, shape: Shape) -> String {
    assert!(case.manifest.contains(NODES), "{}", case.manifest);
    let bench = Bench::new("golden", &case.manifest.replace(NODES, &shape.nodes(at)));
    case.prepare(&bench);
    // An only engine of a worker is a thread of it, or a process as several are.
    let process = [("MOEJOB_ENGINE", "process")];
    let environment = if shape != ONE && at % 2 == 1 { &process[..] } else { &[] };
    let run = bench.start_with(&["--workers", &shape.workers.to_string()], environment);
    let code = run.wait(LIMIT);
    assert_eq!(code, Some(0), "{} on {shape:?}: {}", case.name, bench.output());
    let ranks = bench.count("EngineStarted");
    let processes = if shape.engines > 1 || !environment.is_empty() { shape.ranks() } else { 0 };
    assert!(ranks >= processes as usize, "{} on {shape:?}: {}", case.name, bench.output());
    let mut text = String::new();
    for line in bench.metrics() {
        let numbers = [line.loss, line.aux_loss, line.z_loss, line.grad_norm, line.learning_rate];
        write!(text, "step {}", line.step).expect("a string");
        for number in numbers.into_iter().chain(line.validation_loss) {
            write!(text, " {:016x}", number.to_bits()).expect("a string");
        }
        text.push('\n');
    }
    let last = bench.checkpoints().pop().expect("a checkpoint at the end");
    let folder = bench.run_folder().join("checkpoints").join(last);
    for (what, hash) in parts(&folder) {
        writeln!(text, "{what} {hash}").expect("a string");
    }
    text
}
