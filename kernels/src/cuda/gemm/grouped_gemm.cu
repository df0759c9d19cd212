// Every grouped product of a mixture-of-experts layer on sm_90a: one source, a kernel per OP.
//
//   OP_UP      h[r] = x[index[r]] W1[e]^T, a = act(gate) * up      W1 [E][W][D], N = F
//   OP_ROWS    y[r] = a[r] W^T                                     W  [E][N][K]   (down)
//   OP_DROWS   y[r] = a[r] W                                       W  [E][K][N]   (dX)
//   OP_DH      da' = dy[index[r]] W2[e]; dh, s * a, partial <da', a>    W2 [E][D][F], N = F
//   OP_WGRAD   dw[e] = sum over the expert's rows of g[index[r]]^T b[r]; [M][N], or [N][M] if
//              TRANSPOSED
//   OP_LOGITS  y[r] = a[r] (Whi + Wlo)^T in fp32, any N                W  [2 N][K]: Whi, then Wlo
//
// Host macros: ELEMENT OP BM BN STAGES CLUSTER PINGPONG STAGED GATED ACT TRANSPOSED INDEXED OUT (0
// elements, 1 fp32). K and N of weights are multiples of 64 (the host refuses others), rows not.
// Experts' weights and gradients lie a stride apart, a whole number of their rows.
//
// A producer warpgroup fills a ring of stages; two consumer warpgroups multiply. Cooperative: both
// share each tile along m. Ping-pong: a tile belongs to one, while the other is in its epilogue.
// CTAs of a cluster lie along m and each loads a half of B for both; a last odd tile along m they
// share along n, each with its own B.
#define OP_UP 0
#define OP_ROWS 1
#define OP_DROWS 2
#define OP_DH 3
#define OP_WGRAD 4
#define OP_LOGITS 5

constexpr bool GATHERED = OP == OP_UP || OP == OP_DH || OP == OP_WGRAD;  // A by cp.async
constexpr bool A_MN = OP == OP_WGRAD;
constexpr bool B_MN = OP == OP_WGRAD || OP == OP_DROWS || OP == OP_DH;
constexpr bool PERMUTED = OP == OP_UP || OP == OP_ROWS;  // B's rows arrive permuted in 32s
constexpr int BK = 64;
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2;
constexpr int M_BLOCKS = PINGPONG ? BM / 64 : BM / 128;  // m64 blocks of a warpgroup
// Both halves of B belong to the same columns: gate and up, or Whi and Wlo.
constexpr bool PAIRED = OP == OP_LOGITS || (OP == OP_UP && GATED);
constexpr int TILE_N = PAIRED ? BN / 2 : BN;
// Cluster tiles along m that follow each other before n moves on: what they share stays in L2.
constexpr int GROUP_M = 8;

struct Args {
  const u16* gathered;     // A of gathered ops: rows of `gathered_pitch` elements
  const int* index;        // the row of `gathered` that each routed row is, if INDEXED
  const int* offsets;      // [groups + 1]: rows of a group
  const int* order;        // [groups], OP_WGRAD: heaviest first
  u16* out;                // H | Y | dX | dH, in place of H | dW
  u16* out_activation;     // A | s * A
  float* out_f32;          // logits | partial <da', a> [rows][n tiles] | dW
  const float* row_scale;  // [rows]: routing weights s
  const int* starts;       // of sources, where sums are exact: grouped_gemm_plain.cu
  int groups;
  int depth;               // K of row ops
  int cols;                // N of this launch
  int gathered_pitch;      // also M of OP_WGRAD
  int weight_rows;         // rows of B from one expert's first to the next's
  int first_col;           // the first of them that this launch computes
  int out_pitch;
  int out_rows;            // OP_WGRAD: rows from one expert's first to the next's
  int accumulate;          // OP_WGRAD: added to what is there; elements after rounding
};

__device__ __forceinline__ void multiply(float (&d)[BN / 2], u64 a, u64 b, int accumulate) {
  WGMMA<A_MN, B_MN>(d, a, b, accumulate);
}

