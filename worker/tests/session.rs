//! Scenarios of a worker's life: `session/*.txt`, lines of `ms event => effects`.
//!
//! With `BLESS=1` the files are rewritten with what the session does; read the difference.

mod common;

use moe_worker::gang::comm::CommError;
use moe_worker::life::session::{Effect, Event, Session};
use moe_worker::attempt::api::{AttemptEnd, TrainerEvent};
use moe_worker::failure::Failure;
use moejob_protocol::config::{
    CheckpointConfig, DataConfig, DataSource, Member, RecoveryConfig, Resume, Tokenizer,
    ValidationConfig,
};
use moejob_protocol::message::{Frame, Held, LeftReason, Request};
use moejob_protocol::links::Built;
use moejob_protocol::pair::{Meeting, PairAnswer, PairOrder, PairSaid};
use moejob_protocol::preflight::{Answer, Order};
use moejob_protocol::{Down, Layout, Mesh, PROTOCOL_VERSION, Up, WorkerConfig};
use moejob_protocol::report::{Detail, Event as Line, EventKind};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

const JOB: &str = "job-1";
const ORPHAN_MS: u64 = 600_000;

#[test]
fn scenarios() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/session");
    let mut lines = 0;
    for entry in std::fs::read_dir(&folder).expect("the scenarios") {
        let path = entry.expect("an entry").path();
        let text = std::fs::read_to_string(&path).expect("a scenario");
        let actual = play(&text);
        lines += text.lines().filter(|line| line.contains("=>")).count();
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&path, actual).expect("writable");
        } else {
            for (expected, actual) in text.lines().zip(actual.lines()) {
                assert_eq!(actual, expected, "in {}", path.display());
            }
        }
    }
    assert!(lines > 150, "{lines} lines of scenarios were found");
}

/// The text with what the session does after each `=>`. `---` begins with a new session.
fn play(text: &str) -> String {
    let new = || Session::new(JOB.to_string(), Duration::ZERO);
    let mut session = new();
    let mut out = String::new();
    let mut before = 0;
    for line in text.lines() {
        let Some((left, _)) = line.split_once("=>") else {
            if line.starts_with("---") {
                (session, before) = (new(), 0);
            }
            writeln!(out, "{line}").expect("a string");
            continue;
        };
        let (time, event) = left.trim().split_once(' ').expect("a time and an event");
        let time: u64 = time.parse().expect("milliseconds");
        assert!(time >= before, "time goes on: {line}");
        before = time;
        let event = parse(event.trim(), session.term());
        let effects = session.on_event(event, Duration::from_millis(time));
        let effects: Vec<String> = effects.iter().map(show).collect();
        let effects = if effects.is_empty() { "-".to_string() } else { effects.join("; ") };
        writeln!(out, "{left}=> {effects}").expect("a string");
    }
    out
}

