//! Documents packed into one sequence, kept apart, are what each is alone.

mod common;

use moe_worker::data::{Batch, Corpus};
use moe_worker::engine::forward::Pass;
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::round::Round;
use moe_worker::state::snapshot::initialize;
use moejob_protocol::Mesh;
use moejob_protocol::config::{DataSource, MixturePart, Precision, Schedule};
use moejob_protocol::layout::Layout;
use moejob_protocol::model::QkNorm;

/// A model in f64 for one sequence of `length` tokens; all have the same weights.
fn model(length: usize) -> Model {
    let mut config = common::model();
    config.qk_norm = QkNorm::PerHead;
    // Initial weights this large make every token attend to others.
    config.initializer_range = 0.5;
    let mut training = common::training();
    training.precision = Precision::Fp64;
    training.sequence_length = length as u32;
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
    let mut model = Model::new(&config, &layout, 0, &training, 1).expect("a small arena");
    initialize(&mut model, 11);
    model
}

/// [T, D]: what the head reads.
fn outputs(model: &mut Model, tokens: usize) -> Vec<f64> {
    Pass::new(model, &mut Links::solo(), &Round::alone(tokens)).forward();
    let dim = model.config.hidden_size as usize;
    model.device.read_vec::<f64>(model.buffers.head.norm.slice(0, tokens * dim))
}

