// Rows in narrower formats, in which they travel. Behind common.cu, whose ELEMENT is BF16 here and
// means nothing: what rows are of is told by KIND, FP32 or BF16.
//
// A row of D elements as fp8 is D codes of e4m3, then a byte for each block of 128: its scale is
// 2^(byte - 127), the least that brings the block's largest element to 448 at most.
constexpr u32 FP8_BLOCK = 128;
constexpr u32 FP8_LANES = 16;      // threads that share a block, eight elements each
constexpr int FP8_SCALE_MIN = 10;  // what its block unpacks to is a normal number, or zero
constexpr u32 FP8_NO_NUMBER = 255, FP8_NO_CODE = 0x7f;

// From the bits of the largest magnitude of a block; those of what is no number are the largest.
__device__ __forceinline__ u32 fp8_scale(u32 largest) {
  if (largest >= 0x7f800000u) return FP8_NO_NUMBER;
  // 448 is 1.75 * 2^8.
  return max((int)(largest >> 23) - 8 + ((largest & 0x7fffffu) > 0x600000u), FP8_SCALE_MIN);
}
__device__ __forceinline__ float fp8_factor(u32 scale) {
  return __uint_as_float(scale == FP8_NO_NUMBER ? 0x7fc00000u : scale << 23);
}

// The nearest codes of two numbers of at most 448, of two as near the even one; `low` comes first
// in memory. And what two codes stand for.
#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ void of_e4m3(u32 pair, float& low, float& high) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)pair));
  asm("cvt.f32.f16 %0, %1;" : "=f"(low) : "h"((u16)halves));
  asm("cvt.f32.f16 %0, %1;" : "=f"(high) : "h"((u16)(halves >> 16)));
}
#else
__device__ __forceinline__ u32 e4m3(float x) {
  const u32 bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
  // Small ones are 2^-9 apart; the eighth of them is the first that is not small.
  const u32 code = magnitude < (127 - 6) << 23
                       ? __float2uint_rn(__uint_as_float(magnitude) * 512.f)
                       : ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  return (bits >> 24 & 0x80u) | code;
}
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
  return e4m3(low) | e4m3(high) << 8;
}
__device__ __forceinline__ float of_e4m3(u32 code) {
  // Exponents of fp32 count from 127, those of e4m3 from 7.
  const float magnitude =
      __uint_as_float((code & 0x7fu) << 20) * __uint_as_float((127 + 120) << 23);
  return __uint_as_float((code & 0x80u) << 24 | __float_as_uint(magnitude));
}
__device__ __forceinline__ void of_e4m3(u32 pair, float& low, float& high) {
  low = of_e4m3(pair & 0xffu);
  high = of_e4m3(pair >> 8);
}
#endif

// Eight elements of a row, and of bf16 in 16 bytes.
__device__ __forceinline__ void of_halves(uint4 v, float (&x)[8]) {
  const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) x[2 * i] = low_half(pairs[i]), x[2 * i + 1] = high_half(pairs[i]);
}
__device__ __forceinline__ uint4 to_halves(const float (&x)[8]) {
  return make_uint4(pack_pair(x[0], x[1]), pack_pair(x[2], x[3]), pack_pair(x[4], x[5]),
                    pack_pair(x[6], x[7]));
}
template <int KIND> __device__ __forceinline__ void load_eight(const char* at, float (&x)[8]) {
  if constexpr (KIND == FP32) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 v = *(const float4*)(at + 4 * i);
      x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
  } else {
    of_halves(*(const uint4*)at, x);
  }
}
template <int KIND> __device__ __forceinline__ void store_eight(char* at, const float (&x)[8]) {
  if constexpr (KIND == FP32) {
#pragma unroll
    for (int i = 0; i < 8; i += 4)
      *(float4*)(at + 4 * i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  } else {
    *(uint4*)at = to_halves(x);
  }
}
template <int KIND> constexpr u32 ELEMENT_BYTES = KIND == FP32 ? 4 : 2;

// A block of a row by FP8_LANES threads side by side, of which all are here: codes and scale, and
// with BACK the row becomes what they stand for.
template <int KIND, bool BACK>
__device__ __forceinline__ void pack_block(char* row, char* packed, u32 dim, u32 block) {
  const u32 lane = threadIdx.x % FP8_LANES, at = block * FP8_BLOCK + 8 * lane;
  const u32 mask = 0xffffu << (threadIdx.x & FP8_LANES);
  const bool inside = at < dim;  // whole: rows are of sixteens
  float x[8] = {};
  if (inside) load_eight<KIND>(row + (u64)at * ELEMENT_BYTES<KIND>, x);
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
  for (u32 apart = FP8_LANES / 2; apart; apart /= 2)
    largest = max(largest, __shfl_xor_sync(mask, largest, apart));
  const u32 scale = fp8_scale(largest);
  if (lane == 0) packed[dim + block] = (char)scale;
  if (!inside) return;
  const float inverse = __uint_as_float((254 - scale) << 23), factor = fp8_factor(scale);
  u32 codes[2] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 pair = FP8_NO_CODE << 8 | FP8_NO_CODE;
    if (scale != FP8_NO_NUMBER) pair = e4m3_pair(x[2 * i] * inverse, x[2 * i + 1] * inverse);
    codes[i / 2] |= pair << 16 * (i % 2);
    of_e4m3(pair, x[2 * i], x[2 * i + 1]);
  }
  *(uint2*)(packed + at) = make_uint2(codes[0], codes[1]);
  if constexpr (BACK) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= factor;
    store_eight<KIND>(row + (u64)at * ELEMENT_BYTES<KIND>, x);
  }
}

// What sixteen codes stand for.
template <int KIND>
__device__ __forceinline__ void unpack_sixteen(uint4 codes, u32 scale, char* to) {
  const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
  const float factor = fp8_factor(scale);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      of_e4m3(words[2 * half + i / 2] >> 16 * (i % 2) & 0xffffu, x[2 * i], x[2 * i + 1]);
      x[2 * i] *= factor, x[2 * i + 1] *= factor;
    }
    store_eight<KIND>(to + 8 * half * ELEMENT_BYTES<KIND>, x);
  }
}
