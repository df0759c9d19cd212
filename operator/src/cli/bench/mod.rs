//! `moejob bench --preset NAME`: how fast this machine trains a model, without data or files.
//!
//! ```text
//! arguments -> a manifest as a job has it -> Job -> Engine -> steps on tokens made up in memory
//!                                         `-> memory that `plan` expects, beside what was used
//! ```
//! `moejob bench --links` measures the links between GPUs instead (`links`), `--generate` how fast
//! text is generated (`generate`).

mod generate;
mod links;
mod memory;
mod names;
mod options;
mod synthetic;
mod travels;

use super::complain;
use moe_worker::attempt::gauge::Gauge;
use moe_worker::engine::graphs::Captures;
use moe_worker::engine::step::{Engine, StepError, StepSummary};
use moe_worker::engine::trace::{STEPS_TRACED, Trace};
use moe_worker::gang::comm::Comm;
use moe_worker::state::rank::{DeviceError, RankState};
use moe_worker::state::snapshot::initialize;
use moejob_kernels::{Pace, StepPhase};
use moejob_kernels::cuda::Gpu;
use moejob_kernels::memory_bounds::peak_of_this_process;
use moejob_manifest::{Job, devices, job::Venue, preset::fields};
use moejob_manifest::spec::{Preset, as_typed};
use moejob_plan::launch::{self, Places};
use moejob_plan::placement::{self, gib};
use moejob_protocol::WorkerConfig;
use moejob_protocol::by_load::Loads;
use moejob_protocol::communication::CommunicationReport;
use moejob_protocol::config::{Backend, Wire};
use moejob_protocol::layout::Placement;
use names::{gradients, moments, recompute};
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;
pub use options::{BenchArgs, DeviceName, Placed, Routing};
use synthetic::{Synthetic, of_slices, uneven};
use travels::{LOOK_EACH, Travels};

/// Why nothing was measured: the exit code and the words.
struct Refused(u8, String);

impl Refused {
    fn told(self) -> ExitCode {
        let Refused(code, words) = self;
        eprintln!("moejob: {words}");
        ExitCode::from(code)
    }
}

pub fn run(args: &BenchArgs) -> ExitCode {
    if args.links.links {
        return links::run(&args.links, args.devices, args.written);
    }
    // The parser lets nobody pass who names neither.
    let Some(preset) = args.preset else { return ExitCode::from(2) };
    if let Some(tokens) = args.generate {
        return match generate::run(args, preset, tokens) {
            Ok(()) => ExitCode::SUCCESS,
            Err(refused) => refused.told(),
        };
    }
    match measure(args, preset) {
        Ok(measured) => {
            match args.written.is_json() {
                true => println!("{}", measured.json()),
                false => print!("{}", measured.text()),
            }
            ExitCode::SUCCESS
        }
        Err(refused) => refused.told(),
    }
}

