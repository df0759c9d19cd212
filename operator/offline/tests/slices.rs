//! Experts in slices, as `moejob plan` counts them: up to as many ranks as there are slices, their
//! rows, memory and what travels.

use moejob_manifest::Job;
use moejob_manifest::keys::Keys;
use moejob_offline::{outlook, text};
use moejob_plan::observed::Size;
use moejob_plan::placement::{memory, sizes};
use moejob_plan::traffic;

/// Of `max` machines of one rank: the base's manifest with other nodes and more lines.
fn job(nodes: &str, more: &str) -> Job {
    let base = include_str!("../../manifest/tests/manifests/base.yaml");
    let base = base.replace("profile: cpu, min: 1, max: 4", nodes);
    let base = base.replace("globalBatchSize: 8", "globalBatchSize: 64");
    let base = base.replace("  checkpoint:", &format!("{more}  checkpoint:"));
    Job::read(base.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"))
}

const TWO: &str = "  parallelism: { expertSlices: 2 }\n";

fn degrees(job: &Job) -> Vec<(u32, u32)> {
    let (sizes, _) = sizes(job);
    sizes.iter().map(|size: &Size| (size.nodes, size.layout.mesh.ep)).collect()
}

#[test]
fn more_ranks_than_experts_share_them() {
    let nodes = "profile: cpu, min: 16, max: 16";
    assert_eq!(degrees(&job(nodes, "")), [(16, 8)]);
    assert_eq!(degrees(&job(nodes, TWO)), [(16, 16)]);
    let asked = "  parallelism: { expert: 16, expertSlices: 2 }\n";
    assert_eq!(degrees(&job(nodes, asked)), [(16, 16)]);
    let job = job(nodes, TWO);
    let told = outlook(&job, None, &Keys::default(), &[]);
    assert_eq!(told.sizes[0].experts_per_rank, [1, 1]);
    assert!(text(&told).contains("experts by their slices: 2 of expert e"), "{}", text(&told));
    let json = serde_json::to_value(&told).expect("JSON");
    assert_eq!(json["model"]["slices"], 2);
}

/// GPUs hold fewer slices than a token chooses, but share them out.
#[test]
fn gpus_share_slices_out() {
    let gpus = |count: u32, more: &str| {
        let nodes = format!("profile: gpu, devicesPerNode: {count}");
        let wide = |job: Job| {
            let mut job = job;
            job.model.experts.intermediate_size = 256;
            job.model.head_dim = 64;
            job
        };
        wide(job(&nodes, more))
    };
    // At least one expert on each, and one slice.
    assert_eq!(degrees(&gpus(16, "")), [(1, 8)]);
    assert_eq!(degrees(&gpus(16, TWO)), [(1, 16)]);
    let mut one = gpus(2, TWO);
    one.profile.ranks = 1;
    let (sizes, skipped) = sizes(&one);
    assert!(sizes.is_empty());
    let why = skipped[0].sentence();
    assert!(why.contains("expertSlices: 2 shares experts out over several GPUs"), "{why}");
}

/// Two ranks more for each token, and a row from each slice.
#[test]
fn what_travels_and_lies_there_is_counted() {
    let of = |more: &str| {
        let job = job("profile: cpu, min: 8, max: 8", more);
        let layout = sizes(&job).0[0].layout.clone();
        assert_eq!(layout.mesh.ep, 8);
        let memory = memory(&job, &layout, 0);
        let part = |name: &str| {
            let found = memory.parts.iter().find(|part| part.name == name);
            found.map_or(0, |part| part.bytes)
        };
        (part("weights"), part("exchange"))
    };
    let (whole, two) = (of(""), of(TWO));
    // Each holds as many numbers, of tensors that begin at a block.
    assert!((whole.0..whole.0 * 6 / 5).contains(&two.0), "{two:?} {whole:?}");
    assert!(two.1 >= whole.1, "{two:?} {whole:?}");
    // Between GPUs ids and weights of twice as many choices travel.
    let gpus = |more: &str| {
        let mut job = job("profile: gpu, devicesPerNode: 4", more);
        (job.model.experts.intermediate_size, job.model.head_dim) = (256, 64);
        let layout = sizes(&job).0[0].layout.clone();
        assert_eq!(layout.mesh.ep, 4);
        traffic::expected(&job, &layout)
    };
    let [whole, two] = ["", TWO].map(|more| gpus(more)[0].bytes);
    assert!(two > whole, "{two} {whole}");
}