// Static persistent order. Row ops: expert by expert, equal tiles. OP_WGRAD: heaviest expert first
// and every second round backwards, so that long and short tiles meet on one cluster.
// m0 is this CTA's first row of the group (OP_WGRAD: of the output), n0 counts tiles along n.
// Without `shared_b` the CTAs of the cluster have the same m0 and each its own n0, of which the
// last may be past the end: not `live`, and nothing is loaded for it.
struct Tile {
  int expert, m0, n0, row0, rows;
  bool shared_b, live;
};
struct Schedule {
  const int* offsets;
  const int* order;
  int rank, groups, m_tiles, n_tiles, round, at, base;
  __device__ __forceinline__ bool next(Tile& tile) {
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    const bool backwards = OP == OP_WGRAD && (round & 1);
    const int t = round * clusters + (backwards ? clusters - 1 - cluster : cluster);
    int pairs;
    for (;; at++) {
      if (at >= groups) return false;
      tile.expert = OP == OP_WGRAD ? order[at] : at;
      tile.row0 = offsets[tile.expert];
      tile.rows = offsets[tile.expert + 1] - tile.row0;
      const int m_count = OP == OP_WGRAD ? m_tiles : (tile.rows + BM - 1) / BM;
      pairs = m_count / CLUSTER;
      const int odd = (m_count % CLUSTER) * ((n_tiles + CLUSTER - 1) / CLUSTER);
      if (t < base + pairs * n_tiles + odd) break;
      base += pairs * n_tiles + odd;
    }
    const int l = t - base, group = l / (GROUP_M * n_tiles), r = l - group * GROUP_M * n_tiles;
    tile.shared_b = CLUSTER > 1 && l < pairs * n_tiles;
    if (CLUSTER == 1 || tile.shared_b) {
      const int width = min(pairs - group * GROUP_M, GROUP_M);
      tile.m0 = ((group * GROUP_M + r % width) * CLUSTER + rank) * BM;
      tile.n0 = r / width;
    } else {
      tile.m0 = pairs * CLUSTER * BM;
      tile.n0 = (l - pairs * n_tiles) * CLUSTER + rank;
    }
    tile.live = tile.n0 < n_tiles;
    round++;
    return true;
  }
  __device__ __forceinline__ static int depth(const Tile& tile, const Args& args) {
    return ((OP == OP_WGRAD ? tile.rows : args.depth) + BK - 1) / BK;
  }
};

// Buffers of each consumer warp, see grouped_gemm_hidden.cu and grouped_gemm_gradient.cu: boxes of
// 2 KiB that the copy engine brings or takes.
constexpr int BOX = 2048, BUFFER = OP == OP_DH && GATED ? 2 * BOX : BOX;
constexpr int BUFFER_BYTES = STAGED * 8 * BUFFER;  // of all consumer warps
// Full and empty barriers of the stages, and one of each buffer of H.
constexpr int BARRIERS = 2 * STAGES + (OP == OP_DH ? 8 * STAGED : 0);
struct Ring {
  u32 a, b, buffers, barriers;
  int stage;
  u32 phase;
  __device__ __forceinline__ u32 full() const { return barriers + stage * 8; }
  __device__ __forceinline__ u32 empty(int s) const { return barriers + (STAGES + s) * 8; }
  __device__ __forceinline__ u32 buffer_barriers(int warp) const {
    return barriers + (2 * STAGES + warp * STAGED) * 8;
  }
  __device__ __forceinline__ u32 a_at() const { return a + stage * A_BYTES; }
  __device__ __forceinline__ u32 b_at() const { return b + stage * B_BYTES; }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
  __device__ __forceinline__ void skip(int n) {
    stage += n;
    phase ^= (stage / STAGES) & 1;
    stage %= STAGES;
  }
};

// ---- producers
// B of k step `it`: this CTA's share of the boxes into every CTA of the cluster, or all of them
// into its own.
__device__ __forceinline__ void load_b(const Ring& ring, const TensorMap* map, const Tile& tile,
                                       const Args& args, int it, int rank) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (tile.shared_b && half != rank) continue;
    if (B_MN) {
      const int k = (OP == OP_WGRAD ? tile.row0 : tile.expert * args.weight_rows) + it * BK;
#pragma unroll
      for (int j = half; j < BN / 64; j += 2)
        load_box(ring.b_at() + j * (BK * 128), map, ring.full(), tile.n0 * BN + j * 64, k,
                 tile.shared_b);
    } else {
      const int within = PAIRED ? half * args.cols + tile.n0 * TILE_N
                                : args.first_col + tile.n0 * BN + half * (BN / 2);
      const int n = tile.expert * args.weight_rows + within;
      const u32 to = ring.b_at() + half * (B_BYTES / 2);
      if (PERMUTED) load_permuted(to, map, ring.full(), it * BK, n >> 5, tile.shared_b);
      else load_box(to, map, ring.full(), it * BK, n, tile.shared_b);
    }
  }
}

// One elected thread drives the copy engine; A is contiguous.
__device__ __forceinline__ void produce_boxes(Ring ring, Schedule schedule, const TensorMap* map_a,
                                              const TensorMap* map_b, const Args& args, int rank) {
  Tile tile;
  while (schedule.next(tile)) {
    const int steps = Schedule::depth(tile, args);
    for (int it = 0; it < steps; it++) {
      barrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
      barrier_expect(ring.full(), tile.live ? A_BYTES + B_BYTES : 0);
      if (tile.live) {
        load_b(ring, map_b, tile, args, it, rank);
        load_box(ring.a_at(), map_a, ring.full(), it * BK, tile.row0 + tile.m0);
      }
      ring.advance();
    }
  }
}

// B of a step beside rows of A that the warps copy: they take turns, for the copy engine's
// instructions take a thread a while.
__device__ __forceinline__ void turn_to_load_b(const Ring& ring, const TensorMap* map_b,
                                               const Tile& tile, const Args& args, int it,
                                               int rank) {
  if (threadIdx.x != (it & 3) * 32) return;
  barrier_expect(ring.full(), tile.live ? B_BYTES : 0);
  if (tile.live) load_b(ring, map_b, tile, args, it, rank);
}

