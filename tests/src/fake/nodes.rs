//! The kubelet of all fake nodes: it registers them and renews their leases, starts and ends the
//! workers of the pods that are bound to them, and says of each pod what a kubelet says.

use super::Gauge;
use super::gang::Gangs;
use super::worker::{self, Birth, Ending};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::authentication::v1::{
    BoundObjectReference, TokenRequest, TokenRequestSpec,
};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod, ServiceAccount};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, ResourceExt};
use moejob_protocol::pod::{ENV_AUTHORITY, ENV_JOB_UID, ENV_WORKER, TOKEN_AUDIENCE};
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;

pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Writes to the API server at once; kubelets are many, this machine is one.
const WRITES_MAX: usize = 32;
const ORDERS_EVERY: Duration = Duration::from_millis(50);

pub struct Options {
    pub nodes: u32,
    /// Nodes `fake-1` to `fake-N` of one rack, then the next.
    pub nodes_a_rack: u32,
    pub renew: Duration,
    pub pace: Duration,
    /// The folder with the files `silent` (a node a line) and `killed` (`namespace/pod` a line),
    /// which say what happens to nodes and workers, `hold`, the step after which gangs wait,
    /// `reset`, a number with each change of which all streams to leaders are reset, and
    /// `token-POD`, what that pod's worker shows in place of its token; while it is empty, the pod
    /// waits for it.
    pub orders: PathBuf,
    /// Pods get addresses of `first` and after.
    pub first: Ipv4Addr,
    pub gauge: Arc<Gauge>,
}

/// With the six digits that a lease asks for.
pub fn now() -> String {
    format!("{:.6}", Timestamp::now())
}

struct Running {
    endings: mpsc::Sender<Ending>,
    name: String,
}

struct Fleet {
    client: Client,
    /// A thread of their own for all workers: what kubelets tell does not wait for handshakes.
    workers: Handle,
    orders: PathBuf,
    gangs: Gangs,
    silent: HashMap<String, watch::Sender<bool>>,
    hold: watch::Sender<u64>,
    reset: watch::Sender<u64>,
    /// By uid.
    pods: Mutex<HashMap<String, Running>>,
    addresses: Mutex<u32>,
}

/// Runs the nodes until it is ended.
///
/// # Errors
/// When the API server refuses what a kubelet may do.
pub async fn run(client: Client, options: Options) -> Result<(), Failure> {
    let names: Vec<String> = (1..=options.nodes).map(|number| format!("fake-{number}")).collect();
    register(&client, &names, &options).await?;
    println!("registered {} nodes", names.len());
    let (hold, held) = watch::channel(u64::MAX);
    let (reset, resets) = watch::channel(0);
    let fleet = Arc::new(Fleet {
        client: client.clone(),
        workers: thread_of_workers()?,
        gangs: Gangs::new(options.pace, held, resets, options.gauge),
        hold,
        reset,
        orders: options.orders.clone(),
        silent: names.iter().map(|name| (name.clone(), watch::Sender::new(false))).collect(),
        pods: Mutex::default(),
        addresses: Mutex::new(u32::from(options.first)),
    });
    tokio::select! {
        done = renew(Arc::clone(&fleet), names, options.renew) => done,
        done = obey(Arc::clone(&fleet), options.orders) => done,
        done = follow(fleet) => done,
    }
}

/// Runs what is spawned on it, for as long as the process lives.
fn thread_of_workers() -> Result<Handle, Failure> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    let run = move || runtime.block_on(std::future::pending::<()>());
    std::thread::Builder::new().name("workers".to_string()).spawn(run)?;
    Ok(handle)
}

async fn register(client: &Client, names: &[String], options: &Options) -> Result<(), Failure> {
    let nodes = Api::<Node>::all(client.clone());
    let leases = Api::<Lease>::namespaced(client.clone(), "kube-node-lease");
    let all = names.iter().zip(0..).map(|(name, index)| {
        let rack = index / options.nodes_a_rack;
        let (nodes, leases) = (nodes.clone(), leases.clone());
        async move {
            let node = serde_json::from_value(node(name, rack))?;
            nodes.create(&PostParams::default(), &node).await?;
            let lease = serde_json::from_value(lease(name))?;
            leases.create(&PostParams::default(), &lease).await?;
            Ok::<(), Failure>(())
        }
    });
    futures::stream::iter(all).buffer_unordered(WRITES_MAX).try_collect().await
}

