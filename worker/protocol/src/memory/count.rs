//! What a rank needs, counted part by part.

use super::*;
use crate::buckets::sizes;

/// The memory of `rank`, part by part: of its device where that is a GPU, else of the host. A
/// checkpoint every `checkpoint_steps` is a snapshot of its own only where none is taken for
/// memory's sake at the same step. Tokens travel along `rails`.
pub fn rank_memory(
    model: &ModelConfig,
    layout: &Layout,
    rank: u32,
    training: &TrainingConfig,
    recovery: &RecoveryConfig,
    checkpoint_steps: u64,
    rails: Option<Rails>,
) -> RankMemory {
    let shape = Shape { rails, ..Shape::new(model, layout, rank, training) };
    let mut count = Count::of(model, &shape);
    if training.compute.backend == Backend::Cuda {
        count.device(layout.mesh.world() > 1);
        match window_bytes(model, layout, training, shape.rails) {
            0 => {}
            _ if shape.by_need() => {}
            bytes => count.add("windows", bytes),
        }
    } else {
        let shares = checkpoint_steps.is_multiple_of(recovery.memory_every_steps.max(1));
        count.host(model, layout, rank, shares);
    }
    count.told()
}

/// The memory of a model by itself, without peers, snapshots and checkpoints: of one that is
/// measured, or that generates text.
pub fn model_memory(model: &ModelConfig, shape: &Shape) -> RankMemory {
    let mut count = Count::of(model, shape);
    match shape.on_cpu {
        true => count.add("process", PROCESS_BYTES),
        false => count.device(false),
    }
    count.told()
}

/// What a GPU takes beside its context and its arena: cuBLASLt's workspace, tables, and with others
/// NCCL's buffers.
pub fn beside_arena(with_others: bool) -> u64 {
    TABLES_BYTES + if with_others { LINKS_BYTES + NEXT_LINKS_BYTES } else { 0 }
}

/// Rooms of a window by which `positions` ranks of a node exchange the tokens of an expert group:
/// `tokens` each, with rails those of the own one. A token has so many bytes, on its way out and
/// back, and `top_k` choices. The rooms hold rows, ids and weights that others take; or, in
/// turn, rows and gradients of weights that the others bring.
pub fn window_rooms(positions: u64, tokens: u64, [out, back]: [u64; 2], top_k: u64) -> u64 {
    let taken = tokens.saturating_mul(out + 2 * 4 * top_k);
    let others = positions.saturating_sub(1).saturating_mul(tokens);
    taken.max(others.saturating_mul(back + 4 * top_k))
}

/// What a GPU takes for a window, by which tokens of expert groups travel within a node; none where
/// none travel. Those that travel by need ([`Shape::by_need`]) take no window.
pub fn window_bytes(
    model: &ModelConfig,
    layout: &Layout,
    training: &TrainingConfig,
    rails: Option<Rails>,
) -> u64 {
    let [nodes, positions] = match rails {
        Some(Rails { nodes, places }) => [nodes as u64, places as u64],
        None => [1, u64::from(layout.mesh.ep)],
    };
    if positions == 1 || training.compute.backend != Backend::Cuda {
        return 0;
    }
    let own = u64::from(training.micro_batch_size) * u64::from(training.sequence_length);
    let tokens = nodes * own;
    let (element, top_k) = (training.precision.element(), model.slices().slots);
    let bytes = training.compute.formats(element, top_k).token_bytes(model.hidden_size.into());
    let rooms = window_rooms(positions, tokens, bytes, top_k.into());
    let bytes = rooms.saturating_add(WINDOW_MAIL);
    bytes.checked_next_multiple_of(WINDOW_PAGE).unwrap_or(bytes)
}

/// A planner that only counts.
struct Count<'a> {
    shape: &'a Shape,
    parts: Vec<Part>,
    offloaded: Vec<Part>,
    headroom: f64,
    /// Beyond the balanced bytes.
    committed: u64,
    worst: u64,
}

