// Gather and scatter of KV blocks, between an engine's strided layout and packed places.
//
//   engine   base + plane * plane_stride + blocks[i] * block_stride      (a plane: K or V of a layer)
//   packed   packed + places[i] * packed_stride + plane * block_bytes    (all planes of a block)
//
// One thread block copies one block of one plane at a time, 16 bytes per thread where both sides
// are aligned for it. Any grid does all of the work. No thread waits for another, so the source
// also compiles as C++, with the shim in tests/stand_in.

struct __align__(16) Vector { unsigned long long low, high; };

static __device__ void copy_bytes(char *to, const char *from, long long nbytes) {
  long long done = 0;
  if ((((unsigned long long)to | (unsigned long long)from) & 15) == 0) {
    done = nbytes & ~15LL;
    for (long long i = threadIdx.x; i < done / 16; i += blockDim.x)
      ((Vector *)to)[i] = ((const Vector *)from)[i];
  }
  for (long long i = done + threadIdx.x; i < nbytes; i += blockDim.x) to[i] = from[i];
}

extern "C" __global__ void gather_blocks(
    char *packed, const char *base, const long long *blocks, const long long *places,
    long long count, long long planes, long long block_bytes,
    long long plane_stride, long long block_stride, long long packed_stride) {
  for (long long i = blockIdx.x; i < count * planes; i += gridDim.x) {
    const long long block = i / planes, plane = i % planes;
    copy_bytes(packed + places[block] * packed_stride + plane * block_bytes,
               base + plane * plane_stride + blocks[block] * block_stride, block_bytes);
  }
}

extern "C" __global__ void scatter_blocks(
    char *base, const char *packed, const long long *blocks, const long long *places,
    long long count, long long planes, long long block_bytes,
    long long plane_stride, long long block_stride, long long packed_stride) {
  for (long long i = blockIdx.x; i < count * planes; i += gridDim.x) {
    const long long block = i / planes, plane = i % planes;
    copy_bytes(base + plane * plane_stride + blocks[block] * block_stride,
               packed + places[block] * packed_stride + plane * block_bytes, block_bytes);
  }
}
