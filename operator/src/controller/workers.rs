//! The workers of one job as pods: which are dialled, which cannot start, which are to be deleted.

use super::job::{JobState, Lookup, delete};
use super::Origin;
use crate::control::Verifier;
use crate::identity::PodIdentity;
use crate::observe::{Key, PodSeen, WorkerPod, key};
use moejob_plan::observed::{Millis, Observed, Outcome, Worker, WorkerState};
use moejob_plan::pods::attempt_and_slot;
use moejob_plan::track::Happening;
use moejob_protocol::message::Down;
use moejob_protocol::pod::PORT;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

/// Between two tries to reach a worker that has not yet answered.
const REDIAL: Millis = 200;
/// An image may take so long to come before its pod counts as failed.
const IMAGE_MAX: Millis = 600_000;
/// So may its volumes; and after the second a person is told that they have not.
const MOUNT_MAX: Millis = 120_000;
const MOUNT_TOLD: Millis = 15_000;
/// A pod that is there, and is not seen for so long, has gone meanwhile.
const DOUBT_MAX: Millis = 1_000;
/// A process whose stream has closed is ending; its pod is left alone for so long, so that its exit
/// code and its log are not lost.
const ENDING: Millis = 5_000;
/// Pods of a job that have ended and are kept for their logs; the oldest go first.
const ENDED_MAX: usize = 8;
/// A pod on a silent node, whose kubelet does not confirm its end, is deleted by force after this.
const FORCE_AFTER: Millis = 20_000;
/// A node whose pod was deleted by force and which still counts as ready is avoided for so long:
/// Kubernetes takes 40 to 50 s from the first silence to find it not ready.
const SILENT_AVOID: Millis = 40_000;

/// What the tracker does not know of workers.
#[derive(Default)]
pub struct Workers {
    known: HashMap<String, Known>,
    /// Nodes where workers did not come up, and what was said of it last.
    troubles: BTreeMap<String, String>,
    /// Nodes that allocation is to hear of.
    blamed: Vec<String>,
    worked: Vec<String>,
    avoided: Vec<(String, Millis)>,
    /// Ended pods, oldest first.
    ended: VecDeque<WorkerPod>,
    /// Names for which there were pods already, whoever's, and since when that is known.
    doubts: Vec<(String, Millis)>,
}

#[derive(Default)]
struct Known {
    address: String,
    /// When it was first seen by this leader.
    since: Millis,
    redial_at: Option<Millis>,
    delete_at: Option<Millis>,
    /// When its deletion began.
    deleted_at: Option<Millis>,
    forced: bool,
    /// It was told that nobody needs what it holds.
    dismissed: bool,
    silent_at: Option<Millis>,
    /// Why it was not reached, or was not believed, when it was last dialled.
    refused: Option<String>,
    /// Its stream ended: so has, likely, its process.
    closed: bool,
    /// It was in an attempt.
    trained: bool,
}

impl Workers {
    pub fn address(&self, name: &str) -> Option<String> {
        self.known.get(name).map(|known| known.address.clone())
    }

    pub fn connected(&mut self, name: &str) {
        if let Some(known) = self.known.get_mut(name) {
            (known.redial_at, known.silent_at, known.closed) = (None, None, false);
            known.refused = None;
        }
    }

    pub fn silent(&mut self, name: &str, now: Millis) {
        if let Some(known) = self.known.get_mut(name) {
            known.silent_at.get_or_insert(now);
        }
    }

    pub fn trained(&mut self, name: &str) {
        self.known.entry(name.to_string()).or_default().trained = true;
    }

    pub fn delete_at(&mut self, name: &str, at: Millis) {
        self.known.entry(name.to_string()).or_default().delete_at = Some(at);
    }

    /// Whether its pod is to be deleted now.
    pub fn stopped(&mut self, pod: &WorkerPod, now: Millis) -> bool {
        let known = self.known.entry(pod.name.clone()).or_default();
        if known.closed && pod.deletion.is_none() {
            known.delete_at = Some(now + ENDING);
            return false;
        }
        known.deleted_at.get_or_insert(now);
        true
    }

