//! A worker may run any image, and so say anything that is a frame: the loop decides on, and what
//! it keeps, writes and tells of it stays small.

#[path = "lead_world/mod.rs"]
#[allow(dead_code, reason = "what scenarios tell by words")]
mod lead_world;
mod said;

use lead_world::World;
use moejob_protocol::message::{Held, LeftReason, Phase, Up};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde_json::{Value, json};

/// Frames that are said, each followed by a turn.
const FRAMES: usize = 24;
/// Effects of one turn. A gang of two has a dozen, when it breaks.
const EFFECTS_MAX: usize = 40;
/// Of the status of a gang of two, whatever its workers say.
const STATUS_BYTES_MAX: usize = 32 << 10;

const EVENTS: [&str; 22] = [
    "WorkerStarted", "WorkerLost", "EngineStarted", "EngineLost", "AttemptStarted", "Resumed",
    "AttemptsClaimed", "CheckpointCommitted", "CheckpointRefused", "CheckpointRemoved",
    "CheckpointDegraded", "CheckpointRecovered", "DataDegraded", "DataRecovered", "Recovered",
    "StateSaved", "Warning",
    "JobCompleted", "JobFailed", "JobSuspended", "Interrupted", "Resumed",
];

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..4u64, Just(99), Just(100), Just(101), Just(u64::MAX), any::<u64>()]
}

fn text() -> impl Strategy<Value = String> {
    let long = Just("\u{1b}[31m\u{202e}".repeat(20_000));
    let words = prop::sample::select(vec!["", "Found", "DeviceFailed"]).prop_map(str::to_string);
    prop_oneof![words, long, ".{0,40}"]
}

fn held() -> impl Strategy<Value = Vec<Held>> {
    let one = (number(), number(), prop::collection::vec(0..4u32, 0..4))
        .prop_map(|(attempt, step, shards)| Held { attempt: attempt as u32, step, shards });
    prop_oneof![
        prop::collection::vec(one, 0..6),
        // More than any worker has.
        number().prop_map(|step| {
            let held = |attempt: u32| {
                Held { attempt, step: step.wrapping_add(attempt.into()), shards: vec![0] }
            };
            (0..400).map(held).collect()
        }),
    ]
}

fn reason() -> impl Strategy<Value = LeftReason> {
    prop_oneof![
        Just(LeftReason::Asked),
        number().prop_map(|rank| LeftReason::PeerLost { rank: rank as u32 }),
        number().prop_map(|step| LeftReason::Stopped { step }),
        text().prop_map(|message| LeftReason::Error { message }),
    ]
}

/// What is a frame, by the reader of frames.
fn up() -> impl Strategy<Value = Up> {
    let phase = prop_oneof![Just(Phase::Idle), Just(Phase::Training), Just(Phase::Stopping)];
    let heartbeat = (phase, number(), number(), held()).prop_map(|(phase, step, at, held)| {
        json!({ "heartbeat": { "phase": phase, "step": step, "collective": at, "held": held } })
    });
    let step = (number(), any::<f64>()).prop_map(|(step, number)| {
        let number = if number.is_finite() { number } else { 0.0 };
        json!({ "step": { "step": step, "loss": number, "auxLoss": number, "zLoss": number,
            "gradNorm": number, "learningRate": number, "tokens": step,
            "tokensPerSecond": number, "worldSize": step as u32, "attempt": step as u32,
            "expertImbalance": number, "droppedTokens": number, "time": "" } })
    });
    let names = prop::sample::select(EVENTS.to_vec());
    let event = (names, text(), text(), number()).prop_map(|(event, reason, message, number)| {
        json!({ "event": { "time": "", "attempt": number as u32, "event": event, "reason": reason,
            "message": message, "step": number, "device": number, "claimed": number,
            "node": "n0", "rank": number, "lastWords": message, "uuid": message } })
    });
    let left = (reason(), held()).prop_map(|(reason, held)| {
        json!({ "left": { "reason": reason, "held": held } })
    });
    let completed = number().prop_map(|step| json!({ "completed": { "step": step } }));
    let failed = (any::<i32>(), text()).prop_map(|(exit_code, message)| {
        json!({ "failed": { "exit_code": exit_code, "message": message } })
    });
    let all = prop_oneof![heartbeat, step, event, left, completed, failed];
    all.prop_map(|value: Value| {
        serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value}"))
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(1),
        ..ProptestConfig::with_cases(40)
    })]

    #[test]
    fn whatever_a_worker_says_the_loop_goes_on(
        frames in prop::collection::vec((0..2usize, 0..3u32, up(), any::<bool>()), FRAMES),
    ) {
        let mut world = World::default();
        let script = "job min=2 max=2|grant n0 n1 n2|written|written|pod a-a1-0 n0 running|\
            pod a-a1-1 n1 running|open a-a1-0|open a-a1-1|written|step a-a1-0 1|written all";
        for command in script.split('|') {
            world.run(&command.split_whitespace().collect::<Vec<_>>());
        }
        for (worker, attempt, up, answered) in frames {
            world.hear(&format!("a-a1-{worker}"), attempt, up);
            world.run(&["advance", "700"]);
            if answered {
                world.run(&["written", "all"]);
            }
            let (effects, bytes) = world.extent();
            prop_assert!(effects <= EFFECTS_MAX, "{effects} effects of one turn");
            prop_assert!(bytes <= STATUS_BYTES_MAX, "a status of {bytes} bytes");
        }
    }
}

/// Two workers tell of a snapshot of each of 60,000 steps: whether any is whole is found by one
/// walk over them. A walk for each took minutes, in which the loop answered nobody.
#[test]
#[allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "the test takes the time")]
fn thousands_of_snapshots_are_looked_through_once() {
    let mut world = World::default();
    let script = "job min=2 max=2 steps=60000|grant n0 n1|written|written|pod a-a1-0 n0 running|\
        pod a-a1-1 n1 running|open a-a1-0|open a-a1-1|written|step a-a1-0 1|written all";
    for command in script.split('|') {
        world.run(&command.split_whitespace().collect::<Vec<_>>());
    }
    let began = std::time::Instant::now();
    for (worker, other) in [("a-a1-0", 1), ("a-a1-1", 0)] {
        let held = (1..=60_000).map(|step| Held { attempt: 1, step, shards: vec![0] }).collect();
        world.hear(worker, 1, Up::Left { reason: LeftReason::PeerLost { rank: other }, held });
    }
    let told = world.run(&["written", "all"]);
    assert!(told.contains("record of attempt 2"), "{told}");
    assert!(began.elapsed().as_secs() < 30, "{:?}", began.elapsed());
}

/// What a kubelet says of a pod may repeat what a tenant wrote: a megabyte of it would make the API
/// server refuse each status of the job.
#[test]
fn words_of_kubelets_are_short_wherever_they_stand() {
    let mut world = World::default();
    let script = "job min=2 max=2|grant n0 n1|written|written|pod a-a1-0 n0|pod a-a1-1 n1";
    for command in script.split('|') {
        world.run(&command.split_whitespace().collect::<Vec<_>>());
    }
    let long = format!("ErrImagePull: \u{1b}{}", "x".repeat(1 << 20));
    world.run(&["pod", "a-a1-0", "n0", "trouble", &long]);
    world.run(&["advance", "5000"]);
    world.run(&["written", "all"]);
    let (_, bytes) = world.extent();
    assert!(bytes < STATUS_BYTES_MAX, "a status of {bytes} bytes");
    let status = world.status().to_string();
    assert!(status.contains("ErrImagePull: \\\\u{1b}xxx"), "{status}");
}
