//! The mixture layer in chunks of tokens: while the experts compute one of them, tokens of the next
//! and rows of the last travel.
//!
//! ```text
//! forward   choices of all | depart 0, 1 .. | arrive 0, up, down, back 0 | arrive 1 .. | sums
//! backward  depart 0, 1 .. | arrive 0, input gradients, back 0 | .. | weight gradients | sums
//! ```
//! A chunk is a round of its own, in slices of what the whole round has: nothing but weight
//! gradients sums rows, and these are made of the rows of all chunks at once, in the order that
//! they have in one. So no bit depends on the number of chunks. Every rank has the same number of
//! them, tokens or not: an exchange is a call of all ranks.

use crate::engine::backward::Leaf;
use crate::engine::forward::Pass;
use crate::engine::links::{Flight, words};
use crate::engine::model::Model;
use crate::engine::round::Round;
use crate::engine::slices::Computed;
use moejob_kernels::{Buffer, Combine, CpuDevice, GatherRows, Room, ScatterSum};
use moejob_protocol::buffers::{Moe, MoeScratch, Order, Routes, Travel};
use moejob_protocol::stages::Flows;

/// A chunk of a round, or all of it.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    /// As if its tokens were all.
    pub round: Round,
    /// A number of the layer and the chunk.
    pub at: usize,
    /// Own tokens before it.
    pub first: usize,
    /// Choices of the own tokens, their weights, and the gradients of these: those of slices.
    pub ids: Buffer,
    pub weights: Buffer,
    pub dweights: Buffer,
    /// The parts that are the chunk's of what belongs to tokens, choices and rows.
    pub moe: Moe<Buffer>,
    pub scratch: MoeScratch<Buffer>,
    before: Before,
}

/// What belongs to earlier chunks.
#[derive(Clone, Copy, Debug, Default)]
struct Before {
    /// That this rank computes.
    rows: usize,
    arrived: usize,
    /// Of all tokens of the group.
    choices: usize,
}

/// The rows that weight gradients sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Summed {
    /// `S`
    pub sources: usize,
    /// [U, D] each: tokens, and gradients of them
    pub x: Buffer,
    pub dy: Buffer,
    /// u32 [R]: which of them each row is
    pub index: Buffer,
    /// u32 [G * S + 1]
    pub offsets: Buffer,
    /// u32 [R]: where each row lies; none: one behind the other
    pub order: Option<Buffer>,
    /// [R, 2 F], [R, F]
    pub dh: Buffer,
    pub a_scaled: Buffer,
}

impl Chunk {
    pub fn routes(&self) -> &Routes<Buffer> {
        self.moe.routes.as_ref().expect("expert parallel memory")
    }

    pub fn travel(&self) -> &Travel<Buffer> {
        self.scratch.travel.as_ref().expect("expert parallel memory")
    }

    /// The rows of the own tokens' experts, and their `ds`, when they are back.
    pub fn returned(&self) -> (Buffer, Buffer) {
        match &self.scratch.travel {
            Some(travel) => (travel.returned, travel.ds),
            None => (self.scratch.y, self.scratch.ds),
        }
    }
}

impl Model {
    /// In how many chunks tokens travel.
    pub(crate) fn chunk_count(&self) -> usize {
        if self.group.is_alone() { 1 } else { self.chunks }
    }

    /// From the next step on it is so many, as far as there is memory for their tables.
    pub(crate) fn travel_in(&mut self, chunks: u32) {
        self.chunks = chunks.clamp(1, self.shape.chunks as u32) as usize;
    }

    /// The whole round, where it is one chunk.
    pub(crate) fn whole(&self, layer: usize, round: &Round) -> Chunk {
        assert_eq!(self.chunk_count(), 1, "the round travels in chunks");
        self.chunk(layer, round, 0, Before::default())
    }

    /// All chunks of a round that was routed.
    pub(crate) fn chunks(&self, layer: usize, round: &Round) -> Vec<Chunk> {
        let mut before = Before::default();
        let chunk = |at| {
            let chunk = self.chunk(layer, round, at, before);
            before = self.behind(&chunk);
            chunk
        };
        (0..self.chunk_count()).map(chunk).collect()
    }

