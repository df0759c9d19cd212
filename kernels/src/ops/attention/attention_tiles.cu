// Attention for sm_80 and later, for every head dim, and in fp32: cp.async, and products by warps
// (attention_fragments.cu, attention_plain.cu). Four warps, 16 rows each of what stays; tiles of
// MOVING rows of what passes by. Sums have a fixed order: the same bits every time.
//
// Host macros: PADDED, HEAD_DIM in whole steps of a product, zeros behind; MOVING; SPLIT: parts of
// the columns of dk and dv, a block each, where registers do not hold all.
constexpr int THREADS = 128, STAYING = 64;
constexpr int CHUNKS = PADDED / CHUNK;  // 16 bytes each
constexpr u32 STAYING_BYTES = STAYING * PITCH, MOVING_BYTES = MOVING * PITCH;
constexpr int COLUMNS = PADDED / SPLIT;

// Rows of one head of a sequence.
struct HeadRows {
  const u8* at;
  u64 stride;
};
__device__ __forceinline__ HeadRows rows_at(const void* base, const Args& args, int sequence,
                                            int head, int heads) {
  const u64 stride = (u64)heads * HEAD_DIM * SIZE;
  const u64 first = (u64)sequence * args.seq * stride + (u64)head * HEAD_DIM * SIZE;
  return {(const u8*)base + first, stride};
}

// Rows first .. first + COUNT - 1 into a tile; zeros past the sequence and past the columns.
template <int COUNT>
__device__ __forceinline__ void load_tile(u32 to, const HeadRows& rows, int first, int seq) {
#pragma unroll 4
  for (int i = threadIdx.x; i < COUNT * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const bool live = first + row < seq && chunk * CHUNK < HEAD_DIM;
    const u8* from = rows.at + (live ? (u64)(first + row) * rows.stride + chunk * 16 : 0);
    copy16(to + row * PITCH + chunk * 16, from, live ? 16 : 0);
  }
}

// A warp's 16 rows of COUNT columns from `column` on, from row `row` of the sequence on.
template <int COUNT>
__device__ __forceinline__ void store_rows(const HeadRows& rows, const float (&d)[COUNT / 2],
                                           float scale0, float scale1, int row, int column,
                                           int seq, int lane) {
  const int r = row + (lane >> 2);
#pragma unroll
  for (int j = 0; j < COUNT / 8; j++) {
    const int x = column + 8 * j + 2 * (lane & 3);
    if (x >= HEAD_DIM) continue;
    u8* to = (u8*)rows.at + (u64)r * rows.stride + x * SIZE;
    if (r < seq) store_pair(to, d[4 * j] * scale0, d[4 * j + 1] * scale0);
    to += 8 * rows.stride;
    if (r + 8 < seq) store_pair(to, d[4 * j + 2] * scale1, d[4 * j + 3] * scale1);
  }
}

