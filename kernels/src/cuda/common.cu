// Types and helpers that every kernel here uses. The host puts this file first.
//
// Host macro: ELEMENT, what rows and weights are of. Products sum in fp32 whatever they are of.
#define BF16 0
#define FP16 1
#define FP32 2
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Elements of 16 bits. Rounds to nearest even; in a pair `low` comes first in memory. What fp16
// cannot hold becomes infinite, never its largest number: an overflow must reach the check of the
// gradients, which takes the step back.
#if ELEMENT == FP16
__device__ __forceinline__ float element_to_float(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ float low_half(u32 pair) { return element_to_float((u16)pair); }
__device__ __forceinline__ float high_half(u32 pair) {
  return element_to_float((u16)(pair >> 16));
}
__device__ __forceinline__ u32 pack_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#else
__device__ __forceinline__ float element_to_float(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(u32 pair) {
  return __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ u32 pack_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif
__device__ __forceinline__ u16 to_element(float x) { return (u16)pack_pair(x, 0.f); }
// Router weights go into products as two elements each. The second one of fp16 is kept times this:
// it would lie among fp16's smallest numbers, which have few bits.
constexpr float LOW_SCALE = ELEMENT == FP16 ? 2048.f : 1.f;

// Sums over the 32 lanes in a fixed tree; every lane gets the sum.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
__device__ __forceinline__ double warp_sum_f64(double x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
// The sum over a block, warp after warp, for all of its threads; `shared` has room for each warp.
__device__ __forceinline__ double block_sum_f64(double x, double* shared) {
  x = warp_sum_f64(x);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
  __syncthreads();
  double sum = 0.0;
  for (int w = 0; w < (int)(blockDim.x >> 5); w++) sum += shared[w];
  return sum;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// 1 / (1 + e^-x) from the special function unit: about 2^-22 relative, far below 16 bits.
__device__ __forceinline__ float fast_sigmoid(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950408889634f * x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return inverse;
}

#define ACT_SILU 0
#define ACT_RELU 1
#define ACT_GELU 2
// The activation; `slope` is its derivative there. GELU is the tanh form of x * Phi(x), which is
// x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
template <int KIND> __device__ __forceinline__ float activate_both(float x, float& slope) {
  if (KIND == ACT_SILU) {
    const float s = fast_sigmoid(x), y = x * s;
    slope = y * (1.f - s) + s;
    return y;
  }
  if (KIND == ACT_RELU) {
    slope = x > 0.f ? 1.f : 0.f;
    return fmaxf(x, 0.f);
  }
  const float s = fast_sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
  slope = s + x * s * (1.f - s) * (1.59576912f + 0.21406964f * x * x);
  return x * s;
}
template <int KIND> __device__ __forceinline__ float activate(float x) {
  float slope;
  return activate_both<KIND>(x, slope);
}
// The same of several at once: the special function unit answers late.
template <int KIND, int N> __device__ __forceinline__ void activate_all(const float (&x)[N],
                                                                        float (&y)[N],
                                                                        float (&slope)[N]) {
  if constexpr (KIND == ACT_SILU) {
    float s[N];
#pragma unroll
    for (int i = 0; i < N; i++)
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(s[i]) : "f"(-1.4426950408889634f * x[i]));
#pragma unroll
    for (int i = 0; i < N; i++) asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s[i]) : "f"(1.f + s[i]));
#pragma unroll
    for (int i = 0; i < N; i++) {
      y[i] = x[i] * s[i];
      slope[i] = y[i] * (1.f - s[i]) + s[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) y[i] = activate_both<KIND>(x[i], slope[i]);
  }
}
