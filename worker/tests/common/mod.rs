//! Small models and the text they train on.
#![allow(dead_code)]

pub mod chaos;
pub mod disk;
pub mod made;
pub mod reference;
pub mod routers;

use moe_worker::checkpoint::Disk;
use moejob_kernels::cuda::Gpu;
use moejob_protocol::config::{
    AdamW, Compute, DataConfig, DataSource, Precision, Recompute, Schedule, Tokenizer,
    TrainingConfig,
    ValidationConfig,
};
use moejob_protocol::model::{
    Activation, ExpertsConfig, ModelConfig, QkNorm, RouterConfig, Scoring,
};
use std::path::Path;

/// Two layers, D 16, 4 experts, top-2, F 8; bytes.
pub fn model() -> ModelConfig {
    ModelConfig {
        vocab_size: 256,
        hidden_size: 16,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 8,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        tie_word_embeddings: true,
        qk_norm: QkNorm::None,
        clip_qkv: 0.0,
        attention_bias: false,
        initializer_range: 0.02,
        dense_layers: vec![],
        dense_intermediate_size: 24,
        experts: ExpertsConfig {
            count: 4,
            per_token: 2,
            intermediate_size: 8,
            activation: Activation::Silu,
            shared: 0,
            slices: 1,
            routed_headroom: 1.5,
        },
        router: RouterConfig {
            aux_loss_coef: 0.01,
            z_loss_coef: 0.001,
            bias_update_rate: 0.001,
            ..RouterConfig::default()
        },
    }
}

/// The routing of DeepSeek-V3, behind a dense layer.
pub fn route_like_deepseek(model: &mut ModelConfig) {
    model.num_hidden_layers = 3;
    model.dense_layers = vec![0];
    model.experts.count = 6;
    model.experts.shared = 1;
    let router = &mut model.router;
    (router.scoring, router.bias) = (Scoring::Sigmoid, true);
    (router.groups, router.topk_groups, router.scale) = (3, 2, 2.5);
}

/// Five micro-batches of one sequence of 16 tokens.
pub fn training() -> TrainingConfig {
    TrainingConfig {
        steps: 10,
        global_batch_size: 5,
        micro_batch_size: 1,
        sequence_length: 16,
        precision: Precision::Fp32,
        adamw: AdamW {
            learning_rate: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
        },
        schedule: Schedule::Cosine { warmup_steps: 2, min_learning_rate: 0.001 },
        max_grad_norm: 1.0,
        seed: 3,
        recompute: Recompute::None,
        // As a job in fp32 has it, so that no bit depends on the number of ranks.
        compute: Compute { combine_each: Some(true), ..Compute::default() },
    }
}

/// Widths that the kernels of GPUs want, behind a dense layer.
pub fn fit_gpus(model: &mut ModelConfig) {
    (model.hidden_size, model.head_dim, model.experts.intermediate_size) = (64, 32, 64);
    (model.experts.count, model.dense_intermediate_size) = (6, 128);
    (model.dense_layers, model.num_hidden_layers) = (vec![0], 3);
    model.router.bias_update_rate = 0.0;
}

/// Whether the driver shows a GPU; a test that has none says so.
pub fn has_gpu() -> bool {
    let found = Gpu::open(0).is_ok();
    if !found {
        println!("no GPU: left out");
    }
    found
}

/// Writes eight files of made-up words below `root`.
pub fn write_text(root: &Path) {
    let words = ["expert", "router", "token", "shard", "step", "gang", "rank", "buddy"];
    for file in 0..8usize {
        let text: String = (0..400usize)
            .map(|i| {
                let word = words[(i * i + 3 * file + i / 7) % words.len()];
                format!("{word}{}", if i % 11 == 0 { ".\n" } else { " " })
            })
            .collect();
        std::fs::write(root.join(format!("text-{file}.txt")), text).expect("a file of text");
    }
}

pub fn data(root: &Path) -> DataConfig {
    DataConfig {
        source: DataSource::Text {
            root: root.display().to_string(),
            paths: vec!["**/*.txt".to_string()],
            exclude: vec![],
        },
        held_out: None,
        tokenizer: Tokenizer::Bytes,
        end_of_document: None,
        reset_at_boundaries: false,
        mask_at_boundaries: false,
        validation: ValidationConfig { fraction: 0.2, every_steps: 4, max_sequences: 7 },
        exclude: vec![],
    }
}

