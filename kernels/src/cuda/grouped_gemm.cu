// Every grouped product of a mixture-of-experts layer on sm_90a: one source, a kernel per OP.
//
//   OP_UP      h[r] = x[index[r]] W1[e]^T, a = act(gate) * up      W1 [E][W][D], N = F
//   OP_ROWS    y[r] = a[r] W^T                                     W  [E][N][K]   (down)
//   OP_DROWS   y[r] = a[r] W                                       W  [E][K][N]   (dX)
//   OP_DH      da' = dy[index[r]] W2[e]; dh, s * a, partial <da', a>    W2 [E][D][F], N = F
//   OP_WGRAD   dw[e] = sum over the expert's rows of g[index[r]]^T b[r]; [M][N], or [N][M] if
//              TRANSPOSED
//   OP_LOGITS  OP_ROWS with an fp32 output of any width
//
// Host macros: OP BM BN STAGES CLUSTER PINGPONG GATED ACT TRANSPOSED INDEXED OUT (0 bf16, 1 fp32
// added to, 2 fp32). K and N of weights are multiples of 64 (the host refuses
// others); rows are not.
//
// A producer warpgroup fills a ring of stages; two consumer warpgroups multiply. Cooperative: both
// share each tile along m. Ping-pong: a tile belongs to one, while the other is in its epilogue.
// CTAs of a cluster lie along m and each loads a half of B for both.
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
constexpr int UNIT_M = BM * CLUSTER;                     // rows that a cluster takes at once
constexpr int TILE_N = OP == OP_UP && GATED ? BN / 2 : BN;
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
  int groups;
  int depth;               // K of row ops
  int cols;                // N of this launch
  int gathered_pitch;      // also M of OP_WGRAD
  int weight_rows;         // rows of B an expert has where B is K-major
  int first_col;           // the first of them that this launch computes
  int out_pitch;
};

__device__ __forceinline__ void multiply(float (&d)[BN / 2], u64 a, u64 b, int accumulate) {
  WGMMA<A_MN, B_MN>(d, a, b, accumulate);
}

// Static persistent order. Row ops: expert by expert, equal tiles. OP_WGRAD: heaviest expert first
// and every second round backwards, so that long and short tiles meet on one cluster.
struct Tile { int expert, m0, n0, row0, rows; };
struct Schedule {
  const int* offsets;
  const int* order;
  int groups, m_tiles, n_tiles, round, at, base;
  __device__ __forceinline__ bool next(Tile& tile) {
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    const bool backwards = OP == OP_WGRAD && (round & 1);
    const int t = round * clusters + (backwards ? clusters - 1 - cluster : cluster);
    int m_count;
    for (;; at++) {
      if (at >= groups) return false;
      tile.expert = OP == OP_WGRAD ? order[at] : at;
      tile.row0 = offsets[tile.expert];
      tile.rows = offsets[tile.expert + 1] - tile.row0;
      m_count = OP == OP_WGRAD ? m_tiles : (tile.rows + UNIT_M - 1) / UNIT_M;
      if (t < base + m_count * n_tiles) break;
      base += m_count * n_tiles;
    }
    const int l = t - base, group = l / (GROUP_M * n_tiles), r = l - group * GROUP_M * n_tiles;
    const int width = min(m_count - group * GROUP_M, GROUP_M);
    tile.m0 = (group * GROUP_M + r % width) * UNIT_M;
    tile.n0 = r / width;
    round++;
    return true;
  }
  __device__ __forceinline__ static int depth(const Tile& tile, const Args& args) {
    return ((OP == OP_WGRAD ? tile.rows : args.depth) + BK - 1) / BK;
  }
};

struct Ring {
  u32 a, b, barriers;
  int stage;
  u32 phase;
  __device__ __forceinline__ u32 full() const { return barriers + stage * 8; }
  __device__ __forceinline__ u32 empty(int s) const { return barriers + (STAGES + s) * 8; }
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
// B of k step `it`: this CTA's share of the boxes, into every CTA of the cluster.
__device__ __forceinline__ void load_b(const Ring& ring, const TensorMap* map, const Tile& tile,
                                       const Args& args, int it, int rank) {
  constexpr int GATE = OP == OP_UP && GATED;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (CLUSTER > 1 && half != rank) continue;
    if (B_MN) {
      const int k = OP == OP_WGRAD ? tile.row0 + it * BK : tile.expert * args.depth + it * BK;
#pragma unroll
      for (int j = half; j < BN / 64; j += 2)
        load_box_all(ring.b_at() + j * (BK * 128), map, ring.full(), tile.n0 * BN + j * 64, k);
    } else {
      const int within = GATE ? half * args.cols + tile.n0 * TILE_N
                              : args.first_col + tile.n0 * BN + half * (BN / 2);
      const int n = tile.expert * args.weight_rows + within;
      const u32 to = ring.b_at() + half * (B_BYTES / 2);
      if (PERMUTED) load_permuted_all(to, map, ring.full(), it * BK, n >> 5);
      else load_box_all(to, map, ring.full(), it * BK, n);
    }
  }
}

