//! Which gangs work: mesh x model -> sizes, with what each rank then needs; and why others do not.

use crate::launch;
use crate::observed::Size;
use moejob_fabric::travel;
use moejob_manifest::cost::{self, Budget, COUNTED_MAX, Extent, SHOWN_MAX};
use moejob_manifest::devices::{divides, takes_expert_parallel};
use moejob_manifest::job::{Job, Venue};
use moejob_manifest::profile::Backend;
use moejob_manifest::words::{counted, several};
use moejob_protocol::Mesh;
use moejob_protocol::config::Offload;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{
    self, Kind, Masters, Part, RankMemory, Types, rank_memory,
};
use serde::Serialize;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Why a size is left out whose turn to be counted never came.
const NOT_COUNTED: &str = "whether it fits was not counted, since nodes.min to nodes.max are too \
     many sizes of too large a model; narrow them, or set parallelism.expert";

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
    let budget = Budget::new(COUNTED_MAX);
    let (mut sizes, mut skipped) = (Vec::new(), Vec::new());
    for nodes in job.nodes.min..=job.nodes.max {
        match placer.layout(nodes, &budget) {
            Ok(layout) => {
                let exchange = travel::choice(job, &layout).0;
                sizes.push(Size { nodes, layout, exchange });
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
        .take_while(|nodes| budget.take(cost::of_size(job, *nodes)))
        .find(|nodes| placer.layout(*nodes, budget).is_ok())
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
    /// By degree of expert parallelism, the number of ranks that was counted last.
    counted: RefCell<BTreeMap<u32, Counted>>,
}

/// What came of counting the memory of a rank among so many.
struct Counted {
    ranks: u32,
    /// Why they do not fit.
    why: Option<String>,
}

impl Counted {
    /// It says as much of `ranks` ranks: no fewer, and not many more. The more ranks there are, the
    /// less each of them owns, and the more a bucket is padded that ends in even parts.
    fn is_of(&self, ranks: u32) -> bool {
        let more = if self.why.is_some() { self.ranks / 16 } else { self.ranks / 4 };
        (self.ranks..=self.ranks + more).contains(&ranks)
    }
}

impl<'a> Placer<'a> {
    fn new(job: &'a Job) -> Placer<'a> {
        Placer::of(job, Extent::of(&job.model))
    }

    fn of(job: &'a Job, extent: Extent) -> Placer<'a> {
        let (dense, experts) = (extent.other_elements, extent.expert_elements);
        Placer { job, extent, dense, experts, counted: RefCell::default() }
    }

    /// How `nodes` nodes are laid out, or why they cannot be.
    fn layout(&self, nodes: u32, budget: &Budget) -> Result<Layout, String> {
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
            return self.fit(dp, ep, budget);
        }
        let mut last = None;
        for ep in self.preferences(dp) {
            match self.fit(dp, ep, budget) {
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

    fn fit(&self, dp: u32, ep: u32, budget: &Budget) -> Result<Layout, String> {
        let layout = layout(dp, ep);
        let Some(limit) = self.job.profile.rank_memory else { return Ok(layout) };
        let refusal = |needed: u64, about: &str| {
            let (needs, has, more) = (gib(needed), gib(limit), gib(needed - limit));
            format!("a rank needs {about}{needs} of memory, {more} more than the {has} it has")
        };
        let least = self.state_at_least(&layout);
        if least > limit {
            return Err(refusal(least, "at least "));
        }
        let mut all = self.counted.borrow_mut();
        if !all.get(&ep).is_some_and(|known| known.is_of(dp)) {
            if !budget.take(cost::of_rank(self.job, self.extent, layout.mesh)) {
                return Err(NOT_COUNTED.to_string());
            }
            // Rank 0 has the longest runs of experts and of micro-batches.
            let needed = self.memory(&layout, 0).committed;
            let why = (needed > limit).then(|| refusal(needed, ""));
            all.insert(ep, Counted { ranks: dp, why });
        }
        match &all[&ep].why {
            None => Ok(layout),
            Some(why) => Err(why.clone()),
        }
    }

    fn memory(&self, layout: &Layout, rank: u32) -> RankMemory {
        let job = self.job;
        let (model, training, every) = (&job.model, &job.training, job.checkpoint.every_steps);
        let recovery = launch::recovery(job, Venue::Local);
        let rails = travel::rails(job, layout);
        rank_memory(model, layout, rank, training, &recovery, every, rails)
    }

    /// Elements of the experts that lie with `rank`.
    fn held(&self, layout: &Layout, rank: u32) -> u64 {
        let model = &self.job.model;
        let held = layout.experts(model, 0, rank).len() as u64;
        self.experts * held / u64::from(model.slices().count)
    }

    /// Elements that `rank` updates.
    fn owned(&self, layout: &Layout, rank: u32) -> u64 {
        let (mesh, local) = (layout.mesh, self.held(layout, rank));
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

    /// What the state of rank 0 takes of its device, without what is beside it: most jobs that do
    /// not fit are told so by this alone, and nothing is counted of them.
    fn state_at_least(&self, layout: &Layout) -> u64 {
        let (training, mesh) = (&self.job.training, layout.mesh);
        let types = Types::of(training, mesh.rounds(self.job.micro_batches()));
        let masters = match types.masters {
            Masters::Weights => 0,
            Masters::LowBits => Kind::I16.bytes(),
            Masters::Separate => Kind::F32.bytes(),
        };
        let on_device = training.compute.offload == Offload::None;
        let state = if on_device { masters + 2 * types.moment.bytes() } else { 0 };
        let local = self.held(layout, 0);
        let kept = |divided: bool| match divided {
            true => local + self.dense / u64::from(mesh.dp),
            false => local + self.dense,
        };
        let zero = training.compute.zero;
        // What no machine has is counted as what no machine has.
        let times = u64::saturating_mul;
        times(kept(zero.divides_weights()), types.element.bytes())
            .saturating_add(times(kept(zero.divides_gradients()), types.gradient.bytes()))
            .saturating_add(times(self.owned(layout, 0), state))
    }
}
