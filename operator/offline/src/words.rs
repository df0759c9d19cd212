//! The outlook in words: as text, and as the parts that a page has sections for.

use super::{GangFacts, Outlook, RankFacts, WhatIf};
use crate::offload::OffloadPrice;
use crate::outlay;
use moejob_manifest::words::{count, counted, several};
use moejob_plan::fits::{CUT, Change};
use moejob_plan::placement::gib;
use moejob_plan::traffic;
use moejob_protocol::config::Exchange;

/// Nodes that are not used, as far as they are named.
const LEFT_OUT_MAX: usize = 8;

/// A heading, a table whose columns are aligned by spaces, and sentences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    pub title: String,
    pub table: Vec<String>,
    pub lines: Vec<String>,
}

impl Part {
    fn of(title: impl Into<String>) -> Part {
        Part { title: title.into(), ..Part::default() }
    }

    /// The title stands above the rest, where there is one.
    fn text(&self) -> String {
        let title = Some(self.title.as_str()).filter(|title| !title.is_empty());
        let all = title.into_iter().chain(self.table.iter().chain(&self.lines).map(String::as_str));
        all.collect::<Vec<_>>().join("\n")
    }
}

/// The outlook for a person.
pub fn text(outlook: &Outlook) -> String {
    parts(outlook).iter().map(Part::text).collect::<Vec<_>>().join("\n\n")
}

/// All that is told, in its order.
pub fn parts(outlook: &Outlook) -> Vec<Part> {
    let mut parts = vec![job(outlook), sizes(outlook)];
    match &outlook.gang {
        Some(gang) => parts.extend(placement(outlook, gang)),
        None => parts.push(nothing_starts(outlook)),
    }
    if let Some(expected) = &outlook.expected {
        let mut lines = expected.lines();
        parts.push(Part { title: lines.remove(0), lines, ..Part::default() });
    }
    if let Some(outlay) = &outlook.outlay {
        parts.push(Part { lines: outlay.lines(), ..Part::of("all steps") });
    }
    if !outlook.communication.is_empty() {
        let table = traffic::lines(&outlook.communication);
        parts.push(Part { table, ..Part::of("a rank sends in a step") });
    }
    if !outlook.elsewhere.is_empty() {
        let table = outlay::lines(&outlook.elsewhere);
        parts.push(Part { table, ..Part::of("where it would fit, with the fewest nodes") });
    }
    let lines = outlook.why.iter().map(|why| format!("  {why}")).collect();
    parts.push(Part { lines, ..Part::of("what the plan does, and why") });
    if !outlook.what_ifs.is_empty() {
        let (tried, nodes) = (outlook.what_ifs.len(), outlook.gang.as_ref().map(|of| of.nodes));
        let some = nodes.filter(|nodes| tried > 1 && tried < *nodes as usize);
        let some = some.map(|nodes| format!(": the first {tried} of {nodes} nodes one by one"));
        let title = format!("what if, at the worst moment{}", some.unwrap_or_default());
        let lines = outlook.what_ifs.iter().map(what_if_text).collect();
        parts.push(Part { lines, ..Part::of(title) });
    }
    parts
}

fn job(outlook: &Outlook) -> Part {
    let (model, step) = (&outlook.model, &outlook.step);
    let mut lines = vec![
        format!(
            "model  {} parameters, {} of them for a token; {}, {} each, {} a token",
            count(model.parameters),
            count(model.active),
            several(model.layers, "layer"),
            several(model.experts, "expert"),
            model.per_token
        ),
        format!(
            "step   {} of {}, {} tokens in {}; {}",
            several(step.sequences, "sequence"),
            several(step.sequence_length, "token"),
            count(step.tokens),
            counted(step.micro_batches, "micro-batch", "micro-batches"),
            several(step.steps, "step")
        ),
    ];
    outlook.unsupported.iter().for_each(|line| lines.push(format!("NOT YET  {line}")));
    let title = format!("MoeJob {} on nodes of profile {}", outlook.job, outlook.profile);
    Part { lines, ..Part::of(title) }
}

fn sizes(outlook: &Outlook) -> Part {
    let (mut table, mut lines) = (Vec::new(), Vec::new());
    table.push(format!(
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
        table.push(format!(
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
    let named = outlook.left_out.iter().take(LEFT_OUT_MAX);
    lines.extend(named.map(|node| format!("not used: {node}")));
    if let Some(more) = outlook.left_out.len().checked_sub(LEFT_OUT_MAX).filter(|more| *more > 0) {
        lines.push(format!("not used: {more} more"));
    }
    Part { table, lines, ..Part::default() }
}

/// The meaning of the three columns of memory.
const MEMORY_WORDS: [&str; 3] = [
    "  memory  even: the router gives every expert the same number of tokens",
    "          kept: routedHeadroom times as many reach this rank; it must have room for that",
    "          worst: every token of its expert group chooses this rank's experts",
];

/// Why no worker gets a rank, and what would change that.
fn nothing_starts(outlook: &Outlook) -> Part {
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
    let mut lines = vec![format!("  what would change it{each}{cut}:")];
    lines.extend(changes.iter().map(|change| format!("    {change}")));
    Part { lines, ..Part::of(format!("nothing starts: {why}")) }
}

/// The parts that tell where ranks are, and what they need there.
fn placement(outlook: &Outlook, gang: &GangFacts) -> Vec<Part> {
    let mut table = vec!["      RANKS  EXPERTS  MICRO-BATCHES    BUDDIES  NODE".to_string()];
    table.extend(gang.ranks.chunk_by(|a, b| a.node == b.node).map(ranks_of_node));
    let mut lines = Vec::new();
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
    let title = format!("placement on {} ({})", several(gang.nodes, "node"), outlook.order);
    let mut parts = vec![Part { table, lines, title }];
    let Some((size, memory)) = size.and_then(|size| Some((size, size.memory.as_ref()?))) else {
        return parts;
    };
    let table = |parts: &[(&str, u64)]| -> Vec<String> {
        let there = parts.iter().filter(|(_, bytes)| *bytes > 0);
        there.map(|(name, bytes)| format!("  {name:<24} {:>12}", gib(*bytes))).collect()
    };
    let ranks = Part::of("memory of rank 0, even routing");
    parts.push(Part { table: table(&memory.parts), ..ranks });
    if !size.host_memory.is_empty() {
        let all = size.host_memory.iter().map(|(_, bytes)| bytes).sum();
        let host = format!("memory of the host of the first worker, {}", gib(all));
        parts.push(Part { table: table(&size.host_memory), ..Part::of(host) });
    }
    if let (Some(last), Some(offload)) = (parts.last_mut(), &size.offload) {
        last.lines.extend(OffloadPrice::lines(offload));
    }
    parts
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
