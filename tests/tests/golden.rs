//! The bits of training on processors, as commit 097657f computed them.
//!
//! Every case is a manifest of a few steps. `tests/golden/CASE.txt` holds the bits of every loss,
//! norm and held-out loss, and a hash of all weights and moments of the last checkpoint. A change
//! of the engine keeps them, for any number of workers. `MOEJOB_GOLDEN=write` writes the files
//! anew, which only a change that is meant to change the bits may do.

mod cases;

use cases::{Case, all, parts};
use moejob_tests::{Bench, root};
use std::fmt::Write;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);

#[test]
fn losses_and_weights_are_those_of_097657f() {
    let writes = std::env::var_os("MOEJOB_GOLDEN").is_some_and(|what| what == "write");
    let only = std::env::var("MOEJOB_GOLDEN_CASE").ok();
    let mut wrong = Vec::new();
    for case in all().into_iter().filter(|case| only.as_ref().is_none_or(|o| o == case.name)) {
        let file = root().join("tests/golden").join(format!("{}.txt", case.name));
        if writes {
            std::fs::write(&file, bits(&case, 1)).expect("a writable checkout");
            continue;
        }
        let expected = std::fs::read_to_string(&file).expect("the case's bits");
        for workers in [1, case.workers] {
            let found = bits(&case, workers);
            if found != expected {
                let differs = expected.lines().zip(found.lines()).find(|(a, b)| a != b);
                wrong.push(format!("{} on {workers} workers: {differs:?}", case.name));
            }
        }
    }
    assert!(wrong.is_empty(), "expected and found: {wrong:#?}");
}

/// What a run of the case leaves behind, as text.
fn bits(case: &Case, workers: u32) -> String {
    let bench = Bench::new("golden", &case.manifest);
    case.prepare(&bench);
    let workers = workers.to_string();
    let code = bench.run(&["--workers", &workers], LIMIT);
    assert_eq!(code, Some(0), "{}: {}", case.name, bench.output());
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
