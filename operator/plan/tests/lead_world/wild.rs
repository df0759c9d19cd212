//! A world in which anything may happen at any moment, told late or never: writes that land and are
//! not acknowledged, answers in any order, streams that break, leaders that take over with an old
//! view and another clock. What must hold at every moment is looked at with every effect.

mod calm;

use super::{START, World, hello, step_report};
use crate::said::{of_kind, warning};
use moejob_plan::allocate::Granted;
use moejob_plan::lead::{
    Batch, Effect, Ending, Event, JobSeen, Link, Origin, Said, WorkerPod, Write,
    WriteError, WriteErrorKind, Written, owner,
};
use moejob_plan::observed::{Millis, Node};
use moejob_protocol::message::{Down, Heartbeat, LeftReason, Phase, Up};
use moejob_protocol::report::EventKind;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Nodes of the cluster, of which a grant has some.
const NODES: usize = 8;

/// What the watches tell, in this order.
#[derive(Clone)]
enum Told {
    Pod(WorkerPod),
    Gone(String),
    Spec(Box<JobSeen>),
}

/// The process in a pod.
#[derive(Clone, Default)]
struct Process {
    attempt: u32,
    digest: String,
    /// None: it takes no part.
    rank: Option<u32>,
    first: bool,
}

pub struct Wild {
    world: World,
    log: Vec<Told>,
    /// How much of the log this leader has been told.
    told: usize,
    /// Asked for: the pod's name and uid, and whether it was reached before.
    dials: Vec<(String, String, bool)>,
    /// Streams that are up: the pod's name and uid.
    open: BTreeMap<String, String>,
    /// On their way to the leader.
    said: VecDeque<(String, Said)>,
    /// By the uid of its pod.
    running: BTreeMap<String, Process>,
    /// Nodes that nothing is heard of.
    cut: BTreeSet<String>,
    /// Writes of leaders before this one that have not come to an end.
    late: Vec<Batch>,
    /// Digests by attempt, as they were configured by whichever leader.
    configured: BTreeMap<u32, String>,
    /// Members of all gangs that were ever recorded.
    named: BTreeSet<String>,
    /// This leader knows that the policy is there.
    shut: bool,
    /// Of pods so far.
    uids: u32,
    step: u64,
    writes: usize,
}

impl Wild {
    pub fn new(settings: &[&str]) -> Wild {
        let mut world = World::default();
        world.seen.spec["recovery"] = json!({ "maxRestarts": 100_000 });
        world.seen.spec["training"]["steps"] = json!(1 << 30);
        settings.iter().for_each(|setting| world.set(setting));
        world.adopt(1);
        let first = Told::Spec(Box::new(world.seen.clone()));
        let mut wild = Wild {
            world,
            log: vec![first],
            told: 1,
            dials: Vec::new(),
            open: BTreeMap::new(),
            said: VecDeque::new(),
            running: BTreeMap::new(),
            cut: BTreeSet::new(),
            late: Vec::new(),
            configured: BTreeMap::new(),
            named: BTreeSet::new(),
            shut: false,
            uids: 0,
            step: 0,
            writes: 0,
        };
        wild.turn();
        wild
    }

    fn on(&mut self, event: Event) {
        let now = self.world.now;
        if std::env::var_os("MOEJOB_STORY").is_some() {
            eprintln!("{} {:.600}", now - START, format!("{event:?}"));
        }
        self.world.job().on(event, now);
    }

    /// The loop decides, and says all of it at once.
    pub fn turn(&mut self) {
        let now = self.world.now;
        let first = self.world.job().turn(now);
        let second = self.world.job().turn(now);
        let (said, again) = (&first.effects, &second.effects);
        // It may tell again why it waits.
        let silent = again.iter().all(|effect| matches!(effect, Effect::Note { .. }));
        assert!(silent, "asked again at once: {again:?}, after {said:?}");
        assert!(second.due.is_none_or(|at| at > now), "due in the past: {:?}", second.due);
        first.effects.into_iter().for_each(|effect| self.obey(effect));
        let waited_for = self.world.under_way.iter().filter(|batch| !batch.aside).count();
        assert!(waited_for <= 1, "{waited_for} batches that the plan waits for");
        let is_status = |origin: &Origin| matches!(origin, Origin::Status | Origin::Recorded(_));
        let writes = self.world.under_way.iter().flat_map(|batch| &batch.writes);
        let statuses = writes.filter(|(origin, _)| is_status(origin)).count();
        assert!(statuses <= 1, "{statuses} statuses are being written");
    }

