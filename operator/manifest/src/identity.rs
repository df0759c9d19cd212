//! What cannot change between two runs of one job, and what may.

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

/// What makes a job what it is, with every default filled in. [`shared`] is what of it two runs
/// must have alike, and [`steered`] tells what else of it has changed.
pub fn of(job: &Job) -> Value {
    let checkpoint = &job.checkpoint;
    let mut identity = json!({
        "model": job.model,
        "data": job.data,
        "training": job.training,
        "checkpoint": {
            "everySteps": checkpoint.every_steps,
            "keep": checkpoint.keep,
            "keepBest": checkpoint.keep_best,
        },
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
    let last = done.checked_sub(1).filter(|_| before.steps != training.steps)?;
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

/// Fields of an identity that may change where a run goes on, and what a manifest calls them.
const STEERED: [(&str, &str); 10] = [
    ("/training/steps", "training.steps"),
    ("/training/adamw/learningRate", "training.optimizer.adamw.learningRate"),
    ("/training/adamw/weightDecay", "training.optimizer.adamw.weightDecay"),
    ("/training/schedule", "training.schedule"),
    ("/training/maxGradNorm", "training.maxGradNorm"),
    ("/data/validation/everySteps", "data.validation.everySteps"),
    ("/data/validation/maxSequences", "data.validation.maxSequences"),
    ("/checkpoint/everySteps", "checkpoint.everySteps"),
    ("/checkpoint/keep", "checkpoint.keep"),
    ("/checkpoint/keepBest", "checkpoint.keepBest"),
];

/// The fields that may change where a run goes on, as a manifest calls them.
pub fn steered_fields() -> impl Iterator<Item = &'static str> {
    STEERED.iter().map(|(_, field)| *field)
}

/// A field that has another value from some step on.
#[derive(Clone, Debug, PartialEq)]
pub struct Steered {
    pub field: &'static str,
    pub was: Value,
    pub is: Value,
}

/// What a run of `was` is steered by that goes on as `is`, both identities. A field that `was` does
/// not know is that of a release before, and may have been anything.
pub fn steered(was: &Value, is: &Value) -> Vec<Steered> {
    let of = |(path, field): &(&str, &'static str)| {
        let (was, is) = (was.pointer(path)?.clone(), is.pointer(path)?.clone());
        (was != is).then_some(Steered { field, was, is })
    };
    STEERED.iter().filter_map(of).collect()
}

/// What of an identity two runs of one job must share. Formats and devices are left out: weights
/// and moments are kept in fp32, so a run that began on a processor may go on on a GPU. So are
/// slices of experts: checkpoints are read with any number of them. So are the places of the data,
/// whose fingerprint workers compare, and all that a run may be steered by.
pub fn shared(identity: &Value) -> Value {
    let mut shared = identity.clone();
    for (path, _) in STEERED {
        let (group, field) = path.rsplit_once('/').unwrap_or_default();
        if let Some(Value::Object(fields)) = shared.pointer_mut(group) {
            fields.remove(field);
        }
    }
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
