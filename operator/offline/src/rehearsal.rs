//! A rehearsal: the plan in a world in which every worker does as it is told.

use super::WhatIf;
use moejob_manifest::job::{Job, Venue};
use moejob_plan::decide::{Action, plan};
use moejob_plan::launch::{self, Places};
use moejob_plan::observed::{Gang, Millis, Node, Observed, Stored, WorkerState};
use moejob_plan::track::Tracker;
use moejob_protocol::PROTOCOL_VERSION;
use moejob_protocol::checkpoint::directory_name;
use moejob_protocol::config::Resume;
use moejob_protocol::layout::buddies;
use moejob_protocol::message::{Heartbeat, Held, Hello, LeftReason, Phase, Up};
use moejob_protocol::report::StepReport;

/// Rounds of planning that a rehearsal takes at most; a good plan needs about five.
const ROUNDS_MAX: u32 = 100;

/// A world in which everybody does at once what the plan says.
#[derive(Clone)]
pub struct Rehearsal {
    pub tracker: Tracker,
    now: Millis,
    /// Ranks of a node.
    per_node: u32,
    pub why: Vec<String>,
    /// What the newest attempt started from.
    resume: Option<Resume>,
}

impl Rehearsal {
    pub fn new(job: &Job, nodes: &[String]) -> Rehearsal {
        let node = |name: &String| Node::good(name);
        let mut wanted = launch::wanted(job, Venue::Kubernetes);
        // Nodes that are only thought of are good.
        (wanted.suspend, wanted.preflight) = (false, None);
        let template = launch::template(job, Venue::Kubernetes, &job.name, &Places::default());
        let nodes = nodes.iter().map(node).collect();
        let observed = Observed { nodes, ..Observed::new(wanted, template) };
        let (tracker, why) = (Tracker::new(observed), Vec::new());
        Rehearsal { tracker, now: 0, per_node: job.profile.ranks, why, resume: None }
    }

    pub fn gang(&self) -> Option<&Gang> {
        self.tracker.observed.gang()
    }

    /// Plans and obeys until there is nothing left to do.
    pub fn settle(&mut self) {
        for _ in 0..ROUNDS_MAX {
            self.tracker.prune();
            let plan = plan(&self.tracker.observed, self.now);
            for why in plan.why {
                if !self.why.contains(&why) {
                    self.why.push(why);
                }
            }
            if plan.actions.is_empty() && !self.connect() {
                return;
            }
            for action in &plan.actions {
                self.tracker.done(action, self.now);
                self.obey(action);
            }
        }
    }

    fn obey(&mut self, action: &Action) {
        match action {
            Action::StopWorker { name, .. } => {
                self.tracker.exited(name, Some(0), "stopped", self.now);
            }
            Action::Configure { config, .. } => self.resume = Some(config.resume.clone()),
            Action::LeaveAttempt { name, attempt, .. } => {
                let worker = self.tracker.observed.worker(name);
                let held = worker.map(|worker| worker.held.clone()).unwrap_or_default();
                let left = Up::Left { reason: LeftReason::Asked, held };
                self.tracker.heard(name, *attempt, &left, self.now);
            }
            _ => {}
        }
    }

    /// Workers that were started connect. Whether there were any.
    fn connect(&mut self) -> bool {
        let starting = self.tracker.observed.workers.iter();
        let names: Vec<String> = starting
            .filter(|worker| matches!(worker.state, WorkerState::Starting { .. }))
            .map(|worker| worker.name.clone())
            .collect();
        for name in &names {
            let (version, worker) = (PROTOCOL_VERSION, name.clone());
            let hello = Hello { version, worker, ..Hello::default() };
            self.tracker.connected(name, &format!("{name}:1"), &hello);
        }
        !names.is_empty()
    }

    /// Trains to the moment at which a loss costs most: just before the next checkpoint and, if
    /// that falls between two snapshots, just before the next of those.
    pub fn train(&mut self) {
        let Some(gang) = self.gang().cloned() else { return };
        let template = self.tracker.observed.template.clone();
        let every = template.checkpoint.every_steps;
        let memory = template.recovery.memory_every_steps;
        let steps = template.training.steps;
        let step = (2 * every).min(steps).saturating_sub(1);
        let stored = step / every * every;
        if stored > 0 {
            let name = directory_name(stored);
            self.tracker.observed.stored = Some(Stored { step: stored, name });
        }
        let snapshot = step.checked_div(memory).map_or(0, |count| count * memory);
        let buddies = buddies(&node_of_rank(&gang, self.per_node));
        // What each member has: shards of its own ranks, and of those whose buddy is one of them.
        let mut kept = vec![Vec::new(); gang.members.len()];
        for rank in 0..gang.layout.mesh.world() {
            let buddy = buddies[rank as usize].map(|buddy| buddy / self.per_node);
            let own = rank / self.per_node;
            for member in [Some(own), buddy.filter(|buddy| *buddy != own)].into_iter().flatten() {
                kept[member as usize].push(rank);
            }
        }
        for (shards, member) in kept.into_iter().zip(&gang.members) {
            let held = vec![Held { attempt: gang.attempt, step: snapshot, shards }];
            let (phase, loading) = (Phase::Training, None);
            let beat = Heartbeat { phase, step, collective: 1, held, loading };
            self.tracker.heard(&member.worker, gang.attempt, &Up::Heartbeat(beat), self.now);
        }
        if let Some(member) = gang.members.first() {
            let up = Up::Step(StepReport { step, attempt: gang.attempt, ..StepReport::default() });
            self.tracker.heard(&member.worker, gang.attempt, &up, self.now);
        }
        self.settle();
        self.why.clear();
    }

    /// These nodes are lost together.
    pub fn lose_nodes(&mut self, lost: &[String]) {
        let observed = &mut self.tracker.observed;
        for node in observed.nodes.iter_mut().filter(|node| lost.contains(&node.name)) {
            node.usable = false;
        }
        let gone = observed.workers.iter().filter(|worker| lost.contains(&worker.node));
        let gone: Vec<String> = gone.map(|worker| worker.name.clone()).collect();
        for name in gone {
            self.tracker.exited(&name, None, "its node was lost", self.now);
        }
        self.settle();
    }

    /// The same, and what it costs.
    pub fn lose(mut self, lost: Vec<String>) -> WhatIf {
        let before = self.gang().map_or(0, |gang| gang.attempt);
        let done = self.tracker.observed.record.step;
        self.lose_nodes(&lost);
        let gang = self.gang().filter(|gang| gang.attempt > before || lost_nothing(gang, &lost));
        let renewed = gang.is_some_and(|gang| gang.attempt > before);
        let resume = self.resume.as_ref().filter(|_| renewed);
        WhatIf {
            nodes: gang.map(|gang| gang.members.len() as u32),
            dp: gang.map(|gang| gang.layout.mesh.dp),
            ep: gang.map(|gang| gang.layout.mesh.ep),
            steps_lost: resume.map(|resume| done.saturating_sub(resume.step())),
            resume: resume.map(|resume| match resume {
                Resume::Fresh => "initial weights".to_string(),
                Resume::Checkpoint { .. } => "checkpoint".to_string(),
                Resume::Memory { .. } => "memory".to_string(),
            }),
            why: self.why,
            lose: lost,
        }
    }
}

fn lost_nothing(gang: &Gang, lost: &[String]) -> bool {
    gang.members.iter().all(|member| !lost.contains(&member.node))
}

/// The position of each rank's member, which stands for its node.
pub fn node_of_rank(gang: &Gang, per_node: u32) -> Vec<u32> {
    (0..gang.layout.mesh.world()).map(|rank| rank / per_node).collect()
}
