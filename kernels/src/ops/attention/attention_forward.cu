// Forward attention for sm_90a (FlashAttention-3, Shah et al. 2024): o and lse of 64 query rows a
// consumer warpgroup. See attention_hopper.cu, and attention_blocks.cu for which rows make a block.
//
// One thread hands out blocks of queries, one loads, and CONSUMERS warpgroups compute. Key tiles of
// 128 go from the diagonal down, K and V in two stages each with barriers of their own. A step:
// issue S = Q K^T of this tile, issue O += P V of the one before, wait for S, softmax while P V
// runs, wait for it, pack P, rescale O.
//
// Flow: a block's last P V has no S of its own to run beside. So a warpgroup goes straight on to
// the next block, and issues its first S together with that P V. Q has two places, since the next
// one must be there while other warpgroups still read the last. This gains 1.5% among documents. Of
// causal attention heads of 128 gain 0.3 to 1.5%, and heads of 64 and 96 lose 2%.
//
// Without a mask all warpgroups have equally many steps and take turns in issuing products, so that
// one's softmax runs beside another's products. With one, each passes over the tiles that it does
// not see, and turns gain nothing.
//
// Barriers in shared memory, two each but `wanted`:
//   q_full, k_full, v_full     the copy engine has written that place
//   q_empty, k_empty, v_empty  every consumer warp has done with it
//   block_full                 a block was handed out
//   block_empty                every consumer thread has read it
//   wanted                     the loading thread has come to a block's last K
//
// Why none waits for ever. Loads have one order: of each block Q, its first K, then K and V by
// turns, then its last V. Each step waits for K of its tile and then for V of the tile before, so a
// warpgroup that waits holds Q and at most one K or V. What goes into those places next stands
// behind what it waits for in that order. That is so across blocks, too, since a warpgroup passes
// over one K at most before the first that it sees. So the loading thread always gets to what the
// slowest warpgroup waits for.
//
// The next block is handed out once `wanted` says so of this one, and once all have read the block
// before this one. Neither needs this block's last V, so a warpgroup may wait for the next block
// while it holds that. The loading thread has read this block when it says `wanted`, so it has no
// part in `block_empty`.
//
// Host macro: CONSUMERS, 2, or 3 for heads of 64.
constexpr bool TAKE_TURNS = !MASKED;
static_assert(BM - 64 <= BN, "a warpgroup passes over one K at most before the first that it sees");
constexpr int TURN = 4;  // the first of CONSUMERS named barriers; those before are for epilogues
constexpr int STAGES = 2;
constexpr u32 Q_BYTES = SLABS * BM * 128, KV_BYTES = SLABS * BN * 128;
// Sums over warpgroups may not pass what the launch got: 168 * 3 or 128 * 4.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;

struct Shared {
  u32 q, k, v, o, barriers;
  __device__ __forceinline__ u32 k_full(int s) const { return barriers + s * 8; }
  __device__ __forceinline__ u32 k_empty(int s) const { return barriers + 16 + s * 8; }
  __device__ __forceinline__ u32 v_full(int s) const { return barriers + 32 + s * 8; }
  __device__ __forceinline__ u32 v_empty(int s) const { return barriers + 48 + s * 8; }
  __device__ __forceinline__ u32 q_full(int s) const { return barriers + 64 + s * 8; }
  __device__ __forceinline__ u32 q_empty(int s) const { return barriers + 80 + s * 8; }
  __device__ __forceinline__ u32 block_full(int s) const { return barriers + 96 + s * 8; }
  __device__ __forceinline__ u32 block_empty(int s) const { return barriers + 112 + s * 8; }
  __device__ __forceinline__ u32 wanted() const { return barriers + 128; }
  __device__ __forceinline__ u32 block(int s) const { return barriers + 144 + s * 32; }
};

__device__ __forceinline__ Shared share(u8* memory) {
  Shared shared;
  shared.q = shared_address(memory);
  shared.k = shared.q + 2 * Q_BYTES;
  shared.v = shared.k + STAGES * KV_BYTES;
  shared.o = shared.v + STAGES * KV_BYTES;
  shared.barriers = shared.o + Q_BYTES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(shared.k_full(s), 1);
      barrier_init(shared.k_empty(s), CONSUMERS * 4);
      barrier_init(shared.v_full(s), 1);
      barrier_init(shared.v_empty(s), CONSUMERS * 4);
    }
    for (int s = 0; s < 2; s++) {
      barrier_init(shared.q_full(s), 1);
      barrier_init(shared.q_empty(s), CONSUMERS * 4);
      barrier_init(shared.block_full(s), 1);
      barrier_init(shared.block_empty(s), CONSUMERS * 128);
    }
    barrier_init(shared.wanted(), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  return shared;
}

