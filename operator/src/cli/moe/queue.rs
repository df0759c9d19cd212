//! `kubectl moe queue`: the jobs in the order in which they are served.

use super::cluster::{Cluster, JOBS, PRIORITIES};
use super::error::MoeError;
use super::follow::Followed;
use super::job::{JobView, Priorities, in_order, reason_cell};
use super::output::{self, Format};
use super::table::{Table, age, or_dash, short};
use super::{now, run_until_interrupted};
use clap::Args;
use moejob_plan::observed::Millis;
use serde_json::Value;

#[derive(Args)]
pub struct QueueArgs {
    /// Jobs of all namespaces.
    #[arg(short = 'A', long)]
    pub all_namespaces: bool,
    /// Also those that are over.
    #[arg(short, long)]
    pub all: bool,
    /// Jobs with these labels alone, as `team=a,tier!=test`.
    #[arg(short = 'l', long)]
    pub selector: Option<String>,
    /// How they are written.
    #[arg(short, long, value_enum)]
    pub output: Option<Format>,
    /// Go on, with a line for each change.
    #[arg(short, long)]
    pub watch: bool,
    /// Without the heads of the columns.
    #[arg(long)]
    pub no_headers: bool,
}

pub async fn run(cluster: &Cluster, args: &QueueArgs) -> Result<(), MoeError> {
    let namespace = (!args.all_namespaces).then_some(cluster.namespace.as_str());
    let mut objects = cluster.list(JOBS, namespace, args.selector.as_deref()).await?;
    objects.iter_mut().for_each(output::tidy);
    let mut jobs: Vec<(JobView, Value)> =
        objects.into_iter().map(|object| (JobView::read(&object), object)).collect();
    jobs.retain(|(job, _)| args.all || !job.is_over());
    let listed = output::list(jobs.iter().map(|(_, object)| object.clone()).collect());
    let mut views: Vec<JobView> = jobs.into_iter().map(|(job, _)| job).collect();
    in_order(&mut views, &priorities(cluster).await?);
    let style = Style::of(args);
    let table = table(&views, style, now());
    match output::value(args.output, &listed) {
        // A watch writes objects one by one, as kubectl does.
        Some(_) if args.watch => {}
        Some(text) => output::print(&text)?,
        None if views.is_empty() => {
            let place = namespace.map_or(String::new(), |name| format!(" in {name} namespace"));
            let over = if args.all { "" } else { "unfinished " };
            eprintln!("No {over}jobs found{place}.");
        }
        None => output::print(&table.render(!args.no_headers, &[]))?,
    }
    if !args.watch {
        return Ok(());
    }
    let widths = table.widths();
    run_until_interrupted(watch(cluster, args, namespace, style, &widths)).await
}

/// Those that may not read the classes see jobs by age.
pub async fn priorities(cluster: &Cluster) -> Result<Priorities, MoeError> {
    match cluster.list(PRIORITIES, None, None).await {
        Ok(classes) => Ok(Priorities::read(&classes)),
        Err(error) if error.is_forbidden() => Ok(Priorities::default()),
        Err(error) => Err(error),
    }
}

async fn watch(
    cluster: &Cluster,
    args: &QueueArgs,
    namespace: Option<&str>,
    style: Style,
    widths: &[usize],
) -> Result<(), MoeError> {
    let stream = cluster.watch(JOBS, namespace, args.selector.as_deref(), None);
    let mut followed = Followed::new(stream);
    let mut printed: Vec<(String, String)> = Vec::new();
    let mut first = true;
    while let Some(objects) = followed.next().await {
        let listed = std::mem::take(&mut first);
        for mut object in objects {
            output::tidy(&mut object);
            let job = JobView::read(&object);
            if let Some(text) = output::value(args.output, &object) {
                output::print(&text)?;
                continue;
            }
            let row = table(std::slice::from_ref(&job), style, now()).render(false, widths);
            // What the table above has said already, and rows that say the same again.
            let known = printed.iter_mut().find(|(uid, _)| *uid == job.uid);
            let gist = gist(&job);
            match known {
                Some((_, before)) if *before == gist => continue,
                Some((_, before)) => *before = gist,
                None => printed.push((job.uid.clone(), gist)),
            }
            if !listed {
                output::print(&row)?;
            }
        }
    }
    Ok(())
}

/// A line is written when this changes; of progress the status tells every ten seconds.
fn gist(job: &JobView) -> String {
    let status = &job.status;
    format!("{} {} {} {}", job.phase(), status.nodes.summary, status.step, status.restarts)
}

