// The routers beyond dropless top-k: noise, choice, capacity, weights, statistics, backward.
//
// Host macros: EXPERTS, TOP_K, CHOICE, SIGMOID, NORM_TOP_K, GROUPS, GROUPS_KEPT, HELD (hysteresis),
// LOAD. Scores are fp32, everything after them f64, as on the CPU. A warp a token where not said
// else; nothing uses atomics but counts of a histogram, so every result has one value.
#define TOP_K_CHOICE 0
#define RANDOM_SECOND 1
#define TOP_P 2
#define EXPERTS_CHOOSE 3
#define HASHED 4
constexpr int WARPS = 4;
constexpr u32 NO_EXPERT = 0xffffffffu;
constexpr double TOP_K_SUM_MIN = 1e-20, PROB_MIN = 1e-300;

__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ u64 ordered_f64(double x) {
  const u64 bits = __double_as_longlong(x);
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

// noisy = logits + noise, rounded once; probs and lse of that. The noise has the deviation `std`,
// or where it is learned softplus(raw).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
gate_scores(const float* logits, const float* raw, int tokens, Draw draw, double std, float* noisy,
            float* probs, float* lse) {
  const int lane = threadIdx.x & 31, t = blockIdx.x * WARPS + (threadIdx.x >> 5);
  if (t >= tokens) return;
  const u64 row = (u64)t * EXPERTS;
  const bool moves = draw.live && (raw || std != 0.0);
  float x[PER_LANE], p[PER_LANE], top = __int_as_float(0xff800000);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int e = lane + 32 * i;
    x[i] = __int_as_float(0xff800000);
    if (e < EXPERTS) {
      x[i] = logits[row + e];
      if (moves) {
        const double deviation = raw ? softplus(raw[row + e]) : std;
        const double noise = __dmul_rn(normal_of(draw, SITE_LOGITS, t, e), deviation);
        x[i] = (float)__dadd_rn((double)x[i], noise);
      }
      noisy[row + e] = x[i];
    }
    top = fmaxf(top, x[i]);
  }
  top = warp_max(top);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) p[i] = exp_as_cpu(__fsub_rn(x[i], top));
  const float total = row_sum_as_cpu(p, lane);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
    if (lane + 32 * i < EXPERTS)
      probs[row + lane + 32 * i] = SIGMOID ? sigmoid_as_cpu(x[i]) : __fdiv_rn(p[i], total);
  if (lane == 0) lse[t] = top + logf(total);
}