impl<'a> Count<'a> {
    /// Every buffer that a rank of this shape computes in.
    fn of(model: &ModelConfig, shape: &'a Shape) -> Count<'a> {
        let headroom = model.experts.routed_headroom.max(1.0);
        let (parts, offloaded, committed, worst) = (Vec::new(), Vec::new(), 0, 0);
        let mut count = Count { shape, parts, offloaded, headroom, committed, worst };
        let _ = crate::buffers::Buffers::plan(model, shape, &mut count);
        count
    }

    fn told(self) -> RankMemory {
        let Count { parts, offloaded, committed, worst, .. } = self;
        let balanced = parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add);
        let [committed, worst] = [committed, worst].map(|more| balanced.saturating_add(more));
        RankMemory { parts, balanced, committed, worst, offloaded }
    }

    fn add(&mut self, name: &'static str, bytes: u64) {
        add_to(&mut self.parts, name, bytes);
    }

    /// What a GPU takes beside the arena: its context and modules, cuBLASLt's workspace, tables,
    /// and with others NCCL's buffers.
    fn device(&mut self, with_others: bool) {
        self.add("context", CONTEXT_BYTES);
        self.add("tables", TABLES_BYTES);
        if with_others {
            self.add("links", LINKS_BYTES + NEXT_LINKS_BYTES);
        }
    }

    /// What lies outside of the arena.
    fn host(&mut self, model: &ModelConfig, layout: &Layout, rank: u32, shares: bool) {
        let shape = self.shape;
        let world = u64::from(layout.mesh.world());
        let mut shards = elements_of_chunks(model, layout);
        // Weight and two moments.
        shards.iter_mut().for_each(|shard| *shard *= 3 * shape.float_bytes);
        let shard = shards.swap_remove(rank as usize);
        let buddy = shards.into_iter().max();
        self.add("snapshots", GENERATIONS * (shard + buddy.unwrap_or(0)));
        if shares {
            // A slow disk holds it longer than two snapshots live.
            self.worst = self.worst.saturating_add(shard);
        } else {
            self.add("checkpoint", shard);
        }
        // Sums and weights of buckets are copied on their way, out and in, so many at once.
        let gradient = shape.types.summed(shape.types.gradient).bytes();
        let weights: u64 = shape.buckets.iter().map(|bucket| bucket.len).sum();
        let sums = weights.saturating_mul(gradient).min(EXCHANGE_BYTES_MAX) * 2;
        let staging = if world > 1 { sums } else { 0 };
        self.add("exchange", staging.saturating_add(pipes_of_rank(1, world)));
        self.add("process", PROCESS_BYTES);
    }
}

fn add_to(parts: &mut Vec<Part>, name: &'static str, bytes: u64) {
    match parts.iter_mut().find(|part| part.name == name) {
        Some(part) => part.bytes = part.bytes.saturating_add(bytes),
        None => parts.push(Part { name, bytes }),
    }
}

impl Planner for Count<'_> {
    type Buffer = ();

    fn part(&mut self, name: &'static str) {
        self.add(name, 0);
        // The part that was named last is the one that is filled.
        let at = self.parts.iter().position(|part| part.name == name);
        let last = self.parts.len() - 1;
        self.parts.swap(at.unwrap_or(last), last);
    }

    fn alloc(&mut self, kind: Kind, rows: Rows, width: u64) {
        // What no machine has is counted as what no machine has.
        let bytes = |rows: u64| rows as f64 * width as f64 * kind.bytes() as f64;
        let [balanced, worst] = self.shape.rows(rows);
        let even = bytes(balanced);
        let worst = bytes(worst.max(balanced));
        let headroom = if matches!(rows, Rows::Fixed(_)) { 1.0 } else { self.headroom };
        let add = |to: &mut u64, bytes: f64| *to = to.saturating_add(bytes as u64);
        add(&mut self.worst, worst - even);
        add(&mut self.committed, (even * headroom).min(worst) - even);
        let last = self.parts.last_mut().expect("`part` comes before `alloc`");
        add(&mut last.bytes, even);
    }

    fn alloc_on_host(&mut self, name: &'static str, kind: Kind, len: u64) {
        add_to(&mut self.offloaded, name, len * kind.bytes());
    }

    fn part_of(&mut self, (): (), _at: u64, _parts: u64) {}
}

/// Parts of a GPU's state that may lie on its host.
pub const OFFLOADED_MASTERS: &str = "offloaded masters";
pub const OFFLOADED_MOMENTS: &str = "offloaded moments";

