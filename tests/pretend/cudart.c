// A stand-in for libcudart.so.13 with an "H200": device memory is host memory, copies are done at once,
// kernels do nothing. It keeps the state that both halves of the pretend driver share (state.h): what memory
// there is, what work the host knows to be done, captures, and faults of the program.
#define _GNU_SOURCE
#include "state.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#define LOCKED pthread_mutex_lock(&lock)
#define UNLOCK pthread_mutex_unlock(&lock)
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ---- faults
API void pretend_fault(const char *kind, const char *what) {
  fprintf(stderr, "pretend driver: %s: %s\n", kind, what);
  const char *path = getenv("PRETEND_AUDIT");
  FILE *file = path ? fopen(path, "a") : 0;
  if (!file) return;
  fprintf(file, "%d\t%s\t%s\n", getpid(), kind, what);
  fclose(file);
}

// ---- memory
typedef struct { u64 start, n; int host; } Block;
static Block *blocks;
static int n_blocks, room;
static u64 used = (u64)600 << 20;  // the context
API void pretend_add(u64 p, u64 n, int host) {
  LOCKED;
  if (n_blocks == room) blocks = realloc(blocks, (room = room * 2 + 256) * sizeof *blocks);
  blocks[n_blocks++] = (Block){p, n, host};
  if (!host) used += n;
  UNLOCK;
}
API u64 pretend_drop(u64 p) {
  u64 n = 0;
  LOCKED;
  for (int i = n_blocks; i-- && !n;)
    if (blocks[i].start == p) {
      n = blocks[i].n;
      if (!blocks[i].host) used -= n;
      blocks[i] = blocks[--n_blocks];
    }
  UNLOCK;
  return n;
}
API void pretend_account(int64_t bytes) { LOCKED; used += bytes; UNLOCK; }
API void pretend_free_memory(size_t *free, size_t *total) { LOCKED; *total = TOTAL, *free = TOTAL - used; UNLOCK; }
static int find(u64 p, Block *found) {
  int there = 0;
  LOCKED;
  for (int i = 0; i < n_blocks && !there; i++)
    if (p >= blocks[i].start && p - blocks[i].start < blocks[i].n) *found = blocks[i], there = 1;
  UNLOCK;
  return there;
}

