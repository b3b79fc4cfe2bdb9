/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/options.h"

#include <errno.h>
#include <getopt.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: perseus-netbench --plugin FILE [options]\n"
    "Drives an NCCL net plugin the way NCCL does, with rank processes of this machine, and checks the data.\n"
    "  --plugin FILE        the shared library, any vendor's\n"
    "  --api v6..v12        table to use (default: the newest that it has)\n"
    "  --op NAME            sendrecv, allreduce, allgather, reducescatter or alltoall (default allreduce)\n"
    "  --ranks N            rank processes, 2 to 64 (default 2)\n"
    "  --nodes K            spread the ranks over K emulated nodes (default 1)\n"
    "  --sizes A:B[:xF|:+S] bytes, from A to B, times F (default x2) or plus S; K, M, G are 1024-based (default 8:1M)\n"
    "  --odd                each size and also one byte more and one less\n"
    "  --check              compare every byte of every iteration, timed or not\n"
    "  --iters N            timed iterations a size (default 20)   --warmup N  untimed before (default 5)\n"
    "  --comms C            channels that share the work (default 1)\n"
    "  --outstanding K      receives posted ahead on each comm, 1 to 32 (default 8)\n"
    "  --yield N            idle passes between two yields of the processor (default 1, as NCCL's progress thread)\n"
    "  --group G            buffers a receive, told apart by tag, 1 to 8 (default 1)\n"
    "  --chunk BYTES        largest message (default 512K)\n"
    "  --fuse               make one virtual device of all devices and use it (v9 on)\n"
    "  --flush              call iflush after each receive\n"
    "  --churn              register and deregister memory while data is moving, as user buffers are\n"
    "  --mem host           kind of memory (only host)\n"
    "  --timeout S          no progress for so long is a hang, reported (default 60)\n"
    "  --setup-timeout S    the same for connecting and for ranks that wait for each other (default: as --timeout)\n"
    "  --json               one object a line\n";

static const char *const op_names[OP_COUNT] = {
    [OP_SENDRECV] = "sendrecv",           [OP_ALLREDUCE] = "allreduce", [OP_ALLGATHER] = "allgather",
    [OP_REDUCESCATTER] = "reducescatter", [OP_ALLTOALL] = "alltoall",
};

const char *op_name(enum op op)
{
    return op_names[op];
}

static int mistake(const char *option, const char *value, const char *allowed)
{
    fprintf(stderr, "perseus-netbench: --%s %s: %s\n", option, value, allowed);
    return -EINVAL;
}

static int parse_int(const char *option, const char *text, int min, int max, int *out)
{
    char allowed[64], *end;
    long value;

    errno = 0;
    value = strtol(text, &end, 10);
    if (errno || end == text || *end || value < min || value > max) {
        snprintf(allowed, sizeof(allowed), "a number from %d to %d is possible", min, max);
        return mistake(option, text, allowed);
    }
    *out = (int)value;
    return 0;
}

/** "4", "4K", "1M", "2G"; *end is behind it. */
static bool parse_bytes(const char *text, char **end, size_t *out)
{
    unsigned long long value;
    int shift = 0;

    if (*text < '0' || *text > '9')
        return false;
    value = strtoull(text, end, 10);
    switch (**end) {
    case 'k':
    case 'K':
        shift = 10;
        break;
    case 'm':
    case 'M':
        shift = 20;
        break;
    case 'g':
    case 'G':
        shift = 30;
        break;
    default:
        break;
    }
    *end += shift ? 1 : 0;
    *out = (size_t)value << shift;
    return *out >> shift == value && *out <= (size_t)16 << 30;
}

static bool add_size(struct options *options, size_t bytes)
{
    for (int i = 0; i < options->size_count; i++) {
        if (options->size[i] == bytes)
            return true;
    }
    if (options->size_count == SIZES_MAX)
        return false;
    options->size[options->size_count++] = bytes;
    return true;
}

/* So that the largest size times a factor fits size_t. */
#define FACTOR_MAX 1024

static int parse_sizes(struct options *options, const char *text, bool is_odd)
{
    static const char allowed[] = "A:B, A:B:xF (F at most 1024) or A:B:+S, at most 512 sizes of at most 16 GiB";
    size_t from, to, step = 2;
    bool is_factor = true;
    char *end;

    if (!parse_bytes(text, &end, &from))
        return mistake("sizes", text, allowed);
    to = from;
    if (*end == ':' && !parse_bytes(end + 1, &end, &to))
        return mistake("sizes", text, allowed);
    if (*end == ':') {
        is_factor = end[1] == 'x';
        if ((end[1] != 'x' && end[1] != '+') || !parse_bytes(end + 2, &end, &step) || step < (is_factor ? 2 : 1) ||
            (is_factor && step > FACTOR_MAX))
            return mistake("sizes", text, allowed);
    }
    if (*end || to < from)
        return mistake("sizes", text, allowed);
    options->size_count = 0;
    for (size_t bytes = from; bytes <= to;) {
        if ((is_odd && bytes && !add_size(options, bytes - 1)) || !add_size(options, bytes) ||
            (is_odd && !add_size(options, bytes + 1)))
            return mistake("sizes", text, allowed);
        bytes = is_factor ? (bytes ? bytes * step : 1) : bytes + step;
    }
    return 0;
}

static int parse_op(struct options *options, const char *text)
{
    for (int i = 0; i < OP_COUNT; i++) {
        if (strcmp(text, op_names[i]) == 0) {
            options->op = (enum op)i;
            return 0;
        }
    }
    return mistake("op", text, "sendrecv, allreduce, allgather, reducescatter or alltoall");
}

