// The products of grouped_gemm.cu for sm_80 and later: cp.async and mma.sync instead of the copy
// engine and wgmma. Same ops, same Args, same epilogues, same order of every sum over k.
//
// Eight warps share a 128 x BN tile: warp w owns rows 16 w .. 16 w + 15, all columns. Its
// accumulators lie as those of a wgmma m64 block, so the epilogues are shared. BN is 128.
//
// Shared memory: A then B a stage. K-major tiles have rows of 64 k (8 chunks of 16 bytes),
// MN-major ones rows of 128 m or n (16 chunks); chunk c of row r lies at c ^ (r & 7), so that the
// eight rows an ldmatrix reads fall into different banks.
constexpr int THREADS = 256;

__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
template <bool TRANSPOSE> __device__ __forceinline__ void load_matrices(u32 (&v)[4], u32 address) {
  if (TRANSPOSE)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address) : "memory");
}
// d[0..4] += a (16 x 16) b (16 x 8)
__device__ __forceinline__ void multiply_16x8(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
#if ELEMENT == FP16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
  asm volatile(MMA
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where row `row`, chunk `chunk` of a tile lies.
template <bool MN_MAJOR> __device__ __forceinline__ u32 place(int row, int chunk) {
  return row * (MN_MAJOR ? 256 : 128) + ((chunk ^ (row & 7)) << 4);
}

// Row (K-major) of B that shared row r of the tile holds, within the expert; -1: none. UP and ROWS
// permute each 32 rows as the copy engine's map does: a thread then has 8 neighbouring columns.
__device__ __forceinline__ int weight_row(const Tile& tile, const Args& args, int r) {
  const int i = (r >> 3) & 3, q = (r >> 1) & 3;
  const int n = PERMUTED ? (r & ~31) + 8 * q + 2 * i + (r & 1) : r;
  if (PAIRED) {
    const int half = n / TILE_N, col = tile.n0 * TILE_N + n % TILE_N;
    return col < args.cols ? half * args.cols + col : -1;
  }
  const int col = tile.n0 * BN + n;
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
    copy16(to + place<A_MN>(row, chunk), live ? from : args.gathered, live ? 16 : 0);
  }
}

__device__ __forceinline__ void load_b_stage(u32 to, const u16* b, const Tile& tile,
                                             const Args& args, int it) {
  const int tid = threadIdx.x;
#pragma unroll
  for (int i = 0; i < BN * BK / 8 / THREADS; i++) {
    const int at = tid + i * THREADS;
    const int row = B_MN ? at >> 4 : at >> 3, chunk = B_MN ? at & 15 : at & 7;
    const u16* from = b;
    bool live;
    if (B_MN) {
      const int k = it * BK + row, n = tile.n0 * BN + chunk * 8;
      const int depth = OP == OP_WGRAD ? tile.rows : args.depth;
      const u64 first = OP == OP_WGRAD ? (u64)tile.row0 : (u64)tile.expert * args.depth;
      live = k < depth && n < args.cols;
      if (live) from += (first + k) * ((args.cols + 7) & ~7) + n;
    } else {
      const int n = weight_row(tile, args, row), k = it * BK + chunk * 8;
      live = n >= 0 && k < args.depth;
      if (live) from += ((u64)tile.expert * args.weight_rows + n) * args.depth + k;
    }
    copy16(to + place<B_MN>(row, chunk), from, live ? 16 : 0);
  }
}

__device__ __forceinline__ void multiply_stage(float (&acc)[BN / 2], u32 a, u32 b, int m0,
                                               int lane) {
  const int row = lane & 7, matrix = lane >> 3;
#pragma unroll
  for (int kk = 0; kk < BK / 16; kk++) {
    u32 av[4];
    // Matrices of A: m 0-7 and 8-15 of k 0-7, then of k 8-15.
    if (A_MN)
      load_matrices<true>(
          av, a + place<true>(kk * 16 + (matrix >> 1) * 8 + row, m0 / 8 + (matrix & 1)));
    else
      load_matrices<false>(
          av, a + place<false>(m0 + (matrix & 1) * 8 + row, kk * 2 + (matrix >> 1)));
#pragma unroll
    for (int j = 0; j < BN / 8; j += 2) {
      u32 bv[4];
      // Matrices of B: k 0-7 and 8-15 of columns 8 j, then of the next 8.
      if (B_MN)
        load_matrices<true>(
            bv, b + place<true>(kk * 16 + (matrix & 1) * 8 + row, j + (matrix >> 1)));
      else
        load_matrices<false>(
            bv, b + place<false>((j + (matrix >> 1)) * 8 + row, kk * 2 + (matrix & 1)));
      multiply_16x8(&acc[4 * j], av, bv[0], bv[1]);
      multiply_16x8(&acc[4 * j + 4], av, bv[2], bv[3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
grouped_gemm(const u16* a, const u16* b, const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 stages = shared_address(shared);
  int* offsets = (int*)(shared + STAGES * (A_BYTES + B_BYTES));
  int* order = offsets + args.groups + 1;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  for (int i = tid; i <= args.groups; i += THREADS) {
    offsets[i] = args.offsets[i];
    if (OP == OP_WGRAD && i < args.groups) order[i] = args.order[i];
  }
  __syncthreads();
  Schedule schedule = {offsets, order, 0, args.groups, (args.gathered_pitch + BM - 1) / BM,
                       (args.cols + TILE_N - 1) / TILE_N, 0, 0, 0};
  Tile tile;
  while (schedule.next(tile)) {
    const int steps = Schedule::depth(tile, args);
    const auto load = [&](int it) {
      const u32 stage = stages + it % STAGES * (A_BYTES + B_BYTES);
      if (it < steps) {
        load_a(stage, a, tile, args, it);
        load_b_stage(stage + A_BYTES, b, tile, args, it);
      }
      copies_commit();  // an empty group keeps the count
    };
    float acc[BN / 2];
#pragma unroll
    for (int j = 0; j < BN / 2; j++) acc[j] = 0.f;
#pragma unroll
    for (int it = 0; it < STAGES - 1; it++) load(it);
    for (int it = 0; it < steps; it++) {
      copies_wait<STAGES - 2>();
      __syncthreads();  // every thread's copies have landed, and all have left the oldest stage
      load(it + STAGES - 1);
      const u32 stage = stages + it % STAGES * (A_BYTES + B_BYTES);
      multiply_stage(acc, stage, stage + A_BYTES, 16 * warp, lane);
    }
    copies_wait<0>();
    __syncthreads();
    const int m_end = OP == OP_WGRAD ? args.gathered_pitch : tile.rows;
    const int m0 = tile.m0 + (warp >> 2) * 64;
    if (m0 < m_end) finish(acc, tile, args, m0, warp & 3, lane);
  }
}
