//! Where a long text may be cut so that its pieces have the tokens that the whole has.
//!
//! ```text
//! text -> added tokens -> normalizer -> pre-tokenizer -> words -> model
//!      each stage: nothing reaches over the place, and what it is there stays what it was
//!      at the end: a word ends there for sure, or no token of the vocabulary reaches over it
//! ```
//! A cut is made between a letter and the white space behind it, where that can be shown for each
//! stage of the tokenizer. Stages that are not known here, and patterns that cannot be judged, have
//! no such place: their texts stay whole.

use super::pattern::{Facts, GPT2};
use serde_json::Value;
use std::cell::OnceCell;
use std::collections::HashMap;
use tokenizers::models::ModelWrapper;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper, Tokenizer};

/// Pairs of characters that are judged anew for one piece.
const JUDGED_MAX: usize = 1024;

/// What holds for every text between two characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Tokens may reach over the place.
    Together,
    /// They do not.
    Apart,
    /// They do not where a letter follows the space. The later piece is given without the space:
    /// the tokenizer puts one of its own before each text.
    Spaceless,
}

/// Finds places.
#[derive(Clone, Debug, Default)]
pub struct Cutter {
    /// None: every byte is a token, so any place will do.
    stages: Option<Box<Stages>>,
    judged: HashMap<(char, char), Verdict>,
}

#[derive(Clone, Debug)]
struct Stages {
    tokenizer: Tokenizer,
    normalizer: Value,
    pre_tokenizer: Value,
    added: Vec<Added>,
    /// Of the model; taken once a word is not sure to end at a place.
    vocabulary: OnceCell<HashMap<String, u32>>,
}

#[derive(Clone, Debug)]
struct Added {
    /// As it is looked for: before the normalizer, or `normalized` behind it.
    text: String,
    normalized: bool,
    single_word: bool,
    rstrip: bool,
}

impl Cutter {
    pub fn new(tokenizer: &Tokenizer) -> Cutter {
        let normalizer = tokenizer.get_normalizer();
        let added = tokenizer.get_added_tokens_decoder().into_values().map(|token| {
            let mut text = NormalizedString::from(token.content);
            if let Some(normalizer) = normalizer.filter(|_| token.normalized) {
                // As in the library, where it fails the text stays as it is.
                let _ = normalizer.normalize(&mut text);
            }
            let (normalized, single_word, rstrip) =
                (token.normalized, token.single_word, token.rstrip);
            Added { text: text.get().to_string(), normalized, single_word, rstrip }
        });
        let stages = Stages {
            normalizer: serde_json::to_value(normalizer).unwrap_or(Value::Bool(false)),
            pre_tokenizer: serde_json::to_value(tokenizer.get_pre_tokenizer())
                .unwrap_or(Value::Bool(false)),
            added: added.collect(),
            vocabulary: OnceCell::new(),
            tokenizer: tokenizer.clone(),
        };
        Cutter { stages: Some(Box::new(stages)), judged: HashMap::new() }
    }

    /// Bytes at the beginning of each piece but the first that its tokenizer puts there by itself.
    pub fn skipped(tokenizer: &Tokenizer) -> usize {
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).unwrap_or_default();
        usize::from(is_llama(&normalizer))
    }

    /// The last place in `bytes` behind `from`. What is no text has none.
    pub fn last(&mut self, bytes: &[u8], from: usize) -> Option<usize> {
        if self.stages.is_none() {
            return (bytes.len() > from).then_some(bytes.len());
        }
        let mut new = 0;
        for at in (from.max(1)..bytes.len()).rev() {
            let space = bytes[at];
            if !matches!(space, b' ' | b'\n') {
                continue;
            }
            let Some([before, left]) = two_before(&bytes[..at]) else { continue };
            if !is_plain(left) || !is_plain(before) {
                continue;
            }
            let right = char::from(space);
            let verdict = match self.judged.get(&(left, right)) {
                Some(verdict) => *verdict,
                None if new == JUDGED_MAX => return None,
                None => {
                    new += 1;
                    let verdict = self.stages.as_ref()?.judge(left, right);
                    self.judged.insert((left, right), verdict);
                    verdict
                }
            };
            match verdict {
                Verdict::Apart => return Some(at),
                Verdict::Spaceless if self.begins_plainly(&bytes[at + 1..]) => return Some(at),
                _ => {}
            }
        }
        None
    }

    /// A letter comes first, and no added token does.
    fn begins_plainly(&self, bytes: &[u8]) -> bool {
        let head = &bytes[..bytes.len().min(4)];
        let first = head.utf8_chunks().next().and_then(|chunk| chunk.valid().chars().next());
        let begins = |letter: char, stages: &Stages| {
            stages.added.iter().any(|added| added.text.starts_with(letter))
        };
        first.is_some_and(|letter| {
            is_plain(letter) && self.stages.as_ref().is_some_and(|stages| !begins(letter, stages))
        })
    }
}

