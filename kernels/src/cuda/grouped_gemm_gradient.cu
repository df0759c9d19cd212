// OP_WGRAD in elements through shared memory (STAGED > 0): each consumer warp packs its 16 rows of
// m, 64 columns of n at a time, into a buffer that the copy engine takes away. An epilogue of its
// own stores takes three times the instructions, and nothing hides it.
//
// dW [M][N]: boxes of 64 n x 16 rows, 128-byte swizzle. TRANSPOSED, dW [N][M]: boxes of 16 m x 64
// rows, 32-byte swizzle. Expert by expert below each other; M and N are multiples of 64. What is
// added to is added to by the copy engine, which knows the elements' kind from the map.
#if STAGED && OP == OP_WGRAD
struct Outbox {
  const TensorMap* map;
  u32 buffers;
  bool elected;  // the lane that drives the copy engine
  int slot;

  // One m64 block; m is the first of this warp's 16 rows of it.
  __device__ __forceinline__ void finish(const float (&acc)[BN / 2], const Tile& tile,
                                         const Args& args, int m, int lane) {
    const int r = lane & 7, half = (lane >> 3) & 1, next = lane >> 4;
    // Where this lane's row of the matrix of m half `half`, n chunk `next` lies; chunks of 16
    // bytes change places as the swizzle has it.
    const u32 at = TRANSPOSED ? (8 * next + r) * 32 + ((half ^ (r >> 2)) << 4)
                              : (8 * half + r) * 128 + ((next ^ r) << 4);
#pragma unroll
    for (int c = 0; c < BN / 64; c++) {
      const int n = tile.n0 * BN + 64 * c;
      if (n >= args.cols) break;
      const u32 buffer = buffers + slot * BUFFER;
      stores_read<STAGED - 1>();
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        u32 v[4];
#pragma unroll
        for (int x = 0; x < 4; x++) {
          const float* d = acc + 32 * c + 4 * (j + (x >> 1)) + 2 * (x & 1);
          v[x] = pack_pair(d[0], d[1]);
        }
        const u32 to = TRANSPOSED ? at + j * 8 * 32 : at ^ (j << 4);
        store_matrices<TRANSPOSED>(buffer + to, v[0], v[1], v[2], v[3]);
      }
      fence_async_proxy();
      __syncwarp();
      const int x = TRANSPOSED ? m : n, y = tile.expert * args.out_rows + (TRANSPOSED ? n : m);
      store_box_if(elected && !args.accumulate, map, buffer, x, y);
      add_box_if(elected && args.accumulate, map, buffer, x, y);
      stores_commit();
      slot = slot + 1 == STAGED ? 0 : slot + 1;
    }
  }
};
#endif
