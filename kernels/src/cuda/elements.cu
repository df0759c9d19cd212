// Loads and stores of several elements at once. The host puts this file after common.cu.
#if ELEMENT == FP32
typedef float element;
__device__ __forceinline__ float as_float(element x) { return x; }
__device__ __forceinline__ element as_element(float x) { return x; }
#else
typedef u16 element;
__device__ __forceinline__ float as_float(element x) { return element_to_float(x); }
__device__ __forceinline__ element as_element(float x) { return to_element(x); }
#endif
constexpr int CHUNK = ELEMENT == FP32 ? 4 : 8;  // elements in 16 bytes

// N elements as they lie in memory: 16 bytes, or one element where rows are not of whole chunks.
template <int N> struct Raw;
template <> struct Raw<CHUNK> { uint4 bits; };
template <> struct Raw<1> { element bits; };

__device__ __forceinline__ Raw<CHUNK> load_raw(const element* at, Raw<CHUNK>*) {
  return {__ldcs((const uint4*)at)};
}
__device__ __forceinline__ Raw<1> load_raw(const element* at, Raw<1>*) { return {*at}; }
template <int N> __device__ __forceinline__ Raw<N> load(const element* at) {
  return load_raw(at, (Raw<N>*)nullptr);
}
// What other threads read, too: kept in the caches.
__device__ __forceinline__ Raw<CHUNK> load_shared_raw(const element* at, Raw<CHUNK>*) {
  return {*(const uint4*)at};
}
__device__ __forceinline__ Raw<1> load_shared_raw(const element* at, Raw<1>*) { return {*at}; }
template <int N> __device__ __forceinline__ Raw<N> load_kept(const element* at) {
  return load_shared_raw(at, (Raw<N>*)nullptr);
}

__device__ __forceinline__ void unpack(const Raw<1>& raw, float (&v)[1]) {
  v[0] = as_float(raw.bits);
}
__device__ __forceinline__ void unpack(const Raw<CHUNK>& raw, float (&v)[CHUNK]) {
  const u32 words[4] = {raw.bits.x, raw.bits.y, raw.bits.z, raw.bits.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if ELEMENT == FP32
    v[i] = __uint_as_float(words[i]);
#else
    v[2 * i] = low_half(words[i]);
    v[2 * i + 1] = high_half(words[i]);
#endif
  }
}

__device__ __forceinline__ void store(element* at, const float (&v)[1]) { *at = as_element(v[0]); }
__device__ __forceinline__ uint4 pack(const float (&v)[CHUNK]) {
#if ELEMENT == FP32
  return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                    __float_as_uint(v[3]));
#else
  return make_uint4(pack_pair(v[0], v[1]), pack_pair(v[2], v[3]), pack_pair(v[4], v[5]),
                    pack_pair(v[6], v[7]));
#endif
}
__device__ __forceinline__ void store(element* at, const float (&v)[CHUNK]) {
  *(uint4*)at = pack(v);
}

// Vectors of a model that may be fp32 beside elements of 16 bits: gains, biases, their gradients.
__device__ __forceinline__ float load_either(const void* base, int fp32, u64 at) {
  return fp32 ? ((const float*)base)[at] : as_float(((const element*)base)[at]);
}
__device__ __forceinline__ void store_either(void* base, int fp32, u64 at, float x) {
  if (fp32) ((float*)base)[at] = x;
  else ((element*)base)[at] = as_element(x);
}
template <int N>
__device__ __forceinline__ void load_vector(const void* base, int fp32, int at, float (&v)[N]) {
  if (N == 1) {
    v[0] = load_either(base, fp32, at);
  } else if (ELEMENT == FP32 || fp32) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 four = *(const float4*)((const float*)base + at + i);
      v[i] = four.x;
      v[(i + 1) % N] = four.y;
      v[(i + 2) % N] = four.z;
      v[(i + 3) % N] = four.w;
    }
  } else {
    unpack(load_kept<N>((const element*)base + at), v);
  }
}

// Asks for a line of 128 bytes ahead of its load; one of the threads that share it is enough.
__device__ __forceinline__ void prefetch(const element* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
constexpr int LINE_THREADS = 8;  // of chunks
