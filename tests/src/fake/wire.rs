//! What requests are for, and objects as JSON.

use serde_json::{Value, json};

/// What is asked for, as its path says.
#[derive(Clone, Debug, Default)]
pub struct Target {
    pub resource: String,
    pub namespace: String,
    pub name: String,
    pub subresource: String,
}

impl Target {
    /// `/api/v1/...` or `/apis/GROUP/VERSION/...`.
    pub fn of(path: &str) -> Option<Target> {
        let words: Vec<&str> = path.split('/').filter(|word| !word.is_empty()).collect();
        let rest = match words.first()? {
            &"api" => words.get(2..)?,
            &"apis" => words.get(3..)?,
            _ => return None,
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
            rest => ("", rest),
        };
        let word = |at: usize| rest.get(at).copied().unwrap_or_default().to_string();
        let (resource, name, subresource) = (word(0), word(1), word(2));
        Some(Target { resource, namespace: namespace.to_string(), name, subresource })
    }
}

pub fn key_of(object: &Value) -> (String, String) {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_string();
    (text("namespace"), text("name"))
}

pub fn version_of(object: &Value) -> u64 {
    let version = object["metadata"]["resourceVersion"].as_str().unwrap_or_default();
    version.parse().unwrap_or(0)
}

pub fn with(mut object: Value, field: &str, value: Value) -> Value {
    object[field] = value;
    object
}

/// As `application/merge-patch+json`.
pub fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else { return *target = patch.clone() };
    if !target.is_object() {
        *target = json!({});
    }
    for (name, value) in fields {
        match value {
            Value::Null => drop(target.as_object_mut().map(|of| of.remove(name))),
            value => merge(&mut target[name], value),
        }
    }
}
