//! What release 097657f wrote is read, and what is written is read by it: an operator is updated
//! and rolled back under gangs that train.
//!
//! `releases/097657f.jsonl` was written by 097657f itself, a line a thing: records of a job's life,
//! configurations of manifests, frames of both directions. Where what is written today equals it
//! byte for byte as JSON, that release reads it, too: it refuses fields that it does not know.

mod said;

use moejob_manifest::Job;
use moejob_manifest::job::Venue;
use moejob_plan::allocate::Granted;
use moejob_plan::lead::{
    Batch, Effect, Event, JobLoop, JobSeen, Link, Operator, Place, Said, WorkerPod, Write, owner,
};
use moejob_plan::observed::{Gang, Node, Outcome, Record};
use moejob_plan::record::{self, Saved};
use moejob_plan::{launch, pods};
use moejob_protocol::config::{Member, WorkerConfig};
use moejob_protocol::message::{Down, Frame, LeftReason, Up};
use moejob_protocol::report::EventKind;
use moejob_protocol::{Layout, Mesh};
use said::{hello, step_report};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;

const BEFORE: &str = include_str!("releases/097657f.jsonl");

/// Name and value of each line of that kind.
fn written(kind: &str) -> Vec<(String, Value)> {
    let lines = BEFORE.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    let lines = lines.filter(|line: &Value| line["kind"] == kind);
    let lines: Vec<(String, Value)> = lines
        .map(|line| (line["name"].as_str().unwrap_or_default().to_string(), line["value"].clone()))
        .collect();
    assert!(lines.len() > 2, "{} of {kind}", lines.len());
    lines
}

fn through<Body: DeserializeOwned + Serialize>(value: &Value) -> Value {
    let frame: Frame<Body> =
        serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value}"));
    serde_json::to_value(frame).expect("JSON")
}

/// Every field of `part`, with its value, stands in `whole`.
fn is_within(part: &Value, whole: &Value) -> bool {
    match (part, whole) {
        (Value::Object(part), Value::Object(whole)) => {
            part.iter().all(|(name, of)| whole.get(name).is_some_and(|in_| is_within(of, in_)))
        }
        _ => part == whole,
    }
}

#[test]
fn records_of_before_are_read_and_written_as_they_were() {
    for (name, line) in written("record") {
        let text = line.as_str().expect("a text");
        let saved = record::restore(text, "").unwrap_or_else(|error| panic!("{name}: {error}"));
        let json = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
        assert_eq!(json(&record::write(&saved)), json(text), "{name}");
    }
}

/// The same manifest gives the same configuration: a worker of before refuses any other field.
#[test]
fn a_manifest_of_before_is_configured_as_it_was() {
    for (name, line) in written("template") {
        let manifest = line["manifest"].to_string();
        let job = Job::read(manifest.as_bytes()).unwrap_or_else(|of| panic!("{name}: {of:?}"));
        let config = launch::template(&job, Venue::Kubernetes, "uid", &pods::places(&job));
        let mut config = serde_json::to_value(config).expect("JSON");
        let mut before = line["config"].clone();
        // The hash of the identity is of another version, and is compared with its own alone.
        for config in [&mut config, &mut before] {
            let hash = config["checkpoint"]["specHash"].take();
            assert!(hash.as_str().is_some_and(|hash| !hash.is_empty()), "{name}");
        }
        assert_eq!(config, before, "{name}");
    }
}

#[test]
fn orders_of_before_are_read_and_written_as_they_were() {
    for (name, line) in written("down") {
        assert_eq!(through::<Down>(&line), line, "{name}");
    }
    // What a successor adds to a leaf is ignored there: enums of frames take any field.
    let leaf = Down::Leaf { certificate: "PEM".into(), authority: None };
    assert_eq!(serde_json::to_value(leaf).expect("JSON"), json!({"leaf": {"certificate": "PEM"}}));
}

/// Lines of steps have more fields by now, which that release does not look at.
#[test]
fn words_of_workers_of_before_are_read_whole() {
    for (name, line) in written("up") {
        let now = through::<Up>(&line);
        assert!(is_within(&line, &now), "{name}: {line} {now}");
        assert!(now == line || name.starts_with("step"), "{name}: {now}");
    }
}

/// The words that a leader of 097657f does not know. It ends the stream of a worker that says one,
/// and takes the worker for lost: its frames have no place for what is new.
#[test]
fn what_a_leader_of_before_does_not_understand_is_known() {
    let said: BTreeSet<String> = (written("up").iter())
        .filter_map(|(_, line)| line["body"]["event"]["event"].as_str().map(str::to_string))
        .collect();
    let all = [
        EventKind::WorkerStarted,
        EventKind::WorkerLost,
        EventKind::AttemptStarted,
        EventKind::Resumed,
        EventKind::AttemptsClaimed,
        EventKind::CheckpointCommitted,
        EventKind::CheckpointRefused,
        EventKind::CheckpointRemoved,
        EventKind::Recovered,
        EventKind::StateSaved,
        EventKind::Warning,
        EventKind::JobCompleted,
        EventKind::JobFailed,
        EventKind::JobSuspended,
        EventKind::Interrupted,
        EventKind::EngineStarted,
        EventKind::EngineLost,
        EventKind::CheckpointDegraded,
        EventKind::CheckpointRecovered,
        EventKind::DataDegraded,
        EventKind::DataRecovered,
    ];
    let new: Vec<EventKind> = all
        .into_iter()
        .filter(|kind| !said.contains(serde_json::to_value(kind).expect("JSON").as_str().unwrap()))
        .collect();
    use EventKind::{CheckpointDegraded, CheckpointRecovered, EngineLost, EngineStarted};
    use EventKind::{DataDegraded, DataRecovered};
    let known = [EngineStarted, EngineLost, CheckpointDegraded, CheckpointRecovered];
    assert_eq!(new, [&known[..], &[DataDegraded, DataRecovered]].concat());
}