static int parse_chunk(struct options *options, const char *text)
{
    char *end;

    if (!parse_bytes(text, &end, &options->chunk_bytes) || *end || options->chunk_bytes < 1 ||
        options->chunk_bytes > (size_t)1 << 30)
        return mistake("chunk", text, "1 byte to 1G");
    return 0;
}

enum {
    O_PLUGIN = 1,
    O_API,
    O_OP,
    O_RANKS,
    O_NODES,
    O_SIZES,
    O_ODD,
    O_CHECK,
    O_ITERS,
    O_WARMUP,
    O_COMMS,
    O_OUTSTANDING,
    O_YIELD,
    O_GROUP,
    O_CHUNK,
    O_FUSE,
    O_FLUSH,
    O_CHURN,
    O_MEM,
    O_TIMEOUT,
    O_SETUP_TIMEOUT,
    O_JSON,
    O_HELP,
};

static const struct option long_options[] = {
    {"plugin", required_argument, NULL, O_PLUGIN},
    {"api", required_argument, NULL, O_API},
    {"op", required_argument, NULL, O_OP},
    {"ranks", required_argument, NULL, O_RANKS},
    {"nodes", required_argument, NULL, O_NODES},
    {"sizes", required_argument, NULL, O_SIZES},
    {"odd", no_argument, NULL, O_ODD},
    {"check", no_argument, NULL, O_CHECK},
    {"iters", required_argument, NULL, O_ITERS},
    {"warmup", required_argument, NULL, O_WARMUP},
    {"comms", required_argument, NULL, O_COMMS},
    {"outstanding", required_argument, NULL, O_OUTSTANDING},
    {"yield", required_argument, NULL, O_YIELD},
    {"group", required_argument, NULL, O_GROUP},
    {"chunk", required_argument, NULL, O_CHUNK},
    {"fuse", no_argument, NULL, O_FUSE},
    {"flush", no_argument, NULL, O_FLUSH},
    {"churn", no_argument, NULL, O_CHURN},
    {"mem", required_argument, NULL, O_MEM},
    {"timeout", required_argument, NULL, O_TIMEOUT},
    {"setup-timeout", required_argument, NULL, O_SETUP_TIMEOUT},
    {"json", no_argument, NULL, O_JSON},
    {"help", no_argument, NULL, O_HELP},
    {NULL, 0, NULL, 0},
};

/** One option, once its value is known to be there. Return 0 or -EINVAL. */
static int take_option(struct options *options, int option, const char **sizes, bool *is_odd)
{
    switch (option) {
    case O_PLUGIN:
        options->plugin = optarg;
        return 0;
    case O_API:
        return parse_int("api", optarg + (*optarg == 'v'), 6, 12, &options->api);
    case O_OP:
        return parse_op(options, optarg);
    case O_RANKS:
        return parse_int("ranks", optarg, 2, RANKS_MAX, &options->ranks);
    case O_NODES:
        return parse_int("nodes", optarg, 1, RANKS_MAX, &options->nodes);
    case O_SIZES:
        *sizes = optarg;
        return 0;
    case O_ODD:
        *is_odd = true;
        return 0;
    case O_CHECK:
        options->check = true;
        return 0;
    case O_ITERS:
        return parse_int("iters", optarg, 1, ITERS_MAX, &options->iters);
    case O_WARMUP:
        return parse_int("warmup", optarg, 0, ITERS_MAX, &options->warmup);
    case O_COMMS:
        return parse_int("comms", optarg, 1, COMMS_MAX, &options->comms);
    case O_OUTSTANDING:
        return parse_int("outstanding", optarg, 1, OUTSTANDING_MAX, &options->outstanding);
    case O_YIELD:
        return parse_int("yield", optarg, 1, 1 << 20, &options->yield);
    case O_GROUP:
        return parse_int("group", optarg, 1, GROUP_MAX, &options->group);
    case O_CHUNK:
        return parse_chunk(options, optarg);
    case O_FUSE:
        options->fuse = true;
        return 0;
    case O_FLUSH:
        options->flush = true;
        return 0;
    case O_CHURN:
        options->churn = true;
        return 0;
    case O_MEM:
        return strcmp(optarg, "host") == 0 ? 0 : mistake("mem", optarg, "only host is possible");
    case O_TIMEOUT:
        return parse_int("timeout", optarg, 1, 3600, &options->timeout_s);
    case O_SETUP_TIMEOUT:
        return parse_int("setup-timeout", optarg, 1, 3600, &options->setup_timeout_s);
    case O_JSON:
        options->json = true;
        return 0;
    default:
        return -EINVAL;
    }
}

int options_parse(struct options *options, int argc, char **argv)
{
    const char *sizes = "8:1M";
    bool is_odd = false;
    int option;

    *options = (struct options){.op = OP_ALLREDUCE,
                                .ranks = 2,
                                .nodes = 1,
                                .comms = 1,
                                .outstanding = 8,
                                .yield = 1,
                                .group = 1,
                                .iters = 20,
                                .warmup = 5,
                                .timeout_s = 60,
                                .chunk_bytes = 512 << 10};
    while ((option = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        if (option == O_HELP) {
            fputs(usage, stdout);
            return 1;
        }
        if (option == '?' || take_option(options, option, &sizes, &is_odd) < 0) {
            fputs("(--help tells all options)\n", stderr);
            return 3;
        }
    }
    if (options->setup_timeout_s == 0)
        options->setup_timeout_s = options->timeout_s;
    if (optind < argc || !options->plugin) {
        fputs(usage, stderr);
        return 3;
    }
    if (options->nodes > options->ranks) {
        mistake("nodes", "", "more nodes than ranks");
        return 3;
    }
    return parse_sizes(options, sizes, is_odd) < 0 ? 3 : 0;
}
