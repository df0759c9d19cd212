//! `moejob ls|show|tail`: runs of this machine, as `kubectl moe queue|show` shows those of a
//! cluster.
//!
//! ```text
//! DIR/NAME: job.json, lock, metrics.jsonl, events.jsonl --read--> Seen --> rows, pages, lines
//! ```

use crate::controller::now;
use super::args::{RUNS, is_run, or_its_runs, whole, word};
use super::moe::table::{Table, age, millis, short};
use super::validate::Output;
use clap::Args;
use crate::local::words::of_failing;
use moe_worker::checkpoint::{self, Disk};
use moe_worker::checkpoint::aside::{self, Aside};
use moejob_manifest::problem::printable;
use moejob_manifest::words::several;
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Bytes at the end of a file in which its last lines are looked for.
const TAIL_BYTES: u64 = 1 << 20;
/// Events that `show` lists.
const EVENTS_SHOWN: usize = 12;
/// More is no file of a run.
const JOB_BYTES_MAX: u64 = 4 << 20;
/// How often a followed run is looked at.
const FOLLOW_EVERY: Duration = Duration::from_millis(250);
/// Runs that a folder lists at most.
const RUNS_MAX: usize = 10_000;

#[derive(Args)]
pub struct LsArgs {
    /// Where runs lie.
    #[arg(default_value = RUNS)]
    pub dir: PathBuf,
    /// How they are written; json is one list.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

#[derive(Args)]
pub struct ShowArgs {
    /// A name that `moejob ls` lists, or the folder of a run.
    pub run: PathBuf,
    /// How it is written.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

#[derive(Args)]
pub struct TailArgs {
    /// A name that `moejob ls` lists, or the folder of a run.
    pub run: PathBuf,
    /// Lines at the end.
    #[arg(short = 'n', long, default_value_t = 10, value_parser = whole(0, u32::MAX))]
    pub lines: u32,
    /// Go on until the run is over.
    #[arg(short, long)]
    pub follow: bool,
    /// What has happened, in place of the steps.
    #[arg(long)]
    pub events: bool,
    /// How they are written; json is one list, and with --follow a value a line.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

/// What the files of a run say.
#[derive(Debug, Default)]
struct Seen {
    name: String,
    path: PathBuf,
    /// `running`, `done`, `failed`, `interrupted`, `suspended`, `ended` or `new`.
    state: &'static str,
    /// What of the spec is kept once it trains.
    job: Value,
    /// The newest step's line, the newest held-out loss before it or in it, the newest events.
    step: Option<Value>,
    held_out: Option<(u64, f64)>,
    events: Vec<Value>,
    /// What it was warned of, each once.
    warnings: Vec<String>,
    /// Why its checkpoints fail, and the newest good one.
    failing: Option<(String, Option<String>)>,
    /// Refused checkpoints that were set aside.
    aside: Vec<Aside>,
}

pub fn ls(args: &LsArgs) -> ExitCode {
    let entries = match std::fs::read_dir(&args.dir) {
        Ok(entries) => entries,
        Err(error) => {
            let (dir, why) = (args.dir.display(), crate::cli::out::io(&error));
            eprintln!("moejob: {dir}: {why}; name the folder of runs, such as {RUNS}");
            return ExitCode::from(2);
        }
    };
    let paths = entries.flatten().map(|entry| entry.path()).take(RUNS_MAX);
    let mut runs: Vec<Seen> = paths.filter(|path| is_run(path)).map(|path| read(&path)).collect();
    runs.sort_by(|a, b| a.name.cmp(&b.name));
    if args.output == Output::Json {
        println!("{}", Value::from(runs.iter().map(Seen::json).collect::<Vec<_>>()));
    } else if runs.is_empty() {
        eprintln!("No runs in {}.", args.dir.display());
    } else {
        print!("{}", table(&runs, now()).text());
        for run in runs.iter().filter(|run| !run.aside.is_empty()) {
            println!("{}: {}", run.name, run.aside_words());
        }
    }
    ExitCode::SUCCESS
}

pub fn show(args: &ShowArgs) -> ExitCode {
    let run = match found(&args.run) {
        Ok(run) => run,
        Err(code) => return code,
    };
    match args.output {
        Output::Json => println!("{}", run.json()),
        Output::Text => page(&run, now()).iter().for_each(|line| println!("{line}")),
    }
    ExitCode::SUCCESS
}

pub fn tail(args: &TailArgs) -> ExitCode {
    let run = match found(&args.run) {
        Ok(run) => run,
        Err(code) => return code,
    };
    let (file, line): (&str, fn(&Value) -> String) = match args.events {
        true => ("events.jsonl", event_line),
        false => ("metrics.jsonl", step_line),
    };
    let path = run.path.join(file);
    let (last, mut at) = last_lines(&path, args.lines as usize);
    let line = |value: &Value| match args.output {
        Output::Text => line(value),
        Output::Json => value.to_string(),
    };
    if args.output == Output::Json && !args.follow {
        println!("{}", Value::from(last));
        return ExitCode::SUCCESS;
    }
    if last.is_empty() && at == 0 && !args.follow {
        let what = if args.events { "nothing has happened" } else { "no step is done" };
        eprintln!("{}: {what} yet; it is {}", run.path.display(), run.state);
    }
    last.iter().for_each(|value| println!("{}", line(value)));
    while args.follow {
        // It is looked at before the file: what a run writes last is not missed.
        let runs = is_running(&run.path);
        let (more, next) = lines_from(&path, at);
        more.iter().for_each(|value| println!("{}", line(value)));
        at = next;
        if !runs {
            break;
        }
        std::thread::sleep(FOLLOW_EVERY);
    }
    ExitCode::SUCCESS
}

/// The run of a folder, or of a name that `moejob ls` lists.
fn found(path: &Path) -> Result<Seen, ExitCode> {
    let named = Path::new(RUNS).join(path);
    for path in [path, &named] {
        if is_run(path) {
            return Ok(read(path));
        }
    }
    let folder = or_its_runs(path);
    let path = path.display();
    eprintln!("moejob: {path} is neither a run of {RUNS}/ nor the folder of one");
    match folder {
        Some(words) => eprintln!("  {words}"),
        None => eprintln!(
            "  `moejob ls` lists those of {RUNS}/, `moejob ls DIR` those of another folder"
        ),
    }
    Err(ExitCode::from(2))
}

fn read(path: &Path) -> Seen {
    let name = path.canonicalize().ok();
    let name = name.as_deref().unwrap_or(path).file_name().unwrap_or_default();
    let mut text = Vec::new();
    let job = File::open(path.join("job.json"));
    let job = job.and_then(|file| file.take(JOB_BYTES_MAX).read_to_end(&mut text));
    let job = job.ok().and_then(|_| serde_json::from_slice(&text).ok()).unwrap_or(Value::Null);
    let (steps, _) = last_lines(&path.join("metrics.jsonl"), usize::MAX);
    let (mut events, _) = last_lines(&path.join("events.jsonl"), usize::MAX);
    let held_out = steps.iter().rev().find_map(|step| {
        Some((step["step"].as_u64()?, step["validationLoss"].as_f64()?))
    });
    let state = match is_running(path) {
        true => "running",
        false => ended(&events, steps.is_empty()),
    };
    let mut warnings: Vec<String> = Vec::new();
    for event in events.iter().filter(|event| event["event"] == "Warning") {
        let words = printable(event["message"].as_str().unwrap_or_default());
        if !warnings.contains(&words) {
            warnings.push(words);
        }
    }
    let newest = || {
        let all = checkpoint::list(&Disk::real(), &path.join("checkpoints")).unwrap_or_default();
        all.into_iter().rev().find(|of| of.manifest.is_ok()).map(|of| of.name)
    };
    let failing = failing(&events).map(|why| (why, newest()));
    events.drain(..events.len().saturating_sub(EVENTS_SHOWN));
    // What cannot be listed is told by who reads it.
    let aside = aside::list(&Disk::real(), &path.join("checkpoints")).unwrap_or_default();
    Seen {
        name: name.to_string_lossy().into_owned(),
        path: path.to_path_buf(),
        state,
        job,
        step: steps.last().cloned(),
        held_out,
        events,
        warnings,
        failing,
        aside,
    }
}

/// Why checkpoints failed last, where none was written since.
fn failing(events: &[Value]) -> Option<String> {
    let told = events.iter().rev().find(|event| {
        let kind = event["event"].as_str().unwrap_or_default();
        ["CheckpointDegraded", "CheckpointRecovered", "CheckpointCommitted"].contains(&kind)
    })?;
    let is_failure = told["event"] == "CheckpointDegraded";
    is_failure.then(|| printable(told["message"].as_str().unwrap_or_default()))
}

/// How the last of its runs ended. One that was killed has not said so.
fn ended(events: &[Value], is_new: bool) -> &'static str {
    let last = events.iter().rev().find_map(|event| match event["event"].as_str()? {
        "JobCompleted" => Some("done"),
        "JobFailed" => Some("failed"),
        "Interrupted" => Some("interrupted"),
        "JobSuspended" => Some("suspended"),
        "AttemptStarted" => Some("ended"),
        _ => None,
    });
    last.unwrap_or(if is_new { "new" } else { "ended" })
}

/// Whether a runner has the folder. Nothing is written: a shared lock is tried for a moment.
fn is_running(path: &Path) -> bool {
    let lock = File::open(path.join("lock"));
    lock.is_ok_and(|lock| flock(&lock, FlockOperation::NonBlockingLockShared).is_err())
}

/// The newest lines of a file, at most `most` of its last megabyte, and where it ends.
fn last_lines(path: &Path, most: usize) -> (Vec<Value>, u64) {
    let length = std::fs::metadata(path).map_or(0, |of| of.len());
    let from = length.saturating_sub(TAIL_BYTES);
    // The first line behind a cut is no whole one, and no JSON.
    let (mut lines, end) = lines_from(path, from);
    lines.drain(..lines.len().saturating_sub(most));
    (lines, end)
}

/// Whole lines from a place on, and the place behind them.
fn lines_from(path: &Path, from: u64) -> (Vec<Value>, u64) {
    let (mut found, mut at) = (Vec::new(), from);
    let Ok(mut file) = File::open(path) else { return (found, at) };
    if file.seek(SeekFrom::Start(from)).is_err() {
        return (found, at);
    }
    let mut reader = BufReader::new(file.take(2 * TAIL_BYTES));
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
        // The last line may be half written: it is read again.
        if line.last() != Some(&b'\n') {
            break;
        }
        at += line.len() as u64;
        found.extend(serde_json::from_slice::<Value>(&line));
        line.clear();
    }
    (found, at)
}

impl Seen {
    fn steps(&self) -> Option<u64> {
        self.job["spec"]["training"]["steps"].as_u64()
    }

