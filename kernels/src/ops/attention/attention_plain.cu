// The two products of attention_tiles.cu in plain fp32: one warp, 16 rows, laid out over lanes as
// attention_fragments.cu has them, so that masks and softmax are the same.
constexpr int SIZE = 4, CHUNK = 4;
constexpr int PITCH = PADDED * SIZE + 16;

template <int KEYS> struct Weights {
  float values[KEYS / 2];
  __device__ __forceinline__ Weights(const float (&d)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) values[i] = d[i];
  }
};

__device__ __forceinline__ float4 load_shared_four(u32 from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// d [16, N] = a b^T over D; a and b are the first rows of tiles.
template <int N>
__device__ __forceinline__ void multiply_rows(float (&d)[N / 2], u32 a, u32 b, int lane) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) d[i] = 0.f;
  a += (lane >> 2) * PITCH;
  b += 2 * (lane & 3) * PITCH;
  for (int k = 0; k < PADDED * SIZE; k += 16) {
    const float4 upper = load_shared_four(a + k), lower = load_shared_four(a + 8 * PITCH + k);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const float4 left = load_shared_four(b + 8 * j * PITCH + k);
      const float4 right = load_shared_four(b + (8 * j + 1) * PITCH + k);
      d[4 * j] = dot4(upper, left, d[4 * j]);
      d[4 * j + 1] = dot4(upper, right, d[4 * j + 1]);
      d[4 * j + 2] = dot4(lower, left, d[4 * j + 2]);
      d[4 * j + 3] = dot4(lower, right, d[4 * j + 3]);
    }
  }
}

// d [16, COLUMNS] += weights [16, KEYS] b; b is the first of COLUMNS columns of KEYS rows.
template <int COLUMNS, int KEYS>
__device__ __forceinline__ void multiply_weights(float (&d)[COLUMNS / 2],
                                                 const Weights<KEYS>& weights, u32 b, int lane) {
  b += 2 * (lane & 3) * SIZE;
#pragma unroll
  for (int key = 0; key < KEYS; key++) {
    // The weight of this key lies with one lane of the quad.
    const int from = (lane & ~3) + (key % 8) / 2, at = key / 8 * 4 + key % 2;
    const float upper = __shfl_sync(~0u, weights.values[at], from);
    const float lower = __shfl_sync(~0u, weights.values[at + 2], from);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
      const float2 v = load_shared_pair(b + key * PITCH + j * 8 * SIZE);
      d[4 * j] = fmaf(upper, v.x, d[4 * j]);
      d[4 * j + 1] = fmaf(upper, v.y, d[4 * j + 1]);
      d[4 * j + 2] = fmaf(lower, v.x, d[4 * j + 2]);
      d[4 * j + 3] = fmaf(lower, v.y, d[4 * j + 3]);
    }
  }
}

__device__ __forceinline__ void store_pair(u8* to, float a, float b) {
  *(float2*)to = make_float2(a, b);
}
