/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tools/common/json.h"
#include "tools/sim/fused.h"
#include "tools/sim/moe.h"
#include "tools/sim/work.h"

static int (*const play[])(const struct work *, struct work_result *) = {putsignal_play, moe_play,  alltoall_play,
                                                                         fused_play,     nccl_play, trace_play};

/* ---- what is printed ---- */

static void print_fused(const struct options *o, const struct work_result *r)
{
    json_print(stdout, "kernel:%s,us:%.2f,", fused_kernel_names[o->kernel], r->us);
    if (o->kernel == FUSED_MOE)
        json_print(stdout, "experts_of:%s,tokens:%u,zipf:%.2f,passes:%u,rows_per_put:%u,rows_per_signal:%u,",
                   moe_model_names[o->model], o->tokens, o->zipf, o->passes, o->rows_per_put, o->rows_per_signal);
    else
        json_print(stdout, "size:%u,tiles_per_signal:%u,", o->size, o->tiles_per_signal);
}

static void print_json(const struct work *work, const struct work_result *r)
{
    const struct sim_counts *c = &r->counts, *all = &r->all;
    const struct options *options = work->options;
    char number[24];
    double gb = (double)r->bytes / 1e3;

    fputs("{", stdout);
    json_print(stdout, "op:%s,model:true,cluster:%s,band:%s,policy:%s,group:%s,nodes:%u,ranks:%u,queues:%u,seed:%llu,",
               options->workload_name, work->sim.cluster->name, options_band_name(work->band), work->policy,
               options_group_name(work->group, number, sizeof(number)), work->nodes, work->sim.ranks,
               work->sim.queues_per_rail, (unsigned long long)work->sim.seed);
    if (options->workload == WORK_PUTSIGNAL)
        json_print(stdout,
                   "bytes:%llu,concurrency:%u,peers:%u,iterations:%u,put_only_us:%.2f,put_signal_us:%.2f,"
                   "put_only_GBps:%.4f,put_signal_GBps:%.4f,efficiency:%.4f,stall_us:%.2f,both_work_requests:%llu,"
                   "both_doorbells:%llu,both_completions:%llu,",
                   (unsigned long long)work->bytes, work->concurrency, work->peers, options->iterations, r->put_only_us,
                   r->us, gb / r->put_only_us, gb / r->us, r->put_only_us / r->us, r->stall_us,
                   (unsigned long long)r->both.work_requests, (unsigned long long)r->both.doorbells,
                   (unsigned long long)r->both.completions);
    else if (options->workload == WORK_MOE)
        json_print(stdout, "experts_of:%s,tokens:%u,zipf:%.2f,compute:%u,relay:%hhd,us:%.2f,stall_us:%.2f,",
                   moe_model_names[options->model], options->tokens, options->zipf, options->compute,
                   (signed char)options->relay, r->us, r->stall_us);
    else if (options->workload == WORK_FUSED)
        print_fused(options, r);
    else if (options->workload == WORK_NCCL)
        json_print(stdout, "collective:%s,bytes:%llu,us:%.2f,busbw_GBps:%.4f,",
                   nccl_collective_names[options->collective], (unsigned long long)work->bytes, r->us, gb / r->us);
    else if (options->workload == WORK_TRACE)
        json_print(stdout, "trace:%s,us:%.2f,", options->trace, r->us);
    else
        json_print(stdout, "bytes:%llu,outstanding:%u,us:%.2f,", (unsigned long long)work->bytes, options->outstanding,
                   r->us);
    json_print(stdout,
               "transfers:%u,puts:%llu,signals:%llu,fences:%llu,work_requests:%llu,doorbells:%llu,completions:%llu,"
               "arrivals:%llu,all_work_requests:%llu,all_doorbells:%llu,all_completions:%llu,errors:%llu",
               r->transfers, (unsigned long long)c->puts, (unsigned long long)c->signals,
               (unsigned long long)(c->fences + c->drains), (unsigned long long)c->work_requests,
               (unsigned long long)c->doorbells, (unsigned long long)c->completions, (unsigned long long)c->arrivals,
               (unsigned long long)all->work_requests, (unsigned long long)all->doorbells,
               (unsigned long long)all->completions, (unsigned long long)r->early);
    for (int i = 0; options->explain && i < SIM_CAUSES; i++)
        printf(",\"%s_us\":%.2f", sim_cause_names[i], (double)r->explain.total_ps[i] / 1e6);
    if (options->statistics)
        json_print(stdout,
                   ",events:%llu,user_s:%.3f,system_s:%.3f,events_per_s:%.0f,memory_bytes:%llu,connections:%llu,"
                   "side_bytes:%llu",
                   (unsigned long long)r->events, r->user_s, r->system_s, (double)r->events / r->user_s,
                   (unsigned long long)r->memory_bytes, (unsigned long long)r->pairs_most,
                   (unsigned long long)r->side_bytes);
    if (work->sim.loss.wanted)
        json_print(stdout,
                   ",lost_rail:%u,lost_node:%u,lost_at_us:%.2f,replaced_sides:%llu,replayed:%llu,replayed_bytes:%llu,"
                   "had_arrived:%llu,agree_us:%.2f,replaced_us:%.2f",
                   work->sim.loss.rail, work->sim.loss.node, (double)work->sim.loss.at_ps / 1e6,
                   (unsigned long long)r->lost.sides, (unsigned long long)r->lost.replayed,
                   (unsigned long long)r->lost.bytes, (unsigned long long)r->lost.taken, (double)r->lost.agree_ps / 1e6,
                   (double)r->lost.last_ps / 1e6);
    fputs("}\n", stdout);
}