    fn obey(&mut self, effect: Effect) {
        if std::env::var_os("MOEJOB_STORY").is_some() {
            eprintln!("    {:.600}", format!("{effect:?}"));
        }
        match effect {
            Effect::Link(Link::Dial { name, pod, again, .. }) => {
                self.open.remove(&name);
                self.dials.push((name, pod.uid, again));
            }
            Effect::Link(Link::Close { name }) => {
                self.open.remove(&name);
                self.dials.retain(|(of, ..)| *of != name);
            }
            Effect::Link(Link::Configure { name, rank, config }) => {
                let record: Value = self.record();
                let (attempt, digest) = (config.attempt, config.digest.clone());
                assert_eq!(record["attempt"], json!(attempt), "{name} is configured: {record}");
                assert_eq!(record["gang"]["digest"], json!(digest), "of another gang");
                let known = self.configured.entry(attempt).or_insert_with(|| digest.clone());
                assert_eq!(*known, digest, "attempt {attempt} has begun twice");
                if let Some(process) = self.process(&name) {
                    *process = Process { attempt, digest, rank: Some(rank), first: rank == 0 };
                }
            }
            Effect::Link(Link::Send { name, attempt, body }) => self.order(&name, attempt, &body),
            Effect::Write(batch) => {
                let event = |(origin, _): &(Origin, Write)| matches!(origin, Origin::Event);
                // Nothing follows of how an event was written.
                if batch.writes.iter().all(event) {
                    return;
                }
                for (_, write) in &batch.writes {
                    if let Write::CreatePod { birth, .. } = write {
                        assert!(self.shut, "{} is made before the policy", birth.name);
                        assert!(!self.named.contains(&birth.name), "{} is used twice", birth.name);
                    }
                }
                self.writes += batch.writes.len();
                self.world.under_way.push_back(batch);
            }
            _ => {}
        }
    }

    /// The part of the record that version 1 has, as the API server has it.
    fn record(&self) -> Value {
        let text = self.world.seen.status["record"].as_str().unwrap_or_default();
        serde_json::from_str(text).unwrap_or_default()
    }

    /// What is at the other end of an open stream.
    fn process(&mut self, name: &str) -> Option<&mut Process> {
        let uid = self.open.get(name)?;
        let pod = self.world.pods.get(name).filter(|pod| pod.uid == *uid)?;
        if pod.node.as_deref().is_some_and(|node| self.cut.contains(node)) {
            return None;
        }
        self.running.get_mut(uid)
    }

    fn order(&mut self, name: &str, attempt: u32, body: &Down) {
        let Some(process) = self.process(name) else { return };
        let (of, takes_part) = (process.attempt, process.rank.is_some());
        let reason = match body {
            Down::Leave { .. } if of == attempt && takes_part => LeftReason::Asked,
            Down::Request(request) if of == attempt && takes_part => {
                if !request.stop_after_this_step {
                    return;
                }
                LeftReason::Stopped { step: self.step }
            }
            Down::Shutdown => {
                let uid = self.open[name].clone();
                return self.end(&uid, Some(0));
            }
            _ => return,
        };
        self.leave(name, reason);
    }

    fn leave(&mut self, name: &str, reason: LeftReason) {
        let Some(process) = self.process(name) else { return };
        process.rank = None;
        let attempt = process.attempt;
        let up = Up::Left { reason, held: Vec::new() };
        self.said.push_back((name.to_string(), Said::Up { attempt, up }));
    }

    /// The process ends, and its stream with it.
    fn end(&mut self, uid: &str, code: Option<i32>) {
        if self.running.remove(uid).is_none() {
            return;
        }
        let Some(pod) = self.world.pods.values_mut().find(|pod| pod.uid == uid) else { return };
        let how = code.map_or("killed by signal 9".to_string(), |code| format!("exit code {code}"));
        pod.ended = Some((code, how));
        let pod = pod.clone();
        self.log.push(Told::Pod(pod.clone()));
        if !pod.node.as_deref().is_some_and(|node| self.cut.contains(node)) {
            self.part(&pod.name, Ending::Broken);
        }
    }

