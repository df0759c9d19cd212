//! What leading costs, without a cluster: an API server in memory, fake nodes and workers of this
//! process, and `moejob operator` as a process beside it.
//!
//!   leading gang [N]       a gang comes up: when, and what the operator spends on it
//!   leading takeover [N]   a leader is killed; TokenReviews take 1 s
//!   leading reset [N]      all streams are reset at once
//!   leading streams [N]    memory and time of a leader of N streams (gangs of 512)
//!   leading hostile [N]    N hostile jobs beside 20 good ones
//!   leading cuts [N]       a gang of N while the API server is away, unheard, broken, flapping
//!
//! `MOEJOB_FAKE_NO_LEAF=1`: workers show no leaf, as those of a release before. The operator is the
//! one beside this program, or `MOEJOB_BIN`.

use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use moejob_manifest::crd;
use moejob_tests::cluster::small_job;
use moejob_tests::fake::Gauge;
use moejob_tests::fake::api::{Api, Cut, KUBELET};
use moejob_tests::fake::nodes::{self, Failure, Options};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::time::sleep;

const NAMESPACE: &str = "default";
/// A worker takes a socket here and one in the operator.
const FILES: u64 = 16_384;
const PATIENCE: Duration = Duration::from_secs(300);
/// How far a gang is that comes up.
const TOLD_EVERY: Duration = Duration::from_secs(5);
const REVIEWS: &str = "tokenreviews";
/// What a write takes of an API server that starts a gang: pods come one after the other.
const BUSY: Duration = Duration::from_millis(100);
/// While this is measured nothing happens.
const QUIET: Duration = Duration::from_secs(30);
/// A cut from the API server lasts so long; one that flaps is there and gone for so long each.
const CUT: Duration = Duration::from_secs(60);
const FLAP: [Duration; 2] = [Duration::from_millis(2_500), Duration::from_millis(1_500)];
/// As a kubelet starts a container that has ended.
const STARTED_AFTER: Duration = Duration::from_secs(1);
/// Good jobs, and nodes of each.
const GOOD: (usize, u32) = (20, 4);

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(FILES), maximum: Some(FILES) });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let count = |default: u32| words.get(1).map_or(Ok(default), |word| word.parse());
    match words.first().copied() {
        Some("gang") => runtime.block_on(gang(count(512)?)),
        Some("takeover") => runtime.block_on(takeover(count(512)?)),
        Some("reset") => runtime.block_on(reset(count(512)?)),
        Some("streams") => runtime.block_on(streams(count(2048)?)),
        Some("hostile") => runtime.block_on(hostile(count(200)?)),
        Some("cuts") => runtime.block_on(cuts(count(16)?)),
        _ => Err("usage: leading gang|takeover|reset|streams|hostile|cuts [N]".into()),
    }
}

struct Field {
    api: Api,
    gauge: Arc<Gauge>,
    orders: TempDir,
    operators: u32,
}

impl Field {
    async fn new(nodes: u32, pace: Duration) -> Result<Field, Failure> {
        let api = Api::start().await?;
        api.put("customresourcedefinitions", crd::definition());
        let name = json!({ "name": "moejob-authority", "namespace": "moejob-system" });
        api.put("secrets", json!({ "metadata": name }));
        let config = Kubeconfig::from_yaml(&api.kubeconfig(KUBELET))?;
        let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
        let (gauge, orders) = (Arc::new(Gauge::default()), tempfile::tempdir()?);
        let options = Options {
            nodes,
            nodes_a_rack: 16,
            renew: Duration::from_secs(600),
            pace,
            orders: orders.path().to_path_buf(),
            first: Ipv4Addr::new(127, 1, 0, 0),
            gauge: Arc::clone(&gauge),
        };
        // On a thread of their own, as kubelets have nothing to do with who measures.
        let kubelets = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::spawn(move || {
            let run = async { nodes::run(kube::Client::try_from(config)?, options).await };
            if let Err(error) = kubelets.block_on(run) {
                eprintln!("nodes: {error}");
            }
        });
        until("all nodes are there", || api.count("nodes") == nodes as usize).await?;
        Ok(Field { api, gauge, orders, operators: 0 })
    }

