//! What the writer does to an API server for an object that a job shall have.

mod server;

use moejob::apply::Writer;
use moejob::lease::Deadline;
use moejob_plan::lead::{JobName, Origin, Write, WriteErrorKind, Written, owner};
use serde_json::{Value, json};
use server::{Answer, Request, client, failure};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

const POLICIES: &str = "/apis/networking.k8s.io/v1/namespaces/team/networkpolicies";

/// An API server of NetworkPolicies: what there is by name, and what was asked of it.
#[derive(Clone, Default)]
struct Server {
    objects: Arc<Mutex<BTreeMap<String, Value>>>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    async fn start(objects: &[Value]) -> (Server, Writer) {
        let server = Server::default();
        for object in objects {
            server.objects.lock().unwrap().insert(name_of(object), object.clone());
        }
        let of = server.clone();
        let client = client(move |request| of.answer(&request)).await;
        (server, Writer::new(client, "pod_1".to_string(), Deadline::never()))
    }

    fn answer(&self, request: &Request) -> Answer {
        let (method, path, body) = (request.method.as_str(), &request.path, &request.body);
        let rest = path.strip_prefix(POLICIES).unwrap_or_else(|| panic!("{path}"));
        let name = rest.strip_prefix('/').map_or_else(|| name_of(body), str::to_string);
        self.asked.lock().unwrap().push(format!("{method} {name}"));
        let refused = |code: u16, reason: &str| failure(code, reason, reason);
        let mut objects = self.objects.lock().unwrap();
        let Some(present) = objects.get(&name).cloned() else {
            if method == "POST" {
                objects.insert(name, body.clone());
                return (201, body.clone());
            }
            return refused(404, "NotFound");
        };
        match method {
            "GET" => (200, present),
            "POST" => refused(409, "AlreadyExists"),
            "PUT" if version_of(body) == version_of(&present) => {
                objects.insert(name, body.clone());
                (200, body.clone())
            }
            _ => refused(409, "Conflict"),
        }
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }

    fn object(&self, name: &str) -> Option<Value> {
        self.objects.lock().unwrap().get(name).cloned()
    }
}

fn name_of(object: &Value) -> String {
    object["metadata"]["name"].as_str().unwrap_or_default().to_string()
}

fn version_of(object: &Value) -> Option<&str> {
    object["metadata"]["resourceVersion"].as_str()
}

/// A policy of that name, as the API server has it.
fn policy(name: &str, owner_uid: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": format!("uid-of-{name}"),
            "resourceVersion": "7",
            "ownerReferences": [{ "apiVersion": "moejob.dev/v1alpha1", "kind": "MoeJob",
                "name": "a", "uid": owner_uid, "controller": true }],
        },
        "spec": spec,
    })
}

fn asked_for() -> Value {
    let mut object = policy("moejob-a", "uid", json!({ "podSelector": {}, "ingress": [{}] }));
    for field in ["uid", "resourceVersion"] {
        object["metadata"].as_object_mut().expect("metadata").remove(field);
    }
    object
}

async fn ensure(writer: &Writer) -> Written {
    write(writer, false).await
}

async fn write(writer: &Writer, fresh: bool) -> Written {
    let job = JobName { namespace: "team".into(), name: "a".into(), uid: "uid".into() };
    let writes = vec![(Origin::Event, Write::Ensure { job, object: asked_for(), fresh })];
    writer.write_all(&owner("team", "uid"), writes).await.pop().expect("one result").1
}

#[tokio::test]
async fn what_is_missing_is_made_and_what_is_right_is_left_alone() {
    let (server, writer) = Server::start(&[]).await;
    assert_eq!(ensure(&writer).await, Ok(None));
    assert_eq!(server.asked(), ["GET moejob-a", "POST moejob-a"]);
    assert_eq!(server.object("moejob-a").expect("made")["spec"], asked_for()["spec"]);
    assert_eq!(ensure(&writer).await, Ok(None));
    assert_eq!(server.asked(), ["GET moejob-a"]);
    // The API server has filled in defaults.
    let more = json!({ "podSelector": {}, "ingress": [{ "x": 1 }], "policyTypes": ["Ingress"] });
    let (server, writer) = Server::start(&[policy("moejob-a", "uid", more)]).await;
    assert_eq!(ensure(&writer).await, Ok(None));
    assert_eq!(server.asked(), ["GET moejob-a"]);
}

/// One request is all that it takes; only where there is one it is looked at.
#[tokio::test]
async fn what_nobody_has_made_is_made_without_a_look() {
    let (server, writer) = Server::start(&[]).await;
    assert_eq!(write(&writer, true).await, Ok(None));
    assert_eq!(server.asked(), ["POST moejob-a"]);
    assert_eq!(write(&writer, true).await, Ok(None));
    assert_eq!(server.asked(), ["POST moejob-a", "GET moejob-a"]);
    let admins = policy("moejob-a", "another", json!({ "podSelector": {}, "ingress": [] }));
    let (server, writer) = Server::start(std::slice::from_ref(&admins)).await;
    let error = write(&writer, true).await.expect_err("not ours");
    assert_eq!(error.kind, WriteErrorKind::NotOurs);
    assert_eq!(server.asked(), ["POST moejob-a", "GET moejob-a"]);
    assert_eq!(server.object("moejob-a"), Some(admins));
}

#[tokio::test]
async fn the_jobs_own_is_replaced_on_the_version_that_was_seen() {
    let other = policy("moejob-a", "uid", json!({ "podSelector": {}, "ingress": [] }));
    let (server, writer) = Server::start(&[other]).await;
    assert_eq!(ensure(&writer).await, Ok(None));
    assert_eq!(server.asked(), ["GET moejob-a", "PUT moejob-a"]);
    let now = server.object("moejob-a").expect("there");
    assert_eq!(now["spec"], asked_for()["spec"]);
    assert_eq!(now["metadata"]["resourceVersion"], "7", "it was sent with what was seen");
}

#[tokio::test]
async fn what_is_not_the_jobs_is_neither_changed_nor_removed() {
    let admins = policy("moejob-a", "another", json!({ "podSelector": {}, "ingress": [] }));
    let (server, writer) = Server::start(std::slice::from_ref(&admins)).await;
    let error = ensure(&writer).await.expect_err("not ours");
    assert_eq!(error.kind, WriteErrorKind::NotOurs);
    assert!(error.message.contains("moejob-a"), "{}", error.message);
    assert_eq!(server.asked(), ["GET moejob-a"]);
    assert_eq!(server.object("moejob-a"), Some(admins));
}
