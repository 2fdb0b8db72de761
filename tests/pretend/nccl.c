// A stand-in for libnccl.so.2. Ranks find each other in shared memory, and their collectives are compared there: all
// of a communicator must be asked for the same, in the same order. Nothing is exchanged.
#define _GNU_SOURCE
#include "state.h"
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
enum { UNHANDLED_CUDA = 1, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { MOST_RANKS = 64, REMEMBERED = 4096, WAIT_MS = 120000 };
typedef struct { char name[128]; } Id;
typedef struct { int ranks, joined, taken[MOST_RANKS]; u64 asked[REMEMBERED]; } Board;
typedef struct { Board *board; int rank, ranks, dead; u64 asked; } Comm;
#define FAULT(kind, what, code) { pretend_fault(kind, what); return code; }

// ---- communicators. They are kept when they are gone: a second end, or a use, is a fault.
API int ncclGetUniqueId(Id *id) {
  static int made;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  memset(id, 0, sizeof *id);
  snprintf(id->name, sizeof id->name, "/dev/shm/pretend-nccl-%d-%d-%ld", getpid(), made++, now.tv_nsec);
  return OK;
}
static void note(const Id *id, int rank, int ranks) {  // a line of the file PRETEND_COMMUNICATORS
  const char *path = getenv("PRETEND_COMMUNICATORS");
  FILE *file = path ? fopen(path, "a") : 0;
  if (!file) return;
  fprintf(file, "%d\t%s\t%d\t%d\n", getpid(), id->name, rank, ranks);
  fclose(file);
}
// Returns when all ranks have come.
API int ncclCommInitRank(Comm **made, int ranks, Id id, int rank) {
  if (rank < 0 || rank >= ranks || ranks > MOST_RANKS) return INVALID_ARGUMENT;
  int file = open(id.name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(Board))) return SYSTEM;
  Board *board = mmap(0, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (board == MAP_FAILED) return SYSTEM;
  int others = __sync_val_compare_and_swap(&board->ranks, 0, ranks);
  if ((others && others != ranks) || __sync_lock_test_and_set(&board->taken[rank], 1)) FAULT("rank_taken", "ncclCommInitRank", INVALID_USAGE)
  int last = __sync_add_and_fetch(&board->joined, 1) == ranks;
  for (int ms = 0; __atomic_load_n(&board->joined, __ATOMIC_ACQUIRE) < ranks; ms++) {
    if (ms == WAIT_MS) return SYSTEM;
    usleep(1000);
  }
  if (last) unlink(id.name);
  note(&id, rank, ranks);
  *made = calloc(1, sizeof **made);
  **made = (Comm){board, rank, ranks};
  return OK;
}
API int ncclCommInitRankConfig(Comm **made, int ranks, Id id, int rank, void *config) { return ncclCommInitRank(made, ranks, id, rank); }
API int ncclCommInitRankScalable(Comm **made, int ranks, int rank, int n, Id *ids, void *config) { return ncclCommInitRank(made, ranks, ids[0], rank); }
API int ncclCommSplit(Comm *c, int color, int key, Comm **made, void *config) { return INVALID_USAGE; }
API int ncclCommShrink(Comm *c, int *without, int n, Comm **made, void *config, int flags) { return INVALID_USAGE; }
static int end(Comm *c, const char *call) {
  if (!c) return OK;
  if (c->dead) FAULT("freed_twice", call, INVALID_ARGUMENT)
  c->dead = 1;
  munmap(c->board, sizeof *c->board);
  return OK;
}
API int ncclCommDestroy(Comm *c) { return end(c, "ncclCommDestroy"); }
API int ncclCommAbort(Comm *c) { return end(c, "ncclCommAbort"); }
static int alive(Comm *c, const char *call) {
  if (!c || c->dead) FAULT("used_after_free", call, INVALID_ARGUMENT)
  return OK;
}
API int ncclCommFinalize(Comm *c) { return alive(c, "ncclCommFinalize"); }
API int ncclCommCount(Comm *c, int *n) { int code = alive(c, "ncclCommCount"); if (!code) *n = c->ranks; return code; }
API int ncclCommUserRank(Comm *c, int *n) { int code = alive(c, "ncclCommUserRank"); if (!code) *n = c->rank; return code; }
API int ncclCommCuDevice(Comm *c, int *n) { *n = 0; return alive(c, "ncclCommCuDevice"); }
API int ncclCommGetAsyncError(Comm *c, int *code) { *code = OK; return alive(c, "ncclCommGetAsyncError"); }
API int ncclCommSuspend(Comm *c, int flags) { return alive(c, "ncclCommSuspend"); }
API int ncclCommResume(Comm *c) { return alive(c, "ncclCommResume"); }
// Memory of slabs cannot be exported, so none may be registered.
API int ncclCommRegister(Comm *c, void *p, size_t n, void **handle) FAULT("registered_slabs", "ncclCommRegister", INVALID_USAGE)
API int ncclCommWindowRegister(Comm *c, void *p, size_t n, void **window, int flags) FAULT("registered_slabs", "ncclCommWindowRegister", INVALID_USAGE)
API int ncclCommWindowDeregister(Comm *c, void *window) { return INVALID_USAGE; }

// ---- collectives: work on their stream, over memory that has to be there
static size_t bytes(size_t count, int type) {
  static const int SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type < 0 || type >= 12 ? 0 : count * SIZES[type];
}
static int there(const void *p, size_t n, const char *call) {
  if (n && !pretend_reaches((u64)p, n)) FAULT("illegal_address", call, UNHANDLED_CUDA)
  return OK;
}
// The first rank to come leaves what it asks for; later ones compare, unless they are too far behind.
static int agreed(Comm *c, u64 what, const char *call) {
  u64 mine = ++c->asked << 32 | (what & 0xffffffff), *place = &c->board->asked[c->asked % REMEMBERED], seen;
  while ((seen = *place) >> 32 < c->asked) if (__sync_bool_compare_and_swap(place, seen, mine)) return OK;
  if (seen >> 32 == c->asked && seen != mine) FAULT("collectives_differ", call, INVALID_USAGE)
  return OK;
}
static int collective(const char *call, int kind, const void *from, size_t n, void *to, size_t m, size_t count, int type, int op, Comm *c, void *stream) {
  int code = alive(c, call);
  if (!code) code = there(from, n, call);
  if (!code) code = there(to, m, call);
  if (!code) code = agreed(c, ((u64)count * 31 + type) * 31 + op * 8 + kind, call);
  if (!code) code = pretend_work(stream, 0, 0, 0);
  return code;
}
#define SIZE bytes(count, type)
API int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *c, void *s) { return collective("ncclAllReduce", 1, from, SIZE, to, SIZE, count, type, op, c, s); }
API int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, Comm *c, void *s) { return collective("ncclReduce", 2, from, SIZE, to, c && c->rank == root ? SIZE : 0, count, type, op + root, c, s); }
API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *c, void *s) { return collective("ncclBroadcast", 3, from, c && c->rank == root ? SIZE : 0, to, SIZE, count, type, root, c, s); }
API int ncclBcast(void *p, size_t count, int type, int root, Comm *c, void *s) { return ncclBroadcast(p, p, count, type, root, c, s); }
API int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *c, void *s) { return collective("ncclAllGather", 4, from, SIZE, to, c ? SIZE * c->ranks : 0, count, type, 0, c, s); }
API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, Comm *c, void *s) { return collective("ncclReduceScatter", 5, from, c ? SIZE * c->ranks : 0, to, SIZE, count, type, op, c, s); }
API int ncclSend(const void *p, size_t count, int type, int peer, Comm *c, void *s) { int code = alive(c, "ncclSend"); if (!code) code = there(p, SIZE, "ncclSend"); return code ? code : pretend_work(s, 0, 0, 0); }
API int ncclRecv(void *p, size_t count, int type, int peer, Comm *c, void *s) { int code = alive(c, "ncclRecv"); if (!code) code = there(p, SIZE, "ncclRecv"); return code ? code : pretend_work(s, 0, 0, 0); }
API int ncclGroupStart(void) { return OK; }
API int ncclGroupEnd(void) { return OK; }

// ---- versions, errors
API int ncclGetVersion(int *v) { *v = 22900; return OK; }
API const char *ncclGetErrorString(int code) { return code ? "an error of the pretend NCCL" : "no error"; }
API const char *ncclGetLastError(Comm *c) { return ""; }
API int ncclCommQueryProperties(Comm *c, void *properties) { return INVALID_USAGE; }
#include "nccl_stubs.inc"
