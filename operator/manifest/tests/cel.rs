//! The rules beside the fields, evaluated as the API server does, against the rules of the reader:
//! what the one refuses, the other refuses too.

#![allow(clippy::disallowed_methods, reason = "the test reads the examples")]

mod manifests;

use kube_cel::Validator;
use manifests::BASE;
use moejob_manifest::{Job, crd};
use serde_json::Value;
use std::collections::BTreeSet;

fn schema() -> Value {
    crd::definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"].take()
}

fn read(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap()
}

/// Messages of the rules that refuse `new`, as a change of `old` if there is one.
fn refused(new: &Value, old: Option<&Value>) -> Vec<String> {
    match Validator::new().validate(&schema(), new, old) {
        Ok(()) => Vec::new(),
        Err(errors) => errors.iter().map(|error| error.to_string()).collect(),
    }
}

/// The base with `old` replaced by `new`.
fn edited(old: &str, new: &str) -> String {
    assert!(BASE.contains(old), "{old} is not in the base");
    BASE.replacen(old, new, 1)
}

/// Breaks one rule each: what is replaced, by what, and a part of the rule's message.
const CREATED: &[(&str, &str, &str)] = &[
    ("name: sample", "name: abcdefghijklmnopqrstuvwxyz-abcdefghijklmnopqrst", "45 characters"),
    ("name: sample", "name: Sample", "lower-case letters"),
    ("min: 1, max: 4", "min: 4, max: 2", "nodes.min must be at most nodes.max"),
    ("profile: cpu", "profile: custom", "nodes.custom describes the profile custom"),
    (
        "profile: cpu",
        "profile: nd-h100-v5, devicesPerNode: 2",
        "nodes.devicesPerNode goes with the profiles cpu and gpu",
    ),
    (
        "profile: cpu",
        "profile: custom, custom: { devices: 0, deviceMemory: 1Gi, rdma: { resource: ib0, \
         count: 1 } }",
        "an extended resource",
    ),
    ("max: 4", "max: 4, topology: { prefer: rack, require: zone }", "prefer or require"),
    ("hiddenSize: 64", "tieWordEmbeddings: true", "without a preset"),
    ("numAttentionHeads: 2", "numAttentionHeads: 2\n    numKeyValueHeads: 3", "must divide"),
    ("perToken: 2", "perToken: 9", "perToken must be at most count"),
    (
        "    globalBatchSize: 8",
        "    globalBatchSize: 8\n    recomputeLayers: 2",
        "recomputeLayers goes with recompute: full",
    ),
    ("hiddenSize: 64", "hiddenSize: 64\n    router: { topP: 0.5 }", "topP goes with kind topP"),
    ("hiddenSize: 64", "hiddenSize: 64\n    router: { hashSeed: 5 }", "hashSeed goes with kind"),
    (
        "hiddenSize: 64",
        "hiddenSize: 64\n    router: { kind: tutel, balanceLoss: cvSquared }",
        "cvSquared goes with kind noisyTopK",
    ),
    (
        "hiddenSize: 64",
        "hiddenSize: 64\n    router: { balanceLoss: loadImportance }",
        "loadImportance needs gateNoise above 0",
    ),
    (
        "hiddenSize: 64",
        "hiddenSize: 64\n    router: { kind: topP, hysteresis: 0.1 }",
        "hysteresis goes with kinds topK, switch and tutel",
    ),
    (
        "numHiddenLayers: 2\n    numAttentionHeads: 2\n    experts: { count: 8",
        "numHiddenLayers: 512\n    numAttentionHeads: 2\n    experts: { count: 129",
        "at most 65536 experts",
    ),
    (
        "profile: cpu, min: 1, max: 4",
        "profile: custom, custom: { devices: 64, deviceMemory: 1Gi }, max: 4096",
        "must be at most 32768",
    ),
    (
        "    globalBatchSize: 8",
        "    globalBatchSize: 8\n    precision: tf32",
        "processors compute in fp32",
    ),
    (
        "    globalBatchSize: 8",
        "    globalBatchSize: 8\n    attention: fastest",
        "processors compute in fp32",
    ),
    (
        "    globalBatchSize: 8",
        "    globalBatchSize: 8\n    precision: fp32\n    momentDtype: bf16",
        "momentDtype bf16 goes with precision bf16 or fp16",
    ),
    (
        "    globalBatchSize: 8",
        "    globalBatchSize: 8\n    precision: fp32\n    gradientDtype: bf16",
        "gradientDtype bf16 goes with precision bf16",
    ),
    ("train: {", "train: { jsonl: { paths: [a] },", "one of text, jsonl, tokens, megatron"),
    ("microBatchSize: 2", "microBatchSize: 3", "microBatchSize must divide"),
    ("cosine: {", "linear: {}, cosine: {", "one of constant, linear, cosine"),
    ("3.0e-3", "3.0e-39", "fp32 holds nothing smaller"),
    ("3.0e-3 }", "3.0e-3, beta2: 1 }", "at most 0.9999999"),
    (
        "hiddenSize: 64",
        "hiddenSize: 64\n    router: { kind: topP, topP: 0.0001 }",
        "at least 0.001",
    ),
    (
        "hiddenSize: 64",
        "hiddenSize: 64\n    router: { cosine: { initialTemperature: 0.001 } }",
        "at least 0.01",
    ),
    ("hiddenSize: 64", "hiddenSize: 64\n    router: { inputDropout: 0.95 }", "at most 0.9"),
    ("  checkpoint:", "  volumes: [{ mountPath: a }]\n  checkpoint:", "claim or configMap"),
    ("  checkpoint:", "  parallelism: { expert: none }\n  checkpoint:", "or auto"),
];

