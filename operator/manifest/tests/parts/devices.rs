use moejob_manifest::Job;
use moejob_manifest::devices::{on_cluster, unsupported};

/// A job of the profile `nodes`, with more of the model and of training.
fn job(nodes: &str, model: &str, training: &str) -> Job {
    let text = format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  \
         nodes: {{ {nodes} }}\n  model: {{ preset: olmoe-1b-7b{model} }}\n  data: {{ train: \
         {{ text: {{ paths: [a] }} }}, tokenizer: b.json, sequenceLength: 8 }}\n  training: \
         {{ steps: 1, globalBatchSize: 1024{training} }}\n"
    );
    Job::read(text.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"))
}

fn refused(nodes: &str, model: &str, training: &str) -> Vec<String> {
    let found = unsupported(&job(nodes, model, training));
    found.into_iter().map(|problem| format!("{}: {}", problem.path, problem.found)).collect()
}

#[test]
fn one_gpu_trains_what_its_kernels_have() {
    for training in [
        "",
        ", precision: tf32",
        ", precision: fp32",
        ", precision: fp16",
        ", precision: fp16, momentDtype: bf16",
        ", momentDtype: bf16",
        ", recompute: experts",
        ", offload: host",
    ] {
        assert_eq!(refused("profile: gpu", "", training), [""; 0], "{training}");
    }
    for nodes in [
        "profile: gpu, devicesPerNode: 2",
        "profile: gpu, max: 4",
        "profile: nd-h200-v5, max: 4",
        "profile: ndm-a100-v4",
        "profile: custom, max: 2, custom: { devices: 4, deviceMemory: 80Gi }",
    ] {
        assert_eq!(refused(nodes, "", ""), [""; 0], "{nodes}");
    }
    let mut sixteen = job("profile: gpu, devicesPerNode: 16", "", "");
    for (ep, refused) in [(1, 0), (8, 0), (16, 0), (64, 0), (65, 1)] {
        sixteen.expert_parallel = Some(ep);
        assert_eq!(unsupported(&sixteen).len(), refused, "{ep}");
    }
    let custom = "profile: custom, custom: { devices: 1, deviceMemory: 80Gi }";
    let sigmoid = ", router: { scoring: sigmoid, groups: 2, auxLossScope: sequence }";
    assert_eq!(refused(custom, sigmoid, ", attention: fastest"), [""; 0]);
}

#[test]
fn what_one_gpu_lacks_is_refused_by_name() {
    let gpu = "profile: gpu";
    for (nodes, model, training, expected) in [
        (gpu, ", headDim: 80", "", "spec.model.headDim: `80` on GPUs"),
        (gpu, ", hiddenSize: 2080", "", "spec.model.hiddenSize: `2080` on GPUs"),
        (
            gpu,
            ", experts: { intermediateSize: 1000 }",
            "",
            "spec.model.experts.intermediateSize: `1000` on GPUs",
        ),
        (gpu, ", experts: { count: 640 }", "", "spec.model.experts.count: `640` on GPUs"),
        (gpu, ", experts: { perToken: 17 }", "", "spec.model.experts.perToken: `17` on GPUs"),
        (
            gpu,
            ", router: { groups: 64, topkGroups: 16 }",
            "",
            "spec.model.router.groups: `64` on GPUs",
        ),
        (
            gpu,
            ", router: { auxLossScope: sequence }",
            ", microBatchSize: 1024",
            "spec.training.microBatchSize: `1024` with auxLossScope sequence on GPUs",
        ),
    ] {
        assert_eq!(refused(nodes, model, training), [expected]);
    }
    assert_eq!(refused("profile: cpu", ", headDim: 80", ""), [""; 0]);
}

/// Slices lie on several GPUs, are as wide as kernels take, and may be fewer on one than a token
/// chooses.
#[test]
fn slices_are_what_kernels_take() {
    let found = |nodes: &str, slices: u32, ep: Option<u32>| {
        // OLMoE: 64 experts of 1024, 8 a token.
        let mut job = job(nodes, "", "");
        (job.model.experts.slices, job.expert_parallel) = (slices, ep);
        let found = unsupported(&job).into_iter();
        found.map(|of| format!("{}: {}; {}", of.path, of.found, of.allowed)).collect::<Vec<_>>()
    };
    let gpus = "profile: gpu, devicesPerNode: 64";
    for ep in [None, Some(2), Some(16), Some(64)] {
        assert_eq!(found(gpus, 2, ep), [""; 0], "{ep:?}");
    }
    for slices in [4, 8] {
        assert_eq!(found(gpus, slices, None), [""; 0], "{slices}");
        assert_eq!(found("profile: cpu", slices, None), [""; 0], "{slices}");
    }
    let far = "spec.parallelism.expert: `128` on GPUs; 2 to 64";
    assert_eq!(found(gpus, 2, Some(128)), [far]);
    let narrow = |slices: u32, width: &str| {
        let model = format!(", experts: {{ perToken: 1, intermediateSize: {width} }}");
        let mut job = job(gpus, &model, "");
        job.model.experts.slices = slices;
        unsupported(&job).into_iter().map(|of| of.sentence()).collect::<Vec<_>>()
    };
    assert_eq!(narrow(8, "512"), [""; 0]);
    let refused = narrow(8, "256");
    assert!(refused.len() == 1 && refused[0].contains("at most 4"), "{refused:?}");
}

#[test]
fn a_cluster_has_no_machine_of_its_own_to_show() {
    assert_eq!(on_cluster(&job("profile: gpu", "", "")).len(), 1);
    assert_eq!(on_cluster(&job("profile: nd-h200-v5", "", "")), []);
}
