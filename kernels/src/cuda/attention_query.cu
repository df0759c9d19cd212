// dq alone for sm_90a, deterministic: Q and dO stationary, a loop over K and V. See
// attention_hopper.cu.
//
// S = Q K^T and dP = dO V^T are computed again; P (dP - delta) is rounded into fragments of the
// product with K, which is read MN-major. Two consumer warpgroups of 64 query rows each.
constexpr int CONSUMERS = 2, BM = CONSUMERS * 64, BN = 128, STAGES = 2;
constexpr u32 Q_BYTES = SLABS * BM * 128, KV_BYTES = SLABS * BN * 128;

struct Shared {
  u32 q, d_o, staged, k, v, barriers;
  TileQueue tiles;
  __device__ __forceinline__ u32 k_full(int s) const { return barriers + s * 8; }
  __device__ __forceinline__ u32 k_empty(int s) const { return barriers + 16 + s * 8; }
  __device__ __forceinline__ u32 v_full(int s) const { return barriers + 32 + s * 8; }
  __device__ __forceinline__ u32 v_empty(int s) const { return barriers + 48 + s * 8; }
  __device__ __forceinline__ u32 q_full() const { return barriers + 64; }
  __device__ __forceinline__ u32 q_empty() const { return barriers + 72; }
};

