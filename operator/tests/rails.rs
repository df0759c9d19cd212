//! A job on four GPUs of two workers that exchanges along rails, where driver and NCCL are stubs:
//! who sends to whom.

mod stubbed;

use serde_json::Value;
use std::collections::BTreeMap;
use std::process::Command;
use stubbed::Stubbed;

/// A gang whose messages go nowhere, and which writes down whose they are. Ranks are engines, so
/// each has a process of its own. A communicator that is split off is that of a node.
const NCCL: &str = r#"
#include <stdio.h>
#include <stdlib.h>
struct id { char bytes[128]; };
static int own = -1;
static int *made(int count) { int *comm = malloc(sizeof *comm); *comm = count; return comm; }
static int told(const char *what, int with) {
    FILE *file = fopen(getenv("STUB_NCCL"), "a");
    fprintf(file, "%d %s %d\n", own, what, with);
    fclose(file);
    return 0;
}
int ncclGetVersion(int *code) { *code = VERSION; return 0; }
const char *ncclGetErrorString(int code) { return "an error"; }
const char *ncclGetLastError(void *comm) { return ""; }
int ncclCommInitRankConfig(void **comm, int world, struct id id, int rank, void *config) {
    own = rank;
    *comm = made(world);
    return 0;
}
int ncclCommSplit(void *of, int color, int key, void **comm, void *config) {
    *comm = color < 0 ? NULL : made(2);
    return color < 0 ? 0 : told("split", 2);
}
int ncclCommGetAsyncError(void *comm, int *state) { *state = 0; return 0; }
int ncclCommCount(void *comm, int *count) { *count = *(int *)comm; return 0; }
int ncclCommUserRank(void *comm, int *rank) { *rank = *(int *)comm == 2 ? own % 2 : own; return 0; }
int ncclSend(const void *from, size_t count, int type, int peer, void *comm, void *stream) {
    return told("send", peer);
}
int ncclRecv(void *to, size_t count, int type, int peer, void *comm, void *stream) {
    return told("recv", peer);
}
int ncclAllGather(void *from, void *to, size_t count, int type, void *comm, void *stream) {
    return told("gather", *(int *)comm);
}
"#;

/// Its training, and how it is laid out.
const REST: &str = r#"  training: { steps: 4, globalBatchSize: 8, microBatchSize: 2 }
  parallelism: { expert: 4, exchange: EXCHANGE }
"#;

/// `(rank, what, with)`: how often.
type Calls = BTreeMap<(u32, String, u32), usize>;

/// By verb: the link and the bytes that rank 0 tells of its fourth step.
type Told = BTreeMap<String, (String, u64)>;

/// And what `plan` expects of them.
fn calls(exchange: &str, windows: &str) -> (Calls, Told, Told) {
    let rest = REST.replace("EXCHANGE", exchange);
    let place = Stubbed::new(Some(NCCL), "rails", "devicesPerNode: 2, min: 2", 2, &rest);
    let told = place.path().join("calls");
    let ran = place
        .command(4, &["run", "job.yaml", "--workers", "2"])
        // The rest then has the communicator of all ranks.
        .env("MOEJOB_OVERLAP", "off")
        .env("MOEJOB_PEER", windows)
        .env("STUB_NCCL", &told)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
    let mut calls = Calls::new();
    for line in std::fs::read_to_string(&told).unwrap().lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [rank, what, with] = words[..] else { panic!("{line}") };
        let call = (rank.parse().unwrap(), what.to_string(), with.parse().unwrap());
        *calls.entry(call).or_default() += 1;
    }
    let metrics = std::fs::read_to_string(place.path().join("runs/rails/metrics.jsonl")).unwrap();
    let lines: Vec<Value> =
        metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let reports: Vec<&Value> = lines.iter().filter_map(|line| line.get("communication")).collect();
    let [report] = reports[..] else { panic!("{metrics}") };
    assert_eq!(report["step"], 4);
    // Each event of the stub lies 250 us behind the one before: in forward and in backward of two
    // layers.
    let took = report["verbs"]["dispatch"]["seconds"].as_f64().unwrap();
    assert!((took - 4.0 * 0.00025).abs() < 1e-9, "{report}");
    let words = ["plan", "job.yaml", "-o", "json"];
    let mut plan = Command::new(env!("CARGO_BIN_EXE_moejob"));
    let plan = plan.args(words).current_dir(place.path()).output().unwrap();
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
    let of = |name: &str, of: &Value| {
        let (link, bytes) = (of["link"].as_str().unwrap(), of["bytes"].as_u64().unwrap());
        (name.to_string(), (link.to_string(), bytes))
    };
    let told = report["verbs"].as_object().unwrap().iter().map(|(name, value)| of(name, value));
    let planned = plan["communication"].as_array().unwrap().iter();
    let planned = planned.map(|value| of(value["verb"].as_str().unwrap(), value));
    (calls, told.collect(), planned.collect())
}

