/* SPDX-License-Identifier: Apache-2.0 */
/* The RMA table, driven as NCCL's proxy drives it: what a transfer costs on the CPU, without a GPU.
 *
 *   softnic-run -- gin_proxy_bench [ITERATIONS]
 *
 * In each iteration every "CTA" hands a put of 8 bytes with a signal to the proxy of rank 0, one after the other. The
 * proxy is NCCL's of 2.30.7, which takes one descriptor per round, or of 2.31 and newer, which takes all there are and
 * says that more follow. One JSON object a row. Exit status 1 if data or the number of doorbells is wrong. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "test/plugin/gin_job.h"
#include "transport/util/clock.h"

enum { CTAS = 16, MOST_A_ROUND = 32 };

struct row {
    int version;     /* of the table */
    bool batches;    /* the proxy of 2.31 and newer */
    uint32_t gap_ns; /* between two CTAs; 0: all at once */
    uint32_t iterations;
};

struct cost {
    uint64_t put_ns, test_ns, progress_ns; /* of CPU, inside the plugin and the software NIC */
    uint64_t tests, rounds, usec;
};

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

/* Of this thread, so that other processes on its core do not count. */
static uint64_t cpu_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Test every unfinished request, as the proxy does at the start of a round. Return how many are unfinished. */
static int test_all(struct job *job, void **requests, int count, struct cost *cost)
{
    uint64_t began = cpu_ns();
    int left = 0;

    for (int i = 0; i < count; i++) {
        int done = 0;

        if (!requests[i])
            continue;
        cost->tests++;
        if (gin_api_test(&job->api, requests[i], &done) != NET_SUCCESS)
            return -1;
        if (done)
            requests[i] = NULL;
        else
            left++;
    }
    cost->test_ns += cpu_ns() - began;
    return left;
}

/* The CTAs of one kernel hand over one transfer each, to rank 1. Return 0 when all are done. */
static int iterate(struct job *job, const struct row *row, struct cost *cost)
{
    uint64_t start = prs_clock_ns();
    void *requests[CTAS] = {NULL};
    int handed = 0, left = 0;

    while (handed < CTAS || left) {
        uint64_t now = prs_clock_ns(), began;
        int ready = row->gap_ns ? (int)((now - start) / row->gap_ns) + 1 : CTAS;
        int round = row->batches ? MOST_A_ROUND : 1;

        ready = ready < CTAS ? ready : CTAS;
        left = test_all(job, requests, handed, cost);
        CHECK(left >= 0, "test");
        began = cpu_ns();
        for (; round > 0 && handed < ready; round--, handed++, left++) {
            struct gin_call call = {.src = job->source_handle,
                                    .size = 8,
                                    .dst = job->target_handle,
                                    .dst_offset = 8 * (uint64_t)handed,
                                    .rank = 1,
                                    .signal = job->signal_handle,
                                    .operation = GIN_SIGNAL_INC,
                                    .more = row->batches && round > 1 && handed + 1 < ready};

            CHECK(gin_api_put(&job->api, &call, &requests[handed]) == NET_SUCCESS, "put");
        }
        cost->put_ns += cpu_ns() - began;
        began = cpu_ns();
        CHECK(gin_api_progress(&job->api) == NET_SUCCESS, "progress");
        cost->progress_ns += cpu_ns() - began;
        cost->rounds++;
        sched_yield();
    }
    cost->usec += (prs_clock_ns() - start) / 1000;
    return 0;
}

static int send(struct job *job, const struct row *row)
{
    struct cost warm = {0}, cost = {0};
    double transfers = (double)row->iterations * CTAS;
    long before, bells;

    if (iterate(job, row, &warm)) /* connects */
        return 1;
    before = doorbells();
    for (uint32_t i = 0; i < row->iterations; i++)
        if (iterate(job, row, &cost))
            return 1;
    bells = doorbells() - before;
    printf("{\"table\":%d,\"proxy\":\"%s\",\"gap_ns\":%u,\"iterations\":%u,\"doorbells\":%.2f,\"put_ns\":%.0f,"
           "\"test_ns\":%.0f,\"progress_ns\":%.0f,\"tests\":%.1f,\"rounds\":%.1f,\"usec\":%.2f}\n",
           row->version, row->batches ? "2.31" : "2.30.7", row->gap_ns, row->iterations, (double)bells / transfers,
           (double)cost.put_ns / transfers, (double)cost.test_ns / transfers, (double)cost.progress_ns / transfers,
           (double)cost.tests / transfers, (double)cost.rounds / transfers,
           (double)cost.usec / (double)row->iterations);
    /* 16 transfers are 32 work requests, which leave 16 at a time. */
    CHECK(before >= 0, "softnicctl reports nothing");
    CHECK(!row->batches || row->version < 15 || row->gap_ns || bells <= 2 * (long)row->iterations,
          "%ld doorbells in %u rounds of %d", bells, row->iterations, CTAS);
    return 0;
}

static int body(struct ranks *ranks, void *user)
{
    const struct row *row = user;
    struct plan plan = {row->version, 1};
    uint64_t all = (uint64_t)CTAS * (1 + row->iterations);
    struct job job;
    int r = job_open(&job, ranks, &plan);

    if (r)
        return r;
    if (job.api.rank == 0)
        r = send(&job, row);
    else if (job.api.rank == 1)
        r = wait_signal(&job, 0, all);
    if (r)
        return r;
    CHECK(job.api.rank != 1 || job.signals[0] == all, "added %lu of %lu", (unsigned long)job.signals[0],
          (unsigned long)all);
    return job_close(&job);
}

int main(int argc, char **argv)
{
    uint32_t iterations = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 200;
    /* 14: as every NCCL from 2.30.7 on used this plugin before it had 15 and 16. */
    struct row rows[] = {{14, false, 0, 0},   {14, true, 0, 0},   {16, true, 0, 0},
                         {14, false, 300, 0}, {14, true, 300, 0}, {16, true, 300, 0}};

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        int r;

        rows[i].iterations = iterations;
        fflush(stdout);
        r = ranks_run(RANKS, 1, TIMEOUT_S, body, &rows[i]);
        if (r)
            return r == 77 ? 77 : 1;
    }
    return 0;
}
