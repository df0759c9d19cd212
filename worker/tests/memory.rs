//! What a worker takes against what is announced: within 15% or 16 MiB, or less by the slot that a
//! slow checkpoint takes.
//!
//! Each measurement has a process of its own: what an earlier one freed would count as free memory
//! of the next.

mod common;

use common::{Job, trainers};
use moe_worker::attempt::api::AttemptEnd;
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
            let (training, recovery) = (&config.training, &config.recovery);
            let steps = config.checkpoint.every_steps;
            let of_rank = rank_memory(model, layout, rank, training, recovery, steps, None);
            of_rank.balanced
        })
        .sum();
    let before = status("VmRSS");
    let (ends, _) = job.run(&mut trainers(world), None);
    assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 5 }), "{ends:?}");
    let taken = status("VmHWM").saturating_sub(before);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let slack = (announced * 15 / 100).max(16 << 20);
    // A slot more is taken where a checkpoint is still being written when the next snapshot comes.
    let least = announced * 3 / 4;
    assert!(
        taken <= announced + slack && taken + slack >= least,
        "D {dim}, {world} ranks: {:.1} MiB taken, {:.1} announced",
        mib(taken),
        mib(announced)
    );
}

/// Names the measurement that a process of this test is for.
const CASE: &str = "MOEJOB_MEMORY_CASE";

#[test]
fn a_worker_takes_what_is_announced() {
    match std::env::var(CASE).as_deref() {
        Ok("small") => return check(64, 2, 128, 1, 1),
        Ok("first example") => return check(128, 4, 256, 1, 1),
        Ok("two ranks") => return check(128, 4, 256, 2, 2),
        _ => {}
    }
    for case in ["small", "first example", "two ranks"] {
        let test = std::env::current_exe().expect("this test");
        let output = std::process::Command::new(test)
            .args(["--exact", "a_worker_takes_what_is_announced", "--nocapture"])
            .env(CASE, case)
            .output()
            .expect("a process");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{case}: {said}");
    }
}
