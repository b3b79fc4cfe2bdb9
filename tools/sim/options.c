/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/sim/options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/sim/fused.h"
#include "tools/sim/moe.h"

#define FIELD(member) OPTION_FIELD(struct options, member)

static const char *const workload_names[] = {"putsignal", "moe", "alltoall", "fused", "nccl", "trace", NULL};
static const char *const policy_names[] = {"drain", "nic_fence", "in_order", "counted", "auto", NULL};
static const char *const group_names[] = {"coupled", "peer", NULL}; /* GROUP_COUPLED, GROUP_PEER */
static const char *const band_names[] = {"fast", "middle", "slow", NULL};

static bool parse_setting(void *to, const char *text)
{
    struct options *options = to;

    if (options->settings == SETTINGS_MAX)
        return false;
    options->setting[options->settings++] = text;
    return true;
}

static bool parse_zipf(void *to, const char *text)
{
    char *end;

    ((struct options *)to)->zipf = strtod(text, &end);
    return end != text && !*end && ((struct options *)to)->zipf >= 0 && ((struct options *)to)->zipf <= 4;
}

/* RAIL:NODE:US or RAIL:NODE:US:BACK_US */
static bool parse_loss(void *to, const char *text)
{
    struct sim_loss *loss = &((struct options *)to)->loss;
    double at_us, back_us = 0;
    uint64_t rail, node;
    int end = 0, back_end = 0, found;

    if (!option_number(&text, &rail) || *text++ != ':' || !option_number(&text, &node) || *text++ != ':' ||
        rail > UINT32_MAX || node > UINT32_MAX)
        return false;
    found = sscanf(text, "%lf%n:%lf%n", &at_us, &end, &back_us, &back_end);
    if (found < 1 || text[found == 2 ? back_end : end] || !(at_us >= 0 && at_us < 1e9) ||
        (found == 2 && !(back_us > at_us && back_us < 1e9)))
        return false;
    loss->wanted = true;
    loss->rail = (uint32_t)rail;
    loss->node = (uint32_t)node;
    loss->at_ps = (uint64_t)(at_us * 1e6);
    loss->back_ps = (uint64_t)(back_us * 1e6);
    return true;
}

