//! A corpus that a worker has open for engines in other processes.

mod common;

use moe_worker::data::{Batch, Batches, Closing, Corpus, DataError, Desk, Feeder, Overlaps, answer};
use moe_worker::failure::Failure;
use moejob_protocol::config::DataConfig;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

type Opened = Arc<Result<Mutex<Corpus>, Failure>>;

fn folder() -> (tempfile::TempDir, DataConfig) {
    let folder = tempfile::tempdir().expect("a folder");
    common::write_text(folder.path());
    let data = common::data(folder.path());
    (folder, data)
}

fn open(data: &DataConfig) -> Corpus {
    Corpus::open(data, &common::training(), 256).expect("text")
}

/// A worker with a corpus, which it opens when it is first asked, and how often it did.
#[derive(Clone)]
struct Worker {
    data: DataConfig,
    opened: Arc<OnceLock<Opened>>,
    times: Arc<AtomicU32>,
}

impl Worker {
    fn of(data: &DataConfig) -> Worker {
        Worker { data: data.clone(), opened: Arc::default(), times: Arc::default() }
    }

    /// What an engine gets, by way of a descriptor as between processes.
    fn desk(&self) -> (Desk, Closing, JoinHandle<()>) {
        let desk = Desk::new(&common::training()).expect("memory");
        let (at, worker) = (desk.clone(), self.clone());
        let open = move || {
            Arc::clone(worker.opened.get_or_init(|| {
                worker.times.fetch_add(1, Ordering::SeqCst);
                let corpus = Corpus::open(&worker.data, &common::training(), 256);
                Arc::new(corpus.map(Mutex::new).map_err(|error| error.failure()))
            }))
        };
        let thread = std::thread::spawn(move || answer(&at, open));
        let file = desk.file().expect("a file").try_clone_to_owned().expect("a descriptor");
        (Desk::attach(file).expect("a desk"), Closing(desk), thread)
    }

    fn corpus(&self) -> (Corpus, Closing, JoinHandle<()>) {
        let (desk, closing, thread) = self.desk();
        let corpus = Corpus::behind(desk, &common::training(), || false).expect("text");
        (corpus, closing, thread)
    }
}

fn micro_batch(corpus: &mut Corpus, step: u64, index: u32) -> Batch {
    let mut batch = Batch::new(16);
    corpus.fill_micro_batch(step, index, &mut batch).expect("text");
    batch
}

#[test]
fn what_an_engine_gets_is_what_the_worker_has_open() {
    let (_folder, mut data) = folder();
    for apart in [false, true] {
        (data.reset_at_boundaries, data.mask_at_boundaries) = (apart, apart);
        let worker = Worker::of(&data);
        let (mut here, mut expected) = (open(&data), Vec::new());
        let (mut first, _a, _) = worker.corpus();
        let (mut second, _b, _) = worker.corpus();
        assert_eq!(first.fingerprint(), here.fingerprint());
        let most = here.held_out_sequences(u32::MAX);
        assert!(most > 3, "{most} held-out sequences");
        assert_eq!(first.held_out_sequences(u32::MAX), most);
        for (step, index) in [(0, 0), (0, 4), (3, 2), (700, 1)] {
            let batch = micro_batch(&mut here, step, index);
            assert_eq!((batch.starts.is_some(), batch.step_targets.is_some()), (apart, apart));
            assert_eq!(micro_batch(&mut first, step, index), batch);
            assert_eq!(micro_batch(&mut second, step, index), batch);
            expected.push(batch);
        }
        assert!(expected.iter().all(|batch| batch.ids != expected[1].ids || *batch == expected[1]));
        for first_sequence in [0, 3] {
            let [mut own, mut told] = [Batch::new(16), Batch::new(16)];
            here.fill_held_out(first_sequence, &mut own).expect("text");
            first.fill_held_out(first_sequence, &mut told).expect("text");
            assert_eq!(told, own);
        }
        assert_eq!(first.all_overlaps().expect("told"), here.all_overlaps().expect("own"));
        assert!(here.listing().is_some_and(|listing| !listing.files.is_empty()));
        assert_eq!(first.listing(), here.listing());
        assert_eq!(worker.times.load(Ordering::SeqCst), 1, "opened once for both");
    }
}

