/* SPDX-License-Identifier: Apache-2.0 */
/* The threads that copy large pieces. This file replaces the copy of host_copy.c by its own. */
#include "tools/softnic/memory/copy_threads.h"
#include "tools/softnic/memory/host_copy.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "test/support/settled_threads.h"
#include "tools/softnic/world/cores.h"

enum { DONE = 7, LIMIT_MS = 60000, WHOLE = (1 << 20) + 4711, TAIL = 4096, REFUSED = -14 };

static pid_t mover;
static bool shared;             /* true while the next four describe a copy by several threads */
static pid_t helper;            /* another thread than the test's own that copied a part */
static uint64_t copied, last;   /* bytes so far, and before the last part */
static uint64_t refused = ~0ul; /* the part that begins here fails */
static pid_t owner;

/* These replace cores.c and world.c: enough cores that threads are used. */
unsigned sn_cores(void)
{
    return 16;
}

bool sn_cores_are_few(void)
{
    return false;
}

uint64_t sn_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static int part_copy(const struct sn_copy *c)
{
    uint64_t bytes = c->dst[0].length;

    if (gettid() != owner)
        __atomic_store_n(&helper, gettid(), __ATOMIC_RELAXED);
    else if (bytes != TAIL) /* wait until another thread has taken a part; the owner copies the tail */
        for (int ms = 0; ms < LIMIT_MS && !__atomic_load_n(&helper, __ATOMIC_RELAXED); ms++)
            nanosleep(&(struct timespec){0, 1000000}, NULL);
    if (c->src[0].addr == __atomic_load_n(&refused, __ATOMIC_RELAXED))
        return REFUSED;
    memcpy((void *)c->dst[0].addr, (const void *)c->src[0].addr, bytes);
    __atomic_store_n(&last, __atomic_fetch_add(&copied, bytes, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
    return 0;
}

int sn_host_copy_spans(const struct sn_copy *copy)
{
    if (shared)
        return part_copy(copy);
    mover = gettid();
    return DONE;
}

/* True if it is done within the limit. */
static bool moves(void)
{
    static struct sn_host_copy move;

    sn_host_copy_start(&move);
    for (int ms = 0; ms < LIMIT_MS; ms++) {
        /* [copy-result] acquire; pairs with the release in copy_threads.c. */
        if (__atomic_load_n(&move.result, __ATOMIC_ACQUIRE) != SN_HOST_COPY_BUSY)
            return move.result == DONE && mover != gettid();
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    return false;
}

Test(copy_threads, a_forked_child_has_threads_of_its_own)
{
    int status;
    pid_t pid;

    cr_assert(moves());
    cr_assert(other_threads_settle(), "threads with nothing to do are at work for 60 s");
    pid = fork();
    if (pid == 0)
        _exit(moves() ? 0 : 1);
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "nobody moved it");
    cr_assert(moves(), "the parent's go on");
}

static uint8_t *here, *there;

static int share(void)
{
    struct sn_host_copy move = {.bytes = WHOLE};

    here = malloc(WHOLE);
    there = calloc(1, WHOLE);
    cr_assert(here && there);
    for (size_t i = 0; i < WHOLE; i++)
        here[i] = (uint8_t)(i * 7 + i / 251);
    move.src = (uintptr_t)here;
    move.dst = (uintptr_t)there;
    owner = gettid();
    shared = true;
    if (refused != ~0ul)
        refused += move.src;
    return sn_host_copy_split(&move);
}

Test(copy_threads, a_shared_copy_is_made_by_several_threads_and_ends_with_its_tail)
{
    cr_assert_eq(share(), 0);
    cr_assert_eq(memcmp(here, there, WHOLE), 0, "what came is not what went");
    cr_assert(helper, "nobody helped");
    cr_assert_eq(copied, WHOLE, "some was copied twice");
    cr_assert_eq(last, WHOLE - TAIL, "the tail did not come last");
}

Test(copy_threads, a_part_that_fails_is_the_copys_error_and_the_tail_stays)
{
    refused = 128 << 10;
    cr_assert_eq(share(), REFUSED);
    cr_assert_neq(memcmp(here + WHOLE - TAIL, there + WHOLE - TAIL, TAIL), 0, "the tail says that all is there");
}

enum { ROUNDS = 200, BYTES = 300000 };

static void *share_again_and_again(void *seed)
{
    static __thread uint8_t from[BYTES], to[BYTES];
    struct sn_host_copy move = {.dst = (uintptr_t)to, .src = (uintptr_t)from, .bytes = BYTES};

    for (int round = 0; round < ROUNDS; round++) {
        memset(from, round ^ *(int *)seed, BYTES);
        if (sn_host_copy_split(&move) || memcmp(from, to, BYTES) != 0)
            return seed;
    }
    return NULL;
}

Test(copy_threads, copies_shared_at_the_same_time_do_not_mix)
{
    int seeds[3] = {0, 85, 170};
    pthread_t threads[3];
    void *wrong;

    shared = true;
    for (int i = 0; i < 3; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, share_again_and_again, &seeds[i]), 0);
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(pthread_join(threads[i], &wrong), 0);
        cr_assert_null(wrong);
    }
}
