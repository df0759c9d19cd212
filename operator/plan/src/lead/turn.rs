//! What is to be done now: the plan, carried out up to the first batch of writes.

use super::digest::EXPIRY_RETRY;
use super::place::Patience;
use super::{
    Batch, Effect, JobLoop, Link, Memo, Origin, Template, Turn, Write, WriteError, WriteErrorKind,
};
use crate::decide::{Action, FREEZE_PATIENCE, plan};
use crate::observed::{Millis, Outcome, StopCause};
use crate::pods::{Birth, Surroundings};
use crate::record::RECORD_BYTES_MAX;
use moejob_manifest::Job;
use moejob_manifest::words::several;
use moejob_protocol::message::Down;
use std::collections::HashSet;
use std::sync::Arc;

/// Rounds of planning in one go; a plan converges within three.
const ROUNDS_MAX: usize = 16;
/// While nobody is heard and the API server neither, it is looked again after so long.
const ALONE: Millis = 500;

impl JobLoop {
    /// Decides. Calling it again at once gives nothing more.
    pub fn turn(&mut self, now: Millis) -> Turn {
        self.dirty = false;
        if self.fence.is_none() {
            if !self.outbox.busy {
                self.catch_up(now);
                self.look_after(now);
                self.expire(now);
            }
            match self.spec.plannable().is_some() {
                true if self.outbox.may_plan(now) => self.decide(now),
                true => {}
                false => self.requeue = None,
            }
            self.ensure_objects(now);
            self.stand_in_for_nodes(now);
            self.watch_drains(now);
            self.report_status(now);
            self.tell_passes();
        }
        let turned = self.refusals.take_turned(now);
        Turn { effects: std::mem::take(&mut self.effects), due: self.due(now), turned }
    }

    /// When to look again even if nothing happens.
    pub fn due(&self, now: Millis) -> Option<Millis> {
        if let Some(fence) = &self.fence {
            return fence.until();
        }
        // What is due of the pods waits for the end of the batch.
        let pods = self.pods.due().filter(|_| !self.outbox.busy);
        let dues = [
            self.requeue.filter(|_| self.outbox.may_plan(now)),
            self.outbox.due(now),
            pods,
            self.report.due,
            self.expires.filter(|_| !self.outbox.busy),
            self.refusals.due(),
            self.objects.due(),
            self.placeholders.due(self.missing(), now),
            self.drains.due(),
        ];
        dues.into_iter().flatten().min()
    }

    fn decide(&mut self, now: Millis) {
        self.requeue = None;
        for _ in 0..ROUNDS_MAX {
            self.advance(now);
            if self.outbox.busy || std::mem::take(&mut self.outbox.awaits_status) {
                return;
            }
            self.tracker.prune();
            self.tracker.observed.nodes.clone_from(&self.granted.nodes);
            self.tracker.observed.fabric = self.granted.fabric;
            if self.place.has_api()
                && self.pods.is_alone(&self.tracker.observed, self.heard_of_api, now)
            {
                // Nobody is heard and the API server neither: it is the operator that is cut off.
                self.requeue = Some(now + ALONE);
                return;
            }
            if self.tracker.observed.gang().is_none() {
                self.tie_to_checkpoints();
            }
            let plan = plan(&self.tracker.observed, now);
            if plan.why != self.why {
                plan.why.iter().for_each(|why| self.note(false, why.clone()));
                self.why = plan.why;
            }
            if plan.actions.is_empty() {
                self.requeue = plan.requeue;
                return;
            }
            self.outbox.queue.extend(plan.actions);
        }
        self.note(true, "the plan does not converge".to_string());
        self.requeue = Some(now + 1_000);
    }

