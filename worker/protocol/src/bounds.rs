//! What a worker tells its leader at most. A worker may run any image, so both ends hold to it: an
//! honest worker cuts before it sends, and a leader cuts and looks before anybody else hears of it.
//!
//! ```text
//! Up --cut--> without what no leader uses --excess--> None, or what is more than any worker has
//! ```
//! The bytes of a frame are bounded before that, by [`FrameBody::BYTES_MAX`].
//!
//! [`FrameBody::BYTES_MAX`]: crate::message::FrameBody::BYTES_MAX

use crate::communication::Verb;
use crate::message::{Held, Hello, LeftReason, Up};
use crate::pair::{ID_DIGITS, PairSaid};
use crate::preflight::{MEASURED_MAX, Measured};
use crate::report::{Detail, Event, StepReport};

/// Snapshots in a worker's memory: two generations of its own shards and of others', and what it
/// may resume from after gangs that broke before their first step.
pub const HELD_MAX: usize = 64;
/// Shards of all of them: those of 64 engines, of as many others, and what they resumed from.
pub const HELD_SHARDS_MAX: usize = 1_024;
/// Details of an event. The longest has a dozen.
pub const DETAILS_MAX: usize = 32;
/// What a worker has to say to a person: a chain of errors, or the last lines of an engine.
pub const TEXT_BYTES_MAX: usize = 4 << 10;
/// A signing request of an elliptic key has some 400 bytes.
const REQUEST_BYTES_MAX: usize = 4 << 10;
/// A token of a service account has 1 to 2 KiB.
const TOKEN_BYTES_MAX: usize = 16 << 10;
/// The name of a worker, or the digest of an attempt.
const NAME_BYTES_MAX: usize = 256;

impl Up {
    /// Leaves out what no leader uses, and cuts texts and lists that are for people alone.
    pub fn cut(&mut self) {
        match self {
            Up::Step(report) => cut_step(report),
            Up::Event(event) => cut_event(event),
            Up::Failed { message, .. }
            | Up::Left { reason: LeftReason::Error { message }, .. } => cut_text(message),
            Up::Preflight(answer) => {
                cut_text(&mut answer.boot_id);
                cut_measured(answer.measured.as_deref_mut().unwrap_or_default());
            }
            Up::Pair(answer) => match &mut answer.said {
                PairSaid::Measured(measured) => cut_measured(measured),
                PairSaid::Meets(_) => {}
            },
            Up::Built(built) => {
                built.bound();
                cut_text(&mut built.version);
                cut_text(&mut built.unknown);
            }
            Up::Seated(seated) => {
                seated.bound();
                seated.differences.iter_mut().chain([&mut seated.unknown]).for_each(cut_text);
            }
            Up::Hello(_) | Up::Heartbeat(_) | Up::Left { .. } | Up::Completed { .. } => {}
        }
    }

    /// What it has that no worker of a job of so many ranks has, in the words of a reason.
    pub fn excess(&self, ranks: u32) -> Option<String> {
        match self {
            Up::Hello(hello) => hello_excess(hello, ranks),
            Up::Heartbeat(heartbeat) => held_excess(&heartbeat.held, ranks),
            Up::Left { held, .. } => held_excess(held, ranks),
            Up::Event(event) => more("details of an event", event.details.len(), DETAILS_MAX),
            Up::Preflight(answer) => {
                let measured = answer.measured.as_ref().map_or(0, Vec::len);
                more("measurements of a node", measured, MEASURED_MAX)
            }
            Up::Pair(answer) => match &answer.said {
                PairSaid::Measured(measured) => {
                    more("measurements of a pair", measured.len(), MEASURED_MAX)
                }
                PairSaid::Meets(meeting) => {
                    more("digits of a place to meet", meeting.id.len(), ID_DIGITS)
                }
            },
            Up::Step(_)
            | Up::Built(_)
            | Up::Seated(_)
            | Up::Completed { .. }
            | Up::Failed { .. } => None,
        }
    }
}

fn more(what: &str, count: usize, most: usize) -> Option<String> {
    (count > most).then(|| format!("{what}: {count}, and no worker has more than {most}"))
}

