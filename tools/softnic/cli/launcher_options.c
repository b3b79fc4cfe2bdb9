/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/cli/launcher_options.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/stdout_check.h"
#include "tools/softnic/world/quantity.h"

enum {
    EXIT_HELP = 1,  /* status 0, see the header */
    EXIT_USAGE = 3, /* exit status 2 plus one; 2 is usual for shell utilities */
    NODES_MOST = 64,
};

enum kind {
    COUNT,
    RATE,
    LATENCY,
    LOSS,
    DURATION,
    FENCE,
    ATOMIC_CAP,
    NAME,
    QUIET,
    COPIER,
    PLAIN_CUDA,
    EFA,
    ODD_EMPTY,
    NO_SYSFS,
    HELP,
    VERSION
};

static const struct flag {
    const char *name;
    enum kind kind;
    size_t offset;
    uint64_t least, most;
    const char *help;
} flags[] = {
    {"nics", COUNT, offsetof(struct sn_launcher_options, nics), 1, SN_NICS_MOST, "N         NICs of each node (1)"},
    {"nodes", COUNT, offsetof(struct sn_launcher_options, nodes), 1, NODES_MOST,
     "K        emulated nodes; ranks are split over them in blocks (1)"},
    {"rate", RATE, offsetof(struct sn_launcher_options, rate_bps), 0, 0,
     "400G[,..] bits per second of each link; one value for each NIC, the last one for the rest (off)"},
    {"latency", LATENCY, offsetof(struct sn_launcher_options, latency_ns), 0, 0,
     "2us[,..] one way, on top of the transfer time; as above (off)"},
    {"loss", LOSS, offsetof(struct sn_launcher_options, loss_ppb), 0, 0,
     "0.1%[,..] fraction of messages and acknowledgements lost; as above (off)"},
    {"wr-cost", DURATION, offsetof(struct sn_launcher_options, wr_cost_ns), 0, 0,
     "50ns   time a NIC spends on each work request (off)"},
    {"doorbell-cost", DURATION, offsetof(struct sn_launcher_options, doorbell_cost_ns), 0, 0,
     "200ns   time of each doorbell (off)"},
    {"fence-cost", DURATION, offsetof(struct sn_launcher_options, fence_cost_ns), 0, 0,
     "1us time added by a fenced request (off)"},
    {"fence", FENCE, 0, 0, 0, "spec|strict a fence waits for reads and atomics | for all earlier requests (spec)"},
    {"atomic-cap", ATOMIC_CAP, 0, 0, 0,
     "none|hca|glob what the NICs claim of their atomics, which stay what they are (hca)"},
    {"copier", COPIER, 0, 0, 0, "             a process of the NIC's own copies GPU memory, see doc/softnic.md (off)"},
    {"plain-cuda", PLAIN_CUDA, 0, 0, 0,
     "         leave the command's calls of the CUDA driver alone, see doc/softnic.md"},
    {"efa", EFA, 0, 0, 0,
     "             the NICs are EFA devices of AWS: SRD queue pairs, no order; see doc/softnic.md (off)"},
    {"odd-empty", ODD_EMPTY, 0, 0, 0, "          wrong on purpose: an empty write reports a byte (off)"},
    {"jitter", DURATION, offsetof(struct sn_launcher_options, jitter_ns), 0, 0,
     "1us     at most this much is added to each delivery (off)"},
    {"retry-cap", DURATION, offsetof(struct sn_launcher_options, retry_cap_ns), 0, 0,
     "1s   longest wait for a peer that does not answer, whatever the queue pair asks for (1s)"},
    {"seed", COUNT, offsetof(struct sn_launcher_options, seed), 0, UINT64_MAX, "S         of jitter and losses (1)"},
    {"name", NAME, 0, 0, 0, "W         name the world, or join the one that has this name"},
    {"no-sysfs", NO_SYSFS, 0, 0, 0, "        leave /sys/class/infiniband as it is"},
    {"quiet", QUIET, 0, 0, 0, "           say nothing unless it fails"},
    {"help", HELP, 0, 0, 0, " print this"},
    {"version", VERSION, 0, 0, 0, " print the version"},
};
enum { NUM_FLAGS = sizeof(flags) / sizeof(flags[0]) };

