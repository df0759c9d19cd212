//! What several jobs ask of the allocation together, and what comes of it on three nodes.

use moejob_manifest::keys::Keys;
use moejob_manifest::resources::Resources;
use moejob_manifest::status::{Condition, MoeJobStatus};
use moejob_plan::allocate::{ClusterNode, Ground, Memory, allocate};
use moejob_plan::lead::{JobLoop, JobSeen, Operator, Place, demands, unfit};
use moejob_plan::observed::{Gang, Outcome, Record};
use moejob_plan::record::{self, More, Refused, Saved};
use moejob_protocol::config::Member;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const NOW: u64 = 1_700_000_000_000;

/// A job of one node that keeps its checkpoints in a folder of `location`.
fn seen(uid: &str, location: &str, saved: &Saved) -> JobSeen {
    let spec = json!({
        "nodes": {"min": 1, "max": 1},
        "model": {"preset": "tiny"},
        "data": {"train": {"text": {"paths": ["corpus/*"]}}, "sequenceLength": 8},
        "training": {"steps": 100, "globalBatchSize": 8},
        "checkpoint": {"location": format!("checkpoints/{location}")},
        "volumes": [{"mountPath": "checkpoints", "claim": "c"}],
    });
    let record = record::write(saved);
    JobSeen {
        namespace: "team".into(),
        name: uid.into(),
        uid: uid.into(),
        generation: 1,
        created_at: u64::from(uid.as_bytes()[0]),
        status: json!({"record": record, "recordMore": record::write_more(&saved.more)}),
        spec,
        ..JobSeen::default()
    }
}

fn lead(seen: &JobSeen) -> JobLoop {
    JobLoop::new(seen, Place::Cluster(Arc::new(Operator::default())), 1, NOW)
}

/// Which job gets which nodes and why, where each of `holds` has pods on one node.
fn granted(jobs: &[JobSeen], holds: &[(&str, &str)]) -> Vec<String> {
    let loops: Vec<(String, JobLoop)> =
        jobs.iter().map(|seen| (seen.uid.clone(), lead(seen))).collect();
    let held: BTreeMap<&str, BTreeSet<String>> =
        holds.iter().map(|(uid, node)| (*uid, [node.to_string()].into())).collect();
    let allocatable = Resources::read(&json!({"cpu": "64", "memory": "256Gi", "pods": "110"}));
    let node = |name: &str| ClusterNode {
        name: name.into(),
        ready: true,
        allocatable: allocatable.clone(),
        ..ClusterNode::default()
    };
    let ground = Ground::new(["n1", "n2", "n3"].map(node).into(), &Keys::default());
    let led = loops.iter().map(|(uid, job)| (uid.as_str(), job));
    let asked = demands(led, held, |_| (0, true));
    let made = allocate(&ground, &asked, &Memory::default(), NOW);
    let line = |(uid, granted): (&String, &moejob_plan::allocate::Granted)| {
        let names: Vec<&str> = granted.nodes.iter().map(|node| node.name.as_str()).collect();
        format!("{uid}: {} ({})", names.join(" "), granted.why)
    };
    made.jobs.iter().map(line).collect()
}

fn over(outcome: Outcome) -> Saved {
    let record = Record { attempt: 1, outcome: Some(outcome), ..Record::default() };
    Saved { record, ..Saved::default() }
}

/// Its gang of one, on n1, is under way.
fn training(more: More) -> Saved {
    let member = Member {
        rank: 0,
        worker: "a-a1-0".into(),
        node: "n1".into(),
        address: "10.0.0.1:7777".into(),
    };
    let gang = Gang {
        attempt: 1,
        digest: "d".into(),
        layout: Layout::contiguous(Mesh { pp: 1, dp: 1, ep: 1, cp: 1, tp: 1 }),
        members: vec![member],
        resumed_at: 0,
        started_at: NOW,
        stepped: true,
        stop_requested: None,
        broken: None,
        ended: None,
        inherited: false,
    };
    let record = Record { attempt: 1, births: 1, gang: Some(gang), ..Record::default() };
    Saved { record, more, ..Saved::default() }
}

#[test]
fn a_job_waits_for_an_earlier_one_of_its_location_and_for_none_that_is_over() {
    let waits =
        "b:  (its checkpoint.location is that of the job a, which is not over)".to_string();
    let fits = |uid: &str, node: &str| format!("{uid}: {node} (a gang of 1: 0 nodes are its own)");
    let two = |saved: Saved| [seen("a", "x", &saved), seen("b", "x", &Saved::default())];
    assert_eq!(granted(&two(Saved::default()), &[]), [fits("a", "n1"), waits.clone()]);
    // Whatever it has, it gives back.
    assert_eq!(granted(&two(Saved::default()), &[("b", "n1")]), [fits("a", "n2"), waits.clone()]);
    let complete = over(Outcome::Complete { step: 100 });
    assert_eq!(granted(&two(complete), &[]), ["a:  ()".to_string(), fits("b", "n1")]);
    // One that trains already goes on, though it is the later one.
    let later = [
        seen("a", "x", &Saved::default()),
        seen("b", "x", &training(More::default())),
    ];
    let waits_for_b = waits.replace("b:", "a:").replace("the job a", "the job b");
    assert_eq!(granted(&later, &[("b", "n1")])[0], waits_for_b);
    // Who is suspended goes on some day.
    assert_eq!(granted(&two(over(Outcome::Suspended)), &[])[1], waits);
}

