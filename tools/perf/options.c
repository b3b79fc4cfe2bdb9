/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/perf/options.h"

#include <stdio.h>
#include <string.h>

#define FIELD(member) OPTION_FIELD(struct options, member)

static const char *const op_names[] = {"putsignal", "put", "latency", "msgrate", "alltoall", NULL};
static const char *const policy_names[] = {"drain", "nic_fence", "in_order", "counted", "auto", NULL};
static const char *const group_names[] = {"coupled", "peer", NULL}; /* GROUP_COUPLED, GROUP_PEER */

static const struct option_row rows[] = {
    {OPTION_CHOICES, "policy", "LIST",
     "drain,nic_fence,in_order,counted,auto (putsignal: the first four that rails keep; else auto)", FIELD(policies), 0,
     0, policy_names},
    {OPTION_NUMBERS, "group", "LIST",
     "coupled (put, signal, put, signal, ...), peer (all puts, then the signals, one group a\n"
     "                           destination) or a number of puts per group (coupled,peer)",
     FIELD(groups), 1, GROUP_PUTS_MAX, group_names},
    {OPTION_NUMBERS, "concurrency", "LIST", "transfers in flight together, 1-128 (96)", FIELD(concurrency), 1, 128},
    {OPTION_NUMBERS, "bytes", "LIST", "of each transfer, a multiple of 8; 4K, 1M, 4K:4M:x4 (4K)", FIELD(bytes), 8,
     64 << 20},
    {OPTION_NUMBERS, "peers", "LIST", "destinations, 1-63 (7)", FIELD(peers), 1, 63},
    {OPTION_NUMBER, "iterations", "N", "timed iterations (20)", FIELD(iterations), 1, 1000000},
    {OPTION_NUMBER, "warmup", "N", "iterations before them (3)", FIELD(warmup), 0, 1000000},
    {OPTION_NUMBER, "nodes", "K", "spread the ranks over K emulated nodes (1)", FIELD(nodes), 1, 64},
    {OPTION_NUMBER, "queues", "N", "queues a rail (the transport's default)", FIELD(queues_per_rail), 1, 16},
    {OPTION_NUMBER, "timeout", "S", "seconds for everything (120)", FIELD(timeout_s), 1, 86400},
    {OPTION_TEXT, "trace", "FILE",
     "putsignal of one cell: write the commands of its last iteration, for perseus-sim trace", FIELD(trace)},
    {OPTION_SET, "gpu", NULL, "a persistent kernel pushes the commands", FIELD(gpu), 1},
    {OPTION_SET, "json", NULL, "one object a line (perseus-plot draws them)", FIELD(json), 1},
};

static const struct option_table table = {
    "perseus-perf",
    "usage: perseus-perf OP [options]\n"
    "Microbenchmarks of the transport, by the path that GPU commands take.\n"
    "  OP                       putsignal  put  latency  msgrate  alltoall\n",
    "Lists: a,b,c or FROM:TO:xF (times F) or FROM:TO:+S. It forks its ranks itself. Run it under softnic-run where "
    "there\n"
    "is no RDMA device. All data is checked.\n"
    "Example, what waiting for completions costs on a link with 50 us of latency:\n"
    "  softnic-run --latency 50us --rate 10G -- perseus-perf putsignal --policy drain,in_order\n",
    rows,
    sizeof(rows) / sizeof(rows[0]),
};

const char *options_policy_name(const struct options *options, uint32_t i)
{
    return policy_names[options->policies.value[i]];
}

const char *options_group_name(uint64_t group, char *text, uint32_t bytes)
{
    if (group >= GROUP_COUPLED)
        return group_names[group - GROUP_COUPLED];
    snprintf(text, bytes, "%llu", (unsigned long long)group);
    return text;
}

static void parse_op(const char *text, struct options *o)
{
    while (op_names[o->op] && strcmp(text, op_names[o->op]))
        o->op++;
    o->op_name = op_names[o->op];
    if (!o->op_name)
        option_table_refuse(&table, "'%s': want putsignal, put, latency, msgrate or alltoall", text);
}

void options_parse(int argc, char **argv, struct options *o)
{
    uint64_t most = 1;
    int words;

    *o = (struct options){.iterations = 20, .warmup = 3, .nodes = 1, .timeout_s = 120};
    option_table_set(&table, o, "group", "coupled,peer");
    option_table_set(&table, o, "bytes", "4K");
    option_table_set(&table, o, "concurrency", "96");
    option_table_set(&table, o, "peers", "7");
    words = option_table_parse(&table, o, argc, argv);
    if (words == argc)
        option_table_refuse(&table, "want one operation: putsignal, put, latency, msgrate or alltoall");
    if (words + 1 < argc)
        option_table_refuse(&table, "'%s': one operation only", argv[words + 1]);
    parse_op(argv[words], o);
    for (uint32_t i = 0; i < o->bytes.count; i++)
        if (o->bytes.value[i] % 8)
            option_table_refuse(&table, "--bytes '%llu': want multiples of 8", (unsigned long long)o->bytes.value[i]);
    for (uint32_t i = 0; i < o->peers.count; i++)
        most = o->peers.value[i] > most ? o->peers.value[i] : most;
    if (o->op == PERF_LATENCY || o->op == PERF_MSGRATE) /* two ranks */
        most = 1;
    if (o->nodes > most + 1)
        option_table_refuse(&table, "--nodes %u: want at most as many as ranks, %llu", o->nodes,
                            (unsigned long long)most + 1);
    if (o->gpu && o->op != PERF_PUTSIGNAL && o->op != PERF_LATENCY && o->op != PERF_MSGRATE)
        option_table_refuse(&table, "--gpu is for putsignal, latency and msgrate, not for %s", o->op_name);
    if (o->trace && (o->op != PERF_PUTSIGNAL || o->gpu || o->policies.count != 1 || o->groups.count != 1 ||
                     o->bytes.count != 1 || o->concurrency.count != 1 || o->peers.count != 1))
        option_table_refuse(&table,
                            "--trace %s: want putsignal without --gpu, and one --policy, --group, --bytes, "
                            "--concurrency and --peers",
                            o->trace);
    o->every_policy = o->policies.count == 0;
    if (o->every_policy)
        option_table_set(&table, o, "policy", o->op == PERF_PUTSIGNAL ? "drain,nic_fence,in_order,counted" : "auto");
}
