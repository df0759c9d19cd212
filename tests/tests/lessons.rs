//! The lessons, as a person follows them: each command in the header of an example is run, one
//! after the other, in a copy of the files that the lessons read. Only the numbers of steps are
//! smaller.

use moejob_tests::{moejob, root, tracked};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lessons whose commands run elsewhere, and where.
const ELSEWHERE: [(&str, &str); 3] = [
    ("03-on-kubernetes", "tests/tests/cluster/life.rs"),
    ("05-one-gpu.yaml", "by hand: it needs a GPU (tests/gpu/jobs runs smaller ones)"),
    ("06-two-gpus.yaml", "by hand: it needs two GPUs (tests/gpu/two runs smaller ones)"),
];
const HERE: [&str; 6] = [
    "01-first-run.yaml",
    "02-elastic.yaml",
    "04-routers.yaml",
    "07-own-data",
    "08-fine-tune",
    "09-use-it.yaml",
];

/// Words that a command of a header begins with.
const PROGRAMS: [&str; 9] =
    ["cargo", "moejob", "sh", "python", "grep", "tail", "echo", "kill", "kubectl"];

/// A copy of the files that lessons read, with fewer steps, and `moejob` in its `bin`.
struct Place {
    folder: tempfile::TempDir,
    fewer: u64,
}

impl Place {
    /// Every number of steps of the examples is divided by `fewer`.
    fn new(fewer: u64) -> Place {
        let folder = tempfile::tempdir().expect("a folder");
        let endings = [".md", ".yaml", ".sh", ".py", ".txt"];
        for (path, text) in tracked(&endings) {
            let name = path.strip_prefix(root()).expect("a file of the checkout");
            let to = folder.path().join(name);
            std::fs::create_dir_all(to.parent().expect("a folder")).expect("a folder");
            let text = if name.starts_with("examples") { scaled(&text, fewer) } else { text };
            std::fs::write(to, text).expect("a file");
        }
        std::fs::create_dir(folder.path().join("bin")).expect("a folder");
        std::os::unix::fs::symlink(moejob(), folder.path().join("bin/moejob")).expect("a link");
        Place { folder, fewer }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs a command of a header, and gives what it prints.
    fn run(&self, command: &str) -> String {
        let command = scaled(command, self.fewer).replace("cargo run --release --", "moejob");
        let path = std::env::var("PATH").unwrap_or_default();
        let output = Command::new("sh")
            .args(["-c", &command])
            .current_dir(self.folder.path())
            .env("PATH", format!("{}:{path}", self.path("bin").display()))
            .output()
            .expect("a shell");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command}: {:?}\n{told}", output.status.code());
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs all commands of a header but those that begin with one of `but`, and gives each with
    /// what it printed.
    fn follow(&self, example: &str, but: &[&str]) -> Vec<(String, String)> {
        let commands = commands(&root().join("examples").join(example));
        assert!(commands.len() >= 2, "{example}: {commands:?}");
        let left = |command: &String| but.iter().any(|word| command.starts_with(word));
        let (left, run): (Vec<_>, Vec<_>) = commands.into_iter().partition(left);
        for command in left {
            println!("{example}: not run here: {command}");
        }
        run.into_iter().map(|command| (command.clone(), self.run(&command))).collect()
    }

    /// A field of all steps of a run.
    fn each(&self, run: &str, field: &str) -> Vec<Value> {
        let path = self.path(&format!("runs/{run}/metrics.jsonl"));
        let text = std::fs::read_to_string(path).expect("a run's steps");
        let step = |line: &str| serde_json::from_str::<Value>(line).expect("JSON")[field].clone();
        text.lines().map(step).collect()
    }
}

/// Numbers of steps divided by `fewer`; what is done every so many steps is done more often.
fn scaled(text: &str, fewer: u64) -> String {
    let mut text = text.to_string();
    for (field, divisor, least) in
        [("steps", fewer, 1), ("warmupSteps", fewer, 1), ("everySteps", fewer.div_ceil(2), 2)]
    {
        for sign in [": ", "="] {
            let name = format!("{field}{sign}");
            let mut from = 0;
            while let Some(at) = text[from..].find(&name).map(|at| from + at) {
                let start = at + name.len();
                from = start;
                let whole = !text[..at].ends_with(|c: char| c.is_alphanumeric());
                let rest = &text[start..];
                let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
                if let (true, Ok(number)) = (whole, rest[..digits].parse::<u64>()) {
                    let number = (number / divisor).max(least).to_string();
                    text.replace_range(start..start + digits, &number);
                }
            }
        }
    }
    text
}

/// The commands in the header of an example: lines of it that begin with a program, up to two
/// spaces, behind which it is explained.
fn commands(example: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(example).expect("an example");
    let header = text.lines().map_while(|line| line.strip_prefix('#'));
    let command = |line: &str| {
        let command = line.strip_prefix("   ")?.split("  ").next()?.trim();
        let program = command.split(' ').next()?;
        PROGRAMS.contains(&program).then(|| command.to_string())
    };
    header.filter_map(command).collect()
}

/// What was printed by the command that begins so.
fn printed<'a>(all: &'a [(String, String)], start: &str) -> &'a str {
    let found = all.iter().find(|(command, _)| command.starts_with(start));
    &found.unwrap_or_else(|| panic!("no command begins with {start}")).1
}

