// Squares and numbers that are none, in one pass over a bucket's gradients; and what follows from
// a step's numbers. Host macros: ELEMENT (of gradients), NUMBER_*, PARAM_*, CONTROL_*, BLOCK_*.
struct __align__(8) Block {
  u32 name[2], first[2], len, flags, tensor, unused;
};
static_assert(sizeof(Block) == 4 * BLOCK_WORDS, "a block as the host encodes it");

__device__ __forceinline__ u32 lanes_count(u32 x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ void take(float x, double& sum, u32& bad) {
  sum = fma((double)x, (double)x, sum);
  bad += (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
}

// sums[b] = sum of squares of block b; numbers += their sum and the count of those that are no
// numbers. That count goes to `of_tensors`, too, a table of `tensors` counts. They are whole
// numbers, so that the order of the additions changes nothing. A warp a block of 4,096;
// `blocks_a_part` of them, whole eights, a thread block. The last thread block to end adds the
// parts, in their order: which one that is changes nothing. `ticket` starts as zero and ends so.
extern "C" __global__ void __launch_bounds__(256)
gradient_numbers(const Block* table, const double* params, const element* g, double* sums,
                 double* part_squares, u32* part_counts, u32* ticket, double* numbers,
                 double* of_tensors, u64 len, int blocks, int blocks_a_part, u32 tensors) {
  __shared__ double warp_squares[8];
  __shared__ u32 warp_counts[8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = blockIdx.x * blocks_a_part, end = min(blocks, begin + blocks_a_part);
  double squares = 0.0;
  u32 count = 0;
  for (int b = begin + warp; b < end; b += 8) {
    const u64 left = len - (u64)b * 4096;
    const int valid = min(left < 4096 ? (int)left : 4096, (int)table[b].len);
    const u32 flags = table[b].flags;
    const double* own = params + PARAM_CLASSES + PARAM_EACH * (flags >> BLOCK_CLASS_SHIFT);
    const bool counted = !(flags & BLOCK_UNCOUNTED) && own[PARAM_ACTIVE] != 0.0;
    const element* from = g + (u64)b * 4096;
    double sum = 0.0;
    u32 bad = 0;
    if (valid == 4096) {
#pragma unroll 8
      for (int i = 0; i < 4096 / CHUNK / 32; i++) {
        float v[CHUNK];
        unpack(load<CHUNK>(from + (i * 32 + lane) * CHUNK), v);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) take(v[j], sum, bad);
      }
    } else {
      for (int i = lane; i < valid; i += 32) take(as_float(from[i]), sum, bad);
    }
    sum = warp_sum_f64(sum);
    if (lane == 0) sums[b] = sum;
    if (counted) squares += sum;
    count += bad;
    if (__any_sync(~0u, bad)) {
      bad = lanes_count(bad);
      const u32 tensor = table[b].tensor;
      if (lane == 0 && tensor < tensors) atomicAdd(of_tensors + tensor, (double)bad);
    }
  }
  count = lanes_count(count);
  if (lane == 0) {
    warp_squares[warp] = squares;
    warp_counts[warp] = count;
  }
  __syncthreads();
  __shared__ bool last;
  if (threadIdx.x == 0) {
    for (int w = 1; w < 8; w++) {
      squares += warp_squares[w];
      count += warp_counts[w];
    }
    part_squares[blockIdx.x] = squares;
    part_counts[blockIdx.x] = count;
    __threadfence();
    last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  squares = 0.0;
  double all = 0.0;  // counts: whole numbers, exact
  for (u32 i = threadIdx.x; i < gridDim.x; i += 256) {
    squares += __ldcg(part_squares + i);
    all += __ldcg(part_counts + i);
  }
  squares = warp_sum_f64(squares);
  all = warp_sum_f64(all);
  __shared__ double tallies[8];
  if (lane == 0) {
    warp_squares[warp] = squares;
    tallies[warp] = all;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < 8; w++) {
    squares += warp_squares[w];
    all += tallies[w];
  }
  const double unscale = 1.0 / params[PARAM_LOSS_SCALE];
  numbers[NUMBER_SQUARED_NORM] += squares * unscale * unscale;
  numbers[NUMBER_NON_FINITE] += all;
}

// step_numbers.rs `is_skipped`.
__device__ __forceinline__ bool is_skipped(const double* numbers) {
  return numbers[NUMBER_NON_FINITE] != 0.0 || !isfinite(numbers[NUMBER_SQUARED_NORM]) ||
         !isfinite(numbers[NUMBER_LOSS]) || numbers[NUMBER_ROUTED_OVERFLOWS] != 0.0 ||
         numbers[NUMBER_HALTED] != 0.0;
}

// step_numbers.rs `clip_factor`.
__device__ __forceinline__ double clip_factor(double norm, double most) {
  return most > 0.0 && norm > most ? __ddiv_rn(most, norm) : 1.0;
}

// Whether and how much the step changes weights: src/step_numbers.rs `decide`. Behind a step that
// was skipped all are, until the host clears CONTROL_HALTED.
extern "C" __global__ void decide(const double* params, double* numbers, double* control) {
  numbers[NUMBER_HALTED] = control[CONTROL_HALTED];
  const double norm = __dsqrt_rn(numbers[NUMBER_SQUARED_NORM]);
  const double clip = clip_factor(norm, params[PARAM_NORM_MAX]);
  const double apply = is_skipped(numbers) ? 0.0 : 1.0;
  control[CONTROL_APPLY] = apply;
  control[CONTROL_GRADIENT_SCALE] = __ddiv_rn(clip, params[PARAM_LOSS_SCALE]);
  control[CONTROL_NORM] = norm;
  control[CONTROL_UPDATES] += apply;
  control[CONTROL_HALTED] = 1.0 - apply;
  numbers[NUMBER_UPDATES] = control[CONTROL_UPDATES];
}

// bias += rate where an expert's load is below the mean of the layer's, which start at `loads`;
// -= rate where it is above. Loads are whole numbers, so that neither their sum nor the comparison
// is rounded. One block.
extern "C" __global__ void __launch_bounds__(256)
move_corrections(const double* numbers, float* bias, double rate, int loads, int experts) {
  if (is_skipped(numbers)) return;
  const double* load = numbers + loads;
  __shared__ double parts[8];
  double sum = 0.0;
  for (int e = threadIdx.x; e < experts; e += 256) sum += load[e];
  sum = warp_sum_f64(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  u64 total = 0;
  for (int warp = 0; warp < 8; warp++) total += (u64)parts[warp];
  for (int e = threadIdx.x; e < experts; e += 256) {
    const u64 share = (u64)load[e] * experts;
    const double move = share < total ? rate : share > total ? -rate : 0.0;
    if (move != 0.0) bias[e] = __double2float_rn(__dadd_rn((double)bias[e], move));
  }
}

// out[i] = x[0][i] + x[1][i] + .., rows ascending from zero. A thread a column.
extern "C" __global__ void __launch_bounds__(256)
sum_rows(const double* x, double* out, u64 rows, u64 columns) {
  const u64 column = blockIdx.x * (u64)256 + threadIdx.x;
  if (column >= columns) return;
  double sum = 0.0;
  for (u64 row = 0; row < rows; row++) sum += x[row * columns + column];
  out[column] = sum;
}
