//! The mixture layer: route, dispatch, experts, combine, and all of it backwards.
//!
//! ```text
//! own tokens -> route -> choices to all of the expert group        (every rank can now place)
//!            -> rows of x: once to each rank that holds a chosen expert
//!            -> up, down -> a row per (token, expert) comes back -> weighted sum here
//! ```
//! In backward dY travels like x did, and dX rows with <dA', A> come back. With one rank a group
//! nothing travels and the experts read the tokens where they lie.
//!
//! A token's K contributions are summed at its own rank in ascending logical expert id, and the
//! rows of a segment (expert, source) stand in token order: no bit depends on who computes.

use crate::comm::{Comm, CommError};
use crate::model::{Leaf, Model};
use moejob_kernels::{
    Activation, Buffer, Combine, DType, Device, ExpertsDgrad, ExpertsDown, ExpertsDownBackward,
    ExpertsDownWgrad, ExpertsUp, ExpertsUpWgrad, GatherRows, Layout as Order, Matmul, Place, Route,
    RouteBackward, RouteGroups, ScatterRows, ScatterSum, Scoring,
};
use moejob_protocol::buffers::{Moe, MoeScratch, Travel};
use moejob_protocol::layout::Layout;
use moejob_protocol::model::{Activation as ActivationName, ModelConfig, Scoring as ScoringName};

/// One round: a micro-batch on some ranks of the expert group.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// `T` of the own micro-batch; 0 without one.
    pub tokens: usize,
    /// Ranks of the group that have a micro-batch, in ep order.
    pub sources: Vec<Source>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// In the expert group.
    pub position: usize,
    pub tokens: usize,
}

/// The ranks that together hold every expert, as seen by one of them.
#[derive(Clone, Debug)]
pub struct ExpertGroup {
    /// In ep order.
    pub ranks: Vec<u32>,
    /// Where this rank stands among them.
    pub me: usize,
    layers: Vec<Homes>,
    /// What this round's forward pass of each layer leaves to its backward pass.
    routes: Vec<Routes>,
}

/// Where the experts of one layer are computed.
#[derive(Clone, Debug, Default)]
struct Homes {
    /// `[expert]`: position in the group.
    owner: Vec<u32>,
    /// `[expert]`: place in the order by (owner, expert).
    order: Vec<u32>,
    /// `[position]`: the first place of an owner, and one more entry at the end.
    first: Vec<usize>,
    /// `[expert]`: which of this rank's experts it is; `u32::MAX` elsewhere.
    local: Vec<u32>,
    /// `G`
    locals: usize,
}

/// How rows travelled in one layer of one round.
#[derive(Clone, Debug, Default)]
struct Routes {
    /// Own tokens that leave, by destination, each once.
    leaving: Vec<u32>,
    /// `[position]`: where its part of `leaving` starts, and one more entry.
    leaving_starts: Vec<usize>,
    /// `[position]`: own rows computed there start here in `returned`, and one more entry.
    returned_starts: Vec<usize>,
    /// `[source]`: where its tokens start among the arrived, and one more entry.
    arrived_starts: Vec<usize>,
    /// u32 [G * S + 1]
    segments: Vec<u32>,
}

impl ExpertGroup {
    pub fn new(model: &ModelConfig, layout: &Layout, rank: u32) -> ExpertGroup {
        let ranks = layout.mesh.expert_group(rank);
        let me = ranks.iter().position(|member| *member == rank).expect("a rank is in its group");
        let homes = |layer| {
            if !model.is_moe_layer(layer) {
                return Homes::default();
            }
            let of_rank = layout.expert_ranks(model, layer, rank);
            let position = |owner: &u32| ranks.iter().position(|member| member == owner);
            let owner: Vec<u32> = of_rank
                .iter()
                .map(|owner| position(owner).expect("experts are held in the group") as u32)
                .collect();
            let mut by_owner: Vec<usize> = (0..owner.len()).collect();
            by_owner.sort_by_key(|expert| (owner[*expert], *expert));
            let mut order = vec![0; owner.len()];
            by_owner.iter().enumerate().for_each(|(at, expert)| order[*expert] = at as u32);
            let before = |p: usize| owner.iter().filter(|owner| (**owner as usize) < p).count();
            let first = (0..=ranks.len()).map(before).collect();
            let held = layout.experts(model, layer, rank);
            let mut local = vec![u32::MAX; owner.len()];
            held.iter().enumerate().for_each(|(g, expert)| local[*expert as usize] = g as u32);
            Homes { owner, order, first, local, locals: held.len() }
        };
        let layers: Vec<Homes> = (0..model.num_hidden_layers).map(homes).collect();
        let routes = vec![Routes::default(); layers.len()];
        ExpertGroup { ranks, me, layers, routes }
    }
}

