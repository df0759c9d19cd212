// Tokens of an expert group to the ranks that have one of their experts, and what these make of
// them back, summed. Behind wire.cu and peer.cu. The group lies on N nodes, of which the links join
// one, with P positions on each. A position has N T tokens: T of each rank of its place, by node.
// Rows of all lie by (node, position, token). A block has a slice of every position's tokens, the
// same on each rank, so it waits for the blocks of its own number alone.
//
// Each rank lays what others need into its own window, from where they take it. A slice is cut into
// chunks, and a block's threads into two crews: one lays chunk after chunk and says so, the other
// takes those that all have laid. So the links are busy while this GPU's memory is.

// Who needs which token.
struct Need {
  const u32* ids;             // [N P T, K]: experts of each token
  u32 present;                // (node, position) that have tokens, the first ones
  u32 first[PEERS_MAX];       // experts of each position here: first .. first + count
  u32 count[PEERS_MAX];
  u32 tokens, top_k, nodes;   // T, K, N
};

// The threads that share a row: `lanes` neighbours.
__device__ __forceinline__ u32 sharers(u32 lanes) {
  const u32 first = threadIdx.x % 32 / lanes * lanes;
  return lanes == 32 ? ~0u : ((1u << lanes) - 1) << first;
}
// Whether `position` here has an expert of the token of a row, found out by all that share it; an
// empty choice is nobody's.
__device__ __forceinline__ bool needs(const Need& need, u32 row, u32 position, u32 lanes) {
  const u32 first = need.first[position], count = need.count[position];
  const u32* ids = need.ids + (u64)row * need.top_k;
  bool found = false;
  for (u32 k = threadIdx.x % lanes; k < need.top_k; k += lanes) found |= ids[k] - first < count;
  return __any_sync(sharers(lanes), found);
}
// The same of all of `positions`: a bit each.
__device__ __forceinline__ u32 who_needs(const Need& need, u32 row, u32 positions, u32 lanes) {
  const u32* ids = need.ids + (u64)row * need.top_k;
  u32 found = 0;
  for (u32 k = threadIdx.x % lanes; k < need.top_k; k += lanes)
    for (u32 q = 0; q < positions; q++)
      found |= (u32)(ids[k] - need.first[q] < need.count[q]) << q;
  return __reduce_or_sync(sharers(lanes), found);
}
__device__ __forceinline__ bool is_present(const Need& need, u32 rank) {
  return rank < need.present;
}

constexpr u32 CREW = GROUP_THREADS / 2;
enum { LAYS, TAKES };
// All threads of a crew meet. Whether any of them says so.
__device__ __forceinline__ bool crew_any(u32 crew, bool said) {
  u32 any;
  asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0;\n"
               "barrier.cta.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q;}"
               : "=r"(any)
               : "r"((u32)said), "r"(crew + 1), "n"(CREW)
               : "memory");
  return any;
}

struct Slice { u32 begin, end; };
__device__ __forceinline__ Slice slice_of(u32 tokens) {
  const u64 b = blockIdx.x, n = gridDim.x;
  return {(u32)(tokens * b / n), (u32)(tokens * (b + 1) / n)};
}
// The c-th of its chunks of `size` tokens.
__device__ __forceinline__ Slice chunk_of(Slice slice, u32 c, u32 size) {
  const u32 begin = slice.begin + c * size;
  return {begin, min(begin + size, slice.end)};
}

// The tokens of a slice that are of `node`; none where its rank at `position` of `count` has none.
// `row` is that of the first.
struct Part { u32 begin, len; u64 row; };
__device__ __forceinline__ Part part_of(const Need& need, Slice slice, u32 node, u32 position,
                                        u32 count) {
  const u32 rank = node * count + position, first = node * need.tokens;
  const u32 begin = max(slice.begin, first), end = min(slice.end, first + need.tokens);
  const u32 len = begin < end && is_present(need, rank) ? end - begin : 0;
  return {begin, len, (u64)rank * need.tokens + (begin - first)};
}