// Hashed words: the first K of a shuffle that (seed, layer, word) decides, as ranked [T, K], each
// with the score 1 / K.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
gate_hash(const u32* words, int tokens, Draw draw, float* noisy, float* probs, float* lse,
          u32* ranked) {
  __shared__ u16 tables[WARPS][EXPERTS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = blockIdx.x * WARPS + warp;
  if (t >= tokens) return;
  const u64 row = (u64)t * EXPERTS;
  u16* const table = tables[warp];
  for (int e = lane; e < EXPERTS; e += 32) {
    table[e] = e;
    probs[row + e] = noisy[row + e] = 0.f;
  }
  __syncwarp();
  if (lane > 0) return;
  lse[t] = 0.f;
  for (int slot = 0; slot < TOP_K; slot++) {
    const int left = EXPERTS - slot;
    const uint4 all = words_of(draw, SITE_TABLE, words[t], slot / 4);
    const u32 four[4] = {all.x, all.y, all.z, all.w};
    const int at = slot + min((int)__dmul_rn(uniform_of(four[slot % 4]), left), left - 1);
    const u16 found = table[at];
    table[at] = table[slot];
    table[slot] = found;
    ranked[(u64)t * TOP_K + slot] = found;
    probs[row + found] = (float)(1.0 / TOP_K);
  }
}

// Whether each group is kept, as bits: the GROUPS_KEPT with the largest sum of two choices, ties
// to the lower. `choice` [E] is this warp's. Sums are rounded as the choices are.
__device__ __forceinline__ u32 kept_groups(const double* choice, int lane) {
#if GROUPS
  constexpr int SIZE = EXPERTS / GROUPS;
  double first = __longlong_as_double(0xfff0000000000000ull), second = first;
  for (int i = 0; lane < GROUPS && i < SIZE; i++) {
    const double x = choice[lane * SIZE + i];
    if (x > first) { second = first; first = x; }
    else if (x > second) second = x;
  }
  double sum = SIZE == 1 ? first : first + second;
  if (!HELD) sum = (float)sum;
  u32 kept = 0;
  u64 key = lane < GROUPS ? ordered_f64(sum) : 0;
  for (int i = 0; i < GROUPS_KEPT; i++) {
    u64 most = key;
    for (int step = 16; step > 0; step >>= 1) {
      const u64 other = __shfl_xor_sync(~0u, most, step);
      most = other > most ? other : most;
    }
    const u32 best = __reduce_min_sync(~0u, key == most ? lane : ~0u);
    if (lane == best) key = 0;
    kept |= 1u << best;
  }
  return kept;
#else
  return ~0u;
#endif
}

// ranked [T, K]: a token's choices, the best first; ties go to the lowest id. With hysteresis a
// warp goes through a whole sequence; `before` [K] are the choices of the position before the first
// token, or null.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
gate_choose(const float* probs, const float* bias, const u32* positions, const u32* before,
            int tokens, double hysteresis, double sum_wanted, u32* ranked) {
  __shared__ double choices[WARPS][EXPERTS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  double* choice = choices[warp];
  int t = blockIdx.x * WARPS + warp;
  if (t >= tokens || (HELD && t > 0 && positions[t] != 0)) return;
  for (bool more = true, first = true; more; t++, first = false) {
    __syncwarp();
    for (int e = lane; e < EXPERTS; e += 32) {
      const float p = probs[(u64)t * EXPERTS + e];
      choice[e] = bias ? p + bias[e] : p;
    }
    __syncwarp();
    const u32* held = first ? before : ranked + (u64)(t - 1) * TOP_K;
    if (first && (t > 0 || positions[0] == 0)) held = nullptr;
    if (HELD && held) {
      for (int k = lane; k < TOP_K; k += 32) choice[held[k]] += hysteresis;
      __syncwarp();
    }
    const u32 kept = kept_groups(choice, lane);
    u64 key[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int e = lane + 32 * i;
      key[i] = e < EXPERTS ? ordered_f64(choice[e]) : 0;
#if GROUPS
      if (e < EXPERTS && !(kept >> (e / (EXPERTS / GROUPS)) & 1)) key[i] = 0;
#endif
    }
    double reached = 0.0;
    for (int k = 0; k < TOP_K; k++) {
      u64 best = 0;
      u32 id = NO_EXPERT;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) {
        if (key[i] != 0 && (key[i] > best || id == NO_EXPERT)) {
          best = key[i];
          id = lane + 32 * i;
        }
      }
      for (int step = 16; step > 0; step >>= 1) {
        const u64 key_other = __shfl_xor_sync(~0u, best, step);
        const u32 id_other = __shfl_xor_sync(~0u, id, step);
        if (key_other > best || (key_other == best && id_other < id)) {
          best = key_other;
          id = id_other;
        }
      }
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) if (id == lane + 32 * i) key[i] = 0;
      if (CHOICE == TOP_P) {
        // The best one is always taken.
        if (reached >= sum_wanted && reached > 0.0) id = NO_EXPERT;
        else reached += probs[(u64)t * EXPERTS + id];
      }
      if (lane == 0) ranked[(u64)t * TOP_K + k] = id;
    }
    more = HELD && t + 1 < tokens && positions[t + 1] != 0;
  }
}