static void usage(FILE *to)
{
    fprintf(to, "usage: softnic-run [options] [--] command [arguments]\n"
                "Runs a command, and all it starts, with software RDMA devices in place of hardware.\n");
    for (int i = 0; i < NUM_FLAGS; i++) {
        const char *help = flags[i].help; /* begins with the value's name, or with a space */
        int value = (int)strcspn(help, " ");
        char name[64];

        snprintf(name, sizeof(name), "%s %.*s", flags[i].name, value, help);
        fprintf(to, "  --%-18s %s\n", name, help + value + strspn(help + value, " "));
    }
    fprintf(to, "Rates take K, M, G, T; times take ns, us, ms, s. See doc/softnic.md.\n"
                "Example, two NICs of a node, each with 100 Gbit/s and 5 us of latency:\n"
                "  softnic-run --nics 2 --rate 100G --latency 5us -- ibv_devinfo\n");
}

static bool is_world_name(const char *name)
{
    size_t n = strlen(name);
    for (const char *p = name; *p; p++)
        if (!isalnum((unsigned char)*p) && !strchr("_-.", *p))
            return false;
    return n > 0 && n <= 64 && name[0] != '.';
}

static int refuse(const struct flag *flag, const char *value, int why)
{
    fprintf(stderr, "softnic-run: --%s: '%s' ", flag->name, value);
    if (why == -ERANGE && flag->kind == COUNT)
        fprintf(stderr, "is not between %llu and %llu\n", (unsigned long long)flag->least,
                (unsigned long long)flag->most);
    else if (why == -ERANGE)
        fprintf(stderr, "is too large%s\n", flag->kind == LOSS ? ": the most is 1, or 100%" : "");
    else if (flag->kind == COUNT)
        fprintf(stderr, "is not a whole number\n");
    else if (flag->kind == RATE)
        fprintf(stderr, "is not a rate: a number followed by K, M, G or T (bits per second), such as 400G, or off\n");
    else if (flag->kind == LOSS)
        fprintf(stderr,
                "is not a fraction: a number from 0 to 1, such as 0.001, or a percentage, such as 0.1%%, or off\n");
    else if (flag->kind == DURATION || flag->kind == LATENCY)
        fprintf(stderr, "is not a time: a number followed by ns, us, ms or s, such as 2us, or off\n");
    else if (flag->kind == FENCE)
        fprintf(stderr, "is neither spec nor strict\n");
    else if (flag->kind == ATOMIC_CAP)
        fprintf(stderr, "is neither none nor hca nor glob\n");
    else
        fprintf(stderr, "is not a name: 1 to 64 letters, digits, '_', '-' and '.', not starting with '.'\n");
    return EXIT_USAGE;
}

/* "40G,10G": one value for each NIC; the last one also for the rest. */
static int parse_list(struct sn_launcher_list *list, const struct flag *flag, const char *text)
{
    char *copy = strdup(text), *rest = copy, *word;
    int r = copy ? 0 : -ENOMEM;

    list->count = 0;
    while (!r && (word = strsep(&rest, ","))) {
        uint64_t *value = &list->value[list->count];

        if (list->count++ == SN_NICS_MOST)
            r = -ERANGE;
        else if (flag->kind == RATE)
            r = sn_quantity_rate(word, value);
        else if (flag->kind == LATENCY)
            r = sn_quantity_duration(word, value);
        else
            r = sn_quantity_fraction(word, value);
    }
    for (uint64_t i = list->count; !r && i < SN_NICS_MOST; i++)
        list->value[i] = list->value[i - 1];
    free(copy);
    return r;
}

