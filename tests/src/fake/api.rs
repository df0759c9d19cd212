//! An API server in this process: objects in memory, with versions, watches, preconditions and
//! identities, and hands to bring about what a real one does on a bad day.
//!
//! ```text
//! clients --HTTP/1.1, a token each--> serve -> answer -> objects, and what changed -> watches
//! ```
//!
//! It schedules and garbage-collects as it goes: a pod is bound to the node that its affinity
//! names, and what a deleted job owns goes with it. It admits all that it is not told to refuse.

#[path = "http.rs"]
mod http;
#[path = "wire.rs"]
mod wire;

use http::{Answer, Request, failure, read, write};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use wire::{Target, key_of, merge, version_of, with};

/// Changes that a watch may be behind.
const BEHIND_MAX: usize = 1 << 16;
/// Who is never cut off.
pub const KUBELET: &str = "kubelet";
/// Between two looks whether a cut is over.
const GLANCE: Duration = Duration::from_millis(20);

/// A write, or a question, as it was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The token of whoever asked.
    pub who: String,
    pub verb: String,
    /// `pods`, `moejobs/status`.
    pub what: String,
    /// `namespace/name`, or the name.
    pub name: String,
    pub status: u16,
}

/// What lies between operators and the server. Kubelets are not cut off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cut {
    #[default]
    None,
    /// Nobody is there: connections are closed.
    Away,
    /// One way alone: what is asked is done; answers and watches stand still until it is over.
    Unheard,
    /// There is no storage behind it: all fails, and watches tell nothing.
    Broken,
}

/// How the server behaves.
#[derive(Clone, Debug, Default)]
pub struct Mood {
    pub cut: Cut,
    /// Before a TokenReview is answered.
    pub review_takes: Duration,
    /// Before any other write is done.
    pub write_takes: Duration,
    /// Pods of jobs whose name begins so are refused, as by a quota.
    pub refused_prefix: Option<String>,
    /// `VERB RESOURCE` that fail with 500.
    pub failing: Vec<String>,
    /// Who may get /metrics, by token.
    pub scrapers: Vec<String>,
    /// Users whose requests are never answered.
    pub mute: Vec<String>,
}

#[derive(Default)]
struct State {
    mood: Mood,
    version: u64,
    uids: u64,
    /// By resource, then by namespace and name.
    objects: HashMap<String, BTreeMap<(String, String), Value>>,
    watches: Vec<(String, mpsc::Sender<String>)>,
    /// No watch is continued from a version before this.
    compacted: u64,
    asked: Vec<Asked>,
}

/// A clone is the same one.
#[derive(Clone)]
pub struct Api {
    state: Arc<Mutex<State>>,
    pub at: SocketAddr,
}

