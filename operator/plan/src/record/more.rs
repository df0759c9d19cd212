//! What version 1 of the record has no place for: releases before refuse a record with another
//! field, and must be able to read what this one leaves. It stands in a field of its own.

use super::{Rest, VERSION};
use crate::engines::EngineLoss;
use crate::observed::{Gang, Millis};
use moejob_manifest::profile::Profile;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Nodes of which a job remembers that they are to rest; the one that was longest ago goes first.
pub const RESTS_MAX: usize = 256;
/// No time to come lies further ahead: what another machine's clock says of it may be wrong.
const AHEAD_MAX: Millis = 1_200_000;

/// Fields that are as they were at first are left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct More {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted: Option<Accepted>,
    /// Names the key by which the job's pods were sealed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub keyring: String,
    /// What the job's profile said when it was accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
    #[serde(skip_serializing_if = "is_first")]
    pub pods: GangPods,
    /// Of pods that the API server did not take.
    #[serde(skip_serializing_if = "is_first")]
    pub refused: Refused,
    /// By node: failures in a row, the last of them, and until when it rests.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub rests: BTreeMap<String, NodeRest>,
    /// Engines that were lost lately, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub engines_lost: Vec<EngineLoss>,
    #[serde(flatten)]
    pub rest: Rest,
}

/// Failures in a row, when the last one was, and until when no worker comes there.
pub type NodeRest = (u32, Millis, Millis);

fn is_first<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The newest spec that was accepted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Accepted {
    pub generation: i64,
    /// Of the fields that may change, by their paths.
    pub values: Map<String, Value>,
}

/// A profile as a job knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Machine {
    pub name: String,
    /// Of all that the profile says.
    pub digest: String,
    /// GPUs and ranks of a node: layouts of the job rest on them.
    pub devices: u32,
    pub ranks: u32,
}

impl Machine {
    pub fn of(profile: &Profile) -> Machine {
        let Profile { name, digest, devices, ranks, .. } = profile;
        let (name, digest) = (name.clone(), digest.clone());
        Machine { name, digest, devices: *devices, ranks: *ranks }
    }
}

/// The pods of a gang.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GangPods {
    pub attempt: u32,
    /// What all of them run.
    pub image: String,
    /// Uid and protocol of each member's, in the order of the record's members.
    pub members: Vec<(String, u32)>,
}

impl GangPods {
    /// Of the gang's members in their order; nothing if this speaks of another gang.
    pub fn of(&self, gang: &Gang) -> &[(String, u32)] {
        let same = gang.attempt == self.attempt && gang.members.len() == self.members.len();
        if same { &self.members } else { &[] }
    }
}

/// What is known of pods that the API server did not take.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Refused {
    /// The first one since all pods were taken, and the newest.
    pub since: Option<(Millis, Millis)>,
    /// The job stands back until then.
    pub until: Option<Millis>,
    pub times: u32,
    /// Reason and message of the last one before it stood back.
    pub why: (String, String),
}

impl More {
    /// See `Saved::no_later_than`. Of what is to come only so much is believed as this leader would
    /// have said itself.
    pub(super) fn no_later_than(&mut self, now: Millis) {
        let clamp = |at: &mut Millis| *at = (*at).min(now);
        if let Some((first, newest)) = &mut self.refused.since {
            clamp(first);
            clamp(newest);
        }
        self.engines_lost.iter_mut().for_each(|loss| clamp(&mut loss.at));
        self.refused.until.iter_mut().for_each(|at| *at = (*at).min(now + AHEAD_MAX));
        for (_, last, until) in self.rests.values_mut() {
            clamp(last);
            *until = (*until).min(now + AHEAD_MAX);
        }
    }
}

/// The line for `status.recordMore`.
pub fn write_more(more: &More) -> String {
    #[derive(Serialize)]
    struct Line<'a> {
        v: u32,
        #[serde(flatten)]
        more: &'a More,
    }
    serde_json::to_string(&Line { v: VERSION, more }).unwrap_or_default()
}

pub(super) fn read_more(text: &str) -> Result<More, super::RecordError> {
    let mut more: More = super::versioned(text)?;
    // The version is no field that somebody else has added.
    more.rest.remove("v");
    Ok(more)
}
