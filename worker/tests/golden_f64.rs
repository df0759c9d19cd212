//! Training in f64, whose bits are pinned. No manifest asks for that precision: it is what
//! the parity with references is measured in, and reached by the configuration of a worker alone.
//!
//! `golden/f64.txt` holds, for each case, the bits of every loss, norm and held-out loss, and a
//! hash of all masters and moments of the last checkpoint. `MOEJOB_GOLDEN=write` writes it anew,
//! which only a change that is meant to change the bits may do.

mod common;

use common::{Job, bits, newest_held, run_and_cut_off, sources, trainers};
use moe_worker::attempt::api::AttemptEnd;
use moe_worker::checkpoint::{Disk, Growth, grow, grown, verify};
use moejob_protocol::checkpoint::directory_name;
use moejob_protocol::config::{Precision, Resume};
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{Activation, AuxLossScope, BalanceLoss, QkNorm, RouterKind};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

/// Ranks, and how many of them share the experts. Five micro-batches: uneven for all of them.
const MESHES: [(u32, u32); 5] = [(2, 1), (2, 2), (3, 3), (4, 2), (5, 1)];

type Change = fn(&mut Job);

/// Kinds of models and of routers; what becomes of the last two, see [`begun`].
const CASES: [(&str, Change); 8] = [
    ("plain", |_| {}),
    ("deepseek", |job| common::route_like_deepseek(&mut job.config.model)),
    ("qwen3", |job| {
        let model = &mut job.config.model;
        (model.qk_norm, model.tie_word_embeddings) = (QkNorm::PerHead, false);
        model.router.aux_loss_scope = AuxLossScope::Hf;
    }),
    ("olmoe", |job| {
        let model = &mut job.config.model;
        (model.num_key_value_heads, model.qk_norm, model.clip_qkv) = (2, QkNorm::Full, 0.05);
        (model.attention_bias, model.router.norm_topk_prob) = (true, false);
        (model.experts.activation, model.experts.shared) = (Activation::Gelu, 1);
    }),
    ("noisy", |job| {
        let router = &mut job.config.model.router;
        (router.kind, router.balance_loss) = (RouterKind::NoisyTopK, BalanceLoss::CvSquared);
    }),
    ("top-p", |job| {
        let router = &mut job.config.model.router;
        (router.kind, router.top_p, router.norm_topk_prob) = (RouterKind::TopP, 0.45, false);
        (router.aux_loss_scope, router.balance_loss) = (AuxLossScope::Global, BalanceLoss::Kl);
        job.config.model.experts.per_token = 3;
    }),
    ("growth", |_| {}),
    ("import", |_| {}),
];

/// The step after which experts are split, or whose weights another job begins with.
const SPLIT: u64 = 4;

fn layout((dp, ep): (u32, u32)) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

/// The job of a case, and what it goes on from.
fn begun(name: &str, change: Change, mesh: (u32, u32)) -> (Job, Option<Job>) {
    let mut job = Job::new(layout(mesh));
    job.config.training.precision = Precision::Fp64;
    change(&mut job);
    if !["growth", "import"].contains(&name) {
        return (job, None);
    }
    let mut first = Job::new(layout((1, 1)));
    first.config.training.precision = Precision::Fp64;
    run(&first);
    let from = first.location().join(directory_name(SPLIT));
    // The corpus of both is the same file by file.
    job.config.data = first.config.data.clone();
    if name == "import" {
        job.config.model_from = Some(from.display().to_string());
        return (job, Some(first));
    }
    let growth = Growth { noise: 0.01, seed: 1, per_token: None };
    let manifest = verify(&Disk::real(), &from).expect("a checkpoint");
    job.config.model = grown(&first.config.model, &growth);
    job.config.checkpoint.spec_hash = "another manifest".to_string();
    grow(&from, &manifest, &growth, &job.location(), &mut |_, _| {}).expect("room");
    job.config.resume = Resume::Checkpoint { step: SPLIT, name: directory_name(SPLIT) };
    (job, Some(first))
}

/// The numbers of the steps that are left.
fn run(job: &Job) -> Vec<[u64; 5]> {
    let (ends, reports) = job.run(&mut trainers(job.config.layout.mesh.world()), None);
    let completed = AttemptEnd::Completed { step: job.config.training.steps };
    assert!(ends.iter().all(|end| *end == completed), "{ends:?}");
    bits(&reports)
}

