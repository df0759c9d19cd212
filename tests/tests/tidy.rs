//! The house rules that a machine can check.

use moejob_tests::{all_of, root, tracked};
use std::process::Command;

/// Longer files need a reason, which stands here.
const LONG_FILES: [(&str, &str); 0] = [];
const LINES_MAX: usize = 650;
const COLUMNS_MAX: usize = 100;
/// Where a reader needs a file whole: no source of the worker is longer, and its step is one page.
const SHORT_FILES: [(&str, usize); 4] = [
    ("worker/src/engine/step.rs", 199),
    ("worker/src/", 500),
    ("worker/protocol/src/", 500),
    ("worker/nccl/src/", 500),
];

/// What the pages of faults name is there.
#[test]
fn every_test_that_a_fault_names_is_there() {
    let sources: String = tracked(&[".rs"]).into_iter().map(|(_, text)| text).collect();
    for page in ["docs/operator-faults.md", "docs/engine-faults.md"] {
        let page = std::fs::read_to_string(root().join(page)).expect("the page");
        let words = page.split('`').skip(1).step_by(2);
        let tests: Vec<&str> = words.filter(|word| word.matches('_').count() > 2).collect();
        assert!(tests.len() > 40, "{tests:?}");
        for test in tests {
            assert!(sources.contains(&format!("fn {test}(")), "{test} is not there");
        }
    }
}

