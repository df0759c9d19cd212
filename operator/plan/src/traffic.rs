//! What a rank of a gang of GPUs is expected to send in a step, by verb, and how long that takes.
//!
//! ```text
//! dispatch        tokens, choices and weights of all to all ranks of the expert group; gradients
//! combine         sums of what became of them back; gradients of them, and of weights
//! sendRecv        both between nodes, where tokens travel in two stages
//! reduceScatter   gradients of what several ranks hold, once a step, or a round (ZeRO-2)
//! allGather       its new weights, once a step, or as often as they are wanted whole (ZeRO-3)
//! ```
//! Bytes are those that engines send by NCCL, a function of the job and its layout alone; in two
//! stages tokens travel by need, and even routing is assumed. Through windows less travels. The
//! numbers of a step are too few to be counted here.

use crate::placement::gib;
use moejob_fabric::travel::{self, Load, Machines};
use moejob_manifest::job::Job;
use moejob_manifest::words::aligned;
use moejob_protocol::buckets;
use moejob_protocol::communication::{Link, Verb};
use moejob_protocol::config::Backend;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::Types;
use moejob_protocol::owners::Holders;
use moejob_protocol::rails::Rails;
use moejob_protocol::rows::arriving;
use moejob_protocol::zero::{self, Turn};
use serde::Serialize;

/// What one verb is expected to do in a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Expected {
    pub verb: Verb,
    pub link: Link,
    /// That a rank sends.
    pub bytes: u64,
    /// None: the profile says nothing of its links.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Of them, those that the ops of a step wait for; none: nobody knows how long these take.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exposed_seconds: Option<f64>,
    /// It travels beside the ops of a step: tokens in chunks, buckets beside backward and updates.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub beside: bool,
}

impl Expected {
    pub fn bytes_per_second(&self) -> Option<f64> {
        self.seconds.filter(|seconds| *seconds > 0.0).map(|seconds| self.bytes as f64 / seconds)
    }
}

/// Bytes, and the time of them.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    bytes: u64,
    seconds: f64,
}

impl Sum {
    fn add(&mut self, bytes: u64, seconds: f64) {
        self.bytes += bytes;
        self.seconds += seconds;
    }
}

/// Of rank 0 of a gang in this layout; nothing of processors, whose bytes follow from the choices
/// of routers, and of a gang of one rank.
pub fn expected(job: &Job, layout: &Layout) -> Vec<Expected> {
    if job.profile.backend != Backend::Cuda || layout.mesh.world() == 1 {
        return Vec::new();
    }
    let machines = Machines::of(&job.profile);
    let [dispatch, combine, between] = tokens(job, layout, machines);
    let (reduce, gather, beside) = sums(job, layout, machines);
    let all = [
        (Verb::Dispatch, dispatch, false),
        (Verb::Combine, combine, false),
        (Verb::SendRecv, between, false),
        (Verb::ReduceScatter, reduce, beside),
        (Verb::AllGather, gather, beside),
    ];
    let some = all.into_iter().filter(|(_, sum, _)| sum.bytes > 0);
    let of = |(verb, Sum { bytes, seconds }, beside)| Expected {
        verb,
        link: Link::Nccl,
        bytes,
        seconds: machines.map(|_| seconds),
        exposed_seconds: None,
        beside,
    };
    some.map(of).collect()
}

/// How the tokens of a group travel.
struct Way<'a> {
    machines: Option<Machines<'a>>,
    /// Ranks of the group.
    ranks: u64,
    rails: Option<Rails>,
}

impl Way<'_> {
    fn ring(&self, ranks: u64, bytes: u64) -> f64 {
        self.machines.map_or(0.0, |of| of.ring(ranks as u32, bytes as f64))
    }

    /// Every rank of a node gets the `own` bytes of all, or each the sum of those that are its own.
    fn within(&self, own: u64) -> (u64, f64) {
        let (nodes, ranks) = match self.rails.filter(|rails| rails.places > 1) {
            Some(rails) => (rails.nodes as u64, rails.places as u64),
            None => (1, self.ranks),
        };
        (nodes * (ranks - 1) * own, self.ring(ranks, nodes * ranks * own))
    }

    /// Those of the other nodes' ranks of the same place.
    fn between(&self, own: u64) -> (u64, f64) {
        let Some(rails) = self.rails else { return (0, 0.0) };
        let others = rails.nodes as u64 - 1;
        let far = (others * own) as f64;
        let load = Load { near: 0.0, messages: others as f64, far };
        (others * own, self.machines.map_or(0.0, |of| of.stage(load)))
    }
}