// A block an expert: its `rows` best tokens, ties to the first, as taken [E][T].
extern "C" __global__ void __launch_bounds__(1024)
gate_experts(const float* probs, int tokens, int rows, u8* taken) {
  __shared__ int histogram[256], warp_counts[32];
  __shared__ u32 prefix_shared;
  __shared__ int left_shared;
  const int e = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u32 prefix = 0;  // of the key of the last token that is taken
  int left = min(rows, tokens);
  for (int shift = 24; shift >= 0 && left > 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += 1024) histogram[i] = 0;
    __syncthreads();
    for (int t = threadIdx.x; t < tokens; t += 1024) {
      const u32 key = ordered(probs[(u64)t * EXPERTS + e]);
      if (shift == 24 || key >> (shift + 8) == prefix >> (shift + 8))
        atomicAdd(&histogram[key >> shift & 255], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = 255, above = 0;
      while (digit > 0 && above + histogram[digit] < left) above += histogram[digit--];
      prefix_shared = prefix | (u32)digit << shift;
      left_shared = left - above;
    }
    __syncthreads();
    prefix = prefix_shared;
    left = left_shared;
    __syncthreads();
  }
  int before = 0;  // tokens with that very key so far
  for (int first = 0; first < tokens; first += 1024) {
    const int t = first + threadIdx.x;
    const u32 key = t < tokens ? ordered(probs[(u64)t * EXPERTS + e]) : 0;
    const bool equal = t < tokens && key == prefix && rows > 0;
    const u32 votes = __ballot_sync(~0u, equal);
    if (lane == 0) warp_counts[warp] = __popc(votes);
    __syncthreads();
    int place = before + __popc(votes & ((1u << lane) - 1));
    for (int w = 0; w < 32; w++) {
      if (w < warp) place += warp_counts[w];
      before += warp_counts[w];
    }
    const bool best = rows > 0 && (key > prefix || (equal && place < left));
    if (t < tokens) taken[(u64)e * tokens + t] = best;
    __syncthreads();
  }
}

// Expert choice: ranked [T, E] of `taken`, by score, ties to the lowest id; empty slots last.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
gate_rank(const float* probs, const u8* taken, int tokens, u32* ranked) {
  const int lane = threadIdx.x & 31, t = blockIdx.x * WARPS + (threadIdx.x >> 5);
  if (t >= tokens) return;
  int all = 0;
  for (int e = lane; e < EXPERTS; e += 32) all += taken[(u64)e * tokens + t];
  all = __reduce_add_sync(~0u, all);
  for (int e = lane; e < EXPERTS; e += 32) {
    if (e >= all) ranked[(u64)t * TOP_K + e] = NO_EXPERT;
    if (!taken[(u64)e * tokens + t]) continue;
    const u32 own = ordered(probs[(u64)t * EXPERTS + e]);
    int rank = 0;
    for (int other = 0; other < EXPERTS; other++) {
      if (!taken[(u64)other * tokens + t]) continue;
      const u32 key = ordered(probs[(u64)t * EXPERTS + other]);
      rank += key > own || (key == own && other < e);
    }
    ranked[(u64)t * TOP_K + rank] = e;
  }
}

// order [T]: tokens by their largest score, descending, ties to the first. A thread a token.
extern "C" __global__ void __launch_bounds__(256)
gate_order(const float* probs, int tokens, float* best, u32* order, int pass) {
  const int t = blockIdx.x * 256 + threadIdx.x;
  if (t >= tokens) return;
  if (pass == 0) {
    float most = __int_as_float(0xff800000);
    for (int e = 0; e < EXPERTS; e++) most = fmaxf(most, probs[(u64)t * EXPERTS + e]);
    best[t] = most;
    return;
  }
  const u32 own = ordered(best[t]);
  int rank = 0;
  for (int other = 0; other < tokens; other++) {
    const u32 key = ordered(best[other]);
    rank += key > own || (key == own && other < t);
  }
  order[rank] = t;
}

// GShard's coin: with probability min(1, 2 g2).
__device__ __forceinline__ bool takes_second(const float* probs, const u32* choices, int t,
                                             const Draw& draw) {
  if (CHOICE != RANDOM_SECOND || !draw.live) return true;
  const double first = probs[(u64)t * EXPERTS + choices[0]];
  const double second = probs[(u64)t * EXPERTS + choices[1]];
  const double share = first + second > 0.0 ? second / (first + second) : 0.5;
  return 2.0 * share > uniform_of(words_of(draw, SITE_SECOND, t, 0).x);
}

