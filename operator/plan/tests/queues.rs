//! Drawn queues of jobs on nodes that are alike, each simulated from the first job that comes to
//! the last one that ends.
//!
//! `QUEUES=10000 cargo test -p moejob-plan --test queues` simulates as many; without the variable
//! it is some hundreds.

use moejob_manifest::keys::Keys;
use moejob_manifest::resources::Resources;
use moejob_plan::allocate::{ClusterNode, Demand, Ground, Memory, Needs, Standing, allocate};
use moejob_plan::observed::Millis;
use serde_json::json;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Numbers that follow from a seed (SplitMix64).
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % end
    }
}

#[derive(Clone, Debug)]
struct Queue {
    nodes: u32,
    /// How long a gang takes to give up nodes.
    patience: Millis,
    /// A job takes less time on more nodes.
    scales: bool,
    jobs: Vec<Drawn>,
}

#[derive(Clone, Debug)]
struct Drawn {
    min: u32,
    max: u32,
    priority: i32,
    preempts: bool,
    comes: Millis,
    /// Milliseconds, or those of one node.
    work: u64,
}

impl Drawn {
    fn is_elastic(&self) -> bool {
        self.min < self.max
    }
}

fn queue(seed: u64) -> Queue {
    let mut draw = Draw(seed);
    let nodes = 1 + draw.below(13) as u32;
    let patience = draw.below(2) * draw.below(4);
    // A class belongs to each priority.
    let preempts = [true, draw.below(4) > 0, draw.below(4) > 0];
    let one = |draw: &mut Draw| {
        let min = 1 + draw.below(5) as u32;
        let priority = draw.below(3) as i32;
        Drawn {
            min,
            max: min + (draw.below(2) * draw.below(8)) as u32,
            priority,
            preempts: preempts[priority as usize],
            comes: draw.below(40),
            work: 1 + draw.below(60),
        }
    };
    let (count, scales) = (2 + draw.below(7), draw.below(2) == 0);
    Queue { nodes, patience, scales, jobs: (0..count).map(|_| one(&mut draw)).collect() }
}

/// What has become of the queue at some moment.
#[derive(Clone)]
struct World<'q> {
    queue: &'q Queue,
    ground: Ground,
    now: Millis,
    /// Numbers of jobs, the next one last.
    coming: Vec<usize>,
    /// By the number of the job, of those that have come and are not over.
    jobs: BTreeMap<usize, Demand>,
    left: BTreeMap<usize, u64>,
    /// Since when a gang knows that it is to give nodes back.
    told: BTreeMap<usize, Millis>,
    /// Jobs that have had their nodes once.
    started: BTreeSet<usize>,
    /// Since when the first in line could have had its nodes.
    late: Option<(usize, Millis)>,
    stops: usize,
}

fn node(number: u32) -> ClusterNode {
    ClusterNode {
        name: format!("n{number:02}"),
        ready: true,
        allocatable: Resources::read(&json!({ "cpu": "4", "pods": "9" })),
        ..ClusterNode::default()
    }
}

