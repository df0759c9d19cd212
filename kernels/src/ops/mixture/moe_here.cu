// Rows of the experts that one rank of several computes, and slices of experts (src/slices.rs).
// Host macro: TOP_K, of the slices' choices.
constexpr int TOKENS = 256;          // of a block
constexpr int WORDS = TOKENS / 32;

// How many tokens count, the first ones: `tokens`, or as many as `listed` says.
struct Present {
  int tokens;
  const int* listed;
  __device__ __forceinline__ int count() const { return listed ? *listed : tokens; }
};

// Expert of a slot by its place here, below 0 for one that lies elsewhere.
__device__ __forceinline__ int place_of(const int* ids, u64 slot, int present, int t,
                                        int first, int locals) {
  const int place = ids[slot] - first;
  return t < present && ids[slot] >= first && place < locals ? place : -1;
}

// pos [A, K]: rank of a slot among the block's of its expert, below 0 for none;
// histogram [G + 1][blocks]: slots of the block by expert, and of all. A token names an expert
// once.
extern "C" __global__ void __launch_bounds__(TOKENS)
here_count(const int* ids, Present rows, int tokens, int first, int locals, int* pos,
           int* histogram) {
  extern __shared__ u32 masks[];  // [G][WORDS]: the block's tokens that chose each expert
  __shared__ int all;
  const int at = threadIdx.x, t = blockIdx.x * TOKENS + at, present = rows.count();
  if (at == 0) all = 0;
  for (int i = at; i < locals * WORDS; i += TOKENS) masks[i] = 0;
  __syncthreads();
  const auto place = [&](int k) {
    return t < tokens ? place_of(ids, (u64)t * TOP_K + k, present, t, first, locals) : -1;
  };
#pragma unroll 8
  for (int k = 0; k < TOP_K; k++)
    if (place(k) >= 0) atomicOr(&masks[place(k) * WORDS + (at >> 5)], 1u << (at & 31));
  __syncthreads();
  for (int k = 0; k < TOP_K && t < tokens; k++) {
    int rank = -1;
    if (place(k) >= 0) {
      const u32* own = masks + place(k) * WORDS;
      rank = __popc(own[at >> 5] & ((1u << (at & 31)) - 1));
      for (int w = 0; w < at >> 5; w++) rank += __popc(own[w]);
    }
    pos[(u64)t * TOP_K + k] = rank;
  }
  for (int g = at; g < locals; g += TOKENS) {
    int count = 0;
    for (int w = 0; w < WORDS; w++) count += __popc(masks[g * WORDS + w]);
    histogram[(u64)g * gridDim.x + blockIdx.x] = count;
    atomicAdd(&all, count);
  }
  __syncthreads();
  if (at == 0) histogram[(u64)locals * gridDim.x + blockIdx.x] = all;
}

// A warp an expert: its histogram becomes where each block's rows start among the expert's.
extern "C" __global__ void __launch_bounds__(32)
here_scan(int* histogram, int blocks, int* counts) {
  int* own = histogram + (u64)blockIdx.x * blocks;
  const int lane = threadIdx.x;
  int carried = 0;
  for (int first = 0; first < blocks; first += 32) {
    const int b = first + lane, count = b < blocks ? own[b] : 0;
    int sum = count;
    for (int step = 1; step < 32; step <<= 1) {
      const int left = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += left;
    }
    if (b < blocks) own[b] = carried + sum - count;
    carried += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) counts[blockIdx.x] = carried;
}

