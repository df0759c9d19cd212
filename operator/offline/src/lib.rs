//! The plan of a job before there is one: the same `plan()`, over a rehearsal in which every worker
//! does as it is told. It shows what would happen, and what a loss would cost at its worst moment.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod nodes;
mod offload;
pub mod picture;
mod outlay;
mod rehearsal;
pub mod page;
mod time;
mod words;

pub use offload::OffloadPrice;
pub use outlay::{Elsewhere, Outlay};
pub use time::{StepTime, step_time};
pub use words::{Part, parts, text};
pub(crate) use rehearsal::{Rehearsal, node_of_rank};

use moejob_fabric::FabricFacts;
use moejob_fabric::topology::{self, NodeInfo, Ordered};
use moejob_fabric::travel;
use moejob_manifest::cost::CHANGES_SHOWN_MAX;
use moejob_manifest::job::Job;
use moejob_manifest::keys::Keys;
use moejob_manifest::problem::Problem;
use moejob_plan::allocate::nodes_of_group;
use moejob_plan::fits::{Change, Search, changes};
use moejob_plan::observed::{Gang, Size};
use moejob_plan::placement::{self, Need, Skipped};
use moejob_plan::traffic::{self, Expected};
use moejob_protocol::config::Exchange;
use moejob_protocol::layout::buddies;
use moejob_protocol::memory::RankMemory;
use serde::Serialize;

/// Nodes whose ranks are listed.
const LISTED_MAX: usize = 64;
/// Losses that are rehearsed one by one, times the ranks of the gang: each takes as long as the
/// gang is large.
const LOSSES_RANKS: usize = 1 << 15;

