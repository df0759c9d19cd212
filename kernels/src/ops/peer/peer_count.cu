// How many rows pass between this rank and the others of its node. Behind peer_group.cu.

enum { COUNT_THREADS = 1024 };

// Adds to a counter of the host's the bytes of the rows that this rank gathers, or scatters: of
// tokens of other positions, one for each that has an expert here. One block; launches of one
// stream follow each other.
extern "C" __global__ void __launch_bounds__(COUNT_THREADS, 1)
count_rows(const __grid_constant__ Links links, const __grid_constant__ Need need, u32 row_bytes,
           u32 counter) {
  const u32 count = links.positions, me = links.me, tokens = need.nodes * need.tokens;
  u32 found = 0;
  for (u32 j = threadIdx.x; j < tokens * count; j += blockDim.x) {
    const u32 p = j / tokens;
    const auto [rank, row] = place_of(need, j % tokens, p, count);
    found += p != me && is_present(need, rank) && needs(need, row, me, 1);
  }
  __shared__ u32 all;
  if (threadIdx.x == 0) all = 0;
  __syncthreads();
  if (found) atomicAdd(&all, found);
  __syncthreads();
  if (threadIdx.x == 0) {
    volatile u64* const passed = (volatile u64*)(links.control + PASSED) + counter;
    *passed = *passed + (u64)all * row_bytes;
  }
}
