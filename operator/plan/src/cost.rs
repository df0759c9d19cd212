//! What a job costs to plan, counted before anything of that size is made.
//!
//! A manifest of a few hundred bytes can ask for a model of millions of tensors, or for more ranks
//! than any machine room has. Planning it would take the memory and the time of all other jobs, so
//! it is refused by these bounds, which lie well beyond any model that is published.

use crate::job::Job;
use crate::problem::{Code, Problem};
use crate::profile::Backend;
use moejob_protocol::model::ModelConfig;

/// Of a manifest, and of a spec as JSON.
pub const TEXT_BYTES_MAX: usize = 64 << 10;
/// Layers times experts.
pub const EXPERTS_MAX: u64 = 65_536;
/// `nodes.max` times the devices of a node.
pub const RANKS_MAX: u64 = 32_768;
/// Rows of the table of parameters.
pub const TENSORS_MAX: u64 = 262_144;
/// Micro-batches of a step.
pub const MICRO_BATCHES_MAX: u64 = 1 << 20;
/// What it takes to know the memory of a job's workers on processors, for its smallest gang, and
/// for every size where the memory of a node is given: for each row of the table of parameters,
/// each rank is asked once whether it holds it. Less than a second of one core.
pub const COUNTED_MAX: u64 = 1 << 22;
/// Reading a row takes as long as asking so many ranks.
const ROW: u64 = 16;

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
        for param in model.params() {
            let (tensors, elements) = match param.role {
                moejob_protocol::model::Role::Expert { .. } => {
                    (&mut extent.expert_tensors, &mut extent.expert_elements)
                }
                _ => (&mut extent.other_tensors, &mut extent.other_elements),
            };
            *tensors += 1;
            *elements = elements.saturating_add(param.numel());
        }
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
    let experts = layers.saturating_mul(u64::from(model.experts.count));
    let path = "spec.model.experts.count";
    let what = "experts in all layers together";
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
    if small && job.profile.backend == Backend::Cpu {
        let what = "lookups for the memory of the sizes from nodes.min to nodes.max";
        let advice = "have a smaller model, fewer nodes, or fewer sizes of a known memory";
        bound("spec.nodes.max", what, counted(job, extent), COUNTED_MAX, advice);
    }
    problems
}

/// Whether the memory of a rank among `ranks` may be counted where other jobs wait.
pub fn is_countable(job: &Job, ranks: u32) -> bool {
    let tensors = Extent::of(&job.model).tensors();
    tensors.saturating_mul(ROW + u64::from(ranks)) <= COUNTED_MAX
}

/// What `placement` looks up: the table for each number of nodes, and for each degree that divides
/// it. Without a limit the smallest size's alone, for its pods' requests.
fn counted(job: &Job, extent: Extent) -> u64 {
    let ranks = |nodes: u32| u64::from(nodes).saturating_mul(u64::from(job.profile.ranks));
    let of = |dp: u64| {
        let root = (1..).take_while(|at| at * at <= dp);
        let tries = match job.expert_parallel {
            _ if job.profile.rank_memory.is_none() => 1,
            Some(_) => 1,
            None => root.filter(|at| dp % at == 0).count() as u64 * 2,
        };
        extent.tensors().saturating_mul(tries * (ROW + dp))
    };
    // Above the bound nobody asks how much.
    let mut sum = 0u64;
    let smallest = job.profile.rank_memory.is_none();
    let most = if smallest { job.nodes.min } else { job.nodes.max };
    for nodes in job.nodes.min..=most {
        sum = sum.saturating_add(of(ranks(nodes)));
        if sum > COUNTED_MAX {
            break;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use moejob_protocol::model::Role;

    fn model(edit: impl Fn(&mut ModelConfig)) -> ModelConfig {
        let text = "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {name: a}\nspec:\n  \
                    nodes: {min: 1}\n  model: {preset: tiny}\n  data: {train: {text: {paths: [a]}}\
                    , sequenceLength: 8}\n  training: {steps: 1, globalBatchSize: 1}\n";
        let mut model = Job::read(text.as_bytes()).expect("a job").model;
        edit(&mut model);
        model
    }

    #[test]
    fn the_extent_is_that_of_the_table() {
        let cases: [&dyn Fn(&mut ModelConfig); 6] = [
            &|_| {},
            &|model| model.num_hidden_layers = 1,
            &|model| (model.num_hidden_layers, model.dense_layers) = (7, vec![0, 3]),
            &|model| model.tie_word_embeddings = true,
            &|model| (model.attention_bias, model.experts.shared) = (true, 2),
            &|model| (model.router.bias, model.dense_layers) = (true, vec![1, 900]),
        ];
        for edit in cases {
            let mut model = model(edit);
            model.dense_intermediate_size = 24;
            let extent = Extent::of(&model);
            let params = model.params();
            let is_expert = |role: &Role| matches!(role, Role::Expert { .. });
            let experts = params.iter().filter(|param| is_expert(&param.role));
            assert_eq!(extent.tensors(), params.len() as u64);
            assert_eq!(extent.expert_tensors, experts.clone().count() as u64);
            assert_eq!(extent.expert_elements, experts.map(|of| of.numel()).sum::<u64>());
            assert_eq!(extent.expert_elements + extent.other_elements, model.numel());
        }
    }
}
