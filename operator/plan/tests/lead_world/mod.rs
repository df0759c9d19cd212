//! What a `JobLoop` is led by and what it does, as words: an API server that answers when it is
//! told to, and pods and workers that are and say what a scenario wants.

pub mod live;
mod show;
pub mod wild;

use moejob_plan::allocate::Granted;
use moejob_plan::pods;
use moejob_plan::lead::{
    Batch, Effect, Ending, Event, JobLoop, JobSeen, Link, Local, Memo, Operator, Origin, Place,
    Said, WorkerPod,
    Write, WriteError, WriteErrorKind, judge, owner,
};
use moejob_plan::observed::{Millis, Node};
use moejob_plan::preflight::{Cache, News};
use crate::said::{committed, device_failed, hello, of_kind, step_report, warning};
use moejob_manifest::profile::Profiles;
use moejob_protocol::message::{Heartbeat, Hello, LeftReason, Phase, Up};
use moejob_protocol::links::Built;
use moejob_protocol::pair::{Meeting, PairAnswer, PairSaid};
use moejob_protocol::preflight::{Answer, Measured};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

const START: Millis = 1_700_000_000_000;

pub struct World {
    pub now: Millis,
    job: Option<JobLoop>,
    seen: JobSeen,
    pods: BTreeMap<String, WorkerPod>,
    /// What the loop has configured of each worker: attempt, digest, rank.
    members: BTreeMap<String, (u32, String, u32)>,
    under_way: VecDeque<Batch>,
    version: u64,
    keyring: String,
    /// Of the operator itself.
    own_image: String,
    profiles: Arc<Profiles>,
    /// Its pods are processes of a machine.
    machine: Option<Box<Local>>,
    /// An answer was given to nothing.
    missed: bool,
    /// Of the turn before.
    effects: usize,
    /// What happens now the loop is not told of.
    unseen: bool,
    /// What jobs have told of nodes that passed.
    passes: Vec<News>,
    /// Notes, decisions and figures since they were shown last.
    told: Vec<String>,
    /// The status as it was shown last.
    shown: Vec<String>,
    granted: Vec<Node>,
    /// Whether each configuration held its worker to the hash of the spec.
    pub hashes: Vec<bool>,
}

impl Default for World {
    fn default() -> World {
        World {
            now: START,
            job: None,
            seen: JobSeen {
                namespace: "team".into(),
                name: "a".into(),
                uid: "uid".into(),
                generation: 1,
                resource_version: "1".into(),
                created_at: START,
                deleted: false,
                spec: spec(),
                unread: None,
                status: Value::Null,
            },
            pods: BTreeMap::new(),
            members: BTreeMap::new(),
            under_way: VecDeque::new(),
            version: 1,
            keyring: "key".into(),
            own_image: "own:1".into(),
            profiles: Arc::default(),
            machine: None,
            missed: false,
            effects: 0,
            unseen: false,
            passes: Vec::new(),
            told: Vec::new(),
            shown: Vec::new(),
            granted: Vec::new(),
            hashes: Vec::new(),
        }
    }
}

fn spec() -> Value {
    json!({
        "nodes": {"min": 1, "max": 2},
        "model": {"preset": "tiny"},
        "data": {"train": {"text": {"paths": ["corpus/*"]}}, "sequenceLength": 8},
        "training": {"steps": 100, "globalBatchSize": 8},
        "checkpoint": {"location": "checkpoints/a"},
        "volumes": [{"mountPath": "checkpoints", "claim": "c"}],
    })
}

impl World {
    pub fn job(&mut self) -> &mut JobLoop {
        self.job.as_mut().expect("there is a job")
    }

    /// A worker says that; the next turn shows what follows.
    pub fn hear(&mut self, name: &str, attempt: u32, up: Up) {
        self.on(Event::Stream { name: name.to_string(), said: Said::Up { attempt, up } });
    }

    /// The job as the API server has it.
    pub fn seen(&mut self) -> &mut JobSeen {
        &mut self.seen
    }

