// The products of grouped_gemm.cu for sm_80 and later: cp.async and mma.sync instead of the copy
// engine and wgmma. Same ops, same Args, same epilogues, same order of every sum over k.
//
// Eight warps share SIDE = 4 tiles of 128 x BN that follow each other along n, two warps a tile: a
// warp multiplies 64 x 64, so that what it reads from shared memory is used 64 times. Its
// accumulators lie as those of a wgmma m64 block, so the epilogues are shared. BN is 64.
//
// Shared memory: A then B a stage. K-major tiles have rows of 64 k (8 chunks of 16 bytes),
// MN-major ones rows of 128 m or 256 n; chunk c of row r lies at c ^ (r & 7), so that the eight
// rows an ldmatrix reads fall into different banks.
constexpr int THREADS = 256, SIDE = 4, B_ROWS = SIDE * BN;
constexpr int STAGE_BYTES = (BM + B_ROWS) * BK * 2;

// Where row `row`, chunk `chunk` of a tile with `MN` m or n lies.
template <bool MN_MAJOR, int MN> __device__ __forceinline__ u32 place(int row, int chunk) {
  return row * (MN_MAJOR ? 2 * MN : 128) + ((chunk ^ (row & 7)) << 4);
}
__device__ __forceinline__ u32 place_a(int row, int chunk) {
  return place<A_MN, BM>(row, chunk);
}
__device__ __forceinline__ u32 place_b(int row, int chunk) {
  return place<B_MN, B_ROWS>(row, chunk);
}

// Row (K-major) of B that shared row `at` of the tiles holds, within the expert; -1: none. UP and
// ROWS permute each 32 rows as the copy engine's map does: a thread then has 8 columns in a row.
__device__ __forceinline__ int weight_row(const Tile& tile, const Args& args, int at) {
  const int n0 = tile.n0 * SIDE + at / BN, r = at % BN;
  const int i = (r >> 3) & 3, q = (r >> 1) & 3;
  const int n = PERMUTED ? (r & ~31) + 8 * q + 2 * i + (r & 1) : r;
  if (PAIRED) {
    const int half = n / TILE_N, col = n0 * TILE_N + n % TILE_N;
    return col < args.cols ? half * args.cols + col : -1;
  }
  const int col = n0 * BN + n;
  return col < args.cols ? args.first_col + col : -1;
}

// One stage of A: gathered or contiguous rows, or columns of rows for weight gradients.
__device__ __forceinline__ void load_a(u32 to, const u16* a, const Tile& tile, const Args& args,
                                       int it) {
  const int tid = threadIdx.x;
#pragma unroll
  for (int i = 0; i < BM * BK / 8 / THREADS; i++) {
    const int at = tid + i * THREADS;
    const int row = A_MN ? at >> 4 : at >> 3, chunk = A_MN ? at & 15 : at & 7;
    const u16* from = args.gathered;
    bool live;
    if (A_MN) {
      const int r = it * BK + row, m = tile.m0 + chunk * 8;
      live = r < tile.rows && m < args.gathered_pitch;
      const int token = !live ? 0 : INDEXED ? args.index[tile.row0 + r] : tile.row0 + r;
      if (live) from += (u64)token * args.gathered_pitch + m;
    } else {
      const int r = tile.m0 + row, k = it * BK + chunk * 8;
      live = r < tile.rows && k < args.depth;
      if (GATHERED) {
        if (live) from += (u64)args.index[tile.row0 + r] * args.gathered_pitch + k;
      } else {
        // Rows of gradients of logits are padded to whole chunks, with zeros.
        from = a;
        if (live) from += (u64)(tile.row0 + r) * ((args.depth + 7) & ~7) + k;
      }
    }
    copy16(to + place_a(row, chunk), live ? from : args.gathered, live ? 16 : 0);
  }
}

__device__ __forceinline__ void load_b_stage(u32 to, const u16* b, const Tile& tile,
                                             const Args& args, int it) {
  const int tid = threadIdx.x;
#pragma unroll
  for (int i = 0; i < B_ROWS * BK / 8 / THREADS; i++) {
    const int at = tid + i * THREADS;
    constexpr int CHUNKS = B_MN ? B_ROWS / 8 : BK / 8;  // of a row
    const int row = at / CHUNKS, chunk = at % CHUNKS;
    const u16* from = b;
    bool live;
    if (B_MN) {
      const int k = it * BK + row, n = tile.n0 * B_ROWS + chunk * 8;
      const int depth = OP == OP_WGRAD ? tile.rows : args.depth;
      const u64 first = OP == OP_WGRAD ? tile.row0 : tile.expert * args.weight_rows;
      live = k < depth && n < args.cols;
      if (live) from += (first + k) * ((args.cols + 7) & ~7) + n;
    } else {
      const int n = weight_row(tile, args, row), k = it * BK + chunk * 8;
      live = n >= 0 && k < args.depth;
      if (live) from += ((u64)tile.expert * args.weight_rows + n) * args.depth + k;
    }
    copy16(to + place_b(row, chunk), from, live ? 16 : 0);
  }
}

