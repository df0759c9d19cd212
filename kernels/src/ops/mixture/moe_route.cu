// The router behind its product: choice, softmax or sigmoid, statistics, row order, backward.
//
// Host macros: EXPERTS, TOP_K, SIGMOID, NORM_TOP_K, GROUPS (0: any expert may be chosen),
// GROUPS_KEPT, ELEMENT (of gradients of logits). T tokens, E experts, K choices, R = T K rows.
// Nothing here uses atomics: every position and every sum has one order.
constexpr int WARPS = 8;

// Unsigned order of u32 keys = order of floats; 0 is below every float.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x);
  return max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
}

// Of keys and what they belong to in registers, the largest first; equal ones keep their order.
__device__ __forceinline__ void sort_own(u32 (&key)[PER_LANE], u32 (&at)[PER_LANE]) {
#pragma unroll
  for (int end = PER_LANE - 1; end > 0; end--) {
#pragma unroll
    for (int i = 0; i < end; i++) {
      const bool swap = key[i] < key[i + 1];
      const u32 k = key[i], a = at[i];
      key[i] = swap ? key[i + 1] : k;
      at[i] = swap ? at[i + 1] : a;
      key[i + 1] = swap ? k : key[i + 1];
      at[i + 1] = swap ? a : at[i + 1];
    }
  }
}

#if GROUPS
// Whether group g is among the GROUPS_KEPT whose two best choices have the largest sum, as bit g;
// ties keep the lower group. `choice` [E] is this warp's.
__device__ __forceinline__ u32 kept_groups(const float* choice, int lane) {
  constexpr int SIZE = EXPERTS / GROUPS;
  float first = __int_as_float(0xff800000), second = first;
  for (int i = 0; lane < GROUPS && i < SIZE; i++) {
    const float x = choice[lane * SIZE + i];
    second = fmaxf(second, fminf(first, x));
    first = fmaxf(first, x);
  }
  u32 key = lane < GROUPS ? ordered(SIZE == 1 ? first : first + second) : 0, kept = 0;
  for (int i = 0; i < GROUPS_KEPT; i++) {
    const u32 most = __reduce_max_sync(~0u, key);
    const u32 best = __reduce_min_sync(~0u, key == most ? lane : ~0u);
    if (lane == best) key = 0;
    kept |= 1u << best;
  }
  return kept;
}
#endif

// W f32 [len] = high + low / LOW_SCALE, both elements, which together keep 16 bits of it (22 in
// fp16): high [len], then low. Where high is infinite it tells, and low is 0.
extern "C" __global__ void __launch_bounds__(256)
route_split(const float* weights, u16* halves, int len) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= len) return;
  const float whole = weights[i];
  const u16 high = to_element(whole);
  const float rest = whole - element_to_float(high);
  halves[i] = high;
  halves[len + i] = isfinite(rest) ? to_element(rest * LOW_SCALE) : 0;
}

// Segments of equally many tokens, whose statistics are kept apart: how many, the tokens and the
// blocks of each.
struct Segments { int count, tokens, blocks; };

// A warp takes `tokens_a_warp` neighbouring tokens, a block eight warps' of them. ids ascending.
// Those of the largest scores are chosen, ties to the lowest expert: scores are rounded with the
// CPU's bits, so that the same logits choose the same experts there and here. Any bit pattern of
// logits gives K different experts.
// bias f32 [E], or null: added to the scores for the choice alone.
// partials [blocks][E + 1]: sums of p over the block's tokens, then of lse^2.
// histogram [E][blocks]: slots of the block by expert; pos [T, K]: rank of a slot among the
// block's of its expert. Blocks come in runs of `cut.blocks`, a run a segment of tokens.
extern "C" __global__ void __launch_bounds__(256)
route_choose(const float* logits, const float* bias, Segments cut, int tokens_a_warp, float scale,
             int* ids, float* weights, float* lse, float* partials, int* histogram, int* pos) {
  __shared__ float sums[WARPS][EXPERTS + 1];
  __shared__ int counts[WARPS][EXPERTS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int segment = blockIdx.x / cut.blocks, within = blockIdx.x - segment * cut.blocks;
  const int first = segment * cut.tokens + (within * WARPS + warp) * tokens_a_warp;
  const int end = min(first + tokens_a_warp, (segment + 1) * cut.tokens);
  float p_sum[PER_LANE] = {}, square_sum = 0.f;
  for (int e = lane; e < EXPERTS; e += 32) counts[warp][e] = 0;
  __syncwarp();
  for (int t = first; t < end; t++) {
    float x[PER_LANE], top = __int_as_float(0xff800000);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int e = lane + 32 * i;
      x[i] = e < EXPERTS ? logits[(u64)t * EXPERTS + e] : __int_as_float(0xff800000);
      top = fmaxf(top, x[i]);
    }
    top = warp_max(top);
    float p[PER_LANE], scores = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) p[i] = exp_as_cpu(__fsub_rn(x[i], top));
    const float total = row_sum_as_cpu(p, lane), log_sum = top + logf(total);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      p[i] = SIGMOID ? sigmoid_as_cpu(x[i]) : __fdiv_rn(p[i], total);
      if (lane + 32 * i >= EXPERTS) p[i] = 0.f;
      scores += p[i];
    }
    const float inverse = SIGMOID ? 1.f / warp_sum(scores) : 1.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) p_sum[i] += p[i] * inverse;
    square_sum += log_sum * log_sum;
    if (lane == 0) lse[t] = log_sum;
    u32 key[PER_LANE], at[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int e = lane + 32 * i;
      float choice = p[i];
      if (bias && e < EXPERTS) choice = __fadd_rn(choice, bias[e]);
      key[i] = e < EXPERTS ? ordered(choice) : 0;
      at[i] = e;
      if (GROUPS && e < EXPERTS) sums[warp][e] = choice;
    }
