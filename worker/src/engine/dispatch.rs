//! Rows on their way between the ranks of an expert group.
//!
//! ```text
//! choices of all tokens to all of the group -> everybody knows every row's place
//!   -> a token once to each rank that holds one of its experts -> rows by (expert, source, token)
//!   -> a row per (token, expert) back, where it lies by (rank, expert, token)
//! ```

use crate::gang::comm::{Comm, CommError};
use crate::engine::model::Model;
use moejob_kernels::{Buffer, DType, Device, GatherRows, NO_EXPERT};
use moejob_protocol::layout::Layout;
use moejob_protocol::model::ModelConfig;

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
    pub(crate) layers: Vec<Homes>,
    /// What this round's forward pass of each layer leaves to its backward pass.
    routes: Vec<Routes>,
}

/// Where the experts of one layer are computed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Homes {
    /// `[expert]`: position in the group.
    owner: Vec<u32>,
    /// `[expert]`: place in the order by (owner, expert).
    pub order: Vec<u32>,
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
pub(crate) struct Rows {
    /// [U, D]
    pub x: Buffer,
    /// u32 [R]
    pub index: Buffer,
    /// u32 [G * S + 1]
    pub offsets: Buffer,
    /// `R`
    pub count: usize,
    /// `S`
    pub sources: usize,
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
    /// The same in backward, where only the tokens' buffer differs.
    pub(crate) fn arrived_rows(&self, layer: usize, round: &Round) -> Rows {
        let moe = self.moe(layer);
        let d = self.dim();
        if self.group.ranks.len() == 1 {
            let t = round.tokens;
            let count = self.own_rows(layer, t);
            let (x, index) = (self.moe_input(layer, t), moe.rows.slice(0, count));
            return Rows { x, index, offsets: moe.offsets, count, sources: 1 };
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

    /// Tells all choices to the group, then sends each own token once to each rank that needs it.
    pub(crate) fn dispatch(
        &mut self,
        layer: usize,
        round: &Round,
        comm: &mut Comm,
    ) -> Result<Rows, CommError> {
        self.share_choices(layer, round, comm)?;
        self.plan_routes(layer, round)?;
        let x = self.moe_input(layer, round.tokens);
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
                    if *id == NO_EXPERT {
                        slot += 1;
                        continue;
                    }
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
            let owner = |id: &u32| homes.owner.get(*id as usize).copied();
            let goes = |slots: &[u32]| slots.iter().any(|id| owner(id) == Some(position));
            let tokens = ids.chunks_exact(k).enumerate().filter(|(_, slots)| goes(slots));
            routes.leaving.extend(tokens.map(|(token, _)| token as u32));
            routes.leaving_starts.push(routes.leaving.len());
        }
        let offsets: Vec<u32> = self.device.read_vec(moe.offsets);
        routes.returned_starts.extend(homes.first.iter().map(|first| offsets[*first] as usize));
    }

    /// Rows of `x` [T, D] to the ranks that need them; what arrives goes to `into` [U, D].
    pub(crate) fn send_tokens(
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
    pub(crate) fn send_back(
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
}
