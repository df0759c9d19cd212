//! A step whose gradients are summed in buckets and whose mixture layers are one op each, beside
//! the step by a tree of leaves, whose parts are compared with float64: on this processor always,
//! and on the GPU where there is one.

mod common;
#[path = "common/places.rs"]
mod places;

use common::made::Made;
use moe_worker::data::{Batch, Batches, DataError};
use moe_worker::engine::step::{Engine, StepSummary};
use moe_worker::checkpoint::fence::{Claim, Claiming};
use moe_worker::checkpoint::{Disk, Identity, commit, load, show, write_shard};
use moe_worker::state::rank::RankState;
use moe_worker::state::slots::Memory;
use moe_worker::state::snapshot::{cut_into, cut_into_slot};
use moejob_kernels::{DType, Device, HeadDesc, HeadPlan, IGNORE};
use moejob_protocol::checkpoint::ScaleEntry;
use moejob_protocol::config::{
    GradientDtype, MomentDtype, Offload, Precision, Recompute, TrainingConfig,
};
use moejob_protocol::memory::Shape;
use moejob_protocol::model::{AuxLossScope, ModelConfig, QkNorm, Scoring};
use moejob_protocol::workspace::head_bytes;
use std::sync::atomic::AtomicBool;
use places::{
    Where, apart, distances, engine, engine_shaped, engine_with, has_gpu, model, places, run,
    state, steps,
};

fn training() -> TrainingConfig {
    let mut training = common::training();
    (training.global_batch_size, training.micro_batch_size) = (4, 2);
    training.sequence_length = 64;
    (training.steps, training.adamw.learning_rate) = (20, 2e-3);
    training
}

/// How long two runs must stay alike.
#[derive(Clone, Copy)]
struct Alike {
    /// Steps before any token may choose another expert, by a last bit.
    steps: usize,
    /// How far any loss may be apart once one did.
    then: f64,
}

const ALIKE: Alike = Alike { steps: 5, then: 1e-3 };

fn check(name: &str, model: &ModelConfig, training: &TrainingConfig, expected_alike: Alike) {
    let expected = steps(Where::Processor, model, training);
    let (first, last) = (expected[0].loss, expected[expected.len() - 1].loss);
    assert!(last < first - 0.1, "{name}: nothing is learned: {first} to {last}");
    for on in places() {
        let found = steps(on, model, training);
        assert!(found.iter().all(|step| step.non_finite.is_none()), "{name} {on:?}");
        // Where a token chose another expert, by a last bit, both are right from there on.
        let alike = found.iter().zip(&expected).take_while(|(a, b)| a.loads == b.loads).count();
        let alike = alike.min(20);
        assert!(alike >= expected_alike.steps, "{name} {on:?}: loads differ from step {alike} on");
        let (losses, norms) = distances(&found[..alike], &expected[..alike]);
        let (all, _) = distances(&found, &expected);
        println!("{name} {on:?}: losses {losses:.1e}, norms {norms:.1e} apart, then {all:.1e}");
        assert!(losses < 1e-5 && norms < 1e-3, "{name} {on:?}: {losses:e} {norms:e}");
        assert!(all < expected_alike.then, "{name} {on:?}: {all:e}");
        let (found, expected) = (&found[0], &expected[0]);
        assert_eq!(found.loads, expected.loads, "{name} {on:?}");
        for (found, expected) in
            [(found.aux_loss, expected.aux_loss), (found.z_loss, expected.z_loss)]
        {
            assert!(apart(found, expected) < 1e-5, "{name} {on:?}: {found} for {expected}");
        }
    }
}

#[test]
fn the_same_losses_as_by_the_tree() {
    check("plain", &model(), &training(), ALIKE);
}

