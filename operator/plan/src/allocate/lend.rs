//! Nodes that a running job has beyond its least gang, and jobs before it that wait.

use super::{Allocator, Demand, Standing};
use crate::observed::Millis;
use std::cmp::Reverse;

/// After so long no job behind it starts on what a job could use that waits.
pub const PASSED_MAX: Millis = 3_600_000;

impl<'a> Allocator<'a> {
    /// Takes what jobs have before anything is given, and notes what of it is lent.
    pub(super) fn hold(&mut self, rank: usize, job: &Demand) {
        let own = self.own(job);
        own.iter().for_each(|node| self.free[*node] = false);
        let (Standing::Running, Some(least)) = (job.standing, job.sizes.first()) else { return };
        let stay = own.iter().filter(|at| job.needs.keeps(&self.nodes[**at]));
        let stay: Vec<usize> = stay.copied().collect();
        stay.iter().for_each(|node| self.borrower[*node] = Some(rank));
        self.lent.insert(rank, stay.len().saturating_sub(*least as usize));
    }

    /// A job that lacks nodes calls them back from those behind it that have more than they need,
    /// if it fits then, and keeps what is free. One that does not, and has waited for long, lets
    /// others borrow what it could use, and none start there. Whether it gets what it lacks.
    pub(super) fn call_back(
        &mut self,
        (rank, job): (usize, &'a Demand),
        stay: &[usize],
        candidates: &[usize],
        lacks: usize,
    ) -> (bool, String) {
        let verdicts = self.verdicts(&job.needs);
        let of_others = (0..self.nodes.len()).filter(|at| {
            let behind = self.borrower[*at].is_some_and(|other| other > rank);
            let avoided = self.memory.avoided_until(&job.uid, &self.nodes[*at].name);
            behind
                && !self.called_back[*at]
                && self.verdicts[verdicts].1[*at].is_none()
                && self.now >= avoided
        });
        let all: Vec<usize> = candidates.iter().copied().chain(of_others).collect();
        let (least, most) = (job.sizes.first(), job.sizes.last());
        let (least, most) = (least.map_or(0, |of| *of), most.map_or(0, |of| *of));
        let ordered = self.ordered(job, stay, &all, least, most);
        // Of the last job that has borrowed some.
        let mut borrowed: Vec<usize> =
            ordered.iter().copied().filter(|at| !self.free[*at]).collect();
        borrowed.sort_by_key(|at| Reverse(self.borrower[*at]));
        let mut lent = self.lent.clone();
        let mut called = Vec::new();
        for at in borrowed {
            let left = self.borrower[at].and_then(|other| lent.get_mut(&other));
            if let Some(left) = left.filter(|left| **left > 0 && called.len() < lacks) {
                *left -= 1;
                called.push(at);
            }
        }
        let free = ordered.iter().filter(|at| self.free[**at]);
        let free: Vec<usize> = free.copied().collect();
        if called.len() == lacks && stay.len() + free.len() + lacks >= least as usize {
            self.lent = lent;
            called.iter().for_each(|at| self.called_back[*at] = true);
            free.iter().for_each(|at| self.free[*at] = false);
            let names: Vec<&str> = called.iter().map(|at| &*self.nodes[*at].name).collect();
            return (true, format!("; called back from jobs behind it: {}", names.join(", ")));
        }
        let waited = job.created + PASSED_MAX;
        if self.now < waited {
            self.look_again_at(waited);
            return (false, String::new());
        }
        all.iter().for_each(|at| self.kept[*at] = true);
        (false, format!("; after {} min no job behind it starts there", PASSED_MAX / 60_000))
    }
}