/// The job that a manifest with these choices would make.
fn job(args: &BenchArgs, preset: Preset, device: DeviceName) -> Result<Job, Refused> {
    let mut model = json!({ "preset": preset.name() });
    if let Some(layers) = args.layers {
        model["numHiddenLayers"] = json!(layers);
        // Of the dense ones only those that are left.
        if let Some(dense) = fields(preset).dense_layers {
            let dense: Vec<u32> = dense.into_iter().filter(|layer| *layer < layers).collect();
            model["denseLayers"] = json!(dense);
        }
    }
    let devices = u64::from(args.devices.unwrap_or(1));
    let mut training = json!({
        "steps": args.warm_up + args.steps,
        "microBatchSize": args.micro_batch,
        "globalBatchSize": u64::from(args.micro_batch) * u64::from(args.accumulation) * devices,
    });
    if args.routing == Routing::Balanced {
        // What was arranged stays so.
        training["optimizer"] = json!({ "adamw": { "learningRate": 1e-12 } });
    }
    let choices = [
        ("precision", &args.precision),
        ("momentDtype", &args.moments),
        ("gradientDtype", &args.gradients),
        ("attention", &args.attention),
        ("recompute", &args.recompute),
        ("offload", &args.offload),
    ];
    for (field, choice) in choices {
        if let Some(choice) = choice {
            training[field] = json!(choice);
        }
    }
    let profile = if device == DeviceName::Gpu { "gpu" } else { "cpu" };
    let wire = args.wire.as_deref().unwrap_or("auto");
    let manifest = json!({
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoeJob",
        "metadata": { "name": "bench" },
        "spec": {
            "nodes": { "profile": profile, "devicesPerNode": devices },
            "parallelism": {
                "expert": args.expert_parallel,
                "expertSlices": args.expert_slices,
                "wire": wire,
                "zero": args.zero,
            },
            "model": model,
            "data": {
                // Never opened.
                "train": { "tokens": { "paths": ["none"] } },
                "sequenceLength": args.sequence,
            },
            "training": training,
        },
    });
    let told = |problems: Vec<moejob_manifest::problem::Problem>| {
        let lines: Vec<String> = problems.iter().map(|problem| problem.sentence()).collect();
        Refused(2, lines.join("\n"))
    };
    let job = Job::read(manifest.to_string().as_bytes()).map_err(told)?;
    let unsupported = job.unsupported();
    if unsupported.is_empty() { Ok(job) } else { Err(told(unsupported)) }
}

fn device_of(args: &BenchArgs) -> DeviceName {
    let shown = || Gpu::count().is_ok_and(|count| count > 0);
    args.device.unwrap_or_else(|| if shown() { DeviceName::Gpu } else { DeviceName::Cpu })
}

fn measure(args: &BenchArgs, preset: Preset) -> Result<Measured, Refused> {
    let job = job(args, preset, device_of(args))?;
    let (devices, ep) = (args.devices.unwrap_or(1), args.expert_parallel);
    if !devices::divides(ep, devices) {
        return Err(Refused(2, format!("--expert-parallel {ep} does not divide {devices} devices")));
    }
    let layout = placement::layout(devices, ep);
    let planned = placement::memory(&job, &layout, 0);
    let planned = planned.committed - memory::kept(&planned);
    let places = Places {
        root: String::new(),
        checkpoints: String::new(),
        records: String::new(),
        exclude: Vec::new(),
    };
    let template = launch::template(&job, Venue::Local, "bench", &places);
    let ranks = devices;
    if job.training.compute.backend == Backend::Cpu {
        memory::check(args, preset, &job, &layout).map_err(|why| Refused(2, why))?;
    }
    let mut config = WorkerConfig { layout, ranks, threads: args.threads, ..template };
    if args.placement == Placed::ByLoad && ep > 1 {
        let counting = ranks_of(args, &job, &config, (args.warm_up.max(1), 0))?;
        let (counts, experts) = of_slices(&job, &counting[0].loads);
        let loads = Loads { counts: &counts, experts };
        config.layout.placement = Placement::Ordered(loads.order(ep, &loads.in_order()));
    }
    let mut all = ranks_of(args, &job, &config, (args.warm_up, args.steps))?;
    let first = all.swap_remove(0);
    let Trained { device, imbalance, unevenness, loss, watts, used, .. } = first;
    let Trained { phases, pace, captures, seconds, again, .. } = first;
    let travels = Travels::new(first.looks, (&job, &config.layout), &device);
    let watts = all.iter().map(|other| other.watts).fold(watts, |sum, of| Some(sum? + of?));
    Ok(Measured {
        device,
        devices: ranks,
        expert_parallel: ep,
        on_gpu: config.training.compute.backend == Backend::Cuda,
        routing: args.routing,
        preset: preset.name(),
        imbalance,
        unevenness,
        loss,
        planned,
        used,
        watts,
        phases,
        pace,
        captures,
        seconds,
        again,
        travels,
        job,
    })
}

