// AdamW over a bucket in one launch. Host macros: MASTER (WEIGHT_IS_MASTER, LOW_BITS, SEPARATE),
// ELEMENT (of weights), MOMENT, GRADIENT (kinds), AT_ONCE (quads in flight a thread), and the
// places of numbers: PARAM_*, CONTROL_*, BLOCK_*.
#define WEIGHT_IS_MASTER 0
#define LOW_BITS 1
#define SEPARATE 2
struct __align__(8) Block {
  u32 name[2], first[2], len, flags, tensor, unused;
};
static_assert(sizeof(Block) == 4 * BLOCK_WORDS, "a block as the host encodes it");

template <int KIND> struct Quad { uint2 bits; };
template <> struct Quad<FP32> { uint4 bits; };
template <int KIND> __device__ __forceinline__ Quad<KIND> load_quad(const void* base, u64 quad) {
  return {__ldcs((const decltype(Quad<KIND>::bits)*)base + quad)};
}
template <int KIND>
__device__ __forceinline__ void store_quad(void* base, u64 quad, Quad<KIND> q) {
  __stcs((decltype(q.bits)*)base + quad, q.bits);
}
template <int KIND> __device__ __forceinline__ float half_of(u32 pair, int high) {
  if (KIND == BF16) return __uint_as_float(high ? pair & 0xffff0000u : pair << 16);
  float y;
  const u16 x = (u16)(high ? pair >> 16 : pair);
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
template <int KIND> __device__ __forceinline__ float item(const Quad<KIND>& q, int i) {
  if constexpr (KIND == FP32)
    return __uint_as_float(i == 0 ? q.bits.x : i == 1 ? q.bits.y : i == 2 ? q.bits.z : q.bits.w);
  else
    return half_of<KIND>(i < 2 ? q.bits.x : q.bits.y, i & 1);
}
// The 16 bits of an item that has no more.
template <int KIND> __device__ __forceinline__ u32 word(const Quad<KIND>& q, int i) {
  if constexpr (KIND == FP32) return 0;
  else return (i < 2 ? q.bits.x : q.bits.y) >> (i & 1) * 16 & 0xffffu;
}
template <int KIND> __device__ __forceinline__ Quad<KIND> rounded(const float (&x)[4]) {
  if constexpr (KIND == FP32)
    return {make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                       __float_as_uint(x[3]))};
  else return {make_uint2(pack_pair(x[0], x[1]), pack_pair(x[2], x[3]))};
}

struct Factors {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
};

// cpu.rs `update`, operation by operation: the same bits in fp32.
__device__ __forceinline__ void update(const Factors& f, float scale, float rate, float correction,
                                       float keep, float g, float& w, float& m, float& v) {
  g = __fmul_rn(g, scale);
  m = __fmaf_rn(m, f.beta1, __fmul_rn(f.one_minus_beta1, g));
  v = __fmaf_rn(v, f.beta2, __fmul_rn(__fmul_rn(f.one_minus_beta2, g), g));
  const float root = __fsqrt_rn(__fmul_rn(v, correction));
  w = __fmaf_rn(w, keep, -__fdiv_rn(__fmul_rn(rate, m), __fadd_rn(root, f.eps)));
}

__device__ __forceinline__ Quad<FP32> moment(const float (&x)[4], Quad<FP32>*, const u32*) {
  return rounded<FP32>(x);
}
// Up with the probability of what is cut off, by 16 random bits each.
__device__ __forceinline__ Quad<BF16> moment(const float (&x)[4], Quad<BF16>*,
                                             const u32 (&random)[4]) {
  u32 cut[4];
#pragma unroll
  for (int i = 0; i < 4; i++) cut[i] = (__float_as_uint(x[i]) + random[i]) >> 16;
  return {make_uint2(cut[0] | cut[1] << 16, cut[2] | cut[3] << 16)};
}

