//! From a manifest to a model that is used, looked at and asked about, as a person types it.

mod place;

use moejob_manifest::explain;
use place::{PROGRAM, Place};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn a_model_is_used_by_the_command_that_is_printed() {
    let (place, told) = Place::trained();
    let printed = told.lines().find_map(|line| line.strip_prefix("try it: "));
    let printed = printed.unwrap_or_else(|| panic!("no command in {told}"));
    assert!(printed.ends_with(" generate runs/small --prompt \"The \""), "{printed}");
    let output = place.command("sh", &["-c", printed]);
    assert!(output.status.success() && output.stdout.len() > 100, "{printed}: {output:?}");

    // Whatever of its folders is named, it is the same model, and a seed repeats.
    let spoken = |at: &str, more: &[&str]| {
        let asked = ["generate", at, "--prompt", "the ", "--json", "--max-tokens", "40"];
        place.json(&[&asked, more].concat())
    };
    let same = ["--seed", "5"];
    let first = spoken("runs/small", &same);
    assert_eq!(first["tokens"].as_array().map(Vec::len), Some(40), "{first}");
    assert_eq!((&first["promptTokens"], &first["end"]), (&4.into(), &"maxTokens".into()));
    for at in ["runs/small/checkpoints", "runs/small/checkpoints/step-00000010"] {
        assert_eq!(spoken(at, &same)["tokens"], first["tokens"], "{at}");
    }
    assert_ne!(spoken("runs/small", &["--seed", "6"])["tokens"], first["tokens"]);
    let greedy = spoken("runs/small", &["--temperature", "0"]);
    assert_eq!(greedy["tokens"], spoken("runs/small", &["--top-k", "1"])["tokens"]);

    // What is exported says the same, with its tokenizer and its length.
    place.said(&["checkpoint", "export", "runs/small", "exported"]);
    let config = std::fs::read_to_string(place.path("exported/config.json")).expect("a file");
    let config: Value = serde_json::from_str(&config).expect("JSON");
    assert_eq!(config["max_position_embeddings"], 32);
    assert!(place.path("exported/tokenizer.json").is_file());
    let exported = spoken("exported", &["--temperature", "0"]);
    assert_eq!((&exported["tokens"], &exported["text"]), (&greedy["tokens"], &greedy["text"]));

    // `eval` sees as many tokens at once as training did.
    let measured = place.json(&["eval", "runs/small", "--data", "words", "--json"]);
    assert_eq!(measured["sequenceLength"], 32);
    let typed = ["eval", "runs/small", "--data", "words", "--json", "--sequence-length", "16"];
    assert_eq!(place.json(&typed)["sequenceLength"], 16);

    // And keeps documents apart where training did.
    let lines: String = (0..60).map(|i| format!("{{\"text\": \"step {i} gang\"}}\n")).collect();
    std::fs::write(place.path("lines.jsonl"), lines).expect("a file");
    let job = ["run", "job.yaml", "--name", "apart", "--set", "training.steps=5", "--set"];
    let held_out = "data.validation={from: {jsonl: {paths: [lines.jsonl]}}, everySteps: 5}";
    let data = ["data.resetAtBoundaries=true", "--set", held_out];
    place.said(&[&job[..], &data].concat());
    let metrics = std::fs::read_to_string(place.path("runs/apart/metrics.jsonl")).expect("a file");
    let last: Value = serde_json::from_str(metrics.lines().last().expect("a line")).expect("JSON");
    let trained = last["validationLoss"].as_f64().expect("a held-out loss");
    let measured = |more: &[&str]| {
        let asked = ["eval", "runs/apart", "--data", "lines.jsonl", "--json"];
        place.json(&[&asked, more].concat())["loss"].as_f64().expect("a loss")
    };
    assert!((measured(&[]) - trained).abs() < 1e-6, "{} {trained}", measured(&[]));
    let together = measured(&["--reset-at-boundaries", "false"]);
    assert!((together - trained).abs() > 1e-6, "{together} {trained}");

    // What cannot be asked is looked at.
    let choice = ["run", "job.yaml", "--name", "choice", "--set"];
    let output = place.moejob(&[&choice[..], &["model.router={kind: expertChoice}"]].concat());
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let printed = told.lines().find_map(|line| line.strip_prefix("try it: "));
    let printed = printed.unwrap_or_else(|| panic!("no command in {told}"));
    let output = place.command("sh", &["-c", printed]);
    assert!(output.status.success(), "{printed}: {output:?}");

    let (code, told) = place.refused(&["generate", "runs/small", "--prompt", ""]);
    assert!(code == 2 && told.contains("the prompt is empty"), "{told}");
    for (asked, expected) in [
        (&["words", "--prompt", "a"][..], "a folder without weights"),
        (&["runs/smal", "--prompt", "a"], "`moejob ls` lists the runs"),
        (&["runs/small", "--temperature", "-1"], "temperature"),
    ] {
        let (code, told) = place.refused(&[&["generate"], asked].concat());
        assert!(code != 0 && told.contains(expected), "{told}");
        assert!(!told.contains("unexpected argument"), "{told}");
    }
    // What has no memory is refused before any is taken, with what would fit.
    for (asked, option) in [
        ("generate runs/small --prompt a --max-tokens 1048576", "--max-tokens "),
        ("eval runs/small --data words --sequence-length 1048576", "--sequence-length "),
    ] {
        let line = format!("ulimit -v 250000; exec {PROGRAM} {asked}");
        let output = place.command("sh", &["-c", &line]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2), "{told}");
        assert!(told.contains("the model wants ") && told.contains(option), "{told}");
        assert!(told.contains(" would fit; or raise it: `ulimit -v unlimited`"), "{told}");
    }
    let (code, told) = place.refused(&["generate", "mistralai/Mixtral-8x7B-v0.1"]);
    assert!(code == 3 && told.contains("nothing is downloaded"), "{told}");
}

