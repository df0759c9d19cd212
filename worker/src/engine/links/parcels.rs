//! What one rank of an expert group sends and gets, between processors: tokens out, and a row of
//! each of their experts back. Every rank of the group has the choices of all, so that both sides
//! know what there is.

use super::flight::Size;
use super::{Parcel, Travelling};
use moejob_kernels::{Buffer, CpuDevice, Device};
use moejob_protocol::buffers::MoeScratch;
use moejob_protocol::communication::Verb;

/// A verb with what is sent and what is awaited.
pub(super) type Parcels = (Verb, Vec<Parcel>, Vec<Parcel>);

/// Of tokens on their way to experts.
pub(super) fn row_out(way: &Travelling) -> Size {
    Size::Tokens(way.dim * way.travel.leaving.dtype().size())
}

/// Of what comes back for each choice, with `with_ds` also the gradient of its weight.
pub(super) fn row_back(way: &Travelling, with_ds: bool) -> Size {
    let ds = if with_ds { way.travel.ds.dtype().size() } else { 0 };
    Size::RowsBack(way.dim * way.travel.returned.dtype().size() + ds)
}

/// Rows of `travel.leaving` to the ranks that they are for; what arrives goes to `into` [U, D].
pub(super) fn dispatched(device: &Device, way: &Travelling, into: Buffer) -> Parcels {
    let Some(cpu) = device.as_cpu() else { return (Verb::Dispatch, Vec::new(), Vec::new()) };
    let departures = words(cpu, way.routes.departures);
    let arrived = words(cpu, way.routes.arrived.slice(0, way.round.sources.len() + 1));
    let ranks = &way.group.ranks;
    let part = |buffer: Buffer, starts: &[usize], at: usize| {
        vec![buffer.slice(starts[at] * way.dim, (starts[at + 1] - starts[at]) * way.dim)]
    };
    let leaving = way.travel.leaving;
    let sends = (0..ranks.len()).map(|p| (ranks[p], part(leaving, &departures, p))).collect();
    let sources = way.round.sources.iter().enumerate();
    let receives =
        sources.map(|(s, source)| (ranks[source.position], part(into, &arrived, s))).collect();
    (Verb::Dispatch, sends, receives)
}

/// A row of `scratch.y` per (token, expert), with `with_ds` its `ds`, back to where the token
/// lives: `travel.returned`, by (rank, expert, token). `segments` are those of the rows here.
pub(super) fn combined(
    device: &Device,
    way: &Travelling,
    (scratch, segments): (&MoeScratch<Buffer>, Buffer),
    with_ds: bool,
) -> Parcels {
    let Some(cpu) = device.as_cpu() else { return (Verb::Combine, Vec::new(), Vec::new()) };
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
    (Verb::Combine, sends, receives)
}

/// The numbers of a table, which a processor can read at any time.
pub(crate) fn words(cpu: &CpuDevice, buffer: Buffer) -> Vec<usize> {
    cpu.slice::<u32>(buffer).iter().map(|word| *word as usize).collect()
}
