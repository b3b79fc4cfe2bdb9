/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/options.h"

#include <stdio.h>

#define FIELD(member) OPTION_FIELD(struct options, member)

static const char *const op_names[] = {"sendrecv", "allreduce", "allgather", "reducescatter", "alltoall", NULL};
static const char *const memory_names[] = {"host", NULL};

static bool parse_api(void *options, const char *text)
{
    int version, end = 0;

    if (sscanf(text, "v%2d%n", &version, &end) != 1 || text[end] || version < 6 || version > 12)
        return false;
    ((struct options *)options)->api = version;
    return true;
}

static const struct option_row rows[] = {
    {OPTION_TEXT, "plugin", "FILE", "the shared library, any vendor's", FIELD(plugin)},
    {OPTION_TEXT, "peer", "FILE",
     "a second plugin: both run by turns in slices of 10 ms, and are compared pair by pair", FIELD(peer)},
    {OPTION_PARSED, "api", "v6..v12", "table to use (default: the newest that it has)", OPTION_PARSED_BY(parse_api)},
    {OPTION_CHOICE, "op", "NAME", "sendrecv, allreduce, allgather, reducescatter or alltoall (default allreduce)",
     FIELD(op), 0, 0, op_names},
    {OPTION_NUMBER, "ranks", "N", "rank processes, 2 to 64 (default 2)", FIELD(ranks), 2, RANKS_MAX},
    {OPTION_NUMBER, "nodes", "K", "spread the ranks over K emulated nodes (default 1)", FIELD(nodes), 1, RANKS_MAX},
    {OPTION_NUMBERS, "sizes", "A:B[:xF|:+S]",
     "bytes, from A to B, times F (default x2) or plus S; K, M, G are 1024-based (default 8:1M)", FIELD(sizes), 0,
     16ull << 30, NULL, 2},
    {OPTION_SET, "odd", NULL, "each size and also one byte more and one less", FIELD(odd), 1},
    {OPTION_SET, "check", NULL, "compare every byte of every iteration, timed or not", FIELD(check), 1},
    {OPTION_NUMBER, "iters", "N", "timed iterations a size (default 20)", FIELD(iters), 1, ITERS_MAX},
    {OPTION_NUMBER, "warmup", "N", "iterations before them (default 5)", FIELD(warmup), 0, ITERS_MAX},
    {OPTION_TEXT, "until", "FILE", "end a size earlier, once FILE exists: it is looked for after some iterations",
     FIELD(until)},
    {OPTION_NUMBER, "comms", "C", "channels that share the work (default 1)", FIELD(comms), 1, COMMS_MAX},
    {OPTION_NUMBER, "outstanding", "K", "receives posted ahead on each comm, 1 to 32 (default 8)", FIELD(outstanding),
     1, OUTSTANDING_MAX},
    {OPTION_NUMBER, "yield", "N",
     "idle passes between two yields of the processor (default 1, as NCCL's progress thread)", FIELD(yield), 1,
     1 << 20},
    {OPTION_NUMBER, "group", "G", "buffers a receive, told apart by tag, 1 to 8 (default 1)", FIELD(per_receive), 1,
     MULTI_MAX},
    {OPTION_NUMBER, "chunk", "BYTES", "largest message (default 512K)", FIELD(chunk_bytes), 1, 1 << 30},
    {OPTION_SET, "fuse", NULL, "make one virtual device of all devices and use it (v9 on)", FIELD(fuse), 1},
    {OPTION_SET, "flush", NULL, "call iflush after each receive", FIELD(flush), 1},
    {OPTION_SET, "churn", NULL, "register and deregister memory while data is moving, as user buffers are",
     FIELD(churn), 1},
    {OPTION_NUMBER, "rounds", "N",
     "open everything, run, and close everything so often; memory, descriptors and threads must not grow (default 1)",
     FIELD(rounds), 1, ROUNDS_MAX},
    {OPTION_CHOICE, "mem", "host", "kind of memory (only host)", 0, 0, 0, 0, memory_names},
    {OPTION_NUMBER, "timeout", "S", "no progress for so long is a hang, which is reported (default 60)",
     FIELD(timeout_s), 1, 3600},
    {OPTION_NUMBER, "setup-timeout", "S",
     "the same for connecting and for ranks that wait for each other (default: as --timeout)", FIELD(setup_timeout_s),
     1, 3600},
    {OPTION_SET, "json", NULL, "one object a line", FIELD(json), 1},
};

static const struct option_table table = {
    "perseus-netbench",
    "usage: perseus-netbench --plugin FILE [options]\n"
    "Drives an NCCL net plugin the way NCCL does, with rank processes of this machine, and checks the data.\n",
    "Example, without a NIC:\n"
    "  softnic-run -- perseus-netbench --plugin ./libnccl-net-perseus.so --op allreduce --ranks 4 --check\n",
    rows,
    sizeof(rows) / sizeof(rows[0]),
};

const char *op_name(enum op op)
{
    return op_names[op];
}

static void add_size(struct option_list *sizes, uint64_t bytes)
{
    for (uint32_t i = 0; i < sizes->count; i++)
        if (sizes->value[i] == bytes)
            return;
    if (sizes->count == OPTION_LIST_MAX)
        option_table_refuse(&table, "--sizes: want at most %d sizes, with those of --odd", OPTION_LIST_MAX);
    sizes->value[sizes->count++] = bytes;
}

static void add_odd_sizes(struct options *options)
{
    struct option_list even = options->sizes;

    options->sizes.count = 0;
    for (uint32_t i = 0; i < even.count; i++) {
        if (even.value[i])
            add_size(&options->sizes, even.value[i] - 1);
        add_size(&options->sizes, even.value[i]);
        add_size(&options->sizes, even.value[i] + 1);
    }
}

void options_parse(struct options *options, int argc, char **argv)
{
    *options = (struct options){
        .op = OP_ALLREDUCE,
        .ranks = 2,
        .nodes = 1,
        .comms = 1,
        .outstanding = 8,
        .yield = 1,
        .per_receive = 1,
        .rounds = 1,
        .iters = 20,
        .warmup = 5,
        .timeout_s = 60,
        .chunk_bytes = 512 << 10,
    };
    option_table_set(&table, options, "sizes", "8:1M");
    if (option_table_parse(&table, options, argc, argv) < argc)
        option_table_refuse(&table, "'%s' is not an option", argv[argc - 1]);
    if (!options->plugin || !*options->plugin) /* dlopen() takes "" for the program itself */
        option_table_refuse(&table, "--plugin FILE is missing");
    if (options->peer && !*options->peer)
        option_table_refuse(&table, "--peer '': want a file");
    if (options->nodes > options->ranks)
        option_table_refuse(&table, "--nodes %d: want at most as many as --ranks, %d", options->nodes, options->ranks);
    if (options->setup_timeout_s == 0)
        options->setup_timeout_s = options->timeout_s;
    if (options->odd)
        add_odd_sizes(options);
}
