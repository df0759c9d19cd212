// Ops on each element alone. Host macro: ELEMENT. `whole` says that every address is a multiple of
// 16 bytes: chunks then, and the last few elements one by one.

template <typename F> __device__ __forceinline__ void each(u64 len, int whole, const F& f) {
  const u64 chunks = whole ? len / CHUNK : 0;
  const u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
  for (u64 i = at; i < chunks; i += step) f.template at<CHUNK>(i * CHUNK);
  for (u64 i = chunks * CHUNK + at; i < len; i += step) f.template at<1>(i);
}

// a[i] = op(a[i], b[i]); b is null where it is not read.
template <typename Op> struct Change {
  element* a;
  const element* b;
  Op op;
  template <int N> __device__ __forceinline__ void at(u64 i) const {
    float x[N], y[N] = {};
    unpack(load<N>(a + i), x);
    if (b) unpack(load<N>(b + i), y);
#pragma unroll
    for (int j = 0; j < N; j++) x[j] = op(x[j], y[j]);
    store(a + i, x);
  }
};

struct Plus {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
extern "C" __global__ void __launch_bounds__(256)
add(element* a, const element* b, u64 len, int whole) {
  each(len, whole, Change<Plus>{a, b, {}});
}

// The N floats of b from i on.
template <int N> __device__ __forceinline__ void load_wide(const float* b, u64 i, float (&x)[N]) {
  if constexpr (N == 1) {
    x[0] = b[i];
  } else {
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      const float4 four = __ldcs((const float4*)(b + i + j));
      x[j] = four.x, x[j + 1] = four.y, x[j + 2] = four.z, x[j + 3] = four.w;
    }
  }
}

// out[i] = a[i] + b[i], of elements or of fp32; `out` may be a.
template <typename B> struct Total {
  const element* a;
  const B* b;
  element* out;
  template <int N> __device__ __forceinline__ void at(u64 i) const {
    float x[N], y[N];
    unpack(load<N>(a + i), x);
    if constexpr (sizeof(B) == sizeof(element)) unpack(load<N>((const element*)b + i), y);
    else load_wide<N>((const float*)b, i, y);
#pragma unroll
    for (int j = 0; j < N; j++) x[j] += y[j];
    store(out + i, x);
  }
};
extern "C" __global__ void __launch_bounds__(256)
sum(const element* a, const element* b, element* out, u64 len, int whole) {
  each(len, whole, Total<element>{a, b, out});
}
extern "C" __global__ void __launch_bounds__(256)
sum_wide(const element* a, const float* b, element* out, u64 len, int whole) {
  each(len, whole, Total<float>{a, b, out});
}

// What is not a number stays so.
struct Within {
  float limit;
  __device__ __forceinline__ float operator()(float x, float) const {
    const float below = x > limit ? limit : x;
    return below < -limit ? -limit : below;
  }
};
extern "C" __global__ void __launch_bounds__(256)
clamp(element* x, u64 len, int whole, float limit) {
  each(len, whole, Change<Within>{x, nullptr, {limit}});
}

struct Passed {
  float limit;
  __device__ __forceinline__ float operator()(float dx, float x) const {
    return x > limit || x < -limit ? 0.f : dx;
  }
};
extern "C" __global__ void __launch_bounds__(256)
clamp_backward(element* dx, const element* x, u64 len, int whole, float limit) {
  each(len, whole, Change<Passed>{dx, x, {limit}});
}

struct Constant {
  element* x;
  float value;
  template <int N> __device__ __forceinline__ void at(u64 i) const {
    float all[N];
#pragma unroll
    for (int j = 0; j < N; j++) all[j] = value;
    store(x + i, all);
  }
};
extern "C" __global__ void __launch_bounds__(256)
fill(element* x, u64 len, int whole, float value) {
  each(len, whole, Constant{x, value});
}

// In fp32 the sigmoid is the exact one: the fast one has 22 bits.
template <int KIND> __device__ __forceinline__ float act(float x, float& slope) {
  if (ELEMENT == FP32 && KIND != ACT_RELU) {
    const bool gelu = KIND == ACT_GELU;
    const float square = fminf(x * x, 1e4f);
    const float u = gelu ? x * (1.59576912f + 0.0713548163f * square) : x;
    const float du = gelu ? 1.59576912f + 0.214064449f * square : 1.f;
    const float s = 1.f / (1.f + expf(-u));
    slope = s + x * s * (1.f - s) * du;
    return x * s;
  }
  return activate_both<KIND>(x, slope);
}

template <int KIND> struct Gated {
  const element *gate, *up;
  element* out;
  template <int N> __device__ __forceinline__ void at(u64 i) const {
    float g[N], u[N], slope;
    unpack(load<N>(gate + i), g);
    unpack(load<N>(up + i), u);
#pragma unroll
    for (int j = 0; j < N; j++) g[j] = act<KIND>(g[j], slope) * u[j];
    store(out + i, g);
  }
};
extern "C" __global__ void __launch_bounds__(256)
gated_mul(const element* gate, const element* up, element* out, u64 len, int whole, int kind) {
  if (kind == ACT_SILU) each(len, whole, Gated<ACT_SILU>{gate, up, out});
  else if (kind == ACT_RELU) each(len, whole, Gated<ACT_RELU>{gate, up, out});
  else each(len, whole, Gated<ACT_GELU>{gate, up, out});
}