fn hello_excess(hello: &Hello, ranks: u32) -> Option<String> {
    let too_long = [
        ("bytes of its name", &hello.worker, NAME_BYTES_MAX),
        ("bytes of a digest", &hello.digest, NAME_BYTES_MAX),
        ("bytes of a signing request", &hello.signing_request, REQUEST_BYTES_MAX),
        ("bytes of a token", &hello.token, TOKEN_BYTES_MAX),
    ];
    let too_long = too_long.into_iter().find_map(|(what, text, most)| more(what, text.len(), most));
    too_long.or_else(|| held_excess(&hello.held, ranks))
}

fn held_excess(held: &[Held], ranks: u32) -> Option<String> {
    let shards = held.iter().map(|held| held.shards.len()).sum();
    let too_many = more("snapshots in its memory", held.len(), HELD_MAX)
        .or_else(|| more("shards in its memory", shards, HELD_SHARDS_MAX));
    too_many.or_else(|| {
        held.iter().find_map(|Held { attempt, step, shards }| {
            let what = || format!("the snapshot of step {step} of attempt {attempt}");
            if !shards.is_sorted_by(|a, b| a < b) {
                return Some(format!("{} does not have each of its shards once", what()));
            }
            let last = shards.last().filter(|last| **last >= ranks)?;
            Some(format!("{} has shard {last}, and the job {ranks} ranks at most", what()))
        })
    })
}

fn cut_step(report: &mut StepReport) {
    report.device = None;
    report.routing.tokens_per_expert = Vec::new();
    cut_text(&mut report.time);
    if let Some(communication) = &mut report.communication {
        communication.within.clear();
        communication.verbs.retain(|name, _| Verb::ALL.iter().any(|verb| verb.name() == name));
        communication.verbs.values_mut().for_each(|of| cut_text(&mut of.link));
    }
}

fn cut_event(event: &mut Event) {
    [&mut event.time, &mut event.reason, &mut event.message].into_iter().for_each(cut_text);
    for detail in event.details.values_mut() {
        if let Detail::Text(text) = detail {
            cut_text(text);
        }
    }
}

fn cut_measured(measured: &mut [Measured]) {
    measured.iter_mut().flat_map(Measured::texts).for_each(cut_text);
}

fn cut_text(text: &mut String) {
    shorten(text, TEXT_BYTES_MAX);
}

/// Leaves of a text as many whole characters as have together at most `bytes_max` bytes.
pub fn shorten(text: &mut String, bytes_max: usize) {
    text.truncate(beginning(text, bytes_max).len());
}

