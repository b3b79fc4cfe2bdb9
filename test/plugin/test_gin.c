/* SPDX-License-Identifier: Apache-2.0 */
/* The GIN and RMA tables driven as NCCL's proxies drive them, by several processes over whatever device is there. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "test/plugin/gin_world.h"

static uint64_t place(uint32_t rank, int context, uint32_t message)
{
    return ((rank * CONTEXTS + (uint32_t)context) * MESSAGES + message) * WORDS;
}

static uint64_t word(uint32_t from, uint32_t to, int context, uint32_t message, uint32_t at)
{
    return (uint64_t)(from + 1) << 48 | (uint64_t)to << 40 | (uint64_t)context << 32 | message << 16 | at;
}

static void fill_messages(struct world *w, int contexts)
{
    for (uint32_t to = 0; to < RANKS; to++)
        for (int c = 0; c < contexts; c++)
            for (uint32_t m = 0; m < MESSAGES; m++)
                for (uint32_t i = 0; i < WORDS; i++)
                    w->source[place(to, c, m) + i] = word(w->api.rank, to, c, m, i);
}

/* Odd messages as put with signal, even ones as put and then a signal by itself. */
static int send_message(struct world *w, uint32_t to, int c, uint32_t m, void **requests, uint32_t *count)
{
    uint32_t me = w->api.rank;
    struct gin_call signal = {.signal = w->signal_handle,
                              .signal_offset = (me * CONTEXTS + (uint32_t)c) * 8ull,
                              .rank = to,
                              .context = c,
                              .operation = m % 4 < 2 ? GIN_SIGNAL_INC : GIN_SIGNAL_ADD,
                              .value = 1};
    struct gin_call put = m % 2 ? signal : (struct gin_call){.rank = to, .context = c};

    put.src = w->source_handle;
    put.src_offset = place(to, c, m) * 8;
    put.size = WORDS * 8;
    put.dst = w->target_handle;
    put.dst_offset = place(me, c, m) * 8;
    CHECK(gin_api_put(&w->api, &put, &requests[*count]) == NET_SUCCESS && requests[*count], "put %u", m);
    ++*count;
    if (m % 2)
        return 0;
    CHECK(gin_api_put(&w->api, &signal, &requests[*count]) == NET_SUCCESS && requests[*count], "signal %u", m);
    ++*count;
    return 0;
}

/* The m-th value of a sender's signal stands for its m-th message: strong, so for all before it, too. */
static int receive_message(struct world *w, uint32_t from, int c, uint32_t m)
{
    if (wait_signal(w, from * CONTEXTS + (uint32_t)c, m + 1))
        return 1;
    for (uint32_t i = 0; i < WORDS; i++)
        CHECK(w->target[place(from, c, m) + i] == word(from, w->api.rank, c, m, i),
              "v%d: rank %u: message %u of rank %u, context %d, word %u is wrong behind its signal", w->api.version,
              w->api.rank, m, from, c, i);
    return 0;
}

/* Every rank to every rank (itself too) in each context. */
static int exchange(struct ranks *ranks, void *user)
{
    static void *requests[RANKS * CONTEXTS * MESSAGES * 2];
    const struct plan *plan = user;
    uint32_t count = 0;
    struct world w;
    int r = world_open(&w, ranks, plan);

    if (r)
        return r;
    fill_messages(&w, plan->contexts);
    for (uint32_t m = 0; m < MESSAGES; m++)
        for (uint32_t to = 0; to < RANKS; to++)
            for (int c = 0; c < plan->contexts; c++)
                if (send_message(&w, to, c, m, requests, &count))
                    return 1;
    for (uint32_t m = 0; m < MESSAGES; m++)
        for (uint32_t from = 0; from < RANKS; from++)
            for (int c = 0; c < plan->contexts; c++)
                if (receive_message(&w, from, c, m))
                    return 1;
    for (uint32_t i = 0; i < count; i++)
        CHECK(gin_api_wait(&w.api, requests[i]) == 0, "request %u", i);
    CHECK(!gin_api_has_error(&w.api), "an error is told though there was none");
    return world_close(&w);
}

