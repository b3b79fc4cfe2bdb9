/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/board.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "transport/util/clock.h"
#include "transport/util/error.h"

/* A process id may be reused, so a process is identified by its start time too. Both are valid in one namespace
 * only. */
struct process {
    uint64_t namespace, start;
    uint32_t pid;
};

/* One cache line for each rank, written by that rank alone. */
struct line {
    _Alignas(64) struct process process;
    uint32_t left;
    uint64_t came; /* how often it has called prs_board_gather() */
};

/* The first rank that decides about a gathering decides for all: [number % GATHERINGS] = number << 8 | verdict. Older
 * ones than these have timed out for a rank that has not seen them yet. */
enum { GATHERINGS = 16, ALL_CAME = 0xff }; /* any other verdict: the rank that is missing */

struct page {
    struct line rank[PRS_MAX_LOCAL_RANKS];
    uint64_t decided[GATHERINGS];
};

struct prs_board {
    struct page *page;
    uint32_t own, ranks;
    uint64_t gatherings;
    char name[48];
};

/* When a process began, in clock ticks since boot; 0: there is no such process, or it has ended and is a zombie. */
static uint64_t start_of(uint32_t pid)
{
    char path[48], text[512];
    const char *at;
    char state = 'Z';
    unsigned long long start = 0;
    size_t got;
    FILE *f;
    /* qemu-user answers /proc/PID/stat itself for its own process, with a start time that differs from what other
     * processes see. */
    (void)snprintf(path, sizeof(path), "/proc/./%u/stat", pid);
    f = fopen(path, "re");
    if (!f)
        return 0;
    got = fread(text, 1, sizeof(text) - 1, f);
    (void)fclose(f);
    text[got] = '\0';
    at = strrchr(text, ')'); /* the process name before it may contain anything */
    if (!at || sscanf(at + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                      &state, &start) != 2)
        return 0;
    return state == 'Z' || state == 'X' ? 0 : start;
}

static struct process this_process(void)
{
    struct process p = {.pid = (uint32_t)getpid()};
    struct stat s;
    p.start = start_of(p.pid);
    if (p.start != 0 && stat("/proc/self/ns/pid", &s) == 0)
        p.namespace = (uint64_t)s.st_ino;
    return p;
}

/* False if that cannot be found out. */
static bool has_ended(const struct process *p, const struct process *own)
{
    return p->namespace != 0 && p->namespace == own->namespace && start_of(p->pid) != p->start;
}

int prs_board_open(uint64_t name, const struct prs_place *at, struct prs_board **out)
{
    struct prs_board *b = calloc(1, sizeof(*b));
    int fd;
    if (!b)
        return prs_fail(-ENOMEM, "fused: no memory for the board of a node");
    b->own = at->local_rank;
    b->ranks = at->local_ranks;
    (void)snprintf(b->name, sizeof(b->name), "/perseus-%016" PRIx64 "-%u", name, at->node);
    fd = shm_open(b->name, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0 && ftruncate(fd, sizeof(*b->page)) == 0)
        b->page = mmap(NULL, sizeof(*b->page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || !b->page || b->page == MAP_FAILED) {
        int r = prs_fail(-EXDEV, "fused: rank %u cannot open shared memory %s of its node: %s (is /dev/shm full?)",
                         at->rank, b->name, strerror(errno));
        if (fd >= 0)
            (void)close(fd);
        free(b);
        return r;
    }
    (void)close(fd);
    b->page->rank[b->own].process = this_process();
    *out = b;
    return 0;
}

void prs_board_hide(const struct prs_board *b)
{
    (void)shm_unlink(b->name);
}

void prs_board_close(struct prs_board *b)
{
    if (!b)
        return;
    (void)munmap(b->page, sizeof(*b->page));
    free(b);
}

void prs_board_leave(struct prs_board *b)
{
    __atomic_store_n(&b->page->rank[b->own].left, 1, __ATOMIC_RELEASE);
}

bool prs_board_has_left(const struct prs_board *b, uint32_t rank)
{
    return __atomic_load_n(&b->page->rank[rank].left, __ATOMIC_ACQUIRE) ||
           has_ended(&b->page->rank[rank].process, &b->page->rank[b->own].process);
}

bool prs_board_all_left(const struct prs_board *b)
{
    for (uint32_t i = 0; i < b->ranks; i++)
        if (i != b->own && !prs_board_has_left(b, i))
            return false;
    return true;
}

/* The first rank that has not come to gathering `number`; b->ranks if all have come. */
static uint32_t find_missing(const struct prs_board *b, uint64_t number)
{
    uint32_t i = 0;
    while (i < b->ranks && __atomic_load_n(&b->page->rank[i].came, __ATOMIC_ACQUIRE) >= number)
        i++;
    return i;
}

int prs_board_gather(struct prs_board *b, uint32_t timeout_ms, uint32_t *missing)
{
    static const struct timespec pause = {.tv_nsec = 500000};
    uint64_t number = ++b->gatherings, *decided = &b->page->decided[number % GATHERINGS];
    uint64_t end = prs_clock_ms() + timeout_ms, seen;
    __atomic_store_n(&b->page->rank[b->own].came, number, __ATOMIC_RELEASE);
    while ((seen = __atomic_load_n(decided, __ATOMIC_ACQUIRE)) >> 8 < number) {
        *missing = find_missing(b, number);
        if (*missing == b->ranks || prs_clock_ms() >= end || prs_board_has_left(b, *missing))
            (void)__atomic_compare_exchange_n(decided, &seen,
                                              number << 8 | (*missing == b->ranks ? (uint32_t)ALL_CAME : *missing),
                                              false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
        else
            (void)nanosleep(&pause, NULL);
    }
    *missing = seen >> 8 == number ? (uint32_t)(seen & 0xff) : b->own;
    return *missing == ALL_CAME ? 0 : -ETIMEDOUT;
}
