//! The device of whoever computes with a model and does not train it: `moejob eval` and `generate`.

use moejob_kernels::{Device, KernelError};
use moejob_protocol::config::{
    AdamW, Backend, Compute, Precision, Recompute, Schedule, TrainingConfig,
};

/// A device, and the numbers that it computes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Computer {
    /// So many threads, in fp32 or fp64.
    Processors { threads: usize, precision: Precision },
    /// The first GPU that the driver shows.
    Gpu { precision: Precision },
}

impl Computer {
    pub(crate) fn device(self) -> Result<Device, KernelError> {
        match self {
            Computer::Processors { threads, .. } => Device::cpu(threads, 0),
            Computer::Gpu { .. } => Device::cuda(0, 0),
        }
    }

    pub(crate) fn is_gpu(self) -> bool {
        matches!(self, Computer::Gpu { .. })
    }

    /// A training from which memory is planned; nothing is trained.
    pub(crate) fn planned(self, sequence_length: u32, batch: u32) -> TrainingConfig {
        // Layers share the memory of one. On processors what nobody touches takes none.
        let (backend, precision, recompute) = match self {
            Computer::Processors { precision, .. } => (Backend::Cpu, precision, Recompute::None),
            Computer::Gpu { precision } => (Backend::Cuda, precision, Recompute::Full),
        };
        TrainingConfig {
            steps: 1,
            global_batch_size: batch,
            micro_batch_size: batch,
            sequence_length,
            precision,
            adamw: AdamW {
                learning_rate: 0.0,
                beta1: 0.9,
                beta2: 0.95,
                epsilon: 1e-8,
                weight_decay: 0.0,
            },
            schedule: Schedule::Constant { warmup_steps: 0 },
            max_grad_norm: 0.0,
            seed: 0,
            recompute,
            compute: Compute { backend, ..Compute::default() },
        }
    }
}