/// The last two characters of bytes that end with whole ones.
fn two_before(bytes: &[u8]) -> Option<[char; 2]> {
    let tail = &bytes[bytes.len().saturating_sub(8)..];
    let from = tail.iter().position(|byte| byte & 0xc0 != 0x80)?;
    let mut last = std::str::from_utf8(&tail[from..]).ok()?.chars().rev();
    let left = last.next()?;
    Some([last.next()?, left])
}

/// Letters that stand for themselves: they join no neighbour under any normal form or as a
/// grapheme, and their other case is one character.
fn is_plain(c: char) -> bool {
    matches!(c,
        'a'..='z' | 'A'..='Z'
        | '\u{c0}'..='\u{d6}' | '\u{d8}'..='\u{de}' | '\u{e0}'..='\u{f6}' | '\u{f8}'..='\u{12f}'
        | '\u{391}'..='\u{3a1}' | '\u{3a3}'..='\u{3a9}' | '\u{3b1}'..='\u{3c9}'
        | '\u{410}'..='\u{44f}' | '\u{5d0}'..='\u{5ea}' | '\u{621}'..='\u{63a}'
        | '\u{641}'..='\u{64a}' | '\u{e01}'..='\u{e30}' | '\u{3041}'..='\u{3096}'
        | '\u{30a1}'..='\u{30fa}' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}'
        | '\u{ac00}'..='\u{d7a3}')
}

/// What stands on both sides of the place between two stages.
#[derive(Clone, Debug)]
struct Edge {
    left: char,
    /// One of these.
    right: Vec<char>,
}

/// Whether a word is sure to end at the place. None: nothing happens there at this stage.
type Judged = Option<bool>;

impl Stages {
    fn judge(&self, left: char, right: char) -> Verdict {
        let mut edge = Edge { left, right: vec![right] };
        let reaches = |normalized: bool, left, right| {
            let looked_for = self.added.iter().filter(|added| added.normalized == normalized);
            looked_for.into_iter().any(|added| added.reaches(left, right))
        };
        if reaches(false, left, right) {
            return Verdict::Together;
        }
        let spaceless = is_llama(&self.normalizer);
        if spaceless {
            if right != ' ' {
                return Verdict::Together;
            }
            edge.right = vec!['\u{2581}'];
        } else if !edge.normalize(&self.normalizer) {
            return Verdict::Together;
        }
        let Edge { left, right } = &edge;
        if right.iter().any(|right| reaches(true, *left, *right)) {
            return Verdict::Together;
        }
        let apart = edge.split(&self.pre_tokenizer).unwrap_or_else(|| self.no_token_has(&edge));
        match (apart, spaceless) {
            (false, _) => Verdict::Together,
            (true, false) => Verdict::Apart,
            (true, true) => Verdict::Spaceless,
        }
    }

