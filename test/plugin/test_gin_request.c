/* SPDX-License-Identifier: Apache-2.0 */
/* Transfers of GIN and RMA, one at a time, in bursts, and with wrong arguments. */
#include <criterion/criterion.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test/plugin/gin_job.h"

enum { FLOOD = 3000 };

static int flood(struct ranks *ranks, void *user)
{
    static void *requests[FLOOD];
    struct job job;
    int r = job_open(&job, ranks, user);

    if (r)
        return r;
    for (uint32_t i = 0; i < FLOOD && job.api.rank == 0; i++) {
        struct gin_call call = {.src = job.source_handle,
                                .src_offset = i * 8,
                                .size = 8,
                                .dst = job.target_handle,
                                .dst_offset = i * 8,
                                .rank = 1,
                                .signal = job.signal_handle,
                                .operation = GIN_SIGNAL_ADD,
                                .value = 3,
                                .weak = true};

        job.source[i] = i + 1;
        CHECK(gin_api_put(&job.api, &call, &requests[i]) == NET_SUCCESS, "put %u", i);
        CHECK(requests[i], "put %u gave no request: NCCL has no way to try again", i);
    }
    for (uint32_t i = 0; i < FLOOD && job.api.rank == 0; i++)
        CHECK(gin_api_wait(&job.api, requests[i]) == 0, "request %u", i);
    if (job.api.rank == 1) {
        if (wait_signal(&job, 0, 3ull * FLOOD))
            return 1;
        for (uint32_t i = 0; i < FLOOD; i++)
            CHECK(job.target[i] == i + 1, "word %u", i);
        CHECK(job.signals[0] == 3ull * FLOOD, "added to %lu", (unsigned long)job.signals[0]);
    } else if (job.api.rank == 2 && wait_signal(&job, 1, 0)) {
        return 1;
    }
    return job_close(&job);
}

Test(gin, more_puts_than_queues_hold_wait_inside, .timeout = 300)
{
    cr_assert_eq(run(flood, (struct plan){14, 1}), 0);
}

/* Of all devices, from softnicctl. */
static long doorbells(void)
{
    const char *ctl = getenv("SOFTNICCTL");
    char command[4200], text[4096] = {0};
    long sum = 0;
    FILE *out;

    snprintf(command, sizeof(command), "%s --json counters", ctl ? ctl : "softnicctl");
    out = popen(command, "r");
    if (!out || !fread(text, 1, sizeof(text) - 1, out))
        return -1;
    pclose(out);
    for (const char *at = text; (at = strstr(at, "\"doorbells\": "));)
        sum += strtol(at += 13, NULL, 10);
    return sum;
}

enum { BURST = 32, FEW = BURST / 2 };

/* One signal at a time, with a call of progress after each, as NCCL's proxy does. user: whether they share
 * doorbells. */
static int burst(struct ranks *ranks, void *user)
{
    struct plan plan = {13, 1};
    void *requests[BURST];
    struct job job;
    int r = job_open(&job, ranks, &plan);

    if (r)
        return r;
    for (uint32_t i = 0; i < 1 + BURST && job.api.rank == 0; i++) {
        struct gin_call call = {
            .rank = 1, .signal = job.signal_handle, .signal_offset = i * 8, .operation = GIN_SIGNAL_INC};
        static long before, after;

        if (i == 1) /* connected */
            before = doorbells();
        CHECK(gin_api_put(&job.api, &call, &requests[i ? i - 1 : 0]) == NET_SUCCESS, "signal %u", i);
        CHECK(gin_api_progress(&job.api) == NET_SUCCESS, "progress");
        if (i == 0)
            CHECK(gin_api_wait(&job.api, requests[0]) == 0, "the first");
        if (i < BURST)
            continue;
        after = doorbells();
        CHECK(before >= 0 && after >= before, "softnicctl reports nothing");
        CHECK((after - before <= FEW) == *(bool *)user, "%ld doorbells for %d signals", after - before, BURST);
    }
    for (uint32_t i = 0; i < BURST && job.api.rank == 0; i++)
        CHECK(gin_api_wait(&job.api, requests[i]) == 0, "request %u", i);
    for (uint32_t i = 0; i < 1 + BURST && job.api.rank == 1; i++)
        if (wait_signal(&job, i, 1))
            return 1;
    return job_close(&job);
}