ParameterizedTestParameters(gin, every_table_carries_puts_and_signals_among_all_ranks)
{
    static struct plan plans[] = {{11, 1}, {12, 2}, {13, 2}, {14, 2}};

    return cr_make_param_array(struct plan, plans, 4);
}

ParameterizedTest(struct plan *plan, gin, every_table_carries_puts_and_signals_among_all_ranks, .timeout = 300)
{
    cr_assert_eq(run(exchange, *plan), 0, "v%d", plan->version);
}

enum { FLOOD = 3000 };

static int flood(struct ranks *ranks, void *user)
{
    static void *requests[FLOOD];
    struct world w;
    int r = world_open(&w, ranks, user);

    if (r)
        return r;
    for (uint32_t i = 0; i < FLOOD && w.api.rank == 0; i++) {
        struct gin_call call = {.src = w.source_handle,
                                .src_offset = i * 8,
                                .size = 8,
                                .dst = w.target_handle,
                                .dst_offset = i * 8,
                                .rank = 1,
                                .signal = w.signal_handle,
                                .operation = GIN_SIGNAL_ADD,
                                .value = 3,
                                .weak = true};

        w.source[i] = i + 1;
        CHECK(gin_api_put(&w.api, &call, &requests[i]) == NET_SUCCESS, "put %u", i);
        CHECK(requests[i], "put %u gave no request: NCCL has no way to try again", i);
    }
    for (uint32_t i = 0; i < FLOOD && w.api.rank == 0; i++)
        CHECK(gin_api_wait(&w.api, requests[i]) == 0, "request %u", i);
    if (w.api.rank == 1) {
        if (wait_signal(&w, 0, 3ull * FLOOD))
            return 1;
        for (uint32_t i = 0; i < FLOOD; i++)
            CHECK(w.target[i] == i + 1, "word %u", i);
        CHECK(w.signals[0] == 3ull * FLOOD, "added to %lu", (unsigned long)w.signals[0]);
    } else if (w.api.rank == 2 && wait_signal(&w, 1, 0)) {
        return 1;
    }
    return world_close(&w);
}

Test(gin, more_puts_than_queues_hold_wait_inside, .timeout = 300)
{
    cr_assert_eq(run(flood, (struct plan){14, 1}), 0);
}

/* Of all devices, as softnicctl tells them. */
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

/* One at a time, as NCCL's proxy brings them, with a call of progress behind each. user: must they share doorbells? */
static int burst(struct ranks *ranks, void *user)
{
    struct plan plan = {13, 1};
    void *requests[BURST];
    struct world w;
    int r = world_open(&w, ranks, &plan);

    if (r)
        return r;
    for (uint32_t i = 0; i < 1 + BURST && w.api.rank == 0; i++) {
        struct gin_call call = {
            .rank = 1, .signal = w.signal_handle, .signal_offset = i * 8, .operation = GIN_SIGNAL_INC};
        static long before, after;

        if (i == 1) /* connected */
            before = doorbells();
        CHECK(gin_api_put(&w.api, &call, &requests[i ? i - 1 : 0]) == NET_SUCCESS, "signal %u", i);
        CHECK(gin_api_progress(&w.api) == NET_SUCCESS, "progress");
        if (i == 0)
            CHECK(gin_api_wait(&w.api, requests[0]) == 0, "the first");
        if (i < BURST)
            continue;
        after = doorbells();
        CHECK(before >= 0 && after >= before, "softnicctl tells nothing");
        CHECK((after - before <= FEW) == *(bool *)user, "%ld doorbells for %d signals", after - before, BURST);
    }
    for (uint32_t i = 0; i < BURST && w.api.rank == 0; i++)
        CHECK(gin_api_wait(&w.api, requests[i]) == 0, "request %u", i);
    for (uint32_t i = 0; i < 1 + BURST && w.api.rank == 1; i++)
        if (wait_signal(&w, i, 1))
            return 1;
    return world_close(&w);
}

