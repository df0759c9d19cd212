//! Holders, owners and buckets of whole tables.

use moejob_protocol::buckets::{self, BucketKind, Buckets};
use moejob_protocol::layout::{BLOCK, Layout, Placement};
use moejob_protocol::config::TrainingConfig;
use moejob_protocol::memory::Shape;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{Activation, ExpertsConfig, ModelConfig, QkNorm, RouterConfig};
use moejob_protocol::owners::{Holders, Owners};

/// Three layers, the first dense; D 48, so that matrices end within blocks.
fn model(tied: bool) -> ModelConfig {
    ModelConfig {
        vocab_size: 300,
        hidden_size: 48,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 12,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        tie_word_embeddings: tied,
        qk_norm: QkNorm::PerHead,
        clip_qkv: 0.0,
        attention_bias: false,
        initializer_range: 0.02,
        dense_layers: vec![0],
        dense_intermediate_size: 100,
        experts: ExpertsConfig {
            count: 4,
            per_token: 2,
            intermediate_size: 90,
            activation: Activation::Silu,
            shared: 1,
            routed_headroom: 1.5,
            slices: 1,
        },
        router: RouterConfig::default(),
    }
}

fn layouts() -> Vec<Layout> {
    let even = |dp, ep| Layout::contiguous(Mesh::data_parallel(dp, ep));
    let ordered = |dp, ep| {
        let placement = Placement::Ordered(vec![vec![2, 0, 3, 1], vec![3, 1, 2, 0]]);
        Layout { placement, ..even(dp, ep) }
    };
    vec![even(1, 1), even(4, 2), even(6, 3), even(8, 4), ordered(4, 2), ordered(6, 3)]
}

#[test]
fn tables_say_what_layouts_say() {
    let model = model(true);
    for layout in layouts() {
        let holders = Holders::new(&model, &layout);
        for param in &model.params() {
            assert_eq!(holders.of(param), layout.holders(&model, param), "{}", param.name);
            for rank in 0..layout.mesh.world() {
                assert_eq!(holders.holds(param, rank), holders.of(param).contains(&rank));
            }
        }
    }
}

/// The sizes of buckets that a rank's memory is counted by are those of the buckets.
#[test]
fn counted_buckets_are_the_buckets() {
    let training: TrainingConfig = serde_json::from_value(serde_json::json!({
        "steps": 1, "globalBatchSize": 64, "microBatchSize": 1, "sequenceLength": 8,
        "precision": "fp32", "maxGradNorm": 1.0, "seed": 0,
        "adamw": {
            "learningRate": 1e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weightDecay": 0.1,
        },
        "schedule": { "constant": { "warmup_steps": 0 } },
    }))
    .expect("a training");
    let layouts: Vec<Layout> = layouts();
    for (model, layout) in layouts.iter().map(|layout| (model(false), layout)) {
        let buckets = Buckets::new(&model, &model.params(), &Holders::new(&model, layout));
        for rank in 0..layout.mesh.world() {
            let shape = Shape::new(&model, layout, rank, &training);
            let counted = shape.buckets.iter().map(|of| (of.len, of.owned, of.vectors));
            let held = buckets.held(rank);
            let held = held.map(|of| (of.len, of.chunk_len(), of.kind.is_of_vectors()));
            assert!(counted.eq(held), "{layout:?} {rank}");
        }
    }
}

/// The owner of an element is that of its place in its bucket's chunks.
#[test]
fn owners_of_buckets_are_those_of_their_chunks() {
    let model = model(true);
    for layout in layouts() {
        let (params, owners) = (model.params(), Owners::new(&model, &layout));
        let buckets = Buckets::new(&model, &params, owners.holders());
        for (index, param) in params.iter().enumerate() {
            let bucket = &buckets.buckets[buckets.of(index)];
            let mut all = 0;
            for (rank, run) in owners.runs(index, param) {
                let owned = bucket.owned(rank).find(|owned| owned.index == index);
                assert_eq!(owned.map(|owned| owned.elements), Some(run.clone()), "{}", param.name);
                assert_eq!(run, owners.of(index, param, rank));
                all += run.end - run.start;
            }
            assert_eq!(all, param.numel(), "{}", param.name);
            assert!(owners.of(index, param, u32::MAX).is_empty());
        }
    }
}

