//! Inputs that follow the types: what is written today, so that mutation begins behind the door.

use moe_worker::checkpoint;
use moe_worker::life::control;
use moejob_plan::Job;
use moejob_plan::job::Venue;
use moejob_plan::launch::{Places, template};
use moejob_protocol::WorkerConfig;
use moejob_protocol::checkpoint::{CheckpointManifest, FileEntry, Part, Piece, TensorEntry};
use moejob_protocol::message::{Down, Frame};

/// A small job's first configuration.
pub fn configuration() -> WorkerConfig {
    let text = include_str!("corpus/manifest/base.yaml");
    let text = text.replace("count: 8", "count: 2");
    let job = Job::read(text.as_bytes()).expect("a good manifest");
    template(&job, Venue::Local, "uid", &places())
}

pub fn places() -> Places {
    Places {
        root: "/workspace".to_string(),
        checkpoints: "/workspace/c".to_string(),
        records: "/workspace/r".to_string(),
        exclude: Vec::new(),
    }
}

/// Choice 1 of the target: a whole manifest, as it is; and choice 0, which makes its seal right.
pub fn checkpoints() -> Vec<Vec<u8>> {
    let config = configuration();
    let hash = "ab".repeat(32);
    let mut begin = 1000;
    let mut tensors = Vec::new();
    for param in config.model.params() {
        for part in [Part::Weight, Part::Moment1, Part::Moment2] {
            let end = begin + param.numel() * 4;
            let blake3 = hash.clone();
            let piece = Piece { file: 0, begin, end, start: 0, len: param.numel(), blake3 };
            tensors.push(TensorEntry {
                name: param.name.clone(),
                part,
                dtype: "F32".to_string(),
                shape: param.shape.clone(),
                pieces: vec![piece],
            });
            begin = end;
        }
    }
    let name = "a1-r0-0.safetensors".to_string();
    let manifest = CheckpointManifest {
        version: 1,
        job_uid: "uid".to_string(),
        job_name: "sample".to_string(),
        attempt: 1,
        step: 200,
        tokens: 7,
        model: config.model.clone(),
        layout: config.layout.clone(),
        spec_hash: hash.clone(),
        data_fingerprint: hash.clone(),
        seed: 1,
        tensors,
        files: vec![FileEntry { name, bytes: begin, blake3: hash }],
    };
    let problems = checkpoint::check(&manifest, "step-00000200");
    assert!(problems.is_empty(), "the seed is refused: {problems:?}");
    let text = checkpoint::seal(&manifest).expect("JSON");
    [0, 1].map(|choice| [&[choice], &text[..]].concat()).to_vec()
}

/// Choice 1 of the target: what configures an attempt.
pub fn frames() -> Vec<Vec<u8>> {
    let body = Down::Configure(Box::new(configuration()));
    let frame = Frame { v: moejob_protocol::PROTOCOL_VERSION, term: 1, attempt: 1, body };
    let bytes = control::encode(&frame).expect("a frame");
    vec![[&[1], &bytes[4..]].concat()]
}
