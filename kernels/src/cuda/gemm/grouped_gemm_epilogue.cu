// Epilogues. A thread of an m64 block holds acc[4 j + 2 h + b] = row 16 warp + lane / 4 + 8 h,
// column 8 j + 2 (lane % 4) + b. Rows past the group's end are never stored; lanes of such rows
// still take part in the shuffles.

// The 8 neighbouring columns 32 jj + 8 q .. of row half h, starting at register `first`.
__device__ __forceinline__ void columns8(const float* acc, int first, int jj, int h, int q,
                                         float (&v)[8]) {
  float even[4], odd[4];
#pragma unroll
  for (int x = 0; x < 4; x++) {
    even[x] = acc[first + (4 * jj + x) * 4 + 2 * h];
    odd[x] = acc[first + (4 * jj + x) * 4 + 2 * h + 1];
  }
  if (!PERMUTED) { quad_transpose(even, q); quad_transpose(odd, q); }
#pragma unroll
  for (int x = 0; x < 4; x++) { v[2 * x] = even[x]; v[2 * x + 1] = odd[x]; }
}
__device__ __forceinline__ void store8(u16* to, const float (&v)[8]) {
  store16(to, pack_pair(v[0], v[1]), pack_pair(v[2], v[3]), pack_pair(v[4], v[5]),
          pack_pair(v[6], v[7]));
}
__device__ __forceinline__ void unpack8(const uint4& from, float (&v)[8]) {
  const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int x = 0; x < 4; x++) { v[2 * x] = low_half(words[x]); v[2 * x + 1] = high_half(words[x]); }
}

// Two elements each of what is stored, added to what is there.
__device__ __forceinline__ u32 add_pair(u32 a, u32 b) {
  return pack_pair(low_half(a) + low_half(b), high_half(a) + high_half(b));
}
__device__ __forceinline__ void add16(u16* to, u32 a, u32 b, u32 c, u32 d) {
  const uint4 old = *(const uint4*)to;
  store16(to, add_pair(old.x, a), add_pair(old.y, b), add_pair(old.z, c), add_pair(old.w, d));
}

// OP_UP: H as it is, and A unless nobody wants it.
__device__ __forceinline__ void finish_up(const float (&acc)[BN / 2], const Tile& tile,
                                          const Args& args, int first_row, int q) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int r = first_row + 8 * h;
    const bool live = r < tile.rows;
    const u64 row = tile.row0 + (live ? r : 0);
    u16* out = args.out + row * args.out_pitch + tile.n0 * TILE_N + 8 * q;
    u16* activation = args.out_activation + row * args.cols + tile.n0 * TILE_N + 8 * q;
#pragma unroll
    for (int jj = 0; jj < TILE_N / 32; jj++) {
      float gate[8], up[8], a[8];
      columns8(acc, 0, jj, h, q, gate);
      if (GATED) columns8(acc, BN / 4, jj, h, q, up);
#pragma unroll
      for (int x = 0; x < 8; x++) a[x] = activate<ACT>(gate[x]) * (GATED ? up[x] : 1.f);
      if (live && tile.n0 * TILE_N + 32 * jj < args.cols) {
        store8(out + 32 * jj, gate);
        if (GATED) store8(out + args.cols + 32 * jj, up);
        if (args.out_activation) store8(activation + 32 * jj, a);
      }
    }
  }
}

// OP_ROWS, OP_DROWS, OP_WGRAD not transposed: rows of elements. `rows` bounds first_row's range.
__device__ __forceinline__ void finish_rows(const float (&acc)[BN / 2], u16* base, int pitch,
                                            int rows, int cols, int first_row, int n0, int q,
                                            bool add) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int r = first_row + 8 * h;
    const bool live = r < rows;
    u16* out = base + (u64)(live ? r : 0) * pitch + n0 + 8 * q;
#pragma unroll
    for (int jj = 0; jj < BN / 32; jj++) {
      u32 v[4];
#pragma unroll
      for (int x = 0; x < 4; x++) {
        const int j = (4 * jj + x) * 4 + 2 * h;
        v[x] = pack_pair(acc[j], acc[j + 1]);
      }
      if (!PERMUTED) quad_transpose(v, q);
      if (!live || n0 + 32 * jj >= cols) continue;
      if (add) add16(out + 32 * jj, v[0], v[1], v[2], v[3]);
      else store16(out + 32 * jj, v[0], v[1], v[2], v[3]);
    }
  }
}

