//! How long gangs take from apply to all Running on the fake nodes of a test cluster, beside the
//! floor (32 writers that create the same pods); what a lost worker costs; what the operator needs.
//!
//!   gangs ROUNDS [floor] SHAPE... [faults NODES[/SILENT]]
//!
//! A shape is JOBSxNODES or JOBSxNODESxRANKS, ranks of a node: 1x512, 64x8, 1x512x8.
//!
//! `tests/cluster/gangs` brings up what it needs and runs it. Rounds of floor and ours alternate;
//! medians count. With `floor` first, the floor alone is measured, without an operator.

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, ResourceExt};
use moejob_manifest::Job;
use moejob_plan::pods::{self, Birth, Surroundings};
use moejob_tests::cluster::{script, small_job};
use moejob_tests::spent;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io::{Seek, SeekFrom, Write};
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const NAMESPACE: &str = "default";
const WRITERS: usize = 32;
const PATIENCE: Duration = Duration::from_secs(180);
const LABEL: &str = "app.kubernetes.io/managed-by=moejob";
const OPERATOR: &str = "system:serviceaccount:moejob-system:moejob-operator";
/// What follows the last Running pod belongs to it as well.
const SETTLE: Duration = Duration::from_secs(3);

#[derive(Clone, Copy)]
struct Shape {
    jobs: u32,
    nodes: u32,
    /// Of a node.
    ranks: u32,
}

impl Shape {
    fn parse(text: &str) -> Result<Shape, Failure> {
        let numbers: Vec<u32> = text.split('x').map(str::parse).collect::<Result<_, _>>()?;
        match numbers[..] {
            [jobs, nodes] => Ok(Shape { jobs, nodes, ranks: 1 }),
            [jobs, nodes, ranks] => Ok(Shape { jobs, nodes, ranks }),
            _ => Err("a shape is JOBSxNODES or JOBSxNODESxRANKS".into()),
        }
    }

