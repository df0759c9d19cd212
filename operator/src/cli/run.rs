//! `moejob run FILE`.

pub mod mlflow;
pub mod budget;
mod post;
mod refused;
pub mod tfevents;

use super::args::{THREADS_MAX, place, whole, word};
use super::examples::{self, TINY};
use super::{complain, machine};
use super::room::{self, Fit};
use super::profiles::OwnProfiles;
use super::validate::{Changed, ReadJob};
use crate::local::{self, FolderError, LocalError, Options};
use crate::cli::out::io;
use clap::Args;
use mlflow::Tracking;
use refused::Missing;
use moejob_manifest::job::Job;
use moejob_manifest::problem::printable_lines;
use moejob_manifest::words::count;
use moejob_plan::launch::Places;
use moejob_plan::lead::Local;
use moe_worker::checkpoint::{self, Disk};
use moejob_plan::placement;
use moejob_protocol::config::Tokenizer;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
pub struct RunArgs {
    /// The MoeJob manifest; `tiny` is lesson 1, which is written where it is not there.
    pub file: PathBuf,
    /// Another value of a field, such as training.steps=800. May be given several times.
    #[arg(long, value_name = "FIELD=VALUE")]
    pub set: Vec<String>,
    /// Plans training.steps for so much time, such as 5m, by a few steps that are measured first.
    #[arg(long, value_name = "TIME", value_parser = budget::read)]
    pub budget: Option<u64>,
    /// Another name for the job, and so another folder.
    #[arg(long)]
    pub name: Option<String>,
    /// Where runs lie: this one in DIR/NAME.
    #[arg(long, default_value = "runs")]
    pub dir: PathBuf,
    /// Worker processes, in place of nodes.max (and of nodes.min, if that is larger).
    #[arg(long, value_parser = whole(1, 1024))]
    pub workers: Option<u32>,
    /// Kernel threads of each worker; by default the cores are shared out evenly.
    #[arg(long, default_value_t = 0, value_parser = whole(0, THREADS_MAX))]
    pub threads: u32,
    #[command(flatten)]
    pub profiles: OwnProfiles,
    /// Writes three steps of rank 0, the fourth to the sixth, as a Chrome trace: for Perfetto.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Also writes what TensorBoard reads, beside metrics.jsonl.
    #[arg(long)]
    pub tfevents: bool,
    /// Begin at step 0 although checkpoints are there that cannot be used. They are set aside by
    /// name, and nothing removes them.
    #[arg(long)]
    pub fresh: bool,
    /// Also logs the run at an MLflow server, http://HOST:PORT. Default: MLFLOW_TRACKING_URI.
    #[arg(long, value_name = "URI")]
    pub mlflow: Option<String>,
}

pub fn run(args: &RunArgs) -> ExitCode {
    let is_tiny = args.file == Path::new(TINY) && !args.file.exists();
    let file = match is_tiny.then(examples::tiny).transpose() {
        Ok(written) => written.unwrap_or_else(|| args.file.clone()),
        Err(why) => {
            eprintln!("moejob: {why}");
            return ExitCode::from(2);
        }
    };
    let name = args.name.as_deref().or(is_tiny.then_some(TINY));
    let read_job = |sets: &[String]| {
        let changed = Changed { sets, name };
        super::validate::read_changed_job(&file, &args.profiles, &changed)
    };
    let planned = args.budget.map(|budget| {
        let job = read_job(&args.set)?.job;
        budget::steps(args, &file, &job, budget).map_err(|why| {
            eprintln!("moejob: {}", printable_lines(&why));
            ExitCode::from(2)
        })
    });
    let mut sets = args.set.clone();
    match planned.transpose() {
        Ok(Some((steps, why))) => {
            eprintln!("--budget: {why}");
            sets.push(format!("training.steps={steps}"));
        }
        Ok(None) => {}
        Err(code) => return code,
    }
    let read = match read_job(&sets) {
        Ok(read) => read,
        Err(code) => return code,
    };
    let trace = match args.trace.as_deref().map(trace_file).transpose() {
        Ok(trace) => trace,
        Err(why) => {
            eprintln!("moejob: {why}");
            return ExitCode::from(2);
        }
    };
    let mlflow = match tracking(args.mlflow.as_deref()) {
        Ok(mlflow) => mlflow,
        Err(code) => return code,
    };
    let location = read.job.checkpoint.location.as_deref().map(Path::new);
    let missing = Missing::of(&args.dir.join(&read.job.name), location);
    let result = local_job(&read, args).map(|job| {
        let (tfevents, fresh) = (args.tfevents, args.fresh);
        local::run(job, &args.dir, Options { trace, tfevents, mlflow, fresh })
    });
    let code = match result {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => {
            complain(&error);
            if let LocalError::Folder(FolderError::Changed { changes, .. }) = &error {
                eprintln!("  {}", anew(args, &file, &read.job.name, changes));
            }
            error.exit_code()
        }
        Err(message) => {
            eprintln!("moejob: {message}");
            2
        }
    };
    missing.remove(code);
    ExitCode::from(code as u8)
}

