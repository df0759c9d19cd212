// All rows of a buffer to fp8 and back. Behind wire.cu. Host macro: ROW, what rows are of.
extern "C" __global__ void __launch_bounds__(256)
pack_fp8(const char* rows, char* packed, u32 count, u32 dim, u32 bytes) {
  const u32 blocks = (dim + FP8_BLOCK - 1) / FP8_BLOCK;
  const u32 step = gridDim.x * blockDim.x / FP8_LANES;
  for (u32 j = (blockIdx.x * blockDim.x + threadIdx.x) / FP8_LANES; j < count * blocks;
       j += step) {
    const u64 row = j / blocks;
    char* from = (char*)rows + row * dim * ELEMENT_BYTES<ROW>;  // is only read
    pack_block<ROW, false>(from, packed + row * bytes, dim, j % blocks);
  }
}

extern "C" __global__ void __launch_bounds__(256)
unpack_fp8(const char* packed, char* rows, u32 count, u32 dim, u32 bytes) {
  const u32 words = dim / 16, step = gridDim.x * blockDim.x;
  for (u32 j = blockIdx.x * blockDim.x + threadIdx.x; j < count * words; j += step) {
    const u64 row = j / words;
    const u32 at = 16 * (j % words);
    const char* from = packed + row * bytes;
    const u32 scale = (u8)from[dim + at / FP8_BLOCK];
    char* const to = rows + (row * dim + at) * ELEMENT_BYTES<ROW>;
    unpack_sixteen<ROW>(*(const uint4*)(from + at), scale, to);
  }
}