    /// Carries out what is planned, up to the first batch of writes.
    fn advance(&mut self, now: Millis) {
        while let Some(action) = self.outbox.queue.pop_front() {
            match &action {
                Action::StartWorker { .. } => {
                    self.start_workers(action);
                    if self.outbox.busy {
                        return;
                    }
                    continue;
                }
                Action::StopWorker { name, grace } => {
                    self.stop_worker(name, *grace, &action, now);
                    continue;
                }
                Action::RecordAttempt(_) | Action::Finish(_) => {
                    // Status has one writer at a time, and this one must see its result.
                    if self.report.in_flight {
                        // Until then things may change: it is planned anew.
                        self.outbox.awaits_status = true;
                        return self.outbox.queue.clear();
                    }
                    return self.record(action, now);
                }
                Action::Configure { name, rank, config } => {
                    let (name, config) = (name.clone(), Arc::clone(config));
                    self.pods.trained(&name);
                    self.effects.push(Effect::Link(Link::Configure { name, rank: *rank, config }));
                }
                Action::GiveUp { name } => {
                    self.pods.silent(name, now);
                    self.tracker.done(&action, now);
                    let news = self.tracker.take_news();
                    self.tell(news, now);
                    continue;
                }
                Action::Preflight { name } => self.measure(name, now),
                Action::MeasurePairs(_) | Action::RelayPair { .. } | Action::EndPair { .. } => {
                    self.measure_pairs(&action, now);
                    continue;
                }
                Action::LeaveAttempt { name, attempt, reason } => {
                    self.send(name, *attempt, Down::Leave { reason: reason.clone() });
                }
                Action::BePatient { name, attempt } => {
                    let seconds = (FREEZE_PATIENCE / 1000) as u32;
                    self.send(name, *attempt, Down::Patience { seconds });
                }
                Action::Request { attempt, request, cause } => {
                    self.tell_who_gives_back(*cause, now);
                    let gang = self.tracker.observed.record.gang.as_ref();
                    let members = gang.map_or(&[][..], |gang| &gang.members);
                    let names = members.iter().map(|member| member.worker.clone());
                    for name in names.collect::<Vec<_>>() {
                        self.send(&name, *attempt, Down::Request(*request));
                    }
                }
                Action::AvoidNode { node, until } => self.avoid(node, *until, now),
                Action::EndAttempt { .. }
                | Action::NoteUnmeasured { .. }
                | Action::NoteStop
                | Action::WithdrawStop => {}
            }
            self.tracker.done(&action, now);
        }
    }

    /// A gang does without nodes for another job, or ends for it.
    fn tell_who_gives_back(&mut self, cause: StopCause, now: Millis) {
        let observed = &self.tracker.observed;
        let called_back = observed.nodes.iter().filter(|node| node.called_back).count();
        if cause != StopCause::Shrink || called_back == 0 {
            return;
        }
        let nodes = several(called_back, "node");
        let (reason, what) = match observed.is_preempted() {
            true => ("Preempted", "waits, and goes on where it was when there are nodes for it"),
            false => ("NodesCalledBack", "goes on with fewer"),
        };
        let note = format!(
            "takes a checkpoint, gives {nodes} back and {what}: another job needs them, which is \
             of a higher priority or has waited since before this one had them"
        );
        self.event(false, reason, note, now);
    }

    fn measure(&mut self, name: &str, now: Millis) {
        let observed = &self.tracker.observed;
        let worker = observed.worker(name).zip(observed.wanted.preflight.as_ref());
        let Some((worker, standard)) = worker else { return };
        let order = observed.preflight.order(standard, &worker.node, now);
        self.send(name, 0, Down::Preflight(Box::new(order)));
    }

    /// All that are to start now, in one batch; before them what shuts strangers out.
    fn start_workers(&mut self, first: Action) {
        if self.place.has_api() && !self.objects.has_policy() {
            self.outbox.queue.push_front(first);
            return self.send_policy();
        }
        let Some(job) = self.spec.plannable().cloned() else { return };
        let image = job.kubernetes.image.clone().unwrap_or_else(|| self.operator.image.0.clone());
        let image = self.image_for(image);
        let around = Surroundings { image, ..self.surroundings(&job) };
        let template = Arc::new(Template { job, around });
        let granted: HashSet<String> =
            self.granted.nodes.iter().map(|node| node.name.clone()).collect();
        let mut writes = Vec::new();
        let mut next = Some(first);
        while let Some(action) = next {
            let Action::StartWorker { name, node } = &action else {
                self.outbox.queue.push_front(action);
                break;
            };
            let (name, node) = (name.clone(), node.clone());
            // A leader before this one has made it, and it was seen since this was planned: other
            // pods may be needed now. Or the node has gone to another job, which can be while the
            // policy is written: two jobs would make pods there, and one of them for nothing.
            if self.tracker.observed.worker(&name).is_some() || !granted.contains(&node) {
                self.outbox.queue.clear();
                break;
            }
            // Workers that were decided on take their nodes before their pods are seen.
            self.memo(Memo::Decided(node.clone()));
            // Whoever writes it has the key of the seals.
            let birth = Birth { name, node, ..Birth::default() };
            let template = Arc::clone(&template);
            writes.push((Origin::Action(action), Write::CreatePod { template, birth }));
            next = self.outbox.queue.pop_front();
        }
        if writes.is_empty() {
            return;
        }
        self.outbox.busy = true;
        self.effects.push(Effect::Write(Batch { aside: false, writes }));
    }

