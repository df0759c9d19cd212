// OP_DH with H staged in shared memory (STAGED > 0). Each consumer warp owns STAGED buffers of 16
// rows x 64 columns (of gate and of up if GATED) and drives the copy engine itself: a tile's first
// boxes of H are on their way while it is multiplied, dH takes H's place in the buffer and leaves
// as a box. Loads by the epilogue's own threads would queue behind the producer's cp.async, which
// in ping-pong never pause.
//
// A unit is the 16 rows x 64 columns of one box, block by block of the warpgroup's m64 blocks.
#if STAGED && OP == OP_DH
struct Hidden {
  const TensorMap* map;  // H in boxes of 16 x 64, 128-byte swizzle
  u32 buffers, barriers;  // this warp's
  bool elected;           // the lane that drives the copy engine
  int used;               // units that went through the buffers
  int row, col, cols, chunks, units;  // of the tile at hand

  __device__ __forceinline__ int slot(int unit) const { return (used + unit) % STAGED; }
  // Starts the loads of a unit, if there is such a one.
  __device__ __forceinline__ void request(int unit) const {
    const bool mine = elected && unit < units;
    const int block = unit >= chunks;  // of two
    const int x = col + 64 * (unit - block * chunks), y = row + 64 * block;
    const u32 to = buffers + slot(unit) * BUFFER, barrier = barriers + slot(unit) * 8;
    load_box_if(mine, to, map, barrier, x, y, BUFFER);
    if (GATED) load_more_if(mine, to + BOX, map, barrier, cols + x, y);
  }
  __device__ __forceinline__ void start(const Tile& tile, const Args& args, int m0, int warp) {
    static_assert(M_BLOCKS <= 2, "request");
    // Blocks of 64 rows of which this warp's 16 have a row in the group.
    const int left = tile.rows - m0 - 16 * warp;
    const int blocks = min((left + 63) >> 6, M_BLOCKS);
    col = tile.n0 * BN;
    cols = args.cols;
    row = tile.row0 + m0 + 16 * warp;
    chunks = min((cols - col) >> 6, BN / 64);
    units = left > 0 && tile.live ? blocks * chunks : 0;
    stores_read<0>();
#pragma unroll
    for (int unit = 0; unit < STAGED; unit++) request(unit);
  }
  __device__ __forceinline__ u32 wait(int unit) const {
    barrier_wait(barriers + slot(unit) * 8, ((used + unit) / STAGED) & 1);
    return buffers + slot(unit) * BUFFER;
  }
};

// Eight columns of one row: da' and H -> s * A, and dH in H's place. Written phase by phase over
// all elements, so that the latency of one hides behind the others.
__device__ __forceinline__ void hidden_columns(const float* acc, u32 (&gate)[4], u32 (&up)[4],
                                               float scale, float& ds, u32 (&a)[4]) {
  float g[8], act[8], slope[8];
#pragma unroll
  for (int x = 0; x < 4; x++) { g[2 * x] = low_half(gate[x]); g[2 * x + 1] = high_half(gate[x]); }
  activate_all<ACT>(g, act, slope);
#pragma unroll
  for (int x = 0; x < 4; x++) {
    const float u[2] = {GATED ? low_half(up[x]) : 1.f, GATED ? high_half(up[x]) : 1.f};
    float whole[2], dgate[2], dup[2];
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const float da = acc[4 * x + b], d = scale * da;
      whole[b] = act[2 * x + b] * u[b];
      ds += da * whole[b];
      dgate[b] = d * u[b] * slope[2 * x + b];
      dup[b] = d * act[2 * x + b];
    }
    a[x] = pack_pair(scale * whole[0], scale * whole[1]);
    gate[x] = pack_pair(dgate[0], dgate[1]);
    if (GATED) up[x] = pack_pair(dup[0], dup[1]);
  }
}

