// Instructions of sm_80 that C++ does not name: copies into shared memory in groups of the issuing
// thread, and products of a warp on fragments.

__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
template <bool TRANSPOSE> __device__ __forceinline__ void load_matrices(u32 (&v)[4], u32 address) {
  if (TRANSPOSE)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address) : "memory");
}
// d[0..4] += a (16 x 16) b (16 x 8)
__device__ __forceinline__ void multiply_16x8(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
#if ELEMENT == FP16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
  asm volatile(MMA
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
