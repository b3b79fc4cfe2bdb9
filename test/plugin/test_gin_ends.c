/* SPDX-License-Identifier: Apache-2.0 */
/* Windows and contexts that are given back while others go on. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "test/plugin/gin_world.h"

static bool driver_stops;

static void *drive(void *arg)
{
    struct world *w = arg;

    while (!__atomic_load_n(&driver_stops, __ATOMIC_RELAXED)) {
        if (gin_api_progress(&w->api) != NET_SUCCESS)
            return w;
        sched_yield();
    }
    return NULL;
}

static int send_signals(struct world *w, uint32_t count)
{
    struct gin_call call = {.rank = 1, .signal = w->signal_handle, .operation = GIN_SIGNAL_ADD, .value = 1};
    void *request;

    for (uint32_t i = 0; i < count; i++) {
        CHECK(gin_api_put(&w->api, &call, &request) == NET_SUCCESS, "signal %u", i);
        CHECK(gin_api_wait(&w->api, request) == 0, "signal %u", i);
    }
    return 0;
}

/* Rank 0 knows that its signals are done; rank 1, which nobody drives or a thread of its own does, gives up the memory
 * that they are for. */
static int give_up_signals(struct ranks *ranks, void *user)
{
    enum { SIGNALS = 100 };
    const struct plan *plan = user;
    bool threaded = plan->contexts == 2;
    uint64_t *words;
    pthread_t thread;
    void *failed = NULL;
    struct world w;
    int r = world_open(&w, ranks, user);

    if (r)
        return r;
    words = ranks_words(ranks);
    if (w.api.rank == 0) {
        if (send_signals(&w, 1))
            return 1;
        while (!__atomic_load_n(&words[1], __ATOMIC_ACQUIRE))
            gin_api_progress(&w.api);
        if (send_signals(&w, SIGNALS - 1))
            return 1;
        __atomic_store_n(&words[0], 1, __ATOMIC_RELEASE);
        while (!__atomic_load_n(&words[2], __ATOMIC_ACQUIRE))
            gin_api_progress(&w.api);
        CHECK(!gin_api_has_error(&w.api), "rank 0 has an error");
    } else if (w.api.rank == 1) {
        if (wait_signal(&w, 0, 1)) /* connected */
            return 1;
        if (threaded)
            CHECK(pthread_create(&thread, NULL, drive, &w) == 0, "thread");
        __atomic_store_n(&words[1], 1, __ATOMIC_RELEASE);
        while (!__atomic_load_n(&words[0], __ATOMIC_ACQUIRE))
            usleep(100);
        CHECK(gin_api_dereg(&w.api, w.signal_handle) == NET_SUCCESS, "signals");
        w.signal_handle = NULL;
        CHECK(__atomic_load_n(&w.signals[0], __ATOMIC_ACQUIRE) == SIGNALS, "%lu were raised",
              (unsigned long)w.signals[0]);
        __atomic_store_n(&driver_stops, true, __ATOMIC_RELAXED);
        if (threaded)
            pthread_join(thread, &failed);
        CHECK(!failed, "progress failed");
        for (int i = 0; i < 20000; i++)
            CHECK(gin_api_progress(&w.api) == NET_SUCCESS, "a signal found its words gone");
        __atomic_store_n(&words[2], 1, __ATOMIC_RELEASE);
    }
    return world_close(&w);
}

/* Run with `counted` as well, and over EFA: there the receiver raises them. */
Test(gin, memory_goes_when_the_signals_that_came_for_it_are_raised, .timeout = 300)
{
    cr_assert_eq(run(give_up_signals, (struct plan){14, 1}), 0);
}

Test(gin, memory_goes_beside_a_thread_that_raises_its_signals, .timeout = 300)
{
    cr_assert_eq(run(give_up_signals, (struct plan){14, 2}), 0);
}

enum { CONTEXTS_MOST = 4096 }; /* that a team has at a time, with the exchange's */

/* A word from each rank to the next, in the set that transfers take now. */
static int pass_word(struct world *w, uint64_t value)
{
    uint32_t next = (w->api.rank + 1) % RANKS;
    struct gin_call call = {.src = w->source_handle,
                            .size = 8,
                            .dst = w->target_handle,
                            .rank = next,
                            .signal = w->signal_handle,
                            .operation = GIN_SIGNAL_INC};
    void *request;

    w->source[0] = value;
    CHECK(gin_api_put(&w->api, &call, &request) == NET_SUCCESS && request, "put");
    if (wait_signal(w, 0, value))
        return 1;
    CHECK(w->target[0] == value, "rank %u has %lu, want %lu", w->api.rank, (unsigned long)w->target[0],
          (unsigned long)value);
    CHECK(gin_api_wait(&w->api, request) == 0, "put");
    /* Until the next has it: nobody accepts for a rank that does not progress. */
    __atomic_fetch_add(&ranks_words(w->api.ranks)[0], 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&ranks_words(w->api.ranks)[0], __ATOMIC_ACQUIRE) < RANKS * value) {
        CHECK(gin_api_progress(&w->api) == NET_SUCCESS, "progress");
        sched_yield();
    }
    return 0;
}

/* The first set stays; its number and that of the last have the same place in a team's table. */
static int make_many_sets(struct ranks *ranks, void *user)
{
    struct rma_config_v14 config = {.contexts = 1, .traffic_class = -1, .rank_stride = 1}, many = config;
    struct world w;
    void *first, *last, *set;
    int r = world_open(&w, ranks, user);

    if (r)
        return r;
    first = w.api.set;
    if (pass_word(&w, 1))
        return 1;
    for (int i = 1; i < CONTEXTS_MOST; i++) {
        CHECK(w.api.v14->create_context(w.api.coll, &config, &set) == NET_SUCCESS, "set %d", i);
        w.api.v14->destroy_context(set);
    }
    CHECK(w.api.v14->create_context(w.api.coll, &config, &last) == NET_SUCCESS, "set %d", CONTEXTS_MOST);
    w.api.set = last;
    if (pass_word(&w, 2))
        return 1;
    w.api.set = first;
    if (pass_word(&w, 3))
        return 1;
    many.contexts = CONTEXTS_MOST - 2; /* one more than are left beside those two */
    CHECK(w.api.v14->create_context(w.api.coll, &many, &set) == NET_INVALID_ARGUMENT, "too many at a time");
    w.api.v14->destroy_context(last);
    return world_close(&w);
}

Test(gin, contexts_are_given_back, .timeout = 300)
{
    cr_assert_eq(run(make_many_sets, (struct plan){14, 1}), 0);
}
