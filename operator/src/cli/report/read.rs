//! A run's folder -> what of it is drawn.

use super::time::{Beat, Times};
use crate::cli::args::or_its_runs;
use crate::cli::moe::table::millis;
use crate::cli::out::io;
use moe_worker::data::Listing;
use moejob_protocol::Mesh;
use moejob_protocol::report::{DeviceReport, Phases, Stalls};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// A longer line is none that a run writes.
const LINE_BYTES_MAX: usize = 8 << 20;
/// More is no file of a run.
const JOB_BYTES_MAX: u64 = 4 << 20;
/// Steps of which the load of every expert is kept; beyond it every second one goes.
const LOADS_MAX: usize = 1024;
/// Events that are kept: what happens more often is not read by anybody.
const EVENTS_MAX: usize = 4096;

/// What a run has recorded.
#[derive(Debug, Default)]
pub struct Run {
    pub name: String,
    /// One a step, ascending; of a step that was done again the last one.
    pub steps: Vec<Step>,
    /// (step, [layer][expert]), ascending.
    pub loads: Vec<(u64, Vec<Vec<f64>>)>,
    pub events: Vec<Event>,
    /// Ranks over time, where they changed: (seconds since 1970, ranks).
    pub world: Vec<(f64, f64)>,
    pub unreadable: u64,
    /// The part of its manifest that is kept. It is null where there is none.
    pub spec: Value,
    /// Its files and tokens.
    pub data: Option<Listing>,
    pub times: Times,
    /// Joules that its GPUs took, were all of them like rank 0's; none where no GPU tells.
    pub joules: Option<f64>,
    /// Steps of kept checkpoints, and what the model says at each where it was asked.
    pub samples: Vec<(u64, String)>,
}

impl Run {
    /// The newest of them.
    pub fn started(&self) -> Option<&Event> {
        self.events.iter().rev().find(|event| event.event == "RunStarted")
    }

