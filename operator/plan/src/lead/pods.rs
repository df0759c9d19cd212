//! The pods of one job: which are dialled, which cannot start, which are to be deleted, and when
//! each of them is to be looked at again.

use super::{ByName, Effect, JobLoop, Link, Origin, PodIdentity, Said, WorkerPod, Write, doubled};
use crate::observed::{Millis, Observed, Outcome, Worker, WorkerState};
use crate::pods::attempt_and_slot;
use moejob_manifest::problem::printable;
use moejob_protocol::message::Down;
use moejob_protocol::pod::PORT;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};

/// Between two tries to reach a worker that has not yet answered.
pub const REDIAL: Millis = 200;
/// An image may take so long to come before its pod counts as failed.
const IMAGE_MAX: Millis = 600_000;
/// So may its volumes; and after the second a person is told that they have not.
const MOUNT_MAX: Millis = 120_000;
const MOUNT_TOLD: Millis = 15_000;
/// A pod that is there, and is not seen for so long, has gone meanwhile.
const DOUBT_MAX: Millis = 1_000;
/// Pods of a job that have ended and are kept for their logs; the oldest go first.
pub const ENDED_MAX: usize = 8;
/// A pod on a silent node, whose kubelet does not confirm its end, is deleted by force after this.
pub const FORCE_AFTER: Millis = 20_000;
/// The kubelet's word for a container that took more memory than its limit.
pub const OUT_OF_MEMORY: &str = "OOMKilled";
/// The exit code of a worker that another attempt, or the want of a leader, has ended.
const TRY_AGAIN: i32 = 75;
/// A node whose pod was deleted by force may still count as ready: Kubernetes takes 40 to 50 s from
/// the first silence to find it not ready. Meanwhile it is avoided.
pub const SILENT_AVOID: Millis = 40_000;
/// A pod of which nothing is heard is gone so long after its deletion began, whatever was promised:
/// the promise is for saving, and who saves is heard.
const DELETION_MAX: Millis = 95_000;
/// After a DELETE that failed, doubled with each failure up to the second.
const DELETE_RETRY_FIRST: Millis = 1_000;
const DELETE_RETRY_MAX: Millis = 30_000;

/// What the tracker does not know of workers.
#[derive(Debug, Default)]
pub(super) struct Pods {
    known: ByName<Pod>,
    /// When each of them is to be looked at; the earliest first.
    dues: BTreeSet<(Millis, String)>,
    /// Nodes where workers did not come up, and what was said of it last.
    troubles: BTreeMap<String, String>,
    /// Ended pods, oldest first.
    ended: VecDeque<WorkerPod>,
    /// Names for which there were pods already, whoever's, and since when that is known.
    doubts: Vec<(String, Millis)>,
}

#[derive(Debug, Default)]
struct Pod {
    /// As the API server has it; None before it is seen, and when it is gone.
    facts: Option<WorkerPod>,
    /// The one that was known has gone: what `facts` has is another of its name.
    replaced: bool,
    /// When it was first seen by this leader.
    since: Millis,
    /// There is a stream, or one is being opened.
    linked: bool,
    /// When the last frame came.
    heard_at: Option<Millis>,
    /// When it is dialled again, and whether it was reached before.
    redial: Option<(Millis, bool)>,
    /// When it is deleted, and with which grace.
    delete: Option<(Millis, u32)>,
    delete_failures: u32,
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
    /// Which it speaks.
    protocol: Option<u32>,
    mount_told: bool,
    due: Option<Millis>,
}

impl Pod {
    /// When its deletion is over by the kubelet's own word, or must be.
    fn gone_at(&self) -> Option<Millis> {
        let began = self.deleted_at.filter(|_| !self.forced)?;
        let promised = self.facts.as_ref().and_then(|facts| facts.deletion).unwrap_or(0);
        Some((began + FORCE_AFTER).max(promised.min(began + DELETION_MAX)))
    }

    fn next_due(&self) -> Option<Millis> {
        let mounting = self.facts.as_ref().is_some_and(|facts| facts.mounting && !facts.started);
        let told = (mounting && !self.mount_told).then_some(self.since + MOUNT_TOLD);
        let redial = self.redial.map(|(at, _)| at);
        let delete = self.delete.map(|(at, _)| at);
        [redial, delete, self.gone_at(), told].into_iter().flatten().min()
    }
}

