//! What goes with which devices: the one list of what processors, one GPU and a cluster refuse.
//!
//! ```text
//! problems      a choice that its devices never have: the manifest is wrong          E0221
//! unsupported   a job that the workers cannot train yet: a line goes when they can   E0301
//! on_cluster    what only `moejob run` can do                                        E0301
//! ```

use crate::job::Job;
use crate::preset;
use crate::problem::{Code, Problem, quoted};
use crate::workspace::{self, goes_up, no_path};
use crate::profile::Backend;
use crate::spec::{
    AttentionName, MoeJobSpec, NumberOrAuto, OverlapDegree, Word, as_typed,
};
use moejob_protocol::config::{
    GradientDtype, MomentDtype, Precision, TrainingConfig, Wire,
};
use moejob_protocol::kernel_sizes::{
    self, ALIGNMENT, EXPERT_PARALLEL_MAX, EXPERTS_MAX, GROUPS_MAX, SizeRefusal, Size,
    SizeLimit,
};
use moejob_protocol::model::{AuxLossScope, ModelConfig, RouterConfig};
use moejob_protocol::slices::SLICES;

/// Widths of a head that attention on a GPU is tried for.
const HEAD_DIMS: [u32; 4] = [32, 64, 96, 128];

/// What of the numbers' formats does not go with the job's devices or with each other.
pub fn problems(spec: &MoeJobSpec, job: &Job) -> Vec<Problem> {
    match job.profile.backend {
        Backend::Cpu => of_processors(spec, job),
        Backend::Cuda => of_dtypes(&job.training),
    }
}

/// Warns of a field that has no effect.
pub fn warnings(spec: &MoeJobSpec) -> Vec<Problem> {
    let degree = spec.parallelism.as_ref().and_then(|of| of.overlap_degree.clone());
    let Some(OverlapDegree(NumberOrAuto::Number(degree @ 2..))) = degree else {
        return Vec::new();
    };
    let path = "spec.parallelism.overlapDegree";
    let advice = "it has no effect: the tokens of a micro-batch travel at once; delete it";
    vec![Problem::of(Code::Device, path, format!("`{degree}`"), "1 or auto", advice)]
}

/// Processors compute in fp32, always in the same order; what asks for that is no problem.
fn of_processors(spec: &MoeJobSpec, job: &Job) -> Vec<Problem> {
    const ADVICE: &str = "processors compute in fp32: delete it, or choose a nodes.profile with \
                          GPUs, such as gpu";
    let typed = spec.training.clone().unwrap_or_default();
    let mut found = Vec::new();
    if job.training.precision != Precision::Fp32 {
        let given = format!("`{}` on processors", as_typed(job.training.precision));
        found.push(Problem::of(Code::Device, "spec.training.precision", given, "fp32", ADVICE));
    }
    if typed.moment_dtype == Some(Word(MomentDtype::Bf16)) {
        let path = "spec.training.momentDtype";
        found.push(Problem::of(Code::Device, path, "`bf16` on processors", "fp32", ADVICE));
    }
    if typed.gradient_dtype == Some(Word(GradientDtype::Bf16)) {
        let path = "spec.training.gradientDtype";
        found.push(Problem::of(Code::Device, path, "`bf16` on processors", "auto or fp32", ADVICE));
    }
    if typed.attention == Some(AttentionName::Fastest) {
        let advice = "processors sum in one order alone: delete it";
        let path = "spec.training.attention";
        let given = "`fastest` on processors";
        found.push(Problem::of(Code::Device, path, given, "deterministic", advice));
    }
    let parallelism = spec.parallelism.clone().unwrap_or_default();
    if parallelism.combine_pre_reduce == Some(true) {
        let advice = "processors sum at each token's own rank, so that no bit depends on how many \
                      there are: delete it";
        let path = "spec.parallelism.combinePreReduce";
        let given = "`true` on processors";
        found.push(Problem::of(Code::Device, path, given, "false", advice));
    }
    let wire = parallelism.wire.map_or(Wire::Auto, |of| of.0);
    if !matches!(wire, Wire::Auto | Wire::Fp32) {
        let given = format!("`{}` on processors", as_typed(wire));
        found.push(Problem::of(Code::Device, WIRE, given, "auto or fp32", ADVICE));
    }
    found
}

const WIRE: &str = "spec.parallelism.wire";