    fn pods(self) -> usize {
        (self.jobs * self.nodes) as usize
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let usage = "usage: gangs ROUNDS [floor] SHAPE... [faults NODES[/SILENT]]";
    let [rounds, words @ ..] = &words[..] else { return Err(usage.into()) };
    let rounds: u32 = rounds.parse()?;
    let client = Client::try_default().await?;
    claim(&client).await?;
    let (mut floor_alone, mut words) = (false, words.iter());
    if !words.as_slice().first().is_some_and(|word| word == "floor") {
        println!("operator, no job: {:.1} MB", memory()?);
    }
    while let Some(word) = words.next() {
        match word.as_str() {
            "floor" => floor_alone = true,
            "faults" => {
                let of = words.next().ok_or(usage)?;
                let (nodes, silent) = of.split_once('/').unwrap_or((of, "1"));
                faults(&client, rounds, nodes.parse()?, silent.parse()?).await?;
            }
            shape => compare(&client, rounds, Shape::parse(shape)?, floor_alone).await?,
        }
    }
    Ok(())
}

/// Floor and ours in turn.
async fn compare(
    client: &Client,
    rounds: u32,
    shape: Shape,
    floor_alone: bool,
) -> Result<(), Failure> {
    let name = match shape.ranks {
        1 => format!("{}x{}", shape.jobs, shape.nodes),
        ranks => format!("{}x{}x{ranks}", shape.jobs, shape.nodes),
    };
    let [mut floors, mut ours, mut writes, mut memories] = [const { Vec::new() }; 4];
    let mut cores = [const { Cores::new() }; 2];
    for round in 0..rounds {
        let took = floor(client, shape).await?;
        floors.push(took.seconds);
        add(&mut cores[0], took.cores);
        print!("{name}: floor {:.2} s", floors[floors.len() - 1]);
        if !floor_alone {
            let mut audit = Audit::from_now()?;
            let took = gangs(client, shape, round).await?;
            ours.push(took.seconds);
            add(&mut cores[1], took.cores);
            sleep(SETTLE).await;
            writes.push(audit.more()?.len() as f64 / shape.pods() as f64);
            memories.push(memory()?);
            print!(", ours {:.2} s", ours[ours.len() - 1]);
            print!(", {:.2} writes a pod", writes[writes.len() - 1]);
            print!(", {:.1} MB", memories[memories.len() - 1]);
            clear_jobs(client).await?;
        }
        println!();
    }
    let floor = median(&mut floors);
    print!("{name}: median floor {floor:.2} s");
    if !floor_alone {
        let ours = median(&mut ours);
        print!(", ours {ours:.2} s, ratio {:.2}", ours / floor);
        print!(", {:.2} writes a pod", median(&mut writes));
        print!(", {:.1} MB", median(&mut memories));
    }
    println!();
    let [floor, ours] = cores;
    println!("{name}: seconds of a core a round until all run, by process; floor, then ours");
    let each = |of: Option<&f64>| of.map_or(0.0, |sum| sum / f64::from(rounds));
    let all: BTreeSet<&String> = floor.keys().chain(ours.keys()).collect();
    for of in all {
        println!("  {of}: {:.2}  {:.2}", each(floor.get(of)), each(ours.get(of)));
    }
    Ok(())
}

/// Seconds of a core by process.
type Cores = BTreeMap<String, f64>;

/// What it took until all pods ran.
struct Took {
    seconds: f64,
    cores: Cores,
}

fn add(sum: &mut Cores, more: Cores) {
    for (name, seconds) in more {
        *sum.entry(name).or_default() += seconds;
    }
}

/// What the processes of the cluster have had so far, the operator and this one among them.
fn cores() -> Result<Cores, Failure> {
    let mut cores = Cores::from([("gangs".to_string(), spent(std::process::id()).unwrap_or(0.0))]);
    for entry in std::fs::read_dir(format!("{}/pids", state()))? {
        let entry = entry?;
        let text = std::fs::read_to_string(entry.path())?;
        let pid = text.split_whitespace().next().and_then(|pid| pid.parse().ok());
        if let Some(seconds) = pid.and_then(spent) {
            cores.insert(entry.file_name().to_string_lossy().into_owned(), seconds);
        }
    }
    for entry in std::fs::read_dir("/proc")? {
        let Ok(pid) = entry?.file_name().to_string_lossy().parse() else { continue };
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = command.split(|byte| *byte == 0);
        let program = words.next().is_some_and(|word| word.ends_with(b"moejob"));
        if program && words.next() == Some(b"operator") {
            add(&mut cores, Cores::from([("operator".to_string(), spent(pid).unwrap_or(0.0))]));
        }
    }
    Ok(cores)
}

/// Since `start`, at which the processes had had `before`.
fn took(start: Instant, end: Instant, before: &Cores) -> Result<Took, Failure> {
    let mut cores = cores()?;
    for (name, seconds) in &mut cores {
        *seconds -= before.get(name).unwrap_or(&0.0);
    }
    Ok(Took { seconds: end.duration_since(start).as_secs_f64(), cores })
}

/// One pod of a large gang fails; some nodes of it go silent at once.
async fn faults(
    client: &Client,
    rounds: u32,
    nodes: u32,
    silent: usize,
) -> Result<(), Failure> {
    gangs(client, Shape { jobs: 1, nodes, ranks: 1 }, 0).await?;
    let name = "g0-0";
    let (mut created, mut repaired) = (Vec::new(), Vec::new());
    until_step(client, name, 0).await?;
    for _ in 0..rounds {
        let attempt = until_step(client, name, 0).await?;
        let pod = members(client, 1).await?.remove(0).0;
        let new = tokio::spawn(until_new(client.clone()));
        sleep(Duration::from_millis(500)).await;
        let (mut audit, start) = (Audit::from_now()?, Instant::now());
        kill(&pod)?;
        created.push(new.await??.duration_since(start).as_secs_f64());
        until_step(client, name, attempt).await?;
        sleep(SETTLE).await;
        let created_pods = audit.created_pods()?;
        println!(
            "1 of {nodes} fails: a pod is created after {:.2} s, {created_pods} in all",
            created[created.len() - 1]
        );
    }
    for _ in 0..rounds {
        let attempt = until_step(client, name, 0).await?;
        let chosen = members(client, silent).await?;
        let start = Instant::now();
        for (_, node) in &chosen {
            order(node, &["link", "down"])?;
        }
        until_step(client, name, attempt).await?;
        repaired.push(start.elapsed().as_secs_f64());
        let names: Vec<&str> = chosen.iter().map(|(_, node)| &node[..]).collect();
        let took = repaired[repaired.len() - 1];
        println!("{} silent: next step after {took:.2} s", names.join(", "));
        for (_, node) in &chosen {
            order(node, &["link", "up"])?;
        }
        sleep(Duration::from_secs(10)).await;
    }
    let (created, repaired) = (median(&mut created), median(&mut repaired));
    println!("1x{nodes}: medians: a failed pod {created:.2} s, {silent} silent {repaired:.2} s");
    clear_jobs(client).await
}

fn order(node: &str, words: &[&str]) -> Result<(), Failure> {
    let said = script("node", &[&[node], words].concat(), b"");
    if said.good { Ok(()) } else { Err(said.err.into()) }
}

/// As `tests/cluster/node fake-7 containers killed` does, without asking for the node's pods.
fn kill(pod: &str) -> Result<(), Failure> {
    let killed = std::path::Path::new(&state()).join("fake/killed");
    let mut killed = std::fs::OpenOptions::new().create(true).append(true).open(killed)?;
    Ok(writeln!(killed, "{NAMESPACE}/{pod}")?)
}

/// As many running pods from the middle of the gang on, with their nodes.
async fn members(client: &Client, count: usize) -> Result<Vec<(String, String)>, Failure> {
    let api = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
    let pods = api.list(&ListParams::default().labels(LABEL)).await?.items;
    let running = |pod: &&Pod| {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        phase == Some("Running") && pod.metadata.deletion_timestamp.is_none()
    };
    let mut running: Vec<&Pod> = pods.iter().filter(running).collect();
    running.sort_by_key(|pod| pod.name_any());
    let chosen = running.get(running.len() / 2..).and_then(|rest| rest.get(..count));
    let member = |pod: &&Pod| {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        Ok((pod.name_any(), node.ok_or("a pod that is not bound")?))
    };
    chosen.ok_or("too few pods run")?.iter().map(member).collect()
}

/// When a pod is seen that was not there before.
async fn until_new(client: Client) -> Result<Instant, Failure> {
    let api = Api::<Pod>::namespaced(client, NAMESPACE);
    let all = api.list(&ListParams::default().labels(LABEL)).await?;
    let known: HashSet<String> = all.items.iter().filter_map(Pod::uid).collect();
    let config = watcher::Config::default().labels(LABEL);
    let mut pods = watcher(api, config).applied_objects().boxed();
    let new = async {
        while let Some(pod) = pods.try_next().await? {
            if !known.contains(&pod.uid().unwrap_or_default()) {
                return Ok(Instant::now());
            }
        }
        Err::<Instant, Failure>("the watch ended".into())
    };
    timeout(PATIENCE, new).await.map_err(|_| "no pod is created")?
}

/// Waits until a later attempt than this has made its first step, and gives its number. A status
/// is written at once when an attempt begins to step (`Running`).
async fn until_step(client: &Client, name: &str, after: u64) -> Result<u64, Failure> {
    let stepping = async {
        loop {
            let job = jobs(client).get_status(name).await?;
            let status = &job.data["status"];
            let attempt = status["attempt"].as_u64().unwrap_or(0);
            let recovers = status["recoveries"].as_array().into_iter().flatten();
            let open = recovers.filter(|of| of["firstStepMillis"].is_null()).count();
            if attempt > after && status["phase"] == "Running" && open == 0 {
                return Ok::<u64, Failure>(attempt);
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, stepping).await.map_err(|_| "the job does not train")?
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Resident memory of the operator, MB of 10^6 bytes.
fn memory() -> Result<f64, Failure> {
    let said = script("node", &["operator", "containers"], b"");
    let line = said.out.lines().find(|line| line.contains("operator"));
    let kib: f64 = line.and_then(|line| line.split(' ').nth(1)).ok_or("no operator")?.parse()?;
    Ok(kib * 1024.0 / 1e6)
}

/// The folder of the cluster.
fn state() -> String {
    let state = std::env::var("MOEJOB_CLUSTER_STATE");
    state.unwrap_or_else(|_| "/var/lib/moejob-cluster".to_string())
}

/// The operator's writes in the audit log, leases and token reviews apart.
struct Audit {
    file: std::fs::File,
}

impl Audit {
    fn from_now() -> Result<Audit, Failure> {
        let mut file = std::fs::File::open(format!("{}/logs/audit.log", state()))?;
        file.seek(SeekFrom::End(0))?;
        Ok(Audit { file })
    }

    /// Verb and resource of those since the last call.
    fn more(&mut self) -> Result<Vec<(String, String)>, Failure> {
        let text = std::io::read_to_string(&self.file)?;
        let write = |line: &str| {
            let event: Value = serde_json::from_str(line).ok()?;
            let of = event["objectRef"]["resource"].as_str().unwrap_or_default();
            let counts = event["user"]["username"] == OPERATOR
                && !["leases", "tokenreviews"].contains(&of);
            let verb = event["verb"].as_str().unwrap_or_default();
            counts.then(|| (verb.to_string(), of.to_string()))
        };
        Ok(text.lines().filter_map(write).collect())
    }

    fn created_pods(&mut self) -> Result<usize, Failure> {
        let writes = self.more()?;
        Ok(writes.iter().filter(|(verb, of)| (&**verb, &**of) == ("create", "pods")).count())
    }
}

fn manifest(name: &str, Shape { nodes, ranks, .. }: Shape) -> Value {
    let training = json!({ "steps": 1_000_000, "globalBatchSize": 4096, "microBatchSize": 1,
        "precision": "fp32" });
    let mut job = small_job(name, (nodes, nodes), training);
    job["spec"]["nodes"]["devicesPerNode"] = json!(ranks);
    job
}

/// The storage that all jobs name; it may be there already.
async fn claim(client: &Client) -> Result<(), Failure> {
    let api = Api::<PersistentVolumeClaim>::namespaced(client.clone(), NAMESPACE);
    let claim = serde_json::from_value(json!({
        "metadata": { "name": "checkpoints" },
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": { "requests": { "storage": "1Gi" } },
        },
    }))?;
    match api.create(&PostParams::default(), &claim).await {
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        other => other.map(drop).map_err(Into::into),
    }
}

/// Seconds from the first POST to the last pod Running.
async fn floor(client: &Client, shape: Shape) -> Result<Took, Failure> {
    let all = floor_pods(client, shape).await?;
    let api = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
    let watching = tokio::spawn(until_running(api.clone(), shape.pods()));
    sleep(Duration::from_millis(200)).await;
    let (before, start) = (cores()?, Instant::now());
    let how = PostParams::default();
    let posts = all.iter().map(|pod| api.create(&how, pod));
    futures::stream::iter(posts).buffer_unordered(WRITERS).try_collect::<Vec<_>>().await?;
    let took = took(start, watching.await??, &before)?;
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    api.delete_collection(&now, &ListParams::default().labels(LABEL)).await?;
    until_gone(&api).await?;
    Ok(took)
}

/// The pods of such jobs, each bound to a node of its own as ours are.
async fn floor_pods(client: &Client, shape: Shape) -> Result<Vec<Pod>, Failure> {
    let secrets = Api::<Secret>::namespaced(client.clone(), "moejob-system");
    let data = secrets.get_opt("moejob-authority").await?.and_then(|secret| secret.data);
    // With the operator's authority in it the pod's worker starts, as ours do.
    let authority = data.and_then(|mut data| data.remove("authority.crt"));
    let around = Surroundings {
        namespace: NAMESPACE.to_string(),
        job_uid: "00000000-0000-0000-0000-000000000000".to_string(),
        image: "localhost/moejob:test".to_string(),
        image_pull_policy: Some("IfNotPresent".to_string()),
        authority: String::from_utf8(authority.map(|bytes| bytes.0).unwrap_or_default())?,
        operator_namespace: "moejob-system".to_string(),
        memory: Default::default(),
    };
    let text = manifest("floor", shape).to_string();
    let job = Job::read(text.as_bytes()).map_err(|problems| format!("{problems:?}"))?;
    let pod = |slot| {
        let name = format!("floor-a1-{slot}");
        let birth = Birth { name, node: format!("fake-{}", slot + 1), ..Birth::default() };
        let mut pod = pods::pod(&job, &around, &birth);
        // There is no job that could own it.
        pod["metadata"]["ownerReferences"] = json!([]);
        serde_json::from_value(pod).map_err(Into::into)
    };
    (0..shape.pods()).map(pod).collect()
}

/// Seconds from the first apply to the last pod Running.
async fn gangs(client: &Client, shape: Shape, round: u32) -> Result<Took, Failure> {
    let jobs = jobs(client);
    let api = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
    let watching = tokio::spawn(until_running(api, shape.pods()));
    sleep(Duration::from_millis(200)).await;
    let (before, start) = (cores()?, Instant::now());
    // By as many writers as the floor has: one alone would wait longer than all gangs take.
    let how = PostParams::default();
    let name = |job| format!("g{round}-{job}");
    let object = |job| serde_json::from_value(manifest(&name(job), shape));
    let objects = (0..shape.jobs).map(object);
    let objects = objects.collect::<Result<Vec<DynamicObject>, _>>()?;
    let posts = objects.iter().map(|object| jobs.create(&how, object));
    futures::stream::iter(posts).buffer_unordered(WRITERS).try_collect::<Vec<_>>().await?;
    took(start, watching.await??, &before)
}

fn jobs(client: &Client) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("moejob.dev", "v1alpha1", "MoeJob");
    let resource = ApiResource::from_gvk(&kind);
    Api::namespaced_with(client.clone(), NAMESPACE, &resource)
}

async fn clear_jobs(client: &Client) -> Result<(), Failure> {
    let (how, all) = (DeleteParams::default(), ListParams::default());
    jobs(client).delete_collection(&how, &all).await?;
    until_gone(&Api::namespaced(client.clone(), NAMESPACE)).await
}

async fn until_running(api: Api<Pod>, count: usize) -> Result<Instant, Failure> {
    let config = watcher::Config::default().labels(LABEL);
    let mut pods = watcher(api, config).default_backoff().applied_objects().boxed();
    let mut running = HashSet::new();
    let all = async {
        while let Some(pod) = pods.try_next().await? {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            if phase == Some("Running") {
                running.insert(pod.uid());
            }
            if running.len() == count {
                return Ok(Instant::now());
            }
        }
        Err::<Instant, Failure>("the watch ended".into())
    };
    match timeout(PATIENCE, all).await {
        Ok(done) => done,
        Err(_) => Err(format!("{} of {count} pods run after {PATIENCE:?}", running.len()).into()),
    }
}

async fn until_gone(api: &Api<Pod>) -> Result<(), Failure> {
    let gone = async {
        while !api.list(&ListParams::default().labels(LABEL)).await?.items.is_empty() {
            sleep(Duration::from_millis(200)).await;
        }
        Ok::<(), Failure>(())
    };
    timeout(PATIENCE, gone).await.map_err(|_| "pods stay")?
}
