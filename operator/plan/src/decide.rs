//! `plan(&Observed, now) -> Plan`: everything that is to be done for one job, and why.
//!
//! Read top to bottom: is the job over; is its gang healthy; can it grow; can a new attempt start;
//! are there enough workers. Nothing here reads a clock or the world, so equal inputs give equal
//! plans, and a plan for a converged job has no actions.

use crate::observed::{
    Gang, Millis, Observed, Outcome, Size, StopCause, Worker, WorkerState,
};
use moejob_protocol::config::{Member, Resume, ShardSource, WorkerConfig};
use moejob_protocol::layout::Layout;
use moejob_protocol::message::{LeftReason, Request};

/// How long a suspend or an interrupt waits for its checkpoint.
pub const STOP_TIMEOUT: Millis = 60_000;
/// A first step may take this long: data and weights are loaded before it.
pub const FIRST_STEP_TIMEOUT: Millis = 600_000;
/// Automatic step timeout: this many medians, and at least `STEP_TIMEOUT_MIN`.
pub const STEP_TIMEOUT_MEDIANS: u64 = 20;
pub const STEP_TIMEOUT_MIN: Millis = 60_000;
/// Time that a worker has to end by itself when the job is over.
pub const END_GRACE: Millis = 5_000;

/// What to do now, in this order, and when to look again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub actions: Vec<Action>,
    /// One sentence a decision, in the order they were taken.
    pub why: Vec<String>,
    /// Look again at this time even if nothing happens.
    pub requeue: Option<Millis>,
}

/// No choice is left to whoever executes it.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Create a worker on a node.
    StartWorker { name: String, node: String },
    /// End a worker: at once when `grace` is 0.
    StopWorker { name: String, grace: Millis },
    /// Count a loss against the budget, and mark the attempt as over.
    EndAttempt { attempt: u32, unplanned: bool, cause: String },
    /// Make the attempt durable. Before any `Configure` of it.
    RecordAttempt(Box<Gang>),
    Configure { name: String, config: Box<WorkerConfig> },
    LeaveAttempt { name: String, attempt: u32, reason: String },
    /// To every member of the attempt; `cause` is recorded with it.
    Request { attempt: u32, request: Request, cause: StopCause },
    Finish(Outcome),
}

/// Decides. See the module's first lines.
pub fn plan(observed: &Observed, now: Millis) -> Plan {
    let mut planner = Planner { observed, now, plan: Plan::default() };
    planner.decide();
    planner.plan
}

struct Planner<'a> {
    observed: &'a Observed,
    now: Millis,
    plan: Plan,
}

/// What became of the gang that is under way.
enum Health {
    Well,
    /// Some members have stopped as they were asked to, the others are about to.
    Stopping,
    /// It can make no more steps.
    Broken { unplanned: bool, cause: String },
}

impl<'o> Planner<'o> {
    fn decide(&mut self) {
        if self.observed.record.outcome.is_some() {
            return self.stop_everything("the job is over");
        }
        if let Some(outcome) = self.outcome() {
            self.why(format!("finish: {}", describe(&outcome)));
            self.act(Action::Finish(outcome));
            return self.stop_everything("the job is over");
        }
        self.kill_the_silent();
        match self.observed.gang() {
            Some(gang) => self.tend(gang),
            None => self.begin(),
        }
        if !self.observed.interrupt && !self.observed.wanted.suspend {
            self.fill();
        }
    }

    /// The job's end, if something has decided it.
    fn outcome(&self) -> Option<Outcome> {
        let observed = self.observed;
        for worker in &observed.workers {
            match &worker.state {
                WorkerState::Completed { step, .. } => {
                    return Some(Outcome::Complete { step: *step });
                }
                WorkerState::Dead { exit_code: Some(code @ (2 | 3)), message } => {
                    let reason = if *code == 2 { "InvalidSpec" } else { "DataOrCheckpointRefused" };
                    let message = message.clone();
                    return Some(Outcome::Failed { exit_code: *code, reason, message });
                }
                _ => {}
            }
        }
        let halting = observed.interrupt || observed.wanted.suspend;
        if halting && self.is_halted() {
            let interrupted = observed.interrupt;
            return Some(if interrupted { Outcome::Interrupted } else { Outcome::Suspended });
        }
        if observed.gang().is_none() && self.restarts_in_window() > observed.wanted.restarts_max {
            return Some(self.budget_used_up());
        }
        None
    }

