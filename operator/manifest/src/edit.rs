//! Manifests that are made or changed from the command line: `moejob init`, `run --set`.

use crate::Job;
use crate::problem::{Problem, printable};
use crate::yaml::first_words;
use serde_json::{Map, Value};

/// A manifest with other values: `sets` are `FIELD=VALUE`, the field's path with or without `spec.`
/// and the value as it would stand in the file; `name` is the job's.
///
/// # Errors
/// What cannot be read, or where no value can stand.
pub fn with(manifest: &[u8], sets: &[String], name: Option<&str>) -> Result<Vec<u8>, String> {
    let text = std::str::from_utf8(manifest).map_err(|_| "the manifest is no text".to_string())?;
    let mut value: Value = serde_saphyr::from_str(text)
        .map_err(|error| format!("the manifest: {}", words(&error.to_string())))?;
    let mut plain = Vec::new();
    for set in sets {
        let (path, typed) = set
            .split_once('=')
            .ok_or_else(|| format!("--set {set}: write it as FIELD=VALUE, training.steps=800"))?;
        let new: Value = match typed.trim() {
            "" => return Err(format!("--set {set}: there is no value behind the `=`")),
            typed => serde_saphyr::from_str(typed)
                .map_err(|error| format!("--set {set}: the value: {}", words(&error.to_string())))?,
        };
        let (new, path) = (as_typed(text, typed.trim(), new, &mut plain), path.trim());
        if let Some(whole) = beside_spec(path) {
            return Err(format!("--set {set}: {whole}"));
        }
        let names: Vec<&str> = path.strip_prefix("spec.").unwrap_or(path).split('.').collect();
        let mut at = field(&mut value, "spec").ok_or("the manifest has no spec")?;
        let mut done = "spec".to_string();
        for (depth, name) in names.iter().enumerate() {
            if name.is_empty() {
                return Err(format!("--set {set}: `{path}` is no path of a field"));
            }
            if at.is_array() || name.contains('[') {
                let list = if at.is_array() { done } else { format!("{done}.{name}") };
                let list = list.split('[').next().unwrap_or_default().replacen("spec.", "", 1);
                return Err(format!("--set {set}: set a list as a whole: '{list}=[a, b]'"));
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
    let mut text = serde_saphyr::to_string(&value).map_err(|error| error.to_string())?;
    for (stand_in, typed) in plain {
        text = text.replace(&stand_in, &typed);
    }
    Ok(text.into_bytes())
}

/// The value, or what stands for it until the manifest is written: a plain value is written as it
/// was typed, so that what is said of it later names `1e3` and not 1000.0.
fn as_typed(
    manifest: &str,
    typed: &str,
    value: Value,
    plain: &mut Vec<(String, String)>,
) -> Value {
    let is_plain = !value.is_object() && !value.is_array() && !typed.contains('\n');
    // What begins so means something else in the middle of a manifest.
    if !is_plain || typed.starts_with(['|', '>', '&', '*', '!']) {
        return value;
    }
    let mut stand_in = format!("typed-{}-here", plain.len());
    while manifest.contains(&stand_in) {
        stand_in.push('x');
    }
    plain.push((stand_in.clone(), typed.to_string()));
    Value::String(stand_in)
}

/// What is said of a field that does not lie in `spec`.
fn beside_spec(path: &str) -> Option<&'static str> {
    match path.split('.').next().unwrap_or_default() {
        "metadata" | "name" => {
            Some("only fields of spec are set so; --name gives the job another name")
        }
        "apiVersion" | "kind" => Some("only fields of spec are set so"),
        "spec" if !path.contains('.') => Some("name a field of spec, such as training.steps=800"),
        _ => None,
    }
}

/// The same without a place: it would be one in what was typed.
fn words(error: &str) -> String {
    let line = first_words(error);
    let placed = line.strip_prefix("line ").and_then(|rest| rest.split_once(": "));
    placed.map_or(line.as_str(), |(_, words)| words).to_string()
}

/// The place of a field, made where it is missing; none in what has no fields.
fn field<'a>(value: &'a mut Value, name: &str) -> Option<&'a mut Value> {
    if value.is_null() {
        *value = Value::Object(Map::new());
    }
    Some(value.as_object_mut()?.entry(name).or_insert(Value::Null))
}

/// A manifest to begin with: of a preset, or small enough for this machine. `file` is how its
/// own words call it, in commands.
///
/// # Errors
/// The preset or the name is none.
pub fn first(name: &str, preset: Option<&str>, file: &str) -> Result<First, String> {
    let model = match preset {
        None => OWN_MODEL.to_string(),
        Some(preset) => format!("  model: {{ preset: {preset} }}\n"),
    };
    let text = FIRST.replace("NAME", name).replace("FILE", &printable(file));
    let text = text.replace("  MODEL\n", &model);
    match Job::read(text.as_bytes()) {
        Ok(job) => {
            let sentences = job.unsupported().iter().map(Problem::sentence).collect();
            Ok(First { text, unsupported: sentences })
        }
        Err(problems) => {
            let sentences = problems.iter().map(Problem::sentence);
            let mut all = sentences.collect::<Vec<_>>().join("\n");
            if let Some(plain) = name.strip_suffix(".yaml") {
                all.push_str(&format!("\n  give the job's name: {plain}"));
            }
            Err(all)
        }
    }
}

/// A manifest to begin with.
#[derive(Clone, Debug)]
pub struct First {
    pub text: String,
    /// Why the workers cannot run it yet, a sentence each.
    pub unsupported: Vec<String>,
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

const FIRST: &str = "# moejob validate FILE   names every problem
# moejob plan FILE       says what would run
# moejob run FILE        trains it
# moejob explain training.steps   says what a field means
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
        let manifest = first("one", None, "one.yaml").expect("a manifest").text;
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
            ("training.steps=1e3", "found `1e3`"),
            ("training.seed=yes", "found `yes`"),
            ("model.experts=[", "the value: unclosed bracket '['"),
            ("data.train.text.paths[0]=a", "'data.train.text.paths=[a, b]'"),
            ("data.train.text.paths.0=a", "'data.train.text.paths=[a, b]'"),
            ("metadata.name=two", "--name"),
            ("name=two", "--name"),
            ("kind=Job", "only fields of spec"),
        ] {
            let told = set(&[typed], None).expect_err(typed);
            assert!(told.contains(expected), "{typed}: {told}");
        }
    }

    #[test]
    fn a_first_manifest_is_valid() {
        for preset in [None, Some("tiny"), Some("tiny-qwen3")] {
            let made = first("my-job", preset, "my-job.yaml").expect("is valid");
            assert!(made.unsupported.is_empty(), "{made:?}");
            assert!(made.text.contains("# moejob run my-job.yaml "), "{made:?}");
        }
        // Its dimensions are known, and its attention is not built.
        let made = first("later", Some("deepseek-v3"), "'my file.yaml'").expect("is valid");
        assert!(made.unsupported[0].contains("latent attention"), "{made:?}");
        assert!(made.text.contains("# moejob run 'my file.yaml' "), "{made:?}");
        let refused = |name, preset| first(name, preset, "x").expect_err("is none");
        assert!(refused("my-job", Some("tinny")).contains("tiny"));
        assert!(refused("My Job", None).contains("metadata.name"));
        assert!(refused("mine.yaml", None).ends_with("give the job's name: mine"));
    }
}
