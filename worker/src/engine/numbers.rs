//! The numbers of a step: where they stand in device memory, and what they say.
//!
//! ```text
//! rounds, sums of squares -> the rank's own -> sums over ranks -> StepNumbers -> read
//! ```

use crate::engine::links::Links;
use crate::engine::model::Model;
use crate::state::rank::place;
use moejob_kernels::numbers::{record, tally};
use moejob_kernels::step_numbers::CLASSES_MAX;
use moejob_kernels::{
    Buffer, Cast, DecideUpdate, LossScale, Posted, StepClass, StepControl,
    StepNumbers, StepParams, SumRows,
};
use moejob_protocol::buffers::{BLOCK_WORDS, CONTROL_NUMBERS};
use moejob_protocol::config::TrainingConfig;
use moejob_protocol::memory::{
    NumberCounts, PARAM_NUMBERS, RECORD_NUMBERS, SINGLE_NUMBERS, STATISTICS, TALLY_NUMBERS,
};
use moejob_protocol::model::{ModelConfig, Param, Role};
use std::ops::Range;

// The memory that is planned is what the ops fill.
const _: () = {
    assert!(record::COUNT as u64 == RECORD_NUMBERS && tally::COUNT as u64 == TALLY_NUMBERS);
    assert!(StepNumbers::LOADS as u64 == SINGLE_NUMBERS);
    assert!(StepParams::LEN as u64 == PARAM_NUMBERS);
    // A record's losses lie as those of a step.
    assert!(record::LOSS == StepNumbers::LOSS && record::VALID == StepNumbers::VALID_TARGETS);
    assert!(record::AUX == StepNumbers::AUX_LOSS && record::Z == StepNumbers::Z_LOSS);
    assert!(moejob_kernels::balance::row::COUNT as u64 == STATISTICS);
    assert!(moejob_kernels::BucketBlock::WORDS as u64 == BLOCK_WORDS);
    assert!(StepControl::LEN as u64 == CONTROL_NUMBERS);
    // What routers count is added to the numbers of a step, or to a rank's part of them.
    assert!(StepNumbers::FOLLOWED == StepNumbers::UNROUTED + tally::FOLLOWED);
    assert!(StepNumbers::SWITCHED == StepNumbers::UNROUTED + tally::SWITCHED);
    assert!(StepNumbers::ENTROPIES == StepNumbers::UNROUTED + tally::ENTROPIES);
};

/// The classes of StepParams: tensors that decay, tensors that do not, experts, all of which decay.
/// Experts hold still while the router warms up.
pub mod class {
    pub const DECAYING: usize = 0;
    pub const PLAIN: usize = 1;
    pub const EXPERT: usize = 2;
}

/// Whose coefficients a parameter takes.
pub fn class_of(param: &Param) -> usize {
    match (param.role, param.decays()) {
        (Role::Expert { .. }, decays) => {
            assert!(decays, "{}: an expert has matrices alone", param.name);
            class::EXPERT
        }
        (_, true) => class::DECAYING,
        (_, false) => class::PLAIN,
    }
}

/// What a step is told, counted from 0.
pub fn step_params(training: &TrainingConfig, warmup_steps: u64, step: u64) -> StepParams {
    let (lr, adamw) = (training.learning_rate(step), &training.adamw);
    let of = |updates, decay| StepClass::new(updates, lr, (adamw.beta1, adamw.beta2), decay);
    let mut classes = [StepClass::default(); CLASSES_MAX];
    classes[class::DECAYING] = of(step + 1, adamw.weight_decay);
    classes[class::PLAIN] = of(step + 1, 0.0);
    classes[class::EXPERT] = of((step + 1).saturating_sub(warmup_steps), adamw.weight_decay);
    StepParams { loss_scale: 1.0, norm_max: training.max_grad_norm, step, classes }
}

/// What a step was, the same on every rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepSummary {
    pub loss: f64,
    pub aux_loss: f64,
    pub z_loss: f64,
    /// Before clipping.
    pub grad_norm: f64,
    /// What the loss was multiplied by, in fp16.
    pub loss_scale: Option<f64>,
    pub learning_rate: f64,
    pub expert_imbalance: f64,
    /// Entropy of the scores, nats, mean over tokens and layers; none where it is not measured.
    pub router_entropy: Option<f64>,
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
    /// Routed rows found no room; then nothing was updated either.
    pub(crate) overflows: bool,
    /// Nothing was updated, since this step or one before it is to be done again.
    pub(crate) skipped: bool,
    /// That the device has applied since the engine was made.
    pub(crate) updates: u64,
}

