//! How long gangs take from apply to all Running, on the fake nodes of a test cluster, beside the
//! floor: 32 writers that create the same pods.
//!
//!   gangs ROUNDS AUDIT-LOG SHAPE...        a shape is JOBSxNODES, such as 1x512 or 64x8
//!
//! It finds the API server by `KUBECONFIG`. Rounds of floor and ours alternate; medians count.
//! Without an operator (`gangs ROUNDS - floor SHAPE...`) the floor alone is measured.

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, ResourceExt};
use moejob_plan::Job;
use moejob_plan::pods::{self, Birth, Surroundings};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const NAMESPACE: &str = "default";
const WRITERS: usize = 32;
const PATIENCE: Duration = Duration::from_secs(120);
const LABEL: &str = "app.kubernetes.io/managed-by=moejob";
const OPERATOR: &str = "system:serviceaccount:moejob-system:moejob-operator";

#[derive(Clone, Copy)]
struct Shape {
    jobs: u32,
    nodes: u32,
}

impl Shape {
    fn parse(text: &str) -> Result<Shape, Failure> {
        let (jobs, nodes) = text.split_once('x').ok_or("a shape is JOBSxNODES")?;
        Ok(Shape { jobs: jobs.parse()?, nodes: nodes.parse()? })
    }

    fn pods(self) -> usize {
        (self.jobs * self.nodes) as usize
    }
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [rounds, audit, shapes @ ..] = &words[..] else {
        return Err("usage: gangs ROUNDS AUDIT-LOG|- [floor] SHAPE...".into());
    };
    let floor_alone = shapes.first().is_some_and(|word| word == "floor");
    let client = Client::try_default().await?;
    claim(&client).await?;
    for shape in &shapes[usize::from(floor_alone)..] {
        let asked = Shape::parse(shape)?;
        let (mut floors, mut ours, mut writes) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..rounds.parse::<u32>()? {
            floors.push(floor(&client, asked).await?);
            print!("{shape}: floor {:.2} s", floors[floors.len() - 1]);
            if !floor_alone {
                let before = written(audit)?;
                ours.push(gangs(&client, asked, round).await?);
                // What follows the last Running pod belongs to it as well.
                sleep(Duration::from_secs(2)).await;
                writes.push((written(audit)? - before) as f64 / asked.pods() as f64);
                print!(", ours {:.2} s", ours[ours.len() - 1]);
                print!(", {:.2} writes a pod", writes[writes.len() - 1]);
                clear_jobs(&client).await?;
            }
            println!();
        }
        let floor = median(&mut floors);
        print!("{shape}: median floor {floor:.2} s");
        if !floor_alone {
            let ours = median(&mut ours);
            print!(", ours {ours:.2} s, ratio {:.2}", ours / floor);
            print!(", {:.2} writes a pod", median(&mut writes));
        }
        println!();
    }
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The operator's writes in the audit log so far, leases and token reviews apart.
fn written(audit: &str) -> Result<usize, Failure> {
    let text = std::fs::read_to_string(audit)?;
    let counts = |line: &&str| {
        let Ok(event) = serde_json::from_str::<Value>(line) else { return false };
        let of = event["objectRef"]["resource"].as_str().unwrap_or_default();
        event["user"]["username"] == OPERATOR && !["leases", "tokenreviews"].contains(&of)
    };
    Ok(text.lines().filter(counts).count())
}

fn manifest(name: &str, nodes: u32) -> Value {
    json!({
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoeJob",
        "metadata": { "name": name, "namespace": NAMESPACE },
        "spec": {
            "nodes": { "profile": "cpu", "min": nodes, "max": nodes },
            "model": {
                "hiddenSize": 32, "numHiddenLayers": 1, "numAttentionHeads": 2,
                "experts": { "count": 8, "perToken": 2, "intermediateSize": 32 },
            },
            "data": {
                "train": { "text": { "paths": ["corpus/*.txt"] } }, "sequenceLength": 32,
            },
            "training": { "steps": 1_000_000, "globalBatchSize": 4096, "microBatchSize": 1,
                "precision": "fp32" },
            "checkpoint": { "everySteps": 1_000_000, "location": "checkpoints" },
            "volumes": [{ "mountPath": "checkpoints", "claim": "checkpoints" }],
        },
    })
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
async fn floor(client: &Client, shape: Shape) -> Result<f64, Failure> {
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
    };
    let text = manifest("floor", shape.nodes).to_string();
    let job = Job::read(text.as_bytes()).map_err(|problems| format!("{problems:?}"))?;
    let all: Vec<Pod> = (0..shape.pods())
        .map(|slot| {
            let name = format!("floor-a1-{slot}");
            let birth = Birth { name, node: format!("fake-{}", slot + 1), seal: String::new() };
            let mut pod = pods::pod(&job, &around, &birth);
            // There is no job that could own it.
            pod["metadata"]["ownerReferences"] = json!([]);
            serde_json::from_value(pod).map_err(Into::into)
        })
        .collect::<Result<_, Failure>>()?;
    let api = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
    let watching = tokio::spawn(until_running(api.clone(), shape.pods()));
    sleep(Duration::from_millis(200)).await;
    let start = Instant::now();
    let how = PostParams::default();
    let posts = all.iter().map(|pod| api.create(&how, pod));
    futures::stream::iter(posts).buffer_unordered(WRITERS).try_collect::<Vec<_>>().await?;
    let took = watching.await??.duration_since(start).as_secs_f64();
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    api.delete_collection(&now, &ListParams::default().labels(LABEL)).await?;
    until_gone(&api).await?;
    Ok(took)
}

/// Seconds from the first apply to the last pod Running.
async fn gangs(client: &Client, shape: Shape, round: u32) -> Result<f64, Failure> {
    let jobs = jobs(client);
    let api = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
    let watching = tokio::spawn(until_running(api, shape.pods()));
    sleep(Duration::from_millis(200)).await;
    let start = Instant::now();
    for job in 0..shape.jobs {
        let object = serde_json::from_value(manifest(&format!("g{round}-{job}"), shape.nodes))?;
        jobs.create(&PostParams::default(), &object).await?;
    }
    Ok(watching.await??.duration_since(start).as_secs_f64())
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
