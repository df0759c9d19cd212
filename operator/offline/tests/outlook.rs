//! `moejob plan`: what it says of the examples, of losses and of clusters that do not suffice.

#![allow(clippy::disallowed_methods, reason = "the test reads the examples")]

use moejob_fabric::topology::NodeInfo;
use moejob_manifest::Job;
use moejob_manifest::keys::Keys;
use moejob_manifest::profile::Profiles;
use moejob_manifest::words::count;
use moejob_offline::{Outlook, step_time, text};
use moejob_offline::nodes::{nodes_from, select};
use moejob_plan::allocate::Needs;
use moejob_protocol::zero::Zero;
use std::path::Path;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn job(edit: impl Fn(String) -> String) -> Job {
    let base = include_str!("../../manifest/tests/manifests/base.yaml").to_string();
    Job::read(edit(base).as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"))
}

fn outlook(job: &Job, nodes: Option<&[NodeInfo]>, lose: &[String]) -> Outlook {
    moejob_offline::outlook(job, nodes, &Keys::default(), lose)
}

fn nodes(names: &str) -> Vec<NodeInfo> {
    let node = |name: &str| NodeInfo {
        name: name.trim_end_matches('!').to_string(),
        usable: !name.ends_with('!'),
        ..NodeInfo::default()
    };
    names.split_whitespace().map(node).collect()
}

/// `nodes dp/ep from SOURCE, STEPS again` for each what-if.
fn what_ifs(outlook: &Outlook) -> Vec<String> {
    let of = |what: &moejob_offline::WhatIf| {
        let lost = what.lose.join("+");
        let (Some(nodes), Some(dp), Some(ep)) = (what.nodes, what.dp, what.ep) else {
            return format!("{lost}: rests");
        };
        match (&what.resume, what.steps_lost) {
            (Some(from), Some(steps)) => {
                format!("{lost}: {nodes} nodes {dp}/{ep} from {from}, {steps} again")
            }
            _ => format!("{lost}: {nodes} nodes {dp}/{ep} go on"),
        }
    };
    outlook.what_ifs.iter().map(of).collect()
}

#[test]
fn every_example_is_valid_and_has_a_plan() {
    let mut seen = 0;
    for entry in std::fs::read_dir(root().join("examples")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        let job = Job::read(&std::fs::read(&path).unwrap())
            .unwrap_or_else(|problems| panic!("{}: {problems:?}", path.display()));
        assert_eq!(job.warnings, [], "{}", path.display());
        let outlook = outlook(&job, None, &[]);
        assert!(outlook.gang.is_some(), "{}", path.display());
        assert!(text(&outlook).lines().all(|line| line.trim_end() == line));
        seen += 1;
    }
    assert!(seen >= 2);
}

fn of_preset(preset: &str) -> Job {
    job(|base| {
        let start = base.find("    hiddenSize").unwrap();
        let end = base.find("  data:").unwrap();
        format!("{}    preset: {preset}\n{}", &base[..start], &base[end..])
    })
}

/// Counts published by the models' authors: all parameters (of the files on Hugging Face, where
/// there are any), and those of a token. DeepSeek, Moonshot and OpenAI leave the embedding table
/// out of the latter, Moonshot the head too.
#[test]
fn presets_have_the_size_of_their_models() {
    let table = |vocabulary: u64, width: u64| vocabulary * width;
    for (preset, all, active, without) in [
        ("olmoe-1b-7b", 6_919_161_856, 1_282_000_000, 0),
        ("mixtral-8x7b", 46_702_792_704, 12_880_000_000, 0),
        ("qwen3-30b-a3b", 30_532_122_624, 3_350_000_000, 0),
        ("deepseek-v2-lite", 15_706_484_224, 2_450_000_000, table(102_400, 2048)),
        ("moonlight-16b", 15_960_111_936, 2_240_000_000, 2 * table(163_840, 2048)),
        ("gpt-oss-20b", 20_914_757_184, 3_610_000_000, table(201_088, 2880)),
        ("gpt-moe-1.1t", 1_104_000_000_000, 0, 0),
    ] {
        let job = of_preset(preset);
        let near = |found: u64, expected: u64| {
            (found as f64 / expected as f64 - 1.0).abs() < 0.01
        };
        let more = latent_attention(preset, job.model.num_hidden_layers.into());
        let count = |ours: u64| ours.checked_add_signed(more).unwrap();
        let found = count(job.model.numel());
        assert!(near(found, all), "{preset} has {found} parameters");
        let of_token = count(job.model.active_numel()) - without;
        let published = active == 0 || near(of_token, active);
        assert!(published, "{preset} uses {of_token} parameters for a token");
    }
}

/// 7.9 GFLOP for OLMoE at 4,096 tokens and 23 for Qwen3-30B-A3B are what others count, too.
#[test]
fn operations_of_a_token_follow_the_convention() {
    for (preset, sequence, billions) in
        [("olmoe-1b-7b", 4096, 7.88), ("qwen3-30b-a3b", 4096, 23.0), ("mixtral-8x7b", 4096, 79.7)]
    {
        let model = of_preset(preset).model;
        let found = model.flops_per_token(sequence) as f64 / 1e9;
        assert!((found / billions - 1.0).abs() < 0.01, "{preset}: {found}");
    }
}

/// Parameters of the latent attention of the originals (2405.04434, section 2.1: keys and values
/// from 512 numbers a token, 64 dims of a head turned and shared) beyond the ordinary one that
/// stands in its place.
fn latent_attention(preset: &str, layers: i64) -> i64 {
    let (width, heads, head, turned, latent) = (2048, 16, 128, 64, 512);
    if !matches!(preset, "deepseek-v2-lite" | "moonlight-16b") {
        return 0;
    }
    let queries = width * heads * (head + turned);
    let keys_and_values = width * (latent + turned) + latent + latent * heads * 2 * head;
    let ordinary = 3 * width * heads * head;
    layers * (queries + keys_and_values - ordinary)
}

#[test]
fn the_loss_of_one_node_costs_less_than_a_snapshot_interval() {
    let found = outlook(&job(|base| base), None, &[]);
    let expected = [
        "node-0: 3 nodes 3/3 from memory, 9 again",
        "node-1: 3 nodes 3/3 from memory, 9 again",
        "node-2: 3 nodes 3/3 from memory, 9 again",
        "node-3: 3 nodes 3/3 from memory, 9 again",
    ];
    assert_eq!(what_ifs(&found), expected);
}

#[test]
fn the_loss_of_a_pair_of_buddies_costs_a_checkpoint_interval() {
    let lose = |names: &str| -> Vec<String> {
        let lost: Vec<String> = names.split('+').map(str::to_string).collect();
        what_ifs(&outlook(&job(|base| base), None, &lost))
    };
    assert_eq!(lose("node-0+node-2"), ["node-0+node-2: 2 nodes 2/2 from memory, 9 again"]);
    assert_eq!(lose("node-1+node-2"), ["node-1+node-2: 2 nodes 2/2 from checkpoint, 19 again"]);
    assert_eq!(lose("node-0+node-1+node-2+node-3"), ["node-0+node-1+node-2+node-3: rests"]);
}

#[test]
fn a_spare_takes_the_place_of_a_lost_node() {
    let spare = job(|base| base.replace("max: 4", "max: 3, spares: 1"));
    let found = outlook(&spare, None, &["node-1".to_string()]);
    assert_eq!(found.gang.as_ref().unwrap().spares, ["node-3"]);
    assert_eq!(what_ifs(&found), ["node-1: 3 nodes 3/3 from memory, 9 again"]);
    let idle = outlook(&spare, None, &["node-3".to_string()]);
    assert_eq!(what_ifs(&idle), ["node-3: 3 nodes 3/3 go on"]);
}

#[test]
fn a_job_without_enough_nodes_waits_and_says_so() {
    let two = job(|base| base.replace("min: 1", "min: 3"));
    let found = outlook(&two, Some(&nodes("a b c! d!")), &[]);
    assert!(found.gang.is_none());
    assert_eq!(found.why.last().unwrap(), "wait: 2 workers connected, 3 needed");
    let told = text(&found);
    assert!(told.contains("nothing starts: wait: 2 workers connected, 3 needed"), "{told}");
    let least = "what would change it:\n    usable nodes: 3, which is the fewest that work";
    assert!(told.contains(least), "{told}");
    // With three nodes it runs, and the loss of one is one too many.
    let found = outlook(&two, Some(&nodes("a b c d!")), &["b".to_string()]);
    assert_eq!(what_ifs(&found), ["b: rests"]);
}

/// Qwen3-30B-A3B on machines of `nodes`, with `more` in its training.
fn large(nodes: &str, more: &str) -> Job {
    let text = format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  nodes: \
         {{ {nodes} }}\n  model: {{ preset: qwen3-30b-a3b }}\n  data: {{ train: {{ text: {{ paths: \
         [a] }} }}, sequenceLength: 4096 }}\n  training: {{ steps: 10, globalBatchSize: 512{more} \
         }}\n"
    );
    Job::read(text.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"))
}

#[test]
fn a_job_that_no_number_of_nodes_fits_says_what_would_make_it_fit() {
    let sentences = |job: &Job| -> Vec<String> {
        let found = outlook(job, None, &[]);
        assert!(found.sizes.is_empty() && found.gang.is_none());
        let told = text(&found);
        let changes: Vec<String> = found.changes.iter().map(|of| of.sentence()).collect();
        changes.iter().for_each(|change| assert!(told.contains(change), "{change} in {told}"));
        changes
    };
    let mut few = large("profile: nd-h100-v5, min: 1, max: 2", "");
    few.model.num_hidden_layers = 54;
    assert_eq!(
        sentences(&few),
        [
            "spec.nodes.max: 3 (3 nodes work then)",
            "spec.training.recompute: selective (2 nodes work then)",
            "spec.parallelism.zero: 2 (2 nodes work then)",
            "spec.training.offload: host (1 node works then)",
            "spec.nodes.profile: nd-h200-v5 (1 node works then)",
        ]
    );
    // Activations are most of it.
    let wide = large("profile: nd-h200-v5, min: 1, max: 1", ", microBatchSize: 16");
    let found = sentences(&wide);
    let less = ["microBatchSize: 2", "recompute: full"];
    assert_eq!(found, less.map(|of| format!("spec.training.{of} (1 node works then)")));
    let small = "profile: custom, min: 1, max: 1, custom: { devices: 8, deviceMemory: 8Gi }";
    assert!(sentences(&large(small, "")).iter().all(|change| !change.contains("recompute: none")));
    let tiny = "profile: custom, min: 1, max: 1, custom: { devices: 1, deviceMemory: 1Gi }";
    let told = text(&outlook(&large(tiny, ""), None, &[]));
    assert!(told.contains("what would change it"), "{told}");
}

/// What is suggested works when it is done.
#[test]
fn a_job_that_is_changed_as_suggested_fits() {
    let mut seen = 0;
    for nodes in [
        "profile: nd-h100-v5, min: 1, max: 3",
        "profile: ndm-a100-v4, min: 1, max: 2",
        "profile: nd-a100-v4, min: 1, max: 2",
        "profile: nd-h200-v5, min: 1, max: 1",
    ] {
        for size in [1, 2, 4, 8, 16] {
            let job = large(nodes, &format!(", microBatchSize: {size}"));
            let found = outlook(&job, None, &[]);
            for change in &found.changes {
                let mut changed = job.clone();
                for set in &change.set {
                    let (field, value) = set.split_once(": ").unwrap();
                    let number = || value.parse::<u32>().unwrap();
                    match field {
                        "spec.nodes.max" => changed.nodes.max = number(),
                        "spec.nodes.min" => changed.nodes.min = number(),
                        "spec.training.microBatchSize" => {
                            changed.training.micro_batch_size = number();
                        }
                        "spec.training.recompute" => {
                            let value = serde_json::json!(value);
                            changed.training.recompute = serde_json::from_value(value).unwrap();
                        }
                        "spec.training.offload" => {
                            let value = serde_json::json!(value);
                            let compute = &mut changed.training.compute;
                            compute.offload = serde_json::from_value(value).unwrap();
                        }
                        "spec.parallelism.zero" => {
                            changed.training.compute.zero = Zero::of(number()).unwrap();
                        }
                        "spec.nodes.profile" => {
                            changed.profile = Profiles::shipped().get(value).unwrap().clone();
                        }
                        other => panic!("{other}"),
                    }
                }
                let sizes = moejob_plan::placement::sizes(&changed).0;
                assert!(sizes.iter().any(|size| size.nodes == change.nodes), "{change:?}");
                seen += 1;
            }
        }
    }
    assert!(seen > 10, "only {seen} changes were tried");
}

#[test]
fn sizes_are_in_the_units_in_which_they_are_published() {
    let numbers = [950, 1_199_000, 1_282_000_000, 6_919_000_000, 30_532_000_000];
    assert_eq!(numbers.map(count), ["950", "1.20 M", "1.28 B", "6.92 B", "30.5 B"]);
    let told = text(&outlook(&job(|base| base), None, &[]));
    for word in ["  memory  even:", "kept: routedHeadroom times", "worst: every token"] {
        assert!(told.contains(word), "{told}");
    }
}

#[test]
fn given_nodes_are_used_in_the_order_of_their_names() {
    let found = outlook(&job(|base| base), Some(&nodes("n-10 n-9 n-2 n-1 n-11")), &[]);
    let gang = found.gang.unwrap();
    let used: Vec<&str> = gang.ranks.iter().map(|rank| rank.node.as_str()).collect();
    assert_eq!(used, ["n-1", "n-2", "n-9", "n-10"]);
    let experts: Vec<[u32; 2]> = gang.ranks.iter().map(|rank| rank.experts).collect();
    assert_eq!(experts, [[0, 1], [2, 3], [4, 5], [6, 7]]);
}

#[test]
fn the_json_has_what_the_text_has() {
    let found = outlook(&job(|base| base), None, &[]);
    let json = serde_json::to_value(&found).unwrap();
    assert_eq!(json["sizes"].as_array().unwrap().len(), 4);
    assert_eq!(json["sizes"][2]["expertsPerRank"], serde_json::json!([2, 3]));
    assert!(json["sizes"][0]["memory"]["balanced"].as_u64().unwrap() > 1 << 20);
    assert_eq!(json["whatIfs"][0]["stepsLost"], 9);
    assert_eq!(json["gang"]["ranks"][3]["buddy"], 0);
}

/// One and two GPUs of an ND H200 v5, and what a step took (`docs/benchmarks/two-gpus.md`, "What
/// estimates are held to").
#[test]
fn steps_of_two_gpus_are_estimated_within_a_fifth() {
    let of = |model: &str, gpus: u32, ep: u32, micro_batch: u32, rounds: u32| {
        let text = format!(
            "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  \
             nodes: {{ profile: nd-h200-v5 }}\n  model: {{ {model} }}\n  data: {{ train: {{ text: \
             {{ paths: [a] }} }}, sequenceLength: 4096 }}\n  training: {{ steps: 10, \
             globalBatchSize: {}, microBatchSize: {micro_batch} }}\n",
            8 * micro_batch * rounds
        );
        let mut job = Job::read(text.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"));
        (job.profile.ranks, job.profile.devices) = (gpus, gpus);
        job.training.global_batch_size = gpus * micro_batch * rounds;
        let layout = moejob_plan::placement::layout(gpus, ep);
        step_time(&job, &layout).expect("the profile says how fast it is").seconds * 1e3
    };
    let olmoe = "preset: olmoe-1b-7b";
    let qwen = "preset: qwen3-30b-a3b, numHiddenLayers: 16";
    for (estimate, measured) in [
        (of(olmoe, 1, 1, 4, 1), 280.2),
        (of(olmoe, 2, 1, 4, 1), 297.8),
        (of(olmoe, 2, 2, 4, 1), 289.7),
        (of(olmoe, 2, 1, 4, 4), 1067.2),
        (of(olmoe, 2, 2, 4, 4), 1108.2),
        (of(qwen, 2, 2, 2, 1), 198.7),
    ] {
        let ratio = estimate / measured;
        assert!((0.8..=1.2).contains(&ratio), "{estimate:.0} ms, measured {measured}");
    }
}

#[test]
fn an_estimate_says_what_it_is_of() {
    let job = large("profile: nd-h200-v5, min: 2, max: 2", "");
    let found = outlook(&job, None, &[]);
    let told = text(&found);
    for words in [
        "expected, an estimate: ",
        " tokens/s\n  ",
        " products, ",
        "assumes products at 46% of 989 TFLOP/s, as profile nd-h200-v5 says",
        "assumes links by a model of latencies and rates (docs/exchange.md); no contention",
        "assumes each token travels to every GPU of its expert group, as by NCCL",
        "\n\na rank sends in a step\n  dispatch ",
        " ms exposed\n",
    ] {
        assert!(told.contains(words), "{words} in {told}");
    }
    let expected = found.expected.expect("an estimate");
    let parts = expected.products_seconds + expected.tokens_seconds + expected.exposed_seconds;
    assert!((parts - expected.seconds).abs() < 1e-9);
    // More nodes share the same tokens; what is computed again takes longer.
    let time = |nodes: &str, more: &str| {
        outlook(&large(nodes, more), None, &[]).expected.expect("an estimate").seconds
    };
    let two = "profile: nd-h200-v5, min: 2, max: 2";
    assert!(time("profile: nd-h200-v5, min: 4, max: 4", "") < time(two, ""));
    assert!(time(two, ", recompute: full") > 1.2 * time(two, ""));
    // Elements of four bytes travel as such, and lie in memory as such, however products round. In
    // fp32 sums of gradients have eight, and a row of each expert comes back, as in tf32.
    let of = |precision: &str| {
        let more = format!(", precision: {precision}, recompute: full");
        let found = outlook(&large(two, &more), None, &[]);
        let expected = found.expected.expect("an estimate");
        let memory = found.sizes[0].memory.as_ref().expect("counted").balanced;
        (expected.tokens_seconds, expected.gradients_seconds, memory)
    };
    let [fp32, tf32, bf16] = ["fp32", "tf32", "bf16"].map(of);
    assert_eq!(fp32.0, tf32.0);
    assert!(fp32.1 > 1.4 * tf32.1 && fp32.2 > tf32.2, "{fp32:?} {tf32:?}");
    // The masters of fp16 are whole, beside the weights.
    let fp16 = of("fp16");
    assert_eq!((fp16.0, fp16.1), (bf16.0, bf16.1));
    assert!(fp16.2 > bf16.2, "{fp16:?} {bf16:?}");
    assert!(tf32.0 > 1.5 * bf16.0 && tf32.2 > bf16.2);
    // Nothing is known of processors.
    let cpu = outlook(&job_of_processors(), None, &[]);
    assert!(cpu.expected.is_none() && !text(&cpu).contains("expected"));
}

/// Where optimizer state lies on the host: its parts there, and what each step pays for it.
#[test]
fn a_plan_shows_what_offloading_costs() {
    let nodes = "profile: nd-h200-v5, min: 2, max: 2";
    let [plain, offloaded] =
        ["", ", offload: host"].map(|more| outlook(&large(nodes, more), None, &[]));
    let price = offloaded.sizes[0].offload.clone().expect("a price");
    assert_eq!(plain.sizes[0].offload, None);
    let seconds = price.seconds.expect("the profile knows its bus");
    assert!((seconds - price.bytes as f64 / 48e9).abs() < 1e-9, "{price:?}");
    let time = |of: &Outlook| of.expected.clone().expect("an estimate").seconds;
    assert!((time(&offloaded) - time(&plain) - seconds).abs() < 1e-9);
    let told = text(&offloaded);
    for words in [
        "\n  offloaded masters ",
        "\n  offloaded moments ",
        "\n  each step's update reads ",
        "of it over the bus, and writes as much:\n  about ",
        " at 48 GB/s each way, which the profile expects at least",
        "optimizer state to the host and back",
        "assumes optimizer state at 48 GB/s each way between GPU and host",
    ] {
        assert!(told.contains(words), "{words} in {told}");
    }
    assert!(!text(&plain).contains("offloaded"));
    // A machine of which nobody knows how fast its bus is.
    let custom = "profile: custom, min: 1, max: 1, custom: { devices: 8, deviceMemory: 141Gi }";
    let told = text(&outlook(&large(custom, ", offload: host"), None, &[]));
    assert!(told.contains("the profile does not say how fast that is"), "{told}");
}

fn job_of_processors() -> Job {
    job(|base| base)
}

/// Nodes as AKS describes them: what a monitor or a label says against one leaves it out.
#[test]
fn nodes_of_a_cluster_that_are_not_well_or_not_meant_are_left_out() {
    let node = |name: &str, kind: &str, more: &str, conditions: &str| {
        format!(
            "{{ \"metadata\": {{ \"name\": \"{name}\", \"labels\": {{ \
             \"node.kubernetes.io/instance-type\": \"{kind}\"{more} }} }}, \"spec\": {{}}, \
             \"status\": {{ \"conditions\": [{{ \"type\": \"Ready\", \"status\": \"True\" }}\
             {conditions}] }} }}"
        )
    };
    let condition = |name: &str, status: &str, reason: &str| {
        format!(
            ", {{ \"type\": \"{name}\", \"status\": \"{status}\", \"reason\": \"{reason}\" }}"
        )
    };
    let h200 = "Standard_ND96isr_H200_v5";
    let items = [
        node("a", h200, "", ""),
        node("b", h200, "", &condition("GPUMissing", "True", "x")),
        node("c", h200, "", &condition("VMEventScheduled", "True", "RebootScheduled")),
        node("d", h200, "", &condition("VMEventScheduled", "True", "FreezeScheduled")),
        node("e", h200, ", \"autopilot.ibm.com/gpuhealth\": \"EVICT\"", ""),
        node("f", "Standard_D4", "", ""),
        node("g", h200, "", &condition("XIDErrors", "False", "")),
    ];
    let text = format!("{{ \"kind\": \"List\", \"items\": [{}] }}", items.join(", "));
    let job = large("profile: nd-h200-v5, min: 1, max: 8", "");
    let mut nodes = nodes_from(&text).unwrap();
    select(&mut nodes, &Needs::of(&job).selector);
    let found = outlook(&job, Some(&nodes), &[]);
    assert_eq!(
        found.left_out,
        [
            "b: with the condition GPUMissing=True",
            "c: with the condition VMEventScheduled=True",
            "e: with the condition autopilot.ibm.com/gpuhealth=EVICT",
            "f: without the label node.kubernetes.io/instance-type=Standard_ND96isr_H200_v5",
        ]
    );
    let told = moejob_offline::text(&found);
    assert!(told.contains("placement on 3 nodes (3 usable nodes"), "{told}");
    assert!(told.contains("not used: c: with the condition"), "{told}");
    let is_grouped = |line: &str| line.trim().starts_with("0-7    0-127") && line.ends_with("0-7");
    assert!(told.lines().any(is_grouped), "a node is a line: {told}");
    // Names alone tell nothing against a node.
    let mut names = nodes_from("[a, b]").unwrap();
    select(&mut names, &Needs::of(&job).selector);
    assert!(names.iter().all(|node| node.usable));
}
