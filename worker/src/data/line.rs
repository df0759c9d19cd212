//! One line of JSONL -> its text, or where and why it has none.

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use std::borrow::Cow;
use std::fmt;

/// Why a line has no text.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// The column, counted in bytes from 1, and what is wrong there.
    At(usize, String),
    /// An object without the key, and the keys that it has.
    NoKey(String),
}

/// The text in `field` of the JSON object in `line`. None for a line of nothing but white space.
///
/// # Errors
/// What is wrong, and where.
pub fn text<'a>(
    line: &'a [u8],
    field: &str,
    first: bool,
) -> Result<Option<Cow<'a, str>>, Refused> {
    let refused = |column: usize, why: &str| Err(Refused::At(column, why.to_string()));
    if first && line.starts_with(b"\xef\xbb\xbf") {
        return refused(1, "a byte-order mark: save the file without it");
    }
    if first && (line.starts_with(b"\xff\xfe") || line.starts_with(b"\xfe\xff")) {
        return refused(1, "the file is UTF-16: save it as UTF-8");
    }
    if let Some(at) = line.iter().position(|byte| *byte == 0) {
        return refused(at + 1, "a NUL byte");
    }
    let line = match std::str::from_utf8(line) {
        Ok(line) => line,
        Err(error) => return refused(error.valid_up_to() + 1, "bytes that are no UTF-8"),
    };
    if line.trim_ascii().is_empty() {
        return Ok(None);
    }
    let mut found = object(line, field);
    // Python's `json` writes numbers that JSON has not. They are no error where nobody asks for
    // them, as in Python.
    let numbers = found.as_ref().err().and_then(|_| with_numbers(line));
    if let Some(line) = &numbers {
        found = object(line, field).map(|text| text.map(|text| Cow::Owned(text.into_owned())));
    }
    match found {
        Ok(Some(text)) => Ok(Some(text)),
        Ok(None) => {
            Err(Refused::NoKey(keys(numbers.as_deref().unwrap_or(line))))
        }
        Err(error) if error.is_eof() => refused(line.len(), "the line is cut off"),
        Err(error) if numbers.is_some() && error.to_string().contains("floating point") => {
            refused(error.column().max(1), "NaN or Infinity, expected a text")
        }
        Err(error) if error.to_string().contains("hex escape") => {
            let (column, escape) = lone_surrogate(line, error.column());
            let why = "is half of a character (a lone surrogate), which no tokenizer takes: \
                       write the line without it";
            refused(column, &format!("{escape} {why}"))
        }
        Err(error) => {
            // The line is known already; what follows is the reader's own idea of it.
            let text = error.to_string();
            let why = text.split(" at line ").next().unwrap_or_default();
            refused(error.column().max(1), why)
        }
    }
}

fn object<'a>(line: &'a str, field: &str) -> serde_json::Result<Option<Cow<'a, str>>> {
    let mut reader = serde_json::Deserializer::from_str(line);
    let found = Object { field }.deserialize(&mut reader)?;
    reader.end()?;
    Ok(found)
}

/// The line with numbers in the place of NaN, Infinity and -Infinity, at the same columns. None: it
/// has none of them.
fn with_numbers(line: &str) -> Option<String> {
    let bytes = line.as_bytes();
    let (mut text, mut quoted, mut at) = (None, false, 0);
    while at < bytes.len() {
        let mut step = 1;
        match bytes[at] {
            b'\\' if quoted => step = 2,
            b'"' => quoted = !quoted,
            b'N' | b'I' if !quoted => {
                let word = ["NaN", "Infinity"].into_iter().find(|word| {
                    let is_next = bytes[at..].starts_with(word.as_bytes());
                    let before = line[..at].trim_end().bytes().next_back().unwrap_or(b' ');
                    let after = bytes.get(at + word.len()).unwrap_or(&b' ');
                    let apart = b"[:,".contains(&before) || *word == "Infinity" && before == b'-';
                    is_next && apart && b",]} \t\r".contains(after)
                });
                if let Some(word) = word {
                    step = word.len();
                    let number = format!("{:.*}", step - 2, 0.0);
                    let text = text.get_or_insert_with(|| line.to_string());
                    text.replace_range(at..at + step, &number);
                }
            }
            _ => {}
        }
        at += step;
    }
    text
}

