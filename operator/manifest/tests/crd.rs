//! The CustomResourceDefinition in the tree is the one that the types make.

#![allow(clippy::disallowed_methods, reason = "the test reads the tree")]

use moejob_manifest::{Job, crd};
use serde_json::Value;

#[test]
fn the_definition_in_the_tree_is_current() {
    let path = format!("{}/../../manifests/crd.yaml", env!("CARGO_MANIFEST_DIR"));
    let made = crd::yaml();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == made, "`UPDATE=1 cargo test -p moejob-manifest --test crd`, look at the diff");
}

/// The API server refuses a structural schema that breaks these.
#[test]
fn the_schema_is_structural_and_explained() {
    let schema = crd::spec_schema();
    let mut fields = 0;
    walk(&schema, "spec", &mut fields);
    assert!(fields > 90, "only {fields} fields were seen");
}

#[test]
fn a_definition_that_would_prune_our_fields_is_told_by_their_names() {
    let ours = crd::definition();
    assert_eq!(crd::pruned_by(&ours), [""; 0]);
    let schema = "/spec/versions/0/schema/openAPIV3Schema/properties";
    let without = |path: &str, name: &str| {
        let mut served = ours.clone();
        let at = served.pointer_mut(&format!("{schema}{path}")).unwrap_or_else(|| panic!("{path}"));
        assert!(at.as_object_mut().unwrap().remove(name).is_some(), "{path} {name}");
        crd::pruned_by(&served)
    };
    assert_eq!(without("/status/properties", "recordMore"), ["status.recordMore"]);
    assert_eq!(without("/spec/properties/nodes/properties", "spares"), ["spec.nodes.spares"]);
    // Of lists and of maps what their entries have.
    let recoveries = "/status/properties/recoveries/items/properties";
    assert_eq!(without(recoveries, "cause"), ["status.recoveries.cause"]);
    // What is not pruned is not told, nor is what the other one has beside ours.
    let mut served = ours.clone();
    let status = served.pointer_mut(&format!("{schema}/status")).unwrap();
    *status = serde_json::json!({ "x-kubernetes-preserve-unknown-fields": true });
    assert_eq!(crd::pruned_by(&served), [""; 0]);
    let mut served = ours.clone();
    served.pointer_mut(schema).unwrap()["newer"] = serde_json::json!({ "type": "string" });
    assert_eq!(crd::pruned_by(&served), [""; 0]);
    for (field, value) in [("name", "v1"), ("served", "no")] {
        let mut served = ours.clone();
        let version = &mut served["spec"]["versions"][0];
        version[field] = if value == "no" { false.into() } else { value.into() };
        assert_eq!(crd::pruned_by(&served), ["(version v1alpha1)"]);
    }
}

/// The API server fills in what a job without it has, on any device. It leaves open what a device
/// chooses by itself.
#[test]
fn the_defaults_of_the_schema_are_the_reader_s() {
    ["cpu", "gpu"].into_iter().for_each(defaults_change_nothing_on);
}

fn defaults_change_nothing_on(profile: &str) {
    let base = include_str!("manifests/base.yaml");
    let mut object: Value = serde_saphyr::from_str(base).unwrap();
    let read = |object: &Value| Job::read(object.to_string().as_bytes()).unwrap();
    for part in ["checkpoint", "recovery", "parallelism"] {
        object["spec"][part] = serde_json::json!({});
    }
    object["spec"]["training"]["optimizer"] = serde_json::json!({ "adamw": {} });
    object["spec"]["training"]["schedule"] = serde_json::json!({ "constant": {} });
    object["spec"]["training"].as_object_mut().unwrap().remove("microBatchSize");
    object["spec"]["data"]["validation"] = serde_json::json!({});
    object["spec"]["data"].as_object_mut().unwrap().remove("tokenizer");
    object["spec"]["nodes"] = match profile {
        "cpu" => serde_json::json!({ "max": 4 }),
        other => serde_json::json!({ "profile": other, "max": 4 }),
    };
    let without = read(&object);
    for (path, value) in crd::DEFAULTS {
        let field = path.split('.').fold(&mut object["spec"], |field, name| &mut field[name]);
        if *path == "nodes.profile" && profile != "cpu" {
            continue;
        }
        assert!(field.is_null(), "{path} is in the base");
        *field = serde_json::from_str(value).unwrap();
        let schema = path.split('.').fold(crd::spec_schema(), |mut schema, name| {
            schema["properties"][name].take()
        });
        assert_eq!(schema["default"], *field, "{path}");
        let about = schema["description"].as_str().unwrap();
        assert!(about.contains("Default: ") || *path == "suspend", "{path}: {about}");
    }
    assert_eq!(read(&object), without);
}

fn walk(schema: &Value, path: &str, fields: &mut usize) {
    for word in ["$ref", "nullable", "oneOf", "anyOf", "allOf", "not"] {
        assert!(schema[word].is_null(), "{path} has {word}");
    }
    let format = schema["format"].as_str().unwrap_or("int64");
    assert!(["int32", "int64", "double"].contains(&format), "{path} has the format {format}");
    let about = schema["description"].as_str().unwrap_or_default();
    assert!(!about.is_empty() || path.ends_with(']') || path.ends_with('*'), "{path} says nothing");
    for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
        assert!(rule["message"].is_string(), "{path}: a rule without a message");
    }
    if schema["type"] == "string" && schema["enum"].is_null() && !path.ends_with('*') {
        assert!(schema["maxLength"].is_u64(), "{path} has no bound");
    }
    if schema["type"] == "array" {
        assert!(schema["maxItems"].is_u64() || path.contains("denseLayers"), "{path} has no bound");
    }
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        *fields += 1;
        walk(field, &format!("{path}.{name}"), fields);
    }
    if schema["items"].is_object() {
        walk(&schema["items"], &format!("{path}[]"), fields);
    }
    if schema["additionalProperties"].is_object() {
        walk(&schema["additionalProperties"], &format!("{path}.*"), fields);
    }
}

/// The schema for editors knows each field of each lesson, in the words of JSON Schema.
#[test]
fn the_schema_of_a_manifest_knows_the_lessons() {
    fn known(at: &str, value: &Value, schema: &Value) {
        assert!(schema.is_object(), "{at} is in no schema");
        let fields = value.as_object().filter(|_| schema["properties"].is_object());
        for (name, value) in fields.into_iter().flatten() {
            known(&format!("{at}.{name}"), value, &schema["properties"][name]);
        }
    }
    let schema = crd::manifest_schema();
    assert_eq!(schema["properties"]["spec"]["additionalProperties"], false);
    assert!(!schema.to_string().contains("x-kubernetes"), "words of an API server");
    let required = schema["properties"]["spec"]["required"].as_array().expect("a list");
    assert!(required.contains(&"training".into()), "{required:?}");
    for lesson in ["01-first-run", "02-elastic", "04-routers", "05-one-gpu", "09-use-it"] {
        let path = format!("{}/../../examples/{lesson}.yaml", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).expect("a lesson");
        let value: Value = serde_saphyr::from_str(&text).expect("YAML");
        known(lesson, &value, &schema);
    }
}