    /// Its stream has closed and its pod is left alone for now: how it ended is about to be told.
    pub fn ends_soon(&self, name: &str) -> bool {
        self.known.get(name).is_some_and(|known| known.closed && known.deleted_at.is_none())
    }

    /// A pod has ended; the one that must go for it, where `most` are kept.
    fn keep_ended(&mut self, pod: &WorkerPod, most: usize) -> Option<WorkerPod> {
        if self.ended.iter().any(|of| of.uid == pod.uid) || pod.deletion.is_some() {
            return None;
        }
        self.ended.push_back(pod.clone());
        (self.ended.len() > most).then(|| self.ended.pop_front()).flatten()
    }

    /// There is a pod of this name: the watch will tell whose.
    pub fn doubt(&mut self, name: String, now: Millis) {
        self.doubts.push((name, now));
    }

    /// Nodes where a worker has failed since this was last asked.
    pub fn take_blamed(&mut self) -> Vec<String> {
        std::mem::take(&mut self.blamed)
    }

    pub fn avoid(&mut self, node: &str, until: Millis) {
        self.avoided.push((node.to_string(), until));
    }

    /// Nodes that the plan wants avoided, and until when.
    pub fn take_avoided(&mut self) -> Vec<(String, Millis)> {
        std::mem::take(&mut self.avoided)
    }

    /// Nodes where a worker has trained.
    pub fn take_worked(&mut self) -> Vec<String> {
        std::mem::take(&mut self.worked)
    }

    /// Every member of the gang went silent, and the API server was not heard of since.
    pub fn is_alone(&self, observed: &Observed, heard_of_api: Millis, now: Millis) -> bool {
        let Some(gang) = observed.gang() else { return false };
        let mut newest = 0;
        for member in &gang.members {
            let Some(worker) = observed.worker(&member.worker) else { continue };
            match (&worker.state, self.known.get(&worker.name).and_then(|known| known.silent_at)) {
                (WorkerState::Silent, Some(at)) => newest = newest.max(at),
                (WorkerState::Dead { .. }, _) => {}
                _ => return false,
            }
        }
        newest > 0 && heard_of_api <= newest && now < newest + FORCE_AFTER
    }

    /// Why workers do not come up, a line a node.
    pub fn troubles(&self) -> Vec<String> {
        self.troubles.iter().map(|(node, message)| format!("{node}: {message}")).collect()
    }

    pub fn due(&self) -> Option<Millis> {
        let of = |known: &Known| {
            let force = known.deleted_at.filter(|_| !known.forced).map(|at| at + FORCE_AFTER);
            [known.redial_at, known.delete_at, force].into_iter().flatten().min()
        };
        let doubts = self.doubts.iter().map(|(_, since)| since + DOUBT_MAX);
        self.known.values().filter_map(of).chain(doubts).min()
    }

    fn blame(&mut self, node: &str, message: &str) {
        self.troubles.insert(node.to_string(), message.to_string());
        self.blamed.push(node.to_string());
    }

    /// A worker trained there: what was against the node is over.
    fn praise(&mut self, node: &str) {
        self.troubles.remove(node);
        self.worked.push(node.to_string());
    }

    /// A worker came up there.
    pub fn came_up(&mut self, node: &str) {
        self.troubles.remove(node);
    }
}

impl JobState {
    /// A pod of this job is otherwise than before, or gone.
    pub(super) fn pod(&mut self, key: &Key, pod: Option<&PodSeen>, now: Millis) {
        let name = key.rsplit('/').next().unwrap_or_default();
        let worker = pod.and_then(|pod| pod.worker.as_deref());
        match worker.filter(|worker| worker.job_uid == self.id.uid) {
            None => self.pod_gone(name, now),
            Some(worker) => {
                let bound = pod.and_then(|pod| pod.node.as_deref());
                self.pod_seen(worker, bound, now);
            }
        }
    }

    fn pod_gone(&mut self, name: &str, now: Millis) {
        self.leader.close(name);
        let happenings = self.tracker.exited(name, None, "its pod was deleted", now);
        self.tell(happenings);
        self.back_off(name, "its pod was deleted");
        self.workers.known.remove(name);
    }

