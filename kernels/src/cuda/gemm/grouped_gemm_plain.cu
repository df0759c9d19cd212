// The products of grouped_gemm.cu with fp32 elements, plainly: a thread sums 4 x 4 elements of the
// output, k ascending, by fused multiply-adds. For layers in fp32, which are for checking.
//
// Host macros: OP GATED ACT TRANSPOSED INDEXED OUT. W and N as in grouped_gemm.cu;
// the router's weights come as they are, so OP_LOGITS is OP_ROWS. OP_DH leaves a part of
// <da', a> for each column: [rows][N]. A weight gradient in fp64 (OUT 2) is a sum of those of each
// source's tokens: what a rank alone would compute of them, in whatever order. A source has `depth`
// tokens, or those from starts[s] on.
#define OP_UP 0
#define OP_ROWS 1
#define OP_DROWS 2
#define OP_DH 3
#define OP_WGRAD 4
#define OP_LOGITS 5

constexpr bool GATHERED = OP == OP_UP || OP == OP_DH;
constexpr bool TWO = OP == OP_UP && GATED;
constexpr bool SOURCES = OP == OP_WGRAD && OUT == 2;
constexpr int SIDE = 16, EACH = 4, TILE = SIDE * EACH;

// Field by field as in grouped_gemm.cu.
struct Args {
  const float* gathered;
  const int* index;
  const int* offsets;
  const int* order;
  float* out;
  float* out_activation;
  float* out_f32;
  const float* row_scale;
  const int* starts;
  int groups;
  int depth;
  int cols;
  int gathered_pitch;
  int weight_rows;
  int first_col;
  int out_pitch;
  int out_rows;
  int accumulate;
};

// Element (k, m) of A of the group whose rows start at row0.
__device__ __forceinline__ float element_a(const float* a, const Args& args, int row0, int k,
                                           int m) {
  if (OP == OP_WGRAD) {
    const int row = INDEXED ? args.index[row0 + k] : row0 + k;
    return args.gathered[(u64)row * args.gathered_pitch + m];
  }
  if (GATHERED) return args.gathered[(u64)args.index[row0 + m] * args.gathered_pitch + k];
  // Rows of gradients of logits are padded to eights.
  return a[(u64)(row0 + m) * ((args.depth + 7) & ~7) + k];
}
// Element (k, n) of B; `half` 1 is up.
__device__ __forceinline__ float element_b(const float* b, const Args& args, int expert, int row0,
                                           int k, int n, int half) {
  if (OP == OP_WGRAD) return b[(u64)(row0 + k) * ((args.cols + 7) & ~7) + n];
  if (OP == OP_DROWS || OP == OP_DH) return b[((u64)expert * args.weight_rows + k) * args.cols + n];
  const u64 row = (u64)expert * args.weight_rows + args.first_col + half * args.cols + n;
  return b[row * args.depth + k];
}

// One element of the output: row (or m) and column of the group, the sum, up's, and that of all
// ranks.
__device__ __forceinline__ void finish(const Args& args, int expert, int row0, int m, int n,
                                       float sum, float up, double all) {
  if (OP == OP_WGRAD) {
    const u64 at = (u64)expert * args.out_rows * args.out_pitch
                   + (TRANSPOSED ? (u64)n * args.out_pitch + m : (u64)m * args.out_pitch + n);
    if (SOURCES) {
      double* to = (double*)args.out_f32 + at;
      *to = args.accumulate ? *to + all : all;
    } else {
      float* to = args.out_f32 + at;
      *to = args.accumulate ? *to + sum : sum;
    }
    return;
  }
  const u64 row = row0 + m, at = row * args.out_pitch + n;
  if (OP == OP_LOGITS) args.out_f32[at] = sum;
  if (OP == OP_ROWS || OP == OP_DROWS) args.out[at] = sum;
  if (OP == OP_UP) {
    args.out[at] = sum;
    if (GATED) args.out[at + args.cols] = up;
    if (args.out_activation)
      args.out_activation[row * args.cols + n] = activate<ACT>(sum) * (GATED ? up : 1.f);
  }
  if (OP == OP_DH) {
    float slope;
    const float u = GATED ? args.out[at + args.cols] : 1.f;
    const float act = activate_both<ACT>(args.out[at], slope), scale = args.row_scale[row];
    args.out_activation[row * args.cols + n] = scale * act * u;
    args.out_f32[row * args.cols + n] = sum * (act * u);
    args.out[at] = scale * sum * u * slope;
    if (GATED) args.out[at + args.cols] = scale * sum * act;
  }
}

// A rank's products go to the sum of all.
__device__ __forceinline__ void add_up(double (&all)[EACH][EACH], float (&sum)[EACH][EACH]) {
#pragma unroll
  for (int i = 0; i < EACH; i++) {
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      all[i][j] += sum[i][j];
      sum[i][j] = 0.f;
    }
  }
}

extern "C" __global__ void __launch_bounds__(SIDE * SIDE)
grouped_gemm(const float* a, const float* b, const __grid_constant__ Args args) {
  const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
  const int n_tiles = (args.cols + TILE - 1) / TILE;
  int expert = 0, base = 0;
  for (int t = blockIdx.x;; t += gridDim.x) {
    int row0, rows, m_end, tiles;
    for (;; expert++, base += tiles) {
      if (expert >= args.groups) return;
      row0 = args.offsets[expert];
      rows = args.offsets[expert + 1] - row0;
      m_end = OP == OP_WGRAD ? args.gathered_pitch : rows;
      tiles = (m_end + TILE - 1) / TILE * n_tiles;
      if (t < base + tiles) break;
    }
    const int m0 = (t - base) / n_tiles * TILE + y, n0 = (t - base) % n_tiles * TILE + x;
    const int depth = OP == OP_WGRAD ? rows : args.depth;
    float sum[EACH][EACH] = {}, up[EACH][EACH] = {};
    double all[EACH][EACH] = {};
    int next = 0, source = 0;  // the first token of another source
    for (int k = 0; k < depth; k++) {
      if (SOURCES) {
        const int token = args.index[row0 + k];
        if (token >= next) {
          if (!args.starts) next = (token / args.depth + 1) * args.depth;
          else while (token >= next) next = args.starts[++source];
          add_up(all, sum);
        }
      }
      float av[EACH], bv[EACH], uv[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int m = m0 + i * SIDE, n = n0 + i * SIDE;
        av[i] = m < m_end ? element_a(a, args, row0, k, m) : 0.f;
        bv[i] = n < args.cols ? element_b(b, args, expert, row0, k, n, 0) : 0.f;
        uv[i] = TWO && n < args.cols ? element_b(b, args, expert, row0, k, n, 1) : 0.f;
      }
#pragma unroll
      for (int i = 0; i < EACH; i++) {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
          sum[i][j] = fmaf(av[i], bv[j], sum[i][j]);
          if (TWO) up[i][j] = fmaf(av[i], uv[j], up[i][j]);
        }
      }
    }
    if (SOURCES) add_up(all, sum);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        const int m = m0 + i * SIDE, n = n0 + j * SIDE;
        if (m < m_end && n < args.cols)
          finish(args, expert, row0, m, n, sum[i][j], up[i][j], all[i][j]);
      }
    }
  }
}