/// Where the trace goes. It is written in the middle of the training: a place that takes no file is
/// told before.
fn trace_file(file: &Path) -> Result<PathBuf, String> {
    let refused = |error: std::io::Error| {
        format!("--trace {}: {}; name a file in a folder that is there", file.display(), io(&error))
    };
    let path = std::path::absolute(file).map_err(refused)?;
    let is_new = !path.exists();
    std::fs::File::options().create(true).append(true).open(&path).map_err(refused)?;
    if is_new {
        std::fs::remove_file(&path).map_err(refused)?;
    }
    Ok(path)
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
    // A run is named as everywhere else.
    let from = job.model_from.as_deref().map(|from| place(Path::new(from)));
    job.model_from = from.map(|path| path.to_string_lossy().into_owned());
    let of_cluster = of_cluster(&job);
    if !of_cluster.is_empty() {
        eprintln!(
            "moejob: {} {} for a cluster, where `moejob kube submit {}` takes the job: nothing of \
             it counts on this machine",
            of_cluster.join(", "),
            if of_cluster.len() == 1 { "is" } else { "are" },
            word(&args.file),
        );
    }
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
        let lines = skipped.iter().map(|skip| format!("\n  {}", skip.sentence()));
        return Err(format!("no number of workers works:{}", lines.collect::<String>()));
    }
    let needed = || {
        let needs = placement::needs(&job, &sizes, None);
        needs.values().map(|need| need.rank.committed).max().unwrap_or(0)
    };
    for remark in machine::check(&job, needed)? {
        eprintln!("moejob: {remark}");
    }
    absent(&job, &args.dir, args.fresh)?;
    let fit = sizes.last().map(|size| room::check(&job, size)).transpose()?;
    if let Some(tight) = fit.as_ref().and_then(|fit| fit.tight.as_ref()) {
        eprintln!("moejob: {tight}");
    }
    let places = places(&job, &args.dir)?;
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

/// What begins another run with the weights of this one, where they fit it.
fn anew(args: &RunArgs, file: &Path, name: &str, changes: &str) -> String {
    if changes.lines().any(|line| line.trim_start().starts_with("model.")) {
        return "its weights fit no other model; `--name OTHER` begins another run without them"
            .to_string();
    }
    let sets = args.set.iter().map(|set| format!(" --set {}", word(Path::new(set))));
    let own = word(&args.dir.join(name));
    format!(
        "a new run that begins with this one's weights: moejob run {}{} --name OTHER --set \
         model.from.path={own}",
        word(file),
        sets.collect::<String>(),
    )
}

/// What a manifest says that a cluster alone understands.
fn of_cluster(job: &Job) -> Vec<&'static str> {
    let of = &job.kubernetes;
    let template = of.pod_template.as_object();
    let all = [
        ("spec.image", of.image.is_some()),
        ("spec.volumes", !of.volumes.is_empty()),
        ("spec.podTemplate", !template.is_none_or(|fields| fields.is_empty())),
        ("spec.priorityClassName", !of.priority_class_name.is_empty()),
        ("spec.schedulerName", !of.scheduler_name.is_empty()),
        ("spec.ttlSecondsAfterFinished", of.ttl_seconds_after_finished.is_some()),
    ];
    all.into_iter().filter(|(_, is_there)| *is_there).map(|(field, _)| field).collect()
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

/// What a manifest names and this machine has not: told before a worker looks for it. A run that
/// has checkpoints goes on from them, and does not need what it began with.
fn absent(job: &Job, dir: &Path, fresh: bool) -> Result<(), String> {
    const HUB: &str = "if this is the name of a model on a hub: nothing is downloaded here. Fetch \
                       its files first, and name the folder that they lie in";
    const TOKENIZER: &str = "name a tokenizer.json, or `bytes`; `moejob data tokenizer` makes one \
                             of your documents, and nothing is downloaded here";
    let here = std::env::current_dir().unwrap_or_default();
    let is_there = |path: &str| Path::new(path).exists();
    let of = |field: &str, path: &str, advice: &str| {
        format!("{field}: `{path}` is not there, seen from {}\n  {advice}", here.display())
    };
    let own = dir.join(&job.name).join("checkpoints");
    let location = job.checkpoint.location.as_deref().map_or(own.as_path(), Path::new);
    let begun =
        !fresh && checkpoint::list(&Disk::real(), location).is_ok_and(|found| !found.is_empty());
    let from = job.model_from.as_deref().filter(|path| !begun && !is_there(path));
    let tokenizer = match &job.data.tokenizer {
        Tokenizer::Path(path) if !is_there(path) => Some(path),
        _ => None,
    };
    let lines: Vec<String> = [
        from.map(|path| of("spec.model.from.path", path, HUB)),
        tokenizer.map(|path| of("spec.data.tokenizer", path, TOKENIZER)),
    ]
    .into_iter()
    .flatten()
    .collect();
    if lines.is_empty() { Ok(()) } else { Err(lines.join("\n")) }
}

/// # Errors
/// A folder that the job is to lie in cannot be made: which, and why.
fn places(job: &Job, dir: &Path) -> Result<Places, String> {
    let text = |path: PathBuf| path.to_string_lossy().into_owned();
    let absolute = |path: &Path| {
        std::path::absolute(path).map_err(|error| format!("{}: {}", path.display(), io(&error)))
    };
    let (dir, records) = (absolute(dir)?, absolute(dir)?.join(&job.name));
    let (checkpoints, asked) = match &job.checkpoint.location {
        Some(location) => (absolute(Path::new(location))?, "spec.checkpoint.location"),
        None => (records.join("checkpoints"), "--dir"),
    };
    // A checkpoint lasts no longer than the folders that it lies in.
    Disk::real().create_directories(&checkpoints).map_err(|error| {
        let folder = checkpoints.display();
        format!("the folder {folder} cannot be made: {}; choose another {asked}", io(&error))
    })?;
    let here = std::env::current_dir()
        .map_err(|error| format!("there is no current directory: {}", io(&error)))?;
    Ok(Places {
        root: text(here),
        exclude: vec![text(dir), text(checkpoints.clone())],
        checkpoints: text(checkpoints),
        records: text(records),
    })
}
