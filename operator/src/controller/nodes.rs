//! The nodes of each job, decided for all jobs together: `moejob_plan::allocate` over what is seen.

use super::crew::Crew;
use crate::observe::{self, NodeSeen, Owner};
use moejob_plan::allocate::{
    Allocation, ClusterNode, Demand, Ground, Memory, Taint, allocate_on, unhealthy,
    unhealthy_label,
};
use moejob_plan::fabric::Keys;
use moejob_plan::locations::{self, Tenant};
use moejob_plan::observed::{Millis, Outcome};
use moejob_plan::resources::Resources;
use std::collections::{BTreeSet, HashMap};

/// Decides anew. Only jobs that can be planned take part; the pods of others keep their nodes.
/// `ground` is what is known of the nodes, None after one of them has changed.
pub fn decide(
    seen: &observe::Cluster,
    (ground, keys): (&mut Option<Ground>, &Keys),
    states: &HashMap<Owner, Crew>,
    memory: &mut Memory,
    now: Millis,
) -> Allocation {
    memory.expire(now);
    let mut holds: HashMap<&str, BTreeSet<String>> = seen.held().collect();
    let ground = ground.get_or_insert_with(|| {
        let nodes = seen.nodes.values();
        let nodes = nodes.map(|node| cluster_node(node, seen.requested(&node.name)));
        Ground::new(nodes.collect(), keys)
    });
    let waiting = locations::waiting(&tenants(states));
    let jobs = states.iter().filter_map(|(owner, Crew { job: state, .. })| {
        let job = state.job()?;
        let priority = seen.priority(&job.kubernetes.priority_class_name);
        let who = (&**owner, priority, state.created_at());
        let holds = holds.remove(&**owner).unwrap_or_default();
        let (observed, needs) = (&state.tracker().observed, state.needs().clone());
        let mut demand = Demand::of(job, observed, state.claim(), needs, who, holds);
        if state.stands_back() || waiting.contains_key(&**owner) {
            (demand.sizes, demand.spares) = (Vec::new(), 0);
        }
        Some(demand)
    });
    let mut demands = jobs.collect();
    keep_apart(&mut demands, holds);
    let mut allocation = allocate_on(ground, &demands, memory, now);
    for (owner, granted) in &mut allocation.jobs {
        let stands_back = |Crew { job, .. }: &Crew| {
            job.stands_back() && job.tracker().observed.gang().is_none()
        };
        if states.get(owner.as_str()).is_some_and(stands_back) {
            granted.nodes.clear();
        }
        if let Some(earlier) = waiting.get(owner) {
            granted.nodes.clear();
            granted.why = format!(
                "its checkpoint.location is that of the job {earlier}, which is not over"
            );
        }
    }
    allocation
}

/// The jobs that are not over.
fn tenants(states: &HashMap<Owner, Crew>) -> Vec<Tenant<'_>> {
    let each = states.iter().filter_map(|(owner, Crew { job: state, .. })| {
        let observed = &state.tracker().observed;
        let record = &observed.record;
        let over = record.outcome.as_ref().is_some_and(|of| *of != Outcome::Suspended);
        let (namespace, created) = (&*state.id().namespace, state.created_at());
        let (job, runs) = (state.job()?, record.attempt > 0 && record.outcome.is_none());
        (!over).then_some(Tenant { owner, namespace, job, created, runs })
    });
    each.collect()
}

/// Pods of jobs that are not planned (being deleted, or not known yet) hold their nodes all the
/// same: nobody else's worker comes there before they have ended.
fn keep_apart(jobs: &mut Vec<Demand>, holds: HashMap<&str, BTreeSet<String>>) {
    for (owner, holds) in holds {
        jobs.push(Demand {
            uid: owner.to_string(),
            priority: 0,
            created: 0,
            sizes: Vec::new(),
            spares: 0,
            groups: Default::default(),
            topology: None,
            needs: Default::default(),
            holds,
            leaving: Default::default(),
            standing: moejob_plan::allocate::Standing::Running,
        });
    }
}

/// As allocation judges it.
pub(crate) fn cluster_node(node: &NodeSeen, requested: Resources) -> ClusterNode {
    let conditions = node.conditions.iter();
    let taints = node.taints.iter().map(|(key, value, effect)| Taint {
        key: key.clone(),
        value: value.clone(),
        effect: effect.clone(),
    });
    ClusterNode {
        name: node.name.clone(),
        labels: node.labels.clone(),
        ready: node.is_ready(),
        cordoned: node.cordoned,
        unhealthy: unhealthy(conditions.map(|(name, status)| (name.as_str(), status.as_str())))
            .or_else(|| unhealthy_label(&node.labels)),
        taints: taints.collect(),
        allocatable: node.allocatable.clone(),
        requested,
    }
}
