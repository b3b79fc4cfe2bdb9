/* SPDX-License-Identifier: Apache-2.0 */
/* Every GIN and RMA table carries puts and signals, driven as NCCL's proxies drive it. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>

#include "test/plugin/gin_job.h"

static uint64_t message_offset(uint32_t rank, int context, uint32_t message)
{
    return ((rank * CONTEXTS + (uint32_t)context) * MESSAGES + message) * WORDS;
}

static uint64_t expected_word(uint32_t from, uint32_t to, int context, uint32_t message, uint32_t at)
{
    return (uint64_t)(from + 1) << 48 | (uint64_t)to << 40 | (uint64_t)context << 32 | message << 16 | at;
}

static void fill_messages(struct job *job, int contexts)
{
    for (uint32_t to = 0; to < RANKS; to++)
        for (int c = 0; c < contexts; c++)
            for (uint32_t m = 0; m < MESSAGES; m++)
                for (uint32_t i = 0; i < WORDS; i++)
                    job->source[message_offset(to, c, m) + i] = expected_word(job->api.rank, to, c, m, i);
}

/* Odd messages are a put with a signal, even ones a put and then a separate signal. */
static int send_message(struct job *job, uint32_t to, int c, uint32_t m, void **requests, uint32_t *count)
{
    uint32_t me = job->api.rank;
    struct gin_call signal = {.signal = job->signal_handle,
                              .signal_offset = (me * CONTEXTS + (uint32_t)c) * 8ull,
                              .rank = to,
                              .context = c,
                              .operation = m % 4 < 2 ? GIN_SIGNAL_INC : GIN_SIGNAL_ADD,
                              .value = 1};
    struct gin_call put = m % 2 ? signal : (struct gin_call){.rank = to, .context = c};

    put.more = m % 2 == 0;
    put.src = job->source_handle;
    put.src_offset = message_offset(to, c, m) * 8;
    put.size = WORDS * 8;
    put.dst = job->target_handle;
    put.dst_offset = message_offset(me, c, m) * 8;
    CHECK(gin_api_put(&job->api, &put, &requests[*count]) == NET_SUCCESS && requests[*count], "put %u", m);
    ++*count;
    if (m % 2)
        return 0;
    CHECK(gin_api_put(&job->api, &signal, &requests[*count]) == NET_SUCCESS && requests[*count], "signal %u", m);
    ++*count;
    return 0;
}

/* When a sender's signal has value m + 1, message m must have arrived. */
static int receive_message(struct job *job, uint32_t from, int c, uint32_t m)
{
    if (wait_signal(job, from * CONTEXTS + (uint32_t)c, m + 1))
        return 1;
    for (uint32_t i = 0; i < WORDS; i++)
        CHECK(job->target[message_offset(from, c, m) + i] == expected_word(from, job->api.rank, c, m, i),
              "v%d: rank %u: message %u of rank %u, context %d, word %u is wrong after its signal", job->api.version,
              job->api.rank, m, from, c, i);
    return 0;
}

/* Every rank sends to every rank, itself included, in each context. */
static int exchange(struct ranks *ranks, void *user)
{
    static void *requests[RANKS * CONTEXTS * MESSAGES * 2];
    const struct plan *plan = user;
    uint32_t count = 0;
    struct job job;
    int r = job_open(&job, ranks, plan);

    if (r)
        return r;
    fill_messages(&job, plan->contexts);
    for (uint32_t m = 0; m < MESSAGES; m++)
        for (uint32_t to = 0; to < RANKS; to++)
            for (int c = 0; c < plan->contexts; c++)
                if (send_message(&job, to, c, m, requests, &count))
                    return 1;
    for (uint32_t m = 0; m < MESSAGES; m++)
        for (uint32_t from = 0; from < RANKS; from++)
            for (int c = 0; c < plan->contexts; c++)
                if (receive_message(&job, from, c, m))
                    return 1;
    for (uint32_t i = 0; i < count; i++)
        CHECK(gin_api_wait(&job.api, requests[i]) == 0, "request %u", i);
    CHECK(!gin_api_has_error(&job.api), "an error is reported, but there was none");
    return job_close(&job);
}

ParameterizedTestParameters(gin, every_table_carries_puts_and_signals_among_all_ranks)
{
    static struct plan plans[] = {{11, 1}, {12, 2}, {13, 2}, {14, 2}, {15, 2}, {16, 2}, {17, 2}};

    return cr_make_param_array(struct plan, plans, sizeof(plans) / sizeof(*plans));
}

ParameterizedTest(struct plan *plan, gin, every_table_carries_puts_and_signals_among_all_ranks, .timeout = 300)
{
    cr_assert_eq(run(exchange, *plan), 0, "v%d", plan->version);
}
