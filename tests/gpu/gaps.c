// Keeps when each kernel and copy of a process ran, for gaps.py. The CUDA driver loads it:
//   cc -shared -fPIC -O2 -I CUDA/include gaps.c -o libgaps.so -L CUDA/lib64 -lcupti
//   CUDA_INJECTION64_PATH=libgaps.so GAPS_FILE=FILE PROGRAM
// A process writes FILE.PID as it ends: kind, stream, start and end in nanoseconds, name.
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BUFFER = 8 << 20 };
static FILE *out;

static void requested(uint8_t **buffer, size_t *size, size_t *records) {
  *buffer = aligned_alloc(8, BUFFER);
  *size = *buffer ? BUFFER : 0;
  *records = 0;
}

static void completed(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size,
                      size_t valid) {
  CUpti_Activity *record = NULL;
  while (out && cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      CUpti_ActivityKernel9 *kernel = (CUpti_ActivityKernel9 *)record;
      fprintf(out, "kernel %u %llu %llu %s\n", kernel->streamId,
              (unsigned long long)kernel->start, (unsigned long long)kernel->end, kernel->name);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      CUpti_ActivityMemcpy5 *copy = (CUpti_ActivityMemcpy5 *)record;
      fprintf(out, "copy %u %llu %llu %d\n", copy->streamId, (unsigned long long)copy->start,
              (unsigned long long)copy->end, copy->copyKind);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      CUpti_ActivityMemset4 *set = (CUpti_ActivityMemset4 *)record;
      fprintf(out, "set %u %llu %llu -\n", set->streamId, (unsigned long long)set->start,
              (unsigned long long)set->end);
    }
  }
  if (out) fflush(out);
  free(buffer);
}

static void ended(void) {
  cuptiActivityFlushAll(1);
  if (out) fclose(out);
  out = NULL;
}

int InitializeInjection(void) {
  const char *file = getenv("GAPS_FILE");
  char name[4096];
  if (!file || snprintf(name, sizeof name, "%s.%d", file, getpid()) >= (int)sizeof name) return 0;
  out = fopen(name, "w");
  if (!out) return 0;
  cuptiActivityRegisterCallbacks(requested, completed);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET);
  // A process that is killed leaves what it had a second before.
  cuptiActivityFlushPeriod(1000);
  atexit(ended);
  return 1;
}
