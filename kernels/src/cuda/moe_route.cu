// The router behind its product: choice, softmax or sigmoid, statistics, row order, backward.
//
// Host macros: EXPERTS, TOP_K, SIGMOID, NORM_TOP_K. T tokens, E experts, K choices, R = T K rows.
// Nothing here uses atomics: every position and every sum has one order.
constexpr int PER_LANE = (EXPERTS + 31) / 32;  // experts of a lane: lane, lane + 32, ...

// Unsigned order of u32 keys = order of floats; 0 is below every float.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x);
  return max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
}

// One warp a token, blocks stride over tokens. ids ascending, ties to the lowest expert, as on the
// CPU; any bit pattern of logits gives K different experts.
// partials [blocks][E + 1]: sums of p over the block's tokens, then of lse^2.
extern "C" __global__ void __launch_bounds__(256)
route_choose(const float* logits, int tokens, float scale, int* ids, float* weights, float* lse,
             float* partials) {
  __shared__ float sums[8][EXPERTS + 1];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float p_sum[PER_LANE] = {}, square_sum = 0.f;
  for (int t = blockIdx.x * 8 + warp; t < tokens; t += gridDim.x * 8) {
    float x[PER_LANE], top = __int_as_float(0xff800000);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int e = lane + 32 * i;
      x[i] = e < EXPERTS ? logits[(u64)t * EXPERTS + e] : __int_as_float(0xff800000);
      top = fmaxf(top, x[i]);
    }
    top = warp_max(top);
    float p[PER_LANE], total = 0.f, scores = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const float power = expf(x[i] - top);
      total += lane + 32 * i < EXPERTS ? power : 0.f;
      p[i] = SIGMOID ? (lane + 32 * i < EXPERTS ? 1.f / (1.f + expf(-x[i])) : 0.f) : power;
      scores += p[i];
    }
    total = warp_sum(total);
    const float log_sum = top + logf(total);
    const float inverse = 1.f / (SIGMOID ? warp_sum(scores) : total);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      if (!SIGMOID) p[i] *= inverse;
      p_sum[i] += SIGMOID ? p[i] * inverse : p[i];
    }
    square_sum += log_sum * log_sum;
    if (lane == 0) lse[t] = log_sum;
    u32 key[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) key[i] = lane + 32 * i < EXPERTS ? ordered(x[i]) : 0;
    u32 mine = ~0u;
    float weight = 0.f;
    for (int k = 0; k < TOP_K; k++) {
      u32 best = 0, at = ~0u;
      float score = 0.f;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (key[i] > best) { best = key[i]; at = lane + 32 * i; score = p[i]; }
      const u32 most = __reduce_max_sync(~0u, best);
      const u32 id = __reduce_min_sync(~0u, best == most && best > 0 ? at : ~0u);
      score = __shfl_sync(~0u, score, id & 31);
      if (lane == k) { mine = id; weight = score; }
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) if (id == lane + 32 * i) key[i] = 0;
    }
    int rank = 0;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) rank += __shfl_sync(~0u, mine, k) < mine;
    const float chosen = warp_sum(lane < TOP_K ? weight : 0.f) + (SIGMOID ? 1e-20f : 0.f);
    if (lane < TOP_K) {
      ids[(u64)t * TOP_K + rank] = mine;
      weights[(u64)t * TOP_K + rank] = scale * (NORM_TOP_K ? weight / chosen : weight);
    }
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
    if (lane + 32 * i < EXPERTS) sums[warp][lane + 32 * i] = p_sum[i];
  if (lane == 0) sums[warp][EXPERTS] = square_sum;
  __syncthreads();
  for (int e = threadIdx.x; e <= EXPERTS; e += blockDim.x) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < 8; w++) sum += sums[w][e];
    partials[(u64)blockIdx.x * (EXPERTS + 1) + e] = sum;
  }
}

