//! Two jobs that write checkpoints to one folder would fence each other in turn: the later one
//! waits until the earlier one is over.

use crate::observed::Millis;
use crate::pods::places;
use moejob_manifest::job::Job;
use moejob_manifest::workspace::volume_of;
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
