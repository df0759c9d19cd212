//! The reader against inputs that nobody thought of: it never panics, it always says where, and
//! what it lets pass the types take.
//!
//! ```sh
//! MOEJOB_FUZZED=1000000 PROPTEST_RNG_SEED=3 cargo test --release -p moejob-plan --test reader -- \
//!     --nocapture
//! ```

#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "it measures itself")]

mod measured;

use measured::{Most, asked};
use moejob_manifest::{Job, yaml};
use moejob_manifest::problem::Code;
use moejob_manifest::read::Manifest;
use moejob_manifest::spec::MoeJobSpec;
use moejob_plan::placement;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use std::sync::Mutex;

const BASE: &str = include_str!("../../manifest/tests/manifests/base.yaml");

/// Pieces that are put where others were.
const PIECES: &[&str] = &[
    "", " ", "\n", ":", ": ", "- ", "{", "}", "[", "]", ",", "#", "\"", "'", "|", ">", "&a", "*a",
    "!!str", "<<", "?", "%", "@", "`", "~", "null", "true", "no", "0", "-1", "010", "0x1f", "1e9",
    ".nan", ".inf", "8.5", "1_000", "99999999999999999999", "\t", "\r\n", "\u{feff}",
    "\u{202e}", "é",
    "---", "...", "auto", "text", "adamw", "expert", "count", "steps", "min", "spec", "status",
    "podTemplate", "{}", "[]", "a: b", "x: { y: [1, {z: w}] }",
];

fn piece() -> impl Strategy<Value = &'static str> {
    prop::sample::select(PIECES)
}

/// The base with pieces put over its bytes.
fn damaged() -> impl Strategy<Value = Vec<u8>> {
    let edit = (0..BASE.len(), 0usize..12, piece());
    prop::collection::vec(edit, 1..6).prop_map(|edits| {
        let mut bytes = BASE.as_bytes().to_vec();
        for (at, length, piece) in edits {
            let start = at.min(bytes.len());
            let end = (start + length).min(bytes.len());
            bytes.splice(start..end, piece.bytes());
        }
        bytes
    })
}

/// The base with the value of one field replaced, so that the YAML stays well formed more often.
fn revalued() -> impl Strategy<Value = Vec<u8>> {
    let fields: Vec<(usize, usize)> = BASE
        .match_indices(": ")
        .map(|(at, _)| {
            let rest = &BASE[at + 2..];
            let end = rest.find([',', '}', '\n']).unwrap_or(rest.len());
            (at + 2, at + 2 + end)
        })
        .collect();
    (prop::sample::select(fields), piece()).prop_map(|((start, end), piece)| {
        format!("{}{piece}{}", &BASE[..start], &BASE[end..]).into_bytes()
    })
}

/// Of all kinds together.
static MOST: Mutex<Most> = Mutex::new(Most::NOTHING);

/// Examined, in little time and little memory.
fn examine(bytes: &[u8]) -> Result<(), TestCaseError> {
    measured::within(&MOST, "MOEJOB_FUZZED", bytes, || read_or_refused(bytes))
}

fn read_or_refused(bytes: &[u8]) -> Result<(), TestCaseError> {
    let manifest = Manifest::read(bytes);
    for problem in &manifest.problems {
        // The walk and the types agree; the one place where they could not is this problem.
        prop_assert!(problem.allowed != "the fields of a MoeJob", "{problem}");
        prop_assert!(!problem.found.is_empty() && !problem.allowed.is_empty(), "{problem}");
    }
    let lines = bytes.iter().filter(|byte| **byte == b'\n').count() as u32 + 2;
    match Job::read(bytes) {
        Ok(job) => {
            prop_assert!(job.micro_batches() > 0 && job.training.steps > 0);
            // What is valid can be planned.
            let (sizes, skipped) = placement::sizes(&job);
            let all = (job.nodes.max - job.nodes.min + 1) as usize;
            prop_assert!(sizes.len() + skipped.len() == all, "{all}");
            let needs = placement::needs(&job, &sizes, None);
            prop_assert!(needs.values().all(|need| need.rank.committed > 0));
            prop_assert!(needs.is_empty() == sizes.is_empty());
        }
        Err(problems) => {
            prop_assert!(!problems.is_empty());
            for problem in problems {
                let text = problem.to_string();
                prop_assert!(text.chars().all(|c| !c.is_control()), "{text:?}");
                if problem.code != Code::TooLarge {
                    let line = problem.place.map_or(0, |place| place.line);
                    prop_assert!((1..=lines).contains(&line), "{text}");
                }
            }
        }
    }
    Ok(())
}

/// The same cases in every run, so that a failure is the change's own; `PROPTEST_RNG_SEED` tries
/// others.
fn seed() -> RngSeed {
    let asked = std::env::var("PROPTEST_RNG_SEED").ok().and_then(|seed| seed.parse().ok());
    asked.unwrap_or(RngSeed::Fixed(2))
}

/// `MOEJOB_FUZZED` of each kind, with `PROPTEST_RNG_SEED` for others: a run of hours.
fn cases() -> u32 {
    asked("MOEJOB_FUZZED", 1500) as u32
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None,
        rng_seed: seed(),
        ..ProptestConfig::default() })]

    #[test]
    fn damaged_manifests_are_read_or_refused(bytes in damaged()) {
        examine(&bytes)?;
    }

    #[test]
    fn other_values_are_read_or_refused(bytes in revalued()) {
        examine(&bytes)?;
    }

    #[test]
    fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Job::read(&bytes).is_err());
        examine(&bytes)?;
    }

    #[test]
    fn any_text_makes_a_tree_or_problems(text in "[ -~\n]{0,120}") {
        measured::within(&MOST, "MOEJOB_FUZZED", text.as_bytes(), || {
            yaml::parse(text.as_bytes()).map_or_else(
                |problems| Ok(prop_assert!(!problems.is_empty())), |_| Ok(()))
        })?;
    }
}

/// The tree of a text that this crate reads is the value that the YAML library reads.
#[test]
fn both_readers_of_yaml_read_the_same() {
    let manifest = Manifest::read(BASE.as_bytes());
    let other: serde_json::Value = serde_saphyr::from_str(BASE).unwrap();
    let spec: MoeJobSpec = serde_json::from_value(other["spec"].clone()).unwrap();
    assert_eq!(manifest.problems, []);
    assert_eq!(manifest.spec, spec);
}
