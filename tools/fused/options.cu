/* SPDX-License-Identifier: Apache-2.0 */
/* The command line: numbers and switches by table, the rest by hand. */
#include "tools/fused/bench.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIELD(member) offsetof(struct bench_options, member)

static const struct number {
    const char *name, *help;
    size_t field; /* of a uint32_t */
} NUMBERS[] = {
    {"--gpus", "ranks, one thread and GPU each (torchrun and mpirun bring their own)", FIELD(world)},
    {"--nodes", "split the ranks over so many emulated nodes, a process each (needs an RDMA device: softnic-run)",
     FIELD(nodes)},
    {"--iterations", "timed rounds (default 20; 0: check only)", FIELD(iterations)},
    {"--corrupt", "change an element of what the Nth timed launch wrote: the check has to notice", FIELD(corrupt)},
    {"--samples", "elements of each result that are computed anew to check it (default 32768)", FIELD(samples)},
    {"--soak", "more launches, unevenly late, each compared", FIELD(soak)},
    {"--replay", "replays of a CUDA graph of three launches, each compared", FIELD(replay)},
    {"--timeout-ms", "how long a kernel waits for another rank (default 5000)", FIELD(timeout_ms)},
    {"--loopback", "one rank plays so many: times the protocol without NVLink (results are not sums)", FIELD(loopback)},
    {"--clusters", "tuning, as in perseus/fused.h", FIELD(tuning.clusters)},
    {"--band", "tuning", FIELD(tuning.band)},
    {"--push-ctas", "tuning", FIELD(tuning.push_ctas)},
    {"--segments", "tuning", FIELD(tuning.segments)},
    {"--spread", "tuning", FIELD(tuning.spread)},
    {"--group", "tuning", FIELD(tuning.tiles_per_signal)},
    {"--kill-rank-after", "milliseconds: the last rank's process dies, the others must report it", FIELD(kill_after)},
    {"--ctas", "MoE tuning: SMs that work", FIELD(moe.tuning.ctas)},
    {"--mode", "attention tuning: 2 resident, 3 ring of two buffers", FIELD(attention.tuning.mode)},
    {"--attention-ctas", "attention tuning", FIELD(attention.tuning.ctas)},
    {"--slab-rows", "attention tuning", FIELD(attention.tuning.slab_rows)},
    {"--block-rows", "attention tuning", FIELD(attention.tuning.block_rows)},
    {"--overlap", "attention tuning", FIELD(attention.tuning.overlap)},
    {"--share", "MoE tuning: 2: two SMs share rows; 1: not", FIELD(moe.tuning.cluster)},
    {"--route-ctas", "MoE tuning", FIELD(moe.tuning.route_ctas)},
    {"--row-spread", "MoE tuning: percent of the product's time", FIELD(moe.tuning.spread)},
    {"--put-rows", "MoE tuning, several nodes: rows that one put moves", FIELD(moe.tuning.rows_per_put)},
    {"--passes", "MoE tuning, several nodes: 2: what needs no other node first; 1: expert by expert",
     FIELD(moe.tuning.passes)},
};

static const struct choice {
    const char *name, *help;
    size_t field; /* of a uint32_t */
    uint32_t value;
} CHOICES[] = {
    {"--causal", "attention: causal, the sequence zigzag over the ranks", FIELD(attention.causal), 1},
    {"--heads-first", "attention: tensors [B,H,S,D] instead of [B,S,H,D]", FIELD(attention.heads_first), 1},
    {"--json", "one JSON object per row instead of a table", FIELD(json), 1},
    {"--one-device", "all ranks on device 0, to check without several GPUs (with --clusters)", FIELD(one_device), 1},
    {"--no-baselines", "own kernels only", FIELD(no_baselines), 1},
    {"--autotune", "time the candidates first and take the best", FIELD(autotune), 1},
    {"--copy-engine", "tuning", FIELD(tuning.mover), PRS_MOVED_BY_COPY_ENGINES},
    {"--copies-by-ctas", "tuning", FIELD(tuning.mover), PRS_MOVED_BY_CTAS},
    {"--paced", "tuning", FIELD(tuning.paced), PRS_PACED},
    {"--unpaced", "tuning", FIELD(tuning.paced), PRS_UNPACED},
    {"--fused", "refuse shapes that would take the unfused path", FIELD(tuning.path), PRS_PATH_FUSED},
    {"--ragged", "MoE: ranks have different numbers of tokens", FIELD(moe.ragged), 1},
    {"--unfused", "take the unfused path", FIELD(tuning.path), PRS_PATH_UNFUSED},
};

