// Sums over rows in two stages of fixed order, and biases, of any number of columns.
// Host macro: ELEMENT.

// out[c] (+)= sum over parts of partial[part][c]: 32 threads a column take every 32nd part each,
// then a fixed tree. Blocks of 32 x 32, 32 columns each.
extern "C" __global__ void __launch_bounds__(1024)
column_sums(const float* partial, int parts, int columns, void* out, int out_fp32, int accumulate) {
  __shared__ float sums[32][33];
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const int column = blockIdx.x * 32 + x;
  float sum = 0.f;
  if (column < columns)
    for (int part = y; part < parts; part += 32) sum += partial[(u64)part * columns + column];
  sums[y][x] = sum;
  __syncthreads();
  sum = warp_sum(sums[x][y]);
  const int own = blockIdx.x * 32 + y;
  if (x != 0 || own >= columns) return;
  if (accumulate) sum += load_either(out, out_fp32, own);
  store_either(out, out_fp32, own, sum);
}

// partial[part][c] = sum of dy[r][c] over the part's rows. Blocks of 32 x 8: 32 columns, eight rows
// at once; grid (columns / 32, parts).
extern "C" __global__ void __launch_bounds__(256)
bias_backward(const element* dy, float* partial, int rows, int columns, int rows_a_part) {
  __shared__ float sums[8][32];
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const int column = blockIdx.x * 32 + x;
  const int begin = blockIdx.y * rows_a_part, end = min(rows, begin + rows_a_part);
  float sum = 0.f;
  if (column < columns) {
#pragma unroll 4
    for (int row = begin + y; row < end; row += 8) sum += as_float(dy[(u64)row * columns + column]);
  }
  sums[y][x] = sum;
  __syncthreads();
  if (y != 0 || column >= columns) return;
  for (int other = 1; other < 8; other++) sum += sums[other][x];
  partial[(u64)blockIdx.y * columns + column] = sum;
}

// x[r][c] += bias[c]
extern "C" __global__ void __launch_bounds__(256)
add_bias(element* x, const void* bias, int bias_fp32, int rows, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  const float own = load_either(bias, bias_fp32, column);
  for (int row = blockIdx.y; row < rows; row += gridDim.y) {
    element* at = x + (u64)row * columns + column;
    *at = as_element(as_float(*at) + own);
  }
}
