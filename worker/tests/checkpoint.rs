//! Checkpoints against damage, crashes and strangers.

mod common;

use common::{Job, bits, run_until, state_hash, trainers};
use moe_worker::checkpoint::{
    self, Committed, Disk, EndsAfter, Expected, Identity, Newest, aside, commit, load, seal,
    write_shard,
};
use moe_worker::attempt::saves::Patience;
use moe_worker::checkpoint::Problem;
use moe_worker::checkpoint::fence::{self, Claim};
use moe_worker::engine::model::Model;
use moe_worker::state::slots::Memory;
use moe_worker::state::snapshot::{cut, shard_runs};
use moe_worker::attempt::trainer::Trainer;
use moe_worker::attempt::api::AttemptEnd;
use moejob_kernels::philox::philox4x32_10;
use moejob_protocol::CheckpointManifest;
use moejob_protocol::config::Resume;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use std::path::Path;

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

/// A job of two ranks that ended, with checkpoints at steps 4, 8 and 10.
fn ended() -> Job {
    let job = Job::new(layout(2, 2));
    let (ends, _) = job.run(&mut trainers(2), None);
    assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 10 }), "{ends:?}");
    job
}

fn newest(location: &Path) -> Newest {
    checkpoint::newest_usable(&Disk::real(), location).expect("a location that can be read")
}

fn verify(directory: &Path) -> Result<CheckpointManifest, Vec<Problem>> {
    checkpoint::verify(&Disk::real(), directory)
}

/// A trainer whose process ends with storage: it is waited for by nobody.
fn dying(ended: std::sync::Arc<EndsAfter>) -> Trainer {
    let patience =
        Patience { start: std::time::Duration::from_millis(50), ..Patience::default() };
    Trainer::with_disk(Disk::with_faults(ended)).with_patience(patience)
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        if entry.file_type().expect("a type").is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).expect("a copy");
        }
    }
}

/// One rank's state from a checkpoint, or why it is refused.
fn loaded(job: &Job, directory: &Path) -> Result<Vec<u8>, String> {
    let manifest = checkpoint::show(&Disk::real(), directory);
    let manifest = manifest.map_err(|problems| format!("{problems:?}"))?;
    let config = &job.config;
    let mut model =
        Model::new(&config.model, &layout(1, 1), 0, &config.training, 1).expect("a small arena");
    load(&Disk::real(), directory, &manifest, &mut model).map_err(|refusal| refusal.to_string())?;
    let mut state = Vec::new();
    cut(&mut model, &mut state).map_err(|error| error.to_string())?;
    Ok(state)
}

/// MOEJOB_DAMAGES sets how many; 1,000 in the acceptance of a release.
#[test]
fn no_damaged_checkpoint_is_ever_loaded() {
    let job = ended();
    let count = std::env::var("MOEJOB_DAMAGES").ok().and_then(|n| n.parse().ok()).unwrap_or(300);
    let directory = job.location().join("step-00000010");
    let whole = loaded(&job, &directory).expect("an undamaged checkpoint");
    let mut files: Vec<_> = (std::fs::read_dir(&directory).expect("a folder"))
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    assert_eq!(files.len(), 3, "{files:?}");
    for case in 0..count {
        let [a, b, c, d] = philox4x32_10(2024, [case, 0, 0, 0]);
        let path = &files[a as usize % files.len()];
        let before = std::fs::read(path).expect("a file");
        let at = (u64::from(b) << 16 | u64::from(c) & 0xffff) as usize % before.len();
        let mut after = before.clone();
        match d % 8 {
            0 => after.truncate(at),
            1 => after.extend_from_slice(&before[at..(at + 9).min(before.len())]),
            2 => {
                let end = (at + 512).min(after.len());
                after[at..end].fill(0);
            }
            _ => after[at] ^= 1 << (d >> 8 & 7),
        }
        if after == before {
            continue;
        }
        std::fs::write(path, &after).expect("a damaged file");
        let name = path.file_name().expect("a name");
        assert!(verify(&directory).is_err(), "case {case}: {name:?} at {at} was verified");
        if let Ok(state) = loaded(&job, &directory) {
            assert!(state == whole, "case {case}: {name:?} at {at} was loaded");
        }
        if case % 50 == 0 {
            let newest = newest(&job.location());
            assert_eq!(newest.usable.expect("the one before").name, "step-00000008");
            assert_eq!(newest.refused[0].name, "step-00000010");
        }
        std::fs::write(path, &before).expect("the file as it was");
    }
    assert_eq!(newest(&job.location()).usable.expect("whole again").step, 10);
}

