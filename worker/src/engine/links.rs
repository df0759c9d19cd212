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
//! ```
//! A verb is enqueued like an op and returns nothing: how many rows travel stands in device memory.
//! The first failure is kept, later verbs do nothing, and [`Links::check`] tells it. What was
//! computed since then says nothing.

mod carried;
mod files;
mod host;
mod ledger;
mod meet;
mod nccl;
mod packing;
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
use host::Host;
use ledger::Ledger;
use moejob_kernels::{Buffer, CpuDevice, Device};
use moejob_protocol::buffers::{Moe, MoeScratch, Routes, Travel};
use moejob_protocol::communication::{Link, Verb};
use moejob_protocol::links::Built;
use moejob_protocol::stages::{Flows, Piece};
use nccl::Nccl;
use peer::Windows;
use shared::Chunks;
use staged::Staging;
use std::sync::Arc;

pub use nccl::NoLinks;
pub(crate) use files::{Desk, Seat};
pub(crate) use ledger::{Sent, WindowRows};
#[cfg(test)]
pub(crate) use ledger::OfVerb;
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
    /// The gang, for what goes through the host.
    comm: Comm,
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

/// Buffers that go to, or come from, one rank, in order.
pub type Parcel = (u32, Vec<Buffer>);

/// What one layer of one round moves, and where it lies.
pub(crate) struct Travelling<'a> {
    pub layer: usize,
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
        let ledger = Ledger::default();
        Links { way, comm, failure, beside, staging, windows, step: 0, by_need: false, ledger }
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

    /// The same links, between processors, with what reaches an expert group's ranks through
    /// windows alone: tokens that a rank does not need are no numbers there. For tests.
    #[must_use]
    pub fn by_need(self) -> Links {
        Links { by_need: true, ..self }
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
    pub fn leave(&mut self, device: &Device) -> Result<(), String> {
        self.windows.iter().for_each(|windows| windows.stop());
        match &mut self.way {
            Way::Host(_) => {}
            Way::Nccl(nccl) => nccl.leave(device)?,
            // What waited for windows ends; there is nothing else that waits.
            Way::Carried(_) => device.finish().map_err(|error| chain(&error))?,
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

    /// Everybody's choices to everybody: those of the own tokens are read from `moe`.
    pub(crate) fn share_choices(
        &mut self,
        device: &mut Device,
        way: &Travelling,
        moe: &Moe<Buffer>,
        top_k: usize,
    ) {
        let own = way.round.tokens * top_k;
        let own = vec![moe.ids.slice(0, own), moe.weights.slice(0, own)];
        let ranks = &way.group.ranks;
        let sends: Vec<Parcel> = ranks.iter().map(|to| (*to, own.clone())).collect();
        let (all_ids, all_weights) = (way.travel.all_ids, way.travel.all_weights);
        let mut at = 0;
        let mut receives: Vec<Parcel> = Vec::new();
        for source in &way.round.sources {
            let len = source.tokens * top_k;
            let parts = vec![all_ids.slice(at, len), all_weights.slice(at, len)];
            receives.push((ranks[source.position], parts));
            at += len;
        }
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
        if let (Some(staging), Some(cpu), None) =
            (&mut self.staging, device.as_cpu(), &self.failure)
        {
            staging.count(cpu, way, top_k);
        }
    }

    /// Rows of `travel.leaving` to the ranks that they are for; what arrives goes to `into` [U, D].
    pub(crate) fn dispatch(&mut self, device: &mut Device, way: &Travelling, into: Buffer) {
        let Some(cpu) = device.as_cpu() else { return };
        let departures = words(cpu, way.routes.departures);
        let arrived = words(cpu, way.routes.arrived.slice(0, way.round.sources.len() + 1));
        let ranks = &way.group.ranks;
        let part = |buffer: Buffer, starts: &[usize], at: usize| {
            vec![buffer.slice(starts[at] * way.dim, (starts[at + 1] - starts[at]) * way.dim)]
        };
        let leaving = way.travel.leaving;
        let sends: Vec<Parcel> =
            (0..ranks.len()).map(|p| (ranks[p], part(leaving, &departures, p))).collect();
        let sources = way.round.sources.iter().enumerate();
        let receives: Vec<Parcel> =
            sources.map(|(s, source)| (ranks[source.position], part(into, &arrived, s))).collect();
        let row = way.dim * leaving.dtype().size();
        let bytes = |flows: &Flows, piece| flows.tokens(piece) * row;
        self.in_group(device, way, (Verb::Dispatch, [&sends, &receives]), bytes);
    }

    /// A row of `scratch.y` per (token, expert), with `with_ds` its `ds`, back to where the token
    /// lives: `travel.returned`, by (rank, expert, token). `segments` are those of the rows here.
    pub(crate) fn combine(
        &mut self,
        device: &mut Device,
        way: &Travelling,
        scratch: &MoeScratch<Buffer>,
        segments: Buffer,
        with_ds: bool,
    ) {
        let Some(cpu) = device.as_cpu() else { return };
        let (segments, returns) = (words(cpu, segments), words(cpu, way.routes.returns));
        let (ranks, sources) = (&way.group.ranks, way.round.sources.len());
        let locals = (segments.len() - 1) / sources.max(1);
        let segment = |buffer: Buffer, width: usize, g: usize, s: usize| {
            let (start, end) = (segments[g * sources + s], segments[g * sources + s + 1]);
            buffer.slice(start * width, (end - start) * width)
        };
        let mut sends: Vec<Parcel> = Vec::new();
        for (s, source) in way.round.sources.iter().enumerate() {
            let rows = (0..locals).map(|g| segment(scratch.y, way.dim, g, s));
            let ds = (0..locals).map(|g| segment(scratch.ds, 1, g, s));
            let parts = rows.chain(ds.filter(|_| with_ds)).collect();
            sends.push((ranks[source.position], parts));
        }
        let mut receives: Vec<Parcel> = Vec::new();
        for (p, rank) in ranks.iter().enumerate() {
            let (start, len) = (returns[p], returns[p + 1] - returns[p]);
            let mut parts = vec![way.travel.returned.slice(start * way.dim, len * way.dim)];
            if with_ds {
                parts.push(way.travel.ds.slice(start, len));
            }
            receives.push((*rank, parts));
        }
        let ds = if with_ds { way.travel.ds.dtype().size() } else { 0 };
        let row = way.dim * way.travel.returned.dtype().size() + ds;
        let bytes = |flows: &Flows, piece| flows.rows_back(piece) * row;
        self.in_group(device, way, (Verb::Combine, [&sends, &receives]), bytes);
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
        if self.failure.is_none() && self.comm.world() > 1 {
            self.failure = verb(&mut self.comm, &mut self.way).err();
        }
    }
}

fn processor(device: &mut Device) -> &mut CpuDevice {
    device.as_cpu_mut().expect("the host's links are between processors")
}

fn words(cpu: &CpuDevice, buffer: Buffer) -> Vec<usize> {
    cpu.slice::<u32>(buffer).iter().map(|word| *word as usize).collect()
}
