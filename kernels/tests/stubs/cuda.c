/* A driver whose device is this process's memory. Kernels do nothing,
   but for one. VERSION is its CUDA.
   Between the begin and the end of a capture nothing is done, and a launch of the graph does it. */
#define _GNU_SOURCE
#include <stdio.h>
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
/* A page before it says how long it is. */
enum { PAGE = 4096 };
static void *memory(size_t bytes) {
    char *at = mmap(0, PAGE + bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return 0;
    *(size_t *)at = bytes;
    return at + PAGE;
}
/* What is used behind this faults. */
static void give_back(void *at) {
    char *from = (char *)at - PAGE;
    if (at) munmap(from, PAGE + *(size_t *)from);
}


/* What a stream does, now or with a graph: bytes that move or are set, or a kernel. */
struct work {
    int kernel;
    address to, from;
    size_t bytes;
    unsigned char byte;
    double *numbers, *control;
};
/* Of a graph that was made anew only the executable is launched. */
struct graph { struct work *works; size_t count; int alive; };

/* Of this thread: what it records, on which stream, and whether that was spoiled. */
static __thread struct graph *open_graph;
static __thread void *open_stream;
static __thread int spoiled;
/* Kernels that were launched, those of graphs with them; graphs that were made, and launched. */
static long kernels, made, launched;

/* A run tells at its end what it has launched. */
__attribute__((destructor)) static void tell(void) {
    const char *path = getenv("STUB_COUNTS");
    FILE *file = path && kernels ? fopen(path, "a") : 0;
    if (!file) return;
    fprintf(file, "%ld %ld %ld\n", kernels, made, launched);
    fclose(file);
}
static int refuses(const char *what) {
    const char *text = getenv("STUB_GRAPHS");
    return text && !strcmp(text, what);
}
/* A kernel has written where nothing is: each later call of the process fails. */
static int broken;
/* What may not be called while this thread records. 900: not permitted in a capture. */
static int outside(void) {
    if (broken) return 700;
    if (!open_graph) return 0;
    spoiled = 1;
    return 900;
}
static int do_work(struct work *work) {
    if (work->control) {
        work->numbers[13] = ++work->control[3];
        usleep(number("STUB_STEP_MICROSECONDS", 0));
    }
    if (work->kernel) {
        __sync_fetch_and_add(&kernels, 1);
    } else if (work->from) {
        memmove((void *)work->to, (void *)work->from, work->bytes);
    } else {
        /* Whole pages of zeros are given back: an arena is larger than this machine's memory. */
        address to = work->to, n = work->bytes, page = 4096;
        address first = (to + page - 1) & ~(page - 1), end = (to + n) & ~(page - 1);
        if (work->byte || first >= end) {
            memset((void *)to, work->byte, n);
            return 0;
        }
        memset((void *)to, 0, first - to);
        madvise((void *)first, end - first, MADV_DONTNEED);
        memset((void *)end, 0, to + n - end);
    }
    return 0;
}
static int enqueue(void *stream, struct work work) {
    struct graph *graph = open_graph;
    if (!graph || stream != open_stream) return do_work(&work);
    if (spoiled) return 901;
    graph->works = realloc(graph->works, (graph->count + 1) * sizeof work);
    graph->works[graph->count++] = work;
    return 0;
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
/* Some other process has the GPU's memory: the code that the driver answers, and how often. */
int cuDevicePrimaryCtxRetain(void **context, int device) {
    static int tries;
    *context = handle();
    return tries++ < number("STUB_FULL_TIMES", 0) ? number("STUB_FULL", 2) : 0;
}
int cuCtxGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return 0; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = handle(); return 0; }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int p) {
    *stream = handle();
    return 0;
}
int cuStreamBeginCapture_v2(void *stream, int mode) {
    if (open_graph || refuses("begin")) return 900;
    open_graph = calloc(1, sizeof *open_graph);
    open_stream = stream;
    spoiled = refuses("end");
    return 0;
}
int cuStreamEndCapture(void *stream, void **graph) {
    *graph = spoiled ? 0 : open_graph;
    open_graph = open_stream = 0;
    return *graph ? 0 : 901;
}
int cuGraphGetNodes(void *graph, void **nodes, size_t *count) {
    *count = ((struct graph *)graph)->count;
    return 0;
}
int cuGraphInstantiateWithFlags(void **executable, struct graph *graph, address flags) {
    if (refuses("instantiate")) return 2;
    struct graph *copy = malloc(sizeof *copy);
    *copy = *graph;
    copy->alive = 1;
    *executable = copy;
    made++;
    return 0;
}
int cuGraphExecDestroy(struct graph *graph) { graph->alive = 0; return 0; }
int cuGraphLaunch(struct graph *graph, void *stream) {
    if (outside() || !graph->alive) return 400;
    if (refuses("launch")) return 700;
    launched++;
    for (size_t at = 0; at < graph->count; at++) do_work(graph->works + at);
    return 0;
}
int cuStreamSynchronize(void *stream) { return outside(); }
int cuEventQuery(void *event) { return broken ? 700 : 0; }
/* While there is the file that STUB_BUSY names, what is enqueued is not over. */
int cuStreamQuery(void *stream) {
    const char *busy = getenv("STUB_BUSY");
    return busy && !access(busy, F_OK) ? 600 : outside();
}
int cuCtxSynchronize(void) { return outside(); }
int cuMemFree_v2(address at) {
    give_back((void *)at);
    return outside();
}
int cuMemFreeHost(void *at) {
    give_back(at);
    return 0;
}
int cuMemAddressFree(address at, size_t n) {
    give_back((void *)at);
    return 0;
}
int cuMemRelease(address made) {
    if (made > 1) close(made);
    return 0;
}
int cuEventCreate(void **event, unsigned flags) { *event = handle(); return 0; }
int cuEventElapsedTime(float *milliseconds, void *a, void *b) {
    *milliseconds = number("STUB_EVENT_MICROSECONDS", 250) / 1e3;
    return 0;
}
/* Code that begins with STUB_FOREIGN is of another driver. 200: an invalid image. */
int cuModuleLoadData(void **module, const void *image) {
    const char *foreign = getenv("STUB_FOREIGN");
    if (foreign && !memcmp(image, foreign, 4)) return 200;
    *module = handle();
    return outside();
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = strdup(name);
    return 0;
}
/* One of our kernels does something, because a step is not over without it: `decide` counts. */
int cuLaunchKernel(const char *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                   unsigned by, unsigned bz, unsigned shared, void *s, void **given, void **extra) {
    if (moves(function, given)) return 0;
    broken |= !strcmp(function, "touch_nowhere");
    struct work work = {.kernel = 1};
    if (!strcmp(function, "decide")) {
        work.numbers = *(double **)given[1];
        work.control = *(double **)given[2];
    }
    return enqueue(s, work);
}
int cuMemAlloc_v2(address *at, size_t bytes) {
    if (outside()) return 900;
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
int cuMemcpyHtoD_v2(address to, const void *from, size_t n) {
    memcpy((void *)to, from, n);
    return outside();
}
int cuMemcpyDtoH_v2(void *to, address from, size_t n) {
    memcpy(to, (void *)from, n);
    return outside();
}
int cuMemcpyAsync(address to, address from, size_t n, void *s) {
    return enqueue(s, (struct work){.to = to, .from = from, .bytes = n});
}
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t n, void *s) {
    return enqueue(s, (struct work){.to = to, .from = (address)from, .bytes = n});
}
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t n, void *s) {
    return enqueue(s, (struct work){.to = (address)to, .from = from, .bytes = n});
}
int cuMemcpyDtoDAsync_v2(address to, address from, size_t n, void *s) {
    return enqueue(s, (struct work){.to = to, .from = from, .bytes = n});
}
int cuMemsetD8Async(address to, unsigned char byte, size_t n, void *s) {
    return enqueue(s, (struct work){.to = to, .byte = byte, .bytes = n});
}
int cuMemGetAllocationGranularity(size_t *bytes, const void *p, int kind) {
    *bytes = 2 << 20;
    return 0;
}
int cuMemAddressReserve(address *at, size_t n, size_t align, address hint, address flags) {
    *at = (address)memory(n);
    return *at ? 0 : 2;
}
/* Without STUB_WINDOWS each window that is opened is memory of its own, and nobody maps it. */
int cuMemExportToShareableHandle(void *to, address made, int kind, address flags) {
    if (number("STUB_EXPORT", 0)) return number("STUB_EXPORT", 0);
    *(int *)to = made > 1 ? dup(made) : memfd_create("window", MFD_CLOEXEC);
    return *(int *)to < 0 ? 999 : 0;
}
int cuMemCreate(address *made, size_t bytes, const void *p, address flags) {
    *made = 1;
    return getenv("STUB_WINDOWS") ? window(made, bytes) : 0;
}