// A block an expert goes through all choices, by rank, then by `order` (null: by token): the place
// of each among the expert's own decides whether it is kept [T, K], slots by ascending id.
extern "C" __global__ void __launch_bounds__(1024)
gate_take(const float* probs, const u32* ranked, const u32* order, int tokens, int capacity,
          Draw draw, u8* kept, u32* counts, u32* dropped) {
  __shared__ int warp_counts[32];
  __shared__ double sums[32];
  const int e = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int before = 0, counted = 0, lost = 0;
  for (int rank = 0; rank < TOP_K; rank++) {
    for (int first = 0; first < tokens; first += 1024) {
      const int at = first + threadIdx.x;
      const int t = at < tokens ? (order ? order[at] : at) : 0;
      const u32* choices = ranked + (u64)t * TOP_K;
      const bool own = at < tokens && choices[rank] == e;
      const u32 votes = __ballot_sync(~0u, own);
      if (lane == 0) warp_counts[warp] = __popc(votes);
      __syncthreads();
      int place = before + __popc(votes & ((1u << lane) - 1));
      for (int w = 0; w < 32; w++) {
        if (w < warp) place += warp_counts[w];
        before += warp_counts[w];
      }
      __syncthreads();
      if (!own) continue;
      int slot = 0;
      for (int k = 0; k < TOP_K; k++) slot += choices[k] < e;
      const bool taken = rank == 0 || takes_second(probs, choices, t, draw);
      const bool stays = taken && (capacity < 0 || place < capacity);
      counted += taken;
      lost += taken && !stays;
      kept[(u64)t * TOP_K + slot] = stays;
    }
  }
  const double all = block_sum_f64(counted, sums), gone = block_sum_f64(lost, sums);
  if (threadIdx.x > 0) return;
  counts[e] = (u32)all;
  dropped[e] = (u32)gone;
}

// The sum that scores of a token's choices are divided by, and the sum of all its scores.
struct Sums { double divisor, total; bool normed; };
__device__ __forceinline__ Sums token_sums(const float* probs, const u32* chosen, int lane) {
  double all = 0.0, sum = SIGMOID ? TOP_K_SUM_MIN : 0.0, own = 0.0;
  for (int e = lane; SIGMOID && e < EXPERTS; e += 32) all += probs[e];
  for (int k = lane; k < TOP_K; k += 32) own += chosen[k] != NO_EXPERT ? probs[chosen[k]] : 0.f;
  sum += warp_sum_f64(own);
  all = warp_sum_f64(all);
  const bool normed = NORM_TOP_K && sum > 0.0;
  return {normed ? sum : 1.0, SIGMOID ? fmax(all, TOP_K_SUM_MIN) : 1.0, normed};
}

// Kernels leave PARTS doubles of a token for the next one: the sum of its scores, its parts of the
// losses, and the basis of its load (gate_load.cu).
constexpr int PARTS = LOAD == NO_LOAD ? 3 : 6;

