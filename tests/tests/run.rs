//! `moejob run`: trains, checkpoints, resumes, refuses.

use moejob_tests::{Bench, root, send};
use rustix::process::Signal;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn a_manifest_trains_to_a_checkpoint() {
    let bench = Bench::small(60, 15, 1);
    assert_eq!(bench.run(&[], LIMIT), Some(0), "{}", bench.output());
    let metrics = bench.metrics();
    assert_eq!(metrics.len(), 60);
    let steps: Vec<u64> = metrics.iter().map(|line| line.step).collect();
    assert_eq!(steps, (1..=60).collect::<Vec<_>>());
    let (first, last) = (&metrics[0], &metrics[59]);
    assert!((first.loss - 256f64.ln()).abs() < 0.3, "an untrained model knows nothing: {first:?}");
    assert!(last.loss < first.loss - 1.0, "{first:?} {last:?}");
    let held_out = last.validation_loss.expect("measured after the last step");
    assert!(held_out < 4.6, "{held_out}");
    assert_eq!(bench.checkpoints(), ["step-00000030", "step-00000045", "step-00000060"]);
    let kinds: Vec<String> = (bench.events().iter())
        .map(|event| event["event"].as_str().unwrap_or_default().to_string())
        .collect();
    for kind in ["AttemptStarted", "WorkerStarted", "CheckpointCommitted", "JobCompleted"] {
        assert!(kinds.iter().any(|found| found == kind), "no {kind} in {kinds:?}");
    }
    let removed = |event: &&serde_json::Value| event["event"] == "CheckpointRemoved";
    let steps: Vec<_> = (bench.events().iter().filter(removed))
        .map(|event| event["step"].as_u64())
        .collect();
    assert_eq!(steps, [Some(15)], "three are kept");
    let verify = bench.command(&["checkpoint", "verify", "runs/small/checkpoints/step-00000060"]);
    assert!(succeeds(verify), "verify");
    for (what, newest) in [("verify", "step-00000060"), ("show", "step      60,")] {
        let mut folder = bench.command(&["checkpoint", what, "runs/small/checkpoints"]);
        let output = folder.output().expect("runs");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains(newest), "{what}: {output:?}");
    }
    // Done is done: nothing is trained again.
    assert_eq!(bench.run(&[], LIMIT), Some(0), "{}", bench.output());
    assert_eq!(bench.metrics().len(), 60);
}

#[test]
fn any_number_of_workers_gives_the_same_bits() {
    let one = Bench::small(12, 6, 2);
    assert_eq!(one.run(&[], LIMIT), Some(0), "{}", one.output());
    for workers in ["2", "3", "4"] {
        let many = Bench::small(12, 6, 2);
        assert_eq!(many.run(&["--workers", workers], LIMIT), Some(0), "{}", many.output());
        assert_eq!(many.losses(), one.losses(), "{workers} workers");
        let held_out = |bench: &Bench| bench.metrics().last().and_then(|m| m.validation_loss);
        assert_eq!(held_out(&many), held_out(&one), "{workers} workers");
        assert_eq!(weights(&many), weights(&one), "{workers} workers");
    }
}

#[test]
fn engines_that_are_processes_give_the_same_bits() {
    let one = Bench::small(12, 6, 2);
    assert_eq!(one.run(&[], LIMIT), Some(0), "{}", one.output());
    let same = |many: &Bench, what: &str| {
        assert_eq!(many.losses(), one.losses(), "{what}");
        let held_out = |bench: &Bench| bench.metrics().last().and_then(|m| m.validation_loss);
        assert_eq!(held_out(many), held_out(&one), "{what}");
        assert_eq!(weights(many), weights(&one), "{what}");
    };
    for (workers, engines) in [("1", 2), ("1", 4), ("2", 2), ("3", 2)] {
        let many = Bench::with_engines(12, 6, 2, engines);
        assert_eq!(many.run(&["--workers", workers], LIMIT), Some(0), "{}", many.output());
        same(&many, &format!("{workers} workers of {engines} engines"));
        let started = many.count("EngineStarted");
        assert_eq!(started, workers.parse::<usize>().unwrap_or(0) * engines as usize);
    }
    let forced = Bench::small(12, 6, 2);
    let run = forced.start_with(&["--workers", "2"], &[("MOEJOB_ENGINE", "process")]);
    assert_eq!(run.wait(LIMIT), Some(0), "{}", forced.output());
    same(&forced, "a process each");
    assert_eq!(forced.count("EngineStarted"), 2);
    let threads = Bench::with_engines(12, 6, 2, 3);
    let run = threads.start_with(&["--workers", "2"], &[("MOEJOB_ENGINE", "thread")]);
    assert_eq!(run.wait(LIMIT), Some(0), "{}", threads.output());
    same(&threads, "a thread each");
    assert_eq!(threads.count("EngineStarted"), 0);
}