const NOW: u64 = 1_800_000_000_000;

fn spec() -> Value {
    json!({
        "nodes": {"min": 2, "max": 2, "devicesPerNode": 2},
        "model": {"preset": "tiny"},
        "data": {"train": {"text": {"paths": ["corpus/*"]}}, "sequenceLength": 8},
        "training": {"steps": 100, "globalBatchSize": 8},
        "checkpoint": {"location": "checkpoints/a"},
        "volumes": [{"mountPath": "checkpoints", "claim": "c"}],
    })
}

/// A gang of two workers of two ranks that trains, as the leader before has left it.
fn gang() -> (Gang, String) {
    let member = |number: u32| Member {
        rank: 2 * number,
        worker: format!("a-a1-{number}"),
        node: format!("n{number}"),
        address: format!("10.0.0.{number}:7777"),
    };
    let gang = Gang {
        attempt: 1,
        digest: "as-it-was".into(),
        layout: Layout::contiguous(Mesh::data_parallel(4, 4)),
        members: vec![member(0), member(1)],
        resumed_at: 0,
        started_at: NOW - 60_000,
        stepped: true,
        stop_requested: None,
        broken: None,
        ended: None,
        inherited: false,
    };
    let record = Record {
        job_uid: "uid".into(),
        attempt: 1,
        gang: Some(gang.clone()),
        step: 40,
        progressed_at: NOW - 1_000,
        step_median: 100,
        births: 2,
        ..Record::default()
    };
    let saved = Saved { term: 3, record, ..Saved::default() };
    (gang, record::write(&saved))
}

/// The API server and the workers, as they answer a leader that has taken the gang over.
struct Field {
    job: JobLoop,
    now: u64,
    gang: Gang,
    step: u64,
    writes: Vec<Write>,
    /// As each worker is configured.
    configured: Vec<Arc<WorkerConfig>>,
}

impl Field {
    fn new(status: Value) -> Field {
        let (gang, _) = gang();
        let seen = JobSeen {
            namespace: "team".into(),
            name: "a".into(),
            uid: "uid".into(),
            generation: 1,
            resource_version: "9".into(),
            created_at: NOW - 100_000,
            spec: spec(),
            status,
            ..JobSeen::default()
        };
        let image = ("new:2".to_string(), None);
        let operator = Operator { image, keyring: "key".into(), ..Operator::default() };
        let mut job = JobLoop::new(&seen, Place::Cluster(Arc::new(operator)), 4, NOW);
        let node = |name: &str| Node::good(name);
        for member in &gang.members {
            let pod = pod(&member.worker, &member.node, "old:1");
            job.on(Event::Pod(Box::new(pod)), NOW);
        }
        let nodes = ["n0", "n1", "n2"].map(node).to_vec();
        job.on(Event::Granted(Granted { nodes, ..Granted::default() }), NOW);
        let (writes, configured) = Default::default();
        Field { job, now: NOW, gang, step: 40, writes, configured }
    }

    /// Half a second: what it asks for happens.
    fn go_on(&mut self) {
        self.now += 500;
        let now = self.now;
        for effect in self.job.turn(now).effects {
            match effect {
                Effect::Link(Link::Dial { name, .. }) => {
                    let known = self.gang.members.iter().find(|member| member.worker == name);
                    let digest = self.gang.digest.clone();
                    let hello = match known {
                        Some(of) => hello(&name, (1, &digest, Some(of.rank)), &[]),
                        None => hello(&name, (0, "", None), &[]),
                    };
                    self.job.on(Event::Stream { name, said: Said::Opened(hello) }, now);
                }
                Effect::Link(Link::Send { name, attempt, body: Down::Leave { .. } }) => {
                    let left = Up::Left { reason: LeftReason::Asked, held: Vec::new() };
                    let said = Said::Up { attempt, up: left };
                    self.job.on(Event::Stream { name, said }, now);
                }
                Effect::Link(Link::Send { name, body, .. }) => panic!("{name} is told {body:?}"),
                Effect::Link(Link::Configure { config, .. }) => self.configured.push(config),
                Effect::Write(batch) => self.written(batch),
                _ => {}
            }
        }
    }

