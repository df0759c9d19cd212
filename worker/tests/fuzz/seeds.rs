//! Inputs that follow the types: what is written today, so that mutation begins behind the door.

use moe_worker::checkpoint;
use moe_worker::life::control;
use moejob_manifest::Job;
use moejob_manifest::job::Venue;
use moejob_plan::launch::{Places, template};
use moejob_plan::lead::JobSeen;
use moejob_plan::observed::{Gang, Outcome, Record, StopCause};
use moejob_plan::record::{self, GangPods, More, Refused, Saved};
use moejob_protocol::checkpoint::{CheckpointManifest, FileEntry, Part, Piece, TensorEntry};
use moejob_protocol::config::Member;
use moejob_protocol::message::{Down, Frame};
use moejob_protocol::{Layout, Mesh, WorkerConfig};

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
        for part in [Part::Master, Part::Moment1, Part::Moment2] {
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
        version: moejob_protocol::checkpoint::CHECKPOINT_VERSION,
        job_uid: "uid".to_string(),
        job_name: "sample".to_string(),
        attempt: 1,
        step: 200,
        tokens: 7,
        model: config.model.clone(),
        layout: config.layout.clone(),
        spec_hash: hash.clone(),
        training_hash: hash.clone(),
        data_fingerprint: hash.clone(),
        seed: 1,
        loss_scale: None,
        tensors,
        files: vec![FileEntry { name, bytes: begin, blake3: hash }],
        others: Default::default(),
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

/// A job whose status says that.
pub fn seen(record: &str, more: &str) -> JobSeen {
    JobSeen {
        namespace: "team".to_string(),
        name: "a".to_string(),
        uid: "uid".to_string(),
        generation: 1,
        resource_version: "1".to_string(),
        spec: serde_json::json!({
            "nodes": {"min": 1, "max": 2},
            "model": {"preset": "tiny"},
            "data": {"train": {"text": {"paths": ["corpus/*"]}}, "sequenceLength": 8},
            "training": {"steps": 100, "globalBatchSize": 8},
            "checkpoint": {"location": "checkpoints/a"},
            "volumes": [{"mountPath": "checkpoints", "claim": "c"}],
        }),
        status: serde_json::json!({ "record": record, "recordMore": more }),
        ..JobSeen::default()
    }
}

/// Both lines of a gang's record, under way and over.
pub fn records() -> Vec<Vec<u8>> {
    let member = |slot: u32| Member {
        rank: slot,
        worker: format!("a-a1-{slot}"),
        node: format!("n{slot}"),
        address: format!("10.0.0.{slot}:7777"),
    };
    let gang = Gang {
        attempt: 1,
        digest: "d".to_string(),
        layout: Layout::contiguous(Mesh::data_parallel(2, 2)),
        members: vec![member(0), member(1)],
        resumed_at: 0,
        started_at: 1,
        stepped: true,
        stop_requested: Some((StopCause::Growth, 2)),
        broken: None,
        ended: None,
        inherited: false,
    };
    let pods = GangPods {
        attempt: 1,
        image: "a:1".to_string(),
        members: vec![("u0".to_string(), 1), ("u1".to_string(), 1)],
    };
    let refused = Refused { since: Some((1, 2)), until: Some(3), ..Refused::default() };
    let rests = [("n0".to_string(), (1, 2, 3))].into();
    let more = More { keyring: "k".to_string(), pods, refused, rests, ..More::default() };
    let record = Record { attempt: 1, births: 2, step: 7, gang: Some(gang), ..Record::default() };
    let ended = Record { outcome: Some(Outcome::Suspended), ..record.clone() };
    let lines = [record, ended, Record::default()].map(|record| {
        let saved = Saved { term: 3, record, more: more.clone(), ..Saved::default() };
        format!("{}\n{}", record::write(&saved), record::write_more(&saved.more)).into_bytes()
    });
    lines.into()
}