#[test]
fn other_models() {
    let mut other = model();
    (other.dense_layers, other.experts.shared) = (vec![0], 1);
    (other.dense_intermediate_size, other.tie_word_embeddings) = (192, false);
    (other.qk_norm, other.attention_bias) = (QkNorm::None, true);
    check("dense, shared, biases", &other, &training(), ALIKE);
    let mut other = model();
    other.qk_norm = QkNorm::Full;
    other.clip_qkv = 0.5;
    check("norm of all heads, clamp", &other, &training(), ALIKE);
    let mut other = model();
    let router = &mut other.router;
    (router.scoring, router.bias, router.bias_update_rate) = (Scoring::Sigmoid, true, 0.01);
    (router.groups, router.topk_groups, router.scale) = (4, 2, 2.5);
    check("sigmoid, corrections, groups", &other, &training(), ALIKE);
    let mut other = model();
    other.router.aux_loss_scope = AuxLossScope::Sequence;
    other.router.aux_loss_coef = 0.1;
    check("the balance of each sequence", &other, &training(), ALIKE);
}

/// Of each micro-batch every third target does not count.
struct Masked {
    made: Made,
    micro_batches: u64,
    batch: Batch,
}

impl Batches for Masked {
    fn micro_batch(&mut self, step: u64, index: u32) -> Result<&Batch, DataError> {
        self.batch = self.made.micro_batch(step, index)?.clone();
        self.batch.targets.iter_mut().step_by(3).for_each(|target| *target = IGNORE);
        self.batch.step_targets = Some(self.batch.counted() * self.micro_batches);
        Ok(&self.batch)
    }
}

#[test]
fn every_device_divides_by_the_targets_that_count() {
    let (model, training) = (model(), training());
    let steps = |on: Where| -> Vec<StepSummary> {
        let device_is_told = |shape: &mut Shape| shape.masked = on != Where::Processor;
        let mut engine = engine_shaped(on, &model, &training, |_| {}, device_is_told);
        let micro_batches = u64::from(training.global_batch_size / training.micro_batch_size);
        let made = Made::new(&model, &training);
        let mut data = Masked { made, micro_batches, batch: Batch::default() };
        (0..4).map(|step| engine.step(step, &mut data).expect("a step")).collect()
    };
    let expected = steps(Where::Processor);
    for on in places() {
        let (losses, norms) = distances(&steps(on), &expected);
        assert!(losses < 1e-5 && norms < 1e-3, "{on:?}: {losses:e} {norms:e}");
    }
}

/// The head and the embedding may be computed by different ranks, so what is added up is the whole
/// gradient of each: that of a model whose head is a table of its own with the embedding's weights.
#[test]
fn a_tied_tables_gradient_is_the_sum_of_two() {
    let mut training = training();
    training.global_batch_size = training.micro_batch_size;
    for on in places() {
        let first_step = |tied: bool| {
            let mut model = model();
            model.tie_word_embeddings = tied;
            let mut engine = engine(on, &model, &training);
            let tables = if tied { vec![0] } else { vec![0, engine.model.params.len() - 1] };
            let weights = tables.iter().map(|at| engine.model.weight(*at).expect("whole"));
            if let [embedding, head] = weights.collect::<Vec<_>>()[..] {
                engine.model.device.copy(embedding, head);
            }
            engine.step(0, &mut Made::new(&model, &training)).expect("a step");
            let gradient = |at: &usize| -> Vec<f64> {
                engine.model.device.read_vec(engine.model.bucket_gradient(*at).expect("held"))
            };
            tables.iter().map(gradient).collect::<Vec<_>>()
        };
        let [both, apart] = [true, false].map(first_step);
        let [embedding, head] = [&apart[0], &apart[1]];
        let sums = head.iter().zip(embedding).map(|(head, embedding)| head + embedding);
        assert_eq!(sums.zip(&both[0]).position(|(sum, both)| sum != *both), None, "{on:?}");
        let used = head.iter().zip(embedding).filter(|(a, b)| **a != 0.0 && **b != 0.0);
        assert!(used.count() > 1000, "{on:?}: the embedding is used");
    }
}