// chosen and ids by ascending id, weights, first choices; parts [T, PARTS] of each token.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
gate_finish(const float* logits, const float* noisy, const float* probs, const float* lse,
            const u32* ranked, const u8* kept, int tokens, double scale, u32* chosen, u32* ids,
            float* weights, u32* first, double* parts) {
  const int lane = threadIdx.x & 31, t = blockIdx.x * WARPS + (threadIdx.x >> 5);
  if (t >= tokens) return;
  const u32* from = ranked + (u64)t * TOP_K;
  const u64 at = (u64)t * TOP_K, row = (u64)t * EXPERTS;
  probs += row;
  int taken = 0;
  for (int k = lane; k < TOP_K; k += 32) taken += from[k] != NO_EXPERT;
  taken = __reduce_add_sync(~0u, taken);
  for (int k = lane; k < TOP_K; k += 32) {
    if (k >= taken) chosen[at + k] = NO_EXPERT;
    if (from[k] == NO_EXPERT) continue;
    int slot = 0;
    for (int other = 0; other < TOP_K; other++) slot += from[other] < from[k];
    chosen[at + slot] = from[k];
  }
  __syncwarp();
  const Sums sums = token_sums(probs, chosen + at, lane);
  for (int k = lane; k < TOP_K; k += 32) {
    const u32 id = chosen[at + k];
    const bool stays = id != NO_EXPERT && kept[at + k];
    ids[at + k] = stays ? id : NO_EXPERT;
    weights[at + k] = stays ? (float)(scale * (probs[id] / sums.divisor)) : 0.f;
  }
  double entropy = 0.0;
  u64 best = 0;
  for (int e = lane; e < EXPERTS; e += 32) {
    const double share = probs[e] / sums.total;
    entropy -= share * log(fmax(share, PROB_MIN));
    const u64 key = (u64)ordered(probs[e]) << 32 | (u32)~e;  // the lowest of equal ones
    best = key > best ? key : best;
  }
  entropy = warp_sum_f64(entropy);
  for (int step = 16; step > 0; step >>= 1) {
    const u64 other = __shfl_xor_sync(~0u, best, step);
    best = other > best ? other : best;
  }
  const Basis basis = basis_of(logits + row, noisy + row, sums.divisor, lane);
  if (lane > 0) return;
  first[t] = CHOICE == EXPERTS_CHOOSE ? ~(u32)best : from[0];
  double* const own = parts + PARTS * (u64)t;
  own[0] = sums.total;
  own[1] = (double)lse[t] * lse[t];
  own[2] = entropy;
  if (LOAD != NO_LOAD) own[3] = basis.a, own[4] = basis.b, own[5] = basis.c;
}

// Blocks (expert, segment): stats [segments, 5, E], whose rows balance.rs names. The expert behind
// the last: losses, the means of lse^2 and of the entropy.
extern "C" __global__ void __launch_bounds__(256)
gate_statistics(const float* logits, const float* noisy, const float* raw, const float* probs,
                const u32* chosen, const u32* first, const double* parts, int tokens,
                int segments, double std, double* stats, double* losses) {
  __shared__ double sums[8];
  const int e = blockIdx.x, segment = blockIdx.y, count = tokens / segments;
  if (e == EXPERTS) {
    if (segment > 0) return;
    for (int i = 1; i < 3; i++) {
      double sum = 0.0;
      for (int t = threadIdx.x; t < tokens; t += 256) sum += parts[PARTS * (u64)t + i];
      sum = block_sum_f64(sum, sums);
      if (threadIdx.x == 0) losses[i - 1] = sum / tokens;
    }
    return;
  }
  double firsts = 0.0, choices = 0.0, shares = 0.0, importance = 0.0, load = 0.0;
  for (int i = threadIdx.x; i < count; i += 256) {
    const u64 t = (u64)segment * count + i, at = t * EXPERTS;
    const double* own = parts + PARTS * t;
    bool took = false;
    for (int k = 0; k < TOP_K; k++) took |= chosen[t * TOP_K + k] == e;
    firsts += first[t] == e;
    choices += took;
    shares += probs[at + e] / own[0];
    if (LOAD == NO_LOAD) continue;
    const Basis basis = {own[3], own[4], own[5]};
    load += load_of(basis, logits + at, noisy + at, raw ? raw + at : nullptr, e, std);
    if (LOAD == SHAZEER) importance += took ? probs[at + e] / basis.c : 0.0;
    else importance += share_of(basis, logits[at + e]);
  }
  firsts = block_sum_f64(firsts, sums);
  choices = block_sum_f64(choices, sums);
  shares = block_sum_f64(shares, sums);
  if (LOAD != NO_LOAD) {
    importance = block_sum_f64(importance, sums);
    load = block_sum_f64(load, sums);
  }
  if (threadIdx.x > 0) return;
  double* out = stats + (u64)segment * 5 * EXPERTS + e;
  out[0] = firsts;
  out[EXPERTS] = choices;
  out[2 * EXPERTS] = shares;
  out[3 * EXPERTS] = importance;
  out[4 * EXPERTS] = load;
}

