/* A compiler that makes four bytes of anything, those of STUB_CUBIN if it is there; with
   STUB_NO_COMPILER nothing. VERSION is its CUDA. */
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
int nvrtcCompileProgram(void *program, int n, const char **options) {
    return getenv("STUB_NO_COMPILER") ? 6 : 0;
}
int nvrtcDestroyProgram(void **program) { free(*program); return 0; }
int nvrtcGetCUBINSize(void *program, size_t *bytes) { *bytes = 4; return 0; }
int nvrtcGetCUBIN(void *program, char *cubin) {
    const char *bytes = getenv("STUB_CUBIN");
    memcpy(cubin, bytes ? bytes : "stub", 4);
    return 0;
}
int nvrtcGetProgramLogSize(void *program, size_t *bytes) { *bytes = 1; return 0; }
int nvrtcGetProgramLog(void *program, char *log) { *log = 0; return 0; }
