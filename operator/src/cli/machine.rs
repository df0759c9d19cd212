//! Whether the GPUs of this machine can train a job: asked before a worker is started.

use moejob_kernels::cuda::{VisibleGpu, missing_libraries, visible_gpus};
use moejob_plan::Job;
use moejob_plan::placement::gib;
use moejob_plan::profile::Backend;

/// What the machine has: what is missing of driver and libraries, and its GPUs.
struct Machine {
    missing: Vec<(String, String)>,
    gpus: Result<Vec<VisibleGpu>, String>,
    /// `CUDA_VISIBLE_DEVICES`
    chosen: Option<String>,
}

/// Why the GPUs here cannot train `job`, a rank of which needs so many bytes of its device.
///
/// # Errors
/// In words for a person, with what to do.
pub fn check(job: &Job, needed: impl FnOnce() -> u64) -> Result<(), String> {
    if job.profile.backend != Backend::Cuda {
        return Ok(());
    }
    let missing = missing_libraries();
    let gpus = match missing.is_empty() {
        true => visible_gpus().map_err(|error| moe_worker::failure::chain(&error)),
        false => Ok(Vec::new()),
    };
    let chosen = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    judge(&Machine { missing, gpus, chosen }, job.profile.ranks * job.nodes.max, needed())
}

fn judge(machine: &Machine, ranks: u32, needed: u64) -> Result<(), String> {
    const DOCTOR: &str = "`moejob doctor` tells what this machine has; nodes: { profile: cpu } \
                          trains without a GPU";
    let refuse = |what: String| Err(format!("spec.nodes.profile: {what}\n  {DOCTOR}"));
    if !machine.missing.is_empty() {
        let lines = machine.missing.iter();
        let lines: Vec<String> =
            lines.map(|(name, advice)| format!("{name} is missing: {advice}")).collect();
        return refuse(lines.join("; "));
    }
    let gpus = match &machine.gpus {
        Ok(gpus) => gpus,
        Err(error) => return refuse(error.clone()),
    };
    if gpus.len() < ranks as usize {
        let shown = match &machine.chosen {
            Some(chosen) => format!(" with CUDA_VISIBLE_DEVICES={chosen}"),
            None => String::new(),
        };
        return refuse(format!(
            "the job takes {ranks} of this machine's GPUs, and it shows {}{shown}",
            gpus.len()
        ));
    }
    for gpu in &gpus[..ranks as usize] {
        let (major, minor) = gpu.capability;
        if major < 8 {
            return refuse(format!(
                "GPU {} ({}) has compute capability {major}.{minor}; 8.0 or newer is needed",
                gpu.ordinal, gpu.name
            ));
        }
        let (free, whose) = match gpu.free_bytes {
            Some(free) => (free, "are free"),
            None => (gpu.total_bytes, "are there"),
        };
        if needed > free {
            return Err(format!(
                "spec.nodes.profile: a rank needs {} of GPU {} ({}), where {} {whose}\n  end what \
                 else uses it, lower microBatchSize, or set recompute, or momentDtype: bf16",
                gib(needed),
                gpu.ordinal,
                gpu.name,
                gib(free)
            ));
        }
    }
    Ok(())
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

    fn judged(gpus: Vec<VisibleGpu>, needed: u64) -> Result<(), String> {
        let machine =
            Machine { missing: Vec::new(), gpus: Ok(gpus), chosen: Some("3".to_string()) };
        judge(&machine, 1, needed)
    }

    #[test]
    fn a_machine_that_cannot_train_is_refused_by_name() {
        assert_eq!(judged(vec![gpu((9, 0), Some(70 << 30))], 60 << 30), Ok(()));
        assert_eq!(judged(vec![gpu((9, 0), None)], 60 << 30), Ok(()));
        for (gpus, expected) in [
            (Vec::new(), "takes 1 of this machine's GPUs, and it shows 0 with \
                          CUDA_VISIBLE_DEVICES=3"),
            (vec![gpu((7, 5), None)], "has compute capability 7.5; 8.0 or newer is needed"),
            (vec![gpu((9, 0), Some(50 << 30))], "needs 60.0 GiB of GPU 0 (NVIDIA H100), where \
                                                 50.0 GiB are free"),
        ] {
            let refused = judged(gpus, 60 << 30).expect_err("refused");
            assert!(refused.contains(expected), "{refused}");
        }
        let missing = vec![("nvrtc".to_string(), "install NVRTC".to_string())];
        let bare = Machine { missing, gpus: Ok(Vec::new()), chosen: None };
        let refused = judge(&bare, 1, 0).expect_err("refused");
        assert!(refused.starts_with("spec.nodes.profile: nvrtc is missing: install NVRTC"));
    }
}
