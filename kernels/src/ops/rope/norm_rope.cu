// Rotary embedding of heads, with or without the norm before it, forward and backward.
// A unit is VEC elements of a head's first half and the VEC that turn with them in its second.
// Host macros: ELEMENT, HEAD_DIM, HEADS (of a span), NORM (0: rotation alone), VEC (CHUNK or 1),
// GROUP (threads of a span, a power of two), SPANS (that a group has in flight, forward).
// A span is what is normed as one: a head, or all heads of a token.
constexpr int BLOCK = GROUP > 256 ? GROUP : 256;
constexpr int GROUPS = BLOCK / GROUP;
constexpr int HALF = HEAD_DIM / 2;
constexpr int A_HEAD = HALF / VEC;           // units
constexpr int SPAN = HEADS * HEAD_DIM;       // elements
constexpr int UNITS = HEADS * A_HEAD;
constexpr int EACH = (UNITS + GROUP - 1) / GROUP;
constexpr int WARPS = BLOCK / 32;
constexpr bool WHOLE = UNITS % GROUP == 0;
// All units of a thread turn by the same angles.
constexpr bool SAME_ANGLES = GROUP % A_HEAD == 0;

// Sums over the threads of each group: as in norm.cu.
__device__ __forceinline__ void group_sums(float (&sums)[SPANS], int turn) {
#pragma unroll
  for (int step = (GROUP < 32 ? GROUP : 32) / 2; step > 0; step >>= 1) {
#pragma unroll
    for (int r = 0; r < SPANS; r++) sums[r] += __shfl_xor_sync(~0u, sums[r], step);
  }
  if (GROUP <= 32) return;
  __shared__ float parts[2][SPANS][WARPS];
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int r = 0; r < SPANS; r++) parts[turn][r][warp] = sums[r];
  }
  __syncthreads();
  constexpr int EVERY = GROUP > 32 ? GROUP / 32 : 1;
  const int first = warp / EVERY * EVERY;
#pragma unroll
  for (int r = 0; r < SPANS; r++) {
    sums[r] = 0.f;
#pragma unroll
    for (int w = 0; w < EVERY; w++) sums[r] += parts[turn][r][first + w];
  }
}

// Cosine and sine of `position` for one element; the table holds those of the first positions.
__device__ __noinline__ float2 far_turn(const double* frequencies, u32 position, int i) {
  const double2 turn = exact_sin_cos(__dmul_rn((double)position, frequencies[i]));
  return make_float2((float)turn.y, (float)turn.x);
}

