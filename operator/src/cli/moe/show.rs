//! `kubectl moe show NAME`: one job, its workers, its life in words, and what to do.

use super::advice::advice;
use super::cluster::{Cluster, EVENTS, JOBS, PODS};
use super::error::MoeError;
use super::follow::Followed;
use super::job::JobView;
use super::output::{self, Format};
use super::table::{Table, age, cut, millis, or_dash, short, stamp};
use super::timeline::{self, Entry, PodView, Told};
use super::{now, run_until_interrupted};
use clap::Args;
use moejob_manifest::problem::printable_lines;
use moejob_plan::engines::RankPlace;
use moejob_plan::observed::Millis;
use moejob_plan::pods::{LABEL_JOB, LABEL_JOB_UID};
use serde_json::{Value, json};
use std::io::IsTerminal;

/// Workers that are listed one by one; the others are counted.
const WORKERS_MAX: usize = 64;
/// Of the words of a lost engine.
const CAUSE_MAX: usize = 100;

#[derive(Args)]
pub struct ShowArgs {
    /// The job.
    pub job: String,
    /// How it is written.
    #[arg(short, long, value_enum)]
    pub output: Option<Format>,
    /// Each rank with its node and its device, in place of the workers.
    #[arg(long)]
    pub ranks: bool,
    /// Go on: on a terminal it is drawn anew, in a pipe each happening is a line.
    #[arg(short, long)]
    pub watch: bool,
}

/// All that is shown, before it is text.
pub struct Picture {
    /// Rank by rank.
    pub ranks: bool,
    pub job: JobView,
    pub pods: Vec<PodView>,
    pub entries: Vec<Entry>,
    pub advice: Vec<String>,
}

pub async fn run(cluster: &Cluster, args: &ShowArgs) -> Result<(), MoeError> {
    let object = cluster.get(JOBS, Some(&cluster.namespace), &args.job).await?;
    let picture = picture(cluster, &object, args.ranks).await?;
    let drawn = std::io::stdout().is_terminal() && args.watch;
    match output::value(args.output, &json(&picture, &object)) {
        Some(text) => output::print(&text)?,
        None => output::print(&screen(&picture, drawn))?,
    }
    if !args.watch {
        return Ok(());
    }
    run_until_interrupted(watch(cluster, args, picture.entries)).await
}

async fn watch(
    cluster: &Cluster,
    args: &ShowArgs,
    mut known: Vec<Entry>,
) -> Result<(), MoeError> {
    let field = format!("metadata.name={}", args.job);
    let stream = cluster.watch(JOBS, Some(&cluster.namespace), None, Some(&field));
    let mut followed = Followed::new(stream);
    let drawn = std::io::stdout().is_terminal();
    while let Some(objects) = followed.next().await {
        let Some(object) = objects.last().filter(|object| object["gone"] != true) else {
            return Err(MoeError::Failed(format!("{} is gone", args.job)));
        };
        let picture = picture(cluster, object, args.ranks).await?;
        if let Some(text) = output::value(args.output, &json(&picture, object)) {
            output::print(&text)?;
        } else if drawn {
            output::print(&screen(&picture, true))?;
        } else {
            let new = picture.entries.iter().filter(|entry| !is_told(entry, &known));
            output::say(&new.map(line).collect::<String>())?;
        }
        known = picture.entries;
    }
    Ok(())
}

/// An event tells the moment more exactly than the condition that was seen before it.
fn is_told(entry: &Entry, known: &[Entry]) -> bool {
    known.iter().any(|before| {
        let same = (&before.event, &before.words, &before.details)
            == (&entry.event, &entry.words, &entry.details);
        same && before.at.abs_diff(entry.at) < 5_000
    })
}

/// The job is there; pods and events are shown as far as they may be read.
async fn picture(
    cluster: &Cluster,
    object: &Value,
    ranks: bool,
) -> Result<Picture, MoeError> {
    let job = JobView::read(object);
    let label = format!("{LABEL_JOB_UID}={}", job.uid);
    let namespace = Some(cluster.namespace.as_str());
    let about = format!("regarding.uid={}", job.uid);
    let (pods, events) = futures::join!(
        cluster.list(PODS, namespace, Some(&label)),
        cluster.list_fields(EVENTS, namespace, &about),
    );
    let readable = |found: Result<Vec<Value>, MoeError>| match found {
        Err(error) if error.is_forbidden() => {
            eprintln!("kubectl moe: {}", output::plain(&error));
            Ok(Vec::new())
        }
        found => found,
    };
    let pods: Vec<PodView> = readable(pods)?.iter().map(PodView::read).collect();
    let told: Vec<Told> = readable(events)?.iter().filter_map(Told::read).collect();
    let entries = timeline::entries(&job, &told, &pods);
    let advice = advice(&job, &pods);
    Ok(Picture { ranks, job, pods, entries, advice })
}

