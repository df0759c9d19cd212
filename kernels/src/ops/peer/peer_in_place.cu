// Tokens of an expert group and sums of them, read where they lie: in memory that each rank shares
// with the others of its node. Behind peer_group.cu. Nothing is laid into windows, so all threads
// of a block take, and there is one wait. The group lies on one node.
//
// A rank reads in one kernel alone what another one has there. So nobody may write to what was read
// in a kernel before the next kernel of the links has begun everywhere, which each waits for.

constexpr u32 PLACE_BITS = 40;
__device__ __forceinline__ u64 place_word(u32 epoch, u64 place) {
  return (u64)epoch << PLACE_BITS | place;
}

// Tells all where to read here, which also says that the kernels before are over; waits until all
// have told so. theirs[i][p] = the i-th address at position p. False: in vain.
__device__ __forceinline__ bool enter_reading(const Links& links, const u64 (&reads)[READS],
                                              u32 epoch, u32 step, u64 (*theirs)[PEERS_MAX]) {
  const u32 t = threadIdx.x;
  bool late = has_failed(links);
  if (t < links.positions && !late) {
    // A rank is one kernel ahead at most, so that two sets of words are enough.
    if (blockIdx.x == 0) {
      __threadfence_system();
      for (u32 i = 0; i < READS; i++)
        store_word(&mail_of(links, t)->reads[epoch % 2][links.me][i], place_word(epoch, reads[i]));
    }
    for (u32 i = 0; i < READS && !late; i++) {
      const u64* at = &mail_of(links, links.me)->reads[epoch % 2][t][i];
      u64 word;
      late = !await(links, NO_PLACE, t, epoch, step, [&] {
        word = load_word(at);
        return word >> PLACE_BITS == place_word(epoch, 0) >> PLACE_BITS;
      });
      load_acquire(at);
      theirs[i][t] = links.shared[t] + (word & (1ull << PLACE_BITS) - 1);
    }
  }
  return !__syncthreads_or(late);
}

// Which of the places is what: rows, and from WORDS_READ on ids and weights, or slots.
enum { ROWS_READ, WORDS_READ };

// What nobody reads twice.
__device__ __forceinline__ u32 load_word(const u32* at) {
  u32 x;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(x) : "l"(at));
  return x;
}

struct GatherInPlace {
  Need need;           // N = 1
  char* rows;          // [P T, bytes]
  u32* words[2];       // [P T, K] or null, as in Gather
  u64 reads[READS];    // where `rows` and `words` begin in what this rank shares
  u32 bytes, lanes, step;
};

// The token and position of the j-th row of a slice that is of others.
struct Other { u32 position, row; };
__device__ __forceinline__ Other other_of(const Links& links, const Need& need, Slice slice,
                                          u32 j) {
  const u32 others = links.positions - 1;
  const u32 p = (links.me + 1 + j % others) % links.positions;
  return {p, p * need.tokens + slice.begin + j / others};
}

extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 1)
gather_in_place(const __grid_constant__ Links links, const __grid_constant__ GatherInPlace op) {
  constexpr u32 WORDS = 8;  // of 16 bytes, that a thread has under way
  __shared__ u64 theirs[READS][PEERS_MAX];
  const u32 t = threadIdx.x, count = links.positions, me = links.me, top_k = op.need.top_k;
  const u32 epoch = *(volatile u32*)(links.state + EPOCH) + 1;
  if (!enter_reading(links, op.reads, epoch, op.step, theirs)) return;
  const Slice own = slice_of(op.need.tokens);
  const u32 tokens = own.end - own.begin;
  if (op.words[0]) {
    for (u32 p = 0; p < count; p++) {
      if (p == me || !is_present(op.need, p)) continue;
      const u64 first = ((u64)p * op.need.tokens + own.begin) * top_k;
      for (u32 begin = t; begin < tokens * top_k; begin += WORDS * GROUP_THREADS) {
        u32 v[2][WORDS];
#pragma unroll
        for (u32 k = 0; k < 2 * WORDS; k++) {
          const u32 i = begin + k / 2 * GROUP_THREADS;
          const u32* from = (const u32*)theirs[WORDS_READ + k % 2][p];
          if (i < tokens * top_k) v[k % 2][k / 2] = load_word(from + first + i);
        }
#pragma unroll
        for (u32 k = 0; k < 2 * WORDS; k++) {
          const u32 i = begin + k / 2 * GROUP_THREADS;
          if (i < tokens * top_k) op.words[k % 2][first + i] = v[k % 2][k / 2];
        }
      }
    }
    // The ids by which each thread decides were written by others of its block.
    __syncthreads();
  }
  const u32 lane = t % op.lanes, step = GROUP_THREADS / op.lanes, all = tokens * (count - 1);
  const auto comes = [&](u32 j) {
    if (j >= all) return false;
    const Other of = other_of(links, op.need, own, j);
    return is_present(op.need, of.position) && needs(op.need, of.row, me, op.lanes);
  };
  u32 j = t / op.lanes;
  for (bool here = comes(j), next; j < all; j += step, here = next) {
    if (!here) {
      next = comes(j + step);
      continue;
    }
    const Other of = other_of(links, op.need, own, j);
    const uint4* from = (const uint4*)(theirs[ROWS_READ][of.position] + (u64)of.row * op.bytes);
    uint4* const to = (uint4*)(op.rows + (u64)of.row * op.bytes);
    const u32 words = op.bytes / 16, width = op.lanes;
    for (u32 begin = 0; begin < words; begin += WORDS * width) {
      const u32 first = begin + lane;
      uint4 v[WORDS];
#pragma unroll
      for (u32 k = 0; k < WORDS; k++)
        if (first + k * width < words) v[k] = load_once(from + first + k * width);
      // Meanwhile the next row's choices are looked at.
      if (begin == 0) next = comes(j + step);
#pragma unroll
      for (u32 k = 0; k < WORDS; k++)
        if (first + k * width < words) store_far(to + first + k * width, v[k]);
    }
  }
  leave(links, epoch);
}

struct ScatterInPlace {
  Need need;         // N = 1
  char* rows;        // [P T, bytes], as in Scatter
  float* slots;      // [P T, K] or null
  char* onto[2];     // [T, bytes] or null
  u64 reads[READS];  // where `rows` and `slots` begin in what this rank shares
  u32 bytes, lanes, step;
};

constexpr u32 NOBODY = 32;
// The lowest position of a set, which loses it.
__device__ __forceinline__ u32 pop(u32& positions) {
  if (!positions) return NOBODY;
  const u32 lowest = __ffs(positions) - 1;
  positions &= positions - 1;
  return lowest;
}

