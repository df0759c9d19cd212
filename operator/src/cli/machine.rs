//! Whether the GPUs of this machine can train a job: asked before a worker is started.

use moe_worker::failure::chain;
use moe_worker::life::preflight::nccl;
use moejob_kernels::memory_bounds::{BoundSource, MemoryBounds};
use moejob_kernels::cuda::{VisibleGpu, given_words, missing_libraries, visible_gpus};
use moejob_manifest::Job;
use moejob_manifest::profile::Backend;
use moejob_manifest::words::several;
use moejob_plan::placement::gib;

/// This machine in some words: its processors and their memory.
pub fn words() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find(|line| line.starts_with("model name"));
    let model = model.and_then(|line| Some(line.split_once(':')?.1.trim().to_string()));
    let bounds = MemoryBounds::of_this_process().bounds;
    let memory = bounds.iter().find(|bound| bound.by == BoundSource::Machine);
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let mut words = vec![several(cores, "core")];
    words.extend(model);
    words.extend(memory.map(|memory| gib(memory.limit)));
    words.join(", ")
}

/// What the machine has: what is missing of driver and libraries, and its GPUs.
struct Machine {
    missing: Vec<(String, String)>,
    gpus: Result<Vec<Shown>, String>,
    /// What variables say of them: ` with CUDA_VISIBLE_DEVICES=3`.
    said: String,
}

struct Shown {
    gpu: VisibleGpu,
    /// What there is to know of how it trains, or why it cannot.
    fit: Result<Option<&'static str>, String>,
}

/// What a person should know of how the GPUs here train `job`, a rank of which needs so many bytes
/// of its device.
///
/// # Errors
/// Why they cannot, in words for a person, with what to do.
pub fn check(job: &Job, needed: impl FnOnce() -> u64) -> Result<Vec<String>, String> {
    if job.profile.backend != Backend::Cuda {
        return Ok(Vec::new());
    }
    let ranks = job.profile.ranks * job.nodes.max;
    let mut missing = missing_libraries();
    if ranks > 1 && let Err(why) = nccl() {
        missing.push(("nccl".to_string(), why));
    }
    let gpus = match missing.is_empty() {
        true => visible_gpus().map_err(|error| chain(&error)),
        false => Ok(Vec::new()),
    };
    let shown = |gpu: VisibleGpu| Shown { fit: gpu.fit().map_err(|error| chain(&error)), gpu };
    let gpus = gpus.map(|gpus| gpus.into_iter().map(shown).collect());
    judge(&Machine { missing, gpus, said: given_words() }, ranks, needed())
}

/// Whether this machine shows a GPU that a job could be trained on.
///
/// # Errors
/// Why there is none.
pub fn gpus_here() -> Result<(), String> {
    if let Some((name, why)) = missing_libraries().into_iter().next() {
        return Err(format!("{name}: {why}"));
    }
    match visible_gpus().map_err(|error| chain(&error))?.len() {
        0 => Err("the driver shows none".to_string()),
        _ => Ok(()),
    }
}

fn judge(machine: &Machine, ranks: u32, needed: u64) -> Result<Vec<String>, String> {
    const DOCTOR: &str = "`moejob doctor` tells what this machine has; nodes: { profile: cpu } \
                          trains without a GPU";
    let refuse = |what: String| Err(format!("spec.nodes.profile: {what}\n  {DOCTOR}"));
    if !machine.missing.is_empty() {
        let lines = machine.missing.iter();
        let lines: Vec<String> = lines.map(|(name, why)| format!("{name}: {why}")).collect();
        return refuse(lines.join("; "));
    }
    let gpus = match &machine.gpus {
        Ok(gpus) => gpus,
        Err(error) => return refuse(error.clone()),
    };
    if gpus.len() < ranks as usize {
        return refuse(format!(
            "the job takes {ranks} of this machine's GPUs, and it shows {}{}",
            gpus.len(),
            machine.said
        ));
    }
    let mut remarks = Vec::new();
    for Shown { gpu, fit } in &gpus[..ranks as usize] {
        match fit {
            Ok(None) => {}
            Ok(Some(remark)) => {
                remarks.push(format!("GPU {} ({}) is {remark}", gpu.ordinal, gpu.name));
            }
            Err(error) => return refuse(error.clone()),
        }
        let (free, whose) = match gpu.free_bytes {
            Some(free) => (free, "are free"),
            None => (gpu.total_bytes, "are there"),
        };
        if needed > free {
            return Err(format!(
                "spec.nodes.profile: a rank needs {} of GPU {} ({}), where {} {whose}\n  end what \
                 else uses it, lower microBatchSize, or set recompute, offload: host, or \
                 momentDtype: bf16",
                gib(needed),
                gpu.ordinal,
                gpu.name,
                gib(free)
            ));
        }
    }
    Ok(remarks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(capability: (i32, i32), free_bytes: Option<u64>) -> VisibleGpu {
        VisibleGpu {
            ordinal: 0,
            name: "NVIDIA H100".to_string(),
            uuid: [0; 16],
            capability,
            total_bytes: 80 << 30,
            free_bytes,
        }
    }

    const OLDER: &str = "newer than sm_90: it takes the kernels of sm_80";

    fn judged(gpus: Vec<(VisibleGpu, bool)>, needed: u64) -> Result<Vec<String>, String> {
        let shown = |(gpu, fits): (VisibleGpu, bool)| {
            let remark = (gpu.capability.0 > 9).then_some(OLDER);
            let fit = if fits { Ok(remark) } else { Err("GPU 0 cannot train".to_string()) };
            Shown { gpu, fit }
        };
        let gpus = Ok(gpus.into_iter().map(shown).collect());
        let said = " with CUDA_VISIBLE_DEVICES=3".to_string();
        let machine = Machine { missing: Vec::new(), gpus, said };
        judge(&machine, 1, needed)
    }

    #[test]
    fn a_machine_that_cannot_train_is_refused_by_name() {
        for free in [Some(70 << 30), None] {
            assert_eq!(judged(vec![(gpu((9, 0), free), true)], 60 << 30), Ok(Vec::new()));
        }
        let told = judged(vec![(gpu((10, 0), None), true)], 60 << 30);
        assert_eq!(told, Ok(vec![format!("GPU 0 (NVIDIA H100) is {OLDER}")]));
        for (gpus, expected) in [
            (Vec::new(), "takes 1 of this machine's GPUs, and it shows 0 with \
                          CUDA_VISIBLE_DEVICES=3"),
            (vec![(gpu((7, 5), None), false)], "spec.nodes.profile: GPU 0 cannot train"),
            (vec![(gpu((9, 0), Some(50 << 30)), true)], "needs 60.0 GiB of GPU 0 (NVIDIA H100), \
                                                         where 50.0 GiB are free"),
        ] {
            let refused = judged(gpus, 60 << 30).expect_err("refused");
            assert!(refused.contains(expected), "{refused}");
        }
        let missing = vec![("nvrtc".to_string(), "install NVRTC".to_string())];
        let bare = Machine { missing, gpus: Ok(Vec::new()), said: String::new() };
        let refused = judge(&bare, 1, 0).expect_err("refused");
        assert!(refused.starts_with("spec.nodes.profile: nvrtc: install NVRTC"));
    }
}
