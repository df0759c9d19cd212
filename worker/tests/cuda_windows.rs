//! Expert groups whose tokens travel through windows. All ranks are on one GPU, where NCCL has no
//! communicator: what else they exchange goes through the host's memory. Skipped where there is no
//! GPU. What of it is no GPU's runs on processors. On two GPUs: `MOEJOB_PEER=on` before the tests
//! of cuda_ranks.rs.

mod common;
mod travelling;

use common::Job;
use moe_worker::data::Corpus;
use moe_worker::engine::links::PeerUse;
use moe_worker::engine::step::StepError;
use moe_worker::gang::comm::{AbortHandle, Comm};
use moe_worker::state::snapshot::initialize;
use moejob_protocol::config::{Precision, Wire};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use travelling::{
    BLOCKS, PATIENCE, Way, alike, along_rails, engine, gpu, in_another_order, job,
    losses, near, returning_each, same, sliced, travelling_as, wide,
};

/// Sums of three and more are in the order of ranks either way.
#[test]
fn windows_give_the_bits_of_the_hosts_links() {
    let Some(_alone) = gpu() else { return };
    for mesh in [(2, 2), (3, 3)] {
        for precision in [Precision::Fp32, Precision::Bf16] {
            let job = job(mesh, precision);
            let what = format!("{mesh:?} {precision:?}");
            same(&job, true, [Way::Host, Way::Windows], &what);
            same(&job, true, [Way::Windows, Way::Windows], &what);
            let other = in_another_order(job);
            same(&other, true, [Way::Host, Way::Windows], &format!("{what} in another order"));
        }
    }
}

/// In each format that a precision may have; also where tokens come along rails first.
#[test]
fn windows_give_the_bits_of_the_hosts_links_in_every_format() {
    let Some(_alone) = gpu() else { return };
    for (precision, wire) in [
        (Precision::Fp32, Wire::Bf16),
        (Precision::Fp32, Wire::Fp8),
        (Precision::Bf16, Wire::Fp8),
        (Precision::Bf16, Wire::Fp32),
        (Precision::Fp16, Wire::Fp32),
    ] {
        for mesh in [(2, 2), (3, 3)] {
            let job = travelling_as(job(mesh, precision), wire);
            let what = format!("{mesh:?} {precision:?} {wire:?}");
            same(&job, true, [Way::Host, Way::Windows], &what);
            same(&job, true, [Way::Windows, Way::Windows], &what);
        }
        let rails = along_rails(travelling_as(wide((4, 4), precision), wire), 2);
        same(&rails, true, [Way::Host, Way::Windows], &format!("rails {precision:?} {wire:?}"));
    }
}

#[test]
fn rows_of_each_expert_come_back_alike() {
    let Some(_alone) = gpu() else { return };
    for (precision, wire) in [
        (Precision::Fp32, Wire::Auto),
        (Precision::Bf16, Wire::Auto),
        (Precision::Bf16, Wire::Fp8),
        (Precision::Fp32, Wire::Bf16),
    ] {
        let what = format!("{precision:?} {wire:?}");
        let each = |job| returning_each(travelling_as(job, wire));
        same(&each(job((3, 3), precision)), true, [Way::Host, Way::Windows], &what);
        let (flat, rails) = (wide((4, 4), precision), along_rails(wide((4, 4), precision), 2));
        let (flat, rails) = (each(flat), each(rails));
        match (wire, precision) {
            // In lists there are the same rows in another order, and exact sums.
            (Wire::Auto, Precision::Fp32) => {
                alike([&flat, &rails], true, [Way::Host; 2], &format!("lists {what}"));
            }
            (Wire::Auto, _) => same(&rails, true, [Way::Host; 2], &format!("lists {what}")),
            _ => same(&rails, true, [Way::Host, Way::Windows], &format!("rails {what}")),
        }
    }
}

/// Two groups, each with windows of its own; experts that are computed again in backward.
#[test]
fn groups_have_their_own_windows() {
    let Some(_alone) = gpu() else { return };
    let mut job = job((4, 2), Precision::Fp32);
    job.config.model.dense_layers = vec![0];
    job.config.model.num_hidden_layers = 3;
    job.config.training.recompute = moejob_protocol::config::Recompute::Full;
    same(&job, true, [Way::Host, Way::Windows], "two groups");
}

