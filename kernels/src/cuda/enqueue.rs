//! Kernels, made when first asked for, and ops on their way to the device.
//!
//! ```text
//! Text, Unit      a text with host macros, and one with their values: a compilation unit
//! Kernels         kernels and tables that are made of a description
//! Enqueue         one op on its way: kernels of units, addresses, scratch
//! ```

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::hash::{Hash, Hasher};

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::arch::Arch;
use crate::cuda::compile::{Compiler, Module, Source};
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Arena, Function, Launch, Stream};
use crate::cuda::error::CudaError;
use crate::error::LayerError;
use crate::kept::Kept;

/// Loads and stores of several elements at once.
pub(crate) const ELEMENTS: &str = include_str!("elements.cu");
/// Random numbers.
pub(crate) const PHILOX: &str = include_str!("philox.cu");

/// Scratch that ops share, one after the other: partial sums of 264 rows of 16,384 fp32, or the
/// order of a million tokens. An op that needs more makes it grow, which waits for the device.
pub(crate) const SCRATCH_BYTES: usize = 20 << 20;

/// Macros of a text at most.
const MACROS_MAX: usize = 8;

/// A text, and the names of the host macros that shape its kernels.
#[derive(Debug)]
pub(crate) struct Text {
    /// No other text has it.
    pub name: &'static str,
    pub macros: &'static [&'static str],
    /// Macros that are the same in every unit
    pub constants: &'static [(&'static str, usize)],
    pub parts: &'static [&'static str],
}

/// A compilation unit: a text with values of its macros.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unit {
    text: &'static Text,
    values: [usize; MACROS_MAX],
}

impl Text {
    pub(crate) fn unit<const N: usize>(&'static self, own: [usize; N]) -> Unit {
        assert_eq!(N, self.macros.len(), "values of the macros of {}", self.name);
        let mut values = [0; MACROS_MAX];
        values[..N].copy_from_slice(&own);
        Unit { text: self, values }
    }
}

impl PartialEq for Unit {
    fn eq(&self, other: &Unit) -> bool {
        (self.text.name, self.values) == (other.text.name, other.values)
    }
}

impl Eq for Unit {}

impl Hash for Unit {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.text.name, self.values).hash(state);
    }
}

impl Unit {
    pub(crate) fn source(&self, arch: &'static str) -> Source {
        let Text { name, macros, constants, parts } = self.text;
        let own = macros.iter().copied().zip(self.values);
        let all: Vec<_> = constants.iter().copied().chain(own).collect();
        let label = format!("{name} {:?}", &self.values[..macros.len()]);
        Source::new(label, arch, &all, parts)
    }
}

/// Kernels of a description.
pub(crate) trait Kernels: Any + Sized {
    type Desc: PartialEq;

    fn make(compiler: &Compiler, desc: &Self::Desc) -> Result<Self, LayerError>;

    fn desc(&self) -> &Self::Desc;
}

/// Elements in 16 bytes if rows of `dim` are whole chunks, else one.
pub(crate) fn vector(element: DType, dim: usize) -> usize {
    let chunk = 16 / element.size();
    if dim.is_multiple_of(chunk) { chunk } else { 1 }
}

/// Tables, handles and counters that ops keep from call to call.
#[derive(Debug, Default)]
pub(crate) struct KernelCache {
    modules: HashMap<Unit, Module>,
    functions: HashMap<(Unit, &'static str), Function>,
    scratch: Option<Arena>,
    /// How often the scratch has moved: graphs name it.
    moves: u64,
    ticket: Option<Arena>,
    pub(crate) kept: Kept,
}

/// One op on its way to the device.
pub(crate) struct Enqueue<'a> {
    cache: &'a mut KernelCache,
    compiler: &'a Compiler,
    pub stream: &'a Stream,
    arena: &'a Arena,
    /// Ops are recorded: nothing may be made for them.
    captured: bool,
}

impl CudaDevice {
    /// Does `op`, unless one failed before it.
    pub(crate) fn enqueue(&mut self, op: impl FnOnce(&mut Enqueue<'_>) -> Result<(), CudaError>) {
        let mut cache = std::mem::take(&mut *self.cache);
        let (moves, captured) = (cache.moves, self.graphs.open);
        self.attempt(|| {
            let (compiler, stream, arena) = (&self.compiler, &self.stream, &self.arena);
            Ok(op(&mut Enqueue { cache: &mut cache, compiler, stream, arena, captured })?)
        });
        if cache.moves != moves {
            self.forget_captured();
        }
        *self.cache = cache;
    }

    /// The kernels of `desc`, made if they are not there.
    pub(crate) fn kernels<K: Kernels>(&mut self, desc: &K::Desc) -> Result<&mut K, LayerError> {
        let all = self.cache.kept.of::<Vec<K>>();
        let at = match all.iter().position(|kernels| kernels.desc() == desc) {
            Some(at) => at,
            None => {
                self.compiler.gpu().make_current()?;
                all.push(K::make(&self.compiler, desc)?);
                all.len() - 1
            }
        };
        Ok(&mut all[at])
    }

    /// Kernels of any description, if there are some.
    pub(crate) fn first<K: Kernels>(&mut self) -> Option<&K> {
        self.cache.kept.of::<Vec<K>>().first()
    }

    /// Does `op` by the kernels of `desc`, unless one failed before it.
    pub(crate) fn on<K: Kernels>(
        &mut self,
        desc: &K::Desc,
        op: impl FnOnce(&mut K, &Stream, &Arena) -> Result<(), CudaError>,
    ) {
        if let Err(error) = self.kernels::<K>(desc) {
            return self.attempt(|| Err(error));
        }
        let mut all = std::mem::take(self.cache.kept.of::<Vec<K>>());
        let found = all.iter_mut().find(|kernels| kernels.desc() == desc);
        let kernels = found.expect("kernels are there once they are made");
        self.attempt(|| Ok(op(kernels, &self.stream, &self.arena)?));
        *self.cache.kept.of() = all;
    }
}

impl Enqueue<'_> {
    pub(crate) fn at(&self, buffer: Buffer) -> u64 {
        self.arena.address(buffer)
    }