/// Ends the writing process, as it were, after every single effect on storage.
#[test]
fn a_crash_between_any_two_effects_loses_nothing_committed() {
    let mut job = Job::new(layout(1, 1));
    job.config.checkpoint.keep = 1;
    let (ends, all) = job.run(&mut trainers(1), Some(6));
    assert_eq!(ends, [AttemptEnd::Stopped { step: 6 }]);
    assert_eq!(newest(&job.location()).usable.expect("the first").step, 4);
    let (run, kept) = (job.folder.path().join("run"), job.folder.path().join("kept"));
    copy_folder(&run, &kept);
    let mut finals = Vec::new();
    for effects in 0.. {
        std::fs::remove_dir_all(&run).expect("a folder");
        copy_folder(&kept, &run);
        let ended = EndsAfter::new(effects);
        go_on(&mut job, 2);
        let mut dying = dying(ended.clone());
        let (ends, _) = run_until(&job, &mut dying, &mut |_| {}, &|| ended.has_ended());
        if !ended.has_ended() {
            assert_eq!(ends, [AttemptEnd::Completed { step: 10 }], "after {effects} effects");
            break;
        }
        let after = newest(&job.location());
        assert!(after.refused.is_empty(), "after {effects} effects: {:?}", after.refused);
        let step = after.usable.expect("a checkpoint").step;
        assert!([4, 8, 10].contains(&step), "after {effects} effects: step {step}");
        go_on(&mut job, 3);
        let (ends, reports) = job.run(&mut trainers(1), None);
        assert_eq!(ends, [AttemptEnd::Completed { step: 10 }], "after {effects} effects");
        finals.push(state_hash(&job.location().join("step-00000010")));
        for report in bits(&reports) {
            let first = bits(&all).into_iter().find(|row| row[0] == report[0]);
            assert!(first.is_none_or(|row| row == report), "after {effects} effects");
        }
        let left: Vec<_> = (std::fs::read_dir(job.location()).expect("a folder"))
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.starts_with(".a1") || name.starts_with(".a2"))
            .collect();
        assert!(left.is_empty(), "after {effects} effects: {left:?}");
    }
    assert!(finals.len() > 30, "{} effects in all", finals.len());
    assert!(finals.iter().all(|hash| *hash == finals[0]), "the last states differ");
}

/// Attempt `attempt`, from the newest checkpoint.
fn go_on(job: &mut Job, attempt: u32) {
    let found = newest(&job.location()).usable.expect("a checkpoint");
    job.config.attempt = attempt;
    job.config.resume = Resume::Checkpoint { step: found.step, name: found.name };
}

#[test]
fn a_fenced_attempt_ends_and_what_it_wrote_does_not_count() {
    let job = Job::new(layout(1, 1));
    let location = job.location();
    std::fs::create_dir_all(&location).expect("a folder");
    let claim = |attempt, resume_step| Claim {
        attempt,
        resume_step,
        job_uid: "uid".to_string(),
        time: String::new(),
    };
    fence::claim(&Disk::real(), &location, &claim(2, 0)).expect("a claim");
    let (ends, _) = job.run(&mut trainers(1), None);
    assert_eq!(ends, [AttemptEnd::Fenced { attempt: 2 }], "a claim that came before");

    let mut job = Job::new(layout(1, 1));
    let location = job.location();
    job.config.training.steps = 4;
    assert_eq!(job.run(&mut trainers(1), None).0, [AttemptEnd::Completed { step: 4 }]);
    fence::claim(&Disk::real(), &location, &claim(2, 2)).expect("a claim");
    assert!(newest(&location).usable.is_none(), "step 4 of attempt 1 counts");
    assert!(location.join(".aside-a1-step-00000004").exists());
}

#[test]
fn the_newest_are_kept() {
    let mut job = Job::new(layout(1, 1));
    job.config.checkpoint.every_steps = 2;
    job.config.checkpoint.keep = 2;
    job.run(&mut trainers(1), None);
    let names: Vec<String> = (checkpoint::list(&Disk::real(), &job.location()).expect("a location"))
        .into_iter()
        .map(|found| found.name)
        .collect();
    assert_eq!(names, ["step-00000008", "step-00000010"]);
}

