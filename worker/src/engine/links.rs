//! What moves between the devices of an attempt, as verbs over device buffers.
//!
//! ```text
//! dispatch: choices of all; own tokens -> the ranks that compute their experts
//! combine:  a row per (token, expert) -> the token's rank
//! exchange: nodes of gradient sums -> owners; new weights -> holders
//! gather:   every rank's part of a vector -> all
//!
//! reduce_scatter: a bucket's sums -> the holder of each chunk; all_gather: chunks -> all holders
//! all_reduce: the sum of a vector over all ranks
//! gather_tokens, scatter_tokens: of an expert group on GPUs, through windows where it has some,
//!           and along rails where it lies on several nodes and is to
//! .._beside:  the same beside the ops that follow, with a mark for who needs the result
//! .._departs: dispatch and combine of a chunk of tokens beside the ops; arrive: its end
//! ```
//! A verb is enqueued like an op and returns nothing: how many rows travel stands in device memory.
//! The first failure is kept, later verbs do nothing, and [`Links::check`] tells it. What was
//! computed since then says nothing.

mod carried;
mod courier;
mod files;
mod flight;
mod host;
mod ledger;
mod meet;
mod nccl;
mod needed;
mod packing;
mod parcels;
mod peer;
mod shared;
mod staged;
mod tokens;
mod verbs;
mod wanted;

use crate::engine::beside::Overlap;
use crate::engine::group::ExpertGroup;
use crate::engine::round::Round;
use crate::failure::chain;
use crate::gang::comm::{Comm, CommError};
use carried::Carried;
use courier::Gang;
use host::Host;
use ledger::Ledger;
use moejob_kernels::cuda::CudaError;
use moejob_kernels::{Buffer, CpuDevice, Device, Room};
use moejob_protocol::buffers::{Moe, MoeScratch, Routes, Travel};
use moejob_protocol::communication::{Link, Verb};
use moejob_protocol::links::Built;
use moejob_protocol::stages::{Flows, Piece};
use nccl::Nccl;
use parcels::{combined, dispatched, row_back, row_out};
use peer::Windows;
use shared::Chunks;
use staged::Staging;
use std::sync::Arc;

pub use nccl::NoLinks;
pub(crate) use nccl::entry;
pub(crate) use files::{Desk, Seat};
pub(crate) use flight::Flight;
#[cfg(test)]
pub(crate) use ledger::OfVerb;
pub(crate) use ledger::{Sent, WAITED, WindowRows};
pub(crate) use parcels::words;
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
    gang: Gang,
    /// Memory of exchanges beside the ops that none uses.
    spare: Vec<Vec<u8>>,
    failure: Option<CommError>,
    beside: bool,
    /// Expert groups exchange in stages; none: each with each.
    staging: Option<Staging>,
    /// By which tokens of the own expert group travel; none: as everything else.
    windows: Option<Arc<Windows>>,
    /// The step that is enqueued, for the record of a failure.
    step: u32,
    by_need: bool,
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
    /// Multiprocessors of what they share at most, where it travels beside products.
    pub ctas_max: Option<u32>,
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

/// What one layer of one round moves, and where it lies.
pub(crate) struct Travelling<'a> {
    /// A number of the layer and the chunk.
    pub at: usize,
    pub group: &'a ExpertGroup,
    pub round: &'a Round,
    /// `D`
    pub dim: usize,
    pub routes: &'a Routes<Buffer>,
    pub travel: &'a Travel<Buffer>,
}

impl Links {
    pub fn new(comm: Comm) -> Links {
        Links::by(Way::Host(Host::default()), comm, true)
    }

    fn by(way: Way, comm: Comm, beside: bool) -> Links {
        let (failure, staging, windows) = (None, None, None);
        let (gang, spare, ledger) = (Gang::new(comm), Vec::new(), Ledger::default());
        let (step, by_need) = (0, false);
        Links { way, gang, spare, failure, beside, staging, windows, step, by_need, ledger }
    }

    /// Between GPUs through the hosts' memory, which is slow and needs no NCCL: for tests of
    /// several ranks on one GPU.
    pub fn carried(comm: Comm) -> Links {
        Links::by(Way::Carried(Carried::default()), comm, false)
    }

    /// The same links, between processors, by which an expert group exchanges first within each
    /// worker, which has so many ranks, then between workers. All ranks do so.
    #[must_use]
    pub fn in_stages(self, ranks: u32) -> Links {
        Links { staging: Some(Staging::new(ranks)), ..self }
    }

    /// From now on expert groups exchange in stages, by workers of so many ranks, or each with
    /// each. For processors, between two steps, on all ranks alike.
    pub(crate) fn exchange_in(&mut self, stages: Option<u32>) {
        if stages.is_some() != self.staging.is_some() {
            self.staging = stages.map(Staging::new);
        }
    }

    /// The same links, between processors, with what reaches an expert group's ranks through
    /// windows alone: tokens that a rank does not need are no numbers there. For tests.
    #[must_use]
    pub fn by_need(self) -> Links {
        Links { by_need: true, ..self }
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
        self.gang.comm()
    }

