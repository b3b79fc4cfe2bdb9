/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/perf/options.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "perseus-perf OP [options]: microbenchmarks of the transport, by the path that GPU commands take\n"
    "  OP                 putsignal  put  latency  msgrate  alltoall\n"
    "  --policy LIST      drain,nic_fence,in_order,counted,auto (putsignal: the first four that rails keep; else "
    "auto)\n"
    "  --group LIST       coupled (put, signal, put, signal, ...), peer (all puts, then the signals, one group a\n"
    "                     destination) or a number of puts per group (coupled,peer)\n"
    "  --concurrency LIST transfers in flight together, 1-128 (96)\n"
    "  --bytes LIST       of each transfer, a multiple of 8; 4K, 1M, 4K:4M:x4 (4K)\n"
    "  --peers LIST       destinations, 1-63 (7)\n"
    "  --iterations N     (20)     --warmup N (3)\n"
    "  --nodes K          spread the ranks over K emulated nodes (1)\n"
    "  --queues N         queues a rail (the transport's default)\n"
    "  --timeout S        seconds for everything (120)\n"
    "  --gpu              a persistent kernel pushes the commands\n"
    "  --plot FILE        SVG: efficiency over concurrency, a line a policy and group (putsignal)\n"
    "  --json             one object a line\n"
    "Lists: a,b,c or FROM:TO:xF (times F) or FROM:TO:+S. It forks its ranks itself; run it under softnic-run where "
    "there is\n"
    "no RDMA device. All data is checked.\n";

static int wrong(const char *option, const char *text, const char *want)
{
    fprintf(stderr, "perseus-perf: --%s '%s': want %s\n", option, text, want);
    return 1;
}

static int parse_number(const char *text, char **end, uint64_t *out)
{
    errno = 0;
    *out = strtoull(text, end, 10);
    if (*end == text || errno != 0 || *text == '-')
        return 1;
    switch (**end) {
    case 'K':
    case 'k':
        *out <<= 10;
        ++*end;
        break;
    case 'M':
    case 'm':
        *out <<= 20;
        ++*end;
        break;
    case 'G':
        *out <<= 30;
        ++*end;
        break;
    default:
        break;
    }
    return 0;
}

static int add_value(struct values *values, uint64_t value, uint64_t min, uint64_t max)
{
    if (values->count == OPTIONS_VALUES || value < min || value > max)
        return 1;
    values->value[values->count++] = value;
    return 0;
}

/* FROM:TO:xF or FROM:TO:+S, after FROM: */
static int parse_range(char **at, uint64_t from, struct values *values, uint64_t min, uint64_t max)
{
    uint64_t to, step;
    char kind;

    if (parse_number(*at + 1, at, &to))
        return 1;
    if (**at != ':')
        return 1;
    kind = (*at)[1];
    if ((kind != 'x' && kind != '+') || parse_number(*at + 2, at, &step) || step < (kind == 'x' ? 2 : 1))
        return 1;
    for (uint64_t value = from; value <= to; value = kind == 'x' ? value * step : value + step)
        if (add_value(values, value, min, max))
            return 1;
    return 0;
}

static int parse_values(const char *option, const char *text, uint64_t min, uint64_t max, struct values *values)
{
    char want[96];
    char *at = (char *)(uintptr_t)text;

    snprintf(want, sizeof(want), "numbers from %llu to %llu, at most %d", (unsigned long long)min,
             (unsigned long long)max, OPTIONS_VALUES);
    values->count = 0;
    for (;;) {
        uint64_t value;

        if (parse_number(at, &at, &value))
            return wrong(option, text, want);
        if (*at == ':' ? parse_range(&at, value, values, min, max) : add_value(values, value, min, max))
            return wrong(option, text, want);
        if (*at == 0)
            return 0;
        if (*at++ != ',')
            return wrong(option, text, want);
    }
}

static int parse_one(const char *option, const char *text, uint64_t min, uint64_t max, uint32_t *out)
{
    struct values values;

    if (parse_values(option, text, min, max, &values))
        return 1;
    if (values.count != 1)
        return wrong(option, text, "one number");
    *out = (uint32_t)values.value[0];
    return 0;
}

static int parse_policies(const char *text, struct options *o)
{
    static const char *const known[] = {"drain", "nic_fence", "in_order", "counted", "auto"};

    o->policy_count = 0;
    while (*text) {
        size_t length = strcspn(text, ",");
        bool found = false;

        for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
            found |= strlen(known[i]) == length && memcmp(known[i], text, length) == 0;
        if (!found || o->policy_count == OPTIONS_POLICIES)
            return wrong("policy", text, "drain, nic_fence, in_order, counted or auto");
        snprintf(o->policies[o->policy_count++], OPTIONS_POLICY_CHARS, "%.*s", (int)length, text);
        text += length + (text[length] == ',');
    }
    return o->policy_count == 0 ? wrong("policy", "", "a name") : 0;
}

