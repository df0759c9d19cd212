/* A driver whose device is this process's memory. Kernels do nothing,
   but for one. VERSION is its CUDA. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long address;

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}
static void *handle(void) { return malloc(1); }
static void *memory(size_t bytes) {
    void *at = mmap(0, bytes ? bytes : 1, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? 0 : at;
}

int cuInit(unsigned flags) { return number("STUB_INIT", 0); }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "words of the stub"; return 0; }
int cuDeviceGetCount(int *count) { *count = number("STUB_GPUS", 1); return 0; }
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal < number("STUB_GPUS", 1) ? 0 : 101;
}
int cuDeviceGetName(char *name, int length, int device) {
    strncpy(name, "NVIDIA Stub", length);
    return 0;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = i + 16 * device;
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    int capability = number("STUB_CAPABILITY", 90);
    switch (attribute) {
    case 75: *value = capability / 10; break;
    case 76: *value = capability % 10; break;
    case 16: *value = 4; break;
    default: *value = 0;
    }
    return 0;
}
int cuDeviceGetP2PAttribute(int *value, int attribute, int a, int b) { *value = 1; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 64ull << 30; return 0; }
int cuMemGetInfo_v2(size_t *available, size_t *total) {
    *total = (size_t)number("STUB_MIB", 64 << 10) << 20;
    *available = *total / 16 * 15;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = handle(); return 0; }
int cuCtxGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return 0; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = handle(); return 0; }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int p) {
    *stream = handle();
    return 0;
}
int cuStreamEndCapture(void *stream, void **graph) { *graph = handle(); return 0; }
int cuGraphGetNodes(void *graph, void **nodes, size_t *count) { *count = 0; return 0; }
int cuGraphInstantiateWithFlags(void **made, void *graph, address flags) {
    *made = handle();
    return 0;
}
int cuEventCreate(void **event, unsigned flags) { *event = handle(); return 0; }
int cuEventElapsedTime(float *milliseconds, void *a, void *b) { *milliseconds = 0.25; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = handle(); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = strdup(name);
    return 0;
}
/* One of our kernels does something, because a step is not over without it: `decide` counts. */
int cuLaunchKernel(const char *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                   unsigned by, unsigned bz, unsigned shared, void *s, void **given, void **extra) {
    if (!strcmp(function, "decide")) {
        double *numbers = *(double **)given[1], *control = *(double **)given[2];
        numbers[13] = ++control[3];
        usleep(number("STUB_STEP_MICROSECONDS", 0));
    }
    return 0;
}
int cuMemAlloc_v2(address *at, size_t bytes) {
    *at = (address)memory(bytes);
    return *at ? 0 : 2;
}
int cuMemHostAlloc(void **at, size_t bytes, unsigned flags) {
    *at = memory(bytes);
    return *at ? 0 : 2;
}
int cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) {
    return number("STUB_REGISTER", 0);
}
int cuMemHostGetDevicePointer_v2(address *at, void *host, unsigned flags) {
    *at = (address)host;
    return 0;
}
int cuMemcpyAsync(address to, address from, size_t n, void *s) {
    memmove((void *)to, (void *)from, n);
    return 0;
}
int cuMemcpyHtoD_v2(address to, const void *from, size_t n) {
    memcpy((void *)to, from, n);
    return 0;
}
int cuMemcpyDtoH_v2(void *to, address from, size_t n) {
    memcpy(to, (void *)from, n);
    return 0;
}
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t n, void *s) {
    memcpy((void *)to, from, n);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t n, void *s) {
    memcpy(to, (void *)from, n);
    return 0;
}
int cuMemcpyDtoDAsync_v2(address to, address from, size_t n, void *s) {
    memmove((void *)to, (void *)from, n);
    return 0;
}
int cuMemsetD8Async(address to, unsigned char byte, size_t n, void *s) {
    /* Whole pages of zeros are given back: an arena is larger than this machine's memory. */
    address page = 4096, first = (to + page - 1) & ~(page - 1), end = (to + n) & ~(page - 1);
    if (byte || first >= end) {
        memset((void *)to, byte, n);
        return 0;
    }
    memset((void *)to, 0, first - to);
    madvise((void *)first, end - first, MADV_DONTNEED);
    memset((void *)end, 0, to + n - end);
    return 0;
}
int cuMemGetAllocationGranularity(size_t *bytes, const void *p, int kind) {
    *bytes = 2 << 20;
    return 0;
}
int cuMemAddressReserve(address *at, size_t n, size_t align, address hint, address flags) {
    *at = (address)memory(n);
    return *at ? 0 : 2;
}
int cuMemCreate(address *made, size_t bytes, const void *p, address flags) { *made = 1; return 0; }
