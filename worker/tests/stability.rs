//! What keeps routing steady: experts that hold still at first, and experts split in two.

mod common;

use common::{Job, bits, trainers};
use moe_worker::checkpoint::{Disk, Growth, grow, grown, verify};
use moe_worker::engine::model::Model;
use moe_worker::state::snapshot::initialize;
use moejob_protocol::CheckpointManifest;
use moejob_protocol::checkpoint::{Part, directory_name};
use moejob_protocol::config::{Precision, Resume, Schedule};
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{ModelConfig, Scoring};
use moejob_protocol::report::StepReport;
use std::path::Path;

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

/// Runs what is left of the job; its reports.
fn run(job: &Job) -> Vec<StepReport> {
    let (ends, reports) = job.run(&mut trainers(job.config.layout.mesh.world()), None);
    let steps = job.config.training.steps;
    let completed = moe_worker::attempt::api::AttemptEnd::Completed { step: steps };
    assert!(ends.iter().all(|end| *end == completed), "{ends:?}");
    reports
}

/// Values of one part of a tensor in a checkpoint of f32 or f64.
fn values(directory: &Path, manifest: &CheckpointManifest, name: &str, part: Part) -> Vec<f64> {
    let tensor = manifest.tensors.iter().find(|tensor| tensor.name == name && tensor.part == part);
    let tensor = tensor.unwrap_or_else(|| panic!("no {name}"));
    let mut found = Vec::new();
    for piece in &tensor.pieces {
        let file = std::fs::read(directory.join(&manifest.files[piece.file as usize].name));
        let bytes = &file.expect("a shard")[piece.begin as usize..piece.end as usize];
        let (fours, eights) = (bytes.as_chunks::<4>().0, bytes.as_chunks::<8>().0);
        match &tensor.dtype[..] {
            "F32" => found.extend(fours.iter().map(|b| f64::from(f32::from_le_bytes(*b)))),
            "F64" => found.extend(eights.iter().map(|b| f64::from_le_bytes(*b))),
            other => panic!("{other} is not expected"),
        }
    }
    found
}

const WARMUP: u64 = 4;

fn warming_up(layout: Layout) -> Job {
    let mut job = Job::new(layout);
    job.config.model.router.warmup_steps = WARMUP;
    job.config.training.schedule = Schedule::Constant { warmup_steps: 0 };
    job
}

#[test]
fn a_warm_up_moves_everything_but_the_experts() {
    let job = warming_up(layout(1, 1));
    let reports = run(&job);
    let mut first = Model::new(&job.config.model, &layout(1, 1), 0, &job.config.training, 1)
        .expect("a small arena");
    initialize(&mut first, job.config.training.seed);
    let at = |step| job.location().join(directory_name(step));
    let warm = verify(&Disk::real(), &at(WARMUP)).expect("a checkpoint");
    for (index, param) in first.params.iter().enumerate() {
        let expert = param.name.contains(".experts.");
        let weight = first.weight(index).expect("one rank holds everything");
        let initial: Vec<f32> = first.device.read_vec(weight);
        let initial: Vec<f64> = initial.into_iter().map(f64::from).collect();
        let found = values(&at(WARMUP), &warm, &param.name, Part::Master);
        assert_eq!(found == initial, expert, "{}", param.name);
        for part in [Part::Moment1, Part::Moment2] {
            let moments = values(&at(WARMUP), &warm, &param.name, part);
            assert_eq!(moments.iter().all(|value| *value == 0.0), expert, "{}", param.name);
        }
    }
    let losses: Vec<f64> = reports.iter().map(|report| report.loss).collect();
    assert!(losses[9] < losses[4] && losses[4] < losses[0], "{losses:?}");
}

