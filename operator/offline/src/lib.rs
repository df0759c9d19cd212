//! The plan of a job before there is one: the same `plan()`, over a rehearsal in which every worker
//! does as it is told. It shows what would happen, and what a loss would cost at its worst moment.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod nodes;
mod offload;
pub mod picture;
mod rehearsal;
mod time;

pub use offload::OffloadPrice;
pub use time::{StepTime, step_time};
pub(crate) use rehearsal::{Rehearsal, node_of_rank};

use moejob_fabric::FabricFacts;
use moejob_fabric::topology::{self, NodeInfo, Ordered};
use moejob_fabric::travel;
use moejob_manifest::cost::CHANGES_SHOWN_MAX;
use moejob_manifest::job::Job;
use moejob_manifest::keys::Keys;
use moejob_manifest::problem::Problem;
use moejob_manifest::words::{count, counted, several};
use moejob_plan::allocate::nodes_of_group;
use moejob_plan::fits::{CUT, Change, Search, changes};
use moejob_plan::observed::{Gang, Size};
use moejob_plan::placement::{self, Need, Skipped, gib};
use moejob_plan::traffic::{self, Expected};
use moejob_protocol::config::Exchange;
use moejob_protocol::layout::buddies;
use moejob_protocol::memory::RankMemory;
use serde::Serialize;

/// Nodes whose ranks are listed.
const LISTED_MAX: usize = 64;
/// Nodes that are not used, as far as they are named.
const LEFT_OUT_MAX: usize = 8;
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

/// The outlook for a person.
pub fn text(outlook: &Outlook) -> String {
    let mut lines = vec![format!("MoeJob {} on nodes of profile {}", outlook.job, outlook.profile)];
    let (model, step) = (&outlook.model, &outlook.step);
    lines.push(format!(
        "model  {} parameters, {} of them for a token; {}, {} each, {} a token",
        count(model.parameters),
        count(model.active),
        several(model.layers, "layer"),
        several(model.experts, "expert"),
        model.per_token
    ));
    lines.push(format!(
        "step   {} of {}, {} tokens in {}; {}",
        several(step.sequences, "sequence"),
        several(step.sequence_length, "token"),
        count(step.tokens),
        counted(step.micro_batches, "micro-batch", "micro-batches"),
        several(step.steps, "step")
    ));
    outlook.unsupported.iter().for_each(|line| lines.push(format!("NOT YET  {line}")));
    lines.push(String::new());
    sizes_text(outlook, &mut lines);
    let named = outlook.left_out.iter().take(LEFT_OUT_MAX);
    lines.extend(named.map(|node| format!("not used: {node}")));
    if let Some(more) = outlook.left_out.len().checked_sub(LEFT_OUT_MAX).filter(|more| *more > 0) {
        lines.push(format!("not used: {more} more"));
    }
    match &outlook.gang {
        Some(gang) => gang_text(outlook, gang, &mut lines),
        None => lines.push(nothing_starts(outlook)),
    }
    if let Some(expected) = &outlook.expected {
        lines.push(String::new());
        lines.extend(expected.lines());
    }
    if !outlook.communication.is_empty() {
        lines.push("\na rank sends in a step".to_string());
        lines.extend(traffic::lines(&outlook.communication));
    }
    lines.push("\nwhat the plan does, and why".to_string());
    lines.extend(outlook.why.iter().map(|why| format!("  {why}")));
    if !outlook.what_ifs.is_empty() {
        let (tried, nodes) = (outlook.what_ifs.len(), outlook.gang.as_ref().map(|of| of.nodes));
        let some = nodes.filter(|nodes| tried > 1 && tried < *nodes as usize);
        let some = some.map(|nodes| format!(": the first {tried} of {nodes} nodes one by one"));
        lines.push(format!("\nwhat if, at the worst moment{}", some.unwrap_or_default()));
        lines.extend(outlook.what_ifs.iter().map(what_if_text));
    }
    lines.join("\n")
}

fn sizes_text(outlook: &Outlook, lines: &mut Vec<String>) {
    lines.push(format!(
        "{:>5} {:>5} {:>5} {:>5} {:>9} {:>13}   {}",
        "NODES", "RANKS", "DP", "EP", "EXPERTS", "MICRO-BATCHES", "MEMORY A RANK: even, kept, worst"
    ));
    for size in &outlook.sizes {
        let memory = match &size.memory {
            Some(memory) => {
                let of = [memory.balanced, memory.committed, memory.worst];
                of.map(gib).join(", ")
            }
            None => "-".to_string(),
        };
        lines.push(format!(
            "{:>5} {:>5} {:>5} {:>5} {:>9} {:>13}   {memory}",
            size.nodes,
            size.ranks,
            size.dp,
            size.ep,
            span(size.experts_per_rank),
            span(size.micro_batches_per_rank),
        ));
    }
    let counted = outlook.sizes.iter().filter(|size| size.memory.is_some()).count();
    if counted < outlook.sizes.len() {
        lines.push(format!(
            "memory was counted for {counted} of {} sizes, the smallest and the largest among \
             them: for all of this model it takes long",
            outlook.sizes.len()
        ));
    }
    for skip in &outlook.skipped {
        lines.push(format!("{:>5} skipped: {}", skip.nodes, skip.why));
    }
    if !outlook.sizes.is_empty() {
        lines.extend(MEMORY_WORDS.map(str::to_string));
    }
}

/// What the three columns of memory mean.
const MEMORY_WORDS: [&str; 3] = [
    "  memory  even: the router gives every expert the same number of tokens",
    "          kept: routedHeadroom times as many reach this rank; it must have room for that",
    "          worst: every token of its expert group chooses this rank's experts",
];

