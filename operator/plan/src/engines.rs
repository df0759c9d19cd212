//! The engines of a job, by rank, node and device: the GPU of each, as far as it was told, and
//! those that were lost lately.
//!
//! A gang may have 4,096 ranks, so their table stands in no status: it follows from the gang, and
//! metrics have it with the uuids (`Figures::ranks`). A status lists what is odd: the last losses.

use crate::observed::{Gang, Millis, keep_newest};
use moejob_manifest::problem::printable;
use moejob_protocol::bounds::shorten;
use moejob_protocol::report::{DEVICE_FAILED, Detail, Event, EventKind, VICTIM};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Losses that stand in status.
pub const LOST_KEPT: usize = 8;
/// No machine has more devices; what a worker says of others is left out.
const DEVICES_MAX: u64 = 64;
/// `GPU-` and 36 characters, with room for those of parts of a GPU.
const UUID_BYTES_MAX: usize = 64;
/// How it ended and its last words stand in status together.
const CAUSE_BYTES_MAX: usize = 300;

/// An engine that was lost.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EngineLoss {
    pub rank: u32,
    pub node: String,
    /// Its number among the devices of the node.
    pub device: u64,
    /// Of its GPU; empty on processors, and where no engine has told it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uuid: String,
    pub attempt: u32,
    /// Its device gave it up, and nothing of its attempt was lost before.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub by_device: bool,
    /// It followed from another loss of its attempt. Those are told, and not kept.
    #[serde(skip)]
    pub victim: bool,
    /// How it ended, and what it said last.
    pub cause: String,
    pub at: Millis,
}

impl EngineLoss {
    /// `device 1 of node-0 (GPU-...)`.
    pub fn place(&self) -> String {
        let place = format!("device {} of {}", self.device, self.node);
        if self.uuid.is_empty() { place } else { format!("{place} ({})", self.uuid) }
    }
}

/// Where a rank computes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankPlace {
    pub rank: u32,
    pub worker: String,
    pub node: String,
    pub device: u32,
    /// Empty on processors, and before its engine has told it.
    pub uuid: String,
}

/// What workers have told of their engines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Engines {
    /// Oldest first.
    pub lost: Vec<EngineLoss>,
    /// Of each worker's devices, by their numbers.
    uuids: BTreeMap<String, BTreeMap<u64, String>>,
    changes: u64,
}

impl Engines {
    /// With the losses that a leader before has noted.
    pub fn restored(mut lost: Vec<EngineLoss>) -> Engines {
        keep_newest(&mut lost, LOST_KEPT);
        Engines { lost, ..Engines::default() }
    }

    /// Rises whenever a uuid is learned or forgotten.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// A worker on `node` has said this; `gang` is the one that is under way, and `is_first` that
    /// nothing of it was lost before. What is told of the engine's end is given back.
    pub fn heard(
        &mut self,
        (worker, node): (&str, &str),
        (gang, is_first): (Option<&Gang>, bool),
        event: &Event,
        now: Millis,
    ) -> Option<EngineLoss> {
        let device = number(event, "device").filter(|device| *device < DEVICES_MAX)?;
        match event.event {
            EventKind::EngineStarted | EventKind::EngineLost => {
                self.learn(worker, device, uuid(event));
            }
            _ => return None,
        }
        if event.event == EventKind::EngineStarted {
            return None;
        }
        let told = number(event, "rank").and_then(|rank| u32::try_from(rank).ok());
        let gang = gang.filter(|gang| gang.attempt == event.attempt);
        let member = gang.and_then(|gang| gang.members.iter().find(|of| of.worker == worker));
        // What the leader itself has decided counts more.
        let rank = member.map(|member| member.rank + device as u32).or(told)?;
        let by_device = event.reason == DEVICE_FAILED;
        let victim = event.reason == VICTIM || by_device && !is_first;
        let loss = EngineLoss {
            rank,
            node: node.to_string(),
            device,
            uuid: self.uuid(worker, device).to_string(),
            attempt: event.attempt,
            by_device: by_device && !victim,
            victim,
            cause: cause(event),
            at: now,
        };
        if !victim {
            self.lost.push(loss.clone());
            keep_newest(&mut self.lost, LOST_KEPT);
        }
        Some(loss)
    }

    /// A worker keeps its devices, so what one engine has told holds for those that follow it.
    fn learn(&mut self, worker: &str, device: u64, uuid: &str) {
        if !uuid.is_empty() && self.uuid(worker, device) != uuid {
            let of_worker = self.uuids.entry(worker.to_string()).or_default();
            of_worker.insert(device, uuid.to_string());
            self.changes += 1;
        }
    }

    fn uuid(&self, worker: &str, device: u64) -> &str {
        let of_worker = self.uuids.get(worker);
        of_worker.and_then(|devices| devices.get(&device)).map_or("", String::as_str)
    }

    /// Forgets what workers that are gone have told of their devices.
    pub fn prune(&mut self, is_there: impl Fn(&str) -> bool) {
        let before = self.uuids.len();
        self.uuids.retain(|worker, _| is_there(worker));
        self.changes += u64::from(self.uuids.len() != before);
    }

    /// All ranks of a gang, ascending.
    pub fn table(&self, gang: &Gang) -> Vec<RankPlace> {
        let ranks = gang.ranks_a_worker();
        let places = gang.members.iter().flat_map(|member| {
            (0..ranks).map(|device| RankPlace {
                rank: member.rank + device,
                worker: member.worker.clone(),
                node: member.node.clone(),
                device,
                uuid: self.uuid(&member.worker, device.into()).to_string(),
            })
        });
        places.collect()
    }
}

pub(crate) fn number(event: &Event, name: &str) -> Option<u64> {
    match event.details.get(name) {
        Some(Detail::Number(number)) => Some(*number),
        _ => None,
    }
}

fn text<'e>(event: &'e Event, name: &str) -> &'e str {
    match event.details.get(name) {
        Some(Detail::Text(text)) => text,
        _ => "",
    }
}

/// Empty where it is none.
fn uuid(event: &Event) -> &str {
    let plain = |text: &&str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    let uuid = Some(text(event, "uuid")).filter(plain);
    uuid.filter(|uuid| uuid.len() <= UUID_BYTES_MAX).unwrap_or_default()
}

/// `exit code 70: an uncorrectable error`.
fn cause(event: &Event) -> String {
    let parts = [text(event, "exit"), text(event, "lastWords")];
    let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    let mut cause = printable(&parts.join(": "));
    shorten(&mut cause, CAUSE_BYTES_MAX);
    cause
}
