// The ops beside a router's choice: losses that balance the experts, entropies and counts, and the
// cosine gate. All of it but rows is f64. Host macro: ELEMENT, fp32.
#define SWITCH 1
#define GSHARD 2
#define FIRST_CHOICE 3
#define LOAD_IMPORTANCE 4
#define CV_SQUARED 5
#define KL 6
constexpr double PROB_MIN = 1e-300, SQUARE_MIN = 1e-10, SHARES_MIN = 1e-20, NORM_MIN = 1e-12;
constexpr double SCALE_MAX = 100.0;
constexpr u32 NO_EXPERT = 0xffffffffu;

// The sum over a block of at most 1,024 threads, for all of them.
__device__ __forceinline__ double block_sum(double x) {
  __shared__ double parts[32];
  return block_sum_f64(x, parts);
}

// The sum of every block's `own`, in their order, for the last one to end; false for the others.
// `ticket` starts as zero and ends so.
__device__ bool last_block_sums(double own, double* parts, u32* ticket, double& sum) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = own;
    __threadfence();
    last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return false;
  double part = 0.0;
  for (u32 i = threadIdx.x; i < gridDim.x; i += blockDim.x) part += __ldcg(parts + i);
  sum = block_sum(part);
  return true;
}

// var / (mean^2 + 1e-10) of x [E], the variance divided by `degrees`, by a warp; `gradient` gets
// `factor` times its gradient, unless it is null.
__device__ double cv_squared(const double* x, int experts, double degrees, double factor,
                             double* gradient) {
  const int lane = threadIdx.x % 32;
  double sum = 0.0, squares = 0.0;
  if (experts >= 2) {
    for (int e = lane; e < experts; e += 32) sum += x[e];
    const double mean = warp_sum_f64(sum) / experts;
    for (int e = lane; e < experts; e += 32) squares = fma(x[e] - mean, x[e] - mean, squares);
    const double variance = warp_sum_f64(squares) / degrees, square = mean * mean + SQUARE_MIN;
    for (int e = lane; gradient && e < experts; e += 32) {
      const double by_variance = 2.0 * (x[e] - mean) / degrees / square;
      const double by_mean = variance * 2.0 * mean / experts / (square * square);
      gradient[e] = factor * (by_variance - by_mean);
    }
    return variance / square;
  }
  for (int e = lane; gradient && e < experts; e += 32) gradient[e] = 0.0;
  return 0.0;
}

// A segment's loss by a warp; `gradient` [3, E] gets `factor` times its gradient.
__device__ double balance_of(const double* stats, double tokens, int experts, int loss,
                             double factor, double* gradient) {
  const int lane = threadIdx.x % 32;
  const double *first = stats, *chosen = first + experts, *probs = chosen + experts;
  const double *importance = probs + experts, *load = importance + experts;
  for (int i = lane; gradient && i < 3 * experts; i += 32) gradient[i] = 0.0;
  __syncwarp();
  if (tokens == 0.0) return 0.0;
  if (loss == LOAD_IMPORTANCE || loss == CV_SQUARED) {
    const bool tutel = loss == LOAD_IMPORTANCE;
    const double degrees = tutel ? experts - 1.0 : experts, half = tutel ? 0.5 : 1.0;
    double* const of_importance = gradient ? gradient + experts : nullptr;
    double* const of_load = gradient ? gradient + 2 * experts : nullptr;
    return half * (cv_squared(importance, experts, degrees, half * factor, of_importance) +
                   cv_squared(load, experts, degrees, half * factor, of_load));
  }
  const double* const counts = loss == SWITCH ? chosen : first;
  const double times = loss == GSHARD ? 1.0 / experts : experts;
  const bool product = loss == SWITCH || loss == GSHARD || loss == FIRST_CHOICE;
  double sum = 0.0;
  for (int e = lane; e < experts; e += 32) {
    const double prob = probs[e] / tokens;
    double slope = 0.0;
    if (product) {
      slope = times * (counts[e] / tokens) / tokens;
      sum += times * (counts[e] / tokens * prob);
    } else if (loss == KL) {
      const double ratio = log(experts * fmax(prob, PROB_MIN));
      slope = (ratio + 1.0) / tokens;
      sum += prob * ratio;
    }
    if (gradient) gradient[e] = slope * factor;
  }
  return warp_sum_f64(sum);
}