    pub(super) fn surroundings(&self, job: &Job) -> Surroundings {
        let operator = &self.operator;
        let (own, policy) = operator.image.clone();
        Surroundings {
            namespace: self.id.namespace.clone(),
            job_uid: self.id.uid.clone(),
            image: job.kubernetes.image.clone().unwrap_or(own),
            image_pull_policy: policy,
            authority: operator.trusted.clone(),
            operator_namespace: operator.namespace.clone(),
            memory: Default::default(),
        }
    }

    /// Its deletion is written beside all else: a decision never waits for it.
    fn stop_worker(&mut self, name: &str, grace: Millis, action: &Action, now: Millis) {
        let attempt = self.tracker.observed.record.attempt;
        self.send(name, attempt, Down::Shutdown);
        let pod = self.pods.facts(name).filter(|pod| pod.ended.is_none()).cloned();
        let Some(pod) = pod else {
            self.tracker.done(action, now);
            let happenings = self.tracker.exited(name, None, "it has no pod", now);
            return self.tell(happenings, now);
        };
        self.pods.dismiss(name);
        self.gave_up(&pod, now);
        self.tracker.done(action, now);
        let Patience { kill_grace_s, ending, .. } = *self.place.patience();
        // One that hears ends by itself, and its pod stays for its log.
        let over = matches!(
            self.tracker.observed.record.outcome,
            Some(Outcome::Complete { .. } | Outcome::Failed { .. })
        );
        if over && self.pods.is_linked(name) {
            return self.pods.delete_at(name, now + grace, kill_grace_s);
        }
        if self.pods.stopped(name, ending, now) {
            let grace_s = u32::try_from(grace / 1000).unwrap_or(u32::MAX).max(kill_grace_s);
            self.send_deletion(&pod, grace_s);
        }
    }

    /// Before any order that follows from it.
    fn record(&mut self, action: Action, now: Millis) {
        let mut after = self.tracker.clone();
        after.done(&action, now);
        let mut status = self.status_of(&after, now);
        self.write_record(&after, &mut status);
        let bytes = status.record.len() + status.record_more.len();
        if bytes > RECORD_BYTES_MAX {
            // No leader would read it: the job would be fenced by its own record.
            let kind = WriteErrorKind::Refused;
            let message = format!(
                "the record of its gang takes {bytes} bytes, at most {RECORD_BYTES_MAX}; \
                 ask for fewer nodes, or for such with shorter names"
            );
            self.failed("RecordTooLong", &WriteError { kind, message }, now);
            return self.outbox.failed(now, self.place.patience().retry_max);
        }
        let write = self.report.write(&self.id, status, now);
        let writes = vec![(Origin::Recorded(Box::new(action)), write)];
        self.outbox.busy = true;
        self.effects.push(Effect::Write(Batch { aside: false, writes }));
    }

    /// A finished job is deleted after its time.
    fn expire(&mut self, now: Millis) {
        let kubernetes = self.spec.plannable().map(|job| &job.kubernetes);
        let ttl = kubernetes.and_then(|kubernetes| kubernetes.ttl_seconds_after_finished);
        let finished = self.report.finished_at();
        let at = ttl.zip(finished).map(|(ttl, at)| at.min(now) + u64::from(ttl) * 1000);
        // A deletion that did not succeed is tried again after a while.
        self.expires = self.expires.or(at).filter(|_| at.is_some());
        if self.expires.is_some_and(|at| now >= at) {
            self.expires = Some(now + EXPIRY_RETRY);
            let job = self.id.clone();
            self.send_aside(Origin::Expiry, Write::DeleteJob(job));
        }
    }
}
