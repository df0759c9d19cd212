//! Spec -> Job: defaulted and valid, or every problem at once.

use crate::devices;
use crate::preset;
use crate::problem::{Code, Problem};
use crate::profile::{Backend, Profile, Profiles};
use crate::read::Manifest;
use crate::resources;
use crate::router;
use crate::rules;
use crate::spec::{
    AttentionName, ExchangeName, FieldFilesSpec, Level, MixturePartSpec, MoeJobSpec, ModelSpec,
    NumberOrAuto, PrecisionName, PreflightWhen, Preset, RecomputeName, SourceSpec,
    VolumeSpec,
};
use moejob_protocol::canonical::{MUTABLE, canonical_hash};
use moejob_protocol::config::{
    AdamW, Compute, Exchange, GradientDtype, MomentDtype, Offload, Precision,
    Recompute, Schedule, TokenType, Tokenizer, TrainingConfig, ValidationConfig, Wire,
};
use moejob_protocol::model::{Activation, ExpertsConfig, ModelConfig, QkNorm};
use moejob_protocol::zero::Zero;
use serde::Serialize;
use serde_json::json;

/// A job that can be planned: every field has a value and no rule is broken.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    pub name: String,
    pub suspend: bool,
    pub nodes: Nodes,
    pub profile: Profile,
    pub preset: Option<Preset>,
    pub model: ModelConfig,
    /// A directory of Hugging Face weights to start from.
    pub model_from: Option<String>,
    pub data: Data,
    pub training: TrainingConfig,
    /// Ranks of an expert group; none lets the plan choose.
    pub expert_parallel: Option<u32>,
    /// How an expert group exchanges; none lets the plan choose.
    pub exchange: Option<Exchange>,
    pub tensor_parallel: u32,
    pub pipeline_parallel: u32,
    pub checkpoint: Checkpoint,
    pub recovery: Recovery,
    pub kubernetes: Kubernetes,
    /// What cannot be changed, hashed: a checkpoint of another is refused.
    pub spec_hash: String,
    /// Not wrong, but unwise.
    pub warnings: Vec<Problem>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes {
    pub min: u32,
    pub max: u32,
    pub spares: u32,
    pub preflight: PreflightWhen,
    /// A level that all nodes shall lie in, and whether they must.
    pub topology: Option<(Level, Closeness)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closeness {
    Preferred,
    Required,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Data {
    /// One source, or the parts of a mixture.
    pub train: Vec<TrainPart>,
    /// What is held out, where it is not a part of `train`.
    pub held_out: Option<Source>,
    pub tokenizer: Tokenizer,
    pub end_of_document: Option<u32>,
    pub reset_at_boundaries: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")] // Hashes are older.
    pub mask_at_boundaries: bool,
    pub validation: ValidationConfig,
}

impl Data {
    /// Some text is turned into tokens.
    pub fn tokenizes(&self) -> bool {
        let sources = self.train.iter().map(|part| &part.source).chain(&self.held_out);
        sources.map(|source| source.format).any(|format| {
            !matches!(format, DataFormat::Tokens | DataFormat::Megatron)
        })
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainPart {
    /// None for the only source.
    pub weight: Option<f64>,
    pub source: Source,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Source {
    pub format: DataFormat,
    pub paths: Vec<String>,
    pub exclude: Vec<String>,
    /// Of jsonl and parquet.
    pub field: String,
    /// Of tokens.
    pub dtype: Option<TokenType>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum DataFormat {
    Text,
    Jsonl,
    Tokens,
    Megatron,
    Parquet,
}

impl DataFormat {
    /// The field of the manifest.
    pub fn name(self) -> &'static str {
        match self {
            DataFormat::Text => "text",
            DataFormat::Jsonl => "jsonl",
            DataFormat::Tokens => "tokens",
            DataFormat::Megatron => "megatron",
            DataFormat::Parquet => "parquet",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    pub every_steps: u64,
    /// At least so many steps apart, and no more often than costs half a percent of the time.
    pub auto: bool,
    pub keep: u32,
    /// The one with the least held-out loss is kept, too.
    pub keep_best: bool,
    /// None is `DIR/NAME/checkpoints`.
    pub location: Option<String>,
}

/// Durations in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovery {
    pub heartbeat_timeout: u64,
    /// None is automatic.
    pub step_timeout: Option<u64>,
    pub max_restarts: u32,
    pub window: u64,
    pub memory_every_steps: u64,
    /// As often as it costs half a percent of the time instead.
    pub memory_auto: bool,
    /// None is the venue's default.
    pub growth_interval: Option<u64>,
    pub orphan_timeout: Option<u64>,
    pub gang_timeout: u64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kubernetes {
    pub image: Option<String>,
    pub volumes: Vec<VolumeSpec>,
    pub pod_template: serde_json::Value,
    pub priority_class_name: String,
    pub scheduler_name: String,
    pub ttl_seconds_after_finished: Option<u32>,
}

/// Where a job runs: some defaults differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Venue {
    /// Processes of this machine.
    Local,
    Kubernetes,
}

impl Job {
    /// Reads a manifest for one of the profiles that are shipped. All problems carry their line and
    /// column.
    pub fn read(bytes: &[u8]) -> Result<Job, Vec<Problem>> {
        Job::read_with(bytes, None, Profiles::shipped())
    }

    /// The same, where `weights` is the model of `spec.model.from.path`: it fills what is not
    /// typed.
    pub fn read_with(
        bytes: &[u8],
        weights: Option<&ModelConfig>,
        profiles: &Profiles,
    ) -> Result<Job, Vec<Problem>> {
        let manifest = Manifest::read(bytes);
        let judged = match manifest.broken.iter().any(String::is_empty) {
            // Without a tree there is nothing to judge.
            true => Err(Vec::new()),
            false => {
                let name = manifest.name.as_deref().unwrap_or_default();
                judge(name, &manifest.spec, &manifest.broken, (weights, profiles))
            }
        };
        let mut problems = manifest.problems.clone();
        match judged {
            Ok(mut job) if problems.is_empty() => {
                job.warnings = manifest.locate(job.warnings);
                Ok(job)
            }
            Ok(_) => Err(sorted(manifest.locate(problems))),
            Err(found) => {
                problems.extend(found);
                Err(sorted(manifest.locate(problems)))
            }
        }
    }

    /// A spec that the API server has accepted already.
    pub fn from_spec(
        name: &str,
        spec: &MoeJobSpec,
        profiles: &Profiles,
    ) -> Result<Job, Vec<Problem>> {
        judge(name, spec, &[], (None, profiles))
    }

    pub fn micro_batches(&self) -> u32 {
        self.training.global_batch_size / self.training.micro_batch_size
    }

    /// Of a micro-batch.
    pub fn tokens(&self) -> u64 {
        u64::from(self.training.micro_batch_size) * u64::from(self.training.sequence_length)
    }

    pub fn growth_interval(&self, venue: Venue) -> u64 {
        let default = if venue == Venue::Local { 2_000 } else { 60_000 };
        self.recovery.growth_interval.unwrap_or(default)
    }

    pub fn orphan_timeout(&self, venue: Venue) -> u64 {
        let default = if venue == Venue::Local { 0 } else { 600_000 };
        self.recovery.orphan_timeout.unwrap_or(default)
    }

    /// What the workers cannot do yet, by name: refused, never ignored.
    pub fn unsupported(&self) -> Vec<Problem> {
        devices::unsupported(self)
    }
}

fn sorted(mut problems: Vec<Problem>) -> Vec<Problem> {
    problems.sort_by(|a, b| (a.place, a.code, &a.path).cmp(&(b.place, b.code, &b.path)));
    problems
}

fn judge(
    name: &str,
    spec: &MoeJobSpec,
    broken: &[String],
    (weights, profiles): (Option<&ModelConfig>, &Profiles),
) -> Result<Job, Vec<Problem>> {
    let mut broken = broken.to_vec();
    let (profile, unknown) = match profiles.choose(&spec.nodes.clone().unwrap_or_default()) {
        Ok(profile) => (profile, None),
        Err(problem) => {
            broken.push(problem.path.clone());
            // What depends on the machine is not judged, whichever stands there.
            (Profile::default(), Some(problem))
        }
    };
    let mut job = fill(name, spec, weights, profile);
    let (mut problems, warnings) = rules::judge(spec, &job, &broken);
    problems.extend(unknown.map(|problem| *problem));
    job.warnings = warnings;
    if problems.is_empty() { Ok(job) } else { Err(sorted(problems)) }
}

impl Job {
    /// Its nodes are measured before they get a rank.
    pub fn is_measured(&self) -> bool {
        match self.nodes.preflight {
            PreflightWhen::Auto => !self.profile.expect.is_empty(),
            PreflightWhen::Always => true,
            PreflightWhen::Never => false,
        }
    }

    /// The same job with engines on processors in place of GPUs, for tests of clusters that have
    /// none: its pods, nodes and ranks are those of the GPUs. Processors compute in fp32.
    #[must_use]
    pub fn stand_in(mut self) -> Job {
        if self.profile.backend == Backend::Cuda {
            // What is to be measured is not there.
            self.nodes.preflight = PreflightWhen::Never;
            self.training.precision = Precision::Fp32;
            self.training.compute = Compute {
                backend: Backend::Cpu,
                moment_dtype: MomentDtype::Fp32,
                gradient_dtype: GradientDtype::Auto,
                fast_attention: false,
                offload: Offload::None,
                wire: Wire::Auto,
                combine_each: None,
                zero: Zero::default(),
            };
            self.recovery.memory_auto = false;
            self.checkpoint.auto = false;
        }
        self
    }
}

/// Every default. What is missing although it is needed becomes a zero, which `rules` refuses.
fn fill(name: &str, spec: &MoeJobSpec, weights: Option<&ModelConfig>, profile: Profile) -> Job {
    let nodes = spec.nodes.clone().unwrap_or_default();
    let min = nodes.min.unwrap_or(1);
    let topology = nodes.topology.as_ref().and_then(|topology| {
        let required = topology.require.map(|level| (level, Closeness::Required));
        required.or(topology.prefer.map(|level| (level, Closeness::Preferred)))
    });
    let typed = spec.model.clone().unwrap_or_default();
    let data = data(spec);
    let parallelism = spec.parallelism.clone().unwrap_or_default();
    let model = model(&preset::overlay(&typed, weights), &data.tokenizer);
    let model = model.in_slices(parallelism.expert_slices.unwrap_or(1).max(1));
    let backend = profile.backend;
    let training = training(spec, backend);
    let checkpoint = spec.checkpoint.clone().unwrap_or_default();
    let expert_parallel = match parallelism.expert {
        Some(NumberOrAuto::Number(number)) => Some(number.clamp(0, u32::MAX.into()) as u32),
        _ => None,
    };
    let spec_hash = spec_hash(&model, &data, &training);
    Job {
        name: name.to_string(),
        suspend: spec.suspend.unwrap_or(false),
        nodes: Nodes {
            min,
            max: nodes.max.unwrap_or(min),
            spares: nodes.spares.unwrap_or(0),
            preflight: nodes.preflight.unwrap_or_default(),
            topology,
        },
        profile,
        preset: typed.preset,
        model,
        model_from: typed.from.and_then(|from| from.path),
        data,
        training,
        expert_parallel,
        exchange: match parallelism.exchange {
            None | Some(ExchangeName::Auto) => None,
            Some(ExchangeName::Flat) => Some(Exchange::Flat),
            Some(ExchangeName::Hierarchical) => Some(Exchange::Hierarchical),
        },
        tensor_parallel: parallelism.tensor.unwrap_or(1),
        pipeline_parallel: parallelism.pipeline.unwrap_or(1),
        checkpoint: Checkpoint {
            every_steps: checkpoint.every_steps.unwrap_or(200),
            // The best one is of those at steps with a held-out loss, which come by number.
            auto: checkpoint.every_steps.is_none()
                && checkpoint.keep_best != Some(true)
                && backend == Backend::Cuda,
            keep: checkpoint.keep.unwrap_or(3),
            keep_best: checkpoint.keep_best.unwrap_or(false),
            location: checkpoint.location,
        },
        recovery: recovery(spec, backend),
        kubernetes: Kubernetes {
            image: spec.image.clone(),
            volumes: spec.volumes.clone().unwrap_or_default(),
            pod_template: spec.pod_template.clone().unwrap_or_default(),
            priority_class_name: spec.priority_class_name.clone().unwrap_or_default(),
            scheduler_name: spec.scheduler_name.clone().unwrap_or_default(),
            ttl_seconds_after_finished: spec.ttl_seconds_after_finished,
        },
        spec_hash,
        warnings: Vec::new(),
    }
}

fn model(typed: &ModelSpec, tokenizer: &Tokenizer) -> ModelConfig {
    let heads = typed.num_attention_heads.unwrap_or(0);
    let hidden = typed.hidden_size.unwrap_or(0);
    let bytes = if *tokenizer == Tokenizer::Bytes { 256 } else { 0 };
    let experts = typed.experts.clone().unwrap_or_default();
    let mut dense_layers = typed.dense_layers.clone().unwrap_or_default();
    dense_layers.sort_unstable();
    ModelConfig {
        vocab_size: typed.vocab_size.unwrap_or(bytes),
        hidden_size: hidden,
        num_hidden_layers: typed.num_hidden_layers.unwrap_or(0),
        num_attention_heads: heads,
        num_key_value_heads: typed.num_key_value_heads.unwrap_or(heads),
        head_dim: typed.head_dim.unwrap_or(hidden.checked_div(heads).unwrap_or(0)),
        rms_norm_eps: typed.rms_norm_eps.unwrap_or(1e-5),
        rope_theta: typed.rope_theta.unwrap_or(1e4),
        tie_word_embeddings: typed.tie_word_embeddings.unwrap_or(false),
        qk_norm: typed.qk_norm.map_or(QkNorm::None, |of| of.0),
        clip_qkv: typed.clip_qkv.unwrap_or(0.0),
        attention_bias: typed.attention_bias.unwrap_or(false),
        initializer_range: typed.initializer_range.unwrap_or(0.02),
        dense_layers,
        dense_intermediate_size: typed.dense_intermediate_size.unwrap_or(0),
        experts: ExpertsConfig {
            count: experts.count.unwrap_or(0),
            per_token: experts.per_token.unwrap_or(0),
            intermediate_size: experts.intermediate_size.unwrap_or(0),
            activation: experts.activation.map_or(Activation::Silu, |of| of.0),
            shared: experts.shared.unwrap_or(0),
            routed_headroom: experts.routed_headroom.unwrap_or(1.5),
            slices: 1,
        },
        router: router::fill(typed),
    }
}

fn data(spec: &MoeJobSpec) -> Data {
    let data = spec.data.clone().unwrap_or_default();
    let train = data.train.unwrap_or_default();
    let validation = data.validation.unwrap_or_default();
    let tokenizer = match data.tokenizer.as_deref() {
        None | Some("bytes") => Tokenizer::Bytes,
        Some(path) => Tokenizer::Path(path.to_string()),
    };
    let part = |part: MixturePartSpec| TrainPart {
        weight: Some(part.weight.unwrap_or(0.0)),
        source: source(part.source()),
    };
    let train = match train.mixture {
        Some(parts) => parts.into_iter().map(part).collect(),
        None => vec![TrainPart { weight: None, source: source(train.source()) }],
    };
    Data {
        train,
        held_out: validation.from.map(source),
        tokenizer,
        end_of_document: data.end_of_document,
        reset_at_boundaries: data.reset_at_boundaries.unwrap_or(false),
        mask_at_boundaries: data.mask_at_boundaries.unwrap_or(false),
        validation: ValidationConfig {
            fraction: validation.fraction.unwrap_or(0.01),
            every_steps: validation.every_steps.unwrap_or(50),
            max_sequences: validation.max_sequences.unwrap_or(64),
        },
    }
}

/// The one that is given; `rules` refuses none and several.
fn source(typed: SourceSpec) -> Source {
    let SourceSpec { text, jsonl, tokens, megatron, parquet } = typed;
    let make = |format, paths: Option<Vec<String>>, exclude: Option<Vec<String>>| Source {
        format,
        paths: paths.unwrap_or_default(),
        exclude: exclude.unwrap_or_default(),
        field: String::new(),
        dtype: None,
    };
    let with_field = |format, files: FieldFilesSpec| Source {
        field: files.field.unwrap_or_else(|| "text".to_string()),
        ..make(format, files.paths, files.exclude)
    };
    if let Some(files) = jsonl {
        with_field(DataFormat::Jsonl, files)
    } else if let Some(files) = parquet {
        with_field(DataFormat::Parquet, files)
    } else if let Some(files) = tokens {
        let dtype = files.dtype.map(|of| of.0);
        Source { dtype, ..make(DataFormat::Tokens, files.paths, files.exclude) }
    } else if let Some(files) = megatron {
        make(DataFormat::Megatron, files.paths, files.exclude)
    } else {
        let files = text.unwrap_or_default();
        make(DataFormat::Text, files.paths, files.exclude)
    }
}

fn training(spec: &MoeJobSpec, backend: Backend) -> TrainingConfig {
    let training = spec.training.clone().unwrap_or_default();
    let parallelism = spec.parallelism.clone().unwrap_or_default();
    let micro_batch_size = training.micro_batch_size.unwrap_or(1);
    let adamw = training.optimizer.and_then(|optimizer| optimizer.adamw).unwrap_or_default();
    let learning_rate = adamw.learning_rate.unwrap_or(4e-4);
    let schedule = training.schedule.unwrap_or_default();
    let minimum = |typed: Option<f64>| typed.unwrap_or(learning_rate / 10.0);
    let schedule = if let Some(cosine) = schedule.cosine {
        Schedule::Cosine {
            warmup_steps: cosine.warmup_steps.unwrap_or(0),
            min_learning_rate: minimum(cosine.min_learning_rate),
        }
    } else if let Some(linear) = schedule.linear {
        Schedule::Linear {
            warmup_steps: linear.warmup_steps.unwrap_or(0),
            min_learning_rate: minimum(linear.min_learning_rate),
        }
    } else {
        let warmup_steps = schedule.constant.and_then(|constant| constant.warmup_steps);
        Schedule::Constant { warmup_steps: warmup_steps.unwrap_or(0) }
    };
    let precision = match (training.precision, backend) {
        (Some(PrecisionName::Fp32), _) | (None, Backend::Cpu) => Precision::Fp32,
        (Some(PrecisionName::Tf32), _) => Precision::Tf32,
        (Some(PrecisionName::Bf16), _) | (None, Backend::Cuda) => Precision::Bf16,
        (Some(PrecisionName::Fp16), _) => Precision::Fp16,
    };
    // In fp32 the number of GPUs then changes no bit.
    let pre_reduced = matches!(precision, Precision::Bf16 | Precision::Fp16);
    TrainingConfig {
        steps: training.steps.unwrap_or(0),
        global_batch_size: training
            .global_batch_size
            .unwrap_or(micro_batch_size.saturating_mul(8)),
        micro_batch_size,
        sequence_length: spec.data.as_ref().and_then(|data| data.sequence_length).unwrap_or(0),
        precision,
        adamw: AdamW {
            learning_rate,
            beta1: adamw.beta1.unwrap_or(0.9),
            beta2: adamw.beta2.unwrap_or(0.95),
            epsilon: adamw.epsilon.unwrap_or(1e-8),
            weight_decay: adamw.weight_decay.unwrap_or(0.1),
        },
        schedule,
        max_grad_norm: training.max_grad_norm.unwrap_or(1.0),
        seed: training.seed.unwrap_or(1),
        recompute: match (training.recompute, training.recompute_layers) {
            (None | Some(RecomputeName::None), _) => Recompute::None,
            (Some(RecomputeName::Selective), _) => Recompute::Selective,
            (Some(RecomputeName::Experts), _) => Recompute::Experts,
            (Some(RecomputeName::Full), None | Some(1)) => Recompute::Full,
            (Some(RecomputeName::Full), Some(layers)) => Recompute::Every(layers),
        },
        compute: Compute {
            backend,
            moment_dtype: training.moment_dtype.map_or(MomentDtype::Fp32, |of| of.0),
            gradient_dtype: match backend {
                // On processors fp32 is what there is: typed or not, it is the same job.
                Backend::Cpu => GradientDtype::Auto,
                Backend::Cuda => training.gradient_dtype.map_or(GradientDtype::Auto, |of| of.0),
            },
            fast_attention: training.attention == Some(AttentionName::Fastest),
            offload: match backend {
                // There it lies on the host already: typed or not, it is the same job.
                Backend::Cpu => Offload::None,
                Backend::Cuda => training.offload.map_or(Offload::None, |of| of.0),
            },
            wire: match backend {
                // What they may have is the same there.
                Backend::Cpu => Wire::Auto,
                Backend::Cuda => parallelism.wire.map_or(Wire::Auto, |of| of.0),
            },
            combine_each: match backend {
                Backend::Cpu => None,
                Backend::Cuda => {
                    (!parallelism.combine_pre_reduce.unwrap_or(pre_reduced)).then_some(true)
                }
            },
            zero: parallelism.zero.and_then(Zero::of).unwrap_or_default(),
        },
    }
}

fn recovery(spec: &MoeJobSpec, backend: Backend) -> Recovery {
    let typed = spec.recovery.clone().unwrap_or_default();
    let read = |text: &Option<String>| text.as_deref().and_then(millis_of);
    Recovery {
        heartbeat_timeout: read(&typed.heartbeat_timeout).unwrap_or(3_000),
        step_timeout: read(&typed.step_timeout),
        max_restarts: typed.max_restarts.unwrap_or(20),
        window: read(&typed.window).unwrap_or(3_600_000),
        memory_every_steps: typed.memory_every_steps.unwrap_or(10),
        memory_auto: typed.memory_every_steps.is_none() && backend == Backend::Cuda,
        growth_interval: read(&typed.growth_interval),
        orphan_timeout: read(&typed.orphan_timeout),
        gang_timeout: read(&typed.gang_timeout).unwrap_or(30_000),
    }
}

/// Model, data and training: what a checkpoint belongs to.
fn spec_hash(model: &ModelConfig, data: &Data, training: &TrainingConfig) -> String {
    let mut fields = json!({ "model": model, "data": data, "training": training });
    fields["data"]["validation"] = json!({ "fraction": data.validation.fraction });
    canonical_hash(&fields, &MUTABLE)
}

/// `500ms`, `3s`, `10m`, `1h` in milliseconds, at most 30 days.
pub fn millis_of(text: &str) -> Option<u64> {
    const MILLIS_MAX: u64 = 30 * 24 * 3_600_000;
    let end = text.find(|c: char| !c.is_ascii_digit())?;
    let (digits, unit) = text.split_at(end);
    let factor = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    let millis = digits.parse::<u64>().ok()?.checked_mul(factor)?;
    (millis <= MILLIS_MAX).then_some(millis)
}

/// `80Gi` in bytes; no machine has more than terabytes.
pub fn bytes_of(text: &str) -> Option<u64> {
    let (digits, suffix) = resources::split(text);
    let factor = resources::unit(suffix).filter(|of| (1.0..=2f64.powi(40)).contains(of))?;
    digits.parse::<u64>().ok()?.checked_mul(factor as u64).filter(|bytes| *bytes > 0)
}

/// What two manifests may not share: a second job would write over the first's checkpoints.
pub fn same_output(a: &Job, b: &Job) -> Option<Problem> {
    let folder = |job: &Job| job.checkpoint.location.clone().unwrap_or_else(|| job.name.clone());
    let (path, found) = match (&a.checkpoint.location, &b.checkpoint.location) {
        (Some(_), Some(_)) => ("spec.checkpoint.location", folder(b)),
        (None, None) => ("metadata.name", b.name.clone()),
        _ => return None,
    };
    (folder(a) == folder(b)).then(|| {
        Problem::new(Code::SameOutput, path)
            .found(format!("`{found}`, as in the job {}", a.name))
            .allowed("a folder of its own for each job")
            .advice("choose another name or location")
    })
}
