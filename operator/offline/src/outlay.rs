//! The time and the cost of a whole training, and the kinds of machines that would do it.

use super::time::{duration, step_time};
use moejob_manifest::cost::{Budget, CHANGES_LED_MAX, Extent};
use moejob_manifest::job::Job;
use moejob_manifest::profile::Profiles;
use moejob_manifest::words::{aligned, several};
use moejob_plan::placement::{self, gib};
use moejob_protocol::config::Backend;
use serde::Serialize;

/// Nodes of another kind that are tried.
const NODES_TRIED: u32 = 16;

/// All steps take and cost this, as long as nothing is lost.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Outlay {
    pub hours: f64,
    /// Its spares are counted, too.
    pub node_hours: f64,
    /// The price of a node and hour.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub price: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
}

impl Outlay {
    /// The outlay of a job on so many nodes, whose steps take so many seconds.
    pub fn of(job: &Job, nodes: u32, seconds: f64) -> Outlay {
        let hours = seconds * job.training.steps as f64 / 3600.0;
        let (node_hours, price) = (hours * f64::from(nodes), job.profile.price);
        Outlay { hours, node_hours, price, cost: price.map(|price| price * node_hours) }
    }

    /// For a person.
    pub fn lines(&self) -> Vec<String> {
        let of = |hours: f64| format!("{hours:.*}", if hours < 10.0 { 2 } else { 0 });
        let mut lines = vec![format!(
            "  {} hours, {} node-hours, without starts, checkpoints and losses",
            of(self.hours),
            of(self.node_hours)
        )];
        if let (Some(price), Some(cost)) = (self.price, self.cost) {
            lines.push(format!("  costs {cost:.2}, at {price} a node and hour"));
        }
        lines
    }
}

/// A kind of machine, and the fewest of it that train the job.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Elsewhere {
    pub profile: String,
    /// It is None where no number that was tried works.
    pub nodes: Option<u32>,
    /// Bytes that a rank keeps, and those that it has.
    pub memory: Option<[u64; 2]>,
    /// Seconds of a step, where the profile says how fast its GPUs are.
    pub seconds: Option<f64>,
}

/// All shipped kinds that compute on the same device and whose memory is known.
pub fn elsewhere(job: &Job) -> Vec<Elsewhere> {
    if job.profile.backend != Backend::Cuda {
        return Vec::new();
    }
    let (shipped, extent) = (Profiles::shipped(), Extent::of(&job.model));
    let all = shipped.names().filter_map(|name| shipped.get(name));
    let known = all.filter(|of| of.backend == job.profile.backend && of.rank_memory.is_some());
    let tried = known.map(|profile| {
        let mut job = Job { profile: profile.clone(), ..job.clone() };
        (job.nodes.min, job.nodes.max, job.nodes.spares) = (1, NODES_TRIED, 0);
        let nodes = placement::least(&job, extent, &Budget::new(CHANGES_LED_MAX));
        (job.nodes.min, job.nodes.max) = (nodes.unwrap_or(1), nodes.unwrap_or(1));
        let size = nodes.and_then(|_| placement::sizes(&job).0.into_iter().next());
        Elsewhere {
            profile: profile.name.clone(),
            nodes,
            memory: size.as_ref().zip(profile.rank_memory).map(|(size, has)| {
                [placement::memory(&job, &size.layout, 0).committed, has]
            }),
            seconds: size.and_then(|size| Some(step_time(&job, &size.layout)?.seconds)),
        }
    });
    tried.collect()
}

/// A line each.
pub fn lines(all: &[Elsewhere]) -> Vec<String> {
    let cells = |of: &Elsewhere| -> Vec<String> {
        let Some(nodes) = of.nodes else {
            let what = format!("no number up to {NODES_TRIED} was found");
            return vec![of.profile.clone(), what];
        };
        let mut cells = vec![of.profile.clone(), several(nodes, "node")];
        cells.extend(of.memory.map(|[kept, has]| format!("{} of {} kept", gib(kept), gib(has))));
        cells.extend(of.seconds.map(|seconds| format!("{} a step", duration(seconds))));
        cells
    };
    let rows: Vec<Vec<String>> = all.iter().map(cells).collect();
    aligned(&rows, 0..0).lines().map(|line| format!("  {line}")).collect()
}
