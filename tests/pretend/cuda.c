// A stand-in for libcuda.so.1 with an "H200": what the appliance, torch and Triton ask of the driver. Slabs are
// memfds under mmap, copies are done at once, kernels do nothing (state.h, cudart.c).
#define _GNU_SOURCE
#include "state.h"
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
typedef int Code;
int cudaDeviceGetAttribute(int *, int, int);
#define ALLOWED(call) { Code refused = pretend_forbidden(call); if (refused) return refused; }
#define CONTEXT ((void *)0x77)
static Code broken;  // after an illegal address all fails, until the process ends

// ---- device and context
API Code cuInit(unsigned flags) { return OK; }
API Code cuDriverGetVersion(int *v) { *v = 13000; return OK; }
API Code cuDeviceGet(int *d, int ordinal) { *d = ordinal; return ordinal || pretend_device() < 0 ? INVALID_DEVICE : OK; }
API Code cuDeviceGetCount(int *n) { *n = pretend_device() >= 0; return OK; }
API Code cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "NVIDIA H200"); return OK; }
API Code cuDeviceTotalMem_v2(size_t *n, int d) { size_t free; pretend_free_memory(&free, n); return OK; }
enum { VIRTUAL_MEMORY = 102, HOST_NUMA_ID = 114, MULTICAST = 121 };
API Code cuDeviceGetAttribute(int *v, int a, int d) {
  if (a == VIRTUAL_MEMORY || a == HOST_NUMA_ID || a == MULTICAST) { *v = a == VIRTUAL_MEMORY; return OK; }
  return cudaDeviceGetAttribute(v, a, d);
}
API Code cuDeviceGetUuid_v2(char *u, int d) { memset(u, 7 + pretend_device(), 16); return OK; }
API Code cuCtxGetCurrent(void **c) { *c = CONTEXT; return OK; }
API Code cuCtxSetCurrent(void *c) { return OK; }
API Code cuCtxPushCurrent_v2(void *c) { return OK; }
API Code cuCtxPopCurrent_v2(void **c) { *c = CONTEXT; return OK; }
API Code cuCtxGetDevice(int *d) { *d = 0; return OK; }
API Code cuCtxGetLimit(size_t *v, int limit) { *v = 1 << 20; return OK; }
API Code cuCtxSetLimit(int limit, size_t v) { return OK; }
API Code cuCtxSynchronize(void) {
  Code refused = pretend_never_captured("cuCtxSynchronize");
  if (!refused && !broken) pretend_all_done();
  return refused ? refused : broken;
}
API Code cuDevicePrimaryCtxRetain(void **c, int d) { *c = CONTEXT; return OK; }
API Code cuDevicePrimaryCtxRelease(int d) { return OK; }
API Code cuDevicePrimaryCtxRelease_v2(int d) { return OK; }
API Code cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { *flags = 0, *active = 1; return OK; }
static const struct { Code code; const char *name, *why; } NAMES[] = {
  {OK, "CUDA_SUCCESS", "no error"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
  {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}, {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
  {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
  {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
  {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"}};
API Code cuGetErrorName(Code code, const char **s) {
  *s = "CUDA_ERROR_UNKNOWN";
  for (unsigned i = 0; i < sizeof NAMES / sizeof *NAMES; i++) if (NAMES[i].code == code) *s = NAMES[i].name;
  return OK;
}
API Code cuGetErrorString(Code code, const char **s) {
  *s = "an error that the pretend driver has no words for";
  for (unsigned i = 0; i < sizeof NAMES / sizeof *NAMES; i++) if (NAMES[i].code == code) *s = NAMES[i].why;
  return OK;
}
enum { MEMORY_TYPE = 2, DEVICE_POINTER = 3, DEVICE_ORDINAL = 9 };
API Code cuPointerGetAttribute(void *out, int a, u64 p) {
  if (a == DEVICE_POINTER) *(u64 *)out = p;
  else if (a == MEMORY_TYPE) *(unsigned *)out = 2;
  else if (a == DEVICE_ORDINAL) *(int *)out = 0;
  else *(u64 *)out = 0;
  return OK;
}

// ---- slabs: physical memory, ranges of addresses, and what is mapped where
typedef struct Physical { int fd, maps, released; u64 n; } Physical;
typedef struct { u64 start, n; Physical *physical; int access; } Mapping;
typedef struct { u64 start, n; } Range;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Mapping mappings[131072];
static Range ranges[4096];
static int n_mappings, n_ranges;
#define PAGE ((u64)2 << 20)
static Range *range_of(u64 p) {
  for (int i = 0; i < n_ranges; i++) if (p >= ranges[i].start && p - ranges[i].start < ranges[i].n) return &ranges[i];
  return 0;
}
static Mapping *mapping_of(u64 p) {
  for (int i = 0; i < n_mappings; i++) if (p >= mappings[i].start && p - mappings[i].start < mappings[i].n) return &mappings[i];
  return 0;
}
static void drop(Physical *x) {
  if (!x->released || x->maps) return;
  close(x->fd);
  pretend_account(-(int64_t)x->n);
  free(x);
}
API Code cuMemGetAllocationGranularity(size_t *n, void *properties, int option) { *n = PAGE; return OK; }
API Code cuMemCreate(u64 *handle, size_t n, void *properties, u64 flags) {
  size_t free, total;
  pretend_free_memory(&free, &total);
  if (!n || n % PAGE) return INVALID_VALUE;
  if (n > free) return OUT_OF_MEMORY;
  Physical *x = calloc(1, sizeof *x);
  x->fd = memfd_create("pretend", MFD_CLOEXEC), x->n = n;
  if (x->fd < 0 || ftruncate(x->fd, n)) return OUT_OF_MEMORY;
  pretend_account(n);
  *handle = (u64)x;
  return OK;
}
API Code cuMemRelease(u64 handle) {
  Physical *x = (Physical *)handle;
  pthread_mutex_lock(&lock);
  int twice = x->released++;
  if (!twice) drop(x);
  pthread_mutex_unlock(&lock);
  if (twice) pretend_fault("freed_twice", "cuMemRelease");
  return twice ? INVALID_VALUE : OK;
}
API Code cuMemAddressReserve(u64 *p, size_t n, size_t alignment, u64 at, u64 flags) {
  if (!n || n % PAGE) return INVALID_VALUE;
  u64 step = alignment > PAGE ? alignment : PAGE;
  char *m = mmap(0, n + step, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return OUT_OF_MEMORY;
  char *start = (char *)(((u64)m + step - 1) / step * step);
  if (start > m) munmap(m, start - m);
  if (m + step > start) munmap(start + n, m + step - start);
  pthread_mutex_lock(&lock);
  if (n_ranges == sizeof ranges / sizeof *ranges) abort();
  ranges[n_ranges++] = (Range){*p = (u64)start, n};
  pthread_mutex_unlock(&lock);
  return OK;
}
API Code cuMemAddressFree(u64 p, size_t n) {
  pthread_mutex_lock(&lock);
  Range *range = range_of(p);
  int known = range && range->start == p && range->n == n, mapped = 0;
  for (int i = 0; known && i < n_mappings; i++) mapped |= mappings[i].start >= p && mappings[i].start < p + n;
  if (known && !mapped) { munmap((void *)p, n); *range = ranges[--n_ranges]; }
  pthread_mutex_unlock(&lock);
  if (!known || mapped) pretend_fault(known ? "freed_mapped" : "freed_twice", "cuMemAddressFree");
  return known && !mapped ? OK : INVALID_VALUE;
}
API Code cuMemMap(u64 p, size_t n, size_t offset, u64 handle, u64 flags) {
  Physical *x = (Physical *)handle;
  Code code = OK;
  pthread_mutex_lock(&lock);
  Range *range = range_of(p);
  const char *fault = x->released ? "used_after_free" : 0;
  if (fault || !range || p + n > range->start + range->n || p % PAGE || offset || n != x->n) code = INVALID_VALUE;
  for (u64 at = p; !code && at < p + n; at += PAGE) if (mapping_of(at)) code = INVALID_VALUE, fault = "mapped_twice";
  if (!code && mmap((void *)p, n, PROT_NONE, MAP_SHARED | MAP_FIXED, x->fd, 0) == MAP_FAILED) code = OUT_OF_MEMORY;
  if (!code) {
    if (n_mappings == sizeof mappings / sizeof *mappings) abort();
    mappings[n_mappings++] = (Mapping){p, n, x, 0}, x->maps++;
    pretend_add(p, n, DEVICE);
    pretend_account(-(int64_t)n);  // counted when it was made
  }
  pthread_mutex_unlock(&lock);
  if (fault) pretend_fault(fault, "cuMemMap");
  return code;
}
API Code cuMemSetAccess(u64 p, size_t n, void *descriptor, size_t count) {
  pthread_mutex_lock(&lock);
  Code code = OK;
  for (u64 at = p; !code && at < p + n; at += PAGE) if (!mapping_of(at)) code = INVALID_VALUE;
  for (u64 at = p; !code && at < p + n; at += mapping_of(at)->n) mapping_of(at)->access = 1;
  if (!code) mprotect((void *)p, n, PROT_READ | PROT_WRITE);
  pthread_mutex_unlock(&lock);
  return code;
}
// Whole mappings, one or several. Work in line that the host has not waited for is a fault.
API Code cuMemUnmap(u64 p, size_t n) {
  pthread_mutex_lock(&lock);
  int found = 0, part = 0;
  for (int i = 0; i < n_mappings; i++) {
    Mapping *m = &mappings[i];
    if (m->start >= p + n || m->start + m->n <= p) continue;
    found = 1, part |= m->start < p || m->start + m->n > p + n;
  }
  int busy = found && !part && pretend_in_use(p, n);
  for (int i = n_mappings; !part && i--;) {
    Mapping *m = &mappings[i];
    if (m->start >= p + n || m->start + m->n <= p) continue;
    pretend_account((int64_t)m->n);
    pretend_drop(m->start);
    m->physical->maps--;
    drop(m->physical);
    *m = mappings[--n_mappings];
  }
  if (found && !part) mmap((void *)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  pthread_mutex_unlock(&lock);
  if (busy) pretend_fault("unmapped_in_use", "cuMemUnmap");
  if (part) pretend_fault("unmapped_part", "cuMemUnmap");
  return part ? INVALID_VALUE : OK;
}

// ---- copies. An address of a slab's range where nothing is mapped, or not accessible yet, breaks the context.
static Code usable(u64 p, u64 n) {
  Code code = broken;
  pthread_mutex_lock(&lock);
  if (!code && range_of(p))
    for (u64 at = p; !code && at < p + n;) {
      Mapping *m = mapping_of(at);
      if (!m || !m->access) code = broken = ILLEGAL_ADDRESS; else at = m->start + m->n;
    }
  pthread_mutex_unlock(&lock);
  if (code && code == broken) pretend_fault("illegal_address", "a copy, or what came after one");
  return code;
}
API int pretend_reaches(u64 p, u64 n) {
  pthread_mutex_lock(&lock);
  int slabs = range_of(p) != 0, there = slabs;
  for (u64 at = p; there && at < p + n;) {
    Mapping *m = mapping_of(at);
    if (!m || !m->access) there = 0; else at = m->start + m->n;
  }
  pthread_mutex_unlock(&lock);
  return slabs ? there : pretend_known(p, n);
}
API Code cuMemcpyAsync(u64 to, u64 from, size_t n, void *s) {
  Code code = usable(to, n);
  if (!code) code = usable(from, n);
  if (!code) code = pretend_work(s, to, from, n);
  if (!code) memmove((void *)to, (void *)from, n);
  return code;
}
typedef struct {  // CUDA_MEMCPY2D
  size_t from_x, from_y; int from_type; const void *from_host; u64 from; void *from_array; size_t from_pitch;
  size_t to_x, to_y; int to_type; void *to_host; u64 to; void *to_array; size_t to_pitch, width, height;
} Area;
API Code cuMemcpy2DAsync_v2(const Area *a, void *s) {
  Code code = OK;
  for (size_t i = 0; !code && i < a->height; i++) code = cuMemcpyAsync(a->to + i * a->to_pitch, a->from + i * a->from_pitch, a->width, s);
  return code;
}
API Code cuMemcpyDtoH_v2(void *to, u64 from, size_t n) { memmove(to, (void *)from, n); return OK; }
API Code cuMemcpyHtoD_v2(u64 to, const void *from, size_t n) { memmove((void *)to, from, n); return OK; }
API Code cuMemsetD32Async(u64 p, unsigned v, size_t n, void *s) { for (size_t i = 0; i < n; i++) ((unsigned *)p)[i] = v; return pretend_work(s, p, 0, 4 * n); }
API Code cuMemGetInfo_v2(size_t *free, size_t *total) { pretend_free_memory(free, total); return OK; }

// ---- registered host memory
static Range pinned[65536];
static int n_pinned;
API Code cuMemHostRegister_v2(void *p, size_t n, unsigned flags) {
  ALLOWED("cuMemHostRegister")
  const char *slower = getenv("PRETEND_REGISTER_US");
  if (slower) usleep(atoi(slower));
  pthread_mutex_lock(&lock);
  int twice = 0;
  for (int i = 0; i < n_pinned; i++) twice |= (u64)p < pinned[i].start + pinned[i].n && pinned[i].start < (u64)p + n;
  if (!twice) {
    if (n_pinned == sizeof pinned / sizeof *pinned) abort();
    pinned[n_pinned++] = (Range){(u64)p, n};
    pretend_add((u64)p, n, HOST);
  }
  pthread_mutex_unlock(&lock);
  if (twice) pretend_fault("registered_twice", "cuMemHostRegister");
  return twice ? ALREADY_REGISTERED : OK;
}
API Code cuMemHostUnregister(void *p) {
  ALLOWED("cuMemHostUnregister")
  pthread_mutex_lock(&lock);
  u64 n = 0;
  for (int i = n_pinned; !n && i--;) if (pinned[i].start == (u64)p) { n = pinned[i].n; pinned[i] = pinned[--n_pinned]; }
  int busy = n && pretend_in_use((u64)p, n);
  if (n) pretend_drop((u64)p);
  pthread_mutex_unlock(&lock);
  if (!n) pretend_fault("freed_twice", "cuMemHostUnregister");
  if (busy) pretend_fault("unregistered_in_use", "cuMemHostUnregister");
  return n ? OK : NOT_REGISTERED;
}

// ---- streams and events
API Code cuStreamCreate(void **s, unsigned flags) { *s = pretend_stream(); return OK; }
API Code cuStreamDestroy_v2(void *s) { return pretend_end(s); }
API Code cuStreamSynchronize(void *s) { ALLOWED("cuStreamSynchronize") pretend_stream_done(s); return broken; }
API Code cuStreamWaitEvent(void *s, void *e, unsigned flags) { return pretend_wait(s, e); }
API Code cuThreadExchangeStreamCaptureMode(int *mode) { *mode = pretend_exchange(*mode); return OK; }
int cudaEventDestroy(void *);
API Code cuEventCreate(void **e, unsigned flags) { *e = pretend_event(); return OK; }
API Code cuEventDestroy_v2(void *e) { return cudaEventDestroy(e); }
API Code cuEventRecord(void *e, void *s) { return broken ? broken : pretend_record(e, s); }
API Code cuEventSynchronize(void *e) { ALLOWED("cuEventSynchronize") return broken ? broken : pretend_event_done(e); }
API Code cuEventQuery(void *e) { ALLOWED("cuEventQuery") return broken ? broken : pretend_event_done(e); }
API Code cuEventElapsedTime(float *ms, void *a, void *b) { *ms = 0.01f; return OK; }
API Code cuEventElapsedTime_v2(float *ms, void *a, void *b) { *ms = 0.01f; return OK; }
API Code cuIpcGetEventHandle(char *handle, void *e) { memset(handle, 0, 64); memcpy(handle, &e, sizeof e); return OK; }

// ---- modules and launches
API Code cuModuleLoad(void **m, const char *file) { *m = (void *)0x88; return OK; }
API Code cuModuleLoadData(void **m, const void *image) { *m = (void *)0x88; return OK; }
API Code cuModuleLoadDataEx(void **m, const void *image, unsigned n, void *options, void *values) { *m = (void *)0x88; return OK; }
API Code cuModuleUnload(void *m) { return OK; }
API Code cuModuleGetFunction(void **f, void *m, const char *name) { *f = (void *)0x99; return OK; }
API Code cuModuleGetGlobal_v2(u64 *p, size_t *n, void *m, const char *name) { static char zeros[4096]; *p = (u64)zeros; if (n) *n = sizeof zeros; return OK; }
enum { MAX_THREADS = 0, REGISTERS = 4 };
API Code cuFuncGetAttribute(int *v, int a, void *f) { *v = a == MAX_THREADS ? 1024 : a == REGISTERS ? 64 : 0; return OK; }
API Code cuFuncSetAttribute(void *f, int a, int v) { return OK; }
API Code cuFuncSetCacheConfig(void *f, int c) { return OK; }
API Code cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned n, void *s, void **p, void **x) { return broken ? broken : pretend_work(s, 0, 0, 0); }
typedef struct { unsigned grid[3], block[3], shared; void *stream; } Launch;
API Code cuLaunchKernelEx(Launch *launch, void *f, void **p, void **x) { return broken ? broken : pretend_work(launch->stream, 0, 0, 0); }
API Code cuLaunchCooperativeKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned n, void *s, void **p) { return pretend_work(s, 0, 0, 0); }
API Code cuOccupancyMaxActiveClusters(int *n, void *f, void *c) { *n = 16; return OK; }
API Code cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t s) { *n = 2; return OK; }
API Code cuTensorMapEncodeTiled(void *m) { return OK; }

// ---- entry points. A name of the second version has precedence, as with a current driver.
API Code cuGetProcAddress_v2(const char *name, void **f, int version, u64 flags, int *status) {
  static void *self;
  Dl_info here;
  if (!self && dladdr((void *)cuInit, &here)) self = dlopen(here.dli_fname, RTLD_NOW);
  char second[200];
  snprintf(second, sizeof second, "%s_v2", name);
  if (!(*f = dlsym(self, second))) *f = dlsym(self, name);
  if (status) *status = *f ? 0 : 1;
  return *f ? OK : NOT_FOUND;
}
API Code cuGetProcAddress(const char *name, void **f, int version, u64 flags) { return cuGetProcAddress_v2(name, f, version, flags, 0); }
#include "cuda_stubs.inc"
