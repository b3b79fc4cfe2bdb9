/* SPDX-License-Identifier: Apache-2.0 */
/* Results on stdout, as a table or as JSON, and the alpha-beta fit. */
#ifndef TOOLS_PERF_RESULTS_H
#define TOOLS_PERF_RESULTS_H

#include <stdbool.h>
#include <stdint.h>

struct putsignal_result {
    char policy[16];
    char group[16];
    uint64_t bytes;
    uint32_t concurrency, peers, iterations;
    double put_only_us, put_signal_us; /* medians of one iteration */
    double put_only_GBps, put_signal_GBps, efficiency;
    double fences, signals, stall_us; /* per iteration; stall_us: time in which nothing was posted */
    /* Of an iteration without signals and one with, together. */
    double both_work_requests, both_doorbells, both_completions;
    uint64_t errors; /* words that were wrong, and signals seen before their data */
};

void report_putsignal(const struct putsignal_result *result, bool json, bool first);

struct simple_result {
    const char *op, *mode, *policy;
    uint64_t bytes, errors;
    uint32_t concurrency, peers, iterations;
    double usec_p50, usec_p99, GBps, rate_Mps;
};
void report_simple(const struct simple_result *result, bool json, bool first);

/* T = alpha + bytes / beta, for each policy, group, concurrency and peers with at least two sizes. */
void report_fits(const struct putsignal_result *results, uint32_t count, bool json);

#endif