fn node(name: &str, rack: u32) -> Value {
    let now = now();
    let condition = |kind: &str, status: &str| {
        json!({
            "type": kind, "status": status, "reason": "Fake", "message": "",
            "lastHeartbeatTime": now, "lastTransitionTime": now,
        })
    };
    let resources = json!({ "cpu": "8", "memory": "64Gi", "pods": "110" });
    json!({
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "moejob.dev/node": "fake",
                "topology.kubernetes.io/zone": "zone-1",
                "topology.kubernetes.io/rack": format!("rack-{rack}"),
            },
        },
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [condition("Ready", "True"), condition("MemoryPressure", "False"),
                condition("DiskPressure", "False"), condition("PIDPressure", "False")],
        },
    })
}

fn lease(name: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": { "holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now() },
    })
}

/// Every node's lease once in `every`, evenly spread, but for those of silent nodes.
async fn renew(fleet: Arc<Fleet>, names: Vec<String>, every: Duration) -> Result<(), Failure> {
    let leases = Api::<Lease>::namespaced(fleet.client.clone(), "kube-node-lease");
    let pause = every / u32::try_from(names.len().max(1))?;
    loop {
        for name in &names {
            sleep(pause).await;
            if !*fleet.silent[name].borrow() {
                let (leases, name) = (leases.clone(), name.clone());
                tokio::spawn(async move {
                    let (how, spec) = (PatchParams::default(), json!({ "renewTime": now() }));
                    let patch = Patch::Merge(json!({ "spec": spec }));
                    if let Err(error) = leases.patch(&name, &how, &patch).await {
                        eprintln!("lease of {name}: {error}");
                    }
                });
            }
        }
    }
}

/// Reads the orders again and again: nodes that are silent, workers that are killed.
async fn obey(fleet: Arc<Fleet>, folder: PathBuf) -> Result<(), Failure> {
    let mut killed = HashSet::new();
    loop {
        sleep(ORDERS_EVERY).await;
        let read = |name| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        let silent = read("silent");
        let silent: HashSet<&str> = silent.lines().collect();
        for (name, sender) in &fleet.silent {
            let wanted = silent.contains(name.as_str());
            sender.send_if_modified(|is| std::mem::replace(is, wanted) != wanted);
        }
        let reset = read("reset").trim().parse().unwrap_or(0);
        fleet.reset.send_if_modified(|is| std::mem::replace(is, reset) != reset);
        let hold = read("hold").trim().parse().unwrap_or(u64::MAX);
        fleet.hold.send_if_modified(|is| std::mem::replace(is, hold) != hold);
        for name in read("killed").lines().map(str::to_string) {
            if killed.insert(name.clone()) {
                let pods = fleet.pods.lock().expect("no panic holds it");
                for pod in pods.values().filter(|pod| pod.name == name) {
                    let _ = pod.endings.try_send(Ending::Killed);
                }
            }
        }
    }
}

/// Follows the pods that are bound to a fake node.
async fn follow(fleet: Arc<Fleet>) -> Result<(), Failure> {
    let pods = Api::<Pod>::all(fleet.client.clone());
    let config = watcher::Config::default().fields("spec.nodeName!=");
    let mut changes = watcher(pods, config).default_backoff().applied_objects().boxed();
    while let Some(changed) = changes.next().await {
        match changed {
            Ok(pod) => fleet.on_pod(pod),
            Err(error) => eprintln!("pods: {error}"),
        }
    }
    Ok(())
}

