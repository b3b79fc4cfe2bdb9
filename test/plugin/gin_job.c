/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "test/plugin/gin_job.h"

int job_open(struct job *job, struct ranks *ranks, const struct plan *plan)
{
    int r = gin_api_open(&job->api, ranks, RANKS, plan->version, plan->contexts);

    if (r)
        return r;
    job->source = aligned_alloc(4096, DATA_BYTES);
    job->target = aligned_alloc(4096, DATA_BYTES);
    job->signals = aligned_alloc(4096, SIGNAL_WORDS * 8);
    memset(job->source, 0, DATA_BYTES);
    memset(job->target, 0xff, DATA_BYTES);
    memset(job->signals, 0, SIGNAL_WORDS * 8);
    CHECK(gin_api_reg(&job->api, job->source, DATA_BYTES, 0, &job->source_handle) == NET_SUCCESS, "source");
    CHECK(gin_api_reg(&job->api, job->target, DATA_BYTES, 0, &job->target_handle) == NET_SUCCESS, "target");
    CHECK(gin_api_reg(&job->api, job->signals, SIGNAL_WORDS * 8, GIN_MEMORY_STRICT, &job->signal_handle) == NET_SUCCESS,
          "signals");
    return 0;
}

int job_close(struct job *job)
{
    /* Wait for the others, which may still be sending to us. */
    CHECK(ranks_barrier(job->api.ranks) == 0, "barrier before the end");
    CHECK(gin_api_dereg(&job->api, job->source_handle) == NET_SUCCESS, "source");
    CHECK(gin_api_dereg(&job->api, job->target_handle) == NET_SUCCESS, "target");
    CHECK(gin_api_dereg(&job->api, job->signal_handle) == NET_SUCCESS, "signals");
    gin_api_close(&job->api);
    free(job->source);
    free(job->target);
    free(job->signals);
    return 0;
}

int wait_signal(struct job *job, uint32_t index, uint64_t value)
{
    time_t give_up = time(NULL) + TIMEOUT_S / 2;

    while (__atomic_load_n(&job->signals[index], __ATOMIC_ACQUIRE) < value) {
        CHECK(gin_api_progress(&job->api) == NET_SUCCESS, "progress");
        CHECK(time(NULL) < give_up, "rank %u: signal %u: want %lu, have %lu", job->api.rank, index,
              (unsigned long)value, (unsigned long)job->signals[index]);
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
