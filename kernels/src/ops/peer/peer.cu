// Rows and counts between the GPUs of a node, by stores into windows that the peers have mapped.
//
// Host macros: PEERS_MAX, BLOCKS_MAX, COUNTS_MAX, READS (places that a kernel may read of a peer),
// ROOMS (bytes from a window's begin to its rooms).
// P positions; `me` is this rank's. Every wait has a deadline, looks at a flag of the host's, and
// leaves a record of what it waited for. After a failure the kernels of these links do nothing.

// A window begins with mail. Words carry the epoch of what they belong to, so none is ever cleared.
struct Mail {
  u64 places[PEERS_MAX];               // by sender: epoch << 32 | where its rows of there go
  u64 counts[2][PEERS_MAX][COUNTS_MAX];  // by parity of the epoch and sender: epoch << 32 | count
  // By sender and its block: epoch << 32 | how many of its chunks are here.
  u64 flags[PEERS_MAX][BLOCKS_MAX];
  // By parity of the epoch and sender: epoch << PLACE_BITS | where to read in what it shares.
  u64 reads[2][PEERS_MAX][READS];
};
static_assert(sizeof(Mail) <= ROOMS, "the mail fits before the rooms");

struct Links {
  u64 windows[PEERS_MAX];  // of each position, as they are mapped here
  u64 shared[PEERS_MAX];   // likewise what each shares of its arena; 0: nothing
  u32* state;              // in device memory: EPOCH, DONE, COUNTS_EPOCH, FAILED
  u32* control;            // in host memory: STOP, then the record of a failure
  u64 patience;            // ns
  u32 positions, me;
};
enum { EPOCH, DONE, COUNTS_EPOCH, FAILED };
enum { STOP, WHAT, POSITION, AT_EPOCH, AT_STEP };
// What is recorded of a failure; 0 is none.
enum { NO_PLACE = 1, NO_ROWS, NO_COUNTS, NO_ROOM };
// In the state alone: the host has said so. What is enqueued behind it would go on with the epoch
// that was not ended, and tell others of rows that are not there.
enum { STOPPED = 99 };