static const struct option_row rows[] = {
    {OPTION_TEXT, "cluster", "NAME|FILE", "its parameters: cx7, slingshot11, efa-p5, softnic-slow, ... or a file (cx7)",
     FIELD(cluster)},
    {OPTION_PARSED, "set", "NAME=VALUE", "change a parameter; VALUE may be a range low..high; may be repeated",
     OPTION_PARSED_BY(parse_setting)},
    {OPTION_SET, "parameters", NULL, "print the cluster's parameters with their meaning, and end", FIELD(parameters),
     1},
    {OPTION_CHOICES, "band", "LIST", "which end of unknown values: fast,middle,slow (middle)", FIELD(bands), 0, 0,
     band_names},
    {OPTION_NUMBERS, "nodes", "LIST", "how many, of the cluster's GPUs each; hundreds take minutes (2)", FIELD(nodes),
     1, 1024},
    {OPTION_CHOICES, "policy", "LIST", "drain,nic_fence,in_order,counted,auto (the first four that the NIC keeps)",
     FIELD(policies), 0, 0, policy_names},
    {OPTION_NUMBERS, "group", "LIST",
     "putsignal, moe, alltoall: coupled, peer or a number of puts per group, as in perseus-perf (coupled,peer)",
     FIELD(groups), 1, GROUP_PUTS_MAX, group_names},
    {OPTION_NUMBERS, "bytes", "LIST",
     "putsignal, alltoall: of each transfer; nccl: all-reduce: of the buffer, all-to-all: of each pair (4K)",
     FIELD(bytes), 8, 1 << 30},
    {OPTION_NUMBERS, "concurrency", "LIST", "putsignal: transfers of a sender in flight together (96)",
     FIELD(concurrency), 1, 65536},
    {OPTION_NUMBERS, "peers", "LIST", "putsignal: destinations of a sender; 0: all on other nodes (0)", FIELD(peers), 0,
     65535},
    {OPTION_SET, "all", NULL, "putsignal: every rank sends, not only rank 0", FIELD(all_send), 1},
    {OPTION_CHOICE, "model", "NAME", "moe, fused moe: qwen3-30b, gpt-oss-120b, deepseek-v3 (qwen3-30b)", FIELD(model),
     0, 0, moe_model_names},
    {OPTION_NUMBER, "tokens", "N", "moe, fused moe: of each rank (1024)", FIELD(tokens), 1, 1 << 20},
    {OPTION_NUMBER, "experts", "N", "moe: instead of the model's, and at least one a rank", FIELD(experts), 1, 1 << 16},
    {OPTION_PARSED, "zipf", "X", "moe, fused moe: skew of the routing, 0-4 (0)", OPTION_PARSED_BY(parse_zipf)},
    {OPTION_NUMBER, "compute", "0|1", "moe: with the experts' products (1)", FIELD(compute), 0, 1},
    {OPTION_SET, "relay", NULL,
     "moe: rows cross to the GPU of the sender's number, which gives them to the expert's over NVLink", FIELD(relay),
     1},
    {OPTION_NUMBER, "outstanding", "N", "alltoall: transfers of a rank in flight together (64)", FIELD(outstanding), 1,
     65536},
    {OPTION_CHOICE, "kernel", "NAME", "fused: reduce_scatter, allreduce, allgather, attention or moe (reduce_scatter)",
     FIELD(kernel), 0, 0, fused_kernel_names},
    {OPTION_NUMBER, "size", "N", "fused products, fused attention: M = N = K, or keys (8192)", FIELD(size), 256,
     1 << 20},
    {OPTION_NUMBER, "tiles-per-signal", "N", "fused products: tiles, or strips, that share a put and a signal (8)",
     FIELD(tiles_per_signal), 1, 4096},
    {OPTION_NUMBER, "band-pairs", "N", "fused products: pairs of row tiles in a band (2)", FIELD(band_pairs), 1, 4096},
    {OPTION_NUMBER, "passes", "N", "fused moe: 2: blocks that need no other node first; 1: expert by expert (2)",
     FIELD(passes), 1, 2},
    {OPTION_NUMBER, "rows-per-put", "N", "fused moe; 0: as the kernel chooses (0)", FIELD(rows_per_put), 0, 65536},
    {OPTION_NUMBER, "rows-per-signal", "N", "fused moe; 0: as the kernel chooses (0)", FIELD(rows_per_signal), 0,
     65536},
    {OPTION_CHOICE, "collective", "NAME", "nccl: allreduce (a ring) or alltoall, of --bytes (allreduce)",
     FIELD(collective), 0, 0, nccl_collective_names},
    {OPTION_NUMBER, "slice", "N", "nccl: largest message of a ring (512K)", FIELD(slice_bytes), 64, 1 << 30},
    {OPTION_TEXT, "trace", "FILE", "trace: the commands (doc/simulator.md has the format)", FIELD(trace)},
    {OPTION_NUMBER, "queues", "N", "queues of each connection and rail (1)", FIELD(queues), 1, 16},
    {OPTION_NUMBER, "window", "N", "operations in flight of each connection (256)", FIELD(window), 1, 65536},
    {OPTION_NUMBER, "ring", "N", "slots of the command ring, a power of two (1024)", FIELD(ring_slots), 4, 1 << 20},
    {OPTION_NUMBER, "turn", "N",
     "not 0: one thread issues N commands, steps the proxy, and so on, as perseus-perf without a GPU (0)", FIELD(turn),
     0, 1024},
    {OPTION_NUMBER, "connections", "N", "pairs of ranks that stay connected (8192)", FIELD(connections), 1, 1 << 20},
    {OPTION_PARSED, "lose-rail", "R:N:US[:BACK]",
     "rail R of all GPUs of node N is lost after so many us; from BACK on new connections have it (counted, two NICs a "
     "GPU)",
     OPTION_PARSED_BY(parse_loss)},
    {OPTION_NUMBER, "iterations", "N", "putsignal (3)", FIELD(iterations), 1, 1000000},
    {OPTION_NUMBER, "warmup", "N", "putsignal: iterations before them (1)", FIELD(warmup), 0, 1000000},
    {OPTION_NUMBER, "seed", "N", "of everything random (1)", FIELD(seed), 0, UINT32_MAX},
    {OPTION_SET, "explain", NULL, "where the time of the slowest rank went", FIELD(explain), 1},
    {OPTION_SET, "statistics", NULL, "events, events a second of user time, memory", FIELD(statistics), 1},
    {OPTION_SET, "json", NULL, "one object a line (perseus-plot draws them)", FIELD(json), 1},
};