#[test]
fn sixteen_bits_stay_near() {
    if !has_gpu() {
        return;
    }
    let expected = steps(Where::Processor, &model(), &training());
    for (precision, most) in
        [(Precision::Tf32, 2e-3), (Precision::Bf16, 2e-2), (Precision::Fp16, 4e-3)]
    {
        for (moments, gradients) in [
            (MomentDtype::Fp32, GradientDtype::Fp32),
            (MomentDtype::Fp32, GradientDtype::Bf16),
            (MomentDtype::Bf16, GradientDtype::Auto),
        ] {
            let mut training = training();
            training.precision = precision;
            training.compute.moment_dtype = moments;
            training.compute.gradient_dtype = gradients;
            let found = steps(Where::Gpu, &model(), &training);
            let (losses, norms) = distances(&found, &expected);
            println!("{precision:?} {moments:?} {gradients:?}: {losses:.1e} {norms:.1e} apart");
            assert!(losses < most, "{precision:?} {moments:?} {gradients:?}: {losses:e}");
            let again = steps(Where::Gpu, &model(), &training);
            assert_eq!(again, found, "{precision:?}: two runs differ");
        }
    }
}

#[test]
fn what_is_not_finite_changes_nothing() {
    for on in places() {
        let (model, training) = (model(), training());
        let mut broken = engine(on, &model, &training);
        let mut data = Made::new(&model, &training);
        broken.spoil(1);
        let found: Vec<StepSummary> = [0, 1, 1, 2]
            .map(|step| broken.step(step, &mut data).unwrap_or_else(|error| panic!("{error}")))
            .to_vec();
        assert!(found[1].non_finite.is_some(), "{on:?}: {:?}", found[1]);
        let expected = &steps(on, &model, &training)[..3];
        let whole = [found[0].clone(), found[2].clone(), found[3].clone()];
        assert_eq!(&whole, expected, "{on:?}: a skipped step left something behind");
    }
}

/// A power of two before backward and its reciprocal behind it change no bit of what fp32 holds.
#[test]
fn a_scaled_loss_trains_the_same() {
    let (mut model, mut training) = (model(), training());
    (model.router.aux_loss_coef, model.router.z_loss_coef) = (0.5, 0.1);
    training.max_grad_norm = 0.5;
    let mut plain = engine(Where::Processor, &model, &training);
    let expected = run(&mut plain, &training);
    let mut scaled =
        engine_with(Where::Processor, &model, &training, |types| types.scaled = true);
    let mut found = run(&mut scaled, &training);
    assert!(found.iter().all(|step| step.loss_scale == Some(65536.0)));
    found.iter_mut().for_each(|step| step.loss_scale = None);
    assert_eq!(found, expected);
    assert!(state(&mut scaled) == state(&mut plain), "weights or moments differ");
}

/// An overflow halves the scale until there is none, and the step counts once.
#[test]
fn an_overflow_halves_the_scale_and_does_the_step_again() {
    for on in places() {
        let (model, mut training) = (model(), training());
        if on == Where::Gpu {
            training.precision = Precision::Fp16;
        }
        let made = || engine_with(on, &model, &training, |types| types.scaled = true);
        let mut data = Made::new(&model, &training);
        let mut step = |engine: &mut Engine, step| {
            engine.step(step, &mut data).unwrap_or_else(|error| panic!("{error}"))
        };
        let mut broken = made();
        (0..3).for_each(|_| broken.spoil(1));
        let first = step(&mut broken, 0);
        let found = [first, step(&mut broken, 1), step(&mut broken, 2)];
        let scales = found.each_ref().map(|step| step.loss_scale);
        assert_eq!(scales, [Some(65536.0), Some(8192.0), Some(8192.0)], "{on:?}");
        assert!(found.iter().all(|step| step.non_finite.is_none()), "{on:?}");
        assert_eq!(broken.model.loss_scale(), Some(ScaleEntry { scale: 8192.0, good_steps: 2 }));
        let mut whole = made();
        let begun = step(&mut whole, 0);
        whole.model.set_loss_scale(Some(ScaleEntry { scale: 8192.0, good_steps: 0 }));
        let expected = [begun, step(&mut whole, 1), step(&mut whole, 2)];
        assert_eq!(found, expected, "{on:?}");
        assert!(state(&mut broken) == state(&mut whole), "{on:?}: weights or moments differ");
        // No scale helps against what is no number under any.
        (0..40).for_each(|_| broken.spoil(3));
        let ended = step(&mut broken, 3);
        assert!(ended.non_finite.is_some() && ended.loss_scale == Some(1.0), "{on:?}: {ended:?}");
    }
}

