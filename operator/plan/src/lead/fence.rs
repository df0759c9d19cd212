//! A job whose record is not understood, or that another operator leads: nothing is done for it,
//! and its record stays as it is.
//!
//! Its pods may train, its attempt number may be higher than anything that is known: whoever
//! dialled, deleted or wrote would destroy what only a newer operator, or a person with a backup,
//! can read.

use super::spec::{restored, sealed_by};
use super::{Effect, JobLoop, JobSeen, Link, Owner};
use crate::observed::Millis;
use crate::pods::LABEL_JOB_UID;
use crate::record::RecordError;
use moejob_manifest::words::{one_or_more, several};
use serde::Deserialize;
use serde_json::json;

/// The reason of the event that tells of it.
pub const FENCED_BY_RECORD: &str = "BadRecord";

/// Who stands back from another operator looks again once that has written nothing for so long.
const OTHER_GONE_AFTER: Millis = 600_000;

#[derive(Clone, Debug, PartialEq)]
pub struct Fence {
    pub message: String,
    /// Until then another operator is given the job; None where its record is not understood.
    until: Option<Millis>,
}

impl Fence {
    pub(super) fn of(error: &RecordError) -> Fence {
        Fence { message: error.to_string(), until: None }
    }

    pub(super) fn until(&self) -> Option<Millis> {
        self.until
    }

    /// Its record is not understood, as metrics tell.
    pub fn is_of_record(&self) -> bool {
        self.until.is_none()
    }
}

/// Both parts of a record, known again without being kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Found(blake3::Hash);

impl Found {
    pub fn of(seen: &JobSeen) -> Found {
        let parts = ["record", "recordMore"].map(|field| &seen.status[field]);
        Found(blake3::hash(json!(parts).to_string().as_bytes()))
    }
}

impl JobLoop {
    /// It is to be taken anew as it stands now, by a loop that knows nothing of it yet: somebody
    /// has restored or removed a record that was not understood, or a leader before this one has
    /// written another record after this one had looked. What this one knows is then older.
    pub fn is_to_be_taken_anew(&self, seen: &JobSeen) -> bool {
        if self.fence.as_ref().is_some_and(|fence| fence.until.is_some()) {
            return false;
        }
        // What it writes itself it writes on the newest version: nobody's word comes after it.
        if seen.deleted || self.report.has_written || !self.place.has_api() {
            return false;
        }
        if Found::of(seen) == self.found {
            return false;
        }
        let removed = seen.status["record"].as_str().is_none_or(str::is_empty);
        match restored(&seen.status) {
            _ if self.fence.is_some() => true,
            // Nothing is known by it, and attempts have to count on.
            Ok(_) if removed => false,
            Ok(saved) => saved.term < self.term,
            Err(_) => true,
        }
    }
}

impl JobLoop {
    /// This leader has written a status, and another one stands there.
    pub(super) fn look_for_others(&mut self, seen: &JobSeen, now: Millis) {
        if !self.place.has_api() || !self.report.is_newest(&seen.resource_version) {
            return;
        }
        if seen.status["record"].as_str().is_none_or(str::is_empty) {
            let note = "somebody has emptied status.record: it is written again";
            self.event(true, "RecordRemoved", note.to_string(), now);
            self.report.unsaved = true;
            return;
        }
        let Some(other) = self.other_author(seen) else { return };
        let own = self.operator.keyring.clone();
        // Who has a gang leads on. Else that is who comes first by the names of the authorities:
        // both of them know those.
        let has_gang = self.tracker.observed.gang().is_some();
        let others_gang = sealed_by(&seen.status).is_some_and(|by| by == other);
        let stays = if has_gang == others_gang { own < other } else { has_gang };
        let what = if stays { "leads on" } else { "stands back" };
        let note = format!(
            "another operator, whose authority is {other}, writes the status of this job; this \
             one's, in namespace {}, is {own}, and it {what}: who has a gang leads, else the lower \
             of these names. A cluster has one operator, remove the other",
            self.operator.namespace
        );
        self.event(true, "AnotherOperator", note.clone(), now);
        if !stays {
            self.note(true, note.clone());
            self.found = Found::of(seen);
            self.stand_back(note, now);
        }
    }

    /// By the status; none where that is this operator.
    fn other_author(&self, seen: &JobSeen) -> Option<String> {
        /// All else of it is passed over: each own status comes by here.
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Author {
            keyring: String,
        }
        let more = seen.status["recordMore"].as_str().unwrap_or_default();
        // What is not understood is told at the next takeover.
        let Author { keyring } = serde_json::from_str(more).unwrap_or_default();
        (!keyring.is_empty() && keyring != self.operator.keyring).then_some(keyring)
    }

    /// The other one is not disturbed: streams end, and nothing more is written.
    fn stand_back(&mut self, message: String, now: Millis) {
        let linked = |name: &&String| self.pods.is_linked(name);
        let names = self.tracker.observed.workers.iter().map(|worker| &worker.name);
        for name in names.filter(linked).cloned().collect::<Vec<_>>() {
            self.pods.unlinked(&name);
            self.effects.push(Effect::Link(Link::Close { name }));
        }
        self.fence = Some(Fence { message, until: Some(now + OTHER_GONE_AFTER) });
    }

    /// While the other one writes it is given the job.
    pub(super) fn hear_while_fenced(&mut self, seen: &JobSeen, now: Millis) {
        let Some(until) = self.fence.as_mut().and_then(|fence| fence.until.as_mut()) else {
            return;
        };
        // Lists bring it again as it was, and people edit the spec.
        let found = Found::of(seen);
        if found != self.found {
            (self.found, *until) = (found, now + OTHER_GONE_AFTER);
        }
    }

    /// It stood back from another operator, of which nothing is seen any more: whoever holds this
    /// loop takes the job anew.
    pub fn has_stood_back(&self, now: Millis) -> bool {
        let until = self.fence.as_ref().and_then(|fence| fence.until);
        until.is_some_and(|until| now >= until)
    }
}

/// Why whoever has this keyring must not lead: jobs train whose pods another one has sealed. `pods`
/// are, of each pod that has not ended, the job that it says it is of.
pub fn unfit<'s>(
    jobs: impl Iterator<Item = JobSeen>,
    pods: impl Iterator<Item = &'s Owner>,
    keyring: &str,
) -> Option<String> {
    let by_others = |seen: &JobSeen| sealed_by(&seen.status).is_some_and(|by| by != keyring);
    let owners: Vec<Owner> = jobs.filter(by_others).map(|seen| seen.owner()).collect();
    let pods = pods.filter(|owner| owners.contains(owner)).count();
    (pods > 0).then(|| {
        format!(
            "the authority's Secret is not the one by which {} of {} {} made: \
             restore it from a copy, or delete those pods (label {LABEL_JOB_UID})",
            several(pods, "pod"),
            several(owners.len(), "job"),
            one_or_more(pods, "was", "were")
        )
    })
}