impl Api {
    /// Serves for as long as the runtime lives.
    ///
    /// # Errors
    /// When there is no port.
    pub async fn start() -> io::Result<Api> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let api = Api { state: Arc::default(), at: listener.local_addr()? };
        let of = api.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let api = of.clone();
                tokio::spawn(async move { api.serve(stream).await });
            }
        });
        Ok(api)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// By which `who` speaks to it.
    pub fn kubeconfig(&self, who: &str) -> String {
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "clusters": [{"name": "it", "cluster": {"server": format!("http://{}", self.at)}}],
            "users": [{"name": "it", "user": {"token": who}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        })
        .to_string()
    }

    pub fn mood(&self, change: impl FnOnce(&mut Mood)) {
        change(&mut self.state().mood);
    }

    /// Puts an object there, whatever was there before.
    pub fn put(&self, resource: &str, object: Value) {
        let mut state = self.state();
        let key = key_of(&object);
        let known = state.objects.get(resource).is_some_and(|all| all.contains_key(&key));
        state.keep(resource, object, if known { "MODIFIED" } else { "ADDED" });
    }

    /// As a person changes one.
    pub fn edit(
        &self,
        resource: &str,
        (namespace, name): (&str, &str),
        edit: impl FnOnce(&mut Value),
    ) {
        let mut state = self.state();
        let key = (namespace.to_string(), name.to_string());
        let Some(mut object) = state.objects.get(resource).and_then(|all| all.get(&key)).cloned()
        else {
            return;
        };
        edit(&mut object);
        let generation = object["metadata"]["generation"].as_i64().unwrap_or(1);
        object["metadata"]["generation"] = json!(generation + 1);
        state.keep(resource, object, "MODIFIED");
    }

    /// Deletes it at once, with all that it owns. `unseen`: no watch hears of it.
    pub fn remove(&self, resource: &str, (namespace, name): (&str, &str), unseen: bool) {
        let mut state = self.state();
        let watches = if unseen { std::mem::take(&mut state.watches) } else { Vec::new() };
        state.remove(resource, (namespace.to_string(), name.to_string()));
        state.watches.extend(watches);
    }

    pub fn get(&self, resource: &str, key: (&str, &str)) -> Option<Value> {
        self.read(resource, key, Value::clone)
    }

    /// A part of an object, without a copy of the whole.
    pub fn read<T>(
        &self,
        resource: &str,
        (namespace, name): (&str, &str),
        part: impl FnOnce(&Value) -> T,
    ) -> Option<T> {
        let key = (namespace.to_string(), name.to_string());
        self.state().objects.get(resource)?.get(&key).map(part)
    }

    /// How many there are.
    pub fn count(&self, resource: &str) -> usize {
        self.state().objects.get(resource).map_or(0, BTreeMap::len)
    }

    pub fn list(&self, resource: &str) -> Vec<Value> {
        self.map(resource, Value::clone)
    }

    /// A part of each of them.
    pub fn map<T>(&self, resource: &str, part: impl Fn(&Value) -> T) -> Vec<T> {
        let state = self.state();
        state.objects.get(resource).into_iter().flat_map(BTreeMap::values).map(part).collect()
    }

    /// All that was asked since this was last asked.
    pub fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.state().asked)
    }

    /// Of what was asked since, so many were for this.
    pub fn asked_for(&self, what: &str) -> usize {
        self.state().asked.iter().filter(|of| of.what == what).count()
    }

    /// Ends all watches; one that is continued from before must begin anew.
    pub fn end_watches(&self) {
        let mut state = self.state();
        state.watches.clear();
        state.compacted = state.version + 1;
        state.version += 1;
    }

    async fn serve(&self, stream: TcpStream) -> Option<()> {
        stream.set_nodelay(true).ok()?;
        let mut stream = BufReader::new(stream);
        loop {
            let request = read(&mut stream).await?;
            let (mute, takes) = {
                let mood = &self.state().mood;
                let takes = match request.method.as_str() {
                    "GET" => Duration::ZERO,
                    _ if request.path.ends_with("/tokenreviews") => mood.review_takes,
                    _ => mood.write_takes,
                };
                (mood.mute.contains(&request.who), takes)
            };
            if mute {
                std::future::pending::<()>().await;
            }
            let cut = self.cut(&request.who);
            let is_watch = request.query.get("watch").is_some_and(|of| of == "true" || of == "1");
            if cut == Cut::Away {
                return None;
            }
            if is_watch && cut != Cut::Broken {
                return self.watch(stream, &request).await;
            }
            if !takes.is_zero() {
                tokio::time::sleep(takes).await;
            }
            let answer = match cut {
                Cut::Broken => failure(500, "InternalError", "etcdserver: no leader"),
                _ => self.state().answer(&request),
            };
            self.until_heard(&request.who, Cut::Unheard).await?;
            write(&mut stream, &answer).await?;
        }
    }

    fn cut(&self, who: &str) -> Cut {
        if who == KUBELET { Cut::None } else { self.state().mood.cut }
    }

    /// Waits while `cut` holds this back; None when the connection is closed.
    async fn until_heard(&self, who: &str, silenced: Cut) -> Option<()> {
        loop {
            match self.cut(who) {
                Cut::Away => return None,
                Cut::None => return Some(()),
                Cut::Broken if silenced != Cut::Broken => return Some(()),
                Cut::Unheard | Cut::Broken => tokio::time::sleep(GLANCE).await,
            }
        }
    }

    async fn watch(&self, mut stream: BufReader<TcpStream>, request: &Request) -> Option<()> {
        let head = "HTTP/1.1 200 -\r\ncontent-type: application/json\r\n\
            transfer-encoding: chunked\r\n\r\n";
        stream.write_all(head.as_bytes()).await.ok()?;
        let target = Target::of(&request.path)?;
        let from = request.query.get("resourceVersion").and_then(|of| of.parse::<u64>().ok());
        let (sender, mut lines) = mpsc::channel(BEHIND_MAX);
        {
            let mut state = self.state();
            let from = from.unwrap_or(0);
            if from < state.compacted {
                let gone = failure(410, "Expired", "too old resource version");
                drop(sender.try_send(json!({"type": "ERROR", "object": gone.1}).to_string()));
            } else {
                // What has come since the list. (A deletion since then is missed, as by a client
                // whose watch begins late: it is found by the next list.)
                let all = state.objects.get(&target.resource).into_iter();
                for object in all.flat_map(BTreeMap::values) {
                    if version_of(object) > from {
                        let line = json!({"type": "ADDED", "object": object}).to_string();
                        drop(sender.try_send(line));
                    }
                }
                state.watches.push((target.resource, sender));
            }
        }
        loop {
            let line = match tokio::time::timeout(GLANCE, lines.recv()).await {
                Ok(Some(line)) => Some(line),
                Ok(None) => break,
                Err(_) => None,
            };
            self.until_heard(&request.who, Cut::Broken).await?;
            let Some(mut line) = line else { continue };
            line.push('\n');
            let chunk = format!("{:x}\r\n{line}\r\n", line.len());
            stream.write_all(chunk.as_bytes()).await.ok()?;
        }
        stream.write_all(b"0\r\n\r\n").await.ok()
    }
}