#[test]
fn every_element_has_one_owner_among_its_holders() {
    for (model, layout) in [true, false].into_iter().flat_map(|tied| {
        layouts().into_iter().map(move |layout| (model(tied), layout))
    }) {
        let params = model.params();
        let holders = Holders::new(&model, &layout);
        let buckets = Buckets::new(&model, &params, &holders);
        let counted = buckets::sizes(&model, &holders);
        let counted = counted.iter().map(|of| (of.kind, of.holders, of.len, of.chunk_len()));
        let all = buckets.buckets.iter();
        assert!(counted.eq(all.map(|of| (of.kind, &of.holders[..], of.len, of.chunk_len()))));
        let mut covered = vec![0; params.len()];
        for (at, bucket) in buckets.buckets.iter().enumerate() {
            let count = bucket.holders.len() as u64;
            assert!(bucket.len.is_multiple_of(count * BLOCK) && bucket.len > 0);
            let used: u64 = bucket.spans.iter().map(|span| span.len.next_multiple_of(BLOCK)).sum();
            assert!(bucket.len - used < count * BLOCK, "no more padding than needed");
            for span in &bucket.spans {
                assert!(span.start.is_multiple_of(BLOCK));
                assert_eq!(buckets.of(span.index), at);
                assert_eq!(bucket.span(span.index), Some(*span));
                assert_eq!(holders.of(&params[span.index]), &bucket.holders[..]);
            }
            let mut next = vec![0; params.len()];
            for (position, rank) in bucket.holders.iter().enumerate() {
                let chunk = bucket.chunk(*rank).expect("a holder");
                assert_eq!(chunk.start, position as u64 * bucket.chunk_len());
                for run in bucket.owned(*rank) {
                    let span = bucket.span(run.index).expect("in the bucket");
                    assert_eq!(span.start + run.elements.start, chunk.start + run.start);
                    assert_eq!(run.elements.start, next[run.index], "in order, without a gap");
                    assert!(run.elements.start.is_multiple_of(BLOCK), "blocks are never cut");
                    next[run.index] = run.elements.end;
                    covered[run.index] += run.elements.end - run.elements.start;
                }
            }
            assert_eq!(bucket.chunk(u32::MAX), None);
            assert_eq!(bucket.owned(u32::MAX).count(), 0);
        }
        let sizes: Vec<u64> = params.iter().map(|param| param.numel()).collect();
        assert_eq!(covered, sizes);
    }
}

#[test]
fn buckets_come_in_the_order_of_the_table() {
    let kinds = |tied, layout: &Layout| {
        let model = model(tied);
        let params = model.params();
        let buckets = Buckets::new(&model, &params, &Holders::new(&model, layout));
        let of = |bucket: &moejob_protocol::buckets::Bucket| (bucket.kind, bucket.spans.len());
        buckets.buckets.iter().map(of).collect::<Vec<_>>()
    };
    use BucketKind::{Dense, Embedding, Experts, Head, Vectors};
    // q, k, v, o; then 3 matrices, of the dense part or the shared expert. Each layer has two
    // norms, two norms of heads and perhaps a router; the last norm is nobody's.
    let one = vec![
        (Embedding, 1),
        (Vectors, 15),
        (Dense { layer: 0 }, 7),
        (Dense { layer: 1 }, 7),
        (Experts { layer: 1 }, 12),
        (Dense { layer: 2 }, 7),
        (Experts { layer: 2 }, 12),
    ];
    assert_eq!(kinds(true, &layouts()[0]), one);
    assert_eq!(kinds(false, &layouts()[0]).last(), Some(&(Head, 1)), "a head of its own");
    let sets = kinds(true, &layouts()[1]);
    let experts = sets.iter().filter(|(kind, _)| *kind == Experts { layer: 1 });
    assert_eq!(experts.map(|(_, spans)| *spans).collect::<Vec<_>>(), [6, 6], "by holder set");
}

#[test]
fn experts_lie_at_one_stride() {
    for layout in layouts() {
        let model = model(true);
        let params = model.params();
        let buckets = Buckets::new(&model, &params, &Holders::new(&model, &layout));
        for bucket in &buckets.buckets {
            let Some(stride) = bucket.expert_stride(3) else {
                assert!(!matches!(bucket.kind, BucketKind::Experts { .. }));
                continue;
            };
            for (at, span) in bucket.spans.iter().enumerate() {
                let first = bucket.spans[at % 3].start;
                assert_eq!(span.start, first + (at / 3) as u64 * stride);
            }
        }
    }
}

/// Checkpoints of GPUs said once what was divided.
#[test]
fn layouts_of_before_are_read() {
    let layout = &layouts()[1];
    let mut written = serde_json::to_value(layout).expect("JSON");
    for division in ["buckets", "tensors"] {
        written["division"] = division.into();
        let read: Layout = serde_json::from_value(written.clone()).expect("a layout");
        assert_eq!(read, *layout);
    }
    written["more"] = 1.into();
    assert!(serde_json::from_value::<Layout>(written).is_err(), "nothing else is ignored");
}
