// The loss of next-token prediction and the gradient of its logits, a block a token, in place.
//
// Host macros: ELEMENT, VOCAB, THREADS, HELD (rounds of THREADS chunks of 16 bytes that stay in
// shared memory between the two passes over a row; the rest is read again). Rows are whole chunks,
// what is behind VOCAB in the last one is neither read into a sum nor kept.
constexpr int CHUNKS = (VOCAB + CHUNK - 1) / CHUNK;
constexpr int ROUNDS = (CHUNKS + THREADS - 1) / THREADS;
constexpr int WARPS = THREADS / 32;
constexpr u32 IGNORE = 0xffffffffu;
constexpr float LEAST = -1e38f;  // below every logit; differences to it are numbers

// e^(x - max). In 16 bits by the special function unit, 2^-22 relative. The difference comes first:
// one multiply-add of x and of the rounded max * log2(e) would be wrong by what rounding took.
__device__ __forceinline__ float power(float x, float max) {
#if ELEMENT == FP32
  return expf(x - max);
#else
  constexpr float LOG2_E = 1.4426950408889634f;
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"((x - max) * LOG2_E));
  return y;
#endif
}

// A maximum and the sum of e^(x - maximum).
struct Softmax {
  float max, sum;
  __device__ __forceinline__ void add(float other_max, float other_sum) {
    const float most = fmaxf(max, other_max);
    sum = sum * power(max, most) + other_sum * power(other_max, most);
    max = most;
  }
  __device__ __forceinline__ void add_chunk(const uint4& chunk, int at) {
    float v[CHUNK];
    unpack_chunk(chunk, v);
    if (VOCAB % CHUNK && at == CHUNKS - 1) {
#pragma unroll
      for (int i = VOCAB % CHUNK; i < CHUNK; i++) v[i] = __int_as_float(0xff800000);
    }
    float most = max, total = 0.f;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) most = fmaxf(most, v[i]);
#pragma unroll
    for (int i = 0; i < CHUNK; i++) total += power(v[i], most);
    sum = sum * power(max, most) + total;
    max = most;
  }
};

__device__ __forceinline__ void start_copy(const uint4* to, const uint4* from) {
  const u32 address = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}

// Rounds I .. HELD of this thread, each as soon as its own copy has landed.
template <int I> __device__ __forceinline__ void add_held(Softmax& own, const uint4* held) {
  if constexpr (I < HELD) {
    asm volatile("cp.async.wait_group %0;" ::"n"(HELD - 1 - I) : "memory");
    const int at = I * THREADS + threadIdx.x;
    if (at < CHUNKS) own.add_chunk(held[at], at);
    add_held<I + 1>(own, held);
  }
}

// The block's softmax, the same bits in every thread.
__device__ __forceinline__ Softmax block_softmax(Softmax own) {
  __shared__ float maxima[WARPS], sums[WARPS];
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    const float max = __shfl_xor_sync(~0u, own.max, step);
    own.add(max, __shfl_xor_sync(~0u, own.sum, step));
  }
  if ((threadIdx.x & 31) == 0) {
    maxima[threadIdx.x >> 5] = own.max;
    sums[threadIdx.x >> 5] = own.sum;
  }
  __syncthreads();
  Softmax all = {maxima[0], sums[0]};
  for (int w = 1; w < WARPS; w++) all.add(maxima[w], sums[w]);
  return all;
}

// losses f64 [tokens]: ln sum_v e^logits[v] - logits[target], 0 where ignored; no number where the
// target is no word. With `gradient` the logits become scale * loss_scale * (softmax - target).
extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 512 ? 1 : 2)
head_softmax(uint4* logits, const u32* targets, float scale, const float* loss_scale, int gradient,
             double* losses) {
  extern __shared__ uint4 held[];
  uint4* row = logits + (u64)blockIdx.x * CHUNKS;
  const u32 target = targets[blockIdx.x];
  if (target == IGNORE) {
    for (int at = threadIdx.x; gradient && at < CHUNKS; at += THREADS)
      row[at] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) losses[blockIdx.x] = 0.0;
    return;
  }
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int at = i * THREADS + threadIdx.x;
    if (at < CHUNKS) start_copy(held + at, row + at);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  float own_logit = __int_as_float(0x7fc00000);
  if (threadIdx.x == 0 && target < VOCAB) {
    float v[CHUNK];
    unpack_chunk(row[target / CHUNK], v);
#pragma unroll
    for (int i = 0; i < CHUNK; i++) own_logit = target % CHUNK == i ? v[i] : own_logit;
  }
  Softmax own = {LEAST, 0.f};
  add_held<0>(own, held);
  for (int at = HELD * THREADS + threadIdx.x; at < CHUNKS; at += THREADS)
    own.add_chunk(row[at], at);
  const Softmax all = block_softmax(own);
  if (threadIdx.x == 0)
    losses[blockIdx.x] = log((double)all.sum) + ((double)all.max - (double)own_logit);
  if (!gradient) return;
  const float whole = loss_scale ? scale * *loss_scale : scale, factor = whole / all.sum;
#pragma unroll 2
  for (int i = 0; i < ROUNDS; i++) {
    const int at = i * THREADS + threadIdx.x;
    if (at >= CHUNKS) break;
    float v[CHUNK];
    unpack_chunk(i < HELD ? held[at] : row[at], v);
#pragma unroll
    for (int j = 0; j < CHUNK; j++) v[j] = power(v[j], all.max) * factor;
    if (at == target / CHUNK) {
#pragma unroll
      for (int j = 0; j < CHUNK; j++) v[j] -= target % CHUNK == j ? whole : 0.f;
    }
    row[at] = pack_chunk(v);
  }
}

// numbers[0] += the losses' sum, numbers[1] += valid targets: one block, a fixed order.
extern "C" __global__ void __launch_bounds__(1024)
head_sum(const double* losses, const u32* targets, int tokens, double* numbers) {
  __shared__ double sums[32];
  __shared__ int counts[32];
  double sum = 0.0;
  int valid = 0;
  for (int t = threadIdx.x; t < tokens; t += 1024) {
    sum += losses[t];
    valid += targets[t] != IGNORE;
  }
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  valid = __reduce_add_sync(~0u, valid);
  if ((threadIdx.x & 31) == 0) {
    sums[threadIdx.x >> 5] = sum;
    counts[threadIdx.x >> 5] = valid;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < 32; w++) {
    sum += sums[w];
    valid += counts[w];
  }
  numbers[0] += sum;
  numbers[1] += valid;
}