/* Where the time went, as a bar of 60 characters. */
static void print_explain(const struct work_result *r)
{
    static const char marks[] = "#=o<-.";
    uint64_t total = 0;
    int drawn = 0;

    for (int i = 0; i < SIM_CAUSES; i++)
        total += r->explain.total_ps[i];
    printf("  rank %u [", r->slowest);
    for (int i = 0; i < SIM_CAUSES && total; i++)
        for (int end = drawn + (int)(60.0 * (double)r->explain.total_ps[i] / (double)total + 0.5); drawn < end; drawn++)
            putchar(marks[i]);
    printf("]\n ");
    for (int i = 0; i < SIM_CAUSES; i++)
        printf(" %c %s %.1f us", marks[i], sim_cause_names[i], (double)r->explain.total_ps[i] / 1e6);
    putchar('\n');
}

/* Which options a workload has: the others have no column. */
static bool has_bytes(const struct options *o)
{
    return o->workload == WORK_PUTSIGNAL || o->workload == WORK_ALLTOALL || o->workload == WORK_NCCL;
}

static bool has_concurrency(const struct options *o)
{
    return o->workload == WORK_PUTSIGNAL;
}

static void print_head(const struct work *work)
{
    printf("model of %s; counts of rank 0\n%-9s %-8s %5s ", work->sim.cluster->name, "policy", "group", "nodes");
    if (has_bytes(work->options))
        printf("%9s ", "bytes");
    printf("%6s ", "band");
    if (has_concurrency(work->options))
        printf("%6s %12s %10s ", "conc", "us", "share");
    else
        printf("%12s ", "us");
    printf("%8s %8s %8s %8s %8s\n", "fences", "signals", "requests", "bells", "compl");
}

