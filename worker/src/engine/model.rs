//! A rank's model: its memory, where everything lies, and the device that computes.
//!
//! ```text
//! embed -> [norm -> q k v -> rope -> attention -> o -> + -> norm -> experts | dense -> +] x L
//!       -> norm -> logits -> cross-entropy
//! ```
//! What is computed with it stands in `forward.rs` and `backward.rs`, round by round.
//!
//! Letters: `T` tokens, `D` model, `N` heads, `H` head dim, `F` hidden, `V` vocabulary.

use crate::engine::gate::Noise;
use crate::engine::group::ExpertGroup;
use crate::engine::handles::{Dense, Experts, slice};
use crate::engine::numbers::Numbers;
use moejob_kernels::{ArenaPlan, Buffer, DType, Device, KernelError};
use moejob_protocol::buffers::{Buffers, Moe, MoeScratch};
use moejob_protocol::config::TrainingConfig;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{Kind, Planner, Rows, Shape};
use moejob_protocol::model::{ModelConfig, Param};

#[derive(Debug)]
pub struct Model {
    pub config: ModelConfig,
    pub layout: Layout,
    pub rank: u32,
    pub params: Vec<Param>,
    pub shape: Shape,
    pub device: Device,
    pub buffers: Buffers<Buffer>,
    pub(crate) dense: Dense,
    pub(crate) experts: Vec<Experts>,
    pub group: ExpertGroup,
    pub(crate) numbers: Numbers,
    /// Layers with experts.
    pub(crate) mixture: Vec<usize>,
    /// Dropless top-k, which one fused op computes; else `gate.rs`.
    pub(crate) plain: bool,
    pub(crate) noise: Option<Noise>,
    /// `S`
    sequence: usize,
    /// Documents in a sequence are kept apart.
    apart: bool,
    /// 1 / valid targets of a step.
    pub(crate) loss_scale: f64,
    /// 1 / (mixture layers * micro-batches): what a mean over them multiplies by.
    pub(crate) router_scale: f64,
}

/// The device's arena, from the list that the plan counts.
struct ArenaPlanner<'a> {
    shape: &'a Shape,
    plan: ArenaPlan,
    float: DType,
}

impl Planner for ArenaPlanner<'_> {
    type Buffer = Buffer;

    fn part(&mut self, _name: &'static str) {}

    fn alloc(&mut self, kind: Kind, rows: Rows, width: u64) -> Buffer {
        let rows = match rows {
            Rows::Fixed(rows) => rows,
            Rows::Routed => self.shape.worst.routed,
            Rows::Arrived => self.shape.worst.arrived,
        };
        let dtype = match kind {
            Kind::Float => self.float,
            Kind::U32 => DType::U32,
            Kind::F64 => DType::F64,
        };
        self.plan.alloc(dtype, (rows * width) as usize)
    }
}

impl Model {
    /// Plans and reserves the memory; nothing is initialised.
    ///
    /// # Errors
    /// The device cannot be made.
    pub fn new(
        config: &ModelConfig,
        layout: &Layout,
        rank: u32,
        training: &TrainingConfig,
        threads: usize,
    ) -> Result<Model, KernelError> {
        let shape = Shape::new(config, layout, rank, training);
        let float = if shape.float_bytes == 8 { DType::F64 } else { DType::F32 };
        let mut planner = ArenaPlanner { shape: &shape, plan: ArenaPlan::new(), float };
        let buffers = Buffers::plan(config, &shape, &mut planner);
        let mut device = Device::cpu(threads, planner.plan.bytes())?;
        let params = config.params();
        let flats = &shape.flats;
        let dense = Dense::new(config, &params, buffers.state.dense, &flats.dense);
        let experts =
            Experts::new(config, layout, rank, &params, buffers.state.experts, &flats.experts);
        let sequence = training.sequence_length as usize;
        let positions: Vec<u32> =
            (0..shape.tokens as usize).map(|token| (token % sequence) as u32).collect();
        device.write(buffers.batch.positions, &positions);
        let targets = f64::from(training.global_batch_size) * sequence as f64;
        let mixture = (0..config.num_hidden_layers).filter(|layer| config.is_moe_layer(*layer));
        let mixture: Vec<usize> = mixture.map(|layer| layer as usize).collect();
        let means = mixture.len().max(1) as f64 * f64::from(shape.micro_batches);
        let group = ExpertGroup::new(config, layout, rank, shape.tokens);
        group.write_tables(&buffers.layers, &mut device);
        let (counts, count) = (&shape.numbers, shape.micro_batches);
        Ok(Model {
            numbers: Numbers::new(config, layout, &params, rank, counts, count),
            group,
            mixture,
            plain: config.router.is_plain(),
            noise: None,
            config: config.clone(),
            layout: layout.clone(),
            rank,
            params,
            shape,
            device,
            buffers,
            dense,
            experts,
            sequence,
            apart: false,
            loss_scale: 1.0 / targets,
            router_scale: 1.0 / means,
        })
    }

