//! What a worker takes against what is announced: within 15% or 16 MiB.
//!
//! One test, so that nothing else of this process is measured.

mod common;

use common::{Job, trainers};
use moe_worker::trainer_api::AttemptEnd;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::rank_memory;
use moejob_protocol::mesh::Mesh;

/// A field of /proc/self/status in bytes.
fn status(field: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = text.lines().find(|line| line.starts_with(field)).expect("a field");
    let kib = line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    kib.expect("a number") * 1024
}

fn check(dim: u32, layers: u32, sequence: u32, world: u32, ep: u32) {
    let mut job = Job::new(Layout::contiguous(Mesh::data_parallel(world, ep)));
    let config = &mut job.config;
    let model = &mut config.model;
    model.hidden_size = dim;
    model.num_hidden_layers = layers;
    model.head_dim = 32;
    model.num_attention_heads = dim / 32;
    model.num_key_value_heads = dim / 32;
    model.experts.count = 8;
    model.experts.intermediate_size = dim;
    config.training.global_batch_size = 8;
    config.training.micro_batch_size = 2;
    config.training.sequence_length = sequence;
    config.training.steps = 5;
    config.checkpoint.every_steps = 2;
    let announced: u64 = (0..world)
        .map(|rank| {
            let config = &job.config;
            let (model, layout) = (&config.model, &config.layout);
            let of_rank = rank_memory(model, layout, rank, &config.training, &config.recovery);
            of_rank.balanced
        })
        .sum();
    // Memory that earlier checks freed counts as taken before.
    std::fs::write("/proc/self/clear_refs", "5").expect("a new high-water mark");
    let before = status("VmRSS");
    let (ends, _) = job.run(&mut trainers(world), None);
    assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 5 }), "{ends:?}");
    let taken = status("VmHWM").saturating_sub(before);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let slack = (announced * 15 / 100).max(16 << 20);
    assert!(
        announced.abs_diff(taken) <= slack,
        "D {dim}, {world} ranks: {:.1} MiB taken, {:.1} announced",
        mib(taken),
        mib(announced)
    );
}

#[test]
fn a_worker_takes_what_is_announced() {
    check(64, 2, 128, 1, 1);
    check(128, 4, 256, 1, 1);
    check(128, 4, 256, 2, 2);
}
