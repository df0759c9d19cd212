//! What people are told of data that are used all the same: files of text that look like something
//! else, and held-out data that are none.

use super::files::DataFile;
use super::open::Part;
use super::{Corpus, DataError, OVERLAPS_NAMED, header};
use serde::de::IgnoredAny;

/// A file of text is none of the formats that hold text otherwise. Gives its name, and what it
/// looks like, where that is no text.
///
/// # Errors
/// It is of another format, or it cannot be read.
pub(crate) fn is_text(file: &DataFile) -> Result<Option<(String, &'static str)>, DataError> {
    let head = file.head(header::HEAD_BYTES)?;
    header::not_foreign(&head, false).map_err(|(at, why)| DataError::bad(&file.path, at, why))?;
    let name = String::from_utf8_lossy(&file.name).into_owned();
    Ok(looks_like(&head, &name).map(|looks| (name, looks)))
}

const LINES: &str = "JSON lines";

/// What a file of text that begins with `head` looks like instead.
fn looks_like(head: &[u8], name: &str) -> Option<&'static str> {
    let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
    // What was read may end within a character.
    let is_other = |error: std::str::Utf8Error| error.error_len().is_some();
    if head.contains(&0) {
        Some("binary data")
    } else if std::str::from_utf8(head).is_err_and(is_other) {
        Some("another encoding than UTF-8")
    } else if ["jsonl", "ndjson"].contains(&ending) || begins_with_an_object(head) {
        Some(LINES)
    } else {
        None
    }
}

/// Whether a line of JSONL stands there.
fn begins_with_an_object(head: &[u8]) -> bool {
    let first = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    first.starts_with(b"{\"")
        && match serde_json::from_slice::<IgnoredAny>(first) {
            Ok(_) => true,
            // The line goes on behind what was read.
            Err(error) => error.is_eof() && first.len() == head.len(),
        }
}

/// A sentence for each.
pub(super) fn of(corpus: &Corpus) -> Vec<String> {
    let parts: Vec<&Part> = corpus.training.iter().chain(&corpus.held_out).collect();
    let all: Vec<&(String, &str)> = parts.iter().flat_map(|part| &part.doubts).collect();
    let mut kinds: Vec<&str> = all.iter().map(|(_, looks)| *looks).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let told = |kind: &str| {
        let mut names = all.iter().filter(|(_, looks)| *looks == kind).map(|(name, _)| &name[..]);
        let named = names.by_ref().take(OVERLAPS_NAMED).collect::<Vec<_>>().join(", ");
        let more = match names.count() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let instead = match kind {
            LINES => "its keys and quotes are trained on; `jsonl` reads the texts in them",
            _ => "its bytes are trained on as they are; leave out what is no text",
        };
        format!("{named}{more}: it is read as text and looks like {kind}: {instead}")
    };
    let mut told: Vec<String> = kinds.into_iter().map(told).collect();
    let (resets, masks) = (corpus.reset_at_boundaries, corpus.mask_at_boundaries);
    if (resets || masks) && parts.iter().any(|part| part.is_flat) {
        let field = if resets { "resetAtBoundaries" } else { "maskAtBoundaries" };
        told.push(format!(
            "data.{field}: files of tokens tell no end of a document where data.endOfDocument is \
             not set, so each file is one document: set it to the token that ends them"
        ));
    }
    let has_window = |part: &Part| part.stream.windows(corpus.sequence) > 0;
    if corpus.wants_held_out && !corpus.held_out.iter().any(has_window) {
        told.push(
            "data.validation: nothing is held out, so there is no held-out loss: the data are too \
             few to divide. Add text, or name other data by data.validation.from"
                .to_string(),
        );
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_looks_like_no_text_is_seen() {
        let cut = [b"{\"text\": \"".as_slice(), &[b'a'; 600]].concat();
        for (head, name, expected) in [
            (&b"plain words"[..], "a.txt", None),
            ("the end is cut within \u{e4}".as_bytes().split_last().expect("bytes").1, "a", None),
            (b"words\0", "a.txt", Some("binary data")),
            (b"gr\xfc\xdfe", "a.txt", Some("another encoding than UTF-8")),
            (b"{\"a\": 1}\n{\"a\": 2}\n", "a.txt", Some(LINES)),
            (&cut, "a.txt", Some(LINES)),
            (b"words", "a.jsonl", Some(LINES)),
            (b"{ block }\n", "a.rs", None),
            (b"{\"a\": 1 and more\n", "a.txt", None),
        ] {
            assert_eq!(looks_like(head, name), expected, "{head:?}");
        }
    }
}