    /// As it was written last.
    pub fn status(&self) -> &Value {
        &self.seen.status
    }

    /// Effects of the turn before, and bytes of the status as it was written last.
    pub fn extent(&self) -> (usize, usize) {
        (self.effects, self.seen.status.to_string().len())
    }

    /// Lets it happen, and asks the loop for its turn.
    pub fn run(&mut self, words: &[&str]) -> String {
        if *words == ["show"] {
            return self.show().iter().map(|line| format!("  {line}\n")).collect();
        }
        self.happen(words);
        let now = self.now;
        if self.job().has_stood_back(now) {
            self.take(1);
        }
        self.turn()
    }

    fn turn(&mut self) -> String {
        let now = self.now;
        let turn = self.job().turn(now);
        self.effects = turn.effects.len();
        let mut lines = Vec::new();
        if std::mem::take(&mut self.missed) {
            lines.push("(nothing of the kind is under way)".to_string());
        }
        for effect in turn.effects {
            self.execute(effect, &mut lines);
        }
        if turn.turned {
            lines.push("allocation is to look again".to_string());
        }
        if let Some(at) = turn.due {
            lines.push(format!("look again in {} ms", at.saturating_sub(now)));
        }
        lines.iter().map(|line| format!("  {line}\n")).collect()
    }

    fn happen(&mut self, words: &[&str]) {
        let now = self.now;
        match words {
            ["job", settings @ ..] => {
                *self = World::default();
                settings.iter().for_each(|setting| self.set(setting));
                self.adopt(1);
            }
            ["machine", settings @ ..] => {
                *self = World::default();
                settings.iter().for_each(|setting| self.set(setting));
                let job = judge("a", &self.seen.spec, Profiles::shipped()).expect("a good job");
                let places = pods::places(&job);
                self.machine = Some(Box::new(Local { job, places, threads: 1 }));
                self.adopt(1);
            }
            // Another job of the same namespace, led by the same operator.
            ["another", settings @ ..] => {
                let passes = std::mem::take(&mut self.passes);
                *self = World { now: self.now, ..World::default() };
                settings.iter().for_each(|setting| self.set(setting));
                self.adopt(1);
                let mut shared = Cache::default();
                passes.into_iter().for_each(|(key, at)| shared.note(key, at));
                let namespace = self.seen.namespace.clone();
                self.on(Event::Passes(shared.of(&namespace)));
            }
            ["stop"] => self.on(Event::Stop),
            // An admin's own profile `box`: processors that some ranks share.
            ["box", settings @ ..] => {
                self.set_box(settings);
                self.on(Event::Profiles(Arc::clone(&self.profiles)));
                self.on(Event::Spec(Box::new(self.seen.clone())));
            }
            ["leader", term, settings @ ..] => {
                settings.iter().for_each(|setting| self.set(setting));
                self.take(term.parse().expect("a term"));
            }
            // It is told of the nodes that the job had before its first turn, as a shell does.
            ["granting", "leader", term, settings @ ..] => {
                settings.iter().for_each(|setting| self.set(setting));
                self.take(term.parse().expect("a term"));
                let (nodes, why) = (self.granted.clone(), String::new());
                self.on(Event::Granted(Granted { nodes, why, ..Granted::default() }));
            }
            ["clock", "back", millis] => {
                self.now -= millis.parse::<Millis>().expect("milliseconds");
            }
            ["edit", settings @ ..] => {
                settings.iter().for_each(|setting| self.set(setting));
                self.seen.generation += 1;
                self.see();
            }
            ["delete"] => {
                self.seen.deleted = true;
                self.see();
            }
            ["grant", nodes @ ..] => {
                // `n1!` is to freeze, `n1-` takes no workers any more, `n1<` is called back, `n1@2`
                // hangs on leaf 2.
                let node = |word: &&str| {
                    let (name, leaf) = word.split_once('@').unwrap_or((*word, "0"));
                    Node {
                        freezes: name.ends_with('!'),
                        usable: !name.ends_with(['-', '<']),
                        called_back: name.ends_with('<'),
                        leaf: leaf.parse().expect("a number"),
                        ..Node::good(name.trim_end_matches(['!', '-', '<']))
                    }
                };
                self.granted = nodes.iter().map(node).collect();
                let (nodes, why) = (self.granted.clone(), String::new());
                self.on(Event::Granted(Granted { nodes, why, ..Granted::default() }));
            }
            // No nodes, and so many would be enough.
            ["missing", nodes] => {
                let missing = nodes.parse().expect("a number");
                self.on(Event::Granted(Granted { missing, ..Granted::default() }));
            }
            // The same nodes, for another reason.
            ["why", why @ ..] => {
                let (nodes, why) = (self.granted.clone(), why.join(" "));
                self.on(Event::Granted(Granted { nodes, why, ..Granted::default() }));
            }
            ["pod", name, node, what @ ..] => self.see_pod(name, node, what),
            ["gone", name] => {
                self.pods.remove(*name);
                self.on(Event::PodGone(name.to_string()));
            }
            // Its container began anew, and knows nothing of what it was told.
            ["forgets", name] => drop(self.members.remove(*name)),
            ["advance", millis] => self.now += millis.parse::<Millis>().expect("milliseconds"),
            ["crowd"] => self.on(Event::Crowd(true)),
            ["crowd", "over"] => self.on(Event::Crowd(false)),
            ["api"] => self.on(Event::Api { heard: now }),
            ["written"] => self.answer(|_| Ok(())),
            ["written", "all"] => {
                while !self.under_way.is_empty() {
                    self.answer(|_| Ok(()));
                }
            }
            ["fail", kind] => {
                let kind = kind_of(kind);
                let error = WriteError { kind, message: format!("{kind:?}") };
                self.answer(|_| Err(error.clone()));
            }
            ["written", word] => {
                self.pick(word);
                self.answer(|_| Ok(()));
            }
            ["fail", kind, word] if *kind != "one" => {
                self.pick(word);
                let kind = kind_of(kind);
                let error = WriteError { kind, message: format!("{kind:?}") };
                self.answer(|_| Err(error.clone()));
            }
            // The first pod alone is refused.
            ["fail", "one", kind] => {
                let kind = kind_of(kind);
                let error = WriteError { kind, message: format!("{kind:?}") };
                self.answer(|index| if index == 0 { Err(error.clone()) } else { Ok(()) });
            }
            [what, name, rest @ ..] => self.say(what, name, rest),
            other => panic!("{other:?}"),
        }
    }

