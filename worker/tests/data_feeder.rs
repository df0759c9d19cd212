//! Batches that are read ahead, and where the time between two steps goes.

mod common;

use common::{Job, trainers};
use moe_worker::data::{Batch, Batches, Corpus, DocumentOverlap, Feeder};
use moejob_protocol::Mesh;
use moejob_protocol::config::{DataConfig, DataSource, TrainingConfig};
use moejob_protocol::layout::Layout;
use moejob_protocol::report::StepReport;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Steps of five micro-batches.
fn open(data: &DataConfig) -> Corpus {
    Corpus::open(data, &common::training(), 256).expect("text")
}

fn folder() -> (tempfile::TempDir, DataConfig) {
    let folder = tempfile::tempdir().expect("a folder");
    common::write_text(folder.path());
    let mut data = common::data(folder.path());
    data.reset_at_boundaries = true;
    (folder, data)
}

fn texts(folder: &Path) -> Vec<std::path::PathBuf> {
    (0..8).map(|file| folder.join(format!("text-{file}.txt"))).collect()
}

#[test]
fn batches_are_those_of_the_corpus_in_whatever_order_they_are_asked_for() {
    let (_folder, data) = folder();
    let mut corpus = open(&data);
    let mut expected = |step, index| -> Batch {
        let mut batch = Batch::new(16);
        corpus.fill_micro_batch(step, index, &mut batch).expect("text");
        assert!(batch.starts.is_some());
        batch
    };
    let mut feeder = Feeder::start(open(&data), 1..4, 2, 9);
    let mut check = |step, index| {
        let batch = feeder.micro_batch(step, index).expect("text");
        assert_eq!(*batch, expected(step, index), "micro-batch {index} of step {step}");
    };
    for step in 2..9 {
        (1..4).for_each(|index| check(step, index));
        // The statistics of a whole step come first, then its gradients.
        (1..4).for_each(|index| check(step, index));
    }
    // Both steps that are under way are done again, in order.
    for (step, index) in [(7, 1), (7, 2), (7, 3), (8, 1), (8, 3)] {
        check(step, index);
    }
    // Somewhere else, behind the last step, and micro-batches of another rank.
    for (step, index) in [(3, 2), (3, 3), (4, 1), (2, 1), (9, 1), (20, 3), (5, 0), (5, 4), (5, 1)] {
        check(step, index);
    }
    let mut corpus = feeder.into_corpus().expect("its thread has ended");
    let batch = Batches::micro_batch(&mut corpus, 3, 2).expect("text").clone();
    assert_eq!(batch, expected(3, 2));
}

#[test]
fn two_steps_are_read_ahead_and_an_error_comes_where_its_batch_is_needed() {
    let (folder, data) = folder();
    let mut feeder = Feeder::start(open(&data), 0..5, 0, 100);
    feeder.micro_batch(0, 0).expect("text");
    std::thread::sleep(Duration::from_secs(1));
    let kept: Vec<(std::path::PathBuf, Vec<u8>)> = texts(folder.path())
        .into_iter()
        .map(|path| (path.clone(), fs::read(path).expect("a file")))
        .collect();
    kept.iter().for_each(|(path, _)| fs::remove_file(path).expect("a file"));
    // Ten in the ring and one in the thread's hand, behind the one that was taken.
    let mut places = (0..5).flat_map(|step| (0..5).map(move |index| (step, index)));
    let failed = places.find(|(step, index)| feeder.micro_batch(*step, *index).is_err());
    assert_eq!(failed, Some((2, 2)));
    let error = feeder.micro_batch(2, 2).expect_err("no files").to_string();
    assert!(error.ends_with("cannot be read"), "{error}");
    // What came before is kept for a redo all the same.
    feeder.micro_batch(1, 4).expect("kept");
    feeder.micro_batch(2, 1).expect("kept");
    kept.iter().for_each(|(path, text)| fs::write(path, text).expect("a file"));
    assert_eq!(*feeder.micro_batch(2, 2).expect("text"), {
        let mut batch = Batch::new(16);
        open(&data).fill_micro_batch(2, 2, &mut batch).expect("text");
        batch
    });
    assert!(feeder.take_waited() > Duration::ZERO);
    assert_eq!(feeder.take_waited(), Duration::ZERO);
}

