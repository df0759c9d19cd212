//! What cannot change between two runs of one job.

use crate::job::Job;
use moejob_protocol::config::TrainingConfig;
use serde_json::{Value, json};

/// A job that says as little as it can.
pub fn least() -> Job {
    let text = "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {name: none}\nspec:\n  \
                nodes: {min: 1}\n  model: {preset: tiny}\n  data: {train: {text: {paths: [none]}}, \
                sequenceLength: 8}\n  training: {steps: 1, globalBatchSize: 1}\n";
    Job::read(text.as_bytes()).expect("a valid manifest")
}

/// The identity of such a job: what fields that are not typed have.
pub fn defaults() -> Value {
    of(&least())
}

/// What cannot change between two runs of one job, with every default filled in; `training.steps`
/// may grow.
pub fn of(job: &Job) -> Value {
    let mut identity = json!({
        "model": job.model,
        "data": job.data,
        "training": job.training,
    });
    if let Some(from) = &job.model_from {
        identity["modelFrom"] = json!(from);
    }
    identity
}

/// Relative change of the learning rate between two steps that is a jump.
const JUMP: f64 = 0.1;

/// What is said where a run of `was`, an identity, goes on behind `done` steps with more steps in
/// all: its schedule is stretched to the new end, and the learning rate may jump there.
pub fn stretched(was: &Value, training: &TrainingConfig, done: u64) -> Option<String> {
    let before: TrainingConfig = serde_json::from_value(was["training"].clone()).ok()?;
    let last = done.checked_sub(1).filter(|_| before.steps < training.steps)?;
    // Step `done`, counted from 0, is the next one.
    let (from, to) = (before.learning_rate(last), training.learning_rate(done));
    ((to - from).abs() > JUMP * from).then(|| {
        format!(
            "training.steps: was {}, is {}. The schedule is stretched to the new end, so the \
             learning rate jumps from {from:.2e} at step {done} to {to:.2e} at step {}. \
             `--name OTHER` trains all steps under one schedule, from the beginning.",
            before.steps,
            training.steps,
            done + 1
        )
    })
}

/// What of an identity two runs of one job must share. Formats and devices are left out: weights
/// and moments are kept in fp32, so a run that began on a processor may go on on a GPU. So are
/// slices of experts: checkpoints are read with any number of them. And so are the places of the
/// data, whose fingerprint workers compare.
pub fn shared(identity: &Value) -> Value {
    let mut shared = identity.clone();
    if let Some(Value::Object(experts)) = shared.pointer_mut("/model/experts") {
        experts.remove("slices");
    }
    if let Some(training) = shared["training"].as_object_mut() {
        training.retain(|field, _| !["precision", "compute"].contains(&&field[..]));
    }
    if let Some(data) = shared.get_mut("data") {
        leave_places_out(data);
    }
    shared
}

/// Globs of sources, and the path of a tokenizer.
fn leave_places_out(data: &mut Value) {
    match data {
        Value::Object(fields) => {
            fields.retain(|name, _| !["paths", "exclude", "path"].contains(&&name[..]));
            fields.values_mut().for_each(leave_places_out);
        }
        Value::Array(all) => all.iter_mut().for_each(leave_places_out),
        _ => {}
    }
}
