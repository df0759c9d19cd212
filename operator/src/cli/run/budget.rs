//! `--budget 5m`: a few steps are measured, and `training.steps` is what fits into the time.

use crate::controller::now;
use super::RunArgs;
use crate::cli::moe::table::millis;
use crate::cli::out::io;
use moejob_manifest::Job;
use moejob_manifest::job::millis_of;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

/// Steps that are measured; the first ones compile, and touch memory.
const STEPS: u64 = 10;
const FIRST: u64 = 4;
/// Behind these steps the measured run looks at its held-out data, and takes a checkpoint. Either
/// counts on the line of the next step.
const VALIDATED: u64 = 6;
const STORED: u64 = 8;

/// A time as it is typed, in milliseconds.
pub fn read(text: &str) -> Result<u64, String> {
    let millis = millis_of(text).filter(|millis| *millis > 0);
    millis.ok_or_else(|| "a time such as 90s, 5m or 2h".to_string())
}

/// The steps of `job`, which `file` describes, that fit into `budget` milliseconds, and how that is
/// known. A run that has begun keeps its steps: its schedule ends with them.
///
/// # Errors
/// The steps that are measured fail: what they say.
pub fn steps(args: &RunArgs, file: &Path, job: &Job, budget: u64) -> Result<(u64, String), String> {
    let kept = std::fs::read(args.dir.join(&job.name).join("job.json")).ok();
    let kept: Option<Value> = kept.and_then(|text| serde_json::from_slice(&text).ok());
    if let Some(steps) = kept.and_then(|kept| kept["spec"]["training"]["steps"].as_u64()) {
        return Ok((steps, format!("the run goes on with the {steps} steps that were planned")));
    }
    let measured = measured(args, file, job)?;
    let every = [job.data.validation.every_steps, job.checkpoint.every_steps];
    let tokens = job.training.tokens_per_step() as f64;
    let cost = Cost::of(&measured, tokens).ok_or("--budget: no step could be measured")?;
    let steps = cost.steps(budget as f64 / 1000.0, every);
    Ok((steps, format!("{}: training.steps is {steps}", cost.words(every))))
}

/// A run of a few steps.
struct Measured {
    lines: Vec<Value>,
    /// Milliseconds since 1970: when it was started, and when it was over.
    began: u64,
    ended: u64,
}

/// The time that a run takes, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cost {
    step: f64,
    /// One look at the held-out data, and one checkpoint that steps wait for, take these.
    validation: f64,
    checkpoint: f64,
    /// Before the first step, and behind the last one: a checkpoint among them.
    around: f64,
}

impl Cost {
    /// The cost is None where no step of the run was usual.
    fn of(measured: &Measured, tokens: f64) -> Option<Cost> {
        let Measured { lines, began, ended } = measured;
        let step_of = |line: &Value| line["step"].as_u64().unwrap_or(0);
        let number = |line: &Value, field: &str| {
            line[field].as_f64().filter(|number| *number > 0.0)
        };
        let is_plain = |line: &&Value| {
            let step = step_of(line);
            step >= FIRST && ![VALIDATED + 1, STORED + 1].contains(&step)
        };
        let plain = lines.iter().filter(is_plain);
        let mut each: Vec<f64> =
            plain.filter_map(|line| Some(tokens / number(line, "wallTokensPerSecond")?)).collect();
        each.sort_by(f64::total_cmp);
        let step = *each.get(each.len() / 2)?;
        let most = |names: &[&str]| {
            let stalls = |line: &Value| -> f64 {
                names.iter().filter_map(|name| line["stalls"][*name].as_f64()).sum()
            };
            lines.iter().map(stalls).fold(0.0, f64::max)
        };
        let at = |line: &Value| millis(line["time"].as_str()?);
        let (first, last) = (lines.iter().find(|line| step_of(line) == FIRST)?, lines.last()?);
        // The first steps take longer than usual, and that is part of the start.
        let start = at(first)?.saturating_sub(*began) as f64 / 1000.0 - FIRST as f64 * step;
        let end = ended.saturating_sub(at(last)?) as f64 / 1000.0;
        Some(Cost {
            step,
            validation: most(&["validation"]),
            checkpoint: most(&["checkpoint", "snapshot"]),
            around: start.max(0.0) + end,
        })
    }

    /// The number that fits, where looks at held-out data and checkpoints come every so many steps.
    fn steps(&self, seconds: f64, [validation, checkpoint]: [u64; 2]) -> u64 {
        let part = |cost: f64, every: u64| if every == 0 { 0.0 } else { cost / every as f64 };
        let step =
            self.step + part(self.validation, validation) + part(self.checkpoint, checkpoint);
        ((seconds - self.around) / step).floor().max(1.0) as u64
    }

