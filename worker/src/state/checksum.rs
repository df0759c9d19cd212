//! Whether bytes in memory are still those of a snapshot.

use crate::state::slot::Label;
use moejob_kernels::threads::begin;
use moejob_protocol::checkpoint::ScaleEntry;
use std::sync::atomic::{AtomicU64, Ordering};

/// Whether bytes in memory are those that were complete once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Soundness {
    Sound,
    /// They are others, or they belong to nothing any more.
    Damaged,
    /// Nobody makes their checksum.
    NotSummed,
}

/// Bytes that one thread hashes at a time.
pub(super) const CHECKSUM_CHUNK: usize = 4 << 20;
/// Threads that hash at once while everybody waits: together they read about as fast as memory
/// gives.
pub(super) const SUM_THREADS_RESUME: usize = 8;
/// Threads that hash beside the steps.
pub(super) const SUM_THREADS_BESIDE: usize = 2;

/// BLAKE3 of the label and of the hashes of all chunks, which several threads make. They add to a
/// count of bytes while they do.
pub(super) fn checksum(
    label: Label,
    loss_scale: Option<ScaleEntry>,
    (bytes, summed): (&[u8], &AtomicU64),
    threads_max: usize,
) -> [u8; 32] {
    let chunks: Vec<&[u8]> = bytes.chunks(CHECKSUM_CHUNK).collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.min(threads_max).min(chunks.len()).max(1);
    let hashed = |own: &[&[u8]]| -> Vec<blake3::Hash> {
        let hash = |chunk: &&[u8]| {
            let hash = blake3::hash(chunk);
            summed.fetch_add(chunk.len() as u64, Ordering::SeqCst);
            hash
        };
        own.iter().map(hash).collect()
    };
    let mut parts = chunks.chunks(chunks.len().div_ceil(threads).max(1));
    let mut hasher = blake3::Hasher::new();
    hasher.update(&label.attempt.to_le_bytes());
    hasher.update(&label.step.to_le_bytes());
    hasher.update(&label.shard.to_le_bytes());
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    if let Some(ScaleEntry { scale, good_steps }) = loss_scale {
        hasher.update(&scale.to_le_bytes());
        hasher.update(&good_steps.to_le_bytes());
    }
    std::thread::scope(|scope| {
        let first = parts.next().unwrap_or_default();
        let others: Vec<_> = parts.map(|own| begin(scope, move || hashed(own))).collect();
        let mut all = hashed(first);
        for other in others {
            all.extend(other.join().expect("hashing does not panic"));
        }
        for hash in all {
            hasher.update(hash.as_bytes());
        }
    });
    *hasher.finalize().as_bytes()
}