impl State {
    fn answer(&mut self, request: &Request) -> Answer {
        let Some(target) = Target::of(&request.path) else {
            return failure(404, "NotFound", &request.path);
        };
        let mut what = target.resource.clone();
        if !target.subresource.is_empty() {
            what = format!("{what}/{}", target.subresource);
        }
        let of_body = request.body["metadata"]["name"].as_str().unwrap_or_default();
        let name = if target.name.is_empty() { of_body } else { &target.name }.to_string();
        let answer = match self.mood.failing.contains(&format!("{} {what}", request.method)) {
            true => failure(500, "InternalError", "as it was told"),
            false => self.act(request, &target, &what),
        };
        let name = match target.namespace.is_empty() {
            true => name,
            false => format!("{}/{name}", target.namespace),
        };
        let (who, verb) = (request.who.clone(), request.method.clone());
        self.asked.push(Asked { who, verb, what, name, status: answer.0 });
        answer
    }

    fn act(&mut self, request: &Request, target: &Target, what: &str) -> Answer {
        let body = request.body.clone();
        match (request.method.as_str(), what) {
            (_, "tokenreviews") => (201, self.review(body)),
            (_, "subjectaccessreviews") => {
                let user = body["spec"]["user"].as_str().unwrap_or_default();
                let allowed = self.mood.scrapers.iter().any(|of| of == user);
                (201, with(body, "status", json!({ "allowed": allowed })))
            }
            ("POST", "serviceaccounts/token") => {
                let pod = &body["spec"]["boundObjectRef"];
                let text = |of: &Value| of.as_str().unwrap_or_default().to_string();
                let words = [text(&pod["name"]), text(&pod["uid"])];
                let token = format!("pod:{}:{}", target.namespace, words.join(":"));
                let end = "2100-01-01T00:00:00Z";
                let status = json!({ "token": token, "expirationTimestamp": end });
                (201, with(body, "status", status))
            }
            ("GET", _) if target.name.is_empty() => self.list(target),
            ("GET", _) => match self.object(target) {
                Some(object) => (200, object),
                None => failure(404, "NotFound", &target.name),
            },
            ("POST", _) => self.create(target, body),
            ("PUT", _) => self.replace(target, body),
            ("PATCH", _) => self.patch(target, body),
            ("DELETE", _) => self.delete(target, &body),
            _ => failure(405, "MethodNotAllowed", &request.method),
        }
    }

