use moejob_manifest::Job;
use moejob_manifest::profile::Profiles;
use moejob_plan::lead::judge;
use moejob_plan::fits::changes;
use serde_json::{Value, json};

fn good() -> Value {
    json!({
        "nodes": {"min": 1, "max": 2},
        "model": {"preset": "tiny"},
        "data": {"train": {"text": {"paths": ["corpus/*"]}}, "sequenceLength": 8},
        "training": {"steps": 1, "globalBatchSize": 4},
        "checkpoint": {"location": "checkpoints/a"},
        "volumes": [{"mountPath": "checkpoints", "claim": "c"}],
    })
}

fn blocked(change: impl Fn(&mut Value)) -> (String, String) {
    let mut spec = good();
    change(&mut spec);
    let blocked = judge("job", &spec, Profiles::shipped()).expect_err("blocked");
    (format!("{} {}", blocked.reason, blocked.invalid), blocked.message)
}

#[test]
fn what_keeps_a_job_from_being_planned_has_a_reason() {
    assert!(judge("job", &good(), Profiles::shipped()).is_ok());
    let (reason, message) = blocked(|spec| spec["training"]["globalBatchSize"] = json!(0));
    assert_eq!(reason, "InvalidSpec true");
    assert!(message.contains("globalBatchSize"), "{message}");
    let (reason, message) = blocked(|spec| spec["newer"] = json!(1));
    assert_eq!(reason, "InvalidSpec true");
    assert!(message.contains("newer"), "{message}");
    let (reason, _) = blocked(|spec| spec["volumes"] = json!([]));
    assert_eq!(reason, "NoDurableCheckpoint false");
}

/// On machines of so much memory.
fn too_large(nodes: Value, layers: u32, experts: u32) -> (String, String) {
    blocked(|spec| {
        spec["nodes"] = nodes.clone();
        spec["model"] = json!({
            "hiddenSize": 64, "numHiddenLayers": layers, "numAttentionHeads": 2,
            "experts": { "count": experts, "perToken": 2, "intermediateSize": 64 },
        });
        spec["training"]["globalBatchSize"] = json!(1 << 20);
    })
}

fn nodes(min: u32, max: u32, memory: &str) -> Value {
    let custom = json!({ "devices": 0, "deviceMemory": memory });
    json!({ "profile": "custom", "custom": custom, "min": min, "max": max })
}

#[test]
fn a_job_that_does_not_fit_is_told_what_would_change_it() {
    let (reason, message) = blocked(|spec| {
        spec["nodes"] = json!({ "profile": "nd-h100-v5", "min": 1, "max": 2 });
        spec["model"] = json!({ "preset": "qwen3-30b-a3b", "numHiddenLayers": 54 });
        spec["data"]["sequenceLength"] = json!(4096);
        spec["training"]["globalBatchSize"] = json!(512);
    });
    assert_eq!(reason, "NoSizeFits false");
    assert!(message.starts_with("1 node: a rank needs "), "{message}");
    let ways = "\nwhat would change it: spec.nodes.max: 3 (3 nodes work then); or ";
    assert!(message.contains(ways), "{message}");
}

/// A job's status has room for a few of them.
#[test]
fn of_many_numbers_of_nodes_that_do_not_fit_some_are_told() {
    let (_, message) = too_large(nodes(1, 40, "1Mi"), 2, 8);
    let lines: Vec<&str> = message.lines().collect();
    assert!(lines[7].starts_with("8 nodes: a rank needs "), "{message}");
    assert_eq!(lines[8], "and 32 more numbers of nodes");
    let (_, message) = too_large(nodes(1, 8, "1Mi"), 2, 8);
    assert!(!message.contains("more numbers"), "{message}");
}