    fn words(&self, [validation, checkpoint]: [u64; 2]) -> String {
        let mut words = format!("a step takes {:.3} s here", self.step);
        if validation > 0 && self.validation > 0.0 {
            words += &format!(", a validation {:.3} s", self.validation);
        }
        if checkpoint > 0 && self.checkpoint > 0.0 {
            words += &format!(", a checkpoint {:.3} s", self.checkpoint);
        }
        words + &format!(", start and end {:.1} s", self.around)
    }
}

/// A few steps of the same job, in a folder of its own that goes again.
fn measured(args: &RunArgs, file: &Path, job: &Job) -> Result<Measured, String> {
    let failed =
        |error: std::io::Error| format!("--budget: no steps can be measured: {}", io(&error));
    let folder = std::env::temp_dir().join(format!("moejob-budget-{}", std::process::id()));
    let measured = measured_in(&folder, args, file, job, &failed);
    // What cannot be removed harms nobody.
    let _ = std::fs::remove_dir_all(&folder);
    measured
}

fn measured_in(
    folder: &Path,
    args: &RunArgs,
    file: &Path,
    job: &Job,
    failed: &impl Fn(std::io::Error) -> String,
) -> Result<Measured, String> {
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.arg("run").arg(file).arg("--dir").arg(folder).args(["--name", &job.name]);
    let every = if job.data.validation.every_steps > 0 { VALIDATED } else { 0 };
    let stored = if job.checkpoint.every_steps > 0 { STORED } else { 0 };
    let mut sets = vec![
        format!("training.steps={STEPS}"),
        "training.schedule={constant: {}}".to_string(),
        format!("data.validation.everySteps={every}"),
        format!("checkpoint.everySteps={stored}"),
    ];
    if job.checkpoint.location.is_some() {
        // The job's own place is none for a trial.
        sets.push(format!("checkpoint.location={}", folder.join("checkpoints").display()));
    }
    args.set.iter().chain(&sets).for_each(|set| {
        command.arg("--set").arg(set);
    });
    if let Some(workers) = args.workers {
        command.args(["--workers", &workers.to_string()]);
    }
    command.args(["--threads", &args.threads.to_string()]);
    if let Some(from) = &args.profiles.from {
        command.arg("--profiles").arg(from);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).env_remove("MLFLOW_TRACKING_URI");
    let began = now();
    let output = command.output().map_err(failed)?;
    let ended = now();
    if !output.status.success() {
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("--budget: the steps that are measured fail:\n{}", told.trim_end()));
    }
    let lines = std::fs::read_to_string(folder.join(&job.name).join("metrics.jsonl"));
    let lines = lines.map_err(failed)?;
    let lines = lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    Ok(Measured { lines, began, ended })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_budget_counts_start_checkpoints_and_the_end() {
        // Steps of 100 tokens in half a second; the first one compiles for four seconds more.
        let line = |step: u64| {
            let (at, stalls) = match step {
                7 => (500, json!({ "validation": 1.0 })),
                9 => (500, json!({ "checkpoint": 0.25, "snapshot": 0.25 })),
                _ => (0, json!({})),
            };
            let ms = 16_000 + step * 500 + at;
            json!({
                "step": step, "wallTokensPerSecond": if step == 1 { 20.0 } else { 200.0 },
                "stalls": stalls, "time": format!("1970-01-01T00:00:{:06.3}Z", ms as f64 / 1000.0),
            })
        };
        let lines: Vec<Value> = (1..=10).map(line).collect();
        let measured = Measured { lines, began: 10_000, ended: 23_000 };
        let cost = Cost::of(&measured, 100.0).expect("a cost");
        // Six seconds until the first step is begun as usual, and two behind the last one.
        let expected = Cost { step: 0.5, validation: 1.0, checkpoint: 0.5, around: 8.0 };
        assert_eq!(cost, expected);
        assert_eq!(cost.steps(108.0, [0, 0]), 200);
        // Every tenth step is followed by one, every fifth by the other: 0.7 s a step.
        assert_eq!(cost.steps(78.0, [10, 5]), 100);
        assert_eq!(cost.steps(3.0, [0, 0]), 1);
        assert_eq!(
            cost.words([10, 5]),
            "a step takes 0.500 s here, a validation 1.000 s, a checkpoint 0.500 s, start and end \
             8.0 s"
        );
        assert_eq!(cost.words([0, 0]), "a step takes 0.500 s here, start and end 8.0 s");
        assert_eq!(Cost::of(&Measured { lines: Vec::new(), began: 0, ended: 9 }, 1.0), None);
    }
}
