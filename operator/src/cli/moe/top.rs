//! `kubectl moe top [JOB]`: speed, loss, balance of experts and memory, of jobs or of workers.

use super::cluster::{Cluster, JOBS, POD_METRICS, PODS};
use super::error::MoeError;
use super::job::{JobView, in_order};
use super::merge::split;
use super::output::{self, Format};
use super::queue::priorities;
use super::show::by_rank;
use super::speaker::step_of;
use super::table::{Table, age, mebibytes, or_dash, short};
use super::timeline::PodView;
use super::run_until_interrupted;
use clap::Args;
use futures::StreamExt;
use kube::api::LogParams;
use moejob_manifest::resources::thousandths;
use moejob_manifest::workspace::CONTAINER;
use moejob_plan::observed::Millis;
use moejob_plan::pods::{LABEL_JOB, LABEL_JOB_UID};
use moejob_protocol::report::StepReport;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::Duration;

/// Lines of rank 0 among which a step is.
const TAIL: i64 = 50;
/// Logs that are asked for at once.
const LOGS_AT_ONCE: usize = 8;

#[derive(Args)]
pub struct TopArgs {
    /// One job, worker by worker; without it all that run.
    pub job: Option<String>,
    /// Jobs of all namespaces.
    #[arg(short = 'A', long, conflicts_with = "job")]
    pub all_namespaces: bool,
    /// Again every two seconds.
    #[arg(short, long)]
    pub watch: bool,
    /// How it is written.
    #[arg(short, long, value_enum)]
    pub output: Option<Format>,
}

/// What is known of one job's running.
pub struct Load {
    pub job: JobView,
    pub pods: Vec<PodView>,
    /// Rank 0's newest line.
    pub step: Option<StepReport>,
}

/// Thousandths of a core and bytes of a pod, where the cluster measures them.
pub type Usage = BTreeMap<(String, String), (u64, u64)>;

