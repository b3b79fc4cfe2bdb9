/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the models of the kernels' protocols: flags with the kernels' memory orders, waits with a limit that report
 * what they waited for, and the first error. */
#ifndef TEST_FUSED_WATCH_H
#define TEST_FUSED_WATCH_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* Shortly before the epoch wraps. */
#define FIRST_EPOCH 0xfffffff0u

/* The launches of a model: the epoch wraps in the 16th. A sanitizer sees a race or a bad access in the first ones. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { MODEL_LAUNCHES = 200 };
#else
enum { MODEL_LAUNCHES = 600 };
#endif
/* How long to wait for a word. */
enum { WAIT_SECONDS = 60 };
enum { WATCH_THREADS = 64 }; /* threads that wait at a time, at most */

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
    uint32_t failed;     /* atomic; 1: a thread gave up or found a wrong value; 2: and the text is complete */
    char text[200];
    pthread_mutex_t lock; /* protects the list of waiting threads, which is kept only once a node is lost */
    const struct watch_word *waiting[WATCH_THREADS];
    uint32_t waiting_count;
};

/* A zeroed one. Threads: of all ranks, and of those of the last node; lost_after: as above. */
void watch_init(struct watch *w, uint32_t threads, uint32_t of_last_node, uint32_t lost_after);

uint32_t watch_load(const uint32_t *p);    /* acquire */
void watch_raise(uint32_t *p, uint32_t v); /* release */
/* Adds one; release. */
void watch_add(uint32_t *p);
/* Adds one; acquire and release. Returns the new value. */
uint32_t watch_count(uint32_t *p);

/* Call this between two reads of a word that held `seen`: waits, not for long, until one of the functions above changes
 * it. It sleeps, because threads that only yield can keep the thread that they wait for off its core for seconds. */
void watch_pause(const uint32_t *p, uint32_t seen);
/* Each thread of the last node calls this before each launch, counted from 1. True: the thread stops here. Once all of
 * them have stopped, waits for another rank give up as soon as every remaining thread waits, so the result does not
 * depend on the speed of the machine. */
bool watch_leaves(struct watch *w, uint32_t launch);

/* from: the rank that should have raised the flag, or sent the value. */
void watch_fail(struct watch *w, const char *what, uint32_t rank, uint32_t index, uint32_t from, uint32_t want,
                uint32_t seen);
/* Waits until the flag has reached `want`. False: the limit has passed, or another thread failed. */
bool watch_wait(struct watch *w, const uint32_t *flag, uint32_t want, const char *what, uint32_t rank, uint32_t index,
                uint32_t from);
/* Waits until it holds exactly `want`. */
bool watch_wait_exactly(struct watch *w, const uint32_t *flag, uint32_t want, const char *what, uint32_t rank,
                        uint32_t index, uint32_t from);

/* Sleeps for a moment, but rarely. */
void watch_dawdle(uint32_t *random);

#endif
