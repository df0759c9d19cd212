//! The state of this rank, as snapshots and checkpoints see it.
//!
//! ```text
//! kept as it is stored          device <-> host
//! bf16 weight + low half        join, split  <-> stage in device memory <-> host
//! bf16 moments                  cast         <-> stage                  <-> host
//! ```
//! A stage holds 16 Mi elements; what is longer passes in pieces.

use crate::engine::buckets::master;
use crate::engine::handles::slice;
use crate::engine::model::Model;
use crate::failure::chain;
use crate::state::rank::{DeviceFailed, Normal, RankState, StateTable};
use moejob_kernels::{
    Buffer, Cast, DType, Fill, InitNormal, JoinMaster, Master, SplitMaster,
};
use moejob_protocol::checkpoint::Part;
use std::ops::Range;

/// How elements of a part lie in memory.
#[derive(Clone, Copy)]
enum Kept {
    /// As they are stored.
    Whole(Buffer),
    /// A bf16 weight and the low half of its master.
    Halves { weight: Buffer, low: Buffer },
    /// A master of its own beside the weight.
    Separate { weight: Buffer, master: Buffer },
    /// Rounded.
    Rounded(Buffer),
}

impl Kept {
    fn slice(self, start: usize, len: usize) -> Kept {
        let cut = |buffer: Buffer| buffer.slice(start, len);
        match self {
            Kept::Whole(buffer) => Kept::Whole(cut(buffer)),
            Kept::Halves { weight, low } => Kept::Halves { weight: cut(weight), low: cut(low) },
            Kept::Separate { weight, master } => {
                Kept::Separate { weight: cut(weight), master: cut(master) }
            }
            Kept::Rounded(buffer) => Kept::Rounded(cut(buffer)),
        }
    }

    fn len(self) -> usize {
        match self {
            Kept::Whole(buffer) | Kept::Rounded(buffer) => buffer.len(),
            Kept::Halves { weight, .. } | Kept::Separate { weight, .. } => weight.len(),
        }
    }
}

impl Model {
    /// Where elements of a part that this rank needs lie.
    fn kept(&self, part: Part, index: usize, elements: &Range<u64>) -> Kept {
        let needed = self.table().needed(part, index);
        let within = needed.start <= elements.start && elements.end <= needed.end;
        assert!(within, "{part:?} {elements:?} of {index}: only what is needed is here");
        let (start, len) = (elements.start - needed.start, elements.end - elements.start);
        let whole = match self.places {
            Some(_) => self.kept_in_bucket(part, index),
            None => self.kept_flat(part, index).map(Kept::Whole),
        };
        whole.expect("what is needed has a place").slice(start as usize, len as usize)
    }

    fn kept_flat(&self, part: Part, index: usize) -> Option<Buffer> {
        let (state, flat) = (&self.buffers.state, &self.shape.flats.owned);
        match part {
            Part::Master => self.weight(index),
            Part::Moment1 => slice(state.moment1, flat, index),
            Part::Moment2 => slice(state.moment2, flat, index),
        }
    }

    fn kept_in_bucket(&self, part: Part, index: usize) -> Option<Kept> {
        let (bucket, start, len) = self.places.as_ref()?.place(index)?;
        let bucket = &self.buffers.buckets[bucket];
        let at = |buffer: Buffer| buffer.slice(start, len);
        let moment = match part {
            Part::Master => {
                let weight = at(bucket.weight);
                return Some(match master(bucket) {
                    Master::Weight => Kept::Whole(weight),
                    Master::LowBits(low) => Kept::Halves { weight, low: at(low) },
                    Master::Separate(master) => Kept::Separate { weight, master: at(master) },
                });
            }
            Part::Moment1 => at(bucket.moment1),
            Part::Moment2 => at(bucket.moment2),
        };
        let whole = moment.dtype() == self.table().stored;
        Some(if whole { Kept::Whole(moment) } else { Kept::Rounded(moment) })
    }

    /// Calls `each` with pieces that fit into the stage: their first element, where they are kept,
    /// and as much of the stage.
    fn staged(&mut self, kept: Kept, mut each: impl FnMut(&mut Model, usize, Kept, Buffer)) {
        let stage = self.buffers.scratch.stage;
        if let Kept::Whole(_) = kept {
            return each(self, 0, kept, stage.slice(0, 0));
        }
        for start in (0..kept.len()).step_by(stage.len()) {
            let len = (kept.len() - start).min(stage.len());
            each(self, start, kept.slice(start, len), stage.slice(0, len));
        }
    }

    /// Where values of `kept` are written before [`Model::settle`] takes them there.
    fn target(kept: Kept, stage: Buffer) -> Buffer {
        match kept {
            Kept::Whole(buffer) => buffer,
            Kept::Separate { master, .. } => master,
            Kept::Halves { .. } | Kept::Rounded(_) => stage,
        }
    }

    fn settle(&mut self, kept: Kept, stage: Buffer) {
        match kept {
            Kept::Whole(_) => {}
            Kept::Halves { weight, low } => {
                self.device.split_master(&SplitMaster { master: stage, weight, low });
            }
            Kept::Separate { weight, master } => {
                self.device.cast(&Cast { from: master, to: weight });
            }
            Kept::Rounded(to) => self.device.cast(&Cast { from: stage, to }),
        }
    }

    fn held(&self, index: usize) -> Kept {
        let all = self.table().needed(Part::Master, index);
        self.kept(Part::Master, index, &all)
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
        let (kept, size) = (self.kept(part, index, &elements), self.table().stored.size());
        self.staged(kept, |model, first, kept, stage| {
            match kept {
                Kept::Halves { weight, low } => {
                    model.device.join_master(&JoinMaster { weight, low, master: stage });
                }
                Kept::Rounded(from) => model.device.cast(&Cast { from, to: stage }),
                Kept::Whole(_) | Kept::Separate { .. } => {}
            }
            let from = Model::target(kept, stage).reinterpret(DType::U8);
            let into = &mut into[first * size..first * size + from.len()];
            model.device.read(from, into);
        });
    }

    fn write(&mut self, part: Part, index: usize, elements: Range<u64>, from: &[u8]) {
        let (kept, size) = (self.kept(part, index, &elements), self.table().stored.size());
        self.staged(kept, |model, first, kept, stage| {
            let to = Model::target(kept, stage).reinterpret(DType::U8);
            model.device.write(to, &from[first * size..first * size + to.len()]);
            model.settle(kept, stage);
        });
    }

    fn fill(&mut self, index: usize, value: f64) {
        let kept = self.held(index);
        self.staged(kept, |model, _, kept, stage| {
            model.device.fill(&Fill { value, x: Model::target(kept, stage) });
            model.settle(kept, stage);
        });
    }

    fn fill_normal(&mut self, index: usize, normal: &Normal) {
        let Normal { seed, name_hash, std } = *normal;
        let kept = self.held(index);
        self.staged(kept, |model, first, kept, stage| {
            let (first, x) = (first as u64, Model::target(kept, stage));
            model.device.init_normal(&InitNormal { seed, name_hash, first, std, x });
            model.settle(kept, stage);
        });
    }

    fn clear_moments(&mut self) {
        self.device.fill_zero(self.buffers.state.moment1);
        self.device.fill_zero(self.buffers.state.moment2);
        for bucket in self.buffers.buckets.clone() {
            self.device.fill_zero(bucket.moment1);
            self.device.fill_zero(bucket.moment2);
        }
    }

    fn finish(&mut self) -> Result<(), DeviceFailed> {
        self.device.finish().map_err(|error| DeviceFailed(chain(error)))
    }
}
