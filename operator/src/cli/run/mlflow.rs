//! A run as MLflow has it, by its REST calls: parameters once, metrics in batches, how it ended.
//!
//! ```text
//! loop --Said--> a bounded channel --> a thread: experiment, run, batches --http--> the server
//! ```
//! Training waits for none of it but at its end, and then not long. What fails is told once, and
//! tried again with the next batch. The run's id is kept in `mlflow.json`, so that a run that goes
//! on is one run there.

use crate::controller::now;
use super::post::{PostError, Server};
use super::tfevents::values;
use moe_worker::data::durable;
use moejob_protocol::report::StepReport;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// What waits for the thread; a step says one word.
const WAITING_MAX: usize = 4096;
/// Between two batches, so that a fast run makes few requests.
const BATCH_EVERY: Duration = Duration::from_secs(2);
/// Nothing is to be sent: until the next word.
const IDLE: Duration = Duration::from_secs(3600);
/// After a batch that failed.
const AGAIN_AFTER: Duration = Duration::from_secs(15);
/// Of a batch, by the REST API.
const BATCH_METRICS_MAX: usize = 1000;
const BATCH_PARAMS_MAX: usize = 100;
/// Characters of a parameter's value that servers of all ages take.
const PARAM_CHARS_MAX: usize = 250;
/// Metrics that are kept for a server that does not answer; the oldest go first.
const KEPT_MAX: usize = 100_000;
/// So long the end of a run waits for the last batch.
const END_MAX: Duration = Duration::from_secs(10);
/// The experiment, unless `MLFLOW_EXPERIMENT_NAME` names another.
const EXPERIMENT: &str = "moejob";
const UNFINISHED: &str =
    "MLflow: the server does not answer; its run may lack the last steps and the end";
/// What is known of the run at the server, beside metrics.jsonl.
const FILE: &str = "mlflow.json";

/// Where to, and as whom.
#[derive(Clone, Debug)]
pub struct Tracking {
    server: Server,
    experiment: String,
}

/// What the server is told of the job.
#[derive(Clone, Debug)]
pub struct About {
    pub job: String,
    /// The fields that a person compares runs by.
    pub spec: Value,
    pub folder: PathBuf,
}

enum Said {
    Metrics(Vec<Metric>),
    End(&'static str),
}

struct Metric {
    key: &'static str,
    value: f64,
    step: u64,
    /// Milliseconds since 1970.
    at: u64,
}

/// The loop's end of it.
#[derive(Debug)]
pub struct MlFlow {
    to: SyncSender<Said>,
    notes: Receiver<String>,
    missed: u64,
}

impl Tracking {
    /// What `--mlflow` names, or `MLFLOW_TRACKING_URI`, with the variables that MLflow's own
    /// clients read.
    ///
    /// # Errors
    /// Says why nothing can be logged there.
    pub fn read(uri: &str, variable: impl Fn(&str) -> Option<String>) -> Result<Tracking, String> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let token = set("MLFLOW_TRACKING_TOKEN");
        let user = set("MLFLOW_TRACKING_USERNAME");
        let password = set("MLFLOW_TRACKING_PASSWORD").unwrap_or_default();
        let user = user.as_deref().map(|user| (user, password.as_str()));
        let server = Server::read(uri)?.with(token.as_deref(), user);
        let experiment = set("MLFLOW_EXPERIMENT_NAME").unwrap_or_else(|| EXPERIMENT.to_string());
        Ok(Tracking { server, experiment })
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// There can be no further thread.
    pub fn start(self, about: About) -> std::io::Result<MlFlow> {
        let (to, said) = sync_channel(WAITING_MAX);
        let (tell, notes) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name("mlflow".to_string());
        thread.spawn(move || {
            let note = |text: String| {
                // Who has ended listens to nothing.
                let _ = tell.send(text);
            };
            Session::new(self, about).serve(&said, &note);
        })?;
        Ok(MlFlow { to, notes, missed: 0 })
    }
}

impl MlFlow {
    /// A step is done. What the thread has no room for is left out.
    pub fn step(&mut self, report: &StepReport) {
        let at = now();
        let metric = |(key, value)| Metric { key, value, step: report.step, at };
        let metrics = values(report).into_iter().map(metric).collect();
        if self.to.try_send(Said::Metrics(metrics)).is_err() {
            self.missed += 1;
        }
    }

    /// What a person is to be told since the last time.
    pub fn notes(&self) -> Vec<String> {
        self.notes.try_iter().collect()
    }

