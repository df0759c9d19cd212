//! The operator is killed at a write of a job's life, and its successor comes to the same end: at
//! some writes in each run, at every single one with `MOEJOB_CRASH=all`.
//!
//! A cluster of its own, with a real API server and scheduler and with fake nodes; the real
//! operator, behind a proxy (`moejob_tests::cutting`) that ends it at write n: before the write is
//! done, or after it and before the operator knows. What is compared with an undisturbed life is
//! said at `Ended`.

use crate::bench::{Bench, NAMESPACE, POLL, inside, install, shown};
use crate::lag;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::runtime::watcher;
use moejob_tests::cluster::{Own, small_job};
use moejob_tests::cutting::{Cut, View, Write};
use moejob_tests::moejob;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::time::sleep;

/// From one write at which an operator is ended to the next: a life takes 6 s.
const APART: usize = 6;
/// For all lives together.
const LIMIT: Duration = Duration::from_secs(45 * 60);
/// Nothing has been written for so long: an operator has come to its end.
const QUIET: Duration = Duration::from_millis(1500);
/// Of a restarted operator: what it writes again costs no more than this. Status is written as
/// often as it changes, and a successor may see in one what its predecessor saw in two.
const STATUS_AGAIN_MAX: usize = 6;

/// What an operator's work has come to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Phase, step, checkpoint, nodes, restarts and conditions of the complete job.
    pub status: String,
    /// NetworkPolicies, budgets, and pods that have not ended.
    pub objects: Vec<String>,
    /// Names of all pods that there were.
    pub pods: BTreeSet<String>,
    /// Kinds that are still there after the job's deletion.
    pub left: Vec<String>,
}

impl Bench {
    /// The least a status says of a gang that trains. A leader that came when all steps up to
    /// `hold` were done hears of none: it is given one more each second.
    async fn trains(&self, what: &str, name: &str, (nodes, attempt, hold): (u64, u64, u64)) -> u64 {
        self.order("hold", &hold.to_string());
        let job = self.until(what, name, |status| {
            status["phase"] == "Running" && status["nodes"]["ready"] == nodes
                && status["attempt"].as_u64() >= Some(attempt)
        });
        let more = async {
            for hold in hold + 1.. {
                sleep(Duration::from_secs(1)).await;
                self.order("hold", &hold.to_string());
            }
        };
        tokio::select! {
            job = job => job["status"]["attempt"].as_u64().unwrap_or_default(),
            () = more => attempt,
        }
    }

    /// Everything that can happen to a job, one after the other.
    async fn live(&self, name: &str) -> Ended {
        let object = serde_json::from_value(manifest(name)).expect("an object");
        self.jobs().create(&PostParams::default(), &object).await.expect("applied");
        let attempt = self.trains("it trains", name, (2, 1, 5)).await;
        let pods = self.pods(name).await;
        let (lost, _) = pods.iter().find(|(_, ended)| !ended).expect("a running pod");
        self.order("killed", &format!("{NAMESPACE}/{lost}\n"));
        let attempt = self.trains("it recovers", name, (2, attempt + 1, 100)).await;
        self.patch(name, json!({ "suspend": true })).await;
        self.until("it is suspended", name, |status| status["phase"] == "Suspended").await;
        self.until_pods("no pod", name, |pods| pods.is_empty()).await;
        self.patch(name, json!({ "suspend": false })).await;
        let attempt = self.trains("it goes on", name, (2, attempt + 1, 200)).await;
        self.patch(name, json!({ "nodes": { "max": 3 } })).await;
        self.until("it grows", name, |status| status["attempt"].as_u64() > Some(attempt)).await;
        let attempt = self.trains("it trains on three", name, (3, attempt + 1, 300)).await;
        self.patch(name, json!({ "nodes": { "max": 2 } })).await;
        self.until("it shrinks", name, |status| status["attempt"].as_u64() > Some(attempt)).await;
        self.trains("it trains on two", name, (2, attempt + 1, 400)).await;
        self.order("hold", "");
        self.until("it is complete", name, |status| status["phase"] == "Complete").await;
        self.until_pods("all pods end", name, |pods| pods.iter().all(|(_, ended)| *ended)).await;
        self.until_quiet().await;
        let status = status_of(&self.job(name).await);
        let objects = self.objects(name).await;
        let how = DeleteParams::default();
        self.jobs().delete(name, &how).await.expect("deleted");
        let left = self.until_gone(name).await;
        Ended { status, objects, left, pods: BTreeSet::new() }
    }

