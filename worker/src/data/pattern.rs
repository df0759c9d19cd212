//! What a regular expression can do at a place between two characters, whatever else a text holds.
//!
//! A pattern is read as Oniguruma reads it. Only its shape counts here: which characters one of its
//! parts takes is asked of the engine itself, so no table of Unicode stands beside it. What cannot
//! be judged (looking behind, anchors of a beginning, references) is None.

use tokenizers::utils::SysRegex;

/// GPT-2's, which `ByteLevel` has built in.
pub const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Groups within groups; more is no pattern of a tokenizer.
const DEPTH_MAX: u32 = 64;

/// Where a character `left` stands before a character `right`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// It may match nothing.
    pub nullable: bool,
    /// It matches nothing as well, whatever stands there. (Never claimed without being sure.)
    free: bool,
    /// It may take `right` first, or look at it first.
    pub begins: bool,
    /// It may take `left` last.
    pub ends: bool,
    /// It may take `left` and then take `right` or look at it.
    pub crosses: bool,
    /// It matches where it begins at `right`. (Never claimed without being sure.)
    pub starts: bool,
    /// Characters that it takes at most.
    longest: u32,
}

const NOTHING: Facts = Facts {
    nullable: true,
    free: true,
    begins: false,
    ends: false,
    crosses: false,
    starts: false,
    longest: 0,
};

/// Looks at the character that follows, and takes none.
const LOOK: Facts = Facts { free: false, begins: true, ..NOTHING };

impl Facts {
    /// Of a pattern that splits or replaces. None: it cannot be judged.
    pub fn of(pattern: &str, left: char, right: char) -> Option<Facts> {
        let mut parser = Parser {
            text: pattern.chars().collect(),
            at: 0,
            depth: 0,
            folds: false,
            characters: [left, right],
        };
        if parser.takes("(?i)") {
            parser.folds = true;
        }
        let facts = parser.alternatives()?;
        (parser.at == parser.text.len() && !facts.nullable).then_some(facts)
    }

    fn then(self, next: Facts) -> Facts {
        Facts {
            nullable: self.nullable && next.nullable,
            free: self.free && next.free,
            begins: self.begins || self.nullable && next.begins,
            ends: next.ends || next.nullable && self.ends,
            crosses: self.crosses || next.crosses || self.ends && next.begins,
            starts: self.starts && next.free || self.free && next.starts,
            longest: self.longest.saturating_add(next.longest),
        }
    }

    fn or(self, other: Facts) -> Facts {
        Facts {
            nullable: self.nullable || other.nullable,
            free: self.free || other.free,
            begins: self.begins || other.begins,
            ends: self.ends || other.ends,
            crosses: self.crosses || other.crosses,
            starts: self.starts || other.starts,
            longest: self.longest.max(other.longest),
        }
    }

    fn times(self, least: u32, most: u32) -> Facts {
        if most == 0 {
            return NOTHING;
        }
        Facts {
            nullable: self.nullable || least == 0,
            free: self.free || least == 0,
            crosses: self.crosses || most > 1 && self.ends && self.begins,
            starts: self.starts && (least <= 1 || self.free),
            longest: self.longest.saturating_mul(most),
            ..self
        }
    }

    /// What it has taken it does not give back.
    fn kept(self) -> Facts {
        Facts { free: false, ..self }
    }
}

struct Parser {
    text: Vec<char>,
    at: usize,
    depth: u32,
    /// Upper and lower case are alike.
    folds: bool,
    /// `left` and `right`.
    characters: [char; 2],
}

impl Parser {
    fn peek(&self) -> Option<char> {
        self.text.get(self.at).copied()
    }

    fn takes(&mut self, what: &str) -> bool {
        let count = what.chars().count();
        let found = self.text.get(self.at..self.at + count);
        let taken = found.is_some_and(|found| what.chars().eq(found.iter().copied()));
        self.at += if taken { count } else { 0 };
        taken
    }