/// As in a GPU's job whose manifest does not say how often.
#[test]
fn where_nobody_said_how_often_checkpoints_are_written_from_snapshots() {
    for world in [1, 2] {
        let mut job = Job::new(layout(world, 1));
        job.config.training.steps = 60;
        job.config.recovery.memory_auto = true;
        let checkpoint = &mut job.config.checkpoint;
        (checkpoint.auto, checkpoint.every_steps, checkpoint.keep) = (true, 1, 100);
        let (ends, _) = job.run(&mut trainers(world), None);
        assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 60 }), "{ends:?}");
        let found = checkpoint::list(&Disk::real(), &job.location()).expect("a location");
        let steps: Vec<u64> = found.iter().map(|found| found.step).collect();
        // The first snapshot costs nothing yet; how many follow is the clock's.
        assert!(steps.len() > 1 && steps[0] < 4 && steps.last() == Some(&60), "{steps:?}");
    }
}

/// The snapshot that the attempt began with takes no memory once there are newer ones. The state is
/// large: one checkpoint at a time, in a slot beside two snapshots.
#[test]
fn the_last_checkpoint_of_a_large_state_finds_memory() {
    let mut job = Job::new(layout(1, 1));
    // Snapshots of 0, 3, 6 and 9; the last step, 10, is none's.
    (job.config.recovery.memory_every_steps, job.config.checkpoint.every_steps) = (3, 1000);
    let patience = Patience { pending_bytes: 0, ..Patience::default() };
    let (ends, _) = job.run(&mut [Trainer::new().with_patience(patience)], None);
    assert_eq!(ends, [AttemptEnd::Completed { step: 10 }]);
    verify(&job.location().join("step-00000010")).expect("a whole checkpoint");
}

/// Changes the manifest of step 10, seals it again, and gives what is said of it.
fn said_of(job: &Job, change: impl FnOnce(&mut CheckpointManifest)) -> String {
    let directory = job.location().join("step-00000010");
    let path = directory.join("manifest.json");
    let before = std::fs::read(&path).expect("a manifest");
    let mut manifest = checkpoint::show(&Disk::real(), &directory).expect("a checkpoint");
    change(&mut manifest);
    std::fs::write(&path, seal(&manifest).expect("JSON")).expect("a manifest");
    let said = verify(&directory).err().map(|problems| {
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    });
    std::fs::write(&path, before).expect("a manifest");
    said.unwrap_or_else(|| "nothing".to_string())
}

#[test]
fn every_lie_is_refused_by_name() {
    let job = ended();
    let check = |change: &dyn Fn(&mut CheckpointManifest), expected: &str| {
        let said = said_of(&job, change);
        assert!(said.contains(expected), "{said:?}, expected {expected:?}");
    };
    check(&|m| m.version = 3, "version 3 is newer than 2: upgrade moejob");
    check(&|m| m.step = 9, "it is of step 9, not of step-00000010");
    check(&|m| m.layout.mesh.ep = 3, "its mesh is impossible");
    check(&|m| m.layout.mesh.dp = 0, "its mesh is impossible");
    check(&|m| m.files[0].name = "../r0.safetensors".to_string(), "is no name of a shard");
    check(&|m| m.files[0].name = "a1-r0-/x.safetensors".to_string(), "is no name of a shard");
    check(&|m| m.files[1].name = m.files[0].name.clone(), "listed twice");
    check(&|m| m.files[0].name = "a1-r7-0.safetensors".to_string(), "a1-r7-0.safetensors: it is m");
    check(&|m| m.files[0].bytes += 1, "were written");
    check(&|m| m.files[0].blake3 = "0".repeat(64), "its BLAKE3 differs");
    check(&|m| drop(m.tensors.pop()), "tensors, the model has");
    check(&|m| m.tensors.swap(0, 3), "belongs in its place");
    let up_of = |m: &CheckpointManifest, expert: u32| {
        let end = format!("layers.0.mlp.experts.{expert}.up_proj.weight");
        let found = m.tensors.iter().position(|tensor| tensor.name.ends_with(&end));
        found.expect("an expert")
    };
    check(
        &|m| {
            let (first, second) = (up_of(m, 0), up_of(m, 1));
            m.tensors[second] = m.tensors[first].clone();
        },
        "layers.0.mlp.experts.1.up_proj.weight belongs in its place",
    );
    check(&|m| m.tensors[3].shape[0] += 1, "its shape is");
    check(&|m| m.tensors[0].dtype = "I8".to_string(), "none of F16, BF16, F32, F64");
    check(&|m| m.tensors[0].pieces[0].start = 4096, "a gap or overlap at element 0");
    check(&|m| m.tensors[0].pieces[0].end = u64::MAX, "lies outside its file");
    check(&|m| m.tensors[0].pieces[0].file = 9, "lies outside its file");
    check(&|m| m.tensors[0].pieces.clear(), "0 of its 4096 elements");
    check(&|m| m.model.experts.count = 5, "tensors, the model has");
    check(&|m| m.model.num_hidden_layers = u32::MAX, "a model of");
    check(&|m| m.model.hidden_size = 0, "impossible sizes");
    check(&|_| {}, "nothing");
}

