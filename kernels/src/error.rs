//! Why a device, or what it is asked for, cannot be made.

use moejob_protocol::kernel_sizes::SizeRefusal;

use crate::buffer::DType;
use crate::cpu::isa::Isa;
use crate::cuda::error::CudaError;
use crate::types::Output;

/// Why a device could not be made.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error("a CPU device needs between 1 and {max} threads, not {found}")]
    Threads { found: usize, max: usize },
    #[error("reserving an arena of {bytes} bytes of address space")]
    Arena { bytes: usize, source: rustix::io::Errno },
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Layer(#[from] LayerError),
    #[error("this processor has no {isa:?}")]
    Isa { isa: Isa },
}

/// The memory that there is too little of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// The GPU's.
    Device,
    /// The host's, for what is offloaded.
    Host,
}

impl KernelError {
    /// The GPU's own error, if it is one.
    pub fn of_gpu(&self) -> Option<&CudaError> {
        match self {
            KernelError::Cuda(error) => Some(error),
            KernelError::Layer(error) => error.of_gpu(),
            _ => None,
        }
    }

    /// The memory that has no room, if that is the error.
    pub fn lack(&self) -> Option<Lack> {
        match self.of_gpu()? {
            CudaError::HostMemory { .. } => Some(Lack::Host),
            error => error.is_room().then_some(Lack::Device),
        }
    }

    /// The GPU itself is not there, or is none that engines take.
    pub fn is_device(&self) -> bool {
        matches!(self.of_gpu(), Some(CudaError::NoGpu { .. } | CudaError::NotGiven(_)))
    }

    /// See [`CudaError::is_of_process`].
    pub fn is_of_process(&self) -> bool {
        self.of_gpu().is_some_and(CudaError::is_of_process)
    }
}

/// Why a layer could not be made.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    #[error("the layer's shape")]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl LayerError {
    /// The GPU's own error, if it is one.
    pub fn of_gpu(&self) -> Option<&CudaError> {
        match self {
            LayerError::Refused(_) => None,
            LayerError::Cuda(error) => Some(error),
        }
    }
}

/// Why the kernels do not take a shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("{name} is {found}; it must be between {min} and {max}")]
    Range { name: &'static str, found: usize, min: usize, max: usize },
    #[error("{name} is {found}; the kernels take multiples of {multiple} only")]
    Unaligned { name: &'static str, found: usize, multiple: usize },
    #[error("{found} tokens are no whole number for each of {multiple} segments")]
    Segments { found: usize, multiple: usize },
    /// By the list that whoever plans a job reads, too.
    #[error(transparent)]
    Size(#[from] SizeRefusal),
    #[error("{kept} of {count} groups of {experts} experts: {reason}")]
    Groups { count: usize, kept: usize, experts: usize, reason: &'static str },
    #[error("{found} slices of each expert, and one rank has all of them; it computes whole ones")]
    Slices { found: usize },
    #[error("elements of {found:?}; {devices}")]
    Element { found: DType, devices: &'static str },
    #[error("weight gradients as {found:?} of {element:?}: {reason}")]
    Output { found: Output, element: DType, reason: &'static str },
    #[error("{found} tokens are no whole number for each of {sources} ranks")]
    Sources { found: usize, sources: usize },
}

pub(crate) fn range(
    name: &'static str,
    found: usize,
    min: usize,
    max: usize,
) -> Result<(), Refusal> {
    match (min..=max).contains(&found) {
        true => Ok(()),
        false => Err(Refusal::Range { name, found, min, max }),
    }
}

/// The first of the sizes that kernels do not take.
pub(crate) fn all_taken(refused: Vec<SizeRefusal>) -> Result<(), Refusal> {
    refused.into_iter().next().map_or(Ok(()), |first| Err(Refusal::Size(first)))
}