    /// Nodes of its largest gang.
    pub fn nodes(&self) -> Option<u64> {
        self.events.iter().filter_map(|event| event.nodes).max()
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Step {
    pub step: u64,
    pub attempt: u32,
    pub loss: Option<f64>,
    pub validation_loss: Option<f64>,
    pub aux_loss: Option<f64>,
    pub z_loss: Option<f64>,
    pub grad_norm: Option<f64>,
    pub loss_scale: Option<f64>,
    pub learning_rate: Option<f64>,
    pub tokens: Option<f64>,
    pub tokens_per_second: Option<f64>,
    pub communication: Option<Communication>,
    pub world_size: Option<f64>,
    pub expert_imbalance: Option<f64>,
    pub router_entropy: Option<f64>,
    pub dropped_tokens: Option<f64>,
    pub unrouted_tokens: Option<f64>,
    pub expert_switches: Option<f64>,
    pub churn: Option<f64>,
    pub device: Option<DeviceReport>,
    pub(super) stalls: Stalls,
    pub(super) phases: Phases,
    pub(super) wall_tokens_per_second: f64,
    pub(super) tokens_per_expert: Vec<Vec<f64>>,
    pub(super) time: String,
    /// Seconds since 1970.
    #[serde(skip)]
    pub at: Option<f64>,
}

/// Of the steps that were looked at.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Communication {
    pub exposed_share: Option<f64>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Event {
    pub time: String,
    pub attempt: u32,
    pub event: String,
    pub reason: String,
    pub message: String,
    pub worker: Option<String>,
    pub node: Option<String>,
    pub step: Option<u64>,
    pub rank: Option<u64>,
    /// Ranks of an attempt.
    pub(super) mesh: Value,
    pub nodes: Option<u64>,
    /// Fields of a recovery.
    pub first_step_ms: Option<u64>,
    pub steps_lost: Option<u64>,
    /// Fields of a start: the words that were typed, the program, the machine, the price of a node
    /// and hour.
    pub command: Option<String>,
    pub version: Option<String>,
    pub machine: Option<String>,
    pub price: Option<f64>,
    #[serde(skip)]
    pub at: Option<f64>,
}

impl Event {
    /// Ranks of an attempt.
    pub fn ranks(&self) -> Option<u32> {
        Some(serde_json::from_value::<Mesh>(self.mesh.clone()).ok()?.world())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("{path} cannot be read: {why}; name a run, or its folder, such as runs/NAME")]
    Metrics { path: PathBuf, why: String },
    #[error("{path}: {what}")]
    Several { path: PathBuf, what: String },
    #[error("{path} is damaged: of {unreadable} lines none can be read")]
    Damaged { path: PathBuf, unreadable: u64 },
    #[error("{path} has no step yet: the run has not begun to train")]
    Empty { path: PathBuf },
}

/// # Errors
/// There is no `metrics.jsonl`, or nothing in it.
pub fn read(path: &Path) -> Result<Run, ReadError> {
    let metrics = path.join("metrics.jsonl");
    let failed = |error: std::io::Error| match or_its_runs(path) {
        Some(what) => ReadError::Several { path: path.to_path_buf(), what },
        None => ReadError::Metrics { path: metrics.clone(), why: io(&error) },
    };
    let name = path.canonicalize().ok().and_then(|path| {
        path.file_name().map(|name| name.to_string_lossy().into_owned())
    });
    let mut run =
        Run { name: name.unwrap_or_else(|| path.display().to_string()), ..Run::default() };
    let (mut steps, mut loads, mut every) = (BTreeMap::new(), BTreeMap::new(), 1);
    let mut unreadable = 0;
    let mut beats: Vec<(u64, Beat)> = Vec::new();
    let mut before = 0.0;
    lines(&metrics, |line| {
        let Ok(mut step) = serde_json::from_str::<Step>(line) else {
            unreadable += 1;
            return;
        };
        step.at = seconds(&step.time);
        let of_experts = std::mem::take(&mut step.tokens_per_expert);
        if !of_experts.is_empty() && step.step.is_multiple_of(every) {
            loads.insert(step.step, of_experts);
            if loads.len() > LOADS_MAX {
                every *= 2;
                loads.retain(|step, _| step.is_multiple_of(every));
            }
        }
        let tokens = step.tokens.unwrap_or(0.0);
        if let Some(at) = step.at {
            let beat = Beat { at, attempt: step.attempt, ..step.beat(tokens - before) };
            beats.push((step.step, beat));
            let watts = step.device.as_ref().and_then(|device| device.watts);
            if let (Some(watts), Some(world)) = (watts, step.world_size) {
                *run.joules.get_or_insert(0.0) += watts * world * beat.seconds;
            }
        }
        before = tokens;
        if let (Some(at), Some(world)) = (step.at, step.world_size)
            && run.world.last().is_none_or(|(_, last)| *last != world)
        {
            run.world.push((at, world));
        }
        steps.insert(step.step, step);
    })
    .map_err(failed)?;
    if steps.is_empty() && unreadable > 0 {
        return Err(ReadError::Damaged { path: metrics, unreadable });
    }
    if steps.is_empty() {
        return Err(ReadError::Empty { path: metrics });
    }
    run.steps = steps.into_values().collect();
    // Until the end it is what it was last.
    let end = run.steps.iter().filter_map(|step| step.at).fold(f64::MIN, f64::max);
    if let Some((_, last)) = run.world.last().copied() {
        run.world.push((end, last));
    }
    run.loads = loads.into_iter().collect();
    let read = lines(&path.join("events.jsonl"), |line| {
        match serde_json::from_str::<Event>(line) {
            Ok(event) if run.events.len() < EVENTS_MAX => {
                let at = seconds(&event.time);
                run.events.push(Event { at, ..event });
            }
            Ok(_) => {}
            Err(_) => unreadable += 1,
        }
    });
    // A folder of metrics alone is drawn as well.
    if read.is_err_and(|error| error.kind() != std::io::ErrorKind::NotFound) {
        unreadable += 1;
    }
    run.unreadable = unreadable;
    // A step was lost where one of as low a number came later.
    let mut least = u64::MAX;
    for (step, beat) in beats.iter_mut().rev() {
        beat.lost = *step >= least;
        least = least.min(*step);
    }
    let beats: Vec<Beat> = beats.into_iter().map(|(_, beat)| beat).collect();
    run.times = Times::of(&beats, &run.events);
    run.spec = spec(path);
    run.data = Listing::read(&path.join("checkpoints"));
    Ok(run)
}

impl Step {
    /// The time of the step, which had so many tokens.
    fn beat(&self, tokens: f64) -> Beat {
        let all: f64 = self.phases.parts().iter().map(|(_, seconds)| seconds).sum();
        let rate = match self.wall_tokens_per_second {
            rate if rate > 0.0 => rate,
            _ => self.tokens_per_second.unwrap_or(0.0),
        };
        let seconds = match (all > 0.0, rate > 0.0) {
            (true, _) => all,
            (false, true) => tokens.max(0.0) / rate,
            (false, false) => 0.0,
        };
        let waited = self.stalls.data + self.stalls.snapshot + self.stalls.checkpoint;
        Beat { seconds, waited, ..Beat::default() }
    }
}

/// `job.json` as far as it tells what was trained. A folder of metrics alone has none.
fn spec(path: &Path) -> Value {
    let mut text = Vec::new();
    let read = File::open(path.join("job.json"))
        .and_then(|file| file.take(JOB_BYTES_MAX).read_to_end(&mut text));
    let job = read.ok().and_then(|_| serde_json::from_slice::<Value>(&text).ok());
    job.map_or(Value::Null, |mut job| job["spec"].take())
}

fn lines(path: &Path, mut each: impl FnMut(&str)) -> std::io::Result<()> {
    let mut file = BufReader::new(File::open(path)?);
    let mut line = Vec::new();
    loop {
        line.clear();
        let mut limited = std::io::Read::take(&mut file, LINE_BYTES_MAX as u64);
        if limited.read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        // The last line may be half written.
        if line.last() == Some(&b'\n') || line.len() < LINE_BYTES_MAX {
            each(&String::from_utf8_lossy(&line));
        }
    }
}

/// Seconds from 1970 to a time as Kubernetes writes it.
fn seconds(time: &str) -> Option<f64> {
    Some(millis(time)? as f64 / 1000.0)
}
