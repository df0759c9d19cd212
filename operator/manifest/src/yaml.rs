//! YAML, strictly: one bounded document becomes a tree whose every node knows its place.
//!
//! The tree keeps scalars as they were typed, quoted or not: what `010` or `yes` means depends on
//! the reader of the YAML, so it is judged beside the field that it is given to (`read.rs`). The
//! parser is serde-saphyr's.

use crate::problem::{Code, Place, Problem, is_bidi};
use serde_saphyr::granit_parser::{Event, Options, Parser, ScalarStyle, Span};
use std::collections::BTreeMap;

/// No honest manifest comes near.
pub const BYTES_MAX: usize = crate::cost::TEXT_BYTES_MAX;
/// Levels of nesting. A pod template needs about 15.
pub const DEPTH_MAX: usize = 64;
/// Nodes after aliases have been followed.
pub const NODES_MAX: usize = 20_000;

#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub place: Place,
    pub value: Value,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Scalar { text: String, plain: bool },
    List(Vec<Node>),
    Map(Vec<Entry>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub key: String,
    pub place: Place,
    pub value: Node,
}

impl Node {
    pub fn get(&self, key: &str) -> Option<&Entry> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|entry| entry.key == key),
            _ => None,
        }
    }

    /// The place of the field at `path` (`spec.volumes[0].claim`), or of what is nearest above it.
    pub fn place_of(&self, path: &str) -> Place {
        let mut node = self;
        let mut place = self.place;
        for part in path.split(['.', '[']).filter(|part| !part.is_empty()) {
            let next = match &node.value {
                Value::Map(_) => node.get(part).map(|entry| (entry.place, &entry.value)),
                Value::List(items) => part
                    .strip_suffix(']')
                    .and_then(|index| index.parse::<usize>().ok())
                    .and_then(|index| items.get(index))
                    .map(|item| (item.place, item)),
                Value::Scalar { .. } => None,
            };
            let Some((key, value)) = next else { break };
            place = if matches!(value.value, Value::Scalar { .. }) { value.place } else { key };
            node = value;
        }
        place
    }

    fn count(&self) -> usize {
        1 + match &self.value {
            Value::Scalar { .. } => 0,
            Value::List(items) => items.iter().map(Node::count).sum(),
            Value::Map(entries) => entries.iter().map(|entry| 1 + entry.value.count()).sum(),
        }
    }

    fn depth(&self) -> usize {
        1 + match &self.value {
            Value::Scalar { .. } => 0,
            Value::List(items) => items.iter().map(Node::depth).max().unwrap_or(0),
            Value::Map(entries) => {
                entries.iter().map(|entry| entry.value.depth()).max().unwrap_or(0)
            }
        }
    }
}

/// A value as YAML, for people and for `kubectl`.
pub fn write(value: &serde_json::Value) -> String {
    // JSON is YAML: what the writer should not know stands there as it is.
    serde_saphyr::to_string(value).unwrap_or_else(|_| value.to_string())
}

/// The one document in `bytes`, or what keeps it from being one.
pub fn parse(bytes: &[u8]) -> Result<Node, Vec<Problem>> {
    let text = decode(bytes).map_err(|problem| vec![*problem])?;
    let problems = characters(text);
    if !problems.is_empty() {
        return Err(problems);
    }
    Builder::default().document(text).map_err(|problem| vec![*problem])
}

type Refused = Box<Problem>;

/// Why a text is no document.
fn refused(
    code: Code,
    place: Place,
    found: impl Into<String>,
    allowed: impl Into<String>,
    advice: &str,
) -> Refused {
    Box::new(Problem::of(code, "", found, allowed, advice).at(place))
}