fn furthest(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn packed_documents_do_not_see_each_other() {
    let lengths = [5, 1, 7, 3];
    let total: usize = lengths.iter().sum();
    let ids: Vec<u32> = (0..total as u32).map(|i| (i * 37 + i * i) % 251).collect();
    let targets = vec![0; total];
    let mut alone = Vec::new();
    let mut starts = Vec::new();
    for length in lengths {
        let start = starts.len();
        let mut one = model(length);
        one.load(&ids[start..start + length], &targets[start..start + length]);
        alone.extend(outputs(&mut one, length));
        starts.extend(vec![start as u32; length]);
    }
    let mut packed = model(total);
    packed.load_documents(&ids, &targets, Some(&starts));
    let apart = outputs(&mut packed, total);
    assert!(furthest(&apart, &alone) < 1e-12, "{}", furthest(&apart, &alone));
    // Without the boundaries they do, and a batch without them comes back to plain positions.
    packed.load(&ids, &targets);
    let together = outputs(&mut packed, total);
    assert!(furthest(&together, &alone) > 1e-3);
    let mut plain = model(total);
    plain.load(&ids, &targets);
    assert_eq!(outputs(&mut plain, total), together);
    packed.load_documents(&ids, &targets, Some(&starts));
    assert_eq!(outputs(&mut packed, total), apart);
}

/// A job on text and lines of JSON, three to one, documents apart.
fn mixed(layout: Layout) -> common::Job {
    let mut job = common::Job::new(layout);
    let text = job.folder.path().join("text");
    let lines: String = (0..300)
        .map(|i| format!("{{\"text\":\"line {i} of {}\"}}\n", "words ".repeat(i % 7)))
        .collect();
    std::fs::write(text.join("lines.jsonl"), lines).expect("a file");
    let root = text.display().to_string();
    let paths = vec!["*.jsonl".to_string()];
    let jsonl =
        DataSource::Jsonl { root, paths, exclude: vec![], field: "text".to_string() };
    let parts = vec![
        MixturePart { weight: 3.0, source: job.config.data.source.clone() },
        MixturePart { weight: 1.0, source: jsonl },
    ];
    job.config.data.source = DataSource::Mixture { parts };
    job.config.data.reset_at_boundaries = true;
    job.config.data.end_of_document = Some(0);
    job
}

/// Whoever computes which part of a step: its sequences, and where their documents begin, are a
/// function of the step, three of four from the text.
#[test]
fn a_mixtures_batches_do_not_depend_on_how_a_step_is_cut() {
    let job = mixed(Layout::contiguous(Mesh::data_parallel(1, 1)));
    let steps = |micro_batch: u32| -> Vec<Batch> {
        let mut training = job.config.training.clone();
        (training.global_batch_size, training.micro_batch_size) = (12, micro_batch);
        let mut corpus = Corpus::open(&job.config.data, &training, 256).expect("two sources");
        let size = (micro_batch * training.sequence_length) as usize;
        let mut whole = |step: u64| {
            let mut all = Batch { starts: Some(Vec::new()), ..Batch::default() };
            for index in 0..12 / micro_batch {
                let mut batch = Batch::new(size);
                corpus.fill_micro_batch(step, index, &mut batch).expect("the step's sequences");
                all.ids.extend(batch.ids);
                all.targets.extend(batch.targets);
                let starts = batch.starts.expect("documents are kept apart");
                all.starts.as_mut().expect("a list").extend(starts);
            }
            all
        };
        (0..40).map(&mut whole).collect()
    };
    let whole = steps(12);
    for micro_batch in [1, 3, 4] {
        assert_eq!(steps(micro_batch), whole, "{micro_batch} sequences at once");
    }
    let starts = whole.iter().filter_map(|batch| batch.starts.as_ref()).flatten();
    assert!(starts.filter(|start| **start > 0).count() > 100, "documents begin within sequences");
    // Lines of JSON have the word `line`, which the text has not.
    let rows = whole.iter().flat_map(|batch| batch.ids.chunks(16));
    let (mut lines, mut texts) = (0, 0);
    for row in rows {
        let row: Vec<u8> = row.iter().map(|id| *id as u8).collect();
        let is_line = row.windows(5).any(|part| part == b"words" || part == b"line ");
        *(if is_line { &mut lines } else { &mut texts }) += 1;
    }
    assert_eq!(lines + texts, 480);
    assert!((100..=130).contains(&lines), "{lines} of 480 sequences are of the second source");
}

/// The loss is a mean over the targets that count, and its gradient is that mean's: a small step
/// along it lowers the loss by the square of its norm.
#[test]
fn a_target_behind_the_end_of_a_document_has_no_part_in_loss_and_gradient() {
    let steps = |masked: bool| {
        let mut job = common::Job::new(Layout::contiguous(Mesh::data_parallel(1, 1)));
        let text = job.folder.path().join("text");
        // Of 24 windows' targets every third one begins a document.
        let letters = ["ab", "xb", "ac", "ad", "xc"];
        let lines: String = (0..129)
            .map(|i| format!("{{\"text\":\"{}\"}}\n", letters[i * i % letters.len()]))
            .collect();
        std::fs::write(text.join("lines.jsonl"), lines).expect("a file");
        let (root, paths) = (text.display().to_string(), vec!["*.jsonl".to_string()]);
        let config = &mut job.config;
        config.data.source =
            DataSource::Jsonl { root, paths, exclude: vec![], field: "text".to_string() };
        (config.data.end_of_document, config.data.mask_at_boundaries) = (Some(0), masked);
        config.data.validation.fraction = 0.0;
        // One step sees all windows, and its update is RATE times the gradient.
        let training = &mut config.training;
        (training.global_batch_size, training.micro_batch_size) = (24, 4);
        (training.precision, training.max_grad_norm) = (Precision::Fp64, 0.0);
        training.schedule = Schedule::Constant { warmup_steps: 0 };
        training.adamw.epsilon = 1e6;
        training.adamw.learning_rate = RATE * 1e6;
        training.adamw.weight_decay = 0.0;
        config.model.router.aux_loss_coef = 0.0;
        config.model.router.z_loss_coef = 0.0;
        let (_, reports) = job.run(&mut common::trainers(1), None);
        reports
    };
    const RATE: f64 = 1e-3;
    for masked in [false, true] {
        let reports = steps(masked);
        let fallen = reports[0].loss - reports[1].loss;
        let expected = RATE * reports[0].grad_norm.powi(2);
        assert!((fallen / expected - 1.0).abs() < 0.02, "{masked}: {fallen}, {expected}");
    }
    assert_ne!(steps(true)[0].loss, steps(false)[0].loss);
}

#[test]
fn a_mixture_trains_to_the_same_bits_on_any_number_of_ranks() {
    for masked in [false, true] {
        same_bits_on_any_number_of_ranks(masked);
    }
}

fn same_bits_on_any_number_of_ranks(masked: bool) {
    let mixed = |layout| {
        let mut job = mixed(layout);
        job.config.data.mask_at_boundaries = masked;
        job
    };
    let alone = mixed(Layout::contiguous(Mesh::data_parallel(1, 1)));
    let (_, expected) = alone.run(&mut common::trainers(1), None);
    assert_eq!(expected.len(), 10);
    assert!(expected.iter().any(|report| report.validation_loss.is_some()));
    for (dp, ep) in [(2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4)] {
        let job = mixed(Layout::contiguous(Mesh::data_parallel(dp, ep)));
        let (_, reports) = job.run(&mut common::trainers(dp), None);
        assert_eq!(common::bits(&reports), common::bits(&expected), "{dp} ranks, ep {ep}");
    }
    let mut together = mixed(Layout::contiguous(Mesh::data_parallel(1, 1)));
    together.config.data.reset_at_boundaries = false;
    let (_, reports) = together.run(&mut common::trainers(1), None);
    assert_ne!(common::bits(&reports), common::bits(&expected), "boundaries change nothing");
}
