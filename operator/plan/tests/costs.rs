//! What leading costs does not grow with the gang. The bench `leading` has the figures.

#![allow(clippy::disallowed_methods, reason = "it reads what the processor has done")]

mod gangs;
mod said;

use gangs::{BEATS, Gang, measured};

/// Whatever else the machine does makes some readings dearer: the cheapest one counts.
const READINGS: u64 = 8;
const SMALL: u32 = 64;
const LARGE: u32 = 1_024;

/// Microseconds.
fn of_a_heartbeat(nodes: u32) -> f64 {
    // As many heartbeats of each: the kernel counts a thread's time in ticks.
    let gangs = LARGE / nodes;
    let mut all: Vec<Gang> = (0..gangs).map(|number| Gang::new(number, nodes)).collect();
    (0..READINGS).map(|at| measured(&mut all, at * BEATS).0).fold(f64::INFINITY, f64::min)
}

/// A walk over the gang for each of them would make it sixteen times as dear.
#[test]
fn a_heartbeat_of_a_large_gang_costs_as_much_as_of_a_small_one() {
    let (small, large) = (of_a_heartbeat(SMALL), of_a_heartbeat(LARGE));
    assert!(large < small * 6.0, "{small:.2} us in a gang of {SMALL}, {large:.2} us of {LARGE}");
}