impl World<'_> {
    fn new(queue: &Queue) -> World<'_> {
        let ground = Ground::new((0..queue.nodes).map(node).collect(), &Keys::default());
        // What does not fit at all stands in nobody's way, and is left out.
        let can = |of: &usize| queue.jobs[*of].min <= queue.nodes;
        let mut coming: Vec<usize> = (0..queue.jobs.len()).filter(can).collect();
        coming.sort_by_key(|number| Reverse(queue.jobs[*number].comes));
        let (jobs, left, told, started) = Default::default();
        World { queue, ground, now: 0, coming, jobs, left, told, started, late: None, stops: 0 }
    }

    fn next_comes(&self) -> Option<Millis> {
        self.coming.last().map(|number| self.queue.jobs[*number].comes)
    }

    fn remove(&mut self, number: usize) {
        self.jobs.remove(&number);
        self.left.remove(&number);
        self.told.remove(&number);
    }

    fn first_in_line(&self) -> Option<usize> {
        let order = self.in_order();
        let first = order.iter().find(|job| job.holds.is_empty())?;
        Some(first.uid[1..].parse().expect("a number"))
    }

    fn come(&mut self, number: usize) {
        let drawn = &self.queue.jobs[number];
        let requests = Resources::read(&json!({ "cpu": "1", "pods": "1" }));
        let job = Demand {
            uid: format!("j{number}"),
            priority: drawn.priority,
            preempts: drawn.preempts,
            created: drawn.comes,
            since: Some(drawn.comes),
            sizes: (drawn.min..=drawn.max).collect(),
            needs: Needs { requests, ..Needs::default() },
            ..Demand::default()
        };
        self.jobs.insert(number, job);
        self.left.insert(number, drawn.work);
    }

    /// Jobs take what they are given, and give back what they are asked for when they can.
    fn settle(&mut self) {
        while self.next_comes().is_some_and(|at| at <= self.now) {
            self.coming.pop().into_iter().for_each(|number| self.come(number));
        }
        for _ in 0..100 {
            let demands: Vec<Demand> = self.jobs.values().cloned().collect();
            let made = allocate(&self.ground, &demands, &Memory::default(), self.now);
            let mut changed = false;
            for (number, job) in &mut self.jobs {
                let granted = &made.jobs[&job.uid].nodes;
                let kept = granted.iter().filter(|node| node.usable);
                let kept: BTreeSet<String> = kept.map(|node| node.name.clone()).collect();
                if !job.holds.is_subset(&kept) {
                    let told = *self.told.entry(*number).or_insert(self.now);
                    if self.now < told + self.queue.patience {
                        continue;
                    }
                }
                self.told.remove(number);
                if kept == job.holds {
                    continue;
                }
                changed = true;
                let standing = match kept.is_empty() {
                    true => Standing::Waiting,
                    false => Standing::Running,
                };
                self.stops += usize::from(kept.is_empty());
                if job.standing != standing {
                    (job.standing, job.since) = (standing, Some(self.now));
                }
                if standing == Standing::Running {
                    self.started.insert(*number);
                }
                job.holds = kept;
            }
            self.assert_sound();
            if !changed {
                return self.assert_fair();
            }
        }
        panic!("it comes to no rest: {}", self.shown());
    }

    fn in_order(&self) -> Vec<&Demand> {
        let mut order: Vec<&Demand> = self.jobs.values().collect();
        order.sort_by_key(|job| rank(job));
        order
    }

    fn shown(&self) -> String {
        let mut out = format!("at {} of {:?}", self.now, self.queue);
        for job in self.in_order() {
            let Demand { uid, holds, since, sizes, priority, .. } = job;
            let line = format!("\n{uid} {sizes:?} {priority} since {since:?}: {holds:?}");
            out.push_str(&line);
        }
        out
    }

    fn assert_sound(&self) {
        let mut taken = BTreeSet::new();
        for job in self.jobs.values() {
            let count = job.holds.len() as u32;
            assert!(count == 0 || job.sizes.contains(&count), "a part of a gang: {job:?}");
            assert!(job.holds.iter().all(|node| taken.insert(node)), "given twice: {job:?}");
        }
    }

    /// The first in line waits for those alone that are before it or need not stop for it, and for
    /// as long as the others need to; no node idles that somebody could use.
    fn assert_fair(&mut self) {
        let order = self.in_order();
        let held: usize = order.iter().map(|job| job.holds.len()).sum();
        let free = self.queue.nodes as usize - held;
        let first = order.iter().position(|job| job.holds.is_empty());
        let mut late = None;
        if let Some(first) = first {
            let job = order[first];
            let could = order[first + 1..].iter().map(|other| {
                let passed = other.since >= job.since;
                match passed || (job.preempts && job.priority > other.priority) {
                    true => other.holds.len(),
                    false => other.holds.len().saturating_sub(other.sizes[0] as usize),
                }
            });
            if free + could.sum::<usize>() >= job.sizes[0] as usize {
                let number = job.uid[1..].parse().expect("a number");
                let since = self.late.filter(|(of, _)| *of == number);
                let since = since.map_or(self.now, |(_, since)| since);
                // Who has come before it may have taken what was called back.
                let taken = order[..first].iter().filter_map(|job| job.since).max();
                let since = since.max(taken.unwrap_or(0));
                let waits = self.now - since;
                assert!(waits < self.queue.patience, "{} is late: {}", job.uid, self.shown());
                late = Some((number, since));
            }
        }
        // What waits for others to come is kept.
        if late.is_none() && self.told.is_empty() {
            for job in &order {
                let could = match job.holds.len() {
                    0 => job.sizes[0] as usize <= free,
                    count => free > 0 && count < job.sizes.len() + job.sizes[0] as usize - 1,
                };
                assert!(!could, "{free} idle, and {} could use it: {}", job.uid, self.shown());
            }
        }
        self.late = late;
    }

    fn speed(&self, job: &Demand) -> u64 {
        let count = job.holds.len() as u64;
        if self.queue.scales { count } else { count.min(1) }
    }

    /// Up to the next time at which something happens.
    fn advance(&mut self) {
        let ends = self.jobs.iter().filter_map(|(number, job)| {
            let speed = self.speed(job);
            (speed > 0).then(|| self.now + self.left[number].div_ceil(speed))
        });
        let gives = self.told.values().map(|told| told + self.queue.patience);
        let next = ends.chain(gives).chain(self.next_comes()).min().expect("somebody runs");
        let took = next.max(self.now + 1) - self.now;
        self.now += took;
        for (number, job) in &self.jobs {
            let done = took * self.speed(job);
            let left = self.left.get_mut(number).expect("a job that has come");
            *left = left.saturating_sub(done);
        }
        let over: Vec<usize> =
            self.left.iter().filter(|(_, left)| **left == 0).map(|(number, _)| *number).collect();
        over.into_iter().for_each(|number| self.remove(number));
    }
}

