//! The hash that ties a checkpoint to its job.

use moejob_manifest::Job;

fn hash(edit: impl Fn(String) -> String) -> String {
    let base = include_str!("manifests/base.yaml").to_string();
    let edited = edit(base.clone());
    let job = Job::read(edited.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"));
    job.spec_hash
}

fn replaced(from: &'static str, to: &'static str) -> String {
    hash(move |text| {
        assert!(text.contains(from), "no {from:?} in the manifest");
        text.replace(from, to)
    })
}

#[test]
fn what_only_says_how_to_compute_does_not_count() {
    let base = hash(|text| text);
    for (from, to) in [
        ("steps: 100", "steps: 200"),
        ("microBatchSize: 2", "microBatchSize: 1"),
        ("    steps: 100", "    precision: fp32\n    steps: 100"),
        ("    steps: 100", "    gradientDtype: fp32\n    steps: 100"),
        ("    steps: 100", "    offload: host\n    steps: 100"),
        ("profile: cpu, min: 1, max: 4", "profile: gpu"),
        ("max: 4", "max: 2"),
        ("everySteps: 20", "everySteps: 10"),
        // What is typed and what is left out may be the same.
        ("hiddenSize: 64", "hiddenSize: 64\n    tieWordEmbeddings: false"),
    ] {
        assert_eq!(replaced(from, to), base, "{to}");
    }
}

/// What a GPU's job may choose of its devices, its checkpoints do not depend on.
#[test]
fn what_a_gpu_computes_in_does_not_count() {
    let all = "    precision: bf16\n    momentDtype: bf16\n    gradientDtype: fp32\n    \
               attention: fastest\n    offload: host\n    steps: 100";
    let on_a_gpu = hash(|text| {
        let more = "  parallelism: { wire: fp8, combinePreReduce: false, zero: 3 }\n  checkpoint:";
        let text = text.replace("profile: cpu, min: 1, max: 4", "profile: gpu");
        text.replace("    steps: 100", all).replace("  checkpoint:", more)
    });
    assert_eq!(on_a_gpu, hash(|text| text));
}

/// Nor on the way in which processors exchange.
#[test]
fn how_tokens_travel_does_not_count() {
    let more = "  parallelism: { exchange: hierarchical, overlapDegree: 4 }\n  checkpoint:";
    assert_eq!(hash(|text| text.replace("  checkpoint:", more)), hash(|text| text));
}

/// Nor on the slices in which experts are computed: their checkpoints go on with any other number.
#[test]
fn slices_of_experts_do_not_count() {
    let more = "  parallelism: { expertSlices: 4 }\n  checkpoint:";
    assert_eq!(hash(|text| text.replace("  checkpoint:", more)), hash(|text| text));
}

#[test]
fn what_a_job_is_counts() {
    let base = hash(|text| text);
    let mut all = vec![base];
    for (from, to) in [
        ("hiddenSize: 64", "hiddenSize: 32"),
        ("count: 8", "count: 4"),
        ("globalBatchSize: 8", "globalBatchSize: 16"),
        ("learningRate: 3.0e-3", "learningRate: 2.0e-3"),
        ("sequenceLength: 128", "sequenceLength: 64"),
        ("**/*.rs", "**/*.md"),
        ("warmupSteps: 10", "warmupSteps: 11"),
        ("    steps: 100", "    seed: 7\n    steps: 100"),
    ] {
        let other = replaced(from, to);
        assert!(!all.contains(&other), "{to}");
        all.push(other);
    }
}