fn parse(text: &str, term: u64) -> Event {
    let words: Vec<&str> = text.split_whitespace().collect();
    let number = |word: &str| -> u64 { word.parse().unwrap_or_else(|_| panic!("{text}")) };
    // `@2 leave 1 ...` is a frame of another term than the session's.
    let (term, words) = match words[0].strip_prefix('@') {
        Some(other) => (number(other), &words[1..]),
        None => (term, &words[..]),
    };
    let frame = |attempt: &str, body: Down| {
        let attempt = number(attempt) as u32;
        Event::Frame(Frame { v: PROTOCOL_VERSION, term, attempt, body })
    };
    let attempt = |word: &str| number(word) as u32;
    match words {
        ["leader", term] => Event::LeaderConnected { term: number(term), version: 2 },
        ["leader", term, "speaks", version] => {
            Event::LeaderConnected { term: number(term), version: attempt(version) }
        }
        ["lost"] => Event::LeaderLost { why: "its stream ended".to_string() },
        ["silent"] => Event::LeaderSilent,
        ["heartbeat"] => frame("0", Down::Heartbeat),
        ["shutdown"] => frame("0", Down::Shutdown),
        ["leaf", of] => frame(of, Down::Leaf { certificate: "PEM".to_string(), authority: None }),
        ["leave", of] => frame(of, Down::Leave { reason: "as planned".to_string() }),
        ["request", of, bits @ ..] => {
            let checkpoint_now = bits.contains(&"checkpoint");
            let stop_after_this_step = bits.contains(&"stop");
            frame(of, Down::Request(Request { checkpoint_now, stop_after_this_step }))
        }
        ["patience", of, seconds] => {
            frame(of, Down::Patience { seconds: seconds.parse().expect("seconds") })
        }
        ["configure", of, seat, edits @ ..] => {
            frame(of, Down::Configure(Box::new(config(attempt(of), seat, edits))))
        }
        ["joined", of] => Event::Joined { attempt: attempt(of) },
        ["join-failed", of, rest @ ..] => {
            let rank = rest.first().map(|rank| attempt(rank));
            Event::JoinFailed { attempt: attempt(of), rank, why: "no answer".to_string() }
        }
        ["held", of, step] => {
            let held = Held { attempt: attempt(of), step: number(step), shards: vec![0] };
            Event::Trainer(TrainerEvent::Held(vec![held]))
        }
        ["committed", of, step] => Event::Trainer(TrainerEvent::Event(Line {
            time: String::new(),
            attempt: attempt(of),
            event: EventKind::CheckpointCommitted,
            reason: "Committed".to_string(),
            message: String::new(),
            details: BTreeMap::from([("step".to_string(), Detail::Number(number(step)))]),
        })),
        ["ended", of, end @ ..] => Event::AttemptEnded { attempt: attempt(of), end: ended(end) },
        ["signal"] => Event::Signal,
        ["owner-gone"] => Event::OwnerGone,
        ["tick"] => Event::Tick,
        ["preflight", of] => frame("0", Down::Preflight(Box::new(order(number(of))))),
        ["measured", of] => Event::Measured(Answer {
            number: number(of),
            boot_id: "boot".to_string(),
            measured: Some(Vec::new()),
        }),
        ["pair", of, side] => frame("0", Down::Pair(Box::new(pair(number(of), attempt(side))))),
        ["meets", of] => paired(number(of), PairSaid::Meets(place())),
        ["paired", of] => paired(number(of), PairSaid::Measured(Vec::new())),
        ["built", rank] => {
            let built = Built { rank: attempt(rank), ..Built::default() };
            Event::Trainer(TrainerEvent::Built(built))
        }
        _ => panic!("an unknown event: {text}"),
    }
}

fn ended(words: &[&str]) -> AttemptEnd {
    let number = |word: &str| -> u64 { word.parse().expect("a number") };
    match words {
        ["completed", step] => AttemptEnd::Completed { step: number(step) },
        ["stopped", step] => AttemptEnd::Stopped { step: number(step) },
        ["peer", rank] => AttemptEnd::Aborted(CommError::PeerLost {
            rank: number(rank) as u32,
            why: "its stream ended".to_string(),
        }),
        ["protocol", rank] => AttemptEnd::Aborted(CommError::Protocol {
            rank: number(rank) as u32,
            found: "garbage".to_string(),
            expected: "a frame header".to_string(),
        }),
        ["aborted"] => {
            AttemptEnd::Aborted(CommError::Aborted { reason: "as planned".to_string() })
        }
        ["fenced", by] => AttemptEnd::Fenced { attempt: number(by) as u32 },
        ["failed", code] => AttemptEnd::Failed(Failure::new(
            number(code) as i32,
            "the data is unreadable",
            "Look at it.",
        )),
        ["device"] => {
            AttemptEnd::DeviceFailed { message: "an illegal address".to_string(), own: true }
        }
        _ => panic!("an unknown end: {words:?}"),
    }
}