// One unit: columns 64 c .. of this warp's 16 rows. `buffer` holds H there and then dH.
__device__ __forceinline__ void finish_unit(const float* acc, u32 buffer, u16* (&scaled)[2],
                                            const bool (&live)[2], const float (&scale)[2],
                                            float (&ds)[2], int lane) {
  const int q = lane & 3, r = lane >> 2;
  // Chunk j of row r lies at j ^ (r & 7); 8 rows further are 1024 bytes.
  const u32 at = buffer + r * 128 + (r << 4) + 4 * q;
#pragma unroll
  for (int jj = 0; jj < 2; jj++) {
    u32 gate[2][4], up[2][4], a[2][4];
#pragma unroll
    for (int x = 0; x < 4; x++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 from = (at ^ ((4 * jj + x) << 4)) + 1024 * h;
        gate[h][x] = load_shared(from);
        up[h][x] = GATED ? load_shared(from + BOX) : 0;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
      hidden_columns(acc + 16 * jj + 2 * h, gate[h], up[h], scale[h], ds[h], a[h]);
#pragma unroll
    for (int x = 0; x < 4; x++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 to = (at ^ ((4 * jj + x) << 4)) + 1024 * h;
        store_shared(to, gate[h][x]);
        if (GATED) store_shared(to + BOX, up[h][x]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      quad_transpose(a[h], q);
      if (live[h]) store16(scaled[h] + 32 * jj, a[h][0], a[h][1], a[h][2], a[h][3]);
    }
  }
}

// dH of a unit leaves: as boxes if all 16 rows are the group's, else row by row.
__device__ __forceinline__ void send_unit(const Hidden& hidden, const Args& args, u32 buffer,
                                          int x, int y, int rows, int lane) {
  fence_async_proxy();
  __syncwarp();
  const bool box = hidden.elected && rows >= 16;
  store_box_if(box, hidden.map, buffer, x, y);
  if (GATED) store_box_if(box, hidden.map, buffer + BOX, hidden.cols + x, y);
  stores_commit();
  if (rows >= 16) return;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = 4 * i + (lane >> 3), chunk = lane & 7;
    const u32 from = buffer + row * 128 + ((chunk ^ (row & 7)) << 4);
    u16* to = args.out + (u64)(y + row) * args.out_pitch + x + 8 * chunk;
    const uint4 gate = load_shared16(from);
    if (row < rows) store16(to, gate.x, gate.y, gate.z, gate.w);
    if (!GATED) continue;
    const uint4 up = load_shared16(from + BOX);
    if (row < rows) store16(to + args.cols, up.x, up.y, up.z, up.w);
  }
  __syncwarp();
}

// The tile's blocks of this warp, from da' in acc.
__device__ __forceinline__ void finish_hidden(const float (&acc)[M_BLOCKS][BN / 2],
                                              const Tile& tile, const Args& args, Hidden& hidden,
                                              int m0, int warp, int lane) {
  const int q = lane & 3, n_tiles = (args.cols + BN - 1) / BN;
  int unit = 0;
#pragma unroll
  for (int i = 0; i < M_BLOCKS; i++) {
    const int first = m0 + 64 * i + 16 * warp, rows = tile.rows - first;  // of the warp's 16
    if (rows <= 0 || hidden.units == 0) continue;
    bool live[2];
    u16* scaled[2];
    float scale[2], ds[2] = {0.f, 0.f};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = (lane >> 2) + 8 * h;
      live[h] = r < rows;
      const u64 row = tile.row0 + first + (live[h] ? r : 0);
      scaled[h] = args.out_activation + row * args.cols + hidden.col + 8 * q;
      scale[h] = args.row_scale[row];
    }
#pragma unroll
    for (int c = 0; c < BN / 64; c++) {
      if (c >= hidden.chunks) continue;
      const u32 buffer = hidden.wait(unit);
      finish_unit(acc[i] + 32 * c, buffer, scaled, live, scale, ds, lane);
      send_unit(hidden, args, buffer, hidden.col + 64 * c, hidden.row + 64 * i, rows, lane);
      stores_read<0>();
      hidden.request(unit + STAGED);
      scaled[0] += 64;
      scaled[1] += 64;
      unit++;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      ds[h] += __shfl_xor_sync(~0u, ds[h], 1);
      ds[h] += __shfl_xor_sync(~0u, ds[h], 2);
      if (live[h] && q == 0)
        args.out_f32[(u64)(tile.row0 + first + (lane >> 2) + 8 * h) * n_tiles + tile.n0] = ds[h];
    }
  }
  hidden.used += hidden.units;
}
#endif
