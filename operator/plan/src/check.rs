//! What must hold of any plan, said a second time and independently of how it was made.
//!
//! `decide` and this module are a pair: every test runs each plan through both, and a leader may do
//! so too before it applies one. Two properties need more than one plan and are left to the tests:
//! equal inputs give equal plans, and a converged job has no actions.

use crate::decide::{Action, Plan};
use crate::observed::{Gang, Observed, Outcome, Worker, WorkerState};
use crate::preflight::Checked;
use moejob_protocol::config::{Resume, WorkerConfig};
use std::collections::{BTreeMap, BTreeSet};

/// Every rule that the plan breaks, one sentence each; none for a good plan.
pub fn check(observed: &Observed, plan: &Plan) -> Vec<String> {
    let mut checker = Checker { observed, plan, problems: Vec::new() };
    checker.actions_have_reasons();
    checker.nothing_follows_the_end();
    checker.one_gang_at_a_time();
    checker.ends_are_due();
    checker.stops_are_new();
    checker.leaves_are_new();
    checker.patience_fits();
    checker.requests_fit();
    checker.starts_fit();
    checker.measured_are_idle();
    checker.pairs_are_idle();
    checker.attempts_are_whole();
    checker.problems
}

struct Checker<'a> {
    observed: &'a Observed,
    plan: &'a Plan,
    problems: Vec<String>,
}

impl<'a> Checker<'a> {
    fn demand(&mut self, holds: bool, otherwise: impl Fn() -> String) {
        if !holds {
            self.problems.push(otherwise());
        }
    }

    fn actions_have_reasons(&mut self) {
        let (actions, why) = (self.plan.actions.len(), self.plan.why.len());
        self.demand(actions == 0 || why > 0, || format!("{actions} actions without a reason"));
    }

    fn nothing_follows_the_end(&mut self) {
        let observed = self.observed;
        let open = match observed.record.outcome {
            None => true,
            Some(Outcome::Suspended) => observed.halting().is_none(),
            Some(_) => false,
        };
        let is_stop = |action: &Action| matches!(action, Action::StopWorker { .. });
        let is_finish = |action: &Action| matches!(action, Action::Finish(_));
        let end = self.plan.actions.iter().position(is_finish);
        let after = match (open, end) {
            (false, _) => &self.plan.actions[..],
            (true, Some(end)) => &self.plan.actions[end + 1..],
            (true, None) => &[],
        };
        self.demand(after.iter().all(is_stop), || "more than stops after the end".to_string());
    }

    fn one_gang_at_a_time(&mut self) {
        let (observed, newest) = (self.observed, self.observed.record.attempt);
        let mut recorded: Vec<u32> = Vec::new();
        for action in &self.plan.actions {
            if let Action::RecordAttempt(gang) = action {
                let attempt = gang.attempt;
                self.demand(attempt > newest, || {
                    format!("attempt {attempt} is recorded after attempt {newest}")
                });
                self.demand(observed.gang().is_none() && recorded.is_empty(), || {
                    format!("attempt {attempt} is recorded beside another")
                });
                recorded.push(attempt);
            }
            if let Action::Configure { name, config, .. } = action {
                let attempt = config.attempt;
                self.demand(recorded.contains(&attempt), || {
                    format!("{name} is configured for attempt {attempt} before it is recorded")
                });
            }
        }
    }

    /// No member that could still take part is left behind in an attempt that ends.
    fn ends_are_due(&mut self) {
        for action in &self.plan.actions {
            let Action::EndAttempt { attempt, .. } = action else {
                continue;
            };
            let gang = self.observed.gang().filter(|gang| gang.attempt == *attempt);
            self.demand(gang.is_some(), || format!("attempt {attempt} ends but is not under way"));
            for member in gang.iter().flat_map(|gang| &gang.members) {
                let worker = self.observed.worker(&member.worker);
                let takes_part = worker.is_some_and(|worker| {
                    !worker.stopping
                        && !self.stops(&worker.name)
                        && member_of(worker) == Some(*attempt)
                });
                self.demand(!takes_part, || {
                    format!("attempt {attempt} ends while {} takes part", member.worker)
                });
            }
        }
    }

    fn stops(&self, name: &str) -> bool {
        self.plan.actions.iter().any(|action| match action {
            Action::StopWorker { name: of, .. } => of == name,
            _ => false,
        })
    }

    fn stops_are_new(&mut self) {
        let mut seen = BTreeSet::new();
        for action in &self.plan.actions {
            if let Action::StopWorker { name, .. } = action {
                let worker = self.observed.worker(name);
                let runs = worker.is_some_and(|worker| !worker.stopping && !worker.is_dead());
                self.demand(runs && seen.insert(name), || {
                    format!("{name} is stopped though it is not there or is stopping already")
                });
            }
        }
    }

