//! The data: what is read, in which order, and what is refused.

mod common;

use moe_worker::data::{Corpus, DataError};
use moejob_protocol::config::{DataConfig, DataSource, TrainingConfig};
use std::collections::HashMap;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    common::write_text(folder.path());
    folder
}

fn with_paths(root: &Path, paths: &[&str]) -> DataConfig {
    let mut data = common::data(root);
    let DataSource::Text { paths: globs, .. } = &mut data.source else { panic!("text") };
    *globs = paths.iter().map(ToString::to_string).collect();
    data
}

fn open(data: &DataConfig) -> Result<Corpus, DataError> {
    Corpus::open(data, &common::training(), 256)
}

/// All ids of an epoch's first `count` samples.
fn samples(corpus: &mut Corpus, training: &TrainingConfig, count: u64) -> Vec<Vec<u32>> {
    let length = training.sequence_length as usize;
    let batch = u64::from(training.global_batch_size);
    let one = |index: u64| {
        let (mut ids, mut targets) = (vec![0; length], vec![0; length]);
        let (step, micro_batch) = (index / batch, (index % batch) as u32);
        corpus.micro_batch(step, micro_batch, &mut ids, &mut targets).expect("text");
        assert_eq!(ids[1..], targets[..length - 1], "targets are one further");
        ids
    };
    (0..count).map(one).collect()
}

#[test]
fn an_epoch_shows_every_window_once_and_batches_are_functions_of_the_step() {
    let folder = folder();
    let (data, training) = (common::data(folder.path()), common::training());
    let mut corpus = open(&data).expect("text");
    let [(_, tokens), _] = corpus.sizes();
    let windows = (tokens - 1) / u64::from(training.sequence_length);
    let all = samples(&mut corpus, &training, windows);
    // Windows are told apart by where they lie: number the tokens instead of naming them.
    let mut text = Vec::new();
    let held_out = corpus.held_out_names();
    for file in 0..8 {
        let name = format!("text-{file}.txt");
        if !held_out.contains(&name) {
            text.extend(std::fs::read(folder.path().join(name)).expect("a file"));
        }
    }
    let mut counts: HashMap<Vec<u32>, i64> = HashMap::new();
    for window in text.chunks_exact(16).take(windows as usize) {
        *counts.entry(window.iter().map(|byte| u32::from(*byte)).collect()).or_default() += 1;
    }
    for sample in &all {
        *counts.entry(sample.clone()).or_default() -= 1;
    }
    assert!(counts.values().all(|count| *count == 0), "a window came twice or never");
    let mut again = open(&data).expect("text");
    assert_eq!(samples(&mut again, &training, 25), all[..25]);
    let mut other = training.clone();
    other.seed += 1;
    let mut other = Corpus::open(&data, &other, 256).expect("text");
    assert_ne!(samples(&mut other, &training, 25), all[..25]);
}

#[test]
fn held_out_files_are_whole_apart_and_never_none() {
    let folder = folder();
    for fraction in [0.0, 1e-9, 0.2, 0.5, 1.0] {
        let mut data = common::data(folder.path());
        data.validation.fraction = fraction;
        let mut training = common::training();
        training.global_batch_size = 1;
        let corpus = Corpus::open(&data, &training, 256).expect("text");
        let [(training_files, _), (held_out, _)] = corpus.sizes();
        assert_eq!(training_files + held_out, 8);
        assert_eq!(held_out == 0, fraction == 0.0, "{fraction}: {held_out} held out");
        assert!(training_files > 0, "{fraction}");
    }
    let data = common::data(folder.path());
    let before = open(&data).expect("text").held_out_names();
    std::fs::write(folder.path().join("zzz.txt"), "more ".repeat(100)).expect("a file");
    let mut after = open(&data).expect("text").held_out_names();
    after.retain(|name| name != "zzz.txt");
    assert_eq!(before, after, "a new file moved others across");
}

