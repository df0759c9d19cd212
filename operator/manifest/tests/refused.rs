//! Bad manifests: one table of edits, and every problem that must be found in each.

#![allow(clippy::disallowed_methods, reason = "the test reads and writes its table")]

mod manifests;

use manifests::{BASE, TABLE, blocks};
use moejob_manifest::Job;
use moejob_manifest::devices::on_cluster;
use moejob_manifest::job::{bytes_of, millis_of, same_output};
use moejob_manifest::read::Manifest;
use std::fmt::Write;

const PATH: &str = "tests/manifests/refused.txt";

#[test]
fn every_bad_manifest_is_refused_as_the_table_says() {
    let mut found = String::new();
    let mut cases = 0;
    for case in blocks(TABLE) {
        if case.title().is_none() {
            write!(found, "{}\n\n", case.block).unwrap();
            continue;
        }
        cases += 1;
        write!(found, "{}\n{}\n", case.given.join("\n"), report(&case.input())).unwrap();
    }
    let found = format!("{}\n", found.trim_end());
    if std::env::var_os("UPDATE").is_some() {
        let path = format!("{}/{PATH}", env!("CARGO_MANIFEST_DIR"));
        return std::fs::write(path, &found).unwrap();
    }
    for (line, (expected, found)) in TABLE.lines().zip(found.lines()).enumerate() {
        assert_eq!(expected, found, "{PATH}, line {}", line + 1);
    }
    assert_eq!(TABLE.lines().count(), found.lines().count());
    assert!(cases > 120, "only {cases} cases were read");
}

/// Whoever brings words of another trainer along is told those of this one, and once.
#[test]
fn words_of_other_trainers_are_told_by_the_fields_that_they_mean() {
    let told = |from: &str, to: &str| {
        assert!(BASE.contains(from), "{from}");
        let problems = Job::read(BASE.replacen(from, to, 1).as_bytes()).expect_err(to);
        let told = problems.iter().map(|problem| format!("{}: {}", problem.path, problem.advice));
        told.collect::<Vec<_>>()
    };
    let seconds = told("checkpoint:", "recovery: { heartbeatTimeout: 3 }\n  checkpoint:");
    assert_eq!(
        seconds,
        ["spec.recovery.heartbeatTimeout: write 3s, if seconds are meant"]
    );
    let num = told("experts: { count", "experts: { num");
    assert_eq!(num, ["spec.model.experts.num: here it is spec.model.experts.count"]);
    let epochs = told("    steps: 100", "    num_train_epochs: 3");
    let expected = "spec.training.num_train_epochs: here it is spec.training.steps: a step takes";
    assert!(epochs.len() == 1 && epochs[0].starts_with(expected), "{epochs:?}");
    let rate = told("learningRate", "lr");
    let expected = "here it is spec.training.optimizer.adamw.learningRate";
    assert!(rate.len() == 1 && rate[0].ends_with(expected), "{rate:?}");
}

#[test]
fn two_jobs_do_not_share_a_folder() {
    let job = |edit: &str| {
        let text = BASE.replace("keep: 3", &format!("keep: 3{edit}"));
        Job::read(text.as_bytes()).unwrap()
    };
    let named = |name: &str| Job::read(BASE.replace("sample", name).as_bytes()).unwrap();
    let shared = |a: &Job, b: &Job| same_output(a, b).map(|problem| problem.path);
    assert_eq!(shared(&job(""), &job("")), Some("metadata.name".to_string()));
    assert_eq!(shared(&job(""), &named("other")), None);
    let (a, b) = (job(", location: a"), job(", location: b"));
    assert_eq!(shared(&a, &a), Some("spec.checkpoint.location".to_string()));
    assert_eq!(shared(&a, &b), None);
}

#[test]
fn durations_and_quantities_are_read_exactly() {
    let durations = [
        ("0s", Some(0)),
        ("500ms", Some(500)),
        ("3s", Some(3_000)),
        ("10m", Some(600_000)),
        ("720h", Some(2_592_000_000)),
        ("721h", None),
        ("3", None),
        ("-3s", None),
        ("1.5s", None),
        ("3S", None),
        ("3 s", None),
        ("", None),
        ("99999999999999999999h", None),
    ];
    for (text, expected) in durations {
        assert_eq!(millis_of(text), expected, "{text:?}");
    }
    let quantities = [
        ("80Gi", Some(80 << 30)),
        ("1k", Some(1_000)),
        ("7", Some(7)),
        ("0Gi", None),
        ("1Gb", None),
        ("-1", None),
        ("1e30Gi", None),
        ("99999999Ti", None),
    ];
    for (text, expected) in quantities {
        assert_eq!(bytes_of(text), expected, "{text:?}");
    }
}

fn report(input: &[u8]) -> String {
    let mut text = String::new();
    match Job::read(input) {
        Ok(job) => {
            text.push_str("=> good\n");
            for warning in &job.warnings {
                writeln!(text, "=> warning {warning}").unwrap();
            }
            for problem in Manifest::read(input).locate(on_cluster(&job)) {
                writeln!(text, "=> on a cluster {problem}").unwrap();
            }
        }
        Err(problems) => {
            assert!(!problems.is_empty());
            for problem in problems {
                writeln!(text, "=> {problem}").unwrap();
            }
        }
    }
    text
}