    fn pod_seen(&mut self, pod: &WorkerPod, bound: Option<&str>, now: Millis) {
        // A suspended job has none, also where the leader before had no time to delete them.
        let suspended = self.tracker.observed.record.outcome == Some(Outcome::Suspended);
        let most = if suspended { 0 } else { ENDED_MAX };
        if pod.ended.is_some()
            && let Some(oldest) = self.workers.keep_ended(pod, most)
        {
            self.send_aside(Origin::Cleanup, delete(&oldest, 0));
        }
        if self.tracker.observed.worker(&pod.name).is_none() && !self.adopt(pod, bound, now) {
            return;
        }
        let known = self.workers.known.entry(pod.name.clone()).or_default();
        if known.since == 0 {
            known.since = now;
        }
        if pod.deletion.is_some() {
            known.deleted_at.get_or_insert(now);
            let workers = &mut self.tracker.observed.workers;
            let worker = workers.iter_mut().find(|worker| worker.name == pod.name);
            if let Some(worker) = worker.filter(|worker| !worker.stopping) {
                // Somebody else's doing is a drain: its last checkpoint is on its way.
                worker.stopping = true;
                let note = format!("the pod {} on {} is being deleted", pod.name, worker.node);
                self.event(false, "Draining", note);
            }
        }
        if let Some((exit_code, how)) = &pod.ended {
            let happenings = self.tracker.exited(&pod.name, *exit_code, how, now);
            self.leader.close(&pod.name);
            self.tell(happenings);
            self.back_off(&pod.name, how);
            self.workers.known.remove(&pod.name);
        } else if let Some(trouble) = &pod.trouble {
            self.cannot_start(pod, trouble);
        } else if pod.started && !self.leader.is_linked(&pod.name) {
            self.dial(pod, bound);
        }
    }

    /// A worker that this leader did not start: of one before it.
    fn adopt(&mut self, pod: &WorkerPod, bound: Option<&str>, now: Millis) -> bool {
        let Some(node) = bound.or(pod.meant_for.as_deref()) else { return false };
        let record = &mut self.tracker.observed.record;
        if let Some((_, slot)) = attempt_and_slot(&pod.name) {
            record.births = record.births.max(slot + 1);
        }
        let in_gang = record.gang.as_ref().is_some_and(|gang| {
            gang.ended.is_none() && gang.members.iter().any(|of| of.worker == pod.name)
        });
        // What ended while nobody led counts if it was a member: its exit code may be the job's.
        if pod.ended.is_some() && (!in_gang || record.outcome.is_some()) {
            return false;
        }
        self.tracker.observed.workers.push(Worker::starting(&pod.name, node, now));
        self.tracker.observed.workers.sort_by_key(|worker| {
            attempt_and_slot(&worker.name).map_or(u32::MAX, |(_, slot)| slot)
        });
        self.workers.known.entry(pod.name.clone()).or_default().trained = in_gang;
        true
    }

    fn dial(&mut self, pod: &WorkerPod, bound: Option<&str>) {
        let address = pod.address.as_deref().and_then(|text| text.parse::<IpAddr>().ok());
        let Some(address) = address else { return };
        let connected = self.tracker.observed.worker(&pod.name).is_none_or(|worker| {
            !matches!(worker.state, WorkerState::Starting { .. }) || worker.is_dead()
        });
        if connected {
            return;
        }
        let address = SocketAddr::new(address, PORT).to_string();
        let known = self.workers.known.entry(pod.name.clone()).or_default();
        known.address.clone_from(&address);
        known.redial_at = None;
        let verifier = Verifier::TokenReview {
            reviewer: self.context.reviewer.clone(),
            pod: PodIdentity {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                uid: pod.uid.clone(),
                node: bound.unwrap_or_default().to_string(),
            },
        };
        self.leader.dial_by(&pod.name, &address, verifier);
    }

