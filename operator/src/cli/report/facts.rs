//! Facts of runs and of how they went, as rows of a table with a column a run.

use super::read::{Run, Step};
use super::short;
use super::time::Kind;
use super::words::span;
use moejob_manifest::words::{count, several};
use moejob_protocol::model::ModelConfig;
use serde_json::Value;
use std::collections::BTreeMap;

/// A row. Where each run has a number, two can be compared.
pub struct Row {
    pub name: &'static str,
    pub cells: Vec<Cell>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cell {
    pub text: String,
    pub number: Option<f64>,
}

impl Cell {
    fn of(number: Option<f64>, write: impl FnOnce(f64) -> String) -> Cell {
        Cell { text: number.map_or("-".to_string(), write), number }
    }

    fn text(text: Option<String>) -> Cell {
        Cell { text: text.unwrap_or_else(|| "-".to_string()), number: None }
    }
}

/// Rows of which no run has anything are left out.
fn rows(runs: &[Run], all: &[(&'static str, &dyn Fn(&Run) -> Cell)]) -> Vec<Row> {
    let row = |(name, of): &(&'static str, &dyn Fn(&Run) -> Cell)| Row {
        name,
        cells: runs.iter().map(of).collect(),
    };
    let has = |row: &Row| row.cells.iter().any(|cell| cell.text != "-");
    all.iter().map(row).filter(has).collect()
}

/// The rows that tell how runs went. `price`, of a node and hour, counts before the profile's.
pub fn results(runs: &[Run], price: Option<f64>) -> Vec<Row> {
    let last = |run: &Run, of: fn(&Step) -> Option<f64>| run.steps.last().and_then(of);
    let events = |run: &Run, kind: &str| -> Cell {
        let count = run.events.iter().filter(|event| event.event == kind).count();
        Cell { text: count.to_string(), number: Some(count as f64) }
    };
    let whole = |number: f64| format!("{number:.0}");
    rows(runs, &[
        ("steps", &|run| Cell::of(last(run, |step| Some(step.step as f64)), whole)),
        ("loss", &|run| Cell::of(last(run, |step| step.loss), short)),
        ("least held-out loss", &|run| {
            let best = best(run);
            let at = best.map_or(0, |(_, step)| step);
            Cell::of(best.map(|(loss, _)| loss), |loss| format!("{} at step {at}", short(loss)))
        }),
        ("bits per byte", &|run| {
            let held_out = best(run).map(|(loss, _)| loss);
            let words = if held_out.is_some() { "held out" } else { "trained on" };
            let loss = held_out.or(last(run, |step| step.loss));
            let bits = bytes_per_token(run).zip(loss).map(|(bytes, loss)| {
                loss / std::f64::consts::LN_2 / bytes
            });
            Cell::of(bits, |bits| format!("{} ({words})", short(bits)))
        }),
        ("tokens", &|run| Cell::of(last(run, |step| step.tokens), short)),
        ("tokens/s, median", &|run| {
            Cell::of(median(run.steps.iter().filter_map(|step| step.tokens_per_second)), short)
        }),
        ("took", &|run| Cell::of(Some(run.times.all()).filter(|all| *all > 0.0), span)),
        ("of it trained", &|run| {
            let all = run.times.all();
            let share = (all > 0.0).then(|| 100.0 * run.times.sum(Kind::Trained) / all);
            Cell::of(share, |share| format!("{share:.1}%"))
        }),
        ("attempts", &|run| {
            let most = run.steps.iter().map(|step| step.attempt).max().unwrap_or(0);
            Cell { text: most.to_string(), number: Some(most.into()) }
        }),
        ("workers lost", &|run| events(run, "WorkerLost")),
        ("engines lost", &|run| events(run, "EngineLost")),
        ("energy of its GPUs", &|run| {
            Cell::of(run.joules, |joules| format!("{} kWh", short(joules / 3.6e6)))
        }),
        ("cost", &|run| {
            let price = price.or(run.started().and_then(|start| start.price));
            let hours = run.times.all() / 3600.0;
            let cost = price.zip(run.nodes()).map(|(price, nodes)| price * nodes as f64 * hours);
            let price = price.unwrap_or(0.0);
            Cell::of(cost, |cost| format!("{cost:.2} (at {price} a node and hour)"))
        }),
    ])
}

/// The rows that tell what runs trained.
pub fn trained(runs: &[Run]) -> Vec<Row> {
    let field = |run: &Run, path: &str| run.spec.pointer(path).and_then(words);
    rows(runs, &[
        ("model", &|run| {
            let model = &run.spec["model"];
            let of = |field: &str| model[field].as_u64();
            let (layers, width) = (of("numHiddenLayers"), of("hiddenSize"));
            let experts = &model["experts"];
            Cell::text(layers.zip(width).map(|(layers, width)| {
                let each = experts["perToken"].as_u64().unwrap_or(0);
                let experts = experts["count"].as_u64().unwrap_or(0);
                let layers = several(layers, "layer");
                format!("{layers} of width {width}, {experts} experts each, {each} a token")
            }))
        }),
        ("parameters", &|run| {
            let model = serde_json::from_value::<ModelConfig>(run.spec["model"].clone()).ok();
            Cell::text(model.map(|model| {
                format!("{}, {} for a token", count(model.numel()), count(model.active_numel()))
            }))
        }),
        ("data", &|run| Cell::text(data(run))),
        ("tokenizer", &|run| Cell::text(field(run, "/data/tokenizer"))),
        ("a step", &|run| {
            let of = |field: &str| run.spec["training"][field].as_u64();
            let (batch, length) = (of("globalBatchSize"), of("sequenceLength"));
            Cell::text(batch.zip(length).map(|(batch, length)| {
                format!("{batch} sequences of {length} tokens")
            }))
        }),
        ("optimizer", &|run| {
            let fields = field(run, "/training/adamw");
            Cell::text(fields.map(|fields| format!("AdamW, {fields}")))
        }),
        ("schedule", &|run| Cell::text(field(run, "/training/schedule"))),
        ("precision", &|run| Cell::text(field(run, "/training/precision"))),
        ("seed", &|run| Cell::text(field(run, "/training/seed"))),
        ("program", &|run| Cell::text(run.started().and_then(|start| start.version.clone()))),
        ("machine", &|run| {
            let machine = run.started().and_then(|start| start.machine.clone());
            let gpu = run.steps.iter().rev().find_map(|step| Some(&step.device.as_ref()?.name));
            let all: Vec<String> = gpu.cloned().into_iter().chain(machine).collect();
            Cell::text((!all.is_empty()).then(|| all.join("; ")))
        }),
        ("command", &|run| Cell::text(run.started().and_then(|start| start.command.clone()))),
    ])
}

/// `a.txt, b.txt: 1.06 M tokens, 55.8 k held out; 59c0f4d2c7a0d312`
fn data(run: &Run) -> Option<String> {
    const NAMED: usize = 4;
    let paths = run.spec.pointer("/data/train")?.as_array()?;
    let paths = paths.iter().filter_map(|part| part["source"]["paths"].as_array()).flatten();
    let paths: Vec<&str> = paths.filter_map(Value::as_str).collect();
    let mut text = paths.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
    if let Some(more) = paths.len().checked_sub(NAMED).filter(|more| *more > 0) {
        text += &format!(" and {more} more");
    }
    if let Some(data) = &run.data {
        let mark: String = data.fingerprint.chars().take(16).collect();
        text += &format!(
            ": {} tokens, {} held out; fingerprint {mark}",
            count(data.training_tokens),
            count(data.held_out_tokens)
        );
    }
    Some(text)
}

/// Fields and their values as a person reads them.
fn words(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        Value::Object(fields) => {
            let all = fields.iter().filter_map(|(name, value)| {
                let value = words(value)?;
                let name = spaced(name);
                Some(if value.is_empty() { name } else { format!("{name} {value}") })
            });
            Some(all.collect::<Vec<_>>().join(", "))
        }
        other => Some(other.to_string()),
    }
}

/// `learning rate`, of `learningRate` or `learning_rate`.
fn spaced(name: &str) -> String {
    let mut words = String::new();
    for c in name.chars() {
        match c {
            '_' => words.push(' '),
            c if c.is_uppercase() => words.extend([' ', c.to_ascii_lowercase()]),
            c => words.push(c),
        }
    }
    words
}

/// Fields of which not all runs have the same value.
pub fn differences(runs: &[Run]) -> Vec<(String, Vec<String>)> {
    let flat: Vec<BTreeMap<String, String>> = runs
        .iter()
        .map(|run| {
            let mut fields = BTreeMap::new();
            flatten("", &run.spec, &mut fields);
            fields
        })
        .collect();
    let names: std::collections::BTreeSet<&String> = flat.iter().flat_map(BTreeMap::keys).collect();
    let row = |name: &String| {
        let values: Vec<String> =
            flat.iter().map(|fields| fields.get(name).cloned().unwrap_or_default()).collect();
        let differs = values.windows(2).any(|pair| pair[0] != pair[1]);
        differs.then(|| (name.clone(), values))
    };
    names.into_iter().filter_map(row).collect()
}

fn flatten(path: &str, value: &Value, fields: &mut BTreeMap<String, String>) {
    match value {
        Value::Null => {}
        Value::Object(all) => {
            let dot = if path.is_empty() { "" } else { "." };
            all.iter().for_each(|(name, value)| {
                flatten(&format!("{path}{dot}{name}"), value, fields);
            });
        }
        Value::String(text) => {
            fields.insert(path.to_string(), text.clone());
        }
        other => {
            fields.insert(path.to_string(), other.to_string());
        }
    }
}

/// The least held-out loss, and its step.
fn best(run: &Run) -> Option<(f64, u64)> {
    let all = run.steps.iter().filter_map(|step| Some((step.validation_loss?, step.step)));
    all.filter(|(loss, _)| loss.is_finite()).min_by(|a, b| a.0.total_cmp(&b.0))
}

/// Bytes that a token of the training has. They are known where each byte is a token, or where the
/// files are there and are nothing but text.
fn bytes_per_token(run: &Run) -> Option<f64> {
    if run.spec.pointer("/data/tokenizer")? == "bytes" {
        return Some(1.0);
    }
    let (data, train) = (run.data.as_ref()?, run.spec.pointer("/data/train")?.as_array()?);
    let is_text = train.iter().all(|part| part["source"]["format"] == "Text");
    if !is_text || !run.spec["data"]["heldOut"].is_null() {
        return None;
    }
    let mut bytes = 0;
    for file in &data.files {
        bytes += std::fs::metadata(&file.name).ok()?.len();
    }
    let tokens = data.training_tokens + data.held_out_tokens;
    (tokens > 0 && bytes > 0).then(|| bytes as f64 / tokens as f64)
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_that_differ_are_named() {
        let run = |rate: f64, more: Value| Run {
            spec: json!({"training": {"learningRate": rate, "steps": 5, "clip": more}}),
            ..Run::default()
        };
        let found = differences(&[run(0.1, json!("a")), run(0.2, Value::Null)]);
        let of = |name: &str, values: [&str; 2]| {
            (name.to_string(), values.map(String::from).to_vec())
        };
        let expected =
            [of("training.clip", ["a", ""]), of("training.learningRate", ["0.1", "0.2"])];
        assert_eq!(found, expected);
        assert_eq!(differences(&[run(0.1, Value::Null), run(0.1, Value::Null)]), []);
    }

    #[test]
    fn bits_and_money_are_told_where_they_are_known() {
        let step = |step: u64, loss: f64| Step {
            step, validation_loss: Some(loss), loss: Some(9.0), ..Step::default()
        };
        let run = Run {
            steps: vec![step(1, 3.0), step(2, std::f64::consts::LN_2), step(3, 0.9)],
            spec: json!({"data": {"tokenizer": "bytes"}}),
            joules: Some(7.2e6),
            ..Run::default()
        };
        let told = |rows: &[Row], name: &str| {
            rows.iter().find(|row| row.name == name).map(|row| row.cells[0].text.clone())
        };
        let rows = results(std::slice::from_ref(&run), Some(2.0));
        assert_eq!(told(&rows, "bits per byte").as_deref(), Some("1 (held out)"));
        assert_eq!(told(&rows, "least held-out loss").as_deref(), Some("0.6931 at step 2"));
        assert_eq!(told(&rows, "energy of its GPUs").as_deref(), Some("2 kWh"));
        assert_eq!(told(&rows, "cost"), None, "nobody knows how many nodes");
        let other = Run { spec: Value::Null, joules: None, ..run };
        let rows = results(std::slice::from_ref(&other), None);
        assert_eq!(told(&rows, "bits per byte"), None);
    }
}
