//! What is fuzzed: the readers of manifests, checkpoints, data, frames and records.

use moe_worker::checkpoint;
use moe_worker::gang::comm::Header as DataHeader;
use moe_worker::life::control;
use moe_worker::data::{Encoder, Recipe, header, jsonl, megatron};
use moe_worker::gang::step_end::StepEnd;
use moejob_manifest::Job;
use moejob_manifest::job::Venue;
use moejob_plan::allocate::Granted;
use moejob_plan::lead::{Event, JobLoop, Place, WorkerPod};
use moejob_plan::observed::Node;
use moejob_plan::record;
use moejob_plan::launch::template;
use moejob_protocol::config::TokenType;
use moejob_protocol::message::{Down, Frame, FrameBody, Up};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

pub const MANIFEST_WORDS: &[&[u8]] = &[
    b"spec:", b"model:", b"experts: {", b"nodes: { min: 1, max: 4 }", b"data:", b"mixture:",
    b"- ", b"  ", b"\n", b"\t", b"&a ", b"*a", b"<<: *a", b"!!str ", b"---\n", b"...", b"? ",
    b"|2\n", b">-", b"null", b".nan", b".inf", b"1e999", b"0x10", b"010", b"[", b"]", b"{", b"}",
    b"\"", b"'", b"#", b"\xef\xbb\xbf", b"\0", b"\xe2\x80\xae", b"training:", b"preset: tiny",
    b"endOfDocument: 5",
];

/// Never more than a list of problems.
pub fn manifest(input: &[u8]) -> String {
    match Job::read(input) {
        Err(problems) => {
            assert!(!problems.is_empty(), "refused without a reason");
            let first = problems.iter().take(4);
            first.map(|problem| format!("{:?}{}", problem.code, problem.path)).collect()
        }
        Ok(job) => {
            let config = template(&job, Venue::Local, "uid", &super::seeds::places());
            let text = serde_json::to_string(&config).expect("a configuration is JSON");
            let back: moejob_protocol::WorkerConfig =
                serde_json::from_str(&text).expect("what was written is read");
            assert_eq!(back.data, config.data);
            format!("good {:?}", job.data.train.len())
        }
    }
}

pub const CHECKPOINT_WORDS: &[&[u8]] = &[
    b"\"version\":1", b"\"step\":", b"\"tensors\":[", b"\"pieces\":[", b"\"shape\":[",
    b"\"dtype\":\"", b"\"F32\"", b"\"BF16\"", b"\"data_offsets\":[0,4]", b"\"__metadata__\":{}",
    b"18446744073709551615", b"4294967296", b"-1", b"1e400", b"null", b"{", b"}", b"[", b"]",
    b",", b":", b"\\u0000", b"../", b"a1-r0-0.safetensors",
];

/// The first byte chooses: a manifest whose seal is made right, a manifest as it is, or the header
/// of a shard.
pub fn checkpoint(input: &[u8]) -> String {
    let Some((choice, input)) = input.split_first() else { return String::new() };
    match choice % 3 {
        0 => read_manifest(&resealed(input)),
        1 => read_manifest(input),
        _ => shard(input),
    }
}

/// One file in memory takes all inputs in turn.
fn shard(input: &[u8]) -> String {
    thread_local! {
        static FILE: File = File::from(
            rustix::fs::memfd_create("shard", rustix::fs::MemfdFlags::CLOEXEC).expect("memory"),
        );
    }
    FILE.with(|file| {
        file.set_len(input.len() as u64).expect("memory");
        file.write_all_at(input, 0).expect("memory");
        match checkpoint::shard_tensors(file, input.len() as u64) {
            Ok(tensors) => format!("good header {}", if tensors > 0 { "some" } else { "none" }),
            Err(why) => why,
        }
    })
}

/// With the hash that the text has now, so that a damage is read rather than seen at once.
fn resealed(text: &[u8]) -> Vec<u8> {
    const TAIL: usize = 78;
    let body = &text[..text.len().saturating_sub(TAIL)];
    let hash = blake3::hash(body).to_hex();
    [body, b",\"blake3\":\"", hash.as_bytes(), b"\"}\n"].concat()
}

