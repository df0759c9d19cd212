// Random factors of a router's input, bit for bit those of the CPU. Host macro: ELEMENT.
#if ELEMENT == FP32
typedef float Value;
__device__ __forceinline__ double value_of(float x) { return x; }
__device__ __forceinline__ float rounded(double x) { return (float)x; }
__device__ __forceinline__ float sum_of(float a, float b) { return a + b; }
#else
typedef u16 Value;
__device__ __forceinline__ double value_of(u16 x) { return element_to_float(x); }
__device__ __forceinline__ u16 rounded(double x) { return to_element((float)x); }
__device__ __forceinline__ u16 sum_of(u16 a, u16 b) {
  return to_element(element_to_float(a) + element_to_float(b));
}
#endif

// y (+)= x * m, m uniform in [1 - eps, 1 + eps), or with `dropout` 0 with probability eps and else
// 1 / (1 - eps). A thread four neighbouring elements of a row.
extern "C" __global__ void __launch_bounds__(256)
mask_rows(const Value* x, Value* y, int rows, int dim, Draw draw, double eps, int dropout,
          int accumulate) {
  const int blocks = (dim + 3) / 4;
  const u64 at = blockIdx.x * 256ull + threadIdx.x;
  if (at >= (u64)rows * blocks) return;
  const u32 row = at / blocks, block = at - (u64)row * blocks;
  const uint4 words = philox(draw, dropout ? SITE_DROPOUT : SITE_JITTER, row, block);
  for (int i = 0; i < 4 && 4 * block + i < dim; i++) {
    const double u = uniform_of(word_of(words, i));
    const double factor =
        dropout ? (u < eps ? 0.0 : __ddiv_rn(1.0, __dadd_rn(1.0, -eps)))
                : __dadd_rn(__dadd_rn(1.0, -eps), __dmul_rn(__dmul_rn(2.0, eps), u));
    const u64 place = (u64)row * dim + 4 * block + i;
    const Value masked = rounded(__dmul_rn(value_of(x[place]), factor));
    y[place] = accumulate ? sum_of(y[place], masked) : masked;
  }
}
