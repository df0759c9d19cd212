//! Every field of a `config.json` of a supported family, at a value that matters: the loss is that
//! of `transformers`, or the field is refused by its name. tests/parity/configs.py wrote the right
//! values (tests/parity/data/fields.json), and says what a case is.

mod common;
#[path = "common/hf.rs"]
mod fixture;

use fixture::{Fixture, Layout};
use moe_worker::engine::computer::Computer;
use moe_worker::engine::eval::{evaluate, source_of};
use moe_worker::hf::{Weights, read_model};
use moejob_protocol::config::{DataConfig, Precision, ValidationConfig};
use serde_json::{Map, Value};
use std::path::Path;

const SEQUENCE: u32 = 24;
const BOUND: f64 = 1e-5;

/// Letters that a line of arithmetic chooses, as the generator has them.
fn text() -> Vec<u8> {
    let mut state: u64 = 1;
    let mut letter = || {
        state = (state * 1_103_515_245 + 12_345) % (1 << 31);
        b'a' + ((state >> 16) % 26) as u8
    };
    (0..SEQUENCE * 8 + 1).map(|_| letter()).collect()
}

/// The loss of the weights that the names of their tensors decide, or why there is none.
fn loss(config: &Value, folder: &Path, data: &DataConfig) -> Result<f64, String> {
    std::fs::create_dir_all(folder).expect("a folder");
    std::fs::write(folder.join("config.json"), config.to_string()).expect("a file");
    let listed = |problems: Vec<moe_worker::checkpoint::Problem>| {
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    let (model, _) = read_model(folder).map_err(listed)?;
    let mut fixture = Fixture::new(&model, Layout::Each, "F32");
    fixture.config = config.clone();
    fixture.write(folder, 1);
    let weights = Weights::open(folder).map_err(|refusal| refusal.to_string())?;
    let computer = Computer::Processors { threads: 1, precision: Precision::Fp32 };
    let found = evaluate(&weights, data, SEQUENCE, computer, &mut |_, _| {});
    Ok(found.map_err(|error| error.to_string())?.loss)
}

#[test]
fn every_field_is_followed_or_refused_by_its_name() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/data/fields.json");
    let file = std::fs::read(&path).expect("the right values");
    let file: Value = serde_json::from_slice(&file).expect("JSON");
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("data.txt");
    std::fs::write(&data, text()).expect("a file");
    let data = DataConfig {
        source: source_of(&data, "text", None).expect("text"),
        validation: ValidationConfig { fraction: 0.0, every_steps: 0, max_sequences: 0 },
        end_of_document: None,
        ..common::data(folder.path())
    };
    let mut wrong = Vec::new();
    let cases = file["cases"].as_array().expect("cases");
    assert!(cases.len() > 200, "{} cases", cases.len());
    for (number, case) in cases.iter().enumerate() {
        let family = case["family"].as_str().expect("a family");
        let mut config: Map<String, Value> =
            file["bases"][family].as_object().expect("a config").clone();
        config.retain(|field, _| {
            !case["without"].as_array().expect("fields").iter().any(|absent| absent == field)
        });
        config.extend(case["set"].as_object().expect("fields").clone());
        let at = folder.path().join(number.to_string());
        let found = loss(&Value::Object(config), &at, &data);
        let right = case["loss"].as_f64().expect("a loss");
        let shown = format!("{family} {} without {}", case["set"], case["without"]);
        match (&found, case["refused"].as_str()) {
            (Ok(found), None) if (found - right).abs() <= BOUND => {}
            (Err(why), Some(field)) if why.contains(&format!("config.json: {field}")) => {}
            (found, refused) => wrong.push(format!("{shown}: {found:?}, not {right}, {refused:?}")),
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
