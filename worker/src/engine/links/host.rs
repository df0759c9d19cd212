//! Verbs through host memory, between processors: what moves goes through the gang.

use crate::gang::comm::{Comm, CommError};
use super::shared::Chunks;
use super::{Parcel, Shared};
use half::{bf16, f16};
use moejob_kernels::{Buffer, CpuDevice, DType, Pair};
use std::collections::BTreeMap;
use std::ops::Range;

/// Memory for what does not lie in one piece, kept from call to call.
#[derive(Debug, Default)]
pub(super) struct Host {
    out: Vec<u8>,
    inward: Vec<u8>,
}

impl Host {
    /// See [`super::Links::reduce_scatter`]. Sums are in the order of ranks.
    pub fn reduce_scatter(
        &mut self,
        cpu: &mut CpuDevice,
        comm: &mut Comm,
        all: &[Shared],
    ) -> Result<(), CommError> {
        let me = comm.rank();
        let held: Vec<Chunks> = all.iter().filter_map(|shared| shared.chunks(me)).collect();
        let mut sends: BTreeMap<u32, Vec<Buffer>> = BTreeMap::new();
        for (to, chunk) in held.iter().flat_map(|chunks| chunks.others(me)) {
            sends.entry(to).or_default().push(chunk);
        }
        let own: Vec<(Buffer, Vec<u32>)> = held
            .iter()
            .map(|chunks| (chunks.own(), chunks.others(me).map(|(from, _)| from).collect()))
            .collect();
        self.sum(cpu, comm, &sends.into_iter().collect::<Vec<_>>(), &own)
    }

    /// See [`super::Links::all_gather`].
    pub fn all_gather(
        &mut self,
        cpu: &mut CpuDevice,
        comm: &mut Comm,
        all: &[Shared],
    ) -> Result<(), CommError> {
        let me = comm.rank();
        let mut parcels: BTreeMap<u32, [Vec<Buffer>; 2]> = BTreeMap::new();
        for chunks in all.iter().filter_map(|shared| shared.chunks(me)) {
            for (rank, chunk) in chunks.others(me) {
                let [sent, received] = parcels.entry(rank).or_default();
                sent.push(chunks.own());
                received.push(chunk);
            }
        }
        let [sends, receives] = [0, 1].map(|way| -> Vec<Parcel> {
            parcels.iter().map(|(rank, both)| (*rank, both[way].clone())).collect()
        });
        self.exchange(cpu, comm, &sends, &receives)
    }

    /// See [`super::Links::all_reduce`]. Sums are in the order of ranks.
    pub fn all_reduce(
        &mut self,
        cpu: &mut CpuDevice,
        comm: &mut Comm,
        all: &[Buffer],
    ) -> Result<(), CommError> {
        let me = comm.rank();
        let others: Vec<u32> = (0..comm.world()).filter(|rank| *rank != me).collect();
        let sends: Vec<Parcel> = others.iter().map(|to| (*to, all.to_vec())).collect();
        let own: Vec<(Buffer, Vec<u32>)> =
            all.iter().map(|buffer| (*buffer, others.clone())).collect();
        self.sum(cpu, comm, &sends, &own)
    }

    /// Each of `own` becomes the sum of it and of as much from each of its ranks, which ascend; in
    /// the order of ranks.
    fn sum(
        &mut self,
        cpu: &mut CpuDevice,
        comm: &mut Comm,
        sends: &[Parcel],
        own: &[(Buffer, Vec<u32>)],
    ) -> Result<(), CommError> {
        let me = comm.rank();
        // What comes from a rank lies in one piece, in the order of `own`.
        let mut inward: BTreeMap<u32, Range<usize>> = BTreeMap::new();
        for (own, others) in own {
            others.iter().for_each(|from| inward.entry(*from).or_default().end += own.bytes());
        }
        let mut all = 0;
        for span in inward.values_mut() {
            *span = all..all + span.end;
            all = span.end;
        }
        self.inward.resize(self.inward.len().max(all), 0);
        self.stage(cpu, sends.iter());
        let mut staged = &self.out[..];
        let outgoing: Vec<(u32, &[u8])> = sends
            .iter()
            .map(|parcel| (parcel.0, staged.split_off(..bytes(parcel)).expect("room for all")))
            .collect();
        let mut rest = &mut self.inward[..];
        let mut incoming: Vec<(u32, &mut [u8])> = inward
            .iter()
            .map(|(from, span)| (*from, rest.split_off_mut(..span.len()).expect("room for all")))
            .collect();
        comm.exchange(&outgoing, &mut incoming)?;
        for (own, others) in own {
            let mut take = |from: &u32| -> &[u8] {
                let span = inward.get_mut(from).expect("a rank that sends");
                let first = span.start;
                span.start += own.bytes();
                &self.inward[first..span.start]
            };
            let came: Vec<&[u8]> = others.iter().map(&mut take).collect();
            let before = others.partition_point(|from| *from < me);
            add_in_order(cpu, *own, came.split_at(before));
        }
        Ok(())
    }

