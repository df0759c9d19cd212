// The kernel for sm_90a: roles and the consumers' loop.

__device__ __forceinline__ void release(const Ring& ring, int stage, int lane) {
  if (lane >= CLUSTER) return;
  if (CLUSTER > 1) barrier_arrive_at(ring.empty(stage), lane);
  else barrier_arrive(ring.empty(stage));
}

// Rows of B from `left` to the end of their sixteen become zeros: they are the next group's, or lie
// past the last, and meet zeros of A, which does not help against what is not finite. Every
// warpgroup writes the same zeros before it reads them.
__device__ __forceinline__ void clear_rows_past_end(u32 b, int left) {
  if ((left & 15) == 0) return;
  const int warpgroup = threadIdx.x >> 7, chunks = (16 - (left & 15)) * (BN / 8);
  for (int i = threadIdx.x & 127; i < chunks; i += 128) {
    const int row = left + i / (BN / 8), chunk = i % (BN / 8);
    store_zeros16(b + (chunk >> 3) * (BK * 128) + row * 128 + ((chunk & 7) << 4));
  }
  fence_async_proxy();
  asm volatile("bar.sync %0, 128;" ::"r"(2 + warpgroup) : "memory");
}

// The first BLOCKS m64 blocks' products of one tile, the last step of a weight gradient only as
// far as the group has rows.
template <int BLOCKS>
__device__ __forceinline__ int multiply_blocks(float (&acc)[M_BLOCKS][BN / 2], Ring& ring,
                                               int steps, int depth, int m_in_tile, int lane) {
  int previous = -1;
  const auto step = [&](int it, int left) {  // `left`: what there is to sum over
    barrier_wait(ring.full(), ring.phase);
    if (GATHERED) fence_async_proxy();
    if (OP == OP_WGRAD && left < BK) clear_rows_past_end(ring.b_at(), left);
    const u64 a = operand<A_MN>(ring.a_at() + m_in_tile * 128), b = operand<B_MN>(ring.b_at());
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < BK / 16; kk++) {
      if (kk * 16 >= left) break;
#pragma unroll
      for (int i = 0; i < BLOCKS; i++)
        multiply(acc[i], a + i * (64 * 128 >> 4) + kk * next_k16<A_MN>(),
                 b + kk * next_k16<B_MN>(), (it | kk) != 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0) release(ring, previous, lane);
    previous = ring.stage;
    ring.advance();
  };
  const int whole = OP == OP_WGRAD ? depth / BK : steps;
  for (int it = 0; it < whole; it++) step(it, BK);
  if (OP == OP_WGRAD && whole < steps) step(whole, depth - whole * BK);
  return previous;
}

// Products of one tile into acc. Blocks without a row only keep the ring turning: what is not
// multiplied costs no power, and power is what limits this chip.
__device__ __forceinline__ void multiply_tile(float (&acc)[M_BLOCKS][BN / 2], Ring& ring,
                                              int steps, int depth, int m_in_tile,
                                              int blocks, int lane) {
  int previous = -1;
  if (blocks >= M_BLOCKS) {
    previous = multiply_blocks<M_BLOCKS>(acc, ring, steps, depth, m_in_tile, lane);
  } else if (M_BLOCKS > 1 && blocks == 1) {
    previous = multiply_blocks<1>(acc, ring, steps, depth, m_in_tile, lane);
  } else {
    for (int it = 0; it < steps; it++) {
      barrier_wait(ring.full(), ring.phase);
      release(ring, ring.stage, lane);
      ring.advance();
    }
  }
  // The other warpgroup may start: this one has seen its last stage.
#if PINGPONG
  asm volatile("bar.arrive %0, 256;" ::"r"((int)(3 - (threadIdx.x >> 7))) : "memory");
#endif
  wgmma_wait<0>();
  if (previous >= 0) release(ring, previous, lane);
}

__device__ __forceinline__ void consume(Ring ring, Schedule schedule, const Args& args,
                                        const TensorMap* map_out, int warpgroup) {
  // The shuffle tells the compiler that the warp's number is the same in all its lanes.
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0) & 3;
  const int m_in_tile = PINGPONG ? 0 : warpgroup * (M_BLOCKS * 64);
  float acc[M_BLOCKS][BN / 2];
  Tile tile;
#if STAGED
  const int own = warpgroup * 4 + warp;
  const u32 buffers = ring.buffers + own * (STAGED * BUFFER);
