//! What a rank of GPUs is expected to send in a step, beside sums that were made by hand.

use moejob_manifest::Job;
use moejob_offline::step_time;
use moejob_plan::placement::layout;
use moejob_plan::traffic::{Expected, expected, lines};
use moejob_protocol::communication::Verb;
use moejob_protocol::layout::Layout;

/// OLMoE on nodes of eight GPUs; `more` of training.
fn job(profile: &str, more: &str) -> Job {
    let text = format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  nodes: \
         {{ {profile} }}\n  model: {{ preset: olmoe-1b-7b }}\n  data: {{ train: {{ text: {{ paths: \
         [a] }} }}, sequenceLength: 4096 }}\n  training: {{ steps: 10, globalBatchSize: 64, \
         microBatchSize: 4{more} }}\n"
    );
    Job::read(text.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"))
}

const NODE: &str = "profile: nd-h200-v5";
const LAYERS: u64 = 16;
/// Of a micro-batch.
const TOKENS: u64 = 4 * 4096;
/// Bytes of a token in bf16, and of a word for each of its choices.
const ROW: u64 = 2048 * 2;
const WORDS: u64 = 8 * 4;

fn of(all: &[Expected], verb: Verb) -> Expected {
    *all.iter().find(|of| of.verb == verb).unwrap_or_else(|| panic!("{verb:?} in {all:?}"))
}

fn near(found: Option<f64>, by_hand: f64) {
    let found = found.expect("the profile says links");
    assert!((found / by_hand - 1.0).abs() < 1e-6, "{found} s, by hand {by_hand}");
}

/// Sixteen micro-batches on eight GPUs that share the experts: two rounds.
#[test]
fn tokens_of_a_node_travel_by_rings() {
    let job = job(NODE, "");
    let all = expected(&job, &layout(8, 8));
    let chunks = 2 * LAYERS * 7 * TOKENS;
    let dispatch = of(&all, Verb::Dispatch);
    assert_eq!(dispatch.bytes, chunks * (ROW + 2 * WORDS + ROW));
    // Two calls for each layer and round, by the ring's second protocol.
    let seconds = |bytes: u64| 4.0 * LAYERS as f64 * 16.6e-6 + bytes as f64 / 244e9;
    near(dispatch.seconds, seconds(dispatch.bytes));
    let combine = of(&all, Verb::Combine);
    assert_eq!(combine.bytes, chunks * (ROW + ROW + WORDS));
    near(combine.seconds, seconds(combine.bytes));
    assert!(all.iter().all(|of| of.verb != Verb::SendRecv), "one node has no rails: {all:?}");
    // What all hold is less than the experts that one does not share.
    assert!(!of(&all, Verb::ReduceScatter).beside, "{all:?}");
}

/// Of layers whose memory others have taken a forward pass comes once more.
#[test]
fn what_is_computed_again_travels_again() {
    let bytes = |more: &str| {
        let job = job(NODE, more);
        let all = expected(&job, &layout(8, 8));
        [Verb::Dispatch, Verb::Combine].map(|verb| of(&all, verb).bytes)
    };
    let (plain, again) = (bytes(""), bytes(", recompute: full"));
    // All but the last layer.
    let chunks = 2 * (LAYERS - 1) * 7 * TOKENS;
    assert_eq!(again[0] - plain[0], chunks * (ROW + 2 * WORDS));
    assert_eq!(again[1] - plain[1], chunks * ROW);
    assert_eq!(bytes(", recompute: experts"), plain);
}

/// Where each GPU has all experts, all of the model is summed, beside backward.
#[test]
fn buckets_travel_once_a_step() {
    let two = job(NODE, "");
    let all = expected(&two, &layout(8, 1));
    let verbs: Vec<Verb> = all.iter().map(|of| of.verb).collect();
    assert_eq!(verbs, [Verb::ReduceScatter, Verb::AllGather]);
    assert!(all.iter().all(|of| of.beside), "{all:?}");
    // Gradients of two micro-batches are fp32, weights bf16; vectors and what pads are some more.
    let numel = two.model.numel() as f64;
    for (of, bytes) in all.iter().zip([4.0, 2.0]) {
        let least = 7.0 / 8.0 * numel * bytes;
        let ratio = of.bytes as f64 / least;
        assert!((1.0..1.001).contains(&ratio), "{of:?}, at least {least}");
        assert!(of.seconds.expect("links") >= of.bytes as f64 / 244e9, "{of:?}");
    }
    // With one each gradients are bf16.
    let mut one = two.clone();
    one.training.global_batch_size = 32;
    let reduced = |job: &Job| of(&expected(job, &layout(8, 1)), Verb::ReduceScatter).bytes;
    let ratio = reduced(&two) as f64 / reduced(&one) as f64;
    assert!((1.99..2.0).contains(&ratio), "{ratio}");
}