static int parse_groups(const char *text, struct options *o)
{
    const char *start = text;

    o->groups.count = 0;
    while (*text) {
        size_t length = strcspn(text, ",");
        char *end;
        uint64_t value;

        if (length == 7 && memcmp(text, "coupled", 7) == 0)
            value = GROUP_COUPLED;
        else if (length == 4 && memcmp(text, "peer", 4) == 0)
            value = GROUP_PEER;
        else if (parse_number(text, &end, &value) || end != text + length || value == 0 || value >= GROUP_PEER)
            return wrong("group", start, "coupled, peer or numbers of puts");
        if (add_value(&o->groups, value, 0, GROUP_PEER))
            return wrong("group", start, "fewer groups");
        text += length + (text[length] == ',');
    }
    return o->groups.count == 0 ? wrong("group", start, "coupled, peer or numbers of puts") : 0;
}

const char *options_group_name(uint64_t group, char *text, uint32_t bytes)
{
    if (group == GROUP_COUPLED)
        return "coupled";
    if (group == GROUP_PEER)
        return "peer";
    snprintf(text, bytes, "%llu", (unsigned long long)group);
    return text;
}

static int parse_op(const char *text, struct options *o)
{
    static const char *const names[] = {"putsignal", "put", "latency", "msgrate", "alltoall"};

    for (int i = 0; i < 5; i++)
        if (strcmp(text, names[i]) == 0) {
            o->op = (enum perf_op)i;
            o->op_name = names[i];
            return 0;
        }
    fprintf(stderr, "perseus-perf: '%s': want putsignal, put, latency, msgrate or alltoall\n", text);
    return 1;
}

static void set_defaults(struct options *o)
{
    memset(o, 0, sizeof(*o));
    o->iterations = 20;
    o->warmup = 3;
    o->nodes = 1;
    o->timeout_s = 120;
    parse_groups("coupled,peer", o);
    parse_values("bytes", "4K", 8, 64u << 20, &o->bytes);
    parse_values("concurrency", "96", 1, 128, &o->concurrency);
    parse_values("peers", "7", 1, 63, &o->peers);
}

static int parse_option(int c, struct options *o)
{
    uint32_t queues = 0;
    int r = 0;

    switch (c) {
    case 'p':
        return parse_policies(optarg, o);
    case 'g':
        return parse_groups(optarg, o);
    case 'c':
        return parse_values("concurrency", optarg, 1, 128, &o->concurrency);
    case 'b':
        return parse_values("bytes", optarg, 8, 64u << 20, &o->bytes);
    case 'P':
        return parse_values("peers", optarg, 1, 63, &o->peers);
    case 'i':
        return parse_one("iterations", optarg, 1, 1000000, &o->iterations);
    case 'w':
        return parse_one("warmup", optarg, 0, 1000000, &o->warmup);
    case 'n':
        return parse_one("nodes", optarg, 1, 64, &o->nodes);
    case 't':
        return parse_one("timeout", optarg, 1, 86400, &o->timeout_s);
    case 'q':
        r = parse_one("queues", optarg, 1, 16, &queues);
        o->queues_per_rail = (int)queues;
        return r;
    case 'G':
        o->gpu = true;
        return 0;
    case 'j':
        o->json = true;
        return 0;
    case 's':
        o->plot = optarg;
        return 0;
    case 'h':
        fputs(usage, stdout);
        return 2;
    default:
        return 1;
    }
}

int options_parse(int argc, char **argv, struct options *o)
{
    static const struct option table[] = {
        {"policy", 1, NULL, 'p'},     {"group", 1, NULL, 'g'},  {"concurrency", 1, NULL, 'c'},
        {"bytes", 1, NULL, 'b'},      {"peers", 1, NULL, 'P'},  {"nodes", 1, NULL, 'n'},
        {"iterations", 1, NULL, 'i'}, {"warmup", 1, NULL, 'w'}, {"timeout", 1, NULL, 't'},
        {"queues", 1, NULL, 'q'},     {"gpu", 0, NULL, 'G'},    {"json", 0, NULL, 'j'},
        {"plot", 1, NULL, 's'},       {"help", 0, NULL, 'h'},   {0},
    };
    int c, r;

    set_defaults(o);
    while ((c = getopt_long(argc, argv, "h", table, NULL)) != -1) {
        r = parse_option(c, o);
        if (r != 0)
            return r;
    }
    if (optind + 1 != argc) {
        fprintf(stderr, "perseus-perf: want one operation; --help lists them\n");
        return 1;
    }
    if (parse_op(argv[optind], o))
        return 1;
    for (uint32_t i = 0; i < o->bytes.count; i++)
        if (o->bytes.value[i] % 8 != 0)
            return wrong("bytes", "list", "multiples of 8");
    if (o->gpu && o->op != PERF_PUTSIGNAL && o->op != PERF_LATENCY && o->op != PERF_MSGRATE) {
        fprintf(stderr, "perseus-perf: --gpu is for putsignal, latency and msgrate\n");
        return 1;
    }
    o->every_policy = o->policy_count == 0;
    if (o->every_policy)
        parse_policies(o->op == PERF_PUTSIGNAL ? "drain,nic_fence,in_order,counted" : "auto", o);
    return 0;
}
