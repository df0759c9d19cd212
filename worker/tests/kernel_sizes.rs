//! What kernels refuse when a device is opened, against what a manifest's judgement knows of it:
//! whatever a person may write is refused by both or by neither.

use moe_worker::engine::model::step_kernels;
use moejob_kernels::Refusal;
use moejob_manifest::Job;
use moejob_manifest::devices::takes_expert_parallel;
use moejob_manifest::problem::Problem;
use moejob_plan::placement::{layout, memory};
use moejob_protocol::kernel_sizes::{QUERY_PADDING, Size, on_processors};
use std::collections::BTreeSet;

/// Values on both sides of each edge. The first ones are taken by everything.
const MICRO: [u32; 6] = [1, 64, 512, 1024, 32_768, 65_536];
const LENGTH: [u32; 5] = [128, 2, 4096, 65_536, 1 << 20];
const DIM: [u32; 5] = [64, 80, 4096, 16_384, 65_536];
const HIDDEN: [u32; 4] = [64, 96, 4096, 1 << 20];
const EXPERTS: [u32; 3] = [64, 512, 513];
const TOP_K: [u32; 4] = [1, 8, 16, 17];
const HEADS: [u32; 3] = [2, 64, 1024];
const RANKS: [u32; 5] = [1, 2, 16, 32, 64];
const SCOPE: [&str; 2] = ["microBatch", "sequence"];
const SLICES: [u32; 3] = [1, 2, 8];

/// The place of one value of each list.
type Choice = [usize; 10];
const COUNTS: Choice = [6, 5, 5, 4, 3, 4, 3, 5, 2, 3];

fn job(of: Choice) -> Option<Job> {
    let [micro, length, dim, hidden, experts, top_k, heads, ranks, scope, slices] = of;
    let ep = RANKS[ranks];
    let text = format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  nodes: \
         {{ profile: custom, custom: {{ devices: {ep}, deviceMemory: 1048576Gi }} }}\n  \
         parallelism: {{ expert: {ep}, expertSlices: {} }}\n  model: {{ vocabSize: 256, \
         hiddenSize: {}, numHiddenLayers: 1, numAttentionHeads: {}, headDim: 64, experts: {{ \
         count: {}, perToken: {}, intermediateSize: {} }}, router: {{ auxLossScope: {} }} }}\n  \
         data: {{ train: {{ text: {{ paths: [a] }} }}, sequenceLength: {} }}\n  training: {{ \
         steps: 9, globalBatchSize: {}, microBatchSize: {} }}\n",
        SLICES[slices],
        DIM[dim],
        HEADS[heads],
        EXPERTS[experts],
        TOP_K[top_k],
        HIDDEN[hidden],
        SCOPE[scope],
        LENGTH[length],
        // A micro-batch for each rank.
        (MICRO[micro] * ep).min(1 << 20),
        MICRO[micro],
    );
    // Too few micro-batches for the ranks, or slices without several ranks: never opened.
    Job::read(text.as_bytes()).ok()
}

/// What kernels say of the job where so many ranks share its experts.
fn refused(job: &Job, ep: u32) -> Vec<Refusal> {
    let kernels = step_kernels(&job.model, &layout(ep, ep), &job.training);
    let attentions = kernels.attentions.iter().filter_map(|desc| desc.check().err());
    attentions.chain(kernels.layers.iter().filter_map(|desc| desc.check().err())).collect()
}

/// The next choice of a walk that never repeats itself: places are drawn, and one of three is the
/// first, which nobody refuses.
fn drawn(seed: u64) -> Choice {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    COUNTS.map(|count| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1 << 40 | 12_345);
        let word = (state >> 33) as usize;
        if word % 3 == 0 { 0 } else { word / 3 % count }
    })
}

/// Does what a problem advises.
fn mend(job: &mut Job, problem: &Problem) {
    let most = problem.allowed.strip_prefix("at most ").and_then(|most| most.parse().ok());
    let most: u32 = most.unwrap_or_else(|| panic!("{problem}"));
    match &problem.path[..] {
        "spec.training.microBatchSize" => job.training.micro_batch_size = most,
        "spec.data.sequenceLength" => {
            job.training.sequence_length = most;
            job.training.micro_batch_size = 1;
        }
        "spec.parallelism.expert" => job.expert_parallel = Some(most),
        other => panic!("{other}: {problem}"),
    }
}

