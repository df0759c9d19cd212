//! The job of the tests, and what its workers report.

use super::Setup;
use moejob_plan::job::{Job, Venue};
use moejob_plan::launch::{self, Places};
use moejob_protocol::config::WorkerConfig;
use moejob_protocol::message::Up;
use moejob_protocol::report::{Detail, Event, EventKind, StepReport};
use std::collections::BTreeMap;

pub fn step_report(step: u64, attempt: u32) -> Up {
    Up::Step(StepReport {
        step,
        loss: 1.0,
        aux_loss: 1.0,
        z_loss: 0.0,
        grad_norm: 1.0,
        learning_rate: 1e-3,
        tokens: 0,
        tokens_per_second: 0.0,
        timing: Default::default(),
        world_size: 0,
        attempt,
        expert_imbalance: 1.0,
        routing: Default::default(),
        device: None,
        validation_loss: None,
        time: String::new(),
    })
}

pub fn committed(step: u64, attempt: u32) -> Event {
    Event {
        time: String::new(),
        attempt,
        event: EventKind::CheckpointCommitted,
        reason: "Written".to_string(),
        message: String::new(),
        details: BTreeMap::from([("step".to_string(), Detail::Number(step))]),
    }
}

/// A real job's configuration, from a manifest.
pub fn template(setup: &Setup) -> WorkerConfig {
    let manifest = format!(
        "apiVersion: moejob.dev/v1alpha1\n\
         kind: MoeJob\n\
         metadata: {{ name: j }}\n\
         spec:\n\
         \x20 nodes: {{ profile: cpu, min: 1, max: 1 }}\n\
         \x20 model: {{ hiddenSize: 64, numHiddenLayers: 2, numAttentionHeads: 2, \
         experts: {{ count: {}, perToken: 1, intermediateSize: 64 }} }}\n\
         \x20 data: {{ train: {{ text: {{ paths: [a.txt] }} }}, tokenizer: bytes, \
         sequenceLength: 64 }}\n\
         \x20 training: {{ steps: {}, globalBatchSize: 64 }}\n",
        setup.experts, setup.steps
    );
    let job = Job::read(manifest.as_bytes()).expect("the manifest of the tests is valid");
    let places = Places {
        root: "/".to_string(),
        checkpoints: "/c".to_string(),
        records: "/r".to_string(),
        exclude: Vec::new(),
    };
    launch::template(&job, Venue::Local, "uid", &places)
}
