/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/nccl/options.h"

#include "tools/nccl/values.h"

#define FIELD(member) OPTION_FIELD(struct options, member)

static const char *const op_names[] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast",
                                       "reduce",     "sendrecv",   "alltoall",       NULL};
static const char *const place_names[] = {"out", "in", "both", NULL};

static const struct option_row rows[] = {
    {OPTION_NUMBER, "ranks", "N", "processes, one GPU each (2)", FIELD(ranks), 1, RANKS_MAX},
    {OPTION_CHOICES, "ops", "a,b,..", "all_reduce all_gather reduce_scatter broadcast reduce sendrecv alltoall (all)",
     FIELD(ops), 0, 0, op_names},
    {OPTION_CHOICES, "types", "a,b,..", "int8 uint8 int32 uint32 int64 uint64 half float double bfloat16 (float)",
     FIELD(types), 0, 0, values_type_names},
    {OPTION_NUMBERS, "sizes", "A:B[:xF]", "bytes from A to B, times F each (8:64M:x4); suffixes K M G", FIELD(sizes), 1,
     1ull << 40, NULL, 4},
    {OPTION_CHOICE, "place", "out|in|both", "whether the send buffer is the receive buffer (out)", FIELD(place), 0, 0,
     place_names},
    {OPTION_NUMBER, "iters", "N", "timed iterations (20)", FIELD(iterations), 1, ITERATIONS_MAX},
    {OPTION_NUMBER, "warmup", "N", "iterations before them (3)", FIELD(warmup), 0, ITERATIONS_MAX},
    {OPTION_SET, "hosts", NULL, "a NCCL_HOSTID for each rank: NCCL takes them for different nodes", FIELD(hosts), 1},
    {OPTION_SET, "register", NULL, "register the buffers with ncclCommRegister", FIELD(register_buffers), 1},
    {OPTION_TEXT, "label", "NAME", "goes into each result", FIELD(label)},
    {OPTION_TEXT, "nccl", "FILE", "the library (libnccl.so.2)", FIELD(nccl_path)},
    {OPTION_NUMBER, "timeout", "SECONDS", "of each wait (120)", FIELD(timeout_s), 1, 86400},
};

static const struct option_table table = {
    "perseus-nccl-ranks",
    "usage: perseus-nccl-ranks [options]\nThe ranks of perseus-nccl on one host.\n",
    NULL,
    rows,
    sizeof(rows) / sizeof(rows[0]),
};

const char *collective_name(enum collective op)
{
    return op_names[op];
}

void options_parse(struct options *options, int argc, char **argv)
{
    *options = (struct options){.label = "nccl", .ranks = 2, .iterations = 20, .warmup = 3, .timeout_s = 120};
    option_table_set(&table, options, "ops", "all_reduce,all_gather,reduce_scatter,broadcast,reduce,sendrecv,alltoall");
    option_table_set(&table, options, "types", "float");
    option_table_set(&table, options, "sizes", "8:64M:x4");
    if (option_table_parse(&table, options, argc, argv) < argc)
        option_table_refuse(&table, "'%s' is not an option", argv[argc - 1]);
}
