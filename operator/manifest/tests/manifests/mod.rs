//! The table of bad manifests, read: shared by the tests of the reader and those of the API server.

#![allow(dead_code, reason = "not every test uses all of it")]

use std::fmt::Write;

pub const BASE: &str = include_str!("base.yaml");
pub const TABLE: &str = include_str!("refused.txt");

/// One block of the table: what it says, without what is expected of it.
pub struct Case<'a> {
    /// Whole lines, the title first; none of a block that is not a case.
    pub given: Vec<&'a str>,
    pub block: &'a str,
}

impl Case<'_> {
    /// `7 an odd head`, or `None` for a block of prose.
    pub fn title(&self) -> Option<&str> {
        self.given.iter().find_map(|line| line.strip_prefix("## "))
    }

    /// The manifest: the base as this case edits it, or what is made for it.
    pub fn input(&self) -> Vec<u8> {
        input(&self.given)
    }
}

pub fn blocks(table: &str) -> impl Iterator<Item = Case<'_>> {
    table.split("\n\n").map(str::trim_end).map(|block| Case {
        given: block.lines().filter(|line| !line.starts_with("=>")).collect(),
        block,
    })
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
            let location = "x".repeat(1 << 15);
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
        "nested-lists" => "[".repeat(60_000).into_bytes(),
        "nested-maps" => {
            let lines = (0..340).map(|level| format!("{}a:\n", " ".repeat(level)));
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