static const struct option_table table = {
    "perseus-sim",
    "usage: perseus-sim WORKLOAD [options]\n"
    "How long a workload takes on a cluster that you need not have, under each ordering policy. A model: the "
    "transport's\n"
    "own order engine in virtual time. WORKLOAD is one of\n"
    "  putsignal                many small transfers, each with a signal\n"
    "  moe                      a layer of a mixture of experts: dispatch, products, combine\n"
    "  alltoall                 a put and a signal from each rank to each other\n"
    "  fused                    the kernels of libperseus-fused between nodes\n"
    "  nccl                     an all-reduce or all-to-all of NCCL over the plugin\n"
    "  trace                    commands from a file\n"
    "and an option names the workloads that it is for.\n",
    "Columns: us: of the slowest rank; share: of the rate of puts without signals; then counts of rank 0: fences (and\n"
    "waits for completions), signals, work requests, doorbells, completions.\n"
    "Lists: a,b,c or FROM:TO:xF (times F) or FROM:TO:+S. Counts are exact; times are a model (doc/simulator.md).\n"
    "Example, where the time of a slow rank goes:\n"
    "  perseus-sim moe --model deepseek-v3 --nodes 2,4,8,16 --explain\n",
    rows,
    sizeof(rows) / sizeof(rows[0]),
};

const char *options_policy_name(const struct options *options, uint32_t i)
{
    return policy_names[options->policies.value[i]];
}

const char *options_band_name(enum sim_band band)
{
    return band_names[band];
}

const char *options_group_name(uint64_t group, char *text, uint32_t bytes)
{
    if (group >= GROUP_COUPLED)
        return group_names[group - GROUP_COUPLED];
    snprintf(text, bytes, "%llu", (unsigned long long)group);
    return text;
}

/* Whether a text begins with this kind of kernel, or with none, which stands for all. */
static bool is_of_kernel(const char *text, enum fused_kernel kernel)
{
    const char *name = kernel < FUSED_ATTENTION ? "products" : fused_kernel_names[kernel];
    const char *word = text + strspn(text, " ");
    size_t length = strcspn(word, " ,:;(");

    return !length || (length == strlen(name) && !strncmp(name, word, length));
}

/* A help text begins with the workloads that its option is for, as in "moe, fused moe: ..."; another one may follow a
 * semicolon. A text that begins with no workload belongs to an option for all of them. */
static bool is_for(const char *help, const char *workload, enum fused_kernel kernel)
{
    bool is_limited = false;

    for (const char *at = help; at; at = strstr(at, "; ") ? strstr(at, "; ") + 2 : NULL)
        for (const char *word = at; word;) {
            size_t length = strcspn(word, " ,:;"), next = strcspn(word, ",:;(");
            bool is_workload = false;

            for (int i = 0; workload_names[i]; i++)
                is_workload |= strlen(workload_names[i]) == length && !strncmp(workload_names[i], word, length);
            if (!is_workload)
                break;
            if (strlen(workload) == length && !strncmp(workload, word, length) && is_of_kernel(word + length, kernel))
                return true;
            is_limited = true;
            word = word[next] == ',' ? word + next + 2 : NULL;
        }
    return !is_limited;
}

