// Memory-bound passes over rows. Host macro: TOP_K.

// out[t][c] = base[t][c] + sum_k weights[t][k] * y[pos[t][k]][c], slots ascending, fp32 chain, one
// rounding. weights null: all 1; base null: 0 (it may be `out`). Chunks are 16 bytes; y has
// `chunks` of them a row, out and base `out_pitch`, starting at `out_first`.
extern "C" __global__ void __launch_bounds__(256)
combine(const uint4* y, const int* pos, const float* weights, const uint4* base, uint4* out,
        int tokens, int chunks, int out_pitch, int out_first) {
  const int t = blockIdx.x * blockDim.y + threadIdx.y;
  if (t >= tokens) return;
  int row[TOP_K];
  float weight[TOP_K];
#pragma unroll
  for (int k = 0; k < TOP_K; k++) {
    row[k] = pos[(u64)t * TOP_K + k];
    weight[k] = weights ? weights[(u64)t * TOP_K + k] : 1.f;
  }
  for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
    const u64 at = (u64)t * out_pitch + out_first + c;
    uint4 v[TOP_K];
#pragma unroll
    for (int k = 0; k < TOP_K; k++) v[k] = __ldcs(&y[(u64)row[k] * chunks + c]);
    float sum[8] = {};
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
      const u32 words[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sum[2 * i] = fmaf(weight[k], low_half(words[i]), sum[2 * i]);
        sum[2 * i + 1] = fmaf(weight[k], high_half(words[i]), sum[2 * i + 1]);
      }
    }
    if (base) {
      const uint4 b = base[at];
      const u32 words[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sum[2 * i] += low_half(words[i]);
        sum[2 * i + 1] += high_half(words[i]);
      }
    }
    out[at] = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                         pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
  }
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
