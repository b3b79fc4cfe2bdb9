/* SPDX-License-Identifier: Apache-2.0 */
/* A communicator's errors, and contexts that are made and destroyed many times. */
#include <criterion/criterion.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include "test/plugin/gin_job.h"

static int kill_one(struct ranks *ranks, void *user)
{
    time_t give_up = time(NULL) + TIMEOUT_S / 2;
    net_result result = NET_SUCCESS;
    void *request;
    struct job job;
    int done = 0, r = job_open(&job, ranks, user);

    if (r)
        return r;
    struct gin_call call = {.src = job.source_handle,
                            .size = 4096,
                            .dst = job.target_handle,
                            .rank = 1,
                            .signal = job.signal_handle,
                            .operation = GIN_SIGNAL_INC};

    if (job.api.rank == 0) {
        CHECK(gin_api_put(&job.api, &call, &request) == NET_SUCCESS, "put");
        CHECK(gin_api_wait(&job.api, request) == 0, "put");
        __atomic_store_n(&ranks_words(ranks)[0], 1, __ATOMIC_RELEASE);
        while (result == NET_SUCCESS && time(NULL) < give_up) {
            result = gin_api_put(&job.api, &call, &request);
            done = 0;
            while (result == NET_SUCCESS && !done && time(NULL) < give_up)
                result = gin_api_test(&job.api, request, &done);
        }
        CHECK(result == NET_REMOTE_ERROR, "the peer is dead, but the result is %d", result);
        CHECK(gin_api_has_error(&job.api), "no error is reported");
        __atomic_store_n(&ranks_words(ranks)[1], 1, __ATOMIC_RELEASE);
        _exit(0);
    }
    if (job.api.rank == 1) {
        while (!__atomic_load_n(&ranks_words(ranks)[0], __ATOMIC_ACQUIRE))
            gin_api_progress(&job.api);
        _exit(0); /* without closing anything */
    }
    while (!__atomic_load_n(&ranks_words(ranks)[1], __ATOMIC_ACQUIRE) && time(NULL) < give_up)
        usleep(1000);
    _exit(0);
}

Test(gin, a_dead_peer_is_a_remote_error_and_stays_one, .timeout = 300)
{
    cr_assert_eq(run(kill_one, (struct plan){14, 1}), 0);
}

enum { MAX_CONTEXTS = 4096 }; /* of a team at a time, with the one of the allgather */

/* Send a word from each rank to the next, in the current set. */
static int pass_word(struct job *job, uint64_t value)
{
    uint32_t next = (job->api.rank + 1) % RANKS;
    struct gin_call call = {.src = job->source_handle,
                            .size = 8,
                            .dst = job->target_handle,
                            .rank = next,
                            .signal = job->signal_handle,
                            .operation = GIN_SIGNAL_INC};
    void *request;

    job->source[0] = value;
    CHECK(gin_api_put(&job->api, &call, &request) == NET_SUCCESS && request, "put");
    if (wait_signal(job, 0, value))
        return 1;
    CHECK(job->target[0] == value, "rank %u has %lu, want %lu", job->api.rank, (unsigned long)job->target[0],
          (unsigned long)value);
    CHECK(gin_api_wait(&job->api, request) == 0, "put");
    /* Progress until the next rank has it: a rank accepts connections only while it progresses. */
    __atomic_fetch_add(&ranks_words(job->api.ranks)[0], 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&ranks_words(job->api.ranks)[0], __ATOMIC_ACQUIRE) < RANKS * value) {
        CHECK(gin_api_progress(&job->api) == NET_SUCCESS, "progress");
        sched_yield();
    }
    return 0;
}

/* The first set stays: its number and that of the last have the same index in the team's table. */
static int make_many_sets(struct ranks *ranks, void *user)
{
    struct rma_config_v14 config = {.contexts = 1, .traffic_class = -1, .rank_stride = 1}, many = config;
    struct job job;
    void *first, *last, *set;
    int r = job_open(&job, ranks, user);

    if (r)
        return r;
    first = job.api.set;
    if (pass_word(&job, 1))
        return 1;
    for (int i = 1; i < MAX_CONTEXTS; i++) {
        CHECK(job.api.v14->create_context(job.api.coll, &config, &set) == NET_SUCCESS, "set %d", i);
        job.api.v14->destroy_context(set);
    }
    CHECK(job.api.v14->create_context(job.api.coll, &config, &last) == NET_SUCCESS, "set %d", MAX_CONTEXTS);
    job.api.set = last;
    if (pass_word(&job, 2))
        return 1;
    job.api.set = first;
    if (pass_word(&job, 3))
        return 1;
    many.contexts = MAX_CONTEXTS - 2; /* one more than are left */
    CHECK(job.api.v14->create_context(job.api.coll, &many, &set) == NET_INVALID_ARGUMENT, "too many");
    job.api.v14->destroy_context(last);
    return job_close(&job);
}

Test(gin, contexts_are_given_back, .timeout = 300)
{
    cr_assert_eq(run(make_many_sets, (struct plan){14, 1}), 0);
}
