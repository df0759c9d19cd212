/* Products that do nothing. VERSION is its CUDA. STUB_ALGORITHM is the first word of what its
   heuristic recommends. */
#include <stdlib.h>
#include <string.h>

size_t cublasLtGetVersion(void) { return VERSION / 1000 * 10000 + VERSION % 1000 / 10 * 100 + 2; }
int cublasLtCreate(void **made) { *made = malloc(1); return 0; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { *made = malloc(1); return 0; }
int cublasLtMatmulPreferenceCreate(void **made) { *made = malloc(1); return 0; }
int cublasLtMatrixLayoutCreate(void **made, int kind, size_t rows, size_t cols, long long pitch) {
    *made = malloc(1);
    return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *l, void *m, void *a, void *b, void *c, void *d, void *p,
                                   int asked, void *results, int *found) {
    memset(results, 0, 96);
    const char *word = getenv("STUB_ALGORITHM");
    *(long long *)results = word ? atoll(word) : 0;
    *found = 1;
    return 0;
}
