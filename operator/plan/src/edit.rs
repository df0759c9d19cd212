//! Manifests that are made or changed from the command line: `moejob init`, `run --set`.

use crate::Job;
use serde_json::{Map, Value};

/// A manifest with other values: `sets` are `FIELD=VALUE`, the field's path with or without `spec.`
/// and the value as it would stand in the file; `name` is the job's.
///
/// # Errors
/// What cannot be read, or where no value can stand.
pub fn with(manifest: &[u8], sets: &[String], name: Option<&str>) -> Result<Vec<u8>, String> {
    let text = std::str::from_utf8(manifest).map_err(|_| "the manifest is no text".to_string())?;
    let mut value: Value =
        serde_saphyr::from_str(text).map_err(|error| format!("the manifest: {error}"))?;
    for set in sets {
        let (path, typed) = set
            .split_once('=')
            .ok_or_else(|| format!("--set {set}: write it as FIELD=VALUE, training.steps=800"))?;
        let new: Value = match typed.trim() {
            "" => return Err(format!("--set {set}: there is no value behind the `=`")),
            typed => serde_saphyr::from_str(typed)
                .map_err(|error| format!("--set {set}: the value: {error}"))?,
        };
        let path = path.trim();
        let names: Vec<&str> = path.strip_prefix("spec.").unwrap_or(path).split('.').collect();
        let mut at = field(&mut value, "spec").ok_or("the manifest has no spec")?;
        let mut done = "spec".to_string();
        for (depth, name) in names.iter().enumerate() {
            if name.is_empty() {
                return Err(format!("--set {set}: `{path}` is no path of a field"));
            }
            let Some(inner) = field(at, name) else {
                return Err(format!("--set {set}: {done} is no group of fields"));
            };
            if depth + 1 == names.len() {
                *inner = new;
                break;
            }
            at = inner;
            done = format!("{done}.{name}");
        }
    }
    if let Some(name) = name {
        let metadata = field(&mut value, "metadata").ok_or("the manifest has no metadata")?;
        *field(metadata, "name").ok_or("the manifest's metadata is no group of fields")? =
            Value::String(name.to_string());
    }
    serde_saphyr::to_string(&value).map(String::into_bytes).map_err(|error| error.to_string())
}

/// The place of a field, made where it is missing; none in what has no fields.
fn field<'a>(value: &'a mut Value, name: &str) -> Option<&'a mut Value> {
    if value.is_null() {
        *value = Value::Object(Map::new());
    }
    Some(value.as_object_mut()?.entry(name).or_insert(Value::Null))
}

/// A manifest to begin with: of a preset, or small enough for this machine.
///
/// # Errors
/// The preset or the name is none.
pub fn first(name: &str, preset: Option<&str>) -> Result<String, String> {
    let model = match preset {
        None => OWN_MODEL.to_string(),
        Some(preset) => format!("  model: {{ preset: {preset} }}\n"),
    };
    let text = FIRST.replace("NAME", name).replace("  MODEL\n", &model);
    match Job::read(text.as_bytes()) {
        Ok(_) => Ok(text),
        Err(problems) => {
            let sentences = problems.iter().map(crate::problem::Problem::sentence);
            Err(sentences.collect::<Vec<_>>().join("\n"))
        }
    }
}

const OWN_MODEL: &str = "  model:
    hiddenSize: 128
    numHiddenLayers: 4
    numAttentionHeads: 4
    tieWordEmbeddings: true
    initializerRange: 0.08
    experts: { count: 8, perToken: 2, intermediateSize: 128 }
    router: { auxLossCoef: 0.01, initializerRange: 0.02 }
";

const FIRST: &str = "# moejob run NAME.yaml        trains it
# moejob validate NAME.yaml   names every problem
# moejob plan NAME.yaml       says what would run
# moejob explain FIELD        says what a field means, such as training.steps
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata:
  name: NAME
spec:
  nodes: { profile: cpu, min: 1, max: 1 }
  MODEL
  data:
    train:
      text:
        paths: [\"data/**/*.txt\"]     # your text, from the folder where you start it
    validation: { fraction: 0.05, everySteps: 50 }
    sequenceLength: 256
  training:
    steps: 600
    globalBatchSize: 8
    microBatchSize: 2
    optimizer: { adamw: { learningRate: 3.0e-3 } }
    schedule: { cosine: { warmupSteps: 40, minLearningRate: 3.0e-4 } }
  checkpoint: { everySteps: 100, keep: 3 }
";

#[cfg(test)]
mod tests {
    use super::*;

    fn set(sets: &[&str], name: Option<&str>) -> Result<Job, String> {
        let manifest = first("one", None).expect("a manifest");
        let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
        let changed = with(manifest.as_bytes(), &sets, name)?;
        Job::read(&changed).map_err(|problems| problems[0].sentence())
    }

    #[test]
    fn values_are_set_where_they_are_and_where_they_are_not() {
        let sets = ["training.steps=800", "spec.nodes.max=3", "recovery.maxRestarts=4",
            "model.experts={count: 4, perToken: 1, intermediateSize: 64}"];
        let job = set(&sets, Some("other")).expect("a job");
        assert_eq!((job.name.as_str(), job.training.steps, job.nodes.max), ("other", 800, 3));
        assert_eq!((job.model.experts.count, job.recovery.max_restarts), (4, 4));
        let same = set(&[], None).expect("a job");
        assert_eq!((same.name.as_str(), same.training.steps), ("one", 600));
    }

    #[test]
    fn what_cannot_be_set_is_told() {
        for (typed, expected) in [
            ("training.steps", "FIELD=VALUE"),
            ("training.steps=", "no value"),
            ("training..steps=1", "no path"),
            ("training.steps.more=1", "spec.training.steps is no group of fields"),
            ("training.stepz=1", "training.stepz"),
            ("training.steps=many", "training.steps"),
        ] {
            let told = set(&[typed], None).expect_err(typed);
            assert!(told.contains(expected), "{typed}: {told}");
        }
    }

    #[test]
    fn a_first_manifest_is_valid() {
        for preset in [None, Some("tiny"), Some("tiny-qwen3")] {
            first("my-job", preset).expect("is valid");
        }
        assert!(first("my-job", Some("tinny")).expect_err("is none").contains("tiny"));
        assert!(first("My Job", None).is_err());
    }
}
