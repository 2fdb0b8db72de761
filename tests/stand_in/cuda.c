// A stand-in for libcuda.so.1: what the CUDA backend asks of the driver, over memfd and mmap.
//
// Device memory is host memory. Copies and events are only put in line when they are asked for;
// they are done when somebody waits for them, and nothing is done that this wait does not need. So
// streams are as far apart as their events allow, and a wait that is missing is seen: the bytes
// are not there. It proves bookkeeping, never speed, and knows no kernels.
//
// What tests use beside the driver's calls: standin_fail, standin_hold, standin_reset,
// standin_live, standin_forget,
// standin_calls.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       ALREADY_MAPPED = 208, NOT_MAPPED = 211, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
       ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
       CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, ILLEGAL_STATE = 401 };
static const struct { int code; const char *name, *why; } NAMES[] = {
  {OK, "CUDA_SUCCESS", "no error"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
  {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
  {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
  {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
  {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
  {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
  {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"}};

typedef uint64_t u64;
#define GRANULARITY ((u64)2 << 20)
#define LEGACY ((Stream *)1)  // what stream 0 stands for

typedef struct Event { struct Stream *stream; u64 seq; u64 at; unsigned flags; } Event;
typedef struct { enum { COPY, MARK, WAIT } what; char *to, *from; u64 n, rows, to_pitch, from_pitch;
                 Event *event; struct Stream *other; u64 seq; } Op;
typedef struct Stream { Op *ops; u64 done, given, room, held; } Stream;
typedef struct { int fd; u64 n; int maps, released; } Physical;
typedef struct { u64 start, n; } Range;
typedef struct { u64 start, n; Physical *physical; int access; } Mapping;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream legacy;
static Range ranges[1024], pinned[1024];
static Mapping mappings[65536];
static int n_ranges, n_pinned, n_mappings, sticky, initialised, retained;
static u64 budget = (u64)1 << 30, taken, live_handles, live_streams, live_events;
static __thread void *current;
// One capture at a time. What it forbids is forbidden to the thread that captures, and to all others
// if its mode is global, unless a thread's own mode is relaxed; such a call spoils the capture.
enum { GLOBAL, THREAD_LOCAL, RELAXED };
static struct { Stream *stream; pthread_t thread; int mode, spoilt; } capture;
static __thread int thread_mode;
static int forbidden(void) {
  if (!capture.stream || capture.mode == RELAXED || thread_mode == RELAXED) return 0;
  int mine = pthread_equal(capture.thread, pthread_self());
  if (!mine && (capture.mode == THREAD_LOCAL || thread_mode == THREAD_LOCAL)) return 0;
  return capture.spoilt = 1;
}

// Failures: the n-th call of a name from now on returns a code.
static struct { char name[64]; int in, code; } failing[16];
static char calls[1 << 20];
static u64 calls_end;
static int injected(const char *name) {
  for (int i = 0; i < 16; i++)
    if (failing[i].in && !strcmp(failing[i].name, name) && !--failing[i].in) return failing[i].code;
  return OK;
}
#define CALL(name, context) \
  pthread_mutex_lock(&lock); \
  if (calls_end + 64 < sizeof calls) calls_end += sprintf(calls + calls_end, "%s\n", name); \
  int code = !initialised ? NOT_INITIALIZED : sticky ? sticky : context && !current ? INVALID_CONTEXT : injected(name); \
  if (code) goto end;
#define FAIL(error) do { code = error; goto end; } while (0)
#define NO_CAPTURE if (forbidden()) FAIL(CAPTURE_UNSUPPORTED);
#define END end: pthread_mutex_unlock(&lock); return code

static u64 now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000ull + t.tv_nsec; }
static Stream *line(Stream *s) { return !s || s == LEGACY ? &legacy : s; }
static Mapping *mapping_at(u64 p) {
  for (int i = 0; i < n_mappings; i++) if (p >= mappings[i].start && p - mappings[i].start < mappings[i].n) return &mappings[i];
  return 0;
}
static Range *in(Range *list, int n, u64 p) {
  for (int i = 0; i < n; i++) if (p >= list[i].start && p - list[i].start < list[i].n) return &list[i];
  return 0;
}
// Host memory is anybody's; device memory must be mapped and accessible all over. A driver takes a
// copy for host memory that is partly registered, or registered in two parts, for an error.
static int usable(u64 p, u64 n) {
  for (u64 at = p, left = n; left;) {
    Range *range = in(ranges, n_ranges, at);
    if (!range) {
      Range *first = in(pinned, n_pinned, at), *last = in(pinned, n_pinned, at + left - 1);
      return first == last;
    }
    Mapping *m = mapping_at(at);
    if (!m || !m->access) return 0;
    u64 part = m->start + m->n - at;
    if (part > left) part = left;
    at += part, left -= part;
  }
  return 1;
}
static Op *put(Stream *s, int what) {
  if (s->given == s->room) s->ops = realloc(s->ops, (s->room = s->room * 2 + 64) * sizeof(Op));
  Op *op = &s->ops[s->given++];
  memset(op, 0, sizeof *op);
  op->what = what;
  return op;
}
// Do what is in line before `upto`, and what that waits for on other streams; NOT_READY if held.
static int advance(Stream *s, u64 upto) {
  while (s->done < upto) {
    if (s->held && s->done + 1 >= s->held) return NOT_READY;
    Op op = s->ops[s->done];
    if (op.what == WAIT) { int code = advance(op.other, op.seq); if (code) return code; }
    if (op.what == MARK && op.event->seq == s->done + 1) op.event->at = now();
    if (op.what == COPY)
      for (u64 row = 0; row < op.rows; row++) {
        char *to = op.to + row * op.to_pitch, *from = op.from + row * op.from_pitch;
        if (!usable((u64)to, op.n) || !usable((u64)from, op.n)) return sticky = ILLEGAL_ADDRESS;
        memmove(to, from, op.n);
      }
    s->done++;
  }
  return OK;
}
static int settle(Stream *s, u64 upto) {
  int code;
  while ((code = advance(s, upto)) == NOT_READY) pthread_cond_wait(&changed, &lock);
  return code;
}

int cuInit(unsigned flags) { initialised = 1; return injected("cuInit"); }
int cuGetErrorName(int code, const char **s) {
  for (unsigned i = 0; i < sizeof NAMES / sizeof *NAMES; i++) if (NAMES[i].code == code) { *s = NAMES[i].name; return OK; }
  *s = 0; return INVALID_VALUE;
}
int cuGetErrorString(int code, const char **s) {
  for (unsigned i = 0; i < sizeof NAMES / sizeof *NAMES; i++) if (NAMES[i].code == code) { *s = NAMES[i].why; return OK; }
  *s = "an error the stand-in has no words for"; return OK;
}
int cuDeviceGet(int *d, int ordinal) { CALL("cuDeviceGet", 0) if (ordinal) FAIL(INVALID_DEVICE); *d = ordinal; END; }
int cuDevicePrimaryCtxRetain(void **c, int d) { CALL("cuDevicePrimaryCtxRetain", 0) *c = (void *)0x77; retained++; END; }
int cuDevicePrimaryCtxRelease(int d) { CALL("cuDevicePrimaryCtxRelease", 0) retained--; END; }
int cuCtxSetCurrent(void *c) { CALL("cuCtxSetCurrent", 0) current = c; END; }

int cuMemGetAllocationGranularity(u64 *n, void *prop, int option) { CALL("cuMemGetAllocationGranularity", 0) *n = GRANULARITY; END; }
int cuMemCreate(u64 *h, u64 n, void *prop, u64 flags) {
  CALL("cuMemCreate", 0)
  if (!n || n % GRANULARITY) FAIL(INVALID_VALUE);
  if (n > budget - taken) FAIL(OUT_OF_MEMORY);
  Physical *x = calloc(1, sizeof *x);
  x->fd = memfd_create("stand-in", MFD_CLOEXEC), x->n = n;
  if (x->fd < 0 || ftruncate(x->fd, n)) { free(x); FAIL(OUT_OF_MEMORY); }
  taken += n, live_handles++, *h = (u64)x;
  END;
}
static void drop(Physical *x) { if (x->released && !x->maps) { close(x->fd); taken -= x->n; free(x); } }
int cuMemRelease(u64 h) { CALL("cuMemRelease", 0) Physical *x = (Physical *)h; if (x->released) FAIL(INVALID_VALUE); x->released = 1, live_handles--; drop(x); END; }
int cuMemAddressReserve(u64 *p, u64 n, u64 alignment, u64 at, u64 flags) {
  CALL("cuMemAddressReserve", 0)
  if (!n || n % GRANULARITY) FAIL(INVALID_VALUE);
  char *m = mmap(0, n + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) FAIL(OUT_OF_MEMORY);
  char *start = (char *)(((u64)m + GRANULARITY - 1) / GRANULARITY * GRANULARITY);
  if (start > m) munmap(m, start - m);
  if (start < m + GRANULARITY) munmap(start + n, m + GRANULARITY - start);
  ranges[n_ranges++] = (Range){*p = (u64)start, n};
  END;
}
int cuMemAddressFree(u64 p, u64 n) {
  CALL("cuMemAddressFree", 0)
  Range *range = in(ranges, n_ranges, p);
  if (!range || range->start != p || range->n != n) FAIL(INVALID_VALUE);
  for (u64 at = p; at < p + n; at += GRANULARITY) if (mapping_at(at)) FAIL(INVALID_VALUE);
  munmap((void *)p, n);
  *range = ranges[--n_ranges];
  END;
}
int cuMemMap(u64 p, u64 n, u64 offset, u64 h, u64 flags) {
  CALL("cuMemMap", 0)
  Physical *x = (Physical *)h;
  Range *range = in(ranges, n_ranges, p);
  if (!range || p + n > range->start + range->n || p % GRANULARITY || offset || n != x->n || x->released) FAIL(INVALID_VALUE);
  for (u64 at = p; at < p + n; at += GRANULARITY) if (mapping_at(at)) FAIL(INVALID_VALUE);
  if (mmap((void *)p, n, PROT_NONE, MAP_SHARED | MAP_FIXED, x->fd, 0) == MAP_FAILED) FAIL(OUT_OF_MEMORY);
  mappings[n_mappings++] = (Mapping){p, n, x, 0}, x->maps++;
  END;
}
int cuMemSetAccess(u64 p, u64 n, void *desc, u64 count) {
  CALL("cuMemSetAccess", 0)
  for (u64 at = p; at < p + n; at += GRANULARITY) if (!mapping_at(at)) FAIL(INVALID_VALUE);
  for (u64 at = p; at < p + n; at += mapping_at(at)->n) mapping_at(at)->access = 1;
  mprotect((void *)p, n, PROT_READ | PROT_WRITE);
  END;
}
int cuMemUnmap(u64 p, u64 n) {
  CALL("cuMemUnmap", 0)
  Mapping *m = mapping_at(p);
  if (!m || m->start != p || m->n != n) FAIL(INVALID_VALUE);
  mmap((void *)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  m->physical->maps--;
  drop(m->physical);
  *m = mappings[--n_mappings];
  END;
}

int cuStreamCreate(Stream **s, unsigned flags) { CALL("cuStreamCreate", 1) *s = calloc(1, sizeof **s); live_streams++; END; }
int cuStreamDestroy(Stream *s) { CALL("cuStreamDestroy", 1) code = settle(s, s->given); live_streams--; END; }  // kept: events name it
int cuStreamSynchronize(Stream *s) { CALL("cuStreamSynchronize", 1) NO_CAPTURE s = line(s); code = settle(s, s->given); END; }
int cuStreamWaitEvent(Stream *s, Event *e, unsigned flags) {
  CALL("cuStreamWaitEvent", 1)
  if (e->stream) { Op *op = put(line(s), WAIT); op->other = e->stream, op->seq = e->seq; }  // else never recorded: no wait
  END;
}
int cuThreadExchangeStreamCaptureMode(int *mode) { CALL("cuThreadExchangeStreamCaptureMode", 0) int before = thread_mode; thread_mode = *mode; *mode = before; END; }
int cuStreamBeginCapture(Stream *s, int mode) {
  CALL("cuStreamBeginCapture", 1)
  if (!s || s == LEGACY || capture.stream) FAIL(ILLEGAL_STATE);
  capture.stream = s, capture.thread = pthread_self(), capture.mode = mode, capture.spoilt = 0;
  END;
}
int cuStreamEndCapture(Stream *s, void **graph) {
  CALL("cuStreamEndCapture", 1)
  if (capture.stream != s) FAIL(ILLEGAL_STATE);
  capture.stream = 0, *graph = 0;
  if (capture.spoilt) FAIL(CAPTURE_INVALIDATED);
  END;
}
int cuEventCreate(Event **e, unsigned flags) {
  CALL("cuEventCreate", 1)
  if ((flags & 4) && !(flags & 2)) FAIL(INVALID_VALUE);  // interprocess events have no timing
  *e = calloc(1, sizeof **e); (*e)->flags = flags; live_events++;
  END;
}
int cuEventDestroy(Event *e) { CALL("cuEventDestroy", 1) live_events--; END; }  // kept: what is in line names it
int cuEventRecord(Event *e, Stream *s) { CALL("cuEventRecord", 1) s = line(s); put(s, MARK)->event = e; e->stream = s, e->seq = s->given; END; }
int cuEventSynchronize(Event *e) { CALL("cuEventSynchronize", 1) NO_CAPTURE if (e->stream) code = settle(e->stream, e->seq); END; }
int cuEventQuery(Event *e) { CALL("cuEventQuery", 1) NO_CAPTURE if (e->stream) code = advance(e->stream, e->seq); END; }
int cuEventElapsedTime(float *ms, Event *from, Event *to) {
  CALL("cuEventElapsedTime", 1)
  if (!from->stream || !to->stream || (from->flags & 2) || (to->flags & 2)) FAIL(INVALID_HANDLE);
  if (from->stream->done < from->seq || to->stream->done < to->seq) FAIL(NOT_READY);
  *ms = (to->at - from->at) / 1e6f;
  END;
}
// Within one process only, unlike the driver's.
int cuIpcGetEventHandle(char *handle, Event *e) { CALL("cuIpcGetEventHandle", 1) if (!(e->flags & 4)) FAIL(INVALID_HANDLE); memset(handle, 0, 64); memcpy(handle, &e, sizeof e); END; }
typedef struct { char bytes[64]; } Handle;
int cuIpcOpenEventHandle(Event **e, Handle handle) { CALL("cuIpcOpenEventHandle", 1) Event *shared; memcpy(&shared, handle.bytes, sizeof shared); *e = malloc(sizeof **e); **e = *shared; live_events++; END; }

static int copy(Stream *s, Op op) {
  u64 extent = op.n + (op.rows - 1) * op.to_pitch, other = op.n + (op.rows - 1) * op.from_pitch;
  if (!usable((u64)op.to, extent) || !usable((u64)op.from, other)) return INVALID_VALUE;
  op.what = COPY;
  *put(line(s), COPY) = op;
  return OK;
}
int cuMemcpyAsync(u64 to, u64 from, u64 n, Stream *s) { CALL("cuMemcpyAsync", 1) code = copy(s, (Op){.to = (char *)to, .from = (char *)from, .n = n, .rows = 1}); END; }
typedef struct {  // CUDA_MEMCPY2D
  u64 from_x, from_y; int from_type; const void *from_host; u64 from; void *from_array; u64 from_pitch;
  u64 to_x, to_y; int to_type; void *to_host; u64 to; void *to_array; u64 to_pitch; u64 width, height;
} Area;
int cuMemcpy2DAsync(const Area *a, Stream *s) {
  CALL("cuMemcpy2DAsync", 1)
  if (a->from_type != 4 || a->to_type != 4 || a->width > a->from_pitch || a->width > a->to_pitch) FAIL(INVALID_VALUE);
  code = copy(s, (Op){.to = (char *)a->to, .from = (char *)a->from, .n = a->width, .rows = a->height, .to_pitch = a->to_pitch, .from_pitch = a->from_pitch});
  END;
}
int cuMemHostRegister(void *p, u64 n, unsigned flags) {
  CALL("cuMemHostRegister", 1)
  NO_CAPTURE
  for (int i = 0; i < n_pinned; i++) if ((u64)p < pinned[i].start + pinned[i].n && pinned[i].start < (u64)p + n) FAIL(ALREADY_REGISTERED);
  pinned[n_pinned++] = (Range){(u64)p, n};
  END;
}
int cuMemHostUnregister(void *p) {
  CALL("cuMemHostUnregister", 1)
  NO_CAPTURE
  Range *range = in(pinned, n_pinned, (u64)p);
  if (!range || range->start != (u64)p) FAIL(NOT_REGISTERED);
  *range = pinned[--n_pinned];
  END;
}

void standin_fail(const char *name, int nth, int code) {
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < 15 && failing[i].in) i++;
  snprintf(failing[i].name, sizeof failing[i].name, "%s", name), failing[i].in = nth, failing[i].code = code;
  pthread_mutex_unlock(&lock);
}
// Nothing given to a held stream from now on is done; who waits for it waits until it is let go.
void standin_hold(Stream *s, int held) {
  pthread_mutex_lock(&lock);
  line(s)->held = held ? line(s)->given + 1 : 0;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}
void standin_reset(u64 bytes) {  // a new driver, as far as failures and the budget go
  pthread_mutex_lock(&lock);
  memset(failing, 0, sizeof failing);
  capture.stream = 0;
  sticky = 0, calls_end = 0, calls[0] = 0, legacy.held = 0;
  if (bytes) budget = bytes;
  pthread_mutex_unlock(&lock);
}
// What nobody gave back: handles, mappings, ranges, pinned ranges, streams, events, contexts.
void standin_live(u64 *n) { u64 all[] = {live_handles, n_mappings, n_ranges, n_pinned, live_streams, live_events, retained}; memcpy(n, all, sizeof all); }
void standin_forget(void) { live_handles = live_streams = live_events = 0; }
const char *standin_calls(void) { return calls; }

// NVRTC, in the same process, looks for tables of a driver that it finds loaded; it can do without.
int cuGetExportTable(const void **table, const void *id) { *table = 0; return NOT_FOUND; }
int cuGetProcAddress_v2(const char *name, void **f, int version, u64 flags, int *status) {
  static void *self;
  Dl_info here;
  if (!self && dladdr((void *)cuInit, &here)) self = dlopen(here.dli_fname, RTLD_NOW);
  *f = dlsym(self, name);
  if (status) *status = *f ? 0 : 1;
  return *f ? OK : NOT_FOUND;
}
