//! Gangs that train as their leader sees them, and what leading them costs.

use crate::said::{hello, step_report};
use moejob_plan::allocate::Granted;
use moejob_plan::lead::{
    Batch, Effect, Event, JobLoop, JobSeen, Link, Operator, Origin, Place, Said, WorkerPod, Write,
    owner,
};
use moejob_plan::observed::{Millis, Node};
use moejob_protocol::message::{Held, Heartbeat, Phase, Up};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;


const START: Millis = 1_700_000_000_000;
const BEAT: Millis = 500;
/// Heartbeats of each pod while it is measured.
pub const BEATS: u64 = 20;

/// A gang that trains, as its leader sees it.
pub struct Gang {
    job: JobLoop,
    names: Vec<String>,
    version: u64,
    step: u64,
    due: Option<Millis>,
}

impl Gang {
    pub fn new(number: u32, nodes: u32) -> Gang {
        let (namespace, name) = ("team".to_string(), format!("job-{number}"));
        let seen = JobSeen {
            namespace: namespace.clone(),
            name: name.clone(),
            uid: format!("uid-{number}"),
            generation: 1,
            resource_version: "1".into(),
            created_at: START,
            deleted: false,
            spec: json!({
                "nodes": { "min": nodes, "max": nodes },
                "model": { "preset": "tiny" },
                "data": { "train": { "text": { "paths": ["corpus/*"] } }, "sequenceLength": 8 },
                "training": { "steps": 1_000_000, "globalBatchSize": 8 * nodes },
                "checkpoint": { "location": format!("checkpoints/{name}") },
                "volumes": [{ "mountPath": "checkpoints", "claim": "c" }],
            }),
            unread: None,
            status: serde_json::Value::Null,
        };
        let place = Place::Cluster(Arc::new(Operator::default()));
        let job = JobLoop::new(&seen, place, 1, START);
        let mut gang = Gang { job, names: Vec::new(), version: 1, step: 0, due: None };
        let node = |at| Node::good(&format!("n{at}"));
        let nodes = (0..nodes).map(node).collect();
        let granted = Granted { nodes, ..Granted::default() };
        gang.job.on(Event::Granted(granted), START);
        gang.come_up(seen.uid, START);
        gang
    }

    /// Its pods are made and run, its workers are dialled and answer, and it makes a step.
    fn come_up(&mut self, uid: String, now: Millis) {
        let mut opened = BTreeMap::new();
        for _ in 0..16 {
            let turn = self.job.turn(now);
            let mut events = Vec::new();
            for effect in turn.effects {
                match effect {
                    Effect::Write(batch) => {
                        let births = batch.writes.iter().filter_map(|(_, write)| match write {
                            Write::CreatePod { birth, .. } => Some(birth.clone()),
                            _ => None,
                        });
                        let born: Vec<_> = births.collect();
                        events.push(self.written(batch));
                        for birth in born {
                            let at = self.names.len();
                            self.names.push(birth.name.clone());
                            events.push(Event::Pod(Box::new(WorkerPod {
                                namespace: "team".into(),
                                uid: format!("uid-{}", birth.name),
                                owner: owner("team", &uid),
                                node: Some(Arc::from(birth.node.as_str())),
                                meant_for: Some(birth.node),
                                address: Some(format!("10.0.{}.{}", at / 250, 1 + at % 250)),
                                started: true,
                                name: birth.name,
                                ..WorkerPod::default()
                            })));
                        }
                    }
                    Effect::Link(Link::Dial { name, .. }) => {
                        let said = Said::Opened(hello(&name, (0, "", None), &[]));
                        events.push(Event::Stream { name, said });
                    }
                    Effect::Link(Link::Configure { name, rank, config }) => {
                        opened.insert(name, (rank, config.attempt));
                    }
                    _ => {}
                }
            }
            if events.is_empty() && !opened.is_empty() {
                break;
            }
            events.into_iter().for_each(|event| self.job.on(event, now));
        }
        assert_eq!(opened.len(), self.names.len(), "all of them are configured");
        self.step(now);
        self.turn(now);
        assert!(self.job.tracker().observed.gang().is_some_and(|gang| gang.stepped));
    }

    fn written(&mut self, batch: Batch) -> Event {
        let Batch { aside, writes } = batch;
        let answer = |(origin, write): (Origin, Write)| {
            let version = matches!(write, Write::Status { .. }).then(|| {
                self.version += 1;
                self.version.to_string()
            });
            (origin, Ok(version))
        };
        Event::Done { aside, results: writes.into_iter().map(answer).collect() }
    }

    fn step(&mut self, now: Millis) {
        self.step += 1;
        let said = Said::Up { attempt: 1, up: step_report(self.step, 1) };
        let name = self.names[0].clone();
        self.job.on(Event::Stream { name, said }, now);
    }

    /// Of one worker, with the two generations of two shards that it holds.
    fn beat(&mut self, at: usize, now: Millis) {
        let rank = at as u32;
        let before = (rank + self.names.len() as u32 - 1) % self.names.len() as u32;
        let shards = vec![rank.min(before), rank.max(before)];
        let held = |step| Held { attempt: 1, step, shards: shards.clone() };
        let newest = self.step / 10 * 10;
        let beat = Heartbeat {
            phase: Phase::Training,
            step: self.step,
            collective: self.step,
            held: vec![held(newest.saturating_sub(10)), held(newest)],
            loading: None,
        };
        let said = Said::Up { attempt: 1, up: Up::Heartbeat(beat) };
        self.job.on(Event::Stream { name: self.names[at].clone(), said }, now);
    }

    /// As a shell asks: when something has come, or is due.
    fn turn(&mut self, now: Millis) -> bool {
        if !self.job.is_dirty() && self.due.is_none_or(|at| at > now) {
            return false;
        }
        let turn = self.job.turn(now);
        self.due = turn.due;
        for effect in turn.effects {
            if let Effect::Write(batch) = effect {
                let written = self.written(batch);
                self.job.on(written, now);
            }
        }
        true
    }
}

/// Nanoseconds that this thread has had of a processor.
fn spent() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux tells it");
    text.split(' ').next().and_then(|word| word.parse().ok()).expect("a number")
}

/// Microseconds of a heartbeat, milliseconds of a turn, and the share of a core that the decisions
/// of all these gangs take: a heartbeat each 500 ms of each pod, and as many steps of each gang.
pub fn measured(gangs: &mut [Gang], from: u64) -> (f64, f64, f64) {
    let (mut beats, mut turns, mut beating, mut turning) = (0u64, 0u64, 0, 0);
    for time in from + 1..=from + BEATS {
        let now = START + time * BEAT;
        for gang in &mut *gangs {
            let began = spent();
            for at in 0..gang.names.len() {
                gang.beat(at, now);
            }
            let beaten = spent();
            gang.step(now);
            turns += u64::from(gang.turn(now));
            (beating, turning) = (beating + beaten - began, turning + spent() - beaten);
            beats += gang.names.len() as u64;
        }
    }
    let simulated = (BEATS * BEAT) as f64 * 1e6;
    let share = (beating + turning) as f64 / simulated;
    (beating as f64 / beats as f64 / 1e3, turning as f64 / turns as f64 / 1e6, share)
}