    /// Copies what is sent behind each other.
    fn stage<'a>(&mut self, cpu: &CpuDevice, sends: impl Iterator<Item = &'a Parcel>) {
        self.out.clear();
        for part in sends.flat_map(|parcel| &parcel.1) {
            self.out.extend(cpu.slice::<u8>(part.reinterpret(DType::U8)));
        }
    }

    /// See [`super::Links::exchange`].
    pub fn exchange(
        &mut self,
        cpu: &mut CpuDevice,
        comm: &mut Comm,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<(), CommError> {
        let (sends, receives) = (pieces(sends), pieces(receives));
        let in_pieces = |parcel: &&Parcel| parcel.1.len() > 1;
        let comes: usize = receives.iter().filter(in_pieces).map(bytes).sum();
        self.inward.resize(self.inward.len().max(comes), 0);
        self.stage(cpu, sends.iter().filter(in_pieces));
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
        for part in receives.iter().filter(in_pieces).flat_map(|parcel| &parcel.1) {
            let end = at + part.bytes();
            cpu.slice_mut::<u8>(part.reinterpret(DType::U8)).copy_from_slice(&self.inward[at..end]);
            at = end;
        }
        Ok(())
    }
}

/// What came of ranks before the own one, and of those behind it.
type Came<'a> = (&'a [&'a [u8]], &'a [&'a [u8]]);

/// own = the sum of it and of what came, in the order of ranks.
fn add_in_order(cpu: &mut CpuDevice, own: Buffer, came: Came) {
    match own.dtype() {
        DType::F64 => add_all(cpu.slice_mut(own), came, f64::from_ne_bytes, |a, b| a + b),
        DType::F32 => add_all(cpu.slice_mut(own), came, f32::from_ne_bytes, |a, b| a + b),
        DType::Pair => add_all(cpu.slice_mut(own), came, Pair::from_ne_bytes, Pair::plus),
        // Between GPUs alone. Summed in fp32, and rounded once.
        DType::Bf16 => add_halves(cpu.slice_mut(own), came, bf16::from_ne_bytes, bf16::from_f32),
        DType::F16 => add_halves(cpu.slice_mut(own), came, f16::from_ne_bytes, f16::from_f32),
        other => panic!("{other:?} is not summed"),
    }
}

/// Elements that are summed at once, so that sums stay in the nearest cache.
const SUMMED_AT_ONCE: usize = 1024;

fn add_all<T: Copy, const N: usize>(
    own: &mut [T],
    (before, behind): Came,
    value: impl Fn([u8; N]) -> T,
    plus: impl Fn(T, T) -> T,
) {
    let mut ahead: Vec<T> = Vec::with_capacity(SUMMED_AT_ONCE);
    for (at, own) in own.chunks_mut(SUMMED_AT_ONCE).enumerate() {
        let first = at * SUMMED_AT_ONCE * N;
        let len = own.len() * N;
        if let Some((lowest, others)) = before.split_first() {
            ahead.clear();
            ahead.extend(values(lowest, first, len).iter().map(|bytes| value(*bytes)));
            for bytes in others {
                let others = ahead.iter_mut().zip(values(bytes, first, len));
                others.for_each(|(sum, bytes)| *sum = plus(*sum, value(*bytes)));
            }
            own.iter_mut().zip(&ahead).for_each(|(own, sum)| *own = plus(*sum, *own));
        }
        for bytes in behind {
            let others = own.iter_mut().zip(values(bytes, first, len));
            others.for_each(|(sum, bytes)| *sum = plus(*sum, value(*bytes)));
        }
    }
}

/// `len` bytes from `first` on as those of one value each.
fn values<const N: usize>(bytes: &[u8], first: usize, len: usize) -> &[[u8; N]] {
    bytes[first..][..len].as_chunks().0
}

fn add_halves<T: Copy + Into<f32>>(
    own: &mut [T],
    came: Came,
    value: impl Fn([u8; 2]) -> T,
    round: impl Fn(f32) -> T,
) {
    let mut sums: Vec<f32> = own.iter().map(|own| (*own).into()).collect();
    add_all(&mut sums, came, |bytes| value(bytes).into(), |a, b| a + b);
    own.iter_mut().zip(sums).for_each(|(own, sum)| *own = round(sum));
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