    fn leaves_are_new(&mut self) {
        for action in &self.plan.actions {
            if let Action::LeaveAttempt { name, attempt, .. } = action {
                let worker = self.observed.worker(name);
                let gang = self.observed.gang().filter(|gang| gang.attempt == *attempt);
                let first = gang.is_some_and(|gang| gang.broken.is_none());
                let needed = worker.is_some_and(|worker| match worker.state {
                    WorkerState::Member { attempt: of, leaving, .. } if of == *attempt => {
                        leaving.is_none() && (first || !worker.stopping)
                    }
                    WorkerState::Silent | WorkerState::Starting { .. } => first,
                    _ => false,
                });
                let ends = self.stops(name);
                self.demand(needed && !ends, || {
                    format!("{name} is asked to leave attempt {attempt} without need")
                });
            }
        }
    }

    fn patience_fits(&mut self) {
        for action in &self.plan.actions {
            if let Action::BePatient { name, attempt } = action {
                let gang = self.observed.gang().filter(|gang| gang.attempt == *attempt);
                let member = gang.filter(|gang| gang.has(name)).is_some();
                let worker = self.observed.worker(name);
                let untold = worker.is_some_and(|worker| worker.patient_in != Some(*attempt));
                self.demand(member && untold, || {
                    format!("{name} is told to be patient in attempt {attempt} without need")
                });
            }
        }
    }

    fn requests_fit(&mut self) {
        let halting = self.observed.halting();
        let mut count = 0;
        for action in &self.plan.actions {
            if let Action::Request { attempt, cause, request } = action {
                count += 1;
                let gang = self.observed.gang().filter(|gang| gang.attempt == *attempt);
                let well = gang.is_some_and(|gang| gang.broken.is_none());
                self.demand(well && count == 1, || {
                    format!("attempt {attempt} cannot be asked for anything")
                });
                self.demand(cause.halts() == halting.is_some(), || {
                    format!("attempt {attempt} is asked to stop because of {cause:?}")
                });
                self.demand(request.checkpoint_now || !cause.halts(), || {
                    format!("attempt {attempt} would stop for good without a checkpoint")
                });
            }
        }
    }

    fn starts_fit(&mut self) {
        let observed = self.observed;
        let stays = |worker: &&Worker| {
            !worker.is_dead() && !worker.stopping && observed.is_usable(&worker.node)
        };
        let living = observed.workers.iter().filter(stays).count();
        let mut taken: BTreeSet<&str> = (observed.workers.iter())
            .filter(|worker| !worker.is_dead())
            .map(|worker| worker.node.as_str())
            .collect();
        let mut names: BTreeSet<&str> =
            observed.workers.iter().map(|worker| worker.name.as_str()).collect();
        let mut starts = 0;
        for action in &self.plan.actions {
            if let Action::StartWorker { name, node } = action {
                starts += 1;
                self.demand(names.insert(name), || format!("the name {name} is used again"));
                self.demand(taken.insert(node), || format!("a second worker on {node}"));
                self.demand(observed.is_usable(node), || format!("{node} takes no workers"));
            }
        }
        let most = (observed.wanted.nodes_max + observed.wanted.spares) as usize;
        self.demand(starts == 0 || living + starts <= most, || {
            format!("{} workers where gang and spares are {most}", living + starts)
        });
    }

    /// Nothing is measured beside training, nor twice at once.
    fn measured_are_idle(&mut self) {
        let mut seen = BTreeSet::new();
        for action in &self.plan.actions {
            if let Action::Preflight { name } = action {
                let idle = self.observed.worker(name).is_some_and(|worker| {
                    worker.state == WorkerState::Idle
                        && worker.checked == Checked::No
                        && !worker.stopping
                });
                let wanted = self.observed.wanted.preflight.is_some();
                let ends = self.stops(name);
                self.demand(idle && wanted && !ends && seen.insert(name), || {
                    format!("the node of {name} is measured without need")
                });
            }
        }
    }

    /// Whoever measures with another one is good by itself, and in one pair.
    fn pairs_are_idle(&mut self) {
        let mut seen: BTreeSet<&str> =
            self.observed.preflight.pairs.open().iter().flat_map(|open| open.workers()).collect();
        let rounds = self.plan.actions.iter().filter_map(|action| match action {
            Action::MeasurePairs(round) => Some(&round.pairs),
            _ => None,
        });
        for (name, _) in rounds.flatten().flat_map(|pair| &pair.sides) {
            let idle = self.observed.worker(name).is_some_and(|worker| {
                worker.state == WorkerState::Idle
                    && worker.checked == Checked::Passed
                    && !worker.stopping
            });
            let (new, ends) = (seen.insert(name), self.stops(name));
            self.demand(idle && new && !ends, || {
                format!("{name} cannot measure with another one")
            });
        }
    }

    fn attempts_are_whole(&mut self) {
        for action in &self.plan.actions {
            if let Action::RecordAttempt(gang) = action {
                self.ranks_are_whole(gang);
                self.members_are_configured(gang);
            }
        }
    }

