//! A small pure world for the plan: workers that obey as `worker/src/life/session.rs` does, or die;
//! streams that keep their order but not their speed; nodes that fail; a leader that restarts.
//!
//! The world knows the truth and asserts on it. The leader's `Tracker` only sees messages.

// Each test crate uses a part of it.
#![allow(dead_code)]

pub mod job;
pub mod quality;
mod setup;
pub mod sim;

use moejob_plan::check::check;
use moejob_plan::decide::{Action, Plan, plan};
use moejob_plan::observed::{
    Millis, Node, Observed, Outcome, Size, Stored, Wanted, Worker, WorkerState,
};
use moejob_plan::preflight::Checked;
use moejob_plan::record::{self, Saved};
use moejob_plan::track::{Happening, Tracker};
use moejob_protocol::checkpoint::directory_name;
use moejob_protocol::config::{Exchange, Resume, WorkerConfig};
use moejob_protocol::message::{Heartbeat, Hello, LeftReason, Phase, Up};
use moejob_protocol::{Layout, Mesh};
use crate::said::{committed, hello, step_report};
use quality::Quality;
pub use setup::Setup;
use sim::{Message, Run, Sim};
use std::collections::BTreeMap;

/// Plans that follow each other without anything happening in between, at most.
const ROUNDS_MAX: usize = 8;

/// The newest state of a gang, which all its members share.
#[derive(Clone, Debug)]
struct GangTruth {
    step: u64,
    /// The members have found each other and loaded their state.
    joined: bool,
    stop: bool,
    save: bool,
}

pub struct World {
    pub setup: Setup,
    pub tracker: Tracker,
    pub now: Millis,
    pub sims: BTreeMap<String, Sim>,
    gangs: BTreeMap<u32, GangTruth>,
    /// Newest step that any gang has done.
    pub done: u64,
    /// Highest attempt that has made its claim in storage.
    claimed: u32,
    /// Steps of the checkpoints that lie in storage and count, ascending: the truth, of which the
    /// leader may not have heard.
    pub committed: Vec<u64>,
    pub restarts_of_leader: u32,
    pub happenings: Vec<Happening>,
    pub qualities: BTreeMap<String, Quality>,
    /// Who waits at which place to meet, and for which order.
    pub places: BTreeMap<String, (String, u64)>,
}

impl Default for World {
    fn default() -> World {
        World::new(Setup::default())
    }
}

impl World {
    pub fn new(setup: Setup) -> World {
        let sizes = |max: u32| {
            (1..=max)
                .map(|nodes| {
                    // The largest number of expert ranks that divides the gang.
                    let ranks = nodes * setup.devices;
                    let ep = (1..=setup.experts.min(ranks)).rfind(|ep| ranks % ep == 0);
                    let mesh = Mesh::data_parallel(ranks, ep.unwrap_or(1));
                    // One that is not the template's own for every other gang.
                    let exchange = match nodes % 2 {
                        0 => Exchange::Hierarchical,
                        _ => Exchange::Flat,
                    };
                    let layout = Layout::contiguous(mesh);
                    Size { nodes, layout, exchange }
                })
                .collect()
        };
        let node = |index| Node::good(&format!("n{index}"));
        let wanted = Wanted {
            nodes_min: setup.min,
            nodes_max: setup.max,
            spares: setup.spares,
            sizes: sizes(setup.nodes.max(setup.max)),
            restarts_max: setup.restarts_max,
            restart_window: 3_600_000,
            growth_interval: 2_000,
            gang_timeout: 30_000,
            step_timeout: 0,
            suspend: false,
            preflight: setup.preflight.then(|| job::standard(setup.pairs)),
            venue: setup.venue,
        };
        let template = WorkerConfig { ranks: setup.devices, ..job::template(&setup) };
        let nodes = (0..setup.nodes).map(node).collect();
        let observed = Observed { nodes, ..Observed::new(wanted, template) };
        World {
            setup,
            tracker: Tracker::new(observed),
            now: 0,
            sims: BTreeMap::new(),
            gangs: BTreeMap::new(),
            done: 0,
            claimed: 0,
            committed: Vec::new(),
            restarts_of_leader: 0,
            happenings: Vec::new(),
            qualities: BTreeMap::new(),
            places: BTreeMap::new(),
        }
    }

    pub fn observed(&self) -> &Observed {
        &self.tracker.observed
    }

    pub fn outcome(&self) -> Option<&Outcome> {
        self.observed().record.outcome.as_ref()
    }

