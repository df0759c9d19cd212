//! A job on two GPUs of one worker in each stage of ZeRO, where driver and NCCL are stubs: how
//! often gradients are summed and weights gathered, in which lane, and what is planned for it.

mod stubbed;

use serde_json::Value;
use std::collections::BTreeMap;
use stubbed::Stubbed;

/// A gang whose messages go nowhere, and which writes down what they were. Ranks are engines, so
/// each has a process of its own. A communicator that is split off is that of the lane.
const NCCL: &str = r#"
#include <stdio.h>
#include <stdlib.h>
struct id { char bytes[128]; };
static int own = -1;
static int *made(int lane) { int *comm = malloc(sizeof *comm); *comm = lane; return comm; }
static int told(const char *what, void *comm) {
    FILE *file = fopen(getenv("STUB_NCCL"), "a");
    fprintf(file, "%d %s %d\n", own, what, *(int *)comm);
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
int ncclAllGather(void *from, void *to, size_t count, int type, void *comm, void *stream) {
    return told("gather", comm);
}
int ncclReduceScatter(void *from, void *to, size_t n, int type, int op, void *comm, void *stream) {
    return told("reduce", comm);
}
"#;

/// Its training, and how it is laid out.
const REST: &str = r#"  training: { steps: 4, globalBatchSize: 8, microBatchSize: 2 }
  parallelism: { expert: 2, exchange: flat, zero: STAGE }
"#;

/// By verb: bytes, and whether they travel beside the ops.
type Verbs = BTreeMap<String, (u64, bool)>;

struct Ran {
    /// Of rank 0, by verb and lane: how often.
    calls: BTreeMap<(String, u32), usize>,
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

fn run(stage: u32, overlap: Option<&str>) -> Ran {
    let rest = REST.replace("STAGE", &stage.to_string());
    let place = Stubbed::new(Some(NCCL), "zero", "devicesPerNode: 2", 4, &rest);
    let calls = place.path().join("calls");
    let command = |words: &[&str]| {
        let mut command = place.command(2, words);
        command.env("STUB_NCCL", &calls);
        command
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut running = command(&["run", "job.yaml"]);
    let ran = running.envs(overlap.map(|said| ("MOEJOB_OVERLAP", said))).output().unwrap();
    assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
    let mut of_rank_0 = BTreeMap::new();
    for line in std::fs::read_to_string(&calls).unwrap().lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let ["0", what, lane] = words[..] else { continue };
        *of_rank_0.entry((what.to_string(), lane.parse().unwrap())).or_default() += 1;
    }
    let metrics = std::fs::read_to_string(place.path().join("runs/zero/metrics.jsonl")).unwrap();
    let lines: Vec<Value> =
        metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let report = lines.iter().find_map(|line| line.get("communication")).expect("a report");
    let told = report["verbs"].as_object().unwrap();
    let told = verbs(told.iter().map(|(name, of)| (name.as_str(), of)));
    let plan = command(&["plan", "job.yaml", "-o", "json"]).output().unwrap();
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
    let planned = plan["communication"].as_array().unwrap().iter();
    let planned = verbs(planned.map(|of| (of["verb"].as_str().unwrap(), of)));
    Ran { calls: of_rank_0, told, planned }
}

const STEPS: usize = 4;
const ROUNDS: usize = 2;
const LAYERS: usize = 4;
/// Before the first step one word goes by each verb and lane that steps take.
const WORD: usize = 1;

#[test]
fn each_stage_sums_and_gathers_as_often_as_planned() {
    for (stage, overlap) in [(1, None), (2, None), (3, None), (2, Some("off")), (3, Some("off"))] {
        let ran = run(stage, overlap);
        let of = |what: &str, lane: u32| ran.calls.get(&(what.to_string(), lane)).copied();
        // Each layer, the embedding and the head; and the vectors, which take no turns.
        let (dense, vectors) = (LAYERS + 2, 1);
        let reduces = ROUNDS * dense + vectors;
        // Layers 0 and 1 are gathered in the first forward pass and in each backward one, 2 and 3
        // in each forward one; the ends in each round.
        let gathers = match stage {
            3 => 2 * (1 + ROUNDS) + 2 * ROUNDS + 2 * ROUNDS + vectors,
            _ => dense + vectors,
        };
        // Behind the last update two leave that no step wants.
        let unwanted = if stage == 3 && overlap.is_none() { 2 } else { 0 };
        // Where nothing travels beside, tokens have the same communicator. In stage 1 most of this
        // model is held by one rank each.
        if overlap.is_none() && stage > 1 {
            assert_eq!(of("reduce", 1), Some(WORD + STEPS * reduces), "{stage}: {:?}", ran.calls);
            let gathers = WORD + STEPS * gathers + unwanted;
            assert_eq!(of("gather", 1), Some(gathers), "{stage}: {:?}", ran.calls);
        }
        for (verb, (bytes, beside)) in &ran.planned {
            let (told, in_lane) = ran.told[verb];
            assert_eq!((told, in_lane), (*bytes, *beside && overlap.is_none()), "{stage} {verb}");
        }
        assert_eq!(ran.planned["allGather"].1, stage > 1, "what takes turns has a lane");
    }
}