impl Fleet {
    fn on_pod(self: &Arc<Fleet>, pod: Pod) {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
        let (Some(silent), Some(uid)) = (self.silent.get(&node), pod.uid()) else { return };
        let leaving = pod.metadata.deletion_timestamp.is_some();
        let phase = pod.status.as_ref().and_then(|status| status.phase.clone());
        let mut pods = self.pods.lock().expect("no panic holds it");
        match pods.get(&uid) {
            Some(running) if leaving => drop(running.endings.try_send(Ending::Asked)),
            Some(_) => {}
            None if leaving || phase.as_deref() == Some("Pending") => {
                let (endings, asked) = mpsc::channel(4);
                let name = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
                pods.insert(uid.clone(), Running { endings, name: name.clone() });
                let (fleet, silent) = (Arc::clone(self), silent.subscribe());
                tokio::spawn(async move {
                    let lived = fleet.live(&pod, leaving, silent, asked).await;
                    fleet.pods.lock().expect("no panic holds it").remove(&uid);
                    let buried = async {
                        lived?;
                        fleet.bury(&pod).await
                    };
                    if let Err(error) = buried.await {
                        eprintln!("{name}: {error}");
                    }
                });
            }
            None => {}
        }
    }

    /// The whole life of one pod.
    async fn live(
        &self,
        pod: &Pod,
        leaving: bool,
        mut silent: watch::Receiver<bool>,
        mut asked: mpsc::Receiver<Ending>,
    ) -> Result<(), Failure> {
        silent.wait_for(|silent| !silent).await?;
        let pods = Api::<Pod>::namespaced(
            self.client.clone(),
            &pod.namespace().unwrap_or_default(),
        );
        if leaving {
            return gone(&pods, pod).await;
        }
        let address = self.next_address();
        let birth = self.birth(pod, address).await?;
        let started = now();
        let running = json!({ "running": { "startedAt": started } });
        let status = status(pod, "Running", &started, address, &running);
        let is_worker = birth.is_some();
        let grace = pod.metadata.deletion_grace_period_seconds
            .or_else(|| pod.spec.as_ref()?.termination_grace_period_seconds)
            .unwrap_or(30);
        let work = async {
            let exit = match birth {
                Some(birth) => {
                    let (forward, endings) = mpsc::channel(4);
                    let run = worker::run(birth, self.gangs.clone(), silent.clone(), endings);
                    let mut run = EndedWith(self.workers.spawn(run));
                    let relay = async {
                        while let Some(ending) = asked.recv().await {
                            let _ = forward.try_send(ending);
                            if matches!(ending, Ending::Asked) {
                                // Then SIGKILL, as a kubelet does.
                                sleep(Duration::from_secs(grace.max(0).unsigned_abs())).await;
                                let _ = forward.try_send(Ending::Killed);
                            }
                        }
                        std::future::pending::<()>().await
                    };
                    tokio::select! {
                        exit = &mut run.0 => exit??,
                        () = relay => worker::EXIT_KILLED,
                    }
                }
                // A container that waits for its signal, as ours do that are not workers.
                None => match asked.recv().await {
                    Some(Ending::Asked) | None => 0,
                    Some(Ending::Killed) => worker::EXIT_KILLED,
                },
            };
            Ok::<i32, Failure>(exit)
        };
        let tell = async {
            patch(&pods, pod, status).await?;
            Ok::<(), Failure>(())
        };
        let (exit, ()) = tokio::try_join!(work, tell)?;
        silent.wait_for(|silent| !silent).await?;
        let phase = if exit == 0 { "Succeeded" } else { "Failed" };
        let reason = if exit == 0 { "Completed" } else { "Error" };
        let ended = json!({ "terminated": {
            "exitCode": exit, "reason": reason, "startedAt": started, "finishedAt": now(),
        } });
        let status = self::status(pod, phase, &started, address, &ended);
        if is_worker || exit != 0 {
            patch(&pods, pod, status).await?;
        }
        Ok(())
    }

    /// A pod that has ended is gone if it was deleted before it stopped being followed. Of a later
    /// deletion a change tells.
    async fn bury(&self, pod: &Pod) -> Result<(), Failure> {
        let namespace = pod.namespace().unwrap_or_default();
        let pods = Api::<Pod>::namespaced(self.client.clone(), &namespace);
        let found = pods.get_opt(&pod.name_any()).await?;
        let same = found.filter(|found| found.uid() == pod.uid());
        match same.is_some_and(|found| found.metadata.deletion_timestamp.is_some()) {
            true => gone(&pods, pod).await,
            false => Ok(()),
        }
    }

    fn next_address(&self) -> IpAddr {
        let mut next = self.addresses.lock().expect("no panic holds it");
        *next += 1;
        IpAddr::V4(Ipv4Addr::from(*next))
    }

