//! What of an answer of the API server is read: JSON in pieces goes in, and comes out with the
//! fields alone that somebody here asks for, each within its bounds.
//!
//! ```text
//! bytes of a list or a watch --Sieve--> the same objects, small --serde--> Pod, Node, MoeJob ..
//! ```
//! Nothing of what is left out is ever held. An object with a field of more bytes or levels than it
//! may have comes out without that field, and with `unread`, which names it: so one object of
//! somebody neither fills the memory nor makes the list unreadable for all others.

use std::fmt::Write as _;

/// What is kept of a value.
#[derive(Debug)]
pub enum Keep {
    /// All of it, where it has no more bytes of JSON, and no more levels, than that.
    Whole { bytes: usize, levels: usize },
    /// These fields.
    Fields(Fields),
    /// Of each entry of a list that.
    Each(&'static Keep),
    /// These fields of one object of the cluster, whose `unread` says what was left out. Once so
    /// many bytes of it are kept no list of it grows: its other fields bound themselves.
    Object { fields: Fields, bytes: usize },
}

pub type Fields = &'static [(&'static str, Keep)];

/// The field that a sieve adds to an object of which something was too much.
pub const UNREAD: &str = "unread";
/// A longer name of a field is none that is asked for.
const KEY_BYTES_MAX: usize = 256;
/// What stands where a group or a list was expected: a word or a number of an answer that is none.
const OTHER: Keep = Keep::Whole { bytes: 4 << 10, levels: 8 };
/// What `unread` says at most.
const UNREAD_BYTES_MAX: usize = 200;
/// Entries that are kept of a list of an object. Types of Kubernetes are large: of an entry of ten
/// bytes they make a kilobyte.
const ENTRIES_MAX: usize = 64;

/// A group or a list that is kept and still open.
#[derive(Debug)]
struct Open {
    of: Inside,
    name: Option<&'static str>,
    /// Fields or entries that were kept.
    kept: usize,
    /// It is an object of the cluster.
    object: bool,
}

#[derive(Clone, Copy, Debug)]
enum Inside {
    Group(Fields),
    List(&'static Keep),
}

/// What the next byte belongs to.
#[derive(Debug)]
enum At {
    /// Between values.
    Between,
    /// The name of a field.
    Key { name: Vec<u8>, escaped: bool },
    /// The value is about to begin.
    Before(Option<&'static Keep>),
    /// A value that is taken as it is, or left out.
    Within(Value),
}

#[derive(Debug, Default)]
struct Value {
    /// None: it is left out.
    kept: Option<(usize, usize)>,
    text: Vec<u8>,
    bytes: usize,
    level: usize,
    deepest: usize,
    quoted: bool,
    escaped: bool,
}

/// What a byte is to a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Goes,
    /// Its last one.
    Ends,
    /// The one behind it.
    Ended,
}

/// Of one object of the cluster.
#[derive(Debug, Default)]
struct Budget {
    left: usize,
    unread: String,
}

#[derive(Debug)]
pub struct Sieve {
    root: &'static Keep,
    open: Vec<Open>,
    at: At,
    /// The field whose value comes.
    name: Option<&'static str>,
    budget: Option<Budget>,
}

impl Sieve {
    /// For one value after the other, each of which is `root`.
    pub fn new(root: &'static Keep) -> Sieve {
        Sieve { root, open: Vec::new(), at: At::Between, name: None, budget: None }
    }

    /// What follows of the next piece.
    pub fn feed(&mut self, piece: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        for byte in piece {
            self.byte(*byte, &mut out);
        }
        out
    }

    fn byte(&mut self, byte: u8, out: &mut Vec<u8>) {
        // Most bytes are within a value, and nothing is moved for them.
        let step = match &mut self.at {
            At::Within(value) => value.step(byte),
            _ => Step::Ends,
        };
        if step == Step::Goes {
            return;
        }
        match std::mem::replace(&mut self.at, At::Between) {
            At::Key { name, escaped } => self.key(byte, name, escaped),
            At::Before(keep) if byte.is_ascii_whitespace() => self.at = At::Before(keep),
            At::Before(keep) => self.begin(byte, keep, out),
            At::Within(value) => {
                self.end(value, out);
                if step == Step::Ended {
                    self.byte(byte, out);
                }
            }
            At::Between => self.between(byte, out),
        }
    }

