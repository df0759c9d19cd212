//! A job on four GPUs of two workers that exchanges in two stages, where driver and NCCL are stubs:
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
    // layers, and by need choices go before.
    let took = report["verbs"]["dispatch"]["seconds"].as_f64().unwrap();
    let times = if exchange == "flat" { 4.0 } else { 6.0 };
    assert!((took - times * 0.00025).abs() < 1e-9, "{report}");
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

/// What rank 0 tells. Kernels of stubs choose nothing, so that memory says expert 0 for each
/// choice, which is its own. To the other rank of the node, and to that of its place on the other
/// node, it sends how many tokens these get, and what became of theirs: of the rank of the node
/// with those that it passed on.
fn tells_of_needs(told: &Told) {
    let layers = 2;
    let by_nccl = |bytes| ("nccl".to_string(), bytes);
    let (counts, numbers) = (4, WORDS);
    assert_eq!(told["sendRecv"], by_nccl(layers * (counts + 2 * ROWS + numbers)));
    assert_eq!(told["dispatch"], by_nccl(layers * 2 * counts));
    assert_eq!(told["combine"], by_nccl(2 * layers * (2 * ROWS + numbers)));
}

/// The exchange of a job reaches its engines: between nodes each GPU sends to that of its place
/// alone, within a node to its neighbour, and what nobody needs stays.
#[test]
fn gpus_of_two_workers_send_a_token_to_a_node_once() {
    let (layers, steps) = (2, 4);
    for windows in ["off", "on"] {
        let (calls, told, _) = calls("hierarchical", windows);
        tells_of_needs(&told);
        // The first word is that with which they meet. Tokens go out in forward and in backward;
        // rows come back, and in backward with gradients of weights.
        let (out, back) = (1 + 2 * layers * steps, 1 + 3 * layers * steps);
        for (from, to, sent) in [(2, 0, out), (3, 1, out), (1, 0, out), (0, 1, back)]
            .into_iter()
            .chain([(0, 2, back), (1, 3, back), (2, 3, 1), (3, 2, 1)])
        {
            let of = |rank, what: &str, with| calls.get(&(rank, what.to_string(), with)).copied();
            assert_eq!(of(from, "send", to), Some(sent), "{from} to {to}: {calls:?}");
            assert_eq!(of(to, "recv", from), Some(sent), "{from} to {to}: {calls:?}");
        }
        let across = |(rank, what, with): &(u32, String, u32)| {
            what == "send" && rank / 2 != with / 2 && rank % 2 != with % 2
        };
        assert!(!calls.keys().any(across), "{calls:?}");
        assert!(!calls.keys().any(|(_, what, _)| what == "split"), "{calls:?}");
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