/// The same with a step begun behind each: both are done again in their order.
#[test]
fn steps_that_are_begun_ahead_are_done_again_with_the_one_before() {
    for on in places() {
        let (model, mut training) = (model(), training());
        if on == Where::Gpu {
            training.precision = Precision::Fp16;
        }
        training.steps = 8;
        let run = |ahead: bool| {
            let mut engine = engine_with(on, &model, &training, |types| types.scaled = true);
            // A scale that falls, a number that is not finite once more than any scale explains,
            // and a step behind a skipped one that is broken itself.
            [1, 1, 1, 4, 5].into_iter().for_each(|step| engine.spoil(step));
            let mut data = Made::new(&model, &training);
            let mut summaries = Vec::new();
            let mut next = 0;
            for step in 0..training.steps {
                while next < training.steps && next <= step + u64::from(ahead) {
                    engine.begin(next, &mut data).unwrap_or_else(|error| panic!("{error}"));
                    next += 1;
                }
                summaries.push(engine.end(&mut data).unwrap_or_else(|error| panic!("{error}")));
            }
            assert!(engine.is_settled());
            (summaries, engine.model.loss_scale(), state(&mut engine))
        };
        let (expected, found) = (run(false), run(true));
        // Step 5 was broken in a run that did not count, so its scale need not fall.
        let scales = |run: &[StepSummary]| -> Vec<Option<f64>> {
            run.iter().map(|step| step.loss_scale).collect()
        };
        let fell = |n: i32| Some(65536.0 / f64::from(1 << n));
        let [a, b, c, d] = [0, 3, 4, 5].map(fell);
        assert_eq!(scales(&expected.0), [a, b, b, b, c, d, d, d], "{on:?}");
        assert_eq!(scales(&found.0), [a, b, b, b, c, c, c, c], "{on:?}");
        assert!(found.0.iter().all(|step| step.non_finite.is_none()), "{on:?}");
        if on == Where::Processor {
            // In fp32 a scale changes no bit.
            let losses = |run: &[StepSummary]| -> Vec<u64> {
                run.iter().map(|step| step.loss.to_bits()).collect()
            };
            assert_eq!(losses(&found.0), losses(&expected.0));
            assert!(found.2 == expected.2, "weights or moments differ");
        }
    }
}

/// On one device: as many steps at once as a job begins give the bits of one after the other.
#[test]
fn a_device_that_is_given_two_steps_has_the_bits_of_one_after_the_other() {
    for on in places() {
        let (model, training) = (model(), training());
        let mut alone = engine(on, &model, &training);
        let expected = run(&mut alone, &training);
        let mut engine = engine(on, &model, &training);
        let mut data = Made::new(&model, &training);
        engine.begin(0, &mut data).unwrap_or_else(|error| panic!("{error}"));
        let found: Vec<StepSummary> = (1..=training.steps)
            .map(|next| {
                if next < training.steps {
                    engine.begin(next, &mut data).unwrap_or_else(|error| panic!("{error}"));
                }
                engine.end(&mut data).unwrap_or_else(|error| panic!("{error}"))
            })
            .collect();
        assert_eq!(found, expected, "{on:?}");
        assert!(state(&mut engine) == state(&mut alone), "{on:?}: weights or moments differ");
    }
}