    fn on(&mut self, event: Event) {
        let now = self.now;
        if !self.unseen {
            self.job().on(event, now);
        }
    }

    fn set(&mut self, setting: &str) {
        let (name, value) = setting.split_once('=').expect("name=value");
        let number = || json!(value.parse::<u64>().expect("a number"));
        let spec = &mut self.seen.spec;
        match name {
            "min" | "max" => spec["nodes"][name] = number(),
            "profile" | "preflight" => spec["nodes"][name] = json!(value),
            "box" => {
                let said = value.replace(':', "=");
                self.set_box(&said.split(',').collect::<Vec<_>>());
            }
            "batch" => spec["training"]["globalBatchSize"] = number(),
            "suspend" => spec["suspend"] = json!(value == "true"),
            "spares" => spec["nodes"]["spares"] = number(),
            "ttl" => spec["ttlSecondsAfterFinished"] = number(),
            "steps" => spec["training"]["steps"] = number(),
            "gangTimeout" => spec["recovery"]["gangTimeout"] = json!(value),
            "record" => self.seen.status["record"] = json!(value),
            "bytes" => {
                let unread = format!("spec: {value} bytes as JSON, at most 65536");
                self.seen.unread = Some(unread);
            }
            "keyring" => self.keyring = value.to_string(),
            "image" => spec["image"] = json!(value),
            "own" => self.own_image = value.to_string(),
            "more" => self.seen.status["recordMore"] = json!(value),
            other => panic!("{other}"),
        }
    }

