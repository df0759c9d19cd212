//! `moejob report RUN...`: one page of HTML with everything that runs have recorded.
//!
//! ```text
//! metrics.jsonl, events.jsonl, job.json --read--> Run, its times (time)
//! Run --page--> tables (facts, words), charts (chart), heat maps (heat) -> HTML
//! ```
//! The page needs nothing from elsewhere. All of it is there without its script, which tells
//! the values under the pointer.

mod chart;
mod facts;
mod heat;
mod page;
mod read;
mod time;
mod words;

use crate::cli::out::io;
use crate::cli::args::not_negative;
use clap::Args;
use moe_worker::checkpoint::{self, Disk};
use moe_worker::data::durable;
use moejob_manifest::problem::printable_lines;
use read::Run;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

#[derive(Args)]
pub struct ReportArgs {
    /// Folders of runs, such as runs/NAME, or their names. Several are drawn over each other.
    #[arg(required = true)]
    pub runs: Vec<PathBuf>,
    /// The page to write; `-` is standard output.
    #[arg(long, default_value = "report.html")]
    pub out: PathBuf,
    /// A text that each kept checkpoint of each run goes on with, to be compared on the page.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// The price of a node and hour, in place of its profile's.
    #[arg(long, value_parser = not_negative)]
    pub price: Option<f64>,
}

/// Tokens of a sample.
const SAMPLE_TOKENS: &str = "60";

/// Runs that a page still tells apart.
const RUNS_MAX: usize = 8;

pub fn run(args: &ReportArgs) -> ExitCode {
    if args.runs.len() > RUNS_MAX {
        let count = args.runs.len();
        eprintln!("moejob: {count} runs: at most {RUNS_MAX} can be told apart on one page");
        return ExitCode::from(2);
    }
    let mut runs = Vec::new();
    for path in &args.runs {
        match read::read(&super::args::place(path)) {
            Ok(run) => runs.push(run),
            Err(error) => {
                super::complain(&error);
                return ExitCode::from(2);
            }
        }
    }
    if let Some(prompt) = &args.prompt {
        for (run, path) in runs.iter_mut().zip(&args.runs) {
            match samples(&super::args::place(path), prompt) {
                Ok(samples) => run.samples = samples,
                Err(why) => {
                    eprintln!("moejob: --prompt: {}: {}", run.name, printable_lines(&why));
                    return ExitCode::from(2);
                }
            }
        }
    }
    name_apart(&mut runs, &args.runs);
    for run in runs.iter().filter(|run| run.unreadable > 0) {
        let lines = if run.unreadable == 1 { "line" } else { "lines" };
        eprintln!("moejob: {}: {} {lines} could not be read", run.name, run.unreadable);
    }
    let html = page::page(&runs, args.price);
    if args.out == Path::new("-") {
        print!("{html}");
        return ExitCode::SUCCESS;
    }
    match write(&args.out, &html) {
        Ok(()) => {
            println!("{}: open it in a browser", args.out.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("moejob: {} cannot be written: {}", args.out.display(), io(&error));
            eprintln!("  name a file in a folder that is there: --out report.html");
            ExitCode::from(2)
        }
    }
}

/// Each checkpoint of a run goes on with a text, always by the likeliest token. It is asked in a
/// process of its own, which asks for its memory and gives it back.
fn samples(path: &Path, prompt: &str) -> Result<Vec<(u64, String)>, String> {
    let program = std::env::current_exe().map_err(|error| io(&error))?;
    let checkpoints = path.join("checkpoints");
    let kept = checkpoint::list(&Disk::real(), &checkpoints).map_err(|error| io(&error))?;
    let mut found = Vec::new();
    for of in kept.iter().filter(|of| of.manifest.is_ok()) {
        let mut command = Command::new(&program);
        command.arg("generate").arg(&of.path).args(["--prompt", prompt, "--temperature", "0"]);
        command.args(["--max-tokens", SAMPLE_TOKENS, "-o", "json"]).stdin(Stdio::null());
        let output = command.output().map_err(|error| io(&error))?;
        let said = serde_json::from_slice::<serde_json::Value>(&output.stdout).ok();
        match said.as_ref().and_then(|said| said["text"].as_str()) {
            Some(text) => found.push((of.step, format!("{prompt}{text}"))),
            None => return Err(String::from_utf8_lossy(&output.stderr).trim_end().to_string()),
        }
    }
    match found.is_empty() {
        true => Err("it has no checkpoint that could say anything".to_string()),
        false => Ok(found),
    }
}

/// Runs of one name are called by what was typed.
fn name_apart(runs: &mut [Run], typed: &[PathBuf]) {
    let names: Vec<String> = runs.iter().map(|run| run.name.clone()).collect();
    for (run, typed) in runs.iter_mut().zip(typed) {
        if names.iter().filter(|name| **name == run.name).count() > 1 {
            run.name = typed.display().to_string();
        }
    }
}

/// All of it or nothing.
fn write(path: &Path, html: &str) -> std::io::Result<()> {
    let name = path.file_name().ok_or_else(|| std::io::Error::other("it names no file"))?;
    let staged = path.with_file_name(format!(".{}.tmp", name.to_string_lossy()));
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let written = durable::replace(folder.unwrap_or(Path::new(".")), name, |to| {
        std::fs::write(to, html)
    });
    if written.is_err() {
        // What is left of it helps nobody; the error that matters is told.
        let _ = std::fs::remove_file(&staged);
    }
    written
}

/// A number as people read it: four digits that count.
fn short(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        return "none".to_string();
    }
    let scaled = |by: f64, unit: &str| format!("{}{unit}", digits(value / by));
    match size {
        0.0 => "0".to_string(),
        _ if size < 1e-3 => {
            let text = format!("{value:.2e}");
            text.replace(".00e", "e").replace("0e", "e")
        }
        _ if size < 1e4 => digits(value),
        _ if size < 1e6 => scaled(1e3, "K"),
        _ if size < 1e9 => scaled(1e6, "M"),
        _ if size < 1e12 => scaled(1e9, "G"),
        _ => format!("{value:.2e}"),
    }
}

