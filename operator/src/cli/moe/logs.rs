//! `kubectl moe logs NAME`: all workers of a job as one log, and on through its recoveries.

use super::cluster::{Cluster, JOBS, PODS};
use super::error::MoeError;
use super::follow::Followed;
use super::job::JobView;
use super::merge::{Line, Merge, PATIENCE, split};
use super::show::pods_of;
use super::speaker::{Speaker, Style};
use super::timeline::PodView;
use super::{now, output, run_until_interrupted};
use clap::Args;
use futures::StreamExt;
use kube::api::LogParams;
use moejob_manifest::workspace::CONTAINER;
use std::io::IsTerminal;
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::sync::mpsc;

/// Lines on their way from the readers.
const WAITING_MAX: usize = 1024;
/// Between two tries to read on in a log that ended although its worker has not.
const AGAIN: Duration = Duration::from_secs(1);
/// How often the merger looks whether somebody has become quiet.
const TICK: Duration = Duration::from_millis(100);

#[derive(Args)]
pub struct LogsArgs {
    /// The job.
    pub job: String,
    /// Go on until the job is over, also with workers that are not there yet.
    #[arg(short, long)]
    pub follow: bool,
    /// Only this rank; may be repeated.
    #[arg(long)]
    pub rank: Vec<u32>,
    /// Only what was said in this attempt.
    #[arg(long)]
    pub attempt: Option<u32>,
    /// Only so many of the last lines of each worker.
    #[arg(long)]
    pub tail: Option<i64>,
    /// Only what is newer, as 30s, 10m or 2h.
    #[arg(long, value_parser = super::duration)]
    pub since: Option<Duration>,
    /// Metrics and events as they were written, as JSON.
    #[arg(long)]
    pub raw: bool,
    /// The time before each line.
    #[arg(long)]
    pub timestamps: bool,
    /// Without the rank before each line.
    #[arg(long)]
    pub no_prefix: bool,
    /// Logs that are read at once at most.
    #[arg(long, default_value_t = 64)]
    pub max_log_requests: usize,
    /// One JSON object a line.
    #[arg(short, long, value_enum)]
    pub output: Option<LogFormat>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    Json,
}

enum Heard {
    Line { log: usize, time: i128, text: String },
    End { log: usize },
}

pub async fn run(cluster: &Cluster, args: &LogsArgs) -> Result<(), MoeError> {
    let object = cluster.get(JOBS, Some(&cluster.namespace), &args.job).await?;
    let job = JobView::read(&object);
    let pods = cluster.list(PODS, Some(&cluster.namespace), Some(&pods_of(&args.job))).await?;
    let pods: Vec<PodView> = pods.iter().map(PodView::read).collect();
    if pods.is_empty() && (!args.follow || job.is_over()) {
        return Err(MoeError::Failed(no_pods(&job)));
    }
    let readable = pods.iter().filter(|pod| pod.started.is_some()).count();
    if readable > args.max_log_requests {
        let text = format!(
            "{readable} workers have logs, and --max-log-requests is {}; raise it, or name ranks \
             with --rank",
            args.max_log_requests
        );
        return Err(MoeError::Input(text));
    }
    let mut reading = Reading::new(cluster, args, &job);
    for pod in &pods {
        reading.begin(pod);
    }
    match args.follow {
        false => reading.to_the_end().await,
        true => run_until_interrupted(reading.on_and_on()).await,
    }
}

fn no_pods(job: &JobView) -> String {
    let (name, phase) = (&job.name, job.phase());
    let text = format!("{name} is {phase} and has no pods, so it has no logs");
    match phase {
        "Held" | "Complete" | "Failed" => format!(
            "{text} any more; metrics.jsonl and events.jsonl lie beside its checkpoints"
        ),
        _ => format!("{text} yet; `kubectl moe show {name}` says why, --follow waits for them"),
    }
}

struct Reading<'a> {
    cluster: &'a Cluster,
    args: &'a LogsArgs,
    merge: Merge,
    speakers: Vec<Speaker>,
    /// Pods that are read or have been.
    known: BTreeSet<String>,
    open: usize,
    job: JobView,
    sender: mpsc::Sender<Heard>,
    heard: mpsc::Receiver<Heard>,
}