#[test]
fn every_lesson_is_followed_somewhere() {
    let mut found: Vec<String> = std::fs::read_dir(root().join("examples"))
        .expect("examples")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with(|c: char| c.is_ascii_digit()))
        .collect();
    found.sort();
    let mut known: Vec<&str> = HERE.into_iter().chain(ELSEWHERE.map(|(name, _)| name)).collect();
    known.sort_unstable();
    assert_eq!(found, known);
}

#[test]
fn numbers_of_steps_are_made_smaller() {
    let text = "steps: 600\neverySteps: 100 memoryEverySteps: 10 warmupSteps: 40 t.steps=800";
    let fewer = "steps: 6\neverySteps: 2 memoryEverySteps: 10 warmupSteps: 1 t.steps=8";
    assert_eq!(scaled(text, 100), fewer);
}

#[test]
fn lesson_1_trains_on_and_keeps_its_bits_on_three_workers() {
    let place = Place::new(100);
    place.follow("01-first-run.yaml", &[]);
    assert_eq!(place.each("first-run", "step").last(), Some(&8.into()));
    let [whole, three, frozen] =
        ["first-run", "three", "frozen"].map(|run| place.each(run, "loss"));
    assert_eq!((three.len(), frozen.len()), (6, 6));
    assert_eq!(whole[..6], three[..], "the same losses, bit for bit");
    assert_ne!(whole[..6], frozen[..]);
    let report = std::fs::read_to_string(place.path("report.html")).expect("a page");
    assert!(report.contains("first-run") && report.contains("frozen"));
}

/// A line `step 300/600  loss 1.7019  held-out 1.7799` with the numbers of that step, of a run's
/// lines.
fn with_numbers(line: &str, steps: &[Value]) -> String {
    let (before, rest) = line.split_once("step ").expect("a step");
    let number = rest.split('/').next().and_then(|number| number.parse::<u64>().ok());
    let step = steps.iter().find(|step| step["step"].as_u64() == number).expect("a step of it");
    let mut line = format!("{before}step {rest}");
    for (word, field) in [("  loss ", "loss"), ("  held-out ", "validationLoss")] {
        let Some(at) = line.find(word).map(|at| at + word.len()) else { continue };
        let end = line[at..].find(' ').map_or(line.len(), |end| at + end);
        let value = step[field].as_f64().unwrap_or_else(|| panic!("no {field}: {step}"));
        line.replace_range(at..end, &format!("{value:.4}"));
    }
    line
}

/// README and the header of lesson 1 have the losses that everybody sees. `UPDATE_GOLDEN` writes
/// those of this program there.
#[test]
fn readme_has_the_losses_of_lesson_1() {
    let place = Place::new(1);
    place.run("moejob run examples/01-first-run.yaml");
    let text = std::fs::read_to_string(place.path("runs/first-run/metrics.jsonl"));
    let text = text.expect("a run's steps");
    let steps: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let is_step = |line: &str| line.contains("step ") && line.contains("/600  loss ");
    for name in ["README.md", "examples/01-first-run.yaml"] {
        let path = root().join(name);
        let is = std::fs::read_to_string(&path).expect("a file");
        let lines = is.lines().map(|line| match is_step(line) {
            true => with_numbers(line, &steps),
            false => line.to_string(),
        });
        let expected = lines.collect::<Vec<_>>().join("\n") + "\n";
        assert!(is.lines().any(is_step), "{name} shows no step");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&path, &expected).expect("written");
            continue;
        }
        let how = "UPDATE_GOLDEN=1 writes these";
        assert!(is == expected, "{name} has other losses; {how}:\n{expected}");
    }
}

