//! The header of a data frame: 32 bytes, little-endian.
//!
//! ```text
//! magic "MOEJ" | u32 attempt | u64 collective number | u32 source rank | u32 kind | u64 length
//! ```

use std::fmt;

pub const HEADER_BYTES: usize = 32;
const MAGIC: [u8; 4] = *b"MOEJ";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub attempt: u32,
    /// Of the collective, since the attempt began.
    pub number: u64,
    /// Rank of the sender.
    pub source: u32,
    pub kind: Kind,
    /// Bytes of the body that follows.
    pub length: u64,
}

/// Which call a frame belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Exchange = 1,
    Gather = 2,
    /// Of a [`super::Ferry`].
    Copy = 3,
    /// The body comes over strands: how long it is, and over which (`super::strand`). Sent only
    /// to a peer with which there are some, so no earlier release sees it.
    Striped = 4,
}

impl Header {
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.attempt.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.source.to_le_bytes());
        bytes[20..24].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[24..32].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// # Errors
    /// Says what was found instead of a header.
    pub fn decode(bytes: &[u8]) -> Result<Header, String> {
        let Some((magic, rest)) = bytes.split_first_chunk::<4>() else {
            return Err(format!("{} bytes", bytes.len()));
        };
        let Ok(rest) = <[u8; HEADER_BYTES - 4]>::try_from(rest) else {
            return Err(format!("{} bytes", bytes.len()));
        };
        if *magic != MAGIC {
            return Err(format!("the magic {magic:02x?}"));
        }
        let u32_at = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| rest[at + i]));
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let kind = match u32_at(16) {
            1 => Kind::Exchange,
            2 => Kind::Gather,
            3 => Kind::Copy,
            4 => Kind::Striped,
            other => return Err(format!("the unknown kind {other}")),
        };
        Ok(Header {
            attempt: u32_at(0),
            number: u64_at(4),
            source: u32_at(12),
            kind,
            length: u64_at(20),
        })
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Header { attempt, number, source, kind, length } = self;
        let kind = match kind {
            Kind::Exchange => "an exchange",
            Kind::Gather => "a gather",
            Kind::Copy => "a copy",
            Kind::Striped => "a striped message",
        };
        write!(f, "{kind} of attempt {attempt}, number {number}, rank {source}, {length} bytes")
    }
}
