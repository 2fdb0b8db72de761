// The kernels as plain C++ functions; see cuda_shim.h. Compiled with -I appliance/kernels.
#include "cuda_shim.h"

#include "blocks.cu"
#include "exp7.cu"
#include "fingerprint.cu"

typedef long long n64;
extern "C" void run_gather(unsigned grid, unsigned threads, int backwards, char *packed, const char *base,
    const n64 *blocks, const n64 *places, n64 count, n64 planes, n64 block_bytes, n64 plane, n64 block, n64 stride) {
  launch(grid, threads, backwards, gather_blocks, packed, base, blocks, places, count, planes, block_bytes, plane, block, stride);
}
extern "C" void run_scatter(unsigned grid, unsigned threads, int backwards, char *base, const char *packed,
    const n64 *blocks, const n64 *places, n64 count, n64 planes, n64 block_bytes, n64 plane, n64 block, n64 stride) {
  launch(grid, threads, backwards, scatter_blocks, base, packed, blocks, places, count, planes, block_bytes, plane, block, stride);
}
extern "C" void run_fingerprint(unsigned grid, unsigned threads, int backwards, const char *start, n64 nbytes, unsigned long long *sum) {
  launch(grid, threads, backwards, fingerprint, start, nbytes, sum);
}
extern "C" void run_decode_exp7(unsigned grid, unsigned threads, int backwards, char *to, const char *image, const char *entries, n64 first, n64 count) {
  launch(grid, threads, backwards, decode_exp7, to, image, entries, first, count);
}
