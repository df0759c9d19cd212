//! What of a spec may change while its job is there, and what has changed.

use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// Fields that may change.
pub const CHANGEABLE: [&str; 12] = [
    "suspend",
    "nodes.min",
    "nodes.max",
    "nodes.spares",
    "nodes.preflight",
    "training.steps",
    "checkpoint.everySteps",
    "checkpoint.keep",
    "checkpoint.keepBest",
    "recovery",
    "image",
    "podTemplate",
];

/// The changeable fields that the spec gives, by their paths.
pub fn values(spec: &Value) -> Map<String, Value> {
    let of = |path: &&str| {
        let value = path.split('.').fold(spec, |value, name| &value[name]);
        (!value.is_null()).then(|| (path.to_string(), value.clone()))
    };
    CHANGEABLE.iter().filter_map(of).collect()
}

/// Gives the changeable fields these values, and takes away those that are not among them.
pub fn put(spec: &mut Value, values: &Map<String, Value>) {
    for path in CHANGEABLE {
        let mut at = &mut *spec;
        let (parents, last) = path.rsplit_once('.').map_or((None, path), |(a, b)| (Some(a), b));
        for name in parents.into_iter().flat_map(|parents| parents.split('.')) {
            if !at[name].is_object() {
                at[name] = Value::Object(Map::new());
            }
            at = &mut at[name];
        }
        let Value::Object(fields) = at else { continue };
        match values.get(path) {
            Some(value) => drop(fields.insert(last.to_string(), value.clone())),
            None => drop(fields.remove(last)),
        }
    }
}

/// `path: was X, is Y` for each field that differs and may not. `defaults` is what a job has that
/// says nothing: a field that `was` does not know had its default then.
pub fn changes(was: &Value, is: &Value, defaults: &Value) -> Vec<String> {
    let mut found = Vec::new();
    compare("", (was, is), defaults, &mut found);
    found
}

fn compare(path: &str, (was, is): (&Value, &Value), defaults: &Value, found: &mut Vec<String>) {
    if was == is || CHANGEABLE.contains(&path) {
        // The schedule reaches its end at the last step; shortening it would rewrite the past.
        let steps = |value: &Value| value.as_u64().unwrap_or_default();
        if path == "training.steps" && steps(is) < steps(was) {
            found.push(format!("{path}: was {was}, is {is} (it may only grow)"));
        }
        return;
    }
    match (was, is) {
        (Value::Null, is) if is == defaults => {}
        (Value::Object(old), Value::Object(new)) => {
            let keys: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
            for key in keys {
                let of = |map: &Map<String, Value>| map.get(key).cloned().unwrap_or_default();
                let at = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                compare(&at, (&of(old), &of(new)), &defaults[key.as_str()], found);
            }
        }
        (Value::Array(old), Value::Array(new)) if old.len() == new.len() => {
            for (index, (old, new)) in old.iter().zip(new).enumerate() {
                // All entries are alike: the first of the defaults stands for each.
                compare(&format!("{path}[{index}]"), (old, new), &defaults[0], found);
            }
        }
        _ => found.push(format!("{path}: was {was}, is {is}")),
    }
}
