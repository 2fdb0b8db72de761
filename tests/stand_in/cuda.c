// A stand-in for libcuda.so.1: what the CUDA backend asks of the driver, over memfd and mmap.
//
// Device memory is host memory. Copies and events are only put in line when they are asked for;
// they are done when somebody waits for them, and nothing is done that this wait does not need. So
// streams are as far apart as their events allow, and a wait that is missing is seen: the bytes
// are not there. It proves bookkeeping, never speed, and knows no kernels.
//
// It is as strict as the driver is, or as its documentation says where the driver is lax:
//   captures   one at a time, on one stream; what CUDA forbids meanwhile, by the modes of the capture
//              and of the calling thread, fails and spoils it; what is put in line there is recorded,
//              not done. A stream that waits for an event of the capture is refused, not joined.
//   mappings   whole ones are unmapped, one or several by a call; nothing is mapped over another;
//              nothing is accessible before cuMemSetAccess
//   copies     an address without memory shows when the copy is reached, not when it is asked for
//   errors     an illegal address, a failed launch, a lost device: every call fails with it from
//              then on, and what waits for a stream goes on with it
//   audit      what CUDA does not notice, or only by chance: memory unmapped or unlocked under work
//              that the host has not waited for, things given back twice or used afterwards
//
// What tests use next to the driver's calls has names that begin with standin_.
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
       ECC_UNCORRECTABLE = 214, INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500, NOT_READY = 600,
       ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, MISALIGNED_ADDRESS = 716, LAUNCH_FAILED = 719,
       CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906,
       CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908 };