pub async fn run(cluster: &Cluster, args: &TopArgs) -> Result<(), MoeError> {
    if !args.watch {
        return output::print(&look(cluster, args).await?);
    }
    let again = async {
        loop {
            let text = look(cluster, args).await?;
            let clear = if std::io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
            output::print(&format!("{clear}{text}"))?;
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    };
    run_until_interrupted(again).await
}

async fn look(cluster: &Cluster, args: &TopArgs) -> Result<String, MoeError> {
    let namespace = (!args.all_namespaces).then_some(cluster.namespace.as_str());
    let mut jobs: Vec<JobView> = match &args.job {
        Some(name) => vec![JobView::read(&cluster.get(JOBS, namespace, name).await?)],
        None => {
            let all = cluster.list(JOBS, namespace, None).await?;
            all.iter().map(JobView::read).filter(|job| !job.is_over()).collect()
        }
    };
    in_order(&mut jobs, &priorities(cluster).await?);
    let label = match &args.job {
        Some(name) => format!("{LABEL_JOB}={name}"),
        None => LABEL_JOB.to_string(),
    };
    let (pods, usage) = futures::join!(
        cluster.list(PODS, namespace, Some(&label)),
        cluster.list(POD_METRICS, namespace, Some(&label)),
    );
    // Many clusters measure nothing, and some let few people see it.
    let usage = usage_of(&usage.unwrap_or_default());
    let mut by_uid: BTreeMap<String, Vec<PodView>> = BTreeMap::new();
    for pod in pods? {
        let uid = pod["metadata"]["labels"][LABEL_JOB_UID].as_str().unwrap_or_default();
        by_uid.entry(uid.to_string()).or_default().push(PodView::read(&pod));
    }
    let loads = jobs.into_iter().map(|job| {
        let pods = by_uid.remove(&job.uid).unwrap_or_default();
        async move {
            let step = newest(cluster, &job, &pods).await;
            Load { job, pods, step }
        }
    });
    let loads: Vec<Load> = futures::stream::iter(loads).buffered(LOGS_AT_ONCE).collect().await;
    if let Some(text) = output::value(args.output, &json(&loads, &usage)) {
        return Ok(text);
    }
    Ok(match (&args.job, loads.as_slice()) {
        (Some(_), [load]) => workers(load, &usage),
        (_, []) => {
            eprintln!("No jobs are running.");
            String::new()
        }
        _ => table(&loads, &usage, args.all_namespaces).text(),
    })
}

/// The newest step of which rank 0 has told; none where its log may not be read.
async fn newest(cluster: &Cluster, job: &JobView, pods: &[PodView]) -> Option<StepReport> {
    let (worker, _) = job.members().into_iter().next()?;
    let pod = pods.iter().find(|pod| pod.name == worker && pod.started.is_some())?;
    let params = LogParams {
        container: Some(CONTAINER.to_string()),
        tail_lines: Some(TAIL),
        timestamps: true,
        ..LogParams::default()
    };
    let mut lines = std::pin::pin!(cluster.logs(&job.namespace, &pod.name, &params).await.ok()?);
    let mut step = None;
    while let Some(Ok(line)) = lines.next().await {
        step = split(&line).and_then(|(_, text)| step_of(text)).or(step);
    }
    step
}

fn usage_of(metrics: &[Value]) -> Usage {
    let mut usage = Usage::new();
    for pod in metrics {
        let text = |field: &str| pod["metadata"][field].as_str().unwrap_or_default().to_string();
        let sum = |name: &str| -> u64 {
            let containers = pod["containers"].as_array().into_iter().flatten();
            let amounts = containers.filter_map(|of| thousandths(of["usage"][name].as_str()?));
            amounts.map(|amount| u64::try_from(amount).unwrap_or(0)).sum()
        };
        let used = (sum("cpu"), sum("memory") / 1000);
        usage.insert((text("namespace"), text("name")), used);
    }
    usage
}

/// Sum over the workers that have not ended.
fn used(load: &Load, usage: &Usage) -> Option<(u64, u64)> {
    let of = |pod: &PodView| usage.get(&(load.job.namespace.clone(), pod.name.clone()));
    let known: Vec<_> = load.pods.iter().filter(|pod| !pod.ended).filter_map(of).collect();
    let sum = |part: fn(&(u64, u64)) -> u64| known.iter().map(|used| part(used)).sum();
    (!known.is_empty()).then(|| (sum(|used| used.0), sum(|used| used.1)))
}

pub fn table(loads: &[Load], usage: &Usage, namespaces: bool) -> Table {
    let mut heads = vec![
        "NAME", "PHASE", "RANKS", "STEP", "LOSS", "TOK/S", "IMBALANCE", "CPU", "MEMORY", "PLANNED",
        "LEFT",
    ];
    if namespaces {
        heads.insert(0, "NAMESPACE");
    }
    let mut table = Table::new(&heads);
    for load in loads {
        let (job, step) = (&load.job, load.step.as_ref());
        let measured = used(load, usage);
        let planned = job.planned_memory().map(|ranks| ranks.iter().sum());
        let mut cells = vec![
            job.name.clone(),
            job.phase().to_string(),
            or_dash(job.status.mesh.as_ref(), |mesh| mesh.world.to_string()),
            or_dash(step.map(|step| step.step).or(Some(job.status.step)), |step| step.to_string()),
            or_dash(step.map(|step| step.loss).or(job.status.loss), |loss| format!("{loss:.4}")),
            or_dash(rate(load), short),
            or_dash(step.map(|step| step.expert_imbalance), |of| format!("{of:.2}")),
            or_dash(measured, |(cores, _)| format!("{cores}m")),
            or_dash(measured, |(_, bytes)| mebibytes(bytes)),
            or_dash(planned, mebibytes),
            or_dash(left(load), age),
        ];
        if namespaces {
            cells.insert(0, job.namespace.clone());
        }
        table.row(cells);
    }
    table
}

/// Of a job that runs: what rank 0 said last, or the operator.
fn rate(load: &Load) -> Option<f64> {
    let said = load.step.as_ref().map(|step| step.tokens_per_second);
    said.or(load.job.status.tokens_per_second).filter(|_| load.job.status.phase == "Running")
}

/// By what rank 0 said last, or the operator.
fn left(load: &Load) -> Option<Millis> {
    match &load.step {
        Some(step) => load.job.left_at(step.step, step.tokens_per_second),
        None => load.job.left(),
    }
}

/// The job in a line, then a line for each of its workers.
pub fn workers(load: &Load, usage: &Usage) -> String {
    let job = table(std::slice::from_ref(load), usage, false).text();
    let mut table =
        Table::new(&["RANK", "POD", "NODE", "STATE", "TOK/S", "CPU", "MEMORY", "PLANNED"]);
    let planned = load.job.planned_memory().unwrap_or_default();
    let ranks = load.job.ranks_a_worker();
    // Ranks end each step together: none is faster than another.
    let share = f64::from(ranks) / planned.len().max(1) as f64;
    for (rank, pod) in by_rank(&load.job, &load.pods) {
        let measured = usage.get(&(load.job.namespace.clone(), pod.name.clone()));
        table.row(vec![
            or_dash(rank, |rank| load.job.ranks_in_words(rank)),
            pod.name.clone(),
            if pod.node.is_empty() { "-".to_string() } else { pod.node.clone() },
            pod.state.clone(),
            or_dash(rate(load).filter(|_| rank.is_some()), |rate| short(rate * share)),
            or_dash(measured, |(cores, _)| format!("{cores}m")),
            or_dash(measured, |(_, bytes)| mebibytes(*bytes)),
            or_dash(planned_of(&planned, rank, ranks), mebibytes),
        ]);
    }
    format!("{job}\n{}", table.text())
}

/// Of all ranks of the worker whose first one this is.
fn planned_of(planned: &[u64], first: Option<u32>, ranks: u32) -> Option<u64> {
    let first = first? as usize;
    planned.get(first..first + ranks as usize).map(|bytes| bytes.iter().sum())
}

fn json(loads: &[Load], usage: &Usage) -> Value {
    let load = |load: &Load| {
        let planned = load.job.planned_memory().unwrap_or_default();
        let ranks = load.job.ranks_a_worker();
        let worker = |(rank, pod): (Option<u32>, &PodView)| {
            let used = usage.get(&(load.job.namespace.clone(), pod.name.clone()));
            json!({
                "rank": rank, "ranks": rank.map(|_| ranks), "pod": pod.name, "node": pod.node,
                "state": pod.state, "cpuMillicores": used.map(|used| used.0),
                "memoryBytes": used.map(|used| used.1),
                "plannedBytes": planned_of(&planned, rank, ranks),
            })
        };
        let workers: Vec<Value> = by_rank(&load.job, &load.pods).into_iter().map(worker).collect();
        json!({
            "name": load.job.name,
            "namespace": load.job.namespace,
            "phase": load.job.phase(),
            "step": load.step.as_ref().map_or(load.job.status.step, |step| step.step),
            "steps": load.job.status.steps,
            "loss": load.step.as_ref().map(|step| step.loss).or(load.job.status.loss),
            "tokensPerSecond": rate(load),
            "expertImbalance": load.step.as_ref().map(|step| step.expert_imbalance),
            "secondsLeft": left(load).map(|left| left / 1000),
            "workers": workers,
        })
    };
    json!({ "items": loads.iter().map(load).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::object;
    use super::*;
    use moejob_plan::observed::{Gang, Record};
    use moejob_plan::record::{self, Saved};
    use moejob_protocol::Mesh;
    use moejob_protocol::config::Member;
    use moejob_protocol::layout::Layout;

    fn load() -> Load {
        load_of(1)
    }

    /// Two workers with so many devices each.
    fn load_of(devices: u32) -> Load {
        let member = |index: u32| Member {
            rank: index * devices,
            worker: format!("a-a1-{index}"),
            node: format!("worker-{}", index + 1),
            address: "10.0.0.1:7777".into(),
        };
        let gang = Gang {
            attempt: 1,
            digest: "d".into(),
            layout: Layout::contiguous(Mesh::data_parallel(2 * devices, 2)),
            members: vec![member(0), member(1)],
            resumed_at: 0,
            started_at: 1,
            stepped: true,
            stop_requested: None,
            broken: None,
            ended: None,
            inherited: false,
        };
        let record = Record { gang: Some(gang), attempt: 1, ..Record::default() };
        let saved = Saved { record, ..Saved::default() };
        let status = json!({
            "phase": "Running", "step": 100, "steps": 300, "loss": 2.5, "tokensPerSecond": 1000.0,
            "mesh": {"world": 2, "dp": 2, "ep": 2, "tp": 1, "pp": 1},
            "record": record::write(&saved),
        });
        let pod = |name: &str, node: &str, ended: bool| PodView {
            name: name.into(),
            node: node.into(),
            state: if ended { "Exit 1" } else { "Running" }.into(),
            ended,
            ..PodView::default()
        };
        let pods = vec![
            pod("a-a1-2", "worker-1", true),
            pod("a-a1-1", "worker-2", false),
            pod("a-a1-0", "worker-1", false),
        ];
        Load { job: JobView::read(&object("a", status)), pods, step: None }
    }

    #[test]
    fn workers_stand_by_rank_with_what_is_measured() {
        let metrics = json!({
            "metadata": {"name": "a-a1-1", "namespace": "team-a"},
            "containers": [{"usage": {"cpu": "1500m", "memory": "204800Ki"}}],
        });
        let usage = usage_of(&[metrics]);
        let text = workers(&load(), &usage);
        let lines: Vec<String> = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(
            lines[0],
            "NAME PHASE RANKS STEP LOSS TOK/S IMBALANCE CPU MEMORY PLANNED LEFT"
        );
        assert!(lines[1].starts_with("a Running 2 100 2.5000 1000 - 1500m 200Mi "), "{text}");
        assert_eq!(lines[3], "RANK POD NODE STATE TOK/S CPU MEMORY PLANNED");
        assert!(lines[4].starts_with("0 a-a1-0 worker-1 Running 500 - - "), "{text}");
        assert!(lines[4].ends_with("Mi"), "{text}");
        assert!(lines[5].starts_with("1 a-a1-1 worker-2 Running 500 1500m 200Mi "), "{text}");
        assert_eq!(lines[6], "- a-a1-2 worker-1 Exit 1 - - - -");
    }

    #[test]
    fn a_worker_of_several_devices_has_their_ranks_and_their_memory() {
        let (one, four) = (load(), load_of(4));
        let ranks = four.job.planned_memory().expect("a plan");
        let text = workers(&four, &Usage::new());
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[4].starts_with("0-3 ") && lines[5].starts_with("4-7 "), "{text}");
        assert!(lines[5].contains(" 500 "), "half of the rate\n{text}");
        let shown = json(&[four], &Usage::new())["items"][0]["workers"].clone();
        let second = (&shown[1]["rank"], &shown[1]["ranks"], &shown[1]["plannedBytes"]);
        assert_eq!(second, (&json!(4), &json!(4), &json!(ranks[4..].iter().sum::<u64>())));
        let shown = json(&[one], &Usage::new())["items"][0]["workers"].clone();
        assert_eq!((&shown[1]["rank"], &shown[1]["ranks"]), (&json!(1), &json!(1)));
    }

    #[test]
    fn what_rank_0_says_is_newer_than_the_status() {
        let mut load = load();
        load.step = step_of(
            r#"{"step":112,"loss":2.25,"auxLoss":1.0,"zLoss":0.0,"gradNorm":1.0,"learningRate":0.1,
            "tokens":1,"tokensPerSecond":2000.0,"worldSize":2,"attempt":1,"expertImbalance":1.5,
            "time":"2026-11-21T17:00:00.000Z"}"#,
        );
        let row = json(&[load], &Usage::new())["items"][0].clone();
        let found = [&row["step"], &row["loss"], &row["tokensPerSecond"], &row["expertImbalance"]];
        assert_eq!(found, [&json!(112), &json!(2.25), &json!(2000.0), &json!(1.5)]);
    }
}
