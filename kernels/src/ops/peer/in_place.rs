//! Tokens of an expert group, and sums of them, read where they lie in the memory that ranks share
//! ([`PeerLinks::share`]): no rank lays rows into its window.
//!
//! A rank reads in one kernel alone what another one has there. What was read in a kernel may be
//! written again by ops behind the next kernel of the links: that one waits until all have begun
//! it, and so have ended the one before.

use crate::cuda::driver::{Arena, Function, Launch, Stream, parameters};
use crate::cuda::error::CudaError;
use crate::ops::peer::cuda::{LinksData, PEERS_MAX, PeerLinks, READS};
use crate::ops::peer::group::{GROUP_THREADS, NeedData};
use crate::ops::peer::op::{GatherRows, ScatterRows};

/// Threads of a block that sums what two positions have.
pub(crate) const PAIR_THREADS: u32 = 1024;

/// `GatherInPlace` of peer_in_place.cu
#[repr(C)]
#[derive(Clone, Copy)]
struct GatherData {
    need: NeedData,
    rows: u64,
    words: [u64; 2],
    reads: [u64; READS],
    bytes: u32,
    lanes: u32,
    step: u32,
}

/// `ScatterInPlace` of peer_in_place.cu
#[repr(C)]
#[derive(Clone, Copy)]
struct ScatterData {
    need: NeedData,
    rows: u64,
    slots: u64,
    onto: [u64; 2],
    reads: [u64; READS],
    bytes: u32,
    lanes: u32,
    step: u32,
}

/// Those of peer_in_place.cu
#[derive(Debug)]
pub(crate) struct InPlaceKernels {
    pub gather: Function,
    /// Of two positions at most, and of more, by kind of rows: f32, bf16, f16.
    pub scatter: [[Function; 3]; 2],
}

impl InPlaceKernels {
    pub fn load(function: impl Fn(&str) -> Result<Function, CudaError>) -> Result<Self, CudaError> {
        let of = |positions: &str| -> Result<[Function; 3], CudaError> {
            let named = |kind| function(&format!("scatter_{positions}_{kind}"));
            Ok([named("f32")?, named("bf16")?, named("f16")?])
        };
        let scatter = [of("two")?, of("all")?];
        Ok(InPlaceKernels { gather: function("gather_in_place")?, scatter })
    }

    /// Launches each once, of nobody's tokens.
    pub fn warm_up(
        &self,
        stream: &Stream,
        links: LinksData,
        need: NeedData,
    ) -> Result<(), CudaError> {
        let ([rows, slots], reads) = ([0; 2], [0; READS]);
        let (words, onto, bytes, lanes, step) = ([0; 2], [0; 2], 16, 4, 0);
        let gather = GatherData { need, rows, words, reads, bytes, lanes, step };
        let scatter = ScatterData { need, rows, slots, onto, reads, bytes, lanes, step };
        let once = Launch::new(1, 32);
        // SAFETY: the parameters are those of the kernels; without tokens they touch mail alone.
        unsafe {
            self.gather.launch(stream, once, parameters![links, gather])?;
            self.scatter.iter().flatten().try_for_each(|kernel| {
                kernel.launch(stream, once, parameters![links, scatter])
            })
        }
    }
}

impl PeerLinks {
    /// [`PeerLinks::gather_rows`] of rows of `bytes`, `lanes` threads for each, with words at these
    /// addresses. `need` is of one node.
    pub(crate) fn gather_in_place(
        &self,
        (stream, arena): (&Stream, &Arena),
        op: &GatherRows,
        (need, words, reads): (NeedData, [u64; 2], [u64; READS]),
        (bytes, lanes): (u32, u32),
    ) -> Result<(), CudaError> {
        let (rows, step) = (arena.address(op.rows), op.step);
        let data = GatherData { need, rows, words, reads, bytes, lanes, step };
        let (links, launch) = (self.data(), Launch::new(op.blocks, GROUP_THREADS));
        // SAFETY: the parameters are those of `gather_in_place`; buffers were checked.
        unsafe { self.in_place.gather.launch(stream, launch, parameters![links, data]) }
    }

    /// [`PeerLinks::scatter_rows`] likewise, of rows of `kind`.
    pub(crate) fn scatter_in_place(
        &self,
        (stream, arena): (&Stream, &Arena),
        op: &ScatterRows,
        (need, (slots, onto), reads, kind): (NeedData, (u64, [u64; 2]), [u64; READS], usize),
        (bytes, lanes): (u32, u32),
    ) -> Result<(), CudaError> {
        let (rows, step) = (arena.address(op.rows), op.step);
        let data = ScatterData { need, rows, slots, onto, reads, bytes, lanes, step };
        let many = self.desc().positions > 2;
        let kernels = &self.in_place.scatter[usize::from(many)];
        let threads = if many { GROUP_THREADS } else { PAIR_THREADS };
        let (links, launch) = (self.data(), Launch::new(op.blocks, threads));
        // SAFETY: the parameters are those of `scatter_.._..`; buffers were checked.
        unsafe { kernels[kind].launch(stream, launch, parameters![links, data]) }
    }
}

const _: () = assert!(PEERS_MAX <= 32, "positions are bits of a word");
