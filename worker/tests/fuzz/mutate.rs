//! Inputs from inputs: small damages, pieces of others, words of the format, numbers that overflow.

/// The longest input that grows.
const BYTES_MAX: usize = 64 << 10;
/// Numbers at which readers go wrong.
const NUMBERS: [u64; 14] = [
    0,
    1,
    2,
    0x7f,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x0010_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_ffff,
];

/// A stream of inputs: the same for the same seed and the same kept inputs.
pub struct Mutator<'a> {
    state: u64,
    words: &'a [&'a [u8]],
}

impl<'a> Mutator<'a> {
    pub fn new(seed: u64, words: &'a [&'a [u8]]) -> Mutator<'a> {
        Mutator { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, words }
    }

    /// xorshift64* (Vigna 2016).
    fn word(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        if bound == 0 { 0 } else { (self.word() >> 11) as usize % bound }
    }

    pub fn next(&mut self, kept: &[Vec<u8>]) -> Vec<u8> {
        let mut input = kept[self.below(kept.len())].clone();
        // Mostly one or two damages: more of them are refused at the first.
        let damages = 1 + self.below(4) * self.below(3);
        for _ in 0..damages {
            self.damage(&mut input, kept);
        }
        input
    }

    fn range(&mut self, len: usize) -> std::ops::Range<usize> {
        let start = self.below(len + 1);
        let most = if self.below(4) == 0 { len - start } else { (len - start).min(16) };
        start..start + self.below(most + 1)
    }

    fn damage(&mut self, input: &mut Vec<u8>, kept: &[Vec<u8>]) {
        let at = self.below(input.len());
        match self.below(10) {
            0 if !input.is_empty() => input[at] ^= 1 << self.below(8),
            1 if !input.is_empty() => input[at] = self.word() as u8,
            2 => {
                let range = self.range(input.len());
                input.drain(range);
            }
            3 => {
                // Twice, or a thousand times.
                let range = self.range(input.len());
                let piece = input[range.clone()].to_vec();
                let times = if self.below(16) == 0 { self.below(1000) } else { 1 };
                let room = BYTES_MAX.saturating_sub(input.len()) / piece.len().max(1);
                let more = piece.repeat(times.min(room));
                input.splice(range.end..range.end, more);
            }
            4 if !self.words.is_empty() => {
                let word = self.words[self.below(self.words.len())];
                let over = if self.below(2) == 0 { word.len().min(input.len() - at) } else { 0 };
                input.splice(at..at + over, word.iter().copied());
            }
            5 => {
                let number = NUMBERS[self.below(NUMBERS.len())].to_le_bytes();
                let width = [1, 2, 4, 8][self.below(4)].min(input.len() - at);
                input[at..at + width].copy_from_slice(&number[..width]);
            }
            6 => {
                let number = NUMBERS[self.below(NUMBERS.len())];
                let sign = if self.below(4) == 0 { "-" } else { "" };
                let text = format!("{sign}{number}");
                let end = input[at..].iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(0);
                input.splice(at..at + end, text.bytes());
            }
            7 => {
                let other = &kept[self.below(kept.len())];
                let from = self.range(other.len());
                let into = self.range(input.len());
                input.splice(into, other[from].iter().copied());
            }
            8 => input.truncate(at),
            _ => {
                let count = self.below(9);
                let noise: Vec<u8> = (0..count).map(|_| self.word() as u8).collect();
                input.splice(at..at, noise);
            }
        }
        input.truncate(BYTES_MAX);
    }
}