__device__ __forceinline__ Shared share(u8* memory) {
  Shared shared;
  shared.q = shared_address(memory);
  shared.d_o = shared.q + Q_BYTES;
  shared.staged = shared.d_o + Q_BYTES;
  shared.k = shared.staged + Q_BYTES;
  shared.v = shared.k + STAGES * KV_BYTES;
  shared.barriers = shared.v + STAGES * KV_BYTES;
  volatile int* slots = (volatile int*)(memory + 3 * Q_BYTES + 2 * STAGES * KV_BYTES + 128);
  shared.tiles = {shared.barriers + 80, shared.barriers + 96, slots, {0, 0}};
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(shared.k_full(s), 1);
      barrier_init(shared.k_empty(s), CONSUMERS * 4);
      barrier_init(shared.v_full(s), 1);
      barrier_init(shared.v_empty(s), CONSUMERS * 4);
    }
    barrier_init(shared.q_full(), 1);
    barrier_init(shared.q_empty(), CONSUMERS * 4);
    for (int s = 0; s < 2; s++) {
      barrier_init(shared.tiles.full + s * 8, 1);
      barrier_init(shared.tiles.empty + s * 8, CONSUMERS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  return shared;
}

// Key tiles of a block of queries: low .. high.
struct Span { int low, high; };
__device__ __forceinline__ Span span_of(const Args& args, const Place& at) {
  const int high = (min((at.block + 1) * BM, args.seq) + BN - 1) / BN;
  return {first_key(args, at.sequence, at.block * BM) / BN, high};
}

__device__ __forceinline__ void produce(const Maps& maps, const Args& args, Shared& shared) {
  const int blocks = (args.seq + BM - 1) / BM, total = blocks * args.batch * args.heads;
  Ring ring = {0, 0};
  u32 q_parity = 0;
  for (int t = blockIdx.x;; t = next_tile(args.counter)) {
    shared.tiles.give(t);
    if (t >= total) break;
    const Place at = place_of(t, blocks, args.heads, args.batch, args.group, true);
    const Span span = span_of(args, at);
    const int b = at.sequence, h = at.head / (args.heads / args.kv_heads);
    barrier_wait(shared.q_empty(), q_parity ^ 1);
    q_parity ^= 1;
    barrier_expect(shared.q_full(), 2 * Q_BYTES);
    load_rows<BM>(shared.q, &maps.q, shared.q_full(), at.block * BM, at.head, b);
    load_rows<BM>(shared.d_o, &maps.d_o, shared.q_full(), at.block * BM, at.head, b);
    for (int n = span.high - 1; n >= span.low; n--) {
      const int s = ring.at;
      barrier_wait(shared.k_empty(s), ring.parity ^ 1);
      barrier_expect(shared.k_full(s), KV_BYTES);
      load_rows<BN>(shared.k + s * KV_BYTES, &maps.k, shared.k_full(s), n * BN, h, b);
      barrier_wait(shared.v_empty(s), ring.parity ^ 1);
      barrier_expect(shared.v_full(s), KV_BYTES);
      load_rows<BN>(shared.v + s * KV_BYTES, &maps.v, shared.v_full(s), n * BN, h, b);
      ring.next(STAGES);
    }
  }
  end_tiles(args.counter);
}

__device__ __forceinline__ void consume(const Maps& maps, const Args& args, Shared& shared) {
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1;
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const bool leader = (threadIdx.x & 127) == 0;
  const int blocks = (args.seq + BM - 1) / BM, total = blocks * args.batch * args.heads;
  Ring ring = {0, 0};
  u32 q_parity = 0;
  float dq[HEAD_DIM / 2], s[BN / 2], dp[BN / 2];
  u32 ds[BN / 4];
  const u64 q = operand<false>(shared.q + group * 8192), k = operand<false>(shared.k);
  const u64 d_o = operand<false>(shared.d_o + group * 8192), v = operand<false>(shared.v);
  const u64 k_mn = operand_mn<BN>(shared.k);
  const u32 staged = shared.staged + group * 8192;
  const auto release = [&](u32 barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  const auto before = [&]() { return ring.at == 0 ? STAGES - 1 : ring.at - 1; };
  for (int t = shared.tiles.take(lane); t < total; t = shared.tiles.take(lane)) {
    const Place at = place_of(t, blocks, args.heads, args.batch, args.group, true);
    const Span all = span_of(args, at);
    const QueryRows rows =
        query_rows_of<64>(args, at.sequence, at.head, at.block * BM + group * 64, 16 * warp, lane);
    const int own = min(rows.start, args.seq - 1);
    const int low = first_key(args, at.sequence, own) / BN;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) dq[i] = 0.f;
    barrier_wait(shared.q_full(), q_parity);
    q_parity ^= 1;
    for (int n = all.high - 1; n >= low; n--) {
      const u64 stage = ring.at * (KV_BYTES >> 4);
      barrier_wait(shared.k_full(ring.at), ring.parity);
      multiply_heads<BM, BN>(s, q, k + stage);
      barrier_wait(shared.v_full(ring.at), ring.parity);
      wgmma_wait<1>();  // dq of the step before
      if (n < all.high - 1) release(shared.k_empty(before()));
      multiply_heads<BM, BN>(dp, d_o, v + stage);
      wgmma_wait<1>();  // S
      mask(s, rows, n * BN);
#pragma unroll
      for (int i = 0; i < BN / 2; i++)
        s[i] = power_of_two(fmaf(s[i], args.scale_log2, -rows.lse2[(i >> 1) & 1]));
      wgmma_wait<0>();  // dP
      release(shared.v_empty(ring.at));
#pragma unroll
      for (int i = 0; i < BN / 4; i++)
        ds[i] = pack_pair(s[2 * i] * (dp[2 * i] - rows.delta[i & 1]),
                          s[2 * i + 1] * (dp[2 * i + 1] - rows.delta[i & 1]));
      multiply_fragments(dq, ds, k_mn + stage);
      ring.next(STAGES);
    }
    if (low == all.low) release(shared.q_empty());
    if (leader) stores_read<0>();
    named_sync<128>(1 + group);
    wgmma_wait<0>();
    release(shared.k_empty(before()));
    stage_rows<BM * 128>(staged, dq, args.scale, args.scale, warp, lane);
    fence_async_proxy();
    named_sync<128>(1 + group);
    if (leader) store_rows<BM * 128>(&maps.dq, staged, rows.start, at.head, at.sequence);
    if (MASKED) {
      for (int n = low; n > all.low; n--) {  // key tiles that only the other warpgroup sees
        barrier_wait(shared.k_full(ring.at), ring.parity);
        release(shared.k_empty(ring.at));
        barrier_wait(shared.v_full(ring.at), ring.parity);
        release(shared.v_empty(ring.at));
        ring.next(STAGES);
      }
      if (low != all.low) release(shared.q_empty());
    }
  }
  if (leader) stores_done();
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * 128, 1)
attention_query(const __grid_constant__ Maps maps, const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared shared = share(memory);
  if (__shfl_sync(~0u, threadIdx.x >> 7, 0) == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(24));
    if (threadIdx.x == 0) produce(maps, args, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(240));
    consume(maps, args, shared);
  }
}
