//! The engines of a job, by rank, node and device: the GPU of each, as far as it was told, and
//! those that were lost lately.
//!
//! A gang may have 4,096 ranks, so their table stands in no status: it follows from the gang, and
//! metrics have it with the uuids (`Figures::ranks`). A status lists what is odd: the last losses.

use crate::observed::{Gang, Millis};
use moejob_protocol::report::{DEVICE_FAILED, Detail, Event, EventKind};
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
    /// Its device gave it up.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub by_device: bool,
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
        let surplus = lost.len().saturating_sub(LOST_KEPT);
        lost.drain(..surplus);
        Engines { lost, ..Engines::default() }
    }

    /// Rises whenever a uuid is learned or forgotten.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// A worker on `node` has said this; `gang` is the one that is under way. What is told of the
    /// engine's end is given back.
    pub fn heard(
        &mut self,
        (worker, node): (&str, &str),
        gang: Option<&Gang>,
        event: &Event,
        now: Millis,
    ) -> Option<&EngineLoss> {
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
        self.lost.push(EngineLoss {
            rank,
            node: node.to_string(),
            device,
            uuid: self.uuid(worker, device).to_string(),
            attempt: event.attempt,
            by_device: event.reason == DEVICE_FAILED,
            cause: cause(event),
            at: now,
        });
        let surplus = self.lost.len().saturating_sub(LOST_KEPT);
        self.lost.drain(..surplus);
        self.lost.last()
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

fn number(event: &Event, name: &str) -> Option<u64> {
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
    let mut cause = crate::problem::printable(&parts.join(": "));
    let end = (0..=CAUSE_BYTES_MAX.min(cause.len())).rev().find(|at| cause.is_char_boundary(*at));
    cause.truncate(end.unwrap_or(0));
    cause
}

#[cfg(test)]
mod tests {
    use super::*;
    use moejob_protocol::Mesh;
    use moejob_protocol::config::Member;
    use moejob_protocol::layout::Layout;

    fn gang(workers: u32, ranks: u32) -> Gang {
        let member = |index: u32| Member {
            rank: index * ranks,
            worker: format!("j-{index}"),
            node: format!("n{index}"),
            address: String::new(),
        };
        Gang {
            attempt: 3,
            digest: String::new(),
            layout: Layout::contiguous(Mesh::data_parallel(workers * ranks, 2)),
            members: (0..workers).map(member).collect(),
            resumed_at: 0,
            started_at: 0,
            stepped: true,
            stop_requested: None,
            broken: None,
            ended: None,
            inherited: false,
        }
    }

    fn event(kind: EventKind, device: u64, uuid: &str) -> Event {
        let text = |text: &str| Detail::Text(text.to_string());
        let details = [
            ("rank", Detail::Number(99)),
            ("device", Detail::Number(device)),
            ("uuid", text(uuid)),
            ("exit", text("exit code 70")),
            ("lastWords", text(&"e\u{1b}".repeat(1000))),
        ];
        Event {
            time: String::new(),
            attempt: 3,
            event: kind,
            reason: DEVICE_FAILED.to_string(),
            message: String::new(),
            details: details.map(|(name, detail)| (name.to_string(), detail)).into(),
        }
    }

    #[test]
    fn a_loss_is_named_by_rank_node_device_and_uuid() {
        let (mut engines, gang) = (Engines::default(), gang(3, 8));
        let from = ("j-1", "n1");
        let started = event(EventKind::EngineStarted, 2, "GPU-a");
        assert_eq!(engines.heard(from, Some(&gang), &started, 5), None);
        // It ended before it could say which GPU it had.
        let lost = event(EventKind::EngineLost, 2, "");
        let loss = engines.heard(from, Some(&gang), &lost, 7).expect("a loss").clone();
        assert_eq!((loss.rank, loss.device, loss.attempt, loss.at), (10, 2, 3, 7));
        assert_eq!((loss.place().as_str(), loss.by_device), ("device 2 of n1 (GPU-a)", true));
        assert!(loss.cause.starts_with("exit code 70: e"), "{}", loss.cause);
        assert!(loss.cause.len() <= CAUSE_BYTES_MAX && !loss.cause.contains('\u{1b}'));
        // Without a gang only the worker can say which rank it was.
        let loss = engines.heard(from, None, &lost, 8).expect("a loss");
        assert_eq!(loss.rank, 99);
    }

    #[test]
    fn what_is_kept_of_workers_that_say_anything_is_bounded() {
        let (mut engines, gang) = (Engines::default(), gang(1, 2));
        let from = ("j-0", "n0");
        for uuid in ["", "a b", "\u{202e}", "x".repeat(65).as_str(), "GPU-\n"] {
            let started = event(EventKind::EngineStarted, 0, uuid);
            engines.heard(from, Some(&gang), &started, 0);
            assert_eq!(engines, Engines::default(), "{uuid:?}");
        }
        for device in [DEVICES_MAX, u64::MAX] {
            let lost = event(EventKind::EngineLost, device, "GPU-a");
            assert_eq!(engines.heard(from, Some(&gang), &lost, 0), None);
        }
        for at in 0..100 {
            let lost = event(EventKind::EngineLost, at % DEVICES_MAX, "");
            engines.heard(from, Some(&gang), &lost, at);
        }
        let kept: Vec<Millis> = engines.lost.iter().map(|loss| loss.at).collect();
        assert_eq!(kept, (92..100).collect::<Vec<_>>());
        let many = [engines.lost.clone(), engines.lost.clone()].concat();
        assert_eq!(Engines::restored(many).lost.len(), LOST_KEPT);
    }

    #[test]
    fn the_table_has_every_rank_and_the_uuids_that_are_known() {
        let (mut engines, gang) = (Engines::default(), gang(512, 8));
        let started = event(EventKind::EngineStarted, 7, "GPU-b");
        engines.heard(("j-511", "n511"), Some(&gang), &started, 0);
        let table = engines.table(&gang);
        assert_eq!(table.len(), 4096);
        assert!(table.iter().enumerate().all(|(at, of)| of.rank as usize == at));
        let last = &table[4095];
        assert_eq!((&*last.worker, &*last.node, last.device), ("j-511", "n511", 7));
        assert_eq!((last.uuid.as_str(), table[4094].uuid.as_str()), ("GPU-b", ""));
        let before = engines.changes();
        engines.prune(|worker| worker != "j-511");
        assert!(engines.changes() > before && engines.table(&gang)[4095].uuid.is_empty());
    }
}