// Rows m0 .. m0 + 63 by columns n0 .. n0 + 63 of the stage.
__device__ __forceinline__ void multiply_stage(float (&acc)[4][BN / 2], u32 a, u32 b, int m0,
                                               int n0, int lane) {
  const int row = lane & 7, matrix = lane >> 3;
#pragma unroll
  for (int kk = 0; kk < BK / 16; kk++) {
    u32 av[4][4];
    // Matrices of A: m 0-7 and 8-15 of k 0-7, then of k 8-15.
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int m = m0 + 16 * i, second = matrix >> 1;
      const u32 at = A_MN ? place_a(kk * 16 + second * 8 + row, m / 8 + (matrix & 1))
                          : place_a(m + (matrix & 1) * 8 + row, kk * 2 + second);
      load_matrices<A_MN>(av[i], a + at);
    }
#pragma unroll
    for (int j = 0; j < BN / 8; j += 2) {
      u32 bv[4];
      // Matrices of B: k 0-7 and 8-15 of columns 8 j, then of the next 8.
      const int n = n0 + 8 * j, second = matrix >> 1;
      const u32 at = B_MN ? place_b(kk * 16 + (matrix & 1) * 8 + row, n / 8 + second)
                          : place_b(n + second * 8 + row, kk * 2 + (matrix & 1));
      load_matrices<B_MN>(bv, b + at);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        multiply_16x8(&acc[i][4 * j], av[i], bv[0], bv[1]);
        multiply_16x8(&acc[i][4 * j + 4], av[i], bv[2], bv[3]);
      }
    }
  }
}

// The m64 block at m0 of the tile along n that is this warp's.
__device__ __forceinline__ void finish_block(const float (&acc)[4][BN / 2], Tile tile,
                                             const Args& args, int m0, int side, int lane) {
  tile.n0 = tile.n0 * SIDE + side;
  const int m_end = OP == OP_WGRAD ? args.gathered_pitch : tile.rows;
  if (m0 >= m_end || tile.n0 * TILE_N >= args.cols) return;
#pragma unroll
  for (int i = 0; i < 4; i++) finish(acc[i], tile, args, m0, i, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
grouped_gemm(const u16* a, const u16* b, const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 stages = shared_address(shared);
  int* offsets = (int*)(shared + STAGES * STAGE_BYTES);
  int* order = offsets + args.groups + 1;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int block = 64 * (warp & 1), side = warp >> 1;  // of this warp, along m and n
  for (int i = tid; i <= args.groups; i += THREADS) {
    offsets[i] = args.offsets[i];
    if (OP == OP_WGRAD && i < args.groups) order[i] = args.order[i];
  }
  __syncthreads();
  constexpr int WIDE = SIDE * TILE_N;
  Schedule schedule = {offsets, order, 0, args.groups, (args.gathered_pitch + BM - 1) / BM,
                       (args.cols + WIDE - 1) / WIDE, 0, 0, 0};
  Tile tile;
  while (schedule.next(tile)) {
    const int steps = Schedule::depth(tile, args);
    const auto load = [&](int it) {
      const u32 stage = stages + it % STAGES * STAGE_BYTES;
      if (it < steps) {
        load_a(stage, a, tile, args, it);
        load_b_stage(stage + A_BYTES, b, tile, args, it);
      }
      copies_commit();  // an empty group keeps the count
    };
    float acc[4][BN / 2];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < BN / 2; j++) acc[i][j] = 0.f;
#pragma unroll
    for (int it = 0; it < STAGES - 1; it++) load(it);
    for (int it = 0; it < steps; it++) {
      copies_wait<STAGES - 2>();
      __syncthreads();  // every thread's copies have landed, and all have left the oldest stage
      load(it + STAGES - 1);
      const u32 stage = stages + it % STAGES * STAGE_BYTES;
      multiply_stage(acc, stage, stage + A_BYTES, block, side * BN, lane);
    }
    copies_wait<0>();
    __syncthreads();
    finish_block(acc, tile, args, tile.m0 + block, side, lane);
  }
}