template <int N> __device__ __forceinline__ void clear(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) d[i] = 0.f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_forward(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 q = shared_address(memory), k = q + STAYING_BYTES, v = k + MOVING_BYTES;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, all = args.batch * args.heads;
  // The longest blocks, those of the last queries, first.
  const int block = (args.seq - 1) / STAYING - (int)blockIdx.x / all, at = blockIdx.x % all;
  const int b = at / args.heads, h = at % args.heads, kv = h / (args.heads / args.kv_heads);
  const int start = block * STAYING;
  const HeadRows keys = rows_at(args.k, args, b, kv, args.kv_heads);
  const HeadRows values = rows_at(args.v, args, b, kv, args.kv_heads);
  Rows rows = rows_of<STAYING>(args, b, start, 16 * warp, lane);
  const int low = first_key(args, b, start) / MOVING;
  const int high = (min(start + STAYING, args.seq) - 1) / MOVING;
  load_tile<STAYING>(q, rows_at(args.q, args, b, h, args.heads), start, args.seq);
  load_tile<MOVING>(k, keys, high * MOVING, args.seq);
  copies_commit();
  float o[PADDED / 2], s[MOVING / 2];
  clear(o);
  for (int n = high; n >= low; n--) {
    copies_wait<0>();
    __syncthreads();  // K is there, and every warp has done with V
    load_tile<MOVING>(v, values, n * MOVING, args.seq);
    copies_commit();
    multiply_rows<MOVING>(s, q + 16 * warp * PITCH, k, lane);
    mask(s, rows, n * MOVING);
    softmax(s, rows, args.scale_log2);
    copies_wait<0>();
    __syncthreads();  // V is there, and every warp has done with K
    if (n > low) load_tile<MOVING>(k, keys, (n - 1) * MOVING, args.seq);
    copies_commit();
#pragma unroll
    for (int i = 0; i < PADDED / 2; i++) o[i] *= rows.rescale[(i >> 1) & 1];
    multiply_weights<PADDED>(o, Weights<MOVING>(s), v, lane);
  }
  float inverse[2];
  finish_rows(args, b, h, rows, args.seq, inverse);
  store_rows<PADDED>(rows_at(args.o, args, b, h, args.heads), o, inverse[0], inverse[1],
                     start + 16 * warp, 0, args.seq, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_query(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 q = shared_address(memory), d_o = q + STAYING_BYTES;
  const u32 k = d_o + STAYING_BYTES, v = k + MOVING_BYTES;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, all = args.batch * args.heads;
  const int block = (args.seq - 1) / STAYING - (int)blockIdx.x / all, at = blockIdx.x % all;
  const int b = at / args.heads, h = at % args.heads, kv = h / (args.heads / args.kv_heads);
  const int start = block * STAYING;
  const HeadRows keys = rows_at(args.k, args, b, kv, args.kv_heads);
  const HeadRows values = rows_at(args.v, args, b, kv, args.kv_heads);
  const QueryRows rows = query_rows_of<STAYING>(args, b, h, start, 16 * warp, lane);
  const int low = first_key(args, b, start) / MOVING;
  const int high = (min(start + STAYING, args.seq) - 1) / MOVING;
  load_tile<STAYING>(q, rows_at(args.q, args, b, h, args.heads), start, args.seq);
  load_tile<STAYING>(d_o, rows_at(args.d_o, args, b, h, args.heads), start, args.seq);
  float dq[PADDED / 2], s[MOVING / 2], dp[MOVING / 2];
  clear(dq);
  for (int n = high; n >= low; n--) {
    __syncthreads();  // every warp has done with the tiles before
    load_tile<MOVING>(k, keys, n * MOVING, args.seq);
    load_tile<MOVING>(v, values, n * MOVING, args.seq);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    multiply_rows<MOVING>(s, q + 16 * warp * PITCH, k, lane);
    multiply_rows<MOVING>(dp, d_o + 16 * warp * PITCH, v, lane);
    mask(s, rows, n * MOVING);
#pragma unroll
    for (int i = 0; i < MOVING / 2; i++) {
      const int e = (i >> 1) & 1;
      s[i] = power_of_two(fmaf(s[i], args.scale_log2, -rows.lse2[e]));
      dp[i] = s[i] * (dp[i] - rows.delta[e]);
    }
    multiply_weights<PADDED>(dq, Weights<MOVING>(dp), k, lane);
  }
  store_rows<PADDED>(rows_at(args.dq, args, b, h, args.heads), dq, args.scale, args.scale,
                     start + 16 * warp, 0, args.seq, lane);
}

// dk and dv of 64 keys, COLUMNS of them, over the queries of all heads that share them.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 k = shared_address(memory), v = k + STAYING_BYTES;
  const u32 q = v + STAYING_BYTES, d_o = q + MOVING_BYTES, statistics = d_o + MOVING_BYTES;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int all = args.batch * args.kv_heads * SPLIT, at = blockIdx.x % all;
  const int block = blockIdx.x / all, column = at % SPLIT * COLUMNS;
  const int b = at / SPLIT / args.kv_heads, kv = at / SPLIT % args.kv_heads;
  const int start = block * STAYING, last = min(start + STAYING, args.seq) - 1;
  const int group = args.heads / args.kv_heads;
  const Keys keys = keys_of<STAYING>(args, b, start, 16 * warp, lane);
  const int low = start / MOVING;
  const int end = MASKED ? args.past[(u64)b * args.seq + last] : args.seq;
  load_tile<STAYING>(k, rows_at(args.k, args, b, kv, args.kv_heads), start, args.seq);
  load_tile<STAYING>(v, rows_at(args.v, args, b, kv, args.kv_heads), start, args.seq);
  float dk[COLUMNS / 2], dv[COLUMNS / 2], s[MOVING / 2], dp[MOVING / 2];
  clear(dk);
  clear(dv);
  for (int member = 0; member < group; member++) {
    const int h = kv * group + member;
    const u64 head = ((u64)b * args.heads + h) * args.padded;
    const HeadRows queries = rows_at(args.q, args, b, h, args.heads);
    const HeadRows gradients = rows_at(args.d_o, args, b, h, args.heads);
    for (int m = low; m * MOVING < end; m++) {
      const int q0 = m * MOVING;
      __syncthreads();  // every warp has done with the tiles before
      load_tile<MOVING>(q, queries, q0, args.seq);
      load_tile<MOVING>(d_o, gradients, q0, args.seq);
      // lse2, then delta; rows are padded beyond the sequence.
      if (threadIdx.x < MOVING / 2) {
        const int half = threadIdx.x / (MOVING / 4), four = threadIdx.x % (MOVING / 4) * 4;
        const float* from = (half ? args.delta : args.lse2) + head + q0 + four;
        copy16(statistics + (half * MOVING + four) * 4, from, 16);
      }
      copies_commit();
      copies_wait<0>();
      __syncthreads();
      multiply_rows<MOVING>(s, k + 16 * warp * PITCH, q, lane);
      multiply_rows<MOVING>(dp, v + 16 * warp * PITCH, d_o, lane);
      mask<STAYING>(s, keys, q0);
      exponentiate(s, statistics + keys.column * 4, args.scale_log2);
      multiply_weights<COLUMNS>(dv, Weights<MOVING>(s), d_o + column * SIZE, lane);
      forget_alone<STAYING>(s, keys, q0);
      score_gradients(dp, s, statistics + (MOVING + keys.column) * 4);
      multiply_weights<COLUMNS>(dk, Weights<MOVING>(dp), q + column * SIZE, lane);
    }
  }
  const HeadRows to_dk = rows_at(args.dk, args, b, kv, args.kv_heads);
  const HeadRows to_dv = rows_at(args.dv, args, b, kv, args.kv_heads);
  const int row = start + 16 * warp;
  store_rows<COLUMNS>(to_dv, dv, 1.f, 1.f, row, column, args.seq, lane);
  store_rows<COLUMNS>(to_dk, dk, args.scale, args.scale, row, column, args.seq, lane);
}
