// What of CUDA C the kernels use, for a C++ compiler: one thread after the other, in any order.
#pragma once
#include <cstring>

#define __global__
#define __device__
#define __align__(n) __attribute__((aligned(n)))

struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

static unsigned long long atomicAdd(unsigned long long *at, unsigned long long value) {
  unsigned long long before = *at;
  *at += value;
  return before;
}

static int __popc(unsigned value) { return __builtin_popcount(value); }

// Runs a kernel over a grid, the last thread first if `backwards`.
template <class Kernel, class... Arguments>
static void launch(unsigned grid, unsigned threads, int backwards, Kernel kernel, Arguments... arguments) {
  gridDim.x = grid, blockDim.x = threads;
  for (unsigned i = 0; i < grid * threads; i++) {
    unsigned at = backwards ? grid * threads - 1 - i : i;
    blockIdx.x = at / threads, threadIdx.x = at % threads;
    kernel(arguments...);
  }
}