static const struct { int code; const char *name, *why; } NAMES[] = {
  {OK, "CUDA_SUCCESS", "no error"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
  {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
  {MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
  {ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
  {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
  {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
  {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
  {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
  {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"}};

typedef uint64_t u64;
#define GRANULARITY ((u64)2 << 20)
#define LEGACY ((Stream *)1)  // what stream 0 stands for

typedef struct Event { struct Stream *stream; u64 seq; u64 at; unsigned flags; int dead, captured; } Event;
typedef struct { enum { COPY, MARK, WAIT } what; char *to, *from; u64 n, rows, to_pitch, from_pitch;
                 Event *event; struct Stream *other; u64 seq; } Op;
typedef struct Stream { Op *ops; u64 done, given, room, held; int dead, blocking; } Stream;
// Kept when it is gone: a second release names it.
typedef struct Physical { int fd; u64 n; int maps, released; struct Physical *next; } Physical;
typedef struct { u64 start, n; } Range;
typedef struct { u64 start, n; Physical *physical; int access; } Mapping;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream legacy;
static Range ranges[1024], pinned[1024];
static Mapping mappings[65536];
static Stream *streams[4096];
static Physical *physical;
static int n_ranges, n_pinned, n_mappings, n_streams, sticky, initialised, retained;
static u64 budget = (u64)1 << 30, taken, live_handles, live_events, pageable;
static struct { u64 registered_twice, mapped_twice, freed_twice, used_after_free, unmapped_in_use, unmapped_part,
                unmapped_nothing, unregistered_in_use, freed_mapped; } audit;  // as `Audit` in driver.py
static __thread void *current;
// One capture at a time. What it forbids is forbidden to the thread that captures, and to all others
// if its mode is global, unless a thread's own mode is relaxed; such a call spoils the capture.
// What conflicts with a capture by itself (its stream is waited for) is forbidden in all modes.
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
static int breaks(int code) {
  return code == ILLEGAL_ADDRESS || code == LAUNCH_FAILED || code == ECC_UNCORRECTABLE || code == MISALIGNED_ADDRESS;
}
static int injected(const char *name) {
  for (int i = 0; i < 16; i++) {
    if (!failing[i].in) continue;
    // Of all calls: what only sets a number of the thread fails in a broken context, and else never.
    int any = !strcmp(failing[i].name, "*") && (breaks(failing[i].code) || strcmp(name, "cuThreadExchangeStreamCaptureMode"));
    if ((!any && strcmp(failing[i].name, name)) || --failing[i].in) continue;
    if (breaks(failing[i].code)) sticky = failing[i].code, pthread_cond_broadcast(&changed);
    return failing[i].code;
  }
  return OK;
}
#define CALL(name, context) \
  pthread_mutex_lock(&lock); \
  if (calls_end + 64 < sizeof calls) calls_end += sprintf(calls + calls_end, "%s\n", name); \
  int code = !initialised ? NOT_INITIALIZED : sticky ? sticky : context && !current ? INVALID_CONTEXT : injected(name); \
  if (code) goto end;
#define FAIL(error) do { code = error; goto end; } while (0)
#define NO_CAPTURE if (forbidden()) FAIL(CAPTURE_UNSUPPORTED);
#define LIVE(x) if ((x)->dead) { audit.used_after_free++; FAIL(INVALID_HANDLE); }
// Something is put in line: the default stream cannot be used while a stream that waits for it is captured.
#define IN_LINE(s) s = line(s); LIVE(s) \
  if (capture.stream && s == &legacy && capture.stream->blocking) { capture.spoilt = 1; FAIL(CAPTURE_IMPLICIT); } \
  if (capture.stream == s && capture.spoilt) FAIL(CAPTURE_INVALIDATED);
#define NOT_CAPTURING(s) if (capture.stream == (s)) { capture.spoilt = 1; FAIL(CAPTURE_UNSUPPORTED); }
#define NOT_CAPTURED(e) if ((e)->captured) { capture.spoilt = 1; FAIL(CAPTURED_EVENT); }
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
static int overlap(u64 a, u64 n, u64 b, u64 m) { return n && m && a < b + m && b < a + n; }
static int exists(u64 p, u64 n) {  // something is mapped in this process where it begins and where it ends
  unsigned char seen;
  return !mincore((void *)(p / 4096 * 4096), 1, &seen) && !mincore((void *)((p + n - 1) / 4096 * 4096), 1, &seen);
}
// Device memory must be mapped and accessible all over; host memory must be there. A driver takes a
// copy for host memory that is partly registered, or registered in two parts, for an error.
static int usable(u64 p, u64 n) {
  for (u64 at = p, left = n; left;) {
    Range *range = in(ranges, n_ranges, at);
    if (!range) return exists(at, left) ? OK : ILLEGAL_ADDRESS;
    Mapping *m = mapping_at(at);
    if (!m || !m->access) return ILLEGAL_ADDRESS;
    u64 part = m->start + m->n - at;
    if (part > left) part = left;
    at += part, left -= part;
  }
  return OK;
}
static int registered_as_one(u64 p, u64 n) {
  if (!n || in(ranges, n_ranges, p)) return 1;
  Range *first = in(pinned, n_pinned, p);
  if (!first) pageable++;
  return first == in(pinned, n_pinned, p + n - 1);
}
// Whether anything in line, that the host cannot know to be done, reads or writes there.
static int in_use(u64 p, u64 n) {
  for (int i = -1; i < n_streams; i++) {
    Stream *s = i < 0 ? &legacy : streams[i];
    for (u64 k = s->done; k < s->given; k++) {
      Op *op = &s->ops[k];
      if (op->what == COPY && op->n && op->rows
          && (overlap((u64)op->to, op->n + (op->rows - 1) * op->to_pitch, p, n)
              || overlap((u64)op->from, op->n + (op->rows - 1) * op->from_pitch, p, n))) return 1;
    }
  }
  return 0;
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
        if (usable((u64)to, op.n) || usable((u64)from, op.n)) {
          pthread_cond_broadcast(&changed);
          return sticky = ILLEGAL_ADDRESS;
        }
        memmove(to, from, op.n);
      }
    s->done++;
  }
  return OK;
}
static int settle(Stream *s, u64 upto) {
  int code;
  while ((code = sticky ? sticky : advance(s, upto)) == NOT_READY) pthread_cond_wait(&changed, &lock);
  return code;
}

// A destroyed stream stays until what was in line there is done, or until its context goes.
static void drop_dead_streams(int all) {
  for (int i = n_streams; i--;)
    if (streams[i]->dead && (all || streams[i]->done == streams[i]->given)) streams[i] = streams[--n_streams];
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
int cuDevicePrimaryCtxRelease(int d) { CALL("cuDevicePrimaryCtxRelease", 0) if (!--retained) drop_dead_streams(1); END; }
int cuCtxSetCurrent(void *c) { CALL("cuCtxSetCurrent", 0) current = c; END; }

int cuCtxSynchronize(void) {
  CALL("cuCtxSynchronize", 1)
  if (capture.stream) { capture.spoilt = 1; FAIL(CAPTURE_UNSUPPORTED); }
  code = settle(&legacy, legacy.given);
  for (int i = 0; !code && i < n_streams; i++) code = settle(streams[i], streams[i]->given);
  END;
}

int cuMemGetAllocationGranularity(u64 *n, void *prop, int option) { CALL("cuMemGetAllocationGranularity", 0) *n = GRANULARITY; END; }
int cuMemCreate(u64 *h, u64 n, void *prop, u64 flags) {
  CALL("cuMemCreate", 0)
  if (!n || n % GRANULARITY) FAIL(INVALID_VALUE);
  if (n > budget - taken) FAIL(OUT_OF_MEMORY);
  Physical *x = calloc(1, sizeof *x);
  x->fd = memfd_create("stand-in", MFD_CLOEXEC), x->n = n;
  if (x->fd < 0 || ftruncate(x->fd, n)) { free(x); FAIL(OUT_OF_MEMORY); }
  x->next = physical, physical = x;
  taken += n, live_handles++, *h = (u64)x;
  END;
}
static void drop(Physical *x) { if (x->released && !x->maps) { close(x->fd); x->fd = -1, taken -= x->n; } }
int cuMemRelease(u64 h) {
  CALL("cuMemRelease", 0)
  Physical *x = (Physical *)h;
  if (x->released) { audit.freed_twice++; FAIL(INVALID_VALUE); }
  x->released = 1, live_handles--;
  drop(x);
  END;
}
int cuMemAddressReserve(u64 *p, u64 n, u64 alignment, u64 at, u64 flags) {
  CALL("cuMemAddressReserve", 0)
  if (!n || n % GRANULARITY) FAIL(INVALID_VALUE);
  char *m = mmap(0, n + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) FAIL(OUT_OF_MEMORY);
  char *start = (char *)(((u64)m + GRANULARITY - 1) / GRANULARITY * GRANULARITY);
  if (start > m) munmap(m, start - m);
  if (start < m + GRANULARITY) munmap(start + n, m + GRANULARITY - start);
  if (n_ranges == sizeof ranges / sizeof *ranges) abort();
  ranges[n_ranges++] = (Range){*p = (u64)start, n};
  END;
}
int cuMemAddressFree(u64 p, u64 n) {
  CALL("cuMemAddressFree", 0)
  Range *range = in(ranges, n_ranges, p);
  if (!range || range->start != p || range->n != n) { audit.freed_twice++; FAIL(INVALID_VALUE); }
  for (u64 at = p; at < p + n; at += GRANULARITY) if (mapping_at(at)) { audit.freed_mapped++; FAIL(INVALID_VALUE); }
  munmap((void *)p, n);
  *range = ranges[--n_ranges];
  END;
}
int cuMemMap(u64 p, u64 n, u64 offset, u64 h, u64 flags) {
  CALL("cuMemMap", 0)
  Physical *x = (Physical *)h;
  Range *range = in(ranges, n_ranges, p);
  if (x->released) { audit.used_after_free++; FAIL(INVALID_VALUE); }
  if (!range || p + n > range->start + range->n || p % GRANULARITY || offset || n != x->n) FAIL(INVALID_VALUE);
  for (u64 at = p; at < p + n; at += GRANULARITY) if (mapping_at(at)) { audit.mapped_twice++; FAIL(INVALID_VALUE); }
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
// Whole mappings, all of one range. Work in line does not keep it from being done, nor is it waited for.
int cuMemUnmap(u64 p, u64 n) {
  CALL("cuMemUnmap", 0)
  Range *range = in(ranges, n_ranges, p);
  if (!range || !n || p % GRANULARITY || n % GRANULARITY || p + n > range->start + range->n) FAIL(INVALID_VALUE);
  int found = 0;
  for (int i = 0; i < n_mappings; i++) {
    Mapping *m = &mappings[i];
    if (!overlap(m->start, m->n, p, n)) continue;
    if (m->start < p || m->start + m->n > p + n) { audit.unmapped_part++; FAIL(INVALID_VALUE); }
    found = 1;
  }
  if (!found) { audit.unmapped_nothing++; goto end; }  // an H200's driver lets that pass (decision 58)
  if (in_use(p, n)) audit.unmapped_in_use++;
  mmap((void *)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  for (int i = n_mappings; i--;) {
    Mapping *m = &mappings[i];
    if (!overlap(m->start, m->n, p, n)) continue;
    m->physical->maps--;
    drop(m->physical);
    *m = mappings[--n_mappings];
  }
  END;
}

int cuStreamCreate(Stream **s, unsigned flags) {
  CALL("cuStreamCreate", 1)
  drop_dead_streams(0);
  if (n_streams == sizeof streams / sizeof *streams) abort();
  streams[n_streams++] = *s = calloc(1, sizeof **s);
  (*s)->blocking = !(flags & 1);
  END;
}
int cuStreamDestroy(Stream *s) {  // returns at once; kept: events name it
  CALL("cuStreamDestroy", 1)
  if (s->dead) { audit.freed_twice++; FAIL(INVALID_HANDLE); }
  s->dead = 1;
  END;
}
int cuStreamSynchronize(Stream *s) {
  CALL("cuStreamSynchronize", 1)
  IN_LINE(s)
  NOT_CAPTURING(s)
  NO_CAPTURE
  code = settle(s, s->given);
  END;
}
int cuStreamWaitEvent(Stream *s, Event *e, unsigned flags) {
  CALL("cuStreamWaitEvent", 1)
  IN_LINE(s)
  LIVE(e)
  if (e->captured != (capture.stream == s) && (e->stream || e->captured)) { capture.spoilt = 1; FAIL(CAPTURE_ISOLATION); }
  if (e->captured) goto end;
  if (e->stream) { Op *op = put(s, WAIT); op->other = e->stream, op->seq = e->seq; }  // else never recorded: no wait
  END;
}
int cuThreadExchangeStreamCaptureMode(int *mode) { CALL("cuThreadExchangeStreamCaptureMode", 0) int before = thread_mode; thread_mode = *mode; *mode = before; END; }
int cuStreamBeginCapture(Stream *s, int mode) {
  CALL("cuStreamBeginCapture", 1)
  if (!s || s == LEGACY || capture.stream) FAIL(ILLEGAL_STATE);
  LIVE(s)
  capture.stream = s, capture.thread = pthread_self(), capture.mode = mode, capture.spoilt = 0;
  END;
}
int cuStreamEndCapture(Stream *s, void **graph) {
  CALL("cuStreamEndCapture", 1)
  if (capture.stream != s) FAIL(ILLEGAL_STATE);
  if (capture.mode != RELAXED && !pthread_equal(capture.thread, pthread_self())) FAIL(CAPTURE_WRONG_THREAD);
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
int cuEventDestroy(Event *e) {  // kept: what is in line names it
  CALL("cuEventDestroy", 1)
  if (e->dead) { audit.freed_twice++; FAIL(INVALID_HANDLE); }
  e->dead = 1, live_events--;
  END;
}
int cuEventRecord(Event *e, Stream *s) {
  CALL("cuEventRecord", 1)
  IN_LINE(s)
  LIVE(e)
  if ((e->captured = capture.stream == s)) goto end;
  put(s, MARK)->event = e;
  e->stream = s, e->seq = s->given;
  END;
}
int cuEventSynchronize(Event *e) { CALL("cuEventSynchronize", 1) LIVE(e) NOT_CAPTURED(e) NO_CAPTURE if (e->stream) code = settle(e->stream, e->seq); END; }
int cuEventQuery(Event *e) { CALL("cuEventQuery", 1) LIVE(e) NOT_CAPTURED(e) NO_CAPTURE if (e->stream) code = advance(e->stream, e->seq); END; }
int cuEventElapsedTime(float *ms, Event *from, Event *to) {
  CALL("cuEventElapsedTime", 1)
  LIVE(from)
  LIVE(to)
  if (!from->stream || !to->stream || from->captured || to->captured || (from->flags & 2) || (to->flags & 2)) FAIL(INVALID_HANDLE);
  if (from->stream->done < from->seq || to->stream->done < to->seq) FAIL(NOT_READY);
  *ms = (to->at - from->at) / 1e6f;
  END;
}
// Within one process only, unlike the driver's.
int cuIpcGetEventHandle(char *handle, Event *e) { CALL("cuIpcGetEventHandle", 1) LIVE(e) if (!(e->flags & 4)) FAIL(INVALID_HANDLE); memset(handle, 0, 64); memcpy(handle, &e, sizeof e); END; }
typedef struct { char bytes[64]; } Handle;
int cuIpcOpenEventHandle(Event **e, Handle handle) { CALL("cuIpcOpenEventHandle", 1) Event *shared; memcpy(&shared, handle.bytes, sizeof shared); *e = malloc(sizeof **e); **e = *shared; live_events++; END; }

static int copy(Stream *s, Op op) {
  u64 extent = op.n + (op.rows - 1) * op.to_pitch, other = op.n + (op.rows - 1) * op.from_pitch;
  if (!registered_as_one((u64)op.to, extent) || !registered_as_one((u64)op.from, other)) return INVALID_VALUE;
  if (capture.stream == s) return OK;
  op.what = COPY;
  *put(s, COPY) = op;
  return OK;
}
int cuMemcpyAsync(u64 to, u64 from, u64 n, Stream *s) {
  CALL("cuMemcpyAsync", 1)
  IN_LINE(s)
  code = copy(s, (Op){.to = (char *)to, .from = (char *)from, .n = n, .rows = 1});
  END;
}
typedef struct {  // CUDA_MEMCPY2D
  u64 from_x, from_y; int from_type; const void *from_host; u64 from; void *from_array; u64 from_pitch;
  u64 to_x, to_y; int to_type; void *to_host; u64 to; void *to_array; u64 to_pitch; u64 width, height;
} Area;
int cuMemcpy2DAsync(const Area *a, Stream *s) {
  CALL("cuMemcpy2DAsync", 1)
  if (a->from_type != 4 || a->to_type != 4 || a->width > a->from_pitch || a->width > a->to_pitch) FAIL(INVALID_VALUE);
  IN_LINE(s)
  code = copy(s, (Op){.to = (char *)a->to, .from = (char *)a->from, .n = a->width, .rows = a->height, .to_pitch = a->to_pitch, .from_pitch = a->from_pitch});
  END;
}
int cuMemHostRegister(void *p, u64 n, unsigned flags) {
  CALL("cuMemHostRegister", 1)
  NO_CAPTURE
  for (int i = 0; i < n_pinned; i++) if ((u64)p < pinned[i].start + pinned[i].n && pinned[i].start < (u64)p + n) { audit.registered_twice++; FAIL(ALREADY_REGISTERED); }
  if (!n || !exists((u64)p, n)) FAIL(INVALID_VALUE);
  if (n_pinned == sizeof pinned / sizeof *pinned) abort();
  pinned[n_pinned++] = (Range){(u64)p, n};
  END;
}
int cuMemHostUnregister(void *p) {
  CALL("cuMemHostUnregister", 1)
  NO_CAPTURE
  Range *range = in(pinned, n_pinned, (u64)p);
  if (!range || range->start != (u64)p) { audit.freed_twice++; FAIL(NOT_REGISTERED); }
  if (in_use(range->start, range->n)) audit.unregistered_in_use++;
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
// The device is gone: every call fails with this, and so does what waits.
void standin_lose(int code) {
  pthread_mutex_lock(&lock);
  sticky = code;
  pthread_cond_broadcast(&changed);
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
  pageable = 0, sticky = 0, calls_end = 0, calls[0] = 0, legacy.held = 0;
  if (bytes) budget = bytes;
  pthread_mutex_unlock(&lock);
}
// What was not given back, as `Live` in driver.py.
void standin_live(u64 *n) {
  u64 live_streams = 0;
  for (int i = 0; i < n_streams; i++) live_streams += !streams[i]->dead;
  u64 all[] = {live_handles, n_mappings, n_ranges, n_pinned, live_streams, live_events, retained, taken};
  memcpy(n, all, sizeof all);
}
void standin_audit(u64 *n) { memcpy(n, &audit, sizeof audit); }
void standin_pardon(void) { memset(&audit, 0, sizeof audit); }
u64 standin_pageable(void) { return pageable; }
// For each mapping: address, bytes, what lies there, whether it is accessible.
u64 standin_mapped(u64 *n, u64 room) {
  pthread_mutex_lock(&lock);
  u64 count = 0;
  for (; count < (u64)n_mappings && count < room; count++, n += 4)
    n[0] = mappings[count].start, n[1] = mappings[count].n, n[2] = (u64)mappings[count].physical, n[3] = mappings[count].access;
  pthread_mutex_unlock(&lock);
  return count;
}
// The end of a process whose context was broken: all that it had is gone. None of its threads may be left.
void standin_forget(void) {
  pthread_mutex_lock(&lock);
  for (Physical *x = physical; x; x = x->next) { if (x->fd >= 0) close(x->fd); x->fd = -1, x->maps = 0, x->released = 1; }
  for (int i = 0; i < n_ranges; i++) munmap((void *)ranges[i].start, ranges[i].n);
  for (int i = 0; i < n_streams; i++) streams[i]->dead = 1;
  n_mappings = n_ranges = n_pinned = n_streams = retained = 0;
  legacy.done = legacy.given, taken = live_handles = live_events = 0;
  pthread_mutex_unlock(&lock);
}
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
