// Attention of new tokens over keys and values that are kept, for generating text. The host puts
// this file after elements.cu. Host macros: ELEMENT, HEAD_DIM.
//
// A block takes one head of one query and a part of its keys, and leaves a sum that is relative to
// the part's largest score; another kernel joins the parts in their order. Elements of all keys lie
// side by side, so threads take a key each there, and an element of the values each behind it.
constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int PART = 256;                      // keys of a block
constexpr int KEYS = PART / THREADS;           // of a thread
constexpr int ROWS = HEAD_DIM < THREADS ? THREADS / HEAD_DIM : 1;  // values that are added at once
constexpr int EACH = (HEAD_DIM + THREADS - 1) / THREADS;           // elements of a thread
constexpr int WORDS = HEAD_DIM + 2;            // of a part: its sum, largest score, sum of weights

// keys [KV * H, capacity] and values [capacity, KV * H] get the rows of k and v from `past` on.
extern "C" __global__ void __launch_bounds__(256)
cache_append(const element* k, const element* v, element* keys, element* values, int rows,
             int width, int past, int capacity) {
  const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= (long long)rows * width) return;
  const int row = at / width, column = at % width;
  keys[(u64)column * capacity + past + row] = k[at];
  values[(u64)(past + row) * width + column] = v[at];
}

__device__ __forceinline__ float block_max(float x) {
  __shared__ float all[WARPS];
  x = warp_max(x);
  if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = x;
  __syncthreads();
  x = all[0];
#pragma unroll
  for (int w = 1; w < WARPS; w++) x = fmaxf(x, all[w]);
  return x;
}

__device__ __forceinline__ float block_sum(float x) {
  __shared__ float all[WARPS];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) x += all[w];
  return x;
}

// parts: fp32 [queries, heads, parts, WORDS]. Grid: heads, parts, queries from `first` on.
extern "C" __global__ void __launch_bounds__(THREADS)
cached_attention(const element* q, const element* keys, const element* values, float* parts,
                 float scale, int group, int past, int capacity, int first) {
  const int head = blockIdx.x, heads = gridDim.x, query = first + blockIdx.z;
  const int begin = blockIdx.y * PART, end = min(past + query + 1, begin + PART);
  if (begin >= end) return;
  const int column = head / group * HEAD_DIM, width = heads / group * HEAD_DIM;
  __shared__ float scaled[HEAD_DIM], weights[PART], sums[ROWS > 1 ? THREADS : 1];
  for (int e = threadIdx.x; e < HEAD_DIM; e += THREADS)
    scaled[e] = scale * as_float(q[((u64)query * heads + head) * HEAD_DIM + e]);
  __syncthreads();
  float score[KEYS] = {};
#pragma unroll 8
  for (int e = 0; e < HEAD_DIM; e++) {
    const element* at = keys + (u64)(column + e) * capacity + begin + threadIdx.x;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      const bool mine = begin + (int)threadIdx.x + i * THREADS < end;
      score[i] = fmaf(scaled[e], mine ? as_float(at[i * THREADS]) : 0.f, score[i]);
    }
  }
  float most = __int_as_float(0xff800000);
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const bool mine = begin + (int)threadIdx.x + i * THREADS < end;
    score[i] = mine ? score[i] : __int_as_float(0xff800000);
    most = fmaxf(most, score[i]);
  }
  most = block_max(most);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const float weight = expf(score[i] - most);
    weights[threadIdx.x + i * THREADS] = weight;
    sum += weight;
  }
  sum = block_sum(sum);
  float* part = parts + (((u64)blockIdx.z * heads + head) * gridDim.y + blockIdx.y) * WORDS;
  const int count = end - begin, row = ROWS > 1 ? threadIdx.x / HEAD_DIM : 0;
  const int element_of = ROWS > 1 ? threadIdx.x % HEAD_DIM : threadIdx.x;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int e = element_of + i * THREADS;
    float out = 0.f;
    if (row < ROWS && e < HEAD_DIM) {
      const element* at = values + (u64)begin * width + column + e;
#pragma unroll 8
      for (int j = row; j < count; j += ROWS)
        out = fmaf(weights[j], as_float(at[(u64)j * width]), out);
    }
    if (ROWS == 1) {
      if (e < HEAD_DIM) part[e] = out;
      continue;
    }
    sums[threadIdx.x] = out;
    __syncthreads();
    if (threadIdx.x < HEAD_DIM) {
#pragma unroll
      for (int r = 1; r < ROWS; r++) out += sums[r * HEAD_DIM + threadIdx.x];
      part[threadIdx.x] = out;
    }
  }
  if (threadIdx.x == 0) {
    part[HEAD_DIM] = most;
    part[HEAD_DIM + 1] = sum;
  }
}

// o = what the parts of each query and head are together. Grid: heads, queries from `first` on.
extern "C" __global__ void __launch_bounds__(THREADS)
cached_join(const float* parts, element* o, int all, int past, int first) {
  const int head = blockIdx.x, heads = gridDim.x, query = first + blockIdx.y;
  const int count = (past + query + PART) / PART;
  const float* at = parts + ((u64)blockIdx.y * heads + head) * all * WORDS;
  float most = at[HEAD_DIM];
  for (int p = 1; p < count; p++) most = fmaxf(most, at[p * WORDS + HEAD_DIM]);
  for (int e = threadIdx.x; e < HEAD_DIM; e += THREADS) {
    float out = 0.f, sum = 0.f;
#pragma unroll 4
    for (int p = 0; p < count; p++) {
      const float weight = expf(at[p * WORDS + HEAD_DIM] - most);
      out = fmaf(weight, at[p * WORDS + e], out);
      sum = fmaf(weight, at[p * WORDS + HEAD_DIM + 1], sum);
    }
    o[((u64)query * heads + head) * HEAD_DIM + e] = as_element(out / sum);
  }
}
