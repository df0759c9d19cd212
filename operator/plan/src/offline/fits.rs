//! What would make a job fit that does not: of each thing that a person can change, the least.

use crate::job::Job;
use crate::placement;
use crate::profile::{Profile, Profiles};
use crate::words::several;
use moejob_protocol::config::Recompute;
use serde::Serialize;

/// Numbers of nodes beyond `nodes.max` that are tried.
const NODES_TRIED: u32 = 1024;
const NODES_MAX: u32 = 4096;
const DEVICES_MAX: u32 = 64;

/// One change, by which some number of nodes works.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Change {
    /// As it is to stand in the manifest, a line a field.
    pub set: Vec<String>,
    /// The fewest nodes that work then.
    pub nodes: u32,
}

impl Change {
    /// `spec.nodes.max: 6 (6 nodes work then)`.
    pub fn sentence(&self) -> String {
        let work = if self.nodes == 1 { "works" } else { "work" };
        format!("{} ({} {work} then)", self.set.join(", "), several(self.nodes, "node"))
    }
}

/// Of a job of which no number of nodes works. Changes of one thing; where none helps by itself,
/// all that spares memory together and then the nodes.
pub fn changes(job: &Job) -> Vec<Change> {
    let lacks = job.unsupported().len();
    // What the workers cannot do is no way out.
    let fits = |job: &Job| {
        let least = placement::sizes(job).0.first().map(|size| size.nodes)?;
        (job.unsupported().len() <= lacks).then_some(least)
    };
    let tried = [
        nodes(job, &fits),
        micro_batch(job, &fits),
        recompute(job, &fits),
        devices(job, &fits),
        profile(job, &fits),
        experts(job, &fits),
    ];
    let alone: Vec<Change> = tried.into_iter().flatten().collect();
    if !alone.is_empty() {
        return alone;
    }
    let mut least = job.clone();
    least.training.micro_batch_size = 1;
    let mut set = vec!["spec.training.microBatchSize: 1".to_string()];
    if spares(job) {
        least.training.recompute = Recompute::Full;
        set.push("spec.training.recompute: full".to_string());
    }
    let together = |change: Change| Change { set: [&set[..], &change.set].concat(), ..change };
    match fits(&least) {
        Some(nodes) => vec![Change { set, nodes }],
        None => nodes(&least, &fits).map(together).into_iter().collect(),
    }
}

/// More nodes than `max`, or fewer than `min`, whichever is nearer.
fn nodes(job: &Job, fits: &impl Fn(&Job) -> Option<u32>) -> Option<Change> {
    let with = |nodes: u32| {
        let mut changed = job.clone();
        (changed.nodes.min, changed.nodes.max) = (nodes, nodes);
        fits(&changed)
    };
    let (min, max) = (job.nodes.min, job.nodes.max);
    let most = max.saturating_add(NODES_TRIED).min(NODES_MAX);
    let more = (max + 1..=most).find_map(with);
    let fewer = (1..min).rev().find_map(with);
    let set = |field: &str, nodes: u32| Change {
        set: vec![format!("spec.nodes.{field}: {nodes}")],
        nodes,
    };
    match (fewer, more) {
        (Some(nodes), Some(other)) if min - nodes <= other - max => Some(set("min", nodes)),
        (_, Some(nodes)) => Some(set("max", nodes)),
        (Some(nodes), None) => Some(set("min", nodes)),
        (None, None) => None,
    }
}

/// The largest smaller one.
fn micro_batch(job: &Job, fits: &impl Fn(&Job) -> Option<u32>) -> Option<Change> {
    let all = job.training.global_batch_size;
    let smaller = (1..job.training.micro_batch_size).rev();
    let mut divisors = smaller.filter(|size| all.is_multiple_of(*size));
    divisors.find_map(|size| {
        let mut changed = job.clone();
        changed.training.micro_batch_size = size;
        let nodes = fits(&changed)?;
        Some(Change { set: vec![format!("spec.training.microBatchSize: {size}")], nodes })
    })
}

/// Whether something is left that could be computed again.
fn spares(job: &Job) -> bool {
    job.training.recompute != Recompute::Full
}

/// That which computes least again.
fn recompute(job: &Job, fits: &impl Fn(&Job) -> Option<u32>) -> Option<Change> {
    let all = [
        (Recompute::Selective, "selective"),
        (Recompute::Experts, "experts"),
        (Recompute::Full, "full"),
    ];
    let now = match job.training.recompute {
        Recompute::None => 0,
        Recompute::Selective => 1,
        Recompute::Experts | Recompute::Every(_) => 2,
        Recompute::Full => 3,
    };
    all[now..].iter().find_map(|(recompute, name)| {
        let mut changed = job.clone();
        changed.training.recompute = *recompute;
        let nodes = fits(&changed)?;
        Some(Change { set: vec![format!("spec.training.recompute: {name}")], nodes })
    })
}

/// Where the job says how many devices a node has, the nearest other number.
fn devices(job: &Job, fits: &impl Fn(&Job) -> Option<u32>) -> Option<Change> {
    if !job.profile.devices_are_the_jobs() {
        return None;
    }
    let now = job.profile.ranks;
    let mut others: Vec<u32> = (1..=DEVICES_MAX).filter(|count| *count != now).collect();
    others.sort_by_key(|count| (count.abs_diff(now), *count));
    others.into_iter().find_map(|count| {
        let mut changed = job.clone();
        changed.profile = Profile {
            ranks: count,
            devices: if job.profile.devices > 0 { count } else { 0 },
            nvlink_domain: if job.profile.devices > 0 { count } else { 1 },
            ..job.profile.clone()
        };
        let nodes = fits(&changed)?;
        Some(Change { set: vec![format!("spec.nodes.devicesPerNode: {count}")], nodes })
    })
}

/// A shipped machine whose devices have more memory: the one with the least of it.
fn profile(job: &Job, fits: &impl Fn(&Job) -> Option<u32>) -> Option<Change> {
    let has = job.profile.rank_memory?;
    let shipped = Profiles::shipped();
    let all = shipped.names().filter_map(|name| shipped.get(name));
    let larger = all.filter(|of| {
        of.backend == job.profile.backend && of.rank_memory.is_some_and(|bytes| bytes > has)
    });
    let mut larger: Vec<&Profile> = larger.collect();
    larger.sort_by(|a, b| (a.rank_memory, &a.name).cmp(&(b.rank_memory, &b.name)));
    larger.into_iter().find_map(|profile| {
        let changed = Job { profile: profile.clone(), ..job.clone() };
        let nodes = fits(&changed)?;
        Some(Change { set: vec![format!("spec.nodes.profile: {}", profile.name)], nodes })
    })
}

/// A degree of expert parallelism that the job gives itself.
fn experts(job: &Job, fits: &impl Fn(&Job) -> Option<u32>) -> Option<Change> {
    job.expert_parallel?;
    let changed = Job { expert_parallel: None, ..job.clone() };
    let nodes = fits(&changed)?;
    Some(Change { set: vec!["spec.parallelism.expert: auto".to_string()], nodes })
}