    /// `S`
    pub fn sequence(&self) -> usize {
        self.sequence
    }

    pub(crate) fn dim(&self) -> usize {
        self.config.hidden_size as usize
    }

    /// Writes the round's own tokens, sequences of one document each.
    pub fn load(&mut self, ids: &[u32], targets: &[u32]) {
        self.load_documents(ids, targets, None);
    }

    /// Writes the round's own tokens. `starts` [T] says for each where its document begins in its
    /// sequence: attention reaches back so far, and positions count from there.
    pub fn load_documents(&mut self, ids: &[u32], targets: &[u32], starts: Option<&[u32]>) {
        let batch = &self.buffers.batch;
        self.device.write(batch.ids.slice(0, ids.len()), ids);
        self.device.write(batch.targets.slice(0, targets.len()), targets);
        let position = |token: usize| (token % self.sequence) as u32;
        if let Some(starts) = starts {
            let positions: Vec<u32> =
                starts.iter().enumerate().map(|(token, start)| position(token) - start).collect();
            self.device.write(batch.starts.slice(0, starts.len()), starts);
            self.device.write(batch.positions.slice(0, starts.len()), &positions);
        } else if self.apart {
            let positions: Vec<u32> = (0..batch.positions.len()).map(position).collect();
            self.device.write(batch.positions, &positions);
        }
        self.apart = starts.is_some();
    }

    /// Where attention of the loaded tokens begins; none when each sequence is one document.
    pub(crate) fn starts(&self, t: usize) -> Option<Buffer> {
        self.apart.then(|| self.buffers.batch.starts.slice(0, t))
    }

    /// Where the residual stream enters `layer`; the head's input after the last.
    pub(crate) fn layer_input(&self, layer: usize) -> Buffer {
        let layer = self.buffers.layers.get(layer);
        layer.map_or(self.buffers.head.input, |layer| layer.input)
    }

    /// `K`: slots of a token.
    pub(crate) fn top_k(&self) -> usize {
        self.config.slots() as usize
    }

    pub(crate) fn expert_count(&self) -> usize {
        self.config.experts.count as usize
    }

    pub(crate) fn moe(&self, layer: usize) -> Moe<Buffer> {
        self.buffers.layers[layer].moe.clone().expect("a mixture layer")
    }

    pub(crate) fn moe_scratch(&self) -> MoeScratch<Buffer> {
        self.buffers.scratch.moe.clone().expect("a model with experts has their scratch memory")
    }

    /// The whole parameter at `index` of the table in this rank's memory, if it holds it.
    pub fn weight(&self, index: usize) -> Option<Buffer> {
        let (state, flats) = (&self.buffers.state, &self.shape.flats);
        let dense = slice(state.dense, &flats.dense, index);
        dense.or_else(|| slice(state.experts, &flats.experts, index))
    }

    /// Waits for the sum of cross-entropies of a round that was measured.
    pub fn read_loss(&self) -> f64 {
        let mut sum = [0.0];
        self.device.read(self.buffers.head.loss_sum, &mut sum);
        sum[0]
    }
}