fn read_manifest(text: &[u8]) -> String {
    match checkpoint::unseal(text) {
        Err(problem) => problem.to_string(),
        Ok(manifest) => {
            let problems = checkpoint::check(&manifest, "step-00000200");
            let text = checkpoint::seal(&manifest).expect("what was read is written");
            let back = checkpoint::unseal(&text).expect("what was written is read");
            // NaN is no number of JSON, so equality holds for all that can be read.
            assert_eq!(back, manifest);
            problems.iter().take(3).map(ToString::to_string).collect()
        }
    }
}

pub const DATA_WORDS: &[&[u8]] = &[
    b"MMIDIDX\0\0", b"\x01\0\0\0\0\0\0\0", b"{\"text\":\"", b"\"}\n", b"\"text\":", b"\n",
    b"\r\n", b"\0", b"\xef\xbb\xbf", b"\xff\xfe", b"\\ud83d", b"\\u0000", b"[[[[[[[[", b"{\"a\":",
    b"1e999", b"null", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\xd8\xd7\x34\x01",
    b"\x81\xd8\x34\x01",
];

/// The first byte chooses the reader, the second an option of it.
pub fn data(input: &[u8]) -> String {
    let Some(([choice, option], input)) = input.split_first_chunk::<2>() else {
        return String::new();
    };
    match choice % 3 {
        0 => {
            let dtype = [None, Some(TokenType::Uint16), Some(TokenType::Uint32)];
            let dtype = dtype[usize::from(*option) % 3];
            match header::kind(&input[..input.len().min(12)], input.len() as u64, dtype) {
                Err((at, why)) => format!("{at}{why}"),
                Ok(kind) => {
                    let rest = &input[kind.offset as usize..];
                    let ids = kind.width.ids(rest).count() as u64;
                    assert_eq!(ids * kind.width.bytes(), rest.len() as u64);
                    format!("{kind:?}")
                }
            }
        }
        1 => index(input, u64::from(*option)),
        _ => lines(input),
    }
}

fn index(mut input: &[u8], option: u64) -> String {
    let bytes = input.len() as u64;
    let index = match megatron::Index::open(&mut input, bytes) {
        Ok(index) => index,
        Err(refused) => return refused.to_string(),
    };
    // The .bin is as long as the lengths say, or not quite.
    let lengths = &input[megatron::HEADER_BYTES as usize..][..index.sequences as usize * 4];
    let (lengths, _) = lengths.as_chunks::<4>();
    let lengths = lengths.iter().map(|length| u64::from(u32::from_le_bytes(*length)));
    let bin = lengths.fold(0, |sum: u64, length| sum.wrapping_add(length * index.width.bytes()));
    let bin = bin.wrapping_add(option % 2);
    let mut tokens = 0;
    let mut add = |count| {
        tokens += count;
        Ok::<(), megatron::Refused>(())
    };
    match index.each_document(&mut input, bin, &mut add) {
        Err(refused) => refused.to_string(),
        Ok(()) => {
            assert_eq!(tokens * index.width.bytes(), bin);
            format!("good index {:?}", index.width)
        }
    }
}

fn lines(input: &[u8]) -> String {
    let recipe =
        Recipe { encoder: Encoder::Bytes, field: "text".to_string(), end_of_document: Some(256) };
    let mut documents = 0;
    let raw = Box::new(std::io::Cursor::new(input.to_vec()));
    let read = jsonl(raw, Path::new("fuzz.jsonl"), &recipe, &mut |tokens| {
        let counted: u64 = tokens.documents.iter().map(|document| u64::from(document.tokens)).sum();
        assert_eq!(counted, tokens.ids.len() as u64);
        documents += tokens.documents.len();
        Ok(())
    });
    match read {
        Err(error) => error.to_string(),
        Ok(()) => format!("good lines {}", if documents > 0 { "some" } else { "none" }),
    }
}