static void print_text(const struct work *work, const struct work_result *r)
{
    static bool headed;
    const struct sim_counts *c = &r->counts;
    char number[24];

    if (!headed)
        print_head(work);
    headed = true;
    printf("%-9s %-8s %5u ", work->policy, options_group_name(work->group, number, sizeof(number)), work->nodes);
    if (has_bytes(work->options))
        printf("%9llu ", (unsigned long long)work->bytes);
    printf("%6s ", options_band_name(work->band));
    if (has_concurrency(work->options))
        printf("%6u %12.2f %9.1f%% ", work->concurrency, r->us, 100 * r->put_only_us / r->us);
    else
        printf("%12.2f ", r->us);
    printf("%8llu %8llu %8llu %8llu %8llu\n", (unsigned long long)(c->fences + c->drains),
           (unsigned long long)c->signals, (unsigned long long)c->work_requests, (unsigned long long)c->doorbells,
           (unsigned long long)c->completions);
    if (work->options->explain)
        print_explain(r);
    if (work->sim.loss.wanted) {
        printf("  rail %u of node %u lost at %.1f us: replaced on %llu sides of connections, the last at %.1f us; ",
               work->sim.loss.rail, work->sim.loss.node, (double)work->sim.loss.at_ps / 1e6,
               (unsigned long long)r->lost.sides, (double)r->lost.last_ps / 1e6);
        printf("longest agreement %.1f us; %llu requests (%llu bytes) sent again, %llu had arrived\n",
               (double)r->lost.agree_ps / 1e6, (unsigned long long)r->lost.replayed, (unsigned long long)r->lost.bytes,
               (unsigned long long)r->lost.taken);
    }
    if (work->options->statistics) {
        printf("  %llu events in %.2f s of one core (and %.2f s of the kernel): %.2f million a second; ",
               (unsigned long long)r->events, r->user_s, r->system_s, (double)r->events / r->user_s / 1e6);
        printf("%.2f GB; at most %llu pairs connected, %llu bytes a side\n", (double)r->memory_bytes / 1e9,
               (unsigned long long)r->pairs_most, (unsigned long long)r->side_bytes);
    }
}

/* ---- runs ---- */

/* Read the CPU time of this process, so that other programs on the machine do not count. */
static void read_core(double *user_s, double *system_s)
{
    struct rusage used;

    getrusage(RUSAGE_SELF, &used);
    *user_s = (double)used.ru_utime.tv_sec + (double)used.ru_utime.tv_usec / 1e6;
    *system_s = (double)used.ru_stime.tv_sec + (double)used.ru_stime.tv_usec / 1e6;
}

/* Only the policy counted can replace a rail, and only by another of the same GPUs (decisions/0014). */
static int check_loss(const struct work *work)
{
    const struct sim_loss *loss = &work->sim.loss;
    const struct sim_cluster *c = work->sim.cluster;

    if (!loss->wanted)
        return 0;
    if (work->sim.policy != PRS_POLICY_COUNTED || c->nics_per_gpu < 2 || !c->in_order || c->software) {
        fprintf(stderr,
                "perseus-sim: --lose-rail: a rail is replaced only under the policy counted (this run: %s), with two "
                "NICs a GPU or more (%s: %.0f; see --set nics_per_gpu=2), whose queues keep order (in_order 1, "
                "software 0)\n",
                work->policy, c->name, c->nics_per_gpu);
        return -EINVAL;
    }
    if (loss->rail >= (uint32_t)c->nics_per_gpu || loss->node >= work->nodes) {
        fprintf(stderr, "perseus-sim: --lose-rail: rail %u of node %u; there are rails 0 to %.0f and nodes 0 to %u\n",
                loss->rail, loss->node, c->nics_per_gpu - 1, work->nodes - 1);
        return -EINVAL;
    }
    return 0;
}

