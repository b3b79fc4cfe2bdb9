/* SPDX-License-Identifier: Apache-2.0 */
/* A communicator's errors, and contexts that are made and destroyed many times. */
#include <criterion/criterion.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
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

/* ---- what NCCL asks of RMA ---- */

static int tell_properties(struct ranks *ranks, void *user)
{
    const char *order = getenv("PERSEUS_ORDER");
    struct job job;
    int r = job_open(&job, ranks, user);
    /* A word that the CPU raises, or a word over SRD, flushes nothing. */
    bool expected = (!order || strcmp(order, "counted") != 0) && !getenv("SOFTNIC_TEST_EFA");

    if (r)
        return r;
    CHECK(gin_api_signal_flushes(&job.api) == expected, "v%d: %d", job.api.version, !expected);
    return job_close(&job);
}

Test(gin, a_signal_flushes_all_puts_only_where_a_nic_writes_it, .timeout = 300)
{
    cr_assert_eq(run(tell_properties, (struct plan){16, 1}), 0);
    cr_assert_eq(run(tell_properties, (struct plan){17, 1}), 0);
}

static int open_with_class(struct ranks *ranks, void *user)
{
    struct gin_api api;

    gin_api_traffic_class = *(int *)user;
    return gin_api_open(&api, ranks, RANKS, 16, 1) == 0;
}

struct class_row {
    int wanted;
    const char *gin, *ib; /* NCCL_GIN_IB_TC, NCCL_IB_TC; NULL: not set */
    const char *used;     /* in the log; NULL: the network's default */
};

/* Rank 0 connects to rank 1; both log the class of their connections after those of the registrations. */
static int connect_with_class(struct ranks *ranks, void *user)
{
    const struct class_row *row = user;
    struct plan plan = {16, 1};
    char text[64];
    struct job job;
    int r;

    if (row->gin)
        setenv("NCCL_GIN_IB_TC", row->gin, 1);
    if (row->ib)
        setenv("NCCL_IB_TC", row->ib, 1);
    gin_api_traffic_class = row->wanted;
    r = job_open(&job, ranks, &plan);
    if (r)
        return r;
    snprintf(text, sizeof(text), "traffic class %s", row->used ? row->used : "");
    gin_api_looks_for = text;
    if (pass_word(&job, 1))
        return 1;
    CHECK((gin_api_found > 0) == (row->used != NULL), "rank %u: %d lines with \"%s\"", job.api.rank, gin_api_found,
          text);
    return job_close(&job);
}

Test(gin, the_traffic_class_of_a_communicator_reaches_its_connections, .timeout = 300)
{
    struct class_row rows[] = {
        {104, NULL, NULL, "104"}, {-1, NULL, NULL, NULL}, {104, NULL, "96", "96"}, {104, "64", "96", "64"}};

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        int r = ranks_run(RANKS, 1, TIMEOUT_S, connect_with_class, &rows[i]);

        if (r == 77)
            cr_skip_test("no RDMA device here");
        cr_assert_eq(r, 0, "row %zu", i);
    }
}

Test(gin, a_traffic_class_that_is_none_is_refused, .timeout = 300)
{
    int impossible = 256, none = -1;

    cr_assert_eq(ranks_run(RANKS, 1, TIMEOUT_S, open_with_class, &impossible), 0, "the communicator's");
    setenv("NCCL_GIN_IB_TC", "256", 1);
    cr_assert_eq(ranks_run(RANKS, 1, TIMEOUT_S, open_with_class, &none), 0, "NCCL_GIN_IB_TC");
}
