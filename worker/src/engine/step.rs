//! One optimizer step: forward, backward, reduce, agree, update, spread.

use crate::gang::comm::{Comm, CommError};
use crate::data::{Batch, Corpus, DataError};
use crate::engine::diagnosis;
use crate::engine::grads::Gradients;
use crate::engine::model::Model;
use crate::engine::dispatch::{Round, Source};
use crate::engine::gate::Noise;
use crate::engine::routing::Tally;
use crate::gang::step_end::{LOSSES, StepEnd};
use moejob_protocol::config::TrainingConfig;
use moejob_protocol::model::{AuxLossScope, Role};

/// Why a step did not happen.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Data(#[from] DataError),
}

/// What a step was, the same on every rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepSummary {
    pub loss: f64,
    pub aux_loss: f64,
    pub z_loss: f64,
    /// Before clipping.
    pub grad_norm: f64,
    pub learning_rate: f64,
    pub expert_imbalance: f64,
    /// Entropy of the scores, nats, mean over tokens and layers.
    pub router_entropy: f64,
    /// `[mixture layer][expert]`: slots of the whole step that chose it.
    pub loads: Vec<u64>,
    /// The same: choices of full experts, which were dropped; empty for routers that drop none.
    pub dropped: Vec<u64>,
    /// Tokens without any expert, over all layers.
    pub unrouted: u64,
    /// Choices of tokens behind another in their text, and those that the token before did not
    /// make.
    pub followed: u64,
    pub switched: u64,
    /// The loss, or the parameter whose gradient is no finite number; then nothing was updated.
    pub non_finite: Option<String>,
}

/// The micro-batches of one rank group in one round.
#[derive(Clone, Debug, Default)]
struct Schedule {
    round: Round,
    /// The own micro-batch.
    own: Option<u32>,
    /// By source.
    leaves: Vec<u32>,
}

impl Schedule {
    /// `tokens` of each micro-batch of `count`.
    fn new(model: &Model, round: u32, count: u32, tokens: impl Fn(u32) -> usize) -> Schedule {
        let mesh = &model.layout.mesh;
        let mut schedule = Schedule::default();
        for (position, rank) in model.group.ranks.iter().enumerate() {
            let block = mesh.micro_batches(*rank, count);
            if round >= block.end - block.start {
                continue;
            }
            let leaf = block.start + round;
            schedule.round.sources.push(Source { position, tokens: tokens(leaf) });
            schedule.leaves.push(leaf);
            if *rank == model.rank {
                schedule.own = Some(leaf);
                schedule.round.tokens = tokens(leaf);
            }
        }
        schedule
    }
}

/// Which step, counted from 0, and the seed of its noise.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub step: u64,
    pub seed: u64,
}

fn load(
    model: &mut Model,
    corpus: &mut Corpus,
    batch: &mut Batch,
    place: Place,
    micro_batch: u32,
) -> Result<(), DataError> {
    corpus.fill_micro_batch(place.step, micro_batch, batch)?;
    model.load_documents(&batch.ids, &batch.targets, batch.starts.as_deref());
    model.set_noise(Some(Noise { seed: place.seed, step: place.step, micro_batch }));
    Ok(())
}

