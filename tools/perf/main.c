/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/perf/bench.h"
#include "tools/perf/options.h"
#include "tools/perf/putsignal.h"
#include "tools/perf/results.h"
#include "tools/perf/simple.h"
#include "tools/perf/trace.h"

enum { RESULTS_MAX = 4096 };

struct table {
    struct putsignal_result *results;
    uint32_t count;
    uint64_t errors;
};

/* Every cell of one policy. */
static int run_policy(struct bench *bench, const char *policy, struct table *table)
{
    const struct options *o = bench->options;
    uint32_t cells = o->groups.count * o->bytes.count * o->concurrency.count * o->peers.count;

    for (uint32_t i = 0; i < cells; i++) {
        struct cell cell = {
            .policy = policy,
            .group = o->groups.value[i % o->groups.count],
            .concurrency = (uint32_t)o->concurrency.value[i / o->groups.count % o->concurrency.count],
            .bytes = o->bytes.value[i / o->groups.count / o->concurrency.count % o->bytes.count],
            .peers = (uint32_t)o->peers.value[i / o->groups.count / o->concurrency.count / o->bytes.count],
        };
        struct putsignal_result *result = &table->results[table->count];
        int r = putsignal_run(bench, &cell, result);

        if (r < 0)
            return r;
        if (bench->bootstrap.rank != 0)
            continue;
        report_putsignal(result, o->json, table->count == 0);
        table->errors += result->errors;
        if (table->count < RESULTS_MAX - 1)
            table->count++;
    }
    return 0;
}

/* Rails without order (EFA) have neither of these policies. A user who names one gets the transport's error. */
static bool is_left_out(const struct bench *bench, const char *policy)
{
    struct prs_rail_info rail;

    return bench->options->every_policy && (!strcmp(policy, "in_order") || !strcmp(policy, "nic_fence")) &&
           prs_rail_query(bench->fabric, bench->rails.rail[0], &rail) == 0 && !rail.in_order;
}

static int open_trace(struct bench *bench)
{
    bool wanted = bench->options->trace && bench->bootstrap.rank == 0; /* only this rank sends */

    return wanted ? trace_open(bench->options->trace, &bench->trace) : 0;
}

static int putsignal_tables(struct bench *bench)
{
    const struct options *o = bench->options;
    struct table table = {calloc(RESULTS_MAX, sizeof(*table.results)), 0, 0};
    int r = table.results ? open_trace(bench) : -1, written;

    for (uint32_t p = 0; p < o->policies.count && r == 0; p++) {
        const char *policy = options_policy_name(o, p);

        if (is_left_out(bench, policy))
            continue;
        r = bench_open(bench, policy);
        if (!r)
            r = run_policy(bench, policy, &table);
        if (!r)
            r = ranks_barrier(bench->ranks); /* no rank closes while others still send */
        bench_close(bench);
    }
    if (r == 0 && bench->bootstrap.rank == 0)
        report_fits(table.results, table.count, o->json);
    written = trace_close(bench->trace, bench->bootstrap.rank, "perseus-perf putsignal, one iteration with signals");
    if (!r)
        r = written;
    if (table.errors) {
        fprintf(stderr, "perseus-perf: %llu words were wrong\n", (unsigned long long)table.errors);
        r = 1;
    }
    free(table.results);
    return r;
}

static int rank_body(struct ranks *ranks, void *user)
{
    const struct options *options = user;
    uint32_t most = 1;
    struct bench bench;
    int r;

    for (uint32_t i = 0; i < options->peers.count; i++)
        if (options->peers.value[i] > most)
            most = (uint32_t)options->peers.value[i];
    r = bench_init(&bench, ranks, most + 1, options);
    if (r)
        return r;
    r = options->op == PERF_PUTSIGNAL ? putsignal_tables(&bench) : simple_run(&bench);
    bench_fini(&bench);
    return r == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct options options;
    uint32_t ranks = 0;

    options_parse(argc, argv, &options);
    if (options.op == PERF_LATENCY || options.op == PERF_MSGRATE) {
        options.peers.count = 1;
        options.peers.value[0] = 1;
    }
    for (uint32_t i = 0; i < options.peers.count; i++)
        if (options.peers.value[i] + 1 > ranks)
            ranks = (uint32_t)options.peers.value[i] + 1;
    return ranks_run(ranks, options.nodes, options.timeout_s, rank_body, &options);
}
