//! What earlier versions wrote, and what later ones may add.

mod common;

use moe_worker::checkpoint::{self, Disk, Expected, differences, load, seal, unseal};
use moe_worker::engine::model::Model;
use moe_worker::hf::Weights;
use moe_worker::state::snapshot::{cut, shard_runs};
use moejob_protocol::CheckpointManifest;
use moejob_protocol::checkpoint::CHECKPOINT_VERSION;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// One or more of each version that was ever written, with what it calls a weight.
fn samples() -> Vec<(u32, &'static str, PathBuf)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints");
    let of = |name: &str| folder.join(name).join("step-00000004");
    let (first, second) = ("weight", "master");
    vec![
        (1, first, of("v1-fp32")),
        (1, first, of("v1-bias")),
        (2, second, of("v2-fp32")),
    ]
}

#[test]
fn there_is_a_sample_of_each_version() {
    let versions: Vec<u32> = samples().iter().map(|(version, ..)| *version).collect();
    assert!((1..=CHECKPOINT_VERSION).all(|version| versions.contains(&version)), "{versions:?}");
}

/// The values of a tensor's part by the manifest's own words, without any of our types.
fn values(directory: &Path, manifest: &Value, name: &str, part: &str) -> Vec<u8> {
    let tensors = manifest["tensors"].as_array().expect("a list");
    let tensor = tensors.iter().find(|tensor| tensor["name"] == name && tensor["part"] == part);
    let mut bytes = Vec::new();
    for piece in tensor.expect("a tensor")["pieces"].as_array().expect("a list") {
        let number = |field: &str| piece[field].as_u64().expect("a number") as usize;
        let file = manifest["files"][number("file")]["name"].as_str().expect("a name");
        let file = std::fs::read(directory.join(file)).expect("a shard");
        bytes.extend_from_slice(&file[number("begin")..number("end")]);
    }
    bytes
}

#[test]
fn what_each_version_wrote_is_loaded() {
    for (version, weight, directory) in samples() {
        let manifest = checkpoint::verify(&Disk::real(), &directory).expect("whole");
        assert_eq!(manifest.version, version);
        let text = std::fs::read(directory.join("manifest.json")).expect("a manifest");
        let raw: Value = serde_json::from_slice(&text).expect("JSON");
        let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
        let mut model = Model::new(&manifest.model, &layout, 0, &common::training(), 1)
            .expect("a small arena");
        load(&Disk::real(), &directory, &manifest, &mut model).expect("loaded");
        let mut state = Vec::new();
        cut(&mut model, &mut state).expect("a CPU");
        let params = manifest.model.params();
        let (runs, _) = shard_runs(&manifest.model, &params, &layout, 0, 4);
        assert_eq!(runs.len(), params.len());
        for run in runs {
            let (name, len) = (&params[run.index].name, params[run.index].numel() as usize * 4);
            for (at, part) in [weight, "moment1", "moment2"].into_iter().enumerate() {
                let start = run.offset + at * len;
                let written = values(&directory, &raw, name, part);
                assert!(state[start..start + len] == written, "{part} of {name}");
            }
        }
    }
}

/// What a job expects that differs in nothing but the hash of its fields.
fn differs(manifest: &CheckpointManifest, training_hash: &str) -> usize {
    let expected = Expected {
        model: &manifest.model,
        data_fingerprint: &manifest.data_fingerprint,
        seed: manifest.seed,
        spec_hash: "another",
        training_hashes: [training_hash.to_string(), "before".to_string()],
        float_bytes: 4,
    };
    differences(manifest, &expected).len()
}

#[test]
fn the_hash_of_version_1_is_not_compared() {
    let mut manifest = checkpoint::show(&Disk::real(), &samples()[0].2).expect("whole");
    assert!(!manifest.spec_hash.is_empty());
    assert_eq!(differs(&manifest, "training"), 0);
    manifest.version = CHECKPOINT_VERSION;
    assert_eq!(differs(&manifest, "training"), 1);
}

/// A job whose data were moved trains as before.
#[test]
fn where_data_lie_is_not_compared() {
    let mut manifest = checkpoint::show(&Disk::real(), &samples()[1].2).expect("whole");
    assert_eq!(manifest.training_hash, "", "of a release before");
    manifest.version = CHECKPOINT_VERSION;
    assert_eq!(differs(&manifest, "training"), 1);
    manifest.training_hash = "training".to_string();
    assert_eq!(differs(&manifest, "training"), 0);
    assert_eq!(differs(&manifest, "another"), 1);
}

/// Any JSON with the seal that a manifest has.
fn sealed(value: &Value) -> Vec<u8> {
    let mut text = serde_json::to_vec(value).expect("JSON");
    text.pop();
    let hash = blake3::hash(&text).to_hex();
    [&text[..], b",\"blake3\":\"", hash.as_bytes(), b"\"}\n"].concat()
}

#[test]
fn unknown_fields_are_kept_and_missing_ones_have_defaults() {
    let manifest = checkpoint::show(&Disk::real(), &samples()[1].2).expect("whole");
    let mut value = serde_json::to_value(&manifest).expect("JSON");
    let object = value.as_object_mut().expect("an object");
    for name in ["jobName", "tokens", "specHash", "dataFingerprint"] {
        assert!(object.remove(name).is_some(), "{name}");
    }
    let future = json!({ "lossScale": 65536.0, "big": u64::MAX, "deep": [1, null, { "a": "b" }] });
    object.insert("future".to_string(), future.clone());
    object["tensors"][0]["note"] = json!("x");
    object["tensors"][0]["pieces"][0]["note"] = json!("x");
    object["files"][0]["note"] = json!("x");
    let read = unseal(&sealed(&value)).expect("read all the same");
    assert_eq!((read.tokens, read.spec_hash.as_str()), (0, ""));
    assert_eq!(read.tensors, manifest.tensors);
    let again = unseal(&seal(&read).expect("JSON")).expect("its own seal");
    assert_eq!(again, read);
    assert_eq!(again.others.get("future"), Some(&future));
    assert_eq!(again.others.len(), 1, "{:?}", again.others.keys());
}

/// `generate`, `eval`, `export` and `model.from` name a checkpoint; nobody chose it among others.
#[test]
fn weights_of_a_damaged_checkpoint_are_refused_where_they_are_named() {
    for (.., directory) in samples() {
        let folder = tempfile::tempdir().expect("a folder");
        let copy = folder.path().join(directory.file_name().expect("a step's name"));
        std::fs::create_dir(&copy).expect("a folder");
        for entry in std::fs::read_dir(&directory).expect("a checkpoint") {
            let entry = entry.expect("a file");
            std::fs::copy(entry.path(), copy.join(entry.file_name())).expect("copied");
        }
        let link = folder.path().join("latest");
        std::os::unix::fs::symlink(&copy, &link).expect("a link");
        for named in [&copy, &link] {
            Weights::open(named).expect("whole");
        }
        let text = std::fs::read(directory.join("manifest.json")).expect("a manifest");
        let manifest: Value = serde_json::from_slice(&text).expect("JSON");
        let name = manifest["files"][0]["name"].as_str().expect("a name");
        let mut shard = std::fs::read(copy.join(name)).expect("a shard");
        let middle = shard.len() / 2;
        shard[middle] ^= 1;
        std::fs::write(copy.join(name), shard).expect("written");
        let refused = Weights::open(&copy).expect_err("a byte is another");
        assert!(refused.to_string().contains(name), "{refused}");
    }
}