    pub fn world(&self) -> u32 {
        self.gang.world()
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

    /// Everybody's choices to everybody: those of the own tokens are read from `moe`. They arrive
    /// by chunk, of which there are so many, and source.
    pub(crate) fn share_choices(
        &mut self,
        device: &mut Device,
        way: &Travelling,
        moe: &Moe<Buffer>,
        (top_k, chunks): (usize, usize),
    ) {
        let own = way.round.tokens * top_k;
        let own = moe.choices().map(|of| of.slice(0, own)).to_vec();
        let ranks = &way.group.ranks;
        let sends: Vec<Parcel> = ranks.iter().map(|to| (*to, own.clone())).collect();
        let (all_ids, all_weights) = (way.travel.all_ids, way.travel.all_weights);
        let mut parts = vec![[Vec::new(), Vec::new()]; way.round.sources.len()];
        let mut at = 0;
        for chunk in (0..chunks).map(|at| way.round.chunk(at, chunks)) {
            for (source, [ids, weights]) in chunk.sources.iter().zip(&mut parts) {
                let len = source.tokens * top_k;
                ids.push(all_ids.slice(at, len));
                weights.push(all_weights.slice(at, len));
                at += len;
            }
        }
        let sources = way.round.sources.iter().zip(parts);
        let receives: Vec<Parcel> =
            sources.map(|(source, parts)| (ranks[source.position], parts.concat())).collect();
        let slot = all_ids.dtype().size() + all_weights.dtype().size();
        let tokens_of = |position: usize| {
            let sources = way.round.sources.iter();
            sources.filter(|source| source.position == position).map(|source| source.tokens).sum()
        };
        let bytes = |_: &Flows, piece: Piece| {
            let tokens: usize = tokens_of(piece.from);
            tokens * top_k * slot
        };
        self.in_group(device, way, (Verb::Dispatch, [&sends, &receives]), bytes);
    }

    /// Everybody's choices are here, of the round or of a chunk of it. As in `RoutePlan` nothing
    /// travels where one of the ranks has no room.
    pub(crate) fn count_choices(
        &mut self,
        device: &Device,
        way: &Travelling,
        (top_k, rooms): (usize, &[Room]),
    ) {
        if let (Some(staging), Some(cpu), None) =
            (&mut self.staging, device.as_cpu(), &self.failure)
        {
            staging.count(cpu, way, top_k, rooms);
        }
    }

    /// Rows of `travel.leaving` to the ranks that they are for; what arrives goes to `into` [U, D].
    pub(crate) fn dispatch(&mut self, device: &mut Device, way: &Travelling, into: Buffer) {
        let (verb, sends, receives) = dispatched(device, way, into);
        let size = row_out(way);
        let bytes = |flows: &Flows, piece| size.of(flows, piece);
        self.in_group(device, way, (verb, [&sends, &receives]), bytes);
    }

    /// The same beside the ops that follow.
    pub(crate) fn dispatch_departs(
        &mut self,
        device: &mut Device,
        way: &Travelling,
        into: Buffer,
    ) -> Flight {
        let parcels = dispatched(device, way, into);
        self.depart(device, way, parcels, row_out(way))
    }

    /// A row of `scratch.y` per (token, expert), with `with_ds` its `ds`, back to where the token
    /// lives: `travel.returned`, by (rank, expert, token). `segments` are those of the rows here.
    pub(crate) fn combine(
        &mut self,
        device: &mut Device,
        way: &Travelling,
        (scratch, segments): (&MoeScratch<Buffer>, Buffer),
        with_ds: bool,
    ) {
        let (verb, sends, receives) = combined(device, way, (scratch, segments), with_ds);
        let size = row_back(way, with_ds);
        let bytes = |flows: &Flows, piece| size.of(flows, piece);
        self.in_group(device, way, (verb, [&sends, &receives]), bytes);
    }

    /// The same beside the ops that follow.
    pub(crate) fn combine_departs(
        &mut self,
        device: &mut Device,
        way: &Travelling,
        (scratch, segments): (&MoeScratch<Buffer>, Buffer),
        with_ds: bool,
    ) -> Flight {
        let parcels = combined(device, way, (scratch, segments), with_ds);
        self.depart(device, way, parcels, row_back(way, with_ds))
    }

    /// Sends and receives of one rank of an expert group: at once, or in stages. `bytes` are those
    /// of each piece of the group.
    fn in_group(
        &mut self,
        device: &mut Device,
        way: &Travelling,
        (verb, [sends, receives]): (Verb, [&[Parcel]; 2]),
        bytes: impl Fn(&Flows, Piece) -> usize,
    ) {
        let Some(staging) = self.staging.take() else {
            return self.exchange_as(verb, device, sends, receives);
        };
        let begun = device.begin_stretch(false);
        let mut sent = 0;
        self.attempt(|comm, _| {
            let cpu = processor(device);
            sent = staging.exchange(cpu, comm, way, [sends, receives], bytes)?;
            Ok(())
        });
        self.staging = Some(staging);
        self.sent(device, begun, (verb, Link::Host), sent);
    }

    /// Enqueues, unless a verb has failed before or there is nobody else.
    fn attempt(&mut self, verb: impl FnOnce(&mut Comm, &mut Way) -> Result<(), CommError>) {
        if self.failure.is_none() && self.gang.world() > 1 {
            self.failure = verb(self.gang.comm(), &mut self.way).err();
        }
    }
}

fn processor(device: &mut Device) -> &mut CpuDevice {
    device.as_cpu_mut().expect("the host's links are between processors")
}
