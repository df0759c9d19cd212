//! Workers for a gang, and the next attempt of it.

use super::resume::{Start, choose};
use super::{
    Action, DEVICE_FAILURES_MAX, DEVICE_WINDOW, END_GRACE, PARTED_AVOID, PARTINGS_MIN, Planner,
    STOP_TIMEOUT,
};
use crate::observed::{DeviceFailure, Gang, Millis, Size, Worker, WorkerState};
use moejob_manifest::job::Venue;
use moejob_manifest::words::{one_or_more, several};
use moejob_protocol::config::{Member, Resume, WorkerConfig};
use std::sync::Arc;

/// Of a parameter, with both moments.
const STATE_BYTES: u64 = 12;
/// Bytes of a rank's state that take seconds to reach a worker that has none.
const LARGE_STATE: u64 = 2 << 30;

impl<'o> Planner<'o> {
    /// No gang is under way: start the next attempt if there are enough workers.
    pub(super) fn begin(&mut self) {
        self.give_back();
        if self.avoid_parted() || self.avoid_broken() {
            return;
        }
        if self.observed.is_preempted() {
            return self.why("wait: a job before this one needs its nodes".to_string());
        }
        let candidates = self.ahead_of_newcomers(self.candidates().collect());
        let called_back = candidates.iter().filter(|of| self.index.is_called_back(&of.node));
        let fewer = candidates.len() - called_back.count();
        // What is called back is used where the gang cannot do without it.
        let size = self.size_for(fewer as u32).or_else(|| self.size_for(candidates.len() as u32));
        let Some(size) = size else {
            let (have, need) = (candidates.len(), self.least_size());
            let measuring = match self.measuring() {
                0 => String::new(),
                count => format!(", {count} being measured"),
            };
            let have = several(have, "worker");
            return self.why(format!("wait: {have} connected{measuring}, {need} needed"));
        };
        // A first attempt waits for everybody; survivors of a loss do not.
        let (starting, measuring) = (self.starting(), self.measuring());
        let survivors = candidates.iter().any(|w| matches!(w.state, WorkerState::Left { .. }));
        if size.nodes < self.observed.wanted.nodes_max && !survivors {
            if starting > 0 {
                let workers = several(starting, "worker");
                let are = one_or_more(starting, "is", "are");
                return self.why(format!("wait for {workers} that {are} starting"));
            }
            if measuring > 0 {
                return self.why(format!("wait for nodes that are being measured: {measuring}"));
            }
        }
        self.start_attempt(size, &candidates);
    }

    /// After a loss: where a rank's state is large, those who hold it go on at once. Whoever has
    /// come meanwhile joins by a growth, else all would wait while its shard travels. Spares are
    /// there to take a place at once, and so is whoever is needed for half of the gang.
    fn ahead_of_newcomers(&self, all: Vec<&'o Worker>) -> Vec<&'o Worker> {
        let observed = self.observed;
        let lost = |gang: &&Gang| gang.stepped && gang.stop_requested.is_none();
        let Some(gang) = observed.record.gang.as_ref().filter(lost) else { return all };
        let holders: Vec<&'o Worker> =
            all.iter().copied().filter(|worker| !worker.held.is_empty()).collect();
        if holders.len() == all.len() || observed.wanted.spares > 0 {
            return all;
        }
        let Some(size) = self.size_for(holders.len() as u32) else { return all };
        let ranks = u64::from(size.layout.mesh.world().max(1));
        let state = observed.template.model.numel() * STATE_BYTES;
        if 2 * size.nodes < gang.members.len() as u32 || state / ranks < LARGE_STATE {
            return all;
        }
        let from = |workers: &[&Worker], nodes: u32| {
            choose(observed, &self.index, workers, nodes as usize).resume
        };
        let own = from(&holders, size.nodes);
        let with_all = self.size_for(all.len() as u32).map(|size| from(&all, size.nodes));
        let costs_steps = with_all.is_some_and(|other| other.step() > own.step());
        match own {
            Resume::Memory { .. } if !costs_steps => holders,
            _ => all,
        }
    }

    /// Nodes that are no longer listed are not the job's: a gang that does not fit holds nothing.
    fn give_back(&mut self) {
        for worker in &self.observed.workers {
            let listed = self.index.is_listed(&worker.node);
            if !listed && !worker.is_dead() && !worker.stopping {
                self.stop(worker, END_GRACE, &format!("{} is given back", worker.node));
            }
        }
    }

    /// Two nodes that live and lose each other again and again cannot both be in a gang: one of
    /// them is avoided, if the others or free nodes make a gang without it.
    fn avoid_parted(&mut self) -> bool {
        let record = &self.observed.record;
        let since = self.now.saturating_sub(self.observed.wanted.restart_window);
        let recent = || record.partings.iter().filter(|(.., at)| *at >= since);
        let count = |a: &str, b: &str| recent().filter(|(x, y, _)| (&**x, &**y) == (a, b)).count();
        let Some((a, b, _)) = recent().find(|(a, b, _)| count(a, b) >= PARTINGS_MIN) else {
            return false;
        };
        // Who has lost most is at fault, else the one that comes later.
        let losses = |node: &str| recent().filter(|(x, y, _)| x == node || y == node).count();
        let node = if losses(a) > losses(b) { a } else { b };
        if !self.can_spare(node) {
            return false;
        }
        self.avoid(node, PARTED_AVOID, &format!("{a} and {b} live and have lost each other twice"));
        true
    }

    /// A device has failed too often: its node is avoided, if there is another.
    fn avoid_broken(&mut self) -> bool {
        let Some(failure) = self.broken_device() else { return false };
        let (node, name) = (failure.node.clone(), failure.name.clone());
        self.avoid(&node, DEVICE_WINDOW, &format!("{name} has failed {DEVICE_FAILURES_MAX} times"));
        true
    }

    /// The last failure of a device that has failed too often lately.
    pub(super) fn broken_device(&self) -> Option<&'o DeviceFailure> {
        let since = self.now.saturating_sub(DEVICE_WINDOW);
        let recent = || {
            let failures = self.observed.record.device_failures.iter();
            failures.filter(|failure| failure.at >= since)
        };
        let count = |of: &DeviceFailure| {
            let same = |other: &&DeviceFailure| {
                (&other.node, other.device) == (&of.node, of.device)
            };
            recent().filter(same).count()
        };
        let broken = |failure: &&'o DeviceFailure| count(failure) >= DEVICE_FAILURES_MAX;
        recent().rev().find(broken)
    }