// The rank whose token it is, and the token's row, of the token-th of `position` of `count`.
struct Place { u32 rank, row; };
__device__ __forceinline__ Place place_of(const Need& need, u32 token, u32 position, u32 count) {
  const u32 node = token / need.tokens, rank = node * count + position;
  return {rank, rank * need.tokens + (token - node * need.tokens)};
}

// Tells all that what this rank had in its window was read, and that its room may be written; waits
// until all have told so. False: in vain.
__device__ __forceinline__ bool enter(const Links& links, u32 epoch, u32 step) {
  const u32 t = threadIdx.x;
  bool late = has_failed(links);
  if (t < links.positions && !late) {
    if (blockIdx.x == 0) store_word(mail_of(links, t)->places + links.me, (u64)epoch << 32);
    const u64* at = mail_of(links, links.me)->places + t;
    late = !await(links, NO_PLACE, t, epoch, step,
                  [&] { return (u32)(load_word(at) >> 32) == epoch; });
  }
  return !__syncthreads_or(late);
}

// The crew that lays tells all that so many chunks are there.
__device__ __forceinline__ void tell_all(const Links& links, u32 epoch, u32 chunks, u32 t) {
  crew_any(LAYS, false);
  if (t < links.positions) tell(links, t, epoch, chunks);
}
// The crew that takes waits for as many of all. False: in vain.
__device__ __forceinline__ bool hear_all(const Links& links, u32 epoch, u32 chunks, u32 step,
                                         u32 t) {
  return !crew_any(TAKES, t < links.positions && !hear(links, t, epoch, chunks, step));
}

// The next kernel's epoch begins when no block of this one reads it any more.
__device__ __forceinline__ void leave(const Links& links, u32 epoch) {
  if (threadIdx.x == 0 && atomicAdd(links.state + DONE, 1u) == gridDim.x - 1) {
    links.state[DONE] = 0;
    links.state[EPOCH] = epoch;
  }
}

// `count` words of 16 bytes by `width` threads, of which this one is number `lane`.
__device__ __forceinline__ void copy_words(const char* from, char* to, u64 count, u32 lane,
                                           u32 width) {
  const uint4* source = (const uint4*)from;
  uint4* target = (uint4*)to;
  for (u64 first = lane; first < count; first += 8 * width) {
    uint4 v[8];
#pragma unroll
    for (u32 k = 0; k < 8; k++)
      if (first + k * width < count) v[k] = load_once(source + first + k * width);
#pragma unroll
    for (u32 k = 0; k < 8; k++)
      if (first + k * width < count) store_far(target + first + k * width, v[k]);
  }
}

// What rows travel as.
enum Format { AS_THEY_ARE, AS_BF16, AS_FP8 };

struct Gather {
  Need need;
  char* rows;      // [N P T, bytes]: those of the own position are there
  u32* words[2];   // [N P T, K]: the ids of `need` and another word of each; null: all are there
  u64 room;        // bytes from the begin of the rooms: [N T, wire], then [N T, K] twice
  u32 bytes;       // of a row, a multiple of 16
  u32 wire;        // of a row on its way, likewise
  u32 dim;         // elements of a row, where it travels in another format
  u32 lanes;       // threads that share a row, a power of two up to 32
  u32 chunk;       // tokens of a chunk
  u32 step;        // for the record of a failure
};