/// In lists between nodes of one rank each sums are in the order of the flat way. Where nodes have
/// several they are near those; and it is the same bits every time.
#[test]
fn tokens_travel_in_lists_between_nodes() {
    let Some(_alone) = gpu() else { return };
    let flat = job((2, 2), Precision::Fp32);
    let rails = along_rails(job((2, 2), Precision::Fp32), 1);
    alike([&flat, &rails], true, [Way::Host; 2], "2 x 1");
    for (mesh, ranks, precision) in [
        ((4, 4), 2, Precision::Fp32),
        ((4, 4), 2, Precision::Bf16),
        ((6, 6), 2, Precision::Fp32),
        ((6, 6), 3, Precision::Bf16),
        // Two groups, each on two nodes of its own.
        ((8, 4), 2, Precision::Fp32),
    ] {
        let what = format!("{mesh:?} on nodes of {ranks}, {precision:?}");
        let rails = along_rails(wide(mesh, precision), ranks);
        same(&rails, true, [Way::Host; 2], &what);
        if precision == Precision::Fp32 {
            near([&rails, &wide(mesh, precision)], true, &what);
        }
    }
}

/// Slices travel and are computed as experts of their own.
#[test]
fn windows_give_the_bits_of_the_hosts_links_with_slices() {
    let Some(_alone) = gpu() else { return };
    // The second has fewer experts on a rank than a token chooses of all.
    for (mesh, precision, slices) in [
        ((2, 2), Precision::Fp32, 2),
        ((6, 6), Precision::Fp32, 2),
        ((3, 3), Precision::Bf16, 4),
    ] {
        let job = sliced(job(mesh, precision), slices);
        let what = format!("{mesh:?} {precision:?}, {slices} slices");
        same(&job, true, [Way::Host, Way::Windows], &what);
        same(&job, true, [Way::Windows, Way::Windows], &what);
        let each = returning_each(sliced(self::job(mesh, precision), slices));
        same(&each, true, [Way::Host, Way::Windows], &format!("each, {what}"));
    }
    let rails = along_rails(sliced(wide((4, 4), Precision::Fp32), 2), 2);
    same(&rails, true, [Way::Host; 2], "rails, 2 slices");
    let mut whole = job((2, 2), Precision::Fp32);
    whole.config.model.experts.intermediate_size *= 2;
    near([&sliced(job((2, 2), Precision::Fp32), 2), &whole], true, "2 slices");
}

/// A rank goes in the middle of a run: the others end, and give all of their windows back. What is
/// lost is its own process in a job. Here it is a
/// thread, and memory that it gave back would wait for the others' kernels: so it stays until they
/// have ended.
#[test]
fn whose_peer_is_lost_ends_and_gives_its_windows_back() {
    let Some((gpu, _alone)) = gpu() else { return };
    let job = &job((2, 2), Precision::Fp32);
    let survive = |job: &Job, comm: Comm, victim: bool, peers: (&AbortHandle, &Barrier)| {
        let (told, ended) = peers;
        let mut engine = engine(job, comm, true, Way::Windows);
        let training = &job.config.training;
        initialize(&mut engine.model, training.seed);
        let corpus = Corpus::open(&job.config.data, training, job.config.model.vocab_size);
        let mut corpus = corpus.expect("text");
        engine.step(0, &mut corpus).expect("peers");
        let wanted = PeerUse::On { blocks: BLOCKS };
        assert!(engine.open_windows(wanted, 40 * PATIENCE).expect("all are here"));
        engine.step(1, &mut corpus).expect("peers");
        let began = Instant::now();
        if !victim {
            // It is enqueued before anybody knows.
            let error = engine.step(2, &mut corpus).expect_err("a peer is lost");
            assert!(matches!(error, StepError::Comm(_)), "{error}");
            engine.leave().expect("nothing waits any more");
        } else {
            std::thread::sleep(Duration::from_millis(300));
            // As its worker does to a rank whose peer is lost.
            told.abort("the test ends it");
        }
        ended.wait();
        if victim {
            engine.leave().expect("nothing waits any more");
        }
        drop(engine);
        assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    };
    let mut free = Vec::new();
    for _ in 0..6 {
        std::thread::scope(|scope| {
            let comms = Comm::in_process(2);
            let told = Arc::new((comms[0].abort_handle(), Barrier::new(2)));
            for comm in comms {
                let (victim, told) = (comm.rank() == 1, Arc::clone(&told));
                scope.spawn(move || {
                    survive(job, comm, victim, (&told.0, &told.1));
                });
            }
        });
        gpu.make_current().expect("a GPU");
        free.push(gpu.memory().expect("a GPU").0);
    }
    // The windows of a round are 4 MiB.
    let (early, late) = (free[1], free[5]);
    println!("free: {free:?}");
    assert!(late + (8 << 20) >= early, "{free:?}: memory creeps");
}