// One block. prob_sums f64 [E]; losses f64 [2]: E * sum_e load[e] * mean_prob[e], mean of lse^2.
extern "C" __global__ void __launch_bounds__(512)
route_statistics(const float* partials, int blocks, const int* counts, int tokens,
                 double* prob_sums, double* losses) {
  __shared__ double balance[EXPERTS + 1];
  const int lane = threadIdx.x & 31;
  for (int e = threadIdx.x >> 5; e <= EXPERTS; e += blockDim.x >> 5) {
    double sum = 0.0;
    for (int b = lane; b < blocks; b += 32) sum += partials[(u64)b * (EXPERTS + 1) + e];
    for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane > 0) continue;
    if (e < EXPERTS) prob_sums[e] = sum;
    balance[e] = e < EXPERTS ? (double)counts[e] / tokens * (sum / tokens) : sum / tokens;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double sum = 0.0;
    for (int e = 0; e < EXPERTS; e++) sum += balance[e];
    losses[0] = EXPERTS * sum;
    losses[1] = balance[EXPERTS];
  }
}

// ---- row order: stable by expert, then slot. histogram -> scan -> place
constexpr int WARPS = 8, SLOTS_A_WARP = 128, SLOTS_A_BLOCK = WARPS * SLOTS_A_WARP;
constexpr int TURNS = SLOTS_A_WARP / 32;

// Counts this warp's slots by expert into `counts` and, if asked, each slot's rank among them.
__device__ __forceinline__ void count_slots(const int* ids, int slots, int first, int* counts,
                                            int (&id)[TURNS], int (&rank)[TURNS]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const int slot = first + i * 32 + lane;
    id[i] = slot < slots ? ids[slot] : EXPERTS;
  }
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const u32 same = __match_any_sync(~0u, id[i]);
    const int before = id[i] < EXPERTS ? counts[id[i]] : 0;
    rank[i] = before + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (id[i] < EXPERTS && (same >> lane) == 1) counts[id[i]] = before + __popc(same);
    __syncwarp();
  }
}

// histogram [E][blocks]
extern "C" __global__ void __launch_bounds__(256)
route_histogram(const int* ids, int slots, int* histogram) {
  __shared__ int counts[WARPS][EXPERTS];
  const int warp = threadIdx.x >> 5;
  for (int i = threadIdx.x; i < WARPS * EXPERTS; i += blockDim.x) (&counts[0][0])[i] = 0;
  __syncthreads();
  int id[TURNS], rank[TURNS];
  count_slots(ids, slots, blockIdx.x * SLOTS_A_BLOCK + warp * SLOTS_A_WARP, counts[warp], id, rank);
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERTS; e += blockDim.x) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += counts[w][e];
    histogram[(u64)e * gridDim.x + blockIdx.x] = sum;
  }
}

