//! Parameters, gradients and moments in buckets, as a GPU computes with them.
//!
//! ```text
//! backward -> the bucket's gradient: a step's first micro-batch writes, others add
//!   (exact sums: each writes, and the sum in fp64 takes it in; experts' products go there at once)
//!   -> reduce-scatter: each holder has the sum of its chunk
//!   (exact sums: rounded to the own chunk of the gradient)
//!   -> GradientNumbers a chunk -> StepNumbers, summed over ranks -> DecideUpdate -> BucketAdamW
//!   -> all-gather: each holder has all weights
//! ```
//! Everything is decided on the device: the host enqueues the same ops in every step, and every
//! rank the same collectives in the same order. Buckets travel in convoys beside other ops
//! (`beside.rs`), or all at once between the parts of a step where links do nothing beside.

use crate::engine::backward::Leaf;
use crate::engine::beside;
use crate::engine::handles::{Dense, ExpertStacks};
use crate::engine::links::Links;
use crate::engine::model::Model;
use crate::engine::places::{Places, summed};
use crate::engine::round::Round;
use moejob_kernels::{
    AddUp, BucketAdamW, Buffer, Cast, DType, Fill, GradientNumbers, Master, MoveCorrections, Pair,
    StepPhase,
};
use moejob_protocol::buckets::BucketKind;
use moejob_protocol::buffers::Bucket as Memory;
use moejob_protocol::config::AdamW as AdamWConfig;

/// Sums of gradients in buckets.
#[derive(Debug)]
pub struct BucketSums {
    places: Places,
    dense: Dense,
    stacks: Vec<Option<ExpertStacks>>,
    /// An own micro-batch of this step is in the buckets, and tokens of anybody in those of
    /// experts.
    begun: bool,
    begun_experts: bool,
    /// Gradients of dense matrices take turns to be whole.
    takes_turns: bool,
    /// Each micro-batch writes gradients of its own, which are added up in fp64.
    exact: bool,
    /// A tied table's gradient, whole, and its exact sum.
    tied: Option<(Buffer, Buffer)>,
}

impl BucketSums {
    pub fn new(model: &Model) -> BucketSums {
        let places = &model.places;
        let memory = &model.buffers.buckets;
        let find = |index| places.gradient_in(&model.buffers, index);
        BucketSums {
            dense: Dense::new(&model.config, &model.params, &find),
            stacks: places.stacks(model.config.num_hidden_layers, memory, summed),
            places: places.clone(),
            begun: false,
            begun_experts: false,
            takes_turns: places.shapes.iter().any(|of| of.gradient_turn.is_some()),
            exact: model.shape.types.exact,
            tied: model.tied_sum(places),
        }
    }

