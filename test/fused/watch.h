/* SPDX-License-Identifier: Apache-2.0 */
/* What the models of the kernels' protocols share: flags with the orders that the kernels use, waits that end and say
 * what they waited for, and the first thing that went wrong. */
#ifndef TEST_FUSED_WATCH_H
#define TEST_FUSED_WATCH_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* Shortly before the epoch wraps. */
#define FIRST_EPOCH 0xfffffff0u
/* How long to wait for a word. */
enum { WAIT_SECONDS = 60 };
enum { WATCH_THREADS = 64 }; /* that wait at a time, at most */

/* A word that a thread waits for. */
struct watch_word {
    const uint32_t *flag;
    uint32_t want;
    bool exactly;
};

struct watch {
    uint32_t lost_after; /* launches after which the last node's threads stop for good; 0: they do not */
    uint32_t leaving;    /* atomic: how many of them are still there */
    uint32_t staying;    /* threads of the other nodes */
    uint32_t under_way;  /* atomic: commands that the NICs have still to do */
    uint32_t failed;     /* atomic: 1 a thread gave up or found a wrong value, 2 and the text is complete */
    char text[200];
    pthread_mutex_t lock; /* protects the list of waiting threads, which is kept only once a node is lost */
    const struct watch_word *waiting[WATCH_THREADS];
    uint32_t waiting_count;
};

/* A zeroed one. Threads: of all ranks, and of those of the last node; lost_after: as above. */
void watch_init(struct watch *w, uint32_t threads, uint32_t of_last_node, uint32_t lost_after);

uint32_t watch_load(const uint32_t *p);    /* acquire */
void watch_raise(uint32_t *p, uint32_t v); /* release */
/* One more; release. */
void watch_add(uint32_t *p);
/* One more; acquire and release. Gives what it is then. */
uint32_t watch_count(uint32_t *p);

/* Between two looks at a word that held `seen`: until one of the above changes it, but not for long. Sleeps, since
 * threads that only yield keep the one that all of them wait for from its core, for seconds at times. */
void watch_pause(const uint32_t *p, uint32_t seen);
/* Before each launch (from 1) on each thread of the last node: true: it stops here. Once all have stopped, whoever
 * waits for another rank gives up as soon as all threads wait in vain, however slow the machine is. */
bool watch_leaves(struct watch *w, uint32_t launch);

/* from: the rank that should have raised the flag, or sent the value. */
void watch_fail(struct watch *w, const char *what, uint32_t rank, uint32_t index, uint32_t from, uint32_t want,
                uint32_t seen);
/* Waits until the flag has reached `want`. False: it gave up, or another thread failed. */
bool watch_wait(struct watch *w, const uint32_t *flag, uint32_t want, const char *what, uint32_t rank, uint32_t index,
                uint32_t from);
/* Until it holds `want`. */
bool watch_wait_exactly(struct watch *w, const uint32_t *flag, uint32_t want, const char *what, uint32_t rank,
                        uint32_t index, uint32_t from);

/* Seldom, a moment's sleep. */
void watch_dawdle(uint32_t *random);

#endif
