//! The world goes on by itself: an API server that answers, kubelets and workers that do what they
//! are told. A view that was wrong is repaired here as a watch repairs it: by a list.

use super::{World, hello, step_report};
use moejob_plan::allocate::Granted;
use moejob_plan::lead::{
    Batch, Effect, Ending, Event, Link, Said, WorkerPod, Write, WriteError, WriteErrorKind, owner,
};
use moejob_plan::observed::{Node, Outcome};
use moejob_protocol::message::{Down, LeftReason, Up};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Between two looks of whatever lives.
const PACE: u64 = 500;
/// More writes than that are a loop that writes and writes: one a second for each of some pods.
const WRITES_MAX: usize = 8;
const NODES: usize = 8;
/// Who has made steps for so long goes on making them.
const STEADY: u64 = 90_000;

/// The pods of a moment.
pub type View = BTreeMap<String, WorkerPod>;

impl World {
    /// It happens, and the loop is not told.
    pub fn run_unseen(&mut self, words: &[&str]) {
        self.unseen = true;
        self.happen(words);
        self.unseen = false;
        self.turn();
    }

    pub fn view(&self) -> View {
        self.pods.clone()
    }

    /// Another leader, to which a list has told the pods of an earlier moment. What the one before
    /// had sent may have landed.
    pub fn hand_over(&mut self, term: u64, view: &View, landed: bool) {
        for batch in std::mem::take(&mut self.under_way) {
            for (_, write) in batch.writes.into_iter().filter(|_| landed) {
                // Whatever became of it, nobody hears it any more.
                let _ = self.land(&write, &mut Vec::new());
            }
        }
        self.adopt(term);
        for pod in view.values().cloned().collect::<Vec<_>>() {
            self.on(Event::Pod(Box::new(pod)));
        }
    }

    /// A new list: the job, all pods, and that the others are gone.
    fn list(&mut self) {
        self.see();
        let workers = self.job().tracker().observed.workers.clone();
        for worker in workers {
            if !self.pods.contains_key(&worker.name) {
                self.on(Event::PodGone(worker.name));
            }
        }
        for pod in self.pods.values().cloned().collect::<Vec<_>>() {
            self.on(Event::Pod(Box::new(pod)));
        }
    }

    /// What becomes of the API server's objects by this write.
    fn land(&mut self, write: &Write, told: &mut Vec<Event>) -> Result<Option<String>, WriteError> {
        match write {
            Write::CreatePod { birth, template } => {
                if self.pods.contains_key(&birth.name) {
                    let (kind, message) = (WriteErrorKind::Exists, "it is there".to_string());
                    return Err(WriteError { kind, message });
                }
                let pod = WorkerPod {
                    namespace: "team".into(),
                    name: birth.name.clone(),
                    uid: format!("uid-{}", birth.name),
                    owner: owner("team", "uid"),
                    node: Some(Arc::from(birth.node.as_str())),
                    meant_for: Some(birth.node.clone()),
                    address: Some("10.0.0.9".to_string()),
                    image: Some(Arc::from(template.around.image.as_str())),
                    started: true,
                    ..WorkerPod::default()
                };
                self.pods.insert(birth.name.clone(), pod.clone());
                told.push(Event::Pod(Box::new(pod)));
                Ok(None)
            }
            Write::DeletePod { name, uid, .. } => {
                if self.pods.get(name).is_some_and(|pod| pod.uid == *uid) {
                    self.pods.remove(name);
                    told.push(Event::PodGone(name.clone()));
                }
                Ok(None)
            }
            Write::Status { status, .. } => {
                self.version += 1;
                self.seen.status = serde_json::to_value(status).expect("a status");
                Ok(Some(self.version.to_string()))
            }
            Write::Ensure { .. } | Write::DeleteJob(_) | Write::Event { .. } => Ok(None),
        }
    }

    fn answer_all(&mut self) -> usize {
        let mut count = 0;
        while let Some(Batch { aside, writes }) = self.under_way.pop_front() {
            let (mut results, mut told) = (Vec::new(), Vec::new());
            for (origin, write) in writes {
                count += 1;
                let written = self.land(&write, &mut told);
                results.push((origin, written));
            }
            self.on(Event::Done { aside, results });
            told.into_iter().for_each(|event| self.on(event));
        }
        count
    }

