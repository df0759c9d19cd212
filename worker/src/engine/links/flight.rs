//! An exchange beside the ops: its bytes leave the arena when it begins and come into it when it
//! arrives. Ops may write to the arena in between.

use super::courier::Coming;
use super::ledger::{OfVerb, WAITED};
use super::staged::Route;
use super::{Links, Parcel, Travelling, processor};
use crate::gang::comm::{Comm, CommError};
use moejob_kernels::{Buffer, CpuDevice, DType, Device};
use moejob_protocol::communication::{Link, Verb};
use moejob_protocol::stages::{Flows, Piece};

/// Memory of exchanges that is kept for the next ones: of those that are under way at once, two
/// each, and some more.
const SPARE_MAX: usize = 16;

/// An exchange that was begun.
#[derive(Debug)]
#[must_use]
pub(crate) struct Flight {
    verb: Verb,
    receives: Vec<Parcel>,
    /// None: it does not take place.
    coming: Option<Coming<Load>>,
}

/// The bytes of an exchange, those of each rank one behind the other.
#[derive(Debug)]
struct Load {
    sends: Vec<(u32, usize)>,
    receives: Vec<(u32, usize)>,
    out: Vec<u8>,
    inward: Vec<u8>,
    /// Bytes that went to others.
    sent: u64,
}

/// How many bytes a piece of the group has, by the rows that it is of.
#[derive(Clone, Copy, Debug)]
pub(super) enum Size {
    /// A row of so many bytes for each token.
    Tokens(usize),
    /// For each choice that comes back.
    RowsBack(usize),
}

impl Size {
    pub fn of(self, flows: &Flows, piece: Piece) -> usize {
        match self {
            Size::Tokens(row) => flows.tokens(piece) * row,
            Size::RowsBack(row) => flows.rows_back(piece) * row,
        }
    }
}

impl Links {
    /// Sends and receives of one rank of an expert group, at once or in stages, beside the ops that
    /// follow. Until [`Links::arrive`] nobody reads what arrives.
    pub(super) fn depart(
        &mut self,
        device: &mut Device,
        way: &Travelling,
        (verb, sends, receives): (Verb, Vec<Parcel>, Vec<Parcel>),
        size: Size,
    ) -> Flight {
        if self.failure.is_some() || self.gang.world() == 1 {
            return Flight { verb, receives, coming: None };
        }
        let begun = device.begin_stretch(false);
        let (sends, receives) = (full(sends), full(receives));
        let mut spare = || self.spare.pop().unwrap_or_default();
        let (mut out, inward) = (spare(), spare());
        out.clear();
        let cpu = processor(device);
        for part in sends.iter().flat_map(|(_, parts)| parts) {
            out.extend_from_slice(cpu.slice::<u8>(part.reinterpret(DType::U8)));
        }
        let lengths = |of: &[Parcel]| of.iter().map(|of| (of.0, bytes(of))).collect();
        let (sends, awaited) = (lengths(&sends), lengths(&receives));
        let load = Load { sends, receives: awaited, out, inward, sent: 0 };
        let route = self.staging.as_ref().map(|staging| staging.route(way));
        let coming = self.gang.begin(move |comm| match route {
            None => load.exchange(comm),
            Some(route) => load.in_stages(comm, &route, size),
        });
        device.end_stretch(begun, WAITED);
        Flight { verb, receives, coming: Some(coming) }
    }

    /// Waits for what was begun, and lays it where it belongs.
    pub(crate) fn arrive(&mut self, device: &mut Device, flight: Flight) {
        let Flight { verb, receives, coming } = flight;
        let Some(coming) = coming.filter(|_| self.failure.is_none()) else { return };
        let begun = device.begin_stretch(false);
        let came = coming.wait();
        device.stretch_beside(verb as usize, came.began, came.ended);
        match came.result {
            Err(failure) => self.failure = Some(failure),
            Ok(Load { out, inward, sent, .. }) => {
                lay(processor(device), &receives, &inward);
                self.write_down(OfVerb { verb, link: Link::Host, bytes: sent, beside: true });
                self.spare.extend([out, inward]);
                self.spare.truncate(SPARE_MAX);
            }
        }
        device.end_stretch(begun, WAITED);
    }
}

impl Load {
    fn exchange(mut self, comm: &mut Comm) -> Result<Load, CommError> {
        let me = comm.rank();
        self.inward.resize(self.receives.iter().map(|of| of.1).sum(), 0);
        let (mut out, mut inward) = (&self.out[..], &mut self.inward[..]);
        let outgoing: Vec<(u32, &[u8])> = (self.sends.iter())
            .map(|(to, len)| (*to, out.split_off(..*len).expect("as much as was counted")))
            .collect();
        let mut incoming: Vec<(u32, &mut [u8])> = (self.receives.iter())
            .map(|(from, len)| (*from, inward.split_off_mut(..*len).expect("room for all")))
            .collect();
        comm.exchange(&outgoing, &mut incoming)?;
        let others = self.sends.iter().filter(|(to, _)| *to != me);
        self.sent = others.map(|(_, len)| *len as u64).sum();
        Ok(self)
    }

    fn in_stages(
        mut self,
        comm: &mut Comm,
        route: &Route,
        size: Size,
    ) -> Result<Load, CommError> {
        let mut out = &self.out[..];
        let sends = (self.sends.iter())
            .map(|(to, len)| (*to, [out.split_off(..*len).expect("as much as was counted")]));
        let (held, sent) = route.carry(comm, sends, |flows, piece| size.of(flows, piece))?;
        self.sent = sent;
        self.inward.clear();
        for (from, len) in &self.receives {
            let piece = held.of_rank(route, *from);
            assert_eq!(piece.len(), *len, "rank {from} sends what everybody's choices say");
            self.inward.extend_from_slice(piece);
        }
        Ok(self)
    }
}

/// The parcels that have bytes.
fn full(parcels: Vec<Parcel>) -> Vec<Parcel> {
    parcels.into_iter().filter(|parcel| bytes(parcel) > 0).collect()
}

fn bytes((_, parts): &Parcel) -> usize {
    parts.iter().map(Buffer::bytes).sum()
}

/// What came, where it was awaited.
fn lay(cpu: &mut CpuDevice, receives: &[Parcel], mut inward: &[u8]) {
    for part in receives.iter().flat_map(|(_, parts)| parts) {
        let came = inward.split_off(..part.bytes()).expect("all that was awaited");
        cpu.slice_mut::<u8>(part.reinterpret(DType::U8)).copy_from_slice(came);
    }
    assert!(inward.is_empty(), "{} bytes too many", inward.len());
}