/// Rails on processors, as GPUs use them: nodes of one rank each give the bits of the flat way, and
/// so do those of several but for rounding; every time the same bits.
#[test]
fn processors_train_alike_along_rails() {
    for (mesh, ranks) in [((2, 2), 1), ((3, 3), 1), ((4, 2), 1)] {
        let flat = job(mesh, Precision::Fp32);
        let rails = along_rails(job(mesh, Precision::Fp32), ranks);
        alike([&flat, &rails], false, [Way::Host; 2], &format!("{mesh:?} on nodes of {ranks}"));
    }
    for (mesh, ranks) in [((4, 4), 2), ((8, 4), 2), ((6, 6), 2), ((6, 6), 3), ((9, 9), 3)] {
        let (flat, what) = (wide(mesh, Precision::Fp32), format!("{mesh:?} on nodes of {ranks}"));
        let rails = along_rails(wide(mesh, Precision::Fp32), ranks);
        same(&rails, false, [Way::Host; 2], &what);
        near([&rails, &flat], false, &what);
    }
}

/// The formats of processors: all ranks read the same of a row, whoever has it, however it came.
#[test]
fn processors_train_alike_in_every_format() {
    for wire in [Wire::Bf16, Wire::Fp8] {
        for mesh in [(2, 2), (3, 3), (4, 2)] {
            let job = travelling_as(job(mesh, Precision::Fp32), wire);
            let what = format!("{mesh:?} {wire:?}");
            same(&job, false, [Way::Host; 2], &what);
        }
        for (mesh, ranks) in [((2, 2), 1), ((3, 3), 1)] {
            let flat = travelling_as(job(mesh, Precision::Fp32), wire);
            let rails = along_rails(travelling_as(job(mesh, Precision::Fp32), wire), ranks);
            alike([&flat, &rails], false, [Way::Host; 2], &format!("{mesh:?} {wire:?} by rails"));
        }
        let rails = along_rails(travelling_as(wide((4, 4), Precision::Fp32), wire), 2);
        same(&rails, false, [Way::Host; 2], &format!("{wire:?} by rails"));
    }
}

/// Slices on processors that compute as GPUs do, also fewer on a rank than a token chooses of all.
#[test]
fn processors_train_alike_with_slices() {
    for slices in [2, 4] {
        for mesh in [(2, 2), (3, 3), (4, 2), (6, 6), (12, 12)] {
            let job = sliced(job(mesh, Precision::Fp32), slices);
            let what = format!("{mesh:?}, {slices} slices");
            same(&job, false, [Way::Host; 2], &what);
            let mut whole = self::job(mesh, Precision::Fp32);
            whole.config.model.experts.intermediate_size *= slices;
            // Some of the meshes are too large for whole experts.
            if mesh.1 <= 3 {
                near([&job, &whole], false, &what);
            }
        }
        let rails = along_rails(sliced(wide((4, 4), Precision::Fp32), slices), 2);
        same(&rails, false, [Way::Host; 2], &format!("rails, {slices} slices"));
        for each in [false, true] {
            let job = sliced(job((3, 3), Precision::Fp32), slices);
            let job = if each { returning_each(job) } else { job };
            let what = format!("{slices} slices, each by itself: {each}");
            same(&job, false, [Way::Host; 2], &what);
        }
    }
}

