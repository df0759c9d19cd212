// The random numbers of a layer and micro-batch, the bits of `Draw` in philox.rs. Behind philox.cu.
struct Draw {
  u64 seed;
  u32 place, step, first_token;  // the first without its site
  u32 live;                      // 0: evaluation, nothing is random
};
#define SITE_LOGITS 3
#define SITE_SECOND 4
#define SITE_TABLE 5

__device__ __forceinline__ uint4 words_of(const Draw& draw, u32 site, u32 token, u32 block) {
  return philox(draw.seed,
                make_uint4(draw.place | site, draw.step, draw.first_token + token, block));
}
// Uniform in [0, 1), a multiple of 2^-24.
__device__ __forceinline__ double uniform_of(u32 word) {
  return __dmul_rn((double)(word >> 8), 1.0 / 16777216.0);
}
// Standard normal number `element` of the token.
__device__ __forceinline__ double normal_of(const Draw& draw, u32 site, u32 token, u32 element) {
  const double2 pair = box_muller(words_of(draw, site, token, element / 2));
  return element % 2 ? pair.y : pair.x;
}