    fn set_box(&mut self, settings: &[&str]) {
        let fields = settings.iter().map(|setting| setting.replace('=', ": ") + "\n");
        let text = format!("version: 1\nbackend: cpu\n{}", fields.collect::<String>());
        let own = settings.first().map(|_| ("box.yaml".to_string(), text.into_bytes()));
        self.profiles = Arc::new(Profiles::shipped().with(own).0);
    }

    fn adopt(&mut self, term: u64) {
        let operator = Operator {
            image: (self.own_image.clone(), None),
            namespace: "moejob-system".into(),
            trusted: String::new(),
            keyring: self.keyring.clone(),
            stand_in: false,
            profiles: Arc::clone(&self.profiles),
            placeholders_max: 64,
        };
        let place = match &self.machine {
            Some(local) => Place::Machine(local.clone()),
            None => Place::Cluster(Arc::new(operator)),
        };
        self.job = Some(JobLoop::new(&self.seen, place, term, self.now));
    }

    fn see(&mut self) {
        self.version += 1;
        self.seen.resource_version = self.version.to_string();
        let seen = self.seen.clone();
        if !self.unseen && self.job().is_to_be_taken_anew(&seen) {
            let term = self.job().term();
            return self.take(term);
        }
        self.on(Event::Spec(Box::new(seen)));
    }

    /// A loop that knows nothing yet, and hears nothing of what was sent before it.
    fn take(&mut self, term: u64) {
        self.under_way.clear();
        self.adopt(term);
        for pod in self.pods.values().cloned().collect::<Vec<_>>() {
            self.on(Event::Pod(Box::new(pod)));
        }
    }

    fn see_pod(&mut self, name: &str, node: &str, what: &[&str]) {
        let slot = self.pods.len() as u8;
        let pod = self.pods.entry(name.to_string()).or_insert_with(|| WorkerPod {
            namespace: "team".into(),
            name: name.into(),
            uid: format!("uid-{name}"),
            owner: owner("team", "uid"),
            node: Some(Arc::from(node)),
            meant_for: Some(node.into()),
            address: Some(format!("10.0.0.{slot}")),
            ..WorkerPod::default()
        });
        match what {
            [] => {}
            ["running"] => pod.started = true,
            ["runs", image] => pod.image = Some(Arc::from(*image)),
            ["uid", uid] => pod.uid = uid.to_string(),
            ["mounting"] => pod.mounting = true,
            ["unplaced", words @ ..] => {
                (pod.node, pod.address) = (None, None);
                pod.unschedulable = Some(words.join(" "));
            }
            ["placed"] => pod.node = Some(Arc::from(node)),
            ["trouble", words @ ..] => pod.trouble = Some(words.join(" ")),
            ["exit", code] => {
                pod.ended = Some((code.parse().ok(), format!("exit code {code}")));
            }
            ["killed", words @ ..] => pod.ended = Some((None, words.join(" "))),
            ["deleting"] => pod.deletion = Some(self.now + 1_000),
            ["deleting", millis] => {
                pod.deletion = Some(self.now + millis.parse::<Millis>().expect("milliseconds"));
            }
            other => panic!("{other:?}"),
        }
        let pod = pod.clone();
        self.on(Event::Pod(Box::new(pod)));
    }

