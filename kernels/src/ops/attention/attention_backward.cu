// dk, dv and dq for sm_90a: K and V stationary, a loop over the queries of all heads that share
// them, so that dk and dv need no atomics. See attention_hopper.cu.
//
// 128 keys, 64 a consumer warpgroup; queries in stages of BM, of which 64 at a time are worked on.
// S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are fragments of dv += P^T dO and
// dk += dS^T Q, which read dO and Q MN-major from the same stage.
// dS^T also goes to shared memory (two buffers, one barrier a stage), and dq = dS K of both
// warpgroups' keys is added to sums in fp32, in the order of registers: each warpgroup has half of
// the columns, or with BM = 128 half of the queries. `attention_round` undoes that order.
//
// With ORDERED tiles of keys add in ascending order, so that bits do not depend on who comes first.
// The first stores. The last starts its product from the sums and writes dq itself. Two warps of
// the producer's keep the turns, one waits for them and one hands them on; consumers only arrive at
// barriers. Tiles of a head go down the queries in step, each a bit behind the one before, and the
// longest tiles, which are first in turn, also start first: hardly anyone waits.
//
// Host macros: ORDERED; BM, 64 or 128; HELD: K and V as fragments (heads of 64); DESCENDING:
// queries from the last block down, heads inside, so that tiles go in step and share what L2
// holds, else head by head from the diagonal up. ORDERED takes DESCENDING.
constexpr int CONSUMERS = 2, BN = CONSUMERS * 64, STAGES = 2, PARTS = BM / 64;
constexpr u32 KV_BYTES = SLABS * BN * 128, Q_BYTES = SLABS * BM * 128;
constexpr u32 ROW_BYTES = BM * 8;  // lse2 and delta of a stage
constexpr u32 DS_BYTES = BN * BM * 2;
// dv and dk leave one after the other through one place.
constexpr u32 Q_AT = 2 * KV_BYTES, STAGED_AT = Q_AT + STAGES * 2 * Q_BYTES;
constexpr u32 DS_AT = STAGED_AT + KV_BYTES, ROWS_AT = DS_AT + 2 * DS_BYTES;
constexpr u32 BARRIERS_AT = ROWS_AT + STAGES * ROW_BYTES;
constexpr int DQ_CHUNKS = HEAD_DIM / 8;  // of 8 columns, 128 threads by 4 registers each

struct Shared {
  u32 k, v, q, d_o, staged, ds, rows, barriers;
  TileQueue tiles;
  __device__ __forceinline__ u32 q_full(int s) const { return barriers + s * 8; }
  __device__ __forceinline__ u32 q_empty(int s) const { return barriers + 16 + s * 8; }
  __device__ __forceinline__ u32 o_full(int s) const { return barriers + 32 + s * 8; }
  __device__ __forceinline__ u32 o_empty(int s) const { return barriers + 48 + s * 8; }
  __device__ __forceinline__ u32 kv_full() const { return barriers + 64; }
  __device__ __forceinline__ u32 kv_empty() const { return barriers + 72; }
  __device__ __forceinline__ u32 rows_full(int s) const { return barriers + 128 + s * 8; }
  // The turn of a stage has come; its sums are added; it is handed on. Two of each in turn.
  __device__ __forceinline__ u32 turn(int s) const { return barriers + 160 + s * 8; }
  __device__ __forceinline__ u32 added(int s) const { return barriers + 176 + s * 8; }
  __device__ __forceinline__ u32 handed(int s) const { return barriers + 192 + s * 8; }
  // 0: nothing was added to the sums of this stage before; and the number of its turn
  __device__ __forceinline__ u32 position(int s) const { return barriers + 208 + s * 8; }
};

