//! The manifests whose bits are kept: the lessons on a small corpus, kinds of routers, families of
//! models, formats of data, and models that begin from others.

use moejob_tests::{Bench, Random, root};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// A manifest, the files that it reads beside `corpus/`, and what is done before it runs.
pub struct Case {
    pub name: &'static str,
    pub manifest: String,
    /// Micro-batches of a step: it has no more ranks. Trials have numbers of their own.
    #[allow(dead_code)]
    pub ranks_max: u32,
    pub files: Vec<(&'static str, Vec<u8>)>,
    /// Arguments of `moejob`.
    pub before: Vec<&'static str>,
}

impl Case {
    /// Writes its files, and does what comes before it.
    pub fn prepare(&self, bench: &Bench) {
        for (name, bytes) in &self.files {
            std::fs::write(bench.path().join(name), bytes).expect("an input file");
        }
        for command in &self.before {
            let words: Vec<&str> = command.split(' ').collect();
            let output = bench.command(&words).output().expect("moejob starts");
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{}: {command}: {told}", self.name);
        }
    }
}

/// How each of them says on what it runs.
pub const NODES: &str = "profile: cpu, min: 1, max: 4";

const MODEL: &str = "{ hiddenSize: 32, numHiddenLayers: 2, numAttentionHeads: 2, \
                     experts: { count: 8, perToken: 2, intermediateSize: 32 } }";
const TEXT: &str = "{ train: { text: { paths: [\"corpus/**/*.txt\"] } }, \
                    validation: { fraction: 0.2, everySteps: 5 }, sequenceLength: 32 }";
/// How each of them trains, unless it is a lesson.
pub const TRAINING: &str = "{ steps: 10, globalBatchSize: 7, seed: 3, \
                        optimizer: { adamw: { learningRate: 3.0e-3 } }, \
                        schedule: { cosine: { warmupSteps: 3 } } }";
/// As many micro-batches as four workers of four engines have ranks, and one.
const WIDE: u32 = 17;

fn manifest(model: &str, data: &str, training: &str) -> String {
    format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: golden }}\nspec:\n  \
         nodes: {{ {NODES} }}\n  model: {model}\n  data: {data}\n  training: {training}\n  \
         checkpoint: {{ everySteps: 5, keep: 2 }}\n"
    )
}

/// A lesson as it was at that commit, on the corpus of the bench and with few steps.
fn lesson(name: &'static str, ranks_max: u32) -> Case {
    let file = root().join("tests/golden").join(format!("{name}.yaml"));
    let manifest = std::fs::read_to_string(file).expect("a manifest");
    Case { name, manifest, ranks_max, files: Vec::new(), before: Vec::new() }
}

fn model(name: &'static str, model: &str) -> Case {
    let manifest = manifest(model, TEXT, TRAINING);
    Case { name, manifest, ranks_max: 7, files: Vec::new(), before: Vec::new() }
}

fn router(name: &'static str, router: &str) -> Case {
    let open = MODEL.strip_suffix(" }").expect("a closing brace");
    model(name, &format!("{open}, router: {{ {router} }} }}"))
}

fn data(name: &'static str, data: &str, files: Vec<(&'static str, Vec<u8>)>) -> Case {
    let manifest = manifest(MODEL, data, TRAINING);
    Case { name, manifest, ranks_max: 7, files, before: Vec::new() }
}

pub fn all() -> Vec<Case> {
    let mut cases = vec![
        lesson("first-run", 4),
        lesson("elastic", 8),
        lesson("lesson-routers", 4),
        model(
            "qwen3",
            "{ hiddenSize: 48, numHiddenLayers: 3, numAttentionHeads: 6, numKeyValueHeads: 2, \
             headDim: 16, qkNorm: perHead, tieWordEmbeddings: false, \
             experts: { count: 12, perToken: 3, intermediateSize: 24 }, \
             router: { auxLossScope: hf, auxLossCoef: 0.02 } }",
        ),
        model(
            "olmoe",
            "{ hiddenSize: 32, numHiddenLayers: 2, numAttentionHeads: 4, qkNorm: full, \
             clipQkv: 0.5, experts: { count: 6, perToken: 2, intermediateSize: 40 }, \
             router: { normTopkProb: false, zLossCoef: 0.01 } }",
        ),
        model(
            "deepseek",
            "{ hiddenSize: 32, numHiddenLayers: 3, numAttentionHeads: 4, numKeyValueHeads: 4, \
             attentionBias: true, denseLayers: [0], denseIntermediateSize: 64, \
             experts: { count: 8, perToken: 2, intermediateSize: 16, shared: 1 }, \
             router: { scoring: sigmoid, bias: true, groups: 4, topkGroups: 2, scale: 2.5, \
             auxLossScope: sequence } }",
        ),
        router("expert-choice", "kind: expertChoice"),
        router("noisy", "kind: noisyTopK"),
        router("cosine", "kind: tutel, cosine: { projectionSize: 16 }, inputDropout: 0.1"),
        router("top-p", "kind: topP, balanceLoss: kl"),
        router("gshard", "kind: gshard, capacityFactor: 0.8, batchPrioritized: true"),
        router("global", "auxLossScope: global, auxLossCoef: 0.05"),
        router("hysteresis", "hysteresis: 0.1, warmupSteps: 4, bias: true"),
        router("hash", "kind: hash, hashSeed: 5"),
        data(
            "documents",
            "{ train: { jsonl: { paths: [\"*.jsonl\"] } }, tokenizer: bytes, endOfDocument: 0, \
             validation: { fraction: 0.2, everySteps: 5 }, resetAtBoundaries: true, \
             sequenceLength: 48 }",
            vec![("documents.jsonl", documents())],
        ),
        data(
            "mixture",
            "{ train: { mixture: [ { weight: 3, tokens: { paths: [a.bin], dtype: uint16 } }, \
             { weight: 1, text: { paths: [\"corpus/*.txt\"] } } ] }, \
             validation: { from: { tokens: { paths: [b.bin], dtype: uint16 } }, everySteps: 5 }, \
             sequenceLength: 40 }",
            vec![("a.bin", tokens(9000, 1)), ("b.bin", tokens(3000, 2))],
        ),
    ];
    cases.push(Case {
        before: vec![
            "run first.yaml --dir first",
            "checkpoint export first/golden/checkpoints model",
        ],
        ..from_files("import")
    });
    cases.push(wide("wide", MODEL));
    cases.push(grown("growth"));
    cases
}

