// Forward attention for sm_90a (FlashAttention-3, Shah et al. 2024): o and lse of 64 query rows a
// consumer warpgroup. See attention_hopper.cu.
//
// One producer thread; CONSUMERS warpgroups. Key tiles of 128 go from the diagonal down, K and V
// in two stages each with barriers of their own, so that the next tile's Q and K load during the
// epilogue. A step: issue S = Q K^T of this tile, issue O += P V of the one before, wait for S,
// softmax while P V runs, wait for it, pack P, rescale O.
//
// Where all warpgroups have equally many steps they take turns in issuing products, so that one's
// softmax runs beside another's products; otherwise each passes over the tiles it does not see.
//
// Host macro: CONSUMERS, 2, or 3 for heads of 64.
constexpr bool TAKE_TURNS = !MASKED;
constexpr int TURN = 4;  // the first of CONSUMERS named barriers; those before are for epilogues
constexpr int BM = CONSUMERS * 64, BN = 128, STAGES = 2;
constexpr u32 Q_BYTES = SLABS * BM * 128, KV_BYTES = SLABS * BN * 128;
// Sums over warpgroups may not pass what the launch got: 168 * 3 or 128 * 4.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;

struct Shared {
  u32 q, k, v, o, barriers;
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
  shared.k = shared.q + Q_BYTES;
  shared.v = shared.k + STAGES * KV_BYTES;
  shared.o = shared.v + STAGES * KV_BYTES;
  shared.barriers = shared.o + Q_BYTES;
  volatile int* slots = (volatile int*)(memory + 2 * Q_BYTES + 2 * STAGES * KV_BYTES + 128);
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
  Ring k = {0, 0}, v = {0, 0};
  u32 q_parity = 0;
  for (int t = blockIdx.x;; t = next_tile(args.counter)) {
    shared.tiles.give(t);
    if (t >= total) break;
    const Place at = place_of(t, blocks, args.heads, args.batch, args.group, true);
    const Span span = span_of(args, at);
    const int b = at.sequence, h = at.head / (args.heads / args.kv_heads);
    const auto load_k = [&](int n) {
      barrier_wait(shared.k_empty(k.at), k.parity ^ 1);
      barrier_expect(shared.k_full(k.at), KV_BYTES);
      load_rows<BN>(shared.k + k.at * KV_BYTES, &maps.k, shared.k_full(k.at), n * BN, h, b);
      k.next(STAGES);
    };
    const auto load_v = [&](int n) {
      barrier_wait(shared.v_empty(v.at), v.parity ^ 1);
      barrier_expect(shared.v_full(v.at), KV_BYTES);
      load_rows<BN>(shared.v + v.at * KV_BYTES, &maps.v, shared.v_full(v.at), n * BN, h, b);
      v.next(STAGES);
    };
    barrier_wait(shared.q_empty(), q_parity ^ 1);
    q_parity ^= 1;
    barrier_expect(shared.q_full(), Q_BYTES);
    load_rows<BM>(shared.q, &maps.q, shared.q_full(), at.block * BM, at.head, b);
    load_k(span.high - 1);
    for (int n = span.high - 2; n >= span.low; n--) {
      load_k(n);
      load_v(n + 1);
    }
    load_v(span.low);
  }
  end_tiles(args.counter);
}

__device__ __forceinline__ void consume(const Maps& maps, const Args& args, Shared& shared) {
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1;
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const bool leader = (threadIdx.x & 127) == 0;
  const int blocks = (args.seq + BM - 1) / BM, total = blocks * args.batch * args.heads;
  Ring k = {0, 0}, v = {0, 0};
  u32 q_parity = 0;
  float o[HEAD_DIM / 2], s[BN / 2];
  u32 p[BN / 4];
  const u64 q_operand = operand<false>(shared.q + group * 8192);
  const u64 k_operand = operand<false>(shared.k), v_operand = operand_mn<BN>(shared.v);
  const u32 staged = shared.o + group * 8192;
  const auto free_k = [&]() {
    if (lane == 0) barrier_arrive(shared.k_empty(k.at));
    k.next(STAGES);
  };
  const auto free_v = [&]() {
    if (lane == 0) barrier_arrive(shared.v_empty(v.at));
    v.next(STAGES);
  };
  // The first warpgroup is the first to go.
  if (TAKE_TURNS && group == CONSUMERS - 1) named_arrive<256>(TURN);
  const auto pass_over = [&]() {
    barrier_wait(shared.k_full(k.at), k.parity);
    free_k();
    barrier_wait(shared.v_full(v.at), v.parity);
    free_v();
  };
  const auto scores = [&]() {
    multiply_heads<BM, BN>(s, q_operand, k_operand + k.at * (KV_BYTES >> 4));
  };
  const auto weigh = [&]() {
    barrier_wait(shared.v_full(v.at), v.parity);
    multiply_fragments(o, p, v_operand + v.at * (KV_BYTES >> 4));
  };
  for (int t = shared.tiles.take(lane); t < total; t = shared.tiles.take(lane)) {
    const Place at = place_of(t, blocks, args.heads, args.batch, args.group, true);
    const Span all = span_of(args, at);
    Rows rows = rows_of<64>(args, at.sequence, at.block * BM + group * 64, 16 * warp, lane);
    // Key tiles that this warpgroup's rows see; it passes over the others of the block.
    const int own = min(rows.start, args.seq - 1);
    const int low = first_key(args, at.sequence, own) / BN;
    const int high = MASKED ? min(rows.start + 63, args.seq - 1) / BN + 1 : all.high;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) o[i] = 0.f;
    barrier_wait(shared.q_full(), q_parity);
    q_parity ^= 1;
    if (MASKED && BM != BN)
      for (int n = all.high; n > high; n--) pass_over();
    barrier_wait(shared.k_full(k.at), k.parity);
    scores();
    wgmma_wait<0>();
    free_k();
    if (high == low + 1 && lane == 0) barrier_arrive(shared.q_empty());
    mask(s, rows, (high - 1) * BN);
    softmax(s, rows, args.scale_log2);
    round_pairs(p, s);
    for (int n = high - 2; n >= low; n--) {
      barrier_wait(shared.k_full(k.at), k.parity);
      if (TAKE_TURNS) named_sync<256>(TURN + group);
      scores();
      weigh();
      if (TAKE_TURNS) named_arrive<256>(TURN + (group + 1) % CONSUMERS);
      wgmma_wait<1>();
      free_k();
      if (n == low && lane == 0) barrier_arrive(shared.q_empty());
      mask(s, rows, n * BN);
      softmax(s, rows, args.scale_log2);
      wgmma_wait<0>();
      free_v();
      round_pairs(p, s);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; i++) o[i] *= rows.rescale[(i >> 1) & 1];
    }
    weigh();
    float inverse[2];
    finish_rows(args, at.sequence, at.head, rows, inverse);  // while the last product runs
    if (leader) stores_read<0>();
    named_sync<128>(1 + group);
    wgmma_wait<0>();
    free_v();
    stage_rows<BM * 128>(staged, o, inverse[0], inverse[1], warp, lane);
    fence_async_proxy();
    named_sync<128>(1 + group);
    if (leader) store_rows<BM * 128>(&maps.o, staged, rows.start, at.head, at.sequence);
    if (MASKED)
      for (int n = low; n > all.low; n--) pass_over();
  }
  if (leader) stores_done();
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * 128, 1)
attention_forward(const __grid_constant__ Maps maps, const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared shared = share(memory);
  if (__shfl_sync(~0u, threadIdx.x >> 7, 0) == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x == 0) produce(maps, args, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    consume(maps, args, shared);
  }
}