/// What the expert products of one rank read in one round.
#[derive(Clone, Copy, Debug)]
struct Rows {
    /// [U, D]
    x: Buffer,
    /// u32 [R]
    index: Buffer,
    /// u32 [G * S + 1]
    offsets: Buffer,
    /// `R`
    count: usize,
    /// `S`
    sources: usize,
}

/// Moves lists of buffers between ranks, through memory that is kept from call to call.
#[derive(Debug, Default)]
pub struct Mail {
    out: Vec<u8>,
    inward: Vec<u8>,
}

/// Buffers that go to, or come from, one rank, in order.
pub type Parcel = (u32, Vec<Buffer>);

impl Mail {
    /// One collective. Parcels without bytes are left out on both sides; the own rank may stand in
    /// both lists.
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn exchange(
        &mut self,
        device: &mut Device,
        comm: &mut Comm,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<(), CommError> {
        let bytes = |parcel: &Parcel| parcel.1.iter().map(Buffer::bytes).sum::<usize>();
        let full = |parcels: &[Parcel]| parcels.iter().map(bytes).sum::<usize>();
        self.out.resize(full(sends).max(self.out.len()), 0);
        self.inward.resize(full(receives).max(self.inward.len()), 0);
        let mut rest = &mut self.out[..];
        let mut outgoing: Vec<(u32, &[u8])> = Vec::with_capacity(sends.len());
        for parcel in sends.iter().filter(|parcel| bytes(parcel) > 0) {
            let (mine, others) = rest.split_at_mut(bytes(parcel));
            rest = others;
            let mut at = 0;
            for buffer in &parcel.1 {
                let end = at + buffer.bytes();
                device.read(buffer.reinterpret(DType::U8), &mut mine[at..end]);
                at = end;
            }
            outgoing.push((parcel.0, mine));
        }
        let mut rest = &mut self.inward[..];
        let mut incoming: Vec<(u32, &mut [u8])> = Vec::with_capacity(receives.len());
        for parcel in receives.iter().filter(|parcel| bytes(parcel) > 0) {
            let (mine, others) = rest.split_at_mut(bytes(parcel));
            rest = others;
            incoming.push((parcel.0, mine));
        }
        comm.exchange(&outgoing, &mut incoming)?;
        let mut at = 0;
        for buffer in receives.iter().flat_map(|parcel| &parcel.1) {
            let end = at + buffer.bytes();
            device.write(buffer.reinterpret(DType::U8), &self.inward[at..end]);
            at = end;
        }
        Ok(())
    }
}

impl Model {
    fn top_k(&self) -> usize {
        self.config.experts.per_token as usize
    }

    fn expert_count(&self) -> usize {
        self.config.experts.count as usize
    }

    fn moe(&self, layer: usize) -> Moe<Buffer> {
        self.buffers.layers[layer].moe.clone().expect("a mixture layer")
    }

    fn moe_scratch(&self) -> MoeScratch<Buffer> {
        self.buffers.scratch.moe.clone().expect("a model with experts has their scratch memory")
    }

    fn travel(&self) -> Travel<Buffer> {
        self.moe_scratch().travel.expect("expert parallel memory")
    }

    /// out = mid + sum over the token's experts
    pub(crate) fn moe_forward(
        &mut self,
        layer: usize,
        round: &Round,
        out: Buffer,
        comm: &mut Comm,
    ) -> Result<(), CommError> {
        let (t, k, d) = (round.tokens, self.top_k(), self.dim());
        if t > 0 {
            self.route(layer, t);
            self.place(layer, t);
        }
        let y = if self.group.ranks.len() == 1 {
            if t == 0 {
                return Ok(());
            }
            self.rows_here(layer, t)
        } else {
            self.dispatch(layer, round, comm)?
        };
        let rows = y;
        if rows.count > 0 {
            self.experts_forward(layer, &rows);
        }
        let returned = if self.group.ranks.len() == 1 {
            self.moe_scratch().y.slice(0, rows.count * d)
        } else {
            self.send_back(layer, round, comm, false)?;
            self.travel().returned.slice(0, t * k * d)
        };
        if t > 0 {
            let moe = self.moe(layer);
            self.device.combine(&Combine {
                tokens: t,
                top_k: k,
                dim: d,
                y: returned,
                pos: moe.pos.slice(0, t * k),
                weights: moe.weights.slice(0, t * k),
                residual: Some(self.buffers.layers[layer].mid.slice(0, t * d)),
                out,
            });
        }
        Ok(())
    }