    fn alternatives(&mut self) -> Option<Facts> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return None;
        }
        let mut all = self.sequence()?;
        while self.takes("|") {
            all = all.or(self.sequence()?);
        }
        self.depth -= 1;
        Some(all)
    }

    fn sequence(&mut self) -> Option<Facts> {
        let mut all = NOTHING;
        while self.peek().is_some_and(|next| next != '|' && next != ')') {
            let part = self.part()?;
            all = all.then(self.repeated(part)?);
        }
        Some(all)
    }

    /// `part` with what stands behind it: `*`, `+`, `?`, `{1,3}`, and these again.
    fn repeated(&mut self, mut part: Facts) -> Option<Facts> {
        let mut interval = None;
        loop {
            part = match (self.peek(), interval) {
                // A `+` behind `*`, `+` or `?` keeps; behind an interval it repeats. One that is
                // repeated is taken for more than it is in either case.
                (Some('+'), Some(_)) => part.times(1, u32::MAX).kept(),
                // Less of it first, which changes no possibility.
                (Some('?'), Some(_)) => part.or(Facts { free: false, ..NOTHING }),
                (Some('*'), None) => part.times(0, u32::MAX),
                (Some('+'), None) => part.times(1, u32::MAX),
                (Some('?'), None) => part.times(0, 1),
                (Some('{'), None) => match self.interval() {
                    Some((least, most)) => {
                        interval = Some(());
                        part = part.times(least, most);
                        continue;
                    }
                    None => return None,
                },
                (Some('*' | '{'), Some(())) => return None,
                _ => return Some(part),
            };
            interval = Some(());
            self.at += 1;
        }
    }

    /// `{2}`, `{2,}`, `{,3}` or `{2,3}`.
    fn interval(&mut self) -> Option<(u32, u32)> {
        let end = self.text[self.at..].iter().position(|c| *c == '}')? + self.at;
        let inside: String = self.text[self.at + 1..end].iter().collect();
        self.at = end + 1;
        let (least, most) = match inside.split_once(',') {
            None => (inside.parse().ok()?, inside.parse().ok()?),
            Some(("", most)) => (0, most.parse().ok()?),
            Some((least, "")) => (least.parse().ok()?, u32::MAX),
            Some((least, most)) => (least.parse().ok()?, most.parse().ok()?),
        };
        (least <= most).then_some((least, most))
    }

    fn part(&mut self) -> Option<Facts> {
        match self.peek()? {
            '(' => self.group(),
            '$' => {
                self.at += 1;
                Some(LOOK)
            }
            '^' | '*' | '+' | '?' | '{' => None,
            _ => self.character(),
        }
    }

    fn group(&mut self) -> Option<Facts> {
        let folds = self.folds;
        let ahead = self.takes("(?=") || self.takes("(?!");
        let keeps = !ahead && self.takes("(?>");
        if !ahead && !keeps && !self.takes("(?:") {
            if self.takes("(?i:") {
                self.folds = true;
            } else if self.takes("(?") || !self.takes("(") {
                return None;
            }
        }
        let inside = self.alternatives()?;
        self.folds = folds;
        if !self.takes(")") {
            return None;
        }
        match ahead {
            true => (inside.longest <= 1).then_some(LOOK),
            false => Some(if keeps { inside.kept() } else { inside }),
        }
    }

    /// A part that takes one character.
    fn character(&mut self) -> Option<Facts> {
        let from = self.at;
        match self.peek()? {
            '[' => self.class()?,
            '\\' => self.escape()?,
            _ => self.at += 1,
        }
        let source: String = self.text[from..self.at].iter().collect();
        // Two letters may be one in another case (`ss` and `ß`), but not of these.
        if self.folds && (!source.is_ascii() || source.starts_with("[^")) {
            return None;
        }
        if matches!(source.as_str(), r"\z" | r"\Z") {
            return Some(LOOK);
        }
        let fold = if self.folds { "(?i)" } else { "" };
        let regex = SysRegex::new(&format!("{fold}{source}")).ok()?;
        let [left, right] = self.characters.map(|character| {
            let text = character.to_string();
            regex.find_iter(&text).next() == Some((0, text.len()))
        });
        Some(Facts {
            nullable: false,
            free: false,
            begins: right,
            ends: left,
            crosses: false,
            starts: right,
            longest: 1,
        })
    }

    /// `[...]`, with classes in it.
    fn class(&mut self) -> Option<()> {
        let mut open = 0;
        loop {
            match self.peek()? {
                '\\' => self.at += 1,
                '[' => {
                    open += 1;
                    if self.text.get(self.at + 1) == Some(&'^') {
                        self.at += 1;
                    }
                    // One that stands first is meant as itself.
                    if self.text.get(self.at + 1) == Some(&']') {
                        self.at += 1;
                    }
                }
                ']' => open -= 1,
                _ => {}
            }
            self.at += 1;
            if open == 0 {
                return Some(());
            }
        }
    }

    fn escape(&mut self) -> Option<()> {
        let what = *self.text.get(self.at + 1)?;
        self.at += 2;
        match what {
            'p' | 'P' => {
                let end = self.text[self.at..].iter().position(|c| *c == '}')?;
                (self.peek() == Some('{')).then(|| self.at += end + 1)
            }
            's' | 'S' | 'd' | 'D' | 'w' | 'W' | 'h' | 'H' | 'n' | 'r' | 't' | 'f' | 'v' | 'a'
            | 'e' | 'z' | 'Z' => Some(()),
            'u' => (self.text.len() >= self.at + 4).then(|| self.at += 4),
            _ => (!what.is_alphanumeric()).then_some(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// n: nothing, b: begins, e: ends, x: crosses, s: starts; `?` where it cannot be judged.
    fn at(pattern: &str, left: char, right: char) -> String {
        let Some(facts) = Facts::of(pattern, left, right) else { return "?".to_string() };
        let marks = [
            (facts.begins, 'b'),
            (facts.ends, 'e'),
            (facts.crosses, 'x'),
            (facts.starts, 's'),
        ];
        marks.iter().filter(|(holds, _)| *holds).map(|(_, mark)| *mark).collect()
    }

    #[test]
    fn what_a_pattern_does_between_a_letter_and_a_space() {
        let cl100k = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+".to_string()
            + r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s";
        for (pattern, expected) in [
            (GPT2, "bes"),
            (&cl100k, "bes"),
            (r"\s+", "bs"),
            (r"\p{L}+", "e"),
            (r"\p{N}{1,3}+", ""),
            (r"\p{L}+\s?", "ex"),
            (r"(?:\p{L}| )+", "bexs"),
            (r"\p{L}+(?!\s)", "ex"),
            (r"\p{L}+$", "ex"),
            (r"(?:a| z)", "be"),
            (r"(a b)", ""),
            (r"a b|z z", "ex"),
            (r"\s{2,}", "b"),
            (r" {1,2}", "bs"),
            (r"(?>\s*)\s", "b"),
            (r"\s*+\s", "b"),
            (r"\s++", "bs"),
            (r"[[:punct:]]+", ""),
            (r"[\p{L}&&[^a-y]]", "e"),
            (r"[]z]", "e"),
            (r"(?i)'Z|Z", "e"),
            (r".", "bes"),
            (r"\x{20}|\u0020", "?"),
            (r"(?<=a)b", "?"),
            (r"\bz", "?"),
            (r"^z", "?"),
            (r"z*", "?"),
            (r"(z)\1", "?"),
            (r"(?i:ß)", "?"),
            (r"(?=ab)z", "?"),
            (r"\Gz", "?"),
            (r"(?m:.)", "?"),
            (r"(?~z)", "?"),
            ("(z", "?"),
            ("z)", "?"),
            ("[z", "?"),
        ] {
            assert_eq!(at(pattern, 'z', ' '), expected, "{pattern}");
        }
        let o200k = r"[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        assert_eq!(at(o200k, 'z', '\n'), "bes");
        assert_eq!(at(o200k, '.', '\n'), "bexs");
        assert_eq!(at(o200k, '\u{6f22}', '\n'), "bes");
    }
}
