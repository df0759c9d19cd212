//! The state of this rank, as snapshots and checkpoints see it.
//!
//! ```text
//! kept as it is stored          device <-> host
//! bf16 weight + low half        join, split  <-> stage in device memory <-> host
//! bf16 moments                  cast         <-> stage                  <-> host
//! offloaded, as it is stored    copy         <-> stage                  <-> host
//! weight of another's master    rounded      <-  stage                  <-  host
//! ```
//! The states of a GPU pass together, and the host converts them on their way. What it keeps in the
//! host's memory, and what a processor keeps, passes a stage of 16 Mi elements in pieces. In a
//! bucket a rank has masters and moments of its own chunk alone, and weights of all.

use crate::engine::buckets::master;
use crate::engine::machine::check;
use crate::engine::model::Model;
use crate::state::copy::copy;
use crate::state::rank::{DeviceError, Normal, RankState, StateTable};
use moejob_kernels::{
    Buffer, Cast, DType, Device, Fill, InitNormal, JoinMaster, LossScale, Master, Pages,
    SplitMaster, Stored,
};
use moejob_protocol::checkpoint::{Part, ScaleEntry};
use std::ops::Range;

/// How elements of a part lie in memory.
#[derive(Clone, Copy)]
enum Kept {
    /// As they are stored.
    Whole(Buffer),
    /// The same in the memory of a GPU's host. They pass through the stage: the driver makes the
    /// host wait for a copy from there to there.
    Far(Buffer),
    /// A bf16 weight and the low half of its master.
    Halves { weight: Buffer, low: Buffer },
    /// A master of its own beside the weight.
    Separate { weight: Buffer, master: Buffer },
    /// The same, the master in the memory of a GPU's host.
    FarSeparate { weight: Buffer, master: Buffer },
    /// Rounded.
    Rounded(Buffer),
    /// A weight whose master another rank keeps as halves, or nobody: it rounds as that one does.
    Half(Buffer),
}

impl Kept {
    fn slice(self, start: usize, len: usize) -> Kept {
        let cut = |buffer: Buffer| buffer.slice(start, len);
        match self {
            Kept::Whole(buffer) => Kept::Whole(cut(buffer)),
            Kept::Far(buffer) => Kept::Far(cut(buffer)),
            Kept::Halves { weight, low } => Kept::Halves { weight: cut(weight), low: cut(low) },
            Kept::Separate { weight, master } => {
                Kept::Separate { weight: cut(weight), master: cut(master) }
            }
            Kept::FarSeparate { weight, master } => {
                Kept::FarSeparate { weight: cut(weight), master: cut(master) }
            }
            Kept::Rounded(buffer) => Kept::Rounded(cut(buffer)),
            Kept::Half(buffer) => Kept::Half(cut(buffer)),
        }
    }

    /// The memory of a device whose floats pass without a stage; none: they need one.
    fn stored(self) -> Option<Stored> {
        Some(match self {
            Kept::Whole(buffer) | Kept::Separate { master: buffer, .. } => Stored::Plain(buffer),
            Kept::Halves { weight, low } => Stored::Halves { weight, low },
            Kept::Half(weight) => Stored::Upper(weight),
            Kept::Rounded(buffer) => match buffer.dtype() {
                DType::Bf16 => Stored::Bf16(buffer),
                DType::F16 => Stored::F16(buffer),
                _ => return None,
            },
            Kept::Far(_) | Kept::FarSeparate { .. } => return None,
        })
    }

    fn len(self) -> usize {
        match self {
            Kept::Whole(buffer)
            | Kept::Far(buffer)
            | Kept::Rounded(buffer)
            | Kept::Half(buffer) => buffer.len(),
            Kept::Halves { weight, .. }
            | Kept::Separate { weight, .. }
            | Kept::FarSeparate { weight, .. } => weight.len(),
        }
    }
}