fn of_dtypes(training: &TrainingConfig) -> Vec<Problem> {
    let mut found = Vec::new();
    let name = as_typed(training.precision);
    let halves = matches!(training.precision, Precision::Bf16 | Precision::Fp16);
    if training.compute.moment_dtype == MomentDtype::Bf16 && !halves {
        found.push(Problem::of(
            Code::Device,
            "spec.training.momentDtype",
            format!("`bf16` with precision {name}"),
            "bf16 with precision bf16 or fp16",
            "delete it, or choose such a precision",
        ));
    }
    let bf16 = training.precision == Precision::Bf16;
    if training.compute.gradient_dtype == GradientDtype::Bf16 && !bf16 {
        found.push(Problem::of(
            Code::Device,
            "spec.training.gradientDtype",
            format!("`bf16` with precision {name}"),
            "bf16 with precision bf16",
            "choose auto or fp32, or precision bf16",
        ));
    }
    let wire = training.compute.wire;
    if !wire.goes_with(training.precision) {
        let given = format!("`{}` with precision {name}", as_typed(wire));
        let advice = "delete it, or choose precision bf16";
        found.push(Problem::of(Code::Device, WIRE, given, "auto or fp32", advice));
    }
    found
}

/// What the workers cannot do yet, by name: refused before a run starts, never ignored.
pub fn unsupported(job: &Job) -> Vec<Problem> {
    const ADVICE: &str = "the workers cannot do this yet";
    let mut found = Vec::new();
    let degrees = [
        ("spec.parallelism.tensor", job.tensor_parallel),
        ("spec.parallelism.pipeline", job.pipeline_parallel),
    ];
    for (path, degree) in degrees.into_iter().filter(|(_, degree)| *degree != 1) {
        found.push(Problem::of(Code::Unsupported, path, degree.to_string(), "1", ADVICE));
    }
    if let Some((preset, lacks)) = job.preset.and_then(|of| Some((of, preset::lacks(of)?))) {
        let given = format!("{}, {lacks}", preset.name());
        found.push(Problem::of(Code::Unsupported, "spec.model.preset", given, "others", ADVICE));
    }
    match job.profile.backend {
        Backend::Cuda => {
            found.extend(several_gpus(job));
            found.extend(on_one_gpu(&job.model, &job.training));
            found.extend(RankLoad::of(job).problem());
        }
        Backend::Cpu => found.extend(RankLoad::of(job).problem()),
    }
    found
}

/// Whether so many ranks fall into whole groups of `degree`.
pub fn divides(degree: u32, ranks: u32) -> bool {
    degree > 0 && ranks.is_multiple_of(degree)
}

/// Whether devices take the job's experts shared out over `ep` of them.
pub fn takes_expert_parallel(job: &Job, ep: u32) -> bool {
    let counts = job.profile.backend == Backend::Cpu || fits_expert_parallel(&job.model, ep);
    counts && RankLoad { ep, ..RankLoad::of(job) }.refused().is_none()
}

/// Whether the kernels take experts that are shared out over `ep` GPUs: each has one at least.
/// Slices of experts are on several GPUs.
fn fits_expert_parallel(model: &ModelConfig, ep: u32) -> bool {
    let (experts, slices) = (&model.experts, model.slices());
    match slices.each {
        1 => ep <= EXPERT_PARALLEL_MAX.min(experts.count),
        _ => {
            let each = slices.count / ep.max(1)..=slices.count.div_ceil(ep.max(1));
            ep > 1 && ep <= EXPERT_PARALLEL_MAX && *each.start() >= 1 && *each.end() <= EXPERTS_MAX
        }
    }
}

/// What is computed at once, as far as devices bound it.
#[derive(Clone, Copy)]
struct RankLoad<'a> {
    model: &'a ModelConfig,
    training: &'a TrainingConfig,
    micro_batch_size: u32,
    sequence_length: u32,
    /// Ranks that share the experts, and whether the job says so.
    ep: u32,
    typed: bool,
}

