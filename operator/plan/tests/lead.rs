//! One job's loop, step by step: `> what happens`, then the effects in their order.
//!
//! Run with `UPDATE_SCENARIOS=1` to write what is done now into the files, and read the difference.

// The scenarios are files; the loop itself reads none.
#![allow(clippy::disallowed_methods)]

#[path = "lead_world/mod.rs"]
mod lead_world;

use lead_world::World;
use std::path::Path;

#[test]
fn every_arm_of_the_loop_does_what_its_scenario_says() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lead");
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .expect("the scenarios are there")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "txt"))
        .collect();
    files.sort();
    assert!(!files.is_empty());
    for path in files {
        let expected = std::fs::read_to_string(&path).expect("a readable scenario");
        let found = replay(&expected);
        if std::env::var_os("UPDATE_SCENARIOS").is_some() {
            std::fs::write(&path, &found).expect("a writable scenario");
            continue;
        }
        for (line, (expected, found)) in expected.lines().zip(found.lines()).enumerate() {
            assert_eq!(expected, found, "{}:{}", path.display(), line + 1);
        }
        assert_eq!(expected.lines().count(), found.lines().count(), "{}", path.display());
    }
}

/// The text again, with what is done now in place of what stood there.
fn replay(text: &str) -> String {
    let mut world = World::default();
    let mut out = String::new();
    for line in text.lines().filter(|line| !line.starts_with("  ")) {
        out.push_str(line);
        out.push('\n');
        if let Some(command) = line.strip_prefix("> ") {
            for effect in world.run(command) {
                out.push_str(&format!("  {effect}\n"));
            }
        }
    }
    out
}

/// A loop that is asked again at once has nothing more to say, and never wants to be asked at a
/// time that has passed: each would be a turn a millisecond.
#[test]
fn a_turn_is_complete_and_what_is_due_lies_ahead() {
    let mut world = World::default();
    let script = "job min=2 max=2|grant n0 n1|written|written|pod a-a1-0 n0 running|\
        pod a-a1-1 n1 running|open a-a1-0|open a-a1-1|written|step a-a1-0 1|silent a-a1-1|\
        advance 500|pod a-a1-1 n1 deleting|written|advance 25000|fail other|advance 1000|\
        fail other|advance 100000|fail slow|gone a-a1-1|advance 1000|written|edit suspend=true|\
        advance 70000|written";
    for command in script.split('|') {
        world.run(command.trim());
        for _ in 0..200 {
            let now = world.now;
            let turn = world.job().turn(now);
            assert!(turn.effects.is_empty(), "{command}: {:?}", turn.effects);
            assert!(turn.due.is_none_or(|at| at > world.now), "{command}: {:?}", turn.due);
        }
    }
}
