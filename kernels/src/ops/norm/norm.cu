// Root-mean-square norm of rows, forward and backward.
// Host macros: ELEMENT, DIM, VEC (elements a load: CHUNK or 1), GROUP (threads of a row, a power of
// two), ROWS (rows that a group has in flight at once). Blocks are of whole groups.
constexpr int BLOCK = GROUP > 256 ? GROUP : 256;
constexpr int GROUPS = BLOCK / GROUP;
constexpr int UNITS = DIM / VEC;                        // loads a row
constexpr int EACH = (UNITS + GROUP - 1) / GROUP;       // of one thread
constexpr int WARPS = BLOCK / 32;
constexpr bool WHOLE = UNITS % GROUP == 0;

// Sums over the threads of each group, in a fixed tree: lanes, then warps in order. `turn` is 0 or
// 1 in alternation, so that one barrier a sum is enough. All threads of the block call it.
__device__ __forceinline__ void group_sums(float (&sums)[ROWS], int turn) {
#pragma unroll
  for (int step = (GROUP < 32 ? GROUP : 32) / 2; step > 0; step >>= 1) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] += __shfl_xor_sync(~0u, sums[r], step);
  }
  if (GROUP <= 32) return;
  __shared__ float parts[2][ROWS][WARPS];
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) parts[turn][r][warp] = sums[r];
  }
  __syncthreads();
  constexpr int EVERY = GROUP > 32 ? GROUP / 32 : 1;
  const int first = warp / EVERY * EVERY;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    sums[r] = 0.f;
#pragma unroll
    for (int w = 0; w < EVERY; w++) sums[r] += parts[turn][r][first + w];
  }
}

// y = x * rstd * w, rstd = 1 / sqrt(mean x^2 + eps).
extern "C" __global__ void __launch_bounds__(BLOCK)
rms_norm(const element* x, const void* w, int w_fp32, element* y, float* rstd, int rows,
         float eps) {
  const int lane = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
  const long long first = ((long long)blockIdx.x * GROUPS + group) * ROWS;
  Raw<VEC> raw[ROWS][EACH];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int unit = lane + e * GROUP;
      if (first + r < rows && (WHOLE || unit < UNITS))
        raw[r][e] = load<VEC>(x + (first + r) * DIM + unit * VEC);
      else
        raw[r][e] = Raw<VEC>{};
    }
  }
  float sums[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    sums[r] = 0.f;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      float v[VEC];
      unpack(raw[r][e], v);
#pragma unroll
      for (int i = 0; i < VEC; i++) sums[r] = fmaf(v[i], v[i], sums[r]);
    }
  }
  group_sums(sums, 0);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    sums[r] = rsqrtf(sums[r] / DIM + eps);
    if (lane == 0 && first + r < rows) rstd[first + r] = sums[r];
  }
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int unit = lane + e * GROUP;
    if (!WHOLE && unit >= UNITS) break;
    float gain[VEC];
    load_vector(w, w_fp32, unit * VEC, gain);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float v[VEC];
      unpack(raw[r][e], v);
#pragma unroll
      for (int i = 0; i < VEC; i++) v[i] = v[i] * sums[r] * gain[i];
      if (first + r < rows) store(y + (first + r) * DIM + unit * VEC, v);
    }
  }
}