    /// Where the gradients of a round go.
    pub fn leaf(&self, round: &Round) -> Leaf<'_> {
        Leaf {
            dense: (round.tokens > 0).then_some(&self.dense),
            stacks: &self.stacks,
            accumulate: self.begun && !self.exact,
            accumulate_matrices: self.begun && !self.takes_turns && !self.exact,
            accumulate_experts: self.begun_experts,
            // What takes turns has the sum of this round alone.
            tied: self.tied.map(|(x, sum)| AddUp { x, sum, adds: self.begun && !self.takes_turns }),
            last: None,
        }
    }

    /// The same in a step's last round, where buckets travel as soon as they are complete.
    pub(crate) fn last_leaf(&self, round: &Round) -> Leaf<'_> {
        let own = self.begun || round.tokens > 0;
        let experts = self.begun_experts || round.present > 0;
        let leaf = (round.tokens > 0).then_some(self.begun);
        Leaf { last: Some(Last { sums: self, own, experts, leaf }), ..self.leaf(round) }
    }

    /// Forgets everything: a new step begins.
    pub fn clear(&mut self) {
        (self.begun, self.begun_experts) = (false, false);
    }

    /// Takes in the gradients of the round that was just computed.
    pub fn push(&mut self, round: &Round, model: &mut Model) {
        if round.tokens > 0 {
            let convoys = 0..self.places.convoy_count();
            convoys.for_each(|convoy| self.take_in(convoy, self.begun, model));
        }
        self.begun |= round.tokens > 0;
        self.begun_experts |= round.present > 0;
    }

    /// The sum over its holders of each chunk that this rank owns. A rank that computed nothing
    /// gives zeros.
    pub fn reduce(&self, model: &mut Model, links: &mut Links) {
        for convoy in 0..self.places.convoy_count() {
            self.fill_unwritten(convoy, self.begun, self.begun_experts, model);
        }
        let memory = &model.buffers.buckets;
        let gradients = self.places.gradients(None, memory);
        links.reduce_scatter(&mut model.device, &gradients);
    }

    /// Adds gradients of the own micro-batch to exact sums of a convoy, or writes these.
    fn take_in(&self, convoy: usize, adds: bool, model: &mut Model) {
        for at in self.places.of_convoy(convoy) {
            let shape = &self.places.shapes[at];
            let bucket = &model.buffers.buckets[at];
            let (x, sum) = (bucket.gradient, bucket.sum);
            // Experts have done so, and what takes turns does when it leaves.
            let Some(sum) = sum.filter(|_| !shape.experts && shape.gradient_turn.is_none()) else {
                continue;
            };
            // The head's part of a tied table is there already.
            let tied = self.tied.is_some() && self.places.buckets[at].kind == BucketKind::Embedding;
            model.device.add_up(&AddUp { x, sum, adds: adds || tied });
        }
    }

    /// Zeros in gradients of a convoy in which this rank has written nothing: `own` says whether it
    /// had a micro-batch, `experts` whether its experts had tokens of anybody.
    fn fill_unwritten(&self, convoy: usize, own: bool, experts: bool, model: &mut Model) {
        for at in self.places.of_convoy(convoy) {
            let shape = &self.places.shapes[at];
            if shape.gradient_turn.is_some() {
                continue;
            }
            if !if shape.experts { experts } else { own } {
                model.device.fill_zero(summed(&model.buffers.buckets[at]));
            }
        }
    }

    /// Makes an owned gradient no finite number.
    pub(crate) fn spoil(&self, model: &mut Model) {
        let buckets = self.places.buckets.iter().enumerate();
        let mut owned =
            buckets.filter_map(|(at, bucket)| Some((at, bucket.owned(model.rank).next()?)));
        let Some((at, run)) = owned.next() else { return };
        let own = self.places.own_of(at, summed(&model.buffers.buckets[at]));
        let (value, x) = (f64::NAN, own.slice(run.start as usize, 1));
        model.device.await_marks();
        match x.dtype() {
            DType::F64 => model.device.write(x, &[value]),
            DType::Pair => model.device.write(x, &[Pair::from(value)]),
            _ => model.device.fill(&Fill { value, x }),
        }
    }

    /// Squared norm and counts of what is not finite, of what is owned, into the step's numbers.
    pub fn measure(&self, model: &mut Model) {
        let (numbers, layout) = (model.buffers.numbers.clone(), model.numbers.layout());
        // In the order in which they were reduced: the last ones travel meanwhile.
        for convoy in (0..self.places.convoy_count()).rev() {
            model.device.await_mark(convoy, StepPhase::Numbers);
            for at in self.places.of_convoy(convoy) {
                model.settle_bucket(self.places.buckets[at].kind);
                let bucket = model.buffers.buckets[at].clone();
                let gradient = self.places.own_of(at, bucket.gradient);
                if let Some(sum) = bucket.sum {
                    let from = self.places.own_of(at, sum);
                    model.device.cast(&Cast { from, to: gradient });
                }
                model.device.gradient_numbers(&GradientNumbers {
                    layout,
                    table: bucket.table,
                    params: numbers.params,
                    gradient,
                    sums: bucket.square_sums,
                    numbers: numbers.reduced,
                    squares: numbers.squares,
                });
            }
        }
    }

    /// Updates what is owned as was decided, or nothing. Where links work beside, new weights leave
    /// at once, a convoy beside the update of the next.
    pub fn update(&self, model: &mut Model, links: &mut Links, config: &AdamWConfig) {
        // Nothing of the weights is under way from the last step.
        model.device.await_marks();
        model.forget_whole();
        // Before they leave: what arrives from its owner must not undo the own move, nor miss his.
        move_corrections(model);
        for convoy in 0..self.places.convoy_count() {
            for at in self.places.of_convoy(convoy) {
                self.update_bucket(at, model, config);
            }
            if links.work_beside() {
                let weights = self.places.weights(Some(convoy), &model.buffers.buckets);
                links.all_gather_beside(&mut model.device, &weights, convoy);
                if convoy == beside::FIRST {
                    model.gather_first(links);
                }
            }
        }
    }

    fn update_bucket(&self, at: usize, model: &mut Model, config: &AdamWConfig) {
        let (numbers, bucket) = (&model.buffers.numbers, model.buffers.buckets[at].clone());
        let (params, control) = (numbers.params, numbers.control);
        model.device.bucket_adamw(&BucketAdamW {
            beta1: config.beta1,
            beta2: config.beta2,
            eps: config.epsilon,
            table: bucket.table,
            params,
            control,
            weight: self.places.own_of(at, bucket.weight),
            master: master(&bucket),
            moment1: bucket.moment1,
            moment2: bucket.moment2,
            gradient: self.places.own_of(at, bucket.gradient),
        });
    }

    /// All weights to all of their holders, where they have not left already.
    pub fn spread(&self, model: &mut Model, links: &mut Links) {
        if !links.work_beside() {
            let weights = self.places.weights(None, &model.buffers.buckets);
            links.all_gather(&mut model.device, &weights);
        }
    }
}

