//! What the ranks tell each other with every step, beside its numbers.
//!
//! ```text
//! say(n) -> step n computes, on every rank -> hear(n): the same words on all, so all act alike
//! ```
//! Nobody waits for the round between them: it travels while the step computes.

use crate::gang::comm::{Comm, CommError};
use moejob_protocol::bounds::beginning;

/// One rank's part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepEnd {
    /// Asked for on this rank.
    pub checkpoint_now: bool,
    pub stop_after_this_step: bool,
    /// Rank 0's word that state is to be copied to memory.
    pub snapshot_now: bool,
    /// Steps in the newest snapshot that this rank has finished, with its ward's; none yet.
    pub held: Option<u64>,
    /// This rank's worker still writes checkpoints of the attempt before.
    pub earlier: bool,
    /// A higher attempt that rank 0 has seen in storage; 0: none.
    pub fenced_by: u32,
    /// Steps in the newest checkpoint whose shard this rank has made durable.
    pub written: u64,
    /// Steps in the newest checkpoint that rank 0 has committed.
    pub committed: u64,
    /// Rank 0's word that no checkpoint of up to so many steps is waited for any longer.
    pub given_up: u64,
    /// Why this rank's storage fails at present; empty: it does not.
    pub write_error: String,
}

/// Longest `write_error` that is told.
const ERROR_BYTES_MAX: usize = 1024;

/// Bytes of what comes before it.
const HEAD_BYTES: usize = 40;
/// Bytes of all of it.
const BYTES_MAX: usize = HEAD_BYTES + ERROR_BYTES_MAX;

/// Tells the others, and waits for nothing.
///
/// # Errors
/// A peer is lost.
pub fn say(end: &StepEnd, comm: &mut Comm) -> Result<(), CommError> {
    comm.say(&end.encode(), BYTES_MAX)
}

/// What each rank has said, in rank order.
///
/// # Errors
/// A peer is lost or speaks nonsense.
pub fn hear(comm: &mut Comm) -> Result<Vec<StepEnd>, CommError> {
    let all = comm.hear()?;
    all.iter().zip(0..).map(|(bytes, rank)| StepEnd::decode(rank, bytes)).collect()
}

impl StepEnd {
    pub fn encode(&self) -> Vec<u8> {
        let error = beginning(&self.write_error, ERROR_BYTES_MAX);
        let flags = u32::from(self.checkpoint_now)
            | u32::from(self.stop_after_this_step) << 1
            | u32::from(self.snapshot_now) << 2
            | u32::from(self.earlier) << 3;
        let mut out = Vec::with_capacity(HEAD_BYTES + error.len());
        out.extend_from_slice(&flags.to_le_bytes());
        out.extend_from_slice(&self.fenced_by.to_le_bytes());
        out.extend_from_slice(&self.written.to_le_bytes());
        out.extend_from_slice(&self.committed.to_le_bytes());
        out.extend_from_slice(&self.given_up.to_le_bytes());
        let held = self.held.map_or(0, |step| step.saturating_add(1));
        out.extend_from_slice(&held.to_le_bytes());
        out.extend_from_slice(error.as_bytes());
        out
    }

    /// # Errors
    /// Too few bytes, or ones that mean nothing: the peer speaks another protocol.
    pub fn decode(rank: u32, bytes: &[u8]) -> Result<StepEnd, CommError> {
        StepEnd::parse(bytes).ok_or_else(|| CommError::Protocol {
            rank,
            found: format!("{} bytes that are no step's end", bytes.len()),
            expected: "a step's end".to_string(),
        })
    }

    fn parse(bytes: &[u8]) -> Option<StepEnd> {
        let (flags, rest) = bytes.split_first_chunk::<4>()?;
        let (fenced_by, rest) = rest.split_first_chunk::<4>()?;
        let (written, rest) = rest.split_first_chunk::<8>()?;
        let (committed, rest) = rest.split_first_chunk::<8>()?;
        let (given_up, rest) = rest.split_first_chunk::<8>()?;
        let (held, error) = rest.split_first_chunk::<8>()?;
        let flags = u32::from_le_bytes(*flags);
        if flags > 15 || error.len() > ERROR_BYTES_MAX {
            return None;
        }
        Some(StepEnd {
            checkpoint_now: flags & 1 != 0,
            stop_after_this_step: flags & 2 != 0,
            snapshot_now: flags & 4 != 0,
            earlier: flags & 8 != 0,
            fenced_by: u32::from_le_bytes(*fenced_by),
            written: u64::from_le_bytes(*written),
            committed: u64::from_le_bytes(*committed),
            given_up: u64::from_le_bytes(*given_up),
            held: u64::from_le_bytes(*held).checked_sub(1),
            write_error: std::str::from_utf8(error).ok()?.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_comes_back() {
        let end = StepEnd {
            checkpoint_now: true,
            stop_after_this_step: false,
            snapshot_now: true,
            held: Some(30),
            earlier: true,
            fenced_by: 7,
            written: 40,
            committed: u64::MAX,
            given_up: 20,
            write_error: "no space left".to_string(),
        };
        let bytes = end.encode();
        assert_eq!(StepEnd::decode(1, &bytes), Ok(end.clone()));
        assert_eq!(bytes.len(), HEAD_BYTES + end.write_error.len());
        for held in [None, Some(0)] {
            let end = StepEnd { held, ..StepEnd::default() };
            assert_eq!(StepEnd::decode(0, &end.encode()).expect("its own").held, held);
        }
        for len in 0..HEAD_BYTES {
            assert!(StepEnd::decode(1, &bytes[..len]).is_err(), "{len} bytes were taken");
        }
        assert!(StepEnd::decode(1, &[bytes, vec![b'x'; ERROR_BYTES_MAX]].concat()).is_err());
    }

    #[test]
    fn a_long_error_is_cut_at_a_character() {
        let end = StepEnd { write_error: "ü".repeat(2000), ..StepEnd::default() };
        let back = StepEnd::decode(0, &end.encode()).expect("its own encoding");
        assert_eq!(back.write_error, "ü".repeat(512));
    }
}
