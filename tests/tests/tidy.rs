//! The house rules that a machine can check.

use moejob_tests::root;
use std::path::PathBuf;
use std::process::Command;

/// Longer files need a reason, which stands here.
const LONG_FILES: [(&str, &str); 0] = [];
const LINES_MAX: usize = 650;
const COLUMNS_MAX: usize = 100;

fn tracked(endings: &[&str]) -> Vec<(PathBuf, String)> {
    let output = Command::new("git").args(["ls-files"]).current_dir(root()).output().expect("git");
    assert!(output.status.success(), "not a checkout");
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|name| endings.iter().any(|ending| name.ends_with(ending)))
        .map(|name| root().join(name))
        .filter_map(|path| Some((path.clone(), std::fs::read_to_string(path).ok()?)))
        .collect()
}

fn all_of(found: Vec<String>) {
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn sources_are_narrow_and_short() {
    let mut found = Vec::new();
    for (path, text) in tracked(&[".rs", ".cu", ".py"]) {
        let name = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
        let lines = text.lines().count();
        if lines > LINES_MAX && !LONG_FILES.iter().any(|(long, _)| *long == name) {
            found.push(format!("{name}: {lines} lines"));
        }
        for (number, line) in text.lines().enumerate() {
            if line.chars().count() > COLUMNS_MAX {
                found.push(format!("{name}:{}: over {COLUMNS_MAX} columns", number + 1));
            }
        }
    }
    all_of(found);
}

#[test]
fn nothing_is_left_unfinished_or_switched_off() {
    // Written so that this file does not find itself.
    let marks = [["TO", "DO"], ["FIX", "ME"], ["X", "XX"], ["#[ign", "ore"], ["todo", "!("]];
    let marks: Vec<String> = marks.iter().map(|parts| parts.concat()).collect();
    let mut found = Vec::new();
    for (path, text) in tracked(&[".rs", ".cu", ".py", ".sh", ".toml", ".yaml"]) {
        for (number, line) in text.lines().enumerate() {
            if marks.iter().any(|mark| line.contains(mark.as_str())) {
                found.push(format!("{}:{}: {}", path.display(), number + 1, line.trim()));
            }
        }
    }
    all_of(found);
}

#[test]
fn the_pure_crates_stay_pure() {
    for (package, never) in [
        ("moejob-plan", &["tokio", "kube-client", "kube-runtime", "kube v", "rand", "mio"][..]),
        ("moejob-protocol", &["tokio", "rand", "mio", "kube-core"][..]),
        ("moejob-kernels", &["tokio", "mio", "moe-worker"][..]),
        ("moe-worker", &["moejob-plan", "kube-core"][..]),
    ] {
        let output = Command::new(env!("CARGO"))
            .args(["tree", "--offline", "--locked", "-e", "normal", "--prefix", "none"])
            .args(["-p", package])
            .current_dir(root())
            .output()
            .expect("cargo tree");
        let tree = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && tree.lines().count() > 1, "cargo tree -p {package}");
        let wrong: Vec<&str> =
            tree.lines().filter(|line| never.iter().any(|name| line.starts_with(name))).collect();
        assert!(wrong.is_empty(), "{package} depends on {wrong:?}");
    }
}

#[test]
fn the_top_level_has_what_it_needs_and_no_more() {
    let allowed = [
        ".ci", ".gitignore", "Cargo.lock", "Cargo.toml", "LICENSE", "README.md", "docs", "examples",
        "kernels", "manifests", "operator", "tests", "worker",
    ];
    let output = Command::new("git").args(["ls-files"]).current_dir(root()).output().expect("git");
    let listing = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut found: Vec<&str> = listing.lines().filter_map(|name| name.split('/').next()).collect();
    found.dedup();
    let surplus: Vec<&&str> = found.iter().filter(|name| !allowed.contains(name)).collect();
    assert!(surplus.is_empty(), "{surplus:?}");
}

#[test]
fn every_example_says_what_it_teaches() {
    for (path, text) in tracked(&[".yaml"]) {
        if path.parent().is_some_and(|folder| folder.ends_with("examples")) {
            assert!(text.starts_with("# Lesson "), "{}", path.display());
        }
    }
}
