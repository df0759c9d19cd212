// Memory-bound passes over rows. Host macros: TOP_K, ELEMENT.
constexpr int AT_ONCE = TOP_K < 16 ? TOP_K : 16;  // slots whose rows are loaded together

// out[t][c] = base[t][c] + sum_k weights[t][k] * y[pos[t][k]][c], slots ascending, fp32 chain, one
// rounding. A slot whose pos is below 0 adds nothing. weights null: all 1; base null: 0 (it may be
// `out`). Chunks are 16 bytes; y has `chunks` of them a row, out and base `out_pitch`, starting at
// `out_first`. wide: `out` is of fp32, and nothing is rounded.
extern "C" __global__ void __launch_bounds__(256)
combine(const uint4* y, const int* pos, const float* weights, const uint4* base, void* out,
        int wide, int tokens, int chunks, int out_pitch, int out_first) {
  const int t = blockIdx.x * blockDim.y + threadIdx.y;
  if (t >= tokens) return;
  int row[AT_ONCE];
  float weight[AT_ONCE];
  const auto load_slots = [&](int first) {
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const bool some = first + k < TOP_K;
      const u64 slot = (u64)t * TOP_K + first + k;
      row[k] = some ? pos[slot] : -1;
      weight[k] = !some ? 0.f : weights ? weights[slot] : 1.f;
    }
  };
  if (TOP_K == AT_ONCE) load_slots(0);
  for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
    const u64 at = (u64)t * out_pitch + out_first + c;
    uint4 v[AT_ONCE];
    float sum[CHUNK] = {}, own[CHUNK];
    for (int first = 0; first < TOP_K; first += AT_ONCE) {
      if (TOP_K > AT_ONCE) load_slots(first);
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++)
        v[k] = row[k] < 0 ? make_uint4(0, 0, 0, 0) : __ldcs(&y[(u64)row[k] * chunks + c]);
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        unpack_chunk(v[k], own);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) sum[i] = fmaf(weight[k], own[i], sum[i]);
      }
    }
    if (base) {
      unpack_chunk(base[at], own);
#pragma unroll
      for (int i = 0; i < CHUNK; i++) sum[i] += own[i];
    }
    if (wide) {
      float4* const to = (float4*)out + at * (CHUNK / 4);
#pragma unroll
      for (int i = 0; i < CHUNK; i += 4)
        to[i / 4] = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
    } else {
      ((uint4*)out)[at] = pack_chunk(sum);
    }
  }
}

// out[slot] = y[pos[slot]], 0 where that is below 0. Chunks as in combine.
extern "C" __global__ void __launch_bounds__(256)
each_row(const uint4* y, const int* pos, uint4* out, int slots, int chunks, int out_pitch,
         int out_first) {
  const int slot = blockIdx.x * blockDim.y + threadIdx.y;
  if (slot >= slots) return;
  const int row = pos[slot];
  for (int c = threadIdx.x; c < chunks; c += blockDim.x)
    out[(u64)slot * out_pitch + out_first + c] =
        row < 0 ? make_uint4(0, 0, 0, 0) : __ldcs(&y[(u64)row * chunks + c]);
}

// out[i] (+)= sum over parts, ascending, of partials[part][i]
extern "C" __global__ void __launch_bounds__(256)
sum_parts(const float* partials, int parts, u64 len, int accumulate, float* out) {
  const u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
  if (i >= len) return;
  float sum = accumulate ? out[i] : 0.f;
  for (int part = 0; part < parts; part++) sum += partials[part * len + i];
  out[i] = sum;
}
