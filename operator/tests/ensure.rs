//! What the writer does to an API server for an object that a job shall have.

use kube::{Client, Config};
use moejob::apply::Writer;
use moejob::lease::Deadline;
use moejob_plan::lead::{JobName, Origin, Write, WriteErrorKind, Written, owner};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

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
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let of = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                of.serve(stream).await;
            }
        });
        let client = Client::try_from(Config::new(url.parse().expect("a URL"))).expect("a client");
        (server, Writer::new(client, "pod_1".to_string(), Deadline::never()))
    }

    /// One request a connection.
    async fn serve(&self, stream: TcpStream) -> Option<()> {
        let mut stream = BufReader::new(stream);
        let (mut first, mut length) = (String::new(), 0);
        stream.read_line(&mut first).await.ok()?;
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).await.ok()?;
            let line = line.trim().to_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().ok()?;
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.ok()?;
        let words: Vec<&str> = first.split_whitespace().collect();
        let path = words[1].split('?').next().unwrap_or_default();
        let (status, answer) = self.answer(words[0], path, &body);
        let text = answer.to_string();
        let head = format!(
            "HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
             connection: close\r\n\r\n{text}",
            text.len()
        );
        stream.write_all(head.as_bytes()).await.ok()
    }

    fn answer(&self, method: &str, path: &str, body: &[u8]) -> (u16, Value) {
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        let rest = path.strip_prefix(POLICIES).unwrap_or_else(|| panic!("{path}"));
        let name = rest.strip_prefix('/').map_or_else(|| name_of(&body), str::to_string);
        self.asked.lock().unwrap().push(format!("{method} {name}"));
        let failure = |code: u16, reason: &str| {
            let kind = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure",
                "message": reason, "reason": reason, "code": code });
            (code, kind)
        };
        let mut objects = self.objects.lock().unwrap();
        let Some(present) = objects.get(&name).cloned() else {
            if method == "POST" {
                objects.insert(name, body.clone());
                return (201, body);
            }
            return failure(404, "NotFound");
        };
        match method {
            "GET" => (200, present),
            "POST" => failure(409, "AlreadyExists"),
            "PUT" if version_of(&body) == version_of(&present) => {
                objects.insert(name, body.clone());
                (200, body)
            }
            "DELETE" if body["preconditions"]["uid"] == present["metadata"]["uid"] => {
                objects.remove(&name);
                (200, present)
            }
            _ => failure(409, "Conflict"),
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

async fn ensure(writer: &Writer, before: Option<&str>) -> Written {
    let job = JobName { namespace: "team".into(), name: "a".into(), uid: "uid".into() };
    let before = before.map(str::to_string);
    let writes = vec![(Origin::Event, Write::Ensure { job, object: asked_for(), before })];
    writer.write_all(&owner("team", "uid"), writes).await.pop().expect("one result").1
}

#[tokio::test]
async fn what_is_missing_is_made_and_what_is_right_is_left_alone() {
    let (server, writer) = Server::start(&[]).await;
    assert_eq!(ensure(&writer, None).await, Ok(None));
    assert_eq!(server.asked(), ["GET moejob-a", "POST moejob-a"]);
    assert_eq!(server.object("moejob-a").expect("made")["spec"], asked_for()["spec"]);
    assert_eq!(ensure(&writer, None).await, Ok(None));
    assert_eq!(server.asked(), ["GET moejob-a"]);
    // The API server has filled in defaults.
    let more = json!({ "podSelector": {}, "ingress": [{ "x": 1 }], "policyTypes": ["Ingress"] });
    let (server, writer) = Server::start(&[policy("moejob-a", "uid", more)]).await;
    assert_eq!(ensure(&writer, None).await, Ok(None));
    assert_eq!(server.asked(), ["GET moejob-a"]);
}

#[tokio::test]
async fn the_jobs_own_is_replaced_on_the_version_that_was_seen() {
    let other = policy("moejob-a", "uid", json!({ "podSelector": {}, "ingress": [] }));
    let (server, writer) = Server::start(&[other]).await;
    assert_eq!(ensure(&writer, None).await, Ok(None));
    assert_eq!(server.asked(), ["GET moejob-a", "PUT moejob-a"]);
    let now = server.object("moejob-a").expect("there");
    assert_eq!(now["spec"], asked_for()["spec"]);
    assert_eq!(now["metadata"]["resourceVersion"], "7", "it was sent with what was seen");
}

#[tokio::test]
async fn what_is_not_the_jobs_is_neither_changed_nor_removed() {
    let admins = policy("moejob-a", "another", json!({ "podSelector": {}, "ingress": [] }));
    let (server, writer) = Server::start(std::slice::from_ref(&admins)).await;
    let error = ensure(&writer, None).await.expect_err("not ours");
    assert_eq!(error.kind, WriteErrorKind::NotOurs);
    assert!(error.message.contains("moejob-a"), "{}", error.message);
    assert_eq!(server.asked(), ["GET moejob-a"]);
    assert_eq!(server.object("moejob-a"), Some(admins));
    // The same under the name of releases before, which was the job's own.
    let admins = policy("a", "another", json!({ "podSelector": {} }));
    let (server, writer) = Server::start(std::slice::from_ref(&admins)).await;
    assert_eq!(ensure(&writer, Some("a")).await, Ok(None));
    assert_eq!(server.asked(), ["GET a", "GET moejob-a", "POST moejob-a"]);
    assert_eq!(server.object("a"), Some(admins));
}

#[tokio::test]
async fn an_object_of_releases_before_goes_first() {
    let (server, writer) = Server::start(&[policy("a", "uid", json!({}))]).await;
    assert_eq!(ensure(&writer, Some("a")).await, Ok(None));
    assert_eq!(server.asked(), ["GET a", "DELETE a", "GET moejob-a", "POST moejob-a"]);
    assert_eq!(server.object("a"), None);
}