    /// No gang is under way, or it has not saved its last state in time.
    fn is_halted(&self) -> bool {
        match self.observed.gang() {
            None => true,
            Some(gang) => {
                let asked = gang.stop_requested.filter(|(cause, _)| *cause != StopCause::Growth);
                let all_left = self.members(gang).all(|worker| {
                    worker.is_none_or(|worker| !self.takes_part(worker, gang.attempt))
                });
                all_left || asked.is_some_and(|(_, at)| self.now >= at + STOP_TIMEOUT)
            }
        }
    }

    fn restarts_in_window(&self) -> u32 {
        let wanted = &self.observed.wanted;
        let since = self.now.saturating_sub(wanted.restart_window);
        self.observed.record.restarts.iter().filter(|at| **at >= since).count() as u32
    }

    fn budget_used_up(&self) -> Outcome {
        let wanted = &self.observed.wanted;
        Outcome::Failed {
            exit_code: 1,
            reason: "RestartBudgetUsedUp",
            message: format!(
                "{} unplanned losses within {} s, more than recovery.maxRestarts = {}; \
                 look at the newest WorkerLost events for the cause",
                self.restarts_in_window(),
                wanted.restart_window / 1000,
                wanted.restarts_max
            ),
        }
    }

    fn stop_everything(&mut self, reason: &str) {
        let names: Vec<String> = (self.observed.workers.iter())
            .filter(|worker| !worker.is_dead() && !worker.stopping)
            .map(|worker| worker.name.clone())
            .collect();
        for name in names {
            self.why(format!("stop {name}: {reason}"));
            self.act(Action::StopWorker { name, grace: END_GRACE });
        }
    }

    /// A silent worker is lost; ending it is a courtesy, the attempt number is what fences it.
    fn kill_the_silent(&mut self) {
        for worker in &self.observed.workers {
            let late = match worker.state {
                WorkerState::Silent => Some("nothing heard of it".to_string()),
                WorkerState::Starting { since } => {
                    let limit = since + self.observed.wanted.gang_timeout;
                    self.look_again_at(limit);
                    (self.now >= limit).then(|| "it did not connect in time".to_string())
                }
                _ => None,
            };
            if let Some(reason) = late.filter(|_| !worker.stopping) {
                self.why(format!("stop {}: {reason}", worker.name));
                self.act(Action::StopWorker { name: worker.name.clone(), grace: 0 });
            }
        }
    }

    /// A gang is under way: keep it, grow it, or end it.
    fn tend(&mut self, gang: &'o Gang) {
        match self.health(gang) {
            Health::Well => self.improve(gang),
            Health::Stopping => {}
            Health::Broken { unplanned, cause } => self.end(gang, unplanned, cause),
        }
    }

    fn health(&mut self, gang: &'o Gang) -> Health {
        let mut stopped = 0;
        for (member, worker) in gang.members.iter().zip(self.members(gang)) {
            let lost = match worker.map(|worker| &worker.state) {
                None => Some((true, "is gone".to_string())),
                Some(WorkerState::Dead { exit_code, .. }) => {
                    Some((*exit_code != Some(75), ended(*exit_code)))
                }
                Some(WorkerState::Silent) => Some((true, "went silent".to_string())),
                Some(WorkerState::Left { attempt, reason }) if *attempt == gang.attempt => {
                    stopped += u32::from(matches!(reason, LeftReason::Stopped { .. }));
                    left(reason)
                }
                Some(WorkerState::Idle) => Some((true, "connected anew".to_string())),
                _ => None,
            };
            if let Some((unplanned, what)) = lost {
                let cause = format!("rank {} ({}) {what}", member.rank, member.worker);
                return Health::Broken { unplanned, cause };
            }
        }
        match stopped {
            0 => self.progress(gang),
            all if all == gang.members.len() as u32 => {
                Health::Broken { unplanned: false, cause: "it stopped as asked".to_string() }
            }
            _ => self.stopping(gang),
        }
    }