#[test]
fn a_run_is_looked_at_listed_and_continued_under_other_values() {
    let (place, _) = Place::trained();
    let told = place.said(&["report", "runs/small"]);
    assert!(told.starts_with("report.html"), "{told}");
    let html = std::fs::read_to_string(place.path("report.html")).expect("a file");
    for expected in [
        "held out: last", "World size", "layer 1: 4 experts", "all steps are done", "bits per byte",
        "started by moejob run job.yaml", "logarithmic loss",
    ] {
        assert!(html.contains(expected), "{expected}");
    }
    assert_eq!(place.said(&["report", "runs/small", "--out", "-"]), html);
    let (code, told) = place.refused(&["report", "words"]);
    assert!(code == 2 && told.contains("metrics.jsonl") && !told.contains("os error"), "{told}");
    let (code, told) = place.refused(&["report", "runs"]);
    assert!(code == 2 && told.contains("name one of them, such as runs/small"), "{told}");
    assert_eq!(place.said(&["report", "small", "--out", "-"]), html, "by the name that `ls` gives");

    // By its files alone: where it stands, and what has happened.
    let list = place.json(&["ls", "-o", "json"]);
    let of = &list[0];
    assert_eq!((&of["name"], &of["state"]), (&"small".into(), &"done".into()), "{list}");
    assert_eq!((&of["steps"], &of["step"]["step"]), (&10.into(), &10.into()), "{list}");
    assert!(place.said(&["ls"]).contains("small   done    10/10"));
    let page = place.said(&["show", "runs/small"]);
    let named = place.said(&["show", "small"]);
    assert!(named.starts_with("small: done\n"), "by the name that `ls` gives: {named}");
    assert!(page.starts_with("small: done\n") && page.contains("JobCompleted"), "{page}");
    let lines = place.said(&["tail", "runs/small", "-n", "3", "--follow"]);
    assert_eq!(lines.lines().count(), 3, "{lines}");
    assert!(lines.lines().last().is_some_and(|line| line.starts_with("step 10  loss ")), "{lines}");
    assert!(place.said(&["tail", "runs/small", "--events"]).contains("AttemptStarted"));
    let json = place.json(&["tail", "small", "-n", "2", "-o", "json"]);
    assert_eq!((json[0]["step"].as_u64(), json[1]["step"].as_u64()), (Some(9), Some(10)));
    let (code, told) = place.refused(&["show", "words"]);
    assert!(code == 2 && told.contains("neither a run of"), "{told}");

    // More steps, and another job beside it, without another file.
    let schedule = "training.schedule={linear: {minLearningRate: 1.0e-4}}";
    let falling = ["run", "job.yaml", "--name", "falling", "--set", schedule, "--set"];
    place.said(&[&falling[..], &["training.steps=5"]].concat());
    let told = place.moejob(&[&falling[..], &["training.steps=9"]].concat()).stderr;
    let told = String::from_utf8_lossy(&told).into_owned();
    let jump = "the learning rate jumps from 1.00e-4 at step 5 to 3.81e-3 at step 6";
    assert!(told.contains(jump), "{told}");
    let told = place.moejob(&["run", "job.yaml", "--set", "training.steps=12"]).stderr;
    let told = String::from_utf8_lossy(&told).into_owned();
    assert!(told.contains("\ngoes on from step-00000010\n"), "{told}");
    place.said(&["run", "job.yaml", "--set", "training.steps=3", "--name", "other"]);
    let newest = |run: &str| {
        let list = place.json(&["checkpoint", "ls", run, "-o", "json"]);
        list.as_array().and_then(|all| all.last()).map(|last| last["step"].clone())
    };
    assert_eq!(newest("runs/small"), Some(12.into()));
    assert_eq!(newest("runs/other"), Some(3.into()));
    let drawn = ["run", "job.yaml", "--name", "drawn", "--set", "training.steps=6", "--tfevents"];
    let told = String::from_utf8_lossy(&place.moejob(&drawn).stderr).into_owned();
    assert!(told.starts_with("drawn: ") && told.contains(" parameters, "), "{told}");
    assert!(told.contains("  memory ") && told.contains("; in runs/drawn"), "{told}");
    assert!(told.contains(" to go; 6 steps are 0."), "{told}");
    let files = std::fs::read_dir(place.path("runs/drawn")).expect("a folder").flatten();
    let events = |name: &str| name.starts_with("events.out.tfevents.");
    let names = files.map(|file| file.file_name().to_string_lossy().into_owned());
    assert_eq!(names.filter(|name| events(name)).count(), 1);
    let three = ["run", "job.yaml", "--set", "training.steps=2", "--name", "three"];
    let told = place.moejob(&[&three[..], &["--workers", "3"]].concat()).stderr;
    let told = String::from_utf8_lossy(&told).into_owned();
    assert!(told.contains("--workers 3: a step has 2 micro-batches"), "{told}");
    let told = place.moejob(&[&three[..], &["--workers", "2"]].concat()).stderr;
    assert!(!String::from_utf8_lossy(&told).contains("micro-batches"), "{told:?}");
    // The best checkpoint is kept beside the newest one. A learning rate that climbs to 1 ends in
    // a held-out loss that is not the least.
    let rate = "training.optimizer={adamw: {learningRate: 1.0}}";
    let best = ["run", "job.yaml", "--name", "best", "--set", rate, "--set"];
    let keep = "checkpoint={everySteps: 5, keep: 1, keepBest: true}";
    let climb = "training.schedule={constant: {warmupSteps: 19}}";
    let more = [keep, "--set", climb, "--set", "training.steps=20"];
    place.said(&[&best[..], &more].concat());
    let kept = place.json(&["checkpoint", "ls", "runs/best", "-o", "json"]);
    let kept: Vec<&Value> = kept.as_array().expect("a list").iter().map(|of| &of["step"]).collect();
    let metrics = std::fs::read_to_string(place.path("runs/best/metrics.jsonl")).expect("a file");
    let losses = metrics.lines().filter_map(|line| {
        let line: Value = serde_json::from_str(line).expect("JSON");
        Some((line["validationLoss"].as_f64()?, line["step"].as_u64()?))
    });
    let (_, least) = losses.min_by(|a, b| a.0.total_cmp(&b.0)).expect("a held-out loss");
    assert!(least < 20, "the test needs a run that gets worse: {metrics}");
    assert_eq!(kept, [&Value::from(least), &Value::from(20)]);
    let (code, told) = place.refused(&["run", "job.yaml", "--set", "training.stepz=3"]);
    assert!(code == 2 && told.contains("did you mean `steps`"), "{told}");
}

