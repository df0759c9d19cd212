/* A link that fails. Loaded before a program (LD_PRELOAD), it lets sends and receives of NCCL's
 * sockets fail as by a peer that is gone, while the file that MOEJOB_TEST_LINK names is there.
 *     gcc -shared -fPIC -O2 -o link.so link.c -ldl
 * Sockets between two threads of one process go on, as they do where a link fails: NCCL ends by
 * them. So do everybody else's: the worker's own lie in another library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST_FILES = 4096 };

/* Whether both ends are this process's: one of its sockets has the other end's address. */
static int within(int fd) {
    struct sockaddr_storage peer, own;
    socklen_t len = sizeof peer;
    if (getpeername(fd, (struct sockaddr *)&peer, &len) != 0) return 0;
    for (int other = 0; other < MOST_FILES; other++) {
        socklen_t own_len = sizeof own;
        if (getsockname(other, (struct sockaddr *)&own, &own_len) == 0 && own_len == len
            && memcmp(&own, &peer, len) == 0) return 1;
    }
    return 0;
}

static int fails(int fd, void *caller) {
    const char *path = getenv("MOEJOB_TEST_LINK");
    Dl_info info;
    int kept = errno;
    int cut = path && dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libnccl")
        && access(path, F_OK) == 0 && !within(fd);
    errno = kept;
    return cut;
}

ssize_t send(int fd, const void *bytes, size_t len, int flags) {
    static ssize_t (*real)(int, const void *, size_t, int);
    if (!real) real = dlsym(RTLD_NEXT, "send");
    if (fails(fd, __builtin_return_address(0))) { errno = ECONNRESET; return -1; }
    return real(fd, bytes, len, flags);
}

ssize_t recv(int fd, void *bytes, size_t len, int flags) {
    static ssize_t (*real)(int, void *, size_t, int);
    if (!real) real = dlsym(RTLD_NEXT, "recv");
    if (fails(fd, __builtin_return_address(0))) { errno = ECONNRESET; return -1; }
    return real(fd, bytes, len, flags);
}