    fn between(&mut self, byte: u8, out: &mut Vec<u8>) {
        let Some(top) = self.open.last() else {
            return match byte {
                // Lines of a watch stay lines.
                b'\n' => out.push(byte),
                byte if byte.is_ascii_whitespace() => {}
                byte => self.begin(byte, Some(self.root), out),
            };
        };
        match (byte, top.of) {
            (b'}' | b']', _) => self.close(byte, out),
            (b'"', Inside::Group(_)) => {
                self.at = At::Key { name: Vec::new(), escaped: false };
            }
            (b':', Inside::Group(fields)) => {
                let name = self.name;
                let field = fields.iter().find(|(of, _)| Some(*of) == name);
                self.at = At::Before(field.map(|(_, keep)| keep));
            }
            (byte, Inside::List(each)) if byte != b',' && !byte.is_ascii_whitespace() => {
                self.begin(byte, Some(each), out);
            }
            _ => {}
        }
    }

    fn key(&mut self, byte: u8, mut name: Vec<u8>, escaped: bool) {
        if byte == b'"' && !escaped {
            let Some(Open { of: Inside::Group(fields), .. }) = self.open.last() else { return };
            let field = fields.iter().find(|(of, _)| of.as_bytes() == name);
            self.name = field.map(|(of, _)| *of);
            return;
        }
        if name.len() < KEY_BYTES_MAX {
            name.push(byte);
        }
        self.at = At::Key { name, escaped: byte == b'\\' && !escaped };
    }

    fn begin(&mut self, byte: u8, keep: Option<&'static Keep>, out: &mut Vec<u8>) {
        let opened = match (keep, byte) {
            (Some(Keep::Fields(fields)), b'{') => Some((Inside::Group(fields), None)),
            (Some(Keep::Object { fields, bytes }), b'{') => {
                Some((Inside::Group(fields), Some(*bytes)))
            }
            (Some(Keep::Each(each)), b'[') => Some((Inside::List(each), None)),
            _ => None,
        };
        if let Some((of, budget)) = opened {
            // The brackets and the names of what is empty are counted, too.
            let spent = self.spend(self.name.map_or(0, str::len) + 4);
            if !spent {
                return self.value(byte, None, out);
            }
            self.prefix(out);
            out.push(byte);
            let object = budget.is_some();
            if let Some(left) = budget {
                self.budget = Some(Budget { left, ..Budget::default() });
            }
            let name = self.name.take();
            return self.open.push(Open { of, name, kept: 0, object });
        }
        let kept = match keep {
            None => None,
            Some(Keep::Whole { bytes, levels }) => Some((*bytes, *levels)),
            Some(_) => match OTHER {
                Keep::Whole { bytes, levels } => Some((bytes, levels)),
                _ => None,
            },
        };
        self.value(byte, kept, out);
    }

    /// A value that is taken as it is, or left out, begins with that byte.
    fn value(&mut self, byte: u8, kept: Option<(usize, usize)>, out: &mut Vec<u8>) {
        let mut value = Value { kept, ..Value::default() };
        match value.step(byte) {
            Step::Goes => self.at = At::Within(value),
            Step::Ends | Step::Ended => self.end(value, out),
        }
    }

    /// Whether there is room for so much more of the object.
    fn spend(&mut self, bytes: usize) -> bool {
        let object = self.object();
        let Some(budget) = &mut self.budget else { return true };
        let is_list = |open: &Open| matches!(open.of, Inside::List(_));
        let is_long = |open: &Open| is_list(open) && open.kept >= ENTRIES_MAX;
        let why = if self.open[object..].last().is_some_and(is_long) {
            Some(format!("more than {ENTRIES_MAX} entries"))
        } else if budget.left < bytes && self.open[object..].iter().any(is_list) {
            // What had no room has none behind it either.
            budget.left = 0;
            Some("more than is kept of an object".to_string())
        } else {
            budget.left = budget.left.saturating_sub(bytes);
            None
        };
        if let Some(why) = &why {
            self.leave_out(why);
        }
        why.is_none()
    }

    /// Where what is open of the present object begins.
    fn object(&self) -> usize {
        self.open.iter().rposition(|open| open.object).map_or(0, |at| at + 1)
    }

    /// Notes what is left out of the present object, and why.
    fn leave_out(&mut self, why: &str) {
        let object = self.object();
        let names = self.open[object..].iter().filter_map(|open| open.name).chain(self.name);
        let path = names.collect::<Vec<_>>().join(".");
        let Some(budget) = self.budget.as_mut().filter(|budget| budget.unread.is_empty()) else {
            return;
        };
        let _ = write!(budget.unread, "{path}: {why}");
        // Paths are of our own fields, in ASCII.
        budget.unread.truncate(UNREAD_BYTES_MAX);
    }

