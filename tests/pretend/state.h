// What the two halves of the pretend driver share: cuda.c (driver) and cudart.c (runtime) hold one state.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#define API __attribute__((visibility("default")))
typedef uint64_t u64;

enum { OK, INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE = 101, INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500,
       ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, CAPTURE_UNSUPPORTED = 900,
       CAPTURE_INVALIDATED = 901, CAPTURED_EVENT = 907 };
#define TOTAL ((u64)143771 << 20)  // bytes of an H200; only what is written takes memory

// A fault of the program, which a real driver may let pass: a line of the file PRETEND_AUDIT.
void pretend_fault(const char *kind, const char *what);
// Memory: device memory that was allocated, mapped slabs, registered host memory.
enum { DEVICE, HOST };
void pretend_add(u64 p, u64 n, int host);
u64 pretend_drop(u64 p);
void pretend_account(int64_t bytes);
void pretend_free_memory(size_t *free, size_t *total);
int pretend_known(u64 p, u64 n);    // memory of the runtime, allocated and not freed
int pretend_reaches(u64 p, u64 n);  // that, or slabs that are mapped and accessible
// Devices: a machine has PRETEND_DEVICES, of which a process has the first of CUDA_VISIBLE_DEVICES. -1: it has none.
int pretend_device(void);
// Streams and events. `touches` are up to two ranges; none of them: a kernel, which may touch anything.
void *pretend_stream(void);
void *pretend_event(void);
int pretend_end(void *handle);
int pretend_work(void *stream, u64 to, u64 from, u64 n);
int pretend_record(void *event, void *stream);
int pretend_wait(void *stream, void *event);
int pretend_event_done(void *event);
void pretend_stream_done(void *stream);
void pretend_all_done(void);
int pretend_in_use(u64 p, u64 n);  // by work that the host has not waited for
// Captures. Both return an error if this call is forbidden now; the capture is spoilt then.
int pretend_forbidden(const char *call);       // by the modes of capture and thread
int pretend_never_captured(const char *call);  // in every mode
int pretend_exchange(int mode);
