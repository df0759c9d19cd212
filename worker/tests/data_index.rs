//! Large data: read once a node, told while they are read, opened once a job.

mod common;

use common::{Job, trainers};
use moe_worker::attempt::api::{AttemptEnd, Control, TrainerEvent, Wait};
use moe_worker::data::{Corpus, DataError, Progress};
use moe_worker::gang::comm::Comm;
use moejob_protocol::Mesh;
use moejob_protocol::config::{DataConfig, DataSource, TokenType};
use moejob_protocol::layout::Layout;
use moejob_protocol::message::Phase;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

const FILES: u64 = 24;
const BYTES: u64 = 1 << 20;

/// Sparse files of tokens, most of which are 0.
fn tokens(folder: &Path) -> DataConfig {
    for number in 0..FILES {
        let file = File::create(folder.join(format!("{number:02}.bin"))).expect("a file");
        file.set_len(BYTES).expect("a size");
        file.write_all_at(&[number as u8, 0], 4096).expect("a token");
    }
    // Files that were written within the clock's tick are not trusted.
    std::thread::sleep(Duration::from_millis(60));
    let mut data = common::data(folder);
    data.source = DataSource::Tokens {
        root: folder.display().to_string(),
        paths: vec!["*.bin".to_string()],
        exclude: vec![],
        dtype: Some(TokenType::Uint16),
    };
    data
}

fn open(data: &DataConfig) -> (Result<Corpus, DataError>, Progress) {
    let progress = Progress::default();
    let corpus = Corpus::open_telling(data, &common::training(), 256, &progress);
    (corpus, progress)
}

/// As `docs/data.md` has it, by itself.
fn fingerprint(folder: &Path) -> String {
    let mut files = blake3::Hasher::new();
    for number in 0..FILES {
        let name = format!("{number:02}.bin");
        files.update(&(name.len() as u64).to_le_bytes());
        files.update(name.as_bytes());
        files.update(&BYTES.to_le_bytes());
        let content = fs::read(folder.join(name)).expect("a file");
        files.update(blake3::hash(&content).as_bytes());
    }
    let kind = "tokens Some(Uint16)";
    let mut all = blake3::Hasher::new();
    all.update(b"moejob data 1");
    all.update(&(kind.len() as u64).to_le_bytes());
    all.update(kind.as_bytes());
    all.update(&1.0_f64.to_bits().to_le_bytes());
    all.update(files.finalize().as_bytes());
    all.update(&[0; 32]);
    all.update(&u64::MAX.to_le_bytes());
    all.update(&[0]);
    all.finalize().to_hex().to_string()
}

#[test]
fn a_second_start_reads_no_file_and_has_the_same_fingerprint() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = tokens(folder.path());
    let expected = fingerprint(folder.path());
    let all = FILES * BYTES;
    for read in [all, 0, 0] {
        let (corpus, progress) = open(&data);
        assert_eq!(corpus.expect("tokens").fingerprint(), expected);
        assert_eq!((progress.bytes_read(), progress.counts()), (read, (all, all)));
    }
    // The content differs and nothing else that a user can set.
    let path = folder.path().join("05.bin");
    let modified = fs::metadata(&path).and_then(|of| of.modified()).expect("a time");
    let file = OpenOptions::new().write(true).open(&path).expect("a file");
    file.write_all_at(&[1, 0], 999_998).expect("a token");
    file.set_modified(modified).expect("a time");
    std::thread::sleep(Duration::from_millis(60));
    let (corpus, progress) = open(&data);
    assert_eq!(corpus.expect("tokens").fingerprint(), fingerprint(folder.path()));
    assert_eq!(progress.bytes_read(), BYTES);
    // What the index says of the ids is refused as the file itself would be.
    let progress = Progress::default();
    let error = Corpus::open_telling(&data, &common::training(), 23, &progress);
    let error = error.expect_err("an id").to_string();
    assert!(error.ends_with("23.bin, token 2048: the id 23 is outside of the vocabulary of 23"));
}