/// When the first in line starts if no elastic job is behind it from now on, unless another one
/// comes before it.
fn starts_alone(world: &World, number: usize) -> Option<Millis> {
    let mut world = world.clone();
    let queue = world.queue;
    let stays = |of: usize| !queue.jobs[of].is_elastic() || !is_before(queue, number, of);
    world.coming.retain(|of| stays(*of));
    let gone: Vec<usize> = world.jobs.keys().copied().filter(|of| !stays(*of)).collect();
    gone.into_iter().for_each(|of| world.remove(of));
    loop {
        world.settle();
        if world.started.contains(&number) {
            return Some(world.now);
        }
        if world.first_in_line() != Some(number) {
            return None;
        }
        world.advance();
    }
}

/// How many starts were compared, and how often a gang was stopped.
fn simulate(queue: &Queue, compares: bool) -> (usize, usize) {
    let mut world = World::new(queue);
    let mut alone: Option<(usize, Millis)> = None;
    let mut compared = 0;
    loop {
        world.settle();
        if let Some((number, than)) = alone {
            let has_started = world.started.contains(&number);
            assert!(has_started || world.now < than, "later than {than}: {}", world.shown());
            compared += usize::from(has_started);
        }
        let waits = world.first_in_line().filter(|of| compares && !world.started.contains(of));
        alone = alone.filter(|(of, _)| Some(*of) == waits);
        alone = alone.or_else(|| waits.and_then(|of| Some((of, starts_alone(&world, of)?))));
        if world.jobs.is_empty() && world.coming.is_empty() {
            return (compared, world.stops);
        }
        world.advance();
    }
}

fn rank(job: &Demand) -> (i32, Millis, &str) {
    (-job.priority, job.created, &job.uid)
}

fn is_before(queue: &Queue, a: usize, b: usize) -> bool {
    let key = |of: usize| (-queue.jobs[of].priority, queue.jobs[of].comes, format!("j{of}"));
    key(a) < key(b)
}

/// Those that are served first show first what they lack, and all of them together no more than is
/// allowed; what others give back is not missing.
#[test]
fn missing_nodes_of_all_jobs_are_bounded_in_the_order_of_the_jobs() {
    // The third runs on two nodes, of which it needs one.
    let drawn = [(6, 6, 0), (4, 4, 2), (1, 2, 0), (3, 3, 1), (1, 1, 9)];
    let job = |(min, max, priority): (u32, u32, i32)| {
        Drawn { min, max, priority, preempts: false, comes: 0, work: 1 }
    };
    let jobs = drawn.into_iter().map(job).collect();
    let queue = Queue { nodes: 2, patience: 0, scales: false, jobs };
    let mut world = World::new(&queue);
    (0..drawn.len()).for_each(|number| world.come(number));
    let third = world.jobs.get_mut(&2).expect("it has come");
    third.holds = ["n00", "n01"].map(str::to_string).into();
    (third.standing, third.since) = (Standing::Running, Some(0));
    world.jobs.values_mut().for_each(|job| job.since = job.since.map(|at| at + 1));
    let missing = |of: &[usize], most: u32| {
        let jobs: Vec<Demand> = of.iter().map(|number| world.jobs[number].clone()).collect();
        let mut made = allocate(&world.ground, &jobs, &Memory::default(), 0);
        made.bound_missing(&world.ground, &jobs, most);
        jobs.iter().map(|job| made.jobs[&job.uid].missing).collect::<Vec<_>>()
    };
    assert_eq!(missing(&[0, 1, 2, 3], 64), [6, 4, 0, 3]);
    assert_eq!(missing(&[0, 1, 2, 3], 8), [1, 4, 0, 3]);
    assert_eq!(missing(&[0, 1, 2, 3], 5), [0, 4, 0, 1]);
    assert_eq!(missing(&[0, 1, 2, 3], 0), [0, 0, 0, 0]);
    assert_eq!(missing(&[4, 2], 64), [0, 0], "called back");
}

/// In the comparison gangs stop at once, every class preempts, and a job takes its time whatever it
/// has: those before it would end earlier if more nodes were there for them.
#[test]
fn the_first_in_line_starts_as_if_no_elastic_job_were_behind_it() {
    let count = std::env::var("QUEUES").ok().and_then(|count| count.parse().ok());
    let count: u64 = count.unwrap_or(300);
    let (mut compared, mut stops) = (0, 0);
    for seed in 0..count {
        let mut queue = queue(seed);
        stops += simulate(&queue, false).1;
        (queue.patience, queue.scales) = (0, false);
        queue.jobs.iter_mut().for_each(|job| job.preempts = true);
        compared += simulate(&queue, true).0;
    }
    println!("{count} queues: {compared} starts compared, {stops} gangs stopped");
    assert!(compared > count as usize / 4 && stops > 0);
}