    /// Sends what is left, and how the run ended. Waits for `END_MAX` at most.
    pub fn end(self, status: &'static str) -> Vec<String> {
        let mut notes = self.notes();
        let begun = Instant::now();
        if self.to.try_send(Said::End(status)).is_ok() {
            // The thread's end closes the channel.
            loop {
                match self.notes.recv_timeout(END_MAX.saturating_sub(begun.elapsed())) {
                    Ok(note) => notes.push(note),
                    Err(RecvTimeoutError::Disconnected) => break,
                    Err(RecvTimeoutError::Timeout) => {
                        notes.push(UNFINISHED.to_string());
                        break;
                    }
                }
            }
        }
        if self.missed > 0 {
            notes.push(format!("MLflow: {} steps were not logged", self.missed));
        }
        notes
    }
}

/// The thread's end of it.
struct Session {
    tracking: Tracking,
    about: About,
    /// Of the run at the server, once it is there.
    run: Option<String>,
    kept: Vec<Metric>,
    dropped: usize,
    told: bool,
}

impl Session {
    fn new(tracking: Tracking, about: About) -> Session {
        Session { tracking, about, run: None, kept: Vec::new(), dropped: 0, told: false }
    }

    fn serve(mut self, said: &Receiver<Said>, note: &dyn Fn(String)) {
        let mut next = Instant::now();
        loop {
            // A run begins there with its first step.
            let wait = match self.kept.is_empty() {
                true => IDLE,
                false => next.saturating_duration_since(Instant::now()),
            };
            let end = match said.recv_timeout(wait) {
                Ok(Said::Metrics(metrics)) => {
                    self.keep(metrics);
                    None
                }
                Ok(Said::End(status)) => Some(status),
                Err(RecvTimeoutError::Timeout) => None,
                // The run ended without a word.
                Err(RecvTimeoutError::Disconnected) => return,
            };
            if let Some(status) = end {
                if self.run.is_some() || !self.kept.is_empty() {
                    self.try_once(Some(status), note);
                }
                let missing = self.dropped + self.kept.len();
                if missing > 0 {
                    note(format!("MLflow: {missing} values were not logged"));
                }
                return;
            }
            if !self.kept.is_empty() && Instant::now() >= next {
                let done = self.try_once(None, note);
                next = Instant::now() + if done { BATCH_EVERY } else { AGAIN_AFTER };
            }
        }
    }

    fn keep(&mut self, metrics: Vec<Metric>) {
        self.kept.extend(metrics);
        let more = self.kept.len().saturating_sub(KEPT_MAX);
        self.kept.drain(..more);
        self.dropped += more;
    }

    /// Whether all went through.
    fn try_once(&mut self, end: Option<&'static str>, note: &dyn Fn(String)) -> bool {
        let done = self.log(end, note);
        if let Err(error) = &done
            && !self.told
        {
            self.told = true;
            let server = &self.tracking.server;
            note(format!("MLflow at {server}: {error}; training goes on, and it is tried again"));
        }
        done.is_ok()
    }

    fn call(&self, what: &str, body: Option<&Value>) -> Result<Value, PostError> {
        self.tracking.server.call(&format!("/api/2.0/mlflow/{what}"), body)
    }

    fn log(&mut self, end: Option<&'static str>, note: &dyn Fn(String)) -> Result<(), PostError> {
        let run = match &self.run {
            Some(run) => run.clone(),
            None => {
                let run = self.begin(note)?;
                self.run.insert(run).clone()
            }
        };
        while !self.kept.is_empty() {
            let count = self.kept.len().min(BATCH_METRICS_MAX);
            let metrics: Vec<Value> = self.kept[..count].iter().map(as_json).collect();
            let body = json!({ "run_id": run, "metrics": metrics });
            let sent = self.call("runs/log-batch", Some(&body));
            // What is refused once is refused again, and would hold up all that follows.
            let refused = sent.as_ref().is_err_and(PostError::is_final);
            if sent.is_ok() || refused {
                self.kept.drain(..count);
                self.dropped += if refused { count } else { 0 };
            }
            sent?;
        }
        if let Some(status) = end {
            let body = json!({ "run_id": run, "status": status, "end_time": now() });
            self.call("runs/update", Some(&body))?;
        }
        Ok(())
    }

