//! What the workers of the tests say.

// Each test crate uses a part of it.
#![allow(dead_code)]

use moejob_protocol::message::{Held, Hello, Up};
use moejob_protocol::report::{DEVICE_FAILED, Detail, Event, EventKind, StepReport};
use std::collections::BTreeMap;

pub fn hello(
    worker: &str,
    (attempt, digest, rank): (u32, &str, Option<u32>),
    held: &[Held],
) -> Hello {
    Hello {
        version: 1,
        worker: worker.to_string(),
        token: String::new(),
        signing_request: String::new(),
        attempt,
        digest: digest.to_string(),
        rank,
        held: held.to_vec(),
    }
}

pub fn step_report(step: u64, attempt: u32) -> Up {
    Up::Step(StepReport {
        step,
        loss: 1.0,
        aux_loss: 1.0,
        grad_norm: 1.0,
        learning_rate: 1e-3,
        attempt,
        expert_imbalance: 1.0,
        ..StepReport::default()
    })
}

pub fn committed(step: u64, attempt: u32) -> Up {
    let details = BTreeMap::from([("step".to_string(), Detail::Number(step))]);
    event(EventKind::CheckpointCommitted, attempt, "Written", "", details)
}

/// The engine of the `device`-th device of a worker is lost by its device's fault.
pub fn device_failed(attempt: u32, device: u64) -> Up {
    let details = [
        ("device", Detail::Number(device)),
        ("uuid", Detail::Text(format!("GPU-{device}"))),
        ("exit", Detail::Text("exit code 70".to_string())),
        ("lastWords", Detail::Text("an uncorrectable error of its memory".to_string())),
    ];
    let details = details.map(|(name, detail)| (name.to_string(), detail)).into();
    event(EventKind::EngineLost, attempt, DEVICE_FAILED, "", details)
}

pub fn warning(message: &str, attempt: u32) -> Up {
    event(EventKind::Warning, attempt, "Worker\u{1b}Says", message, BTreeMap::new())
}

pub fn of_kind(kind: EventKind, attempt: u32, reason: &str, message: &str) -> Up {
    event(kind, attempt, reason, message, BTreeMap::new())
}

fn event(
    event: EventKind,
    attempt: u32,
    reason: &str,
    message: &str,
    details: BTreeMap<String, Detail>,
) -> Up {
    let (time, reason, message) = (String::new(), reason.to_string(), message.to_string());
    Up::Event(Event { time, attempt, event, reason, message, details })
}