    fn route(&mut self, layer: usize, t: usize) {
        let (e, k, d) = (self.expert_count(), self.top_k(), self.dim());
        let moe = self.moe(layer);
        let logits = moe.logits.slice(0, t * e);
        let router = self.dense.layers[layer].router.expect("a mixture layer has a router");
        self.device.matmul(&Matmul {
            layout: Order::Nt,
            m: t,
            n: e,
            k: d,
            accumulate: false,
            a: self.buffers.layers[layer].norm2.slice(0, t * d),
            b: router,
            c: logits,
        });
        let config = &self.config.router;
        let groups = RouteGroups {
            count: config.groups as usize,
            kept: config.topk_groups as usize,
        };
        self.device.route(&Route {
            tokens: t,
            experts: e,
            top_k: k,
            scoring: scoring(config.scoring),
            norm_topk: config.norm_topk_prob,
            scale: config.scale,
            groups: (config.groups > 1).then_some(groups),
            logits,
            bias: None,
            probs: moe.probs.slice(0, t * e),
            lse: moe.lse.slice(0, t),
            ids: moe.ids.slice(0, t * k),
            weights: moe.weights.slice(0, t * k),
            counts: moe.counts,
            prob_sums: moe.prob_sums,
            losses: moe.losses,
        });
    }

    /// Sorts the own slots by (rank that computes, expert, token).
    fn place(&mut self, layer: usize, t: usize) {
        let k = self.top_k();
        let (moe, scratch) = (self.moe(layer), self.moe_scratch());
        let order = &self.group.layers[layer].order;
        let mut ids = moe.ids.slice(0, t * k);
        if order.iter().enumerate().any(|(expert, at)| expert as u32 != *at) {
            let mut host: Vec<u32> = self.device.read_vec(ids);
            host.iter_mut().for_each(|id| *id = order[*id as usize]);
            ids = scratch.ids.slice(0, t * k);
            self.device.write(ids, &host);
        }
        self.device.place(&Place {
            tokens: t,
            top_k: k,
            experts: self.expert_count(),
            ids,
            counts: scratch.counts,
            offsets: moe.offsets,
            rows: moe.rows.slice(0, t * k),
            pos: moe.pos.slice(0, t * k),
        });
    }

    /// Without expert parallelism the routed rows are read where they lie.
    fn rows_here(&mut self, layer: usize, t: usize) -> Rows {
        let (k, d) = (self.top_k(), self.dim());
        let moe = self.moe(layer);
        self.device.scatter_rows(&ScatterRows {
            rows: t * k,
            dim: 1,
            x: moe.weights.slice(0, t * k),
            index: moe.pos.slice(0, t * k),
            y: moe.row_weights.slice(0, t * k),
        });
        Rows {
            x: self.buffers.layers[layer].norm2.slice(0, t * d),
            index: moe.rows.slice(0, t * k),
            offsets: moe.offsets,
            count: t * k,
            sources: 1,
        }
    }

    /// The same in backward, where only the tokens' buffer differs.
    fn arrived_rows(&self, layer: usize, round: &Round) -> Rows {
        let moe = self.moe(layer);
        let (k, d) = (self.top_k(), self.dim());
        if self.group.ranks.len() == 1 {
            let t = round.tokens;
            let x = self.buffers.layers[layer].norm2.slice(0, t * d);
            let index = moe.rows.slice(0, t * k);
            return Rows { x, index, offsets: moe.offsets, count: t * k, sources: 1 };
        }
        let routes = &self.group.routes[layer];
        let count = *routes.segments.last().unwrap_or(&0) as usize;
        let tokens = *routes.arrived_starts.last().unwrap_or(&0);
        Rows {
            x: moe.arrived.expect("expert parallel memory").slice(0, tokens * d),
            index: moe.row_index.slice(0, count),
            offsets: moe.segments.slice(0, routes.segments.len().max(1)),
            count,
            sources: round.sources.len(),
        }
    }

