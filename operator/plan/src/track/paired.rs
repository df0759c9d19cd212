//! What nodes are like beside each other, as their workers have measured it.

use super::{Happening, Tracker};
use crate::decide::ANSWER_TIMEOUT;
use crate::observed::{Millis, Observed, Worker, WorkerState};
use crate::preflight::{Checked, Grade, Known, Round};
use moejob_protocol::pair::PairAnswer;

impl Tracker {
    pub(super) fn measures_pairs(&mut self, round: &Round, now: Millis) {
        let Observed { wanted, preflight, .. } = &mut self.observed;
        let Some(standard) = &wanted.preflight else { return };
        preflight.asked += round.pairs.len() as u64;
        let known = preflight.pairs.begin(round.clone(), standard.pair_limit(), now);
        let news = self.know(known, now);
        self.news.extend(news);
    }

    pub(super) fn pair_relayed(&mut self, number: u64) {
        self.observed.preflight.pairs.relayed(number);
    }

    pub(super) fn paired(
        &mut self,
        name: &str,
        answer: &PairAnswer,
        now: Millis,
    ) -> Vec<Happening> {
        let Observed { wanted, preflight, .. } = &mut self.observed;
        let Some(standard) = &wanted.preflight else { return Vec::new() };
        let known = preflight.pairs.heard(name, answer, standard.pair_limit());
        self.know(known, now)
    }

    pub(super) fn pair_ended(&mut self, number: u64, late: bool, now: Millis) {
        let Observed { wanted, preflight, workers, .. } = &mut self.observed;
        let Some(standard) = &wanted.preflight else { return preflight.pairs.forget() };
        let is_there = |name: &str| {
            let there = |worker: &Worker| !worker.stopping && worker.state == WorkerState::Idle;
            workers.iter().any(|worker| worker.name == name && there(worker))
        };
        let limit = standard.pair_limit();
        let late = late.then_some(ANSWER_TIMEOUT / 1000);
        let known = preflight.pairs.end(number, late, limit, is_there);
        let news = self.know(known, now);
        self.news.extend(news);
    }

    /// What is to be told of what actions have shown.
    pub fn take_news(&mut self) -> Vec<Happening> {
        std::mem::take(&mut self.news)
    }

    fn know(&mut self, all: Vec<Known>, now: Millis) -> Vec<Happening> {
        let Observed { wanted, workers, preflight, .. } = &mut self.observed;
        let Some(standard) = &wanted.preflight else { return Vec::new() };
        let mut news = Vec::new();
        for known in all {
            let idle = |worker: &&mut Worker| {
                worker.node == known.node && worker.checked == Checked::Passed
            };
            let Some(worker) = workers.iter_mut().find(idle) else { continue };
            let (node, silent) = (known.node.clone(), known.silent);
            // A node that was measured before and served as a partner is as it was.
            if worker.paired && known.grade() < Grade::Fail {
                continue;
            }
            let (grade, text) = preflight.known(standard, known, &worker.boot, now);
            match grade {
                Grade::Fail if silent => worker.checked = Checked::Silent,
                Grade::Fail => worker.checked = Checked::Failed,
                _ => worker.paired = true,
            }
            if grade > Grade::Unknown {
                news.push(Happening::Measured { node, grade, text });
            }
        }
        news
    }
}