static int parse_atomic_cap(const char *text, uint32_t *cap)
{
    static const char *const names[] = {"none", "hca", "glob"}; /* as in enum ibv_atomic_cap */

    for (uint32_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (!strcmp(text, names[i])) {
            *cap = i;
            return 0;
        }
    return -EINVAL;
}

static int apply(struct sn_launcher_options *o, const struct flag *flag, const char *value)
{
    uint64_t *number = (uint64_t *)((char *)o + flag->offset);
    int r = 0;

    switch (flag->kind) {
    case COUNT:
        r = sn_quantity_count(value, flag->least, flag->most, number);
        o->model_given = true;
        break;
    case RATE:
    case LATENCY:
    case LOSS:
        r = parse_list((struct sn_launcher_list *)number, flag, value);
        o->model_given = true;
        break;
    case DURATION:
        r = sn_quantity_duration(value, number);
        o->model_given = true;
        break;
    case FENCE:
        o->fence_strict = !strcmp(value, "strict");
        o->model_given = true;
        r = o->fence_strict || !strcmp(value, "spec") ? 0 : -EINVAL;
        break;
    case ATOMIC_CAP:
        o->model_given = true;
        r = parse_atomic_cap(value, &o->atomic_cap);
        break;
    case COPIER:
        o->copier = true;
        break;
    case ODD_EMPTY:
        o->odd_empty = true;
        o->model_given = true;
        break;
    case PLAIN_CUDA:
        o->plain_cuda = true;
        break;
    case EFA:
        o->efa = true;
        o->model_given = true;
        break;
    case NAME:
        o->name = value;
        r = is_world_name(value) ? 0 : -EINVAL;
        break;
    case QUIET:
        o->quiet = true;
        break;
    case NO_SYSFS:
        o->no_sysfs = true;
        break;
    case HELP:
        stdout_check_at_exit("softnic-run");
        usage(stdout);
        return EXIT_HELP;
    case VERSION:
        stdout_check_at_exit("softnic-run");
        printf("softnic-run %s\n", PRS_VERSION);
        return EXIT_HELP;
    }
    return r ? refuse(flag, value, r) : 0;
}

int sn_launcher_options_parse(struct sn_launcher_options *o, int argc, char **argv)
{
    struct option table[NUM_FLAGS + 1] = {{0}};
    int index = 0, c;

    *o = (struct sn_launcher_options){.nics = 1, .nodes = 1, .seed = 1, .atomic_cap = 1};
    for (int i = 0; i < NUM_FLAGS; i++) {
        table[i].name = flags[i].name;
        table[i].has_arg = flags[i].kind < QUIET ? required_argument : no_argument;
    }
    /* "+": the first word that is not an option starts the command, whose options are not ours. */
    while ((c = getopt_long(argc, argv, "+h", table, &index)) != -1) {
        if (c == 'h') {
            usage(stdout);
            return EXIT_HELP;
        }
        if (c != 0) { /* getopt has named the bad option */
            fprintf(stderr, "softnic-run: softnic-run --help lists the options\n");
            return EXIT_USAGE;
        }
        int r = apply(o, &flags[index], optarg);
        if (r)
            return r;
    }
    for (int i = 0; i < NUM_FLAGS; i++) {
        const struct sn_launcher_list *list = (const struct sn_launcher_list *)((const char *)o + flags[i].offset);

        if (flags[i].kind >= RATE && flags[i].kind <= LOSS && list->count > o->nics) {
            fprintf(stderr, "softnic-run: --%s: %llu values for %llu NICs of a node (--nics)\n", flags[i].name,
                    (unsigned long long)list->count, (unsigned long long)o->nics);
            return EXIT_USAGE;
        }
    }
    o->command = argv + optind;
    if (!*o->command) {
        fprintf(stderr, "softnic-run: no command to run (softnic-run --help lists the options)\n");
        return EXIT_USAGE;
    }
    return 0;
}
