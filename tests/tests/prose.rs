//! The rules of documents that a machine can check: links that lead somewhere, short paragraphs,
//! narrow lines, and commands that the program knows.

use moejob_tests::{all_of, moejob, root, tracked};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

const COLUMNS_MAX: usize = 100;
/// Lines of a paragraph, or of an item of a list.
const PARAGRAPH_MAX: usize = 5;
/// Pages that are notes of work under way, or made by the program.
const NOT_PROSE: [&str; 3] = ["docs/ROADMAP.md", "docs/ROADMAP-kernels.md", "docs/manifest.md"];

/// Every document by its path from the root.
fn documents() -> BTreeMap<String, String> {
    let name = |path: &Path| path.strip_prefix(root()).unwrap_or(path).display().to_string();
    let all: BTreeMap<String, String> =
        tracked(&[".md"]).into_iter().map(|(path, text)| (name(&path), text)).collect();
    assert!(all.len() > 30, "{} documents", all.len());
    all
}

/// The lines of a document outside of code, each with its number.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    text.lines().enumerate().filter_map(move |(number, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        (!code && !fence).then_some((number + 1, line))
    })
}

/// The lines of code of a document whose fence names a shell.
fn shell(text: &str) -> Vec<(usize, &str)> {
    let mut inside = None;
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        match (line.trim_start().strip_prefix("```"), inside) {
            (Some(_), Some(_)) => inside = None,
            (Some(language), None) => inside = Some(language.trim()),
            (None, Some("sh" | "")) => found.push((number + 1, line)),
            (None, _) => {}
        }
    }
    found
}

/// What a heading is called in a link: small letters, and hyphens for spaces.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|(_, line)| line.starts_with('#'));
    headings.map(|(_, line)| anchor(line.trim_start_matches('#'))).collect()
}

/// Targets of `[words](target)`; what stands between backticks is no link.
fn links(line: &str) -> Vec<&str> {
    let mut outside = true;
    let mut found = Vec::new();
    for (at, c) in line.char_indices() {
        outside ^= c == '`';
        if outside && line[at..].starts_with("](") {
            found.extend(line[at + 2..].split(')').next());
        }
    }
    found
}

#[test]
fn every_link_leads_somewhere() {
    let documents = documents();
    let mut found = Vec::new();
    let mut count = 0;
    for (name, text) in &documents {
        let folder = Path::new(name).parent().unwrap_or(Path::new(""));
        for (line, target) in
            prose(text).flat_map(|(line, text)| links(text).into_iter().map(move |to| (line, to)))
        {
            if target.contains("://") {
                continue;
            }
            count += 1;
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let path = root().join(if file.is_empty() {
                Path::new(name).to_path_buf()
            } else {
                folder.join(file)
            });
            let Ok(real) = path.canonicalize() else {
                found.push(format!("{name}:{line}: {target} is not there"));
                continue;
            };
            let known = std::fs::read_to_string(&real).map(|text| anchors(&text));
            if !heading.is_empty() && !known.is_ok_and(|known| known.contains(heading)) {
                found.push(format!("{name}:{line}: {target} has no such heading"));
            }
        }
    }
    assert!(count > 60, "{count} links");
    all_of(found);
}

#[test]
fn lines_are_narrow_and_paragraphs_short() {
    let mut found = Vec::new();
    for (name, text) in documents() {
        let mut paragraph = 0;
        let short = !NOT_PROSE.contains(&name.as_str());
        for (number, line) in prose(&text).chain([(usize::MAX, "")]) {
            let start = line.trim_start();
            let table = start.starts_with('|');
            if line.chars().count() > COLUMNS_MAX && !table && links(line).is_empty() {
                found.push(format!("{name}:{number}: over {COLUMNS_MAX} columns"));
            }
            let number_of_a_list =
                start.split_once(". ").is_some_and(|(digits, _)| digits.parse::<u32>().is_ok());
            let item = start.starts_with("- ") || number_of_a_list;
            let ends = start.is_empty() || start.starts_with('#') || table || item;
            paragraph = if ends { usize::from(item) } else { paragraph + 1 };
            if short && paragraph == PARAGRAPH_MAX + 1 {
                found.push(format!("{name}:{number}: more than {PARAGRAPH_MAX} lines"));
            }
        }
    }
    all_of(found);
}

/// What is left can be read at a glance: a row says it, and links to a page that says more.
#[test]
fn rows_of_the_roadmap_are_short() {
    const ROW_MAX: usize = 200;
    let mut found = Vec::new();
    for (name, text) in documents().iter().filter(|(name, _)| name.starts_with("docs/ROADMAP")) {
        for (number, line) in prose(text) {
            let length = line.chars().count();
            if length > ROW_MAX {
                found.push(format!("{name}:{number}: {length} characters, over {ROW_MAX}"));
            }
        }
    }
    all_of(found);
}

