//! Which job gets which nodes: one look at the whole cluster, whole nodes, gangs or nothing.
//!
//! ```text
//! Ground (nodes) x Demand of each job x Memory x now -> Allocation: each job's nodes in order
//! ```
//!
//! Jobs are served by priority, age and uid. What a job has it keeps. A job that fits (its least
//! gang can be formed of what it has and what is free) gets that first, and as many nodes as make
//! its largest gang when all have got theirs; spares come when all gangs have been served. One that
//! does not fit gets nothing, and gives back what it has unless its gang runs; so a smaller job may
//! pass it, and two jobs that fit only one at a time never hold half of their nodes each.
//!
//! A gang has been lent its nodes beyond the least ones, and a job that has passed another one, or
//! is of a lower priority, all that it has. A job that waits calls back as much of it as it lacks
//! from jobs behind it, the last one first, if it fits then, and keeps what is free meanwhile. They
//! shrink where that is enough. So nobody waits for a job behind it, and no node idles for one that
//! cannot start yet.

mod eligible;
mod lend;
mod memory;
mod missing;

pub use eligible::{
    Against, Needs, Taint, Toleration, is_pause, unhealthy, unhealthy_label,
};
pub use memory::{Memory, UNSEEN_TIMEOUT};

use crate::observed::{Millis, Node, Observed, Outcome, Size, Wanted, Worker};
use moejob_fabric::FabricFacts;
use moejob_fabric::topology::{NodeInfo, Places};
use moejob_manifest::job::{Closeness, Job};
use moejob_manifest::keys::Keys;
use moejob_manifest::resources::Resources;
use moejob_manifest::spec::Level;
use moejob_manifest::words::{one_or_more, several};
use moejob_protocol::layout::Layout;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// A job between two attempts, which has newer state in memory than in storage, keeps its nodes
/// for this long although it does not fit: the lost node may come back.
pub const HOLD_TIMEOUT: Millis = 300_000;

/// A node on which a job avoids to start a worker is kept for it for so long.
pub const RESERVED_MAX: Millis = 60_000;

/// How nodes are chosen where the job does not say: beside each other.
const PACKED: (Level, Closeness) = (Level::Rack, Closeness::Preferred);

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClusterNode {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    /// Its condition Ready is True.
    pub ready: bool,
    /// `spec.unschedulable`.
    pub cordoned: bool,
    /// What a health monitor says against it, see `unhealthy`.
    pub unhealthy: Option<String>,
    /// It is to stand still for seconds, see `is_pause`.
    pub freezes: bool,
    pub taints: Vec<Taint>,
    pub allocatable: Resources,
    /// Sum over all pods on it that have not ended, workers of MoeJobs apart; `pods` counts them.
    pub requested: Resources,
}

/// What one job wants and has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Demand {
    pub uid: String,
    /// Of its PriorityClass; 0 without one.
    pub priority: i32,
    /// A job of a lower priority stops for it where it would fit then.
    pub preempts: bool,
    /// Milliseconds since 1970.
    pub created: Millis,
    /// Since when it waits for nodes, or has them. None: only just; and as long as nobody is to
    /// stop for it.
    pub since: Option<Millis>,
    /// Nodes of the gangs that work, ascending; empty when it wants none.
    pub sizes: Vec<u32>,
    pub spares: u32,
    /// Nodes of an expert group, by the nodes of the gang; one where nothing is said.
    pub groups: BTreeMap<u32, u32>,
    pub topology: Option<(Level, Closeness)>,
    pub needs: Needs,
    /// Nodes on which pods of it are that have not ended.
    pub holds: BTreeSet<String>,
    /// Those of them whose worker is on its way out; others take their place as soon as they can.
    pub leaving: BTreeSet<String>,
    pub standing: Standing,
    /// What keeps it from getting nodes, whatever is free.
    pub barred: Option<Barred>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Barred {
    /// The API server refuses its pods: without a gang it gives back what it has.
    Refused,
    /// The job of this name, which is not over, has the same `checkpoint.location`.
    Location(String),
}

