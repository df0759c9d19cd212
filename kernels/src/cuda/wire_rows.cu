// All rows of a buffer to fp8 and back. Behind wire.cu. Host macro: ROW, what rows are of.
extern "C" __global__ void __launch_bounds__(256)
pack_fp8(const char* rows, char* packed, u64 count, u32 dim, u32 bytes) {
  const u32 blocks = (dim + FP8_BLOCK - 1) / FP8_BLOCK;
  const u64 step = (u64)gridDim.x * blockDim.x / FP8_LANES;
  for (u64 j = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / FP8_LANES; j < count * blocks;
       j += step) {
    const u64 row = j / blocks;
    char* from = (char*)rows + row * dim * ELEMENT_BYTES<ROW>;  // is only read
    pack_block<ROW, false>(from, packed + row * bytes, dim, j % blocks);
  }
}

extern "C" __global__ void __launch_bounds__(256)
unpack_fp8(const char* packed, char* rows, u64 count, u32 dim, u32 bytes) {
  const u32 words = dim / 16;
  const u64 step = (u64)gridDim.x * blockDim.x;
  for (u64 j = (u64)blockIdx.x * blockDim.x + threadIdx.x; j < count * words; j += step) {
    const u64 row = j / words;
    const u32 at = 16 * (u32)(j % words);
    const char* from = packed + row * bytes;
    const u32 scale = (u8)from[dim + at / FP8_BLOCK];
    char* const to = rows + (row * dim + at) * ELEMENT_BYTES<ROW>;
    unpack_sixteen<ROW>(*(const uint4*)(from + at), scale, to);
  }
}