    /// Its stream is closed. One that never answered is dialled again; a member of the gang no
    /// longer than the heartbeat timeout, as others wait for it.
    pub(super) fn closed(&mut self, name: &str, reason: &str, now: Millis) -> Vec<Happening> {
        let starting = self.tracker.observed.worker(name).is_some_and(|worker| {
            matches!(worker.state, WorkerState::Starting { .. })
        });
        if !starting {
            self.workers.silent(name, now);
            self.workers.known.entry(name.to_string()).or_default().closed = true;
            return self.tracker.silent(name, reason);
        }
        tracing::info!(job = self.id.name, name, reason, "not reached");
        let gang = self.tracker.observed.gang();
        let member =
            gang.is_some_and(|gang| gang.members.iter().any(|member| member.worker == name));
        let patience = self.job.as_ref().map_or(3_000, |job| job.recovery.heartbeat_timeout);
        let known = self.workers.known.entry(name.to_string()).or_default();
        known.refused = Some(reason.to_string());
        if member && now >= known.since + patience {
            known.silent_at.get_or_insert(now);
            return self.tracker.silent(name, reason);
        }
        known.redial_at = Some(now + REDIAL);
        Vec::new()
    }

    /// The kubelet says that the container will not start: its node is avoided.
    fn cannot_start(&mut self, pod: &WorkerPod, trouble: &str) {
        let Some(worker) = self.tracker.observed.worker(&pod.name) else { return };
        if !matches!(worker.state, WorkerState::Starting { .. }) || worker.stopping {
            return;
        }
        let node = worker.node.clone();
        self.workers.blame(&node, trouble);
        let happenings = self.tracker.silent(&pod.name, trouble);
        self.tell(happenings);
    }

    fn back_off(&mut self, name: &str, how: &str) {
        let Some(worker) = self.tracker.observed.worker(name) else { return };
        let (node, stopping) = (worker.node.clone(), worker.stopping);
        // One that had trained was lost; one that had not will likely fail again.
        if self.workers.known.get(name).is_some_and(|known| known.trained) {
            self.workers.praise(&node);
        } else if !stopping {
            self.workers.blame(&node, how);
        }
    }

    /// Clocks of pods: images that take their time, dials, deletions.
    pub(super) fn look_after(&mut self, cluster: &Lookup, now: Millis) {
        self.settle_doubts(cluster, now);
        self.wait_for_images(cluster, now);
        self.dismiss();
        let namespace = self.id.namespace.clone();
        let waits = |known: &Known| {
            known.redial_at.or(known.delete_at).is_some()
                || (known.deleted_at.is_some() && !known.forced)
        };
        let waiting = self.workers.known.iter().filter(|(_, known)| waits(known));
        let names: Vec<String> = waiting.map(|(name, _)| name.clone()).collect();
        for name in names {
            let Some(pod) = cluster.worker(&namespace, &name).cloned() else { continue };
            let Some(known) = self.workers.known.get_mut(&name) else { continue };
            if known.redial_at.is_some_and(|at| now >= at) {
                known.redial_at = None;
                if !self.leader.is_linked(&name) && pod.ended.is_none() {
                    let bound = cluster.node_of(&namespace, &name);
                    self.dial(&pod, bound.as_deref());
                }
                continue;
            }
            if known.delete_at.is_some_and(|at| now >= at) {
                known.delete_at = None;
                self.send_aside(Origin::Cleanup, delete(&pod, 1));
                continue;
            }
            let force = known.deleted_at.is_some_and(|at| now >= at + FORCE_AFTER);
            let over = pod.deletion.is_none_or(|at| now >= at);
            let heard = self.leader.is_linked(&name) && known.silent_at.is_none();
            if force && !known.forced && over && !heard {
                known.forced = true;
                // The cluster will find it not ready somewhat later.
                if let Some(node) = cluster.node_of(&namespace, &name)
                    && cluster.is_ready(&node)
                {
                    self.workers.avoid(&node, now + SILENT_AVOID);
                }
                tracing::warn!(job = self.id.name, name, "deleted by force: its node is silent");
                self.send_aside(Origin::Cleanup, delete(&pod, 0));
            }
        }
    }

