//! The job's NetworkPolicy and PodDisruptionBudget: there before the pods, up to date, and made
//! again where somebody has deleted them.

use super::crowd::YIELD_MAX;
use super::{Batch, Effect, JobLoop, Origin, Write};
use crate::observed::Millis;
use crate::pods;

/// How often it is looked whether they are still there.
const HEAL_EVERY: Millis = 60_000;
/// After one that could not be written.
const RETRY: Millis = 5_000;

#[derive(Debug, Default)]
pub struct Objects {
    pub policy: Ensured,
    pub budget: Ensured,
    /// There are pods, and there is a gang: only then is either looked after.
    wanted: (bool, bool),
    /// The first budget waits for other pods to come up, until then at most.
    pub yields: Option<Millis>,
}

#[derive(Debug, Default)]
pub struct Ensured {
    /// The API server has acknowledged it for this generation.
    generation: Option<i64>,
    /// When it is looked at again.
    due: Option<Millis>,
    under_way: bool,
}

impl Ensured {
    pub fn written(&mut self, generation: i64, ok: bool, now: Millis) {
        self.under_way = false;
        if ok {
            self.generation = Some(generation);
        }
        self.due = Some(now + if ok { HEAL_EVERY } else { RETRY });
    }

    fn is_due(&self, generation: i64, now: Millis) -> bool {
        let stale = self.generation.is_some_and(|of| of != generation);
        !self.under_way && (self.due.is_none_or(|at| now >= at) || stale)
    }
}

impl Objects {
    /// No pod is made before strangers are shut out.
    pub fn has_policy(&self) -> bool {
        self.policy.generation.is_some()
    }

    pub fn due(&self) -> Option<Millis> {
        let of = |object: &Ensured, wanted: bool| {
            object.due.filter(|_| wanted && !object.under_way)
        };
        let (policy, budget) = (of(&self.policy, self.wanted.0), of(&self.budget, self.wanted.1));
        policy.into_iter().chain(self.yields.or(budget)).min()
    }
}

impl JobLoop {
    /// Looks after both while there are pods. The budget comes with the gang: earlier the cluster
    /// would count it anew, and write its status, with every pod that starts.
    pub(super) fn ensure_objects(&mut self, now: Millis) {
        let observed = &self.tracker.observed;
        let wanted = self.place.has_api() && self.spec.plannable().is_some()
            && !self.spec.deleted;
        let pods = wanted && !observed.workers.is_empty();
        let gang = pods && observed.gang().is_some();
        self.objects.wanted = (pods, gang);
        let yields = self.objects.yields.take();
        if !pods {
            return;
        }
        let generation = self.spec.generation();
        if self.objects.policy.is_due(generation, now) {
            self.objects.policy.under_way = true;
            if let Some(write) = self.policy() {
                self.send_aside(Origin::Policy(generation), write);
            }
        }
        if gang && self.objects.budget.is_due(generation, now) {
            let first = self.objects.budget.generation.is_none();
            let until = yields.unwrap_or(now + YIELD_MAX);
            if first && self.crowd && now < until {
                self.objects.yields = Some(until);
                return;
            }
            self.objects.budget.under_way = true;
            let Some(job) = self.spec.plannable() else { return };
            let object = pods::disruption_budget(job, &self.surroundings(job));
            let write = self.ensured(object, first);
            self.send_aside(Origin::Budget(generation), write);
        }
    }

    /// The batch that goes before the first pods.
    pub(super) fn send_policy(&mut self) {
        let Some(write) = self.policy() else { return };
        self.objects.policy.under_way = true;
        let writes = vec![(Origin::Policy(self.spec.generation()), write)];
        self.outbox.busy = true;
        self.effects.push(Effect::Write(Batch { aside: false, writes }));
    }

    fn policy(&self) -> Option<Write> {
        let job = self.spec.plannable()?;
        let object = pods::network_policy(job, &self.surroundings(job));
        Some(self.ensured(object, self.objects.policy.generation.is_none()))
    }

    /// Of a job that nobody has led none is there.
    fn ensured(&self, object: serde_json::Value, first: bool) -> Write {
        Write::Ensure { job: self.id.clone(), object, fresh: first && !self.was_led }
    }
}