    fn number(&self, field: &str) -> Option<f64> {
        self.step.as_ref()?[field].as_f64()
    }

    /// `120/600`
    fn progress(&self) -> String {
        let done = self.step.as_ref().and_then(|step| step["step"].as_u64()).unwrap_or(0);
        self.steps().map_or(done.to_string(), |steps| format!("{done}/{steps}"))
    }

    /// Since its newest step.
    fn idle(&self, now: u64) -> Option<u64> {
        let at = millis(self.step.as_ref()?["time"].as_str()?)?;
        Some(now.saturating_sub(at))
    }

    fn json(&self) -> Value {
        json!({
            "name": self.name,
            "path": self.path.display().to_string(),
            "state": self.state,
            "steps": self.steps(),
            "step": self.step,
            "heldOut": self.held_out.map(|(step, loss)| json!({ "step": step, "loss": loss })),
            "uid": self.job["uid"],
            "attempt": self.job["attempt"],
            "events": self.events,
            "warnings": self.warnings,
            "checkpoints": self.failing.as_ref().map(|(why, newest)| {
                json!({ "fail": why, "newest": newest })
            }),
            "aside": self.aside.iter().map(|of| json!({
                "name": of.name,
                "path": of.path.display().to_string(),
                "bytes": of.bytes,
            })).collect::<Vec<_>>(),
        })
    }

