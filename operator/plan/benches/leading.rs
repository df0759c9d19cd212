//! What leading costs where there are thousands of pods: what a heartbeat takes, and what a turn
//! takes, in time of this thread's processor. Run it on a machine that does nothing else: who
//! shares the caches makes each access dearer.
//!
//! ```sh
//! cargo bench -p moejob-plan --bench leading
//! ```

#![allow(clippy::disallowed_methods, reason = "the bench reads what the processor has done")]

#[path = "../tests/gangs/mod.rs"]
mod gangs;
#[path = "../tests/said/mod.rs"]
mod said;

use gangs::{BEATS, Gang, measured};

/// Of a core; an unoptimized build needs some 7%.
const SHARE_MAX: f64 = 0.2;

fn main() {
    for (gangs, nodes) in [(10, 512), (1, 4096)] {
        let mut all: Vec<Gang> = (0..gangs).map(|number| Gang::new(number, nodes)).collect();
        let (beat, turn, share) = measured(&mut all, 0);
        println!(
            "{gangs} x {nodes}: {beat:.2} us a heartbeat, {turn:.2} ms a turn, {:.1}% of a core",
            share * 100.0
        );
        assert!(share < SHARE_MAX, "{gangs} x {nodes}: {share}");
    }
    // As many heartbeats of each: the kernel counts a thread's time in ticks.
    let [small, large] = [(16, 256), (1, 4096)].map(|(gangs, nodes)| {
        let mut all: Vec<Gang> = (0..gangs).map(|number| Gang::new(number, nodes)).collect();
        measured(&mut all, 0);
        measured(&mut all, BEATS).0
    });
    println!("a heartbeat: {small:.2} us in a gang of 256, {large:.2} us in one of 4,096");
    // A walk over the gang for each heartbeat would make it sixteen times as dear.
    assert!(large < small * 4.0, "{small:.2} us, {large:.2} us");
}