fn reports(job: &Job) -> Vec<StepReport> {
    job.run(&mut trainers(1), None).1
}

#[test]
fn a_line_says_what_kept_the_next_step_waiting() {
    let mut job = Job::new(Layout::contiguous(Mesh::data_parallel(1, 1)));
    let mut training: TrainingConfig = job.config.training.clone();
    training.steps = 12;
    job.config.training = training;
    let reports = reports(&job);
    assert_eq!(reports.len(), 12);
    for report in &reports {
        let (timing, stalls) = (&report.timing, &report.timing.stalls);
        // The wall is slower than the step, by what is between two steps at least.
        assert!(timing.wall_tokens_per_second < report.tokens_per_second, "{report:?}");
        let wall = 80.0 / timing.wall_tokens_per_second;
        let step = 80.0 / report.tokens_per_second;
        let between = stalls.validation + stalls.snapshot + stalls.checkpoint;
        assert!(step + between <= wall * 1.001, "{report:?}");
        assert!(stalls.data <= step * 1.001, "{report:?}");
        assert_eq!(stalls.validation > 0.0, report.validation_loss.is_some());
        // What is done after a step stands on the line of the next.
        let before = report.step - 1;
        assert_eq!(stalls.snapshot > 0.0, before.is_multiple_of(3), "{report:?}");
        assert_eq!(stalls.checkpoint > 0.0, before > 0 && before.is_multiple_of(4), "{report:?}");
    }
    let line = serde_json::to_value(&reports[4]).expect("JSON");
    let told = [&line["wallTokensPerSecond"], &line["stalls"]["checkpoint"]];
    assert!(told.iter().all(|number| number.is_f64()), "{line}");
}

#[test]
fn held_out_documents_that_are_trained_on_are_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let line = |number: usize| format!("{{\"text\": \"document {number} of several words\"}}\n");
    let write = |name: &str, numbers: &[usize]| {
        let text: String = numbers.iter().map(|number| line(*number)).collect();
        fs::write(folder.path().join(name), text).expect("a file");
    };
    write("train.jsonl", &(0..100).collect::<Vec<_>>());
    write("held.jsonl", &[200, 31, 201, 31, 202, 77, 203]);
    let source = |name: &str| DataSource::Jsonl {
        root: folder.path().display().to_string(),
        paths: vec![name.to_string()],
        exclude: vec![],
        field: "text".to_string(),
    };
    let mut job = Job::new(Layout::contiguous(Mesh::data_parallel(1, 1)));
    job.config.data.source = source("train.jsonl");
    job.config.data.held_out = Some(source("held.jsonl"));
    let DocumentOverlap { compared, doubled, first } =
        open(&job.config.data).document_overlap().expect("tables");
    assert_eq!((compared, doubled), (7, 3));
    let found: Vec<_> = first.iter().map(|twin| (twin.held_out.1, twin.trained.1)).collect();
    assert_eq!(found, [(1, 31), (5, 77)]);
    reports(&job);
    let events = fs::read_to_string(job.folder.path().join("run/events.jsonl")).expect("events");
    let told = "3 of 7 held-out documents are trained on, too: held.jsonl, document 2 (as \
                train.jsonl, document 32), held.jsonl, document 6 (as train.jsonl, document 78)";
    assert_eq!(events.matches(told).count(), 1, "{events}");
    // In one source, which is divided by its documents.
    let mut data = job.config.data.clone();
    (data.held_out, data.validation.fraction) = (None, 0.25);
    assert_eq!(open(&data).document_overlap().expect("tables").doubled, 0);
    let numbers: Vec<usize> = (0..100).chain(0..100).collect();
    write("train.jsonl", &numbers);
    let DocumentOverlap { compared, doubled, .. } =
        open(&data).document_overlap().expect("tables");
    assert!(doubled > 0 && doubled < compared, "{doubled} of {compared}");
}