/// The first characters of a text, as many as have together at most `bytes_max` bytes.
pub fn beginning(text: &str, bytes_max: usize) -> &str {
    let end = (0..=bytes_max.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{FrameBody, Heartbeat, Phase};
    use crate::preflight::Answer;
    use serde_json::{Value, json};

    fn read(json: Value) -> Up {
        serde_json::from_value(json).expect("a frame")
    }

    fn snapshots(count: u32, shards: &[u32]) -> Value {
        let one = |step: u32| json!({ "attempt": 1, "step": step, "shards": shards });
        (0..count).map(one).collect()
    }

    /// Each list that a frame may have, as long as it may be and one longer.
    #[test]
    fn what_no_worker_has_is_named() {
        let all: Vec<u32> = (0..1_025).collect();
        let left = |held: Value| read(json!({ "left": { "reason": "asked", "held": held } }));
        let hello = |field: &str, value: Value| {
            let mut hello = serde_json::to_value(Hello::default()).expect("JSON");
            hello[field] = value;
            read(json!({ "hello": hello }))
        };
        let heartbeat = |held: Value| {
            read(json!({ "heartbeat":
                { "phase": "idle", "step": 1, "collective": 1, "held": held } }))
        };
        let event = |count: u32| {
            let mut event = json!({ "time": "", "attempt": 1, "event": "Warning", "reason": "" });
            (0..count).for_each(|at| event[format!("d{at}")] = json!(at));
            read(json!({ "event": event }))
        };
        let measured = |count: u32| {
            let one = |_| json!({ "check": "gpus", "value": { "number": 1.0 } });
            let measured: Value = (0..count).map(one).collect();
            read(json!({ "preflight": { "number": 1, "bootId": "", "measured": measured } }))
        };
        let pair = |said: Value| read(json!({ "pair": { "number": 1, "said": said } }));
        let digits = |count: usize| {
            pair(json!({ "meets": { "id": "0".repeat(count), "bytes": 1 } }))
        };
        let none = "";
        for (up, expected) in [
            (left(snapshots(64, &[0])), none),
            (left(snapshots(65, &[0])), "snapshots in its memory: 65, and no worker has more"),
            (left(snapshots(25_000, &[])), "snapshots in its memory: 25000, and no worker has"),
            (heartbeat(snapshots(65, &[])), "snapshots in its memory: 65, and no worker has"),
            (hello("held", snapshots(65, &[])), "snapshots in its memory: 65, and no worker has"),
            (left(snapshots(1, &all[..1_024])), none),
            (left(snapshots(1, &all)), "shards in its memory: 1025, and no worker has more than"),
            (left(snapshots(2, &[3, 2])), "the snapshot of step 0 of attempt 1 does not have"),
            (left(snapshots(2, &[3, 3])), "the snapshot of step 0 of attempt 1 does not have"),
            (left(snapshots(1, &[0, 2_000])), "the snapshot of step 0 of attempt 1 has shard 2000"),
            (hello("digest", json!("x".repeat(257))), "bytes of a digest: 257, and no worker has"),
            (hello("worker", json!("x".repeat(257))), "bytes of its name: 257, and no worker has"),
            (hello("signingRequest", json!("x".repeat(5_000))), "bytes of a signing request: 5000"),
            (hello("token", json!("x".repeat(20_000))), "bytes of a token: 20000, and no worker"),
            (event(32), none),
            (event(33), "details of an event: 33, and no worker has more than 32"),
            (measured(1_024), none),
            (measured(1_025), "measurements of a node: 1025, and no worker has more than 1024"),
            (digits(256), none),
            (digits(257), "digits of a place to meet: 257, and no worker has more than 256"),
        ] {
            let found = up.excess(2_000).unwrap_or_default();
            assert_eq!(found.is_empty(), expected.is_empty(), "{found}");
            assert!(found.starts_with(expected), "{found}");
        }
    }

    /// An honest worker's longest frames have room in the bytes that a leader reads.
    #[test]
    fn what_a_large_worker_tells_is_read() {
        let ranks = 32_768;
        let shards: Vec<u32> = (ranks - 256..ranks).collect();
        let held = |step| Held { attempt: 1_000, step, shards: shards.clone() };
        let held = vec![held(1_000_000), held(1_001_000), held(1_002_000)];
        let (phase, step, collective) = (Phase::Training, 1_000_000, 1_000_000_000);
        let heartbeat = Heartbeat { phase, step, collective, held, loading: None };
        let what = "an all-reduce by the cards of the node: 123.4 GB/s, of which 200 are expected";
        let on = |gpu: u32| format!("GPU {gpu} {what}");
        let one = |gpu| Measured::number("peerReadGBps", 240.5).on(on(gpu));
        let measured = Some((0..640).map(one).collect());
        let answer = Answer { number: 1, boot_id: "b".repeat(36), measured };
        let mut report = StepReport::default();
        report.routing.tokens_per_expert = vec![vec![1_000_000; 512]; 64];
        for mut up in [Up::Heartbeat(heartbeat), Up::Preflight(answer), Up::Step(report)] {
            up.cut();
            assert_eq!(up.excess(ranks), None);
            let bytes = serde_json::to_vec(&up).expect("JSON").len();
            assert!(bytes + 256 < Up::BYTES_MAX, "{bytes} bytes");
        }
    }

    #[test]
    fn texts_are_cut_between_characters_and_what_nobody_reads_is_left_out() {
        let mut failed = Up::Failed { exit_code: 1, message: "\u{e9}".repeat(9_000), step: None };
        failed.cut();
        let Up::Failed { message, .. } = &failed else { panic!("{failed:?}") };
        assert_eq!(message.len(), TEXT_BYTES_MAX);
        let report = json!({ "step": 1, "loss": 1.0, "auxLoss": 0.0, "zLoss": 0.0, "gradNorm": 0.0,
            "learningRate": 0.0, "tokens": 1, "tokensPerSecond": 1.0, "worldSize": 1, "attempt": 1,
            "expertImbalance": 1.0, "droppedTokens": 0.0, "time": "", "device": { "name": "x" },
            "communication": { "verbs": { "dispatch": { "bytes": 7 }, "other": {} } } });
        let mut step = read(json!({ "step": report }));
        step.cut();
        let Up::Step(report) = &step else { panic!("{step:?}") };
        assert_eq!(report.device, None);
        let verbs = &report.communication.as_ref().expect("it is used").verbs;
        assert_eq!(verbs.keys().collect::<Vec<_>>(), ["dispatch"]);
    }
}
