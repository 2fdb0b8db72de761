// A stand-in for libnvidia-ml.so.1: PRETEND_DEVICES, or one, "NVIDIA H200" of compute capability 9.0.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define API __attribute__((visibility("default")))
typedef void *Device;
typedef unsigned long long u64;
#define FIRST ((Device)0x100)
#define NUMBER(d) ((unsigned)((char *)(d) - (char *)FIRST))
static unsigned devices(void) { const char *all = getenv("PRETEND_DEVICES"); return all ? atoi(all) : 1; }
static int device(unsigned i, Device *d) { *d = (char *)FIRST + i; return i < devices() ? 0 : 2; }
API int nvmlInit_v2(void) { return 0; }
API int nvmlInitWithFlags(unsigned flags) { return 0; }
API int nvmlShutdown(void) { return 0; }
API int nvmlDeviceGetCount_v2(unsigned *n) { *n = devices(); return 0; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned i, Device *d) { return device(i, d); }
API int nvmlDeviceGetHandleByUUID(const char *uuid, Device *d) { return device(strtoul(uuid + strlen("GPU-"), 0, 16) % 0x100 - 7, d); }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Device *d) { return device(strtol(strchr(bus, ':') + 1, 0, 16) - 1, d); }
API int nvmlDeviceGetIndex(Device d, unsigned *i) { *i = NUMBER(d); return 0; }
API int nvmlDeviceGetName(Device d, char *s, unsigned n) { snprintf(s, n, "NVIDIA H200"); return 0; }
API int nvmlDeviceGetUUID(Device d, char *s, unsigned n) { unsigned b = 7 + NUMBER(d), w = b << 8 | b; snprintf(s, n, "GPU-%04x%04x-%04x-%04x-%04x-%04x%04x%04x", w, w, w, w, w, w, w, w); return 0; }
API int nvmlDeviceGetCudaComputeCapability(Device d, int *major, int *minor) { *major = 9, *minor = 0; return 0; }
API int nvmlDeviceGetMemoryInfo(Device d, u64 *m) { m[0] = 143771ull << 20, m[1] = 143000ull << 20, m[2] = 771ull << 20; return 0; }
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
API int nvmlDeviceGetPciInfo_v3(Device d, Pci *p) {
  *p = (Pci){.bus = 1 + NUMBER(d)};
  snprintf(p->legacy, sizeof p->legacy, "0000:%02x:00.0", p->bus);
  snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02x:00.0", p->bus);
  return 0;
}
API int nvmlDeviceGetComputeRunningProcesses_v3(Device d, unsigned *n, void *list) { *n = 0; return 0; }
API int nvmlDeviceGetPersistenceMode(Device d, int *on) { *on = 1; return 0; }
API int nvmlSystemGetDriverVersion(char *s, unsigned n) { snprintf(s, n, "580.0 (pretend)"); return 0; }
API int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return 0; }
// No event ever comes; a wait lasts as long as was asked.
enum { NOT_SUPPORTED = 3, TIMEOUT = 10 };
API int nvmlEventSetCreate(void **set) { *set = FIRST; return 0; }
API int nvmlEventSetFree(void *set) { return 0; }
API int nvmlDeviceRegisterEvents(Device d, u64 events, void *set) { return 0; }
API int nvmlEventSetWait_v2(void *set, void *event, unsigned milliseconds) { usleep(milliseconds * 1000); return TIMEOUT; }
API int nvmlDeviceGetUtilizationRates(Device d, void *rates) { return NOT_SUPPORTED; }
API int nvmlDeviceGetPowerUsage(Device d, unsigned *milliwatts) { return NOT_SUPPORTED; }
API int nvmlDeviceGetTemperature(Device d, int sensor, unsigned *degrees) { return NOT_SUPPORTED; }
API int nvmlDeviceGetTotalEccErrors(Device d, int type, int counter, u64 *n) { return NOT_SUPPORTED; }
API const char *nvmlErrorString(int code) { return "an error of the pretend NVML"; }