    fn experts_forward(&mut self, layer: usize, rows: &Rows) {
        let (d, f) = (self.dim(), self.config.experts.intermediate_size as usize);
        let (moe, scratch) = (self.moe(layer), self.moe_scratch());
        let a = moe.a.slice(0, rows.count * f);
        self.device.experts_up(&ExpertsUp {
            dim: d,
            hidden: f,
            sources: rows.sources,
            activation: activation(self.config.experts.activation),
            gated: true,
            x: rows.x,
            row_index: rows.index,
            offsets: rows.offsets,
            w_gate: &self.experts[layer].gate,
            w_up: &self.experts[layer].up,
            h: moe.h.slice(0, rows.count * 2 * f),
            a,
        });
        self.device.experts_down(&ExpertsDown {
            dim: d,
            hidden: f,
            sources: rows.sources,
            a,
            offsets: rows.offsets,
            w_down: &self.experts[layer].down,
            y: scratch.y.slice(0, rows.count * d),
        });
    }

    /// Tells all choices to the group, then sends each own token once to each rank that needs it.
    fn dispatch(
        &mut self,
        layer: usize,
        round: &Round,
        comm: &mut Comm,
    ) -> Result<Rows, CommError> {
        self.share_choices(layer, round, comm)?;
        self.plan_routes(layer, round)?;
        let x = self.buffers.layers[layer].norm2;
        let into = self.moe(layer).arrived.expect("expert parallel memory");
        self.send_tokens(layer, round, x, into, comm)?;
        Ok(self.arrived_rows(layer, round))
    }

    fn share_choices(
        &mut self,
        layer: usize,
        round: &Round,
        comm: &mut Comm,
    ) -> Result<(), CommError> {
        let (k, t) = (self.top_k(), round.tokens);
        let (moe, travel) = (self.moe(layer), self.travel());
        let own = vec![moe.ids.slice(0, t * k), moe.weights.slice(0, t * k)];
        let sends: Vec<Parcel> = self.group.ranks.iter().map(|to| (*to, own.clone())).collect();
        let mut at = 0;
        let mut receives: Vec<Parcel> = Vec::new();
        for source in &round.sources {
            let len = source.tokens * k;
            let parts = vec![travel.all_ids.slice(at, len), travel.all_weights.slice(at, len)];
            receives.push((self.group.ranks[source.position], parts));
            at += len;
        }
        self.mail.exchange(&mut self.device, comm, &sends, &receives)
    }

    /// From everybody's choices: who sends what to whom, and in which row it arrives.
    fn plan_routes(&mut self, layer: usize, round: &Round) -> Result<(), CommError> {
        let (k, me) = (self.top_k(), self.group.me);
        let (moe, travel) = (self.moe(layer), self.travel());
        let slots: usize = round.sources.iter().map(|source| source.tokens * k).sum();
        let ids: Vec<u32> = self.device.read_vec(travel.all_ids.slice(0, slots));
        let homes = &self.group.layers[layer];
        let mut routes = std::mem::take(&mut self.group.routes[layer]);
        let sources = round.sources.len();
        // Per segment (g, s) the arrived token and the slot of each row.
        let mut segments: Vec<Vec<(u32, u32)>> = vec![Vec::new(); homes.locals * sources];
        routes.arrived_starts.clear();
        routes.arrived_starts.push(0);
        let (mut slot, mut arrived) = (0, 0);
        for (s, source) in round.sources.iter().enumerate() {
            for _ in 0..source.tokens {
                let mut comes = false;
                for id in &ids[slot..slot + k] {
                    let owner = homes.owner.get(*id as usize).ok_or_else(|| {
                        let rank = self.group.ranks[source.position];
                        let found = format!("a choice of expert {id}");
                        let expected = format!("one of {}", homes.owner.len());
                        CommError::Protocol { rank, found, expected }
                    })?;
                    if *owner as usize == me {
                        let g = homes.local[*id as usize] as usize;
                        segments[g * sources + s].push((arrived, slot as u32));
                        comes = true;
                    }
                    slot += 1;
                }
                arrived += u32::from(comes);
            }
            routes.arrived_starts.push(arrived as usize);
        }
        routes.segments.clear();
        routes.segments.push(0);
        let mut rows = 0;
        for segment in &segments {
            rows += segment.len() as u32;
            routes.segments.push(rows);
        }
        let order: Vec<(u32, u32)> = segments.into_iter().flatten().collect();
        let index: Vec<u32> = order.iter().map(|row| row.0).collect();
        let slots: Vec<u32> = order.iter().map(|row| row.1).collect();
        self.plan_leaving(layer, round.tokens, &mut routes);
        self.device.write(moe.segments.slice(0, routes.segments.len()), &routes.segments);
        let row_index = moe.row_index.slice(0, index.len());
        // The weights follow their rows by the slot's index, which then makes way for the token's.
        self.device.write(row_index, &slots);
        self.device.gather_rows(&GatherRows {
            rows: slots.len(),
            dim: 1,
            x: travel.all_weights,
            index: row_index,
            y: moe.row_weights.slice(0, slots.len()),
        });
        self.device.write(row_index, &index);
        self.group.routes[layer] = routes;
        Ok(())
    }