pub const FRAME_WORDS: &[&[u8]] = &[
    b"{\"v\":1,\"term\":1,\"attempt\":1,\"body\":", b"\"hello\"", b"\"heartbeat\"",
    b"\"configure\"", b"\"leave\"", b"\"shutdown\"", b"\"held\":[", b"\"shards\":[",
    b"\"reason\"", b"null", b"-1", b"1e400", b"18446744073709551616", b"4294967295", b"MOEJ",
    b"\x01\0\0\0", b"\x02\0\0\0", b"{", b"}", b"[", b"]",
];

/// The first byte chooses: a frame from a worker, from the leader, of data, or a step's end.
pub fn frames(input: &[u8]) -> String {
    let Some((choice, input)) = input.split_first() else { return String::new() };
    match choice % 4 {
        0 => control_frame::<Up>(input),
        1 => control_frame::<Down>(input),
        2 => match DataHeader::decode(input) {
            Err(why) => why,
            Ok(header) => {
                assert_eq!(header.encode(), input);
                header.to_string()
            }
        },
        _ => match StepEnd::decode(0, input) {
            Err(error) => error.to_string(),
            Ok(end) => {
                assert_eq!(end.encode(), input);
                "good end".to_string()
            }
        },
    }
}

fn control_frame<Body>(input: &[u8]) -> String
where
    Body: FrameBody + PartialEq + std::fmt::Debug,
{
    let input = &input[..input.len().min(Body::BYTES_MAX)];
    let frame: Frame<Body> = match control::decode(input) {
        Ok(frame) => frame,
        Err(error) => return error.to_string(),
    };
    let bytes = control::encode(&frame).expect("what was read is written");
    // The length stands before the frame.
    let back: Frame<Body> = control::decode(&bytes[4..]).expect("what was written is read");
    assert_eq!(back, frame);
    format!("{:?}", frame.body).chars().take(12).collect()
}

pub const RECORD_WORDS: &[&[u8]] = &[
    b"\"v\":1", b"\"gang\":{", b"\"members\":[", b"\"layout\":{", b"\"mesh\":{", b"\"dp\":",
    b"\"outcome\":", b"\"suspended\"", b"\"layouts\":[", b"\"births\":", b"\"term\":",
    b"\"recoveries\":[", b"\"accepted\":{", b"\"values\":{", b"\"refused\":{", b"\"rests\":{",
    b"18446744073709551615", b"4294967295", b"0", b"-1", b"null", b"{", b"}", b"[", b"]", b",",
    b"\n", b"\"attempt\":", b"\"stopRequested\":[\"move\",1]", b"\"ended\":1", b"\"until\":",
];

/// What a leader before has left in the status, a line each: a leader takes it and decides, or says
/// why it does not.
pub fn record(input: &[u8]) -> String {
    const NOW: u64 = 1_700_000_000_000;
    let text = String::from_utf8_lossy(input);
    let (record, more) = text.split_once('\n').unwrap_or((&text, ""));
    let saved = match record::restore(record, more) {
        Err(why) => return why.to_string().chars().filter(|of| !of.is_ascii_digit()).collect(),
        Ok(saved) => saved,
    };
    let again = record::restore(&record::write(&saved), &record::write_more(&saved.more));
    assert_eq!(again.as_ref(), Ok(&saved), "what was read is written and read again");
    let seen = super::seeds::seen(record, more);
    let mut job = JobLoop::new(&seen, Place::Cluster(Arc::default()), 1, NOW);
    let node = |name: &str| Node::good(name);
    let nodes = ["n0", "n1"].map(node).to_vec();
    job.on(Event::Granted(Granted { nodes, ..Granted::default() }), NOW);
    let members = saved.record.gang.iter().flat_map(|gang| &gang.members);
    for member in members.take(2) {
        let pod = WorkerPod {
            namespace: seen.namespace.clone(),
            name: member.worker.clone(),
            uid: "uid".to_string(),
            node: Some(Arc::from("n0")),
            address: Some("127.0.0.1".to_string()),
            started: true,
            ..WorkerPod::default()
        };
        job.on(Event::Pod(Box::new(pod)), NOW);
    }
    let mut told = 0;
    for seconds in [0, 1, 60, 3_600] {
        told += job.turn(NOW + seconds * 1_000).effects.len();
    }
    assert!(told < 100, "{told} effects of nothing");
    format!("{:?} {told}", saved.record.outcome.is_some())
}