#[test]
fn half_written_and_replaced_files_are_refused() {
    let job = ended();
    let location = job.location();
    let [eight, ten] = ["step-00000008", "step-00000010"].map(|name| location.join(name));
    let shard = ten.join("a1-r1-0.safetensors");
    std::fs::rename(&shard, location.join("away")).expect("a rename");
    std::os::unix::fs::symlink(location.join("away"), &shard).expect("a link");
    assert!(verify(&ten).is_err(), "a linked shard was followed");
    std::fs::remove_file(&shard).expect("a link");
    assert!(verify(&ten).is_err(), "a missing shard was not missed");
    std::fs::rename(location.join("away"), &shard).expect("a rename");
    verify(&ten).expect("whole again");

    std::fs::remove_file(ten.join("manifest.json")).expect("a manifest");
    let found = newest(&location);
    assert!(found.refused[0].to_string().contains("half written"), "{:?}", found.refused);
    assert_eq!(found.usable.expect("the one before").step, 8);
    std::fs::remove_dir_all(&ten).expect("a folder");
    std::os::unix::fs::symlink(&eight, &ten).expect("a link");
    assert!(newest(&location).refused[0].to_string().contains("symbolic link"));
    std::fs::create_dir(location.join("step-00000012")).expect("an empty one");
    std::fs::create_dir(location.join("step-13")).expect("no checkpoint's name");
    assert_eq!(newest(&location).usable.expect("the one before").step, 8);
}

/// Of the same job, rank and length, and of another step: its content tells it apart.
#[test]
fn a_shard_of_another_step_is_refused() {
    let job = ended();
    let [eight, ten] = ["step-00000008", "step-00000010"].map(|name| job.location().join(name));
    let shard = "a1-r1-0.safetensors";
    assert_ne!(
        std::fs::copy(eight.join(shard), ten.join(shard)).expect("a shard"),
        0,
        "the shards are of one length"
    );
    let problems = verify(&ten).expect_err("another shard");
    assert!(problems[0].to_string().contains("a1-r1-0.safetensors: its BLAKE3 differs"));
}

#[test]
fn a_place_that_cannot_be_written_is_refused_before_the_first_step() {
    let mut job = Job::new(layout(1, 1));
    let file = job.folder.path().join("file");
    std::fs::write(&file, "no folder").expect("a file");
    let location = file.join("checkpoints").display().to_string();
    job.config.checkpoint.location = location.clone();
    let (ends, reports) = job.run(&mut trainers(1), None);
    let AttemptEnd::Failed(failure) = &ends[0] else { panic!("{ends:?}") };
    assert!(failure.message.contains(&location), "{failure}");
    assert!(failure.advice.contains("writable") && reports.is_empty(), "{failure}");
}

#[test]
fn another_jobs_checkpoint_is_refused_with_the_difference() {
    let mut job = ended();
    // The newest is what a leader resumes from.
    std::fs::remove_dir_all(job.location().join("step-00000010")).expect("a checkpoint");
    let check = |job: &Job, expected: &str| {
        let mut config = job.config.clone();
        config.attempt += 1;
        let other = Job { folder: tempfile::tempdir().expect("a folder"), config };
        let (ends, _) = other.run(&mut trainers(2), None);
        let said = ends.iter().find_map(|end| match end {
            AttemptEnd::Failed(failure) if failure.exit_code == 3 => Some(failure.to_string()),
            _ => None,
        });
        let said = said.unwrap_or_else(|| panic!("{ends:?}"));
        assert!(said.contains(expected), "{said:?}, expected {expected:?}");
        assert!(said.contains("step-00000008"), "{said:?} does not name it");
    };
    job.config.resume =
        Resume::Checkpoint { step: 8, name: "step-00000008".to_string() };
    let before = job.config.clone();
    job.config.model.rope_theta = 5000.0;
    check(&job, "model.ropeTheta is 10000.0, this job's is 5000.0");
    job.config = before.clone();
    job.config.training.seed = 4;
    job.config.attempt = 5;
    check(&job, "seed is 3, this job's is 4");
    job.config = before;
    job.config.attempt = 9;
    let text = job.folder.path().join("text/text-0.txt");
    std::fs::write(&text, "another text").expect("a file");
    check(&job, "the fingerprint of its data");
}