impl<'a> RankLoad<'a> {
    fn of(job: &'a Job) -> RankLoad<'a> {
        let (model, training) = (&job.model, &job.training);
        RankLoad {
            model,
            training,
            micro_batch_size: training.micro_batch_size,
            sequence_length: training.sequence_length,
            ep: job.expert_parallel.unwrap_or(1).max(1),
            typed: job.expert_parallel.is_some(),
        }
    }

    /// The first size that is too large for the devices, among those that grow with the tokens.
    fn refused(&self) -> Option<SizeRefusal> {
        let training = TrainingConfig {
            micro_batch_size: self.micro_batch_size,
            sequence_length: self.sequence_length,
            ..*self.training
        };
        match training.compute.backend {
            Backend::Cpu => kernel_sizes::on_processors(self.model, &training, self.ep),
            Backend::Cuda => {
                let found = kernel_sizes::on_gpus(self.model, &training, self.ep).into_iter();
                // Segments have a choice of their own.
                found.into_iter().find(|of| of.size.is_of_tokens() && of.size != Size::Segments)
            }
        }
    }

    /// What is too much, with the least change that makes it less.
    fn problem(self) -> Option<Problem> {
        let refused = self.refused()?;
        let fits = |of: RankLoad| of.refused().is_none();
        let (micro, length) = (self.micro_batch_size, self.sequence_length);
        let all = self.training.global_batch_size;
        let smaller = (1..micro).rev().filter(|size| all.is_multiple_of(*size));
        let micro_batch =
            smaller.clone().find(|size| fits(RankLoad { micro_batch_size: *size, ..self }));
        let fewer = || (1..self.ep).rev().find(|ep| fits(RankLoad { ep: *ep, ..self }));
        let (path, given, most, advice) = if let Some(most) = micro_batch {
            ("spec.training.microBatchSize", micro, most, "a step has more micro-batches then")
        } else if let Some(most) = fewer().filter(|_| self.typed) {
            let advice = "fewer ranks share the experts then; auto is a good choice";
            ("spec.parallelism.expert", self.ep, most, advice)
        } else {
            let least = RankLoad { micro_batch_size: 1, ..self };
            let with = |sequence_length| fits(RankLoad { sequence_length, ..least });
            let (mut most, mut above) = (1, length);
            while above - most > 1 {
                let middle = most + (above - most) / 2;
                if with(middle) { most = middle } else { above = middle }
            }
            let advice = match micro {
                1 => "a smaller hiddenSize makes less, too",
                _ => "and microBatchSize: 1 with it; a smaller hiddenSize makes less, too",
            };
            ("spec.data.sequenceLength", length, most, advice)
        };
        let devices = match self.training.compute.backend {
            Backend::Cpu => "processors",
            Backend::Cuda => "GPUs",
        };
        let given = format!("`{given}` on {devices}, which makes {refused}");
        Some(Problem::of(Code::Unsupported, path, given, format!("at most {most}"), advice))
    }
}

/// What does not go with experts that are shared by several GPUs.
fn several_gpus(job: &Job) -> Option<Problem> {
    let ep = job.expert_parallel.filter(|ep| !fits_expert_parallel(&job.model, *ep))?;
    let slices = job.model.slices();
    if slices.each > 1 {
        let least = slices.count.div_ceil(EXPERTS_MAX).max(2);
        let most = slices.count.min(EXPERT_PARALLEL_MAX);
        return Some(Problem::of(
            Code::Unsupported,
            "spec.parallelism.expert",
            format!("`{ep}` on GPUs"),
            format!("{least} to {most}"),
            format!("a GPU holds 1 to {EXPERTS_MAX} slices of experts"),
        ));
    }
    Some(Problem::of(
        Code::Unsupported,
        "spec.parallelism.expert",
        format!("`{ep}` on GPUs"),
        format!("at most {}", job.model.experts.count.clamp(1, EXPERT_PARALLEL_MAX)),
        "a GPU holds an expert at least",
    ))
}

/// What of a model and its training a GPU does not compute yet.
pub fn on_one_gpu(model: &ModelConfig, training: &TrainingConfig) -> Vec<Problem> {
    const KERNELS: &str = "the kernels for GPUs are not made for it; processors (profile cpu) are";
    let mut found = Vec::new();
    if !HEAD_DIMS.contains(&model.head_dim) {
        let given = format!("`{}` on GPUs", model.head_dim);
        let names: Vec<String> = HEAD_DIMS.iter().map(u32::to_string).collect();
        let allowed = format!("one of {}", names.join(", "));
        found.push(Problem::of(Code::Unsupported, "spec.model.headDim", given, allowed, KERNELS));
    }
    let narrow = ("spec.model.denseIntermediateSize", model.dense_intermediate_size);
    let narrow = Some(narrow).filter(|(_, width)| !width.is_multiple_of(ALIGNMENT));
    let refused = kernel_sizes::on_gpus(model, training, 1).into_iter();
    let refused = refused.filter_map(|of| Some((field_of(model, of.size)?, of.taken)));
    let narrow = narrow.map(|field| (field, SizeLimit::MultiplesOf(ALIGNMENT.into())));
    let groups = ("spec.model.router.groups", model.router.groups);
    let groups = Some(groups).filter(|(_, count)| *count > GROUPS_MAX);
    let groups = groups.map(|field| (field, SizeLimit::AtMost(GROUPS_MAX.into())));
    for ((path, given), taken) in refused.chain(narrow).chain(groups) {
        let allowed = match taken {
            SizeLimit::MultiplesOf(of) => format!("a multiple of {of}"),
            SizeLimit::AtMost(most) => format!("at most {most}"),
        };
        let given = format!("`{given}` on GPUs");
        found.push(Problem::of(Code::Unsupported, path, given, allowed, KERNELS));
    }
    found.extend(of_slices(model));
    found.extend(of_sequences(&model.router, training.micro_batch_size));
    found
}

/// The field of a model that a size is; None: it is not of the model alone.
fn field_of(model: &ModelConfig, size: Size) -> Option<(&'static str, u32)> {
    let experts = &model.experts;
    match size {
        Size::Experts => Some(("spec.model.experts.count", experts.count)),
        Size::TopK => Some(("spec.model.experts.perToken", experts.per_token)),
        Size::Dim => Some(("spec.model.hiddenSize", model.hidden_size)),
        Size::Hidden | Size::WeightRows => {
            Some(("spec.model.experts.intermediateSize", experts.intermediate_size))
        }
        Size::Segments
        | Size::Tokens
        | Size::Sequences
        | Size::Inputs
        | Size::Choices
        | Size::Statistics => None,
    }
}

/// What kernels do not take of slices, where they would take the experts.
fn of_slices(model: &ModelConfig) -> Option<Problem> {
    let (experts, slices) = (&model.experts, model.slices());
    let width_fits = |width: u32| width.is_multiple_of(ALIGNMENT);
    if width_fits(slices.width) || !width_fits(experts.intermediate_size) {
        return None;
    }
    let takes = |each: u32| {
        experts.intermediate_size.is_multiple_of(each)
            && width_fits(model.in_slices(each).slices().width)
    };
    let most = SLICES.into_iter().filter(|each| takes(*each)).max().unwrap_or(1);
    let each = slices.each;
    Some(Problem::of(
        Code::Unsupported,
        "spec.parallelism.expertSlices",
        format!("`{each}` on GPUs"),
        format!("at most {most}"),
        format!("kernels take slices whose width is a multiple of {ALIGNMENT}"),
    ))
}

/// Sequences whose balance is kept apart: the op that chooses of dropless top-k takes some of them.
fn of_sequences(router: &RouterConfig, sequences: u32) -> Option<Problem> {
    const SEGMENTS_MAX: u32 = kernel_sizes::SEGMENTS_MAX;
    let apart = router.aux_loss_scope == AuxLossScope::Sequence && router.is_of_one_op();
    (apart && sequences > SEGMENTS_MAX).then(|| {
        Problem::of(
            Code::Unsupported,
            "spec.training.microBatchSize",
            format!("`{sequences}` with auxLossScope sequence on GPUs"),
            format!("at most {SEGMENTS_MAX}"),
            "lower it, or choose auxLossScope: microBatch",
        )
    })
}

/// What only the machine of `moejob run` can mean.
pub fn on_cluster(job: &Job) -> Vec<Problem> {
    let machine = job.profile.is_this_machine().then(|| {
        Problem::of(
            Code::Unsupported,
            "spec.nodes.profile",
            "`gpu` on a cluster",
            "the kind of the cluster's machines",
            "gpu is the machine of `moejob run`; write profile: nd-h200-v5 or another kind, or \
             describe the machine: profile: custom, custom: { devices: 1, deviceMemory: 80Gi, \
             nodeSelector: { .. } }",
        )
    });
    let outside = workspace::paths(job).into_iter().filter(|(_, path)| goes_up(path));
    let outside = outside.map(|(at, path)| no_path(&at, quoted(path)));
    machine.into_iter().chain(outside).collect()
}
