//! Collectives over buffers, by whatever links there are.

use super::ledger::OfVerb;
use super::nccl::{Lane, Nccl};
use super::shared::in_exchanges;
use super::{Links, Parcel, Shared, Way, processor};
use crate::gang::comm::CommError;
use moejob_kernels::{Buffer, Device};
use moejob_protocol::communication::{Link, Verb, all_reduce_bytes, ring_bytes};

impl Links {
    /// Of each buffer the sum over its holders, chunk by chunk: each holder has its own chunk's in
    /// place afterwards, the others' are undefined. All ranks name the same holders in the same
    /// order.
    pub(crate) fn reduce_scatter(&mut self, device: &mut Device, all: &[Shared]) {
        self.reduce_scatter_as(Verb::ReduceScatter, device, all);
    }

    pub(super) fn reduce_scatter_as(&mut self, verb: Verb, device: &mut Device, all: &[Shared]) {
        let begun = device.begin_stretch(false);
        self.attempt(|comm, way| match way {
            Way::Host(host) => {
                let cpu = processor(device);
                let mut runs = in_exchanges(all).into_iter();
                runs.try_for_each(|run| host.reduce_scatter(cpu, comm, run))
            }
            Way::Nccl(nccl) => nccl.reduce_scatter(device, all, Lane::Ops),
            Way::Carried(carried) => carried.reduce_scatter(device, comm, all),
        });
        self.sent(device, begun, (verb, self.link()), self.sends_of(all));
    }

    /// The chunks of each buffer from their holders to all holders.
    pub(crate) fn all_gather(&mut self, device: &mut Device, all: &[Shared]) {
        self.all_gather_as(Verb::AllGather, device, all);
    }

    pub(super) fn all_gather_as(&mut self, verb: Verb, device: &mut Device, all: &[Shared]) {
        let begun = device.begin_stretch(false);
        self.attempt(|comm, way| match way {
            Way::Host(host) => {
                let cpu = processor(device);
                let mut runs = in_exchanges(all).into_iter();
                runs.try_for_each(|run| host.all_gather(cpu, comm, run))
            }
            Way::Nccl(nccl) => nccl.all_gather(device, all, Lane::Ops),
            Way::Carried(carried) => carried.all_gather(device, comm, all),
        });
        self.sent(device, begun, (verb, self.link()), self.sends_of(all));
    }

    /// [`Links::reduce_scatter`] beside the ops that are enqueued later. Who reads the sums waits
    /// for `mark` ([`Device::await_mark`]); until then nobody touches the buffers.
    pub(crate) fn reduce_scatter_beside(
        &mut self,
        device: &mut Device,
        all: &[Shared],
        mark: usize,
    ) {
        match &self.way {
            Way::Host(_) | Way::Carried(_) => self.reduce_scatter(device, all),
            Way::Nccl(_) => {
                self.beside((Verb::ReduceScatter, mark), device, all, Nccl::reduce_scatter);
            }
        }
    }

    /// [`Links::all_gather`] likewise.
    pub(crate) fn all_gather_beside(&mut self, device: &mut Device, all: &[Shared], mark: usize) {
        match &self.way {
            Way::Host(_) | Way::Carried(_) => self.all_gather(device, all),
            Way::Nccl(_) => self.beside((Verb::AllGather, mark), device, all, Nccl::all_gather),
        }
    }

    fn beside(
        &mut self,
        (verb, mark): (Verb, usize),
        device: &mut Device,
        all: &[Shared],
        call: impl FnOnce(&Nccl, &Device, &[Shared], Lane) -> Result<(), CommError>,
    ) {
        if all.iter().all(|shared| shared.buffer.is_none()) {
            return;
        }
        self.attempt(|_, way| {
            let Way::Nccl(nccl) = way else { return Ok(()) };
            device.as_cuda().iter().for_each(|cuda| cuda.hand_over());
            let begun = device.begin_stretch(true);
            call(nccl, device, all, Lane::Aside)?;
            device.end_stretch(begun, verb as usize);
            device.as_cuda().iter().for_each(|cuda| cuda.set_mark(mark));
            Ok(())
        });
        let (link, bytes) = (self.link(), self.sends_of(all));
        self.write_down(OfVerb { verb, link, bytes, beside: true });
    }

    /// The sums of vectors over all ranks, the same bits on all.
    pub(crate) fn all_reduce(&mut self, device: &mut Device, all: &[Buffer]) {
        let begun = device.begin_stretch(false);
        self.attempt(|comm, way| match way {
            Way::Host(host) => host.all_reduce(processor(device), comm, all),
            Way::Nccl(nccl) => nccl.all_reduce(device, all),
            Way::Carried(carried) => carried.all_reduce(device, comm, all),
        });
        let ranks = self.world() as usize;
        let bytes = all.iter().map(Buffer::bytes).sum();
        let bytes = match self.link() {
            Link::Nccl => all_reduce_bytes(ranks, bytes),
            // Each sends all of it to each.
            _ => ring_bytes(ranks, bytes),
        };
        self.sent(device, begun, (Verb::AllReduce, self.link()), bytes);
    }

    /// One collective. Parcels without bytes are left out on both sides; the own rank may stand in
    /// both lists. What lies in one piece is moved from and to where it lies.
    pub(crate) fn exchange(&mut self, device: &mut Device, sends: &[Parcel], receives: &[Parcel]) {
        self.exchange_as(Verb::SendRecv, device, sends, receives);
    }

    pub(super) fn exchange_as(
        &mut self,
        verb: Verb,
        device: &mut Device,
        sends: &[Parcel],
        receives: &[Parcel],
    ) {
        let begun = device.begin_stretch(false);
        self.attempt(|comm, way| match way {
            Way::Host(host) => host.exchange(processor(device), comm, sends, receives),
            Way::Nccl(nccl) => nccl.exchange(device, sends, receives),
            Way::Carried(carried) => carried.exchange(device, comm, sends, receives),
        });
        if self.is_looked_at() {
            let me = self.comm.rank();
            let others = sends.iter().filter(|(rank, _)| *rank != me);
            let parts = others.flat_map(|(_, parts)| parts);
            let bytes = parts.map(|part| part.bytes() as u64).sum();
            self.sent(device, begun, (verb, self.link()), bytes);
        }
    }
}