    /// Its stream ends; what it said before is heard before.
    fn part(&mut self, name: &str, why: Ending) {
        if self.open.remove(name).is_some() {
            let reason = format!("{why:?}");
            self.said.push_back((name.to_string(), Said::Ended { why, reason }));
        }
    }

    /// What becomes of the API server's objects.
    fn land(&mut self, write: &Write) -> Written {
        let error = |kind: WriteErrorKind| WriteError { kind, message: format!("{kind:?}") };
        match write {
            Write::CreatePod { birth, template } => {
                if self.world.pods.contains_key(&birth.name) {
                    return Err(error(WriteErrorKind::Exists));
                }
                self.uids += 1;
                let pod = WorkerPod {
                    namespace: "team".into(),
                    name: birth.name.clone(),
                    uid: format!("uid-{}", self.uids),
                    owner: owner("team", "uid"),
                    meant_for: Some(birth.node.clone()),
                    image: Some(Arc::from(template.around.image.as_str())),
                    ..WorkerPod::default()
                };
                self.world.pods.insert(birth.name.clone(), pod.clone());
                self.log.push(Told::Pod(pod));
            }
            Write::DeletePod { name, uid, grace_s, .. } => {
                self.delete(name, uid, u64::from(*grace_s) * 1_000);
            }
            Write::Status { status, resource_version, .. } => {
                if *resource_version != self.world.seen.resource_version {
                    return Err(error(WriteErrorKind::Conflict));
                }
                self.world.seen.status = serde_json::to_value(status).expect("a status");
                self.change();
                let record = self.record();
                for member in record["gang"]["members"].as_array().into_iter().flatten() {
                    self.named.extend(member[0].as_str().map(str::to_string));
                }
                return Ok(Some(self.world.seen.resource_version.clone()));
            }
            Write::Ensure { .. } | Write::DeleteJob(_) | Write::Event { .. } => {}
        }
        Ok(None)
    }

    /// The job's object is another.
    fn change(&mut self) {
        self.world.version += 1;
        self.world.seen.resource_version = self.world.version.to_string();
        self.log.push(Told::Spec(Box::new(self.world.seen.clone())));
    }

    fn delete(&mut self, name: &str, uid: &str, grace: Millis) {
        let now = self.world.now;
        let Some(pod) = self.world.pods.get_mut(name).filter(|pod| pod.uid == uid) else { return };
        if grace > 0 && pod.ended.is_none() && pod.node.is_some() {
            let at = pod.deletion.map_or(now + grace, |at| at.min(now + grace));
            pod.deletion = Some(at);
            let pod = pod.clone();
            return self.log.push(Told::Pod(pod));
        }
        self.world.pods.remove(name);
        self.running.remove(uid);
        self.part(name, Ending::Broken);
        self.log.push(Told::Gone(name.to_string()));
    }

    /// A batch comes to its end. `luck` decides what of it.
    fn answer(&mut self, which: usize, luck: u32) {
        let count = self.world.under_way.len();
        if count == 0 {
            return;
        }
        let Batch { aside, writes } = self.world.under_way.remove(which % count).expect("there");
        let mut results = Vec::new();
        for (index, (origin, write)) in (0..).zip(writes) {
            let written = match (luck >> (index % 7)) % 32 {
                0 => {
                    // It is done, and nobody hears of it.
                    drop(self.land(&write));
                    Err(WriteErrorKind::Slow)
                }
                1 => Err(WriteErrorKind::Slow),
                2 => Err(WriteErrorKind::Refused),
                3 => Err(WriteErrorKind::Forbidden),
                4 => Err(WriteErrorKind::Other),
                5 if matches!(write, Write::Ensure { .. }) => Err(WriteErrorKind::NotOurs),
                _ => Ok(()),
            };
            let written = match written {
                Ok(()) => self.land(&write),
                Err(kind) => Err(WriteError { kind, message: format!("{kind:?}") }),
            };
            self.shut |= matches!(origin, Origin::Policy(_)) && written.is_ok();
            results.push((origin, written));
        }
        self.on(Event::Done { aside, results });
    }