#[test]
fn differences_are_all_told() {
    let job = ended();
    let directory = job.location().join("step-00000010");
    let manifest = checkpoint::show(&Disk::real(), &directory).expect("a checkpoint");
    let mut model = job.config.model.clone();
    model.hidden_size = 32;
    model.router.z_loss_coef = 0.5;
    let expected = Expected {
        model: &model,
        data_fingerprint: "other",
        seed: 8,
        spec_hash: "",
        training_hashes: [String::from("training"), String::from("before")],
        float_bytes: 8,
    };
    let told = checkpoint::differences(&manifest, &expected);
    let told: Vec<String> = told.iter().map(ToString::to_string).collect();
    for part in ["hiddenSize", "zLossCoef", "seed", "fingerprint", "dtype"] {
        assert!(told.iter().any(|text| text.contains(part)), "{part} is missing: {told:?}");
    }
    assert_eq!(told.len(), 5, "{told:?}");
}

/// Flips a bit in the middle of a file.
fn flip(path: &Path) {
    let mut bytes = std::fs::read(path).expect("a file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 16;
    std::fs::write(path, bytes).expect("a file");
}

/// All files below a folder, with what they hold.
fn contents(folder: &Path) -> std::collections::BTreeMap<std::path::PathBuf, Vec<u8>> {
    let mut found = std::collections::BTreeMap::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => found.extend(contents(&path)),
            false => drop(found.insert(path.clone(), std::fs::read(&path).expect("a file"))),
        }
    }
    found
}

/// In a cluster nobody looks into storage before the workers do.
#[test]
fn an_attempt_does_not_begin_anew_over_what_is_refused() {
    let newer = |directory: &Path| {
        let mut manifest = checkpoint::show(&Disk::real(), directory).expect("a checkpoint");
        manifest.version += 1;
        let sealed = seal(&manifest).expect("JSON");
        std::fs::write(directory.join("manifest.json"), sealed).expect("a file");
    };
    let damages: [&dyn Fn(&Path); 4] = [
        &|directory| flip(&directory.join("a1-r0-0.safetensors")),
        &|directory| flip(&directory.join("manifest.json")),
        &|directory| std::fs::remove_file(directory.join("manifest.json")).expect("removed"),
        &newer,
    ];
    for damage in damages {
        let mut job = Job::new(layout(1, 1));
        assert_eq!(job.run(&mut trainers(1), None).0, [AttemptEnd::Completed { step: 10 }]);
        for step in [4, 8, 10] {
            damage(&job.location().join(format!("step-{step:08}")));
        }
        let before = contents(&job.location());
        (job.config.attempt, job.config.resume) = (2, Resume::Fresh);
        let (ends, reports) = job.run(&mut trainers(1), None);
        let [AttemptEnd::Failed(failure)] = &ends[..] else { panic!("{ends:?}") };
        assert_eq!((failure.exit_code, reports.len()), (3, 0), "{failure}");
        for words in ["step-00000004", "step-00000010", "--fresh", "another name"] {
            assert!(failure.to_string().contains(words), "{words} is not in {failure}");
        }
        assert!(contents(&job.location()) == before, "something was replaced or removed");
    }
}

#[test]
fn what_is_refused_beyond_the_state_resumed_from_is_set_aside_and_told() {
    let mut job = ended();
    let directory = job.location().join("step-00000010");
    flip(&directory.join("a1-r1-0.safetensors"));
    let before = contents(&directory);
    job.config.attempt = 2;
    let (step, name) = (8, "step-00000008".to_string());
    job.config.resume = Resume::Checkpoint { step, name };
    let (ends, _) = job.run(&mut trainers(2), None);
    assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 10 }), "{ends:?}");
    verify(&directory).expect("written again");
    let found = aside::list(&Disk::real(), &job.location()).expect("a location");
    assert_eq!(found.len(), 1, "{found:?}");
    let bytes = before.values().map(|bytes| bytes.len() as u64).sum::<u64>();
    assert_eq!((&found[0].name[..], found[0].bytes), ("step-00000010.damaged", bytes));
    assert!(contents(&found[0].path).values().eq(before.values()), "other bytes");
    let events = job.folder.path().join("run/events.jsonl");
    let events = std::fs::read_to_string(events).expect("events");
    assert!(events.contains("it is set aside as step-00000010.damaged"), "{events}");
}