#[test]
fn a_feeder_reads_ahead_and_again_across_a_desk() {
    let (_folder, data) = folder();
    let (corpus, _closing, _) = Worker::of(&data).corpus();
    let mut here = open(&data);
    let mut feeder = Feeder::start(corpus, 1..4, 2, 9);
    for (step, index) in [(2, 1), (2, 2), (2, 3), (3, 1), (2, 2), (3, 1), (8, 3), (5, 1)] {
        let expected = micro_batch(&mut here, step, index);
        assert_eq!(*feeder.micro_batch(step, index).expect("text"), expected, "{step} {index}");
    }
    let mut sequence = Batch::new(16);
    feeder.corpus().fill_held_out(1, &mut sequence).expect("between two batches");
}

#[test]
fn overlaps_are_told_with_their_names() {
    let (folder, mut data) = folder();
    let kept = folder.path().join("held");
    std::fs::create_dir(&kept).expect("a folder");
    for file in 0..5 {
        let name = format!("text-{file}.txt");
        std::fs::copy(folder.path().join(&name), kept.join(&name)).expect("a file");
    }
    data.held_out = Some(common::data(&kept).source);
    let (corpus, _closing, _) = Worker::of(&data).corpus();
    let Overlaps { files, named, .. } = corpus.all_overlaps().expect("told");
    assert_eq!((files, named.len()), (5, 3));
    assert!(named[0].0.ends_with("text-0.txt"), "{named:?}");
}

#[test]
fn what_is_wrong_with_the_data_is_said_in_the_same_words() {
    let (folder, data) = folder();
    let worker = Worker::of(&data);
    let (mut corpus, _closing, _) = worker.corpus();
    let mut here = open(&data);
    for file in std::fs::read_dir(folder.path()).expect("a folder") {
        std::fs::write(file.expect("a file").path(), "short").expect("written");
    }
    let mut batch = Batch::new(16);
    let own = here.fill_micro_batch(0, 0, &mut batch).expect_err("changed").failure();
    let told = corpus.fill_micro_batch(0, 0, &mut batch).expect_err("changed").failure();
    assert_eq!((told.exit_code, &told.advice), (3, &own.advice));
    assert!(told.message.contains("changed during training"), "{told}");
    // Nothing that could be opened.
    let (desk, _closing, _) = Worker::of(&data).desk();
    let found = Corpus::behind(desk, &common::training(), || false).expect_err("too small");
    let own = Corpus::open(&data, &common::training(), 256).expect_err("too small");
    assert_eq!(found.failure(), own.failure());
}

#[test]
fn nobody_waits_for_a_worker_longer_than_its_attempt_lasts() {
    let desk = Desk::new(&common::training()).expect("memory");
    let (at, is_open) = (desk.clone(), Arc::new(AtomicBool::new(false)));
    let waits = Arc::clone(&is_open);
    let never = move || -> Opened {
        while !waits.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        Arc::new(Ok(Mutex::new(Corpus::default())))
    };
    let thread = std::thread::spawn(move || answer(&at, never));
    let start = Instant::now();
    let over = move || start.elapsed() > Duration::from_millis(200);
    let found = Corpus::behind(desk.clone(), &common::training(), over).expect_err("given up");
    assert!(matches!(found, DataError::GivenUp), "{found}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    // The answer that comes later is nobody's.
    is_open.store(true, Ordering::SeqCst);
    thread.join().expect("the desk is closed");
    let found = Corpus::behind(desk, &common::training(), || false).expect_err("closed");
    assert!(matches!(found, DataError::GivenUp), "{found}");
}

#[test]
fn a_closed_desk_ends_both_sides() {
    let (_folder, data) = folder();
    let (mut corpus, closing, thread) = Worker::of(&data).corpus();
    micro_batch(&mut corpus, 1, 1);
    drop(closing);
    thread.join().expect("nobody asks any more");
    let found = corpus.fill_micro_batch(1, 2, &mut Batch::new(16)).expect_err("closed");
    assert!(matches!(found, DataError::GivenUp), "{found}");
}

/// As it would be if the thread that answers had panicked.
#[test]
fn a_worker_that_cannot_answer_leaves_no_engine_waiting() {
    let desk = Desk::new(&common::training()).expect("memory");
    let at = desk.clone();
    let thread = std::thread::spawn(move || answer(&at, || panic!("a bug of the worker's")));
    let found = Corpus::behind(desk, &common::training(), || false).expect_err("no answer");
    assert!(matches!(found, DataError::GivenUp), "{found}");
    assert!(thread.join().is_err());
}
