// Forward attention for sm_90a (FlashAttention-3, Shah et al. 2024): o and lse of 64 query rows a
// consumer warpgroup. See attention_hopper.cu.
//
// One producer thread; CONSUMERS warpgroups. Key tiles of 128 go from the diagonal down, K and V
// in two stages each with barriers of their own. A step: issue S = Q K^T of this tile, issue
// O += P V of the one before, wait for S, softmax while P V runs, wait for it, pack P, rescale O.
// Steps flow from one block of queries into the next: the last P V of a block runs beside the first
// S of the next, whose Q has a buffer of its own.
//
// Of a key tile that is half hidden from all rows of a warpgroup, at the diagonal or where its
// documents or windows begin, only the other half is multiplied.
//
// Where all warpgroups have equally many steps they take turns in issuing products, so that one's
// softmax runs beside another's products; otherwise each passes over the tiles it does not see.
//
// A tile's number is asked for while the copies of the tile before wait for their places.
//
// Host macros: CONSUMERS, 2, or 3 for heads of 64; HALVES, whether halves of tiles are told apart.
constexpr bool TAKE_TURNS = !MASKED;
constexpr int TURN = 4;  // the first of CONSUMERS named barriers; those before are for epilogues
constexpr int BM = CONSUMERS * 64, BN = 128, STAGES = 2;
constexpr u32 Q_BYTES = SLABS * BM * 128, KV_BYTES = SLABS * BN * 128;
constexpr u32 BARRIERS_AT = 3 * Q_BYTES + 2 * STAGES * KV_BYTES;
constexpr u64 HALF_TILE = 64 * 128 >> 4;  // what 64 keys add to a descriptor of K or V
// Sums over warpgroups may not pass what the launch got: 168 * 3 or 128 * 4.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;

// A block of queries, from the producer: at block -1 there are no more. `first`: keys that the
// first rows of each warpgroup see first.
struct Task { int block, head, sequence, unused, first[4]; };

struct Shared {
  u32 q, k, v, o, barriers;
  __device__ __forceinline__ u32 k_full(int s) const { return barriers + s * 8; }
  __device__ __forceinline__ u32 k_empty(int s) const { return barriers + 16 + s * 8; }
  __device__ __forceinline__ u32 v_full(int s) const { return barriers + 32 + s * 8; }
  __device__ __forceinline__ u32 v_empty(int s) const { return barriers + 48 + s * 8; }
  // Q and the task of a block of queries
  __device__ __forceinline__ u32 q_full(int s) const { return barriers + 64 + s * 8; }
  __device__ __forceinline__ u32 q_empty(int s) const { return barriers + 80 + s * 8; }
  __device__ __forceinline__ u32 task_full(int s) const { return barriers + 96 + s * 8; }
  __device__ __forceinline__ u32 task_empty(int s) const { return barriers + 112 + s * 8; }
  __device__ __forceinline__ u32 task(int s) const { return barriers + 128 + s * 32; }
};

__device__ __forceinline__ Shared share(u8* memory) {
  Shared shared;
  shared.q = shared_address(memory);
  shared.k = shared.q + 2 * Q_BYTES;
  shared.v = shared.k + STAGES * KV_BYTES;
  shared.o = shared.v + STAGES * KV_BYTES;
  shared.barriers = shared.q + BARRIERS_AT;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(shared.k_full(s), 1);
      barrier_init(shared.k_empty(s), CONSUMERS * 4);
      barrier_init(shared.v_full(s), 1);
      barrier_init(shared.v_empty(s), CONSUMERS * 4);
      barrier_init(shared.q_full(s), 1);
      barrier_init(shared.q_empty(s), CONSUMERS * 4);
      barrier_init(shared.task_full(s), 1);
      barrier_init(shared.task_empty(s), CONSUMERS * 128);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  return shared;
}