/// A change that turns out wrong later leaves no trace: without it the job goes on.
#[test]
fn a_change_that_fails_can_be_undone() {
    let (place, _) = Place::trained();
    let job = || std::fs::read(place.path("runs/small/job.json")).expect("a file");
    let before: Value = serde_json::from_slice(&job()).expect("JSON");
    let more = place.path("words/more.txt");
    std::fs::write(&more, "a document that was not there").expect("a file");
    let (code, told) = place.refused(&["run", "job.yaml", "--set", "training.steps=20"]);
    assert_eq!(code, 3, "{told}");
    // The file is named, and all of it is told once.
    assert_eq!(told.matches("words/more.txt").count(), 1, "{told}");
    assert!(told.contains("of the data's files added: words/more.txt"), "{told}");
    assert!(!told.contains("lost small") && !told.contains("/logs"), "{told}");
    let after: Value = serde_json::from_slice(&job()).expect("JSON");
    assert_eq!(after["spec"], before["spec"]);
    std::fs::remove_file(more).expect("a file");
    place.said(&["run", "job.yaml"]);
    // What never trained a step binds nobody.
    let wrong = ["run", "job.yaml", "--name", "new", "--set"];
    place.refused(&[&wrong[..], &["data.train={text: {paths: ['none/*.txt']}}"]].concat());
    place.said(&[&wrong[..], &["training.steps=2"]].concat());
}

