//! Pods that show autoscalers what a job lacks: one for each node that is missing. No worker is in
//! them. A job's workers are made once their nodes are there, so without these no pod would wait.

use super::{Batch, ByName, Effect, JobLoop, Origin, Template, WorkerPod, Write, doubled};
use crate::observed::Millis;
use crate::pods::{Birth, placeholder_name, placeholder_number};
use moejob_manifest::words::{one_or_more, several};
use std::sync::Arc;

/// A job lacks nodes for so long before it shows that: between two attempts it often does.
const PATIENCE: Millis = 30_000;
/// A node took a placeholder. Where the job lacks one all the same, that node is of no use to it,
/// and another placeholder would go there, too.
const TAKEN_PAUSE: Millis = 120_000;
/// One that was written and is not seen for so long is not there.
const UNSEEN_MAX: Millis = 30_000;
/// A deletion that did not succeed is asked for again.
const DELETE_AGAIN: Millis = 30_000;
/// After one that was refused, doubled with each up to the second.
const REFUSED_FIRST: Millis = 30_000;
const REFUSED_MAX: Millis = 600_000;

#[derive(Debug, Default)]
pub(super) struct Placeholders {
    known: ByName<Placeholder>,
    /// Numbers that were given.
    numbers: u32,
    /// Since when the job lacks nodes.
    since: Option<Millis>,
    not_before: Millis,
    refusals: u32,
}

#[derive(Debug, Default)]
struct Placeholder {
    made_at: Millis,
    /// None before it is seen.
    facts: Option<WorkerPod>,
    /// When its deletion was asked for.
    deleted_at: Option<Millis>,
}

impl Placeholder {
    /// It waits for a node, or is about to.
    fn stands(&self) -> bool {
        let is_over = |of: &WorkerPod| {
            of.deletion.is_some() || of.node.is_some() || of.ended.is_some()
        };
        self.deleted_at.is_none() && !self.facts.as_ref().is_some_and(is_over)
    }

    /// When it is looked at again.
    fn due(&self) -> Option<Millis> {
        match &self.facts {
            None => Some(self.made_at + UNSEEN_MAX),
            Some(_) => self.deleted_at.map(|at| at + DELETE_AGAIN),
        }
    }
}

impl Placeholders {
    pub fn see(&mut self, pod: WorkerPod, now: Millis) {
        let number = placeholder_number(&pod.name).unwrap_or_default();
        self.numbers = self.numbers.max(number.saturating_add(1));
        let new = || Placeholder { made_at: now, ..Placeholder::default() };
        let known = self.known.entry(pod.name.clone()).or_insert_with(new);
        if pod.node.is_some() && known.facts.as_ref().is_some_and(|of| of.node.is_none()) {
            self.not_before = self.not_before.max(now + TAKEN_PAUSE);
        }
        self.refusals = 0;
        known.facts = Some(pod);
    }

    /// Whether it was one of them.
    pub fn lose(&mut self, name: &str) -> bool {
        self.known.remove(name).is_some()
    }

    /// The API server did not take it.
    pub fn refused(&mut self, name: &str, now: Millis) {
        self.known.remove(name);
        let pause = doubled(REFUSED_FIRST, self.refusals, REFUSED_MAX);
        self.refusals += 1;
        self.not_before = self.not_before.max(now + pause);
    }

    /// Those that wait for a node.
    pub fn count(&self) -> usize {
        self.known.values().filter(|of| of.stands()).count()
    }

    /// One of them is there, or is on its way out.
    pub fn any(&self) -> bool {
        !self.known.is_empty()
    }

    /// When to look again.
    pub fn due(&self, missing: u32, now: Millis) -> Option<Millis> {
        let lacks = self.count() < missing as usize;
        let next = self.since.filter(|_| lacks).map(|at| (at + PATIENCE).max(self.not_before));
        let dues = self.known.values().filter_map(Placeholder::due);
        dues.chain(next).filter(|at| *at > now).min()
    }

    /// Numbers of those to be made, and pods to be deleted.
    fn tend(&mut self, missing: u32, now: Millis) -> (std::ops::Range<u32>, Vec<WorkerPod>) {
        self.since = (missing > 0).then(|| self.since.unwrap_or(now));
        self.known.retain(|_, of| of.facts.is_some() || now < of.made_at + UNSEEN_MAX);
        let mut surplus = self.count().saturating_sub(missing as usize);
        let mut gone = Vec::new();
        for one in self.known.values_mut() {
            let Some(facts) = &one.facts else { continue };
            let of_no_use = match one.stands() {
                true => surplus > 0,
                false => {
                    let again = one.deleted_at.is_none_or(|at| now >= at + DELETE_AGAIN);
                    facts.deletion.is_none() && again
                }
            };
            if of_no_use {
                surplus -= usize::from(one.stands());
                gone.push(facts.clone());
                one.deleted_at = Some(now);
            }
        }
        let waits = self.since.is_none_or(|at| now < at + PATIENCE) || now < self.not_before;
        let lacks = (missing as usize).saturating_sub(self.count()) as u32;
        let first = self.numbers;
        self.numbers = first.saturating_add(if waits { 0 } else { lacks });
        (first..self.numbers, gone)
    }
}

impl JobLoop {
    /// Nodes that the job lacks, and that placeholders are to show.
    pub(super) fn missing(&self) -> u32 {
        let shows = self.place.has_api()
            && self.job().is_some()
            && !self.spec.deleted
            && self.refusals.standing_back().is_none();
        if shows { self.granted.missing } else { 0 }
    }

    /// Makes placeholders for nodes that are missing, and deletes those that have done their work.
    /// No decision waits for either.
    pub(super) fn stand_in_for_nodes(&mut self, now: Millis) {
        let (numbers, gone) = self.placeholders.tend(self.missing(), now);
        gone.iter().for_each(|pod| self.send_deletion(pod, 1));
        let Some(job) = self.spec.plannable().filter(|_| !numbers.is_empty()).cloned() else {
            return;
        };
        let (around, count) = (self.surroundings(&job), numbers.len());
        let name = job.name.clone();
        let template = Arc::new(Template { job, around });
        let mut writes = Vec::new();
        for number in numbers {
            let name = placeholder_name(&name, number);
            let one = Placeholder { made_at: now, ..Placeholder::default() };
            self.placeholders.known.insert(name.clone(), one);
            let there = self.granted.there.clone();
            let birth = Birth { name: name.clone(), there, ..Birth::default() };
            let write = Write::CreatePod { template: Arc::clone(&template), birth };
            writes.push((Origin::Placeholder(name), write));
        }
        self.effects.push(Effect::Write(Batch { aside: true, writes }));
        let note = format!(
            "{} {} missing: placeholder pods show autoscalers what the job asks of them",
            several(count, "node"),
            one_or_more(count, "is", "are")
        );
        self.event(false, "NodesMissing", note, now);
    }
}