#if GROUPS
    __syncwarp();
    const u32 kept = kept_groups(sums[warp], lane);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (lane + 32 * i < EXPERTS && !(kept >> ((lane + 32 * i) / (EXPERTS / GROUPS)) & 1))
        key[i] = 0;
    __syncwarp();
#endif
    sort_own(key, at);
    u32 mine = 0;
    for (int k = 0; k < TOP_K; k++) {
      const u32 most = __reduce_max_sync(~0u, key[0]);
      const u32 id = __reduce_min_sync(~0u, key[0] == most ? at[0] : ~0u);
      if (lane == k) mine = id;
      if (key[0] == most && at[0] == id) {
#pragma unroll
        for (int i = 0; i + 1 < PER_LANE; i++) { key[i] = key[i + 1]; at[i] = at[i + 1]; }
        key[PER_LANE - 1] = 0;
      }
    }
    int rank = 0;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) rank += __shfl_sync(~0u, mine, k) < mine;
    float weight = 0.f;
    if (lane < TOP_K) {
      const float own = logits[(u64)t * EXPERTS + mine];
      weight = SIGMOID ? sigmoid_as_cpu(own) : __fdiv_rn(exp_as_cpu(__fsub_rn(own, top)), total);
    }
    const float chosen = warp_sum(weight) + (SIGMOID ? 1e-20f : 0.f);
    if (lane < TOP_K) {
      const u64 slot = (u64)t * TOP_K + rank;
      ids[slot] = mine;
      weights[slot] = scale * (NORM_TOP_K ? weight / chosen : weight);
      pos[slot] = counts[warp][mine]++;  // the lanes' experts differ
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
    if (lane + 32 * i < EXPERTS) sums[warp][lane + 32 * i] = p_sum[i];
  if (lane == 0) sums[warp][EXPERTS] = square_sum;
  __syncthreads();
  for (int e = threadIdx.x; e <= EXPERTS; e += blockDim.x) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sums[w][e];
    partials[(u64)blockIdx.x * (EXPERTS + 1) + e] = sum;
    if (e == EXPERTS) break;
    int before = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const int own = counts[w][e];
      counts[w][e] = before;
      before += own;
    }
    histogram[(u64)e * gridDim.x + blockIdx.x] = before;
  }
  __syncthreads();
  for (int slot = first * TOP_K + lane; slot < end * TOP_K; slot += 32)
    pos[slot] += counts[warp][ids[slot]];
}

// ---- row order: stable by expert, then slot. choose -> scan -> place
// One block an expert, a thread a block of route_choose: exclusive scan of the expert's counts in
// place, its total, and by segment its counts and prob_sums f64 [segments, E]. The block behind
// them: losses[1], the mean of lse^2.
constexpr int SCAN_WARPS = 17;
extern "C" __global__ void __launch_bounds__(32 * SCAN_WARPS)
route_scan(int* histogram, const float* partials, Segments cut, int* counts, int* segment_counts,
           double* prob_sums, double* losses) {
  __shared__ int warp_counts[SCAN_WARPS], own_counts[32 * SCAN_WARPS];
  __shared__ double warp_shares[SCAN_WARPS], own_shares[32 * SCAN_WARPS];
  const int blocks = cut.count * cut.blocks;
  const int e = blockIdx.x, at = threadIdx.x, lane = at & 31, warp = at >> 5;
  int* h = histogram + (u64)e * blocks + at;
  const int own = e < EXPERTS && at < blocks ? *h : 0;
  const double part = at < blocks ? partials[(u64)at * (EXPERTS + 1) + e] : 0.f;
  int sum = own;
  for (int step = 1; step < 32; step <<= 1) {
    const int left = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += left;
  }
  if (lane == 31) warp_counts[warp] = sum;
  const double share = warp_sum_f64(part);
  if (lane == 0) warp_shares[warp] = share;
  __syncthreads();
  for (int w = 0; w < warp; w++) sum += warp_counts[w];
  if (e < EXPERTS && at < blocks) *h = sum - own;
  if (at == 32 * SCAN_WARPS - 1 && e < EXPERTS) {
    counts[e] = sum;
    if (cut.count == 1) segment_counts[e] = sum;
  }
  if (cut.count > 1 && e < EXPERTS) {
    own_counts[at] = own;
    own_shares[at] = part;
    __syncthreads();
    for (int s = warp; s < cut.count; s += SCAN_WARPS) {
      int count = 0;
      double sums = 0.0;
      for (int i = lane; i < cut.blocks; i += 32) {
        count += own_counts[s * cut.blocks + i];
        sums += own_shares[s * cut.blocks + i];
      }
      count = __reduce_add_sync(~0u, count);
      sums = warp_sum_f64(sums);
      if (lane == 0) {
        segment_counts[s * EXPERTS + e] = count;
        prob_sums[s * EXPERTS + e] = sums;
      }
    }
    return;
  }
  if (at > 0) return;
  double total = 0.0;
  for (int w = 0; w < SCAN_WARPS; w++) total += warp_shares[w];
  if (e < EXPERTS) prob_sums[e] = total;
  else losses[1] = total / (cut.count * cut.tokens);
}

