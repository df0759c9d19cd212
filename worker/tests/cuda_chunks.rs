//! Expert groups whose tokens travel in chunks, where ranks compute as GPUs do: near one chunk, the
//! same bits every time and by every way of travelling. On processors in every run; on one GPU,
//! whose ranks have what they exchange carried through the host's memory, in a lane of its own. By
//! NCCL: cuda_ranks.rs and cuda_rails.rs on two GPUs.

mod common;
mod travelling;

use common::Job;
use moejob_protocol::config::{OVERLAP_DEGREES, Precision, Recompute, Wire};
use moejob_protocol::memory::{RankMemory, rank_memory};
use moejob_protocol::zero::Zero;
use travelling::{
    Trained, Way, along_rails, gpu, in_chunks, job, returning_each, steps, travelling_as, wide,
};

/// More than one.
const SEVERAL: [u32; 2] = [2, 4];

/// How far the losses of some steps are from those of one chunk, as parts of them. What goes
/// forward is the same in chunks, so the first loss has the same bits; gradients of experts are
/// sums in another order, and the state is not the same.
fn away(found: &[Trained], one: &[Trained], what: &str) -> f64 {
    let mut most = 0.0_f64;
    for (rank, (found, one)) in found.iter().zip(one).enumerate() {
        assert_eq!(found.0[0].loss.to_bits(), one.0[0].loss.to_bits(), "{what}: rank {rank}");
        // Later a token may choose another expert by a last bit.
        for (found, one) in found.0.iter().zip(&one.0).take(3) {
            let apart = |a: f64, b: f64| (a - b).abs() / b.abs();
            most = most.max(apart(found.loss, one.loss));
            most = most.max(apart(found.grad_norm, one.grad_norm));
        }
    }
    let same = found.iter().zip(one).all(|(found, one)| found.1 == one.1);
    assert!(!same, "{what}: all of it was one chunk");
    most
}

/// In several chunks: the same bits by both ways, and near one chunk. On a GPU 2 are enough.
fn check(make: &dyn Fn() -> Job, on_gpu: bool, ways: [Way; 2], most: f64, what: &str) {
    let one = steps(&make(), on_gpu, ways[0]);
    for degree in SEVERAL.into_iter().filter(|degree| !on_gpu || *degree == 2) {
        let (job, what) = (in_chunks(make(), degree), format!("{what}, {degree} chunks"));
        let [found, again] = ways.map(|way| steps(&job, on_gpu, way));
        for (rank, (found, again)) in found.iter().zip(&again).enumerate() {
            assert!(found.0.iter().all(|step| step.loss.is_finite()), "{what}: {:?}", found.0);
            assert_eq!(found.0, again.0, "{what}: rank {rank}, {ways:?}");
            assert!(found.1 == again.1, "{what}: rank {rank}: other state, {ways:?}");
        }
        let away = away(&found, &one, &what);
        println!("{what}: {away:e} from one chunk");
        assert!(away < most, "{what}: {away:e}");
    }
}

/// Five micro-batches: some ranks have one round less than others, the sixth of six has none.
#[test]
fn processors_train_near_one_chunk() {
    for mesh in [(2, 2), (3, 3), (4, 2), (6, 3)] {
        for way in [Way::Host, Way::ByNeed, Way::OneByOne] {
            let what = format!("{mesh:?} {way:?}");
            check(&|| job(mesh, Precision::Fp32), false, [Way::Host, way], 1e-5, &what);
        }
    }
}

/// Of float64 state and gradients are those of one chunk in all places.
#[test]
fn gradients_are_those_of_one_chunk() {
    for mesh in [(2, 2), (6, 3)] {
        let of = |degree| steps(&in_chunks(job(mesh, Precision::Fp64), degree), false, Way::Host);
        let one = of(1);
        for degree in SEVERAL {
            let (found, what) = (of(degree), format!("{mesh:?}, {degree} chunks"));
            let apart = away(&found, &one, &what);
            assert!(apart < 1e-12, "{what}: {apart:e}");
            for (found, one) in found.iter().zip(&one) {
                let floats = |bytes: &[u8]| -> Vec<f64> {
                    bytes.as_chunks::<8>().0.iter().map(|of| f64::from_le_bytes(*of)).collect()
                };
                let (found, one) = (floats(&found.1), floats(&one.1));
                assert_eq!(found.len(), one.len());
                let near = |a: &f64, b: &f64| (a - b).abs() <= 1e-9 * b.abs() + 1e-11;
                let wrong = found.iter().zip(&one).position(|(a, b)| !near(a, b));
                let at = wrong.map(|at| (at, found[at], one[at]));
                assert_eq!(at, None, "{what}: of {} numbers", one.len());
            }
        }
    }
}

/// Several rounds a step, layers that are computed again, dense ones between, shared experts.
#[test]
fn other_models_and_what_is_computed_again() {
    let recomputes = [
        Recompute::None,
        Recompute::Selective,
        Recompute::Experts,
        Recompute::Full,
        Recompute::Every(2),
    ];
    for recompute in recomputes {
        let make = || {
            let mut job = job((4, 2), Precision::Fp32);
            let model = &mut job.config.model;
            (model.num_hidden_layers, model.dense_layers) = (5, vec![1]);
            model.experts.shared = 1;
            let training = &mut job.config.training;
            (training.recompute, training.global_batch_size) = (recompute, 9);
            job
        };
        check(&make, false, [Way::Host, Way::ByNeed], 1e-5, &format!("{recompute:?}"));
    }
}

