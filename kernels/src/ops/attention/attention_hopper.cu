// What the attention kernels for sm_90a share: copies of boxes of heads, the queue of tiles, masks.
// Stands behind hopper.cu and the wgmma functions that the host writes (`attention_wgmma`).
//
// Host macros: HEAD_DIM (64, 96, 128); MASKED, whether a query sees less than all keys up to its
// own. D = HEAD_DIM, S positions of a sequence, N query heads, KV key heads.
//
// In shared memory a tile of rows lies in slabs of 64 columns, 128 bytes a row, 128-byte swizzle.
// The last slab of a head of 96 is half zeros: the copy engine fills what lies past the columns.
constexpr int SLABS = (HEAD_DIM + 63) / 64;
constexpr int K_STEPS = HEAD_DIM / 16;

// Maps of [batch][seq][heads][D], boxes of 64 columns; those a kernel has no use for are empty.
struct Maps { TensorMap q, k, v, o, d_o, dk, dv; };

template <int THREADS> __device__ __forceinline__ void named_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}
template <int THREADS> __device__ __forceinline__ void named_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}
// Columns x .. of the rows from s on of head h of sequence b.
__device__ __forceinline__ void load_heads(u32 to, const TensorMap* map, u32 bar, int x, int s,
                                           int h, int b) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile"
               ".mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(x), "r"(s), "r"(h), "r"(b) : "memory");
}
__device__ __forceinline__ void store_heads(const TensorMap* map, u32 from, int x, int s, int h,
                                            int b) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group"
               " [%0, {%2, %3, %4, %5}], [%1];"
               ::"l"(map), "r"(from), "r"(x), "r"(s), "r"(h), "r"(b) : "memory");
}
// All slabs of ROWS rows; the caller has told the barrier of SLABS * ROWS * 128 bytes.
template <int ROWS>
__device__ __forceinline__ void load_rows(u32 to, const TensorMap* map, u32 bar, int s, int h,
                                          int b) {
#pragma unroll
  for (int c = 0; c < SLABS; c++) load_heads(to + c * (ROWS * 128), map, bar, c * 64, s, h, b);
}
__device__ __forceinline__ void add_f32x4(float* to, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

__device__ __forceinline__ void store_f32x4(float* to, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// MN-major operand of slabs of 64 m or n by ROWS k; 16 further k add 128.
template <int ROWS> __device__ __forceinline__ u64 operand_mn(u32 address) {
  return operand<true>(address) + ((u64)(ROWS * 128 - 8192) >> 4 << 16);
}
// What k step `k` adds to a K-major operand of ROWS rows.
template <int ROWS> __device__ __forceinline__ constexpr u64 k_step(int k) {
  return (k >> 2) * (ROWS * 128 >> 4) + (k & 3) * 2;
}

// A place in a ring of buffers, and the parity of its barriers.
struct Ring {
  int at;
  u32 parity;
  __device__ __forceinline__ void next(int count) {
    if (++at == count) {
      at = 0;
      parity ^= 1;
    }
  }
};

// Tiles by number from the producer to the consumers, through two slots.
struct TileQueue {
  u32 full, empty;
  volatile int* slots;
  Ring ring;
  __device__ __forceinline__ void give(int tile) {
    barrier_wait(empty + ring.at * 8, ring.parity ^ 1);
    slots[ring.at] = tile;
    barrier_arrive(full + ring.at * 8);
    ring.next(2);
  }
  // Lane 0 loads for its warp, since it arrives for it: ptxas leaves no instruction of a
  // __syncwarp between the loads of all lanes and that, and racecheck reported them.
  __device__ __forceinline__ int take(int lane) {
    int tile = 0;
    if (lane == 0) {
      barrier_wait(full + ring.at * 8, ring.parity);
      tile = slots[ring.at];
      barrier_arrive(empty + ring.at * 8);
    }
    ring.next(2);
    return __shfl_sync(~0u, tile, 0);
  }
};
// The next tile of a launch. Whoever meets the end last sets the counter back for the next launch.
__device__ __forceinline__ int next_tile(int* counter) {
  return (int)gridDim.x + atomicAdd(counter, 1);
}
__device__ __forceinline__ void end_tiles(int* counter) {
  if (atomicAdd(counter + 1, 1) == (int)gridDim.x - 1) counter[0] = counter[1] = 0;
}

struct Place { int block, head, sequence; };
// Tile t of `blocks` blocks for each of `heads` heads of every sequence: blocks in order within
// groups of `group` heads, whose operands then stay in L2; `reversed` from the last block down.
__device__ __forceinline__ Place place_of(int t, int blocks, int heads, int sequences, int group,
                                          bool reversed) {
  const int g = t / (group * blocks), r = t - g * group * blocks;
  const int here = min(group, sequences * heads - g * group), at = g * group + r % here;
  const int block = r / here, sequence = at / heads;
  return {reversed ? blocks - 1 - block : block, at - sequence * heads, sequence};
}

// A 64 x 64 (m, n) part of shared memory that a warp's stmatrix fills: fragments of accumulators,
// rounded, to slab rows `row` on.
__device__ __forceinline__ void store_fragments(u32 slab, int row, int chunk, u32 a, u32 b, u32 c,
                                                u32 d) {
  store_matrices<false>(slab + row * 128 + ((chunk ^ (row & 7)) << 4), a, b, c, d);
}
// A warpgroup's 64 x D accumulators, times `scale` of each of the thread's two rows, into slabs
// that are `pitch` bytes apart.
template <int PITCH>
__device__ __forceinline__ void stage_rows(u32 to, const float (&d)[HEAD_DIM / 2], float scale0,
                                           float scale1, int warp, int lane) {
  const int row = warp * 16 + (lane & 15), chunk = lane >> 4;
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 8; j += 2)
    store_fragments(to + (j >> 3) * PITCH, row, (j & 7) + chunk,
                    pack_pair(d[4 * j] * scale0, d[4 * j + 1] * scale0),
                    pack_pair(d[4 * j + 2] * scale1, d[4 * j + 3] * scale1),
                    pack_pair(d[4 * j + 4] * scale0, d[4 * j + 5] * scale0),
                    pack_pair(d[4 * j + 6] * scale1, d[4 * j + 7] * scale1));
}
// Those slabs to rows s .. s + 63 of a head; what lies past the sequence is clipped.
template <int PITCH>
__device__ __forceinline__ void store_rows(const TensorMap* map, u32 from, int s, int h, int b) {
#pragma unroll
  for (int c = 0; c < SLABS; c++) store_heads(map, from + c * PITCH, c * 64, s, h, b);
  stores_commit();
}

// d = a b^T over D, both K-major in shared memory.
template <int ROWS_A, int ROWS_B, int N>
__device__ __forceinline__ void multiply_heads(float (&d)[N], u64 a, u64 b) {
  wgmma_fence();
  wgmma_ss<0, 0, 0>(d, a, b);
#pragma unroll
  for (int k = 1; k < K_STEPS; k++)
    wgmma_ss<0, 0, 1>(d, a + k_step<ROWS_A>(k), b + k_step<ROWS_B>(k));
  wgmma_commit();
}
// d += a b with a, [64, 4 K], as fragments in registers and b MN-major.
template <int N, int K>
__device__ __forceinline__ void multiply_fragments(float (&d)[N], const u32 (&a)[K], u64 b) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < K / 4; k++)
    wgmma_rs<1, 1>(d, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3], b + k * 128);
  wgmma_commit();
}