// rows [R], row_weights [R], pos [A, K]: the slot's row, all ones for none; choices [R] or null:
// the row of each slot that has one. Blocks as in here_count; the one behind them writes offsets
// [G + 1] and order [G], experts heaviest first. More rows than there is room for are no rows, and
// an overflow.
extern "C" __global__ void __launch_bounds__(TOKENS)
here_place(const int* ids, const float* weights, Present listed, int tokens, int first,
           int locals, const int* histogram, const int* counts, int* offsets, int* order,
           int* rows, int* pos, float* row_weights, int* choices, int room, double* overflows) {
  extern __shared__ int starts[];  // [G + 1]
  const int at = threadIdx.x, blocks = gridDim.x - 1;
  if (at < 32) {
    int carried = 0;
    for (int base = 0; base < locals; base += 32) {
      const int g = base + at, own = g < locals ? counts[g] : 0;
      int sum = own;
      for (int step = 1; step < 32; step <<= 1) {
        const int left = __shfl_up_sync(~0u, sum, step);
        if (at >= step) sum += left;
      }
      if (g < locals) starts[g] = carried + sum - own;
      carried += __shfl_sync(~0u, sum, 31);
    }
    if (at == 0) starts[locals] = carried;
  }
  __syncthreads();
  const bool full = starts[locals] > room;
  if (blockIdx.x == blocks) {
    for (int g = at; g < locals; g += TOKENS) {
      const int own = counts[g];
      int rank = 0;
      for (int o = 0; o < locals; o++) rank += counts[o] > own || (counts[o] == own && o < g);
      order[rank] = g;
      offsets[g] = full ? 0 : starts[g];
    }
    if (at == 0) offsets[locals] = full ? 0 : starts[locals];
    if (at == 0 && full) *overflows += 1.0;
    return;
  }
  const int t = blockIdx.x * TOKENS + at, present = listed.count();
  int next = 0;  // of the slots that have a row
  if (choices) {
    __shared__ int before[TOKENS];
    int own = 0;
    for (int k = 0; k < TOP_K && t < tokens; k++)
      own += place_of(ids, (u64)t * TOP_K + k, present, t, first, locals) >= 0;
    before[at] = own;
    __syncthreads();
    for (int step = 1; step < TOKENS; step <<= 1) {
      const int left = at >= step ? before[at - step] : 0;
      __syncthreads();
      before[at] += left;
      __syncthreads();
    }
    next = histogram[(u64)locals * blocks + blockIdx.x] + before[at] - own;
  }
  if (t >= tokens) return;
  for (int k = 0; k < TOP_K; k++) {
    const u64 slot = (u64)t * TOP_K + k;
    const int place = place_of(ids, slot, present, t, first, locals);
    if (place < 0) continue;  // `pos` is below 0 already
    if (full) {
      pos[slot] = -1;
      continue;
    }
    const int row = starts[place] + histogram[(u64)place * blocks + blockIdx.x] + pos[slot];
    rows[row] = t;
    row_weights[row] = weights[slot];
    pos[slot] = row;
    if (choices) choices[next++] = row;
  }
}

// ds[slot] = the sum of its row's parts, 0 for none
extern "C" __global__ void __launch_bounds__(256)
here_ds(const int* pos, const float* partial, int parts, int slots, float* ds) {
  const int slot = blockIdx.x * 256 + threadIdx.x;
  if (slot >= slots) return;
  const int row = pos[slot];
  float sum = 0.f;
  for (int part = 0; row >= 0 && part < parts; part++) sum += partial[(u64)row * parts + part];
  ds[slot] = sum;
}

// Choices of experts [C] to those of their slices [C, r], a thread for each of these; none stays
// none. With `places` a slice has its place for an id.
extern "C" __global__ void __launch_bounds__(256)
here_slices(const u32* ids, const float* weights, u32 choices, u32 slices, const u32* places,
            u32* slice_ids, float* slice_weights) {
  const u32 at = blockIdx.x * 256 + threadIdx.x;
  if (at >= choices * slices) return;
  const u32 choice = at / slices, id = ids[choice];
  const u32 slice = id * slices + at % slices;
  slice_ids[at] = id == ~0u ? id : places ? places[slice] : slice;
  slice_weights[at] = weights[choice];
}

// sums[c] = x[c][0] + x[c][1] + .., in this order: the CPU's bits.
extern "C" __global__ void __launch_bounds__(256)
here_sums(const float* x, u32 choices, u32 slices, float* sums) {
  const u32 choice = blockIdx.x * 256 + threadIdx.x;
  if (choice >= choices) return;
  const float* own = x + (u64)choice * slices;
  float sum = own[0];
  for (u32 j = 1; j < slices; j++) sum = __fadd_rn(sum, own[j]);
  sums[choice] = sum;
}