Test(gin, requests_of_a_burst_share_doorbells, .timeout = 300)
{
    bool shared = true;
    int r;

    setenv("PERSEUS_GIN_HOLD_NS", "1000000000", 1); /* long enough for a machine that stops for a moment */
    r = ranks_run(RANKS, 1, TIMEOUT_S, burst, &shared);
    if (r == 77)
        cr_skip_test("no RDMA device here");
    cr_assert_eq(r, 0);
    if (getenv("PERSEUS_ORDER") && !strcmp(getenv("PERSEUS_ORDER"), "drain"))
        return; /* under drain, signals wait for one drain together in any case */
    setenv("PERSEUS_GIN_HOLD_NS", "0", 1);
    shared = false;
    cr_assert_eq(ranks_run(RANKS, 1, TIMEOUT_S, burst, &shared), 0, "without a hold each signal has its own doorbell");
}

enum { ROUND = 7 }; /* 14 work requests: 16 would leave by themselves */

/* What a round of NCCL's proxy passes to one rank: puts, each with a signal, and all but the last with the word that
 * more follow. user: the version; 14 has no such word. */
static int round_of_puts(struct ranks *ranks, void *user)
{
    struct plan plan = {*(int *)user, 1};
    long before = 0, at_once, all;
    void *requests[1 + ROUND];
    struct job job;
    int r = job_open(&job, ranks, &plan);

    if (r)
        return r;
    for (uint32_t i = 0; i < 1 + ROUND && job.api.rank == 0; i++) {
        struct gin_call call = {.src = job.source_handle,
                                .src_offset = i * 8,
                                .size = 8,
                                .dst = job.target_handle,
                                .dst_offset = i * 8,
                                .rank = 1,
                                .signal = job.signal_handle,
                                .operation = GIN_SIGNAL_INC,
                                .weak = i % 2,
                                .more = i > 0 && i < ROUND};

        job.source[i] = i + 1;
        if (i == 1) /* connected */
            before = doorbells();
        CHECK(gin_api_put(&job.api, &call, &requests[i]) == NET_SUCCESS, "put %u", i);
        if (i == 0)
            CHECK(gin_api_wait(&job.api, requests[0]) == 0, "the first");
    }
    if (job.api.rank == 0) {
        at_once = doorbells() - before;
        for (uint32_t i = 1; i < 1 + ROUND; i++)
            CHECK(gin_api_wait(&job.api, requests[i]) == 0, "request %u", i);
        all = doorbells() - before;
        CHECK(at_once == 1 && (plan.version >= 15) == (all == 1), "v%d: %ld doorbells at once, %ld in all",
              plan.version, at_once, all);
    }
    if (job.api.rank == 1) {
        if (wait_signal(&job, 0, 1 + ROUND))
            return 1;
        for (uint32_t i = 0; i < 1 + ROUND; i++)
            CHECK(job.target[i] == i + 1, "word %u", i);
    }
    return job_close(&job);
}

Test(gin, a_round_of_transfers_that_says_more_follows_is_one_doorbell, .timeout = 300)
{
    static const int versions[] = {14, 15, 16, 17};

    if (getenv("PERSEUS_ORDER")) /* counted: other queues carry the records; drain: signals wait for completions */
        cr_skip_test("the number of doorbells is that of one queue in order");
    for (int i = 0; i < 4; i++) {
        int version = versions[i], r = ranks_run(RANKS, 1, TIMEOUT_S, round_of_puts, &version);

        if (r == 77)
            cr_skip_test("no RDMA device here");
        cr_assert_eq(r, 0, "v%d", version);
    }
}

/* A put with a signal, alone and after a pause. user: the version. */
static int lone_put_signal(struct ranks *ranks, void *user)
{
    struct plan plan = {*(int *)user, 1};
    struct job job;
    int r = job_open(&job, ranks, &plan);

    if (r)
        return r;
    for (uint32_t i = 0; i < 2 && job.api.rank == 0; i++) { /* the first connects */
        struct gin_call call = {.src = job.source_handle,
                                .size = 64,
                                .dst = job.target_handle,
                                .rank = 1,
                                .signal = job.signal_handle,
                                .operation = GIN_SIGNAL_INC};
        long before = doorbells(), at_once, all;
        void *request;

        CHECK(gin_api_put(&job.api, &call, &request) == NET_SUCCESS, "put");
        at_once = doorbells() - before;
        CHECK(gin_api_wait(&job.api, request) == 0, "put");
        all = doorbells() - before;
        CHECK(i == 0 || (at_once == 1 && all == 1), "v%d: %ld doorbells at once, %ld in all, for a put with a signal",
              plan.version, at_once, all);
    }
    if (job.api.rank == 1 && wait_signal(&job, 0, 2))
        return 1;
    return job_close(&job);
}

