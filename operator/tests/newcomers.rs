//! What a person is told who types something for the first time, and what is left behind by it.

mod place;

use place::Place;
use std::path::Path;

/// Data that cannot be used are told with what to do, and leave no folder behind.
#[test]
fn data_that_are_refused_say_what_to_do_and_leave_nothing_behind() {
    let place = Place::new();
    let lines: String = (0..200).map(|i| format!("{{\"body\": \"line {i}\"}}\n")).collect();
    std::fs::write(place.path("lines.jsonl"), &lines).expect("a file");
    let mixed = lines.replacen("\"body\"", "\"text\"", 1);
    std::fs::write(place.path("mixed.jsonl"), mixed).expect("a file");
    std::fs::write(place.path("alone.bin"), [7; 4000]).expect("a file");
    let bytes = ["data", "tokenize", "words/*.txt", "--out", "pair", "--tokenizer", "bytes"];
    place.said(&bytes);
    for (data, expected) in [
        ("jsonl: {paths: [lines.jsonl]}", "line 1: no key `text`; its keys: body"),
        ("jsonl: {paths: [lines.jsonl]}", "`field: KEY` beside `paths`, or --field KEY"),
        ("jsonl: {paths: [mixed.jsonl]}", "line 2: no key `text`; its keys: body"),
        ("jsonl: {paths: [mixed.jsonl]}", "give the line its text"),
        ("megatron: {paths: [alone.bin]}", "alone.idx is not there"),
        ("megatron: {paths: [alone.bin]}", "put the .idx beside its .bin, and name the .idx"),
        ("megatron: {paths: [pair.bin]}", "pair.idx, is not named\n  name the .idx: its .bin is"),
        ("text: {paths: ['none/*.txt']}", "matches none/*.txt"),
    ] {
        let set = format!("data.train={{{data}}}");
        let (code, told) = place.refused(&["run", "job.yaml", "--set", &set]);
        assert!(code == 3 && told.contains(expected), "{set}: {told}");
        assert!(!place.path("runs").exists(), "{set}");
    }
    // Whoever names the key trains, and whoever names a location of its own finds none left.
    let keyed = "data.train={jsonl: {paths: [lines.jsonl], field: body}}";
    place.said(&["run", "job.yaml", "--name", "keyed", "--set", keyed]);
    let none = "data.train={text: {paths: ['none/*.txt']}}";
    let elsewhere = "checkpoint.location=deep/er/kept";
    place.refused(&["run", "job.yaml", "--name", "new", "--set", none, "--set", elsewhere]);
    assert!(!place.path("deep").exists() && !place.path("runs/new").exists());
    // What was trained stays, whatever is refused later.
    place.refused(&["run", "job.yaml", "--name", "keyed", "--set", none]);
    assert!(place.path("runs/keyed/checkpoints/step-00000010").is_dir());
}

/// What is read as text and looks like something else is told, and trained on.
#[test]
fn text_that_looks_like_none_is_told() {
    let place = Place::new();
    let lines: String = (0..200).map(|i| format!("{{\"text\": \"line {i}\"}}\n")).collect();
    std::fs::write(place.path("lines.txt"), lines).expect("a file");
    std::fs::write(place.path("zeros.txt"), b"a\0b".repeat(3000)).expect("a file");
    for (file, expected) in [
        ("lines.txt", "lines.txt: it is read as text and looks like JSON lines: its keys and"),
        ("zeros.txt", "zeros.txt: it is read as text and looks like binary data: its bytes are"),
    ] {
        let set = format!("data.train={{text: {{paths: [{file}]}}}}");
        let output = place.moejob(&["run", "job.yaml", "--name", &file[..5], "--set", &set]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && told.contains(expected), "{told}");
        let events = place.said(&["tail", &file[..5], "--events", "-n", "100"]);
        assert!(events.contains("looks like"), "{events}");
        // Once when it happens, again at the end, and where the run is shown.
        assert!(told.contains("1 warning:\n  ") && told.matches(expected).count() == 2, "{told}");
        let page = place.said(&["show", &file[..5]]);
        assert!(page.contains("\nwarnings\n  ") && page.contains(expected), "{page}");
    }
    let output = place.moejob(&["run", "job.yaml"]);
    assert!(!String::from_utf8_lossy(&output.stderr).contains("looks like"), "{output:?}");
}