    /// The address of a buffer whose kind and length were promised.
    pub(crate) fn of(&self, buffer: Buffer, dtype: DType, len: usize) -> u64 {
        assert_eq!((buffer.dtype(), buffer.len()), (dtype, len), "{buffer:?}");
        self.at(buffer)
    }

    /// The address of a vector of elements or of fp32, and whether it is of fp32.
    pub(crate) fn either(&self, buffer: Buffer, element: DType, len: usize) -> (u64, i32) {
        let dtype = buffer.dtype();
        assert!(dtype == element || dtype == DType::F32, "{buffer:?} beside {element:?}");
        assert_eq!(buffer.len(), len, "{buffer:?}");
        (self.at(buffer), i32::from(dtype == DType::F32))
    }

    /// The op makes something that waits for the device, or takes bytes from the host.
    fn makes(&self, what: &str) -> Result<(), CudaError> {
        match self.captured {
            true => Err(CudaError::NotCaptured { why: format!("{what} would have to be made") }),
            false => Ok(()),
        }
    }

    fn function(&mut self, unit: Unit, name: &'static str) -> Result<&Function, CudaError> {
        if !self.cache.functions.contains_key(&(unit, name)) {
            self.makes(name)?;
            if !self.cache.modules.contains_key(&unit) {
                let arch = Arch::of(self.compiler.gpu())?.target();
                let loaded = self.compiler.load(&[unit.source(arch)], &|_, _| ())?;
                self.cache.modules.extend(loaded.into_iter().map(|module| (unit, module)));
            }
            let function = self.cache.modules[&unit].function(name)?;
            self.cache.functions.insert((unit, name), function);
        }
        Ok(&self.cache.functions[&(unit, name)])
    }

    /// # Safety
    /// Those of [`Function::launch`].
    pub(crate) unsafe fn launch(
        &mut self,
        (unit, name): (Unit, &'static str),
        launch: Launch,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let stream = self.stream;
        let function = self.function(unit, name)?;
        // SAFETY: the caller's promise.
        unsafe { function.launch(stream, launch, parameters) }
    }

    /// Scratch for what `plan` has; good until the next op asks.
    pub(crate) fn scratch(&mut self, plan: &ArenaPlan) -> Result<Scratch, CudaError> {
        let held = self.cache.scratch.as_ref().map_or(0, Arena::bytes);
        if held < plan.bytes() {
            self.makes("more scratch")?;
            self.cache.moves += u64::from(held > 0);
            self.cache.scratch = None;
            let bytes = plan.bytes().max(SCRATCH_BYTES);
            self.cache.scratch = Some(Arena::new(self.compiler.gpu(), bytes)?);
        }
        let mut all = ArenaPlan::new();
        let base = all.alloc(DType::U8, plan.bytes());
        Ok(Scratch(self.cache.scratch.as_ref().map_or(0, |arena| arena.address(base))))
    }

    /// Sets every byte of a range of the scratch to zero.
    pub(crate) fn zero_scratch(&self, range: Buffer) -> Result<(), CudaError> {
        match &self.cache.scratch {
            Some(arena) => arena.fill_bytes(self.stream, range, 0),
            None => Ok(()),
        }
    }

    /// The address of a word that is zero between launches.
    pub(crate) fn ticket(&mut self) -> Result<u64, CudaError> {
        let mut plan = ArenaPlan::new();
        let word = plan.alloc(DType::U32, 1);
        if self.cache.ticket.is_none() {
            self.makes("a ticket")?;
            let arena = Arena::new(self.compiler.gpu(), plan.bytes())?;
            arena.fill_bytes(self.stream, word, 0)?;
            self.cache.ticket = Some(arena);
        }
        Ok(self.cache.ticket.as_ref().map_or(0, |arena| arena.address(word)))
    }

    /// The one `T` that ops keep on this device.
    pub(crate) fn kept<T: Any + Default>(&mut self) -> &mut T {
        self.cache.kept.of()
    }

    /// Memory of an op's own.
    pub(crate) fn memory(&self, what: &str, bytes: usize) -> Result<Arena, CudaError> {
        self.makes(what)?;
        Arena::new(self.compiler.gpu(), bytes)
    }
}

/// Addresses in the scratch of one op.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scratch(u64);

impl Scratch {
    /// The plan has no such buffer as the scratch was asked for.
    pub(crate) fn at(self, buffer: Buffer) -> u64 {
        self.0 + buffer.offset() as u64
    }
}

/// Whether 16-byte accesses to all of these are aligned.
pub(crate) fn all_whole(addresses: &[u64]) -> i32 {
    i32::from(addresses.iter().all(|address| address.is_multiple_of(16)))
}
