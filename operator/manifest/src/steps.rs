//! What happens at which step, held against how many steps there are.
//!
//! A number of steps is refused where what it asks for never happens. Where something else than it
//! seems to ask for happens, that is a warning.

use crate::job::Job;
use crate::problem::{Code, Problem};
use crate::spec::MoeJobSpec;
use moejob_protocol::config::{Recompute, Schedule, TrainingConfig};

/// The learning rate's way: its name, the steps of its warmup, and the minimum that it falls to.
fn way(training: &TrainingConfig) -> (&'static str, u64, Option<f64>) {
    match training.schedule {
        Schedule::Constant { warmup_steps } => ("constant", warmup_steps, None),
        Schedule::Linear { warmup_steps, min_learning_rate } => {
            ("linear", warmup_steps, Some(min_learning_rate))
        }
        Schedule::Cosine { warmup_steps, min_learning_rate } => {
            ("cosine", warmup_steps, Some(min_learning_rate))
        }
    }
}

/// What of the schedule is wrong, each with the other field that may be the reason.
pub fn problems(training: &TrainingConfig) -> Vec<(Problem, &'static str)> {
    let (name, warmup, minimum) = way(training);
    let at = format!("spec.training.schedule.{name}");
    let mut found = Vec::new();
    // The peak is the rate of the step behind the warmup.
    if warmup >= training.steps {
        let problem = Problem::new(Code::LearningRate, format!("{at}.warmupSteps"))
            .found(format!("`{warmup}`"))
            .allowed(format!("fewer than training.steps, which is {}", training.steps))
            .advice("the rate would never reach its peak");
        found.push((problem, "spec.training.steps"));
    }
    let peak = training.adamw.learning_rate;
    if let Some(minimum) = minimum.filter(|minimum| *minimum > peak) {
        let problem = Problem::new(Code::LearningRate, format!("{at}.minLearningRate"))
            .found(format!("`{minimum}`"))
            .allowed(format!("at most adamw.learningRate, which is {peak}"))
            .advice("the rate falls towards it");
        found.push((problem, "spec.training.optimizer.adamw.learningRate"));
    }
    found
}

/// What is not wrong, and does something else than it seems to.
pub fn warnings(spec: &MoeJobSpec, job: &Job) -> Vec<Problem> {
    let (training, data) = (&job.training, &job.data);
    let steps = training.steps;
    let mut found = Vec::new();
    let mut warn = |code, path: &str, given: String, allowed: String, advice: &str| {
        found.push(Problem::of(code, path, given, allowed, advice));
    };
    let (name, warmup, minimum) = way(training);
    let falls = minimum.is_some_and(|minimum| minimum < training.adamw.learning_rate);
    if falls && warmup > 0 && warmup + 1 == steps {
        let path = format!("spec.training.schedule.{name}.warmupSteps");
        let allowed = format!("at most training.steps less two, which is {}", steps - 2);
        let advice = "the last step has the peak: the rate never falls";
        warn(Code::LearningRate, &path, format!("`{warmup}`"), allowed, advice);
    }
    let layers = job.model.num_hidden_layers;
    if let Recompute::Every(together) = training.recompute
        && together > layers
    {
        let allowed = format!("at most numHiddenLayers, which is {layers}");
        let advice = "all layers are computed again together";
        let path = "spec.training.recomputeLayers";
        warn(Code::Batch, path, format!("`{together}`"), allowed, advice);
    }
    let validation = &data.validation;
    let measures = validation.every_steps > 0
        && (validation.fraction > 0.0 || data.held_out.is_some());
    let path = "spec.checkpoint.keepBest";
    if job.checkpoint.keep_best && !measures {
        let (given, allowed) = ("`true` without a held-out loss", "true where one is measured");
        let advice = "set data.validation.everySteps, and a fraction above 0 or from; without a \
                      loss no checkpoint is the best";
        warn(Code::Batch, path, given.to_string(), allowed.to_string(), advice);
    } else if job.checkpoint.keep_best
        && !job.checkpoint.every_steps.is_multiple_of(validation.every_steps)
    {
        let every = job.checkpoint.every_steps;
        let measured = validation.every_steps;
        let allowed = format!("a multiple of data.validation.everySteps, which is {measured}");
        let advice = "with keepBest, checkpoints without a held-out loss are never the best";
        warn(Code::Batch, "spec.checkpoint.everySteps", format!("`{every}`"), allowed, advice);
    }
    let typed = spec.recovery.as_ref().and_then(|recovery| recovery.memory_every_steps);
    if let Some(every) = typed.filter(|every| *every > steps && steps > 0) {
        let allowed = format!("at most training.steps, which is {steps}");
        let advice = "no copy of the state is kept in memory: a loss goes back to a checkpoint";
        let path = "spec.recovery.memoryEverySteps";
        warn(Code::Batch, path, format!("`{every}`"), allowed, advice);
    }
    found
}