/// What every rank found in so many steps that are not measured, and so many that are.
fn ranks_of(
    args: &BenchArgs,
    job: &Job,
    config: &WorkerConfig,
    steps: (u32, u32),
) -> Result<Vec<Trained>, Refused> {
    let ranks = config.ranks;
    let comms = if ranks == 1 { vec![Comm::solo(1)] } else { Comm::in_process(ranks) };
    // A thread a device: what a worker's engines are processes for, a bench does without.
    let ends: Vec<Result<Trained, Refused>> = std::thread::scope(|scope| {
        let rank = |(rank, comm): (u32, Comm)| {
            let config = WorkerConfig { rank: Some(rank), ..config.clone() };
            let train = move || train(args, job, &config, comm, steps);
            std::thread::Builder::new().spawn_scoped(scope, train)
        };
        let threads: Vec<_> = (0..ranks).zip(comms).map(rank).collect();
        let bug = |_| Err(Refused(1, "a bug: a rank panicked, as told above".to_string()));
        // The others end, since a rank without a thread has left their group.
        let none = |error| Err(Refused(1, format!("there is no thread for a rank: {error}")));
        let ended = threads.into_iter().map(|thread| {
            thread.map_or_else(none, |thread| thread.join().unwrap_or_else(bug))
        });
        ended.collect()
    });
    ends.into_iter().collect()
}

/// What one rank found.
struct Trained {
    device: String,
    imbalance: f64,
    unevenness: f64,
    /// Of the last quarter of the steps that are not measured, and of those that are, by MoE layer
    /// and expert.
    loads: Vec<u64>,
    loss: f64,
    used: Option<u64>,
    watts: Option<f64>,
    phases: [f64; StepPhase::COUNT],
    pace: Option<Pace>,
    captures: Captures,
    seconds: Vec<f64>,
    again: Vec<usize>,
    looks: Vec<CommunicationReport>,
}

fn train(
    args: &BenchArgs,
    job: &Job,
    config: &WorkerConfig,
    comm: Comm,
    (warm_up, measured): (u32, u32),
) -> Result<Trained, Refused> {
    let rank = comm.rank();
    let mut engine = Engine::open(config, rank, comm).map_err(|error| {
        complain(&error);
        Refused(1, "the device cannot be made".to_string())
    })?;
    let failed = |error: DeviceError| Refused(1, error.to_string());
    initialize(&mut engine.model, config.training.seed);
    let mut batches = match args.routing {
        Routing::Natural => Synthetic::natural(&job.model, &config.training),
        Routing::Balanced => {
            synthetic::balance(&mut engine.model).map_err(|why| Refused(2, why))?;
            Synthetic::balanced(&job.model, &config.training)
        }
    };
    engine.model.finish().map_err(failed)?;
    engine.links.meet().map_err(|error| {
        complain(&error);
        Refused(1, "the GPUs cannot be connected".to_string())
    })?;
    let mut gauge = Gauge::of(&engine.model.device, 0, 1);
    engine.look_each(LOOK_EACH);
    let (mut seconds, mut again, mut looks) = (Vec::new(), Vec::new(), Vec::new());
    let mut last = StepSummary::default();
    let (mut imbalance, mut unevenness, mut loads) = (0.0, 0.0, Vec::new());
    let steps = u64::from(warm_up + measured);
    // As a job does, a GPU begins a step before the numbers of the one before it are read.
    let ahead = u64::from(engine.runs_ahead());
    let mut began = Instant::now();
    let mut next = 0;
    for step in 0..steps {
        let failed = |error: StepError| {
            complain(&error);
            Refused(1, format!("step {} failed", step + 1))
        };
        while next < steps && next <= step + ahead {
            engine.begin(next, &mut batches).map_err(failed)?;
            next += 1;
        }
        let summary = engine.end(&mut batches).map_err(failed)?;
        let took = began.elapsed().as_secs_f64();
        began = Instant::now();
        if let Some(what) = &summary.non_finite {
            return Err(Refused(1, format!("{what} is not finite at step {}", step + 1)));
        }
        let is_again = engine.take_again();
        if step < u64::from(warm_up) {
            engine.take_pace();
            engine.take_phases();
        } else {
            again.extend(is_again.then_some(seconds.len() + 1));
            seconds.push(took);
            imbalance += summary.expert_imbalance / f64::from(measured);
            unevenness += uneven(job, config, &summary.loads) / f64::from(measured);
        }
        // What routers do changes fast at first: the last of these steps tell most of what comes.
        if 4 * step >= 3 * u64::from(warm_up).min(steps - 1) {
            loads.resize(summary.loads.len(), 0);
            loads.iter_mut().zip(&summary.loads).for_each(|(sum, load)| *sum += load);
        }
        looks.extend(engine.take_communication());
        last = summary;
    }
    let phases = engine.take_phases().map(|all| all / seconds.len().max(1) as f64);
    let (pace, captures) = (engine.take_pace(), engine.captures());
    if let Some(file) = args.trace.as_ref().filter(|_| measured > 0) {
        // All take part, one writes.
        let file = (rank == 0).then_some(file.as_path());
        trace(&mut engine, &mut batches, steps, file)?;
    }
    let device = &engine.model.device;
    // The step is over: what it drew is still in the newest reading.
    let told = gauge.as_mut().map(|gauge| gauge.report(device, 0.0));
    let (used, watts) = match &told {
        Some(told) => (told.memory_bytes, told.watts),
        // The most that this process had in memory.
        None => (peak_of_this_process(), None),
    };
    let device = match told {
        Some(told) => told.name,
        None => format!("processor, {:?}", moejob_kernels::Isa::detect()),
    };
    let arrived = engine.all_arrived().map_err(|error| error.to_string());
    let left = arrived.and_then(|()| engine.leave().map_err(|left| left.words));
    left.map_err(|error| Refused(1, error))?;
    let loss = last.loss;
    Ok(Trained {
        device,
        imbalance,
        unevenness,
        loads,
        loss,
        used,
        watts,
        phases,
        pace,
        captures,
        seconds,
        again,
        looks,
    })
}