impl Pods {
    /// It was not seen yet, or not for so long, and its container does not run.
    pub fn comes(&self, name: &str, now: Millis, most: Millis) -> bool {
        let Some(pod) = self.known.get(name) else { return true };
        now < pod.since + most && pod.facts.as_ref().is_none_or(|facts| !facts.started)
    }

    /// Changes what is known of it, and when it is looked at.
    fn with<T>(&mut self, name: &str, change: impl FnOnce(&mut Pod) -> T) -> T {
        let pod = self.known.entry(name.to_string()).or_default();
        let result = change(pod);
        let due = pod.next_due();
        if due != pod.due {
            if let Some(at) = pod.due {
                self.dues.remove(&(at, name.to_string()));
            }
            pod.due = due;
            self.dues.extend(due.map(|at| (at, name.to_string())));
        }
        result
    }

    /// The same, for one that is known already.
    fn known<T>(&mut self, name: &str, change: impl FnOnce(&mut Pod) -> T) -> Option<T> {
        self.known.contains_key(name).then(|| self.with(name, change))
    }

    fn remove(&mut self, name: &str) {
        if let Some(Pod { due: Some(at), .. }) = self.known.remove(name) {
            self.dues.remove(&(at, name.to_string()));
        }
    }

    pub fn see(&mut self, facts: WorkerPod, now: Millis) {
        let name = facts.name.clone();
        self.with(&name, |pod| {
            if pod.since == 0 {
                pod.since = now;
            }
            let before = pod.facts.replace(facts);
            let uid = pod.facts.as_ref().map(|facts| facts.uid.as_str());
            pod.replaced |= before.is_some_and(|before| Some(before.uid.as_str()) != uid);
        });
    }

    pub fn lose(&mut self, name: &str) {
        self.known(name, |pod| (pod.facts, pod.replaced) = (None, true));
    }

    pub fn facts(&self, name: &str) -> Option<&WorkerPod> {
        self.known.get(name)?.facts.as_ref()
    }

    pub fn address(&self, name: &str) -> Option<String> {
        address(self.facts(name)?)
    }

    pub fn is_linked(&self, name: &str) -> bool {
        self.known.get(name).is_some_and(|pod| pod.linked)
    }

    pub fn has_trained(&self, name: &str) -> bool {
        self.known.get(name).is_some_and(|pod| pod.trained)
    }

    pub fn heard(&mut self, name: &str, said: &Said, now: Millis) {
        if matches!(said, Said::Opened(_) | Said::Up { .. })
            && let Some(pod) = self.known.get_mut(name)
        {
            pod.heard_at = Some(now);
        }
    }

    pub fn protocol(&self, name: &str) -> Option<u32> {
        self.known.get(name)?.protocol
    }

    pub fn opened(&mut self, name: &str, protocol: u32) {
        self.known(name, |pod| {
            pod.protocol = Some(protocol);
            (pod.redial, pod.silent_at, pod.closed, pod.refused) = (None, None, false, None);
        });
    }

    pub fn unlinked(&mut self, name: &str) {
        self.known(name, |pod| pod.linked = false);
    }

    pub fn silent(&mut self, name: &str, now: Millis) {
        self.known(name, |pod| pod.silent_at = pod.silent_at.or(Some(now)));
    }

    /// Its stream has ended, and is not dialled again.
    pub fn closed(&mut self, name: &str) {
        self.with(name, |pod| pod.closed = true);
    }

    /// Its stream broke; since when nothing is heard of it.
    pub fn broken(&mut self, name: &str, reason: &str, now: Millis) -> Millis {
        self.with(name, |pod| {
            pod.refused = Some(reason.to_string());
            pod.heard_at.unwrap_or(if pod.since == 0 { now } else { pod.since })
        })
    }

    pub fn redial(&mut self, name: &str, starting: bool, now: Millis) {
        let at = if starting { now + REDIAL } else { now };
        self.with(name, |pod| pod.redial = Some((at, !starting)));
    }