#[test]
fn a_first_manifest_is_made_and_fields_are_explained() {
    let place = Place::new();
    place.said(&["init", "mine"]);
    place.said(&["validate", "mine.yaml"]);
    let (code, told) = place.refused(&["init", "mine"]);
    assert!(code == 2 && told.contains("is there already"), "{told}");
    // Its own words name the file that it is.
    let told = place.said(&["init", "mine", "--out", "my own.yaml"]);
    assert!(told.ends_with("moejob run 'my own.yaml'\n"), "{told}");
    let text = std::fs::read_to_string(place.path("my own.yaml")).expect("a file");
    assert!(text.contains("# moejob run 'my own.yaml' "), "{text}");
    // A model whose kind the workers do not compute yet.
    let later = place.moejob(&["init", "later", "--preset", "deepseek-v3"]);
    let told = String::from_utf8_lossy(&later.stderr).into_owned();
    assert!(later.status.success() && told.contains("latent attention"), "{told}");
    assert!(String::from_utf8_lossy(&later.stdout).contains("it cannot run yet"), "{later:?}");
    let (code, told) = place.refused(&["init", "other", "--preset", "tinny"]);
    assert!(code == 2 && told.contains("tiny"), "{told}");
    let text = place.said(&["explain", "spec.checkpoint.keep"]);
    assert!(text.contains("default 3; may change while the job is there"), "{text}");
    let (code, told) = place.refused(&["explain", "steps"]);
    assert!(code == 2 && told.contains("spec.training.steps"), "{told}");
}

#[test]
fn the_page_of_fields_in_the_tree_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/manifest.md");
    let made = explain::markdown();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &made).expect("a file");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let how = "UPDATE_GOLDEN=1 cargo test --workspace --test people";
    assert!(found == made, "docs/manifest.md is old: {how}, and look at the difference");
}