API int pretend_known(u64 p, u64 n) {
  Block block;
  return find(p, &block) && p + n <= block.start + block.n;
}
API int pretend_device(void) {
  const char *all = getenv("PRETEND_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
  int number = visible ? *visible ? atoi(visible) : -1 : 0;
  return number < (all ? atoi(all) : 1) ? number : -1;
}

// ---- streams, events: numbers of operations, and which of them the host has waited for
typedef struct Op { u64 at, to, from, n; } Op;
typedef struct Wait { u64 at; struct Stream *other; u64 seq; } Wait;
typedef struct Stream { u64 given, known, kernel; Op *ops; Wait *waits; int n_ops, n_waits, op_room, wait_room, captured, dead, event; } Stream;
typedef struct Event { Stream *stream; u64 seq; int captured, dead; } Event;
static Stream legacy, *streams[65536];
static int n_streams;
// One capture at a time. What it forbids is forbidden to the thread that captures, and to all others if its mode
// is global, unless a thread's own mode is relaxed.
static struct { Stream *stream; pthread_t thread; int mode, spoilt; } capture;
static __thread int thread_mode;
static Stream *line(void *s) { return (u64)s <= 2 ? &legacy : s; }
API void *pretend_stream(void) {
  Stream *made = calloc(1, sizeof *made);
  LOCKED;
  if (n_streams == sizeof streams / sizeof *streams) abort();
  streams[n_streams++] = made;
  UNLOCK;
  return made;
}
API void *pretend_event(void) { return calloc(1, sizeof(Event)); }
// Kept when they are gone: others wait for what was in line, and a second end is a fault.
static int ended(int *dead) {
  if (*dead) { pretend_fault("freed_twice", "a stream or an event"); return INVALID_HANDLE; }
  *dead = 1;
  return OK;
}
API int pretend_end(void *s) { return ended(&line(s)->dead); }
static void learn(Stream *s, u64 seq) {  // all before `seq` is done, and what that had to wait for
  if (s->known >= seq) return;
  s->known = seq;
  int left = 0;
  for (int i = 0; i < s->n_ops; i++) if (s->ops[i].at > seq) s->ops[left++] = s->ops[i];
  s->n_ops = left;
  for (int i = left = 0, n = s->n_waits; i < n; i++) {
    Wait wait = s->waits[i];
    if (wait.at > seq) s->waits[left++] = wait; else if (wait.other != s) learn(wait.other, wait.seq);
  }
  s->n_waits = left;
}
API int pretend_work(void *stream, u64 to, u64 from, u64 n) {
  LOCKED;
  Stream *s = line(stream);
  int code = s->dead ? INVALID_HANDLE : s->captured && capture.spoilt ? CAPTURE_INVALIDATED : OK;
  if (!code && !s->captured) {
    s->given++;
    if (!n) s->kernel = s->given;
    else {
      if (s->n_ops == s->op_room) s->ops = realloc(s->ops, (s->op_room = s->op_room * 2 + 64) * sizeof *s->ops);
      s->ops[s->n_ops++] = (Op){s->given, to, from, n};
    }
  }
  UNLOCK;
  if (code == INVALID_HANDLE) pretend_fault("used_after_free", "a stream");
  return code;
}
API int pretend_record(void *event, void *stream) {
  LOCKED;
  Event *e = event;
  Stream *s = line(stream);
  e->stream = s, e->seq = s->given, e->captured = s->captured;
  UNLOCK;
  return OK;
}
API int pretend_wait(void *stream, void *event) {
  LOCKED;
  Event *e = event;
  Stream *s = line(stream);
  if (e->captured && capture.stream) s->captured = 1;  // it joins the capture
  else if (e->stream && !s->captured) {
    if (s->n_waits == s->wait_room) s->waits = realloc(s->waits, (s->wait_room = s->wait_room * 2 + 64) * sizeof *s->waits);
    s->waits[s->n_waits++] = (Wait){++s->given, e->stream, e->seq};
  }
  UNLOCK;
  return OK;
}
API int pretend_event_done(void *event) {
  LOCKED;
  Event *e = event;
  int code = e->captured && capture.stream ? CAPTURED_EVENT : OK;
  if (code) capture.spoilt = 1; else if (e->stream) learn(e->stream, e->seq);
  UNLOCK;
  return code;
}
API void pretend_stream_done(void *s) { LOCKED; learn(line(s), line(s)->given); UNLOCK; }
API void pretend_all_done(void) {
  LOCKED;
  learn(&legacy, legacy.given);
  for (int i = 0; i < n_streams; i++) learn(streams[i], streams[i]->given);
  UNLOCK;
}
static int overlap(u64 a, u64 n, u64 b, u64 m) { return a && a < b + m && b < a + n; }
API int pretend_in_use(u64 p, u64 n) {
  int found = 0;
  LOCKED;
  for (int i = -1; i < n_streams && !found; i++) {
    Stream *s = i < 0 ? &legacy : streams[i];
    found = s->kernel > s->known;
    for (int k = 0; k < s->n_ops && !found; k++) found = overlap(s->ops[k].to, s->ops[k].n, p, n) || overlap(s->ops[k].from, s->ops[k].n, p, n);
  }
  UNLOCK;
  return found;
}
static int spoil(const char *call) {
  capture.spoilt = 1;
  pretend_fault("forbidden_in_capture", call);
  return CAPTURE_UNSUPPORTED;
}
API int pretend_forbidden(const char *call) {
  if (!capture.stream || capture.mode == cudaStreamCaptureModeRelaxed || thread_mode == cudaStreamCaptureModeRelaxed) return OK;
  int local = capture.mode == cudaStreamCaptureModeThreadLocal || thread_mode == cudaStreamCaptureModeThreadLocal;
  return local && !pthread_equal(capture.thread, pthread_self()) ? OK : spoil(call);
}
API int pretend_never_captured(const char *call) { return capture.stream ? spoil(call) : OK; }
API int pretend_exchange(int mode) { int before = thread_mode; thread_mode = mode; return before; }
#define ALLOWED(call) { int refused = pretend_forbidden(call); if (refused) return refused; }

// ---- kernels: their names are registered as libraries are loaded; launches are work without an effect
API void **__cudaRegisterFatBinary(void *image) { void **handle = malloc(sizeof *handle); *handle = image; return handle; }
API void __cudaRegisterFatBinaryEnd(void **h) {}
API void __cudaUnregisterFatBinary(void **h) {}
API char __cudaInitModule(void **h) { return 1; }
API void __cudaRegisterFunction(void **h, const char *f, char *g, const char *name, int limit, uint3 *a, uint3 *b, dim3 *c, dim3 *d, int *size) {}
API void __cudaRegisterVar(void **h, char *v, char *a, const char *name, int ext, size_t n, int constant, int global) {}
static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration;
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t n, void *s) { configuration.grid = g, configuration.block = b, configuration.shared = n, configuration.stream = s; return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *n, void *s) { *g = configuration.grid, *b = configuration.block, *n = configuration.shared, *(void **)s = configuration.stream; return OK; }
API cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return OK; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return pretend_work(s, 0, 0, 0); }
API cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return pretend_work(s, 0, 0, 0); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return pretend_work(c->stream, 0, 0, 0); }
API cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return pretend_work(s, 0, 0, 0); }
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 64, a->ptxVersion = a->binaryVersion = 90, a->maxDynamicSharedSizeBytes = 232448;
  return OK;
}
API cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { return OK; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) { *n = 2; return OK; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned flags) { *n = 2; return OK; }

