//! What would make a job fit that does not: of each thing that a person can change, the least.

use crate::placement;
use moejob_manifest::cost::{Budget, Extent};
use moejob_manifest::job::Job;
use moejob_manifest::profile::{Profile, Profiles};
use moejob_manifest::words::several;
use moejob_protocol::config::{Backend, Offload, Recompute};
use moejob_protocol::zero::Zero;
use serde::Serialize;
use std::cell::Cell;

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

/// How a search is told that was cut.
pub const CUT: &str = ", as far as it was tried";

/// What was found, and whether there was more to try.
#[derive(Default)]
pub struct Search {
    pub changes: Vec<Change>,
    pub cut: bool,
}

/// The fewest nodes by which a job works.
type Fits<'a> = &'a dyn Fn(&Job) -> Option<u32>;

/// One thing that a person can change.
type Kind = fn(&Job, Fits) -> Option<Change>;

/// Of a job of which no number of nodes works. Changes of one thing; where none helps by itself,
/// all that spares memory together and then the nodes. Each kind of change is tried for as many
/// `steps` (`cost`), so that one that takes long hides no other.
pub fn changes(job: &Job, steps: u64) -> Search {
    let (lacks, extent) = (job.unsupported().len(), Extent::of(&job.model));
    let cut = Cell::new(false);
    let tried = |kind: Kind, job: &Job| {
        let budget = Budget::new(steps);
        let fits = |job: &Job| {
            // What the workers cannot do is no way out.
            let tries = !budget.is_short() && job.unsupported().len() <= lacks;
            tries.then(|| placement::least(job, extent, &budget)).flatten()
        };
        let found = kind(job, &fits);
        cut.set(cut.get() || budget.is_short());
        found
    };
    let kinds: [Kind; 8] =
        [nodes, micro_batch, recompute, zero, offload, devices, profile, experts];
    let mut changes: Vec<Change> = kinds.iter().filter_map(|kind| tried(*kind, job)).collect();
    if changes.is_empty() {
        let mut least = job.clone();
        least.training.micro_batch_size = 1;
        let mut set = vec!["spec.training.microBatchSize: 1".to_string()];
        if spares(job) {
            least.training.recompute = Recompute::Full;
            set.push("spec.training.recompute: full".to_string());
        }
        let as_it_is: Kind = |job, fits| Some(Change { set: Vec::new(), nodes: fits(job)? });
        let found = tried(as_it_is, &least).or_else(|| tried(nodes, &least));
        let together = |of: Change| Change { set: [&set[..], &of.set].concat(), ..of };
        changes.extend(found.map(together));
    }
    Search { changes, cut: cut.get() }
}

/// More nodes than `max`, or fewer than `min`, whichever is nearer.
fn nodes(job: &Job, fits: Fits) -> Option<Change> {
    let among = |min: u32, max: u32| {
        let mut changed = job.clone();
        (changed.nodes.min, changed.nodes.max) = (min, max);
        fits(&changed)
    };
    let (min, max) = (job.nodes.min, job.nodes.max);
    let most = max.saturating_add(NODES_TRIED).min(NODES_MAX);
    let more = among(max + 1, most);
    let fewer = (1..min).rev().find_map(|nodes| among(nodes, nodes));
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
fn micro_batch(job: &Job, fits: Fits) -> Option<Change> {
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
fn recompute(job: &Job, fits: Fits) -> Option<Change> {
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

/// Dense parameters of GPUs with their owners alone: gradients, then weights as well.
fn zero(job: &Job, fits: Fits) -> Option<Change> {
    if job.training.compute.backend == Backend::Cpu {
        return None;
    }
    let more = [(Zero::Gradients, 2), (Zero::Weights, 3)];
    let mut more = more.into_iter().filter(|(zero, _)| *zero > job.training.compute.zero);
    more.find_map(|(zero, stage)| {
        let mut changed = job.clone();
        changed.training.compute.zero = zero;
        let nodes = fits(&changed)?;
        Some(Change { set: vec![format!("spec.parallelism.zero: {stage}")], nodes })
    })
}

/// Optimizer state of GPUs on their hosts.
fn offload(job: &Job, fits: Fits) -> Option<Change> {
    let compute = &job.training.compute;
    if compute.backend == Backend::Cpu || compute.offload == Offload::Host {
        return None;
    }
    let mut changed = job.clone();
    changed.training.compute.offload = Offload::Host;
    let nodes = fits(&changed)?;
    Some(Change { set: vec!["spec.training.offload: host".to_string()], nodes })
}

/// Where the job says how many devices a node has, the nearest other number.
fn devices(job: &Job, fits: Fits) -> Option<Change> {
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
fn profile(job: &Job, fits: Fits) -> Option<Change> {
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
fn experts(job: &Job, fits: Fits) -> Option<Change> {
    job.expert_parallel?;
    let changed = Job { expert_parallel: None, ..job.clone() };
    let nodes = fits(&changed)?;
    Some(Change { set: vec!["spec.parallelism.expert: auto".to_string()], nodes })
}