    /// Others or free nodes make a gang without it.
    pub(super) fn can_spare(&self, node: &str) -> bool {
        let others = self.candidates().filter(|worker| worker.node != *node).count();
        let free = self.free_nodes().filter(|free| *free != node).count();
        self.size_for((others + free) as u32).is_some()
    }

    pub(super) fn avoid(&mut self, node: &str, time: Millis, why: &str) {
        let until = self.now + time;
        self.why(format!("avoid {node}: {why}"));
        self.act(Action::AvoidNode { node: node.to_string(), until });
        for worker in self.observed.workers.iter().filter(|worker| worker.node == *node) {
            if !worker.is_dead() && !worker.stopping {
                self.stop(worker, END_GRACE, &format!("{node} is avoided"));
            }
        }
    }

    fn start_attempt(&mut self, size: &Size, candidates: &[&Worker]) {
        let observed = self.observed;
        let attempt = observed.record.attempt + 1;
        let Start { chosen, resume, source } =
            choose(observed, &self.index, candidates, size.nodes as usize);
        let ranks = observed.template.ranks;
        let members: Vec<Member> = (0..)
            .zip(&chosen)
            .map(|(index, worker)| Member {
                rank: index * ranks,
                worker: worker.name.clone(),
                node: worker.node.clone(),
                address: worker.address.clone().unwrap_or_default(),
            })
            .collect();
        let mut config = WorkerConfig {
            attempt,
            rank: None,
            layout: size.layout.clone(),
            exchange: size.exchange,
            members: members.clone(),
            resume,
            ..observed.template.clone()
        };
        config.digest = config.digest_of(|config| format!("{config:?}").into_bytes());
        self.why(format!(
            "start attempt {attempt} on {} at step {} from {source}",
            several(size.nodes, "node"),
            config.resume.step()
        ));
        self.act(Action::RecordAttempt(Box::new(Gang {
            attempt,
            digest: config.digest.clone(),
            layout: size.layout.clone(),
            members: members.clone(),
            resumed_at: config.resume.step(),
            started_at: self.now,
            stepped: false,
            stop_requested: None,
            broken: None,
            ended: None,
            inherited: false,
        })));
        let config = Arc::new(config);
        for Member { rank, worker, .. } in members {
            self.act(Action::Configure { name: worker, rank, config: Arc::clone(&config) });
        }
    }

