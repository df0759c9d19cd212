//! The same bits for every number of ranks, and through every way of going on.

mod common;

use common::{Job, bits, sources, state_hash, trainers};
use moe_worker::attempt::api::AttemptEnd;
use moe_worker::checkpoint::Disk;
use moejob_protocol::config::Resume;
use moejob_protocol::layout::{Layout, Placement};
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{Activation, ModelConfig, QkNorm};

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

/// The whole job; its losses and the hash of its last state.
fn whole(layout: Layout, change: impl Fn(&mut Job)) -> (Vec<[u64; 5]>, String) {
    let mut job = Job::new(layout);
    change(&mut job);
    job.whole()
}

fn check(name: &str, layouts: &[Layout], change: impl Fn(&mut ModelConfig)) {
    let change = |job: &mut Job| change(&mut job.config.model);
    let one = whole(layout(1, 1), change);
    assert_eq!(one.0.len(), 10);
    let losses: Vec<f64> = one.0.iter().map(|row| f64::from_bits(row[1])).collect();
    assert!(losses[9] < losses[0], "{name}: the loss does not fall: {losses:?}");
    for layout in layouts {
        let other = whole(layout.clone(), change);
        assert_eq!(other, one, "{name}: {layout:?}");
    }
}

#[test]
fn any_mesh_gives_the_bits_of_one_rank() {
    // Five micro-batches: no power of two, and uneven for every mesh.
    let meshes = [(2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4)];
    check("plain", &meshes.map(|(dp, ep)| layout(dp, ep)), |_| {});
}

#[test]
fn a_rank_without_a_micro_batch_joins_with_zero_rows() {
    check("idle", &[layout(6, 1), layout(6, 3), layout(6, 6)], |model| model.experts.count = 7);
}

#[test]
fn other_models() {
    check("dense and shared", &[layout(2, 2), layout(4, 2)], |model| {
        model.dense_layers = vec![0];
        model.experts.shared = 1;
        model.tie_word_embeddings = false;
    });
    check("norms and biases", &[layout(3, 3), layout(4, 1)], |model| {
        model.qk_norm = QkNorm::PerHead;
        model.attention_bias = true;
        model.router.norm_topk_prob = false;
    });
    check("frozen", &[layout(2, 2)], |model| model.router.frozen = true);
    check("the routing of DeepSeek-V3", &[layout(2, 2), layout(5, 1), layout(3, 3)], |model| {
        common::route_like_deepseek(model);
    });
    check("gelu", &[layout(2, 2)], |model| {
        model.experts.activation = Activation::Gelu;
        model.experts.shared = 1;
    });
    check("one expert", &[layout(2, 1)], |model| {
        model.experts.count = 1;
        model.experts.per_token = 1;
    });
}

#[test]
fn experts_may_lie_in_any_order() {
    let ordered = |dp, ep, order: [u32; 4]| Layout {
        placement: Placement::Ordered(vec![order.to_vec(); 2]),
        ..layout(dp, ep)
    };
    let layouts = [
        ordered(2, 2, [3, 1, 2, 0]),
        ordered(4, 2, [1, 0, 3, 2]),
        // One rank has two of them, apart.
        ordered(3, 3, [0, 3, 2, 1]),
    ];
    check("ordered", &layouts, |_| {});
}

/// Each step moves a correction by its rate, up or down, unless its load is the mean.
#[test]
fn corrections_of_the_choice_follow_the_loads() {
    let mut job = Job::new(layout(1, 1));
    let rate = 1.0 / 1024.0;
    job.config.model.router.bias = true;
    job.config.model.router.bias_update_rate = rate;
    let _ = job.run(&mut trainers(1), None);
    let directory = job.location().join("step-00000010");
    let manifest = moe_worker::checkpoint::verify(&Disk::real(), &directory).expect("a checkpoint");
    let corrections = manifest.tensors.iter().filter(|tensor| {
        tensor.name.ends_with("e_score_correction_bias")
    });
    let mut moved = 0;
    for tensor in corrections {
        let piece = &tensor.pieces[0];
        let file = std::fs::read(directory.join(&manifest.files[piece.file as usize].name));
        let bytes = &file.expect("a shard")[piece.begin as usize..piece.end as usize];
        let values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        for steps in values.map(|value| f64::from(value) / rate) {
            let is_weight = tensor.part == moejob_protocol::checkpoint::Part::Master;
            assert!(steps.fract() == 0.0 && steps.abs() <= 10.0, "{}: {steps}", tensor.name);
            assert!(is_weight || steps == 0.0, "{}: a moment of {steps}", tensor.name);
            moved += usize::from(steps != 0.0);
        }
    }
    assert!(moved >= 4, "{moved} corrections have moved");
}

