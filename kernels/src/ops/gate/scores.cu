// Scores with the bits of the CPU, for every router. Host macro: EXPERTS.
constexpr int PER_LANE = (EXPERTS + 31) / 32;  // experts of a lane: lane, lane + 32, ...

// e^x with the bits of the CPU: `exp` of src/cpu/float.rs, operation by operation.
__device__ __forceinline__ float exp_as_cpu(float x) {
  const float round = 12582912.f;  // 1.5 * 2^23
  x = x > 89.f ? 89.f : x;
  x = x < -104.f ? -104.f : x;
  const float rounded = __fmaf_rn(x, 0x1.715476p+0f, round), n = __fsub_rn(rounded, round);
  const float r = __fmaf_rn(-n, -0x1.05c61p-29f, __fmaf_rn(-n, 0x1.62e43p-1f, x));
  float sum = 1.f / 5040.f;
  sum = __fmaf_rn(r, sum, 1.f / 720.f);
  sum = __fmaf_rn(r, sum, 1.f / 120.f);
  sum = __fmaf_rn(r, sum, 1.f / 24.f);
  sum = __fmaf_rn(r, sum, 1.f / 6.f);
  sum = __fmaf_rn(r, sum, 0.5f);
  sum = __fmaf_rn(r, sum, 1.f);
  sum = __fmaf_rn(r, sum, 1.f);
  const int whole = __float_as_int(rounded) - __float_as_int(round), half = whole >> 1;
  const float power = __int_as_float((half + 127) << 23);
  return __fmul_rn(__fmul_rn(sum, power), __int_as_float((whole - half + 127) << 23));
}
__device__ __forceinline__ float sigmoid_as_cpu(float x) {
  return __fdiv_rn(1.f, __fadd_rn(1.f, exp_as_cpu(-x)));
}

// The sum over a row of which lane l has x[i] of column l + 32 i, with the bits of the CPU
// (src/cpu/lanes.rs): 16 lanes take every 16th column in turn, then a tree adds them.
__device__ __forceinline__ float row_sum_as_cpu(const float (&x)[PER_LANE], int lane) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const float other = __shfl_xor_sync(~0u, x[i], 16);
    sum = __fadd_rn(sum, lane < 16 ? x[i] : other);
    if (32 * i + 16 < EXPERTS) sum = __fadd_rn(sum, lane < 16 ? other : x[i]);
  }
#pragma unroll
  for (int step = 8; step > 0; step >>= 1)
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
  return sum;
}