// One elected thread drives the copy engine; A is contiguous.
__device__ __forceinline__ void produce_boxes(Ring ring, Schedule schedule, const TensorMap* map_a,
                                              const TensorMap* map_b, const Args& args, int rank) {
  Tile tile;
  while (schedule.next(tile)) {
    const int m0 = tile.m0 + rank * BM, steps = Schedule::depth(tile, args);
    const bool live = m0 < tile.rows;  // else the whole CTA idles through this tile
    for (int it = 0; it < steps; it++) {
      barrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
      barrier_expect(ring.full(), B_BYTES + (live ? A_BYTES : 0));
      load_b(ring, map_b, tile, args, it, rank);
      if (live) load_box(ring.a_at(), map_a, ring.full(), it * BK, tile.row0 + m0);
      ring.advance();
    }
  }
}

// Rows of A picked by index, 64 k each: 128 threads copy 16 rows at once, 8 chunks a row.
__device__ __forceinline__ void produce_rows(Ring ring, Schedule schedule, const TensorMap* map_b,
                                             const Args& args, int rank) {
  const int tid = threadIdx.x, row = tid >> 3, chunk = tid & 7;
  const u32 to = row * 128 + ((chunk ^ (row & 7)) << 4);
  Tile tile;
  while (schedule.next(tile)) {
    const int m0 = tile.m0 + rank * BM, steps = Schedule::depth(tile, args);
    u32 from[BM / 16];
#pragma unroll
    for (int i = 0; i < BM / 16; i++) {
      const int r = m0 + row + 16 * i;
      from[i] = r < tile.rows
                    ? (u32)args.index[tile.row0 + r] * (u32)args.gathered_pitch + chunk * 8
                    : ~0u;
    }
    if (OP == OP_DH && tid < BM && m0 + tid < tile.rows) {
      // The epilogue reads this tile of H: start it on its way from memory now. Line by line: bulk
      // prefetches queue at the copy engine, one a lane, before the boxes of B.
      const int width = min(BN, args.cols - tile.n0 * BN);
      const u16* h = args.out + (u64)(tile.row0 + m0 + tid) * args.out_pitch + tile.n0 * BN;
      for (int col = 0; col < width; col += 64) {
        prefetch_to_l2(h + col);
        if (GATED) prefetch_to_l2(h + args.cols + col);
      }
    }
    for (int it = 0; it < steps; it++) {
      barrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
      if (tid == 0) {
        barrier_expect(ring.full(), B_BYTES);
        load_b(ring, map_b, tile, args, it, rank);
      }
#pragma unroll
      for (int i = 0; i < BM / 16; i++) {
        const bool live = from[i] != ~0u;
        copy16(ring.a_at() + to + i * 2048, args.gathered + (live ? from[i] + it * BK : 0u),
               live ? 16 : 0);
      }
      copies_arrive(ring.full());
      ring.advance();
    }
  }
}

// Columns m0.. of rows picked by index: the reduction runs over rows, past the group's end zeros.
__device__ __forceinline__ void produce_columns(Ring ring, Schedule schedule,
                                                const TensorMap* map_b, const Args& args,
                                                int rank) {
  constexpr int CHUNKS = BM / 8, AT_ONCE = 128 / CHUNKS;
  const int tid = threadIdx.x, row = tid / CHUNKS, chunk = tid % CHUNKS;
  const u32 to = (chunk >> 3) * (BK * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
  Tile tile;
  while (schedule.next(tile)) {
    const int m = tile.m0 + rank * BM + chunk * 8, steps = Schedule::depth(tile, args);
    const bool inside = m < args.gathered_pitch;
    u32 from[BK / AT_ONCE];
    const auto pick = [&](int k0) {
#pragma unroll
      for (int i = 0; i < BK / AT_ONCE; i++) {
        const int r = k0 + row + AT_ONCE * i;
        from[i] = ~0u;
        if (inside && r < tile.rows)
          from[i] = INDEXED ? (u32)args.index[tile.row0 + r] : (u32)(tile.row0 + r);
      }
    };
    pick(0);
    for (int it = 0; it < steps; it++) {
      barrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
      if (tid == 0) {
        barrier_expect(ring.full(), B_BYTES);
        load_b(ring, map_b, tile, args, it, rank);
      }
#pragma unroll
      for (int i = 0; i < BK / AT_ONCE; i++) {
        const bool live = from[i] != ~0u;
        const u32 element = live ? from[i] * (u32)args.gathered_pitch + m : 0u;
        copy16(ring.a_at() + to + i * (AT_ONCE * 128), args.gathered + element, live ? 16 : 0);
      }
      copies_arrive(ring.full());
      pick((it + 1) * BK);
      ring.advance();
    }
  }
}