// table: [positions, 2, HALF], cosines before sines.
__device__ __forceinline__ void turns(const float* table, u32 positions, const double* frequencies,
                                      u32 position, int first, float (&c)[VEC], float (&s)[VEC]) {
  if (position < positions) {
    const float* at = table + (u64)position * HEAD_DIM + first;
#pragma unroll
    for (int i = 0; i < VEC; i += VEC < 4 ? 1 : 4) {
      if (VEC < 4) {
        c[i] = at[i];
        s[i] = at[HALF + i];
      } else {
        const float4 cosines = *(const float4*)(at + i), sines = *(const float4*)(at + HALF + i);
        c[i] = cosines.x, c[(i + 1) % VEC] = cosines.y;
        c[(i + 2) % VEC] = cosines.z, c[(i + 3) % VEC] = cosines.w;
        s[i] = sines.x, s[(i + 1) % VEC] = sines.y;
        s[(i + 2) % VEC] = sines.z, s[(i + 3) % VEC] = sines.w;
      }
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < VEC; i++) {
      const float2 turn = far_turn(frequencies, position, first + i);
#pragma unroll
      for (int j = 0; j < VEC; j++) {
        c[j] = i == j ? turn.x : c[j];
        s[j] = i == j ? turn.y : s[j];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
rope_table(const double* frequencies, float* table, int positions) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= positions * HALF) return;
  const int position = at / HALF, i = at % HALF;
  const float2 turn = far_turn(frequencies, position, i);
  table[(u64)position * HEAD_DIM + i] = turn.x;
  table[(u64)position * HEAD_DIM + HALF + i] = turn.y;
}

// The first element of a unit in its span; its partner lies HALF further.
__device__ __forceinline__ int place(int unit) {
  return unit / A_HEAD * HEAD_DIM + unit % A_HEAD * VEC;
}

// y = R(x rstd w), rounded once. Without NORM y = R(x), `inverse` by the negative angle; x may then
// be y.
extern "C" __global__ void __launch_bounds__(BLOCK, BLOCK > 256 ? 1 : 3)
norm_rope(const element* x, const void* w, int w_fp32, const u32* positions, const float* table,
          u32 table_positions, const double* frequencies, element* y, float* rstd, int spans,
          int spans_a_token, float eps, int inverse) {
  const int lane = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
  const long long first = (long long)blockIdx.x * GROUPS * SPANS + group;
  Raw<VEC> low[SPANS][EACH], high[SPANS][EACH];
  u32 position[SPANS];
  float scale[SPANS];
#pragma unroll
  for (int r = 0; r < SPANS; r++) {
    const long long span = first + r * GROUPS;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int unit = lane + e * GROUP;
      const bool mine = span < spans && (WHOLE || unit < UNITS);
      const element* at = x + span * SPAN + place(unit);
      low[r][e] = mine ? load<VEC>(at) : Raw<VEC>{};
      high[r][e] = mine ? load<VEC>(at + HALF) : Raw<VEC>{};
    }
    position[r] = span < spans ? positions[(u32)span / (u32)spans_a_token] : 0;
    scale[r] = 0.f;
  }
  if (NORM) {
#pragma unroll
    for (int r = 0; r < SPANS; r++) {
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        float a[VEC], b[VEC];
        unpack(low[r][e], a);
        unpack(high[r][e], b);
#pragma unroll
        for (int i = 0; i < VEC; i++)
          scale[r] = fmaf(a[i], a[i], fmaf(b[i], b[i], scale[r]));
      }
    }
    group_sums(scale, 0);
#pragma unroll
    for (int r = 0; r < SPANS; r++) {
      scale[r] = rsqrtf(scale[r] / SPAN + eps);
      if (lane == 0 && first + r * GROUPS < spans) rstd[first + r * GROUPS] = scale[r];
    }
  }
#pragma unroll
  for (int r = 0; r < SPANS; r++) {
    const long long span = first + r * GROUPS;
    if (span >= spans) return;
    float c[VEC], s[VEC];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int unit = lane + e * GROUP, at = place(unit);
      if (!WHOLE && unit >= UNITS) break;
      if (e == 0 || !SAME_ANGLES)
        turns(table, table_positions, frequencies, position[r], unit % A_HEAD * VEC, c, s);
      float a[VEC], b[VEC];
      unpack(low[r][e], a);
      unpack(high[r][e], b);
      if (NORM) {
        float gain_a[VEC], gain_b[VEC];
        load_vector(w, w_fp32, at, gain_a);
        load_vector(w, w_fp32, at + HALF, gain_b);
#pragma unroll
        for (int i = 0; i < VEC; i++) {
          a[i] = a[i] * scale[r] * gain_a[i];
          b[i] = b[i] * scale[r] * gain_b[i];
        }
      }
#pragma unroll
      for (int i = 0; i < VEC; i++) {
        const float turn = inverse ? -s[i] : s[i], one = a[i], other = b[i];
        a[i] = fmaf(one, c[i], -(other * turn));
        b[i] = fmaf(other, c[i], one * turn);
      }
      store(y + span * SPAN + at, a);
      store(y + span * SPAN + at + HALF, b);
    }
  }
}

