//! Inputs and ceilings for benchmarks and tests on the device.

use crate::buffer::{Buffer, DType};
use crate::cuda::arch::Arch;
use crate::cuda::compile::{Compiler, Source, element_macro};
use crate::cuda::driver::{Arena, Function, Launch, Stream, parameters};
use crate::cuda::error::CudaError;

/// Blocks of the strided loops: eight for each multiprocessor of an H200.
const BLOCKS: usize = 1056;

#[derive(Clone, Debug)]
pub struct Measure {
    fill: Function,
    copy: Function,
    element: DType,
}

impl Measure {
    /// For buffers of `element`, of 16 bits.
    pub fn new(compiler: &Compiler, element: DType) -> Result<Measure, CudaError> {
        let target = Arch::of(compiler.gpu())?.target();
        let source = Source::new(
            format!("measure {element:?}"),
            target,
            &[("ELEMENT", element_macro(element))],
            &[include_str!("measure.cu")],
        );
        let modules = compiler.load(&[source], &|_, _| ())?;
        let function = |name| modules[0].function(name);
        Ok(Measure { fill: function("fill_random")?, copy: function("copy")?, element })
    }

    /// Fills a buffer of elements with roughly normal numbers of standard deviation `scale`. With
    /// `ones_every` above 0 the first of each so many elements is 1.
    pub fn fill_random(
        &self,
        stream: &Stream,
        arena: &Arena,
        buffer: Buffer,
        (seed, scale, ones_every): (u32, f32, u32),
    ) -> Result<(), CudaError> {
        assert_eq!(buffer.dtype(), self.element, "{buffer:?}");
        let (address, len) = (arena.address(buffer), buffer.len() as u64);
        // SAFETY: the parameters are those of `fill_random`, the range was checked.
        unsafe {
            let parameters = parameters![address, len, seed, scale, ones_every];
            self.fill.launch(stream, Launch::new(BLOCKS, 256), parameters)
        }
    }

    /// Copies as much of `from` to `to` as both hold, by the multiprocessors.
    pub fn copy(
        &self,
        stream: &Stream,
        arena: &Arena,
        from: Buffer,
        to: Buffer,
    ) -> Result<usize, CudaError> {
        assert!(!from.overlaps(&to), "{from:?} {to:?}");
        let len = (from.bytes().min(to.bytes()) / 16) as u64;
        let (a, b) = (arena.address(from), arena.address(to));
        // SAFETY: the parameters are those of `copy`, both ranges were checked.
        unsafe { self.copy.launch(stream, Launch::new(2 * BLOCKS, 512), parameters![a, b, len])? };
        Ok(len as usize * 16)
    }
}
