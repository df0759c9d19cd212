//! Nodes of jobs behind one that waits, and how many of them that one calls back.

use super::{Allocator, Demand, RESERVED_MAX, Standing};
use std::collections::{BTreeMap, BTreeSet};

/// Nodes that a job calls back from those behind it.
struct Call {
    /// Nodes that are to be its own.
    nodes: Vec<usize>,
    /// Free ones that are kept for it until those have come.
    free: Vec<usize>,
    /// Ranks of the jobs that it leaves nothing.
    stopped: BTreeSet<usize>,
}

impl Demand {
    /// Whether a job before this one may have its last nodes, too: one of a higher priority, whose
    /// class does not say otherwise, or one that waited already when this one got them.
    fn yields_to(&self, other: &Demand) -> bool {
        let passed = match (self.since, other.since) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(since), Some(waits)) => since >= waits,
        };
        passed || (other.preempts && other.priority > self.priority)
    }
}

impl<'a> Allocator<'a> {
    /// Takes what jobs have before anything is given, and notes what of it is lent. Whoever has
    /// state in memory alone lends nothing.
    pub(super) fn hold(&mut self, rank: usize) {
        let job = self.jobs[rank];
        let own = self.own(job);
        own.iter().for_each(|node| self.free[*node] = false);
        let Some(least) = job.sizes.first() else { return };
        if matches!(job.standing, Standing::Holding { .. }) {
            return;
        }
        let stay = own.iter().filter(|at| job.needs.keeps(&self.nodes[**at]));
        let stay: Vec<usize> = stay.copied().collect();
        stay.iter().for_each(|node| self.borrower[*node] = Some(rank));
        self.lent.insert(rank, stay.len().saturating_sub(*least as usize));
    }

    /// A job that lacks nodes calls them back from those behind it, if it fits then, and keeps what
    /// is free: what they have beyond their least gangs where that is enough, or else whole gangs.
    /// Says what it calls back.
    pub(super) fn call_back(
        &mut self,
        rank: usize,
        stay: &[usize],
        candidates: &[usize],
    ) -> Option<String> {
        let call = self.call(rank, stay, candidates, false);
        let call = call.or_else(|| self.call(rank, stay, candidates, true))?;
        for at in &call.nodes {
            self.called_back[*at] = true;
            let left = self.borrower[*at].and_then(|other| self.lent.get_mut(&other));
            left.into_iter().for_each(|left| *left = left.saturating_sub(1));
        }
        for at in 0..self.nodes.len() {
            if self.borrower[at].is_some_and(|other| call.stopped.contains(&other)) {
                self.called_back[at] = true;
            }
        }
        for other in &call.stopped {
            self.lent.insert(*other, 0);
        }
        call.free.iter().for_each(|at| self.free[*at] = false);
        let names: Vec<&str> = call.nodes.iter().map(|at| &*self.nodes[*at].name).collect();
        Some(format!("; called back from jobs behind it: {}", names.join(", ")))
    }

    /// `whole`: whole gangs, too.
    fn call(
        &mut self,
        rank: usize,
        stay: &[usize],
        candidates: &[usize],
        whole: bool,
    ) -> Option<Call> {
        let job = self.jobs[rank];
        let verdicts = self.verdicts(&job.needs);
        let yields = |other: usize| {
            let other = self.jobs[other];
            (whole || other.standing == Standing::Waiting) && other.yields_to(job)
        };
        let lent = |other: usize| self.lent.get(&other).copied().unwrap_or(0);
        let of_others = (0..self.nodes.len()).filter(|at| {
            let of = self.borrower[*at].filter(|other| *other > rank && !self.called_back[*at]);
            let avoided = self.memory.avoided_until(&job.uid, &self.nodes[*at].name);
            of.is_some_and(|other| yields(other) || lent(other) > 0)
                && self.verdicts[verdicts].1[*at].is_none()
                && self.now >= avoided
        });
        let all: Vec<usize> = candidates.iter().copied().chain(of_others).collect();
        let (least, most) = (*job.sizes.first()?, *job.sizes.last()?);
        let ordered = self.ordered(job, stay, &all, least, most);
        let (free, borrowed): (Vec<usize>, Vec<usize>) =
            ordered.iter().copied().partition(|at| self.free[*at]);
        let lacks = (least as usize).saturating_sub(stay.len() + free.len());
        let mut others = BTreeMap::<usize, usize>::new();
        for other in borrowed.iter().filter_map(|at| self.borrower[*at]) {
            *others.entry(other).or_default() += 1;
        }
        // Jobs that have no gang yet lose nothing; then some shrink, then some stop. The last one
        // comes first.
        let (mut starting, mut shrinking, mut stopping) = (Vec::new(), Vec::new(), Vec::new());
        for (other, own) in others.into_iter().rev() {
            let (yields, lent) = (yields(other), own.min(lent(other)));
            match self.jobs[other].standing {
                Standing::Waiting if yields => starting.push((other, own, true)),
                _ => {
                    shrinking.push((other, lent, false));
                    stopping.extend(yields.then_some((other, own - lent, true)));
                }
            }
        }
        let (mut chosen, mut sum) = (Vec::new(), 0);
        for step in [starting, shrinking, stopping].into_iter().flatten() {
            if sum < lacks && step.1 > 0 {
                sum += step.1;
                chosen.push(step);
            }
        }
        if sum < lacks || lacks == 0 {
            return None;
        }
        // Whoever came before is spared where those that came later have enough.
        for at in (0..chosen.len()).rev() {
            if sum - chosen[at].1 >= lacks {
                sum -= chosen.remove(at).1;
            }
        }
        let stopped = chosen.iter().filter(|(.., stops)| *stops).map(|(other, ..)| *other);
        let stopped: BTreeSet<usize> = stopped.collect();
        // Who stops gives all, so that others shrink less.
        chosen.retain(|(other, _, stops)| *stops || !stopped.contains(other));
        chosen.sort_by_key(|(.., stops)| !stops);
        let nodes = chosen.iter().flat_map(|(other, count, stops)| {
            let own = borrowed.iter().filter(|at| self.borrower[**at] == Some(*other));
            own.take(if *stops { lacks } else { *count })
        });
        Some(Call { nodes: nodes.copied().take(lacks).collect(), free, stopped })
    }

    /// A job may lack nothing but nodes on which its own workers have just failed. Then nobody
    /// takes those while they rest, nor what is free beside them. Another job would keep them.
    pub(super) fn reserve(
        &mut self,
        job: &'a Demand,
        lacks: u32,
        beside: &[usize],
    ) -> Option<String> {
        let verdicts = self.verdicts(&job.needs);
        let rests = |at: &usize| {
            let until = self.memory.avoided_until(&job.uid, &self.nodes[*at].name);
            let soon = self.now < until && until <= self.now + RESERVED_MAX;
            soon && self.free[*at] && self.verdicts[verdicts].1[*at].is_none()
        };
        let resting: Vec<usize> =
            (0..self.nodes.len()).filter(rests).take(lacks as usize).collect();
        if resting.len() < lacks as usize {
            return None;
        }
        resting.iter().chain(beside).for_each(|at| self.free[*at] = false);
        let names: Vec<&str> = resting.iter().map(|at| self.nodes[*at].name.as_str()).collect();
        Some(format!("; kept for it while its workers rest there: {}", names.join(", ")))
    }
}
