/* A compiler that makes four bytes of anything. VERSION is its CUDA. */
#include <stdlib.h>
#include <string.h>

int nvrtcVersion(int *major, int *minor) {
    *major = VERSION / 1000;
    *minor = VERSION % 1000 / 10;
    return 0;
}
int nvrtcCreateProgram(void **program, const char *text, const char *name, int n, void *headers,
                       void *names) {
    *program = malloc(1);
    return 0;
}
int nvrtcDestroyProgram(void **program) { free(*program); return 0; }
int nvrtcGetCUBINSize(void *program, size_t *bytes) { *bytes = 4; return 0; }
int nvrtcGetCUBIN(void *program, char *cubin) { memcpy(cubin, "stub", 4); return 0; }
int nvrtcGetProgramLogSize(void *program, size_t *bytes) { *bytes = 1; return 0; }
int nvrtcGetProgramLog(void *program, char *log) { *log = 0; return 0; }
