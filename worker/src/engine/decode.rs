//! Token after token, with what is needed of those before kept: `moejob generate`.
//!
//! ```text
//! ids -> chunks of rows -> Pass::forward: attention appends keys and values to the cache, and
//!     reads all of them -> the last row's logits
//! ```
//! Every token has its experts, whatever capacity the router was trained with.

use crate::checkpoint::Refusal;
use crate::engine::computer::Computer;
use crate::engine::forward::Pass;
use crate::engine::links::Links;
use crate::engine::machine::check;
use crate::engine::model::Model;
use crate::engine::round::{Aim, Round};
use crate::hf::{Weights, load};
use crate::state::rank::{DeviceError, RankState};
use moejob_kernels::{CachedAttention, DType, Gate, KernelError, Layout as Order, Matmul};
use moejob_protocol::buffers::LayerCache;
use moejob_protocol::config::TrainingConfig;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{RankMemory, Shape, model_memory};
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{AuxLossScope, ModelConfig, RouterConfig, RouterKind};

/// Tokens of a prompt that pass through the model together: enough for products of many rows, few
/// enough that activations stay small.
const TOGETHER: u32 = 256;

impl Computer {
    /// What a model with room for a text of `capacity` tokens is planned from.
    pub fn generating(self, capacity: u32) -> TrainingConfig {
        self.planned(TOGETHER.min(capacity).max(1), 1)
    }

    /// What a decoder with room for a text of `capacity` tokens takes.
    pub fn memory_of_generating(self, config: &ModelConfig, capacity: u32) -> RankMemory {
        let config = dropless(config);
        model_memory(&config, &shape(&config, &self.generating(capacity), capacity).0)
    }
}

fn shape(config: &ModelConfig, training: &TrainingConfig, capacity: u32) -> (Shape, Layout) {
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
    let shape = Shape::new(config, &layout, 0, training).generating(capacity.max(1).into());
    (shape, layout)
}