/// Where the balance is that of the whole step: its statistics, from a forward pass of their own
/// over all micro-batches, since the first gradient needs them already. Every rank adds them up in
/// the order of micro-batches.
fn whole_step_stats(
    model: &mut Model,
    corpus: &mut Corpus,
    comm: &mut Comm,
    place: Place,
) -> Result<(), StepError> {
    let (count, tokens) = (model.shape.micro_batches, model.shape.tokens as usize);
    if model.config.router.aux_loss_scope != AuxLossScope::Global {
        return Ok(());
    }
    model.set_step_stats(&[]);
    let mut batch = Batch::new(tokens);
    let mut own: Vec<u8> = Vec::new();
    for round in 0..model.layout.mesh.rounds(count) {
        let schedule = Schedule::new(model, round, count, |_| tokens);
        if let Some(micro_batch) = schedule.own {
            load(model, corpus, &mut batch, place, micro_batch)?;
        }
        model.forward(&schedule.round, comm)?;
        if schedule.own.is_some() {
            let stats = model.round_stats(&schedule.round);
            own.extend(stats.iter().flat_map(|stat| stat.to_bits().to_le_bytes()));
        }
    }
    let width = counts_len(model) * moejob_kernels::balance::row::COUNT;
    let all = comm.gather_all(&own, 8 * width * count as usize)?;
    let mut sums = vec![0.0; width];
    let mut seen = 0;
    for rank in model.layout.mesh.data_group(model.rank) {
        for stats in all[rank as usize].chunks_exact(8 * width.max(1)) {
            let numbers = stats.as_chunks::<8>().0.iter();
            let numbers = numbers.map(|bytes| f64::from_bits(u64::from_le_bytes(*bytes)));
            sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
            seen += 1;
        }
    }
    if seen != count {
        let expected = format!("those of {count}");
        let found = format!("routing statistics of {seen} micro-batches");
        return Err(CommError::Protocol { rank: model.rank, found, expected }.into());
    }
    model.set_step_stats(&sums);
    Ok(())
}

/// Computes and reduces the gradients of a step; what comes back is this rank's
/// part of the step's end.
///
/// # Errors
/// A peer is lost, or the data changed.
pub fn gradients(
    model: &mut Model,
    gradients: &mut Gradients,
    corpus: &mut Corpus,
    comm: &mut Comm,
    place: Place,
) -> Result<StepEnd, StepError> {
    let count = model.shape.micro_batches;
    let tokens = model.shape.tokens as usize;
    let mut end = StepEnd::default();
    let mut tally = Tally { counts: vec![0; counts_len(model)], ..Tally::default() };
    let mut batch = Batch::new(tokens);
    let mut broken = None;
    gradients.clear();
    whole_step_stats(model, corpus, comm, place)?;
    for round in 0..model.layout.mesh.rounds(count) {
        let schedule = Schedule::new(model, round, count, |_| tokens);
        if let Some(micro_batch) = schedule.own {
            load(model, corpus, &mut batch, place, micro_batch)?;
        }
        model.forward(&schedule.round, comm)?;
        let loss = model.loss(&schedule.round, true);
        if !loss.is_finite() && broken.is_none() {
            broken = model.broken_activation(&schedule.round);
        }
        model.backward(&schedule.round, &gradients.leaf(&schedule.round), comm)?;
        gradients.push(&schedule.round, schedule.own, &schedule.leaves, model);
        if schedule.own.is_some() {
            let [aux, z, entropy] = model.routing(&schedule.round, &mut tally);
            end.losses.push([loss, aux, z, entropy]);
        }
    }
    (end.counts, end.dropped, end.unrouted) = (tally.counts, tally.dropped, tally.unrouted);
    (end.followed, end.switched) = (tally.followed, tally.switched);
    end.square_sums = gradients.reduce(model, comm)?;
    model.broken = broken;
    Ok(end)
}

/// `[mixture layer][expert]`
fn counts_len(model: &Model) -> usize {
    let mixture = model.buffers.layers.iter().filter(|layer| layer.moe.is_some()).count();
    mixture * model.config.experts.count as usize
}

/// The last collective of a step: every rank's part, in rank order.
///
/// # Errors
/// A peer is lost or speaks nonsense.
pub fn agree(model: &Model, end: &StepEnd, comm: &mut Comm) -> Result<Vec<StepEnd>, CommError> {
    let blocks = |param: &moejob_protocol::model::Param| {
        param.numel().div_ceil(moejob_protocol::layout::BLOCK) as usize
    };
    let blocks = model.params.iter().map(blocks).sum();
    let most = StepEnd::bytes_max(model.shape.micro_batches as usize, counts_len(model), blocks);
    let all = comm.gather_all(&end.encode(), most)?;
    all.iter().zip(0..).map(|(bytes, rank)| StepEnd::decode(rank, bytes)).collect()
}

