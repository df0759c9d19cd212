//! What nodes are like, as their workers have measured it.

use super::{Happening, Tracker};
use crate::decide::ANSWER_TIMEOUT;
use crate::observed::{Millis, Observed, Worker};
use crate::preflight::{Checked, Grade};
use moejob_protocol::preflight::Answer;

impl Tracker {
    /// It was asked to.
    pub(super) fn measures(&mut self, name: &str, now: Millis) {
        self.observed.preflight.asked += 1;
        let number = self.observed.preflight.asked;
        if let Some(worker) = self.worker(name) {
            worker.checked = Checked::Asked { number, at: now };
        }
    }

    pub(super) fn measured(&mut self, name: &str, answer: &Answer, now: Millis) -> Vec<Happening> {
        let Observed { wanted, workers, preflight, .. } = &mut self.observed;
        let asked = |worker: &&mut Worker| {
            let known = matches!(worker.checked, Checked::Asked { number, .. }
                if number == answer.number);
            worker.name == name && known
        };
        let Some(worker) = workers.iter_mut().find(asked) else { return Vec::new() };
        // It is not wanted any more.
        let Some(standard) = &wanted.preflight else {
            worker.checked = Checked::No;
            return Vec::new();
        };
        let (grade, text) = preflight.heard(standard, &worker.node, answer, now);
        worker.checked = if grade == Grade::Fail { Checked::Failed } else { Checked::Passed };
        worker.boot.clone_from(&answer.boot_id);
        worker.paired = preflight.is_paired(standard, &worker.node, &worker.boot, now);
        let node = worker.node.clone();
        let news = grade > Grade::Unknown;
        news.then_some(Happening::Measured { node, grade, text }).into_iter().collect()
    }

    pub(super) fn unmeasured(&mut self, name: &str, now: Millis) {
        let Observed { workers, preflight, .. } = &mut self.observed;
        let worker = workers.iter_mut().find(|worker| worker.name == name);
        let Some(worker) = worker else { return };
        worker.checked = Checked::Silent;
        preflight.silent(&worker.node, ANSWER_TIMEOUT / 1000, now);
    }
}