// One block an expert: exclusive scan over the blocks' counts in place, and the expert's total.
extern "C" __global__ void __launch_bounds__(256)
route_scan(int* histogram, int blocks, int* counts) {
  __shared__ int warp_sums[8];
  int* h = histogram + (u64)blockIdx.x * blocks;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int carried = 0;
  for (int first = 0; first < blocks; first += 256) {
    const int at = first + threadIdx.x, own = at < blocks ? h[at] : 0;
    int sum = own;
    for (int step = 1; step < 32; step <<= 1) {
      const int left = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += left;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int before = carried, all = 0;
    for (int w = 0; w < 8; w++) {
      if (w < warp) before += warp_sums[w];
      all += warp_sums[w];
    }
    if (at < blocks) h[at] = before + sum - own;
    carried += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) counts[blockIdx.x] = carried;
}

// offsets [E + 1], order [E] (heaviest first, ties to the lower), rows [R]: token of each row,
// pos [T, K]: row of each slot, row_weights [R]. The block behind
// the last one writes the two tables.
extern "C" __global__ void __launch_bounds__(256)
route_place(const int* ids, const float* weights, int slots, const int* histogram,
            const int* counts, int* offsets, int* order, int* rows, int* pos,
            float* row_weights) {
  __shared__ int starts[EXPERTS + 1], at[WARPS][EXPERTS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, blocks = gridDim.x - 1;
  for (int i = threadIdx.x; i < WARPS * EXPERTS; i += blockDim.x) (&at[0][0])[i] = 0;
  if (warp == 0) {
    int carried = 0;
    for (int first = 0; first < EXPERTS; first += 32) {
      const int e = first + lane, own = e < EXPERTS ? counts[e] : 0;
      int sum = own;
      for (int step = 1; step < 32; step <<= 1) {
        const int left = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += left;
      }
      if (e < EXPERTS) starts[e] = carried + sum - own;
      carried += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) starts[EXPERTS] = carried;
  }
  __syncthreads();
  if (blockIdx.x == blocks) {
    for (int e = threadIdx.x; e < EXPERTS; e += blockDim.x) {
      const int own = starts[e + 1] - starts[e];
      int rank = 0;
      for (int o = 0; o < EXPERTS; o++) {
        const int count = starts[o + 1] - starts[o];
        rank += count > own || (count == own && o < e);
      }
      order[rank] = e;
      offsets[e] = starts[e];
    }
    if (threadIdx.x == 0) offsets[EXPERTS] = starts[EXPERTS];
    return;
  }
  const int first = blockIdx.x * SLOTS_A_BLOCK + warp * SLOTS_A_WARP;
  int id[TURNS], rank[TURNS];
  count_slots(ids, slots, first, at[warp], id, rank);
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERTS; e += blockDim.x) {
    int next = starts[e] + histogram[(u64)e * blocks + blockIdx.x];
    for (int w = 0; w < WARPS; w++) {
      const int count = at[w][e];
      at[w][e] = next;
      next += count;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const int slot = first + i * 32 + lane;
    if (slot < slots) {
      const int row = at[warp][id[i]] + rank[i];
      rows[row] = slot / TOP_K;
      pos[slot] = row;
      row_weights[row] = weights[slot];
    }
  }
}

// One warp a token: ds partials [R][parts] -> dlogits bf16 [T][pitch], columns past E zero.
// aux: E * aux_coef / T^2 times counts[e] is d(auxiliary loss) / d p; z = 2 z_coef / T.
extern "C" __global__ void __launch_bounds__(256)
route_backward(const float* logits, const float* lse, const int* ids, const int* pos,
               const float* partial_ds, int parts, const int* counts, int tokens, float scale,
               float aux, float z, u16* dlogits, int pitch) {
  const int lane = threadIdx.x & 31, t = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (t >= tokens) return;
  const float log_sum = lse[t];
  float x[PER_LANE], p[PER_LANE], d[PER_LANE], total = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int e = lane + 32 * i;
    const bool inside = e < EXPERTS;
    x[i] = inside ? logits[(u64)t * EXPERTS + e] : 0.f;
    p[i] = !inside ? 0.f : SIGMOID ? 1.f / (1.f + expf(-x[i])) : expf(x[i] - log_sum);
    d[i] = inside ? aux * counts[e] : 0.f;
    total += p[i];
  }
  if (SIGMOID) {  // the loss sees p / total
    total = warp_sum(total);
    float dot = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) dot += d[i] * p[i];
    dot = warp_sum(dot) / total;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) d[i] = (d[i] - dot) / total;
  }
  int id = -1;
  float dw = 0.f;
  if (lane < TOP_K) {
    id = ids[(u64)t * TOP_K + lane];
    const float* from = partial_ds + (u64)pos[(u64)t * TOP_K + lane] * parts;
    for (int i = 0; i < parts; i++) dw += from[i];
  }
  float chosen_p[TOP_K], dweight[TOP_K], sum = SIGMOID ? 1e-20f : 0.f, dot = 0.f;
#pragma unroll
  for (int k = 0; k < TOP_K; k++) {
    const int e = __shfl_sync(~0u, id, k);
    dweight[k] = __shfl_sync(~0u, dw, k);
    float own = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) if (e == lane + 32 * i) own = p[i];
    chosen_p[k] = __shfl_sync(~0u, own, e & 31);
    sum += chosen_p[k];
    dot += chosen_p[k] * dweight[k];
  }
  const float mean = NORM_TOP_K ? dot / sum : 0.f, factor = NORM_TOP_K ? scale / sum : scale;
#pragma unroll
  for (int k = 0; k < TOP_K; k++) {
    const int e = __shfl_sync(~0u, id, k);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (e == lane + 32 * i) d[i] += factor * (dweight[k] - mean);
  }
  float inner = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) inner += d[i] * p[i];
  inner = warp_sum(inner);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int e = lane + 32 * i;
    const float value = SIGMOID
                            ? d[i] * p[i] * (1.f - p[i]) + z * log_sum * expf(x[i] - log_sum)
                            : p[i] * (d[i] - inner + z * log_sum);
    if (e < pitch) dlogits[(u64)t * pitch + e] = to_bf16(e < EXPERTS ? value : 0.f);
  }
}
