//! Tokens are those that Python's `tokenizers` makes of the whole text: whatever dialect a regular
//! expression is of, wherever a long text is cut, whether it is a line of JSON or a file.

use moe_worker::data::prepare::{Layout, Prepare, PrepareError};
use moe_worker::data::{DataFile, Encoder, Format, Recipe};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

fn encoder(folder: &Path, tokenizer: &Value) -> Encoder {
    let path = folder.join("tokenizer.json");
    std::fs::write(&path, tokenizer.to_string()).expect("a file");
    Encoder::read(&path).expect("a tokenizer")
}

fn prepare(
    folder: &Path,
    name: &str,
    encoder: &Encoder,
    end_of_document: Option<u32>,
) -> Result<Vec<u32>, PrepareError> {
    let (field, format) = match name.ends_with(".jsonl") {
        true => ("text".to_string(), Format::Jsonl("text".to_string())),
        false => (String::new(), Format::Text),
    };
    let output = folder.join(format!("{name}.out"));
    let made = Prepare {
        files: vec![DataFile::named(&folder.join(name)).expect("a file")],
        format,
        recipe: Recipe { encoder: encoder.clone(), field, end_of_document },
        output: output.clone(),
        layout: Layout::Flat,
        threads: 2,
        save_every: Duration::ZERO,
    };
    let width = made.width().bytes() as usize;
    made.run(&mut |_| ())?;
    let bytes = std::fs::read(folder.join(format!("{name}.out.bin"))).expect("tokens");
    let id = |id: &[u8]| id.iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte));
    Ok(bytes.chunks(width).map(id).collect())
}

/// A tokenizer whose ids tell how a text was split: each of `words` is one, all else is 0.
fn words(pre_tokenizer: Value, words: &[&str]) -> Value {
    let unknown = [("?".to_string(), json!(0))].into_iter();
    let known = words.iter().zip(1..).map(|(word, id)| (word.to_string(), json!(id)));
    json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
        "decoder": null, "pre_tokenizer": pre_tokenizer,
        "model": { "type": "WordLevel", "unk_token": "?",
                   "vocab": unknown.chain(known).collect::<serde_json::Map<_, _>>() },
    })
}

fn split(pattern: &str) -> Value {
    let pattern = json!({ "Regex": pattern });
    json!({ "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false })
}

#[test]
fn regular_expressions_are_of_the_dialect_of_the_python_package() {
    // The pieces are those of tokenizers 0.23.3 from PyPI.
    let cases: [(&str, &[&str]); 9] = [
        (r"\p{N}{1,3}+", &["call ", "12345678901", " or"]),
        (r"\s++$", &["a  \nb   \n\nc", "\n"]),
        (r"\s+$", &["line", "  ", "\nnext", "\t\t", "\nlast", "\n"]),
        (r"[[:punct:]]", &["a", "«", "b", "»", "c ", "—", " ", "“", "d", "”", "…", "+", "$"]),
        (r"\h+", &["x", "0f", "g ", "9A"]),
        (r"(?i:st)", &["ﬆ", " ", "ſt", " ", "ST", "x"]),
        (r"\w+", &["a", "\u{200d}", "b", " ", "c"]),
        (r"\X", &["e\u{301}", "x", "👩\u{200d}👧"]),
        (r"(?m:a.b)|^c", &["a\nb", "\n", "c", "\n", "c", "c"]),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    for (pattern, pieces) in cases {
        let mut vocabulary: Vec<&str> = pieces.to_vec();
        vocabulary.sort();
        vocabulary.dedup();
        let encoder = encoder(folder.path(), &words(split(pattern), &vocabulary));
        let mut ids = Vec::new();
        encoder.encode(&pieces.concat(), &mut ids).expect("ids");
        let found: Vec<&str> =
            ids.iter().map(|id| *vocabulary.get(*id as usize - 1).unwrap_or(&"?")).collect();
        assert_eq!(found, pieces, "{pattern}");
    }
}

#[test]
fn a_pattern_that_does_not_come_to_an_end_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let encoder = encoder(folder.path(), &words(split("(x+x+)+y"), &["x"]));
    std::fs::write(folder.path().join("a.jsonl"), format!("{{\"text\":\"{}\"}}", "x".repeat(99)))
        .expect("a file");
    let error = prepare(folder.path(), "a.jsonl", &encoder, None).expect_err("no end");
    let said = error.to_string();
    assert!(said.contains("a.jsonl, line 1") && said.contains("gives up: Onig"), "{said}");
}

/// Byte pairs over bytes; `merges` are of characters as GPT-2 writes them.
fn byte_pairs(pre_tokenizer: Value, merges: &[&str]) -> Value {
    let mut alphabet: Vec<String> = ByteLevel::alphabet().iter().map(char::to_string).collect();
    alphabet.sort();
    alphabet.extend(merges.iter().map(|pair| pair.replace(' ', "")));
    let ids = (0..).map(Value::from);
    let vocabulary: serde_json::Map<_, _> = alphabet.into_iter().zip(ids).collect();
    json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
        "decoder": null, "pre_tokenizer": pre_tokenizer,
        "model": { "type": "BPE", "vocab": vocabulary, "merges": merges },
    })
}

fn byte_level() -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true })
}

#[test]
fn a_long_text_has_the_tokens_of_the_whole_as_a_file_and_as_a_line() {
    // Where a MiB ends there is a run of line ends, which GPT-2 has in one token but for the last.
    let line = "All work and no play makes a long text. ".repeat(99);
    let mut text = line.repeat((1 << 20) / line.len());
    text += &"\n".repeat((1 << 20) + 9 - text.len());
    text += &line;
    let folder = tempfile::tempdir().expect("a folder");
    let tokenizer = byte_pairs(byte_level(), &["Ċ Ċ", "Ġ w", "o r", "Ġw or", "ĊĊ Ċ"]);
    let encoder = encoder(folder.path(), &tokenizer);
    std::fs::write(folder.path().join("a.txt"), &text).expect("a file");
    std::fs::write(folder.path().join("a.jsonl"), json!({ "text": text }).to_string())
        .expect("a file");
    let [file, line] = ["a.txt", "a.jsonl"]
        .map(|name| prepare(folder.path(), name, &encoder, None).expect("tokens"));
    let at = file.iter().zip(&line).position(|(id, expected)| id != expected);
    assert_eq!((at, file.len()), (None, line.len()));
}

#[test]
fn a_text_that_may_not_be_cut_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("a.txt"), "some words ".repeat(1 << 20)).expect("a file");
    // It looks behind: what a piece begins with would decide.
    let pre_tokenizer = split(r"(?<=some) words");
    let encoder = encoder(folder.path(), &words(pre_tokenizer, &["some", " words"]));
    let error = prepare(folder.path(), "a.txt", &encoder, None).expect_err("too long");
    let said = error.to_string();
    assert!(said.contains("a.txt, byte 0") && said.contains("write it as lines of JSON"), "{said}");
}

#[test]
fn a_document_without_tokens_has_no_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let lines = ["", "ab", "", ""].map(|text| json!({ "text": text }).to_string());
    std::fs::write(folder.path().join("a.jsonl"), lines.join("\n")).expect("a file");
    let ids = prepare(folder.path(), "a.jsonl", &Encoder::Bytes, Some(0)).expect("tokens");
    assert_eq!(ids, [97, 98, 0]);
}