/// Where the numbers that are not finite came from, by the first rank that knows; the same on all.
///
/// # Errors
/// A peer is lost.
pub fn diagnose(model: &Model, comm: &mut Comm) -> Result<Option<String>, CommError> {
    let own = model.broken_weight().or_else(|| model.broken.clone()).unwrap_or_default();
    let own: String = own.chars().filter(char::is_ascii).take(diagnosis::BYTES_MAX).collect();
    let all = comm.gather_all(own.as_bytes(), diagnosis::BYTES_MAX)?;
    let told = all.iter().map(|text| String::from_utf8_lossy(text).into_owned());
    // A weight says more than what it led to.
    let mut told: Vec<String> = told.filter(|text| !text.is_empty()).collect();
    told.sort_by_key(|text| !text.starts_with("the weight"));
    Ok(told.into_iter().next())
}

/// Losses, norm and balance of a step from all ranks' parts.
///
/// # Errors
/// A peer's part has the wrong sizes.
pub fn summarize(
    model: &Model,
    gradients: &Gradients,
    training: &TrainingConfig,
    ends: &[StepEnd],
    step: u64,
) -> Result<StepSummary, CommError> {
    let losses = by_micro_batch(model, ends);
    let wrong = |rank: u32, found: String| CommError::Protocol {
        rank,
        found,
        expected: "the sizes of this layout".to_string(),
    };
    if losses.len() != model.shape.micro_batches as usize {
        return Err(wrong(0, format!("{} losses in all", losses.len())));
    }
    let mut sums = [0.0; LOSSES];
    for loss in &losses {
        sums.iter_mut().zip(loss).for_each(|(sum, loss)| *sum += loss);
    }
    let micro_batches = f64::from(model.shape.micro_batches);
    let targets = f64::from(training.global_batch_size) * f64::from(training.sequence_length);
    let mut squares = 0.0;
    let mut non_finite = None;
    for (rank, range, index) in &gradients.norm_order {
        let part = ends[*rank as usize].square_sums.get(range.clone());
        let part = part.ok_or_else(|| wrong(*rank, "too few sums of squares".to_string()))?;
        // What is not trained is not clipped for either.
        let of_expert = matches!(model.params[*index].role, Role::Expert { .. });
        if !(of_expert && model.config.router.warms_up(step)) {
            part.iter().for_each(|sum| squares += sum);
        }
        // The last in the table is the first that backward made.
        if !part.iter().all(|sum| sum.is_finite()) {
            let tensor = diagnosis::place(&model.params[*index]);
            non_finite = Some(format!("the gradient of {tensor}"));
        }
    }
    let loss = sums[0] / targets;
    if !loss.is_finite() {
        non_finite = Some("the loss".to_string());
    }
    let (mut loads, mut dropped) = (vec![0; counts_len(model)], vec![0; counts_len(model)]);
    for end in ends {
        loads.iter_mut().zip(&end.counts).for_each(|(sum, count)| *sum += count);
        dropped.iter_mut().zip(&end.dropped).for_each(|(sum, count)| *sum += count);
    }
    if model.plain {
        dropped.clear();
    }
    let mixture = counts_len(model) / (model.config.experts.count as usize).max(1);
    let means = micro_batches * mixture.max(1) as f64;
    Ok(StepSummary {
        loss,
        aux_loss: sums[1] / means,
        z_loss: sums[2] / means,
        grad_norm: squares.sqrt(),
        learning_rate: training.learning_rate(step),
        expert_imbalance: imbalance(model, &loads),
        router_entropy: sums[3] / means,
        loads,
        dropped,
        unrouted: ends.iter().map(|end| end.unrouted).sum(),
        followed: ends.iter().map(|end| end.followed).sum(),
        switched: ends.iter().map(|end| end.switched).sum(),
        non_finite,
    })
}

/// The ranks' losses in the order of micro-batches.
fn by_micro_batch(model: &Model, ends: &[StepEnd]) -> Vec<[f64; LOSSES]> {
    let mesh = &model.layout.mesh;
    mesh.data_group(model.rank)
        .iter()
        .flat_map(|rank| ends[*rank as usize].losses.iter().copied())
        .collect()
}

