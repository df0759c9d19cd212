//! One line of JSONL -> its text, or where and why it has none.

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use std::borrow::Cow;
use std::fmt;

/// The text in `field` of the JSON object in `line`. None for a line of nothing but white space.
///
/// # Errors
/// The column, counted in bytes from 1, and what is wrong there.
pub fn text<'a>(
    line: &'a [u8],
    field: &str,
    first: bool,
) -> Result<Option<Cow<'a, str>>, (usize, String)> {
    let refused = |column: usize, why: &str| Err((column, why.to_string()));
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
    let mut reader = serde_json::Deserializer::from_str(line);
    let found = Object { field }.deserialize(&mut reader).and_then(|text| {
        reader.end()?;
        Ok(text)
    });
    match found {
        Ok(Some(text)) => Ok(Some(text)),
        Ok(None) => refused(1, &format!("no key `{field}`; its keys: {}", keys(line))),
        Err(error) if error.is_eof() => refused(line.len(), "the line is cut off"),
        Err(error) => {
            // The line is known already; what follows is the reader's own idea of it.
            let text = error.to_string();
            let why = text.split(" at line ").next().unwrap_or_default();
            refused(error.column().max(1), why)
        }
    }
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
        assert_eq!(text("  \r"), Ok(None));
        assert_eq!(text(r#"{"text":""}"#), Ok(Some("".into())));
    }

    #[test]
    fn a_line_without_text_says_where_and_why() {
        let cases: [(&[u8], usize, &str); 14] = [
            (b"{\"id\":1,\"content\":\"x\"}", 1, "no key `text`; its keys: content, id"),
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
            (b"{\"text\":\"\\ud800\"}", 16, "hex escape"),
        ];
        for (line, column, why) in cases {
            let shown = String::from_utf8_lossy(line);
            let (at, found) = text(line, "text", true).expect_err(&shown);
            assert!(found.contains(why), "{shown}: {found}");
            assert!(at.abs_diff(column) <= 1, "{shown}: column {at}, expected {column}");
        }
    }
}
