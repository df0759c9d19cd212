//! Events of a run in words of people.

use super::read::{Event, Run};
use super::short;
use moejob_manifest::words::several;

/// A person wants to know these of a run. The others are in events.jsonl.
const TOLD: [&str; 17] = [
    "RunStarted", "AttemptStarted", "WorkerLost", "EngineLost", "Recovered", "Resumed",
    "CheckpointRefused", "CheckpointDegraded", "CheckpointRecovered", "DataDegraded",
    "DataRecovered", "Warning", "JobCompleted", "JobFailed", "JobSuspended", "Interrupted",
    "SpecChanged",
];

/// A person is told of these alone.
pub fn is_told(event: &Event) -> bool {
    TOLD.contains(&event.event.as_str())
}

/// The event in words.
pub fn told(event: &Event) -> String {
    let who = [&event.worker, &event.node].into_iter().flatten();
    let who = who.map(String::as_str).collect::<Vec<_>>().join(" on ");
    let behind = |what: &str| match event.message.is_empty() {
        true => what.to_string(),
        false => format!("{what}: {}", event.message),
    };
    match (event.event.as_str(), event.reason.as_str()) {
        ("RunStarted", _) => format!("started by {}", event.command.as_deref().unwrap_or("-")),
        ("AttemptStarted", _) => {
            let ranks = event.ranks().map(|ranks| format!(" with {}", several(ranks, "rank")));
            format!("attempt {} begins{}", event.attempt, ranks.unwrap_or_default())
        }
        ("Resumed", "Fresh") => "begins with new weights".to_string(),
        ("Resumed", "Memory") => behind("resumed from memory"),
        ("Resumed", _) => behind("resumed from a checkpoint"),
        ("WorkerLost", _) => behind(&format!("{who} is lost")),
        ("Recovered", _) => format!(
            "trains on after {}, {} done again: {}",
            seconds(event.first_step_ms.unwrap_or(0)),
            several(event.steps_lost.unwrap_or(0), "step"),
            event.message
        ),
        ("SpecChanged", _) => format!("from here on {}", event.message),
        ("JobCompleted", _) => "all steps are done".to_string(),
        ("JobFailed", _) => behind("failed"),
        ("JobSuspended", _) => "suspended".to_string(),
        ("Interrupted", _) => "interrupted, with a checkpoint".to_string(),
        ("Warning", _) => behind("warning"),
        // Their messages are whole sentences.
        _ if !event.message.is_empty() => event.message.clone(),
        (other, reason) => format!("{other}: {reason}"),
    }
}

/// `2.2 s`
fn seconds(millis: u64) -> String {
    format!("{:.1} s", millis as f64 / 1000.0)
}

/// `3.1 minutes`, `5.0 hours`, of as many seconds.
pub fn span(seconds: f64) -> String {
    match seconds {
        s if s < 600.0 => format!("{} s", short(s.round())),
        s if s < 36_000.0 => format!("{:.1} minutes", s / 60.0),
        s => format!("{:.1} hours", s / 3600.0),
    }
}

/// A loss that the run went on from.
#[derive(Debug, PartialEq)]
pub struct Recovery {
    /// Seconds of the run.
    pub at: f64,
    pub why: String,
    /// `3 of 4 ranks`
    pub ranks: String,
    pub took: String,
    /// `2 steps`
    pub again: String,
    /// The source of the state.
    pub from: String,
}

/// All of them, in their order.
pub fn recoveries(run: &Run) -> Vec<Recovery> {
    let (mut world, mut before, mut from) = (None, None, String::new());
    let mut found = Vec::new();
    for event in &run.events {
        match event.event.as_str() {
            "AttemptStarted" => {
                (before, world) = (world, event.ranks());
            }
            "Resumed" => from = told(event),
            "Recovered" => {
                let ranks = match (world, before) {
                    (Some(now), Some(was)) if now < was => {
                        format!("{now} of {}", several(was, "rank"))
                    }
                    (Some(now), _) => several(now, "rank"),
                    (None, _) => "-".to_string(),
                };
                let took = event.first_step_ms.unwrap_or(0);
                found.push(Recovery {
                    at: run.times.seconds(event.at.unwrap_or(0.0)) - took as f64 / 1000.0,
                    why: event.message.clone(),
                    ranks,
                    took: seconds(took),
                    again: several(event.steps_lost.unwrap_or(0), "step"),
                    from: from.clone(),
                });
            }
            _ => {}
        }
    }
    found
}