    /// Whether the model itself, given both sides as one word, makes no token of both.
    fn no_token_has(&self, edge: &Edge) -> bool {
        let ModelWrapper::BPE(model) = self.tokenizer.get_model() else { return false };
        let affixed = |affix: &Option<String>| affix.as_ref().is_some_and(|of| !of.is_empty());
        if model.ignore_merges
            || affixed(&model.continuing_subword_prefix)
            || affixed(&model.end_of_word_suffix)
        {
            return false;
        }
        let vocabulary = self.vocabulary.get_or_init(|| self.tokenizer.get_vocab(false));
        let known = |c: &char| vocabulary.contains_key(c.to_string().as_str());
        // Characters that are not in the vocabulary become one unknown token together.
        known(&edge.left)
            && edge.right.iter().all(known)
            && edge.right.iter().all(|right| {
                let both = format!("{}{right}", edge.left);
                !vocabulary.keys().any(|token| token.contains(&both))
            })
    }
}

/// Llama's and Mistral's: every text gets a space, and all spaces become U+2581.
fn is_llama(normalizer: &Value) -> bool {
    let Some([prepend, replace]) = normalizer["normalizers"].as_array().map(Vec::as_slice) else {
        return false;
    };
    prepend["type"] == "Prepend"
        && prepend["prepend"] == "\u{2581}"
        && replace["type"] == "Replace"
        && replace["pattern"]["String"] == " "
        && replace["content"] == "\u{2581}"
}

impl Added {
    /// Whether it may reach over the place, or see what is on its other side.
    fn reaches(&self, left: char, right: char) -> bool {
        let both = format!("{left}{right}");
        self.text.contains(&both)
            || self.rstrip && self.text.ends_with(left)
            || self.single_word && self.text.starts_with(right)
    }
}

impl Edge {
    /// Whether both sides are normalized as they would be alone.
    fn normalize(&mut self, stage: &Value) -> bool {
        match stage["type"].as_str() {
            _ if stage.is_null() => true,
            Some("Sequence") => {
                let stages = stage["normalizers"].as_array();
                stages.is_some_and(|stages| stages.iter().all(|stage| self.normalize(stage)))
            }
            Some(
                "NFC" | "NFD" | "NFKC" | "NFKD" | "Nmt" | "Lowercase" | "StripAccents"
                | "BertNormalizer" | "Precompiled" | "ByteLevel",
            ) => self.map(stage).is_some(),
            Some("Strip") => stage["strip_left"] == false && !self.left.is_whitespace(),
            Some("Replace") => self.replace(stage).is_some(),
            _ => false,
        }
    }

    /// A normalizer that looks at each character alone, or at what belongs to it.
    fn map(&mut self, stage: &Value) -> Option<()> {
        let normalizer: NormalizerWrapper = serde_json::from_value(stage.clone()).ok()?;
        let one = |c: char| {
            let mut text = NormalizedString::from(c.to_string());
            normalizer.normalize(&mut text).ok()?;
            Some(text.get().to_string())
        };
        self.left = one(self.left)?.chars().next_back()?;
        let right: Option<Vec<char>> =
            self.right.iter().map(|right| one(*right)?.chars().next()).collect();
        self.right = right?;
        Some(())
    }

    fn replace(&mut self, stage: &Value) -> Option<()> {
        let (content, pattern) = (stage["content"].as_str()?.chars().next(), &stage["pattern"]);
        let mut right = Vec::new();
        for from in &self.right {
            let facts = facts(pattern, self.left, *from)?;
            if facts.crosses || facts.ends {
                return None;
            }
            if facts.begins {
                right.push(content?);
            }
            if !facts.starts {
                right.push(*from);
            }
        }
        right.dedup();
        self.right = right;
        Some(())
    }

    fn all(&self, is: impl Fn(char) -> bool) -> bool {
        self.right.iter().all(|right| is(*right))
    }