    pub fn trained(&mut self, name: &str) {
        self.with(name, |pod| pod.trained = true);
    }

    /// It is told that nobody needs what it holds. Whether it was before.
    pub fn dismiss(&mut self, name: &str) -> bool {
        self.with(name, |pod| std::mem::replace(&mut pod.dismissed, true))
    }

    pub fn delete_at(&mut self, name: &str, at: Millis, grace_s: u32) {
        self.with(name, |pod| pod.delete = Some((at, grace_s)));
    }

    /// Whether its pod is to be deleted now.
    pub fn stopped(&mut self, name: &str, ending: Millis, now: Millis) -> bool {
        self.with(name, |pod| {
            let deleted = pod.facts.as_ref().is_some_and(|facts| facts.deletion.is_some());
            if pod.closed && !deleted && ending > 0 {
                pod.delete = Some((now + ending, 1));
                return false;
            }
            pod.deleted_at.get_or_insert(now);
            true
        })
    }

    /// A DELETE has not succeeded: it is sent again.
    pub fn delete_failed(&mut self, name: &str, now: Millis) {
        self.known(name, |pod| {
            let wait = doubled(DELETE_RETRY_FIRST, pod.delete_failures, DELETE_RETRY_MAX);
            pod.delete_failures += 1;
            pod.delete = Some((now + wait, if pod.forced { 0 } else { 1 }));
        });
    }