    /// The leader's loop: plans and applies until nothing is left to do. Returns all plans that
    /// had actions, and the last one.
    pub fn decide(&mut self) -> Vec<Plan> {
        let mut plans = Vec::new();
        for _ in 0..ROUNDS_MAX {
            self.tracker.prune();
            let made = plan(self.observed(), self.now);
            assert_eq!(made, plan(self.observed(), self.now), "equal inputs, equal plans");
            let problems = check(self.observed(), &made);
            assert!(problems.is_empty(), "{problems:#?}\n{:#?}\n{:#?}", made.why, self.tracker);
            assert!(made.requeue.is_none_or(|at| at > self.now), "a requeue in the past");
            let converged = made.actions.is_empty();
            for action in &made.actions {
                self.assert_fenced(action);
                self.apply(action);
                self.tracker.done(action, self.now);
                self.happenings.extend(self.tracker.take_news());
            }
            plans.push(made);
            if converged {
                return plans;
            }
        }
        panic!("the plan does not converge: {:#?}", plans.last());
    }

    /// What must hold always, 2: a member has acknowledged leaving, or all are dead, or it took
    /// the time after which only the claim fences.
    fn assert_fenced(&self, action: &Action) {
        let (Action::EndAttempt { attempt, .. }, Some(gang)) = (action, self.observed().gang())
        else {
            return;
        };
        let members = || gang.members.iter().map(|member| self.observed().worker(&member.worker));
        let dead = members().all(|worker| worker.is_none_or(Worker::is_dead));
        let left = members().flatten().any(|worker| match worker.state {
            WorkerState::Idle | WorkerState::Left { .. } | WorkerState::Completed { .. } => true,
            WorkerState::Member { attempt: of, .. } => of != *attempt,
            _ => false,
        });
        let waited = gang.broken.as_ref().is_some_and(|(at, _)| self.now >= at + 20_000);
        assert!(dead || left || waited, "attempt {attempt} is not fenced");
    }

    fn apply(&mut self, action: &Action) {
        match action {
            Action::StartWorker { name, node } => {
                let busy = self.sims.values().any(|sim| sim.runs() && sim.node == *node);
                assert!(!busy, "two processes on {node}");
                self.sims.insert(name.clone(), Sim::new(node));
            }
            Action::StopWorker { name, .. } => {
                if let Some(sim) = self.sims.get_mut(name).filter(|sim| !sim.cut) {
                    sim.end(None);
                }
            }
            Action::EndAttempt { .. }
            | Action::AvoidNode { .. }
            | Action::NoteUnmeasured { .. }
            | Action::GiveUp { .. }
            | Action::BePatient { .. }
            | Action::NoteStop
            | Action::WithdrawStop
            | Action::Finish(_) => {}
            Action::RecordAttempt(gang) => self.assert_nothing_is_skipped(gang.resumed_at),
            Action::Configure { name, rank, config } => {
                self.assert_sources_hold(config);
                let sizes = &self.observed().wanted.sizes;
                let size = sizes.iter().find(|size| size.layout == config.layout);
                assert_eq!(Some(config.exchange), size.map(|size| size.exchange));
                let step = config.resume.step();
                self.gangs.entry(config.attempt).or_insert(GangTruth {
                    step,
                    joined: false,
                    stop: false,
                    save: false,
                });
                let config = WorkerConfig { rank: Some(*rank), ..(**config).clone() };
                self.send(name, Message::Configure(Box::new(config)));
            }
            Action::Preflight { name } => {
                let observed = self.observed();
                let standard = observed.wanted.preflight.as_ref().expect("it is wanted");
                let node = &observed.worker(name).expect("it is there").node;
                let order = observed.preflight.order(standard, node, self.now);
                self.send(name, Message::Preflight(order));
            }
            Action::MeasurePairs(_) | Action::RelayPair { .. } | Action::EndPair { .. } => {
                self.order_pairs(action);
            }
            Action::LeaveAttempt { name, attempt, .. } => {
                self.send(name, Message::Leave { attempt: *attempt });
            }
            Action::Request { attempt, request, .. } => {
                let gang = self.observed().record.gang.clone();
                for member in gang.iter().flat_map(|gang| &gang.members) {
                    let request = *request;
                    self.send(&member.worker, Message::Request { attempt: *attempt, request });
                }
            }
        }
    }

