// Rows of a table by token, and their gradients, added in the order of the tokens. Host macros:
// ELEMENT (rows), TABLE (what the table or its gradient is of: ELEMENT, or FP32).
constexpr int SLICE = 256;  // columns that a warp adds
constexpr int AHEAD = 16;   // rows in flight

__device__ __forceinline__ float table_load(const void* base, u64 at) {
  return load_either(base, TABLE == FP32, at);
}

// x[t] = table[ids[t]]; an id outside of the table gives no numbers, which the step's check finds.
extern "C" __global__ void __launch_bounds__(256)
embed(const u32* ids, const void* table, element* x, int dim, int vocab, int whole) {
  const u32 id = ids[blockIdx.x];
  element* to = x + (u64)blockIdx.x * dim;
  if (id >= vocab) {
    for (int i = threadIdx.x; i < dim; i += blockDim.x) to[i] = as_element(__int_as_float(~0));
    return;
  }
  if (whole) {
    const uint4* from = (const uint4*)((const element*)table + (u64)id * dim);
    for (int i = threadIdx.x; i < dim / CHUNK; i += blockDim.x) ((uint4*)to)[i] = from[i];
    return;
  }
  for (int i = threadIdx.x; i < dim; i += blockDim.x)
    to[i] = as_element(table_load(table, (u64)id * dim + i));
}

// counts[id] = tokens of id; `counts` starts as zeros.
extern "C" __global__ void __launch_bounds__(256)
embed_count(const u32* ids, u32* counts, int tokens, int vocab) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t < tokens && ids[t] < vocab) atomicAdd(&counts[ids[t]], 1u);
}

// A range of slots for each id met, in any order: ranges do not touch each other's results.
extern "C" __global__ void __launch_bounds__(256)
embed_ranges(const u32* counts, u32* starts, u32* used, u32* cursor, int vocab) {
  const int id = blockIdx.x * blockDim.x + threadIdx.x;
  if (id >= vocab || counts[id] == 0) return;
  starts[id] = atomicAdd(cursor, counts[id]);
  used[id] = 0;
}

// Tokens into their id's range, in any order.
extern "C" __global__ void __launch_bounds__(256)
embed_place(const u32* ids, const u32* starts, u32* used, u32* slots, int tokens, int vocab) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= tokens || ids[t] >= vocab) return;
  slots[starts[ids[t]] + atomicAdd(&used[ids[t]], 1u)] = t;
}

// Ranges in ascending order: a token's place is how many of its range come before it.
extern "C" __global__ void __launch_bounds__(256)
embed_order(const u32* ids, const u32* starts, const u32* counts, const u32* slots, u32* ordered,
            const u32* cursor) {
  const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= *cursor) return;
  const u32 token = slots[at], id = ids[token], start = starts[id], count = counts[id];
  u32 before = 0;
  for (u32 i = 0; i < count; i++) before += slots[start + i] < token;
  ordered[start + before] = token;
}

// dtable[id] += its tokens' rows, ascending. A block for every slot and 4 warps of columns; the one
// at the start of a range adds the whole range.
extern "C" __global__ void __launch_bounds__(128)
embed_add(const u32* ids, const u32* starts, const u32* counts, const u32* ordered,
          const u32* cursor, const element* dx, void* dtable, int dim, int whole) {
  const u32 at = blockIdx.x;
  if (at >= *cursor) return;
  const u32 id = ids[ordered[at]];
  if (starts[id] != at) return;
  const u32 count = counts[id];
  const int warp = blockIdx.y * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = warp * SLICE, end = min(dim, begin + SLICE);
  if (whole) {
    for (int c = begin + lane * CHUNK; c < end; c += 32 * CHUNK) {
      float sum[CHUNK], own[CHUNK];
#pragma unroll
      for (int i = 0; i < CHUNK; i++) sum[i] = table_load(dtable, (u64)id * dim + c + i);
      // A frequent token's rows are many: enough of them on their way at once.
      u32 n = 0;
      for (; n + AHEAD <= count; n += AHEAD) {
        Raw<CHUNK> rows[AHEAD];
#pragma unroll
        for (int r = 0; r < AHEAD; r++)
          rows[r] = load<CHUNK>(dx + (u64)ordered[at + n + r] * dim + c);
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
          unpack(rows[r], own);
#pragma unroll
          for (int i = 0; i < CHUNK; i++) sum[i] += own[i];
        }
      }
      for (; n < count; n++) {
        unpack(load<CHUNK>(dx + (u64)ordered[at + n] * dim + c), own);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) sum[i] += own[i];
      }
#pragma unroll
      for (int i = 0; i < CHUNK; i++)
        store_either(dtable, TABLE == FP32, (u64)id * dim + c + i, sum[i]);
    }
    return;
  }
  for (int c = begin + lane; c < end; c += 32) {
    float sum = table_load(dtable, (u64)id * dim + c);
    for (u32 n = 0; n < count; n++) sum += as_float(dx[(u64)ordered[at + n] * dim + c]);
    store_either(dtable, TABLE == FP32, (u64)id * dim + c, sum);
  }
}