// `count` own rows into the own window, by all threads of a crew. In another format they become
// what that stands for.
template <int KIND, int FORMAT>
__device__ __forceinline__ void lay_rows(const Gather& op, char* from, char* to, u32 count,
                                         u32 t) {
  if constexpr (FORMAT == AS_THEY_ARE) {
    copy_words(from, to, (u64)count * op.bytes / 16, t, CREW);
  } else if constexpr (FORMAT == AS_FP8) {
    const u32 blocks = (op.dim + FP8_BLOCK - 1) / FP8_BLOCK;
    for (u32 j = t / FP8_LANES; j < count * blocks; j += CREW / FP8_LANES) {
      const u64 row = j / blocks;
      pack_block<KIND, true>(from + row * op.bytes, to + row * op.wire, op.dim, j % blocks);
    }
  } else {
    for (u64 i = t; i < (u64)count * op.dim / 8; i += CREW) {
      float x[8];
      load_eight<KIND>(from + 8 * i * ELEMENT_BYTES<KIND>, x);
      const uint4 halves = to_halves(x);
      *(uint4*)(to + 16 * i) = halves;
      of_halves(halves, x);
      store_eight<KIND>(from + 8 * i * ELEMENT_BYTES<KIND>, x);
    }
  }
}

// A row from another's window, by `lanes` threads, of which this one is number `lane`.
template <int KIND, int FORMAT>
__device__ __forceinline__ void take_row(const Gather& op, const char* from, char* to, u32 lane) {
  if constexpr (FORMAT == AS_THEY_ARE) {
    copy_words(from, to, op.bytes / 16, lane, op.lanes);
  } else {
    constexpr u32 EACH = FORMAT == AS_FP8 ? 16 : 8;  // elements of a word on its way
    const u32 words = op.dim / EACH, width = op.lanes;
    for (u32 first = lane; first < words; first += 4 * width) {
      uint4 v[4];
      u32 scale[4] = {};
#pragma unroll
      for (u32 k = 0; k < 4; k++) {
        const u32 word = first + k * width;
        if (word >= words) continue;
        v[k] = load_once((const uint4*)from + word);
        if constexpr (FORMAT == AS_FP8)
          scale[k] = load_byte(from + op.dim + word * EACH / FP8_BLOCK);
      }
#pragma unroll
      for (u32 k = 0; k < 4; k++) {
        const u32 word = first + k * width;
        if (word >= words) continue;
        char* const at = to + (u64)word * EACH * ELEMENT_BYTES<KIND>;
        if constexpr (FORMAT == AS_FP8) {
          unpack_sixteen<KIND>(v[k], scale[k], at);
        } else {
          float x[8];
          of_halves(v[k], x);
          store_eight<KIND>(at, x);
        }
      }
    }
  }
}

// Own rows and words of a chunk into the own window.
template <int KIND, int FORMAT>
__device__ __forceinline__ void lay(const Links& links, const Gather& op, Slice chunk, u32 t) {
  const u32 tokens = op.need.nodes * op.need.tokens, top_k = op.need.top_k;
  const u64 words_at = (u64)tokens * op.wire, slots = (u64)tokens * top_k;
  char* const room = (char*)links.windows[links.me] + ROOMS + op.room;
  for (u32 node = 0; node < op.need.nodes; node++) {
    const Part part = part_of(op.need, chunk, node, links.me, links.positions);
    lay_rows<KIND, FORMAT>(op, op.rows + part.row * op.bytes, room + (u64)part.begin * op.wire,
                           part.len, t);
    for (u32 word = 0; word < 2 && op.words[word]; word++) {
      u32* const to = (u32*)(room + words_at) + word * slots + (u64)part.begin * top_k;
      const u32* from = op.words[word] + part.row * top_k;
      for (u32 i = t; i < part.len * top_k; i += CREW) to[i] = from[i];
    }
  }
}

// The others' words of a chunk.
__device__ __forceinline__ void take_words(const Links& links, const Gather& op, Slice chunk,
                                           u32 t) {
  const u32 count = links.positions, tokens = op.need.nodes * op.need.tokens;
  const u32 top_k = op.need.top_k;
  const u64 words_at = (u64)tokens * op.wire, slots = (u64)tokens * top_k;
  for (u32 word = 0; word < 2; word++)
    for (u32 p = 0; p < count; p++)
      for (u32 node = 0; node < op.need.nodes && p != links.me; node++) {
        const Part part = part_of(op.need, chunk, node, p, count);
        const u32* from = (const u32*)(links.windows[p] + ROOMS + op.room + words_at);
        from += word * slots + (u64)part.begin * top_k;
        u32* const to = op.words[word] + part.row * top_k;
        for (u32 i = t; i < part.len * top_k; i += CREW) to[i] = from[i];
      }
}