#[test]
fn what_kernels_refuse_is_known_before_a_device_is_opened() {
    let rounds = std::env::var("MOEJOB_TRIALS").ok().and_then(|many| many.parse().ok());
    let (mut seen, mut opened) = (BTreeSet::new(), 0);
    for seed in 0..rounds.unwrap_or(300_u64) {
        let Some(job) = job(drawn(seed)) else { continue };
        let ep = job.expert_parallel.unwrap_or(1);
        let (known, found) = (job.unsupported(), refused(&job, ep));
        // Whatever is asked for, its memory can be counted.
        let counted = memory(&job, &layout(ep, ep), 0);
        assert!(counted.balanced <= counted.committed && counted.committed <= counted.worst);
        let told = || format!("seed {seed}: {known:?} and {found:?}");
        // More experts than a rank needs, and slices on one rank, are no matter of kernels.
        let of_sizes = known.iter().filter(|problem| problem.path != "spec.parallelism.expert");
        assert!(found.is_empty() || !known.is_empty(), "{}", told());
        assert!(!found.is_empty() || of_sizes.count() == 0, "{}", told());
        assert!(known.is_empty() || known.iter().any(|of| !of.allowed.is_empty()), "{}", told());
        if known.is_empty() {
            assert!(takes_expert_parallel(&job, ep), "{}", told());
            opened += 1;
        }
        for refusal in found {
            if let Refusal::Size(of) = refusal {
                seen.insert(of.size);
            }
        }
    }
    // Each size was refused that is ever the first to be. So many tokens, or choices, have too many
    // elements; and no manifest has so many rows of weights.
    for size in [
        Size::Experts,
        Size::TopK,
        Size::Segments,
        Size::Dim,
        Size::Hidden,
        Size::Sequences,
        Size::Inputs,
        Size::Statistics,
    ] {
        assert!(seen.contains(&size), "{size:?} in none of {seen:?}");
    }
    assert!(opened > 20, "{opened} jobs that open");
}

#[test]
fn what_is_advised_is_taken() {
    let mut mended = BTreeSet::new();
    for (micro, length, dim, heads, ranks) in [
        // 2^32 elements, and one micro-batch fewer.
        (64, 65_536, 4096, 2, 1),
        (64, 4096, 16_384, 2, 2),
        // 65,536 sequences.
        (65_536, 2, 64, 2, 1),
        (1, 65_536, 4096, 2, 16),
        (1, 1 << 20, 4096, 2, 1),
        (1, 1 << 20, 64, 64, 64),
        (32_768, 2, 64, 1024, 1),
    ] {
        let place = |all: &[u32], of: u32| {
            all.iter().position(|value| *value == of).expect("one of the list")
        };
        let mut job = job([
            place(&MICRO, micro),
            place(&LENGTH, length),
            place(&DIM, dim),
            0,
            0,
            0,
            place(&HEADS, heads),
            place(&RANKS, ranks),
            0,
            0,
        ])
        .expect("a manifest");
        let problem = job.unsupported().into_iter().next();
        let problem = problem.unwrap_or_else(|| panic!("{micro} {length} {dim} {heads} {ranks}"));
        mended.insert(problem.path.clone());
        mend(&mut job, &problem);
        assert_eq!(job.unsupported(), [], "{problem}");
        assert!(refused(&job, job.expert_parallel.unwrap_or(1)).is_empty(), "{problem}");
    }
    assert_eq!(mended.len(), 3, "{mended:?}");
}

/// A kernel counts P x T x D in 32 bits: an expert parallelism that makes it more is not chosen.
#[test]
fn a_plan_chooses_no_expert_parallelism_that_kernels_refuse() {
    let mut job = job([0, 3, 2, 0, 0, 0, 0, 4, 0, 0]).expect("a manifest");
    job.expert_parallel = None;
    // 65,536 tokens of 4,096 elements: 16 ranks make 2^32.
    assert!(takes_expert_parallel(&job, 8) && !takes_expert_parallel(&job, 16));
    assert_eq!(job.unsupported(), []);
    let (sizes, skipped) = moejob_plan::placement::sizes(&job);
    let ep = sizes.first().map(|size| size.layout.mesh.ep);
    assert!(ep.is_some_and(|ep| ep <= 8), "{ep:?}, {skipped:?}");
    job.expert_parallel = Some(16);
    let problems = job.unsupported();
    let [problem] = &problems[..] else { panic!("{problems:?}") };
    assert_eq!(problem.path, "spec.parallelism.expert");
    assert_eq!(problem.allowed, "at most 15");
}

#[test]
fn processors_count_choices_in_32_bits() {
    let text = |micro: u32| {
        format!(
            "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  \
             nodes: {{ profile: cpu }}\n  model: {{ preset: tiny }}\n  data: {{ train: {{ \
             text: {{ paths: [a] }} }}, sequenceLength: 1048576 }}\n  training: {{ steps: 9, \
             globalBatchSize: 65536, microBatchSize: {micro} }}\n"
        )
    };
    let job = |micro| Job::read(text(micro).as_bytes()).expect("a manifest");
    assert_eq!(job(1024).unsupported(), []);
    let problems = job(2048).unsupported();
    let [problem] = &problems[..] else { panic!("{problems:?}") };
    assert_eq!(problem.path, "spec.training.microBatchSize");
    assert_eq!(problem.allowed, "at most 1024");
    let (fits, large) = (job(1024), job(2048));
    let alone = |job: &Job| on_processors(&job.model, &job.training, 1);
    assert!(alone(&fits).is_none() && alone(&large).is_some_and(|of| of.size == Size::Choices));
    assert!(QUERY_PADDING.is_multiple_of(64));
}
