//! What moves between the devices of an attempt, as verbs over device buffers.
//!
//! ```text
//! dispatch: choices of all; own tokens -> the ranks that compute their experts
//! combine:  a row per (token, expert) -> the token's rank
//! exchange: nodes of gradient sums -> owners; new weights -> holders
//! gather:   every rank's part of a vector -> all
//! ```
//! A verb is enqueued like an op and returns nothing: how many rows travel stands in device memory.
//! The first failure is kept, later verbs do nothing, and [`Links::check`] tells it. What was
//! computed since then says nothing.

use crate::engine::group::ExpertGroup;
use crate::engine::round::Round;
use crate::gang::comm::{Comm, CommError};
use moejob_kernels::{Buffer, CpuDevice, DType, Device};
use moejob_protocol::buffers::{Moe, MoeScratch, Routes, Travel};

/// The own rank's way to all others: host memory, through the gang.
#[derive(Debug)]
pub struct Links {
    comm: Comm,
    staging: Staging,
    failure: Option<CommError>,
}

/// Memory for what does not lie in one piece, kept from call to call.
#[derive(Debug, Default)]
struct Staging {
    out: Vec<u8>,
    inward: Vec<u8>,
}

/// Buffers that go to, or come from, one rank, in order.
pub type Parcel = (u32, Vec<Buffer>);

/// What one layer of one round moves, and where it lies.
pub(crate) struct Travelling<'a> {
    pub group: &'a ExpertGroup,
    pub round: &'a Round,
    /// `D`
    pub dim: usize,
    pub routes: &'a Routes<Buffer>,
    pub travel: &'a Travel<Buffer>,
}

impl Links {
    pub fn new(comm: Comm) -> Links {
        Links { comm, staging: Staging::default(), failure: None }
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
    /// The first failure of any verb since the links were made.
    pub fn check(&self) -> Result<(), CommError> {
        self.failure.clone().map_or(Ok(()), Err)
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
        self.exchange(device, &sends, &receives);
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
        self.exchange(device, &sends, &receives);
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
        self.exchange(device, &sends, &receives);
    }

    /// Every rank's part of a vector to all: `parts` by rank, the own one among them.
    pub(crate) fn gather(&mut self, device: &mut Device, parts: &[Buffer]) {
        let me = self.comm.rank();
        let others = || (0..self.world()).filter(|rank| *rank != me);
        let sends: Vec<Parcel> = others().map(|to| (to, vec![parts[me as usize]])).collect();
        let receives: Vec<Parcel> =
            others().map(|from| (from, vec![parts[from as usize]])).collect();
        self.exchange(device, &sends, &receives);
    }

    /// One collective. Parcels without bytes are left out on both sides; the own rank may stand in
    /// both lists. What lies in one piece is moved from and to where it lies.
    pub(crate) fn exchange(&mut self, device: &mut Device, sends: &[Parcel], receives: &[Parcel]) {
        if self.failure.is_some() || self.world() == 1 {
            return;
        }
        let cpu = device.as_cpu_mut().expect("the host's links are between processors");
        let moved = self.staging.move_parcels(cpu, &mut self.comm, sends, receives);
        self.failure = moved.err();
    }
}

impl Staging {
    fn move_parcels(
        &mut self,
        cpu: &mut CpuDevice,
        comm: &mut Comm,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<(), CommError> {
        let (sends, receives) = (pieces(sends), pieces(receives));
        let staged = |parcels: &[Parcel]| -> usize {
            parcels.iter().filter(|parcel| parcel.1.len() > 1).map(bytes).sum()
        };
        let room =
            |memory: &mut Vec<u8>, parcels| memory.resize(staged(parcels).max(memory.len()), 0);
        room(&mut self.out, &sends);
        room(&mut self.inward, &receives);
        let mut at = 0;
        for part in sends.iter().filter(|parcel| parcel.1.len() > 1).flat_map(|parcel| &parcel.1) {
            let from = cpu.slice::<u8>(part.reinterpret(DType::U8));
            self.out[at..at + from.len()].copy_from_slice(from);
            at += from.len();
        }
        let direct = |parcels: &[Parcel]| -> Vec<Buffer> {
            let whole = parcels.iter().filter(|parcel| parcel.1.len() == 1);
            whole.map(|parcel| parcel.1[0]).collect()
        };
        let (from, into) = cpu.transfer(&direct(&sends), &direct(&receives));
        let (mut from, mut into) = (from.into_iter(), into.into_iter());
        let (mut out, mut inward) = (&self.out[..], &mut self.inward[..]);
        let mut outgoing: Vec<(u32, &[u8])> = Vec::with_capacity(sends.len());
        for parcel in &sends {
            let mine = if parcel.1.len() == 1 {
                from.next().expect("a view a piece")
            } else {
                out.split_off(..bytes(parcel)).expect("room for all")
            };
            outgoing.push((parcel.0, mine));
        }
        let mut incoming: Vec<(u32, &mut [u8])> = Vec::with_capacity(receives.len());
        for parcel in &receives {
            let mine = if parcel.1.len() == 1 {
                into.next().expect("a view a piece")
            } else {
                inward.split_off_mut(..bytes(parcel)).expect("room for all")
            };
            incoming.push((parcel.0, mine));
        }
        comm.exchange(&outgoing, &mut incoming)?;
        let mut at = 0;
        let staged = receives.iter().filter(|parcel| parcel.1.len() > 1);
        for part in staged.flat_map(|parcel| &parcel.1) {
            let end = at + part.bytes();
            cpu.slice_mut::<u8>(part.reinterpret(DType::U8)).copy_from_slice(&self.inward[at..end]);
            at = end;
        }
        Ok(())
    }
}

/// The parcels that have bytes, without their empty pieces.
fn pieces(parcels: &[Parcel]) -> Vec<Parcel> {
    let full = parcels.iter().map(|(rank, parts)| {
        (*rank, parts.iter().copied().filter(|part| !part.is_empty()).collect::<Vec<_>>())
    });
    full.filter(|(_, parts)| !parts.is_empty()).collect()
}

fn bytes(parcel: &Parcel) -> usize {
    parcel.1.iter().map(Buffer::bytes).sum()
}

fn words(cpu: &CpuDevice, buffer: Buffer) -> Vec<usize> {
    cpu.slice::<u32>(buffer).iter().map(|word| *word as usize).collect()
}