__device__ __forceinline__ u64 clock_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ u64 load_word(const u64* at) {
  u64 x;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ void store_word(u64* at, u64 x) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(x) : "memory");
}
__device__ __forceinline__ u64 load_acquire(const u64* at) {
  u64 x;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(u64* at, u64 x) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(x) : "memory");
}
__device__ __forceinline__ u32 load_host(const u32* at) {
  u32 x;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ uint4 load_once(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}
__device__ __forceinline__ u32 load_byte(const char* at) {
  u16 x;
  asm volatile("ld.global.L1::no_allocate.u8 %0, [%1];" : "=h"(x) : "l"(at));
  return x;
}
__device__ __forceinline__ void store_far(uint4* at, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ Mail* mail_of(const Links& links, u32 position) {
  return (Mail*)links.windows[position];
}
__device__ __forceinline__ bool has_failed(const Links& links) {
  return *(volatile u32*)(links.state + FAILED);
}

// The first failure is kept.
__device__ void fail(const Links& links, u32 what, u32 position, u32 epoch, u32 step) {
  if (atomicCAS(links.state + FAILED, 0u, what)) return;
  volatile u32* record = links.control;
  record[POSITION] = position;
  record[AT_EPOCH] = epoch;
  record[AT_STEP] = step;
  __threadfence_system();
  record[WHAT] = what;
}

// Polls until `ready()`; false: too late, stopped, or another thread has failed. The host's memory
// is slow to read: with a look there at every 64th poll, waits of 64 blocks took 100 us longer. So
// there is one in some milliseconds.
constexpr u32 POLLS_A_LOOK = 4096;
template <typename Ready>
__device__ __forceinline__ bool await(const Links& links, u32 what, u32 position, u32 epoch,
                                      u32 step, Ready ready) {
  u64 until = 0;
  for (u32 polls = 1; !ready(); polls++) {
    if (polls % POLLS_A_LOOK) continue;
    const u64 t = clock_ns();
    if (!until) until = t + links.patience;
    if (has_failed(links)) return false;
    if (load_host(links.control + STOP)) {
      atomicCAS(links.state + FAILED, 0u, STOPPED);
      return false;
    }
    if (t > until) {
      fail(links, what, position, epoch, step);
      return false;
    }
  }
  return true;
}

// Chunks of this block are at `position`; all that this thread's block stored is there then, if its
// threads have met.
__device__ __forceinline__ void tell(const Links& links, u32 position, u32 epoch, u32 chunks) {
  store_release(&mail_of(links, position)->flags[links.me][blockIdx.x], (u64)epoch << 32 | chunks);
}
// Waits for as many of the block of the same number at `position`. False: in vain.
__device__ __forceinline__ bool hear(const Links& links, u32 position, u32 epoch, u32 chunks,
                                     u32 step) {
  const u64* at = &mail_of(links, links.me)->flags[position][blockIdx.x];
  const bool here = await(links, NO_ROWS, position, epoch, step, [&] {
    const u64 word = load_word(at);
    return (u32)(word >> 32) == epoch && (u32)word >= chunks;
  });
  // Polls that acquire would empty the first cache each time, which others of the block copy by.
  load_acquire(at);
  return here;
}

struct Move {
  const char* from;   // [any, bytes]
  const u32* take;    // [rows]: which row of `from` is the i-th; null: the i-th
  const u32* starts;  // [P + 1]: rows starts[p] .. starts[p + 1] are for position p
  const u32* places;  // [P]: the row of this rank's room where what position p sends begins
  u64 room;           // bytes from the begin of the rooms, the same on every rank
  u32 room_rows;      // rows that the room holds
  u32 bytes;          // of a row, a multiple of 16
  u32 lanes;          // threads that share a row, a power of two up to 32
  u32 step;           // for the record of a failure
};

// Each rank tells the others where their rows go in its room, which also says that it has read what
// was there; then stores its rows there; then waits until all others' are in its own room.
extern "C" __global__ void __launch_bounds__(1024, 1)
move_rows(const __grid_constant__ Links links, const __grid_constant__ Move move) {
  __shared__ u32 starts[PEERS_MAX + 1], places[PEERS_MAX];
  const u32 count = links.positions, me = links.me, t = threadIdx.x;
  const u32 epoch = *(volatile u32*)(links.state + EPOCH) + 1;
  Mail* const mine = mail_of(links, me);
  bool late = has_failed(links);
  if (t < count && !late) {
    if (blockIdx.x == 0)
      store_word(mail_of(links, t)->places + me, (u64)epoch << 32 | move.places[t]);
    u64 word;
    late = !await(links, NO_PLACE, t, epoch, move.step, [&] {
      word = load_word(mine->places + t);
      return (u32)(word >> 32) == epoch;
    });
    places[t] = (u32)word;
  }
  if (t <= count) starts[t] = move.starts[t];
  if (__syncthreads_or(late)) return;

  u32 longest = 0;
  for (u32 p = 0; p < count; p++) longest = max(longest, starts[p + 1] - starts[p]);
  const u32 groups = gridDim.x * blockDim.x / move.lanes, lane = t % move.lanes;
  const u32 words = move.bytes / 16, turn = max(groups / count, 1u);
  for (u32 j = (blockIdx.x * blockDim.x + t) / move.lanes; j < longest * count; j += groups) {
    // Neighbours and successive turns of a group are for different positions: the links are
    // loaded all the time, by all blocks.
    const u32 at = j / count, p = (j + at / turn) % count;
    if (at >= starts[p + 1] - starts[p]) continue;
    if (places[p] + at >= move.room_rows) {
      fail(links, NO_ROOM, p, epoch, move.step);
      late = true;
      break;
    }
    const u32 i = starts[p] + at;
    const u64 row = move.take ? move.take[i] : i;
    const uint4* from = (const uint4*)(move.from + row * move.bytes);
    uint4* to = (uint4*)(links.windows[p] + ROOMS + move.room + (u64)(places[p] + at) * move.bytes);
    for (u32 first = lane; first < words; first += 8 * move.lanes) {
      uint4 v[8];
#pragma unroll
      for (u32 k = 0; k < 8; k++)
        if (first + k * move.lanes < words) v[k] = load_once(from + first + k * move.lanes);
#pragma unroll
      for (u32 k = 0; k < 8; k++)
        if (first + k * move.lanes < words) store_far(to + first + k * move.lanes, v[k]);
    }
  }
  // Nothing is announced by a rank that has not stored all of it.
  if (__syncthreads_or(late)) return;
  if (t < count) {
    tell(links, t, epoch, 1);
    late = !hear(links, t, epoch, 1, move.step);
  }
  if (__syncthreads_or(late)) return;
  // The next kernel's epoch begins when no block of this one reads it any more.
  if (t == 0 && atomicAdd(links.state + DONE, 1u) == gridDim.x - 1) {
    links.state[DONE] = 0;
    links.state[EPOCH] = epoch;
  }
}

// out[p, i] = position p's values[me, i]. A word holds a count and its epoch, so that its arrival
// is seen in itself. Words of two epochs lie beside each other: a peer can be one ahead, not two.
extern "C" __global__ void __launch_bounds__(1024, 1)
exchange_counts(const __grid_constant__ Links links, const u32* values, u32* out, u32 len,
                u32 step) {
  const u32 me = links.me, all = links.positions * len;
  const u32 epoch = *(volatile u32*)(links.state + COUNTS_EPOCH) + 1, half = epoch % 2;
  bool late = has_failed(links);
  __syncthreads();
  if (!late)
    for (u32 i = threadIdx.x; i < all; i += blockDim.x)
      store_word(&mail_of(links, i / len)->counts[half][me][i % len],
                 (u64)epoch << 32 | values[i]);
  for (u32 i = threadIdx.x; i < all && !late; i += blockDim.x) {
    const u64* at = &mail_of(links, me)->counts[half][i / len][i % len];
    u64 word;
    late = !await(links, NO_COUNTS, i / len, epoch, step, [&] {
      word = load_word(at);
      return (u32)(word >> 32) == epoch;
    });
    if (!late) out[i] = (u32)word;
  }
  if (!__syncthreads_or(late) && threadIdx.x == 0) links.state[COUNTS_EPOCH] = epoch;
}

// Rows lie by (expert here, source, token), segments [G * S + 1]. take = them by (source, expert,
// token), starts [P + 1] = where each position's begin; `at` [S] are the sources' positions.
struct Sources {
  u32 at[PEERS_MAX];
  u32 count;
};
extern "C" __global__ void __launch_bounds__(1024, 1)
return_order(const u32* segments, u32 locals, const __grid_constant__ Sources sources,
             u32 positions, u32* take, u32* starts) {
  __shared__ u32 first[PEERS_MAX + 1];
  const u32 count = sources.count, lane = threadIdx.x % 32;
  auto rows = [&](u32 g, u32 s) {
    return segments[g * count + s + 1] - segments[g * count + s];
  };
  if (threadIdx.x == 0) {
    u32 sum = 0, p = 0;
    for (u32 s = 0; s < count; s++) {
      first[s] = sum;
      for (; p <= sources.at[s]; p++) starts[p] = sum;
      for (u32 g = 0; g < locals; g++) sum += rows(g, s);
    }
    for (; p <= positions; p++) starts[p] = sum;
  }
  __syncthreads();
  for (u32 j = threadIdx.x / 32; j < locals * count; j += blockDim.x / 32) {
    const u32 s = j % count, from = segments[j], len = segments[j + 1] - from;
    u32 before = 0;
    for (u32 g = lane; g < j / count; g += 32) before += rows(g, s);
#pragma unroll
    for (u32 apart = 16; apart; apart /= 2) before += __shfl_xor_sync(~0u, before, apart);
    for (u32 i = lane; i < len; i += 32) take[first[s] + before + i] = from + i;
  }
}