/// Why no worker gets a rank, and what would change that.
fn nothing_starts(outlook: &Outlook) -> String {
    let why = match outlook.sizes.is_empty() {
        true => "no number of nodes from nodes.min to nodes.max works; see above".to_string(),
        false => outlook.why.last().cloned().unwrap_or_default(),
    };
    let changes: Vec<String> = match (outlook.sizes.first(), outlook.changes.is_empty()) {
        (Some(least), _) => {
            vec![format!("usable nodes: {}, which is the fewest that work", least.nodes)]
        }
        (None, true) => vec![
            "nothing that was tried: more nodes, a smaller microBatchSize, recompute, other \
             profiles; a smaller model or data.sequenceLength might"
                .to_string(),
        ],
        (None, false) => outlook.changes.iter().map(Change::sentence).collect(),
    };
    let each = if changes.len() > 1 { ", each by itself" } else { "" };
    let cut = if outlook.changes_cut { CUT } else { "" };
    let changes = changes.join("\n    ");
    format!("\nnothing starts: {why}\n  what would change it{each}{cut}:\n    {changes}")
}

fn gang_text(outlook: &Outlook, gang: &GangFacts, lines: &mut Vec<String>) {
    lines.push(format!("\nplacement on {} ({})", several(gang.nodes, "node"), outlook.order));
    lines.push("      RANKS  EXPERTS  MICRO-BATCHES    BUDDIES  NODE".to_string());
    lines.extend(gang.ranks.chunk_by(|a, b| a.node == b.node).map(ranks_of_node));
    if let Some(more) = (gang.dp as usize).checked_sub(gang.ranks.len()).filter(|more| *more > 0) {
        lines.push(format!("  and {more} more"));
    }
    if let each @ 2.. = outlook.model.slices {
        lines.push(format!("  experts by their slices: {each} of expert e, from {each} e on"));
    }
    if let Some(fabric) = &outlook.fabric {
        lines.push(format!("  {fabric}"));
    }
    if !gang.spares.is_empty() {
        lines.push(format!("  spares: {}", gang.spares.join(", ")));
    }
    let size = outlook.sizes.iter().find(|size| size.nodes == gang.nodes);
    if let Some((size, why)) = size.and_then(|size| Some((size, size.exchange_why.as_ref()?))) {
        let how = match size.exchange {
            Exchange::Flat => "at once",
            Exchange::Hierarchical => "in two stages, within nodes and between them",
        };
        lines.push(format!("  tokens travel {how}: {why}"));
    }
    if let Some((size, memory)) = size.and_then(|size| Some((size, size.memory.as_ref()?))) {
        lines.push("\nmemory of rank 0, even routing".to_string());
        let parts = memory.parts.iter().filter(|(_, bytes)| *bytes > 0);
        let line = |(name, bytes): &(&str, u64)| format!("  {name:<24} {:>12}", gib(*bytes));
        lines.extend(parts.map(line));
        if !size.host_memory.is_empty() {
            let all = size.host_memory.iter().map(|(_, bytes)| bytes).sum();
            lines.push(format!("\nmemory of the host of the first worker, {}", gib(all)));
            lines.extend(size.host_memory.iter().filter(|(_, bytes)| *bytes > 0).map(line));
        }
        lines.extend(size.offload.iter().flat_map(OffloadPrice::lines));
    }
}

/// A node's ranks in one line; each of them takes its part of what the line says.
fn ranks_of_node(ranks: &[RankFacts]) -> String {
    let (first, last) = (&ranks[0], &ranks[ranks.len() - 1]);
    // Two expert groups of one node have the same experts.
    let experts = ranks.iter().map(|rank| rank.experts);
    let experts = experts.reduce(|all, of| [all[0].min(of[0]), all[1].max(of[1])]);
    let buddies: Vec<u32> = ranks.iter().filter_map(|rank| rank.buddy).collect();
    let buddies = match (buddies.iter().min(), buddies.iter().max()) {
        (Some(first), Some(last)) => span([*first, *last]),
        _ => "-".to_string(),
    };
    let of = if ranks.len() > 1 { format!(" devices 0-{}", last.device) } else { String::new() };
    format!(
        "  {:>9}  {:>7}  {:>13}  {:>9}  {}{of}",
        span([first.rank, last.rank]),
        span(experts.unwrap_or_default()),
        span([first.micro_batches[0], last.micro_batches[1]]),
        buddies,
        first.node
    )
}

fn what_if_text(what: &WhatIf) -> String {
    let lost = what.lose.join(", ");
    match (what.nodes, what.steps_lost, &what.resume) {
        (Some(nodes), Some(steps), Some(resume)) => format!(
            "  lose {lost}: {} {} on (dp {}, ep {}) from {resume}; {} {} done again",
            several(nodes, "node"),
            if nodes == 1 { "goes" } else { "go" },
            what.dp.unwrap_or(0),
            what.ep.unwrap_or(0),
            several(steps, "step"),
            if steps == 1 { "is" } else { "are" },
        ),
        (Some(nodes), ..) => {
            let go = if nodes == 1 { "goes" } else { "go" };
            format!("  lose {lost}: {} {go} on undisturbed", several(nodes, "node"))
        }
        _ => {
            let why = what.why.last().map_or("", String::as_str);
            let why = why.strip_prefix("wait: ").unwrap_or(why);
            format!("  lose {lost}: the job rests: {why}")
        }
    }
}

/// `3`, or `3-4` where the ends differ.
fn span(ends: [u32; 2]) -> String {
    match ends[0] == ends[1] {
        true => ends[0].to_string(),
        false => format!("{}-{}", ends[0], ends[1]),
    }
}