// ---- the device
API cudaError_t cudaGetDeviceCount(int *n) { *n = pretend_device() >= 0; return *n ? OK : cudaErrorNoDevice; }
API cudaError_t cudaGetDevice(int *d) { *d = 0; return OK; }
API cudaError_t cudaSetDevice(int d) { return d ? cudaErrorInvalidDevice : OK; }
API cudaError_t cudaDeviceSynchronize(void) {
  int refused = pretend_never_captured("cudaDeviceSynchronize");
  if (!refused) pretend_all_done();
  return refused;
}
API cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; return OK; }
API cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; return OK; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *low, int *high) { if (low) *low = 0; if (high) *high = -5; return OK; }
API cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", 1 + pretend_device()); return OK; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return OK; }
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H200");
  memset(p->uuid.bytes, 7 + pretend_device(), 16);
  p->totalGlobalMem = TOTAL, p->sharedMemPerBlock = 49152, p->regsPerBlock = 65536, p->warpSize = 32, p->memPitch = 2147483647;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535, p->totalConstMem = 65536;
  p->major = 9, p->minor = 0, p->textureAlignment = 512, p->multiProcessorCount = 132, p->pciBusID = 1 + pretend_device(), p->asyncEngineCount = 3;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->cooperativeLaunch = 1;
  p->memoryBusWidth = 6144, p->l2CacheSize = 62914560, p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerMultiprocessor = 233472, p->regsPerMultiprocessor = 65536, p->sharedMemPerBlockOptin = 232448;
  p->maxBlocksPerMultiProcessor = 32, p->reservedSharedMemPerBlock = 1024;
  p->streamPrioritiesSupported = p->memoryPoolsSupported = p->clusterLaunch = 1;
  return OK;
}
API cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  static const struct { enum cudaDeviceAttr name; int value; } KNOWN[] = {
    {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxBlockDimX, 1024}, {cudaDevAttrMaxBlockDimY, 1024}, {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrMaxGridDimY, 65535}, {cudaDevAttrMaxGridDimZ, 65535},
    {cudaDevAttrMaxSharedMemoryPerBlock, 49152}, {cudaDevAttrWarpSize, 32}, {cudaDevAttrMaxRegistersPerBlock, 65536},
    {cudaDevAttrClockRate, 1980000}, {cudaDevAttrMemoryClockRate, 3201000}, {cudaDevAttrGlobalMemoryBusWidth, 6144},
    {cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrL2CacheSize, 62914560}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448}, {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
    {cudaDevAttrMaxRegistersPerMultiprocessor, 65536}, {cudaDevAttrMaxBlocksPerMultiprocessor, 32}, {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrCooperativeLaunch, 1}, {cudaDevAttrMemoryPoolsSupported, 1}, {cudaDevAttrConcurrentKernels, 1},
    {cudaDevAttrCanMapHostMemory, 1}, {cudaDevAttrManagedMemory, 1}};
  *v = 0;
  for (unsigned i = 0; i < sizeof KNOWN / sizeof *KNOWN; i++) if (KNOWN[i].name == a) *v = KNOWN[i].value;
  return OK;
}

