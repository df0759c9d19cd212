//! What an operator sees late, or never, on a real API server: jobs come to the end that they come
//! to under an operator that sees all at once.
//!
//! Each run is a life of a job as in `crash.rs`, on the same cluster. Either the operator is ended
//! at a write, and lists and watches of its successor come late, each kind by a time of its own, so
//! that no two kinds tell of the same moment. Or one event of a watch is never seen. `MOEJOB_LAGS`
//! says how many runs there are; the seed of each is printed, and `MOEJOB_SEED` begins there.

use crate::bench::{Bench, shown};
use crate::crash::{Ended, line};
use moejob_tests::cutting::{Cut, View, Write};
use moejob_tests::{Random, number, seed};
use std::collections::BTreeMap;
use std::time::Instant;

const RUNS: u64 = 12;
/// What comes late, comes up to so many milliseconds late.
const LATE_MAX: u64 = 1500;
/// Everything is listed anew this often, in seconds: what an event has not told, a list does.
const LISTS: u32 = 2;

/// `events` are those of the undisturbed life, by resource.
pub async fn runs(
    bench: &mut Bench,
    (expected, undisturbed): &(Ended, Vec<Write>),
    events: &BTreeMap<String, usize>,
) {
    bench.lists = LISTS;
    println!("events of watches: {events:?}");
    let first = seed();
    let (start, mut failures, mut spoilt) = (Instant::now(), Vec::new(), 0);
    let runs = number("MOEJOB_LAGS").unwrap_or(RUNS);
    for run in 0..runs {
        let seed = first.wrapping_add(run);
        let (cut, view) = chosen(&mut Random(seed), undisturbed.len(), events);
        let what = format!("MOEJOB_SEED={seed} {cut:?} {view:?}");
        let (ended, writes) = bench.life(&format!("lag{run}"), cut, view).await;
        spoilt += usize::from(bench.proxy.cuts() > 0 || bench.proxy.unseen().is_some());
        line(&what, &ended, &writes);
        if let Some(unseen) = bench.proxy.unseen() {
            println!("  never seen: {unseen}");
        }
        if (&ended.status, &ended.objects, &ended.left)
            != (&expected.status, &expected.objects, &expected.left)
        {
            failures.push(format!("{what}: {ended:#?}\n{}", shown(&writes)));
        }
    }
    println!("{runs} runs, {spoilt} of them spoilt: {:?}", start.elapsed());
    assert!(failures.is_empty(), "expected {expected:#?}\n{}", failures.join("\n"));
    // A life may be shorter than the one whose writes and events were counted.
    assert!(2 * spoilt as u64 >= runs, "{spoilt} of {runs}");
}

/// Where the operator is ended, if at all, and what of the cluster it does not see.
fn chosen(
    random: &mut Random,
    writes: usize,
    events: &BTreeMap<String, usize>,
) -> (Option<Cut>, View) {
    let resources = ["moejobs", "pods", "nodes", "priorityclasses"];
    if random.below(2) == 0 {
        let at = 1 + random.below(writes as u64) as usize;
        let cut = if random.below(2) == 0 { Cut::Before(at) } else { Cut::After(at) };
        let late = resources.map(|of| {
            let late = random.below(3) > 0;
            (of.to_string(), if late { random.below(LATE_MAX) } else { 0 })
        });
        return (Some(cut), View { late: late.to_vec(), after_a_cut: true, unseen: None });
    }
    let all: u64 = events.values().map(|count| *count as u64).sum();
    let mut at = random.below(all.max(1)) as usize;
    let mut unseen = None;
    for (resource, count) in events {
        if at < *count {
            unseen = Some((resource.clone(), at));
            break;
        }
        at -= count;
    }
    (None, View { unseen, ..View::default() })
}
