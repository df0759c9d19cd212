//! Which gangs work: mesh x model -> sizes, with what each rank then needs; and why others do not.

use crate::launch;
use crate::observed::Size;
use moejob_fabric::{overlap, travel};
use moejob_manifest::cost::{self, Budget, Extent, SHOWN_MAX};
use moejob_manifest::devices::{divides, takes_expert_parallel};
use moejob_manifest::job::{Job, Venue};
use moejob_manifest::profile::Backend;
use moejob_manifest::words::{counted, several};
use moejob_protocol::Mesh;
use moejob_protocol::config::Offload;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{
    self, Kind, Masters, OFFLOADED_MASTERS, OFFLOADED_MOMENTS, Part, RankMemory, Types, rank_memory,
};
use serde::Serialize;
use std::collections::BTreeMap;

/// A number of nodes that the job cannot use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Skipped {
    pub nodes: u32,
    pub why: String,
}

impl Skipped {
    /// `3 nodes: a rank needs ..`.
    pub fn sentence(&self) -> String {
        format!("{}: {}", several(self.nodes, "node"), self.why)
    }
}

/// The sizes between min and max that work, ascending, and the others.
pub fn sizes(job: &Job) -> (Vec<Size>, Vec<Skipped>) {
    let placer = Placer::new(job);
    let (mut sizes, mut skipped) = (Vec::new(), Vec::new());
    for nodes in job.nodes.min..=job.nodes.max {
        match placer.layout(nodes) {
            Ok(layout) => {
                let exchange = travel::choice(job, &layout).0;
                let overlap_degree = overlap::choice(job, &layout).0;
                sizes.push(Size { nodes, layout, exchange, overlap_degree });
            }
            Err(why) => skipped.push(Skipped { nodes, why }),
        }
    }
    (sizes, skipped)
}

/// The fewest nodes between min and max that work, as far as the budget reaches. `extent` is that
/// of the job's model.
pub fn least(job: &Job, extent: Extent, budget: &Budget) -> Option<u32> {
    let placer = Placer::of(job, extent);
    (job.nodes.min..=job.nodes.max)
        .take_while(|nodes| budget.take(cost::of_size(job, extent, *nodes)))
        .find(|nodes| placer.layout(*nodes).is_ok())
}

/// `dp` ranks, `ep` of which share the experts.
pub fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

/// What a worker needs of its host's memory beside GPUs. Ranks own alike, but for the last blocks.
pub fn host_memory(job: &Job, layout: &Layout) -> Vec<Part> {
    Placer::new(job).host_memory(layout)
}

/// What `rank` needs.
pub fn memory(job: &Job, layout: &Layout, rank: u32) -> RankMemory {
    Placer::new(job).memory(layout, rank)
}

/// What rank 0 and its worker's host need of some sizes, by number of nodes. Of all of them where
/// that takes no longer than `SHOWN_MAX` allows; else of the smallest, of the largest, of that with
/// `also` nodes, and of as many between as there is time for, evenly.
pub fn needs(job: &Job, sizes: &[Size], also: Option<u32>) -> BTreeMap<u32, Need> {
    let placer = Placer::new(job);
    let steps = sizes.iter().map(|size| cost::of_rank(job, placer.extent, size.layout.mesh));
    let each = steps.sum::<u64>().div_ceil(sizes.len().max(1) as u64);
    let most = (SHOWN_MAX / each.max(1)).max(2) as usize;
    let chosen = |at: usize| match sizes.len() {
        few if few <= most => true,
        // The numbers of those that are counted, `0..most`, stand evenly over `0..sizes.len()`.
        many => {
            let number = |at: usize| at * (most - 1) / (many - 1);
            at == 0 || number(at) > number(at - 1) || Some(sizes[at].nodes) == also
        }
    };
    let of = |(_, size): (usize, &Size)| {
        let host = match job.training.compute.backend {
            Backend::Cuda => placer.host_memory(&size.layout),
            Backend::Cpu => Vec::new(),
        };
        (size.nodes, Need { rank: placer.memory(&size.layout, 0), host })
    };
    sizes.iter().enumerate().filter(|(at, _)| chosen(*at)).map(of).collect()
}

/// Memory of the rank that needs most, and beside GPUs of the host of its worker.
#[derive(Clone, Debug)]
pub struct Need {
    pub rank: RankMemory,
    pub host: Vec<Part>,
}

/// `1.5 GiB`, `12.3 MiB`.
pub fn gib(bytes: u64) -> String {
    let mib = bytes as f64 / (1 << 20) as f64;
    match mib {
        small if small < 0.1 => format!("{} KiB", bytes.div_ceil(1 << 10)),
        mib if mib < 1024.0 => format!("{mib:.1} MiB"),
        mib => format!("{:.1} GiB", mib / 1024.0),
    }
}

/// Elements of the model by where they lie; counted once a job.
struct Placer<'a> {
    job: &'a Job,
    extent: Extent,
    /// Held by every rank.
    dense: u64,
    /// Of all experts together.
    experts: u64,
}