// A tile's steps, `from` being the element of each of this thread's rows. Without ALL, rows from
// `rows` on arrive as zeros.
template <bool ALL>
__device__ __forceinline__ void copy_rows(Ring& ring, const u32 (&from)[BM / 16], u32 to, int rows,
                                          const TensorMap* map_b, const Tile& tile,
                                          const Args& args, int rank) {
  const int steps = Schedule::depth(tile, args);
  const u16* base = args.gathered;
  for (int it = 0; it < steps; it++) {
    barrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
    turn_to_load_b(ring, map_b, tile, args, it, rank);
    const u32 stage = ring.a_at() + to;
#pragma unroll
    for (int i = 0; i < BM / 16; i++)
      copy16(stage + i * 2048, base + from[i], ALL || 16 * i < rows ? 16 : 0);
    copies_arrive(ring.full());
    base += BK;
    ring.advance();
  }
}

// Rows of A picked by index, 64 k each: 128 threads copy 16 rows at once, 8 chunks a row.
__device__ __forceinline__ void produce_rows(Ring ring, Schedule schedule, const TensorMap* map_b,
                                             const Args& args, int rank) {
  const int tid = threadIdx.x, row = tid >> 3, chunk = tid & 7;
  const u32 to = row * 128 + ((chunk ^ (row & 7)) << 4);
  Tile tile;
  while (schedule.next(tile)) {
    const int rows = tile.live ? tile.rows - tile.m0 : 0;  // the group's from the tile's first on
    u32 from[BM / 16];  // of rows past the end a valid one, of which nothing is read
#pragma unroll
    for (int i = 0; i < BM / 16; i++) {
      from[i] = chunk * 8;
      if (row + 16 * i < rows)
        from[i] += (u32)args.index[tile.row0 + tile.m0 + row + 16 * i] * (u32)args.gathered_pitch;
    }
    if (OP == OP_DH && !STAGED && tid < BM && tid < rows) {
      // The epilogue reads this tile of H: start it on its way from memory now. Line by line: bulk
      // prefetches queue at the copy engine, one a lane, before the boxes of B.
      const int width = min(BN, args.cols - tile.n0 * BN);
      const u16* h = args.out + (u64)(tile.row0 + tile.m0 + tid) * args.out_pitch + tile.n0 * BN;
      for (int col = 0; col < width; col += 64) {
        prefetch_to_l2(h + col);
        if (GATED) prefetch_to_l2(h + args.cols + col);
      }
    }
    if (rows >= BM) copy_rows<true>(ring, from, to, BM, map_b, tile, args, rank);
    else copy_rows<false>(ring, from, to, rows - row, map_b, tile, args, rank);
  }
}

// Columns m0.. of rows picked by index: the reduction runs over rows, past the group's end zeros.
// 128 threads copy 8 rows of 128 columns at once. A warp's 16 rows of a step are looked up by its
// lanes, a row each, and handed around; the next step's are on their way meanwhile. Looked up by
// every thread that needs them they cost as much as the copies.
__device__ __forceinline__ void produce_columns(Ring ring, Schedule schedule,
                                                const TensorMap* map_b, const Args& args,
                                                int rank) {
  static_assert(BM == 128 || OP != OP_WGRAD, "16 chunks a row");
  const int tid = threadIdx.x, lane = tid & 31, row = tid >> 4, chunk = tid & 15;
  const int own_row = (tid >> 5) * 2 + (lane & 1) + 8 * ((lane >> 1) & 7);
  const u32 to = (chunk >> 3) * (BK * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
  Tile tile;
  while (schedule.next(tile)) {
    const int m = tile.m0 + chunk * 8, steps = Schedule::depth(tile, args);
    const bool inside = tile.live && m < args.gathered_pitch;
    const u16* base = args.gathered + (inside ? m : 0);
    const auto pick = [&](int step) {
      const int r = step * BK + own_row;
      if (r >= tile.rows) return 0u;
      return INDEXED ? (u32)args.index[tile.row0 + r] : (u32)(tile.row0 + r);
    };
    u32 own = pick(0);  // nothing but the next step's shuffles may touch it: it is under way
    const auto copy_step = [&](int it, int rows) {  // `rows`: what is left for this thread
      u32 from[BK / 8];
      const u32 element = own * (u32)args.gathered_pitch;
#pragma unroll
      for (int i = 0; i < BK / 8; i++) from[i] = __shfl_sync(~0u, element, 2 * i + (lane >> 4));
      own = pick(it + 1);
      barrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
      turn_to_load_b(ring, map_b, tile, args, it, rank);
      const u32 stage = ring.a_at() + to;
#pragma unroll
      for (int i = 0; i < BK / 8; i++)
        copy16(stage + i * 1024, base + from[i], 8 * i < rows ? 16 : 0);
      copies_arrive(ring.full());
      ring.advance();
    };
    const int whole = tile.live && tile.m0 + BM <= args.gathered_pitch ? tile.rows / BK : 0;
    for (int it = 0; it < whole; it++) copy_step(it, BK);
    for (int it = whole; it < steps; it++)
      copy_step(it, inside ? tile.rows - it * BK - row : 0);
  }
}