#[test]
fn what_is_for_tools_is_one_value_of_json() {
    let place = Place::new();
    let found = place.json(&["doctor", "-o", "json"]);
    let lines = found.as_array().expect("a list");
    let names: Vec<&Value> = lines.iter().map(|of| &of["name"]).collect();
    assert!(names.contains(&&"memory".into()), "{names:?}");
    let found = place.json(&["data", "inspect", "words/0.txt", "words/1.txt", "-o", "json"]);
    assert_eq!(found.as_array().map(Vec::len), Some(2));
    assert_eq!(found[1]["path"], "words/1.txt");
    let bytes = ["data", "tokenize", "words/0.txt", "--out", "made", "--tokenizer", "bytes"];
    let made = place.json(&[&bytes[..], &["--json"]].concat());
    assert_eq!((&made["bin"], &made["documents"]), (&"made.bin".into(), &1.into()), "{made}");
    let made = ["data", "tokenizer", "words/*.txt", "--tokens", "270", "--out", "t.json", "--json"];
    assert_eq!(place.json(&made)["tokens"], 270);
    let found = place.json(&["explain", "data.train.mixture", "-o", "json"]);
    assert_eq!(found[0]["path"], "spec.data.train.mixture", "{found}");
    place.said(&["run", "job.yaml"]);
    for how in [&["-o", "json"][..], &["--json"]] {
        let json = |asked: &[&str]| place.json(&[asked, how].concat());
        let few = ["generate", "small", "--prompt", "the ", "--max-tokens", "2"];
        assert_eq!(json(&few)["tokens"].as_array().map(Vec::len), Some(2));
        assert!(json(&["eval", "small", "--data", "words"])["loss"].is_number());
        let out = format!("out{}", how.len());
        assert_eq!(json(&["checkpoint", "export", "small", &out])["path"], out.as_str());
        let grown = json(&["checkpoint", "grow", "small", &format!("{out}-grown")]);
        assert!(grown["path"].as_str().is_some_and(|path| path.ends_with("step-00000010")));
    }
    let asked = ["checkpoint", "verify", "small", "runs/small/checkpoints/step-00000010"];
    let verified = place.moejob(&[&asked[..], &["-o", "json"]].concat());
    let found: Value = serde_json::from_slice(&verified.stdout).expect("JSON");
    assert_eq!((&found[0]["good"], &found[1]["good"]), (&true.into(), &true.into()), "{found}");
    assert_eq!(verified.status.code(), Some(0));
    // The plugin of kubectl by another name.
    let [a, b] = ["moe", "kube"].map(|name| place.said(&[name, "queue", "--help"]));
    assert_eq!(a.replace("moejob moe", "moejob kube"), b);
}

/// A job that is larger than any machine is refused before a worker or a folder is made.
#[test]
fn memory_that_no_machine_has_is_told_before_anything_starts() {
    let place = Place::new();
    let experts = "model.experts={count: 512, perToken: 2, intermediateSize: 65536}";
    let sets = ["--set", experts, "--set", "model.hiddenSize=16384"];
    let (code, told) = place.refused(&[&["run", "job.yaml"], &sets[..]].concat());
    assert!(code == 2 && told.contains("the job wants "), "{told}");
    assert!(told.contains("needs less"), "{told}");
    assert!(!place.path("runs").exists(), "{told}");
}

#[test]
fn a_reader_that_goes_away_and_a_full_disk_are_no_panics() {
    let place = Place::new();
    for command in [
        "explain --markdown",
        "crd",
        "completions bash",
        "doctor",
        "plan job.yaml",
        "data inspect words/0.txt",
    ] {
        let shell = |line: String| place.command("sh", &["-c", &line]);
        let gone = shell(format!("{PROGRAM} {command} | head -c 1"));
        let told = String::from_utf8_lossy(&gone.stderr).into_owned();
        assert!(!told.contains("panicked"), "{command}: {told}");
        let closed = shell(format!("{PROGRAM} {command} 2>&- | head -c 1"));
        assert_eq!(closed.status.code(), Some(0), "{command}");
        let full = shell(format!("{PROGRAM} {command} > /dev/full"));
        let told = String::from_utf8_lossy(&full.stderr).into_owned();
        assert!(!told.contains("panicked"), "{command}: {told}");
        assert!(full.status.code() == Some(1) && told.contains("cannot be written"), "{told}");
    }
}

