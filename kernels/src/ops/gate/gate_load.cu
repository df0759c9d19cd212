// Estimates of the experts' load that have a gradient, of one token: src/cpu/gate/estimate.rs. Host
// macros: EXPERTS, TOP_K, LOAD. All of it is f64.
#define NO_LOAD 0
#define TUTEL 1
#define SHAZEER 2
constexpr double DEVIATION_MIN = 1e-30;

// ln(1 + e^x): ln(1 + y) of y in [0, 1] is 2 atanh(y / (2 + y)), a series.
__device__ double softplus(double x) {
  const double small = exp(-fabs(x)), s = small / (2.0 + small), s2 = s * s;
  double sum = 0.0;
  for (int n = 19; n >= 0; n--) sum = __fma_rn(sum, s2, 1.0 / (2 * n + 1));
  return fmax(x, 0.0) + 2.0 * s * sum;
}
__device__ __forceinline__ double sigmoid_f64(double x) { return 1.0 / (1.0 + exp(-x)); }

__device__ __forceinline__ double normal_pdf(double x) {
  return 0.3989422804014327 * exp(-0.5 * x * x);
}
// The standard normal distribution function: 1/2 + pdf(x) (x + x^3 / 3 + x^5 / 15 + ..).
__device__ double normal_cdf(double x) {
  if (x >= 8.5) return 1.0;
  if (x <= -8.5) return 0.0;
  double term = x, sum = x, odd = 1.0;
  while (fabs(term) > 1e-18 * fabs(sum)) {
    odd += 2.0;
    term *= x * x / odd;
    sum += term;
  }
  return 0.5 + normal_pdf(x) * sum;
}

// A token's load is estimated from these. Tutel: the largest logit, the sum of e^(logit - a), and
// the K-th largest logit with noise. Shazeer: the experts of the K-th and of the next largest logit
// with noise, and what scores are divided by.
struct Basis { double a, b, c; };

// The expert of the `rank`-th largest of row [E], counted from 1; equal ones in the order of ids.
__device__ __forceinline__ int ranked_at(const float* row, int rank, int lane) {
  int last = -1;
  float bound = 0.f;
  for (int i = 0; i < rank; i++) {
    float best = 0.f;
    int id = EXPERTS;
    for (int e = lane; e < EXPERTS; e += 32) {
      const float x = row[e];
      const bool left = last < 0 || x < bound || (x == bound && e > last);
      if (left && (id == EXPERTS || x > best)) { best = x; id = e; }
    }
    for (int step = 16; step > 0; step >>= 1) {
      const float best_other = __shfl_xor_sync(~0u, best, step);
      const int other = __shfl_xor_sync(~0u, id, step);
      const bool over = best_other > best || (best_other == best && other < id);
      if (other < EXPERTS && (id == EXPERTS || over)) { best = best_other; id = other; }
    }
    if (id == EXPERTS) break;  // what is left is no number
    bound = best;
    last = id;
  }
  return max(last, 0);
}

__device__ __forceinline__ Basis basis_of(const float* logits, const float* noisy, double divisor,
                                          int lane) {
  if (LOAD == NO_LOAD) return {};
  if (LOAD == SHAZEER) {
    const int kth = ranked_at(noisy, TOP_K, lane);
    return {(double)kth, (double)ranked_at(noisy, min(TOP_K + 1, EXPERTS), lane), divisor};
  }
  float top = __int_as_float(0xff800000);
  for (int e = lane; e < EXPERTS; e += 32) top = fmaxf(top, logits[e]);
  top = warp_max(top);
  double sum = 0.0;
  for (int e = lane; e < EXPERTS; e += 32) sum += exp((double)logits[e] - top);
  sum = warp_sum_f64(sum);
  return {top, sum, noisy[ranked_at(noisy, TOP_K, lane)]};
}

// Tutel's softmax of the logits.
__device__ __forceinline__ double share_of(const Basis& basis, float logit) {
  return exp((double)logit - basis.a) / basis.b;
}

