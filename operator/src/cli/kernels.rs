//! `moejob kernels --out FOLDER`: compiles the kernels of presets ahead of time, without a GPU.
//!
//! ```text
//! presets x choices -> manifests -> Job -> StepKernels -> sources -> NVRTC -> FOLDER
//! ```
//! A program beside such a folder trains without waiting for NVRTC (docs/install.md).

use super::complain;
use clap::Args;
use moe_worker::engine::model::step_kernels;
use moejob_kernels::cuda::{Arch, Source, compile_into};
use moejob_kernels::StepKernels;
use moejob_manifest::Job;
use moejob_manifest::crd::spec_schema;
use moejob_plan::placement;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
pub struct KernelsArgs {
    /// Models, such as olmoe-1b-7b; all are those that train on GPUs.
    #[arg(long, value_delimiter = ',', default_value = ALL)]
    presets: Vec<String>,
    /// GPUs: sm_80 is an A100, sm_90a H100 and H200, sm_100 a B200.
    #[arg(long, value_delimiter = ',', default_value = "sm_80,sm_90a")]
    #[arg(value_parser = ["sm_80", "sm_90a", "sm_100"])]
    arch: Vec<String>,
    /// training.precision.
    #[arg(long, value_delimiter = ',', default_value = "bf16")]
    #[arg(value_parser = ["fp32", "tf32", "bf16", "fp16"])]
    precision: Vec<String>,
    /// Where they go. What is there already stays.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
}

const ALL: &str = "all";

pub fn run(args: &KernelsArgs) -> ExitCode {
    let mut steps = Vec::new();
    for preset in presets(&args.presets) {
        for precision in &args.precision {
            match steps_of(&preset, precision) {
                Ok(of_preset) => steps.extend(of_preset),
                // Of all presets those that train.
                Err(_) if args.presets.iter().any(|name| name == ALL) => {}
                Err(why) => {
                    eprintln!("moejob: --presets {preset}: {why}");
                    return ExitCode::from(2);
                }
            }
        }
    }
    let (mut sources, mut seen) = (Vec::new(), HashSet::new());
    for arch in args.arch.iter().filter_map(|target| Arch::named(target)) {
        let of_arch = steps.iter().flat_map(|step| step.sources(arch));
        sources.extend(of_arch.filter(|source| seen.insert(source.clone())));
    }
    compile(&args.out, &sources)
}

/// Those that are named, or all.
fn presets(named: &[String]) -> Vec<String> {
    if named.iter().all(|name| name != ALL) {
        return named.to_vec();
    }
    let schema = &spec_schema()["properties"]["model"]["properties"]["preset"]["enum"];
    let names = schema.as_array().into_iter().flatten().filter_map(Value::as_str);
    names.map(str::to_string).collect()
}

/// What is chosen beside preset and precision. Kernels take it into their text where another one is
/// faster; what lies between takes the same.
#[derive(Clone, Copy)]
struct Choices {
    sequence: u32,
    micro_batch: u32,
    accumulation: u32,
    expert_parallel: u32,
    /// Of momentDtype and attention other words than those they have by default.
    moments: Option<&'static str>,
    attention: Option<&'static str>,
}

const DEFAULTS: Choices = Choices {
    sequence: 4096,
    micro_batch: 1,
    accumulation: 1,
    expert_parallel: 1,
    moments: None,
    attention: None,
};

/// Beyond 4,096 positions the fastest attention is another one.
const SEQUENCES: [u32; 2] = [4096, 8192];
/// Few rows of an expert and many take other tiles.
const MICRO_BATCHES: [u32; 2] = [1, 16];
/// With one micro-batch gradients are of 16 bits, with more of 32.
const ACCUMULATIONS: [u32; 2] = [1, 2];
const EXPERT_PARALLELS: [u32; 4] = [1, 2, 4, 8];

fn choices() -> Vec<Choices> {
    let mut all = Vec::new();
    for accumulation in ACCUMULATIONS {
        let of = Choices { accumulation, ..DEFAULTS };
        all.push(Choices { moments: Some("bf16"), ..of });
        for sequence in SEQUENCES {
            all.push(Choices { sequence, attention: Some("fastest"), ..of });
            all.push(Choices { sequence, ..of });
        }
        for (micro_batch, expert_parallel) in MICRO_BATCHES
            .into_iter()
            .flat_map(|sequences| EXPERT_PARALLELS.map(|ranks| (sequences, ranks)))
        {
            all.push(Choices { micro_batch, expert_parallel, ..of });
        }
    }
    all
}

/// The kernels of a preset in every choice that its jobs may make.
///
/// # Errors
/// GPUs do not train it: why.
fn steps_of(preset: &str, precision: &str) -> Result<Vec<StepKernels>, String> {
    let mut all: Vec<StepKernels> = Vec::new();
    // The plainest comes first: what that is refused for is the preset's own.
    for of in std::iter::once(DEFAULTS).chain(choices()) {
        let job = match job(preset, precision, of) {
            Ok(job) => job,
            Err(why) if all.is_empty() => return Err(why),
            // Such as experts over more ranks than it has.
            Err(_) => continue,
        };
        let layout = placement::layout(of.expert_parallel, of.expert_parallel);
        let step = step_kernels(&job.model, &layout, &job.training);
        match all.iter_mut().find(|other| other.is_alike(&step)) {
            Some(other) => other.join(step),
            None => all.push(step),
        }
    }
    Ok(all)
}

/// The job of a manifest with these choices.
fn job(preset: &str, precision: &str, of: Choices) -> Result<Job, String> {
    let mut training = json!({
        "steps": 1,
        "precision": precision,
        "microBatchSize": of.micro_batch,
        "globalBatchSize": of.micro_batch * of.accumulation * of.expert_parallel,
    });
    for (field, word) in [("momentDtype", of.moments), ("attention", of.attention)] {
        if let Some(word) = word {
            training[field] = json!(word);
        }
    }
    let manifest = json!({
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoeJob",
        "metadata": { "name": "kernels" },
        "spec": {
            "nodes": { "profile": "gpu", "devicesPerNode": of.expert_parallel },
            "parallelism": { "expert": of.expert_parallel },
            "model": { "preset": preset },
            // Never opened.
            "data": { "train": { "tokens": { "paths": ["none"] } }, "sequenceLength": of.sequence },
            "training": training,
        },
    });
    let told = |problems: Vec<moejob_manifest::problem::Problem>| {
        let lines: Vec<String> = problems.iter().map(|problem| problem.sentence()).collect();
        lines.join("\n")
    };
    let job = Job::read(manifest.to_string().as_bytes()).map_err(told)?;
    let unsupported = job.unsupported();
    if unsupported.is_empty() { Ok(job) } else { Err(told(unsupported)) }
}

fn compile(folder: &Path, sources: &[Source]) -> ExitCode {
    eprintln!("moejob: {} modules of kernels", sources.len());
    match compile_into(folder, sources, &|_, _| ()) {
        Ok((major, minor)) => {
            println!("{} modules by NVRTC {major}.{minor} in {}", sources.len(), folder.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}