    /// Which own tokens go to each rank of the group, and where their rows come back to.
    fn plan_leaving(&self, layer: usize, t: usize, routes: &mut Routes) {
        let (k, homes) = (self.top_k(), &self.group.layers[layer]);
        let moe = self.moe(layer);
        let positions = self.group.ranks.len();
        routes.leaving.clear();
        routes.leaving_starts.clear();
        routes.leaving_starts.push(0);
        routes.returned_starts.clear();
        if t == 0 {
            routes.leaving_starts.resize(positions + 1, 0);
            routes.returned_starts.resize(positions + 1, 0);
            return;
        }
        let ids: Vec<u32> = self.device.read_vec(moe.ids.slice(0, t * k));
        for position in 0..positions as u32 {
            let goes = |slots: &[u32]| slots.iter().any(|id| homes.owner[*id as usize] == position);
            let tokens = ids.chunks_exact(k).enumerate().filter(|(_, slots)| goes(slots));
            routes.leaving.extend(tokens.map(|(token, _)| token as u32));
            routes.leaving_starts.push(routes.leaving.len());
        }
        let offsets: Vec<u32> = self.device.read_vec(moe.offsets);
        routes.returned_starts.extend(homes.first.iter().map(|first| offsets[*first] as usize));
    }

    /// Rows of `x` [T, D] to the ranks that need them; what arrives goes to `into` [U, D].
    fn send_tokens(
        &mut self,
        layer: usize,
        round: &Round,
        x: Buffer,
        into: Buffer,
        comm: &mut Comm,
    ) -> Result<(), CommError> {
        let d = self.dim();
        let travel = self.travel();
        let routes = &self.group.routes[layer];
        let count = routes.leaving.len();
        let index = travel.index.slice(0, count);
        self.device.write(index, &routes.leaving);
        let leaving = travel.leaving.slice(0, count * d);
        let x = x.slice(0, round.tokens * d);
        self.device.gather_rows(&GatherRows { rows: count, dim: d, x, index, y: leaving });
        let part = |buffer: Buffer, starts: &[usize], at: usize| {
            vec![buffer.slice(starts[at] * d, (starts[at + 1] - starts[at]) * d)]
        };
        let ranks = &self.group.ranks;
        let sends: Vec<Parcel> = (0..ranks.len())
            .map(|p| (ranks[p], part(leaving, &routes.leaving_starts, p)))
            .collect();
        let receives: Vec<Parcel> = (round.sources.iter().enumerate())
            .map(|(s, source)| {
                (ranks[source.position], part(into, &routes.arrived_starts, s))
            })
            .collect();
        self.mail.exchange(&mut self.device, comm, &sends, &receives)
    }