    /// A worker whose pod somebody deletes waits until others need nothing of it any more.
    fn dismiss(&mut self) {
        let observed = &self.tracker.observed;
        let Some(gang) = observed.gang().filter(|gang| gang.stepped) else { return };
        let leaves = |worker: &&Worker| {
            let idle = matches!(worker.state, WorkerState::Idle | WorkerState::Left { .. });
            worker.stopping && idle && gang.members.iter().all(|of| of.worker != worker.name)
        };
        let attempt = gang.attempt;
        let leaving = observed.workers.iter().filter(leaves).map(|worker| worker.name.clone());
        for name in leaving.collect::<Vec<_>>() {
            let known = self.workers.known.entry(name.clone()).or_default();
            if !std::mem::replace(&mut known.dismissed, true) {
                self.leader.send(&name, attempt, Down::Shutdown);
            }
        }
    }

    /// A worker whose name another pod has will never be there; the next one has another name.
    fn settle_doubts(&mut self, cluster: &Lookup, now: Millis) {
        for (name, since) in std::mem::take(&mut self.workers.doubts) {
            let pod = cluster.get(&key(&self.id.namespace, &name));
            let worker = pod.and_then(|pod| pod.worker.as_deref());
            if worker.is_some_and(|worker| worker.job_uid == self.id.uid) {
                continue;
            }
            if pod.is_none() && now < since + DOUBT_MAX {
                self.workers.doubts.push((name, since));
                continue;
            }
            // Neither a loss nor a failed start: nothing of it has ever been.
            tracing::info!(job = self.id.name, name, "another pod has this name");
            drop(self.tracker.silent(&name, "another pod has its name"));
            drop(self.tracker.exited(&name, None, "another pod has its name", now));
            self.workers.known.remove(&name);
            self.dirty = true;
        }
    }

    /// A bound pod whose image is on its way has not begun to be late.
    fn wait_for_images(&mut self, cluster: &Lookup, now: Millis) {
        let known = &self.workers.known;
        for worker in &mut self.tracker.observed.workers {
            let WorkerState::Starting { since } = &mut worker.state else { continue };
            let pod = cluster.worker(&self.id.namespace, &worker.name);
            let bound = cluster.node_of(&self.id.namespace, &worker.name).is_some();
            let Some(pod) = pod.filter(|pod| bound && !pod.started && pod.trouble.is_none()) else {
                continue;
            };
            let seen = known.get(&worker.name).map_or(now, |known| known.since);
            if pod.mounting && now >= seen + MOUNT_TOLD {
                let message = unmounted(&pod.name);
                if self.workers.troubles.insert(worker.node.clone(), message).is_none() {
                    self.dirty = true;
                }
            }
            if now < seen + if pod.mounting { MOUNT_MAX } else { IMAGE_MAX } {
                *since = now;
            }
        }
    }

    /// A suspended job has no pods, ended ones neither.
    pub(super) fn delete_ended(&mut self) {
        for pod in std::mem::take(&mut self.workers.ended) {
            self.send_aside(Origin::Cleanup, delete(&pod, 0));
        }
    }

    /// A worker that is given up before it was reached speaks against its node.
    pub(super) fn gave_up(&mut self, pod: &WorkerPod) {
        let Some(worker) = self.tracker.observed.worker(&pod.name) else { return };
        if matches!(worker.state, WorkerState::Starting { .. }) {
            let node = worker.node.clone();
            let refused = self.workers.known.get(&pod.name).and_then(|of| of.refused.clone());
            let mounts = pod.mounting.then(|| unmounted(&pod.name));
            let why = pod.unschedulable.clone().or(refused).or(mounts);
            let why = why.unwrap_or_else(|| "it did not begin in time".to_string());
            self.workers.blame(&node, &format!("its worker was not reached: {why}"));
        }
    }
}

/// The kubelet tells why in an event alone, which the operator has no right to read.
fn unmounted(pod: &str) -> String {
    format!(
        "a volume or the network of pod {pod} is not there yet (is a ConfigMap missing?); \
         `kubectl describe pod {pod}` says why"
    )
}