// fp32 rows of any width: dW, or logits, each the sum of its products with Whi and Wlo.
template <bool ADD>
__device__ __forceinline__ void finish_f32(const float (&acc)[BN / 2], float* base, int pitch,
                                           int rows, int cols, int first_row, int n0, int q) {
  constexpr bool LOGITS = OP == OP_LOGITS;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int r = first_row + 8 * h;
    if (r >= rows) continue;
    float* out = base + (u64)r * pitch + n0 + 2 * q;
#pragma unroll
    for (int j = 0; j < (LOGITS ? BN / 16 : BN / 8); j++) {
#pragma unroll
      for (int b = 0; b < 2; b++) {
        if (n0 + 8 * j + 2 * q + b >= cols) continue;
        const int i = 4 * j + 2 * h + b;
        const float low = LOGITS ? acc[BN / 4 * LOGITS + i] / LOW_SCALE : 0.f, sum = acc[i] + low;
        if (ADD) add_f32(out + 8 * j + b, sum);
        else store_f32(out + 8 * j + b, sum);
      }
    }
  }
}

// dW [N][M] in elements: 8 x 8 blocks are transposed in registers; a warp stores 32 bytes of a row.
__device__ __forceinline__ void finish_transposed(const float (&acc)[BN / 2], u16* base, int pitch,
                                                  int cols, int first_m, int n0, int lane,
                                                  bool add) {
  const int q = lane & 3;
  u16* out = base + (u64)(n0 + 8 * (q >> 1) + (lane >> 2)) * pitch + first_m + 8 * (q & 1);
#pragma unroll
  for (int j = 0; j < BN / 8; j += 2) {
    u32 v[4];
#pragma unroll
    for (int x = 0; x < 4; x++) {
      const int i = 4 * (j + (x >> 1)) + 2 * (x & 1);
      v[x] = transpose_8x8(pack_pair(acc[i], acc[i + 1]));
    }
    quad_transpose(v, q);
    if (n0 + 8 * j < cols) {
      if (add) add16(out, v[0], v[1], v[2], v[3]);
      else store16(out, v[0], v[1], v[2], v[3]);
    }
    out += (u64)16 * pitch;
  }
}

// The same in fp32; a running pointer and ordered stores keep the addresses out of registers.
template <bool ADD>
__device__ __forceinline__ void finish_transposed_f32(const float (&acc)[BN / 2], float* base,
                                                      int pitch, int cols, int first_m, int n0,
                                                      int lane) {
  const int n = n0 + 2 * (lane & 3);
  float* out = base + (u64)n * pitch + first_m + (lane >> 2);
#pragma unroll
  for (int j = 0; j < BN / 8; j++) {
#pragma unroll
    for (int x = 0; x < 4; x++) {
      float* at = out + (x & 1) * pitch + 8 * (x >> 1);
      if (n + 8 * j + (x & 1) >= cols) continue;
      if (ADD) add_f32(at, acc[4 * j + x]);
      else store_f32(at, acc[4 * j + x]);
    }
    out += (u64)8 * pitch;
  }
}

// H of 8 columns of both row halves. Loads of the next HIDDEN_AHEAD chunks are on their way while
// one is computed: each comes from far, and nothing else hides this epilogue.
constexpr int HIDDEN_AHEAD = 1;
struct HiddenChunk { uint4 gate[2], up[2]; };
__device__ __forceinline__ HiddenChunk load_hidden(u16* const (&h)[2], const bool (&live)[2],
                                                   int col, bool inside, int cols) {
  HiddenChunk chunk;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    chunk.gate[i] = chunk.up[i] = make_uint4(0, 0, 0, 0);
    if (live[i] && inside) {
      chunk.gate[i] = *(const uint4*)(h[i] + col);
      if (GATED) chunk.up[i] = *(const uint4*)(h[i] + cols + col);
    }
  }
  return chunk;
}

