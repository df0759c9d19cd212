// Masks and softmax on fragments of accumulators, for all attention kernels: N registers of a
// thread, of which 4 j + 2 e + c is row `row` + 8 e, column 8 j + `column` + c of a tile.

// The first key that the query at position s of a sequence sees. What it may not be is clamped, so
// that a wrong start reads nothing foreign.
__device__ __forceinline__ int first_key(const Args& args, int sequence, int s) {
  if (!MASKED) return 0;
  const int start = args.starts ? args.starts[(u64)sequence * args.seq + s] : 0;
  return min(max(max(start, s + 1 - args.window), 0), s);
}

// A thread's queries in the forward: of those from `start` on.
struct Rows {
  int start, row, column;
  int first[2], first_last;  // keys its rows and the last row of all see first
  int first_own;             // and the first row of all, where they are of a Block
  float maximum[2], sum[2], rescale[2];
};

// The thread's part of COUNT queries from `start` on, its warp's from `warp_row` of them.
template <int COUNT>
__device__ __forceinline__ Rows rows_of(const Args& args, int sequence, int start, int warp_row,
                                        int lane) {
  Rows rows;
  rows.start = start;
  rows.row = warp_row + (lane >> 2);
  rows.column = 2 * (lane & 3);
  if (MASKED) {
    const int r = start + rows.row;
    rows.first[0] = r < args.seq ? first_key(args, sequence, r) : 0;
    rows.first[1] = r + 8 < args.seq ? first_key(args, sequence, r + 8) : 0;
    rows.first_last = first_key(args, sequence, min(start + COUNT - 1, args.seq - 1));
  }
  rows.maximum[0] = rows.maximum[1] = -INFINITE;
  rows.sum[0] = rows.sum[1] = 0.f;
  return rows;
}

// Scores of keys from `key` on, outside of the mask, to minus infinity.
template <int N> __device__ __forceinline__ void mask(float (&s)[N], const Rows& rows, int key) {
  if (MASKED && key < rows.first_last) {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (key + 8 * (i >> 2) + rows.column + (i & 1) < rows.first[(i >> 1) & 1]) s[i] = -INFINITE;
  }
  if (key + 2 * N - 1 > rows.start) {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (key + 8 * (i >> 2) + rows.column + (i & 1) > rows.start + rows.row + 8 * ((i >> 1) & 1))
        s[i] = -INFINITE;
  }
}

// Scores to powers of two relative to the running maximum of their rows.
template <int N>
__device__ __forceinline__ void softmax(float (&s)[N], Rows& rows, float scale_log2) {
#pragma unroll
  for (int e = 0; e < 2; e++) {
    float high = fmaxf(s[2 * e], s[2 * e + 1]), other = fmaxf(s[4 + 2 * e], s[5 + 2 * e]);
#pragma unroll
    for (int j = 2; j < N / 4; j += 2) {
      high = fmaxf(high, fmaxf(s[4 * j + 2 * e], s[4 * j + 2 * e + 1]));
      other = fmaxf(other, fmaxf(s[4 * j + 4 + 2 * e], s[4 * j + 5 + 2 * e]));
    }
    high = fmaxf(high, other);
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
    high = fmaxf(high, rows.maximum[e]);
    // A row that has seen no key yet has no maximum to subtract.
    const float shift = high == -INFINITE ? 0.f : high * scale_log2;
    rows.rescale[e] = power_of_two(rows.maximum[e] * scale_log2 - shift);
    rows.maximum[e] = high;
    float sum = 0.f, more = 0.f;
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
      s[4 * j + 2 * e] = power_of_two(fmaf(s[4 * j + 2 * e], scale_log2, -shift));
      s[4 * j + 2 * e + 1] = power_of_two(fmaf(s[4 * j + 2 * e + 1], scale_log2, -shift));
      sum += s[4 * j + 2 * e];
      more += s[4 * j + 2 * e + 1];
    }
    rows.sum[e] = fmaf(rows.sum[e], rows.rescale[e], sum + more);
  }
}

// Writes lse of rows before `end`, and 1 / sum of each row into `inverse`.
__device__ __forceinline__ void finish_rows(const Args& args, int sequence, int head,
                                            const Rows& rows, int end, float (&inverse)[2]) {
#pragma unroll
  for (int e = 0; e < 2; e++) {
    float sum = rows.sum[e];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    inverse[e] = 1.f / sum;
    const int r = rows.start + rows.row + 8 * e;
    if (rows.column == 0 && r < end)
      args.lse[((u64)sequence * args.seq + r) * args.heads + head] =
          (rows.maximum[e] * args.scale_log2 + log_of_two(sum)) * LN_2;
  }
}

// A thread's queries where dq is computed.
struct QueryRows {
  int start, row, column;
  int first[2], first_last;
  bool alone[2];  // that row sees one key: its gradients of scores are zero
  float lse2[2], delta[2];
};

template <int COUNT>
__device__ __forceinline__ QueryRows query_rows_of(const Args& args, int sequence, int head,
                                                   int start, int warp_row, int lane) {
  QueryRows rows;
  rows.start = start;
  rows.row = warp_row + (lane >> 2);
  rows.column = 2 * (lane & 3);
  const u64 statistics = ((u64)sequence * args.heads + head) * args.padded;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int r = start + rows.row + 8 * e;
    const bool live = r < args.seq;
    rows.lse2[e] = live ? args.lse2[statistics + r] : INFINITE;
    rows.delta[e] = live ? args.delta[statistics + r] : 0.f;
    rows.first[e] = live ? first_key(args, sequence, r) : 0;
    rows.alone[e] = live && rows.first[e] == r;
  }
  rows.first_last = first_key(args, sequence, min(start + COUNT - 1, args.seq - 1));
  return rows;
}