/// Gradients of a loss times 2^24 are beyond fp16: the scale falls by itself.
#[test]
fn a_scale_that_is_too_large_falls() {
    if !has_gpu() {
        return;
    }
    let (model, mut training) = (model(), training());
    (training.precision, training.steps) = (Precision::Fp16, 4);
    training.micro_batch_size = training.global_batch_size;
    let mut found = engine(Where::Gpu, &model, &training);
    found.model.set_loss_scale(Some(ScaleEntry { scale: 2_f64.powi(24), good_steps: 1999 }));
    let steps = run(&mut found, &training);
    let scale = steps[0].loss_scale.expect("fp16 has a scale");
    println!("2^24 fell to {scale}");
    assert!(scale < 2_f64.powi(24) && steps.iter().all(|step| step.non_finite.is_none()));
    let mut whole = engine(Where::Gpu, &model, &training);
    whole.model.set_loss_scale(Some(ScaleEntry { scale, good_steps: 0 }));
    assert_eq!(run(&mut whole, &training), steps);
    assert!(state(&mut whole) == state(&mut found), "weights or moments differ");
}

/// A checkpoint has the scale and its counter, and whoever loads it goes on with both.
#[test]
fn a_checkpoint_keeps_the_scale() {
    let (model, training) = (model(), training());
    let made = |scaled| {
        engine_with(Where::Processor, &model, &training, |types| types.scaled = scaled)
    };
    let (mut from, mut into) = (made(true), made(true));
    let kept = ScaleEntry { scale: 4096.0, good_steps: 17 };
    from.model.set_loss_scale(Some(kept));
    let folder = tempfile::tempdir().expect("a folder");
    let identity = Identity {
        job_uid: "job".to_string(),
        job_name: "job".to_string(),
        attempt: 1,
        rank: 0,
        model: model.clone(),
        params: from.model.params.clone(),
        layout: from.model.layout.clone(),
        spec_hash: String::new(),
        training_hash: String::new(),
        data_fingerprint: String::new(),
        seed: 1,
        tokens_per_step: 1,
        float_bytes: 4,
        location: folder.path().to_path_buf(),
        keep: 1,
    };
    let disk = Disk::real();
    let len = state(&mut from).len();
    let filling = Memory::default().fill(1, 5, 0, len).expect("memory");
    let mut filling = filling.expect("a slot");
    cut_into(&mut from.model, filling.bytes_mut()).expect("the device works");
    filling.set_loss_scale(Some(kept));
    let slot = filling.complete();
    let claim = Claim {
        attempt: 1,
        resume_step: 0,
        job_uid: "job".to_string(),
        time: String::new(),
    };
    Claiming::new(claim).go(&disk, folder.path()).expect("storage");
    write_shard(&disk, &identity, 5, &slot).expect("storage");
    commit(&disk, &identity, 5, || true).expect("storage");
    let directory = folder.path().join("step-00000005");
    let manifest = show(&disk, &directory).expect("a checkpoint");
    assert_eq!(manifest.loss_scale, Some(kept));
    load(&disk, &directory, &manifest, &mut into.model).expect("a whole checkpoint");
    assert_eq!(into.model.loss_scale(), Some(kept));
    // One of another precision has none, and one without a scale begins with the first.
    let mut other = made(false);
    load(&disk, &directory, &manifest, &mut other.model).expect("a whole checkpoint");
    assert_eq!(other.model.loss_scale(), None);
    into.model.set_loss_scale(None);
    assert_eq!(into.model.loss_scale(), Some(ScaleEntry { scale: 65536.0, good_steps: 0 }));
}

/// Of a large slot few pages are mapped at once, and what a GPU gives comes in batches.
#[test]
fn a_slot_that_is_filled_by_windows_has_the_same_bytes() {
    let (model, training) = (model(), training());
    for on in places() {
        let mut training = training.clone();
        if on == Where::Gpu {
            training.precision = Precision::Bf16;
        }
        let mut engine = engine(on, &model, &training);
        engine.step(0, &mut Made::new(&model, &training)).expect("a step");
        let expected = state(&mut engine);
        for window in [1, 5000, 1 << 17, expected.len()] {
            let memory = Memory::of_engine(|_| ());
            memory.rest_from(window);
            let slot = memory.fill(1, 1, 0, expected.len()).expect("memory");
            let mut slot = slot.expect("a slot");
            cut_into_slot(&mut engine.model, &mut slot).expect("a device");
            assert!(slot.complete()[..] == expected[..], "{on:?}, windows of {window} bytes");
        }
    }
}