use moe_worker::gang::comm::{AbortHandle, Comm};
use moe_worker::attempt::trainer::Trainer;
use moe_worker::attempt::api::{AttemptEnd, Control, TrainerEvent};
use moejob_protocol::config::{
    CheckpointConfig, Member, RecoveryConfig, Resume, ShardSource, WorkerConfig,
};
use moejob_protocol::layout::Layout;
use moejob_protocol::message::Request;
use moejob_protocol::report::StepReport;

/// A job's folder with text, and the configuration of one attempt after the other.
pub struct Job {
    pub folder: tempfile::TempDir,
    pub config: WorkerConfig,
}

impl Job {
    pub fn new(layout: Layout) -> Job {
        let folder = tempfile::tempdir().expect("a folder");
        let text = folder.path().join("text");
        std::fs::create_dir(&text).expect("a folder");
        write_text(&text);
        let config = WorkerConfig {
            job_uid: "uid".to_string(),
            job_name: "small".to_string(),
            attempt: 1,
            digest: String::new(),
            rank: None,
            layout,
            members: vec![],
            resume: Resume::Fresh,
            model: model(),
            model_from: None,
            training: training(),
            data: data(&text),
            checkpoint: CheckpointConfig {
                every_steps: 4,
                auto: false,
                keep: 3,
                keep_best: false,
                location: folder.path().join("run/checkpoints").display().to_string(),
                records: folder.path().join("run").display().to_string(),
                spec_hash: "spec".to_string(),
            },
            recovery: RecoveryConfig {
                heartbeat_timeout_ms: 3000,
                step_timeout_ms: 0,
                orphan_timeout_ms: 0,
                memory_every_steps: 3,
                memory_auto: false,
            },
            ranks: 1,
            exchange: Default::default(),
            threads: 1,
        };
        Job { folder, config }
    }

    pub fn location(&self) -> std::path::PathBuf {
        self.config.checkpoint.location.clone().into()
    }

    /// Runs the attempt on threads of this process, a trainer a rank; rank 0's step reports.
    /// `stop_at` asks one rank to stop once it has seen that many steps done.
    pub fn run(
        &self,
        trainers: &mut [Trainer],
        stop_at: Option<u64>,
    ) -> (Vec<AttemptEnd>, Vec<StepReport>) {
        let world = self.config.layout.mesh.world();
        assert_eq!(trainers.len(), world as usize);
        let comms =
            if world == 1 { vec![Comm::solo(1)] } else { Comm::in_process(world) };
        let mut reports = Vec::new();
        let ends = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for ((comm, trainer), rank) in comms.into_iter().zip(trainers.iter_mut()).zip(0..) {
                let mut config = self.config.clone();
                config.rank = Some(rank);
                if config.members.is_empty() {
                    config.members = (0..world).map(member).collect();
                }
                threads.push(scope.spawn(move || attempt(trainer, &config, comm, stop_at)));
            }
            let mut ends = Vec::new();
            for thread in threads {
                let (end, steps) = thread.join().expect("no panic");
                reports.extend(steps);
                ends.push(end);
            }
            ends
        });
        (ends, reports)
    }

    /// The whole job at once; its losses and the hash of its last state.
    pub fn whole(&self) -> (Vec<[u64; 5]>, String) {
        let steps = self.config.training.steps;
        let (ends, reports) = self.run(&mut trainers(self.config.layout.mesh.world()), None);
        for end in ends {
            assert_eq!(end, AttemptEnd::Completed { step: steps });
        }
        let last = self.location().join(moejob_protocol::checkpoint::directory_name(steps));
        (bits(&reports), state_hash(&last))
    }

    /// Its last rank is lost on the way, and the others go on in `layout` from what they hold, once
    /// `change` was made: the losses. None: the machine was busy elsewhere, and the whole job was
    /// done before the cut.
    pub fn losing_the_last(
        mut self,
        layout: Layout,
        change: impl Fn(&mut Job),
    ) -> Option<Vec<[u64; 5]>> {
        let world = self.config.layout.mesh.world();
        let mut group = trainers(world);
        let cut = std::time::Duration::ZERO;
        let (ends, reports) = run_and_cut_off(&self, &mut group, world - 1, 2, cut);
        if ends.iter().all(|end| matches!(end, AttemptEnd::Completed { .. })) {
            return None;
        }
        assert!(ends.iter().all(|end| matches!(end, AttemptEnd::Aborted(_))), "{ends:?}");
        group.truncate(world as usize - 1);
        let (attempt, step) = newest_held(&group, world);
        let sources = sources(&group, attempt, step, world);
        let earlier = std::mem::replace(&mut self.config.layout, layout);
        self.config.resume = Resume::Memory { step, attempt, layout: earlier, sources };
        self.config.attempt = 2;
        change(&mut self);
        let (ends, more) = self.run(&mut group, None);
        let done = AttemptEnd::Completed { step: self.config.training.steps };
        assert!(ends.iter().all(|end| *end == done), "{ends:?}");
        let mut rows = bits(&reports);
        rows.truncate(step as usize);
        rows.extend(bits(&more));
        Some(rows)
    }
}