    fn order(&self, name: &str, text: &str) -> std::io::Result<()> {
        std::fs::write(self.orders.path().join(name), text)
    }

    /// Of an operator.
    fn log(&self, name: &str) -> PathBuf {
        self.orders.path().join(format!("{name}.log"))
    }

    fn operator(&mut self) -> Result<Operator, Failure> {
        self.operators += 1;
        let name = format!("operator-{}", self.operators);
        let config = self.orders.path().join(format!("{name}.config"));
        std::fs::write(&config, self.api.kubeconfig(&name))?;
        let log = std::fs::File::create(self.log(&name))?;
        let child = Command::new(moejob_tests::moejob())
            .args(["operator", "--image", "moejob:test", "--pod", &name])
            .args(["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"])
            .env("KUBECONFIG", config)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        Ok(Operator { child, name })
    }

    fn leads(&self, operator: &Operator) -> bool {
        let lease = ("moejob-system", "moejob-operator");
        let held = self.api.read("leases", lease, |lease| {
            let holder = lease["spec"]["holderIdentity"].as_str();
            holder.is_some_and(|of| of.starts_with(&operator.name))
        });
        held == Some(true)
    }

    fn linked(&self) -> usize {
        self.gauge.linked.load(Ordering::Relaxed)
    }

    fn steps(&self) -> u64 {
        self.gauge.steps.load(Ordering::Relaxed)
    }

    fn pods(&self) -> BTreeMap<String, Value> {
        let of = |pod: &Value| {
            let name = pod["metadata"]["name"].as_str().unwrap_or_default();
            (name.to_string(), pod["metadata"]["uid"].clone())
        };
        self.api.map("pods", of).into_iter().collect()
    }

    /// Of a job: its attempt, and whether it trains.
    fn attempt(&self, job: &str) -> (u64, bool) {
        let read = self.api.read("moejobs", (NAMESPACE, job), |job| {
            let status = &job["status"];
            (status["attempt"].as_u64().unwrap_or(0), status["phase"] == "Running")
        });
        read.unwrap_or_default()
    }

    /// A gang of so many that trains.
    async fn train(&self, name: &str, nodes: u32) -> Result<(), Failure> {
        self.api.put("moejobs", job(name, nodes));
        let start = Instant::now();
        let mut told = start;
        until("it trains", || {
            if told.elapsed() > TOLD_EVERY {
                told = Instant::now();
                let (pods, linked) = (self.api.count("pods"), self.linked());
                let time = start.elapsed().as_secs();
                eprintln!("{name} after {time} s: {pods} pods, {linked} workers linked");
            }
            self.attempt(name).1
        })
        .await
    }
}

struct Operator {
    child: Child,
    name: String,
}

impl Drop for Operator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Operator {
    fn kill(&self) -> Result<(), Failure> {
        Ok(kill_process(Pid::from_child(&self.child), Signal::KILL)?)
    }

    /// Resident now and at the most, MB of 10^6 bytes.
    fn memory(&self) -> Result<(f64, f64), Failure> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let of = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
            kib.map(|kib| kib * 1024.0 / 1e6).ok_or("no such line")
        };
        Ok((of("VmRSS:")?, of("VmHWM:")?))
    }

    /// Seconds of a core that it has had.
    fn spent(&self) -> Result<f64, Failure> {
        moejob_tests::spent(self.child.id()).ok_or_else(|| "no operator".into())
    }

    /// Waits until it has ended by itself, and tells how.
    async fn ended(&mut self, field: &Field) -> Failure {
        let status = loop {
            match self.child.try_wait() {
                Ok(None) => sleep(Duration::from_secs(1)).await,
                Ok(Some(status)) => break status,
                Err(error) => return error.into(),
            }
        };
        let log = std::fs::read_to_string(field.log(&self.name)).unwrap_or_default();
        format!("the operator ended, {status}: {}", log.lines().last().unwrap_or_default()).into()
    }

    /// The share of a core that it takes.
    async fn load(&self) -> Result<f64, Failure> {
        let (before, start) = (self.spent()?, Instant::now());
        sleep(QUIET).await;
        Ok((self.spent()? - before) / start.elapsed().as_secs_f64())
    }
}