    /// Nothing more is written.
    async fn until_quiet(&self) {
        let (mut known, mut since) = (0, Instant::now());
        while since.elapsed() < QUIET {
            sleep(POLL).await;
            let count = self.proxy.writes().len() + self.proxy.cuts();
            if std::mem::replace(&mut known, count) != count {
                since = Instant::now();
            }
        }
    }

    async fn objects(&self, name: &str) -> Vec<String> {
        let label = ListParams::default().labels(&format!("moejob.dev/job={name}"));
        let policies = self.all::<NetworkPolicy>().list(&label).await.expect("policies");
        let budgets = self.all::<PodDisruptionBudget>().list(&label).await.expect("budgets");
        let mut all: Vec<String> = policies.iter().map(|of| format!("policy {}", of.name_any()))
            .chain(budgets.iter().map(|of| format!("budget {}", of.name_any())))
            .collect();
        let pods = self.pods(name).await;
        let running = pods.into_iter().filter(|(_, ended)| !ended);
        all.extend(running.map(|(name, _)| format!("pod {name}")));
        all.iter().map(|object| object.replace(name, "JOB")).collect()
    }

    /// What is there after 30 s of what should not be.
    async fn until_gone(&self, name: &str) -> Vec<String> {
        let start = Instant::now();
        loop {
            let mut left = self.objects(name).await;
            left.extend(self.pods(name).await.into_iter().map(|(name, _)| format!("pod {name}")));
            if left.is_empty() || start.elapsed() > Duration::from_secs(30) {
                return left;
            }
            sleep(POLL).await;
        }
    }

    /// One life under an operator that is ended at `cut` and sees the cluster by `view`.
    pub async fn life(&self, name: &str, cut: Option<Cut>, view: View) -> (Ended, Vec<Write>) {
        self.forget().await;
        self.proxy.begin(cut);
        self.proxy.spoil(view);
        let seen = Mutex::new(BTreeSet::new());
        let mut ended = tokio::select! {
            ended = self.live(name) => ended,
            never = self.operate() => match never {},
            never = self.see_pods(name, &seen) => match never {},
        };
        ended.pods = seen.into_inner().expect("no panic holds it");
        (ended, self.proxy.writes())
    }

    /// Notes each pod that there is, however short; for as long as it is polled. What the operator
    /// wrote does not tell: of a write that was under way when it ended, nobody has the answer.
    async fn see_pods(&self, name: &str, seen: &Mutex<BTreeSet<String>>) -> Infallible {
        let config = watcher::Config::default().labels(&format!("moejob.dev/job={name}"));
        let mut events = pin!(watcher(self.all::<Pod>(), config));
        loop {
            match events.next().await.expect("watches do not end") {
                Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) => {
                    seen.lock().expect("no panic holds it").insert(pod.name_any());
                }
                Ok(_) => {}
                Err(error) => panic!("the watch of pods: {error}"),
            }
        }
    }
}

fn manifest(name: &str) -> Value {
    let training = json!({ "steps": 500, "globalBatchSize": 12, "microBatchSize": 1,
        "precision": "fp32" });
    let mut job = small_job(name, (2, 2), training);
    job["spec"]["checkpoint"]["everySteps"] = json!(10);
    job["spec"]["recovery"] = json!({ "growthInterval": "1s" });
    job
}

/// What of a status must be the same whatever happened to the operator.
fn status_of(job: &Value) -> String {
    let status = &job["status"];
    let conditions = status["conditions"].as_array().into_iter().flatten();
    let conditions: Vec<String> = conditions
        .map(|of| format!("{}={} {}", of["type"], of["status"], of["reason"]))
        .collect();
    format!(
        "{} step {} of {} checkpoint {} nodes {} restarts {} {}",
        status["phase"], status["step"], status["steps"], status["checkpoint"]["step"],
        status["nodes"], status["restarts"], conditions.join(", "),
    )
}

fn count(writes: &[Write]) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    for write in writes {
        *counts.entry(write.what.as_str()).or_default() += 1;
    }
    counts
}