fn attempt(
    trainer: &mut Trainer,
    config: &WorkerConfig,
    comm: Comm,
    stop_at: Option<u64>,
) -> (AttemptEnd, Vec<StepReport>) {
    let control = Control::default();
    let mut reports = Vec::new();
    let asking = control.clone();
    let stop = Request { checkpoint_now: false, stop_after_this_step: true };
    if stop_at == Some(config.resume.step() + 1) {
        control.request(stop);
    }
    let end = trainer.run_attempt(config, comm, &control, &mut |event| {
        if let TrainerEvent::Step(report) = event {
            if Some(report.step + 1) == stop_at {
                asking.request(stop);
            }
            reports.push(report);
        }
    });
    (end, reports)
}

pub fn member(rank: u32) -> Member {
    Member {
        rank,
        worker: format!("worker-{rank}"),
        node: format!("node-{rank}"),
        address: String::new(),
    }
}

pub fn trainers(count: u32) -> Vec<Trainer> {
    (0..count).map(|_| Trainer::new()).collect()
}

/// What training must not change by a bit: losses, norms and held-out losses.
pub fn bits(reports: &[StepReport]) -> Vec<[u64; 5]> {
    let row = |report: &StepReport| {
        [
            report.step,
            report.loss.to_bits(),
            report.aux_loss.to_bits(),
            report.grad_norm.to_bits(),
            report.validation_loss.map_or(0, f64::to_bits),
        ]
    };
    reports.iter().map(row).collect()
}

/// All values of a checkpoint by tensor and part, whatever its layout, as one hash.
pub fn state_hash(directory: &Path) -> String {
    let manifest =
        moe_worker::checkpoint::verify(&Disk::real(), directory).expect("a whole checkpoint");
    let mut hasher = blake3::Hasher::new();
    for tensor in &manifest.tensors {
        hasher.update(tensor.name.as_bytes());
        for piece in &tensor.pieces {
            let file = &manifest.files[piece.file as usize];
            let bytes = std::fs::read(directory.join(&file.name)).expect("a shard");
            hasher.update(&bytes[piece.begin as usize..piece.end as usize]);
        }
    }
    hasher.finalize().to_hex().to_string()
}

/// Where each shard of `earlier` comes from, when the trainers of `survivors` (old ranks, in the
/// order of their new ones) go on.
pub fn sources(trainers: &[Trainer], attempt: u32, step: u64, shards: u32) -> Vec<ShardSource> {
    let holds = |trainer: &Trainer, shard: u32| {
        trainer.held().iter().any(|held| {
            (held.attempt, held.step) == (attempt, step) && held.shards.contains(&shard)
        })
    };
    (0..shards)
        .map(|shard| {
            let from = trainers.iter().position(|trainer| holds(trainer, shard));
            let from = from.unwrap_or_else(|| panic!("nobody holds shard {shard}")) as u32;
            ShardSource { shard, from }
        })
        .collect()
}

/// Rank 0's reports of an attempt in which `victim` is cut off `delay` after its snapshot of step
/// `after`; how each rank ended.
pub fn run_and_cut_off(
    job: &Job,
    trainers: &mut [Trainer],
    victim: u32,
    after: u64,
    delay: std::time::Duration,
) -> (Vec<AttemptEnd>, Vec<StepReport>) {
    let cut = |rank: u32, event: &TrainerEvent, handle: &AbortHandle| match event {
        TrainerEvent::Held(held)
            if rank == victim && held.iter().any(|held| held.step == after) =>
        {
            let handle = handle.clone();
            std::thread::spawn(move || {
                std::thread::sleep(delay);
                handle.abort("cut off by the test");
            });
        }
        _ => {}
    };
    run_each(job, trainers, &cut)
}

