//! What a job costs to plan, counted before anything of that size is made.
//!
//! A manifest of a few hundred bytes can ask for a model of millions of tensors, or for more ranks
//! than any machine room has. Planning it would take the memory and the time of all other jobs, so
//! it is refused by these bounds, which lie well beyond any model that is published.

use crate::job::Job;
use crate::problem::{Code, Problem};
use crate::profile::Backend;
use moejob_protocol::Mesh;
use moejob_protocol::checkpoint::{
    MANIFEST_BYTES_MAX, PARAMS_MAX, PIECE_BYTES, TENSOR_BYTES, TENSORS_MAX as PARTS_MAX,
};
use moejob_protocol::layout::BLOCK;
use moejob_protocol::message::GANG_RANKS_MAX;
use moejob_protocol::model::{MATRICES, ModelConfig, Role, numel};
use std::cell::Cell;

/// Of a manifest, and of a spec as JSON.
pub const TEXT_BYTES_MAX: usize = 64 << 10;
/// Layers times experts.
pub const EXPERTS_MAX: u64 = 65_536;
/// `nodes.max` times the devices of a node.
pub const RANKS_MAX: u64 = GANG_RANKS_MAX as u64;
/// Rows of the table of parameters: as many as a checkpoint may have.
pub const TENSORS_MAX: u64 = PARAMS_MAX;
/// Micro-batches of a step.
pub const MICRO_BATCHES_MAX: u64 = 1 << 20;
/// What it takes to lay a job out on processors whose memory is given: for each size that is tried
/// the memory of a rank is counted. Less than half a second of one core.
pub const COUNTED_MAX: u64 = 1 << 22;
/// What a plan that is shown spends on the memory of its sizes. With twice of it whole plans took
/// up to 1.2 s of a core that other programs shared. Of more sizes than that some are counted.
pub const SHOWN_MAX: u64 = 1 << 20;
/// What is spent on each kind of change that might make a job fit which no number of nodes fits.
/// All eight take a quarter of a second where a person waits for it. In the leader, which decides
/// for other jobs meanwhile, they take a sixteenth of that.
pub const CHANGES_SHOWN_MAX: u64 = SHOWN_MAX / 4;
pub const CHANGES_LED_MAX: u64 = CHANGES_SHOWN_MAX / 16;

/// Rows of the table of parameters, and elements, without making the table: all layers with experts
/// are alike, and so are all without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Rows of experts' parameters, and of all others.
    pub expert_tensors: u64,
    pub other_tensors: u64,
    /// Elements of both.
    pub expert_elements: u64,
    pub other_elements: u64,
}

impl Extent {
    /// `model` has at most `EXPERTS_MAX` experts in one layer.
    pub fn of(model: &ModelConfig) -> Extent {
        let layers = u64::from(model.num_hidden_layers);
        let dense = model.dense_layers.iter().filter(|layer| **layer < model.num_hidden_layers);
        let dense = (dense.count() as u64).min(layers);
        let with = |num_hidden_layers: u32, dense_layers: Vec<u32>| {
            Extent::counted(&ModelConfig { num_hidden_layers, dense_layers, ..model.clone() })
        };
        let ends = with(0, Vec::new());
        let layer = |one: Extent, count: u64| one.less(ends).times(count);
        let mixture = layer(with(1, Vec::new()), layers - dense);
        match dense {
            0 => ends.plus(mixture),
            dense => ends.plus(mixture).plus(layer(with(1, vec![0]), dense)),
        }
    }

    pub fn tensors(self) -> u64 {
        self.expert_tensors.saturating_add(self.other_tensors)
    }

    fn counted(model: &ModelConfig) -> Extent {
        let mut extent = Extent::default();
        model.each_param(|_, shape, role| {
            let (tensors, elements) = match role {
                Role::Expert { .. } => (&mut extent.expert_tensors, &mut extent.expert_elements),
                _ => (&mut extent.other_tensors, &mut extent.other_elements),
            };
            *tensors += 1;
            *elements = elements.saturating_add(numel(shape));
        });
        extent
    }

    fn each(self, other: Extent, of: impl Fn(u64, u64) -> u64) -> Extent {
        Extent {
            expert_tensors: of(self.expert_tensors, other.expert_tensors),
            other_tensors: of(self.other_tensors, other.other_tensors),
            expert_elements: of(self.expert_elements, other.expert_elements),
            other_elements: of(self.other_elements, other.other_elements),
        }
    }

    fn plus(self, other: Extent) -> Extent {
        self.each(other, u64::saturating_add)
    }

    fn less(self, other: Extent) -> Extent {
        self.each(other, u64::saturating_sub)
    }

    fn times(self, count: u64) -> Extent {
        self.each(self, |of, _| of.saturating_mul(count))
    }
}

