use moejob_manifest::Job;
use moejob_plan::placement;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::zero::Zero;

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
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
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

/// OLMoE's embedding and head have 103 M parameters each, and a layer 16.8 M outside of experts.
#[test]
fn stages_of_zero_spare_what_is_planned() {
    const ENDS: u64 = 50_304 * 2048;
    const LAYER: u64 = 4 * 2048 * 2048;
    const ALL: u64 = 2 * ENDS + 16 * LAYER;
    let layout = Layout::contiguous(Mesh::data_parallel(8, 8));
    let dense = |zero: Zero, name: &str| {
        let mut job = job("profile: gpu, devicesPerNode: 8", ", microBatchSize: 128");
        job.training.compute.zero = zero;
        let memory = placement::memory(&job, &layout, 0);
        let all = memory.parts.iter().filter(|part| part.name.contains(name));
        all.map(|part| part.bytes).sum::<u64>()
    };
    // Of bf16 with one micro-batch a step.
    let spared = 2 * (ALL - ALL / 8 - (ENDS + 2 * LAYER));
    for (name, stages) in [("weights", [0, 0, 1]), ("gradients", [0, 1, 1])] {
        let all = [Zero::Optimizer, Zero::Gradients, Zero::Weights];
        let bytes = all.map(|zero| dense(zero, name));
        assert_eq!(bytes.map(|less| bytes[0] - less), stages.map(|of| of * spared), "{name}");
    }
    // One rank has everything.
    let alone = Layout::contiguous(Mesh::data_parallel(1, 1));
    let parts = |zero: Zero| {
        let mut job = job("profile: gpu", "");
        job.training.compute.zero = zero;
        placement::memory(&job, &alone, 0)
    };
    assert_eq!(parts(Zero::Weights), parts(Zero::Optimizer));
}

/// A cluster's GPUs are counted as those of this machine, to the byte, whatever the model, the mesh
/// and the stage: nobody is told two numbers.
#[test]
fn a_cluster_is_counted_as_this_machine_is() {
    let mut state = 7u64;
    // An LCG of Knuth's; its upper bits are good enough to choose by.
    let mut below = |bound: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % bound
    };
    for _ in 0..200 {
        let (layers, experts, batch) = (1 + below(12), 8 << below(3), 1 << below(3));
        let zero = [Zero::Optimizer, Zero::Gradients, Zero::Weights][below(3) as usize];
        let moments = ["fp32", "bf16"][below(2) as usize];
        let rest = format!(", microBatchSize: {batch}, momentDtype: {moments}");
        let of = |nodes: &str| {
            let mut job = job(nodes, &rest);
            job.model.num_hidden_layers = layers as u32;
            job.model.experts.count = experts as u32;
            job.training.compute.zero = zero;
            job
        };
        let (here, there) = (of("profile: gpu, devicesPerNode: 8"), of("profile: nd-h200-v5"));
        let layout = Layout::contiguous(Mesh::data_parallel(8, 1 << below(4)));
        let [here, there] = [here, there].map(|job| placement::memory(&job, &layout, 0));
        assert_eq!(here, there, "{rest}");
    }
}
