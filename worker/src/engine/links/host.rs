//! Verbs through host memory, between processors: what moves goes through the gang.

use crate::gang::comm::{Comm, CommError};
use super::{Parcel, Shared};
use half::{bf16, f16};
use moejob_kernels::{Buffer, CpuDevice, DType, Element, Pair};

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
        shared: &Shared,
    ) -> Result<(), CommError> {
        let Some(chunks) = shared.chunks(comm.rank()) else { return self.skip(cpu, comm) };
        let (me, own) = (comm.rank(), chunks.own());
        let others = || chunks.others(me);
        let sends: Vec<(u32, Buffer)> = others().collect();
        let came = receive(cpu, comm, &sends, others().map(|(rank, _)| (rank, own.bytes())))?;
        add_in_order(cpu, own, me, &came);
        Ok(())
    }

    /// See [`super::Links::all_gather`].
    pub fn all_gather(
        &mut self,
        cpu: &mut CpuDevice,
        comm: &mut Comm,
        shared: &Shared,
    ) -> Result<(), CommError> {
        let Some(chunks) = shared.chunks(comm.rank()) else { return self.skip(cpu, comm) };
        let me = comm.rank();
        let sends: Vec<Parcel> =
            chunks.others(me).map(|(to, _)| (to, vec![chunks.own()])).collect();
        let receives: Vec<Parcel> =
            chunks.others(me).map(|(from, chunk)| (from, vec![chunk])).collect();
        self.exchange(cpu, comm, &sends, &receives)
    }

    /// See [`super::Links::all_reduce`]. Sums are in the order of ranks.
    pub fn all_reduce(
        &mut self,
        cpu: &mut CpuDevice,
        comm: &mut Comm,
        buffer: Buffer,
    ) -> Result<(), CommError> {
        let me = comm.rank();
        let others: Vec<u32> = (0..comm.world()).filter(|rank| *rank != me).collect();
        let sends: Vec<(u32, Buffer)> = others.iter().map(|to| (*to, buffer)).collect();
        let came =
            receive(cpu, comm, &sends, others.iter().map(|from| (*from, buffer.bytes())))?;
        add_in_order(cpu, buffer, me, &came);
        Ok(())
    }

    /// A collective of others: a call has the same number on all ranks.
    fn skip(&mut self, cpu: &mut CpuDevice, comm: &mut Comm) -> Result<(), CommError> {
        self.exchange(cpu, comm, &[], &[])
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

/// One collective whose bytes come into host memory, by rank.
fn receive(
    cpu: &CpuDevice,
    comm: &mut Comm,
    sends: &[(u32, Buffer)],
    receives: impl Iterator<Item = (u32, usize)>,
) -> Result<Vec<(u32, Vec<u8>)>, CommError> {
    let mut came: Vec<(u32, Vec<u8>)> =
        receives.map(|(from, bytes)| (from, vec![0; bytes])).collect();
    let outgoing: Vec<(u32, &[u8])> = sends
        .iter()
        .map(|(to, part)| (*to, cpu.slice::<u8>(part.reinterpret(DType::U8))))
        .collect();
    let mut incoming: Vec<(u32, &mut [u8])> =
        came.iter_mut().map(|(from, bytes)| (*from, bytes.as_mut_slice())).collect();
    comm.exchange(&outgoing, &mut incoming)?;
    Ok(came)
}

/// own = the sum of it and of what came, in the order of ranks.
fn add_in_order(cpu: &mut CpuDevice, own: Buffer, me: u32, came: &[(u32, Vec<u8>)]) {
    match own.dtype() {
        DType::F64 => add_all(cpu.slice_mut(own), me, came, f64::from_ne_bytes, |a, b| a + b),
        DType::F32 => add_all(cpu.slice_mut(own), me, came, f32::from_ne_bytes, |a, b| a + b),
        DType::Pair => add_all(cpu.slice_mut(own), me, came, Pair::from_ne_bytes, Pair::plus),
        // Between GPUs alone. Summed in fp32, and rounded once.
        DType::Bf16 => add_halves::<bf16>(cpu.slice_mut(own), me, came, bf16::from_f32),
        DType::F16 => add_halves::<f16>(cpu.slice_mut(own), me, came, f16::from_f32),
        other => panic!("{other:?} is not summed"),
    }
}

fn add_all<T: Copy, const N: usize>(
    own: &mut [T],
    me: u32,
    came: &[(u32, Vec<u8>)],
    value: fn([u8; N]) -> T,
    plus: fn(T, T) -> T,
) {
    let (before, behind) = came.split_at(came.partition_point(|(from, _)| *from < me));
    for (at, own) in own.iter_mut().enumerate() {
        let of = |bytes: &[u8]| {
            let (bytes, _) = bytes[at * N..].split_first_chunk::<N>().expect("as long as the own");
            value(*bytes)
        };
        let ahead = before.iter().map(|(_, bytes)| of(bytes)).reduce(plus);
        let sum = ahead.map_or(*own, |sum| plus(sum, *own));
        *own = behind.iter().fold(sum, |sum, (_, bytes)| plus(sum, of(bytes)));
    }
}

fn add_halves<T: Element + Into<f32>>(
    own: &mut [T],
    me: u32,
    came: &[(u32, Vec<u8>)],
    round: fn(f32) -> T,
) {
    let (before, behind) = came.split_at(came.partition_point(|(from, _)| *from < me));
    let of = |bytes: &[u8], at: usize| -> f32 {
        let bytes = [bytes[2 * at], bytes[2 * at + 1]];
        match T::DTYPE {
            DType::Bf16 => bf16::from_ne_bytes(bytes).to_f32(),
            _ => f16::from_ne_bytes(bytes).to_f32(),
        }
    };
    for (at, own) in own.iter_mut().enumerate() {
        let sum = before.iter().fold(0.0, |sum, (_, bytes)| sum + of(bytes, at)) + (*own).into();
        *own = round(behind.iter().fold(sum, |sum, (_, bytes)| sum + of(bytes, at)));
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
