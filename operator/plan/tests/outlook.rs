//! `moejob plan`: what it says of the examples, of losses and of clusters that do not suffice.

#![allow(clippy::disallowed_methods, reason = "the test reads the examples")]

use moejob_plan::Job;
use moejob_plan::fabric::Keys;
use moejob_plan::offline::{self, Outlook, count, text};
use moejob_plan::placement::Skipped;
use moejob_plan::topology::NodeInfo;
use std::path::Path;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn job(edit: impl Fn(String) -> String) -> Job {
    let base = include_str!("manifests/base.yaml").to_string();
    Job::read(edit(base).as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"))
}

fn outlook(job: &Job, nodes: Option<&[NodeInfo]>, lose: &[String]) -> Outlook {
    offline::outlook(job, nodes, &Keys::default(), lose)
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
    let of = |what: &moejob_plan::offline::WhatIf| {
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
    assert!(told.contains("what would change it: more usable nodes, or a smaller nodes.min"));
    // With three nodes it runs, and the loss of one is one too many.
    let found = outlook(&two, Some(&nodes("a b c d!")), &["b".to_string()]);
    assert_eq!(what_ifs(&found), ["b: rests"]);
}

#[test]
fn a_job_that_no_number_of_nodes_fits_says_what_would_change_it() {
    let mut nothing = outlook(&job(|base| base), None, &[]);
    nothing.sizes.clear();
    nothing.gang = None;
    let skip = |why: &str| Skipped { nodes: 1, why: why.to_string() };
    for (why, change) in [
        ("a rank needs 9 GiB of memory, 1 GiB more than the 8 GiB it has", "microBatchSize"),
        ("a step has 4 micro-batches for 8 ranks", "training.globalBatchSize"),
        ("parallelism.expert: 3 does not divide 8 ranks", "parallelism.expert that divides"),
    ] {
        nothing.skipped = vec![skip(why)];
        let told = text(&nothing);
        let changes = told.lines().find(|line| line.contains("what would change it"));
        assert!(changes.is_some_and(|line| line.contains(change)), "{told}");
    }
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