// With n = x rstd, g = dy w: dx (+)= rstd (g - n mean(g n)); partial[block] = sum of dy n over the
// block's rows, `rows_a_block` of them from blockIdx.x * rows_a_block on.
extern "C" __global__ void __launch_bounds__(BLOCK)
rms_norm_backward(const element* x, const void* w, int w_fp32, const float* rstd,
                  const element* dy, element* dx, int accumulate, float* partial, int rows,
                  int rows_a_block) {
  const int lane = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
  const int begin = blockIdx.x * rows_a_block;
  const int end = min(rows, begin + rows_a_block);
  float dw[EACH][VEC] = {};
  int turn = 0;
  for (int base = begin; base < end; base += GROUPS * ROWS, turn ^= 1) {
    Raw<VEC> raw_x[ROWS][EACH], raw_dy[ROWS][EACH], raw_dx[ROWS][EACH];
    float scale[ROWS], sums[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const long long row = base + r * GROUPS + group;
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const int unit = lane + e * GROUP;
        const bool inside = row < end && (WHOLE || unit < UNITS);
        raw_x[r][e] = inside ? load<VEC>(x + row * DIM + unit * VEC) : Raw<VEC>{};
        raw_dy[r][e] = inside ? load<VEC>(dy + row * DIM + unit * VEC) : Raw<VEC>{};
        raw_dx[r][e] = inside && accumulate ? load<VEC>(dx + row * DIM + unit * VEC) : Raw<VEC>{};
      }
      scale[r] = row < end ? rstd[row] : 0.f;
      sums[r] = 0.f;
    }
    // The next turn's rows are on their way while this one's are added up.
    if (VEC > 1 && lane % LINE_THREADS == 0) {
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const long long row = base + (r + ROWS) * GROUPS + group;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          const int unit = lane + e * GROUP;
          if (row >= end || (!WHOLE && unit >= UNITS)) continue;
          prefetch(x + row * DIM + unit * VEC);
          prefetch(dy + row * DIM + unit * VEC);
          if (accumulate) prefetch(dx + row * DIM + unit * VEC);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int unit = lane + e * GROUP;
      float gain[VEC] = {};
      if (WHOLE || unit < UNITS) load_vector(w, w_fp32, unit * VEC, gain);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        float a[VEC], b[VEC];
        unpack(raw_x[r][e], a);
        unpack(raw_dy[r][e], b);
#pragma unroll
        for (int i = 0; i < VEC; i++) {
          sums[r] = fmaf(b[i] * gain[i], a[i], sums[r]);
          dw[e][i] = fmaf(b[i], a[i] * scale[r], dw[e][i]);
        }
      }
    }
    group_sums(sums, turn);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int unit = lane + e * GROUP;
      if (!WHOLE && unit >= UNITS) break;
      float gain[VEC];
      load_vector(w, w_fp32, unit * VEC, gain);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const long long row = base + r * GROUPS + group;
        if (row >= end) continue;
        const float mean = sums[r] * scale[r] / DIM;
        float a[VEC], b[VEC], old[VEC];
        unpack(raw_x[r][e], a);
        unpack(raw_dy[r][e], b);
        unpack(raw_dx[r][e], old);
#pragma unroll
        for (int i = 0; i < VEC; i++)
          old[i] += scale[r] * (b[i] * gain[i] - a[i] * scale[r] * mean);
        store(dx + row * DIM + unit * VEC, old);
      }
    }
  }
  float* out = partial + (u64)blockIdx.x * DIM;
  if (GROUPS == 1) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int unit = lane + e * GROUP;
      if (!WHOLE && unit >= UNITS) break;
#pragma unroll
      for (int i = 0; i < VEC; i++) out[unit * VEC + i] = dw[e][i];
    }
    return;
  }
  // The groups' sums in the order of the groups.
  __shared__ float total[GROUPS > 1 ? DIM : 1];
  for (int g = 0; g < GROUPS; g++) {
    __syncthreads();
    if (g != group) continue;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int unit = lane + e * GROUP;
      if (!WHOLE && unit >= UNITS) break;
#pragma unroll
      for (int i = 0; i < VEC; i++) {
        const int at = GROUPS > 1 ? unit * VEC + i : 0;
        total[at] = g == 0 ? dw[e][i] : total[at] + dw[e][i];
      }
    }
  }
  __syncthreads();
  if (GROUPS > 1)
    for (int i = threadIdx.x; i < DIM; i += BLOCK) out[i] = total[i];
}