    /// A comma and the name of the field, as they are needed.
    fn prefix(&mut self, out: &mut Vec<u8>) {
        let Some(top) = self.open.last_mut() else { return };
        if top.kept > 0 {
            out.push(b',');
        }
        top.kept += 1;
        if let (Inside::Group(_), Some(name)) = (top.of, self.name) {
            out.extend_from_slice(format!("\"{name}\":").as_bytes());
        }
    }

    /// The value is over.
    fn end(&mut self, value: Value, out: &mut Vec<u8>) {
        self.at = At::Between;
        if let Some((most, levels)) = value.kept {
            if value.deepest > levels {
                let deepest = value.deepest;
                self.leave_out(&format!("{deepest} levels of nesting, at most {levels}"));
            } else if value.bytes > most {
                self.leave_out(&format!("{} bytes as JSON, at most {most}", value.bytes));
            } else if self.spend(value.bytes + self.name.map_or(0, str::len) + 4) {
                self.prefix(out);
                out.extend_from_slice(&value.text);
            }
        }
        self.name = None;
    }

    fn close(&mut self, byte: u8, out: &mut Vec<u8>) {
        let Some(closed) = self.open.pop() else { return };
        if closed.object
            && let Some(budget) = self.budget.take().filter(|budget| !budget.unread.is_empty())
        {
            let comma = if closed.kept == 0 { "" } else { "," };
            let unread = serde_json::Value::from(budget.unread);
            out.extend_from_slice(format!("{comma}\"{UNREAD}\":{unread}").as_bytes());
        }
        out.push(byte);
        (self.at, self.name) = (At::Between, None);
    }
}

impl Value {
    fn step(&mut self, byte: u8) -> Step {
        // The end of a number or a word is the byte behind it.
        if self.bytes > 0 && self.level == 0 && !self.quoted && is_end(byte) {
            return Step::Ended;
        }
        self.bytes += 1;
        if let Some((most, levels)) = self.kept {
            if self.bytes > most || self.deepest > levels {
                self.text = Vec::new();
            } else {
                self.text.push(byte);
            }
        }
        let ends = match byte {
            _ if self.escaped => {
                self.escaped = false;
                false
            }
            b'\\' if self.quoted => {
                self.escaped = true;
                false
            }
            b'"' => {
                self.quoted = !self.quoted;
                !self.quoted && self.level == 0
            }
            b'{' | b'[' if !self.quoted => {
                self.level += 1;
                self.deepest = self.deepest.max(self.level);
                false
            }
            b'}' | b']' if !self.quoted => {
                self.level = self.level.saturating_sub(1);
                self.level == 0
            }
            _ => false,
        };
        if ends { Step::Ends } else { Step::Goes }
    }
}

fn is_end(byte: u8) -> bool {
    matches!(byte, b',' | b'}' | b']') || byte.is_ascii_whitespace()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJECT: Keep = Keep::Object {
        fields: &[
            ("name", Keep::Whole { bytes: 20, levels: 0 }),
            ("spec", Keep::Whole { bytes: 24, levels: 3 }),
            ("parts", Keep::Each(&Keep::Fields(&[("of", Keep::Whole { bytes: 8, levels: 1 })]))),
            ("status", Keep::Fields(&[("phase", Keep::Whole { bytes: 12, levels: 0 })])),
        ],
        bytes: 90,
    };
    const LIST: Keep = Keep::Fields(&[("items", Keep::Each(&OBJECT))]);

    /// The same comes out, however the bytes are cut into pieces.
    fn sieved(root: &'static Keep, text: &str) -> String {
        let whole = Sieve::new(root).feed(text.as_bytes());
        for length in [1, 3, 7] {
            let mut sieve = Sieve::new(root);
            let pieces = text.as_bytes().chunks(length);
            let cut: Vec<u8> = pieces.flat_map(|piece| sieve.feed(piece)).collect();
            assert_eq!(cut, whole, "in pieces of {length}");
        }
        String::from_utf8(whole).expect("text")
    }

    #[test]
    fn what_is_asked_for_comes_out_and_nothing_else() {
        let deep = format!("{}1{}", "[".repeat(10_000), "]".repeat(10_000));
        let long = format!("\"{}\"", "x".repeat(1 << 20));
        for (text, expected) in [
            (r#"{"name":"a"}"#, r#"{"name":"a"}"#),
            ("{}", "{}"),
            (r#" { "name" : "a" , "other" : {"name":"b"} } "#, r#"{"name":"a"}"#),
            (r#"{"other":1,"name":"a"}"#, r#"{"name":"a"}"#),
            (r#"{"other":"}\"{","name":"a\"}\\"}"#, r#"{"name":"a\"}\\"}"#),
            (r#"{"na\"me":1,"name":null}"#, r#"{"name":null}"#),
            (r#"{"name":-1.5e3,"spec":true}"#, r#"{"name":-1.5e3,"spec":true}"#),
            (r#"{"spec":{"a":[1, {}]}}"#, r#"{"spec":{"a":[1, {}]}}"#),
            (r#"{"parts":[{"of":1,"x":2},{"x":3},4]}"#, r#"{"parts":[{"of":1},{},4]}"#),
            (r#"{"status":"Failure"}"#, r#"{"status":"Failure"}"#),
            (r#"{"status":{"phase":"Running","x":[[]]}}"#, r#"{"status":{"phase":"Running"}}"#),
            (
                r#"{"name":"a","spec":{"a":[[[0]]]},"status":{"phase":"x"}}"#,
                concat!(
                    r#"{"name":"a","status":{"phase":"x"},"#,
                    r#""unread":"spec: 4 levels of nesting, at most 3"}"#
                ),
            ),
            (r#"{"spec":{"a":"0123456789012345"}}"#, r#"{"spec":{"a":"0123456789012345"}}"#),
            (
                r#"{"spec":{"a":"01234567890123456"}}"#,
                r#"{"unread":"spec: 25 bytes as JSON, at most 24"}"#,
            ),
            (
                r#"{"spec":{"a":"0123456789012345678"}}"#,
                r#"{"unread":"spec: 27 bytes as JSON, at most 24"}"#,
            ),
            (
                r#"{"status":{"phase":"0123456789012345678"}}"#,
                r#"{"status":{},"unread":"status.phase: 21 bytes as JSON, at most 12"}"#,
            ),
            (&format!(r#"{{"other":{deep},"name":"a"}}"#), r#"{"name":"a"}"#),
            (
                &format!(r#"{{"name":"a","spec":{deep}}}"#),
                r#"{"name":"a","unread":"spec: 10000 levels of nesting, at most 3"}"#,
            ),
            (
                &format!(r#"{{"name":"a","spec":{long}}}"#),
                r#"{"name":"a","unread":"spec: 1048578 bytes as JSON, at most 24"}"#,
            ),
        ] {
            let found = sieved(&OBJECT, text);
            assert_eq!(found.trim(), expected);
            serde_json::from_str::<serde_json::Value>(&found).expect("JSON");
        }
    }

    /// Many small parts are too much as well; the next object is whole again.
    #[test]
    fn one_object_has_no_more_than_its_share_and_hinders_no_other() {
        let parts = r#"{"of":1},"#.repeat(10_000);
        let first = format!(r#"{{"name":"a","parts":[{parts}{{}}],"spec":1}}"#);
        let text = format!(r#"{{"kind":"List","items":[{first},{{"spec":2}}]}}"#);
        let found = sieved(&LIST, &text);
        let many = r#"{"items":[{"name":"a","parts":[{"of":1},{"of":1},{"of":1},"#;
        assert!(found.starts_with(many), "{found}");
        let rest =
            r#"],"spec":1,"unread":"parts.of: more than is kept of an object"},{"spec":2}]}"#;
        assert!(found.ends_with(rest) && found.len() < 300, "{found}");
    }

    #[test]
    fn of_a_list_so_many_entries_are_kept() {
        const MANY: Keep = Keep::Object {
            fields: &[("of", Keep::Each(&Keep::Whole { bytes: 8, levels: 1 }))],
            bytes: 1 << 20,
        };
        let text = |count: usize| format!("{{\"of\":[{}]}}", vec!["0"; count].join(","));
        assert_eq!(sieved(&MANY, &text(64)), text(64));
        let cut = text(64).replace("]}", "],\"unread\":\"of: more than 64 entries\"}");
        assert_eq!(sieved(&MANY, &text(65)), cut);
        assert_eq!(sieved(&MANY, &text(10_000)), cut);
    }

    #[test]
    fn lines_of_a_watch_stay_lines() {
        let text = "{\"name\":\"a\"}\n{\"name\":\"b\",\"x\":1}\n";
        assert_eq!(sieved(&OBJECT, text), "{\"name\":\"a\"}\n{\"name\":\"b\"}\n");
    }

    #[test]
    fn what_is_no_json_panics_nowhere() {
        let tokens = ["{", "}", "[", "]", "\"", "\\", ",", ":", "1", "name", "items", " ", "\n"];
        let mut state = 7u64;
        for _ in 0..20_000 {
            let mut text = String::new();
            for _ in 0..24 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                text += tokens[(state >> 33) as usize % tokens.len()];
            }
            Sieve::new(&LIST).feed(text.as_bytes());
        }
    }
}
