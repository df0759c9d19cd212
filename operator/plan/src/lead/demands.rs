//! What the jobs of a leader ask of the allocation, and which of them something keeps from asking.

use super::JobLoop;
use crate::allocate::{Barred, Demand};
use crate::locations::{self, Tenant};
use crate::observed::Outcome;
use std::collections::{BTreeMap, BTreeSet};

/// Of all jobs by their owners. `holds` are the nodes of each job's pods that have not ended;
/// `priority` says what a PriorityClass is worth, and whether jobs of lower ones stop for its.
pub fn demands<'j>(
    jobs: impl Iterator<Item = (&'j str, &'j JobLoop)> + Clone,
    mut holds: BTreeMap<&str, BTreeSet<String>>,
    priority: impl Fn(&str) -> (i32, bool),
) -> Vec<Demand> {
    let tenants: Vec<Tenant> = jobs.clone().filter_map(tenant).collect();
    let waiting = locations::waiting(&tenants);
    let demand = |(owner, state): (&'j str, &'j JobLoop)| {
        let job = state.job()?;
        let (observed, needs) = (&state.tracker.observed, state.spec.needs.clone());
        let holds = holds.remove(owner).unwrap_or_default();
        let (priority, preempts) = priority(&job.kubernetes.priority_class_name);
        // Nobody stops for a job again and again whose pods are then refused.
        let is_taken = state.refusals.of.times == 0;
        let demand = Demand::of(job, observed, state.claim(), needs, owner, holds);
        let demand = Demand {
            priority,
            preempts: preempts && is_taken,
            created: state.created_at,
            since: demand.since.filter(|_| is_taken),
            ..demand
        };
        let earlier = waiting.get(owner).cloned().map(Barred::Location);
        let refused = state.refusals.standing_back().map(|_| Barred::Refused);
        Some(match earlier.or(refused) {
            Some(why) => demand.barred_by(why),
            None => demand,
        })
    };
    let mut demands: Vec<Demand> = jobs.filter_map(demand).collect();
    // Pods of jobs that are not planned (being deleted, or not known yet) hold their nodes all the
    // same: nobody else's worker comes there before they have ended.
    demands.extend(holds.into_iter().map(|(owner, holds)| Demand::unplanned(owner, holds)));
    demands
}

/// It is not over.
fn tenant<'j>((owner, state): (&'j str, &'j JobLoop)) -> Option<Tenant<'j>> {
    let record = &state.tracker.observed.record;
    let over = record.outcome.as_ref().is_some_and(|of| *of != Outcome::Suspended);
    let (namespace, created) = (&*state.id.namespace, state.created_at);
    let (job, runs) = (state.job()?, record.attempt > 0 && record.outcome.is_none());
    (!over).then_some(Tenant { owner, namespace, job, created, runs })
}