    /// `1 refused checkpoint set aside (step-00000020.damaged), 12345 bytes: rm -r ... removes it`
    fn aside_words(&self) -> String {
        let names: Vec<&str> = self.aside.iter().map(|of| &of.name[..]).collect();
        let bytes: u64 = self.aside.iter().map(|of| of.bytes).sum();
        let paths: Vec<String> = self.aside.iter().map(|of| word(&of.path)).collect();
        let what = several(names.len(), "refused checkpoint");
        let (names, paths) = (names.join(", "), paths.join(" "));
        format!("{what} set aside ({names}), {bytes} bytes: `rm -r {paths}` removes what it names")
    }
}

fn cell(value: Option<f64>, write: impl FnOnce(f64) -> String) -> String {
    value.map_or("-".to_string(), write)
}

fn table(runs: &[Seen], now: u64) -> Table {
    let heads = ["NAME", "STATE", "STEP", "LOSS", "HELD-OUT", "TOKENS/S", "RANKS", "LAST STEP"];
    let mut table = Table::new(&heads);
    for run in runs {
        table.row(vec![
            run.name.clone(),
            run.state.to_string(),
            run.progress(),
            cell(run.number("loss"), |loss| format!("{loss:.4}")),
            cell(run.held_out.map(|(_, loss)| loss), |loss| format!("{loss:.4}")),
            cell(run.number("tokensPerSecond"), short),
            cell(run.number("worldSize"), |ranks| format!("{ranks:.0}")),
            run.idle(now).map_or("-".to_string(), |span| format!("{} ago", age(span))),
        ]);
    }
    table
}

/// A run for a person: what it is, where it stands, and what has happened.
fn page(run: &Seen, now: u64) -> Vec<String> {
    let mut lines = vec![format!("{}: {}", printable(&run.name), run.state)];
    let mut put = |name: &str, text: String| lines.push(format!("  {name:<14}{text}"));
    put("step", run.progress());
    if let Some(loss) = run.number("loss") {
        put("loss", format!("{loss:.4}"));
    }
    if let Some((step, loss)) = run.held_out {
        put("held-out", format!("{loss:.4} at step {step}"));
    }
    if let Some(rate) = run.number("learningRate") {
        put("learning rate", format!("{rate:.2e}"));
    }
    if let (Some(speed), Some(ranks)) = (run.number("tokensPerSecond"), run.number("worldSize")) {
        let all = if ranks == 1.0 { "rank" } else { "ranks" };
        put("speed", format!("{} tokens/s on {ranks:.0} {all}", short(speed)));
    }
    if let Some(span) = run.idle(now) {
        put("last step", format!("{} ago", age(span)));
    }
    let model = &run.job["spec"]["model"];
    if let (Some(layers), Some(experts)) =
        (model["numHiddenLayers"].as_u64(), model["experts"]["count"].as_u64())
    {
        let each = model["experts"]["perToken"].as_u64().unwrap_or(0);
        put("model", format!("{layers} layers, {experts} experts each, {each} a token"));
    }
    put("folder", printable(&run.path.display().to_string()));
    if let Some((why, newest)) = &run.failing {
        put("checkpoints", of_failing(why, newest.as_deref()));
    }
    if !run.aside.is_empty() {
        put("set aside", run.aside_words());
    }
    if !run.warnings.is_empty() {
        lines.push("warnings".to_string());
        lines.extend(run.warnings.iter().map(|words| format!("  {words}")));
    }
    if !run.events.is_empty() {
        lines.push("events".to_string());
        lines.extend(run.events.iter().map(|event| format!("  {}", event_line(event))));
    }
    lines
}

/// `step 120  loss 2.1034  12.3k tok/s  4 ranks`
fn step_line(step: &Value) -> String {
    let mut line = format!("step {}", step["step"].as_u64().unwrap_or(0));
    let number = |field: &str| step[field].as_f64();
    if let Some(loss) = number("loss") {
        line += &format!("  loss {loss:.4}");
    }
    if let Some(norm) = number("gradNorm") {
        line += &format!("  gradient norm {norm:.3}");
    }
    if let Some(speed) = number("tokensPerSecond") {
        line += &format!("  {} tok/s", short(speed));
    }
    if let Some(loss) = number("validationLoss") {
        line += &format!("  held-out {loss:.4}");
    }
    if let Some(ranks) = number("worldSize") {
        line += &format!("  {ranks:.0} {}", if ranks == 1.0 { "rank" } else { "ranks" });
    }
    line
}

/// `2026-11-22T17:05:02.123Z  WorkerLost  killed by signal 9`
fn event_line(event: &Value) -> String {
    let text = |field: &str| event[field].as_str().unwrap_or_default().to_string();
    let mut words = vec![text("time"), text("event")];
    let message = match text("message") {
        message if message.is_empty() => text("reason"),
        message => message,
    };
    let step = event["step"].as_u64().map(|step| format!("step {step}"));
    words.extend(step);
    words.push(message);
    words.retain(|word| !word.is_empty());
    printable(&words.join("  "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_event_that_tells_says_how_a_run_ended() {
        let events = |names: &[&str]| -> Vec<Value> {
            names.iter().map(|name| json!({ "event": name })).collect()
        };
        let cases = [
            (&["AttemptStarted", "JobCompleted"][..], "done"),
            (&["AttemptStarted", "JobFailed", "WorkerLost"], "failed"),
            (&["JobCompleted", "AttemptStarted", "CheckpointCommitted"], "ended"),
            (&["AttemptStarted", "Interrupted"], "interrupted"),
        ];
        for (names, state) in cases {
            assert_eq!(ended(&events(names), false), state, "{names:?}");
        }
        assert_eq!((ended(&[], true), ended(&[], false)), ("new", "ended"));
    }

    #[test]
    fn checkpoints_that_fail_are_told_until_one_is_written() {
        let event = |kind: &str| json!({ "event": kind, "message": "no room" });
        let of = |kinds: &[&str]| -> Vec<Value> { kinds.iter().map(|kind| event(kind)).collect() };
        let fails = of(&["CheckpointCommitted", "CheckpointDegraded", "Warning"]);
        let why = super::failing(&fails).expect("they fail");
        let failing = Some((why, Some("step-00000020".to_string())));
        let run = Seen { failing, ..Seen::default() };
        let told = page(&run, 0).join("\n");
        let expected = "  checkpoints   no room; the newest good checkpoint is step-00000020";
        assert!(told.contains(expected), "{told}");
        assert_eq!(run.json()["checkpoints"]["newest"], "step-00000020");
        for since in ["CheckpointRecovered", "CheckpointCommitted"] {
            assert_eq!(super::failing(&of(&["CheckpointDegraded", since])), None);
        }
        assert_eq!(super::failing(&[]), None);
    }

    #[test]
    fn half_a_line_is_read_when_it_is_whole() {
        let home = tempfile::tempdir().expect("a folder");
        let path = home.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"step\": 1}\n{\"step\": 2}\n{\"st").expect("a file");
        let (last, at) = last_lines(&path, 1);
        assert_eq!((last, at), (vec![json!({ "step": 2 })], 24));
        std::fs::write(&path, "{\"step\": 1}\n{\"step\": 2}\n{\"step\": 3}\n").expect("a file");
        assert_eq!(lines_from(&path, at), (vec![json!({ "step": 3 })], 36));
        assert_eq!(lines_from(&home.path().join("none"), 7), (Vec::new(), 7));
    }
}