/// Three are kept. One of those that were there is damaged: it is not among the three, and stays.
#[test]
fn only_what_verifies_counts_among_the_checkpoints_that_are_kept() {
    let mut job = Job::new(layout(1, 1));
    job.config.checkpoint.every_steps = 2;
    job.run(&mut trainers(1), Some(6));
    flip(&job.location().join("step-00000004/a1-r0-0.safetensors"));
    go_on(&mut job, 2);
    job.config.training.steps = 8;
    let (ends, _) = job.run(&mut trainers(1), None);
    assert_eq!(ends, [AttemptEnd::Completed { step: 8 }]);
    let found = checkpoint::list(&Disk::real(), &job.location()).expect("a location");
    let steps: Vec<u64> = found.iter().map(|found| found.step).collect();
    assert_eq!(steps, [2, 4, 6, 8]);
    go_on(&mut job, 3);
    job.config.training.steps = 10;
    job.run(&mut trainers(1), None);
    let found = checkpoint::list(&Disk::real(), &job.location()).expect("a location");
    let steps: Vec<u64> = found.iter().map(|found| found.step).collect();
    assert_eq!(steps, [4, 6, 8, 10], "step 2 went, and the damaged one did not");
}

/// A bit of a claim makes its attempt resume elsewhere: that must not rule out what is good.
#[test]
fn a_damaged_claim_rules_nothing_out() {
    let job = Job::new(layout(1, 1));
    job.run(&mut trainers(1), None);
    let claim = Claim {
        attempt: 2,
        resume_step: 10,
        job_uid: "uid".to_string(),
        time: String::new(),
    };
    fence::claim(&Disk::real(), &job.location(), &claim).expect("a claim");
    let path = job.location().join("attempts/2.json");
    let whole = std::fs::read(&path).expect("a claim");
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bytes).expect("a file");
        let newest = checkpoint::newest_described(&Disk::real(), &job.location());
        let usable = newest.expect("a location").usable.map(|found| found.step);
        assert_eq!(usable, Some(10), "{}", String::from_utf8_lossy(&bytes));
    }
}

/// MOEJOB_TENSORS sets the layers; 12 make more tensors than one file could have once, 34 more than
/// a manifest could.
#[test]
fn what_is_committed_is_read_however_many_tensors_it_has() {
    let layers = std::env::var("MOEJOB_TENSORS").ok().and_then(|n| n.parse().ok()).unwrap_or(12);
    let folder = tempfile::tempdir().expect("a folder");
    let mut model = common::model();
    (model.num_hidden_layers, model.hidden_size) = (layers, 2);
    (model.head_dim, model.vocab_size) = (2, 8);
    (model.experts.count, model.experts.intermediate_size) = (1000, 2);
    let params = model.params();
    assert_eq!(params.len() as u64, model.rows());
    let identity = Identity {
        job_uid: "job".to_string(),
        job_name: "job".to_string(),
        attempt: 1,
        rank: 0,
        model: model.clone(),
        params: params.clone(),
        layout: layout(1, 1),
        spec_hash: String::new(),
        training_hash: String::new(),
        data_fingerprint: String::new(),
        seed: 1,
        tokens_per_step: 1,
        float_bytes: 4,
        location: folder.path().to_path_buf(),
        keep: 1,
    };
    let (_, bytes) = shard_runs(&model, &params, &layout(1, 1), 0, 4);
    let filling = Memory::default().fill(1, 5, 0, bytes).expect("memory").expect("a slot");
    let disk = Disk::real();
    let claim = Claim {
        attempt: 1,
        resume_step: 0,
        job_uid: "job".to_string(),
        time: String::new(),
    };
    fence::claim(&disk, folder.path(), &claim).expect("a claim");
    write_shard(&disk, &identity, 5, &filling.complete()).expect("storage");
    assert_eq!(commit(&disk, &identity, 5, || true).expect("storage"), Committed::Yes);
    let manifest = verify(&folder.path().join("step-00000005")).expect("a whole checkpoint");
    assert_eq!(manifest.tensors.len(), params.len() * 3);
}