fn screen(picture: &Picture, drawn: bool) -> String {
    let clear = if drawn { "\x1b[H\x1b[2J" } else { "" };
    format!("{clear}{}", printable_lines(&text(picture, now())))
}

fn line(entry: &Entry) -> String {
    let details = entry.details.join("; ");
    let separator = if details.is_empty() { "" } else { "; " };
    format!("{}  {}{separator}{details}\n", stamp(entry.at), entry.words.replace('\n', "; "))
}

/// For a person.
pub fn text(picture: &Picture, now: Millis) -> String {
    let job = &picture.job;
    let mut text = String::new();
    for (name, value) in facts(job, now) {
        text += &format!("{:<14}{value}\n", format!("{name}:"));
    }
    if picture.ranks {
        text += &section("Ranks", &ranks(picture));
    } else if !picture.pods.is_empty() {
        text += &section("Workers", &workers(picture, now));
        if picture.pods.len() > WORKERS_MAX {
            text += &format!("  and {} more\n", picture.pods.len() - WORKERS_MAX);
        }
    }
    if !job.status.engines_lost.is_empty() {
        text += &section("Engines lost", &engines_lost(job, now));
    }
    text += "\nTimeline:\n";
    text += &timeline::text(&picture.entries);
    text += "\nWhat to do:\n";
    for advice in &picture.advice {
        text += &format!("  {}\n", advice.replace('\n', "\n  "));
    }
    text
}

fn section(name: &str, table: &Table) -> String {
    let rows: Vec<String> = table.text().lines().map(|row| format!("  {row}\n")).collect();
    format!("\n{name}:\n{}", rows.concat())
}

fn facts(job: &JobView, now: Millis) -> Vec<(&'static str, String)> {
    let status = &job.status;
    let mut facts = vec![
        ("Name", job.name.clone()),
        ("Namespace", job.namespace.clone()),
        ("Phase", job.phase_in_words(now)),
    ];
    let reason = job.reason();
    if !reason.is_empty() {
        facts.push(("Reason", reason.replace('\n', "\n              ")));
    }
    let spares = match status.nodes.spares {
        0 => String::new(),
        1 => ", 1 spare".to_string(),
        spares => format!(", {spares} spares"),
    };
    let on = status.placement.as_ref().map(|of| format!(" ({})", of.ranks.join(", ")));
    let nodes = if status.nodes.summary.is_empty() { "none" } else { &status.nodes.summary };
    facts.push(("Nodes", format!("{nodes}{}{spares}", on.unwrap_or_default())));
    if let (Some(mesh), Some(placement)) = (&status.mesh, &status.placement) {
        facts.push((
            "Mesh",
            format!(
                "world {}: dp {}, ep {}, tp {}, pp {}; experts {}",
                mesh.world, mesh.dp, mesh.ep, mesh.tp, mesh.pp, placement.summary
            ),
        ));
    }
    if let Some(fabric) = status.placement.as_ref().and_then(|of| of.fabric.as_ref()) {
        facts.push(("Fabric", fabric.summary.clone()));
    }
    for (name, type_) in [("Rings", "RingsVerified"), ("Binding", "BindingVerified")] {
        let Some(found) = job.condition(type_) else { continue };
        let verdict = match (found.status.as_str(), found.message.is_empty()) {
            ("True", false) => "",
            ("True", true) => "as planned",
            ("False", _) => "not as planned: ",
            _ => "not known: ",
        };
        let why = found.message.replace('\n', "\n              ");
        facts.push((name, format!("{verdict}{why}")));
    }
    if status.steps > 0 {
        let share = status.step as f64 * 100.0 / status.steps as f64;
        let mut progress = format!("step {} of {} ({share:.0}%)", status.step, status.steps);
        if let Some(loss) = status.loss {
            progress += &format!(", loss {loss:.4}");
        }
        if let Some(rate) = status.tokens_per_second.filter(|_| status.phase == "Running") {
            progress += &format!(", {} tokens/s", short(rate));
        }
        if let Some(left) = job.left() {
            progress += &format!(", about {} left", age(left));
        }
        facts.push(("Progress", progress));
    }
    if let Some(checkpoint) = &status.checkpoint {
        facts.push(("Checkpoint", format!("step {} ({})", checkpoint.step, checkpoint.name)));
    }
    if status.attempt > 0 {
        let budget = job.job.as_ref().map(|job| &job.recovery);
        let of = budget.map(|of| {
            format!(" of {} within {}", of.max_restarts, age(of.window))
        });
        let restarts = format!("{}{}", status.restarts, of.unwrap_or_default());
        facts.push(("Attempt", format!("{}, restarts {restarts}", status.attempt)));
    }
    facts
}

