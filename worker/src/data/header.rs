//! Files of token ids: with llm.c's header, or flat. Which it is, is seen or said, never guessed.
//! And files that are known to be something else.

use super::store::Width;
use moejob_protocol::config::TokenType;

/// 256 words of 4 bytes.
pub const HEADER_BYTES: u64 = 1024;
/// llm.c's magic numbers and versions, and what they mean.
const KINDS: [(u32, u32, Width); 2] =
    [(20_240_520, 1, Width::U16), (20_240_801, 7, Width::U32)];

/// How the tokens of a file lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    pub width: Width,
    /// Bytes before the first token.
    pub offset: u64,
}

/// What a file of `bytes` bytes is that begins with `head` (its first 12 bytes, or fewer), where
/// the manifest says `dtype`.
///
/// # Errors
/// Where and why it is refused.
pub fn kind(
    head: &[u8],
    bytes: u64,
    dtype: Option<TokenType>,
) -> Result<Kind, (String, String)> {
    let word = |at: usize| {
        let word: Option<[u8; 4]> = head.get(at..at + 4).and_then(|word| word.try_into().ok());
        word.map(u32::from_le_bytes)
    };
    let magic = word(0);
    let known = KINDS.iter().find(|(number, ..)| magic == Some(*number));
    if let Some((number, version, width)) = known {
        return headered(*number, *version, *width, [word(4), word(8)], bytes, dtype);
    }
    let Some(dtype) = dtype else {
        let why = "it has no header of llm.c: say dtype: uint16 or uint32 beside its path";
        return Err(("byte 0".to_string(), why.to_string()));
    };
    let width = Width::from(dtype);
    if !bytes.is_multiple_of(width.bytes()) {
        let why = format!("{bytes} bytes are no whole number of {}", width.name());
        return Err((format!("byte {}", bytes - bytes % width.bytes()), why));
    }
    Ok(Kind { width, offset: 0 })
}

fn headered(
    magic: u32,
    version: u32,
    width: Width,
    [found, tokens]: [Option<u32>; 2],
    bytes: u64,
    dtype: Option<TokenType>,
) -> Result<Kind, (String, String)> {
    if found != Some(version) {
        let found = found.map_or("none".to_string(), |found| found.to_string());
        let why = format!("a header of llm.c ({magic}) with version {found}, {version} is known");
        return Err(("byte 4".to_string(), why));
    }
    if let Some(dtype) = dtype.filter(|dtype| Width::from(*dtype) != width) {
        let (said, is) = (Width::from(dtype).name(), width.name());
        let why = format!("its header means {is}, the manifest says {said}");
        return Err(("byte 0".to_string(), why));
    }
    let tokens = u64::from(tokens.unwrap_or(0));
    let needed = HEADER_BYTES + tokens * width.bytes();
    if tokens == 0 || needed != bytes {
        let why =
            format!("{tokens} tokens in the header need {needed} bytes, the file has {bytes}");
        return Err(("byte 8".to_string(), why));
    }
    Ok(Kind { width, offset: HEADER_BYTES })
}

/// Whether a file that begins so has llm.c's header.
pub fn is_headered(head: &[u8]) -> bool {
    let magic = head.get(..4).and_then(|word| <[u8; 4]>::try_from(word).ok());
    magic.is_some_and(|magic| KINDS.iter().any(|(known, ..)| u32::from_le_bytes(magic) == *known))
}

/// Bytes of a file that tell whether it is one of `FOREIGN`.
pub const HEAD_BYTES: usize = 512;

/// Formats that would pass for text or tokens, and are none: bytes that tell them, the first one's
/// place, what it is, and what to do instead.
const FOREIGN: [(&[u8], usize, &str); 9] = [
    (b"ustar", 257, "a tar archive (WebDataset): unpack it and write its texts as JSONL"),
    (b"\x93NUMPY", 0, "NumPy's .npy: write the flat numbers (`array.tofile`)"),
    (b"ARROW1", 0, "an Arrow file: write JSONL or Parquet"),
    (b"\xfd7zXZ\0", 0, "compressed by xz: of compressed files JSONL is read, as gzip or zstd"),
    (b"PAR1", 0, "a Parquet file: name it under `parquet`"),
    (b"PK\x03\x04", 0, "a zip archive: unpack it"),
    (b"BZh", 0, "compressed by bzip2: of compressed files JSONL is read, as gzip or zstd"),
    (b"\x28\xb5\x2f\xfd", 0, "compressed by zstd: of compressed files JSONL alone is read"),
    (b"\x1f\x8b", 0, "compressed by gzip: of compressed files JSONL alone is read"),
];
/// A file of tokens may begin with fewer bytes than this by chance.
const SURE_BYTES: usize = 5;

/// Of a file that begins with `head` and should be text, or with `tokens` a flat file of ids.
///
/// # Errors
/// It is something else: where that is seen, and what it is.
pub fn not_foreign(head: &[u8], tokens: bool) -> Result<(), (String, String)> {
    let known = |(mark, at, what): &(&[u8], usize, &str)| {
        let found = head.get(*at..).is_some_and(|head| head.starts_with(mark));
        let sure = !tokens || mark.len() >= SURE_BYTES;
        (found && sure).then(|| (format!("byte {at}"), format!("it is {what}")))
    };
    FOREIGN.iter().find_map(known).map_or(Ok(()), Err)
}