__device__ __forceinline__ void store_shared16(u32 to, int a, int b, int c, int d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void produce(const Maps& maps, const Args& args, Shared& shared) {
  const int blocks = (args.seq + BM - 1) / BM, total = blocks * args.batch * args.heads;
  Ring k = {0, 0}, v = {0, 0}, q = {0, 0};
  const auto give = [&](const Place& at, const int (&first)[4]) {
    barrier_wait(shared.task_empty(q.at), q.parity ^ 1);
    store_shared16(shared.task(q.at), at.block, at.head, at.sequence, 0);
    store_shared16(shared.task(q.at) + 16, first[0], first[1], first[2], first[3]);
    barrier_arrive(shared.task_full(q.at));
  };
  int t = blockIdx.x;
  while (t < total) {
    const Place at = place_of(t, blocks, args.heads, args.batch, args.group, true);
    int first[4] = {0, 0, 0, 0};
#pragma unroll
    for (int g = 0; g < CONSUMERS; g++)
      first[g] = first_key(args, at.sequence, min(at.block * BM + g * 64, args.seq - 1));
    give(at, first);
    const int low = first[0] / BN, high = (min((at.block + 1) * BM, args.seq) + BN - 1) / BN;
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
    barrier_wait(shared.q_empty(q.at), q.parity ^ 1);
    barrier_expect(shared.q_full(q.at), Q_BYTES);
    load_rows<BM>(shared.q + q.at * Q_BYTES, &maps.q, shared.q_full(q.at), at.block * BM, at.head,
                  b);
    q.next(2);
    load_k(high - 1);
    for (int n = high - 2; n > low; n--) {
      load_k(n);
      load_v(n + 1);
    }
    // Asked for before the last copies wait for their places, so that it is there behind them.
    t = next_tile(args.counter);
    if (high - 1 > low) {
      load_k(low);
      load_v(low + 1);
    }
    load_v(low);
  }
  give({-1, 0, 0}, {0, 0, 0, 0});
  end_tiles(args.counter);
}

// Registers of a consumer: K and V of which steps, rows, and the products in them.
struct Consumer {
  const Args& args;
  const Shared& shared;
  const u64 q_operand, k_operand, v_operand;
  const int group, lane;
  Ring q, k, v;
  float o[HEAD_DIM / 2];
  u32 p[BN / 4];

  __device__ __forceinline__ void free_k() {
    if (lane == 0) barrier_arrive(shared.k_empty(k.at));
    k.next(STAGES);
  }
  __device__ __forceinline__ void free_v() {
    if (lane == 0) barrier_arrive(shared.v_empty(v.at));
    v.next(STAGES);
  }
  __device__ __forceinline__ void pass_over() {
    barrier_wait(shared.k_full(k.at), k.parity);
    free_k();
    barrier_wait(shared.v_full(v.at), v.parity);
    free_v();
  }
  // O = P V of KEYS keys of the step before, `half` behind the start of their tile; `adds`: O +=.
  template <int KEYS> __device__ __forceinline__ void weigh(u64 half, bool adds) {
    barrier_wait(shared.v_full(v.at), v.parity);
    const u64 from = v_operand + v.at * (KV_BYTES >> 4) + half;
    wgmma_fence();
    wgmma_rs_if<1>(o, p[0], p[1], p[2], p[3], from, adds);
#pragma unroll
    for (int k = 1; k < KEYS / 16; k++)
      wgmma_rs<1, 1>(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], from + k * 128);
    wgmma_commit();
  }
  // S of KEYS keys from `key` on, `half` behind the start of their tile, to weights, while
  // O += P V of BEFORE keys runs, if there are any.
  template <int KEYS, int BEFORE>
  __device__ __forceinline__ void step(float (&s)[BN / 2], Rows& rows, int key, u64 half,
                                       u64 half_before, bool last, bool adds) {
    float(&scores)[KEYS / 2] = reinterpret_cast<float(&)[KEYS / 2]>(s);
    barrier_wait(shared.k_full(k.at), k.parity);
    if (TAKE_TURNS && BEFORE) named_sync<256>(TURN + group);
    multiply_heads<BM, BN>(scores, q_operand + q.at * (Q_BYTES >> 4),
                           k_operand + k.at * (KV_BYTES >> 4) + half);
    if (BEFORE) {
      weigh<BEFORE ? BEFORE : 64>(half_before, adds);
      if (TAKE_TURNS) named_arrive<256>(TURN + (group + 1) % CONSUMERS);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    free_k();
    if (last && lane == 0) barrier_arrive(shared.q_empty(q.at));
    mask(scores, rows, key);
    softmax(scores, rows, args.scale_log2);
    if (BEFORE) {
      wgmma_wait<0>();
      free_v();
    }
  }
};

__device__ __forceinline__ void consume(const Maps& maps, const Args& args, Shared& shared) {
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1;
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const bool leader = (threadIdx.x & 127) == 0;
  Consumer c = {args, shared, operand<false>(shared.q + group * 8192), operand<false>(shared.k),
                operand_mn<BN>(shared.v), group, lane, {1, 1}, {0, 0}, {0, 0}};
  const u32 staged = shared.o + group * 8192;
  Ring tasks = {0, 0};
  // The first warpgroup is the first to go.
  if (TAKE_TURNS && group == CONSUMERS - 1) named_arrive<256>(TURN);
  Rows rows;
  float inverse[2] = {0.f, 0.f};
  int head = 0, sequence = 0;
  // The key tile of a step, and the last one that this warpgroup's rows see; those of the block
  // that it passes over behind it; keys that its rows see, in halves of tiles.
  int n = 0, low = 0, below = 0, first_half = 0, past_half = 0;
  bool fresh = true;  // no product of the step before is left to do
  bool adds = false;  // a step of this block has begun O
  int before = 0;     // keys of the step before, and how far behind the start of their tile
  u64 half_before = 0;
  const auto leave = [&](int start) {
    if (leader) stores_read<0>();
    named_sync<128>(1 + group);
    stage_rows<BM * 128>(staged, c.o, inverse[0], inverse[1], warp, lane);
    fence_async_proxy();
    named_sync<128>(1 + group);
    if (leader) store_rows<BM * 128>(&maps.o, staged, start, head, sequence);
  };
  while (true) {
    const bool begins = fresh || n == low;
    int start = 0, next_head = 0, next_sequence = 0;
    if (begins) {
      if (!fresh) finish_rows(args, sequence, head, rows, inverse);
      start = rows.start;
      // Before it passes over tiles, whose places the producer needs to give the next task, and
      // behind the last task the product that is left runs alone.
      bool drains = MASKED && !fresh && (below > 0 || BM != BN);
      const u32 at = shared.task(tasks.at);
      if (!drains) {
        barrier_wait(shared.task_full(tasks.at), tasks.parity);
        drains = !fresh && __shfl_sync(~0u, (int)load_shared(at), 0) < 0;
      }
      if (drains) {
        if (HALVES && before == 64)
          c.weigh<64>(half_before, adds);
        else
          c.weigh<128>(half_before, adds);
        wgmma_wait<0>();
        c.free_v();
        leave(start);
        if (MASKED)
          for (; below > 0; below--) c.pass_over();
        fresh = true;
        continue;
      }
      const uint4 task = load_shared16(at);
      // The same in all lanes; by these ptxas knows.
      const int first = MASKED ? __shfl_sync(~0u, (int)load_shared(at + 16 + group * 4), 0) : 0;
      const int all_first = MASKED ? __shfl_sync(~0u, (int)load_shared(at + 16), 0) : 0;
      barrier_arrive(shared.task_empty(tasks.at));
      tasks.next(2);
      const int block = __shfl_sync(~0u, (int)task.x, 0);
      if (block < 0) break;
      next_head = (int)task.y;
      next_sequence = (int)task.z;
      rows = rows_of<64>(args, next_sequence, block * BM + group * 64, 16 * warp, lane);
      const int last_row = min(rows.start + 63, args.seq - 1);
      const int high = (min((block + 1) * BM, args.seq) + BN - 1) / BN;
      n = MASKED ? last_row / BN : high - 1;
      past_half = rows.start / 64 + 1;
      first_half = first / 64;
      low = first / BN;
      below = low - all_first / BN;
      c.q.next(2);
      barrier_wait(shared.q_full(c.q.at), c.q.parity);
      if (MASKED && BM != BN)
        for (int i = high - 1; i > n; i--) c.pass_over();
    } else {
      n--;
    }
    const bool lower = HALVES && past_half <= 2 * n + 1, upper = HALVES && first_half > 2 * n;
    const int keys = lower || upper ? 64 : 128;
    const int key = n * BN + (!lower && upper ? 64 : 0);
    const u64 half = !lower && upper ? HALF_TILE : 0;
    const bool last = n == low, less = HALVES && before == 64;
    float s[BN / 2];  // of 64 keys the first half
    if (keys == 128) {
      if (fresh) c.step<128, 0>(s, rows, key, half, 0, last, adds);
      else if (less) c.step<128, 64>(s, rows, key, half, half_before, last, adds);
      else c.step<128, 128>(s, rows, key, half, half_before, last, adds);
    } else if (HALVES) {
      if (fresh) c.step<64, 0>(s, rows, key, half, 0, last, adds);
      else if (less) c.step<64, 64>(s, rows, key, half, half_before, last, adds);
      else c.step<64, 128>(s, rows, key, half, half_before, last, adds);
    }
    if (begins) {
      if (!fresh) leave(start);
      head = next_head;
      sequence = next_sequence;
    } else {
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; i++) c.o[i] *= rows.rescale[(i >> 1) & 1];
    }
    adds = !begins;
    round_pairs(c.p, s);
    fresh = false;
    before = keys;
    half_before = half;
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