    fn split(&mut self, stage: &Value) -> Judged {
        let known = |is: bool| is.then_some(true).or(Some(false));
        match stage["type"].as_str() {
            _ if stage.is_null() => None,
            Some("Sequence") => {
                let stages = stage["pretokenizers"].as_array();
                stages.map_or(Some(false), |all| all.iter().find_map(|stage| self.split(stage)))
            }
            Some("ByteLevel") => {
                if stage["add_prefix_space"] != false && !self.all(|right| right == ' ') {
                    return Some(false);
                }
                if stage["use_regex"] != false {
                    return known(self.splits(&Value::from(GPT2), "Isolated") == Some(true));
                }
                let bytes = serde_json::json!({ "type": "ByteLevel" });
                self.map(&bytes).map_or(Some(false), |()| None)
            }
            Some("Split") => {
                let behavior = stage["behavior"].as_str().unwrap_or_default();
                if stage["invert"] != false && !matches!(behavior, "Isolated" | "Removed") {
                    return Some(false);
                }
                self.splits(&stage["pattern"], behavior)
            }
            Some("Metaspace") => {
                let mark = stage["replacement"].as_str().and_then(|mark| mark.chars().next());
                let Some(mark) = mark.filter(|mark| *mark != self.left) else {
                    return Some(false);
                };
                for right in self.right.iter_mut().filter(|right| **right == ' ') {
                    *right = mark;
                }
                let marked = self.all(|right| right == mark);
                match (marked, stage["split"] != false) {
                    (true, true) => Some(true),
                    (true, false) => None,
                    (false, _) => (stage["prepend_scheme"] != "never").then_some(false),
                }
            }
            // White space is no word and in none.
            Some("Whitespace" | "WhitespaceSplit" | "BertPreTokenizer") => known(
                self.all(char::is_whitespace) && self.left.is_alphanumeric(),
            ),
            Some("CharDelimiterSplit") => match stage["delimiter"].as_str() {
                Some(" ") => self.all(|right| right == ' ').then_some(true),
                _ => Some(false),
            },
            Some("Punctuation" | "Digits") => {
                let plain = |c: char| c.is_whitespace() || c == '\u{2581}';
                (!self.all(plain) || !self.left.is_alphabetic()).then_some(false)
            }
            _ => Some(false),
        }
    }

    fn splits(&self, pattern: &Value, behavior: &str) -> Judged {
        let mut ends = true;
        for right in &self.right {
            let Some(facts) = facts(pattern, self.left, *right) else { return Some(false) };
            if facts.crosses {
                return Some(false);
            }
            ends &= match behavior {
                // No match begins or ends at the place.
                _ if !facts.begins && !facts.ends => false,
                "Isolated" | "Removed" => facts.starts,
                // What ends with the letter takes what follows.
                "MergedWithNext" if facts.ends => return Some(false),
                "MergedWithNext" => facts.starts,
                _ => return Some(false),
            };
        }
        ends.then_some(true)
    }
}

