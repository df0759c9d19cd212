//! Two jobs that write checkpoints to one folder would fence each other in turn: the later one
//! waits until the earlier one is over.

use crate::job::Job;
use crate::observed::Millis;
use crate::pods::{places, volume_of};
use std::collections::BTreeMap;

/// A job that has begun or may begin.
#[derive(Clone, Copy, Debug)]
pub struct Tenant<'a> {
    /// See `lead::owner`.
    pub owner: &'a str,
    pub namespace: &'a str,
    pub job: &'a Job,
    pub created: Millis,
    /// It has begun, and its claims lie there: it is not asked to wait.
    pub runs: bool,
}

/// Where a job's checkpoints lie: namespace, claim, and the path on it.
fn place(tenant: &Tenant) -> Option<(String, String, String)> {
    let location = places(tenant.job).checkpoints;
    let (volume, rest) = volume_of(tenant.job, &location)?;
    Some((tenant.namespace.to_string(), volume.claim.clone()?, rest.to_string()))
}

/// The jobs that wait, by their owners, and the name of the job that each waits for. Jobs that are
/// over are not among `tenants`.
pub fn waiting(tenants: &[Tenant]) -> BTreeMap<String, String> {
    let mut first: BTreeMap<(String, String, String), &Tenant> = BTreeMap::new();
    let mut ordered: Vec<&Tenant> = tenants.iter().collect();
    // One that runs has the folder, whoever was made first.
    ordered.sort_by_key(|tenant| (!tenant.runs, tenant.created, tenant.owner));
    let mut waiting = BTreeMap::new();
    for tenant in ordered {
        let Some(place) = place(tenant) else { continue };
        match first.get(&place) {
            None => drop(first.insert(place, tenant)),
            Some(_) if tenant.runs => {}
            Some(earlier) => {
                waiting.insert(tenant.owner.to_string(), earlier.job.name.clone());
            }
        }
    }
    waiting
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn job(name: &str, location: &str, claim: &str) -> Job {
        let spec = json!({
            "nodes": {"min": 1, "max": 1},
            "model": {"preset": "tiny"},
            "data": {"train": {"text": {"paths": ["a"]}}, "sequenceLength": 8},
            "training": {"steps": 1, "globalBatchSize": 8},
            "checkpoint": {"location": location},
            "volumes": [{"mountPath": "checkpoints", "claim": claim}],
        });
        let spec = serde_json::from_value(spec).expect("a spec");
        let job = Job::from_spec(name, &spec, crate::profile::Profiles::shipped());
        job.unwrap_or_else(|problems| panic!("{problems:?}"))
    }

    #[test]
    fn the_later_of_two_jobs_with_one_location_waits() {
        let jobs = [
            job("a", "checkpoints/x", "c"),
            job("b", "checkpoints//x/", "c"),
            job("other-folder", "checkpoints/y", "c"),
            job("other-claim", "checkpoints/x", "d"),
        ];
        let of = |index: usize, namespace, created, runs| Tenant {
            owner: ["o0", "o1", "o2", "o3"][index],
            namespace,
            job: &jobs[index],
            created,
            runs,
        };
        let all = |a_runs, b_runs, b_in| {
            let all = [
                of(0, "n", 2, a_runs),
                of(1, b_in, 1, b_runs),
                of(2, "n", 3, false),
                of(3, "n", 4, false),
            ];
            Vec::from_iter(waiting(&all))
        };
        let waits = |owner: &str, name: &str| vec![(owner.to_string(), name.to_string())];
        assert_eq!(all(false, false, "n"), waits("o0", "b"), "b is older");
        assert_eq!(all(true, false, "n"), waits("o1", "a"), "a runs");
        assert_eq!(all(true, true, "n"), [], "neither is stopped");
        assert_eq!(all(false, false, "m"), [], "another namespace's claim");
    }
}
