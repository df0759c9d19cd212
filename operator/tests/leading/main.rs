//! `moejob operator` as a process, before an API server that has bad days.

#[path = "../../../tests/src/fake/api.rs"]
#[allow(dead_code, reason = "each of the two that use it uses another part")]
mod api;
mod process;

use api::Api;
use moejob_identity::Keyring;
use moejob_manifest::crd;
use moejob_plan::observed::{Gang, Record};
use moejob_plan::record::{self, More, Saved};
use moejob_protocol::config::Member;
use moejob_protocol::{Layout, Mesh};
use process::{NAMESPACE, Operator, add_node, holder, job, until, world};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::sleep;

/// Which pods and jobs are the leader's to write; a lease is only asked for.
const LEASE_S: u64 = 10;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_was_stopped_and_goes_on_writes_nothing_more() {
    let api = world().await;
    let mut first = Operator::start(&api, "first");
    until("the first one leads", 20, || holder(&api).starts_with("first")).await;
    let mut second = Operator::start(&api, "second");
    api.put("moejobs", job("a"));
    until("it has written", 20, || api.get("pods", ("team", "a-a1-0")).is_some()).await;
    let term = |api: &Api| api.list("leases")[0]["spec"]["leaseTransitions"].as_i64();
    let before = term(&api);
    first.signal(Signal::STOP);
    // There is enough to do for whoever leads.
    api.edit("moejobs", ("team", "a"), |job| job["spec"]["suspend"] = json!(true));
    until("the other one leads", LEASE_S + 10, || holder(&api).starts_with("second")).await;
    assert_eq!(term(&api), before.map(|term| term + 1));
    api.asked();
    api.edit("moejobs", ("team", "a"), |job| job["spec"]["suspend"] = json!(false));
    first.signal(Signal::CONT);
    let code = first.until_end(15).await;
    assert_ne!(code, Some(0), "its pod is started anew");
    // The other one goes on meanwhile: it renews its lease, if nothing else.
    sleep(Duration::from_secs(3)).await;
    let asked = api.asked();
    let writes = |who: &str| {
        let of = asked.iter().filter(|of| of.who == who && of.verb != "GET");
        of.cloned().collect::<Vec<_>>()
    };
    assert_eq!(writes("first"), [], "{}", first.log());
    assert!(!writes("second").is_empty(), "{}", second.log());
    assert!(first.log().contains("leadership was lost"), "{}", first.log());
    // One that is asked to end gives the lease back, so that nobody waits for it.
    second.signal(Signal::TERM);
    assert_eq!(second.until_end(10).await, Some(0));
    assert_eq!(holder(&api), "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_that_end_hide_nothing() {
    let api = world().await;
    let operator = Operator::start(&api, "one");
    for name in ["stays", "goes"] {
        api.put("moejobs", job(name));
    }
    api.mood(|mood| mood.scrapers.push("scraper".to_string()));
    let known = async || {
        let (_, text) = operator.scrape(Some("scraper")).await;
        let of = |name: &str| text.contains(&format!("{{namespace=\"team\",job=\"{name}\"}}"));
        (of("stays"), of("goes"), of("comes"))
    };
    for _ in 0..100 {
        if known().await == (true, true, false) {
            break;
        }
        sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(known().await, (true, true, false), "{}", operator.log());
    // What happens while nobody watches is found by the next list, an end among it.
    api.remove("moejobs", ("team", "goes"), true);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(known().await, (true, true, false), "nobody has told it");
    api.end_watches();
    api.put("moejobs", job("comes"));
    for _ in 0..150 {
        if known().await == (true, false, true) {
            break;
        }
        sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(known().await, (true, false, true), "{}", operator.log());
    assert!(holder(&api).starts_with("one"), "it leads as before");
}

/// Its pods are on their way out, and another job has its name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_was_deleted_while_nobody_led_stays_deleted() {
    let api = world().await;
    ["n1", "n2"].iter().for_each(|name| add_node(&api, name));
    let mut first = Operator::start(&api, "first");
    ["a", "b"].iter().for_each(|name| api.put("moejobs", job(name)));
    let pod = |name: &str| api.get("pods", ("team", name));
    until("both have a pod", 30, || pod("a-a1-0").is_some() && pod("b-a1-0").is_some()).await;
    let label = |pod: Value| pod["metadata"]["labels"]["moejob.dev/job-uid"].clone();
    let (old, other) = (label(pod("a-a1-0").expect("it is there")), pod("b-a1-0"));
    first.signal(Signal::KILL);
    first.until_end(10).await;
    api.remove("moejobs", ("team", "a"), false);
    api.put("moejobs", job("a"));
    let new = api.get("moejobs", ("team", "a")).unwrap_or_default()["metadata"]["uid"].take();
    assert_ne!(old, new);
    api.asked();
    let second = Operator::start(&api, "second");
    let of_new = || api.list("pods").into_iter().any(|pod| label(pod) == new);
    until("the new one has a pod", LEASE_S + 30, of_new).await;
    sleep(Duration::from_secs(2)).await;
    let asked = api.asked();
    let deleted = asked.iter().filter(|of| of.verb == "DELETE" && of.what == "pods");
    assert_eq!(deleted.collect::<Vec<_>>(), Vec::<&api::Asked>::new(), "{}", second.log());
    let of_old = api.list("pods").into_iter().filter(|pod| label(pod.clone()) == old);
    assert_eq!(of_old.count(), 1, "nothing is made for a job that is gone: {}", second.log());
    assert_eq!(pod("b-a1-0").map(label), other.map(label), "the other job is as it was");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_are_for_those_who_may_read_them() {
    let api = world().await;
    api.mood(|mood| mood.scrapers.push("scraper".to_string()));
    let operator = Operator::start(&api, "one");
    until("it leads", 20, || holder(&api).starts_with("one")).await;
    let status = async |token: Option<&str>| {
        let (status, text) = operator.scrape(token).await;
        assert_eq!(status == 200, text.contains("moejob_leader 1"), "{status} {text}");
        status
    };
    assert_eq!(status(Some("scraper")).await, 200);
    assert_eq!(status(None).await, 401);
    assert_eq!(status(Some("stranger")).await, 401);
    assert_eq!(status(Some("someone")).await, 403);
    for what in ["POST tokenreviews", "POST subjectaccessreviews"] {
        api.mood(|mood| mood.failing = vec![what.to_string()]);
        assert_eq!(status(Some("scraper")).await, 503, "{what}");
    }
    api.mood(|mood| mood.failing.clear());
    // Without TLS there is nothing, and the kubelet's port has no figures.
    assert_eq!(process::plain(operator.metrics, "/metrics").await, "");
    assert!(process::plain(operator.health, "/metrics").await.starts_with("HTTP/1.1 404 "));
    assert!(process::plain(operator.health, "/healthz").await.starts_with("HTTP/1.1 200 "));
    assert!(process::plain(operator.health, "/readyz").await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_would_lose_its_own_fields_does_not_lead() {
    let api = world().await;
    let schema = "/spec/versions/0/schema/openAPIV3Schema/properties";
    let without = |part: &str, name: &str| {
        let mut old = crd::definition();
        let fields = old.pointer_mut(&format!("{schema}/{part}/properties"));
        let fields = fields.and_then(Value::as_object_mut).expect("fields");
        assert!(fields.remove(name).is_some());
        api.put("customresourcedefinitions", old);
    };
    without("status", "recordMore");
    let operator = Operator::start(&api, "one");
    until("it says so", 20, || operator.log().contains("would prune status.recordMore")).await;
    sleep(Duration::from_secs(3)).await;
    assert_eq!(holder(&api), "");
    let ready = process::plain(operator.health, "/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 503 ") && ready.contains("status.recordMore"), "{ready}");
    assert_eq!(operator.log().matches("would prune").count(), 1, "it is said once");
    // A field of the spec that is missing there nobody can set: that hinders nobody.
    without("spec", "suspend");
    until("it leads", 20, || holder(&api).starts_with("one")).await;
    assert!(operator.log().contains("does not know spec.suspend"), "{}", operator.log());
    let ready = process::plain(operator.health, "/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 200 "), "{ready}");
}

/// A rollback applies its own definition under a leader: each of its writes would fail or be cut.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_definition_under_a_leader_is_told_once_and_by_its_fields() {
    let api = world().await;
    let operator = Operator::start(&api, "one");
    until("it leads", 20, || holder(&api).starts_with("one")).await;
    let mut old = crd::definition();
    let fields = "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties";
    let fields = old.pointer_mut(fields).and_then(Value::as_object_mut).expect("fields");
    assert!(fields.remove("enginesLost").is_some());
    api.put("customresourcedefinitions", old);
    until("it says so", 40, || operator.log().contains("would prune status.enginesLost")).await;
    let ready = process::plain(operator.health, "/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 503 ") && ready.contains("enginesLost"), "{ready}");
    sleep(Duration::from_secs(32)).await;
    assert_eq!(operator.log().matches("would prune").count(), 1, "it is said once");
    assert!(holder(&api).starts_with("one"), "nobody else could do better");
    api.put("customresourcedefinitions", crd::definition());
    until("it is whole again", 40, || operator.log().contains("is whole again")).await;
    let ready = process::plain(operator.health, "/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 200 "), "{ready}");
}