__device__ __forceinline__ Shared share(u8* memory) {
  const u32 at = shared_address(memory);
  Shared shared = {at, at + KV_BYTES, at + Q_AT, at + Q_AT + STAGES * Q_BYTES, at + STAGED_AT,
                   at + DS_AT, at + ROWS_AT, at + BARRIERS_AT, {}};
  volatile int* slots = (volatile int*)(memory + BARRIERS_AT + 144);
  shared.tiles = {shared.barriers + 80, shared.barriers + 96, slots, {0, 0}};
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(shared.q_full(s), 1);
      barrier_init(shared.q_empty(s), CONSUMERS * 4);
      barrier_init(shared.o_full(s), 1);
      barrier_init(shared.o_empty(s), CONSUMERS * 128);
      barrier_init(shared.rows_full(s), 32);
    }
    barrier_init(shared.kv_full(), 1);
    barrier_init(shared.kv_empty(), CONSUMERS * 4);
    for (int s = 0; s < 2; s++) {
      barrier_init(shared.turn(s), 1);
      barrier_init(shared.added(s), CONSUMERS * 4);
      barrier_init(shared.handed(s), 1);
      barrier_init(shared.tiles.full + s * 8, 1);
      barrier_init(shared.tiles.empty + s * 8, CONSUMERS * 4 + 1 + ORDERED);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  return shared;
}

// What a tile goes through: `steps` stages, low .. high blocks of queries of every head.
struct Walk {
  int low, high, heads, steps;
  int block, head;
  __device__ __forceinline__ void next() {
    if (DESCENDING) {
      if (++head == heads) {
        head = 0;
        block--;
      }
    } else if (++block == high) {
      block = low;
      head++;
    }
  }
};
__device__ __forceinline__ Walk walk_of(const Args& args, const Place& at) {
  const int last = min((at.block + 1) * BN, args.seq) - 1;
  const int end = MASKED ? args.past[(u64)at.sequence * args.seq + last] : args.seq;
  Walk walk = {at.block * BN / BM, (end + BM - 1) / BM, args.heads / args.kv_heads, 0, 0, 0};
  walk.steps = walk.heads * (walk.high - walk.low);
  walk.block = DESCENDING ? walk.high - 1 : walk.low;
  return walk;
}

__device__ __forceinline__ void produce(const Maps& maps, const Args& args, Shared& shared) {
  const int blocks = (args.seq + BN - 1) / BN, total = blocks * args.batch * args.kv_heads;
  Ring ring = {0, 0};
  u32 kv_parity = 0;
  for (int t = blockIdx.x;; t = next_tile(args.counter)) {
    shared.tiles.give(t);
    if (t >= total) break;
    const Place at = place_of(t, blocks, args.kv_heads, args.batch, args.group, false);
    Walk walk = walk_of(args, at);
    const int b = at.sequence;
    for (int i = 0; i < walk.steps; i++, walk.next()) {
      const int s = ring.at, row = walk.block * BM, h = at.head * walk.heads + walk.head;
      barrier_wait(shared.q_empty(s), ring.parity ^ 1);
      barrier_expect(shared.q_full(s), Q_BYTES);
      load_rows<BM>(shared.q + s * Q_BYTES, &maps.q, shared.q_full(s), row, h, b);
      if (i == 0) {
        barrier_wait(shared.kv_empty(), kv_parity ^ 1);
        kv_parity ^= 1;
        barrier_expect(shared.kv_full(), 2 * KV_BYTES);
        load_rows<BN>(shared.k, &maps.k, shared.kv_full(), at.block * BN, at.head, b);
        load_rows<BN>(shared.v, &maps.v, shared.kv_full(), at.block * BN, at.head, b);
      }
      barrier_wait(shared.o_empty(s), ring.parity ^ 1);
      barrier_expect(shared.o_full(s), Q_BYTES);
      load_rows<BM>(shared.d_o + s * Q_BYTES, &maps.d_o, shared.o_full(s), row, h, b);
      ring.next(STAGES);
    }
  }
  end_tiles(args.counter);
}