/// One that may have more ranks.
fn wide(name: &'static str, of: &str) -> Case {
    let seven = "globalBatchSize: 7";
    assert!(TRAINING.contains(seven));
    let training = TRAINING.replace(seven, &format!("globalBatchSize: {WIDE}"));
    Case { manifest: manifest(of, TEXT, &training), ranks_max: WIDE, ..model(name, of) }
}

/// Trains, splits the experts after half of its steps, and goes on from there.
fn grown(name: &'static str) -> Case {
    let of = |count: u32, per_token: u32, coefficient: &str| {
        let experts = format!("count: {count}, perToken: {per_token}");
        let open = MODEL.replace("count: 8, perToken: 2", &experts);
        let open = open.strip_suffix(" }").expect("a closing brace").to_string();
        format!("{open}, router: {{ auxLossCoef: {coefficient}, zLossCoef: 0.01 }} }}")
    };
    let first = wide(name, &of(8, 2, "0.02")).manifest.into_bytes();
    Case {
        files: vec![("first.yaml", first)],
        before: vec![
            "run first.yaml --dir first",
            "checkpoint grow first/golden/checkpoints/step-00000005 runs/golden/checkpoints",
        ],
        ..wide(name, &of(16, 4, "0.01"))
    }
}

/// Trains once, exports, and begins again from what was exported.
fn from_files(name: &'static str) -> Case {
    let first = MODEL.replace("hiddenSize", "qkNorm: perHead, hiddenSize");
    let mut case = model(name, &first);
    let second = first.replacen('{', "{ from: { path: model },", 1);
    case.files = vec![("first.yaml", case.manifest.clone().into_bytes())];
    case.manifest = manifest(&second, TEXT, TRAINING);
    case
}

fn documents() -> Vec<u8> {
    let mut random = Random(7);
    let mut out = String::new();
    for number in 0..300 {
        let words: Vec<String> =
            (0..2 + random.below(30)).map(|_| format!("w{}", random.below(50))).collect();
        out += &format!("{{\"id\": {number}, \"text\": \"{}\"}}\n", words.join(" "));
    }
    out.into_bytes()
}

fn tokens(count: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut last = 0;
    let mut next = || {
        last = (last * 3 + random.below(7)) % 256;
        (last as u16).to_le_bytes()
    };
    (0..count).flat_map(|_| next()).collect()
}

/// By part, a hash over the values of all tensors in the order of their names. The master weight
/// counts as the weight, whatever precision it was computed in.
pub fn parts(folder: &Path) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(folder.join("manifest.json")).expect("a manifest");
    let manifest: Value = serde_json::from_str(&text).expect("JSON");
    let files: Vec<Vec<u8>> = (list(&manifest["files"]).iter())
        .map(|file| std::fs::read(folder.join(file["name"].as_str().expect("a name"))))
        .map(|file| file.expect("a shard"))
        .collect();
    let mut tensors = BTreeMap::new();
    for tensor in list(&manifest["tensors"]) {
        let part = match tensor["part"].as_str().expect("a part") {
            "master" => "weight",
            part => part,
        };
        let number = |piece: &Value, field: &str| piece[field].as_u64().expect("a number");
        let mut pieces: Vec<&Value> = list(&tensor["pieces"]).iter().collect();
        pieces.sort_by_key(|piece| number(piece, "start"));
        let mut bytes = Vec::new();
        for piece in pieces {
            let file = &files[number(piece, "file") as usize];
            let range = number(piece, "begin") as usize..number(piece, "end") as usize;
            bytes.extend_from_slice(&file[range]);
        }
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

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().expect("a list")
}