/// A gang trains whose pods were sealed by another key: nobody could know them as the job's own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_authority_that_sealed_the_pods_nobody_leads() {
    let replaced = Keyring::new().expect("keys").write();
    for (what, data) in [("emptied", None), ("replaced", Some(replaced))] {
        let api = world().await;
        let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
        let (worker, node) = ("a-a1-0".to_string(), "n0".to_string());
        let member = Member { rank: 0, worker, node, address: "127.0.0.1:1".to_string() };
        let gang = Gang {
            attempt: 1,
            digest: "d".to_string(),
            layout,
            members: vec![member],
            resumed_at: 0,
            started_at: 1,
            stepped: true,
            stop_requested: None,
            broken: None,
            ended: None,
            inherited: false,
        };
        let record = Record { attempt: 1, births: 1, gang: Some(gang), ..Record::default() };
        let more = More { keyring: "another".to_string(), ..More::default() };
        let saved = Saved { term: 4, record, more, ..Saved::default() };
        let mut object = job("a");
        object["metadata"]["uid"] = json!("uid-a");
        object["status"] = json!({ "record": record::write(&saved),
            "recordMore": record::write_more(&saved.more) });
        api.put("moejobs", object);
        api.put("pods", json!({
            "metadata": { "name": "a-a1-0", "namespace": "team",
                "labels": { "moejob.dev/job-uid": "uid-a" },
                "annotations": { "moejob.dev/seal": "v2:by another key" } },
            "spec": { "nodeName": "n0", "containers": [] },
            "status": { "phase": "Running" },
        }));
        if let Some(data) = data {
            api.put("secrets", json!({
                "metadata": { "name": "moejob-authority", "namespace": NAMESPACE }, "data": data,
            }));
        }
        let mut operator = Operator::start(&api, "one");
        let code = operator.until_end(30).await;
        let log = operator.log();
        assert_ne!(code, Some(0), "{what}: {log}");
        let why = "the authority's Secret is not the one by which 1 pod of 1 job was made";
        assert!(log.contains(why) && log.contains("restore it"), "{what}: {log}");
        assert_eq!(holder(&api), "", "{what}: another one may try");
        let touched = |of: &api::Asked| {
            of.verb != "GET" && (of.what.starts_with("pods") || of.what.starts_with("moejobs"))
        };
        let touched: Vec<_> = api.asked().into_iter().filter(touched).collect();
        assert_eq!(touched, [], "{what}");
    }
}

