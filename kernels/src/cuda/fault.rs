//! Kernels that break a GPU as programs and hardware do, for tests of what happens then.

use crate::buffer::DType;
use crate::cuda::arch::Arch;
use crate::cuda::compile::{Compiler, Source, element_macro};
use crate::cuda::driver::{Launch, Stream, parameters};
use crate::cuda::error::CudaError;

/// How a GPU fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A kernel writes where nothing is: every later call of the process fails.
    IllegalAddress,
    /// A kernel does not end.
    EndlessKernel,
}

impl Fault {
    pub(crate) fn enqueue(self, compiler: &Compiler, stream: &Stream) -> Result<(), CudaError> {
        let target = Arch::of(compiler.gpu())?.target();
        // What kernels share asks for one.
        let half = ("ELEMENT", element_macro(DType::Bf16));
        let source = Source::new("faults".into(), target, &[half], &[include_str!("fault.cu")]);
        let modules = compiler.load(&[source], &|_, _| ())?;
        let (name, parameter) = match self {
            Fault::IllegalAddress => ("touch_nowhere", 16_u64),
            // Turns are even.
            Fault::EndlessKernel => ("never_ends", 1_u64),
        };
        let function = modules[0].function(name)?;
        // SAFETY: the parameter is the kernel's one. What it does to the device is what is wanted.
        unsafe { function.launch(stream, Launch::new(1, 1), parameters![parameter]) }
    }
}
