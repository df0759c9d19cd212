// Which queries make a block of the forward, for sm_90a.
//
// A block is at most BM queries of one head. Its tiles of keys begin at the first key that any of
// its queries sees. Without documents, blocks begin at multiples of BM. Among documents that is
// wasteful: a block in which a long document begins also reads the tiles of the document before,
// and a document that begins amid a tile of keys takes one tile more than its length asks for. So:
//
// 1. Blocks of a long document begin at its start, and every BM positions from there on.
// 2. Short documents share blocks, which begin at multiples of BM. Blocks of their own would be
//    more, with as many tiles.
// 3. A long document's last block, or one more of BM, takes in the short ones up to the next
//    multiple of BM.
//
// A head of the four sequences of the benchmark (documents of mean 1,024) then takes 781 steps of
// tiles, not 827, though it has 137 blocks instead of 128. Its pairs of query and key that see each
// other fill 646 tiles.
//
// A sequence falls into windows of BM positions, and one or two blocks begin in most of them. A few
// of `starts` tell which, so that nobody has to count through the sequence to find a block.
constexpr int BM = CONSUMERS * 64, BN = 128;
// Positions of a long document at least. Twice and four times BM are as fast.
constexpr int LONG = 3 * BM;

struct Block {
  int start, end;  // queries; start is -1 behind the last block
  int low;         // the first key that any query sees: tile n of keys begins at low + n * BN
  int alike;       // whether all queries see that key
  int sequence, head;
  __device__ __forceinline__ int tiles() const { return (end - low + BN - 1) / BN; }
  __device__ __forceinline__ Block of_lane_0() const {
    return {__shfl_sync(~0u, start, 0), __shfl_sync(~0u, end, 0),
            MASKED ? __shfl_sync(~0u, low, 0) : 0, MASKED ? __shfl_sync(~0u, alike, 0) : 1,
            __shfl_sync(~0u, sequence, 0), __shfl_sync(~0u, head, 0)};
  }
};
__device__ __forceinline__ void store_block(u32 to, const Block& block) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(block.start), "r"(block.end), "r"(block.low), "r"(block.alike)
               : "memory");
  store_shared8(to + 16, block.sequence, block.head);
}
__device__ __forceinline__ Block load_block(u32 from) {
  const uint4 x = load_shared16(from);
  return {(int)x.x, (int)x.y, (int)x.z, (int)x.w, (int)load_shared(from + 16),
          (int)load_shared(from + 20)};
}

// Where the document of position s starts. Clamped, so that a wrong start reads nothing foreign.
__device__ __forceinline__ int document_of(const Args& args, int sequence, int s) {
  const int start = args.starts ? args.starts[(u64)sequence * args.seq + s] : 0;
  return min(max(start, 0), s);
}
// Whether the document that starts there and has position s is long.
__device__ __forceinline__ bool is_long(const Args& args, int sequence, int start, int s) {
  const int last = max(start + LONG - 1, s);
  return document_of(args, sequence, min(last, args.seq - 1)) == start && last < args.seq;
}
// The starts that decide a multiprocessor's first block are fetched at once, since all of it waits.
__device__ __forceinline__ void prefetch_starts(const Args& args, int lane) {
  if (!MASKED || !args.starts) return;
  const int windows = (args.seq + BM - 1) / BM;
  if ((int)blockIdx.x >= windows * args.batch * args.heads) return;
  const Place at = place_of(blockIdx.x, windows, args.heads, args.batch, args.group, true);
  for (int s = at.block * BM - LONG + lane * 32; s < (at.block + 2) * BM + LONG; s += 1024)
    if (s >= 0 && s < args.seq) prefetch_to_l2(args.starts + (u64)at.sequence * args.seq + s);
}

// The blocks of a window, some of them empty: from `first` to `second`, and from there to `past`.
struct Cuts { int first, second, past; };

// Where a window's first block begins, and its second. The second begins at the start of a long
// document, of which a window has one at most; the end of the sequence stands for none.
__device__ __forceinline__ int2 begin_of(const Args& args, int sequence, int window) {
  const int from = window * BM, last = min(from + BM, args.seq) - 1;
  if (from >= args.seq) return make_int2(args.seq, args.seq);
  const int before = document_of(args, sequence, from), own = document_of(args, sequence, last);
  const bool goes_on = is_long(args, sequence, before, from);
  const bool begins = is_long(args, sequence, own, last);
  const int behind = (from - before + BM - 1) / BM * BM;
  const int first = goes_on ? min(before + behind, args.seq) : from;
  if (own <= from || !begins) return make_int2(first, args.seq);
  return make_int2(min(first, own), first < own ? own : args.seq);
}
__device__ __forceinline__ Cuts cuts_of(const Args& args, int sequence, int window) {
  if (!MASKED) {
    const int past = min((window + 1) * BM, args.seq);
    return {window * BM, past, past};
  }
  const int2 here = begin_of(args, sequence, window);
  const int past = begin_of(args, sequence, window + 1).x;
  return {here.x, min(here.y, past), past};
}
__device__ __forceinline__ Block block_of(const Args& args, const Place& at, const Cuts& cuts,
                                          int i) {
  const int start = i == 0 ? cuts.first : cuts.second, end = i == 0 ? cuts.second : cuts.past;
  // No more than BM even if `starts` are wrong: its places in shared memory hold no more.
  Block block = {start, min(end, start + BM), 0, 1, at.sequence, at.head};
  if (MASKED && start < end) {
    block.low = first_key(args, at.sequence, start);
    block.alike = first_key(args, at.sequence, block.end - 1) == block.low;
  }
  return block;
}

// A thread's part of the 64 queries that begin `from` behind a block's start. What every query sees
// first is read from memory only where they differ.
__device__ __forceinline__ Rows rows_of_block(const Args& args, const Block& block, int from,
                                              int warp_row, int lane) {
  Rows rows;
  rows.start = block.start + from;
  rows.row = warp_row + (lane >> 2);
  rows.column = 2 * (lane & 3);
  if (MASKED) {
    rows.first[0] = rows.first[1] = rows.first_last = rows.first_own = block.low;
    if (!block.alike) {
      const int last = args.seq - 1, r = rows.start + rows.row;
      rows.first[0] = first_key(args, block.sequence, min(r, last));
      rows.first[1] = first_key(args, block.sequence, min(r + 8, last));
      rows.first_last = first_key(args, block.sequence, min(rows.start + 63, last));
      rows.first_own = first_key(args, block.sequence, rows.start);
    }
  }
  rows.maximum[0] = rows.maximum[1] = -INFINITE;
  rows.sum[0] = rows.sum[1] = 0.f;
  return rows;
}

// Rows `start` up to the block's end, less than 64, of what `stage_rows` left. The copy engine
// would also write the rows behind them, which are another block's.
__device__ __forceinline__ void copy_rows(const Args& args, u32 staged, int start,
                                          const Block& block, int thread) {
  constexpr int CHUNKS = HEAD_DIM / 8;
  const u64 row = (u64)args.heads * HEAD_DIM;
  u16* to = (u16*)args.o + ((u64)block.sequence * args.seq + start) * row + block.head * HEAD_DIM;
  for (int i = thread; i < (block.end - start) * CHUNKS; i += 128) {
    const int r = i / CHUNKS, chunk = i - r * CHUNKS;
    const uint4 x = load_shared16(staged + (chunk >> 3) * (BM * 128) + r * 128 +
                                  (((chunk & 7) ^ (r & 7)) << 4));
    store16(to + r * row + chunk * 8, x.x, x.y, x.z, x.w);
  }
}
