// Random numbers that are functions, the bits of philox.rs: words, uniforms and normal numbers.
//
// In f64 with every rounding written out, lest the compiler fuse what the CPU does not.
struct Draw {
  u64 seed;
  u32 place, step, first_token;  // the first without its site
  u32 live;                      // 0: evaluation, nothing is random
};
#define SITE_JITTER 1
#define SITE_DROPOUT 2
#define SITE_LOGITS 3
#define SITE_SECOND 4

// Philox4x32-10 (Salmon et al. 2011, Random123).
__device__ __forceinline__ uint4 philox(const Draw& draw, u32 site, u32 token, u32 block) {
  uint4 c = make_uint4(draw.place | site, draw.step, draw.first_token + token, block);
  u32 k0 = (u32)draw.seed, k1 = (u32)(draw.seed >> 32);
  for (int i = 0; i < 10; i++) {
    const u32 low_0 = 0xD2511F53u * c.x, high_0 = __umulhi(0xD2511F53u, c.x);
    const u32 low_1 = 0xCD9E8D57u * c.z, high_1 = __umulhi(0xCD9E8D57u, c.z);
    c = make_uint4(high_1 ^ c.y ^ k0, low_1, high_0 ^ c.w ^ k1, low_0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}
__device__ __forceinline__ u32 word_of(const uint4& v, u32 i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
// Uniform in [0, 1), a multiple of 2^-24.
__device__ __forceinline__ double uniform_of(u32 word) {
  return __dmul_rn((double)(word >> 8), 1.0 / 16777216.0);
}

// ln of a positive normal number, by the steps of cpu/float.rs.
__device__ __forceinline__ double exact_ln(double x) {
  const u64 bits = __double_as_longlong(x);
  long long exponent = (long long)(bits >> 52) - 1023;
  double m = __longlong_as_double((bits & ((1ull << 52) - 1)) | (1023ull << 52));
  if (m > 1.4142135623730951) {
    m = __dmul_rn(m, 0.5);
    exponent += 1;
  }
  const double s = __ddiv_rn(__dadd_rn(m, -1.0), __dadd_rn(m, 1.0)), s2 = __dmul_rn(s, s);
  double sum = 0.0;
#pragma unroll
  for (int i = 11; i >= 0; i--) sum = __fma_rn(s2, sum, __ddiv_rn(2.0, 2.0 * i + 3.0));
  const double e = (double)exponent;
  const double small = __fma_rn(__dmul_rn(s, s2), sum, __dmul_rn(e, 2.3190468138462996e-17));
  return __fma_rn(e, 0.6931471805599453, __dadd_rn(__dmul_rn(2.0, s), small));
}

// (sin x, cos x) for |x| < 2^26, by the steps of cpu/float.rs.
__device__ __forceinline__ double2 exact_sin_cos(double x) {
  constexpr double ROUND = 6755399441055744.0;
  const double rounded = __fma_rn(x, 0.6366197723675814, ROUND), n = __dadd_rn(rounded, -ROUND);
  double r = __fma_rn(-n, 1.5707963267948966, x);
  r = __fma_rn(-n, 6.123233995736766e-17, r);
  r = __fma_rn(-n, -1.4973849048591698e-33, r);
  const double r2 = __dmul_rn(r, r);
  double sin = 0.0, cos = 0.0;
  for (double i = 9.0; i >= 1.0; i -= 1.0) {
    const double two = __dmul_rn(2.0, i);
    sin = __ddiv_rn(__dmul_rn(r2, __dadd_rn(1.0, -sin)), __dmul_rn(two, __dadd_rn(two, 1.0)));
    cos = __ddiv_rn(__dmul_rn(r2, __dadd_rn(1.0, -cos)), __dmul_rn(__dadd_rn(two, -1.0), two));
  }
  sin = __fma_rn(-r, sin, r);
  cos = __dadd_rn(1.0, -cos);
  switch (__double_as_longlong(rounded) & 3) {
    case 0: return make_double2(sin, cos);
    case 1: return make_double2(cos, -sin);
    case 2: return make_double2(-sin, -cos);
    default: return make_double2(-cos, sin);
  }
}

// Standard normal number `element` of the token, by Box and Muller.
__device__ __forceinline__ double normal_of(const Draw& draw, u32 site, u32 token, u32 element) {
  const uint4 words = philox(draw, site, token, element / 2);
  constexpr double UNIT = 1.0 / 9007199254740992.0;
  const double a = (double)(((u64)words.y << 32 | words.x) >> 11);
  const double b = (double)(((u64)words.w << 32 | words.z) >> 11);
  const double radius =
      __dsqrt_rn(__dmul_rn(-2.0, exact_ln(__dmul_rn(__dadd_rn(a, 1.0), UNIT))));
  const double2 turned = exact_sin_cos(__dmul_rn(6.283185307179586, __dmul_rn(b, UNIT)));
  return __dmul_rn(radius, element % 2 ? turned.x : turned.y);
}