/// AdamW's first step has the size of the learning rate, whatever the gradient: the moments of an
/// expert are as old as its own training.
#[test]
fn after_a_warm_up_the_experts_begin_with_a_first_step() {
    let mut job = warming_up(layout(1, 1));
    job.config.training.steps = WARMUP + 1;
    job.config.training.max_grad_norm = 0.0;
    job.config.training.adamw.weight_decay = 0.0;
    job.config.training.adamw.epsilon = 1e-30;
    job.config.checkpoint.every_steps = 1;
    run(&job);
    let read = |step, name: &str| {
        let directory = job.location().join(directory_name(step));
        let manifest = verify(&Disk::real(), &directory).expect("a checkpoint");
        values(&directory, &manifest, name, Part::Master)
    };
    let name = "model.layers.1.mlp.experts.2.down_proj.weight";
    let (before, after) = (read(WARMUP, name), read(WARMUP + 1, name));
    let rate = job.config.training.adamw.learning_rate;
    for (before, after) in before.iter().zip(&after) {
        let moved = (after - before).abs();
        assert!(moved == 0.0 || (moved / rate - 1.0).abs() < 1e-3, "{moved}");
    }
    assert_ne!(before, after);
}

#[test]
fn a_warm_up_gives_the_same_bits_on_any_number_of_ranks_and_through_a_resume() {
    let one = bits(&run(&warming_up(layout(1, 1))));
    for (dp, ep) in [(2, 1), (2, 2), (4, 2)] {
        assert_eq!(bits(&run(&warming_up(layout(dp, ep)))), one, "dp {dp}, ep {ep}");
    }
    // In the middle of it, on another mesh.
    let mut job = warming_up(layout(2, 2));
    job.config.checkpoint.every_steps = 2;
    let (_, mut reports) = job.run(&mut trainers(2), Some(2));
    job.config.attempt = 2;
    job.config.layout = layout(3, 1);
    job.config.resume = Resume::Checkpoint { step: 2, name: directory_name(2) };
    reports.extend(run(&job));
    assert_eq!(bits(&reports), one);
}

/// The step after which the experts are split.
const SPLIT: u64 = 4;

/// A job in f64 that trains to its end, without what counts logits or gradients.
fn before_growth(change: impl Fn(&mut ModelConfig)) -> Job {
    let mut job = Job::new(layout(1, 1));
    job.config.model.router.aux_loss_coef = 0.05;
    job.config.model.router.z_loss_coef = 0.0;
    job.config.training.precision = Precision::Fp64;
    job.config.training.max_grad_norm = 0.0;
    job.config.training.adamw.epsilon = 1e-30;
    change(&mut job.config.model);
    job
}

/// The job with its experts split after step `SPLIT`, to go on from there.
fn after_growth(job: &Job, growth: &Growth, layout: Layout) -> Job {
    let from = job.location().join(directory_name(SPLIT));
    let manifest = verify(&Disk::real(), &from).expect("a checkpoint");
    let mut larger = Job::new(layout);
    larger.config.training = job.config.training.clone();
    larger.config.data = job.config.data.clone();
    larger.config.model = grown(&job.config.model, growth);
    larger.config.checkpoint.spec_hash = "another manifest".to_string();
    let (mut done, mut all) = (0, 0);
    let path = grow(&from, &manifest, growth, &larger.location(), &mut |now, total| {
        assert!(now > done && now <= total);
        (done, all) = (now, total);
    });
    let path = path.expect("room");
    assert_eq!(done, all);
    assert_eq!(path, larger.location().join(directory_name(SPLIT)));
    let written = verify(&Disk::real(), &path).expect("a checkpoint");
    assert_eq!(written.model, larger.config.model);
    larger.config.resume = Resume::Checkpoint { step: SPLIT, name: directory_name(SPLIT) };
    larger
}

const EXACT: Growth = Growth { noise: 0.0, seed: 1, per_token: None };

/// Losses of both jobs' later steps, as the largest difference.
fn apart(small: &[StepReport], large: &[StepReport]) -> f64 {
    let small = &small[SPLIT as usize..];
    assert_eq!(small.len(), large.len());
    let pairs = small.iter().zip(large);
    let apart = pairs.map(|(a, b)| {
        assert_eq!(a.step, b.step);
        let held_out = a.validation_loss.unwrap_or(0.0) - b.validation_loss.unwrap_or(0.0);
        (a.loss - b.loss).abs().max(held_out.abs())
    });
    apart.fold(0.0, f64::max)
}