    /// Members stop at the end of the same step; one that does not is waited for, within a bound.
    fn stopping(&mut self, gang: &'o Gang) -> Health {
        let asked_at = gang.stop_requested.map_or(self.observed.record.progressed_at, |(_, at)| at);
        let due = asked_at + STOP_TIMEOUT;
        if self.now < due {
            self.look_again_at(due);
            return Health::Stopping;
        }
        Health::Broken { unplanned: true, cause: "not all members stopped".to_string() }
    }

    /// The second clock: members are alive, but does the job go on?
    fn progress(&mut self, gang: &'o Gang) -> Health {
        let record = &self.observed.record;
        let limit = match (gang.stepped, self.observed.wanted.step_timeout) {
            (false, _) => FIRST_STEP_TIMEOUT,
            (true, 0) => STEP_TIMEOUT_MIN.max(STEP_TIMEOUT_MEDIANS * record.step_median),
            (true, set) => set,
        };
        let due = record.progressed_at.max(gang.started_at) + limit;
        if self.now < due {
            self.look_again_at(due);
            return Health::Well;
        }
        let at: Vec<(u64, &Worker)> =
            self.members(gang).flatten().map(|worker| (worker.collective, worker)).collect();
        let least = at.iter().map(|(collective, _)| *collective).min().unwrap_or(0);
        let behind: Vec<&Worker> =
            at.iter().filter(|(collective, _)| *collective == least).map(|(_, w)| *w).collect();
        if let ([laggard], true) = (&behind[..], at.len() > 1) {
            let name = laggard.name.clone();
            self.why(format!("stop {name}: no step for {limit} ms, it waits behind the others"));
            self.act(Action::StopWorker { name, grace: 0 });
        }
        Health::Broken { unplanned: true, cause: format!("no step for {limit} ms") }
    }

    /// The gang is well: does somebody want it to stop, or can it grow?
    fn improve(&mut self, gang: &'o Gang) {
        let observed = self.observed;
        let asked = gang.stop_requested.map(|(cause, _)| cause);
        let halt = match (observed.interrupt, observed.wanted.suspend) {
            (true, _) => Some(StopCause::Interrupt),
            (_, true) => Some(StopCause::Suspend),
            _ => None,
        };
        if let Some(cause) = halt {
            if asked.is_none_or(|asked| asked == StopCause::Growth) {
                self.why(format!("stop the gang with a checkpoint: {cause:?}"));
                let request = Request { checkpoint_now: true, stop_after_this_step: true };
                self.act(Action::Request { attempt: gang.attempt, request, cause });
            } else if let Some((_, at)) = gang.stop_requested {
                self.look_again_at(at + STOP_TIMEOUT);
            }
            return;
        }
        if asked.is_some() || !gang.stepped {
            return;
        }
        let present = gang.members.len() as u32;
        let possible = present + self.available().count() as u32;
        let Some(size) = self.size_for(possible).filter(|size| size.nodes > present) else {
            return;
        };
        let due = gang.started_at + observed.wanted.growth_interval;
        if self.now < due {
            return self.look_again_at(due);
        }
        self.why(format!("grow from {present} to {} nodes after this step", size.nodes));
        let request = Request { checkpoint_now: false, stop_after_this_step: true };
        let cause = StopCause::Growth;
        self.act(Action::Request { attempt: gang.attempt, request, cause });
    }

    /// The gang is broken: get everybody out of it, then begin anew.
    fn end(&mut self, gang: &'o Gang, unplanned: bool, cause: String) {
        let mut waiting = 0;
        for worker in self.members(gang).flatten() {
            let WorkerState::Member { leaving, .. } = worker.state else {
                continue;
            };
            waiting += 1;
            if !leaving && !worker.stopping {
                self.act(Action::LeaveAttempt {
                    name: worker.name.clone(),
                    attempt: gang.attempt,
                    reason: cause.clone(),
                });
            }
        }
        if waiting > 0 {
            self.why(format!("attempt {} is broken ({cause}): {waiting} to leave it", gang.attempt));
            return;
        }
        self.why(format!("attempt {} is over: {cause}", gang.attempt));
        self.act(Action::EndAttempt { attempt: gang.attempt, unplanned, cause });
    }