// OP_DH: da' is in acc. dH takes the place of H; each element is read and written by one thread.
__device__ __forceinline__ void finish_dh(const float (&acc)[BN / 2], const Tile& tile,
                                          const Args& args, int first_row, int q) {
  bool live[2];
  u16 *h[2], *scaled[2];
  float scale[2], ds[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    live[i] = first_row + 8 * i < tile.rows;
    const u64 row = tile.row0 + (live[i] ? first_row + 8 * i : 0);
    h[i] = args.out + row * args.out_pitch;
    scaled[i] = args.out_activation + row * args.cols;
    scale[i] = args.row_scale[row];
  }
  const int col0 = tile.n0 * BN + 8 * q;
  HiddenChunk ahead[BN / 32];  // indexed by constants only: registers, a few alive at once
  const auto load = [&](int jj) {
    const int col = tile.n0 * BN + 32 * jj;
    ahead[jj] = load_hidden(h, live, col + 8 * q, col < args.cols, args.cols);
  };
#pragma unroll
  for (int jj = 0; jj < HIDDEN_AHEAD && jj < BN / 32; jj++) load(jj);
#pragma unroll
  for (int jj = 0; jj < BN / 32; jj++) {
    if (jj + HIDDEN_AHEAD < BN / 32) load(jj + HIDDEN_AHEAD);
    const HiddenChunk& now = ahead[jj];
    const bool inside = tile.n0 * BN + 32 * jj < args.cols;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float da[8], gate[8], up[8], a[8];
      columns8(acc, 0, jj, i, q, da);
      unpack8(now.gate[i], gate);
      unpack8(now.up[i], up);
#pragma unroll
      for (int x = 0; x < 8; x++) {
        float slope;
        const float g = gate[x], u = GATED ? up[x] : 1.f, act = activate_both<ACT>(g, slope);
        ds[i] += da[x] * (act * u);
        a[x] = scale[i] * act * u;
        const float d = scale[i] * da[x];
        gate[x] = d * u * slope;
        up[x] = d * act;
      }
      if (live[i] && inside) {
        store8(h[i] + col0 + 32 * jj, gate);
        if (GATED) store8(h[i] + args.cols + col0 + 32 * jj, up);
        store8(scaled[i] + col0 + 32 * jj, a);
      }
    }
  }
  const int n_tiles = (args.cols + BN - 1) / BN;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    ds[i] += __shfl_xor_sync(~0u, ds[i], 1);
    ds[i] += __shfl_xor_sync(~0u, ds[i], 2);
    if (live[i] && q == 0)
      args.out_f32[(u64)(tile.row0 + first_row + 8 * i) * n_tiles + tile.n0] = ds[i];
  }
}

// One m64 block of a tile. `first_row` is this thread's row (or m) in the group.
__device__ __forceinline__ void finish(const float (&acc)[BN / 2], const Tile& tile,
                                       const Args& args, int block_m, int warp, int lane) {
  const int q = lane & 3, first_row = block_m + 16 * warp + (lane >> 2);
  if (OP == OP_UP) finish_up(acc, tile, args, first_row, q);
  if (OP == OP_DH) finish_dh(acc, tile, args, first_row, q);
  if (OP == OP_ROWS || OP == OP_DROWS)
    finish_rows(acc, args.out + (u64)tile.row0 * args.out_pitch, args.out_pitch, tile.rows,
                args.cols, first_row, tile.n0 * BN, q, false);
  if (OP == OP_LOGITS)
    finish_f32<false>(acc, args.out_f32 + (u64)tile.row0 * args.out_pitch, args.out_pitch,
                      tile.rows, args.cols, first_row, tile.n0 * TILE_N, q);
  if (OP == OP_WGRAD) {
    const u64 base = (u64)tile.expert * args.out_rows * args.out_pitch;
    const bool add = args.accumulate;
    const int n0 = tile.n0 * BN, pitch = args.out_pitch, rows = args.gathered_pitch;
    if (!TRANSPOSED && OUT == 0)
      finish_rows(acc, args.out + base, pitch, rows, args.cols, first_row, n0, q, add);
    if (!TRANSPOSED && OUT != 0 && !add)
      finish_f32<false>(acc, args.out_f32 + base, pitch, rows, args.cols, first_row, n0, q);
    if (!TRANSPOSED && OUT != 0 && add)
      finish_f32<true>(acc, args.out_f32 + base, pitch, rows, args.cols, first_row, n0, q);
    const int m = block_m + 16 * warp;
    if (TRANSPOSED && OUT == 0)
      finish_transposed(acc, args.out + base, pitch, args.cols, m, n0, lane, add);
    if (TRANSPOSED && OUT != 0 && !add)
      finish_transposed_f32<false>(acc, args.out_f32 + base, pitch, args.cols, m, n0, lane);
    if (TRANSPOSED && OUT != 0 && add)
      finish_transposed_f32<true>(acc, args.out_f32 + base, pitch, args.cols, m, n0, lane);
  }
}