#[test]
fn a_model_with_its_experts_split_goes_on_as_it_was() {
    type Change = fn(&mut ModelConfig);
    let cases: [(&str, Change); 9] = [
        ("softmax, normalised", |_| {}),
        ("softmax", |model| model.router.norm_topk_prob = false),
        // Normalised, one expert weighs 1: its router's gradient is rounding alone.
        ("one expert a token", |model| {
            (model.experts.per_token, model.router.norm_topk_prob) = (1, false);
        }),
        ("all experts", |model| model.experts.per_token = 4),
        ("DeepSeek-V3's, in groups, with a correction", common::route_like_deepseek),
        ("softmax with a correction", |model| {
            (model.router.bias, model.router.bias_update_rate) = (true, 0.02);
        }),
        ("softmax with hysteresis", |model| model.router.hysteresis = 0.05),
        ("DeepSeek-V3's with hysteresis", |model| {
            common::route_like_deepseek(model);
            model.router.hysteresis = 0.05;
        }),
        ("sigmoid, not normalised", |model| {
            model.router.scoring = Scoring::Sigmoid;
            model.router.norm_topk_prob = false;
            model.tie_word_embeddings = false;
        }),
    ];
    for (name, change) in cases {
        let job = before_growth(change);
        let small = run(&job);
        let larger = after_growth(&job, &EXACT, layout(1, 1));
        let large = run(&larger);
        let apart = apart(&small, &large);
        assert!(apart < 1e-9, "{name}: losses differ by {apart:e}");
        let spread = after_growth(&job, &EXACT, layout(2, 2));
        assert_eq!(bits(&run(&spread)), bits(&large), "{name} on two ranks");
    }
}

#[test]
fn noise_is_on_one_of_each_two_experts_and_lets_them_part() {
    let job = before_growth(|_| {});
    let small = run(&job);
    let growth = Growth { noise: 0.02, ..EXACT };
    let larger = after_growth(&job, &growth, layout(1, 1));
    let directory = larger.location().join(directory_name(SPLIT));
    let manifest = verify(&Disk::real(), &directory).expect("a checkpoint");
    let read = |expert: u32, part| {
        let name = format!("model.layers.0.mlp.experts.{expert}.gate_proj.weight");
        values(&directory, &manifest, &name, part)
    };
    let from = job.location().join(directory_name(SPLIT));
    let before = verify(&Disk::real(), &from).expect("a checkpoint");
    let name = "model.layers.0.mlp.experts.1.gate_proj.weight";
    let original = |part| values(&from, &before, name, part);
    assert_eq!(read(1, Part::Master), original(Part::Master));
    let noisy = read(5, Part::Master);
    let pairs = noisy.iter().zip(original(Part::Master));
    let shares: Vec<f64> = pairs.map(|(noisy, weight)| noisy / weight - 1.0).collect();
    let mean_square = shares.iter().map(|share| share * share).sum::<f64>() / shares.len() as f64;
    assert!((mean_square.sqrt() / 0.02 - 1.0).abs() < 0.3, "{}", mean_square.sqrt());
    for (part, factor) in [(Part::Moment1, 0.5), (Part::Moment2, 0.25)] {
        let expected: Vec<f64> = original(part).iter().map(|value| value * factor).collect();
        assert_eq!((read(1, part), read(5, part)), (expected.clone(), expected));
    }
    let apart = apart(&small, &run(&larger));
    assert!(apart > 1e-9 && apart < 0.05, "losses differ by {apart:e}");
    // Without twice the experts a token the function is another.
    let fewer = Growth { per_token: Some(2), ..EXACT };
    let cheaper = after_growth(&job, &fewer, layout(1, 1));
    assert_eq!(cheaper.config.model.experts.per_token, 2);
    run(&cheaper);
}