/// Ten losses of the small model, pinned: a change of any of them is a change of the arithmetic.
#[test]
fn ten_losses_are_pinned() {
    let (rows, _) = whole(layout(1, 1), |_| {});
    let losses: Vec<u64> = rows.iter().map(|row| row[1]).collect();
    let pinned: [u64; 10] = [
        0x4016_1aff_cd95_13fb,
        0x4015_d544_c775_925c,
        0x4015_01c5_4018_5b72,
        0x4013_f349_78ff_10de,
        0x4013_2734_4045_0e2a,
        0x4012_523d_b631_928d,
        0x4011_9dae_639a_1649,
        0x4011_2d29_629f_62e8,
        0x4010_e53d_2ca3_eb3b,
        0x4010_c4af_c28c_2e95,
    ];
    let shown: Vec<f64> = losses.iter().map(|bits| f64::from_bits(*bits)).collect();
    assert_eq!(losses, pinned, "{losses:#018x?} {shown:?}");
}

/// Stops, changes the mesh and goes on from memory, as many times as there are steps in `path`.
fn through_memory(path: &[(u32, u32, u64)]) -> (Vec<[u64; 5]>, String) {
    let mut job = Job::new(layout(1, 1));
    let mut group = Vec::new();
    let mut rows = Vec::new();
    let steps = job.config.training.steps;
    for (at, (dp, ep, until)) in path.iter().enumerate() {
        let earlier = std::mem::replace(&mut job.config.layout, layout(*dp, *ep));
        let attempt = at as u32 + 1;
        // The dead leave from the end, the newcomers join there.
        group.resize_with(*dp as usize, moe_worker::attempt::trainer::Trainer::new);
        if at > 0 {
            let step = path[at - 1].2;
            let shards = earlier.mesh.world();
            let sources = sources(&group, attempt - 1, step, shards);
            let attempt = attempt - 1;
            job.config.resume = Resume::Memory { step, attempt, layout: earlier, sources };
        }
        job.config.attempt = attempt;
        let (ends, reports) = job.run(&mut group, Some(*until).filter(|until| *until < steps));
        let expected = if *until < steps {
            AttemptEnd::Stopped { step: *until }
        } else {
            AttemptEnd::Completed { step: *until }
        };
        assert!(ends.iter().all(|end| *end == expected), "{ends:?}");
        rows.extend(bits(&reports));
    }
    let last = job.location().join(moejob_protocol::checkpoint::directory_name(steps));
    (rows, state_hash(&last))
}

#[test]
fn stops_and_other_sizes_change_nothing_from_memory() {
    let one = whole(layout(1, 1), |_| {});
    let paths: [&[(u32, u32, u64)]; 4] = [
        &[(1, 1, 3), (1, 1, 10)],
        &[(2, 2, 2), (4, 4, 5), (3, 1, 10)],
        &[(4, 2, 4), (3, 3, 5), (2, 1, 7), (4, 4, 10)],
        &[(3, 1, 1), (4, 2, 9), (3, 3, 10)],
    ];
    for path in paths {
        assert_eq!(through_memory(path), one, "{path:?}");
    }
}

/// A leader that has not heard of a commit would resume from before it: nothing is claimed, so that
/// the checkpoint still counts, and the next attempt goes on from it.
#[test]
fn what_the_storage_has_newer_is_not_put_aside() {
    let mut job = Job::new(layout(2, 2));
    job.config.attempt = 1;
    let (ends, _) = job.run(&mut common::trainers(2), Some(5));
    assert!(ends.iter().all(|end| *end == AttemptEnd::Stopped { step: 5 }), "{ends:?}");
    let location = job.location();
    let newest = moe_worker::checkpoint::newest_usable(&Disk::real(), &location);
    let newest = newest.expect("a location");
    let found = newest.usable.expect("a checkpoint");
    assert!(found.step >= 4);
    job.config.attempt = 2;
    job.config.resume = Resume::Fresh;
    let (ends, reports) = job.run(&mut common::trainers(2), None);
    let stopped = |end: &AttemptEnd| *end == AttemptEnd::Stopped { step: 0 };
    assert!(ends.iter().all(stopped) && reports.is_empty(), "{ends:?}");
    assert!(!location.join("attempts/2.json").exists());
    // The same for a job that is made again over the folder of an earlier one.
    let uid = std::mem::replace(&mut job.config.job_uid, "another".to_string());
    job.config.attempt = 1;
    let (ends, _) = job.run(&mut common::trainers(2), None);
    assert!(ends.iter().all(stopped), "{ends:?}");
    job.config.resume = Resume::Checkpoint { step: found.step, name: found.name.clone() };
    let (ends, _) = job.run(&mut common::trainers(2), None);
    let stopped = |end: &AttemptEnd| *end == AttemptEnd::Stopped { step: found.step };
    assert!(ends.iter().all(stopped), "the number of the attempt is taken: {ends:?}");
    job.config.job_uid = uid;
    let (ends, _) = job.run(&mut common::trainers(2), None);
    assert!(matches!(ends[0], AttemptEnd::Fenced { attempt: 1 }), "its own claim: {ends:?}");
    job.config.attempt = 3;
    job.config.resume = Resume::Checkpoint { step: found.step, name: found.name.clone() };
    let (ends, _) = job.run(&mut common::trainers(2), None);
    assert!(matches!(ends[0], AttemptEnd::Completed { .. }), "{ends:?}");
}

