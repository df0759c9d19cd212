//! The canonical form of named fields, and its hash: what ties a checkpoint to its job.
//!
//! ```text
//! {"model": {"hiddenSize": 128, "clipQkv": 0.0}, ..} -> model.hiddenSize=128\n ..  -> BLAKE3
//! ```
//! A line a field, sorted by name; what is nothing (null, false, zero, empty) is left out. So a
//! field that is added later, and is nothing in all jobs from before, changes no hash. One whose
//! default is something must not be serialised where it has that default.

use crate::config::TrainingConfig;
use serde_json::{Value, json};

/// These fields decide how a job is computed and not what it is, so a checkpoint does not hold a
/// job to them. Steps may be added to a job that has ended.
pub const MUTABLE: [&str; 7] = [
    "steps",
    "precision",
    "compute",
    "recompute",
    "offload",
    "microBatchSize",
    "slices",
];

/// These may change where a run goes on. What was trained stays what it was.
const STEERED: [&str; 4] = ["learningRate", "weightDecay", "schedule", "maxGradNorm"];

/// How a job trains, and which `fraction` of its data is held out. With the model, which a
/// checkpoint has field by field, and the fingerprint of its data it is all that makes a job, but
/// for the places where its data lie.
pub fn training_hash(training: &TrainingConfig, fraction: f64) -> String {
    let without = [&MUTABLE[..], &STEERED].concat();
    canonical_hash(&json!({ "training": training, "fraction": fraction }), &without)
}

/// The same as checkpoints of releases before have it, which let nothing be steered.
pub fn training_hash_before(training: &TrainingConfig, fraction: f64) -> String {
    canonical_hash(&json!({ "training": training, "fraction": fraction }), &MUTABLE)
}

/// BLAKE3 of the canonical form, hex. Fields of the names `without`, wherever they stand, do not
/// count: they change how a job is computed, and not what it is.
pub fn canonical_hash(fields: &Value, without: &[&str]) -> String {
    blake3::hash(canonical(fields, without).as_bytes()).to_hex().to_string()
}

/// The text that is hashed.
pub fn canonical(fields: &Value, without: &[&str]) -> String {
    let mut lines = Vec::new();
    collect("", fields, without, &mut lines);
    lines.sort();
    lines.concat()
}

fn collect(at: &str, value: &Value, without: &[&str], lines: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields.iter().filter(|(name, _)| !without.contains(&&name[..])) {
                let dot = if at.is_empty() { "" } else { "." };
                collect(&format!("{at}{dot}{name}"), value, without, lines);
            }
        }
        // The length tells a list that ends with nothing from a shorter one.
        Value::Array(items) if !items.is_empty() => {
            lines.push(format!("{at}={}\n", items.len()));
            for (number, item) in items.iter().enumerate() {
                collect(&format!("{at}[{number}]"), item, without, lines);
            }
        }
        value if is_nothing(value) => {}
        // JSON's own text of strings and numbers: quoted, and the shortest that reads back.
        value => lines.push(format!("{at}={value}\n")),
    }
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Bool(true) | Value::Object(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_a_field_sorted_by_name() {
        let fields = json!({ "b": { "y": 1.5, "x": "a\nb" }, "a": [3, 0], "c": true, "z": -0.0 });
        assert_eq!(canonical(&fields, &[]), "a=2\na[0]=3\nb.x=\"a\\nb\"\nb.y=1.5\nc=true\n");
        assert_eq!(canonical(&fields, &["b", "c"]), "a=2\na[0]=3\n");
    }

    #[test]
    fn what_is_nothing_may_be_added_and_all_else_tells() {
        let before = json!({ "model": { "hiddenSize": 128 } });
        let after = json!({
            "model": { "hiddenSize": 128, "new": null, "off": false, "none": 0, "scale": 0.0,
                       "list": [], "text": "", "deep": { "new": false } },
        });
        assert_eq!(canonical_hash(&before, &[]), canonical_hash(&after, &[]));
        for other in [
            json!({ "model": { "hiddenSize": 129 } }),
            json!({ "model": { "hiddenSize": 128, "new": 1 } }),
            json!({ "model": { "hiddenSize": "128" } }),
            json!({ "hiddenSize": 128 }),
            json!({ "model": { "hiddenSize": [128] } }),
        ] {
            assert_ne!(canonical_hash(&before, &[]), canonical_hash(&other, &[]), "{other}");
        }
        let one = json!({ "list": [1, 0] });
        assert_ne!(canonical_hash(&one, &[]), canonical_hash(&json!({ "list": [1] }), &[]));
    }
}