fn digits(value: f64) -> String {
    let before = value.abs().max(1e-9).log10().floor() as i32;
    let places = (3 - before).clamp(0, 6) as usize;
    let text = format!("{value:.places$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn metrics(steps: std::ops::RangeInclusive<u64>, attempt: u32, world: u32) -> String {
        let line = |step: u64| {
            let loss = 5.0 * (-(step as f64) / 2000.0).exp() + 0.1 * (step as f64 * 0.7).sin();
            let loads: Vec<Vec<u64>> =
                (0..4).map(|l| (0..8).map(|e| 100 + (step * e + l) % 50).collect()).collect();
            let mut line = json!({
                "step": step, "loss": loss, "auxLoss": 1.0, "zLoss": 0.5, "gradNorm": 1.0 / loss,
                "learningRate": 1e-3 / step as f64, "tokens": step * 2048,
                "tokensPerSecond": 100_000.0 + (step % 100) as f64, "worldSize": world,
                "attempt": attempt, "expertImbalance": 1.2, "routerEntropy": 2.0,
                "droppedTokens": 0.0, "unroutedTokens": 0.0, "expertSwitches": 0.4,
                "tokensPerExpert": loads,
                "time": format!("2026-01-{:02}T{:02}:{:02}:{:02}.000Z", 1 + step / 86_400,
                    step / 3600 % 24, step / 60 % 60, step % 60),
            });
            if step.is_multiple_of(50) {
                line["validationLoss"] = json!(loss + 0.2);
                line["churn"] = json!(0.1);
            }
            format!("{line}\n")
        };
        steps.map(line).collect()
    }

    fn event(time: &str, event: &str, attempt: u32, more: serde_json::Value) -> String {
        let mut line = json!({ "time": time, "event": event, "attempt": attempt, "reason": "R" });
        for (key, value) in more.as_object().into_iter().flatten() {
            line[key] = value.clone();
        }
        format!("{line}\n")
    }

    /// 10,000 steps, three attempts, names and words that try to be more than text.
    fn folder(name: &str) -> (tempfile::TempDir, PathBuf) {
        let home = tempfile::tempdir().expect("a folder");
        let path = home.path().join(name);
        std::fs::create_dir(&path).expect("a folder");
        let all = metrics(1..=3000, 1, 3)
            + &metrics(2990..=7000, 2, 2)
            + "no line\n"
            + &metrics(6980..=10_000, 3, 3);
        std::fs::write(path.join("metrics.jsonl"), all).expect("a file");
        let at = |second: u64| format!("2026-01-01T{:02}:{:02}:00.5Z", second / 60, second % 60);
        let evil = "<script>alert('x')</script>\u{1b}[2J\u{202e}";
        let events = event(&at(0), "AttemptStarted", 1, json!({}))
            + &event(&at(50), "WorkerLost", 1, json!({ "worker": evil, "message": evil }))
            + &event(&at(50), "AttemptStarted", 2, json!({}))
            + &event(&at(116), "WorkerLost", 2, json!({ "worker": "w-1" }))
            + &event(&at(116), "AttemptStarted", 3, json!({}));
        std::fs::write(path.join("events.jsonl"), events).expect("a file");
        (home, path)
    }

    #[test]
    fn ten_thousand_steps_are_one_small_page_that_is_safe_to_open() {
        let (_home, path) = folder("<img src=x onerror=\"alert(1)\">");
        let run = read::read(&path).expect("a run");
        assert_eq!((run.steps.len(), run.unreadable), (10_000, 1));
        assert_eq!(run.steps[2994].attempt, 2, "the last line of a step counts");
        let html = page::page(std::slice::from_ref(&run), None);
        assert!(html.len() <= 2 << 20, "{} bytes", html.len());
        for forbidden in ["<script>", "<img", "<link", "https:", "url(", "\u{1b}"] {
            assert!(!html.contains(forbidden), "{forbidden}");
        }
        assert!(html.contains("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;\\u{1b}[2J"));
        for title in [
            "Loss", "held out", "logarithmic loss", "Learning rate", "Gradient norm",
            "Tokens a second",
            "World size", "Router entropy", "Switches of experts", "Load of the busiest expert",
            "attempt 3", "layer 3",
        ] {
            assert!(html.contains(title), "{title}");
        }
        // Opened and closed alike, as a browser wants them.
        for tag in ["svg", "g", "section", "table", "figure", "text", "title"] {
            let count = |what: &str| html.matches(what).count();
            let opened = count(&format!("<{tag}>")) + count(&format!("<{tag} "));
            assert_eq!(opened, count(&format!("</{tag}>")), "{tag}");
        }
        if let Some(place) = std::env::var_os("MOEJOB_REPORT_OUT") {
            std::fs::write(place, html).expect("a file");
        }
    }

    #[test]
    fn several_runs_are_drawn_over_each_other() {
        let (_one, first) = folder("first");
        let (_two, second) = folder("second");
        let runs = [first, second].map(|path| read::read(&path).expect("a run"));
        let html = page::page(&runs, None);
        assert!(html.len() <= 2 << 20, "{} bytes", html.len());
        assert!(html.contains("first") && html.contains("second"));
        let one = page::page(&runs[..1], None);
        let lines = |html: &str| html.matches("<polyline").count();
        assert_eq!(lines(&html), 2 * lines(&one));
    }

    #[test]
    fn what_is_no_run_is_told() {
        let home = tempfile::tempdir().expect("a folder");
        let refused = read::read(home.path()).expect_err("is no run").to_string();
        assert!(refused.contains("metrics.jsonl"), "{refused}");
        std::fs::write(home.path().join("metrics.jsonl"), "").expect("a file");
        let refused = read::read(home.path()).expect_err("has no steps").to_string();
        assert!(refused.contains("no step"), "{refused}");
        std::fs::write(home.path().join("metrics.jsonl"), "abc\n{}{\n").expect("a file");
        let refused = read::read(home.path()).expect_err("is damaged").to_string();
        assert!(refused.contains("of 2 lines none can be read"), "{refused}");
        // A folder of runs: one of them is meant.
        let inner = home.path().join("all/mine");
        std::fs::create_dir_all(&inner).expect("a folder");
        std::fs::write(inner.join("metrics.jsonl"), "").expect("a file");
        let refused = read::read(&home.path().join("all")).expect_err("is none").to_string();
        assert!(refused.contains("a folder of 1 run: name one"), "{refused}");
    }

    #[test]
    fn runs_of_one_name_are_told_apart() {
        let named = |name: &str| Run { name: name.to_string(), ..Run::default() };
        let mut runs = [named("a"), named("b"), named("a")];
        name_apart(&mut runs, &["old/a", "runs/b", "runs/a"].map(PathBuf::from));
        assert_eq!(runs.map(|run| run.name), ["old/a", "b", "runs/a"]);
    }

    #[test]
    fn numbers_are_short() {
        let cases = [
            (0.091_229_461, "0.09123"), (105_062.235, "105.1K"), (2.5, "2.5"), (1234.5, "1234"),
            (0.0, "0"), (3e-5, "3e-5"), (-1.5, "-1.5"), (7.0, "7"), (2.5e7, "25M"),
        ];
        for (value, expected) in cases {
            assert_eq!(short(value), expected, "{value}");
        }
    }
}
