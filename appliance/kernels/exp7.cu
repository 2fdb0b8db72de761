// Decodes blocks of the format `exp7` (see exp7.py, which has it in words).
//
//   image    the blocks' bytes, each at a multiple of 16; `entries[i]` tells where block i's are
//   to       block i's 131,072 bytes at to + (i - first) * 131,072, for i from first on
//
// A thread decodes 32 numbers at a time. Where its escapes begin it finds from the run's number and
// the codes of the run before its own, so no thread waits for another, and the source also compiles
// as C++, with the shim in tests/stand_in. A block's checksum is not looked at here: damage gives
// wrong numbers, but nothing outside of the block's own bytes is read for it.

struct Exp7Entry {
  unsigned long long offset;
  unsigned int nbytes, escapes;
  unsigned long long exponents;
  unsigned int unused, checksum;
};

struct __align__(16) Exp7Vector { unsigned long long low, high; };

enum : unsigned int {
  EXP7_VALUES = 65536,
  EXP7_WORDS = EXP7_VALUES / 32,
  EXP7_RUN_WORDS = 8,
  EXP7_PLANES = EXP7_VALUES,
  EXP7_PLANE_BYTES = EXP7_VALUES / 8,
  EXP7_RUNS = EXP7_PLANES + 3 * EXP7_PLANE_BYTES,
  EXP7_ESCAPES = EXP7_RUNS + 2 * (EXP7_VALUES / 256),
  EXP7_RAW = 0xffffffffu
};

// Which of the 32 numbers of a word are escapes.
static __device__ unsigned int exp7_escaped(const unsigned int *planes, unsigned int word) {
  return planes[word] & planes[EXP7_WORDS + word] & planes[2 * EXP7_WORDS + word];
}

static __device__ void exp7_word(
    char *to, const char *data, const Exp7Entry &entry, unsigned int word) {
  const unsigned int *planes = (const unsigned int *)(data + EXP7_PLANES);
  const unsigned int bit0 = planes[word], bit1 = planes[EXP7_WORDS + word];
  const unsigned int bit2 = planes[2 * EXP7_WORDS + word];
  unsigned int next = 0;
  if (bit0 & bit1 & bit2) {
    next = ((const unsigned short *)(data + EXP7_RUNS))[word / EXP7_RUN_WORDS];
    for (unsigned int w = word / EXP7_RUN_WORDS * EXP7_RUN_WORDS; w < word; w++)
      next += __popc(exp7_escaped(planes, w));
  }
  const unsigned char *escapes = (const unsigned char *)data + EXP7_ESCAPES;
  const Exp7Vector *rests = (const Exp7Vector *)(data + 32 * word);
  Exp7Vector *out = (Exp7Vector *)(to + 64 * word);
#pragma unroll
  for (unsigned int half = 0; half < 2; half++) {
    const Exp7Vector rest = rests[half];
#pragma unroll
    for (unsigned int quarter = 0; quarter < 2; quarter++) {
      const unsigned long long eight = quarter ? rest.high : rest.low;
      unsigned long long numbers[2] = {0, 0};
#pragma unroll
      for (unsigned int i = 0; i < 8; i++) {
        const unsigned int at = 16 * half + 8 * quarter + i;
        const unsigned int code = (bit0 >> at & 1) | (bit1 >> at & 1) << 1 | (bit2 >> at & 1) << 2;
        const unsigned int mine = (unsigned int)(eight >> 8 * i);
        unsigned int exponent = (unsigned int)(entry.exponents >> 8 * code) & 0xff;
        if (code == 7) {
          exponent = next < entry.escapes ? escapes[next] : 0;
          next++;
        }
        const unsigned int number = (mine & 0x80) << 8 | exponent << 7 | (mine & 0x7f);
        numbers[i / 4] |= (unsigned long long)number << 16 * (i % 4);
      }
      out[2 * half + quarter].low = numbers[0], out[2 * half + quarter].high = numbers[1];
    }
  }
}

// What is kept as it is, which the last block of an image may be in part only.
static __device__ void exp7_raw(
    char *to, const char *data, unsigned int nbytes, unsigned int word) {
  const unsigned int start = 64 * word, end = start + 64 < nbytes ? start + 64 : nbytes;
  unsigned int i = start;
  for (; i + 16 <= end; i += 16) *(Exp7Vector *)(to + i) = *(const Exp7Vector *)(data + i);
  for (; i < end; i++) to[i] = data[i];
}

// `to` is a multiple of 16.
extern "C" __global__ void decode_exp7(
    char *to, const char *image, const char *entries, long long first, long long count) {
  const long long threads = (long long)gridDim.x * blockDim.x;
  const long long me = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (long long i = me; i < count * EXP7_WORDS; i += threads) {
    const long long block = i / EXP7_WORDS;
    const unsigned int word = (unsigned int)(i % EXP7_WORDS);
    const Exp7Entry &entry = ((const Exp7Entry *)entries)[first + block];
    char *target = to + block * (2 * EXP7_VALUES);
    if (entry.escapes == EXP7_RAW) exp7_raw(target, image + entry.offset, entry.nbytes, word);
    else exp7_word(target, image + entry.offset, entry, word);
  }
}
