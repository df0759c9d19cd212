//! A file of several YAML documents -> each by itself, at its own lines.

use crate::read::{API_VERSION, KIND};
use crate::yaml::{self, Node, Value};

/// Documents of a file that are told apart at most; more are one that is refused.
const DOCUMENTS_MAX: usize = 256;

/// One document, behind as many empty lines as there are before it in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    pub bytes: Vec<u8>,
    /// Of a document that is something else than a MoeJob: `Service web`.
    pub other: Option<String>,
}

/// The documents of a file that are not empty. One that cannot be read, or that says no kind, may
/// be a MoeJob with a mistake.
pub fn documents(file: &[u8]) -> Vec<Document> {
    let lines: Vec<&[u8]> = file.split_inclusive(|byte| *byte == b'\n').collect();
    let mut found: Vec<Vec<u8>> = vec![Vec::new()];
    for (number, line) in lines.iter().enumerate() {
        if begins(line) || ends(line) {
            if found.len() > DOCUMENTS_MAX {
                return vec![whole(file)];
            }
            found.push(vec![b'\n'; number]);
        }
        // Behind an end nothing is left of its line.
        let text: &[u8] = if ends(line) { b"\n" } else { line };
        if let Some(last) = found.last_mut() {
            last.extend_from_slice(text);
        }
    }
    found.retain(|text| text.split(|byte| *byte == b'\n').any(says_something));
    match found.len() {
        0 | 1 => vec![alone(file)],
        _ => found.into_iter().map(document).collect(),
    }
}

/// The only one of its file is probably meant: it is something else only where it names an API.
fn alone(file: &[u8]) -> Document {
    let of = document(file.to_vec());
    let is_typed = yaml::parse(file).is_ok_and(|tree| tree.get("apiVersion").is_some());
    if is_typed { of } else { whole(file) }
}

fn whole(file: &[u8]) -> Document {
    Document { bytes: file.to_vec(), other: None }
}

fn begins(line: &[u8]) -> bool {
    line.strip_prefix(b"---").is_some_and(|rest| rest.first().is_none_or(u8::is_ascii_whitespace))
}

fn ends(line: &[u8]) -> bool {
    line.strip_prefix(b"...").is_some_and(|rest| rest.trim_ascii().is_empty())
}

/// It is no comment, no mark and not empty.
fn says_something(line: &[u8]) -> bool {
    let text = if begins(line) { &line[3..] } else { line };
    let text = text.trim_ascii();
    !text.is_empty() && !text.starts_with(b"#")
}

fn document(bytes: Vec<u8>) -> Document {
    let tree = yaml::parse(&bytes).ok();
    let text = |node: Option<&Node>| match node.map(|node| &node.value) {
        Some(Value::Scalar { text, .. }) => Some(text.clone()),
        _ => None,
    };
    let field = |name: &str| tree.as_ref()?.get(name).map(|entry| &entry.value);
    // Another kind of our own group is a mistake, and so is our kind written otherwise.
    let group = API_VERSION.split('/').next();
    let is_ours = text(field("apiVersion")).is_some_and(|of| of.split('/').next() == group);
    let kind = text(field("kind")).filter(|kind| {
        !kind.eq_ignore_ascii_case(KIND) && !is_ours
    });
    let name = field("metadata").and_then(|of| of.get("name")).map(|entry| &entry.value);
    let name = text(name).unwrap_or_else(|| "without a name".to_string());
    Document { bytes, other: kind.map(|kind| format!("{kind} {name}")) }
}
