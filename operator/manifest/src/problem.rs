//! A problem of the user's input: where, what was found, what is allowed, what to do.

use moejob_protocol::bounds::shorten;
use std::fmt;

/// A position in a file, both counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub line: u32,
    pub column: u32,
}

/// Stable names of refusals. E00: the text, E01: its shape, E02: its sense, E03: not built yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum Code {
    TooLarge = 1,
    Encoding = 2,
    Character = 3,
    Tab = 4,
    Syntax = 5,
    Documents = 6,
    Nesting = 7,
    Aliases = 8,
    Tag = 9,
    Kind = 101,
    UnknownField = 102,
    Duplicate = 103,
    Missing = 104,
    WrongKind = 105,
    OutOfRange = 106,
    NotOneOf = 107,
    Length = 108,
    Ambiguous = 109,
    Status = 110,
    Name = 201,
    Nodes = 202,
    Divides = 203,
    Batch = 204,
    Ranks = 205,
    Experts = 206,
    LearningRate = 207,
    OneOf = 208,
    Path = 209,
    Image = 210,
    Pod = 211,
    Quantity = 212,
    Duration = 213,
    Vocabulary = 214,
    Layers = 215,
    SameOutput = 216,
    Immutable = 217,
    Durable = 218,
    Router = 219,
    Cost = 220,
    Device = 221,
    Unsupported = 301,
}

/// Every code, ascending, with a sentence that says what it stands for.
pub const CODES: [(Code, &str); 41] = [
    (Code::TooLarge, "The text is longer than a manifest may be."),
    (Code::Encoding, "The text is not UTF-8."),
    (Code::Character, "A character that no manifest needs, such as a control, stands in it."),
    (Code::Tab, "A line is indented by a tab; YAML wants spaces."),
    (Code::Syntax, "The text is no YAML."),
    (Code::Documents, "The file has another number of documents than the command takes."),
    (Code::Nesting, "Values lie deeper in each other than a manifest needs."),
    (Code::Aliases, "Anchors, aliases and merges are not read: write out what they stand for."),
    (Code::Tag, "A YAML tag stands there; values have the kind that their field has."),
    (Code::Kind, "apiVersion and kind say that this is no MoeJob that this program knows."),
    (Code::UnknownField, "No field has that name there. `moejob explain` tells those that are."),
    (Code::Duplicate, "A field stands there twice, and one of them would be ignored."),
    (Code::Missing, "A field that must be given is not there."),
    (Code::WrongKind, "The value is of another kind than its field: text, number, list, group."),
    (Code::OutOfRange, "The number is beyond the bounds of its field."),
    (Code::NotOneOf, "The word is none of those that the field takes."),
    (Code::Length, "The text, list or group is longer or shorter than its field allows."),
    (Code::Ambiguous, "Readers of YAML differ over the value; quote it, or write it otherwise."),
    (Code::Status, "The operator alone writes that part."),
    (Code::Name, "The name is none that a job can have: it becomes part of names of pods."),
    (Code::Nodes, "Numbers of nodes, devices or spares do not fit each other or the profile."),
    (Code::Divides, "A size does not divide another one that it has to."),
    (Code::Batch, "Steps, batches and what comes every so many steps do not fit each other."),
    (Code::Ranks, "There are not as many micro-batches, or experts, as ranks want."),
    (Code::Experts, "Numbers of experts do not fit each other."),
    (Code::LearningRate, "Learning rates, or the steps of their schedule, do not fit each other."),
    (Code::OneOf, "Exactly one of some fields has to be given."),
    (Code::Path, "The path or glob is none that workers could read."),
    (Code::Image, "The name is none that an image can have."),
    (Code::Pod, "The pod template has what the operator writes itself, or what no pod has."),
    (Code::Quantity, "The quantity is none that Kubernetes reads."),
    (Code::Duration, "The duration is none: 500ms, 3s, 10m and 1h are."),
    (Code::Vocabulary, "The vocabulary does not hold what the tokenizer or a field wants."),
    (Code::Layers, "Layers are named that the model does not have."),
    (Code::SameOutput, "Two jobs would write over each other's checkpoints."),
    (Code::Immutable, "The field cannot change while the job is there."),
    (Code::Durable, "What is written would be lost with the pod."),
    (Code::Router, "Fields of the router do not fit each other."),
    (Code::Cost, "The job would take too much time or memory to plan."),
    (Code::Device, "The devices that the profile names do not compute that."),
    (Code::Unsupported, "The manifest is valid, and what it asks for is not built yet."),
];

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "E{:04}", *self as u16)
    }
}

/// A field of a field of ours has less; the names of an overlay are the user's.
const PATH_BYTES_MAX: usize = 512;
/// Each part of a problem's sentence: what was found, what is allowed, and what to do.
const PART_BYTES_MAX: usize = 1 << 10;

/// One line for a person: ``4:15 E0106 spec.nodes.min: found `0`; allowed: 1 to 4096; write ..``.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub code: Code,
    /// `spec.training.steps`; empty for the text as a whole.
    pub path: String,
    pub place: Option<Place>,
    pub found: String,
    pub allowed: String,
    pub advice: String,
}