/// Which columns.
#[derive(Clone, Copy, Debug, Default)]
pub struct Style {
    namespaces: bool,
    wide: bool,
}

impl Style {
    fn of(args: &QueueArgs) -> Style {
        Style {
            namespaces: args.all_namespaces,
            wide: args.output == Some(Format::Wide),
        }
    }
}

pub fn table(jobs: &[JobView], style: Style, now: Millis) -> Table {
    let mut heads = vec!["NAME", "PHASE", "NODES", "STEP", "LOSS", "TOK/S", "LEFT", "AGE"];
    if style.wide {
        heads.extend(["ATTEMPT", "RESTARTS", "EXPERTS", "CHECKPOINT", "PRIORITY", "ON"]);
    }
    heads.push("REASON");
    if style.namespaces {
        heads.insert(0, "NAMESPACE");
    }
    let mut table = Table::new(&heads);
    for job in jobs {
        table.row(row(job, style, now));
    }
    table
}

fn row(job: &JobView, style: Style, now: Millis) -> Vec<String> {
    let status = &job.status;
    let nodes = &status.nodes.summary;
    let text = |text: &str| if text.is_empty() { "-".to_string() } else { text.to_string() };
    let mut cells = vec![
        job.name.clone(),
        job.phase().to_string(),
        text(nodes),
        job.steps(),
        or_dash(status.loss, |loss| format!("{loss:.4}")),
        or_dash(status.tokens_per_second.filter(|_| status.phase == "Running"), short),
        or_dash(job.left(), age),
        age(now.saturating_sub(job.created)),
    ];
    if style.wide {
        let placement = status.placement.as_ref();
        cells.extend([
            status.attempt.to_string(),
            status.restarts.to_string(),
            or_dash(placement, |placement| placement.summary.clone()),
            or_dash(status.checkpoint.as_ref(), |checkpoint| checkpoint.step.to_string()),
            text(&job.priority_class),
            or_dash(placement, |placement| placement.ranks.join(",")),
        ]);
    }
    cells.push(reason_cell(job, style.wide));
    if style.namespaces {
        cells.insert(0, job.namespace.clone());
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::{START, condition, object};
    use super::*;
    use serde_json::json;

    fn jobs() -> Vec<JobView> {
        let running = json!({
            "phase": "Running", "attempt": 2, "restarts": 1, "step": 120, "steps": 300,
            "loss": 2.31456, "tokensPerSecond": 1024.0,
            "nodes": {"ready": 2, "desired": 2, "summary": "2/2"},
            "placement": {"summary": "8 over 2 ranks", "ranks": ["worker-1..2"]},
            "checkpoint": {"step": 100, "name": "step-00000100"},
        });
        let waiting = json!({
            "phase": "Pending", "steps": 300, "nodes": {"desired": 2, "summary": "0/2"},
            "conditions": [condition(
                "Planned", "False", "WaitingForNodes",
                "needs 2 nodes, 0 are free: 2 in use by a MoeJob; it waits for one to be free",
            )],
        });
        vec![
            JobView::read(&object("first", running)),
            JobView::read(&object("second", waiting)),
        ]
    }

    #[test]
    fn the_table_is_what_one_looks_for() {
        let expected = "\
NAME     PHASE     NODES   STEP      LOSS     TOK/S   LEFT   AGE   REASON
first    Running   2/2     120/300   2.3146   1024    90s    60s
second   Pending   0/2     0/300     -        -       -      60s   WHY
";
        let expected = expected
            .replace("WHY", "needs 2 nodes, 0 are free: 2 in use by a MoeJob; it waits...");
        assert_eq!(table(&jobs(), Style::default(), START + 60_000).text(), expected);
    }

    #[test]
    fn wide_has_more_columns_and_whole_reasons() {
        let style = Style { namespaces: true, wide: true };
        let text = table(&jobs(), style, START + 60_000).text();
        let lines: Vec<&str> = text.lines().collect();
        let words = |line: &str| line.split_whitespace().map(str::to_string).collect::<Vec<_>>();
        assert_eq!(
            words(lines[0]).join(" "),
            "NAMESPACE NAME PHASE NODES STEP LOSS TOK/S LEFT AGE ATTEMPT RESTARTS EXPERTS \
             CHECKPOINT PRIORITY ON REASON"
        );
        assert_eq!(
            words(lines[1]).join(" "),
            "team-a first Running 2/2 120/300 2.3146 1024 90s 60s 2 1 8 over 2 ranks 100 - \
             worker-1..2"
        );
        assert!(lines[2].ends_with("it waits for one to be free"), "{text}");
    }
}