/// The last escape before `column` that is no character by itself, and its column.
fn lone_surrogate(line: &str, column: usize) -> (usize, &str) {
    let unit = |at: usize| {
        let digits = line.get(at..at + 6)?.strip_prefix("\\u")?;
        u16::from_str_radix(digits, 16).ok()
    };
    let (mut found, mut at) = ((column.max(1), "an escape"), 0);
    while let Some(next) = line[at..].find('\\').map(|found| at + found)
        && next < column
    {
        at = match (unit(next), unit(next + 6)) {
            (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => next + 12,
            (Some(unit), _) => {
                if (0xd800..=0xdfff).contains(&unit) {
                    found = (next + 1, &line[next..next + 6]);
                }
                next + 6
            }
            // Of a character of several bytes its first counts.
            (None, _) => next + 1 + line[next + 1..].chars().next().map_or(0, char::len_utf8),
        };
    }
    found
}

fn keys(line: &str) -> String {
    const SHOWN: usize = 8;
    let Ok(serde_json::Value::Object(fields)) = serde_json::from_str(line) else {
        return String::new();
    };
    let shown: Vec<String> =
        fields.keys().take(SHOWN).map(|key| key.chars().take(40).collect()).collect();
    if shown.is_empty() { "none".to_string() } else { shown.join(", ") }
}

struct Object<'f> {
    field: &'f str,
}

impl<'de> DeserializeSeed<'de> for Object<'_> {
    type Value = Option<Cow<'de, str>>;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Self::Value, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Object<'_> {
    type Value = Option<Cow<'de, str>>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "an object with a text in `{}`", self.field)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(key) = map.next_key_seed(Text("a key"))? {
            if key != self.field {
                map.next_value::<IgnoredAny>()?;
            } else if found.is_some() {
                return Err(A::Error::custom(format!("the key `{}` twice", self.field)));
            } else {
                found = Some(map.next_value_seed(Text("a text"))?);
            }
        }
        Ok(found)
    }
}

/// A string, borrowed where it holds no escapes.
struct Text(&'static str);

impl<'de> DeserializeSeed<'de> for Text {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Self::Value, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Text {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(text))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_gives_its_text() {
        let text = |line: &'static str| text(line.as_bytes(), "text", true);
        assert_eq!(text(r#"{"text":"one"}"#), Ok(Some("one".into())));
        let line = r#" {"id":[1,{"text":2}],"text":"a\nb \ud83d\ude00"} "#;
        assert_eq!(text(line), Ok(Some("a\nb 😀".into())));
        let line = r#"{"a":NaN, "b":[ -Infinity,Infinity ],"NaN":"NaN","text":"NaN,\"Infinity"}"#;
        assert_eq!(text(line), Ok(Some("NaN,\"Infinity".into())));
        let line = r#"{"half":"\ud800","text":"whole"}"#;
        assert_eq!(text(line), Ok(Some("whole".into())));
        assert_eq!(text("  \r"), Ok(None));
        assert_eq!(text(r#"{"text":""}"#), Ok(Some("".into())));
    }

    #[test]
    fn a_line_without_text_says_where_and_why() {
        let cases: [(&[u8], usize, &str); 22] = [
            (b"{\"id\":1,\"content\":\"x\"}", 1, "its keys: content, id"),
            (b"{}", 1, "its keys: none"),
            (b"{\"text\":7}", 9, "invalid type: integer `7`, expected a text"),
            (b"{\"text\":null}", 12, "expected a text"),
            (b"{\"text\":[\"a\"]}", 8, "invalid type: sequence"),
            (b"[\"text\"]", 0, "expected an object with a text in `text`"),
            (b"\"text\"", 6, "expected an object"),
            (b"{\"text\":\"a\",\"text\":\"b\"}", 18, "the key `text` twice"),
            (b"{\"text\":\"a", 10, "the line is cut off"),
            (b"{\"text\":\"a\"} x", 14, "trailing characters"),
            (b"{\"text\":\"\xff\"}", 10, "no UTF-8"),
            (b"{\"text\":\"\0\"}", 10, "a NUL byte"),
            (b"\xef\xbb\xbf{\"text\":\"a\"}", 1, "byte-order mark"),
            (br#"{"text":"\ud800"}"#, 10, r"\ud800 is half of a character"),
            (br#"{"a":"\ud800","text":"\\ud800\ud83d\ude00 \ud83d x"}"#, 43, r"\ud83d is half"),
            (br#"{"text":"\udc00"}"#, 10, r"\udc00 is half of a character"),
            (br#"{"text":"\ud800\u0041"}"#, 10, r"\ud800 is half of a character"),
            (br#"{"text":NaN}"#, 11, "NaN or Infinity, expected a text"),
            (br#"{"text":-Infinity}"#, 17, "NaN or Infinity, expected a text"),
            (br#"{"a":NaN,"b":1NaN,"text":"x"}"#, 15, "expected `,` or `}`"),
            (br#"{"a":NaN,"b":-NaN,"text":"x"}"#, 15, "invalid number"),
            (br#"{"a":NaN,"b":"x"}"#, 1, "its keys: a, b"),
        ];
        for (line, column, why) in cases {
            let shown = String::from_utf8_lossy(line);
            let (at, found) = match text(line, "text", true).expect_err(&shown) {
                Refused::At(at, found) => (at, found),
                Refused::NoKey(keys) => (1, format!("its keys: {keys}")),
            };
            assert!(found.contains(why), "{shown}: {found}");
            assert!(at.abs_diff(column) <= 1, "{shown}: column {at}, expected {column}");
        }
    }
}