#[test]
fn what_is_no_checkpoint_is_told_by_what_it_is() {
    let place = Place::new();
    std::fs::create_dir(place.path("model")).expect("a folder");
    std::fs::write(place.path("model/config.json"), "{}").expect("a file");
    for (at, what) in [
        ("nowhere", "there is no such folder"),
        ("job.yaml", "it is a file"),
        ("words", "a folder without a checkpoint"),
        ("model", "`moejob checkpoint import`"),
    ] {
        for verb in ["ls", "show", "verify"] {
            let (code, told) = place.refused(&["checkpoint", verb, at]);
            assert!(code == 2 && told.contains(what), "{verb} {at}: {told}");
        }
    }
}

/// A value that is none is told in words, and never by the program's own types.
#[test]
fn numbers_that_are_none_are_refused_in_words() {
    let place = Place::new();
    for (command, option, most) in [
        ("generate x", "--threads", "1024"),
        ("generate x", "--top-k", "4294967295"),
        ("generate x", "--seed", "18446744073709551615"),
        ("generate x", "--max-tokens", "1048576"),
        ("eval x --data y", "--threads", "1024"),
        ("eval x --data y", "--sequence-length", "1048576"),
        ("run job.yaml", "--workers", "1024"),
        ("run job.yaml", "--threads", "1024"),
        ("tail x", "--lines", "4294967295"),
        ("data tokenizer x", "--tokens", "1048576"),
        ("bench --preset tiny", "--steps", "100000"),
        ("preflight", "--gpus", "64"),
    ] {
        for value in ["x", "-1", "1.5", "99999999999999999999"] {
            let typed: Vec<&str> = command.split(' ').chain([option, value]).collect();
            let (code, told) = place.refused(&typed);
            let expected = format!(" to {most}");
            assert!(code == 2 && told.contains("a whole number from "), "{typed:?}: {told}");
            assert!(told.contains(&expected), "{typed:?}: {told}");
            for rust in ["digit", "..", "unexpected argument", "parse"] {
                assert!(!told.contains(rust), "{typed:?}: {told}");
            }
        }
    }
    let (code, told) = place.refused(&["bench", "--preset", "nope"]);
    assert!(code == 2 && told.contains("one of tiny, ") && !told.contains("variant"), "{told}");
}

/// What a job lacks is told by name before a worker or a folder is made.
#[test]
fn what_is_not_there_is_told_before_anything_starts() {
    let place = Place::new();
    for (set, expected) in [
        (&["model.from.path=some/model"][..], "spec.model.from.path: `some/model` is not there"),
        (&["model.from.path=some/model"], "nothing is downloaded here"),
        (&["data.tokenizer=gpt2", "model.vocabSize=300"], "spec.data.tokenizer: `gpt2` is not"),
        (&["training.steps=1e3"], "found `1e3`"),
        (&["training.seed=yes"], "found `yes`"),
        (&["model.experts=["], "unclosed bracket"),
        (&["data.train.text.paths.0=x"], "set a list as a whole"),
        (&["metadata.name=x"], "--name"),
    ] {
        let sets = set.iter().flat_map(|set| ["--set", set]);
        let asked: Vec<&str> = ["run", "job.yaml"].into_iter().chain(sets).collect();
        let (code, told) = place.refused(&asked);
        assert!(code == 2 && told.contains(expected), "{set:?}: {told}");
        assert!(!told.contains("<input>") && !told.contains("os error"), "{told}");
    }
    // A file that was changed has no lines to name.
    let (_, told) = place.refused(&["run", "job.yaml", "--set", "nodes.profile=gpu"]);
    assert!(told.contains("job.yaml: E0301") && !told.contains("job.yaml:1"), "{told}");
    assert!(!place.path("runs").exists());
    for (asked, expected) in [
        (&["--dir", "/dev/null"][..], "choose another --dir"),
        (&["--set", "checkpoint.location=/dev/null/x"], "choose another spec.checkpoint.location"),
        (&["--trace", "none/trace.json"], "--trace none/trace.json: No such file"),
        (&["--mlflow", "banana"], "--mlflow: it is no http"),
    ] {
        let (code, told) = place.refused(&[&["run", "job.yaml"], asked].concat());
        assert!(code == 2 && told.contains(expected), "{asked:?}: {told}");
    }
    let output = place.moejob(&["run", "job.yaml", "--set", "suspend=true"]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && told.contains("spec.suspend is true"), "{told}");
    // A run that has not begun says so.
    let output = place.moejob(&["tail", "small"]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("no step is done yet; it is suspended"), "{told}");
}

