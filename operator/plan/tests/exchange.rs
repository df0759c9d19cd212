//! The estimate of exchanges: held to readings on two GPUs, and its page to what it computes.

mod estimate;

use estimate::Machines;
use std::fmt::Write;

const MIB: f64 = 1048576.0;

/// All-to-all of NCCL in a graph between two H200: bytes of a rank, half of which travel, and
/// microseconds (`docs/benchmarks/links_h200x2_2026-11-22.md`).
const READ: [(f64, f64); 8] = [
    (512.0, 5.9),
    (65536.0, 7.6),
    (MIB, 12.3),
    (4.0 * MIB, 19.3),
    (16.0 * MIB, 50.3),
    (32.0 * MIB, 78.8),
    (64.0 * MIB, 136.0),
    (256.0 * MIB, 476.0),
];

#[test]
fn two_gpus_are_estimated_within_fifteen_percent() {
    let two = Machines { gpus_per_node: 2, ..Machines::nd_h200_v5() };
    for (bytes, read) in READ {
        for estimate in [two.flat(2, bytes), two.hierarchical(2, bytes)] {
            let ratio = estimate * 1e6 / read;
            assert!((0.85..=1.15).contains(&ratio), "{bytes} bytes: {ratio:.2} of {read} us");
        }
    }
}

/// Few large messages gain nothing by a second copy; many small ones do.
#[test]
fn the_hierarchy_pays_where_messages_are_small_and_many() {
    for machines in [Machines::nd_h200_v5(), Machines::ndm_a100_v4()] {
        let gain = |gpus, mib: f64| {
            machines.flat(gpus, mib * MIB) / machines.hierarchical(gpus, mib * MIB)
        };
        assert!(gain(16, 256.0) < 1.0);
        assert!(gain(2048, 1.0) > 3.0);
        let gains: Vec<f64> = [16, 64, 512, 2048].iter().map(|gpus| gain(*gpus, 16.0)).collect();
        assert!(gains.is_sorted(), "{gains:?}");
        // A node alone has nothing to send to others.
        assert_eq!(machines.flat(8, MIB), machines.hierarchical(8, MIB));
    }
}

#[test]
fn the_page_says_what_is_computed() {
    let mut table = String::new();
    for machines in [Machines::nd_h200_v5(), Machines::ndm_a100_v4()] {
        for gpus in [16, 64, 512, 2048] {
            write!(table, "| {} | {gpus} |", machines.name).expect("text");
            for mib in [1.0, 16.0, 64.0, 256.0] {
                let flat = machines.flat(gpus, mib * MIB) * 1e3;
                let two = machines.hierarchical(gpus, mib * MIB) * 1e3;
                write!(table, " {flat:.2} / {two:.2} ({:.2}x) |", flat / two).expect("text");
            }
            table.push('\n');
        }
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/exchange.md");
    let page = std::fs::read_to_string(path).expect("docs/exchange.md");
    assert!(page.contains(&table), "docs/exchange.md is to hold\n{table}");
}