/// The leader decides for other jobs, too: whatever a job asks for, it looks for changes as long as
/// a plan for a person is made, and says that there was more to try.
#[test]
#[allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "the test takes the time")]
fn a_search_for_changes_ends_soon() {
    for (nodes, layers, experts) in [
        (nodes(1, 1, "1Mi"), 256, 128),
        (nodes(40, 40, "1Mi"), 512, 128),
        (nodes(700, 700, "1Mi"), 8, 4096),
    ] {
        let began = std::time::Instant::now();
        let (reason, message) = too_large(nodes, layers, experts);
        let took = began.elapsed();
        assert_eq!(reason, "NoSizeFits false", "{message}");
        // Unoptimized, beside other work: without a bound it takes minutes to hours.
        assert!(took.as_secs_f64() < 60.0, "{took:?}");
        eprintln!("{took:?}: {message}");
        let more = "\n`moejob plan` tries more of what would change it";
        assert!(message.ends_with(more), "{message}");
    }
}

/// What takes long to try hides nothing that is found soon.
#[test]
fn each_kind_of_change_is_tried_whatever_the_others_take() {
    let found = |steps: u64| {
        let job = Job::read(
            b"apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: { name: a }\nspec:\n  \
              nodes: { profile: nd-h100-v5, min: 1, max: 2 }\n  \
              model: { preset: qwen3-30b-a3b, numHiddenLayers: 54 }\n  \
              data: { train: { text: { paths: [a] } }, sequenceLength: 4096 }\n  training: \
              { steps: 10, globalBatchSize: 512 }\n",
        );
        let search = changes(&job.expect("valid"), steps);
        let sets = search.changes.iter().flat_map(|change| change.set.clone());
        (sets.collect::<Vec<_>>(), search.cut)
    };
    let (all, cut) = found(u64::MAX);
    assert!(!cut);
    let kinds = ["spec.nodes.max: 3", "spec.training.recompute: selective"];
    assert_eq!(all[..2], kinds);
    let (some, cut) = found(6_000);
    assert!(cut && some.len() < all.len() && !some.is_empty(), "{some:?}");
    assert!(some.iter().all(|one| all.contains(one)), "{some:?}");
    assert_eq!(found(0), (Vec::new(), true));
}

/// Dense parameters that lie with their owners alone, and tokens that travel at once, spare memory.
#[test]
fn what_spares_memory_on_gpus_is_found() {
    let found = |parallelism: &str, memory: u32| {
        let job = Job::read(
            format!(
                "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  \
                 nodes: {{ profile: custom, custom: {{ backend: cuda, devices: 8, \
                 deviceMemory: {memory}Mi }}, min: 1, max: 1 }}\n  \
                 parallelism: {parallelism}\n  \
                 model: {{ hiddenSize: 2048, numHiddenLayers: 24, numAttentionHeads: 16, \
                 experts: {{ count: 8, perToken: 2, intermediateSize: 512 }} }}\n  \
                 data: {{ train: {{ text: {{ paths: [a] }} }}, sequenceLength: 2048 }}\n  \
                 training: {{ steps: 10, globalBatchSize: 64, microBatchSize: 2, \
                 precision: bf16 }}\n"
            )
            .as_bytes(),
        );
        let search = changes(&job.expect("valid"), u64::MAX);
        let sets = search.changes.into_iter().map(|change| change.set.join(", "));
        sets.filter(|set| set.starts_with("spec.parallelism")).collect::<Vec<_>>()
    };
    let all = |parallelism: &str| {
        let memory = (1..=96).map(|step| step * 256);
        memory.flat_map(|memory| found(parallelism, memory)).collect::<Vec<_>>()
    };
    let plain = all("{ expert: 8 }");
    for set in ["spec.parallelism.zero: 2", "spec.parallelism.zero: 3"] {
        assert!(plain.iter().any(|found| found == set), "{set}: {plain:?}");
    }
    let some = all("{ expert: 8, zero: 2 }");
    assert!(some.iter().any(|found| found == "spec.parallelism.zero: 3"), "{some:?}");
    assert!(!some.iter().any(|set| set.contains("zero: 2")), "{some:?}");
}