fn workers(picture: &Picture, now: Millis) -> Table {
    let mut table = Table::new(&["RANK", "POD", "NODE", "STATE", "AGE"]);
    for (rank, pod) in by_rank(&picture.job, &picture.pods).into_iter().take(WORKERS_MAX) {
        table.row(vec![
            or_dash(rank, |rank| picture.job.ranks_in_words(rank)),
            pod.name.clone(),
            if pod.node.is_empty() { "-".to_string() } else { pod.node.clone() },
            pod.state.clone(),
            age(now.saturating_sub(pod.made)),
        ]);
    }
    table
}

/// All of them, however many.
fn ranks(picture: &Picture) -> Table {
    let mut table = Table::new(&["RANK", "POD", "NODE", "DEVICE", "UUID"]);
    for of in picture.job.ranks() {
        let uuid = if of.uuid.is_empty() { "-".to_string() } else { of.uuid };
        table.row(vec![of.rank.to_string(), of.worker, of.node, of.device.to_string(), uuid]);
    }
    table
}

/// Newest last.
fn engines_lost(job: &JobView, now: Millis) -> Table {
    let mut table = Table::new(&["RANK", "NODE", "DEVICE", "UUID", "ATTEMPT", "AGE", "CAUSE"]);
    for loss in &job.status.engines_lost {
        table.row(vec![
            loss.rank.to_string(),
            loss.node.clone(),
            loss.device.to_string(),
            if loss.uuid.is_empty() { "-".to_string() } else { loss.uuid.clone() },
            loss.attempt.to_string(),
            or_dash(millis(&loss.time), |at| age(now.saturating_sub(at))),
            cut(&loss.cause, CAUSE_MAX),
        ]);
    }
    table
}

/// Ranks first, then spares and those that have ended.
pub fn by_rank<'p>(job: &JobView, pods: &'p [PodView]) -> Vec<(Option<u32>, &'p PodView)> {
    let rank = |pod: &PodView| job.rank_of(&pod.name).filter(|_| !pod.ended);
    let mut all: Vec<_> = pods.iter().map(|pod| (rank(pod), pod)).collect();
    all.sort_by_key(|(rank, pod)| (rank.is_none(), *rank, pod.ended, pod.made, pod.name.clone()));
    all
}

/// For scripts: fields are added in later versions, and none is renamed.
fn json(picture: &Picture, object: &Value) -> Value {
    let job = &picture.job;
    let mut object = object.clone();
    output::tidy(&mut object);
    let worker = |(rank, pod): (Option<u32>, &PodView)| {
        json!({ "rank": rank, "ranks": rank.map(|_| job.ranks_a_worker()), "pod": pod.name,
            "node": pod.node, "state": pod.state, "created": stamp(pod.made) })
    };
    let rank = |of: RankPlace| {
        json!({ "rank": of.rank, "pod": of.worker, "node": of.node, "device": of.device,
            "uuid": of.uuid })
    };
    let ranks: Vec<Value> = match picture.ranks {
        true => job.ranks().into_iter().map(rank).collect(),
        false => Vec::new(),
    };
    let workers: Vec<Value> = by_rank(job, &picture.pods).into_iter().map(worker).collect();
    json!({
        "name": job.name,
        "namespace": job.namespace,
        "phase": job.phase(),
        "reason": job.reason(),
        "secondsLeft": job.left().map(|left| left / 1000),
        "workers": workers,
        "ranks": ranks,
        "enginesLost": job.status.engines_lost,
        "timeline": timeline::json(&picture.entries),
        "advice": picture.advice,
        "object": object,
    })
}