const char *const BENCH_KERNELS[4] = {"gemm", "reduce_scatter", "allgather", "allreduce"};

static const struct bench_moe_shape PRESETS[BENCH_MOE_PRESETS] = {
    {"deepseek-v3", 7168, 2048, 256, 8},
    {"qwen3-30b", 2048, 768, 128, 8},
    {"gpt-oss-120b", 2880, 2880, 128, 4},
};

static void usage(const char *problem)
{
    fprintf(
        stderr,
        "perseus-fused-bench: %s\n"
        "usage: perseus-fused-bench --kernel gemm|reduce_scatter|allgather|allreduce|all --shape MxNxK [--shape ...]\n"
        "       perseus-fused-bench --kernel attention --shape BxHqxHkvxSxD [--shape ...] [--causal]\n"
        "       perseus-fused-bench --kernel moe --preset deepseek-v3|qwen3-30b|gpt-oss-120b|HxNxExK [--preset ...]\n"
        "         --tokens T [--tokens ...] [--zipf S ...]   tokens of each rank; exponent of how experts are liked\n"
        "  %-16s B as [K,N] (default), [N,K] or both\n  %-16s text for the rows\n",
        problem, "--layout kn|nk|both", "--commit TEXT");
    for (const struct number &n : NUMBERS)
        fprintf(stderr, "  %-14s N %s\n", n.name, n.help);
    for (const struct choice &c : CHOICES)
        fprintf(stderr, "  %-16s %s\n", c.name, c.help);
    exit(2);
}

static uint32_t *field_of(struct bench_options *o, size_t field)
{
    return (uint32_t *)((uint8_t *)o + field);
}

static uint32_t parse_number(const char *name, const char *text)
{
    char *end, problem[128];
    unsigned long v = strtoul(text, &end, 10);
    snprintf(problem, sizeof(problem), "%s wants a number, not '%.60s'", name, text);
    if (end == text || *end != '\0' || v > UINT32_MAX)
        usage(problem);
    return (uint32_t)v;
}

static void parse_kernel(struct bench_options *o, const char *name)
{
    uint32_t before = o->kernels;
    if (strcmp(name, "attention") == 0) {
        o->attention.on = 1;
        return;
    }
    if (strcmp(name, "moe") == 0) {
        o->moe.on = 1;
        return;
    }
    for (uint32_t i = 0; i < 4; i++)
        if (strcmp(name, BENCH_KERNELS[i]) == 0 || strcmp(name, "all") == 0)
            o->kernels |= 1u << i;
    if (o->kernels == before)
        usage("no such kernel");
}

static void parse_shape(struct bench_options *o, const char *text)
{
    struct prs_fused_shape *s = &o->shapes[o->shape_count];
    struct prs_attention_shape *t = &o->attention.shapes[o->attention.shape_count];
    if (o->shape_count == BENCH_MAX_SHAPES || o->attention.shape_count == BENCH_MAX_SHAPES)
        usage("too many shapes");
    if (sscanf(text, "%ux%ux%ux%ux%u", &t->batch, &t->heads_q, &t->heads_kv, &t->seq, &t->head_dim) == 5) {
        o->attention.shape_count++;
        return;
    }
    if (sscanf(text, "%ux%ux%u", &s->m, &s->n, &s->k) != 3)
        usage("a shape is MxNxK, of attention BxHqxHkvxSxD");
    o->shape_count++;
}

static void parse_preset(struct bench_moe_options *m, const char *text)
{
    struct bench_moe_shape *s = &m->shapes[m->shape_count];
    if (m->shape_count == BENCH_MOE_LIST)
        usage("too many presets");
    for (const struct bench_moe_shape &p : PRESETS)
        if (strcmp(text, p.name) == 0)
            *s = p;
    if (s->name == NULL && sscanf(text, "%ux%ux%ux%u", &s->hidden, &s->columns, &s->experts, &s->top_k) != 4)
        usage("a preset is a name or HxNxExK");
    if (s->name == NULL)
        s->name = "custom";
    m->shape_count++;
}