/// A template of a tenant that no reader takes is that job's matter alone: others are led, and the
/// next list is read as well as the first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_job_that_nobody_can_read_is_invalid_and_others_are_led() {
    let api = world().await;
    let mut deep = job("deep");
    deep["spec"]["podTemplate"] = (0..140).fold(json!(1), |inner, _| json!([inner]));
    let mut long = job("long");
    long["spec"]["podTemplate"] = json!({ "spec": vec![0; 700_000] });
    for job in [deep, long, job("a")] {
        api.put("moejobs", job);
    }
    let _first = Operator::start(&api, "first");
    until("the good one is led", 30, || api.get("pods", ("team", "a-a1-0")).is_some()).await;
    for (name, why) in [
        ("deep", "141 levels of nesting, at most 64"),
        ("long", "bytes as JSON, at most 65536"),
    ] {
        let is_told = || {
            let job = api.get("moejobs", ("team", name)).expect("it is there");
            let told = job["status"]["conditions"].to_string().contains(why);
            told && job["status"]["phase"] == "Invalid"
        };
        until("the other one is invalid", 20, is_told).await;
    }
}

/// `helm upgrade --force` replaces the Secret by an empty one. Who leads writes back what it holds,
/// and says so: after a restart nobody could lead the gangs that train.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_that_was_emptied_gets_back_what_the_leader_holds() {
    let api = world().await;
    let mut operator = Operator::start(&api, "one");
    until("it leads", 30, || holder(&api).starts_with("one")).await;
    let secret = (NAMESPACE, "moejob-authority");
    let data = || api.get("secrets", secret).expect("it is there")["data"].clone();
    let before = data();
    assert!(before["authority.key"].is_string(), "it was filled at the start");
    api.edit("secrets", secret, |secret| secret["data"] = Value::Null);
    until("it is whole again", 40, || data() == before).await;
    operator.signal(Signal::TERM);
    operator.until_end(20).await;
    let log = operator.log();
    assert!(log.contains("Secret moejob-system/moejob-authority was emptied"), "{log}");
}
