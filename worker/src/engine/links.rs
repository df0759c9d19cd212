//! What moves between the devices of an attempt, as verbs over device buffers.
//!
//! ```text
//! reduce_scatter: a bucket's sums -> the holder of each chunk; all_gather: chunks -> all holders
//! all_reduce: the sum of a vector over all ranks
//! gather_tokens, scatter_tokens: of an expert group on GPUs, through windows where it has some,
//!           and along rails where it lies on several nodes and is to
//! .._beside:  the same beside the ops that follow, with a mark for who needs the result
//! ```
//! A verb is enqueued like an op and returns nothing: how many rows travel stands in device memory.
//! The first failure is kept, later verbs do nothing, and [`Links::check`] tells it. What was
//! computed since then says nothing.

mod by_need;
mod carried;
mod files;
mod host;
mod ledger;
mod meet;
mod nccl;
mod packing;
mod peer;
mod shared;
mod tokens;
mod verbs;
mod wanted;

use crate::engine::beside::Overlap;
use crate::failure::chain;
use crate::gang::comm::{Comm, CommError};
use carried::Carried;
use host::Host;
use ledger::Ledger;
use moejob_kernels::cuda::CudaError;
use moejob_kernels::{Buffer, CpuDevice, Device};
use moejob_protocol::links::Built;
use nccl::Nccl;
use peer::Windows;
use shared::Chunks;
use std::sync::Arc;

pub use nccl::NoLinks;
pub(crate) use nccl::entry;
pub(crate) use by_need::{Back, Hop, Journey, OwnTokens, Route};
pub(crate) use files::{Desk, Seat};
#[cfg(test)]
pub(crate) use ledger::OfVerb;
pub(crate) use ledger::{Sent, WAITED, WindowRows};
pub(crate) use peer::{Near, PATIENCE};
pub(crate) use shared::Shared;
pub(crate) use packing::{Packed, Rows};
pub(crate) use wanted::blocks_for;
pub use wanted::{ENV_PEER, Use as PeerUse};
pub(crate) use wanted::window_wanted;

/// The own rank's way to all others.
#[derive(Debug)]
pub struct Links {
    way: Way,
    /// For what goes through the host.
    comm: Comm,
    failure: Option<CommError>,
    beside: bool,
    /// By which tokens of the own expert group travel; none: as everything else.
    windows: Option<Arc<Windows>>,
    /// The step that is enqueued, for the record of a failure.
    step: u32,
    ledger: Ledger,
}

/// What travels beside the ops of a step.
#[derive(Clone, Debug)]
pub(crate) struct Aside {
    /// The sets of ranks between which it does, the same on every rank in the same order.
    pub groups: Vec<Vec<u32>>,
    /// Marks, by number.
    pub marks: usize,
    pub overlap: Overlap,
}

/// Which ranks have what in common, the same on every rank but for `parcels`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Groups {
    /// The sets of ranks that share buffers, in one order.
    pub shared: Vec<Vec<u32>>,
    /// Those with which this rank exchanges parcels in a step.
    pub parcels: Vec<u32>,
}

/// How device buffers travel.
#[derive(Debug)]
enum Way {
    /// Between processors: through the gang, at once.
    Host(Host),
    /// Between GPUs: enqueued on the device.
    Nccl(Box<Nccl>),
    /// Between GPUs: through the gang, at once.
    Carried(Carried),
}

/// Why a device could not be left.
#[derive(Clone, Debug)]
pub struct NotLeft {
    pub words: String,
    /// Its context is broken. That is nobody else's fault.
    pub broken: bool,
}

impl NotLeft {
    fn waits(error: &dyn std::error::Error) -> NotLeft {
        NotLeft { words: chain(error), broken: false }
    }

    fn broken(error: &CudaError) -> NotLeft {
        let broken = !matches!(error, CudaError::GivenUp { .. } | CudaError::Late { .. });
        NotLeft { words: chain(error), broken }
    }
}

/// Buffers that go to, or come from, one rank, in order.
pub type Parcel = (u32, Vec<Buffer>);

impl Links {
    pub fn new(comm: Comm) -> Links {
        Links::by(Way::Host(Host::default()), comm, true)
    }

    fn by(way: Way, comm: Comm, beside: bool) -> Links {
        let (failure, windows, ledger) = (None, None, Ledger::default());
        Links { way, comm, failure, beside, windows, step: 0, ledger }
    }

    /// Between GPUs through the hosts' memory, which is slow and needs no NCCL: for tests of
    /// several ranks on one GPU.
    pub fn carried(comm: Comm) -> Links {
        Links::by(Way::Carried(Carried::default()), comm, false)
    }