/* The row of an option, by its name or the beginning of it. NULL: the word is no option. */
static const struct option_row *row_of(const char *word)
{
    size_t length = strncmp(word, "--", 2) ? 0 : strcspn(word + 2, "=");
    const struct option_row *found = NULL;

    for (uint32_t k = 0; k < table.count && length; k++) {
        if (strncmp(word + 2, rows[k].name, length))
            continue;
        if (!rows[k].name[length])
            return &rows[k];
        found = &rows[k];
    }
    return found;
}

static void refuse_foreign(int argc, char **argv, const struct options *o)
{
    bool is_fused = o->workload == WORK_FUSED;

    for (int i = 1; i < argc; i++) {
        const struct option_row *row = row_of(argv[i]);

        if (row && !is_for(row->help, o->workload_name, o->kernel))
            option_table_refuse(&table, "--%s is not for %s%s%s: %s", row->name, o->workload_name,
                                is_fused ? " --kernel " : "", is_fused ? fused_kernel_names[o->kernel] : "", row->help);
    }
}

void options_parse(int argc, char **argv, struct options *o)
{
    int words;

    *o = (struct options){.cluster = "cx7",
                          .queues = 1,
                          .window = 256,
                          .ring_slots = 1024,
                          .iterations = 3,
                          .warmup = 1,
                          .connections = 8192,
                          .outstanding = 64,
                          .seed = 1,
                          .tokens = 1024,
                          .slice_bytes = 512 << 10,
                          .size = 8192,
                          .band_pairs = 2,
                          .passes = 2,
                          .tiles_per_signal = 8,
                          .compute = 1};
    option_table_set(&table, o, "group", "coupled,peer");
    option_table_set(&table, o, "bytes", "4K");
    option_table_set(&table, o, "concurrency", "96");
    option_table_set(&table, o, "peers", "0");
    option_table_set(&table, o, "nodes", "2");
    option_table_set(&table, o, "band", "middle");
    words = option_table_parse(&table, o, argc, argv);
    if (words == argc)
        option_table_refuse(&table, "want one workload: putsignal, moe, alltoall, fused, nccl or trace");
    if (words + 1 < argc)
        option_table_refuse(&table, "'%s': one workload only", argv[words + 1]);
    while (workload_names[o->workload] && strcmp(argv[words], workload_names[o->workload]))
        o->workload++;
    o->workload_name = workload_names[o->workload];
    if (!o->workload_name)
        option_table_refuse(&table, "'%s': want putsignal, moe, alltoall, fused, nccl or trace", argv[words]);
    refuse_foreign(argc, argv, o);
    if (!strcmp(o->workload_name, "trace") && !o->trace)
        option_table_refuse(&table, "trace needs --trace FILE, as perseus-perf putsignal --trace writes it");
    if (o->ring_slots & (o->ring_slots - 1))
        option_table_refuse(&table, "--ring '%u': want a power of two", o->ring_slots);
}

/* A name is a file beside the program, in its share folder, or in the source tree. */
static void find_cluster(const char *name, char *path, size_t room)
{
    static const char *const folders[] = {"sim/clusters", "../share/perseus/clusters", "clusters"};
    char program[512];
    ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);

    snprintf(path, room, "%s", name);
    if (strchr(name, '/') || strchr(name, '.') || length <= 0)
        return;
    program[length] = 0;
    *strrchr(program, '/') = 0;
    for (uint32_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        snprintf(path, room, "%s/%s/%s.cluster", program, folders[i], name);
        if (access(path, R_OK) == 0)
            return;
    }
    snprintf(path, room, "%s/%s.cluster", SIM_CLUSTERS, name);
}

void options_cluster(const struct options *options, enum sim_band band, struct sim_cluster *out)
{
    char path[1024];
    int r;

    find_cluster(options->cluster, path, sizeof(path));
    r = sim_cluster_read(path, band, out);
    for (uint32_t i = 0; i < options->settings && !r; i++)
        r = sim_cluster_set(out, options->setting[i], band);
    if (!r)
        r = sim_cluster_check(out);
    if (r)
        exit(2);
}