// value [1]: the mean over segments; gradient [segments, 3, E], or null. One block, a warp a
// segment.
extern "C" __global__ void __launch_bounds__(1024)
balance_losses(const double* stats, int segments, double tokens, int experts, int loss,
               double factor, double* value, double* gradient) {
  __shared__ double values[32];
  const int warp = threadIdx.x / 32;
  double sum = 0.0;
  for (int first = 0; first < segments; first += 32) {
    const int own = first + warp;
    if (own < segments) {
      double* const into = gradient ? gradient + (u64)own * 3 * experts : nullptr;
      const double found = balance_of(stats + (u64)own * 5 * experts, tokens, experts, loss,
                                      factor / segments, into);
      if (threadIdx.x % 32 == 0) values[warp] = found;
    }
    __syncthreads();
    for (int w = 0; threadIdx.x == 0 && w < min(32, segments - first); w++) sum += values[w];
    __syncthreads();
  }
  if (threadIdx.x == 0) *value = sum / segments;
}

// entropy [1]: the mean over tokens of that of a token's scores. A warp a token.
extern "C" __global__ void __launch_bounds__(256)
route_entropy(const float* logits, const float* lse, int tokens, int experts, int softmax,
              double* parts, u32* ticket, double* entropy) {
  const int lane = threadIdx.x % 32, warps = gridDim.x * 8;
  double sum = 0.0;
  for (int t = blockIdx.x * 8 + threadIdx.x / 32; t < tokens; t += warps) {
    const float* x = logits + (u64)t * experts;
    double own = 0.0, total = 0.0;
    for (int e = lane; e < experts; e += 32) {
      if (softmax) own -= exp((double)x[e] - lse[t]) * x[e];
      else total += 1.0 / (1.0 + exp(-(double)x[e]));
    }
    if (softmax) {
      sum += own + (lane == 0 ? lse[t] : 0.0);
      continue;
    }
    total = fmax(warp_sum_f64(total), SHARES_MIN);
    for (int e = lane; e < experts; e += 32) {
      const double share = 1.0 / (1.0 + exp(-(double)x[e])) / total;
      sum -= share * log(fmax(share, PROB_MIN));
    }
  }
  sum = block_sum(sum);
  if (last_block_sums(sum, parts, ticket, sum) && threadIdx.x == 0) *entropy = sum / tokens;
}

// A layer's losses and counts, added to those of a step; `dropped` is null where nothing is. A
// thread a slot [T, K]. What several blocks add are whole numbers, so that no order matters.
extern "C" __global__ void __launch_bounds__(256)
add_routing(const u32* chosen, const u32* ids, const u32* positions, int tokens, int top_k,
            int experts, const double* losses, const u32* counts, const u32* dropped,
            double* record, double* tally, double* loads, double* drops) {
  const u64 slots = (u64)tokens * top_k, step = (u64)gridDim.x * 256;
  double unrouted = 0.0, followed = 0.0, switched = 0.0;
  for (u64 slot = blockIdx.x * (u64)256 + threadIdx.x; slot < slots; slot += step) {
    const int t = (int)(slot / top_k);
    const u64 row = (u64)t * top_k;
    if (dropped && slot == row) {
      bool empty = true;
      for (int k = 0; k < top_k; k++) empty &= ids[row + k] == NO_EXPERT;
      unrouted += empty;
    }
    const u32 id = chosen[slot];
    if (t == 0 || positions[t] == 0 || id == NO_EXPERT) continue;
    bool stays = false;
    for (int k = 0; k < top_k; k++) stays |= chosen[row - top_k + k] == id;
    followed += 1.0;
    switched += !stays;
  }
  const double all[3] = {block_sum(unrouted), block_sum(followed), block_sum(switched)};
  if (threadIdx.x < 3 && all[threadIdx.x] != 0.0) atomicAdd(tally + threadIdx.x, all[threadIdx.x]);
  if (blockIdx.x > 0) return;
  for (int e = threadIdx.x; e < experts; e += 256) {
    loads[e] += counts[e];
    if (dropped) drops[e] += dropped[e];
  }
  if (threadIdx.x < 3) record[threadIdx.x] += losses[threadIdx.x];
  if (threadIdx.x == 0) tally[3] += 1.0;
}