// Scores outside of the mask, and of rows with one key alone, to minus infinity.
template <int N>
__device__ __forceinline__ void mask(float (&s)[N], const QueryRows& rows, int key) {
  if (MASKED && key < rows.first_last) {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (key + 8 * (i >> 2) + rows.column + (i & 1) < rows.first[(i >> 1) & 1]) s[i] = -INFINITE;
  }
  if (key + 2 * N - 1 > rows.start) {
    const int own = rows.start + rows.row - key - rows.column;
    const int last[2] = {own - rows.alone[0], own + 8 - rows.alone[1]};
#pragma unroll
    for (int i = 0; i < N; i++)
      if (8 * (i >> 2) + (i & 1) > last[(i >> 1) & 1]) s[i] = -INFINITE;
  }
}

// A thread's keys where dk and dv are computed: rows are keys, columns queries.
struct Keys {
  int start, row, column;
  int past[2], past_first, past_last;  // one past the queries that see its keys, and all of them
  bool alone[2];                       // the query of that position sees this key alone
};

template <int COUNT>
__device__ __forceinline__ Keys keys_of(const Args& args, int sequence, int start, int warp_row,
                                        int lane) {
  Keys keys;
  keys.start = start;
  keys.row = warp_row + (lane >> 2);
  keys.column = 2 * (lane & 3);
  const u64 first = (u64)sequence * args.seq;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int r = start + keys.row + 8 * e;
    const bool live = MASKED && r < args.seq;
    keys.past[e] = live ? args.past[first + r] : args.seq;
    keys.alone[e] = live ? first_key(args, sequence, r) == r : r == 0;
  }
  const int last = args.seq - 1;
  keys.past_first = MASKED ? args.past[first + min(start, last)] : args.seq;
  keys.past_last = MASKED ? args.past[first + min(start + COUNT - 1, last)] : args.seq;
  return keys;
}

// Scores of keys by queries from q0 on, outside of the mask, to minus infinity. COUNT keys.
template <int COUNT, int N>
__device__ __forceinline__ void mask(float (&s)[N], const Keys& keys, int q0) {
  if (MASKED && q0 + 2 * N > keys.past_first) {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (q0 + 8 * (i >> 2) + keys.column + (i & 1) >= keys.past[(i >> 1) & 1]) s[i] = -INFINITE;
  }
  if (q0 < keys.start + COUNT - 1) {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (q0 + 8 * (i >> 2) + keys.column + (i & 1) < keys.start + keys.row + 8 * ((i >> 1) & 1))
        s[i] = -INFINITE;
  }
}

// Weights of queries that see one key alone have no gradient: zero, once they are used for dv.
template <int COUNT, int N>
__device__ __forceinline__ void forget_alone(float (&s)[N], const Keys& keys, int q0) {
  const bool own = q0 < keys.start + COUNT && keys.start < q0 + 2 * N;
  if (MASKED ? own : own && q0 == 0) {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (q0 + 8 * (i >> 2) + keys.column + (i & 1) == keys.start + keys.row + 8 * ((i >> 1) & 1) &&
          keys.alone[(i >> 1) & 1])
        s[i] = 0.f;
  }
}

__device__ __forceinline__ float2 load_shared_pair(u32 from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from));
  return v;
}

// Scores to weights, by the queries' lse2 in shared memory at `rows`.
template <int N>
__device__ __forceinline__ void exponentiate(float (&s)[N], u32 rows, float scale_log2) {
#pragma unroll
  for (int j = 0; j < N / 4; j++) {
    const float2 lse2 = load_shared_pair(rows + j * 32);
    s[4 * j] = power_of_two(fmaf(s[4 * j], scale_log2, -lse2.x));
    s[4 * j + 1] = power_of_two(fmaf(s[4 * j + 1], scale_log2, -lse2.y));
    s[4 * j + 2] = power_of_two(fmaf(s[4 * j + 2], scale_log2, -lse2.x));
    s[4 * j + 3] = power_of_two(fmaf(s[4 * j + 3], scale_log2, -lse2.y));
  }
}

// dp = p (dp - delta), by the queries' delta in shared memory at `rows`.
template <int N>
__device__ __forceinline__ void score_gradients(float (&dp)[N], const float (&p)[N], u32 rows) {
#pragma unroll
  for (int j = 0; j < N / 4; j++) {
    const float2 delta = load_shared_pair(rows + j * 32);
    dp[4 * j] = p[4 * j] * (dp[4 * j] - delta.x);
    dp[4 * j + 1] = p[4 * j + 1] * (dp[4 * j + 1] - delta.y);
    dp[4 * j + 2] = p[4 * j + 2] * (dp[4 * j + 2] - delta.x);
    dp[4 * j + 3] = p[4 * j + 3] * (dp[4 * j + 3] - delta.y);
  }
}

// Fragments of a product's first operand, rounded.
template <int N>
__device__ __forceinline__ void round_pairs(u32 (&to)[N / 2], const float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) to[i] = pack_pair(d[2 * i], d[2 * i + 1]);
}