Test(gin, requests_of_a_burst_share_doorbells, .timeout = 300)
{
    bool shared = true;
    int r;

    setenv("PERSEUS_GIN_HOLD_NS", "1000000000", 1); /* a machine that stands still for a second must not end it */
    r = ranks_run(RANKS, 1, TIMEOUT_S, burst, &shared);
    if (r == 77)
        cr_skip_test("no RDMA device here");
    cr_assert_eq(r, 0);
    if (getenv("PERSEUS_ORDER") && !strcmp(getenv("PERSEUS_ORDER"), "drain"))
        return; /* there signals wait for one drain together, held or not */
    setenv("PERSEUS_GIN_HOLD_NS", "0", 1);
    shared = false;
    cr_assert_eq(ranks_run(RANKS, 1, TIMEOUT_S, burst, &shared), 0, "not held, each has its own");
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
    struct world w;
    int r = world_open(&w, ranks, user);

    if (r)
        return r;
    peer = (w.api.rank + 1) % RANKS;
    for (uint32_t i = 0; i < 1000; i++)
        w.source[i] = w.api.rank << 16 | i;
    CHECK(ranks_barrier(ranks) == 0, "meeting");
    struct gin_call call = {.src = w.source_handle,
                            .src_offset = 80,
                            .size = 8 * 900,
                            .dst = w.target_handle,
                            .dst_offset = 16,
                            .rank = peer};

    CHECK(gin_api_get(&w.api, &call, &request) == NET_SUCCESS && request, "get");
    /* The others must be driven to be connected to: all wait for each other's queues here. */
    CHECK(gin_api_wait(&w.api, request) == 0, "get");
    for (uint32_t i = 0; i < 900; i++)
        CHECK(w.target[2 + i] == (peer << 16 | (i + 10)), "word %u", i);
    CHECK(gin_api_flush(&w.api, w.target_handle, w.api.rank, &request) == NET_SUCCESS, "flush");
    CHECK(!request, "host memory needs no flush");
    /* Until all have read from us: nobody accepts for a rank that does not progress. */
    __atomic_fetch_add(&ranks_words(ranks)[0], 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&ranks_words(ranks)[0], __ATOMIC_ACQUIRE) < RANKS) {
        CHECK(gin_api_progress(&w.api) == NET_SUCCESS, "progress");
        sched_yield();
    }
    return world_close(&w);
}

Test(gin, a_get_reads_and_a_flush_of_host_memory_is_nothing, .timeout = 300)
{
    cr_assert_eq(run(get_and_flush, (struct plan){13, 1}), 0);
}