/// Bytes of a rank's rows in bf16, and of a word for each choice of its tokens.
const ROWS: u64 = 64 * 64 * 2;
const WORDS: u64 = 64 * 2 * 4;

/// What a rank tells is what was expected of it, but for the numbers of the step.
fn as_planned(told: &Told, planned: Told) {
    let mut told = told.clone();
    assert!(told.remove("allReduce").is_some_and(|(link, bytes)| link == "nccl" && bytes > 0));
    assert_eq!(told, planned);
}

fn tells_of_rails(told: &Told, planned: Told, windows: bool) {
    let layers = 2;
    let of = |verb: &str| told[verb].clone();
    let by_nccl = |bytes| ("nccl".to_string(), bytes);
    // To the other node all that goes out and comes back, as in the flat way but once.
    let all = layers * (ROWS + 2 * WORDS + ROWS + ROWS + ROWS + WORDS);
    assert_eq!(of("sendRecv"), by_nccl(all));
    if windows {
        // Ids and weights of the other rank's rail; kernels of stubs count no rows.
        let words = layers * 2 * 2 * WORDS;
        assert_eq!([of("dispatch"), of("combine")], [words, 0].map(|n| ("window".to_string(), n)));
        return;
    }
    // A chunk to the neighbour of each node's rows.
    assert_eq!(of("dispatch"), by_nccl(2 * layers * (ROWS + 2 * WORDS + ROWS)));
    assert_eq!(of("combine"), by_nccl(2 * layers * (ROWS + ROWS + WORDS)));
    as_planned(told, planned);
}

/// The exchange of a job reaches its engines: between nodes each GPU sends to that of its place
/// alone, within a node it gathers with its neighbour, or through windows.
#[test]
fn gpus_of_two_workers_exchange_along_rails() {
    let (layers, steps) = (2, 4);
    for windows in ["off", "on"] {
        let (rails, told, planned) = calls("hierarchical", windows);
        tells_of_rails(&told, planned, windows == "on");
        for rank in 0..4 {
            let of = |what: &str, with: u32| rails.get(&(rank, what.to_string(), with)).copied();
            // Out: rows, ids and weights; sums back; in backward gradients, and these with those
            // of weights back. The first is the word with which they meet.
            let sent = 1 + (3 + 1 + 1 + 2) * layers * steps;
            let partner = (rank + 2) % 4;
            assert_eq!([of("send", partner), of("recv", partner)], [Some(sent); 2], "{rails:?}");
            let others = [rank, (rank + 1) % 4, (rank + 3) % 4];
            assert!(others.iter().all(|to| of("send", *to).is_none()), "{rails:?}");
            assert_eq!(of("split", 2), Some(1));
            // Rows, ids and weights of each node, then gradients.
            let gathered = if windows == "on" { 0 } else { (3 + 1) * 2 * layers * steps };
            assert_eq!(of("gather", 2), Some(1 + gathered), "{windows}: {rails:?}");
        }
    }
    let (flat, told, planned) = calls("flat", "off");
    let of = |verb: &str| told[verb].clone();
    let by_nccl = |bytes| ("nccl".to_string(), bytes);
    // Three chunks of rows, ids and weights, and of rows again; rows, and rows with weights' own.
    assert_eq!(of("dispatch"), by_nccl(3 * layers as u64 * (ROWS + 2 * WORDS + ROWS)));
    assert_eq!(of("combine"), by_nccl(3 * layers as u64 * (ROWS + ROWS + WORDS)));
    as_planned(&told, planned);
    assert!(flat.keys().all(|(_, what, _)| what != "split"), "{flat:?}");
    // Rows, ids and weights of all at once, then gradients; the rest is not of tokens.
    let gathered = flat[&(0, "gather".to_string(), 4)];
    assert!(gathered > (3 + 1) * layers * steps, "{flat:?}");
}
