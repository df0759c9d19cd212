//! Which algorithm a dense product took, as text that the record of a job keeps.

use std::fmt;
use std::str::FromStr;

use crate::cuda::dense::Key;

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

pub(crate) fn of(product: &str, version: usize, algorithm: [u64; 8]) -> DenseRecord {
    DenseRecord { product: product.to_owned(), version, algorithm }
}

/// `nt 1x4096x50304x2048 bf16 bf16 pitches 2048,2048,50304 aligned 256`, with `add` for C += and
/// `tf32`.
pub(crate) fn key_text(key: &Key) -> String {
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

/// All that a device has chosen for its dense products, with what such a choice depends on beside
/// the shape. Written and read as lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenseChoices {
    /// `NVIDIA H200, sm_90, 132 multiprocessors`
    pub device: String,
    /// Of cuBLASLt, such as 130201
    pub version: usize,
    /// Bytes that an algorithm may work in
    pub workspace: usize,
    pub records: Vec<DenseRecord>,
}

/// Lines that are no choices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoChoices {
    #[error("line {line}: expected `{expected}`, found `{found}`")]
    Line { line: usize, expected: &'static str, found: String },
    #[error("line {line}: {source}")]
    Record { line: usize, source: NoRecord },
}

/// Why a device does not take what another run has chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("products were chosen by {then}, and this is {now}")]
pub struct OtherDevice {
    then: String,
    now: String,
}

impl DenseChoices {
    /// Whether a device that chooses as `own` may take these.
    ///
    /// # Errors
    /// Another device, library or workspace, by name: an algorithm's words mean something else
    /// there, or nothing.
    pub fn suit(&self, own: &DenseChoices) -> Result<(), OtherDevice> {
        let mine = (&self.device, self.version, self.workspace);
        match mine == (&own.device, own.version, own.workspace) {
            true => Ok(()),
            false => Err(OtherDevice { then: self.place(), now: own.place() }),
        }
    }

    /// `cuBLASLt 13.2.1 on NVIDIA H200, sm_90, 132 multiprocessors, in 32 MiB`
    fn place(&self) -> String {
        let (major, minor) = (self.version / 10_000, self.version / 100 % 100);
        let patch = self.version % 100;
        let mib = self.workspace >> 20;
        format!("cuBLASLt {major}.{minor}.{patch} on {}, in {mib} MiB", self.device)
    }
}

impl fmt::Display for DenseChoices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "device {}", self.device)?;
        writeln!(f, "cublasLt {}", self.version)?;
        writeln!(f, "workspace {}", self.workspace)?;
        self.records.iter().try_for_each(|record| writeln!(f, "{record}"))
    }
}

impl FromStr for DenseChoices {
    type Err = NoChoices;

    fn from_str(text: &str) -> Result<DenseChoices, NoChoices> {
        let mut lines = text.lines().zip(1..);
        let mut head = |name: &str, expected: &'static str| {
            let (found, line) = lines.next().unwrap_or_default();
            let wrong = NoChoices::Line { line, expected, found: found.to_owned() };
            match found.strip_prefix(name) {
                Some(value) => Ok((value.to_owned(), wrong)),
                None => Err(wrong),
            }
        };
        let (device, _) = head("device ", "device NAME")?;
        let (version, wrong) = head("cublasLt ", "cublasLt VERSION")?;
        let version = version.parse().map_err(|_| wrong)?;
        let (workspace, wrong) = head("workspace ", "workspace BYTES")?;
        let workspace = workspace.parse().map_err(|_| wrong)?;
        let record = |(found, line): (&str, usize)| {
            found.parse().map_err(|source| NoChoices::Record { line, source })
        };
        let records = lines.map(record).collect::<Result<_, NoChoices>>()?;
        Ok(DenseChoices { device, version, workspace, records })
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

    #[test]
    fn choices_survive_their_text_and_suit_their_own_device_alone() {
        let record = |product: &str| of(product, 130_201, [7, 0, 0, 0, 0, 0, 0, u64::MAX]);
        let choices = DenseChoices {
            device: "NVIDIA H200, sm_90, 132 multiprocessors".to_owned(),
            version: 130_201,
            workspace: 32 << 20,
            records: vec![record("nn 1x8x8x8 bf16 bf16"), record("nt 1x8x8x8 bf16 f32 add")],
        };
        let text = choices.to_string();
        assert_eq!(text.parse(), Ok(choices.clone()));
        assert_eq!(choices.suit(&DenseChoices { records: vec![], ..choices.clone() }), Ok(()));
        for (other, told) in [
            (DenseChoices { device: "A".to_owned(), ..choices.clone() }, "on A, in 32 MiB"),
            (DenseChoices { version: 120_600, ..choices.clone() }, "cuBLASLt 12.6.0 on NVIDIA"),
            (DenseChoices { workspace: 1 << 20, ..choices.clone() }, "in 1 MiB"),
        ] {
            let why = choices.suit(&other).expect_err("another device").to_string();
            let then = "products were chosen by cuBLASLt 13.2.1 on NVIDIA H200";
            assert!(why.starts_with(then), "{why}");
            assert!(why.contains(", and this is cuBLASLt ") && why.contains(told), "{why}");
        }
        let lines: Vec<&str> = text.lines().collect();
        for without in 0..3 {
            let mut rest = lines.clone();
            rest.remove(without);
            assert!(rest.join("\n").parse::<DenseChoices>().is_err(), "without line {without}");
        }
        let (no_version, no_record) =
            ("device A\ncublasLt x\nworkspace 1", "device A\ncublasLt 1\nworkspace 1\nb");
        for wrong in ["", no_version, no_record] {
            assert!(wrong.parse::<DenseChoices>().is_err(), "{wrong}");
        }
    }
}