    /// A row per (token, expert) back to where the token lives; in backward with its `ds`.
    fn send_back(
        &mut self,
        layer: usize,
        round: &Round,
        comm: &mut Comm,
        with_ds: bool,
    ) -> Result<(), CommError> {
        let d = self.dim();
        let (scratch, travel) = (self.moe_scratch(), self.travel());
        let routes = &self.group.routes[layer];
        let (ranks, sources) = (&self.group.ranks, round.sources.len());
        let segment = |buffer: Buffer, width: usize, g: usize, s: usize| {
            let at = g * sources + s;
            let (start, end) = (routes.segments[at] as usize, routes.segments[at + 1] as usize);
            buffer.slice(start * width, (end - start) * width)
        };
        let locals = self.group.layers[layer].locals;
        let mut sends: Vec<Parcel> = Vec::new();
        for (s, source) in round.sources.iter().enumerate() {
            let mut parts: Vec<Buffer> =
                (0..locals).map(|g| segment(scratch.y, d, g, s)).collect();
            if with_ds {
                parts.extend((0..locals).map(|g| segment(scratch.ds, 1, g, s)));
            }
            sends.push((ranks[source.position], parts));
        }
        let mut receives: Vec<Parcel> = Vec::new();
        for (p, rank) in ranks.iter().enumerate() {
            let (start, end) = (routes.returned_starts[p], routes.returned_starts[p + 1]);
            let mut parts = vec![travel.returned.slice(start * d, (end - start) * d)];
            if with_ds {
                parts.push(travel.ds.slice(start, end - start));
            }
            receives.push((*rank, parts));
        }
        self.mail.exchange(&mut self.device, comm, &sends, &receives)
    }

    /// dnorm = the gradient of the layer's output, `scratch.dx`, through experts and router.
    pub(crate) fn moe_backward(
        &mut self,
        layer: usize,
        round: &Round,
        leaf: &Leaf,
        comm: &mut Comm,
    ) -> Result<(), CommError> {
        let (t, k, d) = (round.tokens, self.top_k(), self.dim());
        let dx = self.buffers.scratch.dx;
        let alone = self.group.ranks.len() == 1;
        let dy = if alone {
            dx.slice(0, t * d)
        } else {
            let into = self.travel().dy;
            self.send_tokens(layer, round, dx, into, comm)?;
            into
        };
        let rows = self.arrived_rows(layer, round);
        if rows.sources > 0 && !leaf.experts.is_empty() {
            self.experts_backward(layer, &rows, dy, leaf);
        }
        let scratch = self.moe_scratch();
        let (returned, ds) = if alone {
            (scratch.y.slice(0, rows.count * d), scratch.ds.slice(0, rows.count))
        } else {
            self.send_back(layer, round, comm, true)?;
            let travel = self.travel();
            (travel.returned.slice(0, t * k * d), travel.ds.slice(0, t * k))
        };
        let Some(gradients) = leaf.dense else { return Ok(()) };
        let pos = self.moe(layer).pos.slice(0, t * k);
        let dnorm = self.buffers.scratch.dnorm.slice(0, t * d);
        self.device.scatter_sum(&ScatterSum {
            tokens: t,
            top_k: k,
            dim: d,
            accumulate: false,
            x: returned,
            pos,
            out: dnorm,
        });
        let y = scratch.dweights.slice(0, t * k);
        self.device.gather_rows(&GatherRows { rows: t * k, dim: 1, x: ds, index: pos, y });
        let gradient = gradients.layers[layer].router.expect("a mixture layer has a router");
        self.route_backward(layer, t, gradient);
        Ok(())
    }

    fn experts_backward(&mut self, layer: usize, rows: &Rows, dy: Buffer, leaf: &Leaf) {
        let (dim, hidden) = (self.dim(), self.config.experts.intermediate_size as usize);
        let (moe, scratch) = (self.moe(layer), self.moe_scratch());
        let (sources, offsets, row_index) = (rows.sources, rows.offsets, rows.index);
        let dh = scratch.dh.slice(0, rows.count * 2 * hidden);
        let a_scaled = scratch.a_scaled.slice(0, rows.count * hidden);
        self.device.experts_down_backward(&ExpertsDownBackward {
            dim,
            hidden,
            sources,
            activation: activation(self.config.experts.activation),
            gated: true,
            dy,
            row_index,
            offsets,
            w_down: &self.experts[layer].down,
            h: moe.h.slice(0, rows.count * 2 * hidden),
            a: moe.a.slice(0, rows.count * hidden),
            s: moe.row_weights.slice(0, rows.count),
            ds: scratch.ds.slice(0, rows.count),
            dh,
            a_scaled,
        });
        let locals = self.experts[layer].gate.len();
        let mut dw: [Vec<Buffer>; 3] = Default::default();
        for g in 0..locals {
            for source in &leaf.experts {
                dw[0].push(source[layer].gate[g]);
                dw[1].push(source[layer].up[g]);
                dw[2].push(source[layer].down[g]);
            }
        }
        let dw_down = &dw[2];
        let op =
            ExpertsDownWgrad { dim, hidden, sources, dy, row_index, offsets, a_scaled, dw_down };
        self.device.experts_down_wgrad(&op);
        self.device.experts_up_wgrad(&ExpertsUpWgrad {
            dim,
            hidden,
            sources,
            gated: true,
            x: rows.x,
            row_index,
            offsets,
            dh,
            dw_gate: &dw[0],
            dw_up: &dw[1],
        });
        self.device.experts_dgrad(&ExpertsDgrad {
            dim,
            hidden,
            sources,
            gated: true,
            dh,
            offsets,
            w_gate: &self.experts[layer].gate,
            w_up: &self.experts[layer].up,
            dx: scratch.y.slice(0, rows.count * dim),
        });
    }

