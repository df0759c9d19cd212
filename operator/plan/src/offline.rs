//! The plan of a job before there is one: the same `plan()`, over a rehearsal in which every worker
//! does as it is told. It shows what would happen, and what a loss would cost at its worst moment.

mod rehearsal;

pub(crate) use rehearsal::{Rehearsal, node_of_rank};

use crate::allocate::nodes_of_group;
use crate::job::Job;
use crate::observed::{Gang, Size};
use crate::placement::{self, Need, Skipped, gib};
use crate::problem::Problem;
use crate::fabric::{FabricFacts, Keys};
use crate::topology::{self, NodeInfo, Ordered};
use moejob_protocol::memory::RankMemory;
use serde::Serialize;

/// Ranks that are listed one by one.
const RANKS_LISTED_MAX: usize = 64;
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
    pub sizes: Vec<SizeFacts>,
    pub skipped: Vec<Skipped>,
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
            let most = (LOSSES_RANKS / ranks).clamp(2, RANKS_LISTED_MAX);
            let members = gang.members.iter().take(most);
            members.map(|member| vec![member.node.clone()]).collect()
        }
    };
    rehearsal.train();
    let needs = placement::needs(job, &sizes, gang.as_ref().map(|gang| gang.members.len() as u32));
    let what_ifs = losses.into_iter().map(|lost| rehearsal.clone().lose(lost)).collect();
    Outlook {
        job: job.name.clone(),
        profile: job.profile.name.clone(),
        model: ModelFacts {
            parameters: job.model.numel(),
            active: job.model.active_numel(),
            layers: job.model.num_hidden_layers,
            experts: job.model.experts.count,
            per_token: job.model.experts.per_token,
        },
        step: StepFacts {
            steps: job.training.steps,
            sequences: job.training.global_batch_size,
            sequence_length: job.training.sequence_length,
            tokens: tokens_of_step(job),
            micro_batches: job.micro_batches(),
        },
        gang: gang.map(|gang| gang_facts(job, &gang, &rehearsal)),
        sizes: sizes.iter().map(|size| size_facts(job, size, needs.get(&size.nodes))).collect(),
        skipped,
        order: ordered.why,
        fabric,
        why,
        what_ifs,
        unsupported: job.unsupported().iter().map(Problem::sentence).collect(),
    }
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
        let (count, group) = (size.nodes as usize, nodes_of_group(size));
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
        experts_per_rank: ends(job.model.experts.count, mesh.ep),
        micro_batches_per_rank: ends(job.micro_batches(), mesh.dp),
        memory: need.map(|need| memory_facts(&need.rank)),
        host_memory: host.map(|part| (part.name, part.bytes)).collect(),
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
    let ranks = 0..mesh.world().min(RANKS_LISTED_MAX as u32);
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
            buddy: layout.buddy(rank, &nodes),
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
        "model  {} parameters, {} of them for a token; {} layers, {} experts each, {} a token",
        count(model.parameters),
        count(model.active),
        model.layers,
        model.experts,
        model.per_token
    ));
    lines.push(format!(
        "step   {} sequences of {} tokens, {} tokens in {} micro-batches; {} steps",
        step.sequences,
        step.sequence_length,
        count(step.tokens),
        step.micro_batches,
        step.steps
    ));
    outlook.unsupported.iter().for_each(|line| lines.push(format!("NOT YET  {line}")));
    lines.push(String::new());
    sizes_text(outlook, &mut lines);
    match &outlook.gang {
        Some(gang) => gang_text(outlook, gang, &mut lines),
        None => lines.push(nothing_starts(outlook)),
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
    let is = |words: &str| outlook.skipped.iter().all(|skip| skip.why.contains(words));
    let why = match outlook.sizes.is_empty() {
        true => "no number of nodes from nodes.min to nodes.max works; see above".to_string(),
        false => outlook.why.last().cloned().unwrap_or_default(),
    };
    let change = match outlook.sizes.is_empty() {
        false => "more usable nodes, or a smaller nodes.min",
        true if is("of memory") => {
            "a larger nodes.max, a smaller training.microBatchSize or data.sequenceLength, \
             training.recompute, or nodes with more memory"
        }
        true if is("micro-batches") => {
            "a smaller nodes.min, a larger training.globalBatchSize, or a smaller microBatchSize"
        }
        true if is("parallelism.expert") => {
            "a parallelism.expert that divides the ranks, or none: then the plan chooses"
        }
        true => "other nodes.min and nodes.max, or a smaller training.microBatchSize",
    };
    format!("\nnothing starts: {why}\n  what would change it: {change}")
}

fn gang_text(outlook: &Outlook, gang: &GangFacts, lines: &mut Vec<String>) {
    lines.push(format!("\nplacement on {} ({})", several(gang.nodes, "node"), outlook.order));
    lines.push("   RANK  EXPERTS  MICRO-BATCHES  BUDDY  NODE".to_string());
    for rank in &gang.ranks {
        lines.push(format!(
            "  {:>5}  {:>7}  {:>13}  {:>5}  {}{}",
            rank.rank,
            span(rank.experts),
            span(rank.micro_batches),
            rank.buddy.map_or("-".to_string(), |buddy| buddy.to_string()),
            rank.node,
            if rank.device > 0 { format!(" device {}", rank.device) } else { String::new() }
        ));
    }
    if let Some(more) = (gang.dp as usize).checked_sub(gang.ranks.len()).filter(|more| *more > 0) {
        lines.push(format!("  and {more} more"));
    }
    if let Some(fabric) = &outlook.fabric {
        lines.push(format!("  {fabric}"));
    }
    if !gang.spares.is_empty() {
        lines.push(format!("  spares: {}", gang.spares.join(", ")));
    }
    let size = outlook.sizes.iter().find(|size| size.nodes == gang.nodes);
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
    }
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

/// `1 node`, `3 nodes`.
fn several(count: impl Into<u64>, what: &str) -> String {
    match count.into() {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    }
}

/// `3`, or `3-4` where the ends differ.
fn span(ends: [u32; 2]) -> String {
    match ends[0] == ends[1] {
        true => ends[0].to_string(),
        false => format!("{}-{}", ends[0], ends[1]),
    }
}

/// `30.5 B`, `3.35 B`, `1.20 M`, `950`: in the units in which sizes of models are published.
pub fn count(number: u64) -> String {
    let (value, unit) = match number {
        0..1_000 => return number.to_string(),
        1_000..1_000_000 => (number as f64 / 1e3, "k"),
        1_000_000..1_000_000_000 => (number as f64 / 1e6, "M"),
        _ => (number as f64 / 1e9, "B"),
    };
    let decimals = if value < 9.995 { 2 } else { 1 };
    format!("{value:.decimals$} {unit}")
}