static bool parse_moe(struct bench_moe_options *m, const char *name, const char *value)
{
    if (strcmp(name, "--preset") == 0) {
        parse_preset(m, value);
    } else if (strcmp(name, "--tokens") == 0 && m->token_count < BENCH_MOE_LIST) {
        m->tokens[m->token_count++] = parse_number(name, value);
    } else if (strcmp(name, "--zipf") == 0 && m->zipf_count < BENCH_MOE_LIST) {
        char *end;
        m->zipf[m->zipf_count++] = strtod(value, &end);
        if (end == value || *end != '\0')
            usage("--zipf wants a number");
    } else {
        return false;
    }
    return true;
}

static bool parse_word(struct bench_options *o, const char *name, const char *value)
{
    if (strcmp(name, "--kernel") == 0)
        parse_kernel(o, value);
    else if (strcmp(name, "--shape") == 0)
        parse_shape(o, value);
    else if (strcmp(name, "--layout") == 0)
        o->layouts = strcmp(value, "both") == 0 ? 3 : strcmp(value, "nk") == 0 ? 2 : 1;
    else if (strcmp(name, "--commit") == 0)
        o->commit = value;
    else
        return parse_moe(&o->moe, name, value);
    return true;
}

static bool parse_choice(struct bench_options *o, const char *name)
{
    for (const struct choice &c : CHOICES)
        if (strcmp(name, c.name) == 0) {
            *field_of(o, c.field) = c.value;
            return true;
        }
    return false;
}

static bool parse_valued(struct bench_options *o, const char *name, const char *value)
{
    for (const struct number &n : NUMBERS)
        if (strcmp(name, n.name) == 0) {
            *field_of(o, n.field) = parse_number(name, value);
            return true;
        }
    return parse_word(o, name, value);
}

/* Every kernel that was asked for has something to run on. */
static void check_kernels(struct bench_options *o)
{
    struct bench_attention_options *a = &o->attention;
    if (o->kernels == 0 && o->moe.on == 0 && a->on == 0)
        usage("needs --kernel");
    if (o->moe.on ? o->moe.shape_count == 0 || o->moe.token_count == 0 : (o->kernels != 0) != (o->shape_count != 0))
        usage("needs --kernel and --shape, or --kernel moe, --preset and --tokens");
    if ((a->on != 0) != (a->shape_count != 0))
        usage("--kernel attention needs a --shape of its own");
    if (a->causal != 0 && o->loopback != 0)
        usage("causal ranks do not all send the same: no --loopback");
    for (uint32_t i = 0; i < a->shape_count; i++) {
        a->shapes[i].causal = a->causal;
        a->shapes[i].heads_first = a->heads_first;
    }
    a->tuning.heads_per_step = o->tuning.tiles_per_signal;
    a->tuning.push_ctas = o->tuning.push_ctas;
    a->tuning.mover = o->tuning.mover;
    a->tuning.spread = o->tuning.spread;
}

void bench_options_parse(int argc, char **argv, struct bench_options *o)
{
    memset(o, 0, sizeof(*o));
    o->world = 1, o->nodes = 1, o->iterations = 20, o->layouts = 1, o->timeout_ms = 5000, o->samples = 32768,
    o->commit = "unknown";
    for (int i = 1; i < argc; i++) {
        if (parse_choice(o, argv[i]))
            continue;
        if (i + 1 == argc || !parse_valued(o, argv[i], argv[i + 1]))
            usage(argv[i]);
        i++;
    }
    check_kernels(o);
    if (o->moe.zipf_count == 0)
        o->moe.zipf_count = 1; /* 0: all experts are liked the same */
    if (o->world < 1 || o->world > PRS_MAX_LOCAL_RANKS || o->loopback > PRS_MAX_LOCAL_RANKS)
        usage("so many ranks are not possible");
    if (o->iterations > BENCH_MAX_ITERATIONS)
        usage("at most 200 iterations");
    if (o->samples == 0)
        usage("--samples wants one at least");
    if (o->corrupt > o->iterations)
        usage("--corrupt names a timed launch: 1 to --iterations");
    if (o->nodes < 1 || (o->nodes > 1 && o->loopback != 0))
        usage("at least one node, and a loopback has only one");
}