/// Also after all of its engines were lost: nothing is opened again for that.
#[test]
fn the_data_are_open_in_the_worker_and_in_no_engine() {
    let bench = Bench::with_engines(1_000_000, 1_000_000, 4, 2);
    let _run = bench.start(&["--workers", "1"]);
    let open = |pid: i32| {
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten();
        let names = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
        let is_text = |path: &std::path::PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("part-"))
        };
        names.filter(is_text).collect::<Vec<_>>()
    };
    for round in 0..2 {
        let before = bench.metrics().last().map_or(0, |line| line.step);
        bench.wait_until("two engines that train", LIMIT, |bench| {
            let step = bench.metrics().last().map_or(0, |line| line.step);
            bench.engine_pids().len() == 2 && step >= before + 20
        });
        let (workers, engines) = (bench.worker_pids(), bench.engine_pids());
        assert_eq!((workers.len(), engines.len()), (1, 2), "{}", bench.output());
        assert!(!open(workers[0]).is_empty(), "round {round}: the worker reads them");
        for engine in engines {
            assert_eq!(open(engine), [std::path::PathBuf::new(); 0], "round {round}");
            moejob_tests::send(engine, Signal::KILL);
        }
    }
}

#[test]
fn a_dropped_terminal_ends_a_run_with_its_checkpoint() {
    let bench = Bench::small(100_000, 100_000, 3);
    let run = bench.start(&["--workers", "2"]);
    bench.wait_until("five steps", LIMIT, |bench| bench.losses().len() >= 5);
    run.signal(Signal::HUP);
    assert_eq!(run.wait(LIMIT), Some(130), "{}", bench.output());
    assert_eq!(bench.checkpoints().len(), 1, "{}", bench.output());
}

#[test]
fn ctrl_c_checkpoints_and_the_same_command_goes_on() {
    // More than a fast machine makes until the signal has come.
    const STEPS: u64 = 600;
    let whole = Bench::small(STEPS, 10_000, 3);
    assert_eq!(whole.run(&["--workers", "2"], LIMIT), Some(0), "{}", whole.output());
    let bench = Bench::small(STEPS, 10_000, 3);
    let run = bench.start(&["--workers", "2"]);
    bench.wait_until("five steps", LIMIT, |bench| bench.losses().len() >= 5);
    run.signal(Signal::INT);
    assert_eq!(run.wait(LIMIT), Some(130), "{}", bench.output());
    assert_eq!(bench.checkpoints().len(), 1, "{}", bench.output());
    assert_eq!(bench.run(&["--workers", "3"], LIMIT), Some(0), "{}", bench.output());
    assert_eq!(bench.losses(), whole.losses());
    let steps: Vec<u64> = bench.metrics().iter().map(|line| line.step).collect();
    assert_eq!(steps, (1..=STEPS).collect::<Vec<_>>(), "nothing was trained twice");
}

/// A terminal that is gone: nothing can be written to it, and kernel and shell both say so, to the
/// runner and to its workers.
#[test]
fn a_dropped_terminal_ends_the_run_with_its_checkpoint() {
    let bench = Bench::small(100_000, 100_000, 9);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut command = bench.command(&["run", "job.yaml", "--workers", "2"]);
    command.stdout(writer.try_clone().expect("a pipe")).stderr(writer);
    let mut run = command.spawn().expect("moejob starts");
    // The writers of the parent go with the command.
    drop(command);
    bench.wait_until("five steps", LIMIT, |bench| bench.losses().len() >= 5);
    drop(reader);
    let pid = i32::try_from(run.id()).expect("a pid");
    for _ in 0..2 {
        send(pid, Signal::HUP);
        bench.worker_pids().iter().for_each(|worker| send(*worker, Signal::HUP));
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = run.wait().expect("it ends");
    assert_eq!(status.code(), Some(130), "{status}");
    let steps = bench.losses().len();
    assert_eq!(bench.checkpoints(), [format!("step-{steps:08}")]);
}

#[test]
fn workers_die_with_their_runner() {
    let bench = Bench::small(100_000, 1000, 4);
    let run = bench.start(&["--workers", "3"]);
    bench.wait_until("three steps", LIMIT, |bench| bench.losses().len() >= 3);
    let pids = bench.worker_pids();
    assert_eq!(pids.len(), 3, "{}", bench.output());
    // A stopped process cannot read that its input has ended.
    send(pids[0], Signal::STOP);
    send(run.pid(), Signal::KILL);
    assert_eq!(run.wait(LIMIT), None);
    bench.wait_until("no worker left", Duration::from_secs(30), |b| b.worker_pids().is_empty());
}

#[test]
fn a_folder_in_use_or_of_another_job_is_refused() {
    let bench = Bench::small(100_000, 1000, 5);
    let run = bench.start(&[]);
    bench.wait_until("a step", LIMIT, |bench| !bench.losses().is_empty());
    let mut second = bench.command(&["run", "job.yaml"]);
    let output = second.output().expect("runs");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("in use"), "{output:?}");
    drop(run);
    let manifest = bench.path().join("job.yaml");
    let text = std::fs::read_to_string(&manifest).expect("manifest");
    std::fs::write(&manifest, text.replace("seed: 5", "seed: 6")).expect("manifest");
    let output = bench.command(&["run", "job.yaml"]).output().expect("runs");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("training.seed"), "{output:?}");
}