#[test]
fn sources_are_narrow_and_short() {
    let mut found = Vec::new();
    for (path, text) in tracked(&[".rs", ".cu", ".py"]) {
        let name = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
        let lines = text.lines().count();
        let short = SHORT_FILES.iter().find(|(folder, _)| name.starts_with(folder));
        let most = short.map_or(LINES_MAX, |(_, most)| *most);
        if lines > most && !LONG_FILES.iter().any(|(long, _)| *long == name) {
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
        ("moejob-manifest", &["moejob-fabric", "moejob-plan", "moejob-offline"][..]),
        ("moejob-fabric", &["moejob-plan", "moejob-offline"][..]),
        ("moejob-plan", &["moejob-offline"][..]),
        // The other three are in its tree.
        ("moejob-offline", &["tokio", "kube-client", "kube-runtime", "kube v", "rand", "mio"][..]),
        ("moejob-protocol", &["tokio", "rand", "mio", "kube-core"][..]),
        ("moejob-kernels", &["tokio", "mio", "moe-worker"][..]),
        ("moejob-nccl", &["tokio", "mio", "cudarc", "moejob-kernels", "moe-worker"][..]),
        ("moe-worker", &["moejob-manifest", "moejob-plan", "kube-core"][..]),
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

/// The modules of the worker, each above all that it may import.
const HOUSE: [&str; 10] =
    ["life", "attempt", "engine", "hf", "checkpoint", "state", "data", "gang", "disk", "failure"];

/// The modules of the crate that a file names by `crate::`, by line.
fn imports(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        for rest in code.split("crate::").skip(1) {
            let names = match rest.strip_prefix('{') {
                Some(list) => list.split('}').next().unwrap_or_default().split(',').collect(),
                None => vec![rest],
            };
            for name in names {
                let ends = |c: char| !(c.is_alphanumeric() || c == '_');
                let name = name.trim().split(ends).next().unwrap_or_default();
                found.push((number + 1, name.to_string()));
            }
        }
    }
    found
}

/// Imports of `text`, a file of the module `own`, that do not lead downwards in `HOUSE`.
fn upwards(own: &str, text: &str) -> Vec<String> {
    let floor = |name: &str| HOUSE.iter().position(|module| *module == name);
    let wrong = |(line, name): (usize, String)| match (floor(own), floor(&name)) {
        (_, None) => Some(format!("{line}: `crate::{name}` is no module of the house")),
        (Some(from), Some(to)) if to < from => {
            Some(format!("{line}: {own} imports {name}, which stands above it"))
        }
        _ => None,
    };
    imports(text).into_iter().filter_map(wrong).collect()
}

#[test]
fn the_worker_imports_downwards() {
    let mut found = Vec::new();
    let mut seen = std::collections::BTreeSet::new();
    for (path, text) in tracked(&[".rs"]) {
        let Ok(within) = path.strip_prefix(root().join("worker/src")) else { continue };
        let name = within.display().to_string();
        let own = name.split(['/', '.']).next().unwrap_or_default();
        if ["lib", "main"].contains(&own) {
            continue;
        }
        seen.insert(own.to_string());
        found.extend(upwards(own, &text).iter().map(|why| format!("worker/src/{name}:{why}")));
    }
    let house: std::collections::BTreeSet<String> = HOUSE.map(str::to_string).into();
    assert_eq!(seen, house, "the modules of worker/src");
    let top = std::fs::read_to_string(root().join("worker/src/lib.rs")).expect("the crate");
    let listed: Vec<&str> = top
        .lines()
        .filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'))
        .collect();
    assert_eq!(listed, HOUSE, "the list in worker/src/lib.rs");
    all_of(found);
}

#[test]
fn an_import_upwards_is_found() {
    let one = |own, text| upwards(own, text).len();
    assert_eq!(one("state", "use crate::engine::model::Model;"), 1);
    assert_eq!(one("state", "    let x = crate::attempt::api::now();"), 1);
    assert_eq!(one("gang", "use crate::{failure::chain, life::listener, data::Corpus};"), 2);
    assert_eq!(one("data", "use crate::nowhere::Thing;"), 1);
    assert_eq!(one("engine", "use crate::state::rank::RankState; // crate::life"), 0);
    assert_eq!(one("state", "use crate::state::slots::Slot;\nuse crate::gang::comm::Comm;"), 0);
}

/// Every variable of ours that a program reads is in the table, and no other.
#[test]
fn variables_stand_in_one_table() {
    let page = std::fs::read_to_string(root().join("docs/variables.md")).expect("the page");
    let names = |text: &str| -> Vec<String> {
        let of = |rest: &str| {
            let ends = |c: char| !(c.is_ascii_uppercase() || c == '_');
            format!("MOEJOB_{}", rest.split(ends).next().unwrap_or_default())
        };
        text.split("MOEJOB_").skip(1).map(of).collect()
    };
    let told: std::collections::BTreeSet<String> = names(&page).into_iter().collect();
    let mut read = std::collections::BTreeSet::new();
    for (path, text) in tracked(&[".rs"]) {
        let name = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
        if name.contains("/src/") && !name.starts_with("tests/") {
            // The last is a name that stands for any other in a test of the rules.
            let own = |name: &String| name.len() > "MOEJOB_".len() && name != "MOEJOB_OTHER";
            read.extend(names(&text).into_iter().filter(own));
        }
    }
    assert_eq!(read, told, "docs/variables.md");
}

#[test]
fn the_top_level_has_what_it_needs_and_no_more() {
    let allowed = [
        ".ci", ".gitignore", "AGENTS.md", "Cargo.lock", "Cargo.toml", "LICENSE", "README.md",
        "docs", "examples", "kernels", "manifests", "operator", "tests", "worker",
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

/// What may be linked into a program under Apache-2.0.
const LICENCES: [&str; 11] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// `A OR B` and the older `A/B` need one that is allowed, `AND` needs both.
fn allowed(licence: &str) -> bool {
    licence.split(" AND ").all(|part| {
        part.trim_matches(['(', ')'])
            .split(" OR ")
            .flat_map(|part| part.split('/'))
            .any(|name| LICENCES.contains(&name.trim()))
    })
}

#[test]
fn dependencies_come_from_the_registry_under_licences_we_can_ship() {
    for (licence, expected) in [
        ("MIT OR Apache-2.0", true),
        ("GPL-3.0/MIT", true),
        ("(MIT OR GPL-3.0) AND Unicode-3.0", true),
        ("MIT AND GPL-3.0", false),
        ("MPL-2.0", false),
        ("", false),
    ] {
        assert_eq!(allowed(licence), expected, "{licence}");
    }
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--locked"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(root())
        .output()
        .expect("cargo metadata");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("its JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    assert!(packages.len() > 100, "only {} packages", packages.len());
    let mut found = Vec::new();
    for package in packages {
        let of = |field: &str| package[field].as_str().unwrap_or_default().to_string();
        let name = format!("{} {}", of("name"), of("version"));
        // Ours have no source.
        if !package["source"].is_null() && !of("source").starts_with("registry+") {
            found.push(format!("{name} comes from {}", of("source")));
        }
        if !allowed(&of("license")) {
            found.push(format!("{name} is under '{}'", of("license")));
        }
    }
    all_of(found);
}

/// A name that a rename gives is lost with the power unless the folder is synced behind it. Two
/// places do both, and others give names to what can be made again.
#[test]
fn who_renames_a_file_makes_its_name_durable() {
    const DURABLE: [&str; 2] = ["worker/src/data/durable.rs", "worker/src/disk/mod.rs"];
    const MADE_AGAIN: [&str; 4] = [
        "worker/src/data/index.rs",
        "worker/src/data/cache.rs",
        "worker/src/life/topology.rs",
        "kernels/src/cuda/cubins.rs",
    ];
    let mut found = Vec::new();
    for (path, text) in tracked(&[".rs"]) {
        let name = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
        let is_source = name.contains("/src/") && !name.contains("tests");
        let is_known = DURABLE.iter().chain(&MADE_AGAIN).any(|known| *known == name);
        if is_source && !is_known && text.contains("fs::rename(") {
            found.push(format!("{name}: rename by data::durable, or by a checkpoint's Disk"));
        }
    }
    all_of(found);
}
