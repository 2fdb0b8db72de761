// A 64-bit fingerprint of a range: the sum of mix(word, place) over its 8-byte words, modulo 2^64.
//
// A sum does not care for order, so any grid gives the same fingerprint; a word in another place
// gives another summand. The last word is filled up with zeros. It finds accidents, not attacks.

static __device__ unsigned long long mix(unsigned long long word, unsigned long long place) {
  // The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), its counter folded into the word.
  unsigned long long x = word ^ ((place + 1) * 0x9e3779b97f4a7c15ULL);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// `start` is 8-byte aligned; `sum` is zero at first.
extern "C" __global__ void fingerprint(
    const char *start, long long nbytes, unsigned long long *sum) {
  const unsigned long long *words = (const unsigned long long *)start;
  const long long whole = nbytes / 8, threads = (long long)gridDim.x * blockDim.x;
  const long long me = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long mine = 0;
#pragma unroll 4
  for (long long i = me; i < whole; i += threads) mine += mix(words[i], i);
  if (me == 0 && nbytes % 8) {
    unsigned long long word = 0;
    for (long long i = 0; i < nbytes % 8; i++)
      word |= (unsigned long long)(unsigned char)start[whole * 8 + i] << (8 * i);
    mine += mix(word, whole);
  }
  if (mine) atomicAdd(sum, mine);
}