#[test]
fn lesson_2_compares_four_workers_with_one() {
    let place = Place::new(100);
    // The faults themselves are those of `faults.rs`.
    let all = place.follow("02-elastic.yaml", &["kill"]);
    assert_eq!(printed(&all, "grep").lines().count(), 4, "a process a worker: {all:?}");
    let losses: Vec<&str> = printed(&all, "tail").lines().collect();
    assert_eq!(losses.len(), 2, "{losses:?}");
    assert!(losses[0].starts_with("\"loss\":") && losses[0] == losses[1], "{losses:?}");
    assert!(printed(&all, "moejob tail").contains("WorkerStarted"));
}

#[test]
fn lesson_4_has_the_numbers_of_its_routers() {
    let place = Place::new(20);
    place.follow("04-routers.yaml", &[]);
    let dropped = |run: &str| place.each(run, "droppedTokens");
    let some = |all: Vec<Value>| all.iter().any(|number| number.as_f64() > Some(0.0));
    assert!(some(dropped("routers")) && !some(dropped("even")), "{:?}", dropped("routers"));
    let imbalance = place.each("choice", "expertImbalance");
    assert!(imbalance.iter().all(|number| number.as_f64() == Some(1.0)), "{imbalance:?}");
    let (held_out, churn) =
        (place.each("routers", "validationLoss"), place.each("routers", "churn"));
    // The first held-out loss has none before it.
    let both = |(loss, churn): &(&Value, &Value)| !loss.is_null() && !churn.is_null();
    assert!(held_out.iter().zip(&churn).any(|pair| both(&pair)), "{churn:?}");
    for field in ["tokensPerExpert", "routerEntropy"] {
        assert!(place.each("routers", field).iter().all(|value| !value.is_null()), "{field}");
    }
}

#[test]
fn lesson_7_takes_own_documents_and_a_tokenizer_of_their_own() {
    let place = Place::new(20);
    let all = place.follow("07-own-data/job.yaml", &[]);
    let tokenizer = printed(&all, "moejob data tokenizer");
    assert!(tokenizer.contains("320 tokens"), "as many as the manifest says: {tokenizer}");
    let loss = |start: &str| {
        let text = printed(&all, start);
        let word = text.split_whitespace().nth(1).and_then(|word| word.parse::<f64>().ok());
        word.unwrap_or_else(|| panic!("no loss in {text}"))
    };
    let own = loss("moejob eval runs/own-data --data runs/stories/test.jsonl");
    let other = loss("moejob eval runs/own-data --data examples/corpus/README.md");
    assert!(own < other, "another kind of text is harder: {own} and {other}");
    assert!(place.path("runs/stories/train.idx").is_file());
}

#[test]
fn lesson_8_starts_from_hugging_face_weights() {
    let place = Place::new(4);
    let all = place.follow("08-fine-tune/job.yaml", &["python"]);
    let losses = place.each("fine-tuned", "loss");
    let (first, last) = (losses[0].as_f64(), losses.last().and_then(Value::as_f64));
    assert!(first < Some(4.5), "what knows nothing begins at 5.5: {first:?}");
    assert!(last < first, "{first:?} {last:?}");
    assert!(place.path("runs/fine-tuned-hf/model.safetensors").is_file());
    assert!(place.path("runs/fine-tuned-hf/tokenizer.json").is_file());
    assert!(place.path("runs/imported/step-00000000").is_dir());
    assert_ne!(printed(&all, "moejob eval runs/base-hf"), printed(&all, "moejob eval runs/fine"));
}

#[test]
fn lesson_9_looks_at_a_run_and_lets_it_speak() {
    let place = Place::new(20);
    let all = place.follow("09-use-it.yaml", &[]);
    assert!(printed(&all, "moejob ls").contains("use-it"));
    assert!(printed(&all, "moejob show").starts_with("use-it: done\n"));
    assert_eq!(printed(&all, "moejob tail").lines().count(), 5);
    assert!(!printed(&all, "echo").trim().is_empty());
    let json = all.iter().find(|(command, _)| command.ends_with("--json"));
    let json: Value = serde_json::from_str(&json.expect("a command").1).expect("JSON");
    assert_eq!(json["promptTokens"], 4, "{json}");
    let page = std::fs::read_to_string(place.path("both.html")).expect("a page");
    assert!(page.contains("use-it") && page.contains("other"));
}
