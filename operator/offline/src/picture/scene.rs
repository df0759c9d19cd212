//! What is drawn, as facts.

use crate::{Rehearsal, as_wished, in_order};
use moejob_fabric::{FabricFacts, tree_links};
use moejob_fabric::topology::NodeInfo;
use moejob_manifest::job::Job;
use moejob_manifest::keys::{Keys, depth};
use moejob_manifest::profile::Profile;
use moejob_manifest::spec::Level;
use moejob_plan::observed::Gang;
use moejob_plan::placement;
use moejob_protocol::memory::RankMemory;
use std::collections::BTreeMap;

/// All that is drawn.
pub struct Picture {
    pub job: String,
    pub profile: Profile,
    /// One, or before and after a loss.
    pub scenes: Vec<Scene>,
    /// Of the rank that needs most.
    pub memory: Option<RankMemory>,
    pub micro_batches: u32,
}

/// A gang on its nodes.
pub struct Scene {
    pub title: String,
    /// Members in the order of their ranks, then the others.
    pub seats: Vec<Seat>,
    pub members: usize,
    /// Ranks of an expert group.
    pub group: u32,
    /// First and last expert of each rank, in a layer that has experts.
    pub experts: Vec<[u32; 2]>,
    /// Child and parent of each link: the first tree's, then the second's, by member.
    pub trees: Vec<(u32, u32)>,
    pub facts: Option<FabricFacts>,
}

/// A node.
pub struct Seat {
    pub name: String,
    /// The leaf as its label has it, and a number that no other leaf has.
    pub leaf: (String, u32),
    pub lost: bool,
}

/// Rehearses the job as `moejob plan` does, and the loss of `lose` if there are any.
///
/// # Errors
/// No gang can start: why.
pub fn picture(
    job: &Job,
    nodes: Option<&[NodeInfo]>,
    keys: &Keys,
    lose: &[String],
) -> Result<Picture, String> {
    let nodes = nodes.map_or_else(|| as_wished(job), <[NodeInfo]>::to_vec);
    let (sizes, skipped) = placement::sizes(job);
    let (ordered, _) = in_order(job, &nodes, keys, &sizes);
    let mut rehearsal = Rehearsal::new(job, &ordered.nodes);
    rehearsal.settle();
    let Some(gang) = rehearsal.gang().cloned() else {
        let why = rehearsal.why.last().cloned();
        let why = why.or(skipped.last().map(|skip| skip.why.clone())).unwrap_or_default();
        return Err(format!("no gang can start, so there is nothing to draw: {why}"));
    };
    let places = Drawn::new(&nodes, &ordered.nodes, keys);
    let title = if lose.is_empty() { "the gang" } else { "before" };
    let mut scenes = vec![places.scene(job, title.to_string(), &gang, &[])];
    if !lose.is_empty() {
        rehearsal.train();
        rehearsal.lose_nodes(lose);
        let lost = lose.join(", ");
        let resting = Gang { members: Vec::new(), ..gang.clone() };
        let scene = match rehearsal.gang() {
            Some(after) => places.scene(job, format!("after the loss of {lost}"), after, lose),
            None => {
                let why = rehearsal.why.last().map_or("", String::as_str);
                let title = format!("after the loss of {lost} the job rests: {why}");
                places.scene(job, title, &resting, lose)
            }
        };
        scenes.push(scene);
    }
    Ok(Picture {
        job: job.name.clone(),
        profile: job.profile.clone(),
        scenes,
        memory: Some(placement::memory(job, &gang.layout, 0)),
        micro_batches: job.micro_batches(),
    })
}

/// Where the nodes lie.
struct Drawn<'a> {
    order: &'a [String],
    leaves: BTreeMap<&'a str, (String, u32)>,
}

impl<'a> Drawn<'a> {
    fn new(nodes: &'a [NodeInfo], order: &'a [String], keys: &Keys) -> Drawn<'a> {
        let mut numbers: BTreeMap<Vec<&str>, u32> = BTreeMap::new();
        let mut leaves = BTreeMap::new();
        for node in nodes {
            let mut path = node.path(keys);
            path.truncate(depth(Level::Leaf) + 1);
            let label = path.last().copied().unwrap_or_default().to_string();
            let next = numbers.len() as u32;
            let number = *numbers.entry(path).or_insert(next);
            leaves.insert(node.name.as_str(), (label, number));
        }
        Drawn { order, leaves }
    }

    fn scene(&self, job: &Job, title: String, gang: &Gang, lost: &[String]) -> Scene {
        let seat = |name: &String| Seat {
            name: name.clone(),
            leaf: self.leaves.get(name.as_str()).cloned().unwrap_or_default(),
            lost: lost.contains(name),
        };
        let members: Vec<&String> = gang.members.iter().map(|member| &member.node).collect();
        let others = self.order.iter().filter(|name| !members.contains(name));
        let seats: Vec<Seat> = members.iter().copied().chain(others).map(seat).collect();
        let mesh = gang.layout.mesh;
        let layers = 0..job.model.num_hidden_layers;
        let layer = layers.into_iter().find(|layer| job.model.is_moe_layer(*layer)).unwrap_or(0);
        let experts = |rank: u32| {
            // Of slices their experts.
            let held = gang.layout.experts(&job.model, layer, rank);
            let each = job.model.slices().each;
            [held.first(), held.last()].map(|held| held.map_or(0, |slice| slice / each))
        };
        let count = members.len();
        let leaves: Vec<u32> = seats[..count].iter().map(|seat| seat.leaf.1).collect();
        let per_node = mesh.world().checked_div(count as u32).unwrap_or(0).max(1);
        let whole = mesh.ep.is_multiple_of(per_node);
        let group = if whole { mesh.ep / per_node } else { 1 };
        Scene {
            title,
            seats,
            members: count,
            group: mesh.ep,
            experts: (0..if count == 0 { 0 } else { mesh.world() }).map(experts).collect(),
            trees: if count > 1 { tree_links(count as u32) } else { Vec::new() },
            facts: FabricFacts::of(&leaves, group),
        }
    }
}
