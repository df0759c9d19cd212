// Rows in chunks of 16 bytes. Host macro: ELEMENT.
constexpr int CHUNK = ELEMENT == FP32 ? 4 : 8;  // elements in 16 bytes

__device__ __forceinline__ void unpack_chunk(const uint4& chunk, float (&v)[CHUNK]) {
  const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
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
__device__ __forceinline__ uint4 pack_chunk(const float (&v)[CHUNK]) {
#if ELEMENT == FP32
  return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                    __float_as_uint(v[3]));
#else
  return make_uint4(pack_pair(v[0], v[1]), pack_pair(v[2], v[3]), pack_pair(v[4], v[5]),
                    pack_pair(v[6], v[7]));
#endif
}

