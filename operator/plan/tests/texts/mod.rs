//! Scenarios as text: `> what happens`, then indented what is done about it. Other lines explain.
//!
//! With `UPDATE_SCENARIOS=1` what is done now is written into the files: read the difference.

// The scenarios are files; the plan itself reads none.
#![allow(clippy::disallowed_methods)]

use std::path::{Path, PathBuf};

/// The scenarios of a folder, by their paths.
pub fn scenarios(folder: &str) -> Vec<(PathBuf, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(folder);
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .expect("the scenarios are there")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "txt"))
        .collect();
    files.sort();
    assert!(!files.is_empty());
    let text = |path: &PathBuf| std::fs::read_to_string(path).expect("a readable scenario");
    files.into_iter().map(|path| (path.clone(), text(&path))).collect()
}

/// Every file of `tests/FOLDER` says what `run` says of its commands, in a world of its own.
pub fn replay<World: Default>(folder: &str, run: impl Fn(&mut World, &[&str]) -> String) {
    for (path, expected) in scenarios(folder) {
        let (mut world, mut found) = (World::default(), String::new());
        for line in expected.lines().filter(|line| !line.starts_with("  ")) {
            found.push_str(line);
            found.push('\n');
            if let Some(command) = line.strip_prefix("> ") {
                let words: Vec<&str> = command.split_whitespace().collect();
                found.push_str(&run(&mut world, &words));
            }
        }
        if std::env::var_os("UPDATE_SCENARIOS").is_some() {
            std::fs::write(&path, &found).expect("a writable scenario");
            continue;
        }
        for (line, (expected, found)) in expected.lines().zip(found.lines()).enumerate() {
            assert_eq!(expected, found, "{}:{}", path.display(), line + 1);
        }
        let lines = |text: &str| text.lines().count();
        assert_eq!(lines(&expected), lines(&found), "{}: one ends early", path.display());
    }
}
