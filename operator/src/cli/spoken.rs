//! Tokens -> text as it comes, and where it goes: a terminal sees no control characters.

use moe_worker::data::Encoder;
use moejob_manifest::problem::is_bidi;
use std::io::{IsTerminal, Write};

/// Tokens that wait for the rest of a character at most: four bytes, and what a tokenizer joins.
const WAITING_MAX: usize = 8;

/// Ids in, text out as soon as it is whole: a character may be made of several tokens, and a token
/// may read otherwise behind others.
pub struct TextStream<'a> {
    encoder: &'a Encoder,
    ids: Vec<u32>,
    /// The ids before are out, those from `shown` on are read together with the next.
    shown: usize,
    out: usize,
}

impl<'a> TextStream<'a> {
    /// Behind `before`, whose text is known: a token at the beginning of a text may read otherwise
    /// than within one, as a word without the space in front of it.
    pub fn behind(encoder: &'a Encoder, before: &[u32]) -> TextStream<'a> {
        let ids = before[before.len().saturating_sub(WAITING_MAX)..].to_vec();
        let out = ids.len();
        TextStream { encoder, ids, shown: 0, out }
    }

    /// The text that `id` completes.
    pub fn push(&mut self, id: u32) -> String {
        self.ids.push(id);
        self.take(self.ids.len() - self.out > WAITING_MAX)
    }

    /// What is left, whole or not.
    pub fn finish(&mut self) -> String {
        self.take(true)
    }

    fn take(&mut self, all: bool) -> String {
        let before = self.encoder.decode(&self.ids[self.shown..self.out]);
        let whole = self.encoder.decode(&self.ids[self.shown..]);
        if whole.ends_with(char::REPLACEMENT_CHARACTER) && !all {
            return String::new();
        }
        let more = whole.strip_prefix(&before).unwrap_or(&whole).to_string();
        (self.shown, self.out) = (self.out, self.ids.len());
        more
    }
}

/// Standard output, or nothing.
pub struct Screen {
    silent: bool,
    terminal: bool,
}

impl Screen {
    pub fn new(silent: bool) -> Screen {
        Screen { silent, terminal: std::io::stdout().is_terminal() }
    }

    /// # Errors
    /// Nobody takes it.
    pub fn text(&mut self, text: &str) -> std::io::Result<()> {
        if self.silent || text.is_empty() {
            return Ok(());
        }
        let mut out = std::io::stdout();
        match self.terminal {
            true => out.write_all(harmless(text).as_bytes())?,
            false => out.write_all(text.as_bytes())?,
        }
        out.flush()
    }

    /// # Errors
    /// Nobody takes it.
    pub fn line(&mut self) -> std::io::Result<()> {
        self.text("\n")
    }
}

/// Text that cannot do anything to a terminal: line ends and tabs stay, every other control
/// character, and what turns the direction of writing, is shown as its number.
pub fn harmless(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => clean.push(c),
            c if c.is_control() || is_bidi(c) => clean.extend(c.escape_unicode()),
            c => clean.push(c),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streamed(bytes: &[u8]) -> Vec<String> {
        let encoder = Encoder::Bytes;
        let mut stream = TextStream::behind(&encoder, &[]);
        let mut pieces: Vec<String> =
            bytes.iter().map(|byte| stream.push(u32::from(*byte))).collect();
        pieces.push(stream.finish());
        pieces
    }

    #[test]
    fn characters_come_whole() {
        let text = "aé漢\u{1f600}z";
        let pieces = streamed(text.as_bytes());
        assert_eq!(pieces.concat(), text);
        let whole = ["a", "", "é", "", "", "漢", "", "", "", "\u{1f600}", "z", ""];
        assert_eq!(pieces, whole);
    }

    /// A tokenizer whose words have a space in front of them. Its decoder takes off the first one.
    fn words() -> Encoder {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokenizer.json");
        let decoders = r#"[{"type": "Replace", "pattern": {"String": "_"}, "content": " "},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]"#;
        let tokenizer = format!(
            r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": {{"type": "Sequence", "decoders": {decoders}}},
            "model": {{"type": "WordLevel", "vocab": {{"_The": 0, "_cat": 1, "s": 2}},
            "unk_token": "s"}}}}"#
        );
        std::fs::write(&path, tokenizer).expect("a file");
        Encoder::read(&path).expect("a tokenizer")
    }

    #[test]
    fn an_answer_keeps_the_space_in_front_of_it() {
        let encoder = words();
        for (prompt, answer) in [(&[0][..], &[1, 2, 1][..]), (&[0, 1, 2], &[1]), (&[0], &[2, 1])] {
            let mut stream = TextStream::behind(&encoder, prompt);
            let mut text: String = answer.iter().map(|id| stream.push(*id)).collect();
            text += &stream.finish();
            let whole = encoder.decode(&[prompt, answer].concat());
            assert_eq!(encoder.decode(prompt) + &text, whole);
        }
        let mut first = TextStream::behind(&encoder, &[]);
        assert_eq!(first.push(0) + &first.push(1), "The cat");
    }

    #[test]
    fn what_is_no_text_does_not_hold_up_the_rest() {
        let pieces = streamed(b"a\xff\xffbc\xe6\xbc");
        assert_eq!(pieces.concat(), "a\u{fffd}\u{fffd}bc\u{fffd}");
        assert_eq!(pieces[3], "\u{fffd}\u{fffd}b");
        let broken = streamed(&[0xff; 30]);
        assert!(broken[..20].iter().any(|piece| !piece.is_empty()), "{broken:?}");
        assert_eq!(broken.concat().chars().count(), 30);
    }

    #[test]
    fn a_terminal_sees_no_control_characters() {
        let found = harmless("a\u{1b}]0;x\u{7}\tb\n\u{9b}2J\u{202e}\r");
        assert_eq!(found, "a\\u{1b}]0;x\\u{7}\tb\n\\u{9b}2J\\u{202e}\\u{d}");
    }
}