    /// The next thing that a watch tells; or it is lost on the way.
    fn tell(&mut self, lost: bool) {
        let Some(next) = self.log.get(self.told).cloned() else { return };
        self.told += 1;
        match next {
            // The job's own watch loses none here: a list finds what it has lost.
            Told::Spec(seen) => self.see(seen),
            _ if lost => {}
            Told::Pod(pod) => self.on(Event::Pod(Box::new(pod))),
            Told::Gone(name) => self.on(Event::PodGone(name)),
        }
    }

    /// As the controller does.
    fn see(&mut self, seen: Box<JobSeen>) {
        match self.world.job().is_to_be_taken_anew(&seen) {
            true => {
                let term = self.world.job().term();
                self.begin(*seen, term);
            }
            false => self.on(Event::Spec(seen)),
        }
    }

    fn connect(&mut self, which: usize, luck: u32) {
        if self.dials.is_empty() {
            return;
        }
        let (name, uid, again) = self.dials.remove(which % self.dials.len());
        let cut = |wild: &Wild| {
            let node = wild.world.pods.get(&name).and_then(|pod| pod.node.clone());
            node.is_some_and(|node| wild.cut.contains(&*node))
        };
        let there = self.world.pods.get(&name).is_some_and(|pod| pod.uid == uid);
        let process = self.running.get(&uid).filter(|_| there && !cut(self)).cloned();
        let ended = |why: Ending| Said::Ended { why, reason: format!("{why:?}") };
        let said = match (process, luck % 16) {
            (Some(_), 0) => ended(Ending::Broken),
            (Some(_), 1) => ended(Ending::Unjudged),
            (Some(process), _) => {
                self.open.insert(name.clone(), uid);
                let Process { attempt, digest, rank, .. } = process;
                Said::Opened(hello(&name, (attempt, &digest, rank), &[]))
            }
            (None, luck) if again && luck % 2 == 0 => ended(Ending::Refused),
            (None, _) => ended(Ending::Broken),
        };
        self.said.push_back((name, said));
    }

    fn hear(&mut self) {
        if let Some((name, said)) = self.said.pop_front() {
            self.on(Event::Stream { name, said });
        }
    }

    /// Something of the pod goes on: it is bound, its container starts, its deletion is complete.
    fn kubelet(&mut self, which: usize) {
        let count = self.world.pods.len();
        if count == 0 {
            return;
        }
        let pod = self.world.pods.values_mut().nth(which % count).expect("there");
        let (name, uid) = (pod.name.clone(), pod.uid.clone());
        match (&pod.node, pod.deletion) {
            (Some(node), _) if self.cut.contains(&**node) => return,
            (_, Some(_)) => return self.delete(&name, &uid, 0),
            (None, _) => pod.node = pod.meant_for.as_deref().map(Arc::from),
            (Some(_), None) if pod.started || pod.trouble.is_some() => return,
            (Some(_), None) => {
                pod.started = true;
                pod.address = Some(format!("10.0.{}.1", uid.trim_start_matches("uid-")));
                self.running.insert(uid, Process::default());
            }
        }
        let pod = pod.clone();
        self.log.push(Told::Pod(pod));
    }

    /// The members of a gang make a step, if all of them are there.
    fn train(&mut self) -> bool {
        let record = self.record();
        let Some(members) = record["gang"]["members"].as_array() else { return false };
        let digest = record["gang"]["digest"].as_str().unwrap_or_default();
        let takes_part = |member: &Value| {
            let pod = self.world.pods.get(member[0].as_str().unwrap_or_default());
            let process = pod.and_then(|pod| self.running.get(&pod.uid));
            process.is_some_and(|of| of.digest == digest && of.rank.is_some())
        };
        if !members.iter().all(takes_part) || self.world.job().fence().is_some() {
            return false;
        }
        self.step += 1;
        let first = members[0][0].as_str().unwrap_or_default().to_string();
        let attempt = record["attempt"].as_u64().unwrap_or(0) as u32;
        let up = step_report(self.step, attempt);
        if self.process(&first).is_none() {
            return false;
        }
        self.said.push_back((first, Said::Up { attempt, up }));
        true
    }