// Hands out blocks. The next is drawn only when the loads of the one before are nearly done: one
// drawn early waits behind a long block while other multiprocessors run dry.
__device__ __forceinline__ void hand_out(const Args& args, const Shared& shared) {
  const int windows = (args.seq + BM - 1) / BM, total = windows * args.batch * args.heads;
  Ring ring = {0, 0};
  u32 wanted = 0;
  const auto give = [&](const Block& block) {
    barrier_wait(shared.block_empty(ring.at), ring.parity ^ 1);
    const u32 to = shared.block(ring.at);
    store_block(to, block);
    barrier_arrive(shared.block_full(ring.at));
    ring.next(2);
  };
  for (int t = blockIdx.x; t < total; t = next_tile(args.counter)) {
    const Place at = place_of(t, windows, args.heads, args.batch, args.group, true);
    const Cuts cuts = cuts_of(args, at.sequence, at.block);
    for (int i = 0; i < 2; i++) {
      const Block block = block_of(args, at, cuts, i);
      if (block.start >= block.end) continue;
      give(block);
      barrier_wait(shared.wanted(), wanted);
      wanted ^= 1;
    }
  }
  give({-1, 0, 0, 0, 0, 0});
  end_tiles(args.counter);
}

__device__ __forceinline__ void produce(const Maps& maps, const Args& args,
                                        const Shared& shared) {
  Ring k = {0, 0}, v = {0, 0}, q = {0, 0}, blocks = {0, 0};
  while (true) {
    barrier_wait(shared.block_full(blocks.at), blocks.parity);
    const Block block = load_block(shared.block(blocks.at));
    blocks.next(2);
    if (block.start < 0) break;
    const int b = block.sequence, h = block.head / (args.heads / args.kv_heads);
    const auto load_k = [&](int n) {
      barrier_wait(shared.k_empty(k.at), k.parity ^ 1);
      barrier_expect(shared.k_full(k.at), KV_BYTES);
      load_rows<BN>(shared.k + k.at * KV_BYTES, &maps.k, shared.k_full(k.at), block.low + n * BN,
                    h, b);
      k.next(STAGES);
    };
    const auto load_v = [&](int n) {
      barrier_wait(shared.v_empty(v.at), v.parity ^ 1);
      barrier_expect(shared.v_full(v.at), KV_BYTES);
      load_rows<BN>(shared.v + v.at * KV_BYTES, &maps.v, shared.v_full(v.at), block.low + n * BN,
                    h, b);
      v.next(STAGES);
    };
    barrier_wait(shared.q_empty(q.at), q.parity ^ 1);
    barrier_expect(shared.q_full(q.at), Q_BYTES);
    load_rows<BM>(shared.q + q.at * Q_BYTES, &maps.q, shared.q_full(q.at), block.start, block.head,
                  b);
    q.next(2);
    const int last = block.tiles() - 1;
    for (int n = last; n >= 0; n--) {
      if (n == 0) barrier_arrive(shared.wanted());
      load_k(n);
      if (n < last) load_v(n + 1);
    }
    load_v(0);
  }
}

// What a warpgroup does of a block: its tiles of keys low .. high. Only others see those before
// `low`, and the last `above` tiles.
struct Part { int low, high, above; };
__device__ __forceinline__ bool sees(const Block& block, int group) {
  return block.start >= 0 && (!MASKED || block.start + group * 64 < block.end);
}