    /// Its stream has closed and its pod is left alone for now: how it ended is about to be told.
    pub fn ends_soon(&self, name: &str) -> bool {
        self.known.get(name).is_some_and(|pod| pod.closed && pod.deleted_at.is_none())
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

    /// Every member of the gang went silent, and the API server was not heard of since.
    pub fn is_alone(&self, observed: &Observed, heard_of_api: Millis, now: Millis) -> bool {
        let Some(gang) = observed.gang() else { return false };
        let mut newest = 0;
        for member in &gang.members {
            let Some(worker) = observed.worker(&member.worker) else { continue };
            match (&worker.state, self.known.get(&worker.name).and_then(|pod| pod.silent_at)) {
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

    pub fn trouble(&mut self, node: &str, message: &str) {
        let message = printable(message);
        self.troubles.insert(node.to_string(), message);
    }

    /// A worker came up there.
    pub fn came_up(&mut self, node: &str) {
        self.troubles.remove(node);
    }

    /// When to look again; never a time that was looked at.
    pub fn due(&self) -> Option<Millis> {
        let doubts = self.doubts.iter().map(|(_, since)| since + DOUBT_MAX);
        self.dues.first().map(|(at, _)| *at).into_iter().chain(doubts).min()
    }

    fn take_due(&mut self, now: Millis) -> Vec<String> {
        let due = self.dues.iter().take_while(|(at, _)| *at <= now);
        due.map(|(_, name)| name.clone()).collect()
    }
}

fn address(pod: &WorkerPod) -> Option<String> {
    let address = pod.address.as_deref()?;
    let own_port = address.parse::<SocketAddr>().ok();
    let address = own_port.or_else(|| Some((address.parse::<IpAddr>().ok()?, PORT).into()));
    address.map(|address| address.to_string())
}

impl JobLoop {
    /// A pod of this job is otherwise than before, or gone.
    pub(super) fn pod(&mut self, name: &str, now: Millis) {
        if self.pods.known.get(name).is_some_and(|known| known.replaced)
            && let Some(other) = self.pods.facts(name).cloned()
        {
            self.pod_gone(name, now);
            self.pods.see(other, now);
        }
        match self.pods.facts(name).cloned() {
            None => self.pod_gone(name, now),
            Some(pod) => self.pod_seen(&pod, now),
        }
    }

    fn pod_gone(&mut self, name: &str, now: Millis) {
        self.close(name);
        let happenings = self.tracker.exited(name, None, "its pod was deleted", now);
        self.tell(happenings, now);
        self.back_off(name, "its pod was deleted", now);
        self.pods.remove(name);
    }

    /// Nothing more is heard of it.
    fn close(&mut self, name: &str) {
        if self.pods.is_linked(name) {
            self.effects.push(Effect::Link(Link::Close { name: name.to_string() }));
            self.pods.unlinked(name);
        }
    }

    fn pod_seen(&mut self, pod: &WorkerPod, now: Millis) {
        // A suspended job has none, also where the leader before had no time to delete them.
        let suspended = self.tracker.observed.record.outcome == Some(Outcome::Suspended);
        let most = if suspended { 0 } else { ENDED_MAX };
        if pod.ended.is_some()
            && let Some(oldest) = self.pods.keep_ended(pod, most)
        {
            self.send_deletion(&oldest, 0);
        }
        if self.tracker.observed.worker(&pod.name).is_none() && !self.adopt(pod, now) {
            return;
        }
        // This leader may have chosen another node for a name that a pod had already.
        if let Some(worker) = self.tracker.observed.worker_mut(&pod.name)
            && let Some(node) = pod.node.as_deref().filter(|node| *node != worker.node)
        {
            worker.node = node.to_string();
        }
        if pod.deletion.is_some() {
            self.pods.with(&pod.name, |known| {
                known.deleted_at = known.deleted_at.or(Some(now));
            });
            let worker = self.tracker.observed.worker_mut(&pod.name);
            if let Some(worker) = worker.filter(|worker| !worker.stopping) {
                // Somebody else's doing is a drain: its last checkpoint is on its way.
                worker.stopping = true;
                let note = format!("the pod {} on {} is being deleted", pod.name, worker.node);
                self.event(false, "Draining", note, now);
            }
        }
        if let Some((exit_code, how)) = &pod.ended {
            let happenings = self.tracker.exited(&pod.name, *exit_code, how, now);
            self.close(&pod.name);
            if happenings.is_empty() && how.contains(OUT_OF_MEMORY) {
                // It was lost as its stream ended, which says nothing of the cause.
                self.tracker.explained(&pod.name, how);
                let on = pod.node.as_deref().unwrap_or_default();
                self.event(true, "WorkerLost", format!("{} on {on}: {how}", pod.name), now);
            }
            self.tell(happenings, now);
            // One that was fenced, or had no leader for too long, says nothing of its node.
            if *exit_code != Some(TRY_AGAIN) {
                self.back_off(&pod.name, how, now);
            }
            self.pods.remove(&pod.name);
            self.pods.see(pod.clone(), now);
        } else if self.tracker.observed.worker(&pod.name).is_some_and(Worker::is_dead) {
            self.end_unseen(pod, now);
        } else if let Some(trouble) = &pod.trouble {
            self.cannot_start(pod, trouble, now);
        } else if pod.started && !self.pods.is_linked(&pod.name) {
            self.dial(pod, false);
        }
    }

    /// Its worker was given up before this pod was seen, or the pod took the name of one that had
    /// gone: nobody else will end it.
    fn end_unseen(&mut self, pod: &WorkerPod, now: Millis) {
        let asked = self.pods.known(&pod.name, |known| {
            let asked = known.deleted_at.is_some() || pod.deletion.is_some();
            known.deleted_at.get_or_insert(now);
            asked
        });
        if asked != Some(true) {
            self.send_deletion(pod, self.place.patience().kill_grace_s);
        }
    }

    /// A worker that this leader did not start: of one before it.
    fn adopt(&mut self, pod: &WorkerPod, now: Millis) -> bool {
        let Some(node) = pod.node.as_deref().or(pod.meant_for.as_deref()) else { return false };
        let record = &mut self.tracker.observed.record;
        if let Some((_, slot)) = attempt_and_slot(&pod.name) {
            record.births = record.births.max(slot.saturating_add(1));
        }
        let in_gang = record.gang.as_ref().is_some_and(|gang| {
            gang.ended.is_none() && gang.has(&pod.name)
        });
        let gang = self.tracker.observed.record.gang.as_ref();
        if gang.is_some_and(|gang| self.is_another(gang, pod)) {
            self.note(true, format!("{} is not the pod that had this name", pod.name));
            self.send_deletion(pod, 0);
            return false;
        }
        let record = &self.tracker.observed.record;
        // What ended while nobody led counts if it was a member: its exit code may be the job's.
        if pod.ended.is_some() && (!in_gang || record.outcome.is_some()) {
            return false;
        }
        let slot_of = |name: &str| attempt_and_slot(name).map_or(u32::MAX, |(_, slot)| slot);
        let (worker, slot) = (Worker::starting(&pod.name, node, now), slot_of(&pod.name));
        let workers = &mut self.tracker.observed.workers;
        let at = workers.partition_point(|worker| slot_of(&worker.name) <= slot);
        workers.insert(at, worker);
        self.pods.with(&pod.name, |known| known.trained = in_gang);
        true
    }

    fn dial(&mut self, pod: &WorkerPod, again: bool) {
        let Some(address) = address(pod) else { return };
        let connected = self.tracker.observed.worker(&pod.name).is_none_or(|worker| {
            let starting = matches!(worker.state, WorkerState::Starting { .. });
            worker.is_dead() || (!again && !starting)
        });
        if connected {
            return;
        }
        self.pods.with(&pod.name, |known| (known.redial, known.linked) = (None, true));
        let identity = PodIdentity {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            node: pod.node.as_deref().unwrap_or_default().to_string(),
        };
        let (name, pod) = (pod.name.clone(), identity);
        self.effects.push(Effect::Link(Link::Dial { name, address, pod, again }));
    }

    /// The kubelet says that the container will not start: its node is avoided.
    fn cannot_start(&mut self, pod: &WorkerPod, trouble: &str, now: Millis) {
        let Some(worker) = self.tracker.observed.worker(&pod.name) else { return };
        if !matches!(worker.state, WorkerState::Starting { .. }) || worker.stopping {
            return;
        }
        let node = worker.node.clone();
        self.blame(&node, trouble, now);
        let happenings = self.tracker.silent(&pod.name, trouble);
        self.tell(happenings, now);
    }

    /// Clocks of pods: images that take their time, dials, deletions.
    pub(super) fn look_after(&mut self, now: Millis) {
        self.settle_doubts(now);
        self.wait_for_images(now);
        self.dismiss();
        for name in self.pods.take_due(now) {
            let Some(pod) = self.pods.facts(&name).cloned() else {
                // It is gone, or was never seen: nothing of it is due.
                self.pods.known(&name, |known| {
                    (known.redial, known.delete, known.deleted_at) = (None, None, None);
                });
                continue;
            };
            self.look_at(&pod, now);
        }
    }

    fn look_at(&mut self, pod: &WorkerPod, now: Millis) {
        let name = &pod.name;
        let redial = self.pods.known(name, |known| known.redial.take_if(|(at, _)| now >= *at));
        if let Some(Some((_, again))) = redial
            && !self.pods.is_linked(name)
            && pod.ended.is_none()
        {
            self.dial(pod, again);
        }
        let delete = self.pods.known(name, |known| known.delete.take_if(|(at, _)| now >= *at));
        if let Some(Some((_, grace_s))) = delete {
            self.send_deletion(pod, grace_s);
        }
        let gone = self.pods.known(name, |known| {
            known.mount_told |= now >= known.since + MOUNT_TOLD;
            let gone = known.gone_at().is_some_and(|at| now >= at);
            let heard = known.linked && known.silent_at.is_none();
            if gone && heard {
                // It is there and says so: it is asked again later.
                known.deleted_at = Some(now);
            }
            known.forced |= gone && !heard;
            gone && !heard
        });
        if gone == Some(true) {
            if let Some(node) = &pod.node {
                self.avoid(node, now + SILENT_AVOID, now);
            }
            self.note(true, format!("{name} is deleted by force: its node is silent"));
            self.send_deletion(pod, 0);
        }
    }

    /// A DELETE that nothing waits for.
    pub(super) fn send_deletion(&mut self, pod: &WorkerPod, grace_s: u32) {
        let (namespace, name) = (pod.namespace.clone(), pod.name.clone());
        let write = Write::DeletePod { namespace, name, uid: pod.uid.clone(), grace_s };
        self.send_aside(Origin::Deletion(pod.name.clone()), write);
    }

    /// A worker whose pod somebody deletes waits until others need nothing of it any more: those of
    /// the next gang have made a step, or no gang can be formed before it goes, and the storage has
    /// all that it holds.
    fn dismiss(&mut self) {
        let observed = &self.tracker.observed;
        let gang = observed.gang();
        let stored = observed.stored.as_ref().map_or(0, |stored| stored.step);
        let waits = gang.is_none() && self.tracker.waits_for_nodes();
        let stepped = gang.is_some_and(|gang| gang.stepped);
        let leaves = |worker: &&Worker| {
            let idle = matches!(worker.state, WorkerState::Idle | WorkerState::Left { .. });
            let is_saved = worker.held.iter().all(|held| held.step <= stored);
            let needed = gang.is_some_and(|gang| gang.has(&worker.name));
            worker.stopping && idle && !needed && (stepped || (waits && is_saved))
        };
        let attempt = observed.record.attempt;
        let leaving = observed.workers.iter().filter(leaves).map(|worker| worker.name.clone());
        for name in leaving.collect::<Vec<_>>() {
            if !self.pods.dismiss(&name) {
                self.send(&name, attempt, Down::Shutdown);
            }
        }
    }

    /// A worker whose name another pod has will never be there; the next one has another name.
    fn settle_doubts(&mut self, now: Millis) {
        for (name, since) in std::mem::take(&mut self.pods.doubts) {
            if self.pods.facts(&name).is_some() {
                continue;
            }
            if now < since + DOUBT_MAX {
                self.pods.doubts.push((name, since));
                continue;
            }
            // Neither a loss nor a failed start: nothing of it has ever been.
            self.note(false, format!("another pod has the name {name}"));
            drop(self.tracker.silent(&name, "another pod has its name"));
            drop(self.tracker.exited(&name, None, "another pod has its name", now));
            self.pods.remove(&name);
            self.dirty = true;
        }
    }

    /// A bound pod whose image is on its way has not begun to be late. One that is not bound waits
    /// for a volume, a gate or others' pods to go: the job is pending, and another node is tried.
    fn wait_for_images(&mut self, now: Millis) {
        let pods = &mut self.pods;
        for worker in &mut self.tracker.observed.workers {
            let WorkerState::Starting { since } = &mut worker.state else { continue };
            let Some(known) = pods.known.get(&worker.name) else { continue };
            worker.unplaced = known.facts.as_ref().is_some_and(|facts| facts.node.is_none());
            let waits = |of: &&WorkerPod| {
                of.node.is_some() && !of.started && of.trouble.is_none()
            };
            let Some(pod) = known.facts.as_ref().filter(waits) else { continue };
            let (seen, mounting) = (known.since, pod.mounting);
            if mounting && now >= seen + MOUNT_TOLD && !known.mount_told {
                let message = unmounted(&pod.name);
                pods.with(&worker.name, |known| known.mount_told = true);
                pods.troubles.insert(worker.node.clone(), message);
                self.dirty = true;
            }
            if now < seen + if mounting { MOUNT_MAX } else { IMAGE_MAX } {
                *since = now;
            }
        }
    }

    /// A suspended job has no pods, ended ones neither.
    pub(super) fn delete_ended(&mut self) {
        for pod in std::mem::take(&mut self.pods.ended) {
            self.send_deletion(&pod, 0);
        }
    }

    /// A worker that did not come up in time speaks against its node. One that is ended earlier is
    /// not needed any more, which is none of its node's doing.
    pub(super) fn gave_up(&mut self, pod: &WorkerPod, now: Millis) {
        let observed = &self.tracker.observed;
        let Some(worker) = observed.worker(&pod.name) else { return };
        let limit = observed.wanted.gang_timeout;
        if matches!(worker.state, WorkerState::Starting { since } if now >= since + limit) {
            let node = worker.node.clone();
            let refused = self.pods.known.get(&pod.name).and_then(|of| of.refused.clone());
            let mounts = pod.mounting.then(|| unmounted(&pod.name));
            let why = pod.unschedulable.clone().or(refused).or(mounts);
            let why = why.unwrap_or_else(|| "it did not begin in time".to_string());
            self.blame(&node, &format!("its worker was not reached: {why}"), now);
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