fn job(name: &str, nodes: u32) -> Value {
    let training = json!({ "steps": 1_000_000, "globalBatchSize": 4096, "microBatchSize": 1,
        "precision": "fp32" });
    small_job(name, (nodes, nodes), training)
}

async fn until(what: &str, mut reached: impl FnMut() -> bool) -> Result<(), Failure> {
    let start = Instant::now();
    while !reached() {
        if start.elapsed() > PATIENCE {
            return Err(format!("not within {PATIENCE:?}: {what}").into());
        }
        sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

async fn gang(nodes: u32) -> Result<(), Failure> {
    let mut field = Field::new(nodes + 8, Duration::from_millis(100)).await?;
    let operator = field.operator()?;
    until("it leads", || field.leads(&operator)).await?;
    sleep(Duration::from_secs(1)).await;
    field.api.mood(|mood| mood.write_takes = BUSY);
    let (spent, start) = (operator.spent()?, Instant::now());
    field.api.asked();
    field.api.put("moejobs", job("gang", nodes));
    let told = |what: &str| -> Result<(), Failure> {
        let (seconds, spent) = (start.elapsed().as_secs_f64(), operator.spent()? - spent);
        let reviews = field.api.asked_for(REVIEWS);
        println!(
            "{what} after {seconds:.2} s: {spent:.2} s of the operator, {} workers linked, \
             {reviews} TokenReviews",
            field.linked()
        );
        Ok(())
    };
    let all = nodes as usize;
    until("all pods are there", || field.api.count("pods") == all).await?;
    told("pods are there")?;
    let runs = |pod: &Value| pod["status"]["phase"] == "Running";
    until("all pods run", || {
        field.api.map("pods", runs).into_iter().filter(|runs| *runs).count() == all
    })
    .await?;
    told("pods run")?;
    until("it trains", || field.attempt("gang").1).await?;
    told("the gang trains")?;
    let mut counts = BTreeMap::new();
    for asked in field.api.asked().into_iter().filter(|asked| asked.who == operator.name) {
        *counts.entry(format!("{} {}", asked.verb, asked.what)).or_insert(0) += 1;
    }
    println!("asked of the API server: {counts:?}");
    Ok(())
}

async fn takeover(nodes: u32) -> Result<(), Failure> {
    let mut field = Field::new(nodes + 8, Duration::from_millis(100)).await?;
    let first = field.operator()?;
    field.train("gang", nodes).await?;
    until("all are linked", || field.linked() == nodes as usize).await?;
    let (pods, (attempt, _)) = (field.pods(), field.attempt("gang"));
    field.api.mood(|mood| mood.review_takes = Duration::from_secs(1));
    field.api.asked();
    first.kill()?;
    let second = field.operator()?;
    until("the next one leads", || field.leads(&second)).await?;
    let start = Instant::now();
    until("nobody is linked to the first one", || field.linked() < nodes as usize).await?;
    until("all are linked", || field.linked() == nodes as usize).await?;
    // A worker is linked when it has said who it is; without a leaf its token is judged then.
    if std::env::var_os("MOEJOB_FAKE_NO_LEAF").is_some() {
        until("all are judged", || field.api.asked_for(REVIEWS) >= nodes as usize).await?;
    }
    let linked = start.elapsed().as_secs_f64();
    let steps = field.steps();
    until("it hears of steps", || field.steps() > steps).await?;
    // Whoever was lost would be known by now: the heartbeat timeout is 3 s.
    sleep(Duration::from_secs(8)).await;
    let after = field.pods();
    let lost = pods.iter().filter(|(name, uid)| after.get(*name) != Some(uid)).count();
    let reviews = field.api.asked_for(REVIEWS);
    let same = field.attempt("gang").0 == attempt;
    println!(
        "takeover of {nodes}: all linked and believed {linked:.1} s after the lease, {lost} lost, \
         attempt {}, {reviews} TokenReviews of 1 s",
        if same { "the same" } else { "another" }
    );
    let (now, most) = second.memory()?;
    println!("memory of the leader: {now:.1} MB, {most:.1} MB at the most");
    Ok(())
}

async fn reset(nodes: u32) -> Result<(), Failure> {
    let mut field = Field::new(nodes + 8, Duration::from_millis(100)).await?;
    let operator = field.operator()?;
    field.train("gang", nodes).await?;
    until("all are linked", || field.linked() == nodes as usize).await?;
    let pods = field.pods();
    for round in 1..=3 {
        field.api.asked();
        let start = Instant::now();
        field.order("reset", &round.to_string())?;
        until("streams are reset", || field.linked() < nodes as usize).await?;
        let steps = field.steps();
        until("a leader hears of steps", || field.steps() > steps + 1).await?;
        let stepped = start.elapsed().as_secs_f64();
        until("all are linked", || field.linked() == nodes as usize).await?;
        let linked = start.elapsed().as_secs_f64();
        sleep(Duration::from_secs(5)).await;
        let asked = field.api.asked();
        let deleted = asked.iter().filter(|of| of.verb == "DELETE" && of.what == "pods").count();
        let same = field.pods() == pods;
        println!(
            "reset of {nodes}: next steps {stepped:.2} s, all linked {linked:.2} s, {deleted} pods \
             deleted, pods {}",
            if same { "the same" } else { "changed" }
        );
    }
    drop(operator);
    Ok(())
}

async fn streams(count: u32) -> Result<(), Failure> {
    let mut field = Field::new(count, Duration::from_millis(500)).await?;
    let operator = field.operator()?;
    let mut left = count;
    while left > 0 {
        let nodes = left.min(512);
        field.train(&format!("gang-{left}"), nodes).await?;
        left -= nodes;
    }
    until("all are linked", || field.linked() == count as usize).await?;
    let (_, most) = operator.memory()?;
    sleep(Duration::from_secs(10)).await;
    let load = operator.load().await?;
    let (now, _) = operator.memory()?;
    println!(
        "{count} streams: {now:.1} MB ({most:.1} MB at the most), {:.1}% of a core",
        load * 100.0
    );
    Ok(())
}

/// The operator's process is started anew whenever it ends, as a kubelet does.
async fn keep(
    field: &mut Field,
    operator: &mut Operator,
    time: Duration,
) -> Result<u32, Failure> {
    let (start, mut ends) = (Instant::now(), 0);
    while start.elapsed() < time {
        if operator.child.try_wait()?.is_some() {
            ends += 1;
            sleep(STARTED_AFTER).await;
            *operator = field.operator()?;
        }
        sleep(Duration::from_millis(50)).await;
    }
    Ok(ends)
}

async fn cuts(nodes: u32) -> Result<(), Failure> {
    let mut field = Field::new(nodes + 8, Duration::from_millis(100)).await?;
    let mut operator = field.operator()?;
    field.train("gang", nodes).await?;
    let mut lost = 0;
    for (what, cut, flaps) in [
        ("etcd is away", Cut::Broken, false),
        ("the API server is away", Cut::Away, false),
        ("nothing is heard of it", Cut::Unheard, false),
        ("it comes and goes", Cut::Away, true),
        ("it is heard and not heard", Cut::Unheard, true),
    ] {
        until("all are linked", || field.linked() == nodes as usize).await?;
        let (pods, before) = (field.pods(), field.attempt("gang").0);
        field.api.asked();
        let (start, mut ends) = (Instant::now(), 0);
        while start.elapsed() < CUT {
            field.api.mood(|mood| mood.cut = cut);
            ends += keep(&mut field, &mut operator, if flaps { FLAP[0] } else { CUT }).await?;
            field.api.mood(|mood| mood.cut = Cut::None);
            if flaps {
                ends += keep(&mut field, &mut operator, FLAP[1]).await?;
            }
        }
        let over = Instant::now();
        let mut linked = false;
        while !linked {
            ends += keep(&mut field, &mut operator, Duration::from_millis(100)).await?;
            linked = field.leads(&operator) && field.linked() == nodes as usize;
            if over.elapsed() > PATIENCE {
                return Err(format!("{what}: nobody leads after {PATIENCE:?}").into());
            }
        }
        let steps = field.steps();
        until("a leader hears of steps", || field.steps() > steps + 1).await?;
        let led = over.elapsed().as_secs_f64();
        // Whoever was lost would be known by now.
        ends += keep(&mut field, &mut operator, Duration::from_secs(8)).await?;
        let after = field.pods();
        let gone = pods.iter().filter(|(name, uid)| after.get(*name) != Some(uid)).count();
        let asked = field.api.asked();
        let deleted = asked.iter().filter(|of| of.verb == "DELETE" && of.what == "pods").count();
        let same = field.attempt("gang").0 == before;
        lost += gone + deleted + usize::from(!same);
        println!(
            "{what} for {} s: {gone} of {nodes} workers lost, {deleted} pods deleted, attempt {}; \
             led {led:.1} s after it, the operator began anew {ends} times",
            CUT.as_secs(),
            if same { "the same" } else { "another" }
        );
    }
    match lost {
        0 => Ok(()),
        _ => Err("a cut from the API server has cost workers".into()),
    }
}

/// The time from a killed worker to the next step of each of some good jobs, in order.
async fn recoveries(field: &Field) -> Result<Vec<f64>, Failure> {
    let mut took = Vec::new();
    let mut killed = String::new();
    for index in 0..GOOD.0 / 2 {
        let name = format!("good-{index}");
        let (before, _) = field.attempt(&name);
        let of_job = |pod: &&String| pod.starts_with(&format!("{name}-a"));
        let pods = field.pods();
        let pod = pods.keys().filter(of_job).last().ok_or("no pod")?.clone();
        killed += &format!("{NAMESPACE}/{pod}\n");
        let start = Instant::now();
        field.order("killed", &killed)?;
        until("it trains again", || {
            let (attempt, trains) = field.attempt(&name);
            attempt > before && trains
        })
        .await?;
        took.push(start.elapsed().as_secs_f64());
        sleep(Duration::from_secs(1)).await;
    }
    took.sort_by(f64::total_cmp);
    Ok(took)
}

async fn hostile(count: u32) -> Result<(), Failure> {
    let nodes = GOOD.0 as u32 * (GOOD.1 + 1) + count / 4 + 8;
    let mut field = Field::new(nodes, Duration::from_millis(100)).await?;
    field.api.mood(|mood| mood.refused_prefix = Some("refused".to_string()));
    let mut operator = field.operator()?;
    for index in 0..GOOD.0 {
        field.train(&format!("good-{index}"), GOOD.1).await?;
    }
    let told = |what: &str, took: &[f64]| {
        let (middle, last) = (took[took.len() / 2], took[took.len() - 1]);
        println!("{what}: next step after {middle:.2} s (median), {last:.2} s at the most");
    };
    let alone = recoveries(&field).await?;
    told("good jobs alone", &alone);
    println!("{:.1} MB, {:.1}% of a core", operator.memory()?.0, operator.load().await? * 100.0);
    for index in 0..count {
        let kind = ["large", "flapping", "refused", "loud"][index as usize % 4];
        let mut object = job(&format!("{kind}-{index}"), 1);
        if kind == "large" {
            let spec = &mut object["spec"];
            spec["nodes"] = json!({ "profile": "cpu", "min": 1, "max": 4096 });
            spec["model"]["numHiddenLayers"] = json!(256);
            spec["model"]["experts"]["count"] = json!(256);
        }
        field.api.put("moejobs", object);
    }
    let api = field.api.clone();
    let flapping = tokio::spawn(async move {
        for round in 0u64.. {
            for index in (1..count).step_by(4) {
                let name = format!("flapping-{index}");
                let suspend = round % 2 == 0;
                api.edit("moejobs", (NAMESPACE, &name), |job| {
                    job["spec"]["suspend"] = json!(suspend);
                });
                sleep(Duration::from_millis(10)).await;
            }
        }
    });
    let beside = async {
        sleep(QUIET).await;
        recoveries(&field).await
    };
    let beside = tokio::select! {
        beside = beside => beside?,
        ended = operator.ended(&field) => return Err(ended),
    };
    told(&format!("beside {count} hostile jobs"), &beside);
    let delay = beside[beside.len() / 2] - alone[alone.len() / 2];
    let load = operator.load().await?;
    let (now, most) = operator.memory()?;
    println!(
        "delayed by {delay:.2} s; {now:.1} MB, {most:.1} MB at the most, {:.1}% of a core",
        load * 100.0
    );
    let trains = |index: &usize| field.attempt(&format!("good-{index}")).1;
    println!("{} of {} good jobs train", (0..GOOD.0).filter(trains).count(), GOOD.0);
    flapping.abort();
    Ok(())
}