fn decode(bytes: &[u8]) -> Result<&str, Refused> {
    let first = Place { line: 1, column: 1 };
    if bytes.len() > BYTES_MAX {
        let (found, allowed) = (format!("{} bytes", bytes.len()), format!("at most {BYTES_MAX}"));
        let advice = "give the file of the MoeJob, not of its data";
        return Err(Problem::of(Code::TooLarge, "", found, allowed, advice).into());
    }
    let encoding = |place: Place, found: &str| {
        let advice = "save the file as UTF-8";
        refused(Code::Encoding, place, found, "UTF-8 without a byte-order mark", advice)
    };
    let wide = bytes.starts_with(&[0xff, 0xfe])
        || bytes.starts_with(&[0xfe, 0xff])
        || (bytes.len() >= 2 && (bytes[0] == 0) != (bytes[1] == 0));
    if wide {
        return Err(encoding(first, "UTF-16 or UTF-32"));
    }
    if bytes.starts_with(&[0xef, 0xbb, 0xbf]) {
        return Err(encoding(first, "a byte-order mark"));
    }
    std::str::from_utf8(bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count() as u32;
        let column = 1 + before.iter().rev().take_while(|byte| **byte != b'\n').count() as u32;
        encoding(Place { line, column }, "bytes that are not UTF-8")
    })
}

/// Characters that no manifest needs and that deceive readers or parsers. The first of each line.
fn characters(text: &str) -> Vec<Problem> {
    const PROBLEMS_MAX: usize = 20;
    let mut problems = Vec::new();
    for (index, line) in text.split('\n').enumerate() {
        let at = |column: usize| Place { line: index as u32 + 1, column: column as u32 + 1 };
        let indent = line.len() - line.trim_start_matches([' ', '\t']).len();
        if let Some(column) = line[..indent].find('\t').filter(|_| !line.trim().is_empty()) {
            let (found, advice) = ("a tab in the indentation", "replace it by spaces");
            problems.push(*refused(Code::Tab, at(column), found, "spaces", advice));
        }
        let line = line.strip_suffix('\r').unwrap_or(line);
        let bad = |c: &(usize, char)| (c.1.is_control() && c.1 != '\t') || is_bidi(c.1);
        if let Some((column, c)) = line.chars().enumerate().find(bad) {
            let found = format!("the character {}", c.escape_unicode());
            problems.push(*refused(
                Code::Character,
                at(column),
                found,
                "printable text",
                "delete it",
            ));
        }
        if problems.len() >= PROBLEMS_MAX {
            break;
        }
    }
    problems
}

/// A list or map under construction.
enum Open {
    List { place: Place, anchor: usize, items: Vec<Node> },
    Map { place: Place, anchor: usize, entries: Vec<Entry>, key: Option<(String, Place)> },
}

#[derive(Default)]
struct Builder {
    open: Vec<Open>,
    anchors: BTreeMap<usize, Node>,
    nodes: usize,
    root: Option<Node>,
}

impl Builder {
    fn document(mut self, text: &str) -> Result<Node, Refused> {
        let mut documents = 0;
        let mut options = Options::default();
        options.emit_comments = false;
        for next in Parser::new_from_str_with_options(text, options) {
            let (event, span) = next.map_err(|error| syntax(&error))?;
            if let Event::DocumentStart(..) = event {
                documents += 1;
                if documents > 1 {
                    let (at, advice) = (place(&span), "write one MoeJob a file");
                    return Err(refused(Code::Documents, at, "a second document", "one", advice));
                }
            }
            self.event(event, place(&span))?;
        }
        self.root.ok_or_else(|| {
            let (first, advice) = (Place { line: 1, column: 1 }, "start from one of examples/");
            refused(Code::Documents, first, "nothing", "one MoeJob", advice)
        })
    }

