//! What `moejob bench` may be told.

use super::super::args::{THREADS_MAX, Written, whole};
use super::generate::TOKENS_MIN;
use super::links::LinksArgs;
use clap::{Args, ValueEnum};
use moejob_manifest::explain;
use moejob_manifest::spec::Preset;
use serde_json::json;
use std::path::PathBuf;

#[derive(Args, Clone)]
pub struct BenchArgs {
    /// The model, such as olmoe-1b-7b or tiny; `moejob explain model.preset` lists them.
    #[arg(long, value_parser = preset_of, required_unless_present = "links")]
    pub preset: Option<Preset>,
    #[command(flatten)]
    pub links: LinksArgs,
    /// Generates a text of so many tokens instead of training, by weights as a run begins with
    /// them.
    #[arg(long, value_name = "TOKENS", value_parser = whole(TOKENS_MIN as u32, 1 << 20))]
    pub generate: Option<u32>,
    /// Only so many of its layers.
    #[arg(long, value_parser = whole(1, 512))]
    pub layers: Option<u32>,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 4096, value_parser = whole(1, 1 << 20))]
    pub sequence: u32,
    /// Sequences that are computed at once.
    #[arg(long, default_value_t = 4, value_parser = whole(1, 65536))]
    pub micro_batch: u32,
    /// Micro-batches of a step, of each device.
    #[arg(long, default_value_t = 1, value_parser = whole(1, 4096))]
    pub accumulation: u32,
    /// Steps that are measured.
    #[arg(long, default_value_t = 10, value_parser = whole(1, 100_000))]
    pub steps: u32,
    /// Steps before those.
    #[arg(long, default_value_t = 3, value_parser = whole(0, 100_000))]
    pub warm_up: u32,
    /// natural: the router chooses; balanced: it is made to choose all experts equally often.
    #[arg(long, value_enum, default_value_t = Routing::Natural)]
    pub routing: Routing,
    /// Which device has which experts. byLoad: as many tokens for each as can be, by what the last
    /// steps of a run before counted that has as many steps as --warm-up.
    #[arg(long, value_enum, default_value_t = Placed::Contiguous)]
    pub placement: Placed,
    /// What computes. Default: a GPU where this machine shows one.
    #[arg(long, value_enum)]
    pub device: Option<DeviceName>,
    /// GPUs, or ranks on processors, each with its own micro-batches. Default: 1; of --links all.
    #[arg(long, value_parser = whole(1, 64))]
    pub devices: Option<u32>,
    /// parallelism.expert: devices that share the experts out. Default: each has all.
    #[arg(long, default_value_t = 1, value_parser = whole(1, 64))]
    pub expert_parallel: u32,
    /// parallelism.expertSlices: in how many slices each expert is cut. With --placement byLoad
    /// those of an expert lie on different devices where that can be.
    #[arg(long, default_value_t = 1, value_parser = whole(1, 64))]
    pub expert_slices: u32,
    /// parallelism.wire: as what tokens travel between devices that share the experts.
    #[arg(long, value_parser = ["auto", "fp32", "bf16", "fp8"])]
    pub wire: Option<String>,
    /// parallelism.zero: what of dense parameters a device keeps of its own share alone.
    #[arg(long, default_value_t = 1, value_parser = whole(1, 3))]
    pub zero: u32,
    /// training.precision. Default: bf16 on a GPU, fp32 on processors.
    #[arg(long, value_parser = ["fp32", "tf32", "bf16", "fp16"])]
    pub precision: Option<String>,
    /// training.momentDtype.
    #[arg(long, value_parser = ["fp32", "bf16"])]
    pub moments: Option<String>,
    /// training.gradientDtype.
    #[arg(long, value_parser = ["auto", "bf16", "fp32"])]
    pub gradients: Option<String>,
    /// training.attention.
    #[arg(long, value_parser = ["deterministic", "fastest"])]
    pub attention: Option<String>,
    /// training.recompute.
    #[arg(long, value_parser = ["none", "selective", "experts", "full"])]
    pub recompute: Option<String>,
    /// training.offload.
    #[arg(long, value_parser = ["none", "host"])]
    pub offload: Option<String>,
    /// Threads that compute, on processors; 0 is all of them.
    #[arg(long, default_value_t = 0, value_parser = whole(0, THREADS_MAX))]
    pub threads: u32,
    /// Writes three more steps as a Chrome trace, for Perfetto.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// JSON has the time of every step.
    #[command(flatten)]
    pub written: Written,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Routing {
    Natural,
    Balanced,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Placed {
    Contiguous,
    #[value(name = "byLoad")]
    ByLoad,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceName {
    Cpu,
    Gpu,
}

fn preset_of(name: &str) -> Result<Preset, String> {
    let known = explain::fields().into_iter().find(|field| field.path == "model.preset");
    let known = known.map(|field| field.kind).unwrap_or_default();
    serde_json::from_value(json!(name)).map_err(|_| known)
}