static int run(struct work *work)
{
    const struct options *options = work->options;
    struct work_result result = {0};
    double user_s, system_s;
    int r;

    work->sim.ranks = work->nodes * (uint32_t)work->sim.cluster->gpus_per_node;
    if (work->nodes < 2 && options->workload != WORK_MOE && options->workload < WORK_FUSED) {
        fprintf(stderr, "perseus-sim: %s needs two nodes or more\n", options->workload_name);
        return -EINVAL;
    }
    if (work->peers > work->sim.ranks - (uint32_t)work->sim.cluster->gpus_per_node) {
        fprintf(stderr, "perseus-sim: --peers %u, and %u ranks are on other nodes\n", work->peers,
                work->sim.ranks - (uint32_t)work->sim.cluster->gpus_per_node);
        return -EINVAL;
    }
    r = check_loss(work);
    if (r)
        return r;
    if (!work->peers)
        work->peers = work->sim.ranks - (uint32_t)work->sim.cluster->gpus_per_node;
    if (work->peers > work->concurrency)
        work->peers = work->concurrency;
    if (isatty(STDERR_FILENO)) /* many nodes take minutes */
        fprintf(stderr, "perseus-sim: %s, %s, %u nodes ...\n", options->workload_name, work->policy, work->nodes);
    read_core(&user_s, &system_s);
    r = play[options->workload](work, &result);
    if (r) {
        fprintf(stderr, "perseus-sim: %s, policy %s: %s\n", options->workload_name, work->policy, strerror(-r));
        return r;
    }
    read_core(&result.user_s, &result.system_s);
    result.user_s -= user_s;
    result.system_s -= system_s;
    (options->json ? print_json : print_text)(work, &result);
    fflush(stdout);
    return 0;
}

static int run_sizes(struct work *work)
{
    const struct options *o = work->options;
    bool sized = has_bytes(o), dense = has_concurrency(o);
    int r = 0;

    for (uint32_t b = 0; b < (sized ? o->bytes.count : 1) && !r; b++)
        for (uint32_t c = 0; c < (dense ? o->concurrency.count : 1) && !r; c++)
            for (uint32_t p = 0; p < (dense ? o->peers.count : 1) && !r; p++) {
                work->bytes = sized ? o->bytes.value[b] : 0;
                work->concurrency = dense ? (uint32_t)o->concurrency.value[c] : 0;
                work->peers = dense ? (uint32_t)o->peers.value[p] : 0;
                r = run(work);
            }
    return r;
}

static int run_policies(struct work *work)
{
    const struct options *o = work->options;
    bool every = o->policies.count == 0;
    int r = 0;

    for (uint32_t p = 0; p < (every ? 4 : o->policies.count) && !r; p++) {
        static const char *const four[] = {"drain", "nic_fence", "in_order", "counted"};

        work->policy = every ? four[p] : options_policy_name(o, p);
        prs_policy_parse(work->policy, PRS_POLICY_AUTO, &work->sim.policy);
        if (every && !work->sim.cluster->in_order && (p == 1 || p == 2))
            continue; /* the transport refuses them there */
        for (uint32_t g = 0; g < (o->workload >= WORK_FUSED ? 1 : o->groups.count) && !r; g++) {
            work->group = o->workload < WORK_FUSED                                   ? o->groups.value[g]
                          : o->workload == WORK_FUSED && o->kernel < FUSED_ATTENTION ? o->tiles_per_signal
                                                                                     : 1;
            work->sim.turn_pairs = work->group == GROUP_COUPLED;
            r = run_sizes(work);
        }
    }
    return r;
}

int main(int argc, char **argv)
{
    struct options options;
    struct sim_cluster cluster;
    int r = 0;

    options_parse(argc, argv, &options);
    for (uint32_t b = 0; b < options.bands.count && !r; b++) {
        struct work work = {.options = &options, .band = (enum sim_band)options.bands.value[b]};

        options_cluster(&options, work.band, &cluster);
        if (options.parameters) {
            sim_cluster_print(&cluster);
            continue;
        }
        work.sim = (struct sim_options){.cluster = &cluster,
                                        .queues_per_rail = options.queues,
                                        .window = options.window,
                                        .ring_slots = options.ring_slots,
                                        .connections = options.connections,
                                        .turn_commands = options.turn,
                                        .seed = options.seed,
                                        .loss = options.loss,
                                        .explain = options.explain,
                                        .statistics = options.statistics};
        for (uint32_t n = 0; n < options.nodes.count && !r; n++) {
            work.nodes = (uint32_t)options.nodes.value[n];
            r = run_policies(&work);
        }
    }
    return r ? 1 : 0;
}
