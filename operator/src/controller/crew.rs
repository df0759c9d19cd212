//! One job's loop and what executes its effects: the streams to its workers, and the writer.

use super::Context;
use crate::control::{Leader, Told, Verifier};
use crate::observe::{JobSeen, Owner};
use moejob_plan::allocate::{Claim, Memory};
use moejob_plan::lead::{
    Batch, Effect, Event, Fence, JobLoop, JobName, Memo, Operator, Place, Turn, Write,
};
use moejob_plan::observed::Millis;
use std::sync::Arc;
use std::time::Instant;

pub struct Crew {
    pub job: JobLoop,
    /// No other crew of this process has it, of the same job neither.
    pub number: u64,
    /// When its loop wants to be asked again.
    pub due: Option<Millis>,
    /// It was told which nodes it has. Before that it knows of none and would give back its own.
    pub is_granted: bool,
    leader: Leader,
    context: Arc<Context>,
    /// What it asked of the allocation when it was last asked.
    claimed: Option<Claim>,
    /// Nodes that passed are known to it up to this revision.
    passes: u64,
}

impl Crew {
    pub fn new(
        seen: &JobSeen,
        context: Arc<Context>,
        operator: Arc<Operator>,
        (number, lease_term): (u64, u64),
        now: Millis,
    ) -> Crew {
        let job = JobLoop::new(seen, Place::Cluster(operator), lease_term, now);
        context.metrics.fenced(&seen.uid, job.fence().is_some_and(Fence::is_of_record));
        let (authority, told) = (Arc::clone(&context.authority), context.told.clone());
        let leader = Leader::new(authority, (seen.owner(), &seen.uid), job.term(), told);
        let (due, is_granted, claimed) = (None, false, None);
        Crew { job, number, due, is_granted, leader, context, claimed, passes: 0 }
    }

    pub fn on_told(&mut self, told: Told, now: Millis) {
        if let Some((name, said)) = self.leader.accept(told) {
            self.job.on(Event::Stream { name, said }, now);
        }
    }

    pub fn is_to_turn(&self, now: Millis) -> bool {
        self.job.is_dirty() || self.due.is_some_and(|at| at <= now)
    }

    /// Asks its loop, and does what it says in its order. Whether the allocation is to look again.
    pub fn turn(
        &mut self,
        memory: &mut Memory,
        sent: &mut Vec<(Owner, u64, Batch)>,
        owner: &Owner,
        now: Millis,
    ) -> bool {
        let revision = memory.passes.revision();
        if self.passes != revision {
            self.passes = revision;
            let passes = memory.passes.of(&self.job.id().namespace);
            self.job.on(Event::Passes(passes), now);
        }
        let began = Instant::now();
        let Turn { effects, due, turned } = self.job.turn(now);
        self.context.metrics.reconciled(began.elapsed());
        self.due = due;
        let mut matters = turned;
        for effect in effects {
            match effect {
                Effect::Link(link) => {
                    let reviewer = &self.context.reviewer;
                    let verifier = |pod| Verifier::TokenReview { reviewer: reviewer.clone(), pod };
                    self.leader.execute(link, verifier);
                }
                Effect::Write(batch) => {
                    sent.push((Arc::clone(owner), self.number, self.sealed(batch)));
                },
                Effect::Memory(Memo::Decided(node)) => memory.decided(owner, &node, now),
                Effect::Memory(Memo::Avoid { node, until }) => {
                    memory.avoid(owner, &node, until);
                    matters = true;
                }
                Effect::Memory(Memo::Passed(news)) => {
                    news.into_iter().for_each(|(key, at)| memory.passes.note(key, at));
                }
                Effect::Note { warning, text } => {
                    let job = log_name(self.job.id());
                    match warning {
                        true => tracing::warn!(job, "{text}"),
                        false => tracing::info!(job, "{text}"),
                    }
                }
                Effect::Lost { name, node, cause } => {
                    let job = log_name(self.job.id());
                    tracing::warn!(job, "lost {name} on {node}: {cause}");
                }
                Effect::Recovered(recovery) => self.context.metrics.recovered(&recovery),
                Effect::Figures(figures) => {
                    self.context.metrics.job(&self.job.id().uid, *figures);
                }
            }
        }
        let claim = self.job.claim();
        matters |= self.claimed.as_ref() != Some(&claim);
        self.claimed = Some(claim);
        matters
    }

    /// The seals of pods are made here, where their key is.
    fn sealed(&self, mut batch: Batch) -> Batch {
        let id = self.job.id();
        for (_, write) in &mut batch.writes {
            if let Write::CreatePod { birth, .. } = write {
                birth.seal = self.context.keyring.seal(&id.namespace, &id.uid, &birth.name);
            }
        }
        batch
    }
}

/// Jobs of two namespaces may have one name.
fn log_name(of: &JobName) -> String {
    format!("{}/{}", of.namespace, of.name)
}