    fn object(&self, target: &Target) -> Option<Value> {
        let key = (target.namespace.clone(), target.name.clone());
        self.objects.get(&target.resource)?.get(&key).cloned()
    }

    fn list(&self, target: &Target) -> Answer {
        let here = |object: &&Value| {
            target.namespace.is_empty() || object["metadata"]["namespace"] == target.namespace
        };
        let all = self.objects.get(&target.resource).into_iter().flat_map(BTreeMap::values);
        let items: Vec<&Value> = all.filter(here).collect();
        let version = self.version.to_string();
        (200, json!({ "kind": "List", "apiVersion": "v1", "items": items,
            "metadata": { "resourceVersion": version } }))
    }

    fn create(&mut self, target: &Target, mut object: Value) -> Answer {
        if !target.namespace.is_empty() {
            object["metadata"]["namespace"] = json!(target.namespace);
        }
        let key = key_of(&object);
        if self.objects.get(&target.resource).is_some_and(|all| all.contains_key(&key)) {
            return failure(409, "AlreadyExists", &key.1);
        }
        let refused = |prefix: &String| key.1.starts_with(prefix.as_str());
        if target.resource == "pods" && self.mood.refused_prefix.as_ref().is_some_and(refused) {
            return failure(403, "Forbidden", "exceeded quota: pods");
        }
        if target.resource == "events" {
            return (201, object);
        }
        self.uids += 1;
        object["metadata"]["uid"] = json!(format!("00000000-0000-0000-0000-{:012}", self.uids));
        object["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
        object["metadata"]["generation"] = json!(1);
        if target.resource == "pods" {
            let path = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution\
                /nodeSelectorTerms/0/matchFields/0/values/0";
            if let Some(node) = object.pointer(path).cloned() {
                object["spec"]["nodeName"] = node;
            }
            object["status"] = json!({ "phase": "Pending" });
        }
        (201, self.keep(&target.resource, object, "ADDED"))
    }

    fn replace(&mut self, target: &Target, mut object: Value) -> Answer {
        let Some(present) = self.object(target) else {
            return failure(404, "NotFound", &target.name);
        };
        let asked = &object["metadata"]["resourceVersion"];
        if !asked.is_null() && *asked != present["metadata"]["resourceVersion"] {
            return failure(409, "Conflict", "it has changed");
        }
        object["metadata"]["uid"] = present["metadata"]["uid"].clone();
        (200, self.keep(&target.resource, object, "MODIFIED"))
    }

    fn patch(&mut self, target: &Target, patch: Value) -> Answer {
        let Some(mut object) = self.object(target) else {
            return failure(404, "NotFound", &target.name);
        };
        for field in ["resourceVersion", "uid"] {
            let asked = &patch["metadata"][field];
            if !asked.is_null() && *asked != object["metadata"][field] {
                return failure(409, "Conflict", "it has changed");
            }
        }
        match (target.subresource.as_str(), target.resource.as_str()) {
            // Applied by its one owner: what it leaves out goes.
            ("status", "moejobs") => object["status"] = patch["status"].clone(),
            ("status", _) => merge(&mut object["status"], &patch["status"]),
            _ => merge(&mut object, &patch),
        }
        (200, self.keep(&target.resource, object, "MODIFIED"))
    }

    fn delete(&mut self, target: &Target, how: &Value) -> Answer {
        let Some(mut object) = self.object(target) else {
            return failure(404, "NotFound", &target.name);
        };
        let uid = &how["preconditions"]["uid"];
        if !uid.is_null() && *uid != object["metadata"]["uid"] {
            return failure(409, "Conflict", "it is another one");
        }
        let over = matches!(object["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        let at_once = how["gracePeriodSeconds"] == 0 || target.resource != "pods" || over;
        if at_once {
            self.remove(&target.resource, (target.namespace.clone(), target.name.clone()));
            return (200, object);
        }
        object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        object["metadata"]["deletionGracePeriodSeconds"] = how["gracePeriodSeconds"].clone();
        (200, self.keep(&target.resource, object, "MODIFIED"))
    }

    fn remove(&mut self, resource: &str, key: (String, String)) {
        let Some(mut object) = self.objects.get_mut(resource).and_then(|all| all.remove(&key))
        else {
            return;
        };
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.tell(resource, "DELETED", &object);
        // Of what there is here only jobs own anything.
        if resource != "moejobs" {
            return;
        }
        let uid = object["metadata"]["uid"].clone();
        let owned = |object: &Value| object["metadata"]["ownerReferences"][0]["uid"] == uid;
        let mut all = Vec::new();
        for (resource, objects) in &self.objects {
            let of = objects.iter().filter(|(_, object)| !uid.is_null() && owned(object));
            all.extend(of.map(|(key, _)| (resource.clone(), key.clone())));
        }
        for (resource, key) in all {
            let Some(mut object) = self.objects.get(&resource).and_then(|of| of.get(&key)).cloned()
            else {
                continue;
            };
            if resource != "pods" {
                self.remove(&resource, key);
                continue;
            }
            object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            self.keep(&resource, object, "MODIFIED");
        }
    }

    fn keep(&mut self, resource: &str, mut object: Value, kind: &str) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        if object["metadata"]["uid"].is_null() {
            self.uids += 1;
            object["metadata"]["uid"] = json!(format!("00000000-0000-0000-0001-{:012}", self.uids));
            object["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
            object["metadata"]["generation"] = json!(1);
        }
        let all = self.objects.entry(resource.to_string()).or_default();
        all.insert(key_of(&object), object.clone());
        self.tell(resource, kind, &object);
        object
    }

    fn tell(&mut self, resource: &str, kind: &str, object: &Value) {
        if self.watches.iter().all(|(of, _)| of != resource) {
            return;
        }
        let line = json!({ "type": kind, "object": object }).to_string();
        self.watches.retain(|(of, sender)| of != resource || sender.try_send(line.clone()).is_ok());
    }

    /// A token is `pod:NAMESPACE:NAME:UID`, or the name of a person.
    fn review(&self, review: Value) -> Value {
        let token = review["spec"]["token"].as_str().unwrap_or_default().to_string();
        let words: Vec<&str> = token.split(':').collect();
        let status = match words[..] {
            ["pod", namespace, name, uid] => {
                let pods = self.objects.get("pods");
                let pod = pods.and_then(|all| all.get(&(namespace.to_string(), name.to_string())));
                let same = pod.filter(|pod| pod["metadata"]["uid"] == uid);
                json!({
                    "authenticated": same.is_some(),
                    "audiences": review["spec"]["audiences"],
                    "user": {
                        "username": format!("system:serviceaccount:{namespace}:default"),
                        "extra": {
                            "authentication.kubernetes.io/pod-name": [name],
                            "authentication.kubernetes.io/pod-uid": [uid],
                        },
                    },
                })
            }
            _ if token.starts_with("stranger") => json!({ "authenticated": false }),
            _ => json!({ "authenticated": true, "user": { "username": token } }),
        };
        with(review, "status", status)
    }
}