/// Dispatch, combine, and what of them goes along rails.
fn tokens(job: &Job, layout: &Layout, machines: Option<Machines>) -> [Sum; 3] {
    let (model, training, mesh) = (&job.model, &job.training, layout.mesh);
    let mut sums = [Sum::default(); 3];
    if mesh.ep == 1 {
        return sums;
    }
    let rails = travel::rails(job, layout);
    let way = Way { machines, ranks: mesh.ep.into(), rails };
    let tokens = job.tokens();
    let top_k = model.slices().per_token;
    let formats = training.compute.formats(training.precision.element(), top_k);
    let by_need = rails.filter(|_| formats.are_as_computed());
    let dim = u64::from(model.hidden_size);
    let [out, again] = [formats.tokens, formats.gradients].map(|of| tokens * of.bytes(dim));
    let back = tokens * formats.rows_back * dim * formats.sums.bytes();
    // A word of 4 bytes for each choice of a token.
    let words = tokens * 4 * u64::from(top_k);
    let layers = model.num_hidden_layers;
    let span = training.recompute.span(layers);
    let mixture = (0..layers).filter(|layer| model.is_moe_layer(*layer));
    // A forward pass, once more in backward of layers whose memory others have taken.
    let forward = |layer: &u32| 1 + u64::from(layer / span < (layers - 1) / span);
    let (once, often) = mixture.fold((0, 0), |(n, all), layer| (n + 1, all + forward(&layer)));
    let rounds = u64::from(job.micro_batches().div_ceil(mesh.dp));
    // Rows with ids and weights; then rows; with gradients of weights.
    let ways = [(often, out + 2 * words, back), (once, again, back + words)];
    for (at, (times, out, back)) in ways.into_iter().enumerate() {
        let times = times * rounds;
        let mut add = |at: usize, (bytes, seconds): (u64, f64)| {
            sums[at].add(times * bytes, times as f64 * seconds);
        };
        if let Some(rails) = by_need {
            let of_token = [out / tokens, formats.token_bytes(dim)[1]];
            let gradients = if at == 1 { 4 } else { 0 };
            for (verb, bytes, near) in needed(job, rails, of_token, gradients) {
                let far = if near { 0.0 } else { bytes };
                let messages = if near { 0.0 } else { (rails.nodes - 1) as f64 };
                let load = Load { near: bytes - far, messages, far };
                add(verb, (bytes as u64, machines.map_or(0.0, |of| of.stage(load))));
            }
            continue;
        }
        let alone = rails.is_some_and(|rails| rails.places == 1);
        // With one rank on each node rails bring all, and sums take the flat way.
        if !alone {
            add(0, way.within(out));
            add(2, way.between(back));
        }
        add(2, way.between(out));
        add(1, way.within(back));
    }
    sums
}

/// What a rank sends of a pass through a layer by need, with even routing, once to each node: which
/// sum it is of, its bytes, and whether they stay within the node. A token takes so many bytes out,
/// and all of its rows so many back, and each choice `gradients` bytes more.
fn needed(
    job: &Job,
    rails: Rails,
    [out, back]: [u64; 2],
    gradients: u64,
) -> [(usize, f64, bool); 4] {
    let (model, tokens) = (&job.model, job.tokens() as f64);
    let (nodes, places) = (rails.nodes as f64, rails.places as f64);
    let held = f64::from(model.experts.count) / (nodes * places);
    let top_k = f64::from(model.slices().per_token);
    let each = job.training.compute.combines_each();
    let far = (nodes - 1.0) * tokens * arriving(model, held * places);
    let near = (places - 1.0) * nodes * tokens * arriving(model, held);
    // Choices of experts on other nodes, and those of a node's that are another rank's.
    let choices = [nodes, places].map(|of| tokens * top_k * (of - 1.0) / of);
    let returned = |at: usize, rows: f64| {
        let rows = if each { choices[at] / top_k } else { rows };
        rows * back as f64 + choices[at] * gradients as f64
    };
    [
        (2, far * out as f64, false),
        (0, near * out as f64, true),
        (1, returned(1, near), true),
        (2, returned(0, far), false),
    ]
}

/// Sums of gradients, new weights, and whether they travel beside the ops.
fn sums(job: &Job, layout: &Layout, machines: Option<Machines>) -> (Sum, Sum, bool) {
    let (model, mesh, zero) = (&job.model, layout.mesh, job.training.compute.zero);
    let rounds = job.micro_batches().div_ceil(mesh.dp);
    let types = Types::of(&job.training, rounds);
    let (layers, tied) = (model.num_hidden_layers, model.tie_word_embeddings);
    let gathers = zero::gathers(layers, tied, job.training.recompute, rounds);
    let holders = Holders::new(model, layout);
    let all = buckets::sizes(model, &holders);
    let (mut reduce, mut gather) = (Sum::default(), Sum::default());
    let ring = |ranks: usize, bytes: u64| {
        machines.map_or(0.0, |of| of.ring(ranks as u32, bytes as f64))
    };
    let of_rank_0 = all.iter().filter(|bucket| bucket.holders.first() == Some(&0));
    for bucket in of_rank_0.filter(|bucket| bucket.holders.len() > 1) {
        let ranks = bucket.holders.len();
        let kinds = match bucket.kind.is_of_vectors() {
            true => [types.summed(types.vector), types.vector],
            false => [types.summed(types.gradient), types.element],
        };
        let turns = Turn::of(bucket.kind, ranks).is_some();
        let times = [
            if turns && zero.divides_gradients() { u64::from(rounds) } else { 1 },
            if turns && zero.divides_weights() { gathers(bucket.kind) } else { 1 },
        ];
        for ((sum, kind), times) in [&mut reduce, &mut gather].into_iter().zip(kinds).zip(times) {
            let chunk = bucket.chunk_len() * kind.bytes();
            let seconds = ring(ranks, bucket.len * kind.bytes());
            sum.add(times * (ranks as u64 - 1) * chunk, times as f64 * seconds);
        }
    }
    (reduce, gather, !zero.is_first() || buckets::mostly_shared(all))
}

/// For a person: a line a verb.
pub fn lines(all: &[Expected]) -> Vec<String> {
    let cells = |of: &Expected| -> Vec<String> {
        let ms = |seconds: f64| format!("{:.1} ms", seconds * 1e3);
        let mut cells = vec![of.verb.name().to_string(), gib(of.bytes)];
        cells.extend(of.seconds.map(ms));
        cells.extend(of.exposed_seconds.map(|waits| format!("{} exposed", ms(waits))));
        cells
    };
    let rows: Vec<Vec<String>> = all.iter().map(cells).collect();
    aligned(&rows, 0..0).lines().map(|line| format!("  {line}")).collect()
}