impl<'a> Reading<'a> {
    fn new(cluster: &'a Cluster, args: &'a LogsArgs, job: &JobView) -> Reading<'a> {
        let (sender, heard) = mpsc::channel(WAITING_MAX);
        Reading {
            cluster,
            args,
            merge: Merge::default(),
            speakers: Vec::new(),
            known: BTreeSet::new(),
            open: 0,
            job: job.clone(),
            sender,
            heard,
        }
    }

    /// Reads a pod's log, if it has begun and is not read already.
    fn begin(&mut self, pod: &PodView) {
        if pod.started.is_none() || !self.known.insert(pod.name.clone()) {
            return;
        }
        if self.open >= self.args.max_log_requests {
            let most = self.args.max_log_requests;
            eprintln!("{} is not read: --max-log-requests is {most}", pod.name);
            return;
        }
        let log = self.merge.open(now());
        let whole = self.args.tail.is_none() && self.args.since.is_none();
        self.speakers.push(Speaker::new(&self.job, &pod.name, &pod.node, whole));
        self.open += 1;
        let params = LogParams {
            container: Some(CONTAINER.to_string()),
            follow: self.args.follow && !pod.ended,
            tail_lines: self.args.tail,
            since_seconds: self.args.since.map(|since| since.as_secs().max(1) as i64),
            timestamps: true,
            ..LogParams::default()
        };
        let reader = Reader {
            cluster: self.cluster.clone(),
            pod: pod.name.clone(),
            log,
            sender: self.sender.clone(),
        };
        tokio::spawn(reader.read(params));
    }

    /// What is there now.
    async fn to_the_end(mut self) -> Result<(), MoeError> {
        while self.open > 0 {
            let Some(heard) = self.heard.recv().await else { break };
            self.take(heard);
            self.tell(None)?;
        }
        self.tell(None)
    }

    async fn on_and_on(mut self) -> Result<(), MoeError> {
        let namespace = Some(self.cluster.namespace.as_str());
        let label = pods_of(&self.args.job);
        let mut pods = Followed::new(self.cluster.watch(PODS, namespace, Some(&label), None));
        let field = format!("metadata.name={}", self.args.job);
        let mut jobs = Followed::new(self.cluster.watch(JOBS, namespace, None, Some(&field)));
        let mut tick = tokio::time::interval(TICK);
        let mut over = false;
        loop {
            tokio::select! {
                Some(heard) = self.heard.recv() => self.take(heard),
                Some(objects) = pods.next() => {
                    objects.iter().map(PodView::read).for_each(|pod| self.begin(&pod));
                }
                Some(objects) = jobs.next() => {
                    over = objects.is_empty() || objects.iter().any(|object| {
                        object["gone"] == true || JobView::read(object).is_over()
                    });
                }
                _ = tick.tick() => {}
            }
            self.tell(Some(PATIENCE))?;
            if over && self.open == 0 && self.merge.is_empty() {
                return Ok(());
            }
        }
    }

    fn take(&mut self, heard: Heard) {
        match heard {
            Heard::Line { log, time, text } => self.merge.push(log, time, text, now()),
            Heard::End { log } => {
                self.merge.close(log);
                self.open -= 1;
            }
        }
    }

    fn tell(&mut self, patience: Option<u64>) -> Result<(), MoeError> {
        let style = Style {
            raw: self.args.raw,
            prefix: !self.args.no_prefix,
            timestamps: self.args.timestamps,
            json: self.args.output.is_some(),
        };
        let mut text = String::new();
        while let Some(Line { log, time, text: line }) = self.merge.take(now(), patience) {
            let speaker = &mut self.speakers[log];
            speaker.hear(&line);
            if speaker.is_wanted(&self.args.rank, self.args.attempt) {
                text += &speaker.say(time, &line, style);
            }
        }
        match text.is_empty() {
            true => Ok(()),
            // A file or a pipe gets what the workers wrote.
            false if std::io::stdout().is_terminal() => output::say(&text),
            false => output::print(&text),
        }
    }
}

/// One pod's log, read on after interruptions until its worker has ended.
struct Reader {
    cluster: Cluster,
    pod: String,
    log: usize,
    sender: mpsc::Sender<Heard>,
}

impl Reader {
    async fn read(self, mut params: LogParams) {
        let mut last = i128::MIN;
        let mut complained = false;
        loop {
            match self.once(&params, &mut last).await {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) if error.is_not_found() => break,
                Err(error) => {
                    if !std::mem::replace(&mut complained, true) {
                        eprintln!("kubectl moe: {}", output::plain(&error));
                    }
                    if !error.is_unreachable() {
                        break;
                    }
                }
            }
            if !params.follow || !self.goes_on().await {
                break;
            }
            tokio::time::sleep(AGAIN).await;
            // What came twice is left out by its time.
            let since = k8s_openapi::jiff::Timestamp::from_nanosecond(last);
            if let (true, Ok(since)) = (last > i128::MIN, since) {
                (params.since_seconds, params.tail_lines) = (None, None);
                params.since_time = Some(since);
            }
        }
        let _ = self.sender.send(Heard::End { log: self.log }).await;
    }

    /// False when nobody listens any more.
    async fn once(&self, params: &LogParams, last: &mut i128) -> Result<bool, MoeError> {
        let namespace = &self.cluster.namespace;
        let before = *last;
        let mut lines = std::pin::pin!(self.cluster.logs(namespace, &self.pod, params).await?);
        while let Some(line) = lines.next().await {
            // A cut connection is an end like any other: it is read on from there.
            let Ok(line) = line else { break };
            let (time, text) = split(&line).unwrap_or((*last, &line));
            if time <= before && before > i128::MIN {
                continue;
            }
            *last = time;
            let heard = Heard::Line { log: self.log, time, text: text.to_string() };
            if self.sender.send(heard).await.is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether its worker may still say something.
    async fn goes_on(&self) -> bool {
        match self.cluster.get(PODS, Some(&self.cluster.namespace), &self.pod).await {
            Ok(pod) => !PodView::read(&pod).ended,
            Err(error) => error.is_unreachable(),
        }
    }
}