impl Model {
    /// Where elements of a part that this rank needs lie: pieces in order.
    fn kept(&self, part: Part, index: usize, elements: &Range<u64>) -> Vec<Kept> {
        let needed = self.table().needed(part, index);
        let within = needed.start <= elements.start && elements.end <= needed.end;
        assert!(within, "{part:?} {elements:?} of {index}: only what is needed is here");
        let places = &self.places;
        let (at, start, _) = places.place(index).expect("what is needed has a place");
        let (bucket, own) = (&self.buffers.buckets[at], places.chunk(at));
        let all = start + elements.start as usize..start + elements.end as usize;
        // What of it lies before, in and behind the own chunk.
        let within = |at: usize| at.clamp(all.start, all.end);
        let (first, last) = (within(own.start), within(own.end));
        let parts = [all.start..first, first..last, last..all.end];
        let cut = |buffer: Buffer, run: &Range<usize>| buffer.slice(run.start, run.len());
        let in_chunk = |buffer: Buffer, run: &Range<usize>| {
            buffer.slice(run.start - own.start, run.len())
        };
        let piece = |(of, run): (usize, &Range<usize>)| {
            let owned = of == 1;
            if let Part::Moment1 | Part::Moment2 = part {
                assert!(owned, "moments are their owner's");
                let moment =
                    if part == Part::Moment1 { bucket.moment1 } else { bucket.moment2 };
                let moment = in_chunk(moment, run);
                let whole = moment.dtype() == self.table().stored;
                return match (whole, moment.offset_on_host()) {
                    (false, _) => Kept::Rounded(moment),
                    (true, None) => Kept::Whole(moment),
                    (true, Some(_)) => Kept::Far(moment),
                };
            }
            let weight = match places.divides_weights(at) {
                true => in_chunk(bucket.weight, run),
                false => cut(bucket.weight, run),
            };
            if !self.shape.trains {
                return match weight.dtype() {
                    dtype if dtype == self.table().stored => Kept::Whole(weight),
                    DType::Bf16 => Kept::Half(weight),
                    _ => Kept::Rounded(weight),
                };
            }
            match (master(bucket), owned) {
                (Master::Weight, _) => Kept::Whole(weight),
                (Master::LowBits(low), true) => Kept::Halves { weight, low: in_chunk(low, run) },
                (Master::LowBits(_), false) => Kept::Half(weight),
                (Master::Separate(master), true) => {
                    let master = in_chunk(master, run);
                    match master.offset_on_host() {
                        None => Kept::Separate { weight, master },
                        Some(_) => Kept::FarSeparate { weight, master },
                    }
                }
                (Master::Separate(_), false) => Kept::Rounded(weight),
            }
        };
        parts.iter().enumerate().filter(|(_, run)| !run.is_empty()).map(piece).collect()
    }

    /// [`Model::kept`] beside the places whose floats cross the bus together. None: on processors,
    /// and where some of them need the stage.
    fn together(
        &self,
        part: Part,
        index: usize,
        elements: &Range<u64>,
    ) -> Option<Vec<(Kept, Stored)>> {
        self.device.as_cuda()?;
        let kept = self.kept(part, index, elements).into_iter();
        kept.map(|kept| Some((kept, kept.stored()?))).collect()
    }

    /// Calls `each` with pieces that fit into the stage: their first element, where they are kept,
    /// and as much of the stage.
    fn staged(&mut self, kept: &[Kept], mut each: impl FnMut(&mut Model, usize, Kept, Buffer)) {
        // Weights of others may be on their way still.
        self.device.await_marks();
        let stage = self.buffers.scratch.stage;
        let mut first = 0;
        for kept in kept.iter().copied() {
            let most = match kept {
                Kept::Whole(_) => kept.len(),
                // The rest of the stage takes low halves that nobody keeps.
                Kept::Half(_) => stage.len() / 2,
                _ => stage.len(),
            };
            for start in (0..kept.len()).step_by(most.max(1)) {
                let len = (kept.len() - start).min(most);
                let of_stage = if let Kept::Whole(_) = kept { 0 } else { len };
                each(self, first + start, kept.slice(start, len), stage.slice(0, of_stage));
            }
            first += kept.len();
        }
    }

    /// Where values of `kept` are written before [`Model::settle`] takes them there.
    fn target(kept: Kept, stage: Buffer) -> Buffer {
        match kept {
            Kept::Whole(buffer) => buffer,
            Kept::Separate { master, .. } => master,
            Kept::Far(_)
            | Kept::FarSeparate { .. }
            | Kept::Halves { .. }
            | Kept::Rounded(_)
            | Kept::Half(_) => stage,
        }
    }

    /// Brings values of `kept` to its [`Model::target`], from where they are read.
    fn unsettle(&mut self, kept: Kept, stage: Buffer) {
        match kept {
            Kept::Halves { weight, low } => {
                self.device.join_master(&JoinMaster { weight, low, master: stage });
            }
            Kept::Rounded(from) | Kept::Half(from) => {
                self.device.cast(&Cast { from, to: stage });
            }
            Kept::Far(from) | Kept::FarSeparate { master: from, .. } => {
                self.device.copy(from, stage);
            }
            Kept::Whole(_) | Kept::Separate { .. } => {}
        }
    }

    fn settle(&mut self, kept: Kept, stage: Buffer) {
        match kept {
            Kept::Whole(_) => {}
            Kept::Halves { weight, low } => {
                self.device.split_master(&SplitMaster { master: stage, weight, low });
            }
            Kept::Half(weight) => {
                let all = self.buffers.scratch.stage;
                let rest = all.slice(all.len() / 2, stage.len());
                let low = rest.reinterpret(DType::I16).slice(0, stage.len());
                self.device.split_master(&SplitMaster { master: stage, weight, low });
            }
            Kept::Separate { weight, master } => {
                self.device.cast(&Cast { from: master, to: weight });
            }
            Kept::Far(to) => self.device.copy(stage, to),
            Kept::FarSeparate { weight, master } => {
                self.device.copy(stage, master);
                self.device.cast(&Cast { from: stage, to: weight });
            }
            Kept::Rounded(to) => self.device.cast(&Cast { from: stage, to }),
        }
    }