/// The label by which a job's pods are found before its uid is known.
pub fn pods_of(job: &str) -> String {
    format!("{LABEL_JOB}={job}")
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::{START, condition, object};
    use super::*;
    use moejob_plan::observed::{Gang, Record};
    use moejob_plan::record::{self, Saved};
    use moejob_protocol::Mesh;
    use moejob_protocol::config::Member;
    use moejob_protocol::layout::Layout;

    #[test]
    fn one_page_says_all() {
        let status = json!({
            "phase": "Running", "attempt": 1, "step": 150, "steps": 300, "loss": 2.3123,
            "tokensPerSecond": 512.0,
            "nodes": {"ready": 1, "desired": 2, "spares": 1, "summary": "1/2"},
            "mesh": {"world": 1, "dp": 1, "ep": 1, "tp": 1, "pp": 1},
            "placement": {"summary": "8 over 1 ranks", "ranks": ["worker-1"]},
            "checkpoint": {"step": 100, "name": "step-00000100"},
            "conditions": [
                condition("Running", "True", "Training", ""),
                condition("Degraded", "True", "FewerNodes", "1 of 2 nodes"),
                condition("RingsVerified", "False", "Differs", "a ring goes\nelsewhere"),
                condition("BindingVerified", "True", "AsPlanned", ""),
            ],
        });
        let object = object("a", status);
        let job = JobView::read(&object);
        let pod = PodView {
            name: "a-a1-0".into(),
            node: "worker-1".into(),
            state: "Running".into(),
            made: START + 2_000,
            ..PodView::default()
        };
        let entries = timeline::entries(&job, &[], std::slice::from_ref(&pod));
        let advice = advice(&job, &[]);
        let picture = Picture { ranks: false, job, pods: vec![pod], entries, advice };
        let expected = "\
Name:         a
Namespace:    team-a
Phase:        Running for 60s
Reason:       1 of 2 nodes
Nodes:        1/2 (worker-1), 1 spare
Mesh:         world 1: dp 1, ep 1, tp 1, pp 1; experts 8 over 1 ranks
Rings:        not as planned: a ring goes
              elsewhere
Binding:      as planned
Progress:     step 150 of 300 (50%), loss 2.3123, 512 tokens/s, about 2m30s left
Checkpoint:   step 100 (step-00000100)
Attempt:      1, restarts 0 of 20 within 60m

Workers:
  RANK   POD      NODE       STATE     AGE
  -      a-a1-0   worker-1   Running   63s

Timeline:
  2026-11-21 (UTC)
  17:00:00      +0s  submitted
  17:00:02      +2s  allocated worker-1, after 2.0 s
                     not placed yet: a-a1-0
  17:00:05      +5s  training, 5.0 s after it was submitted

What to do:
  nothing: it makes its way
";
        assert_eq!(text(&picture, START + 65_000), expected);
        let json = json(&picture, &object);
        assert_eq!((&json["phase"], &json["timeline"][2]["event"]),
            (&json!("Running"), &json!("Training")));
        assert_eq!(json["workers"][0]["node"], "worker-1");
        assert!(line(&picture.entries[1]).starts_with("2026-11-21T17:00:02Z  allocated worker-1"));
    }

    #[test]
    fn ranks_and_lost_engines_are_named_by_node_and_device() {
        let member = |index: u32| Member {
            rank: 2 * index,
            worker: format!("a-a2-{index}"),
            node: format!("worker-{}", index + 1),
            address: String::new(),
        };
        let gang = Gang {
            attempt: 3,
            digest: String::new(),
            layout: Layout::contiguous(Mesh::data_parallel(4, 2)),
            members: vec![member(0), member(1)],
            resumed_at: 0,
            started_at: START,
            stepped: true,
            stop_requested: None,
            broken: None,
            ended: None,
            inherited: false,
        };
        let record = Record { gang: Some(gang), attempt: 3, ..Record::default() };
        let record = record::write(&Saved { record, ..Saved::default() });
        let status = json!({
            "phase": "Running", "attempt": 3, "record": record,
            "enginesLost": [{
                "rank": 1, "node": "worker-2", "device": 1, "uuid": "GPU-7c", "attempt": 2,
                "cause": "exit code 70: an illegal address", "time": stamp(START),
            }],
        });
        let object = object("a", status);
        let job = JobView::read(&object);
        let (pods, entries, advice) = Default::default();
        let picture = Picture { ranks: true, job, pods, entries, advice };
        let shown = text(&picture, START + 63_000);
        let expected = "\
Ranks:
  RANK   POD      NODE       DEVICE   UUID
  0      a-a2-0   worker-1   0        -
  1      a-a2-0   worker-1   1        -
  2      a-a2-1   worker-2   0        -
  3      a-a2-1   worker-2   1        GPU-7c

Engines lost:
  RANK   NODE       DEVICE   UUID     ATTEMPT   AGE   CAUSE
  1      worker-2   1        GPU-7c   2         63s   exit code 70: an illegal address
";
        assert!(shown.contains(expected), "{shown}");
        let json = json(&picture, &object);
        let last = &json["ranks"][3];
        let found = ["rank", "pod", "node", "device", "uuid"].map(|field| last[field].clone());
        assert_eq!(json!(found), json!([3, "a-a2-1", "worker-2", 1, "GPU-7c"]));
        assert_eq!(json["enginesLost"][0]["uuid"], "GPU-7c");
    }
}