/// What a job would lose with its nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// Nothing that the storage has not.
    #[default]
    Waiting,
    /// Between two attempts, with newer state in memory than in storage.
    Holding { since: Millis },
    /// A gang is under way.
    Running,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Allocation {
    /// By uid.
    pub jobs: BTreeMap<String, Granted>,
    /// Look again at this time even if nothing happens.
    pub requeue: Option<Millis>,
}

/// What goes into a job's `Observed`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Granted {
    /// In the order in which they are to be used. A node of it that is not listed is to be given
    /// back.
    pub nodes: Vec<Node>,
    /// One sentence for a person.
    pub why: String,
    /// What ranks in this order cost; none where all is on one leaf.
    pub fabric: Option<FabricFacts>,
    /// Nodes that its least gang lacks, and that no other job is to give it.
    pub missing: u32,
    /// Host names of nodes that a worker of it fits on now, where some are missing: a pod that
    /// shows those stands on none of these. [`Allocation::bound_missing`] names them.
    pub there: Vec<String>,
}

/// As they are served.
fn in_order(jobs: &[Demand]) -> Vec<&Demand> {
    let mut jobs: Vec<&Demand> = jobs.iter().collect();
    jobs.sort_by(|a, b| {
        (b.priority, a.created, &a.uid).cmp(&(a.priority, b.created, &b.uid))
    });
    jobs
}

impl Demand {
    /// Of a job as it is now; `holds` are the nodes of its pods.
    pub fn of(
        job: &Job,
        observed: &Observed,
        claim: Claim,
        needs: Needs,
        uid: &str,
        holds: BTreeSet<String>,
    ) -> Demand {
        let wanted = &observed.wanted;
        let range = wanted.nodes_min..=wanted.nodes_max;
        let sizes = wanted.sizes.iter().map(|size| size.nodes);
        let mut sizes: Vec<u32> = sizes.filter(|nodes| range.contains(nodes)).collect();
        let mut spares = wanted.spares;
        let Claim { over, halting, standing, leaving, since } = claim;
        if over {
            sizes.clear();
        } else if halting {
            // Nobody trains on; the least that can save is enough.
            sizes.truncate(1);
            spares = 0;
        }
        Demand {
            uid: uid.to_string(),
            sizes,
            spares,
            groups: groups(wanted),
            topology: job.nodes.topology,
            needs,
            holds,
            leaving,
            standing,
            since,
            ..Demand::default()
        }
    }

    /// Of a job that is not planned, and of which there are pods.
    pub fn unplanned(uid: &str, holds: BTreeSet<String>) -> Demand {
        Demand { uid: uid.to_string(), holds, ..Demand::default() }
    }

    /// It wants nothing for as long as that keeps it from its nodes.
    pub fn barred_by(self, why: Barred) -> Demand {
        Demand { sizes: Vec::new(), barred: Some(why), ..self }
    }
}

/// What a job asks of the allocation by what has become of it, beside its spec and its pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// It wants no nodes any more.
    pub over: bool,
    /// It is to stop.
    pub halting: bool,
    pub standing: Standing,
    /// Nodes of workers that are told to stop: nobody waits until a silent one is confirmed as
    /// ended.
    pub leaving: BTreeSet<String>,
    /// See `Demand::since`.
    pub since: Option<Millis>,
}

impl Claim {
    /// `ends_soon` says of a worker that its exit code is about to be known: until then nobody
    /// takes its place, as that may be the end of the whole job.
    pub fn of(observed: &Observed, ends_soon: impl Fn(&str) -> bool) -> Claim {
        let halting = observed.halting().is_some();
        let leaves = |worker: &&Worker| {
            worker.stopping && !worker.is_dead() && !ends_soon(&worker.name)
        };
        let leaving = observed.workers.iter().filter(leaves);
        Claim {
            over: match observed.record.outcome {
                None => false,
                Some(Outcome::Suspended) => halting,
                Some(_) => true,
            },
            halting,
            standing: Standing::of(observed),
            leaving: leaving.map(|worker| worker.node.clone()).collect(),
            since: None,
        }
    }
}