    fn held(&self, index: usize) -> Vec<Kept> {
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
            owners: &self.owners,
            rank: self.rank,
            stored: if self.shape.float_bytes == 8 { DType::F64 } else { DType::F32 },
        }
    }

    fn read(&mut self, part: Part, index: usize, elements: Range<u64>, into: &mut [u8]) {
        let (kept, size) = (self.kept(part, index, &elements), self.table().stored.size());
        self.staged(&kept, |model, first, kept, stage| {
            model.unsettle(kept, stage);
            let from = Model::target(kept, stage).reinterpret(DType::U8);
            let into = &mut into[first * size..first * size + from.len()];
            match &model.device {
                Device::Cpu(cpu) => copy(cpu.slice(from), into),
                _ => model.read_bytes(from, into),
            }
        });
    }

    fn read_all(&mut self, pieces: Vec<(Part, usize, Range<u64>, &mut [u8])>, pages: Pages) {
        let (size, mut reads) = (self.table().stored.size(), Vec::new());
        for (part, index, elements, into) in pieces {
            // In a lane they leave one by one, and nobody waits for them.
            let by_lane = self.reads_by_lane();
            match self.together(part, index, &elements).filter(|_| !by_lane) {
                None => {
                    self.read(part, index, elements, into);
                    if !by_lane {
                        pages.settle(into);
                    }
                }
                Some(places) => {
                    let mut rest = into;
                    for (kept, place) in places {
                        let own;
                        (own, rest) = rest.split_at_mut(kept.len() * size);
                        reads.push((place, own));
                    }
                }
            }
        }
        if !reads.is_empty() {
            self.device.read_all(reads, pages);
        }
    }

    fn write(&mut self, part: Part, index: usize, elements: Range<u64>, from: &[u8]) {
        self.forget_whole();
        let (kept, size) = (self.kept(part, index, &elements), self.table().stored.size());
        self.staged(&kept, |model, first, kept, stage| {
            let to = Model::target(kept, stage).reinterpret(DType::U8);
            let from = &from[first * size..first * size + to.len()];
            match &mut model.device {
                Device::Cpu(cpu) => copy(from, cpu.slice_mut(to)),
                device => device.write(to, from),
            }
            model.settle(kept, stage);
        });
    }

    fn write_all(&mut self, pieces: &[(Part, usize, Range<u64>, &[u8])]) {
        self.device.await_marks();
        self.forget_whole();
        let (size, mut writes, mut weights) = (self.table().stored.size(), Vec::new(), Vec::new());
        for (part, index, elements, from) in pieces {
            let Some(places) = self.together(*part, *index, elements) else {
                self.write(*part, *index, elements.clone(), from);
                continue;
            };
            let mut rest = *from;
            for (kept, place) in places {
                let own;
                (own, rest) = rest.split_at(kept.len() * size);
                writes.push((place, own));
                if let Kept::Separate { weight, master } = kept {
                    weights.push(Cast { from: master, to: weight });
                }
            }
        }
        if !writes.is_empty() {
            self.device.write_all(&writes);
        }
        weights.iter().for_each(|weight| self.device.cast(weight));
    }

    fn fill(&mut self, index: usize, value: f64) {
        self.forget_whole();
        let kept = self.held(index);
        self.staged(&kept, |model, _, kept, stage| {
            model.device.fill(&Fill { value, x: Model::target(kept, stage) });
            model.settle(kept, stage);
        });
    }

    fn fill_normal(&mut self, index: usize, normal: &Normal) {
        let Normal { seed, name_hash, place, std } = *normal;
        self.forget_whole();
        let (kept, begin) = (self.held(index), self.table().needed(Part::Master, index).start);
        self.staged(&kept, |model, first, kept, stage| {
            let (first, x) = (begin + first as u64, Model::target(kept, stage));
            model.device.init_normal(&InitNormal { seed, name_hash, first, place, std, x });
            model.settle(kept, stage);
        });
    }

    fn clear_moments(&mut self) {
        for bucket in self.buffers.buckets.clone() {
            self.device.fill_zero(bucket.moment1);
            self.device.fill_zero(bucket.moment2);
        }
    }

    fn loss_scale(&self) -> Option<ScaleEntry> {
        let LossScale { scale, good_steps } = self.scaling?;
        Some(ScaleEntry { scale, good_steps })
    }

    fn set_loss_scale(&mut self, kept: Option<ScaleEntry>) {
        let kept = kept.map(|ScaleEntry { scale, good_steps }| LossScale { scale, good_steps });
        self.scaling = self.scaling.map(|_| kept.unwrap_or(LossScale::FIRST));
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        // The first failure is kept.
        let _ = self.device.finish();
        check(&self.device, self.layout.mesh.world())
    }
}