    /// The run at the server: that of `mlflow.json`, or a new one with its parameters.
    fn begin(&self, note: &dyn Fn(String)) -> Result<String, PostError> {
        let path = self.about.folder.join(FILE);
        if let Some(run) = known(&path, &self.tracking) {
            let body = json!({ "run_id": run, "status": "RUNNING" });
            match self.call("runs/update", Some(&body)) {
                Ok(_) => return Ok(run),
                // It was deleted there, or the server is a new one.
                Err(error) if error.is_absent() => {}
                Err(error) => return Err(error),
            }
        }
        let experiment = self.experiment()?;
        let tag = |key: &str, value: &str| json!({ "key": key, "value": value });
        let job = &self.about.job;
        let body = json!({
            "experiment_id": experiment,
            "run_name": job,
            "start_time": now(),
            "tags": [tag("mlflow.runName", job), tag("mlflow.source.name", "moejob")],
        });
        let run = self.call("runs/create", Some(&body))?;
        let run = text(&run["run"]["info"]["run_id"])?;
        for params in params(&self.about.spec).chunks(BATCH_PARAMS_MAX) {
            self.call("runs/log-batch", Some(&json!({ "run_id": run, "params": params })))?;
        }
        let file = json!({
            "uri": self.tracking.server.to_string(),
            "experiment": self.tracking.experiment,
            "runId": run,
        });
        let written = durable::replace(&self.about.folder, FILE, |to| {
            std::fs::write(to, file.to_string())
        });
        if let Err(error) = written {
            note(format!("MLflow: {} cannot be written: {error}", path.display()));
        }
        Ok(run)
    }

    fn experiment(&self) -> Result<String, PostError> {
        let name = &self.tracking.experiment;
        let asked = format!("experiments/get-by-name?experiment_name={}", escaped(name));
        match self.call(&asked, None) {
            Ok(found) => text(&found["experiment"]["experiment_id"]),
            Err(error) if error.is_absent() => {
                let made = self.call("experiments/create", Some(&json!({ "name": name })))?;
                text(&made["experiment_id"])
            }
            Err(error) => Err(error),
        }
    }
}

/// The run that an earlier start of this job made there.
fn known(path: &Path, tracking: &Tracking) -> Option<String> {
    let file: Value = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    let same = file["uri"] == tracking.server.to_string()
        && file["experiment"] == tracking.experiment.as_str();
    file["runId"].as_str().filter(|_| same).map(str::to_string)
}

fn text(value: &Value) -> Result<String, PostError> {
    let found = value.as_str().filter(|text| !text.is_empty());
    found.map(str::to_string).ok_or_else(|| PostError::Answer("an id is missing".to_string()))
}

fn as_json(metric: &Metric) -> Value {
    let value = match metric.value {
        value if value.is_finite() => json!(value),
        // As Protocol Buffers write them in JSON.
        value if value.is_nan() => json!("NaN"),
        value if value > 0.0 => json!("Infinity"),
        _ => json!("-Infinity"),
    };
    json!({ "key": metric.key, "value": value, "timestamp": metric.at, "step": metric.step })
}

/// Every leaf of the spec by its path, as `training.steps`.
fn params(spec: &Value) -> Vec<Value> {
    fn walk(path: &str, value: &Value, to: &mut Vec<Value>) {
        match value {
            Value::Object(fields) => fields.iter().for_each(|(name, value)| {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                walk(&path, value, to);
            }),
            Value::Null => {}
            leaf => {
                let text = leaf.as_str().map_or_else(|| leaf.to_string(), str::to_string);
                let text: String = text.chars().take(PARAM_CHARS_MAX).collect();
                to.push(json!({ "key": path, "value": text }));
            }
        }
    }
    let mut all = Vec::new();
    walk("", spec, &mut all);
    all
}

/// For a query: RFC 3986, section 2.1.
fn escaped(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
            char::from(byte).to_string()
        }
        other => format!("%{other:02X}"),
    };
    text.bytes().map(byte).collect()
}


#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_leaves_by_their_path() {
        let long = "x".repeat(1000);
        let spec = json!({ "a": { "b": 1, "c": [2, 3], "none": null }, "d": "text", "e": long });
        let found = params(&spec);
        let expected = [("a.b", "1"), ("a.c", "[2,3]"), ("d", "text"), ("e", &long[..250])];
        let expected = expected.map(|(key, value)| json!({ "key": key, "value": value }));
        assert_eq!(found, expected);
    }

    #[test]
    fn numbers_that_json_lacks_are_words() {
        let of = |value| as_json(&Metric { key: "loss", value, step: 1, at: 2 })["value"].clone();
        assert_eq!(of(1.5), json!(1.5));
        let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY].map(of);
        assert_eq!(odd, ["NaN", "Infinity", "-Infinity"].map(|word| json!(word)));
        assert_eq!(escaped("a b/ü&="), "a%20b%2F%C3%BC%26%3D");
    }
}