Test(gin, a_lone_put_with_its_signal_is_one_doorbell_at_once, .timeout = 300)
{
    static const int versions[] = {13, 14, 16};

    if (getenv("PERSEUS_ORDER"))
        cr_skip_test("the number of doorbells is that of one queue in order");
    for (int i = 0; i < 3; i++) {
        int version = versions[i], r = ranks_run(RANKS, 1, TIMEOUT_S, lone_put_signal, &version);

        if (r == 77)
            cr_skip_test("no RDMA device here");
        cr_assert_eq(r, 0, "v%d", version);
    }
}

static int not_connected(struct ranks *ranks, void *user)
{
    struct gin_api api;

    return gin_api_open(&api, ranks, RANKS, 13, *(int *)user) == 0; /* 77: no device */
}

Test(gin, a_hold_that_is_no_number_is_refused, .timeout = 300)
{
    int contexts = 1;

    setenv("PERSEUS_GIN_HOLD_NS", "soon", 1);
    cr_assert_eq(ranks_run(RANKS, 1, TIMEOUT_S, not_connected, &contexts), 0);
}

static int get_and_flush(struct ranks *ranks, void *user)
{
    uint32_t peer;
    void *request;
    struct job job;
    int r = job_open(&job, ranks, user);

    if (r)
        return r;
    peer = (job.api.rank + 1) % RANKS;
    for (uint32_t i = 0; i < 1000; i++)
        job.source[i] = job.api.rank << 16 | i;
    CHECK(ranks_barrier(ranks) == 0, "barrier");
    struct gin_call call = {.src = job.source_handle,
                            .src_offset = 80,
                            .size = 8 * 900,
                            .dst = job.target_handle,
                            .dst_offset = 16,
                            .rank = peer};

    CHECK(gin_api_get(&job.api, &call, &request) == NET_SUCCESS && request, "get");
    /* This also accepts connections: each rank must progress until the others are connected. */
    CHECK(gin_api_wait(&job.api, request) == 0, "get");
    for (uint32_t i = 0; i < 900; i++)
        CHECK(job.target[2 + i] == (peer << 16 | (i + 10)), "word %u", i);
    CHECK(gin_api_flush(&job.api, job.target_handle, job.api.rank, &request) == NET_SUCCESS, "flush");
    CHECK(!request, "host memory needs no flush");
    /* Progress until all have read from us: a rank accepts connections only while it progresses. */
    __atomic_fetch_add(&ranks_words(ranks)[0], 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&ranks_words(ranks)[0], __ATOMIC_ACQUIRE) < RANKS) {
        CHECK(gin_api_progress(&job.api) == NET_SUCCESS, "progress");
        sched_yield();
    }
    return job_close(&job);
}

Test(gin, a_get_reads_and_a_flush_of_host_memory_is_nothing, .timeout = 300)
{
    cr_assert_eq(run(get_and_flush, (struct plan){13, 1}), 0);
}

static int misuse(struct ranks *ranks, void *user)
{
    void *request = NULL;
    struct job job;
    int r = job_open(&job, ranks, user);

    if (r)
        return r;
    const struct gin_call good = {.src = job.source_handle,
                                  .size = 64,
                                  .dst = job.target_handle,
                                  .rank = 0,
                                  .signal = job.signal_handle,
                                  .operation = GIN_SIGNAL_INC};
    struct gin_call bad[8];

    for (int i = 0; i < 8; i++)
        bad[i] = good;
    bad[0].rank = RANKS;
    bad[1].context = 1;
    bad[2].dst_offset = DATA_BYTES - 63;
    bad[3].src_offset = ~0ull - 10;
    bad[4].signal_offset = SIGNAL_WORDS * 8;
    bad[5].signal_offset = 4;
    bad[6].operation = 9;
    bad[7].src = NULL;
    for (int i = 0; i < 8; i++)
        CHECK(gin_api_put(&job.api, &bad[i], &request) == NET_INVALID_ARGUMENT && !request, "row %d was accepted", i);
    CHECK(gin_api_put(&job.api, &good, &request) == NET_SUCCESS && request, "the valid one");
    CHECK(gin_api_wait(&job.api, request) == 0, "test() must drive rank 0");
    return job_close(&job);
}

static int misuse_self(struct ranks *ranks, void *user)
{
    /* Only rank 0 sends, to itself: the other ranks do not progress. */
    if (ranks_rank(ranks) == 0)
        return misuse(ranks, user);
    struct job job;
    int r = job_open(&job, ranks, user);

    return r ? r : job_close(&job);
}

Test(gin, a_transfer_that_cannot_be_right_is_refused, .timeout = 300)
{
    cr_assert_eq(run(misuse_self, (struct plan){14, 1}), 0);
}