    /// Samples are neither skipped nor is a newer whole state thrown away that the storage has.
    fn assert_nothing_is_skipped(&self, resumed_at: u64) {
        assert!(resumed_at <= self.done, "step {resumed_at} was never done, {} was", self.done);
        let stored = self.observed().stored.as_ref().map_or(0, |stored| stored.step);
        assert!(resumed_at >= stored, "step {resumed_at} is before the stored {stored}");
        // Where nobody is left out, the newest state that they hold whole is taken.
        let available = || self.observed().workers.iter().filter(|worker| worker.is_available());
        let gang_size = self.observed().wanted.nodes_max as usize;
        if available().count() > gang_size {
            return;
        }
        for held in available().flat_map(|worker| &worker.held) {
            let Some(layout) = self.observed().layout_of(held.attempt) else { continue };
            let of = |worker: &Worker, shard: u32| {
                worker.held.iter().any(|other| {
                    (other.attempt, other.step) == (held.attempt, held.step)
                        && other.shards.contains(&shard)
                })
            };
            let whole = (0..layout.mesh.world())
                .all(|shard| available().any(|worker| of(worker, shard)));
            let usable = available().all(|worker| self.observed().is_usable(&worker.node));
            assert!(
                !whole || !usable || held.step <= resumed_at,
                "step {} is whole in memory, but {resumed_at} is resumed",
                held.step
            );
        }
    }

    /// In truth, not only in what the leader has heard.
    fn assert_sources_hold(&self, config: &WorkerConfig) {
        let Resume::Memory { step, attempt, sources, .. } = &config.resume else {
            return;
        };
        for source in sources {
            let worker = &config.member_of(source.from).expect("a member").worker;
            let sim = &self.sims[worker];
            let holds = sim.held.iter().any(|held| {
                (held.step, held.attempt) == (*step, *attempt)
                    && held.shards.contains(&source.shard)
            });
            assert!(holds || !sim.alive, "{worker} lacks shard {} of {step}", source.shard);
        }
    }

    fn send(&mut self, name: &str, message: Message) {
        if let Some(sim) = self.sims.get_mut(name).filter(|sim| sim.connected) {
            sim.down.push_back(message);
        }
    }

    // What happens in the world.

    /// The worker opens its listener and the leader's dialling succeeds.
    pub fn connect(&mut self, name: &str) -> bool {
        let observed = self.tracker.observed.worker(name);
        let waits = observed.is_some_and(|worker| {
            matches!(worker.state, WorkerState::Starting { .. }) && !worker.stopping
        });
        let Some(sim) = self.sims.get_mut(name).filter(|sim| waits && sim.answers()) else {
            return false;
        };
        if sim.connected {
            return false;
        }
        sim.connected = true;
        let hello = Hello {
            version: self.setup.speaks,
            ..hello(name, (sim.attempt, &sim.digest, sim.rank), &sim.held)
        };
        let report = sim.report.clone();
        sim.up.push_back((sim.attempt, Up::Hello(hello)));
        sim.up.extend(report);
        true
    }

    /// One message from a worker reaches the leader, or its end does.
    pub fn hear(&mut self, name: &str) -> bool {
        let Some(sim) = self.sims.get_mut(name) else {
            return false;
        };
        if let Some((attempt, up)) = sim.up.pop_front() {
            let happenings = match up {
                Up::Hello(hello) => {
                    self.tracker.connected(name, &format!("{name}:1"), &hello);
                    Vec::new()
                }
                up => self.tracker.heard(name, attempt, &up, self.now),
            };
            self.happenings.extend(happenings);
            return true;
        }
        if sim.alive || sim.reaped {
            return false;
        }
        sim.reaped = true;
        let (code, how) = (sim.exit_code, sim.how);
        let node = sim.node.clone();
        self.happenings.extend(self.tracker.exited(name, code, how, self.now));
        for of in &mut self.tracker.observed.nodes {
            if of.name == node {
                of.avoid_until = of.avoid_until.max(self.now + 100);
            }
        }
        true
    }

    /// One message of the leader reaches a worker.
    pub fn obey(&mut self, name: &str) -> bool {
        let answers = |sim: &&mut Sim| sim.answers() && !sim.deaf;
        let Some(sim) = self.sims.get_mut(name).filter(answers) else {
            return false;
        };
        let Some(message) = sim.down.pop_front() else {
            return false;
        };
        if let Message::Preflight(order) = message {
            self.measure(name, order);
            return true;
        }
        if let Message::Pair(order) = message {
            self.measure_pair(name, order);
            return true;
        }
        if let Some((attempt, request)) = sim.obey(message)
            && let Some(gang) = self.gangs.get_mut(&attempt)
        {
            gang.stop |= request.stop_after_this_step;
            gang.save |= request.checkpoint_now;
        }
        true
    }