    /// Tokens of the own expert group travel through windows, or between processors, which do all
    /// in the order of GPUs.
    pub(crate) fn have_windows(&self) -> bool {
        self.windows.is_some() || matches!(self.way, Way::Host(_))
    }

    /// The same links, by which buckets travel between the parts of a step and not within them.
    pub fn one_by_one(self) -> Links {
        Links { beside: false, ..self }
    }

    /// Whether buckets leave as soon as they are complete. Between processors a verb is done when
    /// it returns, but in the same order as between GPUs.
    pub(crate) fn work_beside(&self) -> bool {
        self.beside
    }

    /// Between the GPUs of all ranks, of which `device` is this one's; `aside` is what travels
    /// beside the ops, or nothing does; `near` is the own expert group, if it has several ranks.
    /// All ranks call it alike, and then [`Links::meet`].
    ///
    /// # Errors
    /// NCCL is missing or differs between ranks, or a peer is lost.
    pub(crate) fn between_gpus(
        mut comm: Comm,
        device: &mut Device,
        groups: &Groups,
        aside: Option<&Aside>,
        near: Option<&Near>,
    ) -> Result<Links, NoLinks> {
        if comm.world() == 1 {
            return Ok(Links::by(Way::Host(Host::default()), comm, aside.is_some()));
        }
        // Before NCCL has kernels that loading others would wait for.
        let windows = near.map(|near| Windows::open(&mut comm, device, near)).transpose()?;
        let nccl = Nccl::begin(&mut comm, device, groups, aside)?;
        let links = Links::by(Way::Nccl(Box::new(nccl)), comm, aside.is_some());
        Ok(Links { windows: windows.flatten(), ..links })
    }

    /// Waits until the GPUs are connected, before the first verb.
    ///
    /// # Errors
    /// NCCL does not connect them, or a peer is lost.
    pub fn meet(&mut self) -> Result<(), NoLinks> {
        match &mut self.way {
            Way::Host(_) | Way::Carried(_) => Ok(()),
            Way::Nccl(nccl) => nccl.meet(),
        }
    }

    /// What NCCL says it has built for this rank, once it has; told once.
    pub fn take_built(&mut self) -> Option<Built> {
        match &mut self.way {
            Way::Host(_) | Way::Carried(_) => None,
            Way::Nccl(nccl) => nccl.take_built(),
        }
    }

    /// The attempt is over: what is enqueued for peers ends, whether they still come or not.
    ///
    /// # Errors
    /// It does not end: only the end of this process frees the device.
    pub fn leave(&mut self, device: &Device) -> Result<(), NotLeft> {
        self.windows.iter().for_each(|windows| windows.stop());
        match &mut self.way {
            Way::Host(_) => {}
            Way::Nccl(nccl) => nccl.leave(device)?,
            // What waited for windows ends; there is nothing else that waits.
            Way::Carried(_) => device.finish().map_err(|error| NotLeft::waits(&error))?,
        }
        // Those that a kernel may still use stay until the process ends.
        let is_idle = device.as_cuda().is_some_and(|cuda| cuda.is_idle().unwrap_or(false));
        if let Some(windows) = self.windows.take().filter(|_| is_idle) {
            windows.release();
        }
        Ok(())
    }

    /// No other rank.
    pub fn solo() -> Links {
        Links::new(Comm::solo(1))
    }

    /// For what the ranks tell each other beside the steps.
    pub fn comm(&mut self) -> &mut Comm {
        &mut self.comm
    }

    pub fn world(&self) -> u32 {
        self.comm.world()
    }

    /// Nothing is worth computing any more.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// # Errors
    /// The first failure of any verb since the links were made, or what ended a wait for them.
    pub fn check(&self) -> Result<(), CommError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        match &self.way {
            Way::Host(_) | Way::Carried(_) => {}
            Way::Nccl(nccl) => nccl.check()?,
        }
        // What the gang says of a failure says more.
        self.windows.as_ref().map_or(Ok(()), |windows| windows.check())
    }

    /// Enqueues, unless a verb has failed before or there is nobody else.
    fn attempt(&mut self, verb: impl FnOnce(&mut Comm, &mut Way) -> Result<(), CommError>) {
        if self.failure.is_none() && self.comm.world() > 1 {
            self.failure = verb(&mut self.comm, &mut self.way).err();
        }
    }
}

fn processor(device: &mut Device) -> &mut CpuDevice {
    device.as_cpu_mut().expect("the host's links are between processors")
}