/// Every bound that the job exceeds.
pub fn problems(job: &Job) -> Vec<Problem> {
    let model = &job.model;
    let mut problems = Vec::new();
    let mut bound = |path: &str, what: &str, found: u64, most: u64, advice: &str| {
        if found > most {
            problems.push(
                Problem::new(Code::Cost, path)
                    .found(format!("{found} {what}"))
                    .allowed(format!("at most {most}"))
                    .advice(advice),
            );
        }
        found <= most
    };
    let layers = u64::from(model.num_hidden_layers);
    let slices = model.slices();
    let experts = layers.saturating_mul(u64::from(slices.count));
    let path = "spec.model.experts.count";
    let what = match slices.each {
        1 => "experts in all layers together",
        _ => "slices of experts (parallelism.expertSlices) in all layers together",
    };
    let small = bound(path, what, experts, EXPERTS_MAX, "have fewer layers or fewer experts");
    let ranks = u64::from(job.nodes.max).saturating_mul(u64::from(job.profile.ranks));
    bound("spec.nodes.max", "ranks", ranks, RANKS_MAX, "lower nodes.max");
    let training = &job.training;
    let micro_batches = training.global_batch_size / training.micro_batch_size.max(1);
    let path = "spec.training.globalBatchSize";
    let advice = "lower it, or raise microBatchSize";
    bound(path, "micro-batches a step", micro_batches.into(), MICRO_BATCHES_MAX, advice);
    // The table of one layer is made for it.
    if !small {
        return problems;
    }
    let extent = Extent::of(model);
    let path = "spec.model.numHiddenLayers";
    let advice = "have fewer layers or fewer experts";
    let small = bound(path, "tensors", extent.tensors(), TENSORS_MAX, advice);
    if small {
        let what = "bytes of a checkpoint's manifest";
        let found = manifest_bytes(job, extent, ranks);
        bound("spec.nodes.max", what, found, MANIFEST_BYTES_MAX, "lower nodes.max");
    }
    if small && job.profile.backend == Backend::Cpu && job.profile.rank_memory.is_some() {
        let what = "steps to count the memory of the sizes from nodes.min to nodes.max";
        let advice = "have a smaller model, fewer nodes, or no deviceMemory";
        bound("spec.nodes.max", what, counted(job, extent), COUNTED_MAX, advice);
    }
    problems
}

/// What the manifest of a checkpoint takes that `ranks` ranks write: each owner has a piece of a
/// tensor, unless that has fewer blocks. Experts have the fewest owners that they may have.
fn manifest_bytes(job: &Job, extent: Extent, ranks: u64) -> u64 {
    let slices = u64::from(job.model.slices().count).max(1);
    let degree = job.expert_parallel.map_or(ranks.min(slices), u64::from).max(1);
    let pieces = |tensors: u64, elements: u64, owners: u64| {
        let blocks = (elements / BLOCK).saturating_add(tensors);
        tensors.saturating_mul(owners).min(blocks)
    };
    let others = pieces(extent.other_tensors, extent.other_elements, ranks.max(1));
    let experts =
        pieces(extent.expert_tensors, extent.expert_elements, (ranks / degree).max(1));
    let pieces = others.saturating_add(experts).saturating_mul(PIECE_BYTES);
    let parts = PARTS_MAX / PARAMS_MAX;
    extent.tensors().saturating_mul(TENSOR_BYTES).saturating_add(pieces).saturating_mul(parts)
}

/// Steps that it takes to count the memory of a rank of `mesh`: one for each parameter that it
/// holds, for each run of experts of a layer with the same holders, and for each rank.
pub fn of_rank(job: &Job, extent: Extent, mesh: Mesh) -> u64 {
    let experts = job.model.slices().count;
    let held = u64::from(MATRICES * experts.div_ceil(mesh.ep));
    let layers = u64::from(job.model.num_hidden_layers);
    let steps = extent.other_tensors + layers * (u64::from(mesh.ep.min(experts)) + held);
    steps + u64::from(mesh.world())
}

/// Steps that may still be taken.
pub struct Budget {
    left: Cell<u64>,
    short: Cell<bool>,
}

impl Budget {
    pub fn new(steps: u64) -> Budget {
        Budget { left: Cell::new(steps), short: Cell::new(false) }
    }

    /// Whether there are as many left; from the first time that there are not, never.
    pub fn take(&self, steps: u64) -> bool {
        match self.left.get().checked_sub(steps).filter(|_| !self.short.get()) {
            Some(left) => self.left.set(left),
            None => self.short.set(true),
        }
        !self.is_short()
    }

    pub fn is_short(&self) -> bool {
        self.short.get()
    }
}

/// Steps that it takes to find out whether `nodes` nodes work, beside those of counting.
pub fn of_size(job: &Job, nodes: u32) -> u64 {
    // A copy of the job.
    const ONE: u64 = 16;
    // What the state takes at least, and words why it does not fit.
    const ESTIMATE: u64 = 4;
    // Numbers of which one divides another are found in a loop that does nothing else.
    const DIVISIONS: u64 = 32;
    let ranks = u64::from(nodes).saturating_mul(job.profile.ranks.into());
    if ranks > job.micro_batches().into() {
        return ONE;
    }
    let each = job.profile.rank_memory.map_or(0, |_| ESTIMATE);
    let divisions = ranks.min(job.model.slices().count.into()).div_ceil(DIVISIONS);
    each.saturating_mul(tries(job, ranks)).saturating_add(ONE + divisions)
}

/// At most so many degrees of expert parallelism are tried for `ranks` ranks.
fn tries(job: &Job, ranks: u64) -> u64 {
    let root = (1..).take_while(|at| at * at <= ranks);
    match job.expert_parallel {
        Some(_) => 1,
        None => root.filter(|at| ranks.is_multiple_of(*at)).count() as u64 * 2,
    }
}

/// What `placement::sizes` counts where the memory of a node is given: of each number of nodes,
/// each degree that divides it.
fn counted(job: &Job, extent: Extent) -> u64 {
    let of = |ranks: u64| extent.tensors().saturating_add(ranks).saturating_mul(tries(job, ranks));
    let mut sum = 0u64;
    for nodes in job.nodes.min..=job.nodes.max {
        let ranks = u64::from(nodes).saturating_mul(job.profile.ranks.into());
        sum = sum.saturating_add(of(ranks));
        // Above the bound nobody asks how much.
        if sum > COUNTED_MAX {
            break;
        }
    }
    sum
}