// TWO: there are no more than two positions, so that one pass brings all that is added, and a
// thread needs few registers.
template <int KIND, bool TWO>
__device__ __forceinline__ void scatter_in_place(const Links& links, const ScatterInPlace& op) {
  constexpr u32 THREADS = TWO ? PAIR_THREADS : GROUP_THREADS;
  constexpr u32 WORDS = 4;  // of 16 bytes, that a thread has under way from each of two
  __shared__ u64 theirs[READS][PEERS_MAX];
  const u32 t = threadIdx.x, count = links.positions, me = links.me, top_k = op.need.top_k;
  const u32 epoch = *(volatile u32*)(links.state + EPOCH) + 1;
  if (!enter_reading(links, op.reads, epoch, op.step, theirs)) return;
  const Slice own = slice_of(op.need.tokens);
  const u32 lane = t % op.lanes, step = THREADS / op.lanes, words = op.bytes / 16;
  const u32 end = is_present(op.need, me) ? own.end : own.begin;
  const auto adders = [&](u32 token) {
    if (token >= end) return 0u;
    return who_needs(op.need, me * op.need.tokens + token, count, op.lanes);
  };
  // A position's own numbers are among those that it shares.
  const auto slot_of = [&](u32 q, u64 at) {
    return __uint_as_float(load_word((const u32*)theirs[WORDS_READ][q] + at));
  };
  u32 token = own.begin + t / op.lanes;
  for (u32 from = adders(token), next; token < end; token += step, from = next) {
    const u64 row = (u64)me * op.need.tokens + token;
    // With two the slots are loaded beside the rows, for they take as long to come.
    float slots[2] = {};
    const bool early = TWO && op.slots && lane < top_k;
    if (early)
#pragma unroll
      for (u32 q = 0; q < 2; q++)
        if (from >> q & 1) slots[q] = slot_of(q, row * top_k + lane);
    for (u32 begin = 0; begin < words; begin += WORDS * op.lanes) {
      const u32 first = begin + lane;
      const auto inside = [&](u32 k) { return first + k * op.lanes < words; };
      uint4 v[2][WORDS];
      // Sums of more than two are kept from pass to pass.
      Sum<KIND> sums[TWO ? 1 : WORDS];
      u32 left = from;
      do {
        const u32 a = pop(left), b = pop(left);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
          const u32 q = i ? b : a;
          if (q == NOBODY) continue;
          const uint4* at = (const uint4*)(theirs[ROWS_READ][q] + row * op.bytes) + first;
#pragma unroll
          for (u32 k = 0; k < WORDS; k++)
            if (inside(k)) v[i][k] = load_once(at + k * op.lanes);
        }
        if (begin == 0 && !left) next = adders(token + step);
#pragma unroll
        for (u32 k = 0; k < WORDS; k++) {
          if (!inside(k)) break;
          Sum<KIND> of_two;
          Sum<KIND>& sum = TWO ? of_two : sums[k];
          if (a != NOBODY) sum.add(v[0][k]);
          if (b != NOBODY) sum.add(v[1][k]);
          if (TWO || !left) v[0][k] = sum.word();
        }
      } while (!TWO && left);
      uint4* to = (uint4*)(op.rows + row * op.bytes) + first;
      if (op.onto[0]) {
        const uint4* onto = (const uint4*)(op.onto[0] + (u64)token * op.bytes) + first;
        to = (uint4*)(op.onto[1] + (u64)token * op.bytes) + first;
#pragma unroll
        for (u32 k = 0; k < WORDS; k++)
          if (inside(k)) v[1][k] = load_once(onto + k * op.lanes);
#pragma unroll
        for (u32 k = 0; k < WORDS; k++)
          if (inside(k)) v[0][k] = plus<KIND>(v[1][k], v[0][k]);
      }
#pragma unroll
      for (u32 k = 0; k < WORDS; k++)
        if (inside(k)) to[k * op.lanes] = v[0][k];
    }
    if (!op.slots) continue;
    if (early) {
      float sum = 0.f;
#pragma unroll
      for (u32 q = 0; q < 2; q++)
        if (from >> q & 1) sum += slots[q];
      op.slots[row * top_k + lane] = sum;
    }
    for (u32 k = TWO ? lane + op.lanes : lane; k < top_k; k += op.lanes) {
      float sum = 0.f;
      for (u32 q = 0; q < count; q++)
        if (from >> q & 1) sum += slot_of(q, row * top_k + k);
      op.slots[row * top_k + k] = sum;
    }
  }
  leave(links, epoch);
}

#define SCATTER_IN_PLACE(name, KIND, TWO)                                                        \
  extern "C" __global__ void __launch_bounds__(TWO ? PAIR_THREADS : GROUP_THREADS, 1) name(      \
      const __grid_constant__ Links links, const __grid_constant__ ScatterInPlace op) {          \
    scatter_in_place<KIND, TWO>(links, op);                                                      \
  }
SCATTER_IN_PLACE(scatter_two_f32, 0, true)
SCATTER_IN_PLACE(scatter_two_bf16, 1, true)
SCATTER_IN_PLACE(scatter_two_f16, 2, true)
SCATTER_IN_PLACE(scatter_all_f32, 0, false)
SCATTER_IN_PLACE(scatter_all_bf16, 1, false)
SCATTER_IN_PLACE(scatter_all_f16, 2, false)
