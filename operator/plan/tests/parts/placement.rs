use moejob_manifest::Job;
use moejob_plan::observed::Size;
use moejob_plan::placement::{memory, sizes};
use moejob_protocol::Mesh;
use moejob_protocol::config::TrainingConfig;
use moejob_protocol::layout::Layout;

fn job(nodes: &str, model: &str, batch: u32, rest: &str) -> Job {
    let text = format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  \
         nodes: {{ {nodes} }}\n  model: {{ {model} }}\n  data: {{ train: {{ text: {{ paths: \
         [a] }} }}, sequenceLength: 4096 }}\n  training: {{ steps: 10, globalBatchSize: \
         {batch} }}\n{rest}"
    );
    Job::read(text.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"))
}

/// `nodes: dp/ep` for each size that works, and the numbers of nodes that do not.
fn shapes(job: &Job) -> String {
    let (sizes, skipped) = sizes(job);
    let shape = |size: &Size| {
        format!("{}: {}/{}", size.nodes, size.layout.mesh.dp, size.layout.mesh.ep)
    };
    let good: Vec<String> = sizes.iter().map(shape).collect();
    let bad: Vec<String> = skipped.iter().map(|skip| skip.nodes.to_string()).collect();
    format!("{} | {}", good.join(", "), bad.join(" "))
}

#[test]
fn on_processors_experts_are_shared_by_as_many_ranks_as_possible() {
    let found = job("min: 1, max: 10", "preset: tiny", 16, "");
    let expected = "1: 1/1, 2: 2/2, 3: 3/3, 4: 4/4, 5: 5/5, 6: 6/6, 7: 7/7, 8: 8/8, 9: 9/3, \
                    10: 10/5 | ";
    assert_eq!(shapes(&found), expected);
}

#[test]
fn a_given_degree_skips_what_it_does_not_divide() {
    let rest = "  parallelism: { expert: 2 }\n";
    let found = job("min: 1, max: 5", "preset: tiny", 16, rest);
    assert_eq!(shapes(&found), "2: 2/2, 4: 4/2 | 1 3 5");
}

#[test]
fn on_gpus_they_stay_within_an_nvlink_domain_unless_memory_wants_more() {
    let found = job("profile: nd-h200-v5, min: 1, max: 3", "preset: olmoe-1b-7b", 512, "");
    assert_eq!(shapes(&found), "1: 8/8, 2: 16/8, 3: 24/8 | ");
    let model = "preset: qwen3-30b-a3b, numHiddenLayers: 60";
    let found = job("profile: nd-h100-v5, min: 1, max: 4", model, 512, "");
    // What 24 GPUs share has no room on so few.
    assert_eq!(shapes(&found), "4: 32/16 | 1 2 3");
}

#[test]
fn of_one_gpu_the_plan_counts_what_the_engine_reserves() {
    let needed = |rest: &str, training: &str| {
        let found = job(
            "profile: custom, custom: { devices: 1, deviceMemory: 1Ti }",
            &format!("preset: olmoe-1b-7b, numHiddenLayers: 2{rest}"),
            1,
            "",
        );
        let text = format!("{{ {training} }}");
        let compute = serde_json::from_str(&text).expect("fields of Compute");
        let training = TrainingConfig { compute, ..found.training.clone() };
        let found = Job { training, ..found };
        memory(&found, &Layout::contiguous(Mesh::data_parallel(1, 1)), 0)
    };
    let cuda = "\"backend\": \"cuda\"";
    let plain = needed("", cuda);
    let of_host = ["snapshots", "checkpoint", "exchange", "process"];
    assert!(plain.parts.iter().all(|part| !of_host.contains(&part.name)), "{plain:?}");
    assert_eq!(plain.balanced, plain.parts.iter().map(|part| part.bytes).sum::<u64>());
    let small = needed("", &format!("{cuda}, \"momentDtype\": \"bf16\""));
    // Two moments of two bytes less for about 960 M parameters.
    let saved = plain.committed - small.committed;
    assert!((3_000_000_000..5_000_000_000).contains(&saved), "{saved}");
    let whole = needed("", &format!("{cuda}, \"gradientDtype\": \"fp32\""));
    assert!(whole.committed > plain.committed + 1_500_000_000, "{whole:?}");
}

#[test]
fn the_largest_jobs_are_laid_out_at_once() {
    let model = "preset: deepseek-v3";
    let found = job("profile: nd-h200-v5, min: 1, max: 4096", model, 32768, "");
    let (sizes, skipped) = sizes(&found);
    assert_eq!(sizes.len() + skipped.len(), 4096);
    assert!(sizes.iter().all(|size| size.layout.mesh.is_valid()));
}
