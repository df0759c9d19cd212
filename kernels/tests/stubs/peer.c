/* Windows of peers, where STUB_WINDOWS is set: files that processes map, and the kernels of peer.cu
   and peer_in_place.cu as their contracts say, one row after the other. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long address;
typedef unsigned u32;
enum { PEERS = 16, ROOMS = 1 << 19, TURNS = 0, PLACES = 1024, READS_AT = 2048, COUNTS = 1 << 16 };
enum { READS = 3 };

struct links { address windows[PEERS], shared[PEERS], state, control, patience; u32 positions, me; };
struct move { address from, take, starts, places, room; u32 room_rows, bytes, lanes, step; };
struct need { address ids; u32 present, first[PEERS], count[PEERS], tokens, top_k, nodes; };
struct gather {
    struct need need;
    address rows, words[2], reads[READS];
    u32 bytes, lanes, step;
};
struct scatter {
    struct need need;
    address rows, slots, onto[2], reads[READS];
    u32 bytes, lanes, step;
};

static char *mail(const struct links *links, u32 p, size_t at) {
    return (char *)links->windows[p] + at;
}
/* Until all are here. The turn of each stands in the mail of each. */
static void meet(const struct links *links) {
    static long turn;
    if (links->positions < 2) return;
    turn++;
    __sync_synchronize();
    for (u32 p = 0; p < links->positions; p++)
        *(volatile long *)mail(links, p, TURNS + 8 * links->me) = turn;
    for (u32 p = 0; p < links->positions; p++) {
        volatile long *theirs = (volatile long *)mail(links, links->me, TURNS + 8 * p);
        for (int looks = 0; *theirs < turn; looks++) {
            if (looks > 1000000) abort();
            usleep(20);
        }
    }
    __sync_synchronize();
}
static void counts(const struct links *links, const u32 *values, u32 *out, u32 len) {
    size_t bytes = 4 * len;
    for (u32 p = 0; p < links->positions; p++)
        memcpy(mail(links, p, COUNTS + 4096 * links->me), values + p * len, bytes);
    meet(links);
    for (u32 p = 0; p < links->positions; p++)
        memcpy(out + p * len, mail(links, links->me, COUNTS + 4096 * p), bytes);
    meet(links);
}
static void move(const struct links *links, const struct move *op) {
    const u32 *starts = (u32 *)op->starts, *places = (u32 *)op->places, *take = (u32 *)op->take;
    for (u32 p = 0; p < links->positions; p++)
        *(u32 *)mail(links, p, PLACES + 4 * links->me) = places[p];
    meet(links);
    for (u32 p = 0; p < links->positions; p++) {
        u32 place = *(u32 *)mail(links, links->me, PLACES + 4 * p);
        for (u32 i = starts[p]; i < starts[p + 1]; i++, place++) {
            if (place >= op->room_rows) abort();
            address row = take ? take[i] : i;
            memcpy(mail(links, p, ROOMS + op->room + (size_t)place * op->bytes),
                   (char *)op->from + row * op->bytes, op->bytes);
        }
    }
    meet(links);
}
static int needs(const struct need *need, size_t row, u32 position) {
    const u32 *ids = (u32 *)need->ids + row * need->top_k;
    int found = 0;
    for (u32 k = 0; k < need->top_k; k++)
        found |= ids[k] - need->first[position] < need->count[position];
    return found;
}
static int comes(const struct need *need, u32 from, size_t row, u32 to) {
    return from != to && from < need->present && needs(need, row, to);
}
/* Where a read of position p begins, of what it has told by its place in the mail. */
static char *theirs(const struct links *links, u32 p, u32 read) {
    address *told = (address *)mail(links, links->me, READS_AT + 32 * p);
    return (char *)links->shared[p] + told[read];
}
static void tell_reads(const struct links *links, const address *reads) {
    for (u32 p = 0; p < links->positions; p++)
        memcpy(mail(links, p, READS_AT + 32 * links->me), reads, READS * sizeof *reads);
    meet(links);
}
static void gather(const struct links *links, const struct gather *op) {
    const size_t tokens = op->need.tokens;
    if (op->words[0]) abort(); /* engines alone ask for it */
    tell_reads(links, op->reads);
    for (size_t row = 0; row < tokens * links->positions; row++) {
        u32 from = row / tokens;
        if (comes(&op->need, from, row, links->me))
            memcpy((char *)op->rows + row * op->bytes,
                   theirs(links, from, 0) + row * op->bytes, op->bytes);
    }
    meet(links);
}
static float wide(unsigned short number) {
    u32 bits = (u32)number << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
/* Whole numbers below 257, which bf16 has. */
static void scatter(const struct links *links, const struct scatter *op) {
    const size_t tokens = op->need.tokens;
    const u32 me = links->me;
    if (op->onto[0] || op->slots) abort(); /* engines alone ask for it */
    tell_reads(links, op->reads);
    for (size_t row = me * tokens; row < (me + 1) * tokens; row++) {
        unsigned short *own = (unsigned short *)((char *)op->rows + row * op->bytes);
        for (u32 w = 0; w < op->bytes / 2; w++) {
            float sum = 0;
            for (u32 q = 0; q < links->positions; q++)
                if (needs(&op->need, row, q))
                    sum += wide(((unsigned short *)(theirs(links, q, 0) + row * op->bytes))[w]);
            u32 bits;
            memcpy(&bits, &sum, 4);
            own[w] = bits >> 16;
        }
    }
    meet(links);
}
/* Whether it was one of these. */
static int moves(const char *kernel, void **given) {
    if (!getenv("STUB_WINDOWS")) return 0;
    const struct links *links = given[0];
    if (!strcmp(kernel, "move_rows")) move(links, given[1]);
    else if (!strcmp(kernel, "gather_in_place")) gather(links, given[1]);
    else if (!strcmp(kernel, "scatter_two_bf16")) scatter(links, given[1]);
    else if (!strcmp(kernel, "scatter_all_bf16")) scatter(links, given[1]);
    else if (!strcmp(kernel, "exchange_counts"))
        counts(links, *(u32 **)given[1], *(u32 **)given[2], *(u32 *)given[3]);
    else return 0;
    return 1;
}
static int window(address *made, size_t bytes) {
    int file = memfd_create("window", MFD_CLOEXEC);
    *made = file;
    return file < 0 || ftruncate(file, bytes) ? 2 : 0;
}
int cuMemImportFromShareableHandle(address *made, void *file, int kind) {
    *made = dup((int)(address)file);
    return 0;
}
int cuMemMap(address at, size_t bytes, size_t offset, address made, address flags) {
    if (!getenv("STUB_WINDOWS")) return 0;
    int may = PROT_READ | PROT_WRITE, shared = MAP_SHARED | MAP_FIXED;
    void *to = mmap((void *)at, bytes, may, shared, made, offset);
    return to == MAP_FAILED ? 2 : 0;
}