/// Why there is no next token.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    #[error(transparent)]
    Weights(#[from] Refusal),
    #[error(
        "the router is `expertChoice`: each expert chooses among all tokens of a text, so no token \
         can be routed before those behind it are known. Such a model can be measured (`moejob \
         eval`), but not used to generate"
    )]
    ExpertChoice,
    #[error("the device cannot be made")]
    Device(#[from] KernelError),
    #[error(transparent)]
    Failed(#[from] DeviceError),
    #[error("there is room for {capacity} tokens, and {wanted} are wanted")]
    Full { capacity: usize, wanted: usize },
    #[error("the token {id} is none of the model's {vocabulary}")]
    Unknown { id: u32, vocabulary: u32 },
    #[error("the output after token {position} is not finite")]
    NotFinite { position: usize },
}

/// A model and what it remembers of one text.
#[derive(Debug)]
pub struct Decoder {
    model: Model,
    links: Links,
    /// Rows that there is memory for.
    together: usize,
    capacity: usize,
}

impl Decoder {
    /// Loads weights, with room for a text of `capacity` tokens.
    ///
    /// # Errors
    /// The weights are refused, or the model cannot work so.
    pub fn open(
        weights: &Weights,
        capacity: u32,
        computer: Computer,
    ) -> Result<Decoder, DecodeError> {
        let mut decoder = Decoder::empty(weights.model(), capacity, computer)?;
        load(weights, &mut decoder.model)?;
        decoder.model.finish()?;
        Ok(decoder)
    }

    /// A decoder without weights yet.
    ///
    /// # Errors
    /// See [`Decoder::open`].
    pub fn empty(
        config: &ModelConfig,
        capacity: u32,
        computer: Computer,
    ) -> Result<Decoder, DecodeError> {
        if config.router.kind == RouterKind::ExpertChoice {
            return Err(DecodeError::ExpertChoice);
        }
        let config = dropless(config);
        let training = computer.generating(capacity);
        let (shape, layout) = shape(&config, &training, capacity);
        let mut model = Model::on(computer.device()?, shape, &config, &layout, 0, &training)?;
        model.past = Some(0);
        let (together, capacity) = (training.sequence_length as usize, capacity.max(1) as usize);
        Ok(Decoder { model, links: Links::solo(), together, capacity })
    }

    /// Whose weights may be written.
    pub fn model_mut(&mut self) -> &mut Model {
        &mut self.model
    }

    /// Tokens that are remembered.
    pub fn len(&self) -> usize {
        self.model.past.unwrap_or(0)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens that can still be fed.
    pub fn room(&self) -> usize {
        self.capacity - self.len()
    }

    /// Begins a new text.
    pub fn forget(&mut self) {
        self.model.past = Some(0);
    }

    /// Goes on by `ids`, at least one; the logits [V] of the token after them.
    ///
    /// # Errors
    /// There is no room, an id is none of the model's, or a number broke. The text is then as it
    /// was, but for the last case.
    pub fn feed(&mut self, ids: &[u32]) -> Result<Vec<f64>, DecodeError> {
        assert!(!ids.is_empty(), "something to go on by");
        let (wanted, vocabulary) = (self.len() + ids.len(), self.model.config.vocab_size);
        if wanted > self.capacity {
            return Err(DecodeError::Full { capacity: self.capacity, wanted });
        }
        if let Some(id) = ids.iter().copied().find(|id| *id >= vocabulary) {
            return Err(DecodeError::Unknown { id, vocabulary });
        }
        let (mut rest, mut last) = (ids, 0);
        while !rest.is_empty() {
            // A GPU makes ready for each number of rows, so there are few of them.
            let rows = match rest.len() {
                many if many >= self.together => self.together,
                few => 1 << few.ilog2(),
            };
            let (these, behind) = rest.split_at(rows);
            self.rows(these);
            (rest, last) = (behind, rows - 1);
        }
        let logits = self.logits(last);
        check(&self.model.device, 1)?;
        if logits.iter().any(|logit| !logit.is_finite()) {
            return Err(DecodeError::NotFinite { position: wanted - 1 });
        }
        Ok(logits)
    }

    fn rows(&mut self, ids: &[u32]) {
        let (model, t) = (&mut self.model, ids.len());
        let past = model.past.unwrap_or(0);
        model.loaded = t;
        let positions: Vec<u32> = (past as u32..(past + t) as u32).collect();
        model.device.write(model.buffers.batch.ids.slice(0, t), ids);
        model.device.write(model.buffers.batch.positions.slice(0, t), &positions);
        let round = Round { aim: Aim::Activations, ..Round::alone(t) };
        Pass::new(model, &mut self.links, &round).forward();
        model.past = Some(past + t);
    }

    fn logits(&mut self, row: usize) -> Vec<f64> {
        let model = &mut self.model;
        let (d, v) = (model.dim(), model.config.vocab_size as usize);
        let cache = model.buffers.cache.as_ref().expect("a decoder has a cache");
        let (a, b, c) = (model.buffers.head.norm.slice(row * d, d), model.dense.head, cache.logits);
        let (layout, accumulate) = (Order::Nt, false);
        model.device.matmul(&Matmul { layout, m: 1, n: v, k: d, accumulate, a, b, c });
        if c.dtype() == DType::F64 {
            return model.device.read_vec(c);
        }
        model.device.read_vec::<f32>(c).into_iter().map(f64::from).collect()
    }
}

/// The model without what routers have for training alone: capacities, and parts of a batch that
/// are balanced by themselves.
fn dropless(model: &ModelConfig) -> ModelConfig {
    let router = RouterConfig {
        capacity_factor: 0.0,
        eval_capacity_factor: 0.0,
        aux_loss_scope: AuxLossScope::MicroBatch,
        ..model.router.clone()
    };
    ModelConfig { router, ..model.clone() }
}

impl Model {
    fn layer_cache(&self, layer: usize) -> Option<(usize, LayerCache<moejob_kernels::Buffer>)> {
        Some((self.past?, *self.buffers.cache.as_ref()?.layers.get(layer)?))
    }

    /// The attention of `t` tokens that go on with a text; none where a round is by itself.
    pub(crate) fn cached_attention_op(&self, layer: usize, t: usize) -> Option<CachedAttention> {
        let (past, cache) = self.layer_cache(layer)?;
        let (config, b) = (&self.config, &self.buffers.layers[layer]);
        let (q_size, kv_size) = (config.q_size() as usize, config.kv_size() as usize);
        Some(CachedAttention {
            queries: t,
            past,
            capacity: cache.keys.len() / kv_size,
            heads: config.num_attention_heads as usize,
            kv_heads: config.num_key_value_heads as usize,
            head_dim: config.head_dim as usize,
            scale: 1.0 / f64::from(config.head_dim).sqrt(),
            q: b.q.slice(0, t * q_size),
            k: b.k.slice(0, t * kv_size),
            v: b.v.slice(0, t * kv_size),
            keys: cache.keys,
            values: cache.values,
            o: b.attended.slice(0, t * q_size),
        })
    }

    /// The experts that the token before the first one chose, for a router that holds on to them.
    pub(crate) fn experts_before(&self, layer: usize) -> Option<moejob_kernels::Buffer> {
        let (past, cache) = self.layer_cache(layer)?;
        (past > 0 && self.config.router.hysteresis > 0.0).then_some(cache.chosen)
    }

    /// Keeps those of the last token.
    pub(crate) fn keep_experts(&mut self, layer: usize, gate: &Gate) {
        let Some((_, cache)) = self.layer_cache(layer) else { return };
        if gate.hysteresis > 0.0 {
            let last = gate.chosen.slice((gate.tokens - 1) * gate.top_k, gate.top_k);
            self.device.copy(last, cache.chosen);
        }
    }
}
