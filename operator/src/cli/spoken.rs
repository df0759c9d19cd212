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
    pub fn new(encoder: &'a Encoder) -> TextStream<'a> {
        TextStream { encoder, ids: Vec::new(), shown: 0, out: 0 }
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
        let mut stream = TextStream::new(&encoder);
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
