// What all attention kernels share: their arguments and powers of two,
// from the special function unit but in fp32.
// The host puts this behind common.cu.

// `AttentionArgs` on the host, field by field. Zero addresses are operands that a kernel has not.
struct Args {
  const void *q, *k, *v;  // elements [B, S, N or KV, D]
  void* o;                // elements [B, S, N, D]
  const void* d_o;
  void *dq, *dk, *dv;
  float* lse;             // [B, S, N], natural
  const int* starts;      // [B, S] or none; they do not fall within a sequence
  float *lse2, *delta;    // [B, N, padded]: lse in powers of two, infinite past S; <o, do>, there 0
  float* sums;            // dq in fp32, in the order of registers
  int* turns;             // [B, N, blocks of queries]: tiles of keys that have added to sums
  int* counter;           // of tiles, and of blocks that ended; zero between launches
  int* past;              // [B, S]: one past the last query that sees a key, where MASKED
  int batch, seq, padded, heads, kv_heads;
  int group;              // heads whose tiles run together
  int window;             // keys a query sees at most
  float scale_log2, scale;
};

#if ELEMENT == FP32
__device__ __forceinline__ float power_of_two(float x) { return exp2f(x); }
__device__ __forceinline__ float log_of_two(float x) { return log2f(x); }
#else
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log_of_two(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif
#define INFINITE __int_as_float(0x7f800000)
constexpr float LN_2 = 0.69314718055994531f, LOG2_E = 1.4426950408889634f;