/// Changes of a job that exists: what is replaced, by what, and the message; none is allowed.
const CHANGED: &[(&str, &str, Option<&str>)] = &[
    ("steps: 100", "steps: 200", None),
    ("steps: 100", "steps: 99", Some("training.steps only grows")),
    ("min: 1, max: 4", "min: 2, max: 3, spares: 1", None),
    ("keep: 3", "keep: 4", None),
    ("keep: 3", "keep: 3, keepBest: true", None),
    ("everySteps: 20", "everySteps: 30", None),
    ("  checkpoint:", "  suspend: true\n  checkpoint:", None),
    ("  checkpoint:", "  recovery: { maxRestarts: 3 }\n  checkpoint:", None),
    ("  checkpoint:", "  image: a:1\n  checkpoint:", Some("only while the job is suspended")),
    ("  checkpoint:", "  image: a:1\n  suspend: true\n  checkpoint:", None),
    (
        "  checkpoint:",
        "  podTemplate: { spec: { nodeSelector: { a: b } } }\n  checkpoint:",
        Some("podTemplate changes only while the job is suspended"),
    ),
    (
        "  checkpoint:",
        "  podTemplate: { spec: { nodeSelector: { a: b } } }\n  suspend: true\n  checkpoint:",
        None,
    ),
    ("hiddenSize: 64", "hiddenSize: 128", Some("model is immutable")),
    ("tokenizer: bytes", "tokenizer: other.json", Some("data is immutable")),
    ("\"**/*.rs\"", "\"**/*.md\"", Some("data is immutable")),
    ("globalBatchSize: 8", "globalBatchSize: 16", Some("training is immutable")),
    ("microBatchSize: 2", "microBatchSize: 1", Some("training is immutable")),
    ("microBatchSize: 2", "microBatchSize: 2\n    seed: 2", Some("training is immutable")),
    ("3.0e-3", "4.0e-3", Some("training is immutable")),
    ("warmupSteps: 10", "warmupSteps: 11", Some("training is immutable")),
    (
        "microBatchSize: 2",
        "microBatchSize: 2\n    momentDtype: fp32",
        Some("training is immutable"),
    ),
    (
        "microBatchSize: 2",
        "microBatchSize: 2\n    gradientDtype: auto",
        Some("training is immutable"),
    ),
    (
        "microBatchSize: 2",
        "microBatchSize: 2\n    attention: deterministic",
        Some("training is immutable"),
    ),
    ("profile: cpu", "profile: nd-h100-v5", Some("nodes.profile is immutable")),
    ("profile: cpu, ", "", None),
    ("profile: cpu", "profile: cpu, devicesPerNode: 1", None),
    ("profile: cpu", "profile: cpu, devicesPerNode: 2", Some("devicesPerNode is immutable")),
    ("max: 4", "max: 4, topology: { prefer: rack }", Some("nodes.topology is immutable")),
    ("keep: 3", "keep: 3, location: elsewhere", Some("checkpoint.location is immutable")),
    ("  checkpoint:", "  parallelism: { expert: 2 }\n  checkpoint:", Some("are immutable")),
    ("  checkpoint:", "  schedulerName: other\n  checkpoint:", Some("are immutable")),
];

/// Changes of a job that is more than the base: the base's edit, then the change.
const CHANGED_AGAIN: &[(&str, &str, &str)] = &[
    ("parallelism: { expert: 2 }", "parallelism: { expert: 4 }", "parallelism is immutable"),
    (
        "volumes: [{ mountPath: a, claim: b }]",
        "volumes: [{ mountPath: a, claim: c }]",
        "volumes are immutable",
    ),
    ("schedulerName: one", "schedulerName: two", "schedulerName is immutable"),
    (
        "podTemplate: { spec: { nodeSelector: { a: b } } }",
        "podTemplate: { spec: { nodeSelector: { a: c } } }",
        "podTemplate changes only",
    ),
    ("priorityClassName: one", "priorityClassName: two", "priorityClassName is immutable"),
    (
        "checkpoint: { location: one }",
        "checkpoint: { location: two }",
        "checkpoint.location is immutable",
    ),
    (
        "nodes: { profile: custom, custom: { devices: 0, deviceMemory: 8Gi } }",
        "nodes: { profile: custom, custom: { devices: 1, deviceMemory: 8Gi } }",
        "nodes.custom is immutable",
    ),
];