impl Standing {
    pub fn of(observed: &Observed) -> Standing {
        if observed.gang().is_some() {
            return Standing::Running;
        }
        let stored = observed.stored.as_ref().map_or(0, |stored| stored.step);
        let newer = observed.workers.iter().flat_map(|worker| &worker.held);
        let ended = observed.record.gang.as_ref().and_then(|gang| gang.ended);
        match ended.filter(|_| newer.into_iter().any(|held| held.step > stored)) {
            Some(since) => Standing::Holding { since },
            None => Standing::Waiting,
        }
    }
}

/// The nodes, and what follows of them alone: made anew only when one of them changes.
#[derive(Clone, Debug)]
pub struct Ground {
    /// By name.
    nodes: Vec<ClusterNode>,
    places: Places,
}

impl Ground {
    pub fn new(mut nodes: Vec<ClusterNode>, keys: &Keys) -> Ground {
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        let place = |node: &ClusterNode| NodeInfo {
            name: node.name.clone(),
            labels: node.labels.clone(),
            usable: true,
            ..NodeInfo::default()
        };
        let places: Vec<NodeInfo> = nodes.iter().map(place).collect();
        Ground { places: Places::new(&places, keys), nodes }
    }

    /// What pods other than workers ask of the node now.
    pub fn set_requested(&mut self, node: &str, requested: Resources) {
        if let Some(at) = self.index(node) {
            self.nodes[at].requested = requested;
        }
    }

    fn index(&self, name: &str) -> Option<usize> {
        self.nodes.binary_search_by(|node| node.name.as_str().cmp(name)).ok()
    }
}

/// Decides. Equal inputs give equal allocations, whatever the order of nodes and jobs.
pub fn allocate(ground: &Ground, jobs: &[Demand], memory: &Memory, now: Millis) -> Allocation {
    let jobs = in_order(jobs);
    // Whole gangs lie best where each is chosen at once; where somebody waits, least ones come
    // first.
    let (mut allocator, mut gangs) = gangs(ground, &jobs, (memory, now), usize::MAX);
    if jobs.iter().zip(&gangs).any(|(job, given)| !job.sizes.is_empty() && !given.fits) {
        (allocator, gangs) = self::gangs(ground, &jobs, (memory, now), 1);
        for (job, given) in jobs.iter().zip(&mut gangs).filter(|(_, given)| given.fits) {
            allocator.grow(job, given, usize::MAX);
        }
    }
    let mut jobs_granted = BTreeMap::new();
    for (job, mut given) in jobs.iter().zip(gangs) {
        if given.fits {
            allocator.spares(job, &mut given);
        }
        jobs_granted.insert(job.uid.clone(), allocator.grant(job, given));
    }
    Allocation { jobs: jobs_granted, requeue: allocator.requeue }
}

/// Gives each job one of its `count` smallest gangs, the largest that can be.
fn gangs<'a>(
    ground: &'a Ground,
    jobs: &'a [&'a Demand],
    (memory, now): (&'a Memory, Millis),
    count: usize,
) -> (Allocator<'a>, Vec<Given>) {
    let mut allocator = Allocator::new(ground, jobs, memory, now);
    (0..jobs.len()).for_each(|rank| allocator.hold(rank));
    let gangs = (0..jobs.len()).map(|rank| allocator.gang(rank, count)).collect();
    (allocator, gangs)
}

struct Allocator<'a> {
    ground: &'a Ground,
    nodes: &'a [ClusterNode],
    places: &'a Places,
    /// In the order in which they are served; a job's rank is its place there.
    jobs: &'a [&'a Demand],
    /// Nobody has it, and nobody has been given it.
    free: Vec<bool>,
    /// By node the rank of the job that has it, and by rank how many nodes it has beyond its least
    /// gang.
    borrower: Vec<Option<usize>>,
    lent: BTreeMap<usize, usize>,
    /// Called back from its borrower.
    called_back: Vec<bool>,
    /// What is against each node for jobs with these needs; most jobs of a cluster have the same.
    verdicts: Vec<(&'a Needs, Vec<Option<Against<'a>>>)>,
    memory: &'a Memory,
    now: Millis,
    requeue: Option<Millis>,
}