    fn say(&mut self, what: &str, name: &str, rest: &[&str]) {
        let (attempt, digest, rank) = self.members.get(name).cloned().unwrap_or_default();
        let up = |up: Up| Said::Up { attempt, up };
        let pair = |number: &str, said: PairSaid| {
            let number = number.parse().expect("a number");
            Said::Up { attempt, up: Up::Pair(PairAnswer { number, said }) }
        };
        let ended = |why| Said::Ended { why, reason: format!("{why:?}") };
        let said = match (what, rest) {
            ("open", version) => {
                let rank = (attempt > 0).then_some(rank);
                let version = version.first().map_or(1, |of| of.parse().expect("a version"));
                Said::Opened(Hello {
                    version,
                    ..hello(name, (attempt, &digest, rank), &[])
                })
            }
            ("measured", [number, boot, checks @ ..]) => up(Up::Preflight(Answer {
                number: number.parse().expect("a number"),
                boot_id: boot.to_string(),
                measured: (*checks != ["same"]).then(|| checks.iter().map(measured).collect()),
            })),
            ("meets", [number, place]) => {
                let meeting = Meeting { id: format!("{place:0>256}"), bytes: 1 << 33 };
                pair(number, PairSaid::Meets(meeting))
            }
            ("paired", [number, checks @ ..]) => {
                pair(number, PairSaid::Measured(checks.iter().map(measured).collect()))
            }
            // Its ranks are `of`, from the first on; rings go so many ranks on.
            ("built", [first, of, on, world]) => {
                let [first, of, on, world] =
                    [first, of, on, world].map(|word| word.parse::<u32>().expect("a number"));
                for rank in first..first + of {
                    let ring = ((rank + world - on) % world, (rank + on) % world);
                    let (rings, version) = (BTreeSet::from([ring]), "2.28.9".to_string());
                    let built = Built { rank, version, rings, ..Built::default() };
                    self.hear(name, attempt, Up::Built(built));
                }
                return;
            }
            ("heartbeat", _) => up(Up::Heartbeat(Heartbeat {
                phase: Phase::Training,
                step: 1,
                collective: 1,
                held: Vec::new(),
                loading: None,
            })),
            ("step", [step]) => up(step_report(step.parse().expect("a step"), attempt)),
            ("left", _) => up(Up::Left { reason: LeftReason::Asked, held: Vec::new() }),
            ("committed", [step]) => up(committed(step.parse().expect("a step"), attempt)),
            ("stopped", [step]) => {
                let reason = LeftReason::Stopped { step: step.parse().expect("a step") };
                up(Up::Left { reason, held: Vec::new() })
            }
            ("completed", [step]) => {
                up(Up::Completed { step: step.parse().expect("a step") })
            }
            ("engine", [device]) => {
                up(device_failed(attempt, device.parse().expect("a device")))
            }
            ("says", [kind, reason, words @ ..]) => {
                let kind = serde_json::from_value(json!(kind)).expect("a kind of event");
                up(of_kind(kind, attempt, reason, &words.join(" ")))
            }
            ("exited", [code]) => up(Up::Failed {
                exit_code: code.parse().expect("a code"),
                message: "it gave\u{1b} up".to_string(),
                step: None,
            }),
            ("warns", words) => up(warning(&words.join(" "), attempt)),
            ("silent", _) => Said::Silent,
            ("broken", _) => ended(Ending::Broken),
            ("refused", _) => ended(Ending::Refused),
            ("unjudged", _) => ended(Ending::Unjudged),
            ("unspoken", _) => ended(Ending::Unspoken),
            ("flood", [times]) => {
                for time in 0..times.parse::<u64>().expect("a number") {
                    let said = up(warning(&format!("{time}"), attempt));
                    self.on(Event::Stream { name: name.to_string(), said });
                }
                return;
            }
            other => panic!("{other:?}"),
        };
        self.on(Event::Stream { name: name.to_string(), said });
    }

    /// The oldest batch that writes such a thing is the next to be answered.
    fn pick(&mut self, word: &str) {
        let has = |batch: &Batch| batch.writes.iter().any(|(_, of)| show::words(of).contains(word));
        let at = self.under_way.iter().position(has);
        // What a scenario waits for in vain shows in its text.
        let Some(at) = at else { return self.under_way.push_front(Batch::default()) };
        let batch = self.under_way.remove(at).expect("it is there");
        self.under_way.push_front(batch);
    }