/// Of a pattern as a file has it: `{"Regex": ".."}`, `{"String": ".."}`, or a regular expression.
fn facts(pattern: &Value, left: char, right: char) -> Option<Facts> {
    match (pattern.as_str(), pattern["Regex"].as_str(), pattern["String"].as_str()) {
        (Some(regex), ..) | (_, Some(regex), _) => Facts::of(regex, left, right),
        (.., Some(text)) => {
            let plain = |c: char| match c.is_ascii_punctuation() {
                true => format!("\\{c}"),
                false => c.to_string(),
            };
            Facts::of(&text.chars().map(plain).collect::<String>(), left, right)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::Encoder;
    use super::*;
    use serde_json::json;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    const MARK: &str = "\u{2581}";
    const TEXT: &str = "Two  words or work\n\nor  more.\n  A word\tword, work <m> a tool  work \
                        wort\u{301} w\u{f6}rk 12 345 or\r\nwork \u{4e00}\u{4e8c} or\u{4e00} work";

    fn split(pattern: Value, behavior: &str) -> Value {
        json!({ "type": "Split", "pattern": pattern, "behavior": behavior, "invert": false })
    }

    fn bytes(prefix: bool, use_regex: bool) -> Value {
        json!({ "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true,
                "use_regex": use_regex })
    }

    fn sequence(stages: &[Value]) -> Value {
        json!({ "type": "Sequence", "pretokenizers": stages, "normalizers": stages })
    }

    fn metaspace(scheme: &str, split: bool) -> Value {
        json!({ "type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme,
                "split": split })
    }

    /// Byte pairs over the characters of `TEXT` and what stands for its bytes.
    fn tokenizer(normalizer: Value, pre_tokenizer: Value, merges: &[&str]) -> Encoder {
        let characters = TEXT.chars().chain([' ', '\u{2581}']).chain(ByteLevel::alphabet());
        let mut tokens: Vec<String> = characters.map(String::from).collect();
        tokens.extend(merges.iter().map(|pair| pair.replace(' ', "")));
        tokens.sort();
        tokens.dedup();
        let count = tokens.len();
        let ids = (0..).map(Value::from);
        let vocabulary: serde_json::Map<_, _> = tokens.into_iter().zip(ids).collect();
        let added = |id: usize, content: &str, strips: bool| {
            json!({ "id": id, "content": content, "single_word": !strips, "lstrip": strips,
                    "rstrip": strips, "normalized": false, "special": false })
        };
        let value = json!({
            "version": "1.0", "post_processor": null, "decoder": null,
            "added_tokens": [added(count, "<m>", true), added(count + 1, "a tool", false)],
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
            "model": { "type": "BPE", "vocab": vocabulary, "merges": merges },
        });
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, value.to_string()).expect("a file");
        Encoder::read(&path).expect("a tokenizer")
    }

    /// Places at which `TEXT` may be cut; its tokens have to be those of the whole at each.
    fn places(encoder: &Encoder) -> usize {
        let mut whole = Vec::new();
        encoder.encode(TEXT, &mut whole).expect("ids");
        let mut cutter = encoder.cutter();
        let mut found: Vec<usize> =
            (1..=TEXT.len()).filter_map(|end| cutter.last(&TEXT.as_bytes()[..end], 0)).collect();
        found.dedup();
        for at in &found {
            let mut ids = Vec::new();
            encoder.encode_piece(&TEXT[..*at], 0, &mut ids).expect("ids");
            encoder.encode_piece(&TEXT[*at..], *at as u64, &mut ids).expect("ids");
            assert_eq!(ids, whole, "{:?} | {:?}", &TEXT[..*at], &TEXT[*at..]);
        }
        found.len()
    }

    #[test]
    fn pieces_have_the_tokens_of_the_whole_or_there_are_none() {
        let cl100k = r"[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|\s++$|\s*[\r\n]|\s+(?!\S)|\s";
        let regex = |pattern: &str| json!({ "Regex": pattern });
        let replace = |from: &str| {
            json!({ "type": "Replace", "pattern": { "String": from }, "content": MARK })
        };
        let llama = sequence(&[json!({ "type": "Prepend", "prepend": MARK }), replace(" ")]);
        let (bpe, spm) = (["Ġ w", "o r", "Ġw or", "Ċ Ċ"], ["\u{2581} w", "o r", "\u{2581}w or"]);
        let over = ["r \u{2581}", "d \n", "r \n", "o r"];
        let lower = json!({ "type": "Lowercase" });
        for (name, normalizer, pre_tokenizer, merges, least) in [
            ("GPT-2", Value::Null, bytes(false, true), &bpe[..], 9),
            ("with a prefix", Value::Null, bytes(true, true), &bpe, 5),
            ("cl100k", lower, sequence(&[split(regex(cl100k), "Isolated"), bytes(false, false)]),
             &bpe, 9),
            ("Mistral", llama.clone(), Value::Null, &spm, 4),
            ("Mistral with tokens over spaces", llama, Value::Null, &over, 1),
            ("Mixtral", Value::Null, metaspace("first", true), &spm, 5),
            ("a mark alone", Value::Null, metaspace("always", false), &spm, 5),
            ("a mark over spaces", Value::Null, metaspace("never", false), &over, 1),
            ("Gemma", replace(" "), split(json!({ "String": " " }), "MergedWithPrevious"), &spm, 5),
            ("merged with the next", Value::Null, split(regex(r"\s"), "MergedWithNext"), &spm, 5),
            ("merged with the one before", Value::Null, split(regex(r"\s"), "MergedWithPrevious"),
             &over, 0),
            ("behind", Value::Null, split(regex(r"(?<=or) "), "Isolated"), &over, 0),
        ] {
            let found = places(&tokenizer(normalizer, pre_tokenizer, merges));
            assert!(found >= least && (least > 0 || found == 0), "{name}: {found} places");
        }
    }
}