    /// One that takes part in a gang of which another has gone notices it.
    fn notice(&mut self) {
        let record = self.record();
        let digest = record["gang"]["digest"].as_str().unwrap_or_default().to_string();
        let members = record["gang"]["members"].as_array().cloned().unwrap_or_default();
        let there = |member: &Value| {
            let pod = self.world.pods.get(member[0].as_str().unwrap_or_default());
            pod.and_then(|pod| self.running.get(&pod.uid)).is_some_and(|of| of.rank.is_some())
        };
        let Some(lost) = members.iter().position(|member| !there(member)) else { return };
        let part = |(name, uid): (&String, &String)| {
            let process = self.running.get(uid)?;
            (process.digest == digest && process.rank.is_some()).then(|| name.clone())
        };
        let names: Vec<String> = self.open.iter().filter_map(part).collect();
        for name in names {
            self.leave(&name, LeftReason::PeerLost { rank: lost as u32 });
        }
    }

    /// Time goes by. Whoever is heard says that it lives.
    fn pass(&mut self, millis: Millis) {
        self.world.now += millis;
        for (name, uid) in self.open.clone() {
            let Some(process) = self.process(&name) else {
                if millis > 3_000 && self.running.contains_key(&uid) {
                    self.said.push_back((name, Said::Silent));
                }
                continue;
            };
            let (attempt, rank) = (process.attempt, process.rank);
            let phase = if rank.is_some() { Phase::Training } else { Phase::Idle };
            let beat = Heartbeat {
                phase,
                step: self.step,
                collective: self.step,
                held: Vec::new(),
                loading: None,
            };
            let up = Up::Heartbeat(beat);
            self.on(Event::Stream { name, said: Said::Up { attempt, up } });
        }
    }

    /// Another leader. It knows the pods as they were `lag` events ago.
    fn hand_over(&mut self, lag: usize, luck: u32) {
        let skew = Millis::from(luck % 7_200) * 1_000;
        self.world.now = match luck % 3 {
            0 => self.world.now,
            1 => self.world.now + skew,
            _ => self.world.now.saturating_sub(skew).max(START),
        };
        let (term, seen) = (self.world.job().term() + 1, self.world.seen.clone());
        // Its view of the job is of the same moment.
        self.told = self.log.len().saturating_sub(lag).max(1);
        self.begin(seen, term);
    }

    /// A loop that knows nothing yet: what was sent before it may land, and nobody is told.
    fn begin(&mut self, seen: JobSeen, term: u64) {
        self.late.extend(std::mem::take(&mut self.world.under_way));
        (self.dials, self.said, self.shut) = Default::default();
        self.open.clear();
        let (mut pods, mut job) = (BTreeMap::new(), seen);
        for told in &self.log[..self.told] {
            match told {
                Told::Pod(pod) => drop(pods.insert(pod.name.clone(), pod.clone())),
                Told::Gone(name) => drop(pods.remove(name)),
                Told::Spec(seen) => job = (**seen).clone(),
            }
        }
        let now = std::mem::replace(&mut self.world.seen, job);
        self.world.adopt(term);
        self.world.seen = now;
        for pod in pods.into_values() {
            self.on(Event::Pod(Box::new(pod)));
        }
    }

    /// A write of a leader before this one comes to its end after all.
    fn land_late(&mut self, which: usize) {
        if self.late.is_empty() {
            return;
        }
        let batch = self.late.remove(which % self.late.len());
        for (_, write) in batch.writes {
            drop(self.land(&write));
        }
    }

    fn edit(&mut self, luck: u32) {
        let spec = &mut self.world.seen.spec;
        let (a, b) = (1 + luck / 8 % 3, 1 + luck / 32 % 4);
        match luck % 8 {
            0 | 1 => spec["nodes"] = json!({ "min": a.min(b), "max": a.max(b) }),
            2 => spec["nodes"]["spares"] = json!(b % 3),
            3 | 4 => spec["suspend"] = json!(luck / 8 % 2 == 0),
            5 => spec["image"] = json!(format!("image:{a}")),
            // Nobody may change it; the API server's rules are older than ours.
            6 => spec["model"]["preset"] = json!(["tiny", "none-such"][luck as usize / 8 % 2]),
            _ => spec["nodes"]["max"] = json!(0),
        }
        self.world.seen.generation += 1;
        self.change();
    }