/// The same numbers where rank 1 is lost behind the snapshot of step 6, and the others go on.
fn run_with_a_loss(mut job: Job) -> (Job, Vec<[u64; 5]>) {
    let world = job.config.layout.mesh.world();
    let mut group = trainers(world);
    let (ends, reports) = run_and_cut_off(&job, &mut group, 1, 6, Duration::ZERO);
    let mut rows = bits(&reports);
    if ends.iter().all(|end| matches!(end, AttemptEnd::Completed { .. })) {
        // The steps were faster than the thread that cuts it off.
        return (job, rows);
    }
    group.remove(1);
    let (attempt, step) = newest_held(&group, world);
    let sources = sources(&group, attempt, step, world);
    let fewer = layout((world - 1, 1));
    let earlier = std::mem::replace(&mut job.config.layout, fewer);
    job.config.resume = Resume::Memory { step, attempt, layout: earlier, sources };
    job.config.attempt += 1;
    rows.retain(|row| row[0] <= step);
    let (ends, reports) = job.run(&mut group, None);
    assert!(ends.iter().all(|end| matches!(end, AttemptEnd::Completed { .. })), "{ends:?}");
    rows.extend(bits(&reports));
    (job, rows)
}

/// What a run has left behind, as text.
fn text(name: &str, job: &Job, rows: &[[u64; 5]]) -> String {
    let mut text = format!("{name}\n");
    for [step, numbers @ ..] in rows {
        let numbers: Vec<String> = numbers.iter().map(|bits| format!("{bits:016x}")).collect();
        writeln!(text, "step {step} {}", numbers.join(" ")).expect("a string");
    }
    let last = job.location().join(directory_name(job.config.training.steps));
    for (part, hash) in parts(&last) {
        writeln!(text, "{part} {hash}").expect("a string");
    }
    text
}

/// By part, a hash over the values of all tensors in the order of their names.
fn parts(folder: &Path) -> BTreeMap<String, String> {
    let read = std::fs::read_to_string(folder.join("manifest.json")).expect("a manifest");
    let manifest: Value = serde_json::from_str(&read).expect("JSON");
    let list = |value: &Value| value.as_array().expect("a list").clone();
    let files: Vec<Vec<u8>> = (list(&manifest["files"]).iter())
        .map(|file| folder.join(file["name"].as_str().expect("a name")))
        .map(|path| std::fs::read(path).expect("a shard"))
        .collect();
    let mut tensors = BTreeMap::new();
    for tensor in list(&manifest["tensors"]) {
        assert_eq!(tensor["dtype"], "F64", "{tensor}");
        // Version 1 called masters weights.
        let part = match tensor["part"].as_str().expect("a part") {
            "weight" => "master",
            part => part,
        };
        let number = |piece: &Value, field: &str| piece[field].as_u64().expect("a number") as usize;
        let mut pieces = list(&tensor["pieces"]);
        pieces.sort_by_key(|piece| number(piece, "start"));
        let of = |piece: &Value| {
            let range = number(piece, "begin")..number(piece, "end");
            files[number(piece, "file")][range].to_vec()
        };
        let bytes: Vec<u8> = pieces.iter().flat_map(of).collect();
        let name = tensor["name"].as_str().expect("a name").to_string();
        tensors.insert((part.to_string(), name), blake3::hash(&bytes));
    }
    let mut hashers: BTreeMap<String, blake3::Hasher> = BTreeMap::new();
    for ((part, name), hash) in tensors {
        let hasher = hashers.entry(part).or_default();
        hasher.update(name.as_bytes()).update(hash.as_bytes());
    }
    hashers.into_iter().map(|(part, hasher)| (part, hasher.finalize().to_string())).collect()
}

#[test]
fn training_in_f64_has_the_pinned_bits() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/f64.txt");
    let mut found = String::new();
    for (name, change) in CASES {
        let (job, _first) = begun(name, change, (1, 1));
        found += &text(name, &job, &run(&job));
    }
    if std::env::var_os("MOEJOB_GOLDEN").is_some_and(|what| what == "write") {
        return std::fs::write(file, found).expect("a writable checkout");
    }
    let expected = std::fs::read_to_string(file).expect("the cases' bits");
    let differs = expected.lines().zip(found.lines()).find(|(a, b)| a != b);
    assert_eq!(differs, None, "expected and found");
    assert_eq!(found.len(), expected.len());
    for (at, (name, change)) in CASES.into_iter().enumerate() {
        // All meshes for the first case, for the others two that follow one another.
        let meshes = MESHES.into_iter().cycle().skip(at);
        for mesh in meshes.take(if at == 0 { MESHES.len() } else { 2 }) {
            let (job, _first) = begun(name, change, mesh);
            let spread = text(name, &job, &run(&job));
            assert!(expected.contains(&spread), "{name} on {mesh:?}:\n{spread}");
        }
        let (job, _first) = begun(name, change, (3, 1));
        let (job, rows) = run_with_a_loss(job);
        let spread = text(name, &job, &rows);
        assert!(expected.contains(&spread), "{name} with a loss:\n{spread}");
    }
}