// ---- memory of the runtime
#define PAGE ((u64)2 << 20)
API cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { pretend_free_memory(free, total); return OK; }
API cudaError_t cudaMalloc(void **p, size_t n) {
  ALLOWED("cudaMalloc")
  *p = 0;
  if (!n) return OK;
  n = (n + 4095) & ~(size_t)4095;
  if (n > TOTAL - used) return OUT_OF_MEMORY;
  char *m = mmap(0, n + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return OUT_OF_MEMORY;
  char *start = (char *)(((u64)m + PAGE - 1) & ~(PAGE - 1));
  if (start > m) munmap(m, start - m);
  if (m + PAGE > start) munmap(start + n, m + PAGE - start);
  pretend_add((u64)start, n, DEVICE);
  *p = start;
  return OK;
}
API cudaError_t cudaFree(void *p) {
  if (!p) return OK;
  ALLOWED("cudaFree")
  pretend_all_done();
  u64 n = pretend_drop((u64)p);
  if (!n) { pretend_fault("freed_twice", "cudaFree"); return INVALID_VALUE; }
  munmap(p, n);
  return OK;
}
API cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return cudaMalloc(p, n); }
API cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
API cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) {
  ALLOWED("cudaHostAlloc")
  n = (n + 4095) & ~(size_t)4095;
  if (!(*p = aligned_alloc(4096, n))) return OUT_OF_MEMORY;
  memset(*p, 0, n);
  pretend_add((u64)*p, n, HOST);
  return OK;
}
API cudaError_t cudaFreeHost(void *p) {
  ALLOWED("cudaFreeHost")
  if (!pretend_drop((u64)p)) { pretend_fault("freed_twice", "cudaFreeHost"); return INVALID_VALUE; }
  free(p);
  return OK;
}
API cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags) { ALLOWED("cudaHostRegister") pretend_add((u64)p, n, HOST); return OK; }
API cudaError_t cudaHostUnregister(void *p) {
  ALLOWED("cudaHostUnregister")
  if (!pretend_drop((u64)p)) { pretend_fault("freed_twice", "cudaHostUnregister"); return NOT_REGISTERED; }
  return OK;
}
API cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned flags) { *d = h; return OK; }
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  Block block;
  memset(a, 0, sizeof *a);
  if (!find((u64)p, &block)) { a->type = cudaMemoryTypeUnregistered, a->device = -2; return OK; }
  a->type = block.host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->devicePointer = (void *)p, a->hostPointer = block.host ? (void *)p : 0;
  return OK;
}
API cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) { memmove(to, from, n); return OK; }
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
  int code = pretend_work(s, (u64)to, (u64)from, n);
  if (!code) memmove(to, from, n);
  return code;
}
API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, enum cudaMemcpyKind k, cudaStream_t s) {
  int code = height ? pretend_work(s, (u64)to, (u64)from, (height - 1) * to_pitch + width) : OK;
  for (size_t i = 0; !code && i < height; i++) memmove((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
  return code;
}
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t n, size_t offset, enum cudaMemcpyKind k) { return OK; }
#define MOST_SET ((size_t)256 << 20)  // more would only make pages of zeros
API cudaError_t cudaMemset(void *p, int v, size_t n) { if (n < MOST_SET) memset(p, v, n); return OK; }
API cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) {
  int code = pretend_work(s, (u64)p, 0, n);
  return code ? code : cudaMemset(p, v, n);
}
API cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) { static char zeros[1 << 16]; *p = zeros; return OK; }