    fn chunk(&self, layer: usize, round: &Round, at: usize, before: Before) -> Chunk {
        let (chunks, d) = (self.chunk_count(), self.dim());
        let Computed { slots: k, width: f, .. } = self.slices();
        let (moe, scratch) = (self.moe(layer), self.moe_scratch());
        let first = (0..at).map(|at| round.chunk(at, chunks).tokens).sum::<usize>();
        let round = round.chunk(at, chunks);
        let t = round.tokens;
        let sources = round.sources.len();
        let choices = round.sources.iter().map(|source| source.tokens).sum::<usize>() * k;
        // Of own tokens, of rows from here on, of tokens that arrive from here on, of tables.
        let own = |of: Buffer, width: usize| of.slice(first * width, t * width);
        let from = |of: Buffer, start: usize| of.slice(start, of.len() - start);
        let routed = |of: Buffer, width: usize| from(of, before.rows * width);
        let arrived = |of: Buffer| from(of, before.arrived * d);
        // There is one for each chunk that was planned, also where there are fewer.
        let tables = self.shape.chunks as usize;
        let table = |of: Buffer| of.slice(of.len() / tables * at, of.len() / tables);
        let routes = moe.routes.clone().map(|routes| Routes {
            tokens: arrived(routes.tokens),
            arrived: table(routes.arrived).slice(0, sources + 1),
            leaving: own(routes.leaving, k),
            departures: table(routes.departures),
            returns: table(routes.returns),
            ..routes
        });
        let segments = match routes {
            Some(_) => {
                let segments = self.group.layers[layer].locals * sources + 1;
                table(moe.segments).slice(0, segments)
            }
            None => moe.segments,
        };
        let [ids, weights] = moe.choices().map(|of| own(of, k));
        let of_experts = self.router_scratch().dweights;
        let dweights = own(scratch.slice_dweights.unwrap_or(of_experts), k);
        let moe = Moe {
            slices: None,
            rows: own(moe.rows, k),
            pos: own(moe.pos, k),
            segments,
            row_index: routed(moe.row_index, 1),
            row_weights: routed(moe.row_weights, 1),
            h: routed(moe.h, 2 * f),
            a: routed(moe.a, f),
            routes,
            ..moe
        };
        let travel = scratch.travel.clone().map(|travel| Travel {
            all_ids: travel.all_ids.slice(before.choices, choices),
            all_weights: travel.all_weights.slice(before.choices, choices),
            slots: routed(travel.slots, 1),
            leaving: own(travel.leaving, k * d),
            dy: arrived(travel.dy),
            returned: own(travel.returned, k * d),
            ds: own(travel.ds, k),
            ..travel
        });
        let scratch = MoeScratch {
            ids: own(scratch.ids, k),
            y: routed(scratch.y, d),
            ds: routed(scratch.ds, 1),
            dh: routed(scratch.dh, 2 * f),
            a_scaled: routed(scratch.a_scaled, f),
            travel,
            ..scratch
        };
        let at = layer * chunks + at;
        Chunk { round, at, first, ids, weights, dweights, moe, scratch, before }
    }

    /// What lies before the chunk that follows this one, whose routes are known.
    fn behind(&self, chunk: &Chunk) -> Before {
        let Before { rows, arrived, choices } = chunk.before;
        let (Some(cpu), Some(routes)) = (self.device.as_cpu(), &chunk.moe.routes) else {
            return chunk.before;
        };
        let last = |table: Buffer| words(cpu, table).last().copied().unwrap_or(0);
        let own = chunk.scratch.travel.as_ref().map_or(0, |travel| travel.all_ids.len());
        Before {
            rows: rows + last(chunk.moe.segments),
            arrived: arrived + last(routes.arrived),
            choices: choices + own,
        }
    }