#[test]
fn a_changed_corpus_is_refused_on_resume() {
    // More steps than a fast machine makes until the signal has come.
    let bench = Bench::small(100_000, 10, 6);
    let run = bench.start(&[]);
    bench.wait_until("a checkpoint", LIMIT, |bench| !bench.checkpoints().is_empty());
    run.signal(Signal::INT);
    assert_eq!(run.wait(LIMIT), Some(130), "{}", bench.output());
    std::fs::write(bench.path().join("corpus/part-03.txt"), "something else").expect("corpus");
    assert_eq!(bench.run(&[], LIMIT), Some(3), "{}", bench.output());
}

/// Data that lie elsewhere are the same data: a job with absolute paths goes on, with the losses
/// that it would have had.
#[test]
fn data_that_were_moved_are_the_same_data() {
    let until = |bench: &Bench, steps: u64| {
        let run = bench.start(&[]);
        bench.wait_until("steps", LIMIT, |bench| {
            bench.metrics().last().is_some_and(|line| line.step >= steps)
        });
        run.signal(Signal::INT);
        assert_eq!(run.wait(LIMIT), Some(130), "{}", bench.output());
        bench.metrics().last().expect("steps").step
    };
    let [moved, whole] = [(); 2].map(|()| Bench::small(100_000, 1000, 6));
    let path = moved.path().join("job.yaml");
    let text = std::fs::read_to_string(&path).expect("manifest");
    let lies_in = |folder: &str| {
        let folder = moved.path().join(folder);
        let manifest = text.replace("corpus/", &format!("{}/", folder.display()));
        assert_ne!(manifest, text);
        std::fs::write(&path, manifest).expect("manifest");
    };
    lies_in("corpus");
    let before = until(&moved, 10);
    std::fs::create_dir(moved.path().join("else")).expect("a folder");
    std::fs::rename(moved.path().join("corpus"), moved.path().join("else/where")).expect("moved");
    lies_in("else/where");
    let done = until(&moved, before + 10);
    until(&whole, done);
    let mut expected = whole.losses();
    expected.retain(|step, _| *step <= done);
    assert_eq!(moved.losses(), expected);
}

#[test]
fn examples_are_valid() {
    let mut names: Vec<_> = std::fs::read_dir(root().join("examples"))
        .expect("examples")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|end| end == "yaml"))
        .collect();
    names.sort();
    assert!(names.len() >= 2);
    for name in names {
        let mut command = Command::new(moejob_tests::moejob());
        command.arg("validate").arg(&name);
        assert!(succeeds(command), "{}", name.display());
    }
}

fn succeeds(mut command: Command) -> bool {
    let output = command.output().expect("runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {:?}\n{text}", output.status.code());
    output.status.success()
}

/// The final weights: every tensor's bytes, by name and part, whatever the shards.
fn weights(bench: &Bench) -> std::collections::BTreeMap<String, Vec<u8>> {
    let name = bench.checkpoints().pop().expect("a checkpoint");
    let folder = bench.run_folder().join("checkpoints").join(name);
    let manifest = std::fs::read(folder.join("manifest.json")).expect("manifest");
    let mut manifest: serde_json::Value = serde_json::from_slice(&manifest).expect("manifest");
    // The seal over the manifest's own text.
    manifest.as_object_mut().expect("an object").remove("blake3");
    let manifest: moejob_protocol::CheckpointManifest =
        serde_json::from_value(manifest).expect("manifest");
    let read = |piece: &moejob_protocol::checkpoint::Piece| {
        let file = &manifest.files[piece.file as usize].name;
        let bytes = std::fs::read(folder.join(file)).expect("shard");
        bytes[piece.begin as usize..piece.end as usize].to_vec()
    };
    (manifest.tensors.iter())
        .map(|tensor| {
            let bytes = tensor.pieces.iter().flat_map(read).collect();
            (format!("{} {:?}", tensor.name, tensor.part), bytes)
        })
        .collect()
}