/// Largest tokens_per_expert over the mean, worst layer.
fn imbalance(model: &Model, loads: &[u64]) -> f64 {
    let experts = model.config.experts.count as usize;
    let layer = |counts: &[u64]| {
        let total: u64 = counts.iter().sum();
        let most = counts.iter().max().copied().unwrap_or(0);
        if total == 0 { 1.0 } else { most as f64 * experts as f64 / total as f64 }
    };
    loads.chunks_exact(experts.max(1)).map(layer).fold(1.0, f64::max)
}

/// Clips, updates what this rank owns and spreads the new weights. `step` counts from 0.
///
/// # Errors
/// A peer is lost; the weights are then torn.
pub fn update(
    model: &mut Model,
    gradients: &Gradients,
    training: &TrainingConfig,
    summary: &StepSummary,
    comm: &mut Comm,
    step: u64,
) -> Result<(), CommError> {
    let most = training.max_grad_norm;
    let clips = most > 0.0 && summary.grad_norm > most;
    let grad_scale = if clips { most / summary.grad_norm } else { 1.0 };
    gradients.update(model, &training.adamw, summary.learning_rate, step + 1, grad_scale);
    model.balance(&summary.loads);
    gradients.spread(model, comm)
}

/// What was measured on held-out sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Validation {
    /// Mean cross-entropy.
    pub loss: f64,
    /// Share of tokens whose favourite expert is another than at the last validation of this
    /// attempt, over all layers; none the first time.
    pub churn: Option<f64>,
}

/// Measures on the first held-out sequences, without noise; none when there are none.
///
/// # Errors
/// A peer is lost, or the data changed.
pub fn validate(
    model: &mut Model,
    corpus: &mut Corpus,
    comm: &mut Comm,
    sequences_max: u32,
) -> Result<Option<Validation>, StepError> {
    let sequences = corpus.held_out_sequences(sequences_max);
    if sequences == 0 {
        return Ok(None);
    }
    let (sequences_each, length) = (model.shape.batch as u32, model.sequence());
    let count = sequences.div_ceil(sequences_each);
    let left = |leaf: u32| sequences - leaf * sequences_each;
    let of_batch = |leaf: u32| left(leaf).min(sequences_each) as usize * length;
    let mut losses = Vec::new();
    let (mut changed, mut compared) = (0, 0);
    model.set_noise(None);
    for round in 0..model.layout.mesh.rounds(count) {
        let schedule = Schedule::new(model, round, count, of_batch);
        if let Some(leaf) = schedule.own {
            let mut batch = Batch::new(schedule.round.tokens);
            corpus.fill_held_out(leaf * sequences_each, &mut batch)?;
            model.load_documents(&batch.ids, &batch.targets, batch.starts.as_deref());
        }
        model.forward(&schedule.round, comm)?;
        let loss = model.loss(&schedule.round, false);
        if let Some(leaf) = schedule.own {
            losses.push([loss, 0.0, 0.0, 0.0]);
            let (more, of) = model.churn(leaf, schedule.round.tokens);
            (changed, compared) = (changed + more, compared + of);
        }
    }
    let end = StepEnd { losses, counts: vec![changed, compared], ..StepEnd::default() };
    let all = comm.gather_all(&end.encode(), StepEnd::bytes_max(count as usize, 2, 0))?;
    let ends = all.iter().zip(0..).map(|(bytes, rank)| StepEnd::decode(rank, bytes));
    let ends = ends.collect::<Result<Vec<_>, _>>()?;
    let sum = by_micro_batch(model, &ends).iter().fold(0.0, |sum, loss| sum + loss[0]);
    let tally = |at: usize| ends.iter().filter_map(|end| end.counts.get(at)).sum::<u64>();
    let (changed, compared) = (tally(0), tally(1));
    Ok(Some(Validation {
        loss: sum / (f64::from(sequences) * length as f64),
        churn: (compared > 0).then(|| changed as f64 / compared as f64),
    }))
}
