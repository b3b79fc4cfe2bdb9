/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/bandwidth.h"

#include <stdio.h>
#include <stdlib.h>

#include "tools/common/json.h"

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Bytes that each port carries for a byte of the operation, as nccl-tests counts. */
static double bus_factor(const struct options *options)
{
    double ranks = options->ranks;

    switch (options->op) {
    case OP_ALLREDUCE:
        return 2 * (ranks - 1) / ranks;
    case OP_ALLGATHER:
    case OP_REDUCESCATTER:
    case OP_ALLTOALL:
        return (ranks - 1) / ranks;
    default:
        return 1;
    }
}

void bandwidth_print_head(const struct options *options)
{
    if (options->json)
        return;
    printf("# %s, %s, %d ranks on %d nodes, %d comms, %d outstanding, %d a receive, %d iterations, data %s\n",
           options->plugin, op_name(options->op), options->ranks, options->nodes, options->comms, options->outstanding,
           options->per_receive, options->iters, options->check ? "checked" : "not checked");
    printf("#%12s %4s %10s %10s %10s %10s %8s\n", "bytes", "api", "p50 us", "p99 us", "alg GB/s", "bus GB/s", "errors");
    fflush(stdout);
}

struct times {
    double least, p50, p99, most;
};

/* Summarizes all iterations. The time of an iteration is that of its slowest rank. */
static struct times summarize(const struct options *options, struct job *job, int iterations)
{
    double *slowest = job_usec(job, 0);

    for (int rank = 1; rank < options->ranks; rank++) {
        const double *other = job_usec(job, rank);

        for (int i = 0; i < iterations; i++)
            slowest[i] = other[i] > slowest[i] ? other[i] : slowest[i];
    }
    qsort(slowest, iterations, sizeof(*slowest), by_value);
    return (struct times){slowest[0], slowest[iterations / 2], slowest[(iterations * 99 - 1) / 100],
                          slowest[iterations - 1]};
}

void bandwidth_print_size(const struct options *options, const struct net *net, struct job *job, size_t bytes,
                          int iterations)
{
    struct times usec = summarize(options, job, iterations);
    double alg = usec.p50 > 0 ? bytes / usec.p50 / 1e3 : 0, bus;
    uint64_t errors = 0;

    bus = alg * bus_factor(options);
    for (int rank = 0; rank < options->ranks; rank++)
        errors += job->rank[rank].errors;
    if (options->json)
        json_print(stdout,
                   "{plugin:%s,name:%s,api:%d,op:%s,ranks:%d,nodes:%d,comms:%d,outstanding:%d,group:%d,chunk:%zu,"
                   "bytes:%zu,iterations:%d,usec_min:%.2f,usec_p50:%.2f,usec_p99:%.2f,usec_max:%.2f,algbw_GBps:%.4f,"
                   "busbw_GBps:%.4f,"
                   "checked:%hhd,errors:%llu}\n",
                   net->file, net->name, net->version, op_name(options->op), options->ranks, options->nodes,
                   options->comms, options->outstanding, options->per_receive, options->chunk_bytes, bytes, iterations,
                   usec.least, usec.p50, usec.p99, usec.most, alg, bus, options->check, (unsigned long long)errors);
    else
        printf("%13zu %4s%d %9.2f %10.2f %10.3f %10.3f %8llu%s%s\n", bytes, "v", net->version, usec.p50, usec.p99, alg,
               bus, (unsigned long long)errors, options->peer ? "  " : "", options->peer ? net->name : "");
    fflush(stdout);
}

void bandwidth_print_ratio(const struct options *options, size_t bytes, struct ratios *ratios)
{
    const double *value = ratios->value;
    int count = ratios->count;

    if (count == 0) {
        fprintf(stderr, "perseus-netbench: %zu bytes: no two slices to compare: raise --iters\n", bytes);
        return;
    }
    qsort(ratios->value, (size_t)count, sizeof(*value), by_value);
    if (options->json)
        json_print(stdout, "{bytes:%zu,slices:%d,time_ratio:%.4f,time_ratio_p25:%.4f,time_ratio_p75:%.4f}\n", bytes,
                   count, value[count / 2], value[count / 4], value[count * 3 / 4]);
    else
        printf("%13zu time of the plugin by the peer's: %.3f (quartiles %.3f and %.3f of %d pairs of slices)\n", bytes,
               value[count / 2], value[count / 4], value[count * 3 / 4], count);
    fflush(stdout);
}

void bandwidth_print_holding(const struct options *options, const struct holding *before, const struct holding *now)
{
    if (options->json)
        json_print(stdout,
                   "{rounds:%d,memory_kb_before:%ld,memory_kb:%ld,descriptors_before:%d,descriptors:%d,"
                   "threads_before:%d,threads:%d}\n",
                   options->rounds, before->memory_kb, now->memory_kb, before->descriptors, now->descriptors,
                   before->threads, now->threads);
    else
        printf("%d rounds: memory %ld KB, then %ld; descriptors %d, then %d; threads %d, then %d\n", options->rounds,
               before->memory_kb, now->memory_kb, before->descriptors, now->descriptors, before->threads, now->threads);
    fflush(stdout);
}