#[test]
fn what_was_opened_outlives_an_attempt_that_ends_early() {
    let mut job = Job::new(Layout::contiguous(Mesh::data_parallel(1, 1)));
    job.config.rank = Some(0);
    let mut trainer = trainers(1).remove(0);
    let (comm, control) = (Comm::solo(1), Control::default());
    let abort = comm.abort_handle();
    let mut loading = None;
    let end = trainer.run_attempt(&job.config, comm, &control.clone(), &mut |event| {
        if let TrainerEvent::Event(_) = &event {
            // Once all is open and before the first step.
            loading = loading.or(control.loading());
            abort.abort("the test");
        }
    });
    assert!(matches!(end, AttemptEnd::Aborted(_)), "{end:?}");
    let loading = loading.expect("while it loads");
    assert!(loading.bytes > 0 && loading.bytes_done == loading.bytes, "{loading:?}");
    assert_eq!((control.phase(), control.loading()), (Phase::Idle, None));
    job.config.attempt = 2;
    let again = Control::default();
    let end = trainer.run_attempt(&job.config, Comm::solo(2), &again, &mut |_| {});
    assert_eq!(end, AttemptEnd::Completed { step: 10 });
    let mut bytes = 0;
    again.waiting(Wait::Data, || bytes = again.loading().map_or(0, |loading| loading.bytes));
    assert_eq!(bytes, 0, "opened again");
}

#[test]
fn an_attempt_that_is_aborted_while_it_opens_its_data_ends() {
    let mut job = Job::new(Layout::contiguous(Mesh::data_parallel(1, 1)));
    job.config.rank = Some(0);
    let mut trainer = trainers(1).remove(0);
    let (comm, control) = (Comm::solo(1), Control::default());
    comm.abort_handle().abort("the leader says so");
    let end = trainer.run_attempt(&job.config, comm, &control, &mut |_| {});
    let AttemptEnd::Aborted(error) = end else { panic!("{end:?}") };
    assert!(error.to_string().contains("the leader says so"), "{error}");
    control.waiting(Wait::Data, || {
        assert_eq!(control.loading().map(|loading| loading.bytes_done), Some(0));
    });
}

#[test]
fn a_file_that_is_replaced_or_removed_is_noticed_behind_a_handle_that_stays_open() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = tokens(folder.path());
    let read_all = |corpus: &mut Corpus| {
        let (mut ids, mut targets) = (vec![0; 16], vec![0; 16]);
        (0..200).try_for_each(|step| corpus.micro_batch(step, 0, &mut ids, &mut targets))
    };
    let mut corpus = open(&data).0.expect("tokens");
    read_all(&mut corpus).expect("as found");
    for number in 0..FILES {
        let (old, new) = (format!("{number:02}.bin"), format!("{number:02}.new"));
        let (old, new) = (folder.path().join(old), folder.path().join(new));
        fs::copy(&old, &new).expect("a copy");
        fs::rename(&new, &old).expect("a rename");
    }
    read_all(&mut corpus).expect("the same content in other files");
    for number in 0..FILES {
        let name = |ending: &str| folder.path().join(format!("{number:02}.{ending}"));
        let modified = fs::metadata(name("bin")).and_then(|of| of.modified()).expect("a time");
        let file = File::create(name("new")).expect("a file");
        file.set_len(BYTES).expect("a size");
        file.write_all_at(&[200, 0], 77_778).expect("a token");
        file.set_modified(modified).expect("a time");
        fs::rename(name("new"), name("bin")).expect("a rename");
    }
    let error = read_all(&mut corpus).expect_err("other files").to_string();
    assert!(error.ends_with("changed during training: its content differs"), "{error}");
    for number in 0..FILES {
        fs::remove_file(folder.path().join(format!("{number:02}.bin"))).expect("a file");
    }
    let error = read_all(&mut corpus).expect_err("no files").to_string();
    assert!(error.ends_with("cannot be read"), "{error}");
}