    fn written(&mut self, batch: Batch) {
        let version = Some(self.now.to_string());
        let (mut results, mut born) = (Vec::new(), Vec::new());
        for (origin, write) in batch.writes {
            let is_status = matches!(write, Write::Status { .. });
            if let Write::CreatePod { template, birth } = &write {
                born.push(pod(&birth.name, &birth.node, &template.around.image));
            }
            self.writes.push(write);
            results.push((origin, Ok(version.clone().filter(|_| is_status))));
        }
        self.job.on(Event::Done { aside: batch.aside, results }, self.now);
        born.into_iter().for_each(|pod| self.job.on(Event::Pod(Box::new(pod)), self.now));
    }

    fn step(&mut self) {
        self.step += 1;
        let said = Said::Up { attempt: 1, up: step_report(self.step, 1) };
        self.job.on(Event::Stream { name: "a-a1-0".into(), said }, self.now);
    }
}

fn pod(name: &str, node: &str, image: &str) -> WorkerPod {
    WorkerPod {
        namespace: "team".into(),
        name: name.into(),
        uid: format!("uid-{name}"),
        owner: owner("team", "uid"),
        node: Some(Arc::from(node)),
        address: Some("10.0.0.1".into()),
        image: Some(Arc::from(image)),
        started: true,
        ..WorkerPod::default()
    }
}

/// Of 097657f: its record, no `recordMore`, pods of its image; and back, where the definition of
/// before has pruned what it does not know.
#[test]
fn a_gang_trains_on_under_the_other_release_and_back() {
    let (gang, record) = gang();
    let mut status = json!({ "record": record });
    for way in ["updated", "rolled back", "updated again"] {
        let mut field = Field::new(status);
        for _ in 0..200 {
            field.go_on();
            field.step();
        }
        let Field { job, writes, .. } = &field;
        let observed = &job.tracker().observed;
        assert_eq!(observed.gang().map(|of| (of.attempt, &of.digest)), Some((1, &gang.digest)));
        assert!(observed.record.restarts.is_empty() && observed.record.step > 200, "{way}");
        let touched = |write: &&Write| {
            matches!(write, Write::CreatePod { .. } | Write::DeletePod { .. } | Write::DeleteJob(_))
        };
        assert_eq!(writes.iter().filter(touched).count(), 0, "{way}");
        let newest = writes.iter().rev().find_map(|write| match write {
            Write::Status { status, .. } => Some(status),
            _ => None,
        });
        let newest = newest.expect("a status is written");
        let line: Value = serde_json::from_str(&newest.record).expect("JSON");
        let known: BTreeSet<String> = (written("record").iter())
            .filter_map(|(_, line)| serde_json::from_str::<Value>(line.as_str()?).ok())
            .flat_map(|line| line.as_object().map(|of| of.keys().cloned().collect::<Vec<_>>()))
            .flatten()
            .collect();
        let fields: BTreeSet<String> =
            line.as_object().map(|of| of.keys().cloned().collect()).unwrap_or_default();
        assert!(fields.is_subset(&known), "{way}: {fields:?} beyond {known:?}");
        assert_eq!(line["v"], 1, "{way}");
        status = json!({ "record": newest.record });
    }
    assert_ne!(status["record"], json!(record), "what was done since stands there");
}

/// A worker of before refuses a checkpoint whose hash it has not made itself, and that ends the
/// job: a gang that is not of this release is told no hash.
#[test]
fn who_may_be_of_another_release_is_not_held_to_this_ones_hash() {
    for (survivors, told) in [("old:1", false), ("new:2", true)] {
        let (_, record) = gang();
        let mut field = Field::new(json!({ "record": record }));
        for member in field.gang.members.clone() {
            let pod = pod(&member.worker, &member.node, survivors);
            field.job.on(Event::Pod(Box::new(pod)), NOW);
        }
        (0..4).for_each(|_| field.go_on());
        let mut lost = pod("a-a1-1", "n1", survivors);
        lost.ended = Some((None, "killed".into()));
        field.job.on(Event::Pod(Box::new(lost)), field.now);
        for _ in 0..20 {
            field.go_on();
        }
        let images = field.writes.iter().filter_map(|write| match write {
            Write::CreatePod { template, .. } => Some(template.around.image.as_str()),
            _ => None,
        });
        assert_eq!(images.collect::<Vec<_>>(), [survivors], "as the gang runs");
        let hashes: Vec<bool> = (field.configured.iter())
            .map(|config| !config.checkpoint.spec_hash.is_empty())
            .collect();
        assert_eq!(hashes, [told, told], "{survivors}");
    }
}

#[test]
fn ends_of_before_are_ends() {
    let outcome = |name: &str| {
        let (_, line) = written("record").into_iter().find(|(of, _)| of == name).expect("a line");
        record::read(line.as_str().expect("a text")).expect("readable").record.outcome
    };
    assert_eq!(outcome("complete"), Some(Outcome::Complete { step: 100 }));
    let failed = |reason| Outcome::Failed { exit_code: 3, reason, message: "no".into() };
    assert_eq!(outcome("failed"), Some(failed("DataOrCheckpointRefused")));
    assert_eq!(outcome("suspended"), Some(Outcome::Suspended));
}