// y = x / max(|x|, 1e-12), norm f64 [rows]. A warp a row.
extern "C" __global__ void __launch_bounds__(256)
normalize_rows(const float* x, int rows, int dim, float* y, double* norm) {
  const int lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32;
  if (row >= rows) return;
  const u64 at = (u64)row * dim;
  double sum = 0.0;
  for (int i = lane; i < dim; i += 32) sum = fma((double)x[at + i], (double)x[at + i], sum);
  const double length = sqrt(warp_sum_f64(sum)), divisor = fmax(length, NORM_MIN);
  for (int i = lane; i < dim; i += 32) y[at + i] = (float)(x[at + i] / divisor);
  if (lane == 0) norm[row] = length;
}

// dx (+)= (dy - y <dy, y>) / norm.
extern "C" __global__ void __launch_bounds__(256)
normalize_rows_backward(const float* y, const double* norm, const float* dy, int rows, int dim,
                        int accumulate, float* dx) {
  const int lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32;
  if (row >= rows) return;
  const u64 at = (u64)row * dim;
  double sum = 0.0;
  for (int i = lane; i < dim; i += 32) sum = fma((double)y[at + i], (double)dy[at + i], sum);
  const double along = norm[row] < NORM_MIN ? 0.0 : warp_sum_f64(sum);
  const double divisor = fmax(norm[row], NORM_MIN);
  for (int i = lane; i < dim; i += 32) {
    const float own = (float)((dy[at + i] - y[at + i] * along) / divisor);
    dx[at + i] = accumulate ? dx[at + i] + own : own;
  }
}

// e^min(temperature, ln 100), and whether it follows the temperature.
__device__ __forceinline__ double scale_of(float temperature, bool& moves) {
  moves = temperature <= log(SCALE_MAX);
  return moves ? exp((double)temperature) : SCALE_MAX;
}

extern "C" __global__ void __launch_bounds__(256)
temper(const float* temperature, float* x, u64 len) {
  bool moves;
  const double scale = scale_of(*temperature, moves);
  for (u64 i = blockIdx.x * (u64)256 + threadIdx.x; i < len; i += gridDim.x * (u64)256)
    x[i] = (float)(x[i] * scale);
}

// d_temperature (+)= <dx, x>, 0 above the bound; then dx *= e^temperature.
extern "C" __global__ void __launch_bounds__(256)
temper_backward(const float* temperature, const float* x, float* dx, u64 len, int accumulate,
                double* parts, u32* ticket, float* d_temperature) {
  bool moves;
  const double scale = scale_of(*temperature, moves);
  double sum = 0.0;
  for (u64 i = blockIdx.x * (u64)256 + threadIdx.x; i < len; i += gridDim.x * (u64)256) {
    sum = fma((double)x[i], (double)dx[i], sum);
    dx[i] = (float)(dx[i] * scale);
  }
  sum = block_sum(sum);
  if (!last_block_sums(sum, parts, ticket, sum) || threadIdx.x > 0) return;
  const float own = moves ? (float)sum : 0.f;
  *d_temperature = accumulate ? *d_temperature + own : own;
}

// a += b
extern "C" __global__ void __launch_bounds__(256)
add_doubles(double* a, const double* b, u64 len) {
  const u64 i = blockIdx.x * (u64)256 + threadIdx.x;
  if (i < len) a[i] += b[i];
}
