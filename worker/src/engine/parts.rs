//! The state of this rank, as snapshots and checkpoints see it.

use crate::engine::handles::slice;
use crate::engine::model::Model;
use crate::failure::chain;
use crate::state::rank::{DeviceFailed, Normal, RankState, StateTable};
use moejob_kernels::{Buffer, DType, Fill, InitNormal};
use moejob_protocol::checkpoint::Part;
use std::ops::Range;

impl Model {
    /// Where elements of a part that this rank needs lie.
    fn stored_at(&self, part: Part, index: usize, elements: Range<u64>) -> Buffer {
        let needed = self.table().needed(part, index);
        let within = needed.start <= elements.start && elements.end <= needed.end;
        assert!(within, "{part:?} {elements:?} of {index}: only what is needed is here");
        let (state, flat) = (&self.buffers.state, &self.shape.flats.owned);
        let base = match part {
            Part::Master => self.weight(index),
            Part::Moment1 => slice(state.moment1, flat, index),
            Part::Moment2 => slice(state.moment2, flat, index),
        };
        let (start, len) = (elements.start - needed.start, elements.end - elements.start);
        base.expect("what is needed has a place").slice(start as usize, len as usize)
    }

    fn held(&self, index: usize) -> Buffer {
        self.weight(index).expect("only what is held gets values")
    }
}

impl RankState for Model {
    fn table(&self) -> StateTable<'_> {
        StateTable {
            model: &self.config,
            params: &self.params,
            layout: &self.layout,
            rank: self.rank,
            stored: if self.shape.float_bytes == 8 { DType::F64 } else { DType::F32 },
        }
    }

    fn read(&mut self, part: Part, index: usize, elements: Range<u64>, into: &mut [u8]) {
        self.device.read(self.stored_at(part, index, elements).reinterpret(DType::U8), into);
    }

    fn write(&mut self, part: Part, index: usize, elements: Range<u64>, from: &[u8]) {
        self.device.write(self.stored_at(part, index, elements).reinterpret(DType::U8), from);
    }

    fn fill(&mut self, index: usize, value: f64) {
        self.device.fill(&Fill { value, x: self.held(index) });
    }

    fn fill_normal(&mut self, index: usize, normal: &Normal) {
        let Normal { seed, name_hash, std } = *normal;
        let x = self.held(index);
        self.device.init_normal(&InitNormal { seed, name_hash, first: 0, std, x });
    }

    fn clear_moments(&mut self) {
        self.device.fill_zero(self.buffers.state.moment1);
        self.device.fill_zero(self.buffers.state.moment2);
    }

    fn finish(&mut self) -> Result<(), DeviceFailed> {
        self.device.finish().map_err(|error| DeviceFailed(chain(error)))
    }
}