/// The sums of a step in its last round: which of them this rank has written, `own` of what it
/// computes for its own tokens, `experts` of its experts. `leaf`: the round has tokens of its own,
/// whose gradients exact sums of earlier ones take in, or begin with.
#[derive(Clone, Copy, Debug)]
pub struct Last<'a> {
    sums: &'a BucketSums,
    own: bool,
    experts: bool,
    leaf: Option<bool>,
}

impl Last<'_> {
    /// Nothing writes to the gradients of `convoy` any more in this step: their sums over ranks
    /// begin beside what follows.
    pub fn reduce(&self, convoy: usize, model: &mut Model, links: &mut Links) {
        let places = &self.sums.places;
        if let Some(adds) = self.leaf {
            self.sums.take_in(convoy, adds, model);
        }
        self.sums.fill_unwritten(convoy, self.own, self.experts, model);
        let gradients = places.gradients(Some(convoy), &model.buffers.buckets);
        links.reduce_scatter_beside(&mut model.device, &gradients, convoy);
    }
}

/// How a bucket's masters are kept.
pub(crate) fn master(bucket: &Memory<Buffer>) -> Master {
    use moejob_kernels::DType::I16;
    match bucket.master {
        None => Master::Weight,
        Some(low) if low.dtype() == I16 => Master::LowBits(low),
        Some(whole) => Master::Separate(whole),
    }
}

/// Corrections of routers follow the loads of the step. Each rank holds all corrections and knows
/// all loads, so all do alike.
pub(crate) fn move_corrections(model: &mut Model) {
    let (rate, frozen) = (model.config.router.bias_update_rate, model.config.router.frozen);
    if rate == 0.0 || frozen {
        return;
    }
    let numbers = model.buffers.numbers.reduced;
    for (at, layer) in model.mixture.clone().into_iter().enumerate() {
        let Some(bias) = model.dense.layers[layer].correction else { continue };
        let loads = model.numbers.loads(at);
        model.device.move_corrections(&MoveCorrections { rate, loads, numbers, bias });
    }
}