    fn grant(&mut self, luck: u32) {
        let granted = (0..NODES).filter(|at| luck >> at & 1 == 1);
        let node = |at: usize| Node {
            freezes: luck >> (at + NODES) & 7 == 7,
            usable: luck >> (at + NODES) & 15 != 5,
            ..Node::good(&format!("n{at}"))
        };
        let nodes = granted.map(node).collect();
        self.on(Event::Granted(Granted { nodes, ..Granted::default() }));
    }

    /// One thing happens, of the kind that the first number says.
    pub fn happen(&mut self, what: u8, luck: u32) {
        let which = luck as usize / 64;
        let uid = |wild: &Wild| wild.running.keys().nth(which % wild.running.len().max(1)).cloned();
        let name = |wild: &Wild| wild.open.keys().nth(which % wild.open.len().max(1)).cloned();
        match what {
            0..20 => self.answer(which, luck % 64 * 3 + 6 * u32::from(luck % 64 > 20)),
            20..36 => (0..=luck % 4).for_each(|_| self.tell(false)),
            36 => self.tell(true),
            37..47 => self.connect(which, luck),
            47..59 => (0..=luck % 4).for_each(|_| self.hear()),
            59..69 => (0..4).for_each(|at| self.kubelet(which + at)),
            69..75 => drop(self.train()),
            75..81 => self.pass(Millis::from(luck % 2_000)),
            81 => self.pass(Millis::from(luck % 100_000)),
            82 => self.pass(Millis::from(luck % 700_000)),
            83 => {
                let code = [Some(0), Some(1), Some(75), Some(101), None, None][luck as usize % 6];
                uid(self).into_iter().for_each(|uid| self.end(&uid, code));
            }
            84 => name(self).into_iter().for_each(|name| self.part(&name, Ending::Broken)),
            85 => {
                let why = [Ending::Refused, Ending::Unspoken][luck as usize % 2];
                name(self).into_iter().for_each(|name| self.part(&name, why));
            }
            86 => {
                let node = format!("n{}", which % NODES);
                if !self.cut.remove(&node) {
                    self.cut.insert(node);
                }
            }
            87 => {
                let pods = &self.world.pods;
                let pod = pods.values().nth(which % pods.len().max(1)).cloned();
                let grace = if luck % 4 == 0 { 0 } else { 30_000 };
                pod.into_iter().for_each(|pod| self.delete(&pod.name, &pod.uid, grace));
            }
            88..91 => self.grant(luck),
            91 | 92 => self.edit(luck),
            93 => self.hand_over(which % 6, luck),
            94 => self.land_late(which),
            95 => self.notice(),
            96 => {
                let Some(name) = name(self) else { return };
                let attempt = self.process(&name).map_or(0, |process| process.attempt);
                let up = match luck % 5 {
                    0 => warning("it is warm here", attempt),
                    1 => Up::Failed { exit_code: 1, message: "no".to_string(), step: None },
                    2 => of_kind(EventKind::CheckpointRefused, attempt, "A", "b"),
                    3 => step_report(u64::from(luck), attempt + luck % 2),
                    _ => {
                        let reason = LeftReason::Error { message: "odd".to_string() };
                        return self.leave(&name, reason);
                    }
                };
                self.said.push_back((name, Said::Up { attempt, up }));
            }
            97 => {
                let count = self.world.pods.len();
                let pods = self.world.pods.values_mut();
                let waits = |pod: &&mut WorkerPod| !pod.started && pod.node.is_some();
                let pod = pods.filter(waits).nth(which % count.max(1));
                if let Some(pod) = pod {
                    pod.trouble = Some("ImagePullBackOff: no".to_string());
                    let pod = pod.clone();
                    self.log.push(Told::Pod(pod));
                }
            }
            98 => {
                let heard = self.world.now;
                self.on(Event::Api { heard });
                self.on(Event::Crowd(which % 2 == 0));
            }
            _ => self.notice(),
        }
        // What comes together is decided on together.
        if luck % 4 != 0 {
            self.turn();
        }
    }
}