// A block of 4,096 elements a thread block: four quads a thread, AT_ONCE of them in flight.
extern "C" __global__ void __launch_bounds__(256)
adamw_bucket(const Block* table, const double* params, const double* control, Factors f,
             void* weight, void* low, float* master, void* moment1, void* moment2,
             const void* gradient) {
  const Block block = table[blockIdx.x];
  const double* own = params + PARAM_CLASSES + PARAM_EACH * (block.flags >> BLOCK_CLASS_SHIFT);
  if (control[CONTROL_APPLY] == 0.0 || own[PARAM_ACTIVE] == 0.0) return;
  if (block.flags & BLOCK_FROZEN) return;
  const float scale = (float)control[CONTROL_GRADIENT_SCALE];
  const float rate = (float)own[PARAM_RATE], correction = (float)own[PARAM_CORRECTION];
  const float keep = block.flags & BLOCK_DECAYS ? (float)own[PARAM_KEEP] : 1.f;
  const u64 step = (u64)params[PARAM_STEP];
  const u64 first = (u64)block.first[1] << 32 | block.first[0];
  const u64 name = (u64)block.name[1] << 32 | block.name[0];
  const u64 base = (u64)blockIdx.x * 1024;
#pragma unroll 1
  for (int turn = 0; turn < 4; turn += AT_ONCE) {
    Quad<ELEMENT> w[AT_ONCE];
    Quad<BF16> bits[AT_ONCE];
    Quad<FP32> separate[AT_ONCE];
    Quad<MOMENT> m[AT_ONCE], v[AT_ONCE];
    Quad<GRADIENT> g[AT_ONCE];
#pragma unroll
    for (int q = 0; q < AT_ONCE; q++) {
      const u64 at = base + (turn + q) * 256 + threadIdx.x;
      if (MASTER != SEPARATE) w[q] = load_quad<ELEMENT>(weight, at);
      if (MASTER == LOW_BITS) bits[q] = load_quad<BF16>(low, at);
      if (MASTER == SEPARATE) separate[q] = load_quad<FP32>(master, at);
      m[q] = load_quad<MOMENT>(moment1, at);
      v[q] = load_quad<MOMENT>(moment2, at);
      g[q] = load_quad<GRADIENT>(gradient, at);
    }
#pragma unroll
    for (int q = 0; q < AT_ONCE; q++) {
      const u32 quad = (turn + q) * 256 + threadIdx.x;
      const u64 at = base + quad;
      u32 random1[4] = {}, random2[4] = {};
      if (MOMENT == BF16) {
        const u64 logical = first / 4 + quad;
        const uint4 words = philox(name, make_uint4((u32)logical, (u32)(logical >> 32), (u32)step,
                                                    (u32)(step >> 32)));
        const u32 all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; i++) random1[i] = all[i] & 0xffffu, random2[i] = all[i] >> 16;
      }
      float new_w[4], new_m[4], new_v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if constexpr (MASTER == LOW_BITS)
          new_w[i] =
              __uint_as_float((word(w[q], i) << 16) + (u32)(int)(short)word(bits[q], i));
        else if constexpr (MASTER == SEPARATE) new_w[i] = item(separate[q], i);
        else new_w[i] = item(w[q], i);
        new_m[i] = item(m[q], i);
        new_v[i] = item(v[q], i);
        if (4 * quad + i < block.len)
          update(f, scale, rate, correction, keep, item(g[q], i), new_w[i], new_m[i], new_v[i]);
        else
          random1[i] = random2[i] = 0;  // padding keeps its bits
      }
      store_quad(moment1, at, moment(new_m, (Quad<MOMENT>*)nullptr, random1));
      store_quad(moment2, at, moment(new_v, (Quad<MOMENT>*)nullptr, random2));
      if constexpr (MASTER == WEIGHT_IS_MASTER) {
        store_quad(weight, at, rounded<FP32>(new_w));
      } else if constexpr (MASTER == SEPARATE) {
        store_quad(master, at, rounded<FP32>(new_w));
        store_quad(weight, at, rounded<ELEMENT>(new_w));
      } else {
        u32 top[4], rest[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u32 whole = __float_as_uint(new_w[i]);
          top[i] = (whole + 0x8000u) >> 16;
          rest[i] = whole & 0xffffu;
        }
        const Quad<BF16> high = {make_uint2(top[0] | top[1] << 16, top[2] | top[3] << 16)};
        store_quad(weight, at, high);
        const Quad<BF16> under = {make_uint2(rest[0] | rest[1] << 16, rest[2] | rest[3] << 16)};
        store_quad(low, at, under);
      }
    }
  }
}
