// Elements of one kind to another, and masters to and from their parts. No host macro: every kind
// stands in one module; ELEMENT is BF16 here and means nothing.
__device__ __forceinline__ float half_to_float(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ u16 float_to_half(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

template <int KIND> __device__ __forceinline__ float get(const void* base, u64 i) {
  if (KIND == FP32) return ((const float*)base)[i];
  const u16 x = ((const u16*)base)[i];
  return KIND == FP16 ? half_to_float(x) : __uint_as_float((u32)x << 16);
}
template <int KIND> __device__ __forceinline__ void put(void* base, u64 i, float x) {
  if (KIND == FP32) ((float*)base)[i] = x;
  else ((u16*)base)[i] = KIND == FP16 ? float_to_half(x) : to_element(x);
}

// Four elements a thread and turn, a block's width apart: enough is on its way.
template <int FROM, int TO>
__device__ __forceinline__ void cast_all(const void* from, void* to, u64 len) {
  const u64 step = gridDim.x * (u64)(4 * blockDim.x);
  for (u64 first = blockIdx.x * (u64)(4 * blockDim.x) + threadIdx.x; first < len; first += step) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (first + i * blockDim.x < len) v[i] = get<FROM>(from, first + i * blockDim.x);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (first + i * blockDim.x < len) put<TO>(to, first + i * blockDim.x, v[i]);
  }
}

extern "C" __global__ void __launch_bounds__(256)
cast(const void* from, int from_kind, void* to, int to_kind, u64 len) {
  switch (3 * from_kind + to_kind) {
    case 3 * BF16 + FP16: return cast_all<BF16, FP16>(from, to, len);
    case 3 * BF16 + FP32: return cast_all<BF16, FP32>(from, to, len);
    case 3 * FP16 + BF16: return cast_all<FP16, BF16>(from, to, len);
    case 3 * FP16 + FP32: return cast_all<FP16, FP32>(from, to, len);
    case 3 * FP32 + BF16: return cast_all<FP32, BF16>(from, to, len);
    case 3 * FP32 + FP16: return cast_all<FP32, FP16>(from, to, len);
  }
}

// sum (+)= x, in fp64.
template <class X>
__device__ __forceinline__ void add_all_up(const X* x, double* sum, int adds, u64 len) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < len;
       i += (u64)gridDim.x * blockDim.x)
    sum[i] = adds ? sum[i] + (double)x[i] : (double)x[i];
}
extern "C" __global__ void __launch_bounds__(256)
add_up_f32(const float* x, double* sum, int adds, u64 len) {
  add_all_up(x, sum, adds, len);
}
extern "C" __global__ void __launch_bounds__(256)
add_up_f64(const double* x, double* sum, int adds, u64 len) {
  add_all_up(x, sum, adds, len);
}
extern "C" __global__ void __launch_bounds__(256)
cast_f64(const double* from, float* to, u64 len) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < len;
       i += (u64)gridDim.x * blockDim.x)
    to[i] = __double2float_rn(from[i]);
}

// master's bits = weight << 16, plus the signed low half; both ways lossless.
extern "C" __global__ void __launch_bounds__(256)
split_master(const u32* master, u16* weight, u16* low, u64 len) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < len;
       i += (u64)gridDim.x * blockDim.x) {
    const u32 bits = master[i];
    weight[i] = (u16)((bits + 0x8000u) >> 16);
    low[i] = (u16)bits;
  }
}
extern "C" __global__ void __launch_bounds__(256)
join_master(const u16* weight, const short* low, u32* master, u64 len) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < len;
       i += (u64)gridDim.x * blockDim.x)
    master[i] = ((u32)weight[i] << 16) + (u32)(int)low[i];
}