__device__ __forceinline__ void store_shared16(u32 to, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
// lse2 and delta of every stage, by a warp of the producer's, with plain stores: consumers read
// them with plain loads, before they let go of dO's stage. There each lane arrives for itself.
// Where lane 0 arrived for its warp, behind __syncwarp, nothing raced either, but ptxas leaves no
// instruction of __syncwarp where lanes go together, and racecheck reported the others' loads.
__device__ __forceinline__ void load_statistics(const Args& args, Shared& shared) {
  const int lane = threadIdx.x & 31;
  const int blocks = (args.seq + BN - 1) / BN, total = blocks * args.batch * args.kv_heads;
  Ring ring = {0, 0};
  for (int t = shared.tiles.take(lane); t < total; t = shared.tiles.take(lane)) {
    const Place at = place_of(t, blocks, args.kv_heads, args.batch, args.group, false);
    Walk walk = walk_of(args, at);
    const int head = at.sequence * args.heads + at.head * walk.heads;
    const float* from = (lane < 16 ? args.lse2 : args.delta) + (lane & 15) * 4;
    const u32 to = shared.rows + (lane < 16 ? 0 : BM * 4) + (lane & 15) * 16;
    for (int i = 0; i < walk.steps; i++, walk.next()) {
      barrier_wait(shared.o_empty(ring.at), ring.parity ^ 1);
      const float* row = from + (u64)(u32)(head + walk.head) * args.padded + walk.block * BM;
#pragma unroll
      for (int part = 0; part < PARTS; part++)
        store_shared16(to + ring.at * ROW_BYTES + part * 256, *(const float4*)(row + part * 64));
      barrier_arrive(shared.rows_full(ring.at));
      ring.next(STAGES);
    }
  }
}

// What the tiles before have added can be seen once their turn's end was.
__device__ __forceinline__ int load_turn(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void store_turn(int* to, int x) {
  asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x)
               : "memory");
}

// Waits for the turns, of all tiles of keys that a block of queries sees, in ascending order.
// Whoever is waited for has a lower number, so it is done or running.
__device__ __forceinline__ void await_turns(const Args& args, Shared& shared) {
  const int lane = threadIdx.x & 31;
  const int blocks = (args.seq + BN - 1) / BN, total = blocks * args.batch * args.kv_heads;
  Ring ring = {0, 0};
  const auto give = [&](u32 turn, int position) {
    barrier_wait(shared.handed(ring.at), ring.parity ^ 1);
    store_shared(shared.position(ring.at), position);
    store_shared(shared.position(ring.at) + 4, turn);
    barrier_arrive(shared.turn(ring.at));
    ring.next(2);
  };
  for (int t = shared.tiles.take(lane); t < total; t = shared.tiles.take(lane)) {
    const Place at = place_of(t, blocks, args.kv_heads, args.batch, args.group, false);
    Walk walk = walk_of(args, at);
    const int query_blocks = (args.seq + BM - 1) / BM;
    const u32 head = (u32)(at.sequence * args.heads + at.head * walk.heads) * query_blocks;
    if (lane == 0)
      for (int i = 0; i < walk.steps; i++, walk.next()) {
        const u32 turn = head + walk.head * query_blocks + walk.block;
        const int position = at.block - first_key(args, at.sequence, walk.block * BM) / BN;
        while (load_turn(args.turns + turn) != position) {
        }
        give(turn, position);
      }
    __syncwarp();
  }
  if (lane == 0) give(0, -1);
}
// Hands turns on, by a warp of its own: that takes about as long as waiting for the next. It ends
// at position -1. What it needs is ready before the sums are.
__device__ __forceinline__ void hand_on_turns(const Args& args, Shared& shared) {
  Ring ring = {0, 0};
  while (true) {
    barrier_wait(shared.turn(ring.at), ring.parity);
    const int position = (int)load_shared(shared.position(ring.at));
    int* const turn = args.turns + load_shared(shared.position(ring.at) + 4);
    if (position < 0) break;
    barrier_wait(shared.added(ring.at), ring.parity);
    store_turn(turn, position + 1);
    barrier_arrive(shared.handed(ring.at));
    ring.next(2);
  }
}