#if OP == OP_DH
  Hidden hidden = {map_out, buffers, ring.buffer_barriers(own), lane == 0};
#else
  Outbox outbox = {map_out, buffers, lane == 0};
#endif
#endif
#if PINGPONG
  if (warpgroup == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
#endif
  for (int turn = 0; schedule.next(tile); turn++) {
    const int steps = Schedule::depth(tile, args), m0 = tile.m0 + m_in_tile;
#if PINGPONG
    if ((turn & 1) != warpgroup) { ring.skip(steps); continue; }
#endif
#if STAGED && OP == OP_DH
    hidden.start(tile, args, m0, warp);
#endif
#if PINGPONG
    // A wait on a parity may not run a whole phase ahead: wait until the other has gone by.
    asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory");
#endif
    if (OP == OP_WGRAD && steps == 0) {
#pragma unroll
      for (int i = 0; i < M_BLOCKS; i++)
#pragma unroll
        for (int j = 0; j < BN / 2; j++) acc[i][j] = 0.f;
    }
    const int m_end = OP == OP_WGRAD ? args.gathered_pitch : tile.rows;
    const int blocks = tile.live ? (m_end - m0 + 63) >> 6 : 0;
    multiply_tile(acc, ring, steps, tile.rows, m_in_tile, blocks, lane);
#if STAGED && OP == OP_DH
    finish_hidden(acc, tile, args, hidden, m0, warp, lane);
#elif STAGED
#pragma unroll
    for (int i = 0; i < M_BLOCKS; i++)
      if (i < blocks) outbox.finish(acc[i], tile, args, m0 + 64 * i + 16 * warp, lane);
#else
#pragma unroll
    for (int i = 0; i < M_BLOCKS; i++)
      if (i < blocks) finish(acc[i], tile, args, m0 + 64 * i, warp, lane);
#endif
  }
#if STAGED
  stores_done();
#endif
}

// 384 threads start with 168 registers each: 504 = one producer's and two consumers' share. Two
// m64n192 blocks of accumulators need all that consumers can get; the index arithmetic of
// OP_WGRAD spills in 40.
constexpr int PRODUCER_REGISTERS = OP == OP_WGRAD && !PINGPONG ? 72 : 40;
constexpr int CONSUMER_REGISTERS = (504 - PRODUCER_REGISTERS) / 2;

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(384, 1)
grouped_gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
             const __grid_constant__ Args args) {
  // Stages need 1024-byte alignment, which a kernel without static shared memory has.
  extern __shared__ __align__(1024) u8 shared[];
  Ring ring = {shared_address(shared)};
  ring.b = ring.a + STAGES * A_BYTES;
  ring.buffers = ring.b + STAGES * B_BYTES;
  ring.barriers = ring.buffers + BUFFER_BYTES;
  int* offsets = (int*)(shared + STAGES * (A_BYTES + B_BYTES) + BUFFER_BYTES + BARRIERS * 8);
  int* order = offsets + args.groups + 1;
  const int tid = threadIdx.x, warpgroup = __shfl_sync(~0u, tid >> 7, 0);
  u32 rank = 0;
#if CLUSTER > 1
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  for (int i = tid; i <= args.groups; i += blockDim.x) {
    offsets[i] = args.offsets[i];
    if (OP == OP_WGRAD && i < args.groups) order[i] = args.order[i];
  }
  if (tid == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(ring.barriers + s * 8, GATHERED ? 129 : 1);
      barrier_init(ring.empty(s), CLUSTER * (PINGPONG ? 4 : 8));
    }
    for (int s = 2 * STAGES; s < BARRIERS; s++) barrier_init(ring.barriers + s * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_sync();
  Schedule schedule = {offsets, order, (int)rank, args.groups, (args.gathered_pitch + BM - 1) / BM,
                       (args.cols + TILE_N - 1) / TILE_N, 0, 0, 0};
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (OP == OP_WGRAD) produce_columns(ring, schedule, &map_b, args, rank);
    else if (GATHERED) produce_rows(ring, schedule, &map_b, args, rank);
    else if (tid == 0) produce_boxes(ring, schedule, &map_a, &map_b, args, rank);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    consume(ring, schedule, args, &map_a, warpgroup - 1);
  }
  if (CLUSTER > 1) cluster_sync();
}