impl<'a> Placer<'a> {
    fn new(job: &'a Job) -> Placer<'a> {
        Placer::of(job, Extent::of(&job.model))
    }

    fn of(job: &'a Job, extent: Extent) -> Placer<'a> {
        let (dense, experts) = (extent.other_elements, extent.expert_elements);
        Placer { job, extent, dense, experts }
    }

    /// How `nodes` nodes are laid out, or why they cannot be.
    fn layout(&self, nodes: u32) -> Result<Layout, String> {
        let job = self.job;
        let dp = nodes * job.profile.ranks;
        let micro_batches = job.micro_batches();
        if dp > micro_batches {
            return Err(format!(
                "a step has {} (training.globalBatchSize / microBatchSize) for {}, and each needs \
                 one",
                counted(micro_batches, "micro-batch", "micro-batches"),
                several(dp, "rank")
            ));
        }
        if let Some(ep) = job.expert_parallel {
            if !divides(ep, dp) {
                let ranks = several(dp, "rank");
                return Err(format!("parallelism.expert: {ep} does not divide {ranks}"));
            }
            return self.fit(dp, ep);
        }
        let mut last = None;
        for ep in self.preferences(dp) {
            match self.fit(dp, ep) {
                Ok(layout) => return Ok(layout),
                Err(why) => last = Some(why),
            }
        }
        Err(last.unwrap_or_else(|| match job.model.slices().each {
            1 if !takes_expert_parallel(job, 1) => {
                "what a rank computes at once is more than its device takes".to_string()
            }
            1 => format!("no expert parallelism divides {dp} ranks"),
            each => format!(
                "parallelism.expertSlices: {each} shares experts out over several GPUs, and {} \
                 cannot",
                several(dp, "rank")
            ),
        }))
    }

    /// Degrees of expert parallelism in the order in which they are tried: on processors the
    /// largest, on GPUs the largest within an NVLink domain, then, for memory's sake, larger ones.
    fn preferences(&self, dp: u32) -> Vec<u32> {
        let most = dp.min(self.job.model.slices().count);
        let mut degrees: Vec<u32> = (1..=most).filter(|ep| divides(*ep, dp)).collect();
        degrees.retain(|ep| takes_expert_parallel(self.job, *ep));
        let profile = &self.job.profile;
        if profile.backend == Backend::Cpu {
            degrees.reverse();
            return degrees;
        }
        let within = degrees.iter().rposition(|ep| *ep <= profile.nvlink_domain).unwrap_or(0);
        degrees.split_off(within)
    }

    fn fit(&self, dp: u32, ep: u32) -> Result<Layout, String> {
        let layout = layout(dp, ep);
        let Some(limit) = self.job.profile.rank_memory else { return Ok(layout) };
        // Rank 0 has the longest runs of experts and of micro-batches.
        let needed = self.memory(&layout, 0).committed;
        if needed > limit {
            let (needs, has, more) = (gib(needed), gib(limit), gib(needed - limit));
            let why = format!("a rank needs {needs} of memory, {more} more than the {has} it has");
            return Err(why);
        }
        Ok(layout)
    }

    /// Of a cluster's GPUs an estimate: jobs of thousands are laid out here, again and again.
    fn memory(&self, layout: &Layout, rank: u32) -> RankMemory {
        let job = self.job;
        let of_this_machine = job.profile.is_this_machine();
        let on_gpus = job.training.compute.backend == Backend::Cuda;
        if on_gpus && layout.mesh.world() > 1 && !of_this_machine {
            return self.device_memory(layout, rank);
        }
        let (model, training, every) = (&job.model, &job.training, job.checkpoint.every_steps);
        let chunks = overlap::choice(job, layout).0;
        let recovery = launch::recovery(job, Venue::Local);
        rank_memory(model, layout, rank, training, &recovery, every, chunks)
    }

    /// Experts of a layer that lie with `rank`, and elements of all its experts.
    fn held(&self, layout: &Layout, rank: u32) -> (u64, u64) {
        let model = &self.job.model;
        let held = layout.experts(model, 0, rank).len() as u64;
        (held, self.experts * held / u64::from(model.slices().count))
    }

    /// Dense elements whose weights, and whose gradients, a rank has: all of them, or by the stage
    /// of ZeRO its own, with what is whole in turn: an end of the model, and two layers.
    fn dense_kept(&self, mesh: Mesh) -> [u64; 2] {
        let (model, zero) = (&self.job.model, self.job.training.compute.zero);
        let ends = u64::from(model.vocab_size) * u64::from(model.hidden_size);
        let ends_of_model = if model.tie_word_embeddings { 1 } else { 2 };
        let layers = u64::from(model.num_hidden_layers).max(1);
        let layer = self.dense.saturating_sub(ends_of_model * ends) / layers;
        let turns = ends + layers.min(2) * layer;
        let own = self.dense.div_ceil(mesh.dp.into()) + turns;
        [zero.divides_weights(), zero.divides_gradients()].map(|divided| {
            if divided && mesh.dp > 1 { own } else { self.dense }
        })
    }

    /// Elements that `rank` updates.
    fn owned(&self, layout: &Layout, rank: u32) -> u64 {
        let (mesh, (_, local)) = (layout.mesh, self.held(layout, rank));
        self.dense.div_ceil(mesh.dp.into()) + local.div_ceil(mesh.edp().into())
    }

    fn host_memory(&self, layout: &Layout) -> Vec<Part> {
        // Of an element: its master and two moments, in fp32.
        let shard = 12 * self.owned(layout, 0);
        let ranks = u64::from(self.job.profile.ranks);
        let offloaded = match self.job.training.compute.offload {
            Offload::None => Vec::new(),
            Offload::Host => self.memory(layout, 0).offloaded,
        };
        memory::host_memory(shard, ranks, layout.mesh.world().into(), &offloaded)
    }

    /// Moments, and what masters have beyond the weights, of so many elements on the host.
    fn offloaded(owned: u64, types: &Types) -> Vec<Part> {
        let masters = match types.masters {
            Masters::Weights => 0,
            Masters::LowBits => Kind::I16.bytes(),
            Masters::Separate => Kind::F32.bytes(),
        };
        vec![
            Part { name: OFFLOADED_MASTERS, bytes: owned * masters },
            Part { name: OFFLOADED_MOMENTS, bytes: owned * 2 * types.moment.bytes() },
        ]
    }

    /// An estimate for a GPU: what must lie there by the design of the step, without workspaces.
    /// Per token of a layer: the residual stream and its norms 4 D, queries and their output
    /// 2 N H, keys and values 2 KV H; per routed row gate, up and their product 3 F and in and
    /// out 2 D. Without recomputation all of it lies there for each layer.
    fn device_memory(&self, layout: &Layout, rank: u32) -> RankMemory {
        let (job, model, mesh) = (self.job, &self.job.model, layout.mesh);
        let wire = job.training.precision.element().bytes();
        let (held, local) = self.held(layout, rank);
        let owned = self.owned(layout, rank);
        let training = &job.training;
        let tokens = u64::from(training.micro_batch_size) * u64::from(training.sequence_length);
        let layers = u64::from(model.num_hidden_layers);
        let dim = u64::from(model.hidden_size);
        let attention = 2 * u64::from(model.q_size()) + 2 * u64::from(model.kv_size());
        // What is computed again lies there once, or as often as layers are together.
        let recompute = training.recompute;
        let together = u64::from(recompute.span(model.num_hidden_layers));
        let kept = |dropped: bool| if dropped { 1 } else { together };
        let norms = kept(recompute.drops_norms());
        let hidden = kept(recompute.drops_hidden());
        let inputs = if together < layers { layers.div_ceil(together) } else { 0 };
        let of_token = together * (2 * dim + attention) + (2 * norms + inputs) * dim;
        let slices = model.slices();
        let inner = 3 * u64::from(slices.width);
        let row_bytes = (hidden * inner + together * 2 * dim) * wire;
        let top_k = u64::from(slices.per_token);
        // What no machine has is counted as what no machine has.
        let times = u64::saturating_mul;
        let routed =
            times(tokens, top_k * u64::from(mesh.ep) * held) / u64::from(slices.count).max(1);
        let worst = times(tokens, u64::from(mesh.ep) * top_k.min(held));
        let types = Types::of(training, mesh.rounds(job.micro_batches()));
        let (state, offloaded) = match training.compute.offload {
            Offload::None => (owned * 12, Vec::new()),
            Offload::Host => (0, Self::offloaded(owned, &types)),
        };
        let [weights, gradients] = self.dense_kept(mesh);
        let gradients = match types.exact {
            // Sums in fp64; of experts beside them those of the own chunk in fp32 alone.
            true => (gradients + local) * 8 + (gradients + local.div_ceil(mesh.edp().into())) * 4,
            false => (gradients + local) * 4,
        };
        let formats = training.compute.formats(types.element, slices.per_token);
        let back = match mesh.ep > 1 && formats.returns_each() {
            true => times(tokens, u64::from(mesh.ep) * formats.token_bytes(dim)[1]),
            false => 0,
        };
        let parts = vec![
            Part { name: "weights", bytes: (weights + local) * wire },
            Part { name: "gradients", bytes: gradients },
            Part { name: "masters and moments", bytes: state },
            Part { name: "activations", bytes: times(tokens, of_token * wire) },
            Part {
                name: "logits",
                bytes: times(tokens, u64::from(model.vocab_size) * (4 + wire)),
            },
            Part { name: "routed rows", bytes: times(routed, row_bytes) },
            Part { name: "rows that come back", bytes: back },
        ];
        let parts: Vec<Part> = parts.into_iter().filter(|part| part.bytes > 0).collect();
        let balanced = parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add);
        let most = worst.saturating_sub(routed);
        let extra = ((routed as f64 * (model.experts.routed_headroom - 1.0)) as u64).min(most);
        RankMemory {
            parts,
            balanced,
            committed: balanced.saturating_add(times(extra, row_bytes)),
            worst: balanced.saturating_add(times(most, row_bytes)),
            offloaded,
        }
    }
}