/// The same of an attempt that is left alone; `tell` has each rank's events, on its thread.
pub fn run_and_tell(
    job: &Job,
    trainers: &mut [Trainer],
    tell: &(dyn Fn(u32, &TrainerEvent) + Sync),
) -> (Vec<AttemptEnd>, Vec<StepReport>) {
    run_each(job, trainers, &|rank, event, _| tell(rank, event))
}

fn run_each(
    job: &Job,
    trainers: &mut [Trainer],
    see: &(dyn Fn(u32, &TrainerEvent, &AbortHandle) + Sync),
) -> (Vec<AttemptEnd>, Vec<StepReport>) {
    let world = job.config.layout.mesh.world();
    let mut reports = Vec::new();
    let ends = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for ((comm, trainer), rank) in
            Comm::in_process(world).into_iter().zip(trainers.iter_mut()).zip(0..)
        {
            let mut config = job.config.clone();
            config.rank = Some(rank);
            config.members = (0..world).map(member).collect();
            threads.push(scope.spawn(move || {
                let handle = comm.abort_handle();
                let mut reports = Vec::new();
                let end = trainer.run_attempt(&config, comm, &Control::default(), &mut |event| {
                    see(rank, &event, &handle);
                    if let TrainerEvent::Step(report) = event {
                        reports.push(report);
                    }
                });
                (end, reports)
            }));
        }
        let mut ends = Vec::new();
        for thread in threads {
            let (end, steps) = thread.join().expect("no panic");
            reports.extend(steps);
            ends.push(end);
        }
        ends
    });
    (ends, reports)
}

/// The newest state whose shards all are in memory: attempt and step.
pub fn newest_held(trainers: &[Trainer], shards: u32) -> (u32, u64) {
    let held: Vec<_> = trainers.iter().flat_map(Trainer::held).collect();
    let complete = |attempt: u32, step: u64| {
        (0..shards).all(|shard| {
            held.iter().any(|held| {
                (held.attempt, held.step) == (attempt, step) && held.shards.contains(&shard)
            })
        })
    };
    let newest = held.iter().filter(|held| complete(held.attempt, held.step));
    let newest = newest.map(|held| (held.step, held.attempt)).max();
    newest.map(|(step, attempt)| (attempt, step)).expect("a complete snapshot in memory")
}

/// Runs the attempt of a single rank; `see` is called with each report on the training thread.
pub fn run_and_see(
    job: &Job,
    trainers: &mut [Trainer; 1],
    see: &mut dyn FnMut(&StepReport),
) -> (Vec<AttemptEnd>, Vec<StepReport>) {
    run_until(job, &mut trainers[0], see, &|| false)
}

/// Runs the attempt of a single rank, whose process ends as soon as `has_ended`.
pub fn run_until(
    job: &Job,
    trainer: &mut Trainer,
    see: &mut dyn FnMut(&StepReport),
    has_ended: &(dyn Fn() -> bool + Sync),
) -> (Vec<AttemptEnd>, Vec<StepReport>) {
    let mut config = job.config.clone();
    config.rank = Some(0);
    config.members = vec![member(0)];
    let mut reports = Vec::new();
    let comm = Comm::solo(1);
    let (handle, over) = (comm.abort_handle(), std::sync::atomic::AtomicBool::new(false));
    let end = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                if has_ended() {
                    return handle.abort("the process has ended");
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        let end = trainer.run_attempt(&config, comm, &Control::default(), &mut |event| {
            if let TrainerEvent::Step(report) = event {
                see(&report);
                reports.push(report);
            }
        });
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        end
    });
    (vec![end], reports)
}

/// The gradient of the parameter at `index`, as far as it is summed; one rank holds everything.
pub fn gradient(model: &moe_worker::engine::model::Model, index: usize) -> Vec<f64> {
    use moejob_kernels::{DType, Pair};
    let buffer = model.bucket_gradient(index).expect("one rank holds everything");
    match buffer.dtype() {
        DType::F64 => model.device.read_vec(buffer),
        DType::Pair => {
            model.device.read_vec::<Pair>(buffer).into_iter().map(|pair| pair.high).collect()
        }
        DType::F32 => model.device.read_vec::<f32>(buffer).into_iter().map(f64::from).collect(),
        other => panic!("gradients of {other:?}"),
    }
}