/// The end of an only file of text is held out, as of one of tokens; where nothing can be, a person
/// is told.
#[test]
fn one_file_of_text_has_a_held_out_loss() {
    let place = Place::new();
    let text: String = (0..2000).map(|i| format!("word {} ", i * i % 97)).collect();
    std::fs::write(place.path("one.txt"), text).expect("a file");
    place.said(&["data", "tokenizer", "words/*.txt", "--tokens", "270", "--out", "t.json"]);
    let only = "data.train={text: {paths: [one.txt]}}";
    let read_by = ["data.tokenizer=t.json", "--set", "model.vocabSize=270", "--set", only];
    for (name, how) in [("bytes", &[only][..]), ("tokens", &read_by)] {
        let asked = [&["run", "job.yaml", "--name", name, "--set"], how].concat();
        let output = place.moejob(&asked);
        let (out, told) = (&output.stdout, String::from_utf8_lossy(&output.stderr).into_owned());
        assert!(output.status.success(), "{told}");
        assert!(String::from_utf8_lossy(out).contains("  held-out "), "{name}: {output:?}");
        assert!(!told.contains("nothing is held out"), "{told}");
    }
    std::fs::write(place.path("few.jsonl"), "{\"text\": \"short\"}\n".repeat(24)).expect("a file");
    let few = "data={train: {jsonl: {paths: [few.jsonl]}}, sequenceLength: 64, \
               validation: {fraction: 0.001, everySteps: 5}}";
    let batch = ["training.globalBatchSize=1", "--set", "training.microBatchSize=1", "--set", few];
    let output =
        place.moejob(&[&["run", "job.yaml", "--name", "few", "--set"], &batch[..]].concat());
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("nothing is held out, so there is no held-out loss"), "{told}");
}

/// A path that leads upwards is one like any other on one machine, and none in a pod.
#[test]
fn a_path_may_lead_upwards_on_one_machine() {
    let place = Place::new();
    std::fs::create_dir(place.path("inner")).expect("a folder");
    let line = |rest: &str| {
        format!("cd inner && {} {rest}", place::PROGRAM)
    };
    let set = "data.train={text: {paths: ['../words/*.txt']}}";
    for rest in [
        format!("validate ../job.yaml --set \"{set}\""),
        format!("run ../job.yaml --set \"{set}\" --set checkpoint.location=../kept"),
    ] {
        let output = place.command("sh", &["-c", &line(&rest)]);
        assert!(output.status.success(), "{output:?}");
    }
    assert!(place.path("kept/step-00000010").is_dir());
    let inner = std::fs::read_to_string(place.path("job.yaml")).expect("a file");
    let inner = inner.replace("words/*.txt", "../words/*.txt");
    std::fs::write(place.path("up.yaml"), inner).expect("a file");
    let (_, told) = place.refused(&["kube", "submit", "up.yaml", "--dry-run"]);
    assert!(told.contains("E0209 spec.data.train.text.paths[0]: found `../words/*.txt`"), "{told}");
}

/// `validate` takes values of the command line, and files of other kinds beside manifests.
#[test]
fn what_validates_is_what_would_run() {
    let place = Place::new();
    place.said(&["validate", "job.yaml", "--set", "training.steps=20"]);
    for (set, expected) in [
        ("training.stepz=3", "did you mean `steps`"),
        ("training.globalBatchSize=3", "job.yaml: E0204"),
        ("training.steps", "write it as FIELD=VALUE"),
    ] {
        let (code, told) = place.refused(&["validate", "job.yaml", "--set", set]);
        assert!(code == 2 && told.contains(expected), "{set}: {told}");
    }
    let service = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n";
    std::fs::write(place.path("web.yaml"), service).expect("a file");
    let told = place.said(&["validate", "web.yaml", "job.yaml"]);
    assert_eq!(told, "job.yaml: MoeJob small is valid\n");
    let (code, told) = place.refused(&["validate", "web.yaml"]);
    assert!(code == 2 && told.contains("it holds no MoeJob"), "{told}");
    let asked = ["validate", "web.yaml", "job.yaml", "--set", "training.steps=0"];
    assert_eq!(place.refused(&asked).0, 2, "a manifest beside it is still judged");
}