/// A shard leaves beside a step, into memory that the driver has pinned: it is that of before.
#[test]
fn what_leaves_beside_a_step_is_the_state_before_it() {
    let (model, training) = (model(), training());
    let offloads = [Offload::None, Offload::Host];
    for (on, offload) in places().into_iter().flat_map(|on| offloads.map(|of| (on, of))) {
        let what = format!("{on:?} {offload:?}");
        let mut training = training.clone();
        training.compute.offload = offload;
        if on == Where::Gpu {
            training.precision = Precision::Bf16;
        }
        let mut other = engine(on, &model, &training);
        let mut batches = Made::new(&model, &training);
        let memory = Memory::default();
        let len = state(&mut other).len();
        match other.model.device.as_cuda().map(|cuda| cuda.gpu().clone()) {
            Some(gpu) => memory.prepare_pinned(&gpu, 0, len, &AtomicBool::new(false)),
            None => other.model.cut_late(),
        }
        for step in 0..3 {
            let before = state(&mut other);
            let slot = memory.fill(1, step, 0, len).expect("memory").expect("a slot");
            assert!(other.model.can_leave(&slot), "{on:?}: it is pinned");
            other.model.begin_cut(slot);
            other.step(step, &mut batches).expect("a step");
            let (slot, waited) = other.model.end_cut().expect("a device").expect("on its way");
            let slot = slot.complete();
            println!("{what}, step {step}: {len} bytes, the update waited for {waited} s");
            assert!(slot[..] == before[..], "{what}, step {step}");
            assert!(state(&mut other) != before, "{what}, step {step}: it was updated");
            drop(slot);
            memory.confirm(1, step);
            memory.make_room(1, step + 1);
        }
    }
}

/// What backward computes again has the bits of what forward had.
#[test]
fn recomputed_activations_change_no_bit() {
    for on in places() {
        let (mut model, mut training) = (model(), training());
        model.num_hidden_layers = 5;
        training.steps = 4;
        if on == Where::Gpu {
            training.precision = Precision::Bf16;
        }
        let mut dense = model.clone();
        (dense.dense_layers, dense.experts.shared) = (vec![0, 4], 1);
        dense.dense_intermediate_size = 192;
        for model in [model, dense] {
            let mut kept = engine(on, &model, &training);
            let expected = run(&mut kept, &training);
            for recompute in
                [Recompute::Selective, Recompute::Experts, Recompute::Full, Recompute::Every(2)]
            {
                let training = TrainingConfig { recompute, ..training.clone() };
                let mut again = engine(on, &model, &training);
                assert_eq!(run(&mut again, &training), expected, "{on:?} {recompute:?}");
                let same = state(&mut again) == state(&mut kept);
                assert!(same, "{on:?} {recompute:?}: weights or moments differ");
            }
        }
    }
}

/// The plan reserves for a head what the kernels lay out.
#[test]
fn a_planned_head_is_as_large_as_its_scratch() {
    let cpu = Device::cpu(1, 0).expect("a thread");
    for (tokens, vocab) in [(100, 50257), (256, 256), (16384, 50304), (4096, 151_936), (3, 7)] {
        for (element, on_gpu) in [(DType::F32, false), (DType::F64, false), (DType::Bf16, true)] {
            let desc = HeadDesc { element, tokens, dim: 64, vocab };
            let plan = if on_gpu { HeadPlan::cuda(&desc) } else { cpu.head_plan(&desc) };
            let bytes = element.size() as u64;
            let planned = head_bytes(tokens as u64, vocab as u64, bytes, on_gpu);
            assert_eq!(planned, plan.scratch_bytes as u64, "{desc:?}");
        }
    }
}