    /// Workers that can be given a rank: on a cordoned node none that had none, and none on a node
    /// that is given back.
    pub(super) fn candidates(&self) -> impl Iterator<Item = &'o Worker> + use<'_, 'o> {
        let index = &self.index;
        let had_rank =
            |worker: &Worker| index.is_member(&worker.name) && index.is_listed(&worker.node);
        (self.observed.workers.iter()).filter(move |worker| {
            worker.is_available()
                && (index.is_usable(&worker.node) || had_rank(worker))
                && self.is_cleared(worker)
        })
    }

    fn starting(&self) -> usize {
        let is_starting = |worker: &&Worker| matches!(worker.state, WorkerState::Starting { .. });
        self.observed.workers.iter().filter(|w| !w.stopping).filter(is_starting).count()
    }

    pub(super) fn least_size(&self) -> u32 {
        let wanted = &self.observed.wanted;
        let sizes = wanted.sizes.iter().map(|size| size.nodes);
        sizes.filter(|nodes| *nodes >= wanted.nodes_min).min().unwrap_or(wanted.nodes_min)
    }

    /// The job is to stop between two attempts: can another one save what is newer in memory than
    /// in storage? A bounded time after it was asked to stop it is too late.
    pub(super) fn can_save(&mut self) -> bool {
        let since = self.observed.record.stopping_since.unwrap_or(self.now);
        let deadline = since + STOP_TIMEOUT;
        let candidates: Vec<&Worker> = self.candidates().collect();
        let start = choose(self.observed, &self.index, &candidates, candidates.len());
        let step = start.resume.step();
        let stored = self.observed.stored.as_ref().map_or(0, |stored| stored.step);
        let possible = candidates.len() + self.starting() + self.free_by(deadline);
        if step <= stored || self.now >= deadline || self.size_for(possible as u32).is_none() {
            return false;
        }
        self.look_again_at(deadline);
        true
    }

    /// Nodes on which a worker can be started now.
    fn free_nodes(&self) -> impl Iterator<Item = &'o str> + use<'_, 'o> {
        let (index, now) = (&self.index, self.now);
        let is_free = move |name: &str| !index.is_busy(name);
        (self.observed.nodes.iter())
            .filter(move |node| node.usable && now >= node.avoid_until && is_free(&node.name))
            .map(|node| node.name.as_str())
    }

    /// Nodes on which a worker may be started in time.
    fn free_by(&self, deadline: Millis) -> usize {
        let busy = |name: &str| {
            let stays = |worker: &&Worker| !worker.is_dead() && !worker.stopping;
            self.observed.workers.iter().filter(stays).any(|worker| worker.node == name)
        };
        let nodes = self.observed.nodes.iter();
        nodes.filter(|of| of.usable && of.avoid_until < deadline && !busy(&of.name)).count()
    }

    /// Workers that are there to stay.
    fn living(&self) -> u32 {
        let stays = |worker: &&Worker| {
            !worker.is_dead() && !worker.stopping && self.index.is_usable(&worker.node)
        };
        self.observed.workers.iter().filter(stays).count() as u32
    }

    fn target(&self) -> u32 {
        let wanted = &self.observed.wanted;
        match self.observed.halting() {
            // Nobody trains on; the least that can save is enough.
            Some(_) => self.least_size(),
            None => wanted.nodes_max + wanted.spares,
        }
    }

    /// Enough workers for the largest gang and its spares, one a node.
    pub(super) fn fill(&mut self) {
        let halting = self.observed.halting().is_some();
        if halting && self.observed.gang().is_some() {
            return;
        }
        let missing = self.target().saturating_sub(self.living());
        if missing == 0 {
            return;
        }
        let nodes: Vec<&str> = self.free_nodes().take(missing as usize).collect();
        for (node, birth) in nodes.into_iter().zip(self.observed.record.births..) {
            let name = self.name_of(birth);
            self.why(format!("start {name} on {node}"));
            self.act(Action::StartWorker { name, node: node.to_string() });
        }
        let avoided: Vec<Millis> = (self.observed.nodes.iter())
            .filter(|node| node.usable)
            .map(|node| node.avoid_until)
            .collect();
        avoided.into_iter().for_each(|until| self.look_again_at(until));
    }

    /// Never used again. A pod's tells the attempt for or in which it was made.
    fn name_of(&self, birth: u32) -> String {
        let job = &self.observed.template.job_name;
        match self.observed.wanted.venue {
            Venue::Local => format!("{job}-{birth}"),
            Venue::Kubernetes => {
                let next = u32::from(self.observed.gang().is_none());
                format!("{job}-a{}-{birth}", self.observed.record.attempt + next)
            }
        }
    }

    /// Ends workers that nobody needs: on cordoned nodes, and more than gang and spares. Not before
    /// the gang has made a step: until then their snapshots may be the only ones.
    pub(super) fn trim(&mut self, gang: &'o Gang) {
        if !gang.stepped || self.observed.halting().is_some() {
            return;
        }
        let mut surplus = self.living().saturating_sub(self.target());
        for worker in self.observed.workers.iter().rev() {
            if worker.is_dead() || worker.stopping || self.index.is_member(&worker.name) {
                continue;
            }
            if !self.index.is_usable(&worker.node) {
                self.stop(worker, 0, &format!("{} takes no new ranks", worker.node));
            } else if surplus > 0 {
                surplus -= 1;
                self.stop(worker, 0, "more workers than gang and spares");
            }
        }
    }
}
