/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "test/plugin/gin_world.h"

int world_open(struct world *w, struct ranks *ranks, const struct plan *plan)
{
    int r = gin_api_open(&w->api, ranks, RANKS, plan->version, plan->contexts);

    if (r)
        return r;
    w->source = aligned_alloc(4096, DATA_BYTES);
    w->target = aligned_alloc(4096, DATA_BYTES);
    w->signals = aligned_alloc(4096, SIGNAL_WORDS * 8);
    memset(w->source, 0, DATA_BYTES);
    memset(w->target, 0xff, DATA_BYTES);
    memset(w->signals, 0, SIGNAL_WORDS * 8);
    CHECK(gin_api_reg(&w->api, w->source, DATA_BYTES, 0, &w->source_handle) == NET_SUCCESS, "source");
    CHECK(gin_api_reg(&w->api, w->target, DATA_BYTES, 0, &w->target_handle) == NET_SUCCESS, "target");
    CHECK(gin_api_reg(&w->api, w->signals, SIGNAL_WORDS * 8, GIN_MEMORY_STRICT, &w->signal_handle) == NET_SUCCESS,
          "signals");
    return 0;
}

int world_close(struct world *w)
{
    /* Others may still be sending to us: all are done first. */
    CHECK(ranks_barrier(w->api.ranks) == 0, "meeting before the end");
    CHECK(gin_api_dereg(&w->api, w->source_handle) == NET_SUCCESS, "source");
    CHECK(gin_api_dereg(&w->api, w->target_handle) == NET_SUCCESS, "target");
    CHECK(gin_api_dereg(&w->api, w->signal_handle) == NET_SUCCESS, "signals");
    gin_api_close(&w->api);
    free(w->source);
    free(w->target);
    free(w->signals);
    return 0;
}

int wait_signal(struct world *w, uint32_t index, uint64_t value)
{
    time_t give_up = time(NULL) + TIMEOUT_S / 2;

    while (__atomic_load_n(&w->signals[index], __ATOMIC_ACQUIRE) < value) {
        CHECK(gin_api_progress(&w->api) == NET_SUCCESS, "progress");
        CHECK(time(NULL) < give_up, "rank %u: signal %u: want %lu, have %lu", w->api.rank, index, (unsigned long)value,
              (unsigned long)w->signals[index]);
        sched_yield();
    }
    return 0;
}

int run(int (*body)(struct ranks *, void *), struct plan plan)
{
    int r = ranks_run(RANKS, 1, TIMEOUT_S, body, &plan);

    if (r == 77)
        cr_skip_test("no RDMA device here");
    return r;
}
