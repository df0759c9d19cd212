//! Large copies between memory of the host, by several threads.
//!
//! One thread reaches a fraction of what memory gives, and less where pages are touched for the
//! first time: each of them costs the kernel more than its bytes cost the thread.

use moejob_kernels::threads::begin;

/// Bytes from which on a further thread is worth its start, some 30 microseconds.
const PER_THREAD: usize = 4 << 20;
/// More threads than this gain nothing on one socket.
const THREADS_MAX: usize = 8;

/// Copies `from`, as long as `into`.
pub fn copy(from: &[u8], into: &mut [u8]) {
    assert_eq!(from.len(), into.len(), "a copy has the length of what is copied");
    let threads = threads_for(from.len());
    if threads == 1 {
        return into.copy_from_slice(from);
    }
    let chunk = from.len().div_ceil(threads);
    std::thread::scope(|scope| {
        let mut parts = from.chunks(chunk).zip(into.chunks_mut(chunk));
        let first = parts.next();
        for (from, into) in parts {
            begin(scope, move || into.copy_from_slice(from));
        }
        if let Some((from, into)) = first {
            into.copy_from_slice(from);
        }
    });
}

/// How many threads should share in work on so many bytes of memory.
pub fn threads_for(bytes: usize) -> usize {
    // Asked for once: it reads the control group's files.
    static CORES: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    let cores = *CORES.get_or_init(|| {
        std::thread::available_parallelism().map_or(1, usize::from)
    });
    (bytes / PER_THREAD).clamp(1, cores.min(THREADS_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_whatever_the_length() {
        for len in [0, 1, PER_THREAD, 2 * PER_THREAD - 1, 2 * PER_THREAD, 5 * PER_THREAD + 3] {
            let from: Vec<u8> = (0..len).map(|at| (at * 7 + at / 253) as u8).collect();
            let mut into = vec![0; len];
            copy(&from, &mut into);
            assert!(into == from, "{len} bytes");
        }
    }
}
