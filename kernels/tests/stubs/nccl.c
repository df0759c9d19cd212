/* A gang whose messages go nowhere: sums of nothing are right. VERSION is its own.
   Where STUB_GANG names a folder they go through files there, at the end of each group: numbers
   of bf16 between processes of one rank each. Where STUB_REFUSED names a file, the next id is
   refused, once: the file is gone then. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned short bf16;
enum kind { SEND, RECEIVE, REDUCE, SCATTER, GATHER };
struct op { enum kind kind; const bf16 *from; bf16 *to; size_t count; int peer; };
static struct op ops[64];
static int waiting, me, world = 1;
/* Messages to and from each rank so far. */
static long sent[16], received[16];

static void name(char *path, int from, int to, long number) {
    sprintf(path, "%s/%d-%d-%ld", getenv("STUB_GANG"), from, to, number);
}
static void put(int to, const void *at, size_t bytes) {
    char path[500], whole[500];
    name(whole, me, to, sent[to]++);
    sprintf(path, "%s.part", whole);
    int file = open(path, O_CREAT | O_WRONLY, 0600);
    if (write(file, at, bytes) != bytes) abort();
    close(file);
    rename(path, whole);
}
static void take(int from, void *at, size_t bytes) {
    char path[500];
    name(path, from, me, received[from]++);
    int file = -1;
    for (int looks = 0; file < 0 && looks < 200000; looks++) {
        file = open(path, O_RDONLY);
        if (file < 0) usleep(50);
    }
    if (file < 0 || read(file, at, bytes) != bytes) abort();
    close(file);
    unlink(path);
}
static float wide(bf16 number) {
    unsigned bits = (unsigned)number << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
/* Whole numbers below 257, which bf16 has. */
static void add(bf16 *to, const bf16 *more, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float sum = wide(to[i]) + wide(more[i]);
        unsigned bits;
        memcpy(&bits, &sum, 4);
        to[i] = bits >> 16;
    }
}
static void give_all(const struct op *op) {
    if (op->kind == SEND) put(op->peer, op->from, 2 * op->count);
    if (op->kind <= RECEIVE) return;
    for (int p = 0; p < world; p++)
        if (p != me) put(p, op->from + (op->kind == SCATTER) * p * op->count, 2 * op->count);
}
static void take_all(const struct op *op) {
    if (op->kind == RECEIVE) take(op->peer, op->to, 2 * op->count);
    if (op->kind <= RECEIVE) return;
    const bf16 *own = op->from + (op->kind == SCATTER) * me * op->count;
    memmove(op->to + (op->kind == GATHER) * me * op->count, own, 2 * op->count);
    bf16 *more = malloc(2 * op->count);
    for (int p = 0; p < world; p++) {
        if (p == me) continue;
        take(p, more, 2 * op->count);
        if (op->kind == GATHER) memcpy(op->to + p * op->count, more, 2 * op->count);
        else add(op->to, more, op->count);
    }
    free(more);
}
static int later(struct op op) {
    if (getenv("STUB_GANG")) ops[waiting++] = op;
    return 0;
}
int ncclGroupEnd(void) {
    for (int i = 0; i < waiting; i++) give_all(ops + i);
    for (int i = 0; i < waiting; i++) take_all(ops + i);
    waiting = 0;
    return 0;
}
int ncclSend(const void *from, size_t count, int kind, int peer, void *comm, void *stream) {
    return later((struct op){SEND, from, 0, count, peer});
}
int ncclRecv(void *to, size_t count, int kind, int peer, void *comm, void *stream) {
    return later((struct op){RECEIVE, 0, to, count, peer});
}
int ncclAllReduce(const void *from, void *to, size_t count, int kind, int sum, void *comm,
                  void *stream) {
    return later((struct op){REDUCE, from, to, count, 0});
}
int ncclReduceScatter(const void *from, void *to, size_t count, int kind, int sum, void *comm,
                      void *stream) {
    return later((struct op){SCATTER, from, to, count, 0});
}
int ncclAllGather(const void *from, void *to, size_t count, int kind, void *comm, void *stream) {
    return later((struct op){GATHER, from, to, count, 0});
}

struct id { char bytes[128]; };
int ncclGetVersion(int *code) { *code = VERSION; return 0; }
const char *ncclGetErrorString(int code) {
    return code == 2 ? "unhandled system error" : "an error";
}
const char *ncclGetLastError(void *comm) { return ""; }
int ncclGetUniqueId(struct id *id) {
    const char *refused = getenv("STUB_REFUSED");
    return refused && !unlink(refused) ? 2 : 0;
}
int ncclCommInitRankConfig(void **comm, int ranks, struct id id, int rank, void *config) {
    world = ranks;
    me = rank;
    *comm = malloc(1);
    return 0;
}
int ncclCommSplit(void *of, int color, int key, void **comm, void *config) {
    *comm = malloc(1);
    return 0;
}
int ncclCommGetAsyncError(void *comm, int *state) { *state = 0; return 0; }
/* Of a part of the gang it says the same. */
int ncclCommCount(void *comm, int *count) { *count = world; return 0; }
int ncclCommUserRank(void *comm, int *rank) { *rank = 0; return 0; }