/// The memory of the host of a process that drives a GPU, as it grows to over hours: the driver's,
/// NCCL's 0.8 GiB, code of kernels, pinned pieces for copies of state.
const ENGINE_BYTES: u64 = 1536 << 20;
/// The worker beside its engines: streams, feeder, writer of checkpoints.
const WORKER_BYTES: u64 = 512 << 20;

/// The pipes of one rank in a world of so many, of which a worker has `ranks`. For what steps
/// exchange there are two to each other rank. For copies there is one to its buddy, and one from
/// the rank whose buddy it is. All are touched in time, since each is a ring.
fn pipes_of_rank(ranks: u64, world: u64) -> u64 {
    let peers = world - 1;
    2 * (peers + peers.min(1)) * (PIPE_HEAD + pipe_bytes(ranks, world))
}

/// The memory of the host that a worker needs beside GPUs, part by part: `ranks` ranks of `world`,
/// each with a shard of so many bytes, and with `offloaded` parts of its state on the host.
/// Snapshots are counted whole: a worker on a machine with less memory takes none, and goes on from
/// checkpoints alone.
pub fn host_memory(shard: u64, ranks: u64, world: u64, offloaded: &[Part]) -> Vec<Part> {
    let own = ranks * shard;
    let others = world > ranks;
    let mut parts = vec![
        Part { name: "snapshots", bytes: GENERATIONS * own },
        Part { name: "snapshots of others", bytes: if others { GENERATIONS * own } else { 0 } },
        Part { name: "checkpoint", bytes: own },
        Part { name: "engines", bytes: ranks * ENGINE_BYTES },
        Part { name: "worker", bytes: WORKER_BYTES },
        Part { name: "pipes between ranks", bytes: ranks * pipes_of_rank(ranks, world) },
    ];
    let of_all = |part: &Part| Part { bytes: ranks * part.bytes, ..part.clone() };
    parts.extend(offloaded.iter().map(of_all));
    parts
}

/// Elements of what every rank owns, with what its chunks of buckets have beyond parameters.
fn elements_of_chunks(model: &ModelConfig, layout: &Layout) -> Vec<u64> {
    let holders = Holders::new(model, layout);
    let mut elements = vec![0; layout.mesh.world() as usize];
    for bucket in sizes(model, &holders) {
        for rank in bucket.holders {
            elements[*rank as usize] += bucket.chunk_len();
        }
    }
    elements
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring is touched whole after some thousands of steps of a few words each.
    #[test]
    fn the_pipes_of_a_large_gang_are_counted() {
        let pipes = |ranks, world| {
            let parts = host_memory(1 << 30, ranks, world, &[]);
            let found = parts.into_iter().find(|part| part.name == "pipes between ranks");
            found.map(|part| part.bytes)
        };
        // To and from another one, and for copies to a buddy and from a ward.
        assert_eq!(pipes(1, 2), Some((2 + 2) * (PIPE_HEAD + PIPE_BYTES)));
        assert_eq!(pipes(1, 1), Some(0));
        for world in [64, 512, 1024, 4096] {
            let found = pipes(8, world).unwrap_or(0);
            assert!(found <= PIPES_BYTES_MAX && found > PIPES_BYTES_MAX / 2, "{world}: {found}");
        }
    }

    /// Who brings most: one other, or many.
    #[test]
    fn rooms_hold_what_is_taken_or_brought() {
        assert_eq!(window_rooms(2, 16_384, [4096; 2], 8), 16_384 * (4096 + 64));
        assert_eq!(window_rooms(8, 16_384, [4096; 2], 8), 7 * 16_384 * (4096 + 32));
        assert_eq!(window_rooms(1, 10, [64; 2], 2), 10 * 80);
        // Sums that come back in fp32.
        assert_eq!(window_rooms(2, 16_384, [4096, 8192], 8), 16_384 * (8192 + 32));
    }

    #[test]
    fn what_all_ranks_offload_is_memory_of_their_host() {
        let offloaded = [Part { name: OFFLOADED_MOMENTS, bytes: 5 }];
        let all = |offloaded| -> u64 {
            host_memory(1 << 30, 8, 16, offloaded).iter().map(|part| part.bytes).sum()
        };
        assert_eq!(all(&offloaded), all(&[]) + 40);
        let parts = host_memory(1 << 30, 8, 16, &offloaded);
        assert_eq!(parts.last(), Some(&Part { name: "offloaded moments", bytes: 40 }));
    }
}
