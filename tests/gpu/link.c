/* A link that fails. Loaded before a program (LD_PRELOAD), it lets sends and receives of NCCL's
 * sockets fail as by a peer that is gone, while the file that MOEJOB_TEST_LINK names is there.
 *     gcc -shared -fPIC -O2 -o link.so link.c -ldl
 * Everybody else's sockets go on: the worker's own lie in another library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int fails(void *caller) {
    const char *path = getenv("MOEJOB_TEST_LINK");
    Dl_info info;
    return path && dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libnccl")
        && access(path, F_OK) == 0;
}

ssize_t send(int fd, const void *bytes, size_t len, int flags) {
    static ssize_t (*real)(int, const void *, size_t, int);
    if (!real) real = dlsym(RTLD_NEXT, "send");
    if (fails(__builtin_return_address(0))) { errno = ECONNRESET; return -1; }
    return real(fd, bytes, len, flags);
}

ssize_t recv(int fd, void *bytes, size_t len, int flags) {
    static ssize_t (*real)(int, void *, size_t, int);
    if (!real) real = dlsym(RTLD_NEXT, "recv");
    if (fails(__builtin_return_address(0))) { errno = ECONNRESET; return -1; }
    return real(fd, bytes, len, flags);
}
