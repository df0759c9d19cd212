//! A job whose record is not understood: nothing is done for it, and its record stays as it is.
//!
//! Its pods may train, its attempt number may be higher than anything that is known: whoever
//! dialled, deleted or wrote would destroy what only a newer operator, or a person with a backup,
//! can read.

use crate::words::{one_or_more, several};
use super::spec::sealed_by;
use super::{JobSeen, Owner};
use crate::pods::LABEL_JOB_UID;
use crate::record::RecordError;
use serde_json::Value;

/// The reason of the event that tells of it.
pub const FENCED_BY_RECORD: &str = "BadRecord";

#[derive(Clone, Debug, PartialEq)]
pub struct Fence {
    pub message: String,
    /// Both parts of the record, as they are not understood.
    record: [Value; 2],
}

impl Fence {
    pub(super) fn of(error: &RecordError, seen: &JobSeen) -> Fence {
        Fence { message: error.to_string(), record: record_of(seen) }
    }

    /// Somebody has restored or removed the record: the job is to be taken anew.
    pub fn is_lifted(&self, seen: &JobSeen) -> bool {
        record_of(seen) != self.record
    }
}

fn record_of(seen: &JobSeen) -> [Value; 2] {
    ["record", "recordMore"].map(|field| seen.status[field].clone())
}

/// Why whoever has this keyring must not lead: jobs train whose pods another one has sealed. `pods`
/// are, of each pod that has not ended, the job that it says it is of.
pub fn unfit<'s>(
    jobs: impl Iterator<Item = &'s JobSeen>,
    pods: impl Iterator<Item = &'s Owner>,
    keyring: &str,
) -> Option<String> {
    let by_others = |seen: &&JobSeen| sealed_by(&seen.status).is_some_and(|by| by != keyring);
    let owners: Vec<Owner> = jobs.filter(by_others).map(JobSeen::owner).collect();
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn seen(status: Value) -> JobSeen {
        JobSeen { status, ..JobSeen::default() }
    }

    #[test]
    fn a_fence_stands_until_a_part_of_the_record_is_another() {
        let error = RecordError::Version(7);
        let status = json!({ "record": "a", "recordMore": "b", "phase": "Training" });
        let fence = Fence::of(&error, &seen(status.clone()));
        assert_eq!(fence.message, error.to_string());
        assert!(!fence.is_lifted(&seen(status.clone())));
        for (field, value, lifted) in [
            ("record", json!("restored"), true),
            ("record", Value::Null, true),
            ("recordMore", json!("restored"), true),
            ("recordMore", Value::Null, true),
            ("phase", json!("Failed"), false),
            ("conditions", json!([]), false),
        ] {
            let mut status = status.clone();
            status[field] = value.clone();
            assert_eq!(fence.is_lifted(&seen(status)), lifted, "{field}: {value}");
        }
        assert!(fence.is_lifted(&seen(json!({}))), "both were removed");
        // A record of one part alone.
        let half = seen(json!({ "record": "a" }));
        assert!(!Fence::of(&error, &half).is_lifted(&half));
    }
}