#[test]
fn a_job_whose_pods_are_refused_holds_nothing_without_a_gang() {
    let why = ("PodNotCreated".to_string(), "quota".to_string());
    let until = Some(NOW + 30_000);
    let more = || {
        let refused = Refused { until, why: why.clone(), ..Refused::default() };
        More { refused, ..More::default() }
    };
    let refused = seen("a", "x", &Saved { more: more(), ..Saved::default() });
    let other = seen("b", "y", &Saved::default());
    let gets = "b: n2 (a gang of 1: 0 nodes are its own)".to_string();
    // Until its pod has gone nobody else has its node.
    let both = [refused, other.clone()];
    assert_eq!(granted(&both, &[("a", "n1")]), ["a:  ()".to_string(), gets.clone()]);
    let both = [seen("a", "x", &training(more())), other];
    assert_eq!(granted(&both, &[("a", "n1")]), ["a: n1 ()".to_string(), gets]);
}

#[test]
fn pods_of_a_job_that_is_not_planned_keep_their_nodes() {
    let mut invalid = seen("a", "x", &Saved::default());
    invalid.spec = json!({"nodes": 7});
    let fenced = JobSeen { status: json!({"record": "?"}), ..seen("b", "y", &Saved::default()) };
    let waiting = seen("c", "z", &Saved::default());
    let holds = [("a", "n1"), ("b", "n2"), ("gone", "n3")];
    let made = granted(&[invalid, fenced, waiting], &holds);
    let expected = [
        "a: n1 ()",
        "b: n2 ()",
        "c:  (waits for nodes: 0 of 1 fit (3 in use by a MoeJob); it holds nothing)",
        "gone: n3 ()",
    ];
    assert_eq!(made, expected);
}

/// The time stands in the status, so that the next leader knows it, too.
#[test]
fn who_waits_since_when_is_asked_of_the_status_and_a_refused_job_stops_nobody() {
    let condition = |kind: &str, status: &str, at: &str| Condition {
        type_: kind.into(),
        status: status.into(),
        reason: String::new(),
        message: String::new(),
        last_transition_time: Some(format!("2023-11-14T22:{at}Z")),
    };
    let told = |uid: &str, conditions: Vec<Condition>, saved: &Saved| {
        let seen = seen(uid, uid, saved);
        let told = MoeJobStatus {
            conditions,
            record: seen.status["record"].as_str().unwrap_or_default().into(),
            record_more: seen.status["recordMore"].as_str().unwrap_or_default().into(),
            ..MoeJobStatus::default()
        };
        JobSeen { status: serde_json::to_value(told).expect("a status"), ..seen }
    };
    let planned = |uid: &str, status: &str, saved: &Saved| {
        told(uid, vec![condition("Planned", status, "00:00")], saved)
    };
    let held = |is: &str| {
        let suspended = condition("Suspended", is, "00:09");
        told("b", vec![condition("Planned", "False", "00:00"), suspended], &Saved::default())
    };
    let asked = |seen: &JobSeen| {
        let led = lead(seen);
        let made = demands([(&*seen.uid, &led)].into_iter(), BTreeMap::new(), |_| (7, true));
        (made[0].priority, made[0].preempts, made[0].since)
    };
    let since = Some(1_699_999_200_000);
    let (new, runs) = (Saved::default(), training(More::default()));
    // A wait begins at the end of a second: who has got its nodes in that one has passed nobody.
    let waits = since.map(|at| at + 999);
    assert_eq!(asked(&seen("b", "b", &new)), (7, true, Some(98 + 999)), "since it was made");
    assert_eq!(asked(&planned("b", "False", &new)), (7, true, waits), "it waits");
    assert_eq!(asked(&held("True")), (7, true, None), "it is suspended");
    let again = waits.map(|at| at + 9_000);
    assert_eq!(asked(&held("False")), (7, true, again), "since it goes on");
    assert_eq!(asked(&planned("a", "True", &runs)), (7, true, since), "it has its gang");
    assert_eq!(asked(&planned("a", "False", &runs)), (7, true, None), "it has just got it");
    assert_eq!(asked(&planned("b", "True", &new)), (7, true, None), "it has just lost it");
    let refused = Refused { times: 1, ..Refused::default() };
    let refused = Saved { more: More { refused, ..More::default() }, ..Saved::default() };
    assert_eq!(asked(&planned("b", "False", &refused)), (7, false, None));
}

#[test]
fn who_has_not_the_keys_of_pods_that_live_does_not_lead() {
    let sealed = |keyring: &str| training(More { keyring: keyring.into(), ..More::default() });
    let complete = Saved { record: over(Outcome::Suspended).record, ..sealed("old") };
    let jobs = [seen("a", "x", &sealed("old")), seen("b", "y", &sealed("new"))];
    let pods = jobs.each_ref().map(JobSeen::owner);
    let why = |jobs: &[JobSeen], pods: &[_]| unfit(jobs.iter().cloned(), pods.iter(), "new");
    let told = why(&jobs, &[&pods[..], &pods[..1]].concat()).expect("not fit");
    assert!(told.contains("2 pods of 1 job were made"), "{told}");
    assert_eq!(why(&jobs, &pods[1..]), None, "no pod of it lives");
    assert_eq!(why(&[seen("a", "x", &complete)], &pods), None, "its gang is over");
    // Nor of one whose attempt has ended, or that has failed with an attempt under way.
    let mut between = sealed("old");
    between.record.gang.as_mut().expect("a gang").ended = Some(NOW);
    assert_eq!(why(&[seen("a", "x", &between)], &pods), None);
    let mut failed = sealed("old");
    failed.record.outcome = Some(Outcome::Interrupted);
    assert_eq!(why(&[seen("a", "x", &failed)], &pods), None);
    let nothing = JobSeen { status: Value::Null, ..jobs[0].clone() };
    assert_eq!(why(&[nothing], &pods), None);
}