// By how many deviations a logit lies above the K-th largest of the others; whether that is the
// next one behind the K-th, since the expert itself is among the K; and whether there is any such.
struct Margin { double z, deviation; bool among, some; };
__device__ __forceinline__ Margin margin_of(const Basis& basis, const float* logits,
                                            const float* noisy, const float* raw, int e) {
  const int kth = (int)basis.a, next = (int)basis.b;
  const bool among = noisy[e] > noisy[kth] || (noisy[e] == noisy[kth] && e <= kth);
  const double deviation = fmax(softplus(raw ? raw[e] : 0.0), DEVIATION_MIN);
  const double z = ((double)logits[e] - noisy[among ? next : kth]) / deviation;
  return {z, deviation, among, TOP_K < EXPERTS};
}

__device__ __forceinline__ double load_of(const Basis& basis, const float* logits,
                                          const float* noisy, const float* raw, int e,
                                          double std) {
  if (LOAD == TUTEL) return normal_cdf((share_of(basis, logits[e]) - basis.c) / std);
  const Margin margin = margin_of(basis, logits, noisy, raw, e);
  return margin.some ? normal_cdf(margin.z) : 1.0;
}

// Gradients of the logits with noise that are thresholds: `kth`, and Shazeer's `next`; and Tutel's
// mean of gradients under the softmax.
struct Thresholds {
  double kth, next, mean;
  int kth_at;
  __device__ __forceinline__ double at(const Basis& basis, int e) const {
    if (LOAD == NO_LOAD) return 0.0;
    const double of_next = LOAD == SHAZEER && e == (int)basis.b ? next : 0.0;
    return (e == kth_at ? kth : 0.0) + of_next;
  }
};

// Tutel's gradient of the load by the share of an expert.
__device__ __forceinline__ double tutel_slope(const Basis& basis, double share, double by_load,
                                              double std) {
  return by_load * normal_pdf((share - basis.c) / std) / std;
}
// Shazeer's by its logit.
__device__ __forceinline__ double shazeer_slope(const Margin& margin, double by_load) {
  return margin.some ? by_load * normal_pdf(margin.z) / margin.deviation : 0.0;
}

__device__ __forceinline__ Thresholds thresholds_of(const Basis& basis, const float* logits,
                                                    const float* noisy, const float* raw,
                                                    const double* by_importance,
                                                    const double* by_load, double times,
                                                    double std, int lane) {
  Thresholds out = {0.0, 0.0, 0.0, (int)basis.a};
  if (LOAD == NO_LOAD) return out;
  for (int e = lane; e < EXPERTS; e += 32) {
    if (LOAD == TUTEL) {
      const double share = share_of(basis, logits[e]);
      const double slope = tutel_slope(basis, share, times * by_load[e], std);
      out.kth += slope;
      out.mean += (times * by_importance[e] + slope) * share;
    } else {
      const Margin margin = margin_of(basis, logits, noisy, raw, e);
      const double slope = shazeer_slope(margin, times * by_load[e]);
      (margin.among ? out.next : out.kth) += slope;
    }
  }
  out.kth = warp_sum_f64(out.kth);
  out.next = warp_sum_f64(out.next);
  out.mean = warp_sum_f64(out.mean);
  if (LOAD == TUTEL) out.kth_at = ranked_at(noisy, TOP_K, lane);
  return out;
}

// Gradients of a logit beside its noise, and of its deviation.
struct Slopes { double logit, deviation; };
__device__ __forceinline__ Slopes slopes_of(const Basis& basis, const float* logits,
                                            const float* noisy, const float* raw,
                                            const double* by_importance, const double* by_load,
                                            double times, double std, const Thresholds& lost,
                                            int e) {
  if (LOAD == NO_LOAD) return {};
  if (LOAD == TUTEL) {
    const double share = share_of(basis, logits[e]);
    const double slope = tutel_slope(basis, share, times * by_load[e], std);
    return {share * (times * by_importance[e] + slope - lost.mean), 0.0};
  }
  const Margin margin = margin_of(basis, logits, noisy, raw, e);
  const double slope = shazeer_slope(margin, times * by_load[e]);
  return {slope, -slope * margin.z};
}