fn with(line: &str) -> String {
    let name = line.split(':').next().unwrap();
    let kept = BASE.lines().filter(|kept| !kept.starts_with(&format!("  {name}:")));
    format!("{}\n  {line}\n", kept.collect::<Vec<_>>().join("\n"))
}

#[test]
fn good_manifests_pass() {
    let base = read(BASE);
    assert_eq!(refused(&base, None), Vec::<String>::new());
    assert_eq!(refused(&base, Some(&base)), Vec::<String>::new());
    let gpu = edited("profile: cpu, min: 1, max: 4", "profile: gpu, devicesPerNode: 1");
    let options = "precision: bf16\n    momentDtype: bf16\n    gradientDtype: bf16\n    \
                   attention: fastest\n    offload: host";
    let gpu = gpu.replace("steps: 100", &format!("steps: 100\n    {options}"));
    assert_eq!(refused(&read(&gpu), None), Vec::<String>::new());
    for custom in ["devices: 1", "devices: 1, backend: cuda"] {
        let nodes = format!("profile: custom, custom: {{ {custom}, deviceMemory: 8Gi }}");
        let text = gpu.replace("profile: gpu, devicesPerNode: 1", &nodes);
        assert_eq!(refused(&read(&text), None), Vec::<String>::new(), "{custom}");
    }
    for example in ["01-first-run", "02-elastic", "04-routers", "05-one-gpu", "06-two-gpus"] {
        let path = format!("{}/../../examples/{example}.yaml", env!("CARGO_MANIFEST_DIR"));
        let job = read(&std::fs::read_to_string(path).unwrap());
        assert_eq!(refused(&job, None), Vec::<String>::new(), "{example}");
    }
}

/// The table of what is refused has good neighbours, too.
#[test]
fn what_the_reader_takes_the_api_server_takes() {
    let mut taken = 0;
    for case in manifests::blocks(manifests::TABLE) {
        let (Some(title), input) = (case.title(), case.input()) else { continue };
        if Job::read(&input).is_ok() {
            let found = refused(&read(&String::from_utf8(input).unwrap()), None);
            assert_eq!(found, Vec::<String>::new(), "{title}");
            taken += 1;
        }
    }
    assert!(taken > 10, "only {taken} manifests were taken");
}

#[test]
fn what_the_api_server_refuses_the_reader_refuses() {
    for (old, new, message) in CREATED {
        let text = edited(old, new);
        let found = refused(&read(&text), None);
        assert!(found.iter().any(|found| found.contains(message)), "{new}: {found:?}");
        assert!(Job::read(text.as_bytes()).is_err(), "{new} is read without a problem");
    }
}

#[test]
fn what_is_immutable_stays() {
    for (old, new, message) in CHANGED {
        let found = refused(&read(&edited(old, new)), Some(&read(BASE)));
        match message {
            None => assert_eq!(found, Vec::<String>::new(), "{new}"),
            Some(message) => {
                assert!(found.iter().any(|found| found.contains(message)), "{new}: {found:?}");
            }
        }
    }
    for (before, after, message) in CHANGED_AGAIN {
        let (before, after) = (read(&with(before)), read(&with(after)));
        assert_eq!(refused(&before, Some(&before)), Vec::<String>::new());
        let found = refused(&after, Some(&before));
        assert!(found.iter().any(|found| found.contains(message)), "{message}: {found:?}");
    }
}

/// A rule that nothing here breaks may as well not be there.
#[test]
fn every_rule_is_tried() {
    let mut messages = BTreeSet::new();
    collect(&schema(), &mut messages);
    assert!(messages.len() > 20, "only {} rules were found", messages.len());
    let changed = CHANGED.iter().filter_map(|(_, _, message)| *message);
    let created = CREATED.iter().map(|(_, _, message)| *message);
    let again = CHANGED_AGAIN.iter().map(|(_, _, message)| *message);
    let tried: Vec<&str> = changed.chain(created).chain(again).collect();
    for message in &messages {
        assert!(tried.iter().any(|tried| message.contains(tried)), "nothing breaks: {message}");
    }
}

fn collect(schema: &Value, messages: &mut BTreeSet<String>) {
    match schema {
        Value::Object(fields) => {
            for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
                messages.insert(rule["message"].as_str().unwrap().to_string());
            }
            fields.values().for_each(|field| collect(field, messages));
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, messages)),
        _ => {}
    }
}