/// Where everything stands.
#[derive(Clone, Debug)]
pub struct Numbers {
    layout: StepNumbers,
}

impl Numbers {
    pub fn new(model: &ModelConfig, params: &[Param], counts: &NumberCounts) -> Numbers {
        let (loads, experts) = (counts.loads as usize, model.experts.count as usize);
        let layers = loads / experts.max(1);
        Numbers { layout: StepNumbers { layers, experts, tensors: params.len() } }
    }

    pub(crate) fn layout(&self) -> StepNumbers {
        self.layout
    }

    /// Elements of the reduced vector where the loads of the `at`-th mixture layer stand.
    pub(crate) fn loads(&self, at: usize) -> Range<usize> {
        self.layout.loads_of(at)
    }
}

impl Model {
    /// F64 [2]: where the micro-batch that is computed adds its cross-entropies and how many they
    /// are.
    pub(crate) fn loss_numbers(&self) -> Buffer {
        self.buffers.numbers.record.slice(record::LOSS, 2)
    }

    /// F64 [4]: what routers count.
    pub(crate) fn tally(&self) -> Buffer {
        self.buffers.numbers.reduced.slice(StepNumbers::UNROUTED, tally::ROUTED)
    }

    /// F64 [1]: where a step, or a validation, counts rows that found no room.
    pub(crate) fn routed_overflows(&self) -> Buffer {
        self.buffers.numbers.reduced.slice(StepNumbers::ROUTED_OVERFLOWS, 1)
    }

    /// F64 [E] each: loads and drops of the `at`-th mixture layer.
    pub(crate) fn load_counts(&self, at: usize) -> [Buffer; 2] {
        let dropped = self.numbers.layout.dropped().start - self.numbers.layout.loads().start;
        let loads = self.numbers.loads(at);
        let numbers = self.buffers.numbers.reduced;
        [0, dropped].map(|behind| numbers.slice(loads.start + behind, loads.len()))
    }

    /// A step begins: what it is told is written, its own numbers are zero. `step` counts from 0.
    pub fn begin_step(&mut self, training: &TrainingConfig, step: u64) {
        let mut params = step_params(training, self.config.router.warmup_steps, step);
        if let (Some(scaling), Some(at)) = (self.scaling, self.buffers.numbers.loss_scale) {
            params.loss_scale = scaling.scale;
            // A power of two, which fp32 holds.
            self.device.write(at, &[scaling.scale as f32]);
        }
        self.device.write(self.buffers.numbers.params, &params.encode());
        self.device.fill_zero(self.buffers.numbers.reduced);
        self.device.fill_zero(self.buffers.numbers.parts);
        if let Some(squares) = self.buffers.numbers.squares {
            self.device.fill_zero(squares);
        }
    }

    /// A micro-batch begins: its record is empty.
    pub fn begin_record(&mut self) {
        self.device.fill_zero(self.buffers.numbers.record);
    }

    /// The record of the step's micro-batch of this number is complete. It is moved only now, so
    /// that the ops of a micro-batch write to the same place whichever it is.
    pub fn keep_record(&mut self, micro_batch: u32) {
        let numbers = &self.buffers.numbers;
        let at = micro_batch as usize * record::COUNT;
        self.device.copy(numbers.record, numbers.parts.slice(at, record::COUNT));
    }

    /// Ops have added to the rank's numbers themselves, but for the losses of micro-batches. A
    /// record is 0 but at one rank, so that its sum over ranks is what it was, and losses are
    /// summed in the order of micro-batches whatever rank had which.
    pub fn reduce_numbers(&mut self, links: &mut Links) {
        let numbers = self.buffers.numbers.clone();
        let all = [numbers.reduced, numbers.parts].into_iter().chain(numbers.squares);
        links.all_reduce(&mut self.device, &all.collect::<Vec<_>>());
        if let Some(squares) = numbers.squares {
            let to = numbers.reduced.slice(StepNumbers::SQUARED_NORM, 1);
            self.device.cast(&Cast { from: squares, to });
        }
        self.device.sum_rows(&SumRows { x: numbers.parts, out: numbers.records });
        const LOSSES: usize = record::ENTROPY;
        let to = numbers.reduced.slice(StepNumbers::LOSS, LOSSES);
        self.device.copy(numbers.records.slice(record::LOSS, LOSSES), to);
        let to = numbers.reduced.slice(StepNumbers::ENTROPY, 1);
        self.device.copy(numbers.records.slice(record::ENTROPY, 1), to);
    }

