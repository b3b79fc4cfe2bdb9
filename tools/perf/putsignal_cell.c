/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/perf/putsignal_cell.h"

void cell_count(struct bench *bench, struct cell_counts *out)
{
    struct prs_stats stats;

    prs_proxy_stats(bench->proxy, &out->proxy);
    prs_team_stats(bench->team, 0, &stats);
    out->fences = out->proxy.fences + stats.fences + stats.drains;
    out->work_requests = stats.work_requests;
    out->doorbells = stats.doorbells;
    out->completions = stats.completions;
}

void cell_conclude(const struct cell *cell, uint32_t iterations, double *put_only_us, double *put_signal_us,
                   const struct cell_counts *before, const struct cell_counts *after, struct putsignal_result *result)
{
    double total = (double)cell->bytes * cell->concurrency;

    result->iterations = iterations;
    result->put_only_us = bench_median(put_only_us, iterations);
    result->put_signal_us = bench_median(put_signal_us, iterations);
    result->put_only_GBps = total / result->put_only_us / 1e3;
    result->put_signal_GBps = total / result->put_signal_us / 1e3;
    result->efficiency = result->put_only_us / result->put_signal_us;
    result->fences = (double)(after->fences - before->fences) / iterations;
    result->signals = (double)(after->proxy.signals - before->proxy.signals) / iterations;
    result->both_work_requests = (double)(after->work_requests - before->work_requests) / iterations;
    result->both_doorbells = (double)(after->doorbells - before->doorbells) / iterations;
    result->both_completions = (double)(after->completions - before->completions) / iterations;
    result->stall_us = (double)(after->proxy.stall_ns - before->proxy.stall_ns) / 1e3 / iterations;
}
