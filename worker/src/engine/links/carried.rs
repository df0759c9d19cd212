//! Verbs between GPUs through host memory: what a buffer holds is read, travels as between
//! processors, and is written back. The host waits in each verb. For tests of several ranks on one
//! GPU, where NCCL has no communicator.

use super::host::Host;
use super::{Parcel, Shared};
use crate::gang::comm::{Comm, CommError};
use moejob_kernels::{ArenaPlan, Buffer, CpuDevice, DType, Device};

#[derive(Debug, Default)]
pub(super) struct Carried {
    host: Host,
}

/// A processor's memory with what some buffers of a GPU hold.
struct Copy {
    device: Device,
    of: Vec<Buffer>,
    at: Vec<Buffer>,
}

impl Copy {
    fn new(gpu: &Device, of: impl Iterator<Item = Buffer>) -> Result<Copy, CommError> {
        let of: Vec<Buffer> = of.collect();
        let mut plan = ArenaPlan::new();
        let at: Vec<Buffer> = of.iter().map(|from| plan.alloc(from.dtype(), from.len())).collect();
        let failed = |error| CommError::Aborted { reason: format!("no host memory: {error}") };
        let mut device = Device::cpu(1, plan.bytes()).map_err(|error| failed(error.to_string()))?;
        let cpu = super::processor(&mut device);
        for (from, to) in of.iter().zip(&at).filter(|(from, _)| !from.is_empty()) {
            let bytes = gpu.read_vec::<u8>(from.reinterpret(DType::U8));
            cpu.slice_mut::<u8>(to.reinterpret(DType::U8)).copy_from_slice(&bytes);
        }
        Ok(Copy { device, of, at })
    }

    fn cpu(&mut self) -> &mut CpuDevice {
        super::processor(&mut self.device)
    }

    fn write_back(&mut self, gpu: &mut Device) {
        let Copy { device, of, at } = self;
        let cpu = super::processor(device);
        for (to, from) in of.iter().zip(&*at).filter(|(to, _)| !to.is_empty()) {
            gpu.write(to.reinterpret(DType::U8), cpu.slice::<u8>(from.reinterpret(DType::U8)));
        }
    }
}

impl Carried {
    pub fn reduce_scatter(
        &mut self,
        gpu: &mut Device,
        comm: &mut Comm,
        all: &[Shared],
    ) -> Result<(), CommError> {
        self.shared(gpu, comm, all, Host::reduce_scatter)
    }

    pub fn all_gather(
        &mut self,
        gpu: &mut Device,
        comm: &mut Comm,
        all: &[Shared],
    ) -> Result<(), CommError> {
        self.shared(gpu, comm, all, Host::all_gather)
    }

    fn shared(
        &mut self,
        gpu: &mut Device,
        comm: &mut Comm,
        all: &[Shared],
        verb: impl Fn(&mut Host, &mut CpuDevice, &mut Comm, &[Shared]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        for shared in all {
            let mut copy = Copy::new(gpu, shared.buffer.into_iter())?;
            let buffer = copy.at.first().copied();
            let same = Shared { holders: shared.holders, len: shared.len, buffer };
            verb(&mut self.host, copy.cpu(), comm, &[same])?;
            copy.write_back(gpu);
        }
        Ok(())
    }

    pub fn all_reduce(
        &mut self,
        gpu: &mut Device,
        comm: &mut Comm,
        all: &[Buffer],
    ) -> Result<(), CommError> {
        let mut copy = Copy::new(gpu, all.iter().copied())?;
        let at = copy.at.clone();
        self.host.all_reduce(copy.cpu(), comm, &at)?;
        copy.write_back(gpu);
        Ok(())
    }

    pub fn exchange(
        &mut self,
        gpu: &mut Device,
        comm: &mut Comm,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<(), CommError> {
        let parts = |parcels: &[Parcel]| -> Vec<Buffer> {
            parcels.iter().flat_map(|(_, parts)| parts.iter().copied()).collect()
        };
        let (sent, received) = (parts(sends), parts(receives));
        let from = sent.iter().chain(&received).copied();
        let mut copy = Copy::new(gpu, from)?;
        let mut at = copy.at.clone().into_iter();
        let mut again = |parcels: &[Parcel]| -> Vec<Parcel> {
            let of = |(rank, parts): &Parcel| (*rank, at.by_ref().take(parts.len()).collect());
            parcels.iter().map(of).collect()
        };
        let (sends, receives) = (again(sends), again(receives));
        self.host.exchange(copy.cpu(), comm, &sends, &receives)?;
        // What was only sent has not changed, and may be sent from where others arrive.
        let begin = sent.len();
        copy.of.drain(..begin);
        copy.at.drain(..begin);
        copy.write_back(gpu);
        Ok(())
    }
}