/// Steps that are traced and not measured: marks take time.
fn trace(
    engine: &mut Engine,
    batches: &mut Synthetic,
    first: u64,
    file: Option<&Path>,
) -> Result<(), Refused> {
    if let Some(file) = file {
        engine.trace(Trace::new(file.to_path_buf(), 0, 0));
    }
    for step in first..first + STEPS_TRACED {
        engine.step(step, batches).map_err(|error| {
            complain(&error);
            Refused(1, format!("step {} failed", step + 1))
        })?;
    }
    let written = engine.take_traced().unwrap_or(Ok(()));
    let name = file.unwrap_or(Path::new("")).display();
    written.map_err(|error| Refused(1, format!("--trace {name}: {error}")))
}

/// What a bench tells.
struct Measured {
    device: String,
    devices: u32,
    expert_parallel: u32,
    on_gpu: bool,
    preset: String,
    job: Job,
    routing: Routing,
    /// Tokens of the busiest expert over the mean, mean over the measured steps.
    imbalance: f64,
    /// The same of the fullest rank of an expert group, the mean of all layers.
    unevenness: f64,
    loss: f64,
    /// Bytes that `plan` expects of a rank.
    planned: u64,
    used: Option<u64>,
    watts: Option<f64>,
    /// Seconds of each phase, mean over the measured steps.
    phases: [f64; StepPhase::COUNT],
    /// Of the measured steps, mean.
    pace: Option<Pace>,
    captures: Captures,
    /// Of each measured step.
    seconds: Vec<f64>,
    /// Measured steps, from 1, that were computed twice.
    again: Vec<usize>,
    travels: Travels,
}

impl Measured {
    fn tokens(&self) -> f64 {
        let training = &self.job.training;
        f64::from(training.global_batch_size) * f64::from(training.sequence_length)
    }

