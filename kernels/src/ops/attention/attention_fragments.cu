// The two products of attention_tiles.cu by mma.sync: elements of 16 bits, one warp, 16 rows.
// Stands behind ampere.cu. Fragments are those of m16n8k16.
constexpr int SIZE = 2, CHUNK = 8;
constexpr int PITCH = PADDED * SIZE + 16;  // of a tile's rows: eight of them fill all banks once

// Weights of 16 rows by KEYS columns, as the first operand of a product.
template <int KEYS> struct Weights {
  u32 pairs[KEYS / 4];
  __device__ __forceinline__ Weights(const float (&d)[KEYS / 2]) { round_pairs(pairs, d); }
};

// d [16, N] = a b^T over D; a and b are the first rows of tiles.
template <int N>
__device__ __forceinline__ void multiply_rows(float (&d)[N / 2], u32 a, u32 b, int lane) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) d[i] = 0.f;
  const int row = lane & 7, matrix = lane >> 3;
  a += ((matrix & 1) * 8 + row) * PITCH + (matrix >> 1) * 16;
  b += ((matrix >> 1) * 8 + row) * PITCH + (matrix & 1) * 16;
#pragma unroll
  for (int k = 0; k < PADDED / 16; k++) {
    u32 av[4];
    load_matrices<false>(av, a + k * 32);
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
      u32 bv[4];
      load_matrices<false>(bv, b + j * 8 * PITCH + k * 32);
      multiply_16x8(&d[4 * j], av, bv[0], bv[1]);
      multiply_16x8(&d[4 * j + 4], av, bv[2], bv[3]);
    }
  }
}

// d [16, COLUMNS] += weights [16, KEYS] b; b is the first of COLUMNS columns of KEYS rows.
template <int COLUMNS, int KEYS>
__device__ __forceinline__ void multiply_weights(float (&d)[COLUMNS / 2],
                                                 const Weights<KEYS>& weights, u32 b, int lane) {
  const int row = lane & 7, matrix = lane >> 3;
  b += ((matrix & 1) * 8 + row) * PITCH + (matrix >> 1) * 16;
#pragma unroll
  for (int k = 0; k < KEYS / 16; k++) {
    const u32 av[4] = {weights.pairs[4 * k], weights.pairs[4 * k + 1], weights.pairs[4 * k + 2],
                       weights.pairs[4 * k + 3]};
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 2) {
      u32 bv[4];
      load_matrices<true>(bv, b + k * 16 * PITCH + j * 16);
      multiply_16x8(&d[4 * j], av, bv[0], bv[1]);
      multiply_16x8(&d[4 * j + 4], av, bv[2], bv[3]);
    }
  }
}

// Two neighbouring columns of a row of the output.
__device__ __forceinline__ void store_pair(u8* to, float a, float b) {
  *(u32*)to = pack_pair(a, b);
}