    /// Decides on the device whether the step changes weights, by the numbers of all ranks.
    pub fn decide_update(&mut self) {
        let numbers = &self.buffers.numbers;
        let (params, control) = (numbers.params, numbers.control);
        self.device.decide_update(&DecideUpdate { params, numbers: numbers.reduced, control });
    }

    /// Steps change weights again.
    pub(crate) fn go_on(&mut self) {
        let control = self.buffers.numbers.control;
        self.device.write(control.slice(StepControl::HALTED, 1), &[0.0_f64]);
    }

    /// The one read of a step: of StepNumbers, whatever summed them.
    pub(crate) fn post_numbers(&mut self) -> Posted {
        // New weights may be under way to other ranks still.
        self.device.post(self.buffers.numbers.reduced)
    }

    /// What the numbers say of a step whose loss was scaled as the next one's would be. For tests
    /// and tools.
    pub fn read_numbers(&mut self, training: &TrainingConfig, step: u64) -> StepSummary {
        let posted = self.post_numbers();
        let numbers: Vec<f64> = self.device.fetch(posted);
        self.summary(training, step, self.scaling, &numbers)
    }

    /// What the numbers of a step say, whose loss was scaled so.
    pub(crate) fn summary(
        &self,
        training: &TrainingConfig,
        step: u64,
        scaling: Option<LossScale>,
        numbers: &[f64],
    ) -> StepSummary {
        let (layout, single) = (&self.numbers.layout, |at: usize| numbers[at]);
        let micro_batches = f64::from(self.shape.micro_batches);
        let targets = f64::from(training.global_batch_size) * f64::from(training.sequence_length);
        let counted = single(StepNumbers::VALID_TARGETS);
        let means = micro_batches * layout.layers.max(1) as f64;
        let whole = |range: Range<usize>| -> Vec<u64> {
            numbers[range].iter().map(|count| *count as u64).collect()
        };
        let loads = whole(layout.loads());
        let entropies = single(StepNumbers::ENTROPIES);
        StepSummary {
            loss: single(StepNumbers::LOSS) / if counted > 0.0 { counted } else { targets },
            aux_loss: single(StepNumbers::AUX_LOSS) / means,
            z_loss: single(StepNumbers::Z_LOSS) / means,
            grad_norm: single(StepNumbers::SQUARED_NORM).sqrt(),
            loss_scale: scaling.map(|scaling| scaling.scale),
            learning_rate: training.learning_rate(step),
            expert_imbalance: imbalance(layout.experts, &loads),
            router_entropy: (entropies > 0.0).then(|| single(StepNumbers::ENTROPY) / entropies),
            dropped: if self.plain { Vec::new() } else { whole(layout.dropped()) },
            loads,
            unrouted: single(StepNumbers::UNROUTED) as u64,
            followed: single(StepNumbers::FOLLOWED) as u64,
            switched: single(StepNumbers::SWITCHED) as u64,
            non_finite: (!StepNumbers::are_finite(numbers))
                .then(|| self.what_is_not_finite(numbers)),
            overflows: single(StepNumbers::ROUTED_OVERFLOWS) != 0.0,
            skipped: StepNumbers::is_skipped(numbers),
            updates: single(StepNumbers::UPDATES) as u64,
        }
    }

    fn what_is_not_finite(&self, numbers: &[f64]) -> String {
        if !numbers[StepNumbers::LOSS].is_finite() {
            return "the loss".to_string();
        }
        // The last in the table is the first that backward made.
        let bad = numbers[self.numbers.layout.non_finite()].iter().rposition(|count| *count > 0.0);
        match bad {
            Some(tensor) => format!("the gradient of {}", place(&self.params[tensor])),
            None => "a number of the step".to_string(),
        }
    }

    /// Of one own micro-batch: sum of cross-entropies, valid targets, auxiliary loss, z loss,
    /// entropy, the last three summed over the layers. For tests and tools; a step reads once, at
    /// its end.
    pub fn read_record(&self) -> [f64; record::COUNT] {
        let mut numbers = [0.0; record::COUNT];
        self.device.read(self.buffers.numbers.record, &mut numbers);
        numbers
    }
}

/// Largest tokens_per_expert over the mean, worst layer.
fn imbalance(experts: usize, loads: &[u64]) -> f64 {
    let layer = |counts: &[u64]| {
        let total: u64 = counts.iter().sum();
        let most = counts.iter().max().copied().unwrap_or(0);
        if total == 0 { 1.0 } else { most as f64 * experts as f64 / total as f64 }
    };
    loads.chunks_exact(experts.max(1)).map(layer).fold(1.0, f64::max)
}