    /// No gang is under way: start the next attempt if there are enough workers.
    fn begin(&mut self) {
        let observed = self.observed;
        if observed.interrupt || observed.wanted.suspend {
            return;
        }
        let available: Vec<&'o Worker> = self.available().collect();
        let starting = (observed.workers.iter())
            .filter(|worker| !worker.stopping)
            .filter(|worker| matches!(worker.state, WorkerState::Starting { .. }))
            .count();
        let Some(size) = self.size_for(available.len() as u32) else {
            let (have, need) = (available.len(), self.least_size());
            return self.why(format!("wait: {have} workers connected, {need} needed"));
        };
        // A first attempt waits for everybody; survivors of a loss do not.
        let survivors = available.iter().any(|w| matches!(w.state, WorkerState::Left { .. }));
        let could_be_more = size.nodes < observed.wanted.nodes_max && starting > 0;
        if could_be_more && !survivors {
            return self.why(format!("wait for {starting} workers that are starting"));
        }
        self.start_attempt(&size, &available);
    }

    fn start_attempt(&mut self, size: &Size, available: &[&Worker]) {
        let observed = self.observed;
        let attempt = observed.record.attempt + 1;
        // Survivors first: they hold state, and keep their order.
        let (survivors, newcomers): (Vec<&Worker>, Vec<&Worker>) =
            available.iter().partition(|worker| !worker.held.is_empty());
        let chosen: Vec<&Worker> =
            survivors.into_iter().chain(newcomers).take(size.nodes as usize).collect();
        let members: Vec<Member> = (0..)
            .zip(&chosen)
            .map(|(rank, worker)| Member {
                rank,
                worker: worker.name.clone(),
                node: worker.node.clone(),
                address: worker.address.clone().unwrap_or_default(),
            })
            .collect();
        let (resume, source) = choose_state(observed, &chosen);
        let mut config = WorkerConfig {
            attempt,
            rank: None,
            layout: size.layout.clone(),
            members: members.clone(),
            resume,
            ..observed.template.clone()
        };
        config.digest = config.digest_of(|config| format!("{config:?}").into_bytes());
        self.why(format!(
            "start attempt {attempt} on {} nodes at step {} from {source}",
            size.nodes,
            config.resume.step()
        ));
        self.act(Action::RecordAttempt(Box::new(Gang {
            attempt,
            digest: config.digest.clone(),
            layout: size.layout.clone(),
            members,
            resumed_at: config.resume.step(),
            started_at: self.now,
            stepped: false,
            stop_requested: None,
            ended: false,
        })));
        for (rank, worker) in (0..).zip(&chosen) {
            let config = Box::new(WorkerConfig { rank: Some(rank), ..config.clone() });
            self.act(Action::Configure { name: worker.name.clone(), config });
        }
    }

    /// Enough workers for the largest gang and its spares, one a node.
    fn fill(&mut self) {
        let observed = self.observed;
        let alive: Vec<&Worker> = observed.workers.iter().filter(|w| !w.is_dead()).collect();
        let living = alive.iter().filter(|worker| !worker.stopping).count() as u32;
        let target = observed.wanted.nodes_max + observed.wanted.spares;
        let mut missing = target.saturating_sub(living);
        let mut births = observed.record.births;
        for node in &observed.nodes {
            if missing == 0 {
                return;
            }
            if !node.usable || alive.iter().any(|worker| worker.node == node.name) {
                continue;
            }
            if self.now < node.avoid_until {
                self.look_again_at(node.avoid_until);
                continue;
            }
            let name = format!("{}-{births}", observed.template.job_name);
            self.why(format!("start {name} on {}", node.name));
            self.act(Action::StartWorker { name, node: node.name.clone() });
            births += 1;
            missing -= 1;
        }
    }

    fn members(&self, gang: &'o Gang) -> impl Iterator<Item = Option<&'o Worker>> + use<'o> {
        let observed = self.observed;
        gang.members.iter().map(|member| observed.worker(&member.worker))
    }

    fn takes_part(&self, worker: &Worker, attempt: u32) -> bool {
        matches!(&worker.state, WorkerState::Member { attempt: of, .. } if *of == attempt)
    }

