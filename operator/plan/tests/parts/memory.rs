use moejob_manifest::Job;
use moejob_plan::placement;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;

/// A job of the profile `nodes`, with more of training.
fn job(nodes: &str, training: &str) -> Job {
    let text = format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  \
         nodes: {{ {nodes} }}\n  model: {{ preset: olmoe-1b-7b }}\n  data: {{ train: \
         {{ text: {{ paths: [a] }} }}, tokenizer: b.json, sequenceLength: 8 }}\n  training: \
         {{ steps: 1, globalBatchSize: 1024{training} }}\n"
    );
    Job::read(text.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"))
}

#[test]
fn a_plan_counts_what_recompute_spares() {
    let activations = |training: &str| {
        let job = job("profile: gpu", training);
        let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
        let memory = placement::memory(&job, &layout, 0);
        let part = memory.parts.iter().find(|part| part.name == "activations");
        part.expect("a part").bytes as f64
    };
    let none = activations(", microBatchSize: 1024");
    for (recompute, most) in [("selective", 0.8), ("experts", 0.55), ("full", 0.15)] {
        let part = activations(&format!(", microBatchSize: 1024, recompute: {recompute}"));
        assert!(part <= most * none, "{recompute}: {part} of {none}");
    }
}

/// On processors, where it lies on the host anyway, it is the same job.
#[test]
fn state_on_the_host_is_room_on_the_device() {
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1)).by_buckets();
    let of = |nodes: &str, training: &str| {
        let job = job(nodes, training);
        let host = placement::host_memory(&job, &layout);
        (placement::memory(&job, &layout, 0), host.iter().map(|part| part.bytes).sum::<u64>())
    };
    // Of OLMoE's 6.9 G parameters: fp32 moments, and 16 bits of the masters of matrices.
    for (more, least, most) in [("", 69.0e9, 69.4e9), (", momentDtype: bf16", 41.4e9, 41.7e9)] {
        let (plain, plain_host) = of("profile: gpu", more);
        let (less, host) = of("profile: gpu", &format!("{more}, offload: host"));
        let bytes = less.offloaded_bytes();
        assert!((least..most).contains(&(bytes as f64)), "{bytes}");
        assert_eq!((less.committed + bytes, host), (plain.committed, plain_host + bytes));
    }
    let manifest = |more: &str| job("profile: cpu", more);
    assert_eq!(manifest(", offload: host"), manifest(""));
}
