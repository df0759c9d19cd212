//! A job on two GPUs of one worker whose tokens travel in chunks, where driver and NCCL are stubs:
//! in which stream they do, how often, in which order, and what is told and planned of it.

mod stubbed;

use serde_json::Value;
use std::collections::BTreeMap;
use stubbed::Stubbed;

/// A gang whose messages go nowhere, and which writes down what they were, and in which stream.
/// Ranks are engines, so each has a process of its own. A communicator that is split off is that of
/// the lane of buckets.
const NCCL: &str = r#"
#include <stdio.h>
#include <stdlib.h>
struct id { char bytes[128]; };
static int own = -1;
static int *made(int lane) { int *comm = malloc(sizeof *comm); *comm = lane; return comm; }
static int told(const char *what, void *comm, void *stream) {
    FILE *file = fopen(getenv("STUB_NCCL"), "a");
    fprintf(file, "%d %s %d %p\n", own, what, *(int *)comm, stream);
    fclose(file);
    return 0;
}
int ncclGetVersion(int *code) { *code = VERSION; return 0; }
const char *ncclGetErrorString(int code) { return "an error"; }
const char *ncclGetLastError(void *comm) { return ""; }
int ncclCommInitRankConfig(void **comm, int world, struct id id, int rank, void *config) {
    own = rank;
    *comm = made(0);
    return 0;
}
int ncclCommSplit(void *of, int color, int key, void **comm, void *config) {
    *comm = color < 0 ? NULL : made(1);
    return 0;
}
int ncclCommGetAsyncError(void *comm, int *state) { *state = 0; return 0; }
int ncclCommCount(void *comm, int *count) { *count = 2; return 0; }
int ncclCommUserRank(void *comm, int *rank) { *rank = own; return 0; }
int ncclAllReduce(void *from, void *to, size_t n, int type, int op, void *comm, void *stream) {
    return told("sum", comm, stream);
}
int ncclAllGather(void *from, void *to, size_t count, int type, void *comm, void *stream) {
    return told("gather", comm, stream);
}
int ncclReduceScatter(void *from, void *to, size_t n, int type, int op, void *comm, void *stream) {
    return told("reduce", comm, stream);
}
"#;

/// Its training, and how it is laid out.
const REST: &str = r#"  training: { steps: 4, globalBatchSize: 8, microBatchSize: 2 }
  parallelism: { expert: 2, exchange: flat, zero: 2, overlapDegree: DEGREE }
"#;

const STEPS: usize = 4;
const ROUNDS: usize = 2;
const LAYERS: usize = 4;

/// By verb: bytes, and whether they travel beside the ops.
type Verbs = BTreeMap<String, (u64, bool)>;

struct Ran {
    /// Of rank 0, without the first words: what, the communicator and the stream.
    calls: Vec<(String, u32, String)>,
    told: Verbs,
    planned: Verbs,
}

fn verbs<'a>(all: impl Iterator<Item = (&'a str, &'a Value)>) -> Verbs {
    let of = |(name, of): (&str, &Value)| {
        let beside = of["beside"].as_bool().unwrap_or(false);
        (name.to_string(), (of["bytes"].as_u64().unwrap(), beside))
    };
    all.map(of).collect()
}

fn run(degree: u32) -> Ran {
    let rest = REST.replace("DEGREE", &degree.to_string());
    let place = Stubbed::new(Some(NCCL), "chunks", "devicesPerNode: 2", 4, &rest);
    let calls = place.path().join("calls");
    let command = |words: &[&str]| {
        let mut command = place.command(2, words);
        command.env("STUB_NCCL", &calls);
        command
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let ran = command(&["run", "job.yaml"]).output().unwrap();
    assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
    let of_line = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [rank, what, lane, stream] = words[..] else { panic!("{line}") };
        let call = (what.to_string(), lane.parse().unwrap(), stream.to_string());
        (rank == "0").then_some(call)
    };
    let calls = std::fs::read_to_string(&calls).unwrap();
    let mut calls: Vec<_> = calls.lines().filter_map(of_line).collect();
    // A word by each verb, in each lane, in a stream that is gone then.
    calls.drain(..2 * 3);
    let metrics = std::fs::read_to_string(place.path().join("runs/chunks/metrics.jsonl")).unwrap();
    let lines: Vec<Value> =
        metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let report = lines.iter().find_map(|line| line.get("communication")).expect("a report");
    let told = report["verbs"].as_object().unwrap();
    let told = verbs(told.iter().map(|(name, of)| (name.as_str(), of)));
    let plan = command(&["plan", "job.yaml", "-o", "json"]).output().unwrap();
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
    let planned = plan["communication"].as_array().unwrap().iter();
    let planned = verbs(planned.map(|of| (of["verb"].as_str().unwrap(), of)));
    Ran { calls, told, planned }
}

/// What of one layer travels: rows, ids and weights of each chunk out, then its sums back; in
/// backward rows alone, and sums with gradients of weights. All of it in a stream that has nothing
/// else.
#[test]
fn tokens_in_chunks_have_a_stream_of_their_own() {
    for degree in [1, 2, 4] {
        let ran = run(degree);
        let in_lane = |lane: u32| ran.calls.iter().filter(move |call| call.1 == lane);
        let streams = |what: &str, lane| -> Vec<&str> {
            let mut of: Vec<&str> =
                in_lane(lane).filter(|call| call.0 == what).map(|call| call.2.as_str()).collect();
            of.sort_unstable();
            of.dedup();
            of
        };
        let [ops, buckets] = [streams("sum", 0), streams("reduce", 1)];
        assert!(ops.len() == 1 && buckets.len() == 1 && ops != buckets, "{ops:?} {buckets:?}");
        let tokens = streams("gather", 0);
        assert_eq!(tokens, streams("reduce", 0), "{degree}");
        assert_eq!((tokens.len(), tokens == ops), (1, degree == 1), "{tokens:?} beside {ops:?}");
        assert_ne!(tokens, buckets, "{degree}");

        let n = degree as usize;
        let times = |what: &'static str, count: usize| std::iter::repeat_n(what, count);
        let each = |out: usize, back: usize| -> Vec<&str> {
            // One chunk comes back before anything else leaves.
            times("gather", n * out).chain(times("reduce", n * back)).collect()
        };
        let round = [each(3, 1).repeat(LAYERS), each(1, 2).repeat(LAYERS)].concat();
        let found: Vec<&str> = in_lane(0)
            .filter(|call| call.2 == tokens[0] && call.0 != "sum")
            .map(|call| call.0.as_str())
            .collect();
        assert_eq!(found, round.repeat(STEPS * ROUNDS), "{degree}");

        for verb in ["dispatch", "combine"] {
            assert_eq!(ran.told[verb], ran.planned[verb], "{degree} {verb}");
            assert_eq!(ran.told[verb].1, degree > 1, "{degree} {verb}");
        }
        assert_eq!(ran.told["dispatch"].0, run_of_one().told["dispatch"].0, "{degree}");
    }
}

/// Chunks send what one sends.
fn run_of_one() -> &'static Ran {
    static ONE: std::sync::OnceLock<Ran> = std::sync::OnceLock::new();
    ONE.get_or_init(|| run(1))
}