static int misuse(struct ranks *ranks, void *user)
{
    void *request = NULL;
    struct world w;
    int r = world_open(&w, ranks, user);

    if (r)
        return r;
    const struct gin_call good = {.src = w.source_handle,
                                  .size = 64,
                                  .dst = w.target_handle,
                                  .rank = 0,
                                  .signal = w.signal_handle,
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
        CHECK(gin_api_put(&w.api, &bad[i], &request) == NET_INVALID_ARGUMENT && !request, "row %d was taken", i);
    CHECK(gin_api_put(&w.api, &good, &request) == NET_SUCCESS && request, "the good one");
    CHECK(gin_api_wait(&w.api, request) == 0, "rank 0 is driven by its own test alone");
    return world_close(&w);
}

static int misuse_self(struct ranks *ranks, void *user)
{
    /* Only rank 0 has somebody who progresses rank 0. */
    if (ranks_rank(ranks) == 0)
        return misuse(ranks, user);
    struct world w;
    int r = world_open(&w, ranks, user);

    return r ? r : world_close(&w);
}

Test(gin, a_transfer_that_cannot_be_right_is_refused, .timeout = 300)
{
    cr_assert_eq(run(misuse_self, (struct plan){14, 1}), 0);
}

static int bad_window(struct ranks *ranks, void *user)
{
    struct gin_api api;
    const struct plan *plan = user;
    void *handle = NULL, *memory = aligned_alloc(4096, 4096);
    int r = gin_api_open(&api, ranks, RANKS, plan->version, 1);

    if (r)
        return r;
    /* Rank 1 registers what is not mapped. */
    CHECK(gin_api_reg(&api, api.rank == 1 ? (void *)0x10000 : memory, 4096, 0, &handle) != NET_SUCCESS && !handle,
          "rank %u: registered though rank 1 could not", api.rank);
    CHECK(gin_api_reg(&api, memory, 4096, 0, &handle) == NET_SUCCESS, "rank %u: the next one", api.rank);
    CHECK(gin_api_dereg(&api, handle) == NET_SUCCESS, "release");
    CHECK(ranks_barrier(ranks) == 0, "meeting before the end");
    gin_api_close(&api);
    free(memory);
    return 0;
}

Test(gin, when_one_rank_cannot_register_all_are_told, .timeout = 300)
{
    cr_assert_eq(run(bad_window, (struct plan){14, 1}), 0);
}

static int kill_one(struct ranks *ranks, void *user)
{
    time_t give_up = time(NULL) + TIMEOUT_S / 2;
    net_result result = NET_SUCCESS;
    void *request;
    struct world w;
    int done = 0, r = world_open(&w, ranks, user);

    if (r)
        return r;
    struct gin_call call = {.src = w.source_handle,
                            .size = 4096,
                            .dst = w.target_handle,
                            .rank = 1,
                            .signal = w.signal_handle,
                            .operation = GIN_SIGNAL_INC};

    if (w.api.rank == 0) {
        CHECK(gin_api_put(&w.api, &call, &request) == NET_SUCCESS, "put");
        CHECK(gin_api_wait(&w.api, request) == 0, "put");
        __atomic_store_n(&ranks_words(ranks)[0], 1, __ATOMIC_RELEASE);
        while (result == NET_SUCCESS && time(NULL) < give_up) {
            result = gin_api_put(&w.api, &call, &request);
            done = 0;
            while (result == NET_SUCCESS && !done && time(NULL) < give_up)
                result = gin_api_test(&w.api, request, &done);
        }
        CHECK(result == NET_REMOTE_ERROR, "the peer is dead, and the result is %d", result);
        CHECK(gin_api_has_error(&w.api), "no error is told");
        __atomic_store_n(&ranks_words(ranks)[1], 1, __ATOMIC_RELEASE);
        _exit(0);
    }
    if (w.api.rank == 1) {
        while (!__atomic_load_n(&ranks_words(ranks)[0], __ATOMIC_ACQUIRE))
            gin_api_progress(&w.api);
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

/* Rank 1 ends its comm where the others register. */
static int leave_early(struct ranks *ranks, void *user)
{
    time_t began = time(NULL);
    const struct plan *plan = user;
    struct gin_api api;
    void *handle = NULL, *memory = aligned_alloc(4096, 4096);
    int r = gin_api_open(&api, ranks, RANKS, plan->version, 1);

    if (r)
        return r;
    if (api.rank != 1)
        CHECK(gin_api_reg(&api, memory, 4096, 0, &handle) != NET_SUCCESS && !handle, "rank %u", api.rank);
    CHECK(time(NULL) - began < 40, "rank %u waited for one that had left", api.rank);
    gin_api_close(&api);
    free(memory);
    return 0;
}

Test(gin, a_rank_that_has_left_ends_the_registration_of_the_others, .timeout = 300)
{
    cr_assert_eq(run(leave_early, (struct plan){14, 1}), 0);
}