    /// The oldest batch that is under way has come to its end.
    fn answer(&mut self, answer: impl Fn(usize) -> Result<(), WriteError>) {
        let Some(batch) = self.under_way.pop_front().filter(|of| !of.writes.is_empty()) else {
            return self.missed = true;
        };
        let mut results = Vec::new();
        for (index, (origin, write)) in batch.writes.into_iter().enumerate() {
            let written = answer(index).map(|()| match write {
                Write::Status { status, .. } => {
                    self.version += 1;
                    self.seen.status = serde_json::to_value(&status).expect("a status");
                    Some(self.version.to_string())
                }
                _ => None,
            });
            results.push((origin, written));
        }
        self.on(Event::Done { aside: batch.aside, results });
    }

    fn execute(&mut self, effect: Effect, lines: &mut Vec<String>) {
        let line = match effect {
            Effect::Link(Link::Dial { name, address, again, .. }) => {
                format!("dial {name} at {address}{}", if again { " again" } else { "" })
            }
            Effect::Link(Link::Close { name }) => format!("close {name}"),
            Effect::Link(Link::Send { name, attempt, body }) => {
                format!("tell {name} of attempt {attempt}: {}", show::order(&body))
            }
            Effect::Link(Link::Configure { name, rank, config }) => {
                let member = (config.attempt, config.digest.clone(), rank);
                self.members.insert(name.clone(), member);
                self.hashes.push(!config.checkpoint.spec_hash.is_empty());
                format!("configure {name} as rank {rank} of attempt {}", config.attempt)
            }
            Effect::Link(Link::HeartbeatTimeout(_) | Link::Ranks(_)) => return,
            Effect::Figures(figures) => return self.told.push(show::figures(&figures)),
            Effect::Recovered(recovery) => format!("recovered: {}", recovery.cause),
            Effect::Lost { name, node, cause } => format!("lost {name} on {node}: {cause}"),
            Effect::Note { warning, text } => {
                let what = if warning { "warning" } else { "note" };
                return self.told.push(format!("{what}: {}", text.replace('\n', " / ")));
            }
            Effect::Memory(memo) => match memo {
                Memo::Decided(node) => return self.told.push(format!("decided: {node}")),
                Memo::Avoid { node, until } => {
                    format!("memory: avoid {node} for {} ms", until.saturating_sub(self.now))
                }
                Memo::Passed(news) => {
                    let one = |(key, at): &News| {
                        let how = if key.paired { " with others" } else { "" };
                        let passed = if at.is_some() { "passed" } else { "passed no more" };
                        format!("{} {passed}{how}", key.node)
                    };
                    let all: Vec<String> = news.iter().map(one).collect();
                    let line = format!("memory: {}", all.join(", "));
                    self.passes.extend(news);
                    line
                }
            },
            Effect::Write(batch) => {
                let waits = if batch.aside { "" } else { ", and wait" };
                let writes = batch.writes.iter().map(|(_, of)| show::words(of));
                let writes: Vec<String> = writes.collect();
                let event = matches!(batch.writes[0].0, Origin::Event);
                // Nothing follows of how an event was written.
                if !event {
                    self.under_way.push_back(batch);
                }
                let what = if event { "say" } else { "write" };
                format!("{what} {}{waits}", writes.join(", "))
            }
        };
        lines.push(line);
    }
}

fn kind_of(word: &str) -> WriteErrorKind {
    match word {
        "slow" => WriteErrorKind::Slow,
        "conflict" => WriteErrorKind::Conflict,
        "exists" => WriteErrorKind::Exists,
        "forbidden" => WriteErrorKind::Forbidden,
        "refused" => WriteErrorKind::Refused,
        "deposed" => WriteErrorKind::Deposed,
        "not-ours" => WriteErrorKind::NotOurs,
        _ => WriteErrorKind::Other,
    }
}

/// `check=number`
fn measured(text: &&str) -> Measured {
    let (check, number) = text.split_once('=').expect("check=number");
    Measured::number(check, number.parse().expect("a number"))
}
