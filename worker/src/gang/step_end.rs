//! What the ranks tell each other at the end of a step, in one collective.
//!
//! Numbers travel as their bits, little-endian: what is added up must be the same everywhere.

use crate::gang::comm::CommError;

/// One rank's part.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepEnd {
    /// Asked for on this rank.
    pub checkpoint_now: bool,
    pub stop_after_this_step: bool,
    /// A higher attempt that rank 0 has seen in storage; 0: none.
    pub fenced_by: u32,
    /// Steps in the newest checkpoint whose shard this rank has made durable.
    pub written: u64,
    /// Steps in the newest checkpoint that rank 0 has committed.
    pub committed: u64,
    /// Why this rank's shard could not be written; empty: it could.
    pub write_error: String,
    /// Of each micro-batch of this rank, ascending: the sum of its cross-entropies, its auxiliary
    /// loss, its z loss and the entropy of its scores, these summed over layers.
    pub losses: Vec<[f64; LOSSES]>,
    /// `[mixture layer][expert]`: slots that chose it.
    pub counts: Vec<u64>,
    /// The same: those that were dropped; empty for routers that drop none.
    pub dropped: Vec<u64>,
    /// Tokens without any expert, over all layers.
    pub unrouted: u64,
    /// Choices of tokens behind another, and those that the token before did not make.
    pub followed: u64,
    pub switched: u64,
    /// Of the owned blocks, in table order.
    pub square_sums: Vec<f64>,
}

/// Numbers of a micro-batch.
pub const LOSSES: usize = 4;

/// Longest `write_error` that is told.
const ERROR_BYTES_MAX: usize = 1024;

impl StepEnd {
    /// The longest encoding, so that a receiver can bound what it takes.
    pub fn bytes_max(micro_batches: usize, counts: usize, blocks: usize) -> usize {
        80 + ERROR_BYTES_MAX + 8 * LOSSES * micro_batches + 8 * (2 * counts + blocks)
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut error = self.write_error.as_str();
        while error.len() > ERROR_BYTES_MAX {
            let shorter = (0..error.len()).rev().find(|at| error.is_char_boundary(*at));
            error = &error[..shorter.unwrap_or(0)];
        }
        let flags = u32::from(self.checkpoint_now) | u32::from(self.stop_after_this_step) << 1;
        let lengths = [
            error.len(),
            self.losses.len(),
            self.counts.len(),
            self.dropped.len(),
            self.square_sums.len(),
        ];
        let mut out = Vec::new();
        for word in [flags, self.fenced_by].into_iter().chain(lengths.map(|len| len as u32)) {
            out.extend_from_slice(&word.to_le_bytes());
        }
        let tallies = [self.unrouted, self.followed, self.switched];
        for number in [self.written, self.committed].into_iter().chain(tallies) {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(error.as_bytes());
        let doubles = self.losses.iter().flatten().map(|x| x.to_bits());
        let doubles = doubles.chain(self.counts.iter().chain(&self.dropped).copied());
        for bits in doubles.chain(self.square_sums.iter().map(|x| x.to_bits())) {
            out.extend_from_slice(&bits.to_le_bytes());
        }
        out
    }

    /// # Errors
    /// Any byte too few or too many: the peer speaks another protocol.
    pub fn decode(rank: u32, bytes: &[u8]) -> Result<StepEnd, CommError> {
        StepEnd::parse(bytes).ok_or_else(|| CommError::Protocol {
            rank,
            found: format!("{} bytes that are no step's end", bytes.len()),
            expected: "a step's end".to_string(),
        })
    }

    fn parse(mut bytes: &[u8]) -> Option<StepEnd> {
        let word = |bytes: &mut &[u8]| {
            let (first, rest) = bytes.split_first_chunk::<4>()?;
            *bytes = rest;
            Some(u32::from_le_bytes(*first))
        };
        let double = |bytes: &mut &[u8]| {
            let (first, rest) = bytes.split_first_chunk::<8>()?;
            *bytes = rest;
            Some(u64::from_le_bytes(*first))
        };
        let (flags, fenced_by) = (word(&mut bytes)?, word(&mut bytes)?);
        let mut lengths = [0; 5];
        for len in &mut lengths {
            *len = word(&mut bytes)? as usize;
        }
        let (written, committed) = (double(&mut bytes)?, double(&mut bytes)?);
        let unrouted = double(&mut bytes)?;
        let (followed, switched) = (double(&mut bytes)?, double(&mut bytes)?);
        let [error, losses, counts, dropped, sums] = lengths;
        let tallies = counts.checked_add(dropped)?;
        let numbers = losses.checked_mul(LOSSES)?.checked_add(tallies)?.checked_add(sums)?;
        if flags > 3 || bytes.len() != error.checked_add(numbers.checked_mul(8)?)? {
            return None;
        }
        let (error, mut bytes) = bytes.split_at(error);
        let write_error = std::str::from_utf8(error).ok()?.to_string();
        let mut next = || double(&mut bytes);
        let mut float = || next().map(f64::from_bits);
        let losses = (0..losses)
            .map(|_| Some([float()?, float()?, float()?, float()?]))
            .collect::<Option<Vec<_>>>()?;
        let counts = (0..counts).map(|_| next()).collect::<Option<Vec<_>>>()?;
        let dropped = (0..dropped).map(|_| next()).collect::<Option<Vec<_>>>()?;
        let sums = (0..sums).map(|_| next().map(f64::from_bits)).collect::<Option<Vec<_>>>()?;
        Some(StepEnd {
            checkpoint_now: flags & 1 != 0,
            stop_after_this_step: flags & 2 != 0,
            fenced_by,
            written,
            committed,
            write_error,
            losses,
            counts,
            dropped,
            unrouted,
            followed,
            switched,
            square_sums: sums,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_counts() {
        let end = StepEnd {
            checkpoint_now: true,
            stop_after_this_step: false,
            fenced_by: 7,
            written: 40,
            committed: 30,
            write_error: "no space left".to_string(),
            losses: vec![[1.5, f64::NAN, -0.0, 1.0], [2.5, 0.1, 0.2, 0.3]],
            counts: vec![3, u64::MAX],
            dropped: vec![7, 0],
            unrouted: 9,
            followed: 80,
            switched: 7,
            square_sums: vec![1e-300, f64::INFINITY],
        };
        let bytes = end.encode();
        assert!(bytes.len() <= StepEnd::bytes_max(2, 2, 2));
        let back = StepEnd::decode(1, &bytes).expect("its own encoding");
        assert_eq!(back.encode(), bytes);
        for len in 0..bytes.len() {
            assert!(StepEnd::decode(1, &bytes[..len]).is_err(), "{len} bytes were taken");
        }
        assert!(StepEnd::decode(1, &[bytes, vec![0]].concat()).is_err());
    }

    #[test]
    fn a_long_error_is_cut_at_a_character() {
        let end = StepEnd { write_error: "ü".repeat(2000), ..StepEnd::default() };
        let back = StepEnd::decode(0, &end.encode()).expect("its own encoding");
        assert_eq!(back.write_error, "ü".repeat(512));
    }
}