    /// What each rank has room for in one chunk: nothing where one of them has too little for all
    /// chunks together.
    fn rooms(&self, layer: usize, round: &Round) -> Vec<Room> {
        let mut rooms = self.group.rooms();
        let (Some(cpu), Some(routes), Some(travel)) =
            (self.device.as_cpu(), self.moe(layer).routes, self.moe_scratch().travel)
        else {
            return rooms;
        };
        let chunks = (0..self.chunk_count()).map(|at| round.chunk(at, self.chunk_count()));
        let sources: Vec<(usize, usize)> = chunks
            .flat_map(|chunk| chunk.sources)
            .map(|source| (source.position, source.tokens))
            .collect();
        let top_k = self.slices().slots;
        let choices = sources.iter().map(|(_, tokens)| tokens * top_k).sum();
        let all_ids = cpu.slice::<u32>(travel.all_ids.slice(0, choices));
        let owner = cpu.slice::<u32>(routes.owner);
        let flows = Flows::new(rooms.len(), top_k, &sources, owner, all_ids);
        if flows.overflow(rooms.iter().map(|room| (room.rows, room.tokens))) {
            rooms.fill(Room { rows: 0, tokens: 0 });
        }
        rooms
    }
}

impl Pass<'_> {
    /// out = mid + sum over the token's experts, of tokens whose experts are chosen.
    pub(crate) fn forward_in_chunks(&mut self, layer: usize, out: Buffer) {
        let (t, d) = (self.round.tokens, self.model.dim());
        self.share_choices(layer);
        let rooms = self.model.rooms(layer, self.round);
        let x = self.model.moe_input(layer, t);
        let (mut all, mut before) = (Vec::new(), Before::default());
        for at in 0..self.model.chunk_count() {
            let chunk = self.model.chunk(layer, self.round, at, before);
            if chunk.round.tokens > 0 {
                self.place(layer, &chunk);
            }
            self.plan_routes(layer, &chunk, &rooms);
            before = self.model.behind(&chunk);
            let flight = self.tokens_depart(&chunk, x, false);
            all.push((chunk, flight));
        }
        let mut back = Vec::new();
        for (chunk, flight) in all {
            self.links.arrive(&mut self.model.device, flight);
            let rows = self.model.routed_rows(layer, &chunk);
            if rows.sources > 0 {
                self.experts_up(layer, &chunk, &rows);
                self.experts_down(layer, &chunk, &rows);
            }
            let flight = self.rows_depart(&chunk, rows.offsets, false);
            back.push((chunk, flight));
        }
        for (chunk, flight) in back {
            self.links.arrive(&mut self.model.device, flight);
            if chunk.round.tokens > 0 {
                let out = out.slice(chunk.first * d, chunk.round.tokens * d);
                self.sum_rows(layer, &chunk, out);
            }
        }
    }

    /// From `dx`, the gradients of the layer's outputs, to those of its inputs, as far as experts
    /// make them: in `scratch.dnorm`, and of the weights of choices in `scratch.dweights`.
    pub(crate) fn backward_in_chunks(&mut self, layer: usize, dx: Buffer, leaf: &Leaf) {
        let chunks = self.model.chunks(layer, self.round);
        let depart = |chunk: &Chunk| self.tokens_depart(chunk, dx, true);
        let coming: Vec<Flight> = chunks.iter().map(depart).collect();
        let rows: Vec<_> =
            chunks.iter().map(|chunk| self.model.routed_rows(layer, chunk)).collect();
        let computes = !self.round.sources.is_empty() && !leaf.experts.is_empty();
        if computes && self.model.shape.recompute.drops_hidden() {
            for (chunk, rows) in chunks.iter().zip(&rows) {
                self.experts_up(layer, chunk, rows);
            }
        }
        let mut back = Vec::new();
        for ((chunk, rows), flight) in chunks.iter().zip(&rows).zip(coming) {
            self.links.arrive(&mut self.model.device, flight);
            if computes {
                self.experts_backward(layer, chunk, rows, chunk.travel().dy);
            }
            back.push(self.rows_depart(chunk, rows.offsets, true));
        }
        if computes {
            let summed = self.all_rows(layer, &chunks);
            self.experts_gradients(layer, &summed, leaf);
        }
        for (chunk, flight) in chunks.iter().zip(back) {
            self.links.arrive(&mut self.model.device, flight);
            if leaf.dense.is_some() {
                self.sum_gradients(chunk);
            }
        }
    }

    /// out = mid + sum over the token's experts, of the own tokens of a chunk, whose rows are back.
    pub(crate) fn sum_rows(&mut self, layer: usize, chunk: &Chunk, out: Buffer) {
        let (t, d) = (chunk.round.tokens, self.model.dim());
        let mid = self.model.buffers.layers[layer].mid.slice(chunk.first * d, t * d);
        let op = Combine {
            tokens: t,
            top_k: self.model.slices().slots,
            dim: d,
            y: chunk.returned().0,
            pos: chunk.moe.pos,
            weights: chunk.weights,
            residual: Some(mid),
            out,
        };
        self.model.device.combine(&op);
    }

    /// Of the own tokens of a chunk, whose rows are back: the sum of the gradients that their
    /// experts give, and those of their weights.
    pub(crate) fn sum_gradients(&mut self, chunk: &Chunk) {
        let (t, k, d) = (chunk.round.tokens, self.model.slices().slots, self.model.dim());
        let ((x, ds), pos) = (chunk.returned(), chunk.moe.pos);
        let out = self.model.buffers.scratch.dnorm.slice(chunk.first * d, t * d);
        let op = ScatterSum { tokens: t, top_k: k, dim: d, accumulate: false, x, pos, out };
        self.model.device.scatter_sum(&op);
        let (x, y) = (ds, chunk.dweights);
        self.model.device.gather_rows(&GatherRows { rows: t * k, dim: 1, x, index: pos, y });
    }

    /// Rows of the chunk's own tokens to the ranks that need them: of `x` [T, D] for the forward
    /// pass, of gradients for the backward one.
    fn tokens_depart(&mut self, chunk: &Chunk, x: Buffer, backward: bool) -> Flight {
        let d = self.model.dim();
        self.gather_leaving(chunk, x.slice(chunk.first * d, chunk.round.tokens * d));
        self.travelling(chunk, |links, model, way| {
            let into = if backward { way.travel.dy } else { way.routes.tokens };
            links.dispatch_departs(&mut model.device, way, into)
        })
    }

    /// The experts' rows of a chunk back, whose segments are `offsets`, and with `with_ds` their
    /// `ds`.
    fn rows_depart(&mut self, chunk: &Chunk, offsets: Buffer, with_ds: bool) -> Flight {
        self.travelling(chunk, |links, model, way| {
            links.combine_departs(&mut model.device, way, (&chunk.scratch, offsets), with_ds)
        })
    }

    /// What weight gradients sum: the rows of all chunks, in the order of one.
    fn all_rows(&mut self, layer: usize, chunks: &[Chunk]) -> Summed {
        let (moe, scratch) = (self.model.moe(layer), self.model.moe_scratch());
        let travel = scratch.travel.expect("expert parallel memory");
        let Order { offsets, rows, tokens } = travel.order.expect("memory of several chunks");
        let sources = self.round.sources.len();
        let segments = self.model.group.layers[layer].locals * sources;
        let cpu = self.model.device.as_cpu_mut().expect("chunks are for processors");
        let [ends, at, of] = in_order(cpu, segments, chunks);
        let [offsets, rows, tokens] =
            [(offsets, ends), (rows, at), (tokens, of)].map(|(buffer, words)| {
                let buffer = buffer.slice(0, words.len());
                cpu.slice_mut(buffer).copy_from_slice(&words);
                buffer
            });
        Summed {
            sources,
            x: moe.routes.expect("expert parallel memory").tokens,
            dy: travel.dy,
            index: tokens,
            offsets,
            order: Some(rows),
            dh: scratch.dh,
            a_scaled: scratch.a_scaled,
        }
    }
}

/// Rows of all chunks by segment, and in it by chunk, which is by token: where the segments start;
/// where each row lies; and the arrived token that it is.
fn in_order(cpu: &CpuDevice, segments: usize, chunks: &[Chunk]) -> [Vec<u32>; 3] {
    let tables: Vec<_> = chunks
        .iter()
        .map(|chunk| (chunk.before, words(cpu, chunk.moe.segments), chunk.moe.row_index))
        .collect();
    let (mut ends, mut rows, mut tokens) = (vec![0], Vec::new(), Vec::new());
    for segment in 0..segments {
        for (before, starts, index) in &tables {
            let (start, end) = (starts[segment], starts[segment + 1]);
            rows.extend((start..end).map(|row| (before.rows + row) as u32));
            let index = cpu.slice::<u32>(index.slice(start, end - start));
            tokens.extend(index.iter().map(|token| before.arrived as u32 + token));
        }
        ends.push(rows.len() as u32);
    }
    [ends, rows, tokens]
}
