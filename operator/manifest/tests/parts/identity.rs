use moejob_manifest::Job;
use moejob_manifest::identity::{self, stretched};
use serde_json::Value;

fn job(steps: u64, schedule: &str) -> Job {
    let text = format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{name: a}}\nspec:\n  \
         nodes: {{min: 1}}\n  model: {{preset: tiny}}\n  data: {{train: {{text: {{paths: \
         [a]}}}}, sequenceLength: 8}}\n  training: {{steps: {steps}, globalBatchSize: 4, \
         optimizer: {{adamw: {{learningRate: 1.0e-3}}}}, schedule: {schedule}}}\n"
    );
    Job::read(text.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"))
}

#[test]
fn a_learning_rate_that_jumps_is_told_before_it_happens() {
    let cosine = "{cosine: {warmupSteps: 10, minLearningRate: 1.0e-5}}";
    let was = identity::of(&job(100, cosine));
    let told = stretched(&was, &job(200, cosine).training, 100).expect("a jump");
    assert!(told.starts_with("training.steps: was 100, is 200."), "{told}");
    assert!(told.contains("from 1.00e-5 at step 100 to 5."), "{told}");
    // It has not begun, nothing is stretched, or the schedule knows no end.
    assert_eq!(stretched(&was, &job(200, cosine).training, 0), None);
    assert_eq!(stretched(&was, &job(100, cosine).training, 50), None);
    let constant = "{constant: {warmupSteps: 10}}";
    let was = identity::of(&job(100, constant));
    assert_eq!(stretched(&was, &job(200, constant).training, 100), None);
    assert_eq!(stretched(&Value::Null, &job(200, constant).training, 100), None);
}