    /// The router's gradient, and dnorm += what flows through its logits.
    fn route_backward(&mut self, layer: usize, t: usize, gradient: Buffer) {
        let (e, k, d) = (self.expert_count(), self.top_k(), self.dim());
        let (moe, scratch) = (self.moe(layer), self.moe_scratch());
        let dlogits = scratch.dlogits.slice(0, t * e);
        let config = &self.config.router;
        self.device.route_backward(&RouteBackward {
            tokens: t,
            experts: e,
            top_k: k,
            scoring: scoring(config.scoring),
            norm_topk: config.norm_topk_prob,
            scale: config.scale,
            aux_coef: config.aux_loss_coef * self.router_scale,
            z_coef: config.z_loss_coef * self.router_scale,
            logits: moe.logits.slice(0, t * e),
            probs: moe.probs.slice(0, t * e),
            lse: moe.lse.slice(0, t),
            ids: moe.ids.slice(0, t * k),
            counts: moe.counts,
            dweights: scratch.dweights.slice(0, t * k),
            dlogits,
        });
        let x = self.buffers.layers[layer].norm2.slice(0, t * d);
        if self.config.router.frozen {
            self.device.fill_zero(gradient);
        } else {
            let (layout, accumulate) = (Order::Tn, false);
            let (a, b, c) = (dlogits, x, gradient);
            self.device.matmul(&Matmul { layout, m: e, n: d, k: t, accumulate, a, b, c });
        }
        let (layout, accumulate) = (Order::Nn, true);
        let b = self.dense.layers[layer].router.expect("a mixture layer has a router");
        let (a, c) = (dlogits, self.buffers.scratch.dnorm.slice(0, t * d));
        self.device.matmul(&Matmul { layout, m: t, n: d, k: e, accumulate, a, b, c });
    }

    /// Auxiliary and z loss of the loaded micro-batch, summed over the layers, and the slots that
    /// chose each expert, `[layer][expert]`, added to `counts`.
    pub fn routing(&self, round: &Round, counts: &mut [u64]) -> [f64; 2] {
        let mut sums = [0.0; 2];
        if round.tokens == 0 {
            return sums;
        }
        let mixture = self.buffers.layers.iter().filter_map(|layer| layer.moe.as_ref());
        for (moe, counts) in mixture.zip(counts.chunks_exact_mut(self.expert_count())) {
            let mut losses = [0.0; 2];
            self.device.read(moe.losses, &mut losses);
            (sums[0], sums[1]) = (sums[0] + losses[0], sums[1] + losses[1]);
            let chosen: Vec<u32> = self.device.read_vec(moe.counts);
            for (sum, count) in counts.iter_mut().zip(chosen) {
                *sum += u64::from(count);
            }
        }
        sums
    }
}

fn scoring(name: ScoringName) -> Scoring {
    match name {
        ScoringName::Softmax => Scoring::Softmax,
        ScoringName::Sigmoid => Scoring::Sigmoid,
    }
}

/// `trainer::unsupported` refuses what has no op before a model is made.
fn activation(name: ActivationName) -> Activation {
    match name {
        ActivationName::Relu => Activation::Relu,
        ActivationName::Silu | ActivationName::Gelu => Activation::Silu,
    }
}