    fn event(&mut self, event: Event<'_>, place: Place) -> Result<(), Refused> {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                untagged(tag.is_some(), place)?;
                let plain = matches!(style, ScalarStyle::Plain);
                self.scalar(text.into_owned(), plain, anchor, place)
            }
            Event::SequenceStart(_, anchor, tag) => {
                untagged(tag.is_some(), place)?;
                self.deeper(place)?;
                self.open.push(Open::List { place, anchor, items: Vec::new() });
                Ok(())
            }
            Event::MappingStart(_, anchor, tag) => {
                untagged(tag.is_some(), place)?;
                self.deeper(place)?;
                let entries = Vec::new();
                self.open.push(Open::Map { place, anchor, entries, key: None });
                Ok(())
            }
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                Some(Open::List { place, anchor, items }) => {
                    self.add(Node { place, value: Value::List(items) }, anchor)
                }
                Some(Open::Map { place, anchor, entries, .. }) => {
                    self.add(Node { place, value: Value::Map(entries) }, anchor)
                }
                None => Ok(()),
            },
            Event::Alias(id) => {
                let Some(node) = self.anchors.get(&id) else {
                    return Err(aliases(place, "an alias inside its own anchor"));
                };
                if self.open.len() + node.depth() > DEPTH_MAX {
                    return Err(nesting(place));
                }
                let mut node = node.clone();
                node.place = place;
                self.nodes += node.count();
                self.add(node, 0)
            }
            _ => Ok(()),
        }
    }

    fn deeper(&self, place: Place) -> Result<(), Refused> {
        match self.open.len() < DEPTH_MAX {
            true => Ok(()),
            false => Err(nesting(place)),
        }
    }

    fn scalar(
        &mut self,
        text: String,
        plain: bool,
        anchor: usize,
        place: Place,
    ) -> Result<(), Refused> {
        if let Some(Open::Map { key: key @ None, .. }) = self.open.last_mut() {
            if text == "<<" && plain {
                let advice = "write the fields out; YAML 1.2 has no merge keys";
                return Err(refused(Code::Tag, place, "a merge key `<<`", "fields", advice));
            }
            *key = Some((text, place));
            self.nodes += 1;
            return Ok(());
        }
        self.add(Node { place, value: Value::Scalar { text, plain } }, anchor)
    }

    fn add(&mut self, node: Node, anchor: usize) -> Result<(), Refused> {
        self.nodes += 1;
        let place = node.place;
        if self.nodes > NODES_MAX {
            return Err(aliases(place, &format!("more than {NODES_MAX} values")));
        }
        if anchor != 0 {
            self.anchors.insert(anchor, node.clone());
        }
        match self.open.last_mut() {
            None => self.root = Some(node),
            Some(Open::List { items, .. }) => items.push(node),
            Some(Open::Map { entries, key, .. }) => match key.take() {
                Some((key, place)) => entries.push(Entry { key, place, value: node }),
                None => {
                    let (found, advice) =
                        ("a list or map as the name of a field", "write `name: value`");
                    return Err(refused(Code::WrongKind, place, found, "text", advice));
                }
            },
        }
        Ok(())
    }
}

fn place(span: &Span) -> Place {
    Place { line: span.start.line() as u32, column: span.start.col() as u32 + 1 }
}

fn untagged(tagged: bool, place: Place) -> Result<(), Refused> {
    let (allowed, advice) = ("values without tags", "delete the tag; quote what shall be text");
    match tagged {
        false => Ok(()),
        true => Err(refused(Code::Tag, place, "a tag (`!...`)", allowed, advice)),
    }
}

fn nesting(place: Place) -> Refused {
    let found = format!("more than {DEPTH_MAX} levels of nesting");
    refused(Code::Nesting, place, found, format!("at most {DEPTH_MAX}"), "flatten it")
}

fn aliases(place: Place, found: &str) -> Refused {
    let allowed = format!("at most {NODES_MAX} values, aliases followed");
    refused(Code::Aliases, place, found, allowed, "write the values out")
}

/// What a reader of YAML says first; the picture of the text that it draws below is left out.
pub fn first_words(error: &str) -> String {
    let line = error.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_string()
}

fn syntax(error: &serde_saphyr::granit_parser::ScanError) -> Refused {
    let mark = error.marker();
    let what = error.to_string();
    let what = what.split(" at char").next().unwrap_or_default();
    let place = Place { line: mark.line().max(1) as u32, column: mark.col() as u32 + 1 };
    let deep = what.contains("nest") || what.contains("recursion");
    if deep {
        return nesting(place);
    }
    let found: String = what.chars().filter(|c| !c.is_control()).take(160).collect();
    let advice = "look at the quotes, colons and indentation there and just above";
    refused(Code::Syntax, place, found, "YAML 1.2", advice)
}
