//! A rank's model: its memory, where everything lies, and the device that computes.
//!
//! ```text
//! embed -> [norm -> q k v -> rope -> attention -> o -> + -> norm -> experts | dense -> +] x L
//!       -> norm -> logits -> cross-entropy
//! ```
//! What is computed with it stands in `forward.rs` and `backward.rs`, round by round.
//!
//! Letters: `T` tokens, `D` model, `N` heads, `H` head dim, `F` hidden, `V` vocabulary.

use crate::engine::arena::{Growing, dtype, lay_out};
use crate::engine::beside::BesideProducts;
use crate::engine::local_experts::{LEGS, local_experts, sums_of_slices};
use crate::engine::fused;
use crate::engine::gate::{Noise, gates};
use crate::engine::group::ExpertGroup;
use crate::engine::lane::Lane;
use crate::engine::links::{Route, window_wanted};
use crate::engine::handles::{Dense, ExpertStacks};
use crate::engine::numbers::Numbers;
use crate::engine::places::Places;
use crate::engine::zero::Turning;
use moejob_kernels::{
    ArenaPlan, AttentionDesc, Buffer, Device, GateShape, HeadDesc, IGNORE, KernelError, LossScale,
    MoeDesc, Refusal, StepKernels,
};
use moejob_protocol::buffers::Buffers;
use moejob_protocol::config::{Backend, Precision, TrainingConfig};
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{Shape, beside_arena};
use moejob_protocol::model::{ModelConfig, Param, QkNorm};
use moejob_protocol::owners::Owners;
use moejob_protocol::zero::Zero;

#[derive(Debug)]
pub struct Model {
    pub config: ModelConfig,
    pub layout: Layout,
    pub rank: u32,
    pub params: Vec<Param>,
    pub(crate) owners: Owners,
    pub shape: Shape,
    pub device: Device,
    pub buffers: Buffers<Buffer>,
    pub(crate) dense: Dense,
    /// `[layer]`; none of layers without experts.
    pub(crate) stacks: Vec<Option<ExpertStacks>>,
    /// Where parameters lie in buckets.
    pub(crate) places: Places,
    /// Where some of them are whole in turn.
    pub(crate) turning: Option<Turning>,
    /// The mixture layer as one op.
    pub(crate) fused: Option<MoeDesc>,
    /// Its part at this rank, where experts are shared out over ranks.
    pub(crate) here: Option<MoeDesc>,
    pub group: ExpertGroup,
    /// `[layer]`: how its tokens travel by need, hop by hop, from forward to backward.
    pub(crate) routes: Vec<Vec<Route>>,
    /// Routed rows that have memory for fewer than the worst case.
    pub(crate) growing: Option<Growing>,
    pub(crate) numbers: Numbers,
    /// Layers with experts.
    pub(crate) mixture: Vec<usize>,
    /// One op chooses experts, else `gate.rs`.
    pub(crate) plain: bool,
    /// Tokens that were loaded; the others that are computed are padding.
    pub(crate) loaded: usize,
    pub(crate) noise: Option<Noise>,
    /// Tokens before those of a round, of which the cache knows; none: a round is by itself.
    pub(crate) past: Option<usize>,
    /// Attention's backward may add in any order.
    pub(crate) fast_attention: bool,
    /// `S`
    sequence: usize,
    /// Documents in a sequence are kept apart.
    apart: bool,
    /// Targets of a step.
    targets: f64,
    /// 1 / those of them that count, where the device is not told by itself.
    pub(crate) target_share: f64,
    /// By what the loss of the next step is multiplied, in fp16.
    pub(crate) scaling: Option<LossScale>,
    /// Gradients of attention's matrices were written, and added to, in a round before this one:
    /// their kernels are loaded. The driver holds up what is loaded beside a kernel that waits.
    pub(crate) attention_loaded: [bool; 2],
    /// 1 / (mixture layers * micro-batches): what a mean over them multiplies by.
    pub(crate) router_scale: f64,
    /// Behind the device, which writes to memory that is kept here.
    pub(crate) lane: Lane,
}

