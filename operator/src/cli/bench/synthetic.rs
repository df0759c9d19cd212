//! Tokens that nobody wrote, and a model that sends them to all experts equally often.
//!
//! Balanced routing needs no other router: a token's class is its id modulo the experts. The first
//! numbers of its embedding name the class, louder than anything that layers add, and the routers
//! are made to prefer the class's own expert and the K - 1 that follow it.

use moe_worker::data::{Batch, Batches, DataError};
use moe_worker::state::rank::RankState;
use moejob_kernels::DType;
use moejob_manifest::Job;
use moejob_protocol::WorkerConfig;
use moejob_protocol::by_load::Loads;
use moejob_protocol::checkpoint::Part;
use moejob_protocol::config::TrainingConfig;
use moejob_protocol::layout::Placement;
use moejob_protocol::model::{AuxLossScope, ModelConfig, Role, RouterConfig, Scoring};

/// How loud an embedding names its class: layers add about 1 to each number.
const LOUD: f32 = 256.0;
/// Bytes of weights that are on the host at once.
const BYTES_AT_ONCE: usize = 16 << 20;

/// Micro-batches of random ids; the same for a step and index whenever they are asked for.
pub struct Synthetic {
    vocabulary: u32,
    /// Classes that follow each other token by token; 1 where ids are free.
    classes: u32,
    batch: Batch,
}

impl Synthetic {
    pub fn natural(model: &ModelConfig, training: &TrainingConfig) -> Synthetic {
        let tokens = training.micro_batch_size as usize * training.sequence_length as usize;
        Synthetic { vocabulary: model.vocab_size, classes: 1, batch: Batch::new(tokens) }
    }

    /// Of each class equally many ids.
    pub fn balanced(model: &ModelConfig, training: &TrainingConfig) -> Synthetic {
        Synthetic { classes: model.experts.count, ..Synthetic::natural(model, training) }
    }
}

impl Batches for Synthetic {
    fn micro_batch(&mut self, step: u64, index: u32) -> Result<&Batch, DataError> {
        let seed = (step << 20) ^ u64::from(index);
        let classes = u64::from(self.classes);
        let of_class = (u64::from(self.vocabulary) / classes).max(1);
        let Batch { ids, targets, .. } = &mut self.batch;
        for (at, (id, target)) in ids.iter_mut().zip(targets).enumerate() {
            let random = mixed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at as u64);
            let class = at as u64 % classes;
            *id = ((random >> 32) % of_class * classes + class) as u32;
            *target = ((random & 0xffff_ffff) % u64::from(self.vocabulary)) as u32;
        }
        Ok(&self.batch)
    }
}

/// SplitMix64's finish.
fn mixed(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Makes a model that was initialised choose equally often where batches are balanced.
///
/// # Errors
/// Its router or its sizes do not allow it.
pub fn balance(state: &mut impl RankState) -> Result<(), String> {
    let (config, params) = (state.table().model.clone(), state.table().params.to_vec());
    let (experts, top_k) = (config.experts.count as usize, config.experts.per_token as usize);
    let (dim, vocabulary) = (config.hidden_size as usize, config.vocab_size as usize);
    let router = RouterConfig { aux_loss_scope: AuxLossScope::MicroBatch, ..config.router };
    let softmax = router.scoring == Scoring::Softmax;
    if !router.is_plain() || !softmax || router.groups > 1 {
        let why = "--routing balanced is for models with softmax and dropless top-k alone";
        return Err(why.to_string());
    }
    if experts > dim || experts > vocabulary {
        return Err(format!(
            "--routing balanced takes at most as many experts as the model is wide and has words; \
             it has {experts}"
        ));
    }
    // A normed row has about sqrt(D) at its class: between two choices lie about 2 of a logit.
    let slope = 2.0 / (dim as f32).sqrt();
    for (index, param) in params.iter().enumerate() {
        let rows = param.numel() as usize / dim;
        match param.role {
            Role::Router { .. } => edit(state, index, (rows, dim), |expert, row| {
                row.fill(0.0);
                for behind in 0..top_k {
                    let class = (expert + experts - behind) % experts;
                    row[class] = slope * (top_k - behind) as f32;
                }
            }),
            _ if param.name == "model.embed_tokens.weight" => {
                edit(state, index, (rows, dim), |word, row| {
                    row[..experts].fill(0.0);
                    row[word % experts] = LOUD;
                });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Changes the rows of a matrix, [rows, width].
fn edit(
    state: &mut impl RankState,
    index: usize,
    (rows, width): (usize, usize),
    change: impl Fn(usize, &mut [f32]),
) {
    assert_eq!(state.table().stored, DType::F32, "a bench is never of fp64");
    let at_once = (BYTES_AT_ONCE / (width * 4)).max(1);
    for first in (0..rows).step_by(at_once) {
        let count = at_once.min(rows - first);
        let elements = (first * width) as u64..((first + count) * width) as u64;
        let mut bytes = vec![0; count * width * 4];
        state.read(Part::Master, index, elements.clone(), &mut bytes);
        let floats = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        let mut values: Vec<f32> = floats.collect();
        for (row, numbers) in values.chunks_exact_mut(width).enumerate() {
            change(first + row, numbers);
        }
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        state.write(Part::Master, index, elements, &bytes);
    }
}

/// Counts of what lies on ranks, experts or slices of them, and how many a layer has.
pub(super) fn of_slices(job: &Job, counts: &[u64]) -> (Vec<u64>, usize) {
    let slices = job.model.slices();
    let each = slices.each as usize;
    (counts.iter().flat_map(|count| vec![*count; each]).collect(), slices.count as usize)
}

/// Tokens of the fullest rank over the mean, in a step with these loads.
pub(super) fn uneven(job: &Job, config: &WorkerConfig, counts: &[u64]) -> f64 {
    let (layout, ep) = (&config.layout, config.layout.mesh.ep);
    let (counts, experts) = of_slices(job, counts);
    let loads = Loads { counts: &counts, experts };
    match &layout.placement {
        Placement::Ordered(order) => loads.unevenness(ep, order),
        _ => loads.unevenness(ep, &loads.in_order()),
    }
}
