//! The CPU machine: memory, threads, numbers and products. It knows no op.
//!
//! ```text
//! arena.rs   memory, views that cannot alias
//! isa.rs     instruction sets; exec.rs, pool.rs   threads
//! float.rs   f32 and f64, elementary functions      lanes.rs  sums over rows
//! gemm/      products, of which all the rest is made
//! ```
//! Results are bit-identical on every x86-64 machine, for any number of threads and any batching
//! of rows: a product is one chain of fused multiply-adds per element and chunk of k, a sum over a
//! row runs in 16 fixed lanes and a fixed tree, a sum over rows in fixed chunks, and threads only
//! ever divide outputs.

pub(crate) mod arena;
pub(crate) mod activation;
pub(crate) mod exec;
pub(crate) mod float;
pub(crate) mod gemm;
pub(crate) mod isa;
pub(crate) mod lanes;
pub(crate) mod pool;

use arena::{Arena, Views};
use exec::Exec;
use isa::Isa;

use crate::buffer::{Buffer, DType, Element};
use crate::error::KernelError;
use crate::kept::Kept;
use crate::traffic::TrafficCounts;

/// Rows that one job computes: enough to be worth handing over, few enough to spread.
pub(crate) const ROWS_PER_JOB: usize = 32;

/// Elements that one job of an elementwise op computes.
pub(crate) const ELEMENTS_PER_JOB: usize = 1 << 14;

/// The memory and the threads of one rank on a CPU.
#[derive(Debug)]
pub struct CpuDevice {
    pub(crate) arena: Arena,
    pub(crate) exec: Exec,
    /// Tables that ops keep from call to call
    pub(crate) kept: Kept,
    pub(crate) traffic: TrafficCounts,
}

impl CpuDevice {
    /// A device that computes with `isa`; an error if this machine lacks it.
    pub fn new(threads: usize, arena_bytes: usize, isa: Isa) -> Result<CpuDevice, KernelError> {
        let exec = Exec::new(threads, isa)?;
        let (arena, kept) = (Arena::new(arena_bytes)?, Kept::default());
        let traffic = TrafficCounts::default();
        Ok(CpuDevice { arena, exec, kept, traffic })
    }

    pub(crate) fn reserve(
        &mut self,
        arena_bytes: usize,
        host_bytes: usize,
    ) -> Result<(), KernelError> {
        self.arena = Arena::with_host(arena_bytes, host_bytes)?;
        Ok(())
    }

    pub fn threads(&self) -> usize {
        self.exec.threads
    }

    pub fn isa(&self) -> Isa {
        self.exec.isa
    }

    /// The memory of `buffer`.
    pub fn slice<E: Element>(&self, buffer: Buffer) -> &[E] {
        self.arena.slice(buffer)
    }

    /// The memory of `buffer`, to write to.
    pub fn slice_mut<E: Element>(&mut self, buffer: Buffer) -> &mut [E] {
        self.arena.slice_mut(buffer)
    }

    /// Bytes of the arena that are sent, and others that are received into, at once; none of the
    /// latter overlaps any other.
    pub fn transfer(
        &mut self,
        sends: &[Buffer],
        receives: &[Buffer],
    ) -> (Vec<&[u8]>, Vec<&mut [u8]>) {
        let mut views = self.arena.views();
        let bytes = |buffer: &Buffer| buffer.reinterpret(DType::U8);
        let sends = sends.iter().map(|buffer| views.read(bytes(buffer))).collect();
        let receives = receives.iter().map(|buffer| views.write(bytes(buffer))).collect();
        (sends, receives)
    }

    pub(crate) fn copy(&mut self, from: Buffer, to: Buffer) {
        let mut views = self.arena.views();
        let from: &[u8] = views.read(from.reinterpret(DType::U8));
        let to: &mut [u8] = views.write(to.reinterpret(DType::U8));
        to.copy_from_slice(from);
    }

    pub(crate) fn fill_zero(&mut self, buffer: Buffer) {
        self.slice_mut::<u8>(buffer.reinterpret(DType::U8)).fill(0);
    }

    /// Views of the arena for one op, and what computes it.
    pub(crate) fn split(&mut self) -> (Views<'_>, &Exec) {
        (self.arena.views(), &self.exec)
    }
}