#[test]
fn the_fingerprint_sees_names_and_contents_alone() {
    let folder = folder();
    let data = common::data(folder.path());
    let fingerprint = || open(&data).expect("text").fingerprint().to_string();
    let first = fingerprint();
    let path = folder.path().join("text-3.txt");
    let text = std::fs::read(&path).expect("a file");
    std::fs::write(&path, &text).expect("the same text, written anew");
    assert_eq!(fingerprint(), first);
    let mut changed = text.clone();
    changed[7] ^= 1;
    std::fs::write(&path, &changed).expect("a file");
    assert_ne!(fingerprint(), first);
    std::fs::write(&path, &text).expect("a file");
    std::fs::rename(&path, folder.path().join("text-9.txt")).expect("a rename");
    assert_ne!(fingerprint(), first);
}

#[test]
fn folders_that_are_no_text_of_the_project_are_left_out() {
    let folder = folder();
    let before = open(&common::data(folder.path())).expect("text").fingerprint().to_string();
    for name in [".git", "target", "runs", "nested/target"] {
        std::fs::create_dir_all(folder.path().join(name)).expect("a folder");
        let path = folder.path().join(name).join("more.txt");
        std::fs::write(path, "not of the project").expect("a file");
    }
    std::fs::write(folder.path().join("empty.txt"), "").expect("a file");
    std::fs::write(folder.path().join("draft.txt"), "a draft").expect("a file");
    symlink("nowhere", folder.path().join("dangling.md")).expect("a link");
    let mut data = common::data(folder.path());
    data.exclude = vec![folder.path().join("runs").display().to_string()];
    let DataSource::Text { exclude, .. } = &mut data.source else { panic!("text") };
    *exclude = vec!["draft*".to_string()];
    assert_eq!(open(&data).expect("text").fingerprint(), before);
}

/// A ConfigMap as a kubelet mounts it: each file once, whatever the date of the mount.
#[test]
fn a_mounted_config_map_is_its_files() {
    let plain = folder();
    let before = open(&common::data(plain.path())).expect("text").fingerprint().to_string();
    for date in ["..2026_11_21_10_00_00.1", "..2026_11_22_11_00_00.2"] {
        let mounted = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(mounted.path().join(date)).expect("a folder");
        symlink(date, mounted.path().join("..data")).expect("a link");
        for entry in std::fs::read_dir(plain.path()).expect("a folder") {
            let entry = entry.expect("an entry");
            let name = entry.file_name();
            let target = mounted.path().join(date).join(&name);
            std::fs::copy(entry.path(), target).expect("a copy");
            let link = std::path::Path::new("..data").join(&name);
            symlink(link, mounted.path().join(&name)).expect("a link");
        }
        let data = common::data(mounted.path());
        assert_eq!(open(&data).expect("text").fingerprint(), before);
    }
}

/// The refusal names the file and exits with 3.
fn refused(data: &DataConfig, name: &str, why: &str) {
    let failure = open(data).expect_err(name).failure();
    let exit_code = if why.contains("cannot be read: error parsing") { 2 } else { 3 };
    assert_eq!(failure.exit_code, exit_code, "{failure}");
    assert!(failure.message.contains(name), "{failure} does not name {name}");
    assert!(failure.message.contains(why), "{failure}, expected {why}");
    assert!(!failure.advice.is_empty());
}

