//! Pages of the host's memory while a device copies to them or from them.
//!
//! A page that this process has not touched costs a fault when it is, one by one; a whole piece is
//! mapped an order of magnitude faster. And a process that ends takes every page apart that it
//! maps before its device is free, so of shared memory that others read it maps few.

use rustix::mm::{Advice, madvise};

const PAGE: usize = 4096;

/// Whether pages of the host stay mapped once bytes of a device were copied to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    Stay,
    /// They leave the table of this process, and are found again when they are touched. Of memory
    /// that is shared with others this changes no byte; memory without a file would lose its bytes.
    Leave,
}

impl Pages {
    /// Maps the pages of `bytes` to write to them. A system that cannot has them come one by one.
    pub fn come(bytes: &mut [u8]) {
        advise(bytes, Advice::LinuxPopulateWrite);
    }

    /// Maps the pages of `bytes` to read them.
    pub fn come_to_read(bytes: &[u8]) {
        advise(bytes, Advice::LinuxPopulateRead);
    }

    /// `bytes` have been written. A page of which they are a part may be another's, too.
    pub fn settle(self, bytes: &mut [u8]) {
        if self == Pages::Leave {
            advise(bytes, Advice::LinuxDontNeed);
        }
    }
}

fn advise(bytes: &[u8], advice: Advice) {
    let first = bytes.as_ptr().addr() / PAGE * PAGE;
    let len = (bytes.as_ptr().addr() + bytes.len()).next_multiple_of(PAGE) - first;
    let start = bytes.as_ptr().map_addr(|_| first).cast_mut().cast();
    // SAFETY: every page holds some of the bytes, so it is mapped. None of the advice given here
    // changes a byte, or as `Pages::Leave` says.
    let _ = unsafe { madvise(start, len, advice) };
}

/// `to` becomes `from`, past the caches: what a device has brought or takes, nobody here reads.
///
/// # Panics
/// The lengths differ.
pub(crate) fn copy_past_caches(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len());
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx") {
        // SAFETY: the feature was detected.
        return unsafe { stream(from, to) };
    }
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
fn stream(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::{
        __m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256,
    };
    const WIDE: usize = size_of::<__m256i>();
    let head = to.as_ptr().align_offset(WIDE).min(to.len());
    let (first, rest) = to.split_at_mut(head);
    first.copy_from_slice(&from[..head]);
    let from = &from[head..];
    let whole = rest.len() / WIDE * WIDE;
    for at in (0..whole).step_by(WIDE) {
        // SAFETY: both have as many bytes from `at` on, and those of `rest` are aligned.
        unsafe {
            let wide = _mm256_loadu_si256(from.as_ptr().add(at).cast());
            _mm256_stream_si256(rest.as_mut_ptr().add(at).cast(), wide);
        }
    }
    rest[whole..].copy_from_slice(&from[whole..]);
    // Stores past the caches reach other processors in any order, unless a fence is behind them.
    _mm_sfence();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_past_the_caches_are_the_bytes() {
        let from: Vec<u8> = (0..1000).map(|at| (at % 251) as u8).collect();
        for start in 0..70 {
            for len in [0, 1, 31, 32, 33, 64, 200, 900] {
                let mut to = vec![9; 1000];
                copy_past_caches(&from[start..start + len], &mut to[3..3 + len]);
                assert_eq!(to[3..3 + len], from[start..start + len], "{len} from {start}");
                assert!(to[..3].iter().chain(&to[3 + len..]).all(|byte| *byte == 9));
            }
        }
    }

    #[test]
    fn pages_that_come_keep_their_bytes() {
        let mut bytes: Vec<u8> = (0..100_000).map(|at| (at % 251) as u8).collect();
        Pages::come(&mut bytes[77..90_001]);
        Pages::come_to_read(&bytes[5..99_999]);
        Pages::Stay.settle(&mut bytes);
        assert!(bytes.iter().enumerate().all(|(at, byte)| usize::from(*byte) == at % 251));
    }
}
