//! What of a job outlives its leader, as one line of JSON: it stands in `status.record`, and the
//! next leader goes on from it.
//!
//! Times are milliseconds since 1970 there: a leader on Kubernetes counts so.

mod more;

pub use more::{Accepted, GangPods, Machine, More, NodeRest, RESTS_MAX, Refused, write_more};

use crate::observed::{Gang, Millis, Reason, Record};
use crate::reasons;
use crate::track::Recovery;
use moejob_manifest::cost;
use moejob_protocol::layout::{Layout, Placement};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// Of this text; another one is not understood.
const VERSION: u32 = 1;

/// Of both texts together. Longer ones are nobody's record, and are never written: a gang of 4,096
/// takes two thirds of it where names are long. The API server stores 1.5 MiB an object.
pub const RECORD_BYTES_MAX: usize = 1 << 20;

/// Attempts and workers of a job: one of each a second for 60 years.
const COUNT_MAX: u32 = 1 << 31;

/// What is restored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Saved {
    /// Of the leader that wrote it.
    pub term: u64,
    pub record: Record,
    pub recoveries: Vec<Recovery>,
    pub more: More,
    /// Fields of a newer operator, written back as they are.
    pub rest: Rest,
}

/// Fields by name.
pub type Rest = BTreeMap<String, Value>;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("status.record is not understood: {0}; restore it, or delete the job's status")]
    Text(String),
    #[error("status.record is of version {0}, this operator knows {VERSION}; use a newer one")]
    Version(u32),
}

/// The line for `status.record`.
pub fn write(saved: &Saved) -> String {
    let Saved { term, record, recoveries, rest, .. } = saved.clone();
    serde_json::to_string(&Line { v: VERSION, term, record, recoveries, rest }).unwrap_or_default()
}

/// # Errors
/// When the text is not such a line.
pub fn read(text: &str) -> Result<Saved, RecordError> {
    let saved = versioned::<Line>(text)?.saved();
    match saved.record.unsound() {
        None => Ok(saved),
        Some(what) => Err(RecordError::Text(what.to_string())),
    }
}

/// Both texts, of which each may be missing.
///
/// # Errors
/// When one of them is not understood: then nothing may be done for the job.
pub fn restore(record: &str, more: &str) -> Result<Saved, RecordError> {
    let mut saved = match record {
        "" => Saved::default(),
        text => read(text)?,
    };
    if !more.is_empty() {
        saved.more = more::read_more(more)?;
    }
    Ok(saved)
}

fn versioned<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T, RecordError> {
    #[derive(Deserialize)]
    struct Versioned {
        v: u32,
    }
    if text.len() > RECORD_BYTES_MAX {
        return Err(RecordError::Text(format!("it has {} bytes", text.len())));
    }
    let wrong = |error: serde_json::Error| RecordError::Text(error.to_string());
    let Versioned { v } = serde_json::from_str(text).map_err(wrong)?;
    if v != VERSION {
        return Err(RecordError::Version(v));
    }
    serde_json::from_str(text).map_err(wrong)
}

impl Record {
    /// What no leader could have written: whoever planned with it would count beyond its ends.
    fn unsound(&self) -> Option<&'static str> {
        let sound = |Layout { mesh, placement, .. }: &Layout| {
            let even = match placement {
                Placement::Contiguous => true,
                Placement::Ordered(layers) => layers.iter().all(|order| is_permutation(order)),
            };
            mesh.is_valid() && u64::from(mesh.world()) <= cost::RANKS_MAX && even
        };
        let earlier = self.layouts.iter().map(|(_, layout)| layout);
        if !earlier.chain(self.gang.iter().map(|gang| &gang.layout)).all(sound) {
            return Some("the layout of a gang is none");
        }
        let even = |gang: &Gang| {
            let world = gang.layout.mesh.world() as usize;
            !gang.members.is_empty() && world.is_multiple_of(gang.members.len())
        };
        if self.attempt.max(self.births) > COUNT_MAX {
            return Some("its attempts or workers are beyond all counting");
        }
        (!self.gang.iter().all(even)).then_some("its gang has members of different sizes")
    }
}

/// Whether `order` has each number below its length once.
fn is_permutation(order: &[u32]) -> bool {
    let mut seen = vec![false; order.len()];
    let is_new = |of: &u32| {
        seen.get_mut(*of as usize).is_some_and(|seen| !std::mem::replace(seen, true))
    };
    order.iter().all(is_new)
}

impl Saved {
    /// Times of another machine's clock, which may run ahead of this one's: none of them is later
    /// than now, or what is counted from them would wait for as long as the clocks differ.
    pub fn no_later_than(&mut self, now: Millis) {
        let clamp = |at: &mut Millis| *at = (*at).min(now);
        let record = &mut self.record;
        clamp(&mut record.progressed_at);
        record.restarts.iter_mut().for_each(clamp);
        record.stopping_since.iter_mut().for_each(clamp);
        record.start_failures.iter_mut().for_each(clamp);
        record.partings.iter_mut().for_each(|(.., at)| clamp(at));
        if let Some(gang) = &mut record.gang {
            clamp(&mut gang.started_at);
            gang.stop_requested.iter_mut().for_each(|(_, at)| clamp(at));
            gang.broken.iter_mut().for_each(|(at, _)| clamp(at));
            gang.ended.iter_mut().for_each(clamp);
        }
        for recovery in &mut self.recoveries {
            clamp(&mut recovery.detected_at);
            let Recovery { replanned_at, rejoined_at, first_step_at, .. } = recovery;
            let times = [replanned_at, rejoined_at, first_step_at];
            times.into_iter().flatten().for_each(clamp);
        }
        self.more.no_later_than(now);
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    v: u32,
    term: u64,
    #[serde(flatten)]
    record: Record,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    recoveries: Vec<Recovery>,
    #[serde(flatten)]
    rest: Rest,
}

impl Line {
    fn saved(self) -> Saved {
        let Line { term, mut record, recoveries, rest, .. } = self;
        if let Some(gang) = &mut record.gang {
            let ranks = gang.ranks_a_worker();
            for (index, member) in (0..).zip(&mut gang.members) {
                member.rank = index * ranks;
            }
        }
        Saved { term, record, recoveries, more: More::default(), rest }
    }
}

/// `[worker, node, address]` each, in rank order.
pub(crate) mod members {
    use moejob_protocol::config::Member;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(members: &[Member], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(members.iter().map(|of| (&of.worker, &of.node, &of.address)))
    }

    /// Their ranks follow from the layout.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Member>, D::Error> {
        let members = Vec::<(String, String, String)>::deserialize(from)?;
        let member = |(worker, node, address)| Member { rank: 0, worker, node, address };
        Ok(members.into_iter().map(member).collect())
    }
}

pub(crate) fn reason<'de, D: Deserializer<'de>>(from: D) -> Result<Reason, D::Error> {
    let found = String::deserialize(from)?;
    let known = reasons::ALL.iter().find(|known| **known == found);
    Ok(known.copied().unwrap_or("Failed"))
}