/// Along rails, in every format, and with a row of each expert back.
#[test]
fn chunks_go_every_way() {
    let ways = [Way::Host, Way::ByNeed];
    for (mesh, ranks) in [((2, 2), 1), ((4, 4), 2), ((6, 6), 3)] {
        let make = || along_rails(wide(mesh, Precision::Fp32), ranks);
        check(&make, false, ways, 1e-5, &format!("rails {mesh:?} on nodes of {ranks}"));
    }
    for wire in [Wire::Auto, Wire::Fp32, Wire::Bf16, Wire::Fp8] {
        // What is rounded on its way rounds again what differs by a last bit.
        let most = if matches!(wire, Wire::Auto | Wire::Fp32) { 1e-5 } else { 1e-3 };
        let flat = || travelling_as(job((3, 3), Precision::Fp32), wire);
        check(&flat, false, ways, most, &format!("{wire:?}"));
        let each = || returning_each(travelling_as(job((3, 3), Precision::Fp32), wire));
        check(&each, false, ways, most, &format!("each, {wire:?}"));
        let rails = || along_rails(travelling_as(wide((4, 4), Precision::Fp32), wire), 2);
        check(&rails, false, ways, most, &format!("rails, {wire:?}"));
        check(&|| returning_each(rails()), false, ways, most, &format!("each by rails, {wire:?}"));
    }
}

/// With one round a step all stages of ZeRO give the same bits, as with one chunk.
#[test]
fn every_stage_of_zero_goes_in_chunks() {
    for (mesh, degree) in [((2, 2), 2), ((4, 2), 4)] {
        let of = |zero, way| {
            let mut job = in_chunks(job(mesh, Precision::Fp32), degree);
            job.config.training.compute.zero = zero;
            job.config.training.global_batch_size = mesh.0;
            let trained = steps(&job, false, way);
            trained.into_iter().map(|(steps, _)| steps).collect::<Vec<_>>()
        };
        let first = of(Zero::Optimizer, Way::Host);
        for zero in [Zero::Optimizer, Zero::Gradients, Zero::Weights] {
            for way in [Way::Host, Way::OneByOne] {
                assert_eq!(of(zero, way), first, "{mesh:?} {zero:?} {way:?}");
            }
        }
    }
}

/// Tables and own rows are counted once more, windows and the experts' memory as much less.
#[test]
fn chunks_are_counted() {
    let memory = |ep, degree| -> RankMemory {
        let mut job = job((4, ep), Precision::Bf16);
        job.config.training.compute.backend = moejob_protocol::config::Backend::Cuda;
        job.config.training.sequence_length = 65_536;
        job.config.model.experts.count = 4 * ep;
        let (config, training) = (&job.config, &job.config.training);
        let (model, layout) = (&config.model, &config.layout);
        rank_memory(model, layout, 0, training, &config.recovery, 4, degree)
    };
    let of = |memory: &RankMemory, name: &str| {
        let part = memory.parts.iter().find(|part| part.name == name);
        part.map(|part| part.bytes).expect("a part")
    };
    let [one, two, four] = OVERLAP_DEGREES.map(|degree| memory(4, degree));
    for (name, more) in [("activations", true), ("scratch", false), ("windows", false)] {
        let [one, two, four] = [&one, &two, &four].map(|memory| of(memory, name));
        let right = if more { one < two && two <= four } else { one > two && two > four };
        assert!(right, "{name}: {one}, {two}, {four}");
    }
    // Nothing travels to experts.
    assert_eq!(memory(1, 1), memory(1, 4));
}

#[test]
fn a_gpu_trains_near_one_chunk() {
    let Some(_alone) = gpu() else { return };
    for mesh in [(2, 2), (3, 3)] {
        for (precision, most) in [(Precision::Fp32, 1e-5), (Precision::Bf16, 1e-2)] {
            for ways in [[Way::Host, Way::Windows], [Way::Windows; 2]] {
                let what = format!("{mesh:?} {precision:?}");
                check(&|| job(mesh, precision), true, ways, most, &what);
            }
        }
    }
    let (one, four) = (job((2, 2), Precision::Fp32), in_chunks(job((2, 2), Precision::Fp32), 4));
    let [one, four] = [one, four].map(|job| steps(&job, true, Way::Windows));
    let away = away(&four, &one, "4 chunks");
    assert!(away < 1e-5, "{away:e}");
}

#[test]
fn chunks_go_every_way_on_a_gpu() {
    let Some(_alone) = gpu() else { return };
    let ways = [Way::Host, Way::Windows];
    for (precision, wire) in [
        (Precision::Fp32, Wire::Auto),
        (Precision::Fp32, Wire::Bf16),
        (Precision::Bf16, Wire::Fp8),
        (Precision::Bf16, Wire::Fp32),
        (Precision::Fp16, Wire::Fp32),
    ] {
        let most = if (precision, wire) == (Precision::Fp32, Wire::Auto) { 1e-5 } else { 1e-2 };
        let what = format!("{precision:?} {wire:?}");
        let rails = || along_rails(travelling_as(wide((4, 4), precision), wire), 2);
        check(&rails, true, ways, most, &format!("rails, {what}"));
        let flat = || travelling_as(job((3, 3), precision), wire);
        check(&flat, true, ways, most, &what);
        check(&|| returning_each(flat()), true, ways, most, &format!("each, {what}"));
    }
}

/// Several rounds, what is computed again, and a layer without experts between.
#[test]
fn other_models_on_a_gpu() {
    let Some(_alone) = gpu() else { return };
    for recompute in [Recompute::Experts, Recompute::Full] {
        let make = || {
            let mut job = job((4, 2), Precision::Fp32);
            (job.config.model.num_hidden_layers, job.config.model.dense_layers) = (4, vec![1]);
            (job.config.training.recompute, job.config.training.global_batch_size) = (recompute, 9);
            job
        };
        check(&make, true, [Way::Host, Way::Windows], 1e-5, &format!("{recompute:?}"));
    }
}