impl Model {
    /// Plans and reserves the memory on processors; nothing is initialised.
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
        Model::on(Device::cpu(threads, 0)?, shape, config, layout, rank, training)
    }

    /// The same on a device without memory yet, which is given what `shape` needs.
    ///
    /// # Errors
    /// The device has no such kernels, or too little memory.
    pub fn on(
        mut device: Device,
        mut shape: Shape,
        config: &ModelConfig,
        layout: &Layout,
        rank: u32,
        training: &TrainingConfig,
    ) -> Result<Model, KernelError> {
        let mixture = (0..config.num_hidden_layers).filter(|layer| config.is_moe_layer(*layer));
        let mixture: Vec<usize> = mixture.map(|layer| layer as usize).collect();
        let means = mixture.len().max(1) as f64 * f64::from(shape.micro_batches);
        let router_scale = 1.0 / means;
        device.set_tf32(training.precision == Precision::Tf32);
        let (fused, here) = layers(config, layout, rank, &shape, router_scale);
        let slices = config.slices().each;
        if fused.is_some() && !shape.on_cpu && shape.expert_parallel == 1 && slices > 1 {
            let refusal = Refusal::Slices { found: slices as usize };
            return Err(KernelError::Layer(refusal.into()));
        }
        let descs = descs(config, &shape, fused, here);
        prepare(&mut device, config, &mut shape, training, &descs)?;
        let mut group = ExpertGroup::new(config, layout, rank, shape.tokens).along(shape.rails);
        let on_gpu = training.compute.backend == Backend::Cuda;
        if on_gpu && shape.expert_parallel > 1 {
            // All say the same of rows, also those with memory for all of them.
            group.commit(config.experts.routed_headroom);
        }
        let with_others = layout.mesh.world() > 1;
        let window = window_wanted(config, layout, training, &shape);
        let beside = (beside_arena(with_others) + window) as usize;
        let room = (beside, group.room());
        let (buffers, plan, growing) = lay_out(config, &shape, &device, room);
        device.reserve_planned(&plan, beside)?;
        let params = config.params();
        let places = Places::new(config, &params, layout, rank, &shape.buckets);
        let dense_in = |place| {
            Dense::new(config, &params, &|index| places.weight_in(&buffers, place, index))
        };
        let dense = dense_in(1);
        let turning = Turning::new(&places, &shape, |place| dense_in(place).layers);
        let layers = config.num_hidden_layers;
        let stacks = places.stacks(layers, &buffers.buckets, |bucket| bucket.weight);
        let sequence = training.sequence_length as usize;
        let positions: Vec<u32> =
            (0..shape.tokens as usize).map(|token| (token % sequence) as u32).collect();
        device.write(buffers.batch.positions, &positions);
        let targets = f64::from(training.global_batch_size) * sequence as f64;
        let beside = BesideProducts::said();
        if shape.expert_parallel > 1 && beside.blocks > 0 {
            device.open_token_lane(LEGS, beside.free)?;
        }
        group.write_tables(&buffers.layers, &mut device);
        let scaled = shape.types.scaled;
        let stage = if shape.trains { training.compute.zero } else { Zero::default() };
        let mut model = Model {
            turning,
            growing,
            numbers: Numbers::new(config, &params, &shape.numbers),
            group,
            routes: vec![Vec::new(); layers as usize],
            mixture,
            plain: config.router.is_of_one_op(),
            loaded: 0,
            noise: None,
            past: None,
            fast_attention: training.compute.fast_attention,
            config: config.clone(),
            layout: layout.clone(),
            rank,
            params,
            owners: Owners::new(config, layout).in_stage(stage),
            shape,
            device,
            buffers,
            dense,
            stacks,
            places,
            fused,
            here,
            sequence,
            apart: false,
            targets,
            target_share: 1.0 / targets,
            scaling: scaled.then_some(LossScale::FIRST),
            attention_loaded: [false; 2],
            router_scale,
            lane: Lane::default(),
        };
        if model.shape.trains {
            model.places.clone().write_tables(&mut model);
        }
        if let Some(spread) = &model.buffers.scratch.spread {
            let slots: Vec<u32> = (0..spread.slots.len() as u32).collect();
            model.device.write(spread.slots, &slots);
        }
        Ok(model)
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
        let missing = self.computed_together(ids.len()) - ids.len();
        self.loaded = ids.len();
        if missing > 0 {
            let padded = |of: &[u32], with| [of, &vec![with; missing]].concat();
            let starts = starts.map(|starts| padded(starts, 0));
            let (ids, targets) = (padded(ids, 0), padded(targets, IGNORE));
            return self.write_batch(&ids, &targets, starts.as_deref());
        }
        self.write_batch(ids, targets, starts);
    }

    fn write_batch(&mut self, ids: &[u32], targets: &[u32], starts: Option<&[u32]>) {
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

    /// How many targets of a step count; None: all of them. Told before each of its losses.
    pub(crate) fn count_targets(&mut self, counted: Option<u64>) {
        // A step without any has no gradient, whatever it is divided by.
        let counted = counted.map_or(self.targets, |counted| counted.max(1) as f64);
        match self.buffers.numbers.target_scale {
            // Kernels that were captured have their numbers in them, so this one is in memory.
            Some(at) => {
                let loss_scale = self.scaling.map_or(1.0, |scaling| scaling.scale);
                let scale = loss_scale * self.targets / counted;
                self.device.write(at, &[scale as f32]);
            }
            None => self.target_share = 1.0 / counted,
        }
    }

    /// Tokens that are computed where `tokens` are wanted. A GPU's kernels of mixture layers are
    /// made for a whole micro-batch, and ranks that share experts have equal parts of the memory in
    /// which tokens meet: the rest is padding without targets.
    pub(crate) fn computed_together(&self, tokens: usize) -> usize {
        let any = self.shape.on_cpu && self.here.is_none();
        if any { tokens } else { self.shape.tokens as usize }
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

    /// `K`: slots of a token, as its router fills them.
    pub(crate) fn top_k(&self) -> usize {
        self.config.slots() as usize
    }

    pub(crate) fn expert_count(&self) -> usize {
        self.config.experts.count as usize
    }

    /// The whole parameter at `index` of the table in this rank's memory, if it always holds it.
    pub fn weight(&self, index: usize) -> Option<Buffer> {
        self.places.weight(&self.buffers.buckets, index)
    }

    /// What this rank always has of the parameter at `index`, and the first element of that.
    pub(crate) fn kept_weight(&self, index: usize) -> Option<(usize, Buffer)> {
        let whole = self.weight(index).map(|whole| (0, whole));
        whole.or_else(|| self.places.own_weight(&self.buffers.buckets, index))
    }

    /// Where the whole gradient of the parameter at `index` is summed.
    pub fn bucket_gradient(&self, index: usize) -> Option<Buffer> {
        self.places.gradient(&self.buffers.buckets, index)
    }

    /// Bytes of state that lie in the memory of a GPU's host.
    pub fn offloaded_bytes(&self) -> u64 {
        let parts = self.buffers.buckets.iter().flat_map(|bucket| {
            bucket.master.into_iter().chain([bucket.moment1, bucket.moment2])
        });
        let far = parts.filter(|part| part.offset_on_host().is_some());
        far.map(|part| part.bytes() as u64).sum()
    }

    /// The head of `tokens`.
    pub(crate) fn head_desc(&self, tokens: usize) -> HeadDesc {
        head_desc(&self.config, &self.shape, tokens)
    }

    /// Waits for the sum of cross-entropies of a round that was measured.
    pub fn read_loss(&self) -> f64 {
        let mut sum = [0.0];
        self.device.read(self.buffers.head.measured.slice(0, 1), &mut sum);
        sum[0]
    }
}

fn head_desc(config: &ModelConfig, shape: &Shape, tokens: usize) -> HeadDesc {
    let (dim, vocab) = (config.hidden_size as usize, config.vocab_size as usize);
    HeadDesc { element: dtype(shape.types.element), tokens, dim, vocab }
}

/// The mixture layer where it is one op, and this rank's part where its experts are shared out.
fn layers(
    config: &ModelConfig,
    layout: &Layout,
    rank: u32,
    shape: &Shape,
    router_scale: f64,
) -> (Option<MoeDesc>, Option<MoeDesc>) {
    let mixture = (0..config.num_hidden_layers).filter(|layer| config.is_moe_layer(*layer));
    let mixture: Vec<usize> = mixture.map(|layer| layer as usize).collect();
    let fused = (!mixture.is_empty()).then(|| layer_desc(config, shape, router_scale));
    let here = fused.and_then(|whole| local_experts(config, layout, rank, &mixture, &whole));
    (fused, here)
}

/// What kernels are made for.
fn descs(
    config: &ModelConfig,
    shape: &Shape,
    fused: Option<MoeDesc>,
    here: Option<MoeDesc>,
) -> Vec<MoeDesc> {
    let own = fused.filter(|_| here.is_some() && shape.formats.returns_each());
    let own = own.and_then(|whole| sums_of_slices(config, &whole));
    fused.into_iter().chain(here).chain(own).collect()
}

/// Attention of whole sequences, and of documents that are kept apart where there may be some: that
/// takes other kernels, and another workspace.
fn attentions(
    config: &ModelConfig,
    shape: &Shape,
    training: &TrainingConfig,
) -> Vec<AttentionDesc> {
    let whole = AttentionDesc {
        element: dtype(shape.types.element),
        batch: shape.batch as usize,
        seq: training.sequence_length as usize,
        heads: config.num_attention_heads as usize,
        kv_heads: config.num_key_value_heads as usize,
        head_dim: config.head_dim as usize,
        scale: (1.0 / f64::from(config.head_dim).sqrt()) as f32,
        documents: false,
        window: None,
        deterministic: !training.compute.fast_attention,
    };
    let kinds: &[bool] = if shape.documents { &[false, true] } else { &[false] };
    kinds.iter().map(|documents| AttentionDesc { documents: *documents, ..whole }).collect()
}

/// The kernels of the steps of rank 0, with documents kept apart and without, told without a
/// device. Those of layers in parts, which processors have, are not among them.
pub fn step_kernels(
    config: &ModelConfig,
    layout: &Layout,
    training: &TrainingConfig,
) -> StepKernels {
    let mut shape = Shape::new(config, layout, 0, training);
    shape.documents = true;
    let (fused, here) = layers(config, layout, 0, &shape, 1.0);
    let [heads, kv_heads] = [config.num_attention_heads, config.num_key_value_heads];
    let head_dim = config.head_dim as usize;
    let (mut norms, mut turns) = (vec![config.hidden_size as usize], Vec::new());
    for heads in [heads as usize, kv_heads as usize] {
        // Heads that are normed as one; a clamp between norm and turn makes two ops of them.
        let together = if config.qk_norm == QkNorm::PerHead { 1 } else { heads };
        if config.qk_norm != QkNorm::None {
            norms.push(together * head_dim);
            turns.push((together, true));
        }
        turns.push((heads, false));
    }
    StepKernels {
        element: dtype(shape.types.element),
        gradient: dtype(shape.types.gradient),
        moment: dtype(shape.types.moment),
        norms,
        head_dim,
        turns,
        head: head_desc(config, &shape, shape.tokens as usize),
        attentions: attentions(config, &shape, training),
        layers: descs(config, &shape, fused, here),
        gates: gates(config, shape.tokens as usize).iter().map(GateShape::of).collect(),
        shared_out: here.is_some(),
    }
}

fn layer_desc(config: &ModelConfig, shape: &Shape, router_scale: f64) -> MoeDesc {
    let kinds = [shape.types.element, shape.types.summed(shape.types.gradient)].map(dtype);
    let segments = shape.segments as usize;
    fused::describe(config, kinds, shape.tokens as usize, segments, router_scale)
}

/// Makes the kernels that a step needs, so that none waits for them, and learns how much memory
/// they work in.
fn prepare(
    device: &mut Device,
    config: &ModelConfig,
    shape: &mut Shape,
    training: &TrainingConfig,
    layers: &[MoeDesc],
) -> Result<(), KernelError> {
    let head = head_desc(config, shape, shape.tokens as usize);
    device.head_load(&head)?;
    let mut bytes = device.head_plan(&head).scratch_bytes;
    for desc in layers {
        bytes = bytes.max(device.moe_plan(desc, &mut ArenaPlan::new())?.workspace_bytes);
        device.moe_place_load(desc.top_k)?;
    }
    // Text is generated by attention over what is kept, which has kernels of its own.
    let attentions = match shape.cached {
        0 => attentions(config, shape, training),
        _ => Vec::new(),
    };
    for desc in attentions {
        bytes = bytes.max(device.attention_plan(&desc)?);
    }
    for gate in gates(config, shape.tokens as usize) {
        device.gate_load(&gate)?;
        bytes = bytes.max(device.gate_workspace([gate.tokens, gate.experts, gate.top_k]));
    }
    shape.workspace = [shape.workspace[0].min(bytes as u64), bytes as u64];
    Ok(())
}
