//! The part of a mixture layer that is a chunk's, where experts are shared out over ranks.
//!
//! ```text
//! rows of all    chunk 0: rank 0, rank 1 .. | chunk 1: rank 0, rank 1 .. | ..
//! own tokens     c T / n .. (c + 1) T / n of chunk c of n
//! ```
//! A portion is a whole layer of `T / n` tokens of each rank, so every op and verb is the same for
//! it. No size depends on a router: tables and rows of each portion have room for its worst case.
//! With one chunk the only portion is all there is.
//!
//! In several chunks the tokens of some travel while the experts compute another one. What leaves
//! is a flight of the device, two of each portion.

use crate::engine::forward::Pass;
use crate::engine::links::WAITED;
use crate::engine::model::Model;
use crate::engine::round::Round;
use crate::engine::spread::{Here, sums_of_slices};
use moejob_kernels::peer::Need;
use moejob_kernels::{Buffer, MoeDesc, MoeTensors, Saved, Weights};
use moejob_protocol::buffers::{Spread, SpreadScratch};
use moejob_protocol::model::ModelConfig;

/// Which way rows of a portion travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leg {
    Out,
    Back,
}

/// Flights of each portion.
pub(crate) const LEGS: usize = 2;

/// What travels beside products though it is in one chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flying {
    /// Gradients of outputs, beside those of the attention's weights of the layer above.
    pub out: bool,
    /// Gradients of tokens, beside that of up.
    pub back: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Portion {
    /// Of so many.
    at: usize,
    chunks: usize,
    /// In backward, which way also what is all of the round is beside what follows.
    pub fly: Flying,
    /// Where this rank stands in the group.
    me: usize,
    /// Of its tokens of the group, and the experts here.
    pub here: Here,
    /// The parts that are the chunk's.
    pub spread: Spread<Buffer>,
    pub scratch: SpreadScratch<Buffer>,
    /// [R, W], and on processors [R, F]
    h: Buffer,
    a: Buffer,
    /// Which rank of the group needs which token.
    pub need: Need,
}

impl Model {
    /// The portions of a round.
    pub(crate) fn portions(&self, layer: usize, round: &Round) -> Vec<Portion> {
        let chunks = self.shape.chunks as usize;
        (0..chunks).map(|at| self.portion(layer, round, at, chunks)).collect()
    }

    fn portion(&self, layer: usize, round: &Round, at: usize, chunks: usize) -> Portion {
        let fused = self.buffers.layers[layer].fused.as_ref().expect("a mixture layer");
        let parts = self.here.zip(fused.spread.clone()).zip(self.buffers.scratch.spread.clone());
        let ((here, spread), scratch) = parts.expect("memory of experts over ranks");
        let (ranks, rails) = (self.group.ranks.len(), self.group.rails);
        let part = |all: Buffer| part(all, at, chunks);
        let tables = [spread.offsets, spread.order].map(part);
        let [tokens, top_k] = [here.desc.tokens / ranks, here.desc.top_k];
        let spread = Spread {
            x: part(spread.x),
            ids: part(spread.ids),
            weights: part(spread.weights),
            places: spread.places,
            // Ranks with fewer experts use less of them.
            offsets: tables[0].slice(0, here.desc.experts + 1),
            order: tables[1].slice(0, here.desc.experts.min(tables[1].len())),
            rows: part(spread.rows),
            pos: part(spread.pos),
            row_weights: part(spread.row_weights),
        };
        let scratch = SpreadScratch {
            dout: part(scratch.dout),
            partial: part(scratch.partial),
            packed: part(scratch.packed),
            ds: part(scratch.ds),
            own_ds: part(scratch.own_ds),
            choice_ds: scratch.choice_ds,
            // They begin at 0 in each.
            slots: scratch.slots.slice(0, tokens * top_k),
        };
        let need = Need {
            tokens,
            top_k,
            ids: spread.ids,
            present: round.present,
            experts: self.group.layers[layer].ranges(),
            nodes: rails.map_or(1, |rails| rails.nodes),
            node: rails.map_or(0, |rails| rails.node(self.group.me)),
        };
        let (h, a, me) = (part(fused.h), part(fused.a), self.group.me);
        let fly = Flying::default();
        Portion { at, chunks, fly, me, here, spread, scratch, h, a, need }
    }
}

impl Portion {
    /// What travels is beside the ops: both ways where it is not all of the round.
    fn flies(&self, leg: Leg) -> bool {
        let alone = match leg {
            Leg::Out => self.fly.out,
            Leg::Back => self.fly.back,
        };
        self.chunks > 1 || alone
    }

    fn flight(&self, leg: Leg) -> usize {
        LEGS * self.at + leg as usize
    }

    /// The chunk's part of what all own tokens have.
    pub fn of_own(&self, all: Buffer) -> Buffer {
        part(all, self.at, self.chunks)
    }

    /// This rank's part of what all ranks have in the chunk.
    pub fn mine(&self, all: Buffer) -> Buffer {
        part(all, self.me, self.need.experts.len())
    }

    /// The layer of this rank's own tokens of the chunk, as far as these are summed up; of all of
    /// them it is `whole`.
    pub fn own_desc(&self, model: &ModelConfig, whole: MoeDesc) -> MoeDesc {
        if self.chunks > 1 {
            return self.here.own();
        }
        sums_of_slices(model, &whole).unwrap_or(whole)
    }

    /// What the experts here read and keep.
    pub fn tensors(&self, model: &Model, layer: usize) -> MoeTensors {
        let b = model.buffers.layers[layer].fused.as_ref().expect("a mixture layer");
        let none = b.router.losses.slice(0, 0);
        let stacks = model.stacks[layer].expect("a mixture layer has experts");
        let spread = &self.spread;
        MoeTensors {
            x: spread.x,
            residual: None,
            weights: Weights { router: none, bias: None, up: stacks.up, down: stacks.down },
            saved: Saved {
                h: self.h,
                a: self.a,
                logits: none,
                probs: none,
                lse: none,
                ids: spread.ids,
                weights: spread.weights,
                counts: none,
                offsets: spread.offsets,
                order: spread.order,
                rows: spread.rows,
                pos: spread.pos,
                row_weights: spread.row_weights,
                segment_counts: none,
                prob_sums: none,
                losses: none,
                router_halves: none,
            },
            workspace: model.buffers.scratch.workspace,
            loss_scale: None,
        }
    }
}

impl Pass<'_> {
    /// Verbs of a portion: at once, or beside the ops that follow.
    pub(crate) fn depart(
        &mut self,
        portion: &Portion,
        leg: Leg,
        verbs: impl FnOnce(&mut Self),
    ) {
        if !portion.flies(leg) {
            return verbs(self);
        }
        self.model.device.flight_begins();
        verbs(self);
        self.model.device.flight_ends(portion.flight(leg));
    }

    /// The ops that follow read what came by these verbs.
    pub(crate) fn arrive(&mut self, portion: &Portion, leg: Leg) {
        if portion.flies(leg) {
            let device = &mut self.model.device;
            let begun = device.begin_stretch(false);
            device.await_flight(portion.flight(leg));
            device.end_stretch(begun, WAITED);
        }
    }
}

/// The part at `at` of a buffer that has as much in each of `parts`.
pub(crate) fn part(all: Buffer, at: usize, parts: usize) -> Buffer {
    let len = all.len() / parts;
    all.slice(at * len, len)
}
