//! The floors of this crate, by the text of its imports: no op above the machine, no machine above
//! an op, and no circle that is too large to be read at once.

use moejob_kernels::OPS;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const FLOORS_MAX: usize = 8;
const CIRCLE_MAX: usize = 10;

/// The text of each module by its path, such as `ops::gate::cpu`, without its tests and comments.
/// `lib.rs` is left out: it is the door, and names what stands behind it.
fn modules() -> BTreeMap<String, String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut left, mut found) = (vec![source.clone()], BTreeMap::new());
    while let Some(path) = left.pop() {
        if path.is_dir() {
            let entries = std::fs::read_dir(path).expect("our sources");
            left.extend(entries.map(|entry| entry.expect("a source").path()));
            continue;
        }
        let within = path.strip_prefix(&source).expect("a source").display().to_string();
        let Some(name) = within.strip_suffix(".rs").filter(|name| *name != "lib") else { continue };
        let text = std::fs::read_to_string(&path).expect("a source");
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
        let name = name.strip_suffix("/mod").unwrap_or(name).replace('/', "::");
        found.insert(name, lines.collect::<Vec<_>>().join("\n"));
    }
    found
}

/// The paths behind each `crate::` of a text, one for each name of a list.
fn paths(text: &str) -> Vec<String> {
    let ends = |c: char| !(c.is_alphanumeric() || c == '_' || c == ':');
    let mut found = Vec::new();
    for rest in text.split("crate::").skip(1) {
        let path = rest.split(ends).next().unwrap_or_default();
        let list = rest[path.len()..].strip_prefix('{').filter(|_| path.ends_with("::"));
        let names = list.map_or("", |list| list.split('}').next().unwrap_or_default());
        match list {
            Some(_) => found.extend(names.split(',').map(|name| format!("{path}{}", name.trim()))),
            None => found.push(path.to_string()),
        }
    }
    found
}

/// Which modules each imports.
fn imports(modules: &BTreeMap<String, String>) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut all = BTreeMap::new();
    for (own, text) in modules {
        let mut to = BTreeSet::new();
        for path in paths(text) {
            let mut part = path.as_str();
            while !part.is_empty() && !modules.contains_key(part) {
                part = part.rsplit_once("::").map_or("", |(front, _)| front);
            }
            assert!(!part.is_empty(), "{own} imports crate::{path}, which no module defines");
            let (name, _) = modules.get_key_value(part).expect("looked for above");
            to.insert(name.as_str());
        }
        to.remove(own.as_str());
        all.insert(own.as_str(), to);
    }
    all
}

/// All that a module imports, and what that imports.
fn below<'a>(of: &'a str, imports: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> BTreeSet<&'a str> {
    let (mut left, mut found) = (vec![of], BTreeSet::new());
    while let Some(one) = left.pop() {
        left.extend(imports[one].iter().filter(|next| found.insert(**next)));
    }
    found
}

#[test]
fn no_op_stands_below_the_machine_and_no_device_below_a_contract() {
    for (own, to) in imports(&modules()) {
        let file = own.rsplit("::").next().unwrap_or_default();
        let is_machine = ["cpu", "cuda"].contains(&own.split("::").next().unwrap_or_default());
        let is_contract = own.starts_with("ops::") && ["op", "desc"].contains(&file);
        for to in to {
            let is_op = to.split("::").next() == Some("ops");
            let is_device = ["cpu", "cuda"].contains(&to.rsplit("::").next().unwrap_or_default())
                || ["cpu", "cuda"].contains(&to.split("::").next().unwrap_or_default());
            assert!(!(is_machine && is_op), "{own}, the machine, imports the op {to}");
            assert!(!(is_contract && is_device), "{own}, a contract, imports the device {to}");
        }
    }
}

#[test]
fn floors_are_few_and_circles_small() {
    let modules = modules();
    let imports = imports(&modules);
    let below: BTreeMap<&str, BTreeSet<&str>> =
        imports.keys().map(|own| (*own, below(own, &imports))).collect();
    let in_circle = |a: &str, b: &str| below[a].contains(b) && below[b].contains(a);
    for own in below.keys() {
        let circle: Vec<_> = below.keys().filter(|other| in_circle(own, other)).collect();
        assert!(circle.len() <= CIRCLE_MAX, "a circle of {}: {circle:?}", circle.len());
    }
    // A circle is one floor.
    let mut floors: BTreeMap<&str, usize> = below.keys().map(|own| (*own, 1)).collect();
    for _ in 0..below.len() {
        for (own, to) in &imports {
            let lower = to.iter().filter(|to| !in_circle(own, to));
            let floor = lower.map(|to| floors[to] + 1).max().unwrap_or(1);
            let circle = below.keys().filter(|other| in_circle(own, other));
            let floor = circle.map(|other| floors[other]).max().unwrap_or(1).max(floor);
            floors.insert(own, floor);
        }
    }
    let highest = floors.values().max().expect("modules");
    let top: Vec<_> = floors.iter().filter(|(_, floor)| *floor == highest).collect();
    assert!(*highest <= FLOORS_MAX, "{highest} floors, at the top {top:?}");
}

/// Each op of the table has its room: one reference and one launch, in files of the same folder.
#[test]
fn every_op_is_on_every_device() {
    let modules = modules();
    let rooms = |op: &str, device: &str| -> Vec<String> {
        let has = |text: &str| {
            [format!("fn {op}("), format!("fn {op}<")].iter().any(|start| text.contains(start))
        };
        let of_device = |name: &&String| name.split("::").nth(2) == Some(device);
        let found = modules.iter().filter(|(name, text)| of_device(name) && has(text));
        found.filter_map(|(name, _)| Some(name.split("::").nth(1)?.to_string())).collect()
    };
    assert!(OPS.len() > 40, "{OPS:?}");
    for op in OPS {
        let (cpu, cuda) = (rooms(op, "cpu"), rooms(op, "cuda"));
        assert!(!cpu.is_empty() && !cuda.is_empty(), "{op}: {cpu:?}, {cuda:?}");
        assert!(cpu.iter().any(|room| cuda.contains(room)), "{op}: {cpu:?}, {cuda:?}");
    }
    let lacking = modules.iter().filter(|(_, text)| text.contains(".lacks("));
    assert_eq!(lacking.count(), 0, "an op exists on every device or it does not exist");
}