// Those of the others' rows of a chunk whose tokens have an expert here.
template <int KIND, int FORMAT>
__device__ __forceinline__ void take_rows(const Links& links, const Gather& op, Slice chunk,
                                          u32 t) {
  const u32 count = links.positions, me = links.me, lane = t % op.lanes;
  const u32 all = (chunk.end - chunk.begin) * count;
  for (u32 j = t / op.lanes; j < all; j += CREW / op.lanes) {
    const u32 token = chunk.begin + j / count, p = (j + me) % count;
    const auto [rank, row] = place_of(op.need, token, p, count);
    if (p == me || !is_present(op.need, rank) || !needs(op.need, row, me, op.lanes)) continue;
    const char* from = (const char*)links.windows[p] + ROOMS + op.room + (u64)token * op.wire;
    take_row<KIND, FORMAT>(op, from, op.rows + (u64)row * op.bytes, lane);
  }
}

// rows[n, p, t] = position p's row, where this rank has an expert of its token; others stay as they
// are. Each rank lays its own into its window, and takes from the others' what it needs.
template <int KIND, int FORMAT>
__device__ __forceinline__ void gather(const Links& links, const Gather& op) {
  const u32 crew = threadIdx.x / CREW, t = threadIdx.x % CREW;
  const u32 epoch = *(volatile u32*)(links.state + EPOCH) + 1;
  const Slice own = slice_of(op.need.nodes * op.need.tokens);
  bool late = false;
  if (!enter(links, epoch, op.step)) return;
  u32 chunks = 0;
  for (Slice chunk; (chunk = chunk_of(own, chunks, op.chunk)).begin < own.end && !late;) {
    chunks++;
    if (crew == LAYS) {
      lay<KIND, FORMAT>(links, op, chunk, t);
      tell_all(links, epoch, chunks, t);
      continue;
    }
    late = !hear_all(links, epoch, chunks, op.step, t);
    if (late) break;
    if (op.words[0]) {
      take_words(links, op, chunk, t);
      // The ids by which each thread decides were written by others of its crew.
      crew_any(TAKES, false);
    }
    take_rows<KIND, FORMAT>(links, op, chunk, t);
  }
  if (!__syncthreads_or(late)) leave(links, epoch);
}

extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 1)
gather_rows(const __grid_constant__ Links links, const __grid_constant__ Gather op) {
  gather<BF16, AS_THEY_ARE>(links, op);
}
extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 1)
gather_f32_as_bf16(const __grid_constant__ Links links, const __grid_constant__ Gather op) {
  gather<FP32, AS_BF16>(links, op);
}
extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 1)
gather_f32_as_fp8(const __grid_constant__ Links links, const __grid_constant__ Gather op) {
  gather<FP32, AS_FP8>(links, op);
}
extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 1)
gather_bf16_as_fp8(const __grid_constant__ Links links, const __grid_constant__ Gather op) {
  gather<BF16, AS_FP8>(links, op);
}