impl Problem {
    pub fn new(code: Code, path: impl Into<String>) -> Problem {
        Problem {
            code,
            path: bounded(path, PATH_BYTES_MAX),
            place: None,
            found: String::new(),
            allowed: String::new(),
            advice: String::new(),
        }
    }

    /// One that says all: what was found at `path`, what may stand there, and what to do.
    pub fn of(
        code: Code,
        path: impl Into<String>,
        found: impl Into<String>,
        allowed: impl Into<String>,
        advice: impl Into<String>,
    ) -> Problem {
        Problem::new(code, path).found(found).allowed(allowed).advice(advice)
    }

    pub fn at(mut self, place: Place) -> Problem {
        self.place = Some(place);
        self
    }

    pub fn found(mut self, found: impl Into<String>) -> Problem {
        self.found = bounded(found, PART_BYTES_MAX);
        self
    }

    pub fn allowed(mut self, allowed: impl Into<String>) -> Problem {
        self.allowed = bounded(allowed, PART_BYTES_MAX);
        self
    }

    pub fn advice(mut self, advice: impl Into<String>) -> Problem {
        self.advice = bounded(advice, PART_BYTES_MAX);
        self
    }

    /// The problem without its place: code, path, found, allowed, what to do.
    pub fn sentence(&self) -> String {
        let separator = if self.path.is_empty() { "" } else { " " };
        let mut text = format!(
            "{}{separator}{}: found {}; allowed: {}",
            self.code, self.path, self.found, self.allowed
        );
        if !self.advice.is_empty() {
            text += &format!("; {}", self.advice);
        }
        text
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Some(place) => write!(f, "{}:{} {}", place.line, place.column, self.sentence()),
            None => write!(f, "{}", self.sentence()),
        }
    }
}

/// What was typed, short and without anything that would disturb a terminal.
pub fn quoted(text: &str) -> String {
    const CHARS_MAX: usize = 60;
    let clean: String =
        text.chars().take(CHARS_MAX).flat_map(|c| match c.is_control() || is_bidi(c) {
            true => c.escape_unicode().collect::<Vec<_>>(),
            false => vec![c],
        }).collect();
    match text.chars().nth(CHARS_MAX) {
        Some(_) => format!("`{clean}...` ({} bytes)", text.len()),
        None => format!("`{clean}`"),
    }
}

/// Words of somebody else without what would disturb a terminal, a page or a picture: lines and
/// tabs become spaces, other control characters and those that turn text around are shown.
pub fn printable(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\r' | '\t' => clean.push(' '),
            c if c.is_control() || is_bidi(c) => clean.extend(c.escape_unicode()),
            c => clean.push(c),
        }
    }
    clean
}

/// The same, of a text of several lines and tabs.
pub fn printable_lines(text: &str) -> String {
    let line = |line: &str| line.split('\t').map(printable).collect::<Vec<_>>().join("\t");
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

/// The text, with no more than so many bytes, and no more memory: what is longer ends with dots.
/// Texts that are kept, written or told come through here, whoever made them.
pub fn bounded(text: impl Into<String>, bytes_max: usize) -> String {
    let mut text = text.into();
    if text.len() > bytes_max {
        shorten(&mut text, bytes_max.saturating_sub(CUT.len()));
        text.push_str(CUT);
        text.shrink_to_fit();
    }
    text
}

/// As many of the lines as have together so many bytes, and how many are left out.
pub fn bounded_lines(lines: impl IntoIterator<Item = String>, bytes_max: usize) -> String {
    let (mut text, mut left_out) = (String::new(), 0usize);
    for line in lines {
        if left_out > 0 || text.len() + line.len() > bytes_max && !text.is_empty() {
            left_out += 1;
            continue;
        }
        if !text.is_empty() {
            text.push('\n');
        }
        text += &bounded(line, bytes_max);
    }
    if left_out > 0 {
        text += &format!("\nand {left_out} more");
    }
    text
}

/// Stands for what was cut.
const CUT: &str = "...";

/// Characters that make text read otherwise than it is.
pub fn is_bidi(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The candidate that was probably meant: equal but for case and separators, or few letters away.
pub fn nearest<'a>(typed: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |text: &str| text.to_lowercase().replace(['_', '-'], "");
    let typed = plain(typed);
    let limit = (typed.chars().count() / 3).clamp(1, 3);
    candidates
        .map(|candidate| (distance(&typed, &plain(candidate)), candidate))
        .filter(|(distance, _)| *distance <= limit)
        .min()
        .map(|(_, candidate)| candidate)
}

/// Levenshtein's, bounded by the length of a field's name.
fn distance(a: &str, b: &str) -> usize {
    const CHARS_MAX: usize = 64;
    let a: Vec<char> = a.chars().take(CHARS_MAX).collect();
    let b: Vec<char> = b.chars().take(CHARS_MAX).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