// K or V of a warpgroup as fragments.
__device__ __forceinline__ void load_fragments(u32 (&f)[HELD ? HEAD_DIM / 4 : 1], u32 slab,
                                               int warp, int lane) {
#if HELD
  const int row = warp * 16 + (lane & 15);
#pragma unroll
  for (int k = 0; k < K_STEPS; k++) {
    const u32 at = slab + row * 128 + (((2 * k + (lane >> 4)) ^ (row & 7)) << 4);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[4 * k]), "=r"(f[4 * k + 1]), "=r"(f[4 * k + 2]), "=r"(f[4 * k + 3])
                 : "r"(at) : "memory");
  }
#endif
}

// d [64 keys, 64 queries] = keys queries^T over D; keys from fragments if they are held.
__device__ __forceinline__ void multiply_keys(float (&d)[32], u64 keys,
                                              const u32 (&held)[HELD ? HEAD_DIM / 4 : 1],
                                              u64 queries) {
#if HELD
  wgmma_fence();
  wgmma_rs<0, 0>(d, held[0], held[1], held[2], held[3], queries);
#pragma unroll
  for (int k = 1; k < K_STEPS; k++)
    wgmma_rs<0, 1>(d, held[4 * k], held[4 * k + 1], held[4 * k + 2], held[4 * k + 3],
                   queries + k_step<BM>(k));
  wgmma_commit();
#else
  multiply_heads<BN, BM>(d, keys, queries);
#endif
}