    /// The list is right again, there are nodes enough, and nothing fails any more. Whether the job
    /// trains after so many seconds, or is over; else why not.
    ///
    /// # Errors
    /// What it does in place of that.
    pub fn live(&mut self, seconds: u64) -> Result<(), String> {
        let node = |at| Node::good(&format!("n{at}"));
        let nodes: Vec<Node> = (0..NODES).map(node).collect();
        self.list();
        self.on(Event::Granted(Granted { nodes, ..Granted::default() }));
        let (mut away, mut step, mut writes) = (BTreeSet::new(), 1_000, 0);
        let began = self.now;
        let (mut since, mut last) = (None, 0);
        while self.now < began + seconds * 1_000 {
            self.now += PACE;
            since = since.filter(|_| last + 10 * PACE > self.now);
            if since.is_some_and(|since| self.now > since + STEADY) {
                break;
            }
            let now = self.now;
            writes += self.answer_all();
            for effect in self.job().turn(now).effects {
                self.obey(effect, &mut away);
            }
            if let Some(name) = self.first_of_gang(&away) {
                (step, last) = (step + 1, now);
                since.get_or_insert(now);
                let attempt = self.members[&name].0;
                self.hear(&name, attempt, step_report(step, attempt));
            }
        }
        let seconds = (self.now - began) / 1_000;
        if writes > WRITES_MAX * seconds as usize {
            return Err(format!("{writes} writes within {seconds} s"));
        }
        let over = self.job().fence().is_some() || self.job().job().is_none();
        let outcome = self.job().tracker().observed.record.outcome.clone();
        let ended = outcome.is_some_and(|of| of != Outcome::Suspended);
        let suspended = self.seen.spec["suspend"] == true;
        match over || ended || suspended || last + 10 * PACE > self.now {
            true => Ok(()),
            false => Err(format!("no steps: {:#?}", self.job().tracker().observed)),
        }
    }

    /// Rank 0, if all members of the gang are there and take part.
    fn first_of_gang(&mut self, away: &BTreeSet<String>) -> Option<String> {
        let gang = self.job().tracker().observed.gang()?.clone();
        let takes_part = |name: &String| {
            let alive = self.pods.get(name).is_some_and(|pod| pod.ended.is_none());
            let told = self.members.get(name).is_some_and(|of| of.0 == gang.attempt);
            alive && told && !away.contains(name)
        };
        let names = || gang.members.iter().map(|member| &member.worker);
        names().all(takes_part).then(|| names().next().cloned()).flatten()
    }

    fn obey(&mut self, effect: Effect, away: &mut BTreeSet<String>) {
        let alive = |world: &World, name: &str| {
            world.pods.get(name).is_some_and(|pod| pod.ended.is_none() && pod.trouble.is_none())
        };
        match effect {
            Effect::Link(Link::Dial { name, again, .. }) => {
                let said = match alive(self, &name) {
                    true => {
                        let known = self.members.get(&name).cloned().unwrap_or_default();
                        let (attempt, digest, rank) = known;
                        let rank = (attempt > 0 && !away.contains(&name)).then_some(rank);
                        Said::Opened(hello(&name, (attempt, &digest, rank), &[]))
                    }
                    false => {
                        let why = if again { Ending::Refused } else { Ending::Broken };
                        Said::Ended { why, reason: "nobody is there".to_string() }
                    }
                };
                self.on(Event::Stream { name, said });
            }
            Effect::Link(Link::Configure { name, rank, config }) => {
                away.remove(&name);
                self.members.insert(name, (config.attempt, config.digest.clone(), rank));
            }
            Effect::Link(Link::Send { name, attempt, body: Down::Leave { .. } }) => {
                if alive(self, &name) {
                    away.insert(name.clone());
                    let left = Up::Left { reason: LeftReason::Asked, held: Vec::new() };
                    self.hear(&name, attempt, left);
                }
            }
            Effect::Link(Link::Send { name, attempt, body: Down::Request(request) }) => {
                if alive(self, &name) && request.stop_after_this_step {
                    away.insert(name.clone());
                    let reason = LeftReason::Stopped { step: 1_000 };
                    self.hear(&name, attempt, Up::Left { reason, held: Vec::new() });
                }
            }
            Effect::Link(Link::Send { name, body: Down::Shutdown, .. }) => {
                if let Some(pod) = self.pods.get_mut(&name).filter(|pod| pod.ended.is_none()) {
                    pod.ended = Some((Some(0), "exit code 0".to_string()));
                    let pod = pod.clone();
                    self.on(Event::Pod(Box::new(pod)));
                }
            }
            Effect::Write(batch) => self.under_way.push_back(batch),
            _ => {}
        }
    }
}