// dlogits, and d_raw unless it is null: through weights, mean scores, entropy, z loss and estimated
// loads, all in f64. The losses count `loss_scale` times, unless that is null.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
gate_backward(const float* logits, const float* noisy, const float* raw, const float* probs,
              const float* lse, const u32* chosen, const u32* ids, const float* dweights,
              const double* dstats, Draw draw, int tokens, int segment_tokens, double std,
              double scale, double z, double entropy, const float* loss_scale, float* dlogits,
              float* d_raw) {
  __shared__ double by_score[WARPS][EXPERTS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = blockIdx.x * WARPS + warp;
  if (t >= tokens) return;
  const u64 at = (u64)t * TOP_K, row = (u64)t * EXPERTS;
  probs += row;
  noisy += row;
  logits += row;
  const double times = loss_scale ? *loss_scale : 1.0;
  entropy *= times;
  double* d = by_score[warp];
  const Sums sums = token_sums(probs, chosen + at, lane);
  const double* by_probs = dstats + (u64)(t / segment_tokens) * 3 * EXPERTS;
  const double *by_importance = by_probs + EXPERTS, *by_load = by_importance + EXPERTS;
  double mean = 0.0;
  for (int e = lane; e < EXPERTS; e += 32) {
    const double share = probs[e] / sums.total;
    const double of_entropy = entropy == 0.0 ? 0.0 : entropy * (log(fmax(share, PROB_MIN)) + 1.0);
    d[e] = times * by_probs[e] - of_entropy;
    mean += d[e] * share;
  }
  if (SIGMOID) {  // share = score / total
    mean = warp_sum_f64(mean);
    for (int e = lane; e < EXPERTS; e += 32) d[e] = (d[e] - mean) / sums.total;
  }
  __syncwarp();
  double inner = 0.0;
  const auto by_weight = [&](int k) {
    double sum = ids[at + k] != NO_EXPERT ? scale * dweights[at + k] : 0.0;
    if (LOAD == SHAZEER) sum += times * by_importance[chosen[at + k]];
    return sum;
  };
  for (int k = lane; k < TOP_K; k += 32)
    if (chosen[at + k] != NO_EXPERT)
      inner += by_weight(k) * (probs[chosen[at + k]] / sums.divisor);
  inner = sums.normed ? warp_sum_f64(inner) : 0.0;
  for (int k = lane; k < TOP_K; k += 32)
    if (chosen[at + k] != NO_EXPERT) d[chosen[at + k]] += (by_weight(k) - inner) / sums.divisor;
  __syncwarp();
  double dot = 0.0;
  for (int e = lane; e < EXPERTS; e += 32) dot += d[e] * probs[e];
  dot = warp_sum_f64(dot);
  const double by_z = times * z * lse[t];
  const Basis basis = basis_of(logits, noisy, sums.divisor, lane);
  const Thresholds lost = thresholds_of(basis, logits, noisy, raw ? raw + row : nullptr,
                                        by_importance, by_load, times, std, lane);
  for (int e = lane; e < EXPERTS; e += 32) {
    const double p = probs[e];
    const double through_noise =
        (SIGMOID ? d[e] * p * (1.0 - p) + by_z * exp((double)noisy[e] - lse[t])
                 : p * (d[e] - dot + by_z)) -
        lost.at(basis, e);
    const Slopes own = slopes_of(basis, logits, noisy, raw ? raw + row : nullptr, by_importance,
                                 by_load, times, std, lost, e);
    dlogits[row + e] = (float)(through_noise + own.logit);
    if (!d_raw) continue;
    const double slope = sigmoid_f64(raw[row + e]);
    const double noise = draw.live ? normal_of(draw, SITE_LOGITS, t, e) : 0.0;
    d_raw[row + e] = (float)((own.deviation + through_noise * noise) * slope);
  }
}