/// Bytes of one rank's shard are damaged: all leave the attempt, and the newest whole one is told.
#[test]
fn a_damaged_checkpoint_gives_way_to_the_one_before() {
    let mut job = Job::new(layout(2, 2));
    (job.config.attempt, job.config.checkpoint.every_steps) = (1, 2);
    job.config.checkpoint.keep = 3;
    let (ends, _) = job.run(&mut common::trainers(2), Some(6));
    assert!(matches!(ends[0], AttemptEnd::Stopped { .. }), "{ends:?}");
    let location = job.location();
    let all = moe_worker::checkpoint::list(&Disk::real(), &location).expect("a location");
    let [.., before, newest] = &all[..] else { panic!("{all:?}") };
    let shards = newest.manifest.as_ref().expect("a manifest").files.iter();
    let shard = newest.path.join(&shards.last().expect("a shard").name);
    let mut bytes = std::fs::read(&shard).expect("a shard");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&shard, bytes).expect("damaged");
    job.config.attempt = 2;
    job.config.resume = Resume::Checkpoint { step: newest.step, name: newest.name.clone() };
    let (ends, reports) = job.run(&mut common::trainers(2), None);
    let stopped = |end: &AttemptEnd| *end == AttemptEnd::Stopped { step: newest.step };
    assert!(ends.iter().all(stopped) && reports.is_empty(), "{ends:?}");
    let told = std::fs::read_to_string(job.config.checkpoint.records.clone() + "/events.jsonl");
    let told = told.expect("a record");
    let last: Vec<&str> = told.lines().rev().take(2).collect();
    assert!(last[0].contains("Found") && last[0].contains(&before.name), "{told}");
    assert!(last[1].contains("CheckpointRefused") && last[1].contains("BLAKE3"), "{told}");
    job.config.attempt = 3;
    job.config.resume = Resume::Checkpoint { step: before.step, name: before.name.clone() };
    let (ends, _) = job.run(&mut common::trainers(2), None);
    assert!(matches!(ends[0], AttemptEnd::Completed { .. }), "{ends:?}");
}

#[test]
fn stops_and_other_sizes_change_nothing_from_checkpoints() {
    let one = whole(layout(1, 1), |_| {});
    for path in [[(1, 1), (4, 2), (3, 3)], [(4, 4), (1, 1), (2, 2)], [(3, 1), (2, 1), (4, 1)]] {
        let mut job = Job::new(layout(1, 1));
        let mut rows = Vec::new();
        for (at, (dp, ep)) in path.into_iter().enumerate() {
            job.config.layout = layout(dp, ep);
            job.config.attempt = at as u32 + 1;
            if at > 0 {
                let newest = moe_worker::checkpoint::newest_usable(&Disk::real(), &job.location());
                let found = newest.expect("a location").usable.expect("a checkpoint");
                job.config.resume = Resume::Checkpoint { step: found.step, name: found.name };
                rows.truncate(found.step as usize);
            }
            // Checkpoints lie at 4 and 8; the steps after them are done again.
            let stop_at = [Some(6), Some(9), None][at];
            let (ends, reports) = job.run(&mut trainers(dp), stop_at);
            assert!(
                !ends.iter().any(|end| matches!(end, AttemptEnd::Failed(_))),
                "{ends:?}"
            );
            rows.extend(bits(&reports));
        }
        let last = job.location().join("step-00000010");
        assert_eq!((rows, state_hash(&last)), one, "{path:?}");
    }
}

#[test]
fn a_number_that_is_not_finite_ends_the_job_before_it_reaches_a_checkpoint() {
    for (world, rate) in [(1, 1e30), (2, 1e30), (1, 1e39), (2, 1e39)] {
        let mut job = Job::new(layout(world, world));
        job.config.training.adamw.learning_rate = rate;
        job.config.checkpoint.every_steps = 1;
        let (ends, reports) = job.run(&mut trainers(world), None);
        for end in &ends {
            let AttemptEnd::Failed(failure) = end else { panic!("{ends:?}") };
            assert_eq!(failure.exit_code, 1);
            let said = ["is not finite at step", "it holds NaN or infinity"];
            assert!(said.iter().any(|said| failure.message.contains(said)), "{failure}");
            // Where, and when.
            assert!(failure.message.contains("model.") && failure.message.contains(" step "));
            assert!(failure.advice.contains("learning rate"), "{failure}");
        }
        assert!(reports.iter().all(|report| report.loss.is_finite()));
        let newest = moe_worker::checkpoint::newest_usable(&Disk::real(), &job.location());
        let newest = newest.expect("a location");
        assert!(newest.refused.is_empty(), "{:?}", newest.refused);
    }
}