/// What a word of the glossary means stands there once.
#[test]
fn the_glossary_defines_each_word_once() {
    let page = std::fs::read_to_string(root().join("docs/ARCHITECTURE.md")).expect("the page");
    let words = page.split("\n## ").find(|section| section.starts_with("Words")).expect("Words");
    let rows = words.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| word"));
    let mut seen = BTreeSet::new();
    for row in rows {
        for word in row.split('|').nth(1).unwrap_or_default().split(',') {
            assert!(seen.insert(word.trim().to_string()), "{word} is defined twice");
        }
    }
    assert!(seen.len() > 20, "{seen:?}");
}

/// Words of a command of ours, up to a pipe, a comment or another command.
fn command(line: &str) -> Option<Vec<&str>> {
    let line = line.trim().trim_start_matches("$ ").split(" #").next()?;
    let line = line.split(['|', ';', '>']).next()?;
    let mut words = line.split_whitespace();
    let own = match words.next()? {
        "moejob" => vec![],
        "kubectl" if words.clone().next() == Some("moe") => {
            words.next();
            vec!["kube"]
        }
        "cargo" if words.next() == Some("run") => {
            words.find(|word| *word == "--")?;
            vec![]
        }
        _ => return None,
    };
    let known = |word: &&str| !word.contains('[') && !word.ends_with(']') && *word != "...";
    Some(own.into_iter().chain(words.filter(known)).collect())
}

/// The help of the command that `words` begin with, and how many of them name it.
fn help<'a>(words: &[&'a str], helps: &mut BTreeMap<Vec<&'a str>, String>) -> (String, usize) {
    let mut depth = 0;
    let mut page = ask(&[], helps);
    while let Some(word) = words.get(depth) {
        let known = |line: &str| line.split_whitespace().next() == Some(word);
        let commands = page.split("Commands:").nth(1).unwrap_or_default();
        let commands = commands.split("Options:").next().unwrap_or_default();
        if !commands.lines().any(known) {
            break;
        }
        depth += 1;
        page = ask(&words[..depth], helps);
    }
    (page, depth)
}

fn ask<'a>(path: &[&'a str], helps: &mut BTreeMap<Vec<&'a str>, String>) -> String {
    let make = || {
        let output = Command::new(moejob()).args(path).arg("--help").output().expect("moejob");
        assert!(output.status.success(), "{path:?} --help");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    helps.entry(path.to_vec()).or_insert_with(make).clone()
}

/// The lines of an example's header, whose commands are explained behind two spaces.
fn header(text: &str) -> Vec<(usize, &str)> {
    let lines = text.lines().map_while(|line| line.strip_prefix('#')).enumerate();
    let inside = lines.filter_map(|(number, line)| Some((number + 1, line.strip_prefix("   ")?)));
    inside.map(|(number, line)| (number, line.split("  ").next().unwrap_or_default())).collect()
}

/// A command in a document or an example names a command of the program, with options that it has.
#[test]
fn commands_in_documents_are_known() {
    let documents = documents();
    let examples = tracked(&[".yaml", ".sh"]).into_iter().filter_map(|(path, text)| {
        let name = path.strip_prefix(root()).ok()?;
        name.starts_with("examples").then(|| (name.display().to_string(), text))
    });
    let examples: Vec<(String, String)> = examples.collect();
    let of = |name: &str, text| if name.ends_with(".md") { shell(text) } else { header(text) };
    let (mut found, mut helps, mut count) = (Vec::new(), BTreeMap::new(), 0);
    for (name, text) in documents.iter().chain(examples.iter().map(|(name, text)| (name, text))) {
        for (line, words) in
            of(name, text).into_iter().filter_map(|(line, text)| Some((line, command(text)?)))
        {
            if words.first().is_none_or(|word| word.starts_with("ARG") || word.starts_with('<')) {
                continue;
            }
            count += 1;
            let (page, depth) = help(&words, &mut helps);
            if depth == 0 && !words[0].starts_with('-') {
                found.push(format!("{name}:{line}: there is no command {}", words[0]));
                continue;
            }
            let options = words[depth..].iter().filter(|word| word.starts_with("--"));
            for option in options.filter(|word| word.len() > 2) {
                let option = option.split('=').next().unwrap_or_default();
                let mut known = page.split(|c: char| c.is_whitespace() || ",=[<".contains(c));
                if !known.any(|word| word == option) {
                    let of = words[..depth].join(" ");
                    found.push(format!("{name}:{line}: {of} has no option {option}"));
                }
            }
        }
    }
    assert!(count > 30, "{count} commands");
    all_of(found);
}
