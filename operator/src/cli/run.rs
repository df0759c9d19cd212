//! `moejob run FILE`.

use super::{complain, machine};
use super::room::{self, Fit};
use super::profiles::OwnProfiles;
use super::validate::{Changed, ReadJob};
use crate::local::{self, Options, Tracking};
use clap::Args;
use moejob_plan::job::Job;
use moejob_plan::launch::Places;
use moejob_plan::lead::Local;
use moejob_plan::offline::count;
use moejob_plan::placement;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
pub struct RunArgs {
    /// The MoeJob manifest.
    pub file: PathBuf,
    /// Another value of a field, such as training.steps=800. May be given several times.
    #[arg(long, value_name = "FIELD=VALUE")]
    pub set: Vec<String>,
    /// Another name for the job, and so another folder.
    #[arg(long)]
    pub name: Option<String>,
    /// Where runs lie: this one in DIR/NAME.
    #[arg(long, default_value = "runs")]
    pub dir: PathBuf,
    /// Worker processes, in place of nodes.max (and of nodes.min, if that is larger).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub workers: Option<u32>,
    /// Kernel threads of each worker; by default the cores are shared out evenly.
    #[arg(long, default_value_t = 0)]
    pub threads: u32,
    #[command(flatten)]
    pub profiles: OwnProfiles,
    /// Writes three steps of rank 0, the fourth to the sixth, as a Chrome trace: for Perfetto.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Also writes what TensorBoard reads, beside metrics.jsonl.
    #[arg(long)]
    pub tfevents: bool,
    /// Also logs the run at an MLflow server, http://HOST:PORT. Default: MLFLOW_TRACKING_URI.
    #[arg(long, value_name = "URI")]
    pub mlflow: Option<String>,
}

pub fn run(args: &RunArgs) -> ExitCode {
    let changed = Changed { sets: &args.set, name: args.name.as_deref() };
    let read = match super::validate::read_changed_job(&args.file, &args.profiles, &changed) {
        Ok(read) => read,
        Err(code) => return code,
    };
    let trace = match args.trace.as_ref().map(std::path::absolute).transpose() {
        Ok(trace) => trace,
        Err(error) => {
            eprintln!("moejob: --trace: {error}");
            return ExitCode::from(2);
        }
    };
    let mlflow = match tracking(args.mlflow.as_deref()) {
        Ok(mlflow) => mlflow,
        Err(code) => return code,
    };
    let result = local_job(&read, args).map(|job| {
        local::run(job, &args.dir, Options { trace, tfevents: args.tfevents, mlflow })
    });
    match result {
        Ok(Ok(code)) => ExitCode::from(code as u8),
        Ok(Err(error)) => {
            complain(&error);
            ExitCode::from(error.exit_code() as u8)
        }
        Err(message) => {
            eprintln!("moejob: {message}");
            ExitCode::from(2)
        }
    }
}

/// Where the run is logged. What was typed is refused; a variable that is meant for others, as a
/// folder or a database, is told and left alone.
fn tracking(typed: Option<&str>) -> Result<Option<Tracking>, ExitCode> {
    let variable = |name: &str| std::env::var(name).ok();
    let set = variable("MLFLOW_TRACKING_URI").filter(|uri| !uri.is_empty());
    let Some(uri) = typed.map(str::to_string).or(set) else { return Ok(None) };
    match (Tracking::read(&uri, variable), typed) {
        (Ok(tracking), _) => Ok(Some(tracking)),
        (Err(why), Some(_)) => {
            eprintln!("moejob: --mlflow: {why}");
            Err(ExitCode::from(2))
        }
        (Err(why), None) => {
            eprintln!("moejob: nothing is logged at MLFLOW_TRACKING_URI: {why}");
            Ok(None)
        }
    }
}

/// The job as this machine runs it, or why it cannot.
fn local_job(read: &ReadJob, args: &RunArgs) -> Result<Local, String> {
    let mut job = read.job.clone();
    if let Some(workers) = args.workers {
        job.nodes.max = workers;
        job.nodes.min = job.nodes.min.min(workers);
        if let Some(words) = idle(&job, workers) {
            eprintln!("moejob: {words}");
        }
    }
    let unsupported = read.lines(job.unsupported());
    if !unsupported.is_empty() {
        return Err(unsupported.join("\n"));
    }
    let (sizes, skipped) = placement::sizes(&job);
    if sizes.is_empty() {
        let lines = skipped.iter().map(|skip| format!("\n  {} nodes: {}", skip.nodes, skip.why));
        return Err(format!("no number of workers works:{}", lines.collect::<String>()));
    }
    let needed = || {
        let needs = placement::needs(&job, &sizes, None);
        needs.values().map(|need| need.rank.committed).max().unwrap_or(0)
    };
    machine::check(&job, needed)?;
    let fit = sizes.last().map(|size| room::check(&job, size)).transpose()?;
    if let Some(tight) = fit.as_ref().and_then(|fit| fit.tight.as_ref()) {
        eprintln!("moejob: {tight}");
    }
    let places = places(&job, &args.dir).map_err(|error| format!("{}: {error}", job.name))?;
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    let threads = if args.threads > 0 { args.threads } else { (cores / job.nodes.max).max(1) };
    if let Some(fit) = fit {
        banner(&job, &fit, threads, &args.dir).iter().for_each(|line| eprintln!("{line}"));
    }
    Ok(Local { job, places, threads })
}

/// What is about to run, in two lines.
fn banner(job: &Job, fit: &Fit, threads: u32, dir: &Path) -> [String; 2] {
    let (model, training) = (&job.model, &job.training);
    let tokens = u64::from(training.global_batch_size) * u64::from(training.sequence_length);
    let plural = |number: u32| if number == 1 { "" } else { "s" };
    let available = fit.available.map_or(String::new(), |bytes| {
        format!(" of {} available", placement::gib(bytes))
    });
    let workers = fit.wish.workers;
    [
        format!(
            "{}: {} parameters, {} of them for a token; {} steps of {tokens} tokens, {} in all",
            job.name,
            count(model.numel()),
            count(model.active_numel()),
            training.steps,
            count(tokens.saturating_mul(training.steps))
        ),
        format!(
            "  memory {}{available}; {workers} worker{} with {threads} thread{}; in {}",
            placement::gib(fit.wish.even),
            plural(workers),
            plural(threads),
            dir.join(&job.name).display()
        ),
    ]
}

/// What is said of more workers than a step has work for.
fn idle(job: &Job, workers: u32) -> Option<String> {
    let training = &job.training;
    let micro_batches = training.global_batch_size / training.micro_batch_size.max(1);
    let busy = micro_batches.div_ceil(job.profile.ranks.max(1));
    (workers > busy).then(|| {
        format!(
            "--workers {workers}: a step has {micro_batches} micro-batches (globalBatchSize {} / \
             microBatchSize {}), so {busy} train at most and the others wait",
            training.global_batch_size, training.micro_batch_size
        )
    })
}

fn places(job: &Job, dir: &Path) -> std::io::Result<Places> {
    let text = |path: PathBuf| path.to_string_lossy().into_owned();
    let dir = std::path::absolute(dir)?;
    let records = dir.join(&job.name);
    let checkpoints = match &job.checkpoint.location {
        Some(location) => std::path::absolute(location)?,
        None => records.join("checkpoints"),
    };
    std::fs::create_dir_all(&checkpoints)?;
    Ok(Places {
        root: text(std::env::current_dir()?),
        exclude: vec![text(dir), text(checkpoints.clone())],
        checkpoints: text(checkpoints),
        records: text(records),
    })
}