/// The order in which experts lie changes nothing but the order of sums, and not even that where a
/// row of each expert comes back.
#[test]
fn processors_train_alike_in_another_order_of_experts() {
    for mesh in [(2, 2), (3, 3), (4, 2)] {
        let (of, what) = (|| job(mesh, Precision::Fp32), format!("{mesh:?}"));
        same(&in_another_order(of()), false, [Way::Host; 2], &what);
        near([&of(), &in_another_order(of())], false, &what);
        let each = || returning_each(of());
        let [first, second] = [each(), in_another_order(each())].map(|job| losses(&job));
        assert_eq!(first, second, "{what}");
    }
    let of = || wide((4, 4), Precision::Fp32);
    near([&of(), &in_another_order(of())], false, "four choices");
    let rails = in_another_order(along_rails(of(), 2));
    same(&rails, false, [Way::Host; 2], "rails");
    let sliced = in_another_order(sliced(job((3, 3), Precision::Fp32), 2));
    same(&sliced, false, [Way::Host; 2], "slices");
}

/// With a row of each slice back the first loss has the same bits for every degree of expert
/// parallelism, up to as many ranks as there are slices.
#[test]
fn rows_of_each_slice_are_added_in_one_order() {
    let of = |ep| {
        let mut job = sliced(job((12, ep), Precision::Fp32), 2);
        job.config.training.global_batch_size = 12;
        losses(&returning_each(job))[0].to_bits()
    };
    let two = of(2);
    for ep in [3, 4, 6, 12] {
        assert_eq!(of(ep), two, "{ep}");
    }
    let each = returning_each(sliced(job((3, 3), Precision::Fp32), 2));
    same(&each, false, [Way::Host; 2], "each");
}

/// What fp32 says is what processors do.
#[test]
fn fp32_is_what_processors_send_anyway() {
    let (plain, said) = (job((3, 3), Precision::Fp32), job((3, 3), Precision::Fp32));
    let said = travelling_as(said, Wire::Fp32);
    alike([&plain, &said], false, [Way::Host; 2], "fp32");
}

/// How far a whole step is from one whose rows travel as they are. The first loss shows rounding
/// alone, the others what was learned with it.
#[test]
fn what_a_format_costs_a_step_is_small() {
    let far = |found: &[f64], expected: &[f64]| {
        let away = found.iter().zip(expected).map(|(a, b)| (a - b).abs() / b);
        away.fold(0.0, f64::max)
    };
    for mesh in [(2, 2), (6, 3)] {
        let plain = losses(&wide(mesh, Precision::Fp32));
        for (wire, most) in [(Wire::Bf16, 1e-5), (Wire::Fp8, 1e-4)] {
            let found = losses(&travelling_as(wide(mesh, Precision::Fp32), wire));
            let away = far(&found, &plain);
            println!("{mesh:?} {wire:?}: {away:e}");
            assert!(away > 0.0 && away < most, "{mesh:?} {wire:?}: {found:?} for {plain:?}");
        }
    }
}

/// With fp8 every rank rounds what experts read alike, also its own: so degrees of expert
/// parallelism differ by the order of sums alone.
#[test]
fn degrees_of_expert_parallelism_agree_on_what_was_rounded() {
    let of = |ep| {
        let mut job = travelling_as(job((6, ep), Precision::Fp32), Wire::Fp8);
        (job.config.model.experts.count, job.config.training.global_batch_size) = (12, 6);
        losses(&job)
    };
    let [two, three, six] = [2, 3, 6].map(of);
    for other in [three, six] {
        for (found, expected) in other.iter().zip(&two).take(3) {
            assert!((found - expected).abs() / expected < 1e-5, "{other:?} for {two:?}");
        }
    }
}

/// A token's own rank adds up what each of its experts made of it, as a rank does that has all of
/// them: the first loss has the same bits for every degree of expert parallelism.
#[test]
fn rows_of_each_expert_are_added_as_by_one_rank() {
    let of = |ep, each: bool| {
        let mut job = wide((6, ep), Precision::Fp32);
        (job.config.model.experts.count, job.config.training.global_batch_size) = (24, 6);
        losses(&if each { returning_each(job) } else { job })[0].to_bits()
    };
    let one = of(1, false);
    for ep in [2, 3, 6] {
        assert_eq!(of(ep, true), one, "{ep}");
    }
    for wire in [Wire::Auto, Wire::Bf16, Wire::Fp8] {
        let each = |job| returning_each(travelling_as(job, wire));
        let what = format!("each, {wire:?}");
        same(&each(job((3, 3), Precision::Fp32)), false, [Way::Host; 2], &what);
        let rails = along_rails(each(wide((4, 4), Precision::Fp32)), 2);
        same(&rails, false, [Way::Host; 2], &format!("{what} by rails"));
    }
}