    fn available(&self) -> impl Iterator<Item = &'o Worker> + use<'o> {
        self.observed.workers.iter().filter(|worker| worker.is_available())
    }

    /// The largest gang that `nodes` workers can form.
    fn size_for(&self, nodes: u32) -> Option<Size> {
        let wanted = &self.observed.wanted;
        let fits = |size: &&Size| {
            (wanted.nodes_min..=wanted.nodes_max.min(nodes)).contains(&size.nodes)
        };
        wanted.sizes.iter().filter(fits).next_back().cloned()
    }

    fn least_size(&self) -> u32 {
        let wanted = &self.observed.wanted;
        let sizes = wanted.sizes.iter().map(|size| size.nodes);
        sizes.filter(|nodes| *nodes >= wanted.nodes_min).min().unwrap_or(wanted.nodes_min)
    }

    fn look_again_at(&mut self, at: Millis) {
        if at > self.now {
            self.plan.requeue = Some(self.plan.requeue.map_or(at, |other| other.min(at)));
        }
    }

    fn act(&mut self, action: Action) {
        self.plan.actions.push(action);
    }

    fn why(&mut self, reason: String) {
        self.plan.why.push(reason);
    }
}

/// The newest state that the chosen workers or the storage have whole.
fn choose_state(observed: &Observed, chosen: &[&Worker]) -> (Resume, String) {
    let mut best: Option<(u64, u32, &Layout, Vec<ShardSource>)> = None;
    for held in chosen.iter().flat_map(|worker| &worker.held) {
        let newer = best.as_ref().is_none_or(|(step, attempt, ..)| {
            (held.step, held.attempt) > (*step, *attempt)
        });
        let Some(layout) = observed.layout_of(held.attempt).filter(|_| newer) else {
            continue;
        };
        if let Some(sources) = sources_of(layout, held.attempt, held.step, chosen) {
            best = Some((held.step, held.attempt, layout, sources));
        }
    }
    let stored = observed.stored.as_ref();
    match best {
        Some((step, attempt, layout, sources)) if stored.is_none_or(|s| s.step <= step) => {
            let layout = layout.clone();
            let source = format!("the memory of attempt {attempt}");
            (Resume::Memory { step, attempt, layout, sources }, source)
        }
        _ => match stored {
            Some(stored) => {
                let (step, name) = (stored.step, stored.name.clone());
                let source = format!("checkpoint {name}");
                (Resume::Checkpoint { step, name }, source)
            }
            None => (Resume::Fresh, "initial weights".to_string()),
        },
    }
}

/// Who sends each shard of (attempt, step): its own rank where that survives, else any holder.
fn sources_of(
    layout: &Layout,
    attempt: u32,
    step: u64,
    chosen: &[&Worker],
) -> Option<Vec<ShardSource>> {
    let holds = |worker: &Worker, shard: u32| {
        (worker.held.iter())
            .any(|held| (held.attempt, held.step) == (attempt, step) && held.shards.contains(&shard))
    };
    (0..layout.mesh.world())
        .map(|shard| {
            let from = chosen.iter().position(|worker| holds(worker, shard))? as u32;
            Some(ShardSource { shard, from })
        })
        .collect()
}

fn ended(exit_code: Option<i32>) -> String {
    match exit_code {
        Some(code) => format!("ended with exit code {code}"),
        None => "was killed".to_string(),
    }
}

/// Whether a member that left has broken the gang by that, and how.
fn left(reason: &LeftReason) -> Option<(bool, String)> {
    match reason {
        LeftReason::Asked => Some((true, "has left".to_string())),
        LeftReason::PeerLost { rank } => Some((true, format!("lost rank {rank}"))),
        LeftReason::Error { message } => Some((true, format!("left: {message}"))),
        LeftReason::Stopped { .. } => None,
    }
}

fn describe(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Complete { step } => format!("all {step} steps are done"),
        Outcome::Failed { reason, message, .. } => format!("{reason}: {message}"),
        Outcome::Suspended => "suspended".to_string(),
        Outcome::Interrupted => "interrupted".to_string(),
    }
}