/// What one job has been given so far; indices of nodes.
#[derive(Default)]
struct Given {
    fits: bool,
    /// Keeps its own although it does not fit.
    keeps: bool,
    own: Vec<usize>,
    new: Vec<usize>,
    /// Free nodes that would do as well.
    rest: Vec<usize>,
    why: String,
    /// Nodes that its least gang lacks, and that no other job is to give it.
    missing: u32,
}

impl<'a> Allocator<'a> {
    fn new(
        ground: &'a Ground,
        jobs: &'a [&'a Demand],
        memory: &'a Memory,
        now: Millis,
    ) -> Allocator<'a> {
        Allocator {
            ground,
            jobs,
            nodes: &ground.nodes,
            places: &ground.places,
            free: vec![true; ground.nodes.len()],
            borrower: vec![None; ground.nodes.len()],
            lent: BTreeMap::new(),
            called_back: vec![false; ground.nodes.len()],
            verdicts: Vec::new(),
            memory,
            now,
            requeue: None,
        }
    }

    fn look_again_at(&mut self, at: Millis) {
        if at > self.now {
            self.requeue = Some(self.requeue.map_or(at, |other| other.min(at)));
        }
    }

    /// Nodes of its pods, and of those that were decided but are not seen yet.
    fn own(&mut self, job: &Demand) -> Vec<usize> {
        let mut names: BTreeSet<&str> = job.holds.iter().map(String::as_str).collect();
        let memory = self.memory;
        for (node, at) in memory.unseen_of(&job.uid, self.now) {
            self.look_again_at(at + UNSEEN_TIMEOUT);
            names.insert(node);
        }
        names.iter().filter_map(|name| self.ground.index(name)).collect()
    }

    fn keeps(&self, job: &Demand, node: usize) -> bool {
        job.needs.keeps(&self.nodes[node]) && !self.called_back[node]
    }

    fn gang(&mut self, rank: usize, count: usize) -> Given {
        let job = self.jobs[rank];
        let own = self.own(job);
        let stay: Vec<usize> = own.iter().copied().filter(|at| self.keeps(job, *at)).collect();
        let mut given = Given { keeps: true, own, ..Given::default() };
        match &job.barred {
            None => {}
            Some(Barred::Refused) => given.keeps = job.standing == Standing::Running,
            Some(Barred::Location(earlier)) => {
                given.keeps = false;
                given.why = format!(
                    "its checkpoint.location is that of the job {earlier}, which is not over"
                );
            }
        }
        let (Some(least), Some(most)) = (job.sizes.first(), job.sizes.last()) else {
            return given;
        };
        let (candidates, against) = self.candidates(job, &given.own);
        let ordered = self.ordered(job, &stay, &candidates, *least, *most + job.spares);
        let possible = (stay.len() + ordered.len()) as u32;
        match *least <= possible {
            true => {
                given.fits = true;
                given.rest = ordered;
                self.grow(job, &mut given, count);
            }
            false => {
                let own = given.own.len();
                given.keeps = match job.standing {
                    Standing::Running => true,
                    Standing::Waiting => false,
                    Standing::Holding { since } => {
                        self.look_again_at(since + HOLD_TIMEOUT);
                        self.now < since + HOLD_TIMEOUT
                    }
                };
                let lacks = *least - possible;
                let reserved = if given.keeps { self.reserve(job, lacks, &ordered) } else { None };
                let comes = reserved.or_else(|| self.call_back(rank, &stay, &candidates));
                given.missing = if comes.is_some() { 0 } else { lacks };
                let fate = match (own, given.keeps) {
                    (0, _) => "it holds nothing",
                    _ if given.own.iter().all(|at| self.called_back[*at]) => {
                        "a job before it needs what it has"
                    }
                    (_, true) => "it keeps what it has",
                    (_, false) => "it gives back what it has",
                };
                let comes = comes.unwrap_or_default();
                given.why = format!(
                    "waits for nodes: {possible} of {least} fit{against}; {fate}{comes}"
                );
            }
        }
        given
    }

    fn leaves(&self, job: &Demand, node: usize) -> bool {
        job.leaving.contains(&self.nodes[node].name)
    }

    fn verdicts(&mut self, needs: &'a Needs) -> usize {
        if let Some(known) = self.verdicts.iter().position(|(of, _)| *of == needs) {
            return known;
        }
        let all = self.nodes.iter().map(|node| needs.refuses(node)).collect();
        self.verdicts.push((needs, all));
        self.verdicts.len() - 1
    }

    /// Free nodes on which the job could run, and a summary of what is against the others.
    fn candidates(&mut self, job: &'a Demand, own: &[usize]) -> (Vec<usize>, String) {
        let (mut good, mut against) = (Vec::new(), BTreeMap::<Against, u32>::new());
        let verdicts = self.verdicts(&job.needs);
        let mut is_own = vec![false; self.nodes.len()];
        own.iter().for_each(|at| is_own[*at] = true);
        for at in (0..self.nodes.len()).filter(|at| !is_own[*at]) {
            let why = match (self.free[at], self.verdicts[verdicts].1[at]) {
                (false, _) => Against::InUse,
                (true, Some(why)) => why,
                (true, None) => {
                    let avoided = self.memory.avoided_until(&job.uid, &self.nodes[at].name);
                    if self.now >= avoided {
                        good.push(at);
                        continue;
                    }
                    self.look_again_at(avoided);
                    Against::Avoided
                }
            };
            *against.entry(why).or_default() += 1;
        }
        let against: Vec<String> =
            against.iter().map(|(why, count)| format!("{count} {why}")).collect();
        let against = match against.is_empty() {
            true => String::new(),
            false => format!(" ({})", against.join(", ")),
        };
        (good, against)
    }

    /// The candidates, those first that lie best beside the job's own nodes and each other. With a
    /// required level only those of one part.
    fn ordered(
        &self,
        job: &Demand,
        own: &[usize],
        candidates: &[usize],
        least: u32,
        most: u32,
    ) -> Vec<usize> {
        if own.len() + candidates.len() < least as usize {
            return candidates.to_vec();
        }
        let wish = job.topology.unwrap_or(PACKED);
        if own.is_empty() {
            return self.places.order(candidates, Some(wish), least, most).0;
        }
        // Beside its own nodes there is no choice of a part.
        let (mut nodes, _) = self.places.order(candidates, None, least, most);
        let (level, closeness) = wish;
        let beside = self.places.beside(own, level);
        if closeness == Closeness::Required {
            nodes.retain(|at| beside(*at)[0] > 0);
        }
        // Beside most of them first.
        nodes.sort_by_cached_key(|at| Reverse(beside(*at)));
        nodes
    }

    /// Takes what it needs for one of its `count` smallest sizes, the largest that can be.
    fn grow(&mut self, job: &Demand, given: &mut Given, count: usize) {
        given.rest.retain(|at| self.free[*at]);
        let own = given.own.iter().filter(|at| self.keeps(job, **at));
        let stay: Vec<usize> = own.copied().collect();
        // A worker on its way out counts as there, unless a gang can be formed without it.
        let here = stay.iter().filter(|at| !self.leaves(job, **at)).count();
        let mut sizes = job.sizes.iter().take(count).map(|size| *size as usize);
        let most = given.new.len() + given.rest.len();
        let certain = sizes.clone().rfind(|size| *size <= here + most);
        let possible = sizes.rfind(|size| *size <= stay.len() + most).unwrap_or(0);
        let needs = certain.map_or(possible.saturating_sub(stay.len()), |size| {
            size.saturating_sub(here)
        });
        let missing = needs.saturating_sub(given.new.len()).min(given.rest.len());
        let taken: Vec<usize> = given.rest.drain(..missing).collect();
        taken.iter().for_each(|node| self.free[*node] = false);
        given.new.extend(taken);
        given.why = format!(
            "a gang of {possible}: {} {} its own",
            several(stay.len(), "node"),
            one_or_more(stay.len(), "is", "are")
        );
    }

    /// All gangs have been served: what is left may be kept warm.
    fn spares(&mut self, job: &Demand, given: &mut Given) {
        let most = job.sizes.last().map_or(0, |most| *most as usize);
        let stays = |at: &&usize| self.keeps(job, **at) && !self.leaves(job, **at);
        let stay = given.own.iter().filter(stays).count();
        let have = stay + given.new.len();
        // Below the largest gang the next size was out of reach; more nodes than the gang and its
        // spares need would lie idle.
        let gang = job.sizes.iter().rfind(|size| **size as usize <= have).map_or(0, |of| *of);
        let want = (gang as usize).min(most) + job.spares as usize;
        for node in std::mem::take(&mut given.rest) {
            if stay + given.new.len() < want && self.free[node] {
                self.free[node] = false;
                given.new.push(node);
            }
        }
    }

    fn grant(&self, job: &Demand, given: Given) -> Granted {
        let Given { own, new, keeps, why, missing, .. } = given;
        if !keeps {
            return Granted { why, missing, ..Granted::default() };
        }
        let all: Vec<usize> = own.iter().chain(&new).copied().collect();
        let most = job.sizes.last().copied().unwrap_or(0);
        let least = job.sizes.first().copied().unwrap_or(0);
        // Preferred, so that none is left out: they are its own. The part that the gang fills
        // comes first, so that spares are what lies apart.
        let (level, _) = job.topology.unwrap_or(PACKED);
        let wish = Some((level, Closeness::Preferred));
        let (mut ordered, _) = self.places.order(&all, wish, least, most);
        let fabric = self.arrange(job, &new, &mut ordered);
        let why = match &fabric {
            Some(facts) => format!("{why}; {facts}"),
            None => why,
        };
        let node = |at: usize| Node {
            name: self.nodes[at].name.clone(),
            usable: new.contains(&at) || self.keeps(job, at),
            called_back: self.called_back[at],
            avoid_until: self.memory.avoided_until(&job.uid, &self.nodes[at].name),
            freezes: self.nodes[at].freezes,
            leaf: self.places.part(Level::Leaf, at),
        };
        let nodes = ordered.into_iter().map(node).collect();
        Granted { nodes, why, fabric, missing, ..Granted::default() }
    }

    /// Those that make the gang change places among each other, so that ranks in this order cost
    /// the fabric least: what the order costs.
    fn arrange(
        &self,
        job: &Demand,
        new: &[usize],
        ordered: &mut [usize],
    ) -> Option<FabricFacts> {
        let stays = |at: usize| {
            new.contains(&at) || (self.keeps(job, at) && !self.leaves(job, at))
        };
        let good: Vec<usize> = (0..ordered.len()).filter(|at| stays(ordered[*at])).collect();
        let size = job.sizes.iter().rfind(|size| **size as usize <= good.len())?;
        let seats = &good[..*size as usize];
        let gang: Vec<usize> = seats.iter().map(|seat| ordered[*seat]).collect();
        let group = job.groups.get(size).copied().unwrap_or(1);
        let gang = self.places.arranged(&gang, group);
        for (seat, node) in seats.iter().zip(&gang) {
            ordered[*seat] = *node;
        }
        self.places.facts(&gang, group)
    }
}

/// Where an expert group takes whole nodes, how many.
fn groups(wanted: &Wanted) -> BTreeMap<u32, u32> {
    let group = |size: &Size| (size.nodes, nodes_of_group(size.nodes, &size.layout));
    wanted.sizes.iter().map(group).filter(|(_, group)| *group > 1).collect()
}

/// Nodes of an expert group; 1 where it lies in a node or does not end with one.
pub fn nodes_of_group(nodes: u32, layout: &Layout) -> u32 {
    let mesh = layout.mesh;
    let ranks = mesh.world() / nodes.max(1);
    let whole = ranks > 0 && mesh.ep.is_multiple_of(ranks);
    if whole { mesh.ep / ranks } else { 1 }
}