/// `seat` is `RANK/WORLD` or `spare/WORLD`; the edits say what is unusual.
fn config(attempt: u32, seat: &str, edits: &[&str]) -> WorkerConfig {
    let (rank, world) = seat.split_once('/').expect("a seat");
    let world: u32 = world.parse().expect("a world size");
    let member = |rank: u32| Member {
        rank,
        worker: format!("w{rank}"),
        node: format!("n{rank}"),
        address: format!("127.0.0.1:{}", 1000 + rank),
    };
    let mut config = WorkerConfig {
        job_uid: JOB.to_string(),
        job_name: "test".to_string(),
        attempt,
        digest: "d".to_string(),
        rank: rank.parse().ok(),
        layout: Layout::contiguous(Mesh::data_parallel(world, 1)),
        members: (0..world).map(member).collect(),
        resume: Resume::Fresh,
        model: common::model(),
        model_from: None,
        training: common::training(),
        data: DataConfig {
            source: DataSource::Text { root: ".".into(), paths: vec![], exclude: vec![] },
            held_out: None,
            tokenizer: Tokenizer::Bytes,
            end_of_document: None,
            reset_at_boundaries: false,
            mask_at_boundaries: false,
            validation: ValidationConfig { fraction: 0.0, every_steps: 0, max_sequences: 0 },
            exclude: vec![],
        },
        checkpoint: CheckpointConfig {
            every_steps: 10,
            auto: false,
            keep: 1,
            keep_best: false,
            location: String::new(),
            records: String::new(),
            spec_hash: String::new(),
        },
        recovery: RecoveryConfig {
            heartbeat_timeout_ms: 3000,
            step_timeout_ms: 0,
            orphan_timeout_ms: ORPHAN_MS,
            memory_every_steps: 10,
            memory_auto: false,
        },
        ranks: 1,
        exchange: Default::default(),
        threads: 1,
    };
    for edit in edits {
        match *edit {
            "local" => config.recovery.orphan_timeout_ms = 0,
            "other-digest" => config.digest = "e".to_string(),
            "other-job" => config.job_uid = "job-2".to_string(),
            "other-attempt" => config.attempt += 1,
            "missing-member" => drop(config.members.pop()),
            "shuffled" => config.members.reverse(),
            "two-ranks" => config.ranks = 2,
            "bad-mesh" => config.layout.mesh.ep = 7,
            _ => panic!("an unknown edit: {edit}"),
        }
    }
    config
}

fn show(effect: &Effect) -> String {
    match effect {
        Effect::Adopt => "adopt".to_string(),
        Effect::RefuseLeader { why } => format!("refuse leader ({why})"),
        Effect::DropLeader { why } => format!("drop leader ({why})"),
        Effect::Send { attempt, up } => format!("send[{attempt}] {}", show_up(up)),
        Effect::Heartbeat => "heartbeat".to_string(),
        Effect::InstallLeaf { attempt, .. } => format!("leaf {attempt}"),
        Effect::Join(config) => {
            let rank = config.rank.expect("only ranks join");
            format!("join {} as {rank} of {}", config.attempt, config.members.len())
        }
        Effect::CancelJoin => "cancel join".to_string(),
        Effect::Train => "train".to_string(),
        Effect::Abort { reason } => format!("abort ({reason})"),
        Effect::Request(request) => {
            let checkpoint = if request.checkpoint_now { " checkpoint" } else { "" };
            let stop = if request.stop_after_this_step { " stop" } else { "" };
            format!("request{checkpoint}{stop}")
        }
        Effect::Patience(seconds) => format!("steps may take {seconds} s longer"),
        Effect::Measure(order) => format!("measure {}", order.number),
        Effect::MeasurePair(order) => format!("measure {} as side {}", order.number, order.side),
        Effect::StopMeasuring => "stop measuring".to_string(),
        Effect::Exit(code) => format!("EXIT {code}"),
        Effect::Log(text) => format!("\"{text}\""),
    }
}

fn order(number: u64) -> Order {
    Order { number, expected: Default::default(), passed_at_boot: None }
}

fn place() -> Meeting {
    Meeting { id: "0f".repeat(128), bytes: 1 << 33 }
}

fn pair(number: u64, side: u32) -> PairOrder {
    let meeting = (side == 1).then(place);
    PairOrder { number, side, devices: 8, rdma: true, meeting }
}

fn paired(number: u64, said: PairSaid) -> Event {
    Event::Paired(PairAnswer { number, said })
}

fn show_up(up: &Up) -> String {
    match up {
        Up::Left { reason, held } => {
            let held: Vec<String> =
                held.iter().map(|held| format!(" held {}:{}", held.attempt, held.step)).collect();
            let reason = match reason {
                LeftReason::Asked => "asked".to_string(),
                LeftReason::PeerLost { rank } => format!("lost {rank}"),
                LeftReason::Stopped { step } => format!("stopped {step}"),
                LeftReason::Error { message } => format!("error ({message})"),
            };
            format!("left {reason}{}", held.join(""))
        }
        Up::Preflight(answer) => format!("preflight {}", answer.number),
        Up::Pair(PairAnswer { number, said: PairSaid::Meets(_) }) => format!("meets {number}"),
        Up::Pair(PairAnswer { number, .. }) => format!("paired {number}"),
        Up::Built(built) => format!("built {}", built.rank),
        Up::Completed { step } => format!("completed {step}"),
        Up::Event(line) => format!("{:?} {:?}", line.event, line.details["step"]),
        Up::Failed { exit_code, message, .. } => {
            format!("failed {exit_code} ({})", message.replace('\n', " /"))
        }
        other => format!("{other:?}"),
    }
}