#[test]
fn what_is_no_text_file_is_refused_by_name() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let only = |paths: &[&str]| with_paths(folder.path(), paths);
    refused(&only(&["*.md"]), "*.md", "no file under");
    refused(&only(&["gone.txt"]), "gone.txt", "cannot be read");
    std::fs::create_dir(at("folder")).expect("a folder");
    refused(&only(&["folder"]), "folder", "it is a directory");
    std::fs::write(at("empty.md"), "").expect("a file");
    refused(&only(&["empty.md"]), "empty.md", "it is empty");
    let fifo = at("pipe.fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .expect("a pipe");
    refused(&only(&["*.fifo"]), "pipe.fifo", "no regular file");
    refused(&only(&["pipe.fifo"]), "pipe.fifo", "no regular file");
    symlink("loop-b.txt", at("loop-a.txt")).expect("a link");
    symlink("loop-a.txt", at("loop-b.txt")).expect("a link");
    refused(&only(&["loop-a.txt"]), "loop-a.txt", "loop");
    std::fs::remove_file(at("loop-a.txt")).expect("a link");
    std::fs::remove_file(at("loop-b.txt")).expect("a link");
    symlink(folder.path(), at("folder/back")).expect("a link");
    refused(&only(&["**/*.txt"]), "folder/back", "loop");
    std::fs::remove_file(at("folder/back")).expect("a link");
    refused(&only(&["text-[.txt"]), "text-[.txt", "cannot be read: error parsing");
    std::fs::set_permissions(at("text-1.txt"), PermissionsExt::from_mode(0o000)).expect("a mode");
    if std::fs::File::open(at("text-1.txt")).is_err() {
        refused(&only(&["*.txt"]), "text-1.txt", "cannot be read");
    }
}

#[test]
fn held_out_files_that_are_trained_on_are_told() {
    let folder = folder();
    let mut data = common::data(folder.path());
    assert_eq!(open(&data).expect("text").overlaps(), []);
    let root = folder.path().display().to_string();
    let (paths, exclude) = (vec!["text-[12].txt".to_string()], vec![]);
    data.held_out = Some(DataSource::Text { root: root.clone(), paths, exclude });
    let twice = |name: &str| (name.to_string(), name.to_string());
    let overlaps = open(&data).expect("text").overlaps();
    assert_eq!(overlaps, [twice("text-1.txt"), twice("text-2.txt")]);
    // Under another name, in one source that is divided by its files.
    data.held_out = None;
    let held = open(&data).expect("text").held_out_names();
    let text = std::fs::read(folder.path().join(&held[0])).expect("a file");
    std::fs::write(folder.path().join("copy.txt"), text).expect("a file");
    let overlaps = open(&data).expect("text").overlaps();
    assert_eq!(overlaps, [(held[0].clone(), "copy.txt".to_string())]);
}

#[test]
fn too_little_text_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("short.txt"), "only this").expect("a file");
    let data = common::data(folder.path());
    refused(&data, "9 tokens", "a step needs 81");
}

#[test]
fn a_file_that_changes_during_training_is_refused() {
    let training = common::training();
    type Change = fn(&Path);
    let changes: [(&str, Change); 4] = [
        ("shrunk", |path| std::fs::write(path, "short").expect("a file")),
        ("grown", |path| {
            let text = std::fs::read(path).expect("a file");
            std::fs::write(path, [text, b"more".to_vec()].concat()).expect("a file");
        }),
        ("rewritten", |path| {
            let mut text = std::fs::read(path).expect("a file");
            text[100] ^= 1;
            std::fs::write(path, text).expect("a file");
        }),
        ("removed", |path| std::fs::remove_file(path).expect("a file")),
    ];
    for (name, change) in changes {
        let folder = folder();
        let mut corpus = open(&common::data(folder.path())).expect("text");
        samples(&mut corpus, &training, 20);
        let touched = corpus.held_out_names();
        for file in 0..8 {
            let file = format!("text-{file}.txt");
            if !touched.contains(&file) {
                // A clock that stands still hides nothing: the time is set apart.
                change(&folder.path().join(file));
            }
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        let (mut ids, mut targets) = (vec![0; 16], vec![0; 16]);
        let error = corpus.micro_batch(5, 0, &mut ids, &mut targets).expect_err(name);
        let failure = error.failure();
        assert_eq!(failure.exit_code, 3);
        assert!(failure.message.contains("text-"), "{name}: {failure}");
    }
    let folder = folder();
    let mut corpus = open(&common::data(folder.path())).expect("text");
    let before = samples(&mut corpus, &training, 20);
    for file in 0..8 {
        let path = folder.path().join(format!("text-{file}.txt"));
        let text = std::fs::read(&path).expect("a file");
        std::fs::write(&path, text).expect("the same text");
    }
    assert_eq!(samples(&mut corpus, &training, 20), before, "only touched");
}