template <int KIND> struct GatedBackward {
  const element *gate, *up, *d_out;
  element *dgate, *dup;
  template <int N> __device__ __forceinline__ void at(u64 i) const {
    float g[N], u[N], d[N], slope;
    unpack(load<N>(gate + i), g);
    unpack(load<N>(up + i), u);
    unpack(load<N>(d_out + i), d);
#pragma unroll
    for (int j = 0; j < N; j++) {
      const float value = act<KIND>(g[j], slope);
      g[j] = d[j] * u[j] * slope;
      u[j] = d[j] * value;
    }
    store(dgate + i, g);
    store(dup + i, u);
  }
};
extern "C" __global__ void __launch_bounds__(256)
gated_mul_backward(const element* gate, const element* up, const element* d_out, element* dgate,
                   element* dup, u64 len, int whole, int kind) {
  if (kind == ACT_SILU)
    each(len, whole, GatedBackward<ACT_SILU>{gate, up, d_out, dgate, dup});
  else if (kind == ACT_RELU)
    each(len, whole, GatedBackward<ACT_RELU>{gate, up, d_out, dgate, dup});
  else
    each(len, whole, GatedBackward<ACT_GELU>{gate, up, d_out, dgate, dup});
}

// x[i] = std z(seed, name, first + i), the CPU's bits. A pair of numbers a thread.
extern "C" __global__ void __launch_bounds__(256)
init_normal(element* x, u64 len, u64 seed, u64 name, u64 first, double std) {
  const u64 pair = first / 2 + blockIdx.x * (u64)blockDim.x + threadIdx.x;
  if (pair > (first + len - 1) / 2) return;
  const double2 z = box_muller(
      philox(seed, make_uint4((u32)name, (u32)(name >> 32), (u32)pair, (u32)(pair >> 32))));
  if (2 * pair >= first) x[2 * pair - first] = as_element((float)__dmul_rn(std, z.x));
  const u64 second = 2 * pair + 1 - first;
  if (second < len) x[second] = as_element((float)__dmul_rn(std, z.y));
}

// The same of elements that lie in runs: first + i is the at-th of them, whose place is
// from + at / run * stride + at % run.
extern "C" __global__ void __launch_bounds__(256)
init_normal_strided(element* x, u64 len, u64 seed, u64 name, u64 first, u64 from, u64 run,
                    u64 stride, double std) {
  const u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
  if (i >= len) return;
  const u64 at = from + (first + i) / run * stride + (first + i) % run, pair = at / 2;
  const double2 z = box_muller(
      philox(seed, make_uint4((u32)name, (u32)(name >> 32), (u32)pair, (u32)(pair >> 32))));
  x[i] = as_element((float)__dmul_rn(std, at % 2 ? z.y : z.x));
}

// y (+)= x m: see `MaskRows`. A block of four neighbours of a row a thread; `place`, `step`
// and `token` are words of the counter, `p` is the mask's parameter. Either may be fp32.
extern "C" __global__ void __launch_bounds__(256)
mask_rows(const void* x, int wide_x, void* y, int wide_y, int rows, int dim, int dropout, double p,
          u64 seed, u32 place, u32 step, u32 token, int accumulate) {
  const int blocks = (dim + 3) / 4;
  const u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x;
  if (at >= (u64)rows * blocks) return;
  const u32 row = (u32)(at / blocks), block = (u32)(at % blocks);
  const uint4 all = philox(seed, make_uint4(place, step, token + row, block));
  const u32 words[4] = {all.x, all.y, all.z, all.w};
  for (int i = 0; i < 4 && 4 * block + i < dim; i++) {
    const double u = (double)(words[i] >> 8) / 16777216.0;
    const double jitter = __dadd_rn(1.0 - p, __dmul_rn(2.0 * p, u));
    const double factor = dropout ? (u < p ? 0.0 : __ddiv_rn(1.0, 1.0 - p)) : jitter;
    const u64 to = (u64)row * dim + 4 * block + i;
    const float masked = (float)__dmul_rn((double)load_either(x, wide_x, to), factor);
    store_either(y, wide_y, to, accumulate ? load_either(y, wide_y, to) + masked : masked);
  }
}

// y[i] = x[index[i]], 0 where that is below 0. Rows of `dim`: src/place.rs.
struct GatheredRows {
  const element* x;
  const int* index;
  element* y;
  u32 dim;
  template <int N> __device__ __forceinline__ void at(u64 i) const {
    const int row = index[i / dim];
    float v[N] = {};
    if (row >= 0) unpack(load<N>(x + (u64)row * dim + i % dim), v);
    store(y + i, v);
  }
};
extern "C" __global__ void __launch_bounds__(256)
gather_rows(const element* x, const int* index, element* y, u64 len, u32 dim, int whole) {
  each(len, whole, GatheredRows{x, index, y, dim});
}

// out[i] (+)= the sum over k, ascending from zero, of x[pos[i][k]], none where that is below 0.
struct SummedRows {
  const element* x;
  const int* pos;
  element* out;
  u32 top_k, dim;
  int accumulate;
  template <int N> __device__ __forceinline__ void at(u64 i) const {
    float sum[N] = {}, v[N];
    const int* own = pos + i / dim * top_k;
    for (u32 k = 0; k < top_k; k++) {
      if (own[k] < 0) continue;
      unpack(load<N>(x + (u64)own[k] * dim + i % dim), v);
#pragma unroll
      for (int j = 0; j < N; j++) sum[j] += v[j];
    }
    if (accumulate) {
      unpack(load<N>(out + i), v);
#pragma unroll
      for (int j = 0; j < N; j++) sum[j] = v[j] + sum[j];
    }
    store(out + i, sum);
  }
};
extern "C" __global__ void __launch_bounds__(256)
sum_rows(const element* x, const int* pos, element* out, u64 len, u32 top_k, u32 dim,
         int accumulate, int whole) {
  each(len, whole, SummedRows{x, pos, out, top_k, dim, accumulate});
}
