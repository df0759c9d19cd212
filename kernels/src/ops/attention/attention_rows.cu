// Passes over rows beside the attention kernels: who sees a key, <o, do>, dq out of its sums.
//
// Host macros: ELEMENT, HEAD_DIM; LANES, a power of two: lanes a row; Q_BLOCK: queries that the
// sums of dq count together; CLEARS: what attention_delta zeroes for the backward, SUMS, TURNS or
// neither.
constexpr int CHUNK = ELEMENT == FP32 ? 4 : 8;  // elements of 16 bytes
constexpr int ROWS_A_THREAD = 4;
#define SUMS 1
#define TURNS 2

// past of every key. Where the first key that queries see goes up from `before` to `first`, the
// keys between are seen by no query from there on: a warp writes them together. A thread a
// position.
extern "C" __global__ void __launch_bounds__(256)
attention_ranges(const __grid_constant__ Args args) {
  const int s = blockIdx.x * 256 + threadIdx.x, lane = threadIdx.x & 31, b = blockIdx.y;
  const bool live = s < args.seq;
  const int first = live ? first_key(args, b, s) : 0;
  const int before = live && s > 0 ? first_key(args, b, s - 1) : 0;
  int* past = args.past + (u64)b * args.seq;
  for (u32 left = __ballot_sync(~0u, first > before); left; left &= left - 1) {
    const int from = __ffs(left) - 1;
    const int low = __shfl_sync(~0u, before, from), high = __shfl_sync(~0u, first, from);
    for (int key = low + lane; key < high; key += 32) past[key] = s - lane + from;
  }
  // Those that the last query sees are seen to the end.
  const u32 last = __ballot_sync(~0u, s == args.seq - 1);
  if (!last) return;
  const int low = __shfl_sync(~0u, first, __ffs(last) - 1);
  for (int key = low + lane; key < args.seq; key += 32) past[key] = args.seq;
}

__device__ __forceinline__ float dot_chunk(uint4 a, uint4 b) {
  const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (ELEMENT == FP32)
      sum = fmaf(__uint_as_float(x[i]), __uint_as_float(y[i]), sum);
    else
      sum = fmaf(low_half(x[i]), low_half(y[i]), fmaf(high_half(x[i]), high_half(y[i]), sum));
  }
  return sum;
}

// delta = <o, do> and lse2 as [B, N, padded] of the sequence blockIdx.y; LANES threads do four
// positions of a head, a block 256 / LANES heads one after the other. What the backward adds to is
// zeroed on the way, see CLEARS.
extern "C" __global__ void __launch_bounds__(256)
attention_delta(const __grid_constant__ Args args) {
  constexpr int CHUNKS = (HEAD_DIM / CHUNK + LANES - 1) / LANES;
  const int b = blockIdx.y, lane = threadIdx.x % LANES;
  const int unit = blockIdx.x * (256 / LANES) + threadIdx.x / LANES;
  const int h = unit % args.heads, first = unit / args.heads * ROWS_A_THREAD;
  const u64 row = (u64)args.heads * (HEAD_DIM / CHUNK);
  const u64 at = (b * (u64)args.seq + first) * row + h * (HEAD_DIM / CHUNK);
  const uint4 *o = (const uint4*)args.o + at, *d_o = (const uint4*)args.d_o + at;
  uint4 x[ROWS_A_THREAD][CHUNKS], y[ROWS_A_THREAD][CHUNKS];
#pragma unroll
  for (int i = 0; i < ROWS_A_THREAD; i++)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int chunk = lane + c * LANES;
      x[i][c] = y[i][c] = make_uint4(0, 0, 0, 0);
      if (first + i < args.seq && chunk < HEAD_DIM / CHUNK) {
        x[i][c] = o[i * row + chunk];
        y[i][c] = d_o[i * row + chunk];
      }
    }
  const u64 head = (u64)b * args.heads + h;
  float lse[ROWS_A_THREAD];
#pragma unroll
  for (int i = 0; i < ROWS_A_THREAD; i++) {
    const u64 r = b * (u64)args.seq + first + i;
    lse[i] = lane == 0 && first + i < args.seq ? args.lse[r * args.heads + h] * LOG2_E : INFINITE;
  }
  const int rows = (args.seq + Q_BLOCK - 1) / Q_BLOCK * Q_BLOCK;
  if (CLEARS == SUMS && first < rows) {
    float4* sums = (float4*)args.sums + (head * rows + first) * (HEAD_DIM / 4) + lane;
    for (int c = 0; lane + c < ROWS_A_THREAD * HEAD_DIM / 4; c += LANES)
      sums[c] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (CLEARS == TURNS && first < rows && first % Q_BLOCK == 0 && lane == 0)
    args.turns[(head * rows + first) / Q_BLOCK] = 0;
  float sum[ROWS_A_THREAD];
#pragma unroll
  for (int i = 0; i < ROWS_A_THREAD; i++) {
    sum[i] = 0.f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) sum[i] += dot_chunk(x[i][c], y[i][c]);
#pragma unroll
    for (int step = LANES / 2; step > 0; step >>= 1)
      sum[i] += __shfl_xor_sync(~0u, sum[i], step);
  }
  if (lane == 0 && first < args.padded) {
    *(float4*)(args.delta + head * args.padded + first) = {sum[0], sum[1], sum[2], sum[3]};
    *(float4*)(args.lse2 + head * args.padded + first) = {lse[0], lse[1], lse[2], lse[3]};
  }
}

#if ELEMENT != FP32 && HEAD_DIM % 32 == 0
// dq, rounded, from the sums that attention_backward leaves: a block a 64 queries of a head, 128
// threads a 32 columns.
extern "C" __global__ void __launch_bounds__(HEAD_DIM * 4)
attention_round(const __grid_constant__ Args args) {
  const int blocks = (args.seq + Q_BLOCK - 1) / Q_BLOCK * (Q_BLOCK / 64);
  const int block = blockIdx.x % blocks, head = blockIdx.x / blocks;
  const int b = head / args.heads, h = head - b * args.heads;
  const int part = threadIdx.x >> 7, t = threadIdx.x & 127, q = t & 3;
  const u64 chunk = (u64)blockIdx.x * (HEAD_DIM / 8) + part * 4;
  const float4* from = (const float4*)args.sums + chunk * 128;
  float4 v[4];
#pragma unroll
  for (int j = 0; j < 4; j++) v[j] = from[j * 128 + t];
  u32 upper[4], lower[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    upper[j] = pack_pair(v[j].x * args.scale, v[j].y * args.scale);
    lower[j] = pack_pair(v[j].z * args.scale, v[j].w * args.scale);
  }
  quad_transpose(upper, q);
  quad_transpose(lower, q);
  const int r = block * 64 + (t >> 5) * 16 + ((t & 31) >> 2), column = part * 32 + 8 * q;
  u16* to = (u16*)args.dq + (((u64)b * args.seq + r) * args.heads + h) * HEAD_DIM + column;
  if (r < args.seq) store16(to, upper[0], upper[1], upper[2], upper[3]);
  to += (u64)8 * args.heads * HEAD_DIM;
  if (r + 8 < args.seq) store16(to, lower[0], lower[1], lower[2], lower[3]);
}
#endif