__device__ __forceinline__ void consume(const Maps& maps, const Args& args,
                                        const Shared& shared) {
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1;
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const bool leader = (threadIdx.x & 127) == 0;
  Ring k = {0, 0}, v = {0, 0}, q = {0, 0}, blocks = {0, 0};
  float o[HEAD_DIM / 2], s[BN / 2];
  u32 p[BN / 4];
  const u64 q_operand = operand<false>(shared.q + group * 8192);
  const u64 k_operand = operand<false>(shared.k), v_operand = operand_mn<BN>(shared.v);
  const u32 staged = shared.o + group * 8192;
  // All lanes load and arrive. Where lane 0 does it for its warp, ptxas does not see that what it
  // hands on is the same in all lanes, and moves descriptors to uniform registers in every step.
  const auto take = [&]() {
    barrier_wait(shared.block_full(blocks.at), blocks.parity);
    const Block block = load_block(shared.block(blocks.at));
    barrier_arrive(shared.block_empty(blocks.at));
    blocks.next(2);
    return block.of_lane_0();
  };
  const auto free_k = [&]() {
    if (lane == 0) barrier_arrive(shared.k_empty(k.at));
    k.next(STAGES);
  };
  const auto free_v = [&]() {
    if (lane == 0) barrier_arrive(shared.v_empty(v.at));
    v.next(STAGES);
  };
  const auto free_q = [&]() {
    if (lane == 0) barrier_arrive(shared.q_empty(q.at));
  };
  // The first warpgroup is the first to go.
  if (TAKE_TURNS && group == CONSUMERS - 1) named_arrive<256>(TURN);
  const auto begin_turn = [&]() {
    if (TAKE_TURNS) named_sync<256>(TURN + group);
  };
  const auto end_turn = [&]() {
    if (TAKE_TURNS) named_arrive<256>(TURN + (group + 1) % CONSUMERS);
  };
  const auto pass_key = [&]() {
    barrier_wait(shared.k_full(k.at), k.parity);
    free_k();
  };
  const auto pass_value = [&]() {
    barrier_wait(shared.v_full(v.at), v.parity);
    free_v();
  };
  const auto part_of = [&](const Block& block, const Rows& rows) {
    if (!MASKED) return Part{0, block.tiles(), 0};
    const int last = min(rows.start + 64, block.end) - 1;
    const int high = (last - block.low) / BN + 1;
    const int low = block.alike ? 0 : max(rows.first_own - block.low, 0) / BN;
    return Part{low, high, block.tiles() - high};
  };
  const auto scores = [&]() {
    multiply_heads<BM, BN>(s, q_operand + q.at * (Q_BYTES >> 4),
                           k_operand + k.at * (KV_BYTES >> 4));
  };
  const auto weigh = [&]() {
    barrier_wait(shared.v_full(v.at), v.parity);
    multiply_fragments(o, p, v_operand + v.at * (KV_BYTES >> 4));
  };
  const auto leave = [&](const Block& block, int start, const float (&inverse)[2]) {
    if (leader) stores_read<0>();
    named_sync<128>(1 + group);
    stage_rows<BM * 128>(staged, o, inverse[0], inverse[1], warp, lane);
    fence_async_proxy();
    named_sync<128>(1 + group);
    // The copy engine clips what lies past the sequence, not what belongs to another block.
    if (MASKED && start + 64 > block.end && block.end < args.seq)
      copy_rows(args, staged, start, block, threadIdx.x & 127);
    else if (leader)
      store_rows<BM * 128>(&maps.o, staged, start, block.head, block.sequence);
  };
  Block block = take();
  while (block.start >= 0) {
    if (MASKED && !sees(block, group)) {
      for (int n = block.tiles(); n > 0; n--) {
        pass_key();
        pass_value();
      }
      // Else a phase could go by unseen, and the next Q in this place be taken for there.
      barrier_wait(shared.q_full(q.at), q.parity);
      free_q();
      q.next(2);
      block = take();
      continue;
    }
    Rows rows = rows_of_block(args, block, group * 64, 16 * warp, lane);
    Part part = part_of(block, rows);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) o[i] = 0.f;
    barrier_wait(shared.q_full(q.at), q.parity);
    if (MASKED)
      for (int n = part.above; n > 0; n--) pass_key();
    barrier_wait(shared.k_full(k.at), k.parity);
    scores();
    wgmma_wait<0>();
    free_k();
    if (part.high == part.low + 1) free_q();
    mask(s, rows, block.low + (part.high - 1) * BN);
    softmax(s, rows, args.scale_log2);
    round_pairs(p, s);
    if (MASKED)
      for (int n = part.above; n > 0; n--) pass_value();
    Block next;
    float inverse[2];
    while (true) {
      for (int n = part.high - 2; n >= part.low; n--) {
        barrier_wait(shared.k_full(k.at), k.parity);
        begin_turn();
        scores();
        weigh();
        end_turn();
        wgmma_wait<1>();
        free_k();
        if (n == part.low) free_q();
        mask(s, rows, block.low + n * BN);
        softmax(s, rows, args.scale_log2);
        wgmma_wait<0>();
        free_v();
        round_pairs(p, s);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) o[i] *= rows.rescale[(i >> 1) & 1];
      }
      // Tiles below are passed over before those of the next block, whose first S has to wait then.
      const bool passes = MASKED && part.low > 0;
      if (!passes) next = take();
      q.next(2);
      if (passes || !sees(next, group)) break;
      Rows before = rows;
      rows = rows_of_block(args, next, group * 64, 16 * warp, lane);
      part = part_of(next, rows);
      barrier_wait(shared.q_full(q.at), q.parity);
      if (MASKED)
        for (int n = part.above; n > 0; n--) pass_key();
      barrier_wait(shared.k_full(k.at), k.parity);
      begin_turn();
      scores();
      weigh();
      end_turn();
      finish_rows(args, block.sequence, block.head, before, block.end, inverse);
      wgmma_wait<1>();
      free_k();
      if (part.high == part.low + 1) free_q();
      mask(s, rows, next.low + (part.high - 1) * BN);
      softmax(s, rows, args.scale_log2);
      wgmma_wait<0>();
      free_v();
      round_pairs(p, s);
      leave(block, before.start, inverse);
      block = next;
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; i++) o[i] = 0.f;
      if (MASKED)
        for (int n = part.above; n > 0; n--) pass_value();
    }
    weigh();
    finish_rows(args, block.sequence, block.head, rows, block.end, inverse);
    wgmma_wait<0>();
    free_v();
    leave(block, rows.start, inverse);
    if (MASKED)
      for (int n = part.low; n > 0; n--) {
        pass_key();
        pass_value();
      }
    if (MASKED && part.low > 0) next = take();
    block = next;
    if (!MASKED) break;  // every block but the last flows on
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
    if (threadIdx.x >= 32 && threadIdx.x < 64) prefetch_starts(args, threadIdx.x & 31);
    if (threadIdx.x == 32) hand_out(args, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    consume(maps, args, shared);
  }
}