// dy turned back, then the backward pass of the norm: as rms_norm_backward, a span for a row.
extern "C" __global__ void __launch_bounds__(BLOCK)
norm_rope_backward(const element* x, const void* w, int w_fp32, const float* rstd,
                   const u32* positions, const float* table, u32 table_positions,
                   const double* frequencies, const element* dy, element* dx, float* partial,
                   int spans, int spans_a_token, int spans_a_block) {
  const int lane = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
  const int begin = blockIdx.x * spans_a_block;
  const int end = min(spans, begin + spans_a_block);
  float dw[EACH][2 * VEC] = {};
  int turn = 0;
  for (int base = begin; base < end; base += GROUPS, turn ^= 1) {
    const long long span = base + group;
    const bool inside = span < end;
    Raw<VEC> x_low[EACH], x_high[EACH], dy_low[EACH], dy_high[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int unit = lane + e * GROUP;
      const bool mine = inside && (WHOLE || unit < UNITS);
      const u64 at = span * SPAN + place(unit);
      x_low[e] = mine ? load<VEC>(x + at) : Raw<VEC>{};
      x_high[e] = mine ? load<VEC>(x + at + HALF) : Raw<VEC>{};
      dy_low[e] = mine ? load<VEC>(dy + at) : Raw<VEC>{};
      dy_high[e] = mine ? load<VEC>(dy + at + HALF) : Raw<VEC>{};
    }
    const u32 position = inside ? positions[(u32)span / (u32)spans_a_token] : 0;
    const float scale = inside ? rstd[span] : 0.f;
    float c[VEC], s[VEC], g_low[EACH][VEC], g_high[EACH][VEC], sum = 0.f;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int unit = lane + e * GROUP, at = place(unit);
      const bool mine = WHOLE || unit < UNITS;
      if ((e == 0 || !SAME_ANGLES) && mine)
        turns(table, table_positions, frequencies, position, unit % A_HEAD * VEC, c, s);
      float gain_a[VEC] = {}, gain_b[VEC] = {}, a[VEC], b[VEC];
      if (mine) {
        load_vector(w, w_fp32, at, gain_a);
        load_vector(w, w_fp32, at + HALF, gain_b);
      }
      unpack(x_low[e], a);
      unpack(x_high[e], b);
      unpack(dy_low[e], g_low[e]);
      unpack(dy_high[e], g_high[e]);
#pragma unroll
      for (int i = 0; i < VEC; i++) {
        const float first = g_low[e][i], second = g_high[e][i];
        const float da = mine ? fmaf(first, c[i], second * s[i]) : 0.f;
        const float db = mine ? fmaf(second, c[i], -(first * s[i])) : 0.f;
        dw[e][i] = fmaf(da, a[i] * scale, dw[e][i]);
        dw[e][VEC + i] = fmaf(db, b[i] * scale, dw[e][VEC + i]);
        g_low[e][i] = da * gain_a[i];
        g_high[e][i] = db * gain_b[i];
        sum = fmaf(g_low[e][i], a[i], fmaf(g_high[e][i], b[i], sum));
      }
    }
    float sums[SPANS] = {sum};
    group_sums(sums, turn);
    const float mean = sums[0] * scale / SPAN;
    if (!inside) continue;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int unit = lane + e * GROUP;
      if (!WHOLE && unit >= UNITS) break;
      float a[VEC], b[VEC];
      unpack(x_low[e], a);
      unpack(x_high[e], b);
#pragma unroll
      for (int i = 0; i < VEC; i++) {
        a[i] = scale * (g_low[e][i] - a[i] * scale * mean);
        b[i] = scale * (g_high[e][i] - b[i] * scale * mean);
      }
      const u64 at = span * SPAN + place(unit);
      store(dx + at, a);
      store(dx + at + HALF, b);
    }
  }
  __shared__ float total[SPAN];
  for (int g = 0; g < GROUPS; g++) {
    __syncthreads();
    if (g != group) continue;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int unit = lane + e * GROUP, at = place(unit);
      if (!WHOLE && unit >= UNITS) break;
#pragma unroll
      for (int i = 0; i < VEC; i++) {
        total[at + i] = g == 0 ? dw[e][i] : total[at + i] + dw[e][i];
        total[at + HALF + i] = g == 0 ? dw[e][VEC + i] : total[at + HALF + i] + dw[e][VEC + i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < SPAN; i += BLOCK) partial[(u64)blockIdx.x * SPAN + i] = total[i];
}