/// Everything that `moejob plan` shows.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Outlook {
    pub job: String,
    pub profile: String,
    pub model: ModelFacts,
    pub step: StepFacts,
    /// What runs first, on the nodes that were given.
    pub gang: Option<GangFacts>,
    /// How long a step of that gang may take; none where its profile does not say how fast it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<StepTime>,
    /// All steps take and cost this. It is None where nobody knows how long one takes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outlay: Option<Outlay>,
    /// Kinds of machines, and what of each would train the job.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub elsewhere: Vec<Elsewhere>,
    /// What a rank of GPUs is expected to send in a step, by verb.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub communication: Vec<Expected>,
    pub sizes: Vec<SizeFacts>,
    pub skipped: Vec<Skipped>,
    /// Where no size works: what would make one work, each by itself.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<Change>,
    /// There was more to try.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub changes_cut: bool,
    /// Nodes that are there and are not used: why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// Why nodes are used in this order.
    pub order: String,
    /// What that order costs the fabric; none where the nodes lie on one leaf, or nobody knows.
    pub fabric: Option<FabricFacts>,
    pub why: Vec<String>,
    pub what_ifs: Vec<WhatIf>,
    /// What workers cannot do yet, one sentence each.
    pub unsupported: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelFacts {
    pub parameters: u64,
    /// Of them, those that one token uses.
    pub active: u64,
    pub layers: u32,
    pub experts: u32,
    pub per_token: u32,
    /// Of each expert. Where there are several, ranks have experts by the ids of these.
    #[serde(skip_serializing_if = "is_one")]
    pub slices: u32,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StepFacts {
    pub steps: u64,
    pub sequences: u32,
    pub sequence_length: u32,
    pub tokens: u64,
    pub micro_batches: u32,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SizeFacts {
    pub nodes: u32,
    pub ranks: u32,
    pub dp: u32,
    pub ep: u32,
    /// Least and most, as they differ by at most one.
    pub experts_per_rank: [u32; 2],
    pub micro_batches_per_rank: [u32; 2],
    /// Of large jobs of many sizes that of some of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryFacts>,
    /// Beside GPUs: what a worker needs of its host's memory, in bytes, part by part.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub host_memory: Vec<(&'static str, u64)>,
    /// Where optimizer state lies in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload: Option<OffloadPrice>,
    #[serde(skip_serializing_if = "Exchange::is_flat")]
    pub exchange: Exchange,
    /// Why they exchange so, where they are on several nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exchange_why: Option<String>,
}

fn is_one(number: &u32) -> bool {
    *number == 1
}

/// Bytes of the rank that needs most.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryFacts {
    pub balanced: u64,
    pub committed: u64,
    pub worst: u64,
    pub parts: Vec<(&'static str, u64)>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GangFacts {
    pub nodes: u32,
    pub dp: u32,
    pub ep: u32,
    pub ranks: Vec<RankFacts>,
    /// Nodes with a worker but without a rank.
    pub spares: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RankFacts {
    pub rank: u32,
    pub node: String,
    pub device: u32,
    /// First and last.
    pub experts: [u32; 2],
    pub micro_batches: [u32; 2],
    /// The rank that keeps a second copy of its snapshots.
    pub buddy: Option<u32>,
}

/// What follows from the loss of nodes, at the worst moment.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WhatIf {
    pub lose: Vec<String>,
    /// Nodes that go on; none when the job waits.
    pub nodes: Option<u32>,
    pub dp: Option<u32>,
    pub ep: Option<u32>,
    /// `memory`, `checkpoint` or `initial weights`.
    pub resume: Option<String>,
    /// Steps that are done again.
    pub steps_lost: Option<u64>,
    pub why: Vec<String>,
}

/// Rehearses the job on `nodes` (none: as many as it wants), which lie where their labels `keys`
/// say, and the loss of `lose` together, or of each node of the gang when it is empty.
pub fn outlook(
    job: &Job,
    nodes: Option<&[NodeInfo]>,
    keys: &Keys,
    lose: &[String],
) -> Outlook {
    let (sizes, skipped) = placement::sizes(job);
    let nodes = nodes.map_or_else(|| as_wished(job), <[NodeInfo]>::to_vec);
    let (ordered, fabric) = in_order(job, &nodes, keys, &sizes);
    let mut rehearsal = Rehearsal::new(job, &ordered.nodes);
    rehearsal.settle();
    let why = std::mem::take(&mut rehearsal.why);
    let gang = rehearsal.gang().cloned();
    let losses: Vec<Vec<String>> = match (lose.is_empty(), &gang) {
        (_, None) => Vec::new(),
        (false, _) => vec![lose.to_vec()],
        (true, Some(gang)) => {
            let ranks = gang.layout.mesh.world().max(1) as usize;
            let most = (LOSSES_RANKS / ranks).clamp(2, LISTED_MAX);
            let members = gang.members.iter().take(most);
            members.map(|member| vec![member.node.clone()]).collect()
        }
    };
    rehearsal.train();
    let needs = placement::needs(job, &sizes, gang.as_ref().map(|gang| gang.members.len() as u32));
    let what_ifs = losses.into_iter().map(|lost| rehearsal.clone().lose(lost)).collect();
    let found = sizes.is_empty().then(|| changes(job, CHANGES_SHOWN_MAX));
    let Search { changes, cut: changes_cut } = found.unwrap_or_default();
    let expected = gang.as_ref().and_then(|gang| step_time(job, &gang.layout));
    let communication = match (&expected, &gang) {
        (Some(expected), _) => expected.communication.clone(),
        (None, Some(gang)) => traffic::expected(job, &gang.layout),
        (None, None) => Vec::new(),
    };
    Outlook {
        job: job.name.clone(),
        profile: job.profile.name.clone(),
        model: ModelFacts {
            parameters: job.model.numel(),
            active: job.model.active_numel(),
            layers: job.model.num_hidden_layers,
            experts: job.model.experts.count,
            per_token: job.model.experts.per_token,
            slices: job.model.slices().each,
        },
        step: StepFacts {
            steps: job.training.steps,
            sequences: job.training.global_batch_size,
            sequence_length: job.training.sequence_length,
            tokens: tokens_of_step(job),
            micro_batches: job.micro_batches(),
        },
        outlay: gang.as_ref().zip(expected.as_ref()).map(|(gang, expected)| {
            Outlay::of(job, gang.members.len() as u32 + job.nodes.spares, expected.seconds)
        }),
        elsewhere: outlay::elsewhere(job),
        expected,
        communication,
        gang: gang.map(|gang| gang_facts(job, &gang, &rehearsal)),
        sizes: sizes.iter().map(|size| size_facts(job, size, needs.get(&size.nodes))).collect(),
        changes,
        changes_cut,
        skipped,
        left_out: left_out(&nodes),
        order: ordered.why,
        fabric,
        why,
        what_ifs,
        unsupported: job.unsupported().iter().map(Problem::sentence).collect(),
    }
}

/// `n3: cordoned`, of each node of which a cluster tells why it is not used.
fn left_out(nodes: &[NodeInfo]) -> Vec<String> {
    let why = |node: &NodeInfo| Some(format!("{}: {}", node.name, node.against.as_ref()?));
    nodes.iter().filter_map(why).collect()
}

/// As many nodes as the job wants, where nobody says which there are.
pub(crate) fn as_wished(job: &Job) -> Vec<NodeInfo> {
    let name = |index| format!("node-{index}");
    let node = |index| NodeInfo { name: name(index), usable: true, ..NodeInfo::default() };
    (0..job.nodes.max + job.nodes.spares).map(node).collect()
}

/// The nodes as the job uses them, those of the gang as its ranks are given.
pub(crate) fn in_order(
    job: &Job,
    nodes: &[NodeInfo],
    keys: &Keys,
    sizes: &[Size],
) -> (Ordered, Option<FabricFacts>) {
    let wanted = job.nodes.max + job.nodes.spares;
    let mut ordered = topology::order(nodes, keys, job.nodes.topology, job.nodes.min, wanted);
    let size = sizes.iter().rfind(|size| size.nodes as usize <= ordered.nodes.len());
    let fabric = size.and_then(|size| {
        let (count, group) = (size.nodes as usize, nodes_of_group(size.nodes, &size.layout));
        topology::arranged(nodes, keys, &mut ordered.nodes[..count], group)
    });
    (ordered, fabric)
}

fn tokens_of_step(job: &Job) -> u64 {
    u64::from(job.training.global_batch_size) * u64::from(job.training.sequence_length)
}

fn size_facts(job: &Job, size: &Size, need: Option<&Need>) -> SizeFacts {
    let mesh = size.layout.mesh;
    let ends = |count: u32, parts: u32| [count / parts, count.div_ceil(parts)];
    let host = need.iter().flat_map(|need| &need.host);
    SizeFacts {
        nodes: size.nodes,
        ranks: mesh.world(),
        dp: mesh.dp,
        ep: mesh.ep,
        experts_per_rank: ends(job.model.slices().count, mesh.ep),
        micro_batches_per_rank: ends(job.micro_batches(), mesh.dp),
        memory: need.map(|need| memory_facts(&need.rank)),
        host_memory: host.map(|part| (part.name, part.bytes)).collect(),
        offload: need.and_then(|need| OffloadPrice::of(job, &need.rank)),
        exchange: size.exchange,
        exchange_why: travel::choice(job, &size.layout).1,
    }
}

fn memory_facts(memory: &RankMemory) -> MemoryFacts {
    MemoryFacts {
        balanced: memory.balanced,
        committed: memory.committed,
        worst: memory.worst,
        parts: memory.parts.iter().map(|part| (part.name, part.bytes)).collect(),
    }
}

fn gang_facts(job: &Job, gang: &Gang, rehearsal: &Rehearsal) -> GangFacts {
    let (layout, per_node) = (&gang.layout, job.profile.ranks);
    let mesh = layout.mesh;
    let nodes = node_of_rank(gang, per_node);
    let moe_layer = (0..job.model.num_hidden_layers).find(|layer| job.model.is_moe_layer(*layer));
    let ranks = 0..mesh.world().min(LISTED_MAX as u32 * per_node.max(1));
    let buddies = buddies(&nodes);
    let rank_facts = |rank: u32| {
        let experts = layout.experts(&job.model, moe_layer.unwrap_or(0), rank);
        let micro_batches = mesh.micro_batches(rank, job.micro_batches());
        RankFacts {
            rank,
            node: gang.members[(rank / per_node) as usize].node.clone(),
            device: rank % per_node,
            experts: [
                experts.first().copied().unwrap_or(0),
                experts.last().copied().unwrap_or(0),
            ],
            micro_batches: [micro_batches.start, micro_batches.end.saturating_sub(1)],
            buddy: buddies[rank as usize],
        }
    };
    let idle = rehearsal.tracker.observed.workers.iter().filter(|worker| worker.is_available());
    GangFacts {
        nodes: gang.members.len() as u32,
        dp: mesh.dp,
        ep: mesh.ep,
        ranks: ranks.map(rank_facts).collect(),
        spares: idle.map(|worker| worker.node.clone()).collect(),
    }
}