    /// The median of an even number of steps lies between two of them.
    fn median(&self) -> f64 {
        let mut seconds = self.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        let half = seconds.len() / 2;
        match seconds.len() % 2 {
            0 => (seconds[half - 1] + seconds[half]) / 2.0,
            _ => seconds[half],
        }
    }

    fn tokens_per_second(&self) -> f64 {
        self.tokens() / self.median()
    }

    /// FLOP/s by the convention of `flops.rs`.
    fn model_flops(&self) -> f64 {
        let sequence = u64::from(self.job.training.sequence_length);
        self.tokens_per_second() * self.job.model.flops_per_token(sequence) as f64
    }

    fn ceiling(&self) -> Option<f64> {
        let one = moejob_protocol::flops::bf16_ceiling(&self.device).filter(|_| self.on_gpu);
        one.map(|one| one * f64::from(self.devices))
    }

    fn routing_name(&self) -> &'static str {
        match self.routing {
            Routing::Natural => "natural",
            Routing::Balanced => "balanced",
        }
    }

    fn text(&self) -> String {
        let (model, training) = (&self.job.model, &self.job.training);
        let compute = &training.compute;
        let number = |count: u64| scaled(count as f64, &["", " k", " M", " B"]);
        let least = self.seconds.iter().copied().fold(f64::INFINITY, f64::min);
        let most = self.seconds.iter().copied().fold(0.0, f64::max);
        let share = self.ceiling().map(|ceiling| {
            let percent = 100.0 * self.model_flops() / ceiling;
            format!(", {percent:.1}% of {:.0} (bf16, the data sheet's)", ceiling / 1e12)
        });
        let lines = [
            (
                "device",
                match self.devices {
                    1 => self.device.clone(),
                    count => format!(
                        "{count} x {}, experts over {}",
                        self.device, self.expert_parallel
                    ),
                },
            ),
            (
                "model",
                format!(
                    "{}, {} layers: {} parameters, {} active",
                    self.preset,
                    model.num_hidden_layers,
                    number(model.numel()),
                    number(model.active_numel())
                ),
            ),
            (
                "batch",
                format!(
                    "{} x {} sequences of {}: {} tokens a step",
                    training.global_batch_size / training.micro_batch_size,
                    training.micro_batch_size,
                    training.sequence_length,
                    self.tokens()
                ),
            ),
            (
                "numbers",
                format!(
                    "{}, moments {}, gradients {}, attention {}, recompute {}{}{}{}",
                    as_typed(training.precision),
                    moments(compute.moment_dtype),
                    gradients(compute.gradient_dtype),
                    if compute.fast_attention { "fastest" } else { "deterministic" },
                    recompute(training.recompute),
                    if compute.offload.is_none() { "" } else { ", state offloaded to the host" },
                    match compute.wire {
                        Wire::Auto => String::new(),
                        wire => format!(", tokens travel as {}", as_typed(wire)),
                    },
                    ["", ", ZeRO stage 2", ", ZeRO stage 3"][compute.zero as usize],
                ),
            ),
            (
                "routing",
                format!(
                    "{}; the busiest expert had {:.2} times the mean{}",
                    self.routing_name(),
                    self.imbalance,
                    match self.expert_parallel {
                        1 => String::new(),
                        _ => format!(", the fullest device {:.3} times", self.unevenness),
                    }
                ),
            ),
            (
                "step",
                format!(
                    "{:.2} ms, the median of {} ({:.2} to {:.2})",
                    self.median() * 1e3,
                    self.seconds.len(),
                    least * 1e3,
                    most * 1e3
                ),
            ),
            ("phases", self.phases_text()),
            ("speed", format!("{:.0} tokens/s", self.tokens_per_second())),
            (
                "model rate",
                scaled(self.model_flops() / 1e6, &[" MFLOP/s", " GFLOP/s", " TFLOP/s"])
                    + &share.unwrap_or_default(),
            ),
            (
                "memory",
                format!(
                    "{} planned, {} used",
                    gib(self.planned),
                    self.used.map_or("unknown".to_string(), gib)
                ),
            ),
        ];
        let mut text = String::new();
        for (name, value) in lines.into_iter().chain(self.travels.lines()) {
            text += &format!("{name:<12}{value}\n");
        }
        if self.on_gpu {
            text += &format!("{:<12}{}\n", "host", self.host_text());
        }
        if let Some(watts) = self.watts {
            text += &format!("{:<12}{watts:.0} W at the end\n", "power");
        }
        text + &format!("{:<12}{:.4} at the last step\n", "loss", self.loss)
    }

    /// Milliseconds, on the device's clock, and on the host's what is left of a step.
    fn phases_text(&self) -> String {
        let of = |phase| self.phases[phase as usize] * 1e3;
        // What several devices wait for each other, beside what is part of another phase.
        let waits = match self.devices {
            1 => String::new(),
            _ => format!("communication {:.1}, ", of(StepPhase::Communication)),
        };
        let told: f64 = self.phases.iter().sum::<f64>() * 1e3 - of(StepPhase::Other);
        // A step that is begun ahead is computed in part before the first one is measured.
        let step = self.seconds.iter().sum::<f64>() * 1e3 / self.seconds.len().max(1) as f64;
        let step = step.max(told);
        let again = match &self.again[..] {
            [] => String::new(),
            steps => format!("; computed twice: steps {steps:?}"),
        };
        format!(
            "forward {:.1}, backward {:.1}, {waits}numbers {:.1}, update {:.1}, data {:.1}, \
             other {:.1} of {step:.1} ms (means){again}",
            of(StepPhase::Forward),
            of(StepPhase::Backward),
            of(StepPhase::Numbers),
            of(StepPhase::Update),
            of(StepPhase::Data),
            step - told
        )
    }

    /// How long the host takes to give the device a step, and by which graphs.
    fn host_text(&self) -> String {
        let [host, device] = self.pace.map_or([0.0; 2], |Pace { host, device }| [host, device]);
        let Captures { graphs, launches, .. } = self.captures;
        let (host, device) = (host * 1e3, device * 1e3);
        format!("enqueues a step in {host:.2} ms, the device computes it in {device:.2} (means); \
                 {graphs} captured graphs of {launches} launches")
    }

    fn json(&self) -> Value {
        let training = &self.job.training;
        json!({
            "device": self.device,
            "devices": self.devices,
            "expertParallel": self.expert_parallel,
            "preset": self.preset,
            "layers": self.job.model.num_hidden_layers,
            "parameters": self.job.model.numel(),
            "activeParameters": self.job.model.active_numel(),
            "sequenceLength": training.sequence_length,
            "microBatchSize": training.micro_batch_size,
            "accumulation": training.global_batch_size / training.micro_batch_size,
            "precision": as_typed(training.precision),
            "compute": training.compute,
            "recompute": recompute(training.recompute),
            "routing": self.routing_name(),
            "expertImbalance": self.imbalance,
            "rankImbalance": self.unevenness,
            "secondsPerStep": self.seconds,
            "medianSeconds": self.median(),
            "hostSeconds": self.pace.map(|pace| pace.host),
            "deviceSeconds": self.pace.map(|pace| pace.device),
            "capturedGraphs": self.captures.graphs,
            "capturedLaunches": self.captures.launches,
            "graphLaunches": self.captures.repeats,
            "tokensPerSecond": self.tokens_per_second(),
            "modelFlopsPerSecond": self.model_flops(),
            "ceilingFlopsPerSecond": self.ceiling(),
            "memoryPlannedBytes": self.planned,
            "memoryUsedBytes": self.used,
            "watts": self.watts,
            "loss": self.loss,
            "communication": self.travels.json(),
        })
    }
}

/// In the largest of these units, which are a thousand apart, that leaves a number above 1.
fn scaled(value: f64, units: &[&str]) -> String {
    let mut value = value;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.2}{}", units[unit])
}
