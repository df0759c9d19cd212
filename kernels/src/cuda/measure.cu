// What benchmarks need beside the ops: inputs of any size, and the ceiling of memory-bound kernels.

// Sum of four uniforms, times scale: roughly normal, of unit variance. With `pitch`, the first of
// each `pitch` elements is 1.
extern "C" __global__ void __launch_bounds__(256)
fill_random(u16* out, u64 len, u32 seed, float scale, u32 pitch) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < len;
       i += (u64)gridDim.x * blockDim.x) {
    u64 bits = i + ((u64)seed << 40);
    bits = (bits ^ (bits >> 33)) * 0xff51afd7ed558ccdull;
    bits = (bits ^ (bits >> 33)) * 0xc4ceb9fe1a85ec53ull;
    bits ^= bits >> 33;
    const u32 low = (u32)bits, high = (u32)(bits >> 32);
    const float sum = (low & 0xffff) + (low >> 16) + (high & 0xffff) + (high >> 16);
    const float x = (sum * (1.f / 65536.f) - 2.f) * 1.7320508f * scale;
    out[i] = to_element(pitch && i % pitch == 0 ? 1.f : x);
  }
}

// Four chunks a thread at once, so that enough is on its way; `len` chunks of 16 bytes.
extern "C" __global__ void __launch_bounds__(512) copy(const uint4* a, uint4* b, u64 len) {
  const u64 stride = gridDim.x * (u64)(4 * blockDim.x);
  for (u64 first = blockIdx.x * (u64)(4 * blockDim.x) + threadIdx.x; first < len; first += stride) {
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (first + i * blockDim.x < len) v[i] = __ldcs(a + first + i * blockDim.x);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (first + i * blockDim.x < len) __stcs(b + first + i * blockDim.x, v[i]);
  }
}