/// A run is named, or its folder is, wherever a model is.
#[test]
fn a_run_is_named_wherever_a_model_is() {
    let (place, _) = Place::trained();
    for named in ["small", "runs/small", "runs/small/checkpoints"] {
        let shown = place.said(&["checkpoint", "show", named]);
        assert!(shown.contains("step      10,"), "{named}: {shown}");
        let verified = place.said(&["checkpoint", "verify", named]);
        assert!(verified.contains("step-00000010: good"), "{named}: {verified}");
        let from = format!("model.from.path={named}");
        let name = format!("from-{}", named.len());
        let start = ["run", "job.yaml", "--name", &name, "--set", &from, "--set"];
        place.said(&[&start[..], &["training.steps=1"]].concat());
        let steps = std::fs::read_to_string(place.path(&format!("runs/{name}/metrics.jsonl")));
        let step: serde_json::Value =
            serde_json::from_str(steps.expect("a run's steps").trim()).expect("JSON");
        assert!(step["loss"].as_f64() < Some(4.0), "it knows something already: {step}");
    }
}

/// A manifest for a cluster says so where it runs on one machine, and what submits it.
#[test]
fn a_manifest_of_a_cluster_says_what_it_is_for() {
    let place = Place::new();
    let volume = "volumes=[{mountPath: corpus, configMap: c, readOnly: true}]";
    let run = ["run", "job.yaml", "--set", volume, "--set", "image=a.example/b:1"];
    let told = String::from_utf8_lossy(&place.moejob(&run).stderr).into_owned();
    let expected = "spec.image, spec.volumes are for a cluster, where `moejob kube submit";
    assert!(told.contains(expected), "{told}");
    let told = place.moejob(&["train", "job.yaml", "--name", "plain"]);
    assert!(told.status.success(), "`train` is another word for `run`");
    assert!(!String::from_utf8_lossy(&told.stderr).contains("cluster"), "{told:?}");
    // The code of a refusal is explained.
    assert!(place.said(&["explain", "E0204"]).starts_with("E0204: Steps, batches"));
}

/// `-o` says how a result is written, and never where to.
#[test]
fn the_letter_o_means_one_thing() {
    let place = Place::new();
    let tokenizer = ["data", "tokenizer", "words/*.txt", "--tokens", "270", "--out", "t.json"];
    let made = place.json(&[&tokenizer[..], &["-o", "json"]].concat());
    assert_eq!(made["path"], "t.json");
    for asked in [
        &["data", "tokenizer", "words/*.txt", "-o", "u.json"][..],
        &["data", "tokenize", "words/*.txt", "--tokenizer", "bytes", "-o", "made"],
        &["report", "small", "-o", "page.html"],
        &["init", "mine", "-o", "mine.yaml"],
    ] {
        let (code, told) = place.refused(asked);
        assert_eq!(code, 2, "{asked:?}: {told}");
        assert!(!Path::new(&place.path(asked[asked.len() - 1])).exists());
    }
}

/// Lessons come with their texts wherever the program is, and one run needs no file at all.
#[test]
fn lessons_are_written_where_there_is_no_clone() {
    let place = Place::new();
    let told = place.said(&["examples", "1", "one"]);
    assert!(told.starts_with("one/examples/01-first-run.yaml\n  Lesson 1: "), "{told}");
    assert!(told.contains("\n  Machine: two cores"), "{told}");
    assert!(place.path("one/examples/corpus/shakespeare.txt").is_file());
    assert!(!place.path("one/examples/corpus/rust.txt").exists(), "it is none of lesson 1");
    let all = place.said(&["examples", "all"]);
    assert_eq!(all.matches("\n  Lesson ").count(), 9, "{all}");
    assert!(place.path("all/examples/slurm/one-node.sh").is_file());
    for entry in std::fs::read_dir(place.path("all/examples")).expect("a folder").flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|ending| ending == "yaml") {
            place.said(&["validate", &path.display().to_string()]);
        }
    }
    let (code, told) = place.refused(&["examples", "12"]);
    assert!(code == 2 && told.contains("lessons are 1 to 9"), "{told}");
    // What is there already stays.
    std::fs::write(place.path("one/examples/01-first-run.yaml"), "mine").expect("a file");
    let output = place.moejob(&["examples", "1", "one"]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && told.contains("is another one"), "{told}");
    let kept = std::fs::read_to_string(place.path("one/examples/01-first-run.yaml"));
    assert_eq!(kept.expect("a file"), "mine");
    let few = ["training.steps=2", "--set", "training.schedule={constant: {}}"];
    place.said(&[&["run", "tiny", "--set"], &few[..]].concat());
    assert!(place.path("runs/tiny/checkpoints/step-00000002").is_dir());
}
