// Philox4x32-10 and the elementary functions of src/philox.rs and src/cpu/float.rs, operation by
// operation: the same bits as the CPU's. Products and sums are written so that none is fused.
__device__ __forceinline__ uint4 philox(u64 key, uint4 c) {
  u32 low = (u32)key, high = (u32)(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 a = (u64)0xD2511F53u * c.x, b = (u64)0xCD9E8D57u * c.z;
    c = make_uint4((u32)(b >> 32) ^ c.y ^ low, (u32)b, (u32)(a >> 32) ^ c.w ^ high, (u32)a);
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  return c;
}

__device__ double exact_ln(double x) {
  if (isnan(x) || x < 0.0) return __longlong_as_double(0x7ff8000000000000ll);
  if (x == 0.0) return -__longlong_as_double(0x7ff0000000000000ll);
  if (isinf(x)) return x;
  int lift = 0;
  if (x < 2.2250738585072014e-308) {
    x = __dmul_rn(x, 18014398509481984.0);
    lift = 54;
  }
  const u64 bits = __double_as_longlong(x);
  int exponent = (int)(bits >> 52) - 1023 - lift;
  double m = __longlong_as_double((bits & ((1ull << 52) - 1)) | (1023ull << 52));
  if (m > 1.4142135623730951) {
    m = __dmul_rn(m, 0.5);
    exponent++;
  }
  const double s = __ddiv_rn(__dsub_rn(m, 1.0), __dadd_rn(m, 1.0));
  const double s2 = __dmul_rn(s, s);
  double sum = 0.0;
#pragma unroll
  for (int i = 11; i >= 0; i--) sum = __fma_rn(s2, sum, 2.0 / (2 * i + 3));
  const double e = exponent;
  const double tail = __fma_rn(__dmul_rn(s, s2), sum, __dmul_rn(e, 2.3190468138462996e-17));
  return __fma_rn(e, 0.69314718055994530942, __dadd_rn(__dmul_rn(2.0, s), tail));
}

// (sin x, cos x)
__device__ double2 exact_sin_cos(double x) {
  const double shift = 6755399441055744.0;
  const double rounded = __fma_rn(x, 0.63661977236758134308, shift);
  const double n = __dsub_rn(rounded, shift);
  double r = __fma_rn(-n, 1.57079632679489661923, x);
  r = __fma_rn(-n, 6.123233995736766e-17, r);
  r = __fma_rn(-n, -1.4973849048591698e-33, r);
  const double r2 = __dmul_rn(r, r);
  double sin = 0.0, cos = 0.0;
  for (double i = 9.0; i >= 1.0; i -= 1.0) {
    sin = __ddiv_rn(__dmul_rn(r2, __dsub_rn(1.0, sin)), __dmul_rn(2.0 * i, 2.0 * i + 1.0));
    cos = __ddiv_rn(__dmul_rn(r2, __dsub_rn(1.0, cos)), __dmul_rn(2.0 * i - 1.0, 2.0 * i));
  }
  sin = __fma_rn(-r, sin, r);
  cos = __dsub_rn(1.0, cos);
  switch (__double_as_longlong(rounded) & 3) {
    case 0: return make_double2(sin, cos);
    case 1: return make_double2(cos, -sin);
    case 2: return make_double2(-sin, -cos);
    default: return make_double2(-cos, sin);
  }
}

// Two standard normal numbers of four random words.
__device__ double2 box_muller(uint4 words) {
  const double unit = 1.0 / 9007199254740992.0;
  const double a = (double)(((u64)words.y << 32 | words.x) >> 11);
  const double b = (double)(((u64)words.w << 32 | words.z) >> 11);
  const double ln = exact_ln(__dmul_rn(__dadd_rn(a, 1.0), unit));
  const double radius = __dsqrt_rn(__dmul_rn(-2.0, ln));
  const double2 turn = exact_sin_cos(__dmul_rn(6.28318530717958647693, __dmul_rn(b, unit)));
  return make_double2(__dmul_rn(radius, turn.y), __dmul_rn(radius, turn.x));
}
