//! One optimizer step: forward, backward, reduce, update, spread. The engine that does it.

use crate::data::{Batches, DataError};
use crate::engine::forward::Pass;
use crate::engine::gate::Noise;
use crate::engine::links::Links;
use crate::engine::model::Model;
use crate::engine::round::{Aim, Schedule};
use crate::engine::sums::Sums;
use crate::engine::validate::Favourites;
use crate::failure::chain;
use crate::gang::comm::{Comm, CommError};
use moejob_kernels::{Device, KernelError, SumRows};
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::{Backend, TrainingConfig};
use moejob_protocol::memory::Shape;

pub use crate::engine::numbers::StepSummary;

/// Why a step did not happen.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Data(#[from] DataError),
    /// Nothing of the step counts; only a new process can use the device again.
    #[error("the device failed: {0}")]
    Device(String),
}

/// A device and all that one rank computes with it. It knows the other ranks by its links alone.
#[derive(Debug)]
pub struct Engine {
    pub model: Model,
    pub gradients: Sums,
    pub links: Links,
    pub(crate) training: TrainingConfig,
    pub(crate) favourites: Favourites,
    /// Steps in whose next run a number is broken.
    spoiled: Vec<u64>,
}

impl Engine {
    /// Plans and reserves the memory of `rank`; there is no state yet.
    ///
    /// # Errors
    /// The device cannot be made, lacks a kernel, or has too little memory.
    pub fn open(config: &WorkerConfig, rank: u32, comm: Comm) -> Result<Engine, KernelError> {
        let (training, ranks) = (&config.training, config.ranks.max(1));
        let device = match training.compute.backend {
            Backend::Cpu => {
                let threads = match config.threads {
                    0 => std::thread::available_parallelism().map_or(1, usize::from),
                    threads => threads as usize,
                };
                // The ranks of a worker share its processors.
                Device::cpu((threads / ranks as usize).max(1), 0)?
            }
            // The ranks of a worker follow each other, a device each.
            Backend::Cuda => Device::cuda((rank % ranks) as usize, 0)?,
        };
        let shape = Shape::new(&config.model, &config.layout, rank, training);
        let model = Model::on(device, shape, &config.model, &config.layout, rank, training)?;
        Ok(Engine::new(model, training, Links::new(comm)))
    }

    pub fn new(model: Model, training: &TrainingConfig, links: Links) -> Engine {
        let gradients = Sums::new(&model);
        let favourites = Favourites::default();
        let (training, spoiled) = (training.clone(), Vec::new());
        Engine { model, gradients, links, training, favourites, spoiled }
    }

    /// Breaks a gradient of the next run of `step`, as a fault of the machine would: for tests of
    /// what happens then.
    pub fn spoil(&mut self, step: u64) {
        self.spoiled.push(step);
    }

    /// One step, counted from 0, on all ranks. Where a number is not finite nothing is updated,
    /// and the same step done again gives the same bits. Where routed rows find no room it is done
    /// again at once, with more. The host reads once, at the end.
    ///
    /// # Errors
    /// A peer is lost, or the data changed. The weights may be torn then.
    pub fn step(
        &mut self,
        step: u64,
        batches: &mut impl Batches,
    ) -> Result<StepSummary, StepError> {
        loop {
            let summary = self.step_once(step, batches)?;
            if !summary.overflows {
                return Ok(summary);
            }
            if !self.model.group.grow() {
                let non_finite = Some("a count of routed rows".to_string());
                return Ok(StepSummary { non_finite, ..summary });
            }
        }
    }

    fn step_once(
        &mut self,
        step: u64,
        batches: &mut impl Batches,
    ) -> Result<StepSummary, StepError> {
        self.model.begin_step(&self.training, step);
        self.gradients.clear();
        self.whole_step_balance(step, batches)?;
        self.rounds(step, batches, Aim::Record, |engine, schedule| {
            let (model, round) = (&mut engine.model, &schedule.round);
            let mut pass = Pass::new(model, &mut engine.links, round);
            pass.forward();
            let leaf = engine.gradients.leaf(round);
            pass.loss(Some(&leaf));
            pass.backward(&leaf);
            engine.gradients.push(round, schedule.own, &schedule.leaves, model);
        })?;
        let Engine { model, gradients, links, training, spoiled, .. } = self;
        gradients.reduce(model, links);
        if let Some(at) = spoiled.iter().position(|spoiled| *spoiled == step) {
            spoiled.remove(at);
            gradients.spoil(model);
        }
        gradients.measure(model);
        model.device.mark("numbers", None);
        model.reduce_numbers(links);
        // What was not summed over all ranks must not move a weight.
        links.check()?;
        gradients.update(model, &training.adamw);
        gradients.spread(model, links);
        model.device.mark("update", None);
        links.check()?;
        let summary = model.read_numbers(training, step);
        // What was read before a failure says nothing.
        model.device.check().map_err(|error| StepError::Device(chain(error)))?;
        Ok(summary)
    }

    /// Calls `each` with every round of a step, its micro-batch loaded.
    pub(crate) fn rounds(
        &mut self,
        step: u64,
        batches: &mut impl Batches,
        aim: impl Fn(usize) -> Aim,
        mut each: impl FnMut(&mut Engine, &Schedule),
    ) -> Result<(), StepError> {
        let (count, tokens) = (self.model.shape.micro_batches, self.model.shape.tokens as usize);
        for round in 0..self.model.layout.mesh.rounds(count) {
            let schedule = Schedule::new(&self.model, round, count, &aim, |_| tokens);
            if let Some(micro_batch) = schedule.own {
                let batch = batches.micro_batch(step, micro_batch)?;
                self.model.load_documents(&batch.ids, &batch.targets, batch.starts.as_deref());
                let seed = self.training.seed;
                self.model.set_noise(Some(Noise { seed, step, micro_batch }));
            }
            each(self, &schedule);
            self.links.check()?;
        }
        Ok(())
    }

    /// Where the balance is that of the whole step: its statistics, from a forward pass of their
    /// own over all micro-batches, since the first gradient needs them already. Every rank adds
    /// them up in the order of micro-batches.
    fn whole_step_balance(
        &mut self,
        step: u64,
        batches: &mut impl Batches,
    ) -> Result<(), StepError> {
        let Some(balance) = self.model.buffers.numbers.balance.clone() else { return Ok(()) };
        self.rounds(step, batches, Aim::Statistics, |engine, schedule| {
            Pass::new(&mut engine.model, &mut engine.links, &schedule.round).forward();
        })?;
        let (mesh, count) = (self.model.layout.mesh, self.model.shape.micro_batches);
        let part = |rank| {
            let block = mesh.micro_batches(rank, count);
            let width = balance.sum.len();
            balance.micro_batches.slice(block.start as usize * width, block.len() * width)
        };
        let parts: Vec<_> = (0..mesh.world()).map(part).collect();
        self.links.gather(&mut self.model.device, &parts);
        self.model.device.sum_rows(&SumRows { x: balance.micro_batches, out: balance.sum });
        Ok(())
    }
}
