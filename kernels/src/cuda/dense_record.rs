//! Which algorithm a dense product took, as text that the record of a job keeps.

use std::fmt;
use std::str::FromStr;

use super::dense::Key;

/// What can change a bit of a dense product: the shape, the library's version and its algorithm,
/// as opaque words of cuBLASLt. Written and read as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenseRecord {
    /// The shape in words, see [`key_text`]
    pub product: String,
    pub version: usize,
    pub algorithm: [u64; 8],
}

/// A line that is no record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected `PRODUCT | VERSION | EIGHT HEXADECIMAL WORDS`, found `{line}`")]
pub struct NoRecord {
    line: String,
}

pub(super) fn of(product: &str, version: usize, algorithm: [u64; 8]) -> DenseRecord {
    DenseRecord { product: product.to_owned(), version, algorithm }
}

/// `nt 1x4096x50304x2048 bf16 bf16 pitches 2048,2048,50304 aligned 256`, with `add` for C += and
/// `tf32`.
pub(super) fn key_text(key: &Key) -> String {
    let shape = &key.shape;
    let name = |value: &dyn fmt::Debug| format!("{value:?}").to_lowercase();
    let [a, b, c] = shape.pitches;
    format!(
        "{} {}x{}x{}x{} {} {}{}{} pitches {a},{b},{c} aligned {}",
        name(&shape.layout),
        shape.batch,
        shape.m,
        shape.n,
        shape.k,
        name(&shape.element),
        name(&shape.output),
        if shape.accumulate { " add" } else { "" },
        if shape.tf32 { " tf32" } else { "" },
        key.alignment,
    )
}

impl fmt::Display for DenseRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self.algorithm.iter().map(|word| format!("{word:x}")).collect();
        write!(f, "{} | {} | {}", self.product, self.version, words.join(" "))
    }
}

impl FromStr for DenseRecord {
    type Err = NoRecord;

    fn from_str(line: &str) -> Result<DenseRecord, NoRecord> {
        let wrong = || NoRecord { line: line.to_owned() };
        let parts: Vec<&str> = line.split(" | ").collect();
        let [product, version, words] = parts[..] else { return Err(wrong()) };
        let words: Result<Vec<u64>, _> =
            words.split(' ').map(|word| u64::from_str_radix(word, 16)).collect();
        let algorithm = words.ok().and_then(|words| words.try_into().ok()).ok_or_else(wrong)?;
        let version = version.parse().map_err(|_| wrong())?;
        Ok(DenseRecord { product: product.to_owned(), version, algorithm })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_its_text() {
        let record = of("nt 1x8x8x8 bf16 f32 add pitches 8,8,8 aligned 16", 130_201, {
            [1, 0, u64::MAX, 3, 4, 5, 6, 7]
        });
        assert_eq!(record.to_string().parse(), Ok(record));
        for wrong in ["", "a | b | 0 0 0 0 0 0 0 0", "a | 1 | 0 0 0", "a | 1 | 0 0 0 0 0 0 0 g"] {
            assert!(wrong.parse::<DenseRecord>().is_err(), "{wrong}");
        }
    }
}
