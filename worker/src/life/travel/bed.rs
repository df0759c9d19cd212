//! Memory of a rank, with the numbers that travel.

use super::truth::{Numbers, READ_MAX};
use super::verb::{Call, rows_of};
use half::bf16;
use moejob_kernels::cuda::{Arena, CudaError, Event, Gpu, Stream};
use moejob_kernels::peer::Need;
use moejob_kernels::{ArenaPlan, Buffer, DType};

/// Where the numbers are.
pub(super) struct Bed {
    pub arena: Arena,
    pub stream: Stream,
    pub rank: u32,
    pub world: u32,
    pub sizes: Vec<usize>,
    /// bf16 [most]: the rank's own numbers
    pub from: Buffer,
    /// bf16 [most]
    pub to: Buffer,
    /// u32 [P T, P]: every token has an expert on each rank
    pub ids: Buffer,
    /// u32 [P + 1] and [P]: rows to each rank, and where those of each rank go
    pub starts: Buffer,
    pub places: Buffer,
    pub first: Event,
    pub last: Event,
}

impl Bed {
    /// # Errors
    /// The GPU has no room for it, or failed.
    pub fn new(
        gpu: &Gpu,
        (rank, world): (u32, u32),
        sizes: Vec<usize>,
    ) -> Result<Bed, CudaError> {
        let positions = world as usize;
        let most = sizes.iter().copied().max().unwrap_or(0) / size_of::<bf16>();
        let mut plan = ArenaPlan::new();
        let from = plan.alloc(DType::Bf16, most);
        // Where tokens that travel lie in a step.
        let to = plan.alloc_shared(DType::Bf16, most);
        let ids = plan.alloc(DType::U32, slots(&sizes, positions));
        let (starts, places) =
            (plan.alloc(DType::U32, positions + 1), plan.alloc(DType::U32, positions));
        let arena = Arena::in_parts(gpu, plan.bytes(), 0, plan.shared_bytes())?;
        let numbers = Numbers::of(rank);
        let mut piece = vec![bf16::ZERO; READ_MAX.min(most)];
        for start in (0..most).step_by(piece.len().max(1)) {
            let len = piece.len().min(most - start);
            numbers.fill(start, &mut piece[..len]);
            arena.write(from.slice(start, len), &piece[..len])?;
        }
        let all: Vec<u32> = (0..world).cycle().take(ids.len()).collect();
        arena.write(ids, &all)?;
        let stream = gpu.stream()?;
        let (first, last) = (Event::new(gpu)?, Event::new(gpu)?);
        Ok(Bed { arena, stream, rank, world, sizes, from, to, ids, starts, places, first, last })
    }

    /// Numbers of the larger buffer, and of each rank's part of it.
    pub fn lens(&self, call: Call) -> (usize, usize) {
        let whole = call.bytes / size_of::<bf16>();
        (whole, whole / self.world as usize)
    }

    /// Everybody needs each of the tokens that lie in so many bytes of each rank.
    pub fn need(&self, bytes: usize) -> Need {
        let (tokens, top_k) = (rows_of(bytes), self.world as usize);
        Need {
            tokens,
            top_k,
            ids: self.ids.slice(0, top_k * tokens * top_k),
            present: self.world as usize,
            experts: (0..self.world).map(|rank| (rank, 1)).collect(),
            nodes: 1,
            node: 0,
        }
    }
}

/// Bytes that a rank needs on its GPU, without what NCCL takes: by the sizes of its results.
pub(super) fn bytes_needed(sizes: &[usize], world: usize) -> usize {
    let most = sizes.iter().copied().max().unwrap_or(0);
    2 * most + rooms(sizes) + 4 * slots(sizes, world)
}

/// Choices of all tokens of the largest group.
fn slots(sizes: &[usize], world: usize) -> usize {
    sizes.iter().map(|size| rows_of(size / world) * world * world).max().unwrap_or(0)
}

/// Of an all-to-all alone: other verbs read where the numbers lie.
pub(super) fn rooms(sizes: &[usize]) -> usize {
    sizes.iter().copied().max().unwrap_or(0).next_multiple_of(16)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is needed is what is taken: numbers twice, the rooms, and a choice a token and rank.
    #[test]
    fn memory_is_counted() {
        let sizes = [64 << 10, 256 << 20];
        // Two ranks have 32,768 tokens of 4 KiB each, with two choices.
        let slots = 2 * 32768 * 2;
        assert_eq!(super::slots(&sizes, 2), slots);
        assert_eq!(bytes_needed(&sizes, 2), 3 * (256 << 20) + 4 * slots);
        assert_eq!(bytes_needed(&[], 2), 0);
    }
}