/// A group of two nodes: flat by one ring, or by need, once to the other node. A token misses a
/// node when all its 8 experts are among the 32 of the other one's, and a rank when they are among
/// 60.
#[test]
fn a_token_goes_to_the_other_node_once() {
    let mut job = job("profile: nd-h200-v5, min: 2, max: 2", "");
    job.exchange = Some(moejob_protocol::config::Exchange::Hierarchical);
    let layout = layout(16, 16);
    let found = expected(&job, &layout);
    let rounds = (LAYERS * TOKENS) as f64;
    let missed = |others: u32| -> f64 {
        (0..8).map(|k| f64::from(others - k) / f64::from(64 - k)).product()
    };
    let [node, rank] = [32, 60].map(|others| 1.0 - missed(others));
    assert!((0.99..1.0).contains(&node) && (0.41..0.43).contains(&rank), "{node} {rank}");
    let (row, words) = (ROW as f64, WORDS as f64);
    let is = |verb: Verb, bytes: f64| {
        let found = of(&found, verb).bytes as f64;
        assert!((found - bytes).abs() < 1e-6 * bytes, "{verb:?}: {found}, expected {bytes}");
    };
    // Half of the choices are of the other node, 7 of 8 of a node's of other ranks.
    is(Verb::SendRecv, rounds * (node * (4.0 * row + 2.0 * words) + words / 2.0));
    is(Verb::Dispatch, rounds * 14.0 * rank * (2.0 * row + 2.0 * words));
    is(Verb::Combine, rounds * (14.0 * rank * 2.0 * row + words * 7.0 / 8.0));
    let between = of(&found, Verb::SendRecv);
    let latency = 4.0 * LAYERS as f64 * (8e-6 + 2e-6);
    near(between.seconds, latency + between.bytes as f64 / 46e9);
    job.exchange = Some(moejob_protocol::config::Exchange::Flat);
    let flat = expected(&job, &layout);
    assert!(flat.iter().all(|of| of.verb != Verb::SendRecv), "{flat:?}");
    assert_eq!(of(&flat, Verb::Dispatch).bytes, 15 * LAYERS * TOKENS * (2 * ROW + 2 * WORDS));
}

#[test]
fn nothing_is_said_of_what_nobody_knows() {
    let cpu = job("profile: cpu", "");
    assert!(expected(&cpu, &layout(2, 1)).is_empty(), "processors");
    let gpus = job(NODE, "");
    assert!(expected(&gpus, &layout(1, 1)).is_empty(), "one rank");
    let custom = job("profile: custom, custom: { devices: 8, deviceMemory: 141Gi }", "");
    let all = expected(&custom, &layout(8, 8));
    assert_eq!(all.len(), 4);
    assert!(all.iter().all(|of| of.seconds.is_none() && of.bytes > 0), "{all:?}");
    assert_eq!(lines(&all)[0], "  dispatch       28.2 GiB");
}

/// A step waits for all tokens, and for what of gradients nothing hides.
#[test]
fn exposed_parts_are_those_of_the_estimate() {
    let job = job(NODE, "");
    let time = |layout: &Layout| step_time(&job, layout).expect("the profile says how fast it is");
    for ep in [1, 8] {
        let time = time(&layout(8, ep));
        let exposed: f64 = time.communication.iter().filter_map(|of| of.exposed_seconds).sum();
        let expected = time.tokens_seconds + time.exposed_seconds;
        assert!((exposed - expected).abs() < 1e-9, "{time:?}");
        let all: f64 = time.communication.iter().filter_map(|of| of.seconds).sum();
        assert!((all - time.tokens_seconds - time.gradients_seconds).abs() < 1e-9, "{time:?}");
    }
    let text = lines(&time(&layout(8, 8)).communication);
    assert!(text[0].starts_with("  dispatch ") && text[0].ends_with(" ms exposed"), "{text:?}");
}

/// As fast for thousands of ranks: the leader asks once an attempt.
#[test]
fn a_large_gang_is_counted_at_once() {
    let mut job = job(NODE, "");
    job.training.global_batch_size = 4 * 4096;
    let layout = layout(4096, 8);
    let began = std::time::Instant::now();
    assert_eq!(expected(&job, &layout).len(), 4);
    let took = began.elapsed();
    println!("{took:?}");
    assert!(took < std::time::Duration::from_secs(2), "{took:?}");
}