    /// Heartbeats of every worker that lives, with what it holds.
    pub fn beat(&mut self) {
        for sim in self.sims.values_mut().filter(|sim| sim.answers() && sim.connected) {
            let heartbeat = Heartbeat {
                phase: if sim.waits { Phase::Stopping } else { Phase::Training },
                step: 0,
                collective: sim.collective,
                held: sim.held.clone(),
                loading: None,
            };
            sim.up.push_back((sim.attempt, Up::Heartbeat(heartbeat)));
        }
    }

    /// The leader has heard nothing of it for the heartbeat timeout.
    pub fn silence(&mut self, name: &str) {
        if let Some(told) = self.tracker.waits_out(name, self.now) {
            self.happenings.extend(told);
            return;
        }
        if let Some(sim) = self.sims.get_mut(name)
            && sim.connected
        {
            sim.connected = false;
            sim.up.clear();
            sim.down.clear();
            self.happenings.extend(self.tracker.silent(name, "nothing heard of it"));
        }
    }

    pub fn kill(&mut self, name: &str, exit_code: Option<i32>) {
        if let Some(sim) = self.sims.get_mut(name) {
            sim.end(exit_code);
        }
    }

    /// A member notices that a peer's stream has closed.
    pub fn notice(&mut self, name: &str) -> bool {
        let Some(Run { attempt, peers }) = self.sims.get(name).and_then(|sim| sim.run.clone())
        else {
            return false;
        };
        // A peer that has not been told of the attempt yet is waited for.
        let is_gone = |sim: &Sim| {
            !sim.alive || sim.attempt > attempt || (sim.attempt == attempt && sim.run.is_none())
        };
        let gone = peers.iter().position(|peer| self.sims.get(peer).is_some_and(is_gone));
        let sim = self.sims.get_mut(name).filter(|sim| sim.answers());
        let (Some(rank), Some(sim)) = (gone, sim) else {
            return false;
        };
        // Whichever of its ranks was the first to miss it.
        let devices = self.setup.devices;
        sim.leave(LeftReason::PeerLost { rank: rank as u32 * devices + devices - 1 });
        true
    }

    /// The gang of an attempt, if all of its members are in it and can compute.
    fn whole_gang(&self) -> Option<(u32, Vec<String>)> {
        let runs = self.sims.values().filter_map(|sim| sim.run.clone());
        let newest = runs.max_by_key(|run| run.attempt)?;
        let works = |name: &String| {
            self.sims.get(name).is_some_and(|sim| sim.answers() && sim.is_in(newest.attempt))
        };
        newest.peers.iter().all(works).then_some((newest.attempt, newest.peers))
    }

    /// All members of the newest gang do one step together; before their first they join and take
    /// a snapshot of what they start from. False where no gang can.
    pub fn step(&mut self) -> bool {
        let Some((attempt, members)) = self.whole_gang() else {
            return false;
        };
        if attempt < self.claimed {
            members.iter().for_each(|name| self.kill(name, Some(75)));
            return true;
        }
        let gang = self.gangs.get_mut(&attempt).expect("a running gang was configured");
        if attempt > self.claimed {
            // Its claim: what is newer than its start no longer counts.
            self.committed.retain(|step| *step <= gang.step);
        }
        self.claimed = attempt;
        if !gang.joined {
            gang.joined = true;
            let step = gang.step;
            let world = members.len() as u32;
            for (rank, name) in (0u32..).zip(&members) {
                let sim = self.sims.get_mut(name).expect("members are there");
                sim.snapshot(attempt, step, shards(rank, world, self.setup.devices));
            }
            self.beat();
            return true;
        }
        if gang.step < self.setup.steps {
            gang.step += 1;
        }
        let GangTruth { step, stop, save, .. } = gang.clone();
        self.done = self.done.max(step);
        let complete = step >= self.setup.steps;
        let rank_0 = self.sims.get_mut(&members[0]).expect("members are there");
        rank_0.up.push_back((attempt, step_report(step, attempt)));
        if save || complete || step % self.setup.checkpoint_every == 0 {
            rank_0.up.push_back((attempt, committed(step, attempt)));
            self.committed.push(step);
        }
        for (rank, name) in (0u32..).zip(&members) {
            let sim = self.sims.get_mut(name).expect("members are there");
            sim.collective += 10;
            let world = members.len() as u32;
            if stop {
                // What was stopped with is not yet at the buddy.
                sim.snapshot(attempt, step, shards(rank, 1, self.setup.devices));
            } else if step % self.setup.memory_every == 0 {
                sim.snapshot(attempt, step, shards(rank, world, self.setup.devices));
            }
            if complete {
                sim.complete(step);
            } else if stop {
                sim.leave(LeftReason::Stopped { step });
            }
        }
        self.beat();
        true
    }