    /// None for a pod that is no worker of moejob's, such as those that the floor is made of.
    async fn birth(&self, pod: &Pod, address: IpAddr) -> Result<Option<Birth>, Failure> {
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        let env: HashMap<&str, &str> = containers
            .flat_map(|container| container.env.iter().flatten())
            .filter_map(|variable| Some((variable.name.as_str(), variable.value.as_deref()?)))
            .collect();
        let (Some(worker), Some(job_uid), Some(authority)) =
            (env.get(ENV_WORKER), env.get(ENV_JOB_UID), env.get(ENV_AUTHORITY))
        else {
            return Ok(None);
        };
        Ok(Some(Birth {
            worker: worker.to_string(),
            job_uid: job_uid.to_string(),
            authority: authority.to_string(),
            token: match self.forged(pod).await {
                Some(token) => token,
                None => self.token(pod).await?,
            },
            address,
        }))
    }

    async fn forged(&self, pod: &Pod) -> Option<String> {
        let path = self.orders.join(format!("token-{}", pod.name_any()));
        loop {
            let token = std::fs::read_to_string(&path).ok()?;
            if !token.is_empty() {
                return Some(token);
            }
            sleep(ORDERS_EVERY).await;
        }
    }

    /// The projected token, bound to the pod, as the kubelet asks for it.
    async fn token(&self, pod: &Pod) -> Result<String, Failure> {
        let namespace = pod.namespace().unwrap_or_default();
        let accounts = Api::<ServiceAccount>::namespaced(self.client.clone(), &namespace);
        let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
        let request = TokenRequest {
            spec: TokenRequestSpec {
                audiences: vec![TOKEN_AUDIENCE.to_string()],
                expiration_seconds: Some(3600),
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".to_string()),
                    kind: Some("Pod".to_string()),
                    name: Some(pod.name_any()),
                    uid: pod.uid(),
                }),
            },
            ..TokenRequest::default()
        };
        let account = account.unwrap_or_else(|| "default".to_string());
        let how = PostParams::default();
        let made = accounts.create_token_request(&account, &how, &request).await?;
        Ok(made.status.map(|status| status.token).unwrap_or_default())
    }
}

/// A worker whose pod is given up ends with it.
struct EndedWith<T>(JoinHandle<T>);

impl<T> Drop for EndedWith<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn status(pod: &Pod, phase: &str, started: &str, address: IpAddr, state: &Value) -> Value {
    let running = phase == "Running";
    let condition = |kind: &str, holds: bool| {
        let status = if holds { "True" } else { "False" };
        json!({ "type": kind, "status": status, "lastTransitionTime": now() })
    };
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let containers: Vec<Value> = containers
        .map(|container| json!({
            "name": container.name, "image": container.image, "imageID": "fake", "ready": running,
            "started": running, "restartCount": 0, "state": state, "containerID": "fake://1",
        }))
        .collect();
    json!({ "status": {
        "phase": phase,
        "startTime": started,
        "podIP": address,
        "podIPs": [{ "ip": address }],
        "conditions": [condition("PodScheduled", true), condition("Initialized", true),
            condition("ContainersReady", running), condition("Ready", running)],
        "containerStatuses": containers,
    } })
}

/// A pod that is gone meanwhile is nothing to complain of.
async fn patch(pods: &Api<Pod>, pod: &Pod, mut status: Value) -> Result<(), Failure> {
    // Another pod of the same name is not meant.
    status["metadata"]["uid"] = json!(pod.uid());
    let patch = Patch::Merge(status);
    match pods.patch_status(&pod.name_any(), &PatchParams::default(), &patch).await {
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(()),
        other => other.map(drop).map_err(Into::into),
    }
}

async fn gone(pods: &Api<Pod>, pod: &Pod) -> Result<(), Failure> {
    let preconditions = Preconditions { uid: pod.uid(), resource_version: None };
    let how = DeleteParams {
        grace_period_seconds: Some(0),
        preconditions: Some(preconditions),
        ..DeleteParams::default()
    };
    match pods.delete(&pod.name_any(), &how).await {
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(()),
        other => other.map(drop).map_err(Into::into),
    }
}