// ---- streams, events, graphs
static u64 graphs = 0x1000;
API cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = pretend_stream(); return OK; }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { *s = pretend_stream(); return OK; }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int p) { *s = pretend_stream(); return OK; }
API cudaError_t cudaStreamDestroy(cudaStream_t s) { return pretend_end(s); }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; return OK; }
API cudaError_t cudaStreamSynchronize(cudaStream_t s) { ALLOWED("cudaStreamSynchronize") pretend_stream_done(s); return OK; }
API cudaError_t cudaStreamQuery(cudaStream_t s) { ALLOWED("cudaStreamQuery") pretend_stream_done(s); return OK; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { return pretend_wait(s, e); }
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *data, unsigned flags) { f(s, cudaSuccess, data); return OK; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) { f(data); return OK; }
API cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = pretend_event(); return OK; }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = pretend_event(); return OK; }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { return ended(&((Event *)e)->dead); }
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return pretend_record(e, s); }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return pretend_record(e, s); }
API cudaError_t cudaEventSynchronize(cudaEvent_t e) { ALLOWED("cudaEventSynchronize") return pretend_event_done(e); }
API cudaError_t cudaEventQuery(cudaEvent_t e) { ALLOWED("cudaEventQuery") return pretend_event_done(e); }
API cudaError_t cudaEventElapsedTime(float *t, cudaEvent_t a, cudaEvent_t b) { *t = 1; return OK; }
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
  LOCKED;
  int code = (u64)s <= 2 || capture.stream ? ILLEGAL_STATE : OK;
  if (!code) capture.stream = line(s), capture.thread = pthread_self(), capture.mode = mode, capture.spoilt = 0, line(s)->captured = 1;
  UNLOCK;
  // So that other threads meet it: it lasts as long as a pass of kernels that do nothing.
  const char *longer = getenv("PRETEND_CAPTURE_US");
  if (!code && longer) usleep(atoi(longer));
  return code;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
  LOCKED;
  int code = capture.stream != line(s) ? ILLEGAL_STATE : capture.spoilt ? CAPTURE_INVALIDATED : OK;
  if (code != ILLEGAL_STATE) {
    for (int i = 0; i < n_streams; i++) streams[i]->captured = 0;
    capture.stream = 0;
  }
  *g = code ? 0 : (cudaGraph_t)(graphs += 16);
  UNLOCK;
  return code;
}
static enum cudaStreamCaptureStatus capturing(cudaStream_t s) {
  return !line(s)->captured ? cudaStreamCaptureStatusNone : capture.spoilt ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = capturing(s); return OK; }
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
  *c = capturing(s);
  if (id) *id = 1;
  if (g) *g = (cudaGraph_t)1;
  if (d) *d = 0;
  if (e) *e = 0;
  if (n) *n = 0;
  return OK;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { *mode = pretend_exchange(*mode); return OK; }
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long flags) { *x = (cudaGraphExec_t)(graphs += 16); return OK; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { *n = 1; return OK; }
static void note_launched(cudaGraphExec_t g) {  // a line of the file PRETEND_GRAPHS, the first time; for 65536 graphs of a process
  static char launched[1 << 16];
  u64 number = (u64)g / 16 % sizeof launched;
  const char *path = launched[number] ? 0 : getenv("PRETEND_GRAPHS");
  FILE *file = path ? fopen(path, "a") : 0;
  launched[number] = 1;
  if (!file) return;
  fprintf(file, "%d\t%lu\n", getpid(), (unsigned long)number);
  fclose(file);
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s) { note_launched(g); return pretend_work(s, 0, 0, 0); }

// ---- errors, entry points
API const char *cudaGetErrorName(cudaError_t e) { return e ? "cudaErrorOfThePretendDriver" : "cudaSuccess"; }
API const char *cudaGetErrorString(cudaError_t e) {
  return e == OUT_OF_MEMORY ? "out of memory" : e == CAPTURE_UNSUPPORTED ? "operation not permitted when stream is capturing"
       : e == CAPTURE_INVALIDATED ? "operation failed due to a previous error during capture" : e ? "an error of the pretend driver" : "no error";
}
API cudaError_t cudaGetLastError(void) { return OK; }
API cudaError_t cudaPeekAtLastError(void) { return OK; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *r) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  char second[200];
  snprintf(second, sizeof second, "%s_v2", name);
  if (!(*f = dlsym(driver, second))) *f = dlsym(driver, name);
  if (r) *r = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!*f) fprintf(stderr, "pretend driver: no entry %s\n", name);
  return OK;
}
API cudaError_t cudaGetDriverEntryPoint(const char *name, void **f, unsigned long long flags, enum cudaDriverEntryPointQueryResult *r) { return cudaGetDriverEntryPointByVersion(name, f, 0, flags, r); }
