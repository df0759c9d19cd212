//! What must be so once nothing fails any more.

use super::Wild;
use crate::lead_world::World;
use moejob_plan::lead::{ENDED_MAX, Event, WorkerPod};
use moejob_plan::observed::{Millis, Outcome};
use serde_json::json;

/// Between two looks.
const PACE: Millis = 500;
/// Whoever trains for so long goes on training.
const STEADY: Millis = 60_000;
/// Writes meanwhile of a job that trains, or is over: none but its progress.
const QUIET_MAX: usize = 60;

impl Wild {
    /// A list of all that there is.
    fn list(&mut self) {
        self.told = self.log.len();
        self.see(Box::new(self.world.seen.clone()));
        for worker in self.world.job().tracker().observed.workers.clone() {
            if !self.world.pods.contains_key(&worker.name) {
                self.on(Event::PodGone(worker.name));
            }
        }
        for pod in self.world.pods.values().cloned().collect::<Vec<_>>() {
            self.on(Event::Pod(Box::new(pod)));
        }
    }

    /// Nothing fails any more, and there are nodes enough.
    ///
    /// # Errors
    /// Why the job does not train after so many seconds, and is not over either.
    pub fn calm(&mut self, seconds: u64) -> Result<(), String> {
        while !self.late.is_empty() {
            self.land_late(0);
        }
        self.cut.clear();
        self.world.seen.spec["nodes"] = json!({ "min": 1, "max": 2, "spares": 1 });
        self.world.seen.spec["model"]["preset"] = json!("tiny");
        self.world.seen.spec["suspend"] = json!(false);
        self.world.seen.generation += 1;
        self.change();
        self.list();
        self.grant(0xff);
        let began = self.world.now;
        let (mut since, mut last, mut quiet) = (None, began, 0);
        loop {
            self.turn();
            while !self.world.under_way.is_empty() {
                self.answer(0, u32::MAX);
            }
            (self.told..self.log.len()).for_each(|_| self.tell(false));
            while !self.dials.is_empty() {
                self.connect(0, 15);
            }
            (0..self.said.len()).for_each(|_| self.hear());
            (0..self.world.pods.len()).for_each(|at| self.kubelet(at));
            self.notice();
            let now = self.world.now;
            if self.train() {
                last = now;
            }
            let over = self.is_over();
            if last + 5 * PACE < now && !over {
                since = None;
            } else if since.is_none() {
                (since, quiet) = (Some(now), self.writes);
            }
            if since.is_some_and(|since| now > since + STEADY) {
                break;
            }
            if now > began + seconds * 1_000 {
                let mut world = std::mem::take(&mut self.world);
                let why = world.why();
                let observed = &world.job().tracker().observed;
                return Err(format!("no steps: {why:?} {observed:#?}"));
            }
            self.pass(PACE);
        }
        self.settled(self.writes - quiet)
    }

    fn is_over(&mut self) -> bool {
        let outcome = &self.world.job().tracker().observed.record.outcome;
        outcome.as_ref().is_some_and(|of| *of != Outcome::Suspended)
    }

    /// Nothing is left that nobody needs.
    fn settled(&mut self, writes: usize) -> Result<(), String> {
        let most = if self.is_over() { 0 } else { 3 };
        let alive: Vec<&WorkerPod> =
            self.world.pods.values().filter(|pod| pod.ended.is_none()).collect();
        if alive.len() > most {
            return Err(format!("{} pods live, at most {most} are needed: {alive:#?}", alive.len()));
        }
        let ended = self.world.pods.len() - alive.len();
        if ended > ENDED_MAX {
            return Err(format!("{ended} pods that have ended are left"));
        }
        match writes > QUIET_MAX {
            true => Err(format!("{writes} writes within {} s", STEADY / 1_000)),
            false => Ok(()),
        }
    }
}

impl World {
    /// What the loop says of its decisions.
    fn why(&mut self) -> Vec<String> {
        let now = self.now;
        let plan = moejob_plan::decide::plan(&self.job().tracker().observed, now);
        plan.why
    }
}