// offsets [E + 1], order [E]: experts, heaviest first, ties to the lower one; losses[0]: the mean
// over segments of E * sum_e load[e] * mean_prob[e].
__device__ __forceinline__ void write_tables(const int (&starts)[EXPERTS + 1],
                                             const int* segment_counts, const double* prob_sums,
                                             Segments cut, int* offsets, int* order,
                                             double* losses) {
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
  if (threadIdx.x >= 32) return;
  double balance = 0.0;
  for (int i = threadIdx.x; i < cut.count * EXPERTS; i += 32)
    balance += (double)segment_counts[i] / cut.tokens * (prob_sums[i] / cut.tokens);
  balance = EXPERTS * warp_sum_f64(balance) / cut.count;
  if (threadIdx.x == 0) losses[0] = balance;
}

// rows [R]: token of each row; pos [T, K]: in, the slot's rank in its block, out, its row;
// row_weights [R]. Blocks as in route_choose; the one behind them writes the tables.
extern "C" __global__ void __launch_bounds__(256)
route_place(const int* ids, const float* weights, Segments cut, int slots_a_block,
            const int* histogram, const int* counts, const int* segment_counts,
            const double* prob_sums, int* offsets, int* order, int* rows, int* pos,
            float* row_weights, double* losses) {
  __shared__ int starts[EXPERTS + 1], base[EXPERTS];
  const int lane = threadIdx.x & 31, blocks = gridDim.x - 1;
  for (int e = threadIdx.x; blockIdx.x < blocks && e < EXPERTS; e += blockDim.x)
    base[e] = histogram[(u64)e * blocks + blockIdx.x];
  if (threadIdx.x < 32) {
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
    write_tables(starts, segment_counts, prob_sums, cut, offsets, order, losses);
    return;
  }
  const int segment = blockIdx.x / cut.blocks, within = blockIdx.x - segment * cut.blocks;
  const int first = segment * cut.tokens * TOP_K + within * slots_a_block;
  const int end = min(first + slots_a_block, (segment + 1) * cut.tokens * TOP_K);
#pragma unroll 4
  for (int slot = first + threadIdx.x; slot < end; slot += 256) {
    const int id = ids[slot], row = starts[id] + base[id] + pos[slot];
    rows[row] = slot / TOP_K;
    pos[slot] = row;
    row_weights[row] = weights[slot];
  }
}

#if ELEMENT == FP32
typedef float Gradient;
__device__ __forceinline__ float as_gradient(float x) { return x; }
#else
typedef u16 Gradient;
__device__ __forceinline__ u16 as_gradient(float x) { return to_element(x); }
#endif
// One warp a token: ds partials [R][parts] -> dlogits [T][pitch], columns past E zero.
// aux: E * aux_coef / (segments * tokens of one ^ 2) times the segment's counts[e] is d(auxiliary
// loss) / d p; z = 2 z_coef / T. Both are multiplied by loss_scale [1], unless that is null.
extern "C" __global__ void __launch_bounds__(256)
route_backward(const float* logits, const float* lse, const int* ids, const int* pos,
               const float* partial_ds, int parts, const int* segment_counts, int segment_tokens,
               int tokens, float scale, float aux, float z, const float* loss_scale,
               Gradient* dlogits, int pitch) {
  const int lane = threadIdx.x & 31, t = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (t >= tokens) return;
  if (loss_scale) {
    aux *= *loss_scale;
    z *= *loss_scale;
  }
  const float log_sum = lse[t];
  const int* counts = segment_counts + t / segment_tokens * EXPERTS;
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
    if (e < pitch) dlogits[(u64)t * pitch + e] = as_gradient(e < EXPERTS ? value : 0.f);
  }
}