    /// Another leader takes over: it has the record and finds the workers by their pods.
    pub fn take_over(&mut self) {
        self.restarts_of_leader += 1;
        let before = self.observed().clone();
        let now = self.now;
        let mut observed = before.clone();
        observed.workers.clear();
        observed.preflight = Default::default();
        observed.rings = Default::default();
        observed.seats = Default::default();
        for sim in self.sims.values_mut() {
            sim.connected = false;
            sim.up.clear();
            sim.down.clear();
        }
        for worker in before.workers {
            let sim = &self.sims[&worker.name];
            if sim.alive || !sim.reaped {
                observed.workers.push(Worker {
                    state: WorkerState::Starting { since: now },
                    held: Vec::new(),
                    collective: 0,
                    address: None,
                    speaks: 0,
                    checked: Checked::No,
                    paired: false,
                    boot: String::new(),
                    quiet_since: None,
                    patient_in: None,
                    unplaced: false,
                    ..worker
                });
            }
        }
        // What was committed is read from the storage, not from messages.
        let term = u64::from(self.restarts_of_leader);
        let recoveries = self.tracker.recoveries.clone();
        // Whose the gang was at first is each leader's own knowledge.
        observed.record.gang.iter_mut().for_each(|gang| gang.inherited = false);
        // Who was lost first is known to the leader that heard it.
        observed.record.first_lost = None;
        let record = observed.record;
        let saved = Saved { term, record, recoveries, ..Saved::default() };
        let line = record::write(&saved);
        let found = record::read(&line).expect("what one leader wrote the next one reads");
        assert_eq!(found, saved, "{line}");
        observed.record = found.record;
        let newest = self.committed.last();
        observed.stored = newest.map(|step| Stored { step: *step, name: directory_name(*step) });
        self.tracker = Tracker::new(observed);
        self.tracker.recoveries = found.recoveries;
    }

    /// A checkpoint lies in storage, and the leader knows of it.
    pub fn store(&mut self, step: u64) {
        self.committed.push(step);
        self.done = self.done.max(step);
        self.tracker.observed.stored = Some(Stored { step, name: directory_name(step) });
    }

    /// What was cut off, stopped or hung goes on, unless it was to end meanwhile.
    pub fn heal(&mut self, name: &str) {
        let stopping = self.observed().worker(name).is_none_or(|worker| worker.stopping);
        if let Some(sim) = self.sims.get_mut(name) {
            (sim.frozen, sim.cut, sim.deaf) = (false, false, false);
            if stopping {
                sim.end(None);
            }
        }
    }

    /// Newest step whose every shard is held, in truth, by workers that are alive.
    pub fn newest_whole(&self) -> u64 {
        let alive = || self.sims.values().filter(|sim| sim.alive);
        let is_whole = |attempt: u32, step: u64| {
            let of = |sim: &Sim, shard: u32| {
                sim.held.iter().any(|held| {
                    (held.attempt, held.step) == (attempt, step) && held.shards.contains(&shard)
                })
            };
            self.observed().layout_of(attempt).is_some_and(|layout| {
                (0..layout.mesh.world()).all(|shard| alive().any(|sim| of(sim, shard)))
            })
        };
        let held = alive().flat_map(|sim| &sim.held);
        let whole = held.filter(|held| is_whole(held.attempt, held.step));
        whole.map(|held| held.step).max().unwrap_or(0)
    }

    pub fn node(&mut self, name: &str) -> &mut Node {
        let nodes = &mut self.tracker.observed.nodes;
        nodes.iter_mut().find(|node| node.name == name).expect("a node of this world")
    }

    /// Messages flow until none is left, with plans in between. Returns the plans with actions.
    pub fn settle(&mut self) -> Vec<Plan> {
        let mut plans = Vec::new();
        for _ in 0..200 {
            plans.extend(self.decide());
            let names: Vec<String> = self.sims.keys().cloned().collect();
            let mut moved = false;
            for name in &names {
                while self.obey(name) {
                    moved = true;
                }
            }
            for name in &names {
                while self.hear(name) {
                    moved = true;
                }
            }
            if !moved {
                return plans;
            }
        }
        panic!("messages never end");
    }
}

/// Ranks whose shards a worker keeps: its own and those of the one before it, whose buddy it is.
fn shards(index: u32, workers: u32, devices: u32) -> Vec<u32> {
    let before = if workers > 1 { (index + workers - 1) % workers } else { index };
    let of = |worker: u32| worker * devices..(worker + 1) * devices;
    let mut shards: Vec<u32> = of(index).chain(of(before)).collect();
    shards.sort_unstable();
    shards.dedup();
    shards
}
