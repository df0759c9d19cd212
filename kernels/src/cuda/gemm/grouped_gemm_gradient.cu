// OP_WGRAD through shared memory (STAGED > 0): each consumer warp packs its 16 rows of m, a box of
// columns of n at a time, into a buffer that the copy engine takes away. An epilogue of its own
// stores takes three times the instructions, and nothing hides it.
//
//                        elements                        fp32
// dW [M][N]              64 n x 16 rows, swizzle 128     32 n x 16 rows, swizzle 128
// TRANSPOSED, dW [N][M]  16 m x 64 rows, swizzle 32      none: its rows of 64 bytes add slower than
//                                                        the registers do (2.31 ms for 2.07)
//
// Expert by expert below each other; M and N are multiples of 64. What is added to is added to by
// the copy engine, which knows the numbers' kind from the map.
#if STAGED && OP == OP_WGRAD
struct Outbox {
  const TensorMap* map;
  u32 buffers;
  bool elected;  // the lane that drives the copy engine
  int slot;

  // The buffer that is written next, once the copy engine has read what was in it.
  __device__ __forceinline__ u32 begin() const {
    stores_read<STAGED - 1>();
    __syncwarp();
    return buffers + slot * BUFFER;
  }

  // Hands it to the copy engine: a box whose first element is of this m and n.
  __device__ __forceinline__ void send(u32 buffer, const Tile& tile, const Args& args, int m,
                                       int n) {
    fence_async_proxy();
    __syncwarp();
    const int x = TRANSPOSED ? m : n, y = tile.expert * args.out_rows + (TRANSPOSED ? n : m);
    store_box_if(elected && !args.accumulate, map, buffer, x, y);
    add_box_if(elected && args.accumulate, map, buffer, x, y);
    stores_commit();
    slot = slot + 1 == STAGED ? 0 : slot + 1;
  }

#if OUT
  static_assert(!TRANSPOSED, "fp32 in boxes has rows of 128 bytes");
  // One m64 block; m is the first of this warp's 16 rows of it. Lanes of one store write to
  // different banks: half of them write what others write two steps later.
  __device__ __forceinline__ void finish(const float (&acc)[BN / 2], const Tile& tile,
                                         const Args& args, int m, int lane) {
    const int r = lane >> 2, q = lane & 3;
    const bool swap = r & 1;
    const u32 at = r * 128 + ((r ^ (q >> 1) ^ (swap << 2)) << 4) + (q & 1) * 8;
#pragma unroll
    for (int c = 0; c < BN / 32; c++) {
      const int n = tile.n0 * BN + 32 * c;
      if (n >= args.cols) break;
      const u32 buffer = begin();
#pragma unroll
      for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float* d = acc + 16 * c + 4 * j + 2 * h;
          const float* other = acc + 16 * c + 4 * (j ^ 2) + 2 * h;
          store_shared8(buffer + (at ^ (j << 5)) + h * 1024,
                        __float_as_uint(swap ? other[0] : d[0]),
                        __float_as_uint(swap ? other[1] : d[1]));
        }
      }
      send(buffer, tile, args, m, n);
    }
  }
#else
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
      const u32 buffer = begin();
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
      send(buffer, tile, args, m, n);
    }
  }
#endif
};
#endif