    fn ranks_are_whole(&mut self, gang: &Gang) {
        let (attempt, observed) = (gang.attempt, self.observed);
        let (mesh, wanted) = (gang.layout.mesh, &observed.wanted);
        let (members, nodes) = (&gang.members, gang.members.len() as u32);
        let of = |what: &str| format!("attempt {attempt}: {what}");
        self.demand(mesh.is_valid() && gang.layout.covers(&observed.template.model), || {
            of("an expert group lacks an expert")
        });
        let ranks = observed.template.ranks;
        let firsts = (0..mesh.world()).step_by(ranks.max(1) as usize);
        let whole = mesh.world().is_multiple_of(ranks.max(1));
        self.demand(whole && members.iter().map(|member| member.rank).eq(firsts), || {
            of("the ranks are not 0..world")
        });
        let workers: BTreeSet<&str> = members.iter().map(|of| of.worker.as_str()).collect();
        let places: BTreeSet<&str> = members.iter().map(|of| of.node.as_str()).collect();
        self.demand(workers.len() == members.len() && places.len() == members.len(), || {
            of("two members on one worker or node")
        });
        let known =
            wanted.sizes.iter().any(|size| (size.nodes, &size.layout) == (nodes, &gang.layout));
        let allowed = (wanted.nodes_min..=wanted.nodes_max).contains(&nodes);
        self.demand(known && allowed, || of("a gang of a size that is not allowed"));
        for member in members {
            let worker = observed.worker(&member.worker);
            let reached = worker.is_some_and(|worker| {
                worker.is_available()
                    && worker.node == member.node
                    && worker.address.as_ref() == Some(&member.address)
            });
            self.demand(reached && !self.stops(&member.worker), || {
                of(&format!("{} cannot be given a rank", member.worker))
            });
            let halting = observed.halting().is_some() || wanted.preflight.is_none();
            let bad = worker.is_some_and(|worker| {
                matches!(worker.checked, Checked::Asked { .. } | Checked::Failed | Checked::Silent)
                    && worker.state == WorkerState::Idle
            });
            self.demand(halting || !bad, || {
                of(&format!("the node of {} has not passed", member.worker))
            });
        }
    }

    fn members_are_configured(&mut self, gang: &Gang) {
        let configs: Vec<(&String, u32, &WorkerConfig)> = (self.plan.actions.iter())
            .filter_map(|action| match action {
                Action::Configure { name, rank, config } if config.attempt == gang.attempt => {
                    Some((name, *rank, &**config))
                }
                _ => None,
            })
            .collect();
        let of = |what: &str| format!("attempt {}: {what}", gang.attempt);
        let named: Vec<(&String, u32)> =
            configs.iter().map(|(name, rank, _)| (*name, *rank)).collect();
        let expected: Vec<(&String, u32)> =
            gang.members.iter().map(|member| (&member.worker, member.rank)).collect();
        self.demand(named == expected, || of("other workers are configured than its members"));
        for (name, _, config) in &configs {
            let same = config.digest == gang.digest
                && config.rank.is_none()
                && config.layout == gang.layout
                && config.members == gang.members
                && config.resume.step() == gang.resumed_at
                && config.resume == configs[0].2.resume;
            self.demand(same, || of(&format!("{name} is told something else than is recorded")));
        }
        if let Some((.., config)) = configs.first() {
            self.state_is_there(gang, &config.resume);
        }
    }

    fn state_is_there(&mut self, gang: &Gang, resume: &Resume) {
        let observed = self.observed;
        let of = |what: &str| format!("attempt {}: {what}", gang.attempt);
        let stored = observed.stored.as_ref();
        self.demand(resume.step() >= stored.map_or(0, |stored| stored.step), || {
            of("the storage has a newer state")
        });
        match resume {
            Resume::Fresh => {}
            Resume::Checkpoint { step, name } => {
                let is_stored = stored.is_some_and(|s| s.step == *step && s.name == *name);
                self.demand(is_stored, || of("no such checkpoint"));
            }
            Resume::Memory { step, attempt, layout, sources } => {
                self.demand(observed.layout_of(*attempt) == Some(layout), || {
                    of("snapshots are read under another layout than they were cut")
                });
                let shards = sources.iter().map(|source| source.shard);
                self.demand(shards.eq(0..layout.mesh.world()), || of("not each shard once"));
                let members = gang.members.iter().map(|member| &member.worker);
                let held = members.filter_map(|name| Some((name, observed.worker(name)?)));
                let held: BTreeMap<&String, BTreeSet<u32>> = held
                    .map(|(name, worker)| {
                        let of = worker.held.iter();
                        let of = of.filter(|of| (of.attempt, of.step) == (*attempt, *step));
                        (name, of.flat_map(|of| of.shards.iter().copied()).collect())
                    })
                    .collect();
                for source in sources {
                    let sender = gang.member_of(source.from);
                    let shards = sender.and_then(|member| held.get(&member.worker));
                    let holds = shards.is_some_and(|of| of.contains(&source.shard));
                    self.demand(holds, || of(&format!("rank {} lacks its shard", source.from)));
                }
            }
        }
    }
}

fn member_of(worker: &Worker) -> Option<u32> {
    match worker.state {
        WorkerState::Member { attempt, .. } => Some(attempt),
        _ => None,
    }
}