/// Runs it on a terminal of so many columns, with `typed` at its keyboard: what the terminal saw.
fn on_terminal(
    place: &Place,
    columns: u16,
    term: &str,
    arguments: &[&str],
    typed: &[u8],
) -> String {
    use std::io::{Read, Write};
    let flags = rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY;
    let master = rustix::pty::openpt(flags).expect("a terminal");
    rustix::pty::unlockpt(&master).expect("unlocked");
    let name = rustix::pty::ptsname(&master, Vec::new()).expect("a name");
    let name = name.to_str().expect("text");
    let slave = std::fs::File::options().read(true).write(true).open(name).expect("opens");
    let size =
        rustix::termios::Winsize { ws_row: 40, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(&slave, size).expect("a size");
    let end = || Stdio::from(slave.try_clone().expect("a terminal"));
    let mut child = Command::new(PROGRAM)
        .args(arguments)
        .current_dir(place.path(""))
        .env("TERM", term)
        .stdin(end())
        .stdout(end())
        .stderr(end())
        .spawn()
        .expect("the program is there");
    drop(slave);
    let mut master = std::fs::File::from(master);
    master.write_all(typed).expect("typed");
    let (mut seen, mut buffer) = (Vec::new(), [0; 4096]);
    // The end of it is an error of Linux's.
    while let Ok(count @ 1..) = master.read(&mut buffer) {
        seen.extend_from_slice(&buffer[..count]);
    }
    assert!(child.wait().expect("ends").success(), "{}", String::from_utf8_lossy(&seen));
    String::from_utf8_lossy(&seen).into_owned()
}

/// The same text, all in one colour.
fn without_colours(seen: &str) -> String {
    let mut plain = String::new();
    for (at, part) in seen.split("\x1b[").enumerate() {
        match part.split_once('m').filter(|(code, _)| code.bytes().all(|c| c.is_ascii_digit())) {
            Some((_, rest)) if at > 0 => plain += rest,
            _ if at > 0 => plain += &format!("\x1b[{part}"),
            _ => plain += part,
        }
    }
    plain
}

/// A line that changes stays one line, and each held-out loss stays on the screen.
#[test]
fn a_terminal_is_written_no_wider_than_it_is() {
    let place = Place::new();
    let run = |columns: u16, term: &str, name: &str| {
        let asked = ["run", "job.yaml", "--name", name, "--set", "training.steps=60"];
        on_terminal(&place, columns, term, &asked, b"")
    };
    for columns in [30, 40, 80, 160] {
        let painted = run(columns, "xterm", &format!("w{columns}"));
        assert!(painted.contains("\x1b[36mloss "), "a loss has a colour: {painted:?}");
        let seen = without_colours(&painted);
        // A path may be wider than any terminal.
        let drawn = seen.split(['\r', '\n']).map(|line| line.trim_start_matches("\x1b[K"));
        let wide = drawn.filter(|line| line.chars().count() >= columns.into());
        let wide: Vec<&str> = wide.filter(|line| line.trim_start().contains(' ')).collect();
        assert_eq!(wide, [""; 0], "{columns}");
        let drawn: Vec<&str> = seen.split("\r\x1b[K").skip(1).collect();
        assert!(drawn.len() > 12, "{seen:?}");
        for line in drawn.iter().filter_map(|line| line.split(['\r', '\n']).next()) {
            let step = line.starts_with("step ") && !line.contains("held-out");
            assert!(!step || line.chars().count() < columns.into(), "{columns}: {line:?}");
        }
        // Steps 5, 10, ..., 60 are measured, whatever the time between them.
        let kept = drawn.iter().filter(|line| line.starts_with("step ") && line.contains('\n'));
        assert!(kept.count() >= 12, "{columns}: {seen:?}");
        assert!(seen.matches("  held-out ").count() >= 12, "{columns}: {seen:?}");
        assert!(!seen.contains("\r\n\r\n"), "no empty lines: {seen:?}");
    }
    let seen = run(80, "dumb", "dumb");
    assert!(!seen.contains('\x1b'), "{seen:?}");
    let steps = seen.lines().filter(|line| line.starts_with("step "));
    assert_eq!(steps.filter(|line| line.contains("  held-out ")).count(), 12, "{seen:?}");
    let exported = on_terminal(&place, 40, "xterm", &["checkpoint", "export", "dumb", "o"], b"");
    let wide = exported.split(['\r', '\n']).find(|line| line.chars().count() >= 40);
    assert_eq!(wide, None, "{exported:?}");
    // A conversation goes on after what is no text, and ends when it is told to.
    let asked = ["generate", "dumb", "--max-tokens", "4"];
    let seen = on_terminal(&place, 80, "xterm", &asked, b"the\n\xff\xfe\n/help\n/new\n\n/quit\n");
    let seen = seen.split_whitespace().collect::<Vec<_>>().join(" ");
    for expected in ["9.42 k of them for a token", "/new begins a new text, /quit", "is empty"] {
        assert!(seen.contains(expected), "{expected}: {seen}");
    }
}

/// The same documents give the same tokenizer, and what is refused leaves no file.
#[test]
fn a_tokenizer_is_made_of_own_documents() {
    let place = Place::new();
    let make =
        |to: &'static str| ["data", "tokenizer", "words/*.txt", "--tokens", "270", "--out", to];
    let told = place.said(&make("one.json"));
    place.said(&make("two.json"));
    let read = |name: &str| std::fs::read(place.path(name)).expect("a file");
    assert_eq!(read("one.json"), read("two.json"));
    assert!(told.starts_with("one.json: 270 tokens, learned from "), "{told}");
    assert!(told.contains("vocabSize: 270") && told.contains("endOfDocument: 0"), "{told}");
    // It writes what it was made from, and what it never saw, and reads both again.
    let unseen = "Ωμέγα <|no|> \u{1f980} 12\n";
    std::fs::write(place.path("unseen.txt"), unseen).expect("a file");
    for name in ["words/3.txt", "unseen.txt"] {
        let found = place.json(&["data", "inspect", name, "--tokenizer", "one.json", "--json"]);
        let text = found["text"].as_str().expect("text");
        let whole = String::from_utf8(read(name)).expect("text");
        assert!(!text.is_empty() && whole.starts_with(text), "{text:?}");
        let bytes = found["bytes"].as_u64().expect("a number");
        assert!(found["tokens"].as_u64() <= Some(bytes), "{found}");
    }

    let (code, told) = place.refused(&make("one.json"));
    assert!(code == 2 && told.contains("delete it"), "{told}");
    let (code, told) = place.refused(&make("none/one.json"));
    assert!(code == 2 && told.contains("make the folder first"), "{told}");
    let lines = "{\"text\": \"good\"}\n{\"words\": 1}\n";
    std::fs::write(place.path("bad.jsonl"), lines).expect("a file");
    let (code, told) = place.refused(&["data", "tokenizer", "bad.jsonl", "--out", "bad.json"]);
    assert!(code == 3 && told.contains("line 2") && told.contains("no key `text`"), "{told}");
    assert!(!place.path("bad.json").exists());
    let (code, told) = place.refused(&["data", "tokenizer", "unseen.txt", "--tokens", "100"]);
    assert!(code == 2 && told.contains("--tokens"), "{told}");
}