// Where a thread's part of dq of the group's first head's first 64 queries is added.
__device__ __forceinline__ float* sums_of(const Args& args, const Place& at, int blocks,
                                          int group) {
  const int head = at.sequence * args.heads + at.head * (args.heads / args.kv_heads);
  const int first = PARTS == 2 ? group * DQ_CHUNKS : group * 8;  // of chunks
  return args.sums + (u64)head * blocks * (64 * HEAD_DIM) + first * 512 + (threadIdx.x & 127) * 4;
}
__device__ __forceinline__ void add_dq(float* sums, const float (&dq)[32], int group, bool first) {
  // Of a head of 96 the second warpgroup has 4 chunks, and zeros.
  constexpr int BOTH = PARTS == 2 ? 8 : DQ_CHUNKS - 8;
  if (first) {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (j < BOTH || group == 0)
        store_f32x4(sums + j * 512, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (j < BOTH || group == 0)
        add_f32x4(sums + j * 512, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
  }
}

// What others have added to sums before. From L2: no line of it may be in L1.
__device__ __forceinline__ void load_dq(float (&d)[32], const float* sums, int group) {
  constexpr int BOTH = PARTS == 2 ? 8 : DQ_CHUNKS - 8;
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (j < BOTH || group == 0)
      asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(d[4 * j]), "=f"(d[4 * j + 1]), "=f"(d[4 * j + 2]), "=f"(d[4 * j + 3])
                   : "l"(sums + j * 512) : "memory");
}
// dq, rounded: rows `s` and s + 8 of the thread, columns from `column` on of head h.
__device__ __forceinline__ void finish_dq(const Args& args, const float (&dq)[32], int group,
                                          int b, int s, int h, int column, int quad) {
  constexpr int BOTH = PARTS == 2 ? 8 : DQ_CHUNKS - 8;
  const u64 row = (u64)args.heads * HEAD_DIM;
  u16* to = (u16*)args.dq + ((u64)b * args.seq + s) * row + h * HEAD_DIM + column + 8 * quad;
#pragma unroll
  for (int j = 0; j < 8; j += 4)
    if (j < BOTH || group == 0) {
      u32 upper[4], lower[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* d = &dq[4 * (j + i)];
        upper[i] = pack_pair(d[0] * args.scale, d[1] * args.scale);
        lower[i] = pack_pair(d[2] * args.scale, d[3] * args.scale);
      }
      quad_transpose(upper, quad);
      quad_transpose(lower, quad);
      if (s < args.seq) store16(to + j * 8, upper[0], upper[1], upper[2], upper[3]);
      if (s + 8 < args.seq)
        store16(to + j * 8 + 8 * row, lower[0], lower[1], lower[2], lower[3]);
    }
}

__device__ __forceinline__ void consume(const Maps& maps, const Args& args, Shared& shared) {
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1;
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const bool leader = (threadIdx.x & 127) == 0;
  const int blocks = (args.seq + BN - 1) / BN, total = blocks * args.batch * args.kv_heads;
  Ring ring = {0, 0};
  u32 kv_parity = 0;
  const int query_blocks = (args.seq + BM - 1) / BM * PARTS;  // of 64
  int buffer = 0;  // of dS
  Ring turns = {0, 0};
  float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2], s[32], dp[32];
  u32 p[16], ds[16], k_held[HELD ? HEAD_DIM / 4 : 1], v_held[HELD ? HEAD_DIM / 4 : 1];
  // dP is dead when dq is computed; with registers of its own ptxas would serialize.
  float(&dq)[32] = dp;
  const u64 k = operand<false>(shared.k + group * 8192);
  const u64 v = operand<false>(shared.v + group * 8192);
  const u64 q = operand<false>(shared.q), d_o = operand<false>(shared.d_o);
  const u64 q_mn = operand_mn<BM>(shared.q), o_mn = operand_mn<BM>(shared.d_o);
  const u64 k_mn = operand_mn<BN>(shared.k + (PARTS == 1 ? group * (BN * 128) : 0));
  const u32 staged = shared.staged + group * 8192;
  const auto release = [&](u32 barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  // Lane 0 loads for its warp, as in `TileQueue::take`.
  const auto position_of = [&](int turn) {
    const u32 position = lane == 0 ? load_shared(shared.position(turn)) : 0;
    return __shfl_sync(~0u, position, 0);
  };
  for (int t = shared.tiles.take(lane); t < total; t = shared.tiles.take(lane)) {
    const Place at = place_of(t, blocks, args.kv_heads, args.batch, args.group, false);
    const Keys keys = keys_of<64>(args, at.sequence, at.block * BN + group * 64, 16 * warp, lane);
    Walk walk = walk_of(args, at);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) dk[i] = dv[i] = 0.f;
    barrier_wait(shared.kv_full(), kv_parity);
    kv_parity ^= 1;
    load_fragments(k_held, shared.k + group * 8192, warp, lane);
    load_fragments(v_held, shared.v + group * 8192, warp, lane);
    float* const sums = sums_of(args, at, query_blocks, group);
    for (int i = 0; i < walk.steps; i++, walk.next()) {
      const int st = ring.at;
      const u64 stage = st * (Q_BYTES >> 4);
      const bool last = walk.block < walk.low + BN / BM;  // of the tiles that see these queries
      bool goes_on = false;                               // dq, from what is in sums
      float* const to =
          sums + (u64)(u32)(walk.head * query_blocks + walk.block * PARTS) * (64 * HEAD_DIM);
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const int q0 = walk.block * BM + part * 64;
        const u64 k_rows = stage + part * (8192 >> 4), mn_rows = stage + part * (64 / 16 * 128);
        const u32 rows = shared.rows + st * ROW_BYTES + part * 256 + keys.column * 4;
        if (part == 0) {
          barrier_wait(shared.q_full(st), ring.parity);
          barrier_wait(shared.rows_full(st), ring.parity);
        }
        multiply_keys(s, k, k_held, q + k_rows);
        if (part == 0) barrier_wait(shared.o_full(st), ring.parity);
        multiply_keys(dp, v, v_held, d_o + k_rows);
        wgmma_wait<1>();  // S
        mask<64>(s, keys, q0);
        exponentiate(s, rows, args.scale_log2);
        round_pairs(p, s);
        multiply_fragments(dv, p, o_mn + mn_rows);
        forget_alone<64>(s, keys, q0);
        wgmma_wait<1>();  // dP
        score_gradients(dp, s, rows + BM * 4);
        round_pairs(ds, dp);
        if (ORDERED && part == PARTS - 1 && last) {
          barrier_wait(shared.turn(turns.at), turns.parity);
          goes_on = position_of(turns.at) != 0;
          if (goes_on) load_dq(dq, to, group);
        }
        const u32 slab = shared.ds + buffer * DS_BYTES + part * (BN * 128);
        const int row = group * 64 + warp * 16 + (lane & 15), chunk = lane >> 4;
#pragma unroll
        for (int j = 0; j < 4; j++)
          store_fragments(slab, row, 2 * j + chunk, ds[4 * j], ds[4 * j + 1], ds[4 * j + 2],
                          ds[4 * j + 3]);
        wgmma_wait<0>();  // dv
        if (part == PARTS - 1) {
          barrier_arrive(shared.o_empty(st));
          fence_async_proxy();
          named_sync<256>(3);  // dS of both warpgroups is there
          const u64 ds_mn = operand_mn<BN>(shared.ds + buffer * DS_BYTES +
                                           (PARTS == 2 ? group * (BN * 128) : 0));
          wgmma_fence();
          wgmma_ss_if<1, 1>(dq, ds_mn, k_mn, goes_on);
#pragma unroll
          for (int j = 1; j < BN / 16; j++)
            wgmma_ss<1, 1, 1>(dq, ds_mn + j * 128, k_mn + j * 128);
          wgmma_commit();
          buffer ^= 1;
        }
        multiply_fragments(dk, ds, q_mn + mn_rows);
        if (part == PARTS - 1) {
          wgmma_wait<1>();  // dq, which leaves while dk is computed
          if (ORDERED && last) {
            const int row = walk.block * BM + (PARTS == 2 ? group * 64 : 0) + keys.row;
            finish_dq(args, dq, group, at.sequence, row, at.head * walk.heads + walk.head,
                      PARTS == 2 ? 0 : group * 64, lane & 3);
          } else {
            bool first = false;
            if (ORDERED) {
              barrier_wait(shared.turn(turns.at), turns.parity);
              first = position_of(turns.at) == 0;
            }
            add_dq(to, dq, group, first);
          }
          if (ORDERED) {
            __syncwarp();  // all lanes have added
            release(shared.added(turns.at));
            turns.next(2);
          }
        }
        wgmma_wait<0>();  // dk, before S of the next: ptxas has no registers for both
        if (part == PARTS - 1) release(shared.q_empty(st));
      }
      ring.next(STAGES);
    }
    if (leader) stores_read<0>();
    named_sync<128>(1 + group);
    stage_rows<BN * 128>(staged, dv, 1.f, 1.f, warp, lane);
    fence_async_proxy();
    named_sync<128>(1 + group);
    if (leader) store_rows<BN * 128>(&maps.dv, staged, keys.start, at.head, at.sequence);
    __syncwarp();  // all lanes have loaded the fragments that they hold
    release(shared.kv_empty());
    if (leader) stores_read<0>();
    named_sync<128>(1 + group);
    stage_rows<BN * 128>(staged, dk, args.scale, args.scale, warp, lane);
    fence_async_proxy();
    named_sync<128>(1 + group);
    if (leader) store_rows<BN * 128>(&maps.dk, staged, keys.start, at.head, at.sequence);
  }
  if (leader) stores_done();
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * 128, 1)
attention_backward(const __grid_constant__ Maps maps, const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared shared = share(memory);
  if (__shfl_sync(~0u, threadIdx.x >> 7, 0) == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(24));
    if (threadIdx.x == 0) produce(maps, args, shared);
    if (threadIdx.x >= 32 && threadIdx.x < 64) load_statistics(args, shared);
    if (ORDERED && threadIdx.x >= 64 && threadIdx.x < 96) await_turns(args, shared);
    if (ORDERED && threadIdx.x == 96) hand_on_turns(args, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(240));
    consume(maps, args, shared);
  }
}
