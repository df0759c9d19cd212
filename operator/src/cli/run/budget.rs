//! `--budget 5m`: a few steps are measured, and `training.steps` is what fits into the time.

use super::RunArgs;
use crate::cli::out::io;
use moejob_manifest::Job;
use moejob_manifest::job::millis_of;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

/// Steps that are measured; the first ones compile, and touch memory.
const STEPS: u64 = 10;
const FIRST: u64 = 4;
/// The step behind which the measured run looks at its held-out data.
const VALIDATED: u64 = 6;

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
    let lines = measured(args, file, job)?;
    let number = |line: &Value, field: &str| line[field].as_f64().filter(|number| *number > 0.0);
    let is_plain = |line: &&Value| {
        line["step"].as_u64().is_some_and(|step| step >= FIRST && step != VALIDATED + 1)
    };
    let tokens = job.training.tokens_per_step() as f64;
    let rates = lines.iter().filter(is_plain);
    let mut each: Vec<f64> = rates
        .filter_map(|line| Some(tokens / number(line, "wallTokensPerSecond")?))
        .collect();
    each.sort_by(f64::total_cmp);
    let step = *each.get(each.len() / 2).ok_or("--budget: no step could be measured")?;
    let stalls = lines.iter().filter_map(|line| line["stalls"]["validation"].as_f64());
    let validation = match job.data.validation.every_steps {
        0 => 0.0,
        every => stalls.fold(0.0, f64::max) / every as f64,
    };
    let steps = ((budget as f64 / 1000.0) / (step + validation)).floor().max(1.0) as u64;
    let of_validation = match validation > 0.0 {
        true => format!(" and {:.3} s of validation", validation),
        false => String::new(),
    };
    Ok((steps, format!("a step takes {step:.3} s here{of_validation}: training.steps is {steps}")))
}

/// The lines of a few steps of the same job, in a folder of its own that goes again.
fn measured(args: &RunArgs, file: &Path, job: &Job) -> Result<Vec<Value>, String> {
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
) -> Result<Vec<Value>, String> {
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.arg("run").arg(file).arg("--dir").arg(folder).args(["--name", &job.name]);
    let every = if job.data.validation.every_steps > 0 { VALIDATED } else { 0 };
    let sets = [
        format!("training.steps={STEPS}"),
        "training.schedule={constant: {}}".to_string(),
        format!("data.validation.everySteps={every}"),
    ];
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
    let output = command.output().map_err(failed)?;
    if !output.status.success() {
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("--budget: the steps that are measured fail:\n{}", told.trim_end()));
    }
    let lines = std::fs::read_to_string(folder.join(&job.name).join("metrics.jsonl"));
    let lines = lines.map_err(failed)?;
    Ok(lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}
