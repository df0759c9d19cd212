//! Bad manifests: one table of edits, and every problem that must be found in each.

#![allow(clippy::disallowed_methods, reason = "the test reads and writes its table")]

use moejob_plan::Job;
use moejob_plan::job::{bytes_of, millis_of, same_output};
use std::fmt::Write;

const BASE: &str = include_str!("manifests/base.yaml");
const TABLE: &str = "tests/manifests/refused.txt";

#[test]
fn every_bad_manifest_is_refused_as_the_table_says() {
    let path = format!("{}/{TABLE}", env!("CARGO_MANIFEST_DIR"));
    let table = std::fs::read_to_string(&path).unwrap();
    let mut found = String::new();
    let mut cases = 0;
    for block in table.split("\n\n").map(str::trim_end) {
        let case = block.lines().find(|line| line.starts_with("## "));
        let Some(_) = case else {
            write!(found, "{block}\n\n").unwrap();
            continue;
        };
        cases += 1;
        let given: Vec<&str> = block.lines().filter(|line| !line.starts_with("=>")).collect();
        let input = input(&given);
        write!(found, "{}\n{}\n", given.join("\n"), report(&input)).unwrap();
    }
    let found = format!("{}\n", found.trim_end());
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    for (line, (expected, found)) in table.lines().zip(found.lines()).enumerate() {
        assert_eq!(expected, found, "{TABLE}, line {}", line + 1);
    }
    assert_eq!(table.lines().count(), found.lines().count());
    assert!(cases > 120, "only {cases} cases were read");
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

fn input(lines: &[&str]) -> Vec<u8> {
    if let Some(name) = lines.iter().find_map(|line| line.strip_prefix("! ")) {
        return made(name);
    }
    let mut text = BASE.to_string();
    let mut edits: Vec<(String, String)> = Vec::new();
    for line in &lines[1..] {
        if let Some(old) = line.strip_prefix("- ") {
            match edits.last_mut().filter(|(_, new)| new.is_empty()) {
                Some((other, _)) => *other = format!("{other}\n{old}"),
                None => edits.push((old.to_string(), String::new())),
            }
        } else if let Some(new) = line.strip_prefix('+') {
            let new = new.strip_prefix(' ').unwrap_or(new);
            let (_, text) = edits.last_mut().unwrap();
            let separator = if text.is_empty() { "" } else { "\n" };
            *text = format!("{text}{separator}{}", unescape(new));
        }
    }
    for (old, new) in edits {
        assert!(text.contains(&old), "{old:?} is not in the base");
        text = text.replacen(&old, &new, 1);
    }
    text.into_bytes()
}

fn unescape(text: &str) -> String {
    let text = text.replace("\\t", "\t").replace("\\0", "\0").replace("\\r", "\r");
    let mut parts = text.split("\\u{");
    let mut plain = parts.next().unwrap().to_string();
    for part in parts {
        let (code, rest) = part.split_once('}').unwrap();
        plain.push(char::from_u32(u32::from_str_radix(code, 16).unwrap()).unwrap());
        plain.push_str(rest);
    }
    plain
}

/// Inputs that are too large or not text.
fn made(name: &str) -> Vec<u8> {
    let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    match name {
        "long-location" => {
            let location = "x".repeat(1 << 16);
            BASE.replace("keep: 3", &format!("keep: 3, location: {location}")).into_bytes()
        }
        "alias-bomb" => {
            let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_string();
            for level in 1..30 {
                let items = vec![format!("*a{}", level - 1); 10].join(", ");
                writeln!(text, "a{level}: &a{level} [{items}]").unwrap();
            }
            text.into_bytes()
        }
        "alias-loop" => b"a: &a\n  b: *a\n".to_vec(),
        "nested-lists" => "[".repeat(100_000).into_bytes(),
        "nested-maps" => {
            let lines = (0..1_000).map(|level| format!("{}a:\n", " ".repeat(level)));
            lines.collect::<String>().into_bytes()
        }
        "large" => format!("# {}\n", "x".repeat(3 << 20)).into_bytes(),
        "empty" => Vec::new(),
        "comments" => b"# nothing\n".to_vec(),
        "list" => b"- a\n- b\n".to_vec(),
        "bom" => format!("\u{feff}{BASE}").into_bytes(),
        "crlf" => BASE.replace('\n', "\r\n").into_bytes(),
        "utf16" => [vec![0xff, 0xfe], utf16(BASE)].concat(),
        "utf16-bare" => utf16(BASE),
        "latin1" => BASE.replace("sample", "s?mple").into_bytes().into_iter()
            .map(|byte| if byte == b'?' { 0xe4 } else { byte })
            .collect(),
        "bare" => {
            let end = BASE.find("metadata").unwrap();
            format!("{}metadata: {{ name: a }}\nspec: {{}}\n", &BASE[..end]).into_bytes()
        }
        other => panic!("no input is called {other}"),
    }
}
