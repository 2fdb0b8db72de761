// A stand-in for libcublas.so.13 and, with LT, libcublasLt.so.13: every product succeeds and writes nothing.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define API __attribute__((visibility("default")))
static int make(void **made, size_t n) { *made = calloc(1, n); return 0; }
static int end(void *made) { free(made); return 0; }
#ifdef LT
API size_t cublasLtGetVersion(void) { return 130100; }
API int cublasLtMatmulDescCreate(void **d, int compute, int scale) { return make(d, 512); }
API int cublasLtMatmulDescDestroy(void *d) { return end(d); }
API int cublasLtMatmulPreferenceCreate(void **d) { return make(d, 512); }
API int cublasLtMatmulPreferenceDestroy(void *d) { return end(d); }
API int cublasLtMatrixLayoutCreate(void **d, int type, unsigned long rows, unsigned long columns, long pitch) { return make(d, 512); }
API int cublasLtMatrixLayoutDestroy(void *d) { return end(d); }
typedef struct { unsigned long algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } Heuristic;
API int cublasLtMatmulAlgoGetHeuristic(void *h, void *op, void *a, void *b, void *c, void *d, void *p, int n, Heuristic *result, int *found) {
  memset(result, 0, sizeof *result);
  *found = 1;
  return 0;
}
#else
API int cublasCreate_v2(void **h) { return make(h, 4096); }
API int cublasDestroy_v2(void *h) { return end(h); }
API int cublasGetMathMode(void *h, int *mode) { *mode = 0; return 0; }
API int cublasGetPointerMode_v2(void *h, int *mode) { *mode = 0; return 0; }
API int cublasGetVersion_v2(void *h, int *version) { *version = 130100; return 0; }
#endif
#include STUBS