/// One line of the table that the test prints.
pub fn line(what: &str, ended: &Ended, writes: &[Write]) {
    let counts: Vec<String> =
        count(writes).iter().map(|(what, count)| format!("{count} {what}")).collect();
    println!("{what}: {} writes ({}), pods {}", writes.len(), counts.join(", "), ended.pods.len());
}

#[test]
fn an_operator_that_dies_or_does_not_see_comes_to_the_same_end() {
    let environment = [("MOEJOB_FAKE_STEP_MS", "5")];
    let program = moejob().display().to_string();
    let up = ["--nodes", "0", "--fake", "4", "--program", &program];
    let cluster = Own::up("crash", &up, &environment);
    install(&cluster);
    let state = cluster.state.clone();
    inside(&cluster, async move {
        let mut bench = Bench::new(state).await;
        bench.kubeconfig().await;
        // The garbage collector learns of a new kind within half a minute; this life waits for it.
        bench.life("first", None, View::default()).await;
        let whole = bench.life("whole", None, View::default()).await;
        line("undisturbed", &whole.0, &whole.1);
        println!("{}{:#?}", shown(&whole.1), whole.0);
        let events = bench.proxy.events();
        every_write(&bench, &whole).await;
        lag::runs(&mut bench, &whole, &events).await;
    });
}

async fn every_write(bench: &Bench, (expected, undisturbed): &(Ended, Vec<Write>)) {
    let start = Instant::now();
    let Some((first, apart)) = chosen() else { return };
    println!("killed at write {first} and every {apart} after it; MOEJOB_CRASH=all: at each");
    let (mut number, mut failures) = (first, Vec::new());
    'all: loop {
        for (letter, cut) in [("b", Cut::Before(number)), ("a", Cut::After(number))] {
            let name = format!("cut{number}{letter}");
            let (ended, writes) = bench.life(&name, Some(cut), View::default()).await;
            // A life of fewer writes than that is over: so were all before it.
            if bench.proxy.cuts() == 0 {
                break 'all;
            }
            let at = writes.get(number - 1).map(|write| write.what.clone()).unwrap_or_default();
            line(&format!("{cut:?} {at}"), &ended, &writes);
            if let Some(difference) = differs(expected, &ended, undisturbed, &writes) {
                println!("DIFFERS {cut:?} {at}: {difference}\n{}", shown(&writes));
                failures.push(format!("{cut:?} {at}: {difference}"));
            }
        }
        number += apart;
        assert!(start.elapsed() < LIMIT, "{number} of {} writes in {LIMIT:?}", undisturbed.len());
    }
    println!("killed before and after writes up to {}: {:?}", number - apart, start.elapsed());
    assert!(number > undisturbed.len() / 2, "{number} of {}", undisturbed.len());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The first write, and how far apart the others are: from 1 to 6 by the clock, so that runs
/// together see them all, unless `MOEJOB_CRASH` says `all`, `none`, or from which number on all.
fn chosen() -> Option<(usize, usize)> {
    match std::env::var("MOEJOB_CRASH").as_deref() {
        Err(_) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
            Some((1 + now.as_secs() as usize % APART, APART))
        }
        Ok("none") => None,
        Ok("all") => Some((1, 1)),
        Ok(text) => Some((text.parse().expect("MOEJOB_CRASH is `all`, `none` or a number"), 1)),
    }
}

/// What is otherwise than in the undisturbed life.
fn differs(
    expected: &Ended,
    ended: &Ended,
    undisturbed: &[Write],
    writes: &[Write],
) -> Option<String> {
    if (&ended.status, &ended.objects, &ended.left) 
        != (&expected.status, &expected.objects, &expected.left)
    {
        return Some(format!("{ended:#?}"));
    }
    if ended.pods.len() != expected.pods.len() {
        return Some(format!("pods {:?} for {:?}", ended.pods, expected.pods));
    }
    let (before, now) = (count(undisturbed), count(writes));
    let of = |counts: &BTreeMap<&str, usize>, what| counts.get(what).copied().unwrap_or(0);
    let status = "PATCH moejobs/status";
    let again = of(&now, status).saturating_sub(of(&before, status));
    (again > STATUS_AGAIN_MAX).then(|| format!("{again} more writes of status"))
}
