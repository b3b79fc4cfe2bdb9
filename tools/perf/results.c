/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/perf/results.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "tools/common/json.h"

void report_putsignal(const struct putsignal_result *r, bool json, bool first)
{
    if (json) {
        json_print(stdout,
                   "{op:putsignal,policy:%s,group:%s,bytes:%" PRIu64 ",concurrency:%u,peers:%u,iterations:%u,"
                   "put_only_us:%.2f,put_signal_us:%.2f,put_only_GBps:%.4f,put_signal_GBps:%.4f,efficiency:%.4f,"
                   "fences:%.2f,signals:%.2f,stall_us:%.2f,both_work_requests:%.2f,both_doorbells:%.2f,"
                   "both_completions:%.2f,errors:%" PRIu64 "}\n",
                   r->policy, r->group, r->bytes, r->concurrency, r->peers, r->iterations, r->put_only_us,
                   r->put_signal_us, r->put_only_GBps, r->put_signal_GBps, r->efficiency, r->fences, r->signals,
                   r->stall_us, r->both_work_requests, r->both_doorbells, r->both_completions, r->errors);
        fflush(stdout);
        return;
    }
    if (first)
        printf("%-10s %-8s %9s %5s %5s %12s %12s %10s %10s %7s %8s %8s %6s\n", "policy", "group", "bytes", "conc",
               "peers", "put us", "put+sig us", "put GB/s", "p+s GB/s", "effic.", "fences", "signals", "errors");
    printf("%-10s %-8s %9" PRIu64 " %5u %5u %12.1f %12.1f %10.4f %10.4f %6.1f%% %8.1f %8.1f %6" PRIu64 "\n", r->policy,
           r->group, r->bytes, r->concurrency, r->peers, r->put_only_us, r->put_signal_us, r->put_only_GBps,
           r->put_signal_GBps, 100 * r->efficiency, r->fences, r->signals, r->errors);
    fflush(stdout);
}

void report_simple(const struct simple_result *r, bool json, bool first)
{
    if (json) {
        json_print(stdout,
                   "{op:%s,mode:%s,policy:%s,bytes:%" PRIu64 ",concurrency:%u,peers:%u,iterations:%u,usec_p50:%.2f,"
                   "usec_p99:%.2f,GBps:%.4f,rate_Mps:%.4f,errors:%" PRIu64 "}\n",
                   r->op, r->mode, r->policy, r->bytes, r->concurrency, r->peers, r->iterations, r->usec_p50,
                   r->usec_p99, r->GBps, r->rate_Mps, r->errors);
        fflush(stdout);
        return;
    }
    if (first)
        printf("%-9s %-11s %-10s %9s %5s %5s %10s %10s %10s %10s %6s\n", "op", "mode", "policy", "bytes", "conc",
               "peers", "p50 us", "p99 us", "GB/s", "M/s", "errors");
    printf("%-9s %-11s %-10s %9" PRIu64 " %5u %5u %10.2f %10.2f %10.4f %10.4f %6" PRIu64 "\n", r->op, r->mode,
           r->policy, r->bytes, r->concurrency, r->peers, r->usec_p50, r->usec_p99, r->GBps, r->rate_Mps, r->errors);
    fflush(stdout);
}

/* T = alpha + bytes / GBps, by least squares. r2 is 0 where no line fits. */
struct fit {
    double alpha_us, GBps, r2;
};

static struct fit fit_line(const double *bytes, const double *us, uint32_t count)
{
    double mean_x = 0, mean_y = 0, xx = 0, xy = 0, yy = 0;
    struct fit fit = {0, 0, 0};

    for (uint32_t i = 0; i < count; i++) {
        mean_x += bytes[i] / count;
        mean_y += us[i] / count;
    }
    for (uint32_t i = 0; i < count; i++) {
        xx += (bytes[i] - mean_x) * (bytes[i] - mean_x);
        xy += (bytes[i] - mean_x) * (us[i] - mean_y);
        yy += (us[i] - mean_y) * (us[i] - mean_y);
    }
    if (xx <= 0 || yy <= 0 || xy <= 0)
        return fit;
    fit.alpha_us = mean_y - xy / xx * mean_x;
    fit.GBps = xx / xy / 1e3; /* bytes per us are MB/s */
    fit.r2 = xy * xy / (xx * yy);
    return fit;
}

/* The results of one fit differ only in their sizes. */
static bool same_fit(const struct putsignal_result *a, const struct putsignal_result *b)
{
    return !strcmp(a->policy, b->policy) && !strcmp(a->group, b->group) && a->peers == b->peers &&
           a->concurrency == b->concurrency;
}

void report_fits(const struct putsignal_result *results, uint32_t count, bool json)
{
    for (uint32_t i = 0; i < count; i++) {
        double bytes[32], us[32];
        uint32_t points = 0;
        bool seen = false;
        struct fit fit;

        for (uint32_t k = 0; k < i; k++)
            seen |= same_fit(&results[k], &results[i]);
        for (uint32_t k = i; k < count && !seen && points < 32; k++) {
            if (!same_fit(&results[k], &results[i]))
                continue;
            bytes[points] = (double)results[k].bytes * results[k].concurrency;
            us[points++] = results[k].put_signal_us;
        }
        if (seen || points < 2)
            continue;
        fit = fit_line(bytes, us, points);
        if (json)
            json_print(stdout,
                       "{op:fit,policy:%s,group:%s,concurrency:%u,peers:%u,alpha_us:%.2f,beta_GBps:%.4f,r2:%.5f}\n",
                       results[i].policy, results[i].group, results[i].concurrency, results[i].peers, fit.alpha_us,
                       fit.GBps, fit.r2);
        else
            printf("fit %-10s %-8s %u x %u peers: T = %.1f us + M / %.4f GB/s, R^2 %.4f\n", results[i].policy,
                   results[i].group, results[i].concurrency, results[i].peers, fit.alpha_us, fit.GBps, fit.r2);
    }
}
