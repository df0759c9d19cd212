//! Which gangs work: mesh x model -> sizes, with what each rank then needs; and why others do not.

use crate::job::Job;
use crate::observed::Size;
use crate::profile::Backend;
use moejob_protocol::Mesh;
use moejob_protocol::config::RecoveryConfig;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{RankMemory, rank_memory};

/// A number of nodes that the job cannot use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    pub nodes: u32,
    pub why: String,
}

/// The sizes between min and max that work, ascending, and the others.
pub fn sizes(job: &Job) -> (Vec<Size>, Vec<Skipped>) {
    let (mut sizes, mut skipped) = (Vec::new(), Vec::new());
    for nodes in job.nodes.min..=job.nodes.max {
        match layout(job, nodes) {
            Ok(layout) => sizes.push(Size { nodes, layout }),
            Err(why) => skipped.push(Skipped { nodes, why }),
        }
    }
    (sizes, skipped)
}

/// How `nodes` nodes are laid out, or why they cannot be.
pub fn layout(job: &Job, nodes: u32) -> Result<Layout, String> {
    let dp = nodes * job.profile.ranks;
    let micro_batches = job.micro_batches();
    if dp > micro_batches {
        return Err(format!("{dp} ranks for {micro_batches} micro-batches"));
    }
    if let Some(ep) = job.expert_parallel {
        if !divides(ep, dp) {
            return Err(format!("expert: {ep} does not divide {dp} ranks"));
        }
        return fit(job, dp, ep);
    }
    let mut least = None;
    for ep in preferences(job, dp) {
        match fit(job, dp, ep) {
            Ok(layout) => return Ok(layout),
            Err(why) => least = Some(why),
        }
    }
    Err(least.unwrap_or_else(|| format!("no expert parallelism divides {dp} ranks")))
}

/// Degrees of expert parallelism in the order in which they are tried: on processors the largest, on
/// GPUs the largest within an NVLink domain, then, for memory's sake, ever larger ones.
fn preferences(job: &Job, dp: u32) -> Vec<u32> {
    let most = dp.min(job.model.experts.count);
    let mut degrees: Vec<u32> = (1..=most).filter(|ep| divides(*ep, dp)).collect();
    if job.profile.backend == Backend::Cpu {
        degrees.reverse();
        return degrees;
    }
    let near: Vec<u32> =
        degrees.iter().copied().filter(|ep| *ep <= job.profile.nvlink_domain).collect();
    let far = degrees.into_iter().filter(|ep| *ep > job.profile.nvlink_domain);
    near.last().copied().into_iter().chain(far).collect()
}

fn fit(job: &Job, dp: u32, ep: u32) -> Result<Layout, String> {
    let layout = Layout::contiguous(Mesh::data_parallel(dp, ep));
    let Some(limit) = job.profile.rank_memory else { return Ok(layout) };
    let needed = memory(job, &layout, 0).committed;
    if needed > limit {
        return Err(format!("a rank needs {} and has {}", gib(needed), gib(limit)));
    }
    Ok(layout)
}

/// What `rank` needs.
pub fn memory(job: &Job, layout: &Layout, rank: u32) -> RankMemory {
    rank_memory(&job.model, layout, rank, &job.training, &recovery(job))
}

fn recovery(job: &Job) -> RecoveryConfig {
    RecoveryConfig {
        heartbeat_timeout_ms: job.recovery.heartbeat_timeout,
        step_timeout_ms: job.recovery.step_timeout.unwrap_or(0),
        orphan_timeout_ms: job.recovery.orphan_timeout.unwrap_or(0),
        memory_every_steps: job.recovery.memory_every_steps,
    }
}

pub fn divides(degree: u32, ranks: u32) -> bool {
    degree > 0 && ranks % degree == 0
}

/// `1.5 GiB`, `12.3 MiB`.
pub fn gib(bytes: u64) -> String {
    let mib = bytes as f64 / (1 << 20) as f64;
    if mib >= 1024.0 { format!("{:.1} GiB", mib / 1024.0) } else { format!("{mib:.1} MiB") }
}