// Sums are in fp32 and rounded once. KIND: 0 f32, 1 bf16, 2 f16.
template <int KIND> __device__ __forceinline__ float low_of(u32 pair) {
  if constexpr (KIND == 1) return __uint_as_float(pair << 16);
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)pair));
  return y;
}
template <int KIND> __device__ __forceinline__ float high_of(u32 pair) {
  if constexpr (KIND == 1) return __uint_as_float(pair & 0xffff0000u);
  return low_of<KIND>(pair >> 16);
}
template <int KIND> __device__ __forceinline__ u32 pair_of(float low, float high) {
  u32 pair;
  if constexpr (KIND == 1)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// The numbers in a word of 16 bytes.
template <int KIND> struct Sum {
  float x[KIND ? 8 : 4] = {};
  __device__ __forceinline__ void add(uint4 v) {
    const u32 part[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (KIND == 0) {
        x[i] += __uint_as_float(part[i]);
      } else {
        x[2 * i] += low_of<KIND>(part[i]);
        x[2 * i + 1] += high_of<KIND>(part[i]);
      }
    }
  }
  __device__ __forceinline__ uint4 word() const {
    u32 part[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (KIND == 0)
        part[i] = __float_as_uint(x[i]);
      else
        part[i] = pair_of<KIND>(x[2 * i], x[2 * i + 1]);
    }
    return {part[0], part[1], part[2], part[3]};
  }
};

// a + b, rounded, in each number of a word.
template <int KIND> __device__ __forceinline__ u32 plus(u32 a, u32 b) {
  if constexpr (KIND == 0) return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
  return pair_of<KIND>(low_of<KIND>(a) + low_of<KIND>(b), high_of<KIND>(a) + high_of<KIND>(b));
}
template <int KIND> __device__ __forceinline__ uint4 plus(uint4 a, uint4 b) {
  return {plus<KIND>(a.x, b.x), plus<KIND>(a.y, b.y), plus<KIND>(a.z, b.z), plus<KIND>(a.w, b.w)};
}

struct Scatter {
  Need need;
  char* rows;      // [N P T, bytes]: what this rank adds to each token; those of the own position
                   // become sums
  float* slots;    // [N P T, K] likewise, or null
  char* onto[2];   // [T, bytes] of N = 1: the second becomes the first + the sums; or null
  u64 room;        // bytes from the begin of the rooms: [P - 1][N T, bytes], then [P - 1][N T, K]
  u32 bytes, lanes, chunk, step;
};

// The row of the rooms of `from` where what it adds to a token of `to` lies.
__device__ __forceinline__ u64 place_in(const Scatter& op, u32 from, u32 to, u32 token) {
  return (u64)(to - (to > from)) * op.need.nodes * op.need.tokens + token;
}

__device__ __forceinline__ u64 slots_at(const Scatter& op, u32 positions) {
  return (u64)(positions - 1) * op.need.nodes * op.need.tokens * op.bytes;
}

// What this rank adds to the others' tokens of a chunk, into its own window.
__device__ __forceinline__ void lay_sums(const Links& links, const Scatter& op, Slice chunk,
                                         u32 t) {
  const u32 count = links.positions, me = links.me, lane = t % op.lanes, top_k = op.need.top_k;
  const u32 all = (chunk.end - chunk.begin) * count;
  char* const room = (char*)links.windows[me] + ROOMS + op.room;
  float* const slots = (float*)(room + slots_at(op, count));
  for (u32 j = t / op.lanes; j < all; j += CREW / op.lanes) {
    const u32 token = chunk.begin + j / count, p = (j + me) % count;
    const auto [rank, row] = place_of(op.need, token, p, count);
    if (p == me || !is_present(op.need, rank) || !needs(op.need, row, me, op.lanes)) continue;
    const u64 place = place_in(op, me, p, token);
    copy_words(op.rows + (u64)row * op.bytes, room + place * op.bytes, op.bytes / 16, lane,
               op.lanes);
    if (op.slots)
      for (u32 k = lane; k < top_k; k += op.lanes)
        slots[place * top_k + k] = op.slots[(u64)row * top_k + k];
  }
}

// Sums of the own tokens of a chunk, in the order of positions.
template <int KIND>
__device__ __forceinline__ void add_up(const Links& links, const Scatter& op, Slice chunk, u32 t) {
  constexpr u32 WORDS = 4;  // of 16 bytes, that a thread has under way from each position
  const u32 count = links.positions, me = links.me, lane = t % op.lanes, top_k = op.need.top_k;
  const u32 words = op.bytes / 16;
  for (u32 token = chunk.begin + t / op.lanes; token < chunk.end; token += CREW / op.lanes) {
    const auto [rank, at] = place_of(op.need, token, me, count);
    if (!is_present(op.need, rank)) continue;
    const u64 row = at;
    const u32 from = who_needs(op.need, at, count, op.lanes);
    const auto room = [&](u32 q) { return (const char*)links.windows[q] + ROOMS + op.room; };
    char* const mine = op.rows + row * op.bytes;
    for (u32 first = lane; first < words; first += WORDS * op.lanes) {
      Sum<KIND> sums[WORDS];
      for (u32 q = 0; q < count; q++) {
        if (!(from >> q & 1)) continue;
        const char* theirs = q == me ? mine : room(q) + place_in(op, q, me, token) * op.bytes;
        uint4 v[WORDS];
#pragma unroll
        for (u32 k = 0; k < WORDS; k++)
          if (first + k * op.lanes < words)
            v[k] = load_once((const uint4*)theirs + first + k * op.lanes);
#pragma unroll
        for (u32 k = 0; k < WORDS; k++)
          if (first + k * op.lanes < words) sums[k].add(v[k]);
      }
#pragma unroll
      for (u32 k = 0; k < WORDS; k++) {
        const u32 w = first + k * op.lanes;
        if (w >= words) break;
        if (!op.onto[0]) {
          ((uint4*)mine)[w] = sums[k].word();
          continue;
        }
        const u64 to = (u64)token * op.bytes;
        ((uint4*)(op.onto[1] + to))[w] =
            plus<KIND>(load_once((const uint4*)(op.onto[0] + to) + w), sums[k].word());
      }
    }
    if (op.slots)
      for (u32 k = lane; k < top_k; k += op.lanes) {
        float sum = 0.f;
        for (u32 q = 0; q < count; q++) {
          if (!(from >> q & 1)) continue;
          const float* theirs = (const float*)(room(q) + slots_at(op, count));
          sum += q == me ? op.slots[row * top_k + k]
                         : theirs[place_in(op, q, me, token) * top_k + k];
        }
        op.slots[row * top_k + k] = sum;
      }
  }
}

// rows[n, me, t] = the sum, in the order of positions, of what those have there that have an expert
// of the token. Each rank lays what it adds into its window, from where the token's takes it.
template <int KIND>
__device__ __forceinline__ void scatter(const Links& links, const Scatter& op) {
  const u32 crew = threadIdx.x / CREW, t = threadIdx.x % CREW;
  const u32 epoch = *(volatile u32*)(links.state + EPOCH) + 1;
  const Slice own = slice_of(op.need.nodes * op.need.tokens);
  bool late = false;
  if (!enter(links, epoch, op.step)) return;
  u32 chunks = 0;
  for (Slice chunk; (chunk = chunk_of(own, chunks, op.chunk)).begin < own.end && !late;) {
    chunks++;
    if (crew == LAYS) {
      lay_sums(links, op, chunk, t);
      tell_all(links, epoch, chunks, t);
      continue;
    }
    late = !hear_all(links, epoch, chunks, op.step, t);
    if (!late) add_up<KIND>(links, op, chunk, t);
  }
  if (!__syncthreads_or(late)) leave(links, epoch);
}

extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 1)
scatter_f32(const __grid_constant__ Links links, const __grid_constant__ Scatter op) {
  scatter<0>(links, op);
}
extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 1)
scatter_bf16(const __grid_constant__ Links links, const __grid_constant__ Scatter op) {
  scatter<1>(links, op);
}
extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 1)
scatter_f16(const __grid_constant__ Links links, const __grid_constant__ Scatter op) {
  scatter<2>(links, op);
}
