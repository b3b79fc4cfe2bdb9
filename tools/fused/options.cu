/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of perseus-fused-bench. */
#include "tools/fused/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/option_table.h"

#define FIELD(member) OPTION_FIELD(struct bench_options, member)

const char *const BENCH_KERNELS[4] = {"gemm", "reduce_scatter", "allgather", "allreduce"};
const char *const BENCH_DTYPES[6] = {"default", "bf16", "fp16", "fp32", "e4m3", NULL};
const char *const BENCH_SCALINGS[5] = {"none", "tensor", "rows", "blocks", NULL};
const char *const BENCH_ACTIVATIONS[6] = {"none", "relu", "gelu", "gelu-tanh", "silu", NULL};

static const struct bench_moe_shape PRESETS[BENCH_MOE_PRESETS] = {
    {"deepseek-v3", 7168, 2048, 256, 8},
    {"qwen3-30b", 2048, 768, 128, 8},
    {"gpt-oss-120b", 2880, 2880, 128, 4},
};

static bool parse_kernel(void *options, const char *name)
{
    struct bench_options *o = (struct bench_options *)options;
    bool attention = !strcmp(name, "attention"), moe = !strcmp(name, "moe");
    uint32_t before = o->kernels;
    o->attention.on |= attention, o->moe.on |= moe;
    for (uint32_t i = 0; i < 4; i++)
        if (!strcmp(name, BENCH_KERNELS[i]) || !strcmp(name, "all"))
            o->kernels |= 1u << i;
    return attention || moe || o->kernels != before;
}

/* Numbers with x between them, and nothing else. */
static bool parse_sizes(const char *text, uint32_t *const *sizes, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t size;
        if ((i && *text++ != 'x') || !option_number(&text, &size) || !size || size > UINT32_MAX)
            return false;
        *sizes[i] = (uint32_t)size;
    }
    return !*text;
}

static bool parse_shape(void *options, const char *text)
{
    struct bench_options *o = (struct bench_options *)options;
    struct prs_gemm_shape *s = &o->shapes[o->shape_count];
    struct prs_attention_shape *t = &o->attention.shapes[o->attention.shape_count];
    if (o->shape_count == BENCH_MAX_SHAPES || o->attention.shape_count == BENCH_MAX_SHAPES)
        return false;
    uint32_t *const attention[] = {&t->batch, &t->heads_q, &t->heads_kv, &t->seq, &t->head_dim};
    uint32_t *const product[] = {&s->m, &s->n, &s->k};
    if (parse_sizes(text, attention, 5))
        return ++o->attention.shape_count;
    return parse_sizes(text, product, 3) && ++o->shape_count;
}

static bool parse_preset(void *options, const char *text)
{
    struct bench_moe_options *m = &((struct bench_options *)options)->moe;
    struct bench_moe_shape *s = &m->shapes[m->shape_count];
    if (m->shape_count == BENCH_MOE_LIST)
        return false;
    for (const struct bench_moe_shape &p : PRESETS)
        if (!strcmp(text, p.name))
            *s = p;
    uint32_t *const sizes[] = {&s->hidden, &s->columns, &s->experts, &s->top_k};
    if (!s->name && !parse_sizes(text, sizes, 4))
        return false;
    if (!s->name)
        s->name = "custom";
    return ++m->shape_count;
}

static bool parse_tokens(void *options, const char *text)
{
    struct bench_moe_options *m = &((struct bench_options *)options)->moe;
    uint64_t tokens;
    if (!option_number(&text, &tokens) || *text || tokens > UINT32_MAX || m->token_count == BENCH_MOE_LIST)
        return false;
    m->tokens[m->token_count++] = (uint32_t)tokens;
    return true;
}

static bool parse_zipf(void *options, const char *text)
{
    struct bench_moe_options *m = &((struct bench_options *)options)->moe;
    char *end;
    if (m->zipf_count == BENCH_MOE_LIST)
        return false;
    double skew = strtod(text, &end);
    m->zipf[m->zipf_count++] = skew;
    return end != text && !*end && skew >= 0 && skew <= 4;
}

static const char *const C_DTYPES[] = {"same", "fp32", NULL}, *const DTYPES[] = {"bf16", "fp16", "e4m3", NULL};
static const char *const LAYOUTS[] = {"kn", "nk", "both", NULL};

static const struct option_row ROWS[] = {
    {OPTION_PARSED, "kernel", "NAME", "gemm|reduce_scatter|allgather|allreduce|all, attention or moe; may be repeated",
     OPTION_PARSED_BY(parse_kernel)},
    {OPTION_PARSED, "shape", "SHAPE", "MxNxK, or BxHqxHkvxSxD of attention; may be repeated, up to 64 times",
     OPTION_PARSED_BY(parse_shape)},
    {OPTION_PARSED, "preset", "NAME",
     "MoE: deepseek-v3, qwen3-30b, gpt-oss-120b or HxNxExK; may be repeated, up to 8 times",
     OPTION_PARSED_BY(parse_preset)},
    {OPTION_PARSED, "tokens", "N", "MoE: tokens of each rank; may be repeated, up to 8 times",
     OPTION_PARSED_BY(parse_tokens)},
    {OPTION_PARSED, "zipf", "S",
     "MoE: expert i is chosen in proportion to 1 / i^S, 0-4 (default 0); may be repeated, up to 8 times",
     OPTION_PARSED_BY(parse_zipf)},
    {OPTION_CHOICE, "layout", "kn|nk|both", "B as [K,N] (default), [N,K] or both", FIELD(layouts), 0, 0, LAYOUTS},
    {OPTION_CHOICE, "dtype", "bf16|fp16|e4m3", "products: of the matrices; e4m3: --layout nk", FIELD(dtype), 0, 0,
     DTYPES},
    {OPTION_CHOICE, "scaling", "tensor|rows|blocks",
     "products of e4m3: what has a scale (default tensor); blocks have no baselines", FIELD(scaling), 0, 0,
     BENCH_SCALINGS},
    {OPTION_SET, "fast-accumulation", NULL, "products of e4m3: sums are not promoted to fp32", FIELD(fast), 1},
    {OPTION_CHOICE, "c-dtype", "same|fp32", "products: of C: that of A and B (default), or fp32", FIELD(wide), 0, 0,
     C_DTYPES},
    {OPTION_CHOICE, "activation", "none|relu|gelu|gelu-tanh|silu", "products: what is applied to the sum",
     FIELD(activation), 0, 0, BENCH_ACTIVATIONS},
    {OPTION_SET, "gated", NULL, "products: the first half of B's columns is the gate", FIELD(gated), 1},
    {OPTION_SET, "bias", NULL, "products: add a bias to each row", FIELD(bias), 1},
    {OPTION_SET, "residual", NULL, "products: add a matrix to the result", FIELD(residual), 1},
    {OPTION_SET, "norm", NULL, "products but all-gathers, C as A and B: RMS norm of the rows; wants --residual",
     FIELD(norm), 1},
    {OPTION_SET, "keep-gathered", NULL, "all-gather: store the A of all ranks, too", FIELD(keep_gathered), 1},
    {OPTION_TEXT, "commit", "TEXT", "text for the rows", FIELD(commit)},
    {OPTION_NUMBER, "gpus", "N", "ranks, one thread and GPU each (torchrun and mpirun bring their own)", FIELD(world),
     1, PRS_MAX_LOCAL_RANKS},
    {OPTION_NUMBER, "nodes", "N",
     "split the ranks over N emulated nodes, a process each (needs an RDMA device: softnic-run)", FIELD(nodes), 1,
     PRS_MAX_LOCAL_RANKS},
    {OPTION_NUMBER, "iterations", "N", "timed rounds (default 20; 0: check only; at most 200)", FIELD(iterations), 0,
     BENCH_MAX_ITERATIONS},
    {OPTION_NUMBER, "corrupt", "N", "change an element of what the Nth timed launch wrote: the check must find it",
     FIELD(corrupt), 0, UINT32_MAX},
    {OPTION_NUMBER, "samples", "N", "elements of each result that are computed again to check it (default 32768)",
     FIELD(samples), 1, UINT32_MAX},
    {OPTION_NUMBER, "soak", "N", "more launches, with random delays, each compared", FIELD(soak), 0, UINT32_MAX},
    {OPTION_NUMBER, "replay", "N", "replays of a CUDA graph of three launches, each compared", FIELD(replay), 0,
     UINT32_MAX},
    {OPTION_NUMBER, "timeout-ms", "N", "how long a kernel waits for another rank (default 5000)", FIELD(timeout_ms), 0,
     UINT32_MAX},
    {OPTION_NUMBER, "loopback", "N", "one rank plays N: times the protocol without NVLink (results are not sums)",
     FIELD(loopback), 0, PRS_MAX_LOCAL_RANKS},
    {OPTION_NUMBER, "clusters", "N", "tuning, as in perseus/fused.h", FIELD(tuning.clusters), 0, UINT32_MAX},
    {OPTION_NUMBER, "band", "N", "tuning", FIELD(tuning.band), 0, UINT32_MAX},
    {OPTION_NUMBER, "segments", "N", "tuning", FIELD(tuning.segments), 0, UINT32_MAX},
    {OPTION_NUMBER, "spread", "N", "tuning", FIELD(tuning.spread), 0, UINT32_MAX},
    {OPTION_NUMBER, "group", "N", "tuning", FIELD(tuning.tiles_per_signal), 0, UINT32_MAX},
    {OPTION_NUMBER, "columns", "N", "tuning", FIELD(tuning.columns), 0, UINT32_MAX},
    {OPTION_NUMBER, "kill-rank-after", "N",
     "milliseconds until the last rank's process dies; the others must report it", FIELD(kill_after), 0, UINT32_MAX},
    {OPTION_NUMBER, "ctas", "N", "MoE tuning: SMs that work", FIELD(moe.tuning.ctas), 0, UINT32_MAX},
    {OPTION_NUMBER, "mode", "N", "attention tuning: 2 resident, 3 ring of two buffers", FIELD(attention.tuning.mode), 0,
     UINT32_MAX},
    {OPTION_NUMBER, "attention-ctas", "N", "attention tuning", FIELD(attention.tuning.ctas), 0, UINT32_MAX},
    {OPTION_NUMBER, "slab-rows", "N", "attention tuning", FIELD(attention.tuning.slab_rows), 0, UINT32_MAX},
    {OPTION_NUMBER, "block-rows", "N", "attention tuning", FIELD(attention.tuning.block_rows), 0, UINT32_MAX},
    {OPTION_NUMBER, "overlap", "N", "attention tuning", FIELD(attention.tuning.overlap), 0, UINT32_MAX},
    {OPTION_NUMBER, "share", "N", "MoE tuning: 2: two SMs share rows; 1: they do not", FIELD(moe.tuning.cluster), 0,
     UINT32_MAX},
    {OPTION_NUMBER, "route-ctas", "N", "MoE tuning", FIELD(moe.tuning.route_ctas), 0, UINT32_MAX},
    {OPTION_NUMBER, "row-spread", "N", "MoE tuning: percent of the product's time", FIELD(moe.tuning.spread), 0,
     UINT32_MAX},
    {OPTION_NUMBER, "put-rows", "N", "MoE tuning, several nodes: rows that one put moves",
     FIELD(moe.tuning.rows_per_put), 0, UINT32_MAX},
    {OPTION_NUMBER, "passes", "N", "MoE tuning, several nodes: 2: first what needs no other node; 1: expert by expert",
     FIELD(moe.tuning.passes), 0, UINT32_MAX},
    {OPTION_SET, "causal", NULL, "attention: causal, the sequence zigzag over the ranks", FIELD(attention.causal), 1},
    {OPTION_SET, "backward", NULL, "attention: time the backward pass too, and both passes one after the other",
     FIELD(attention.backward), 1},
    {OPTION_SET, "heads-first", NULL, "attention: tensors [B,H,S,D] instead of [B,S,H,D]", FIELD(attention.heads_first),
     1},
    {OPTION_SET, "json", NULL, "one JSON object per row instead of a table", FIELD(json), 1},
    {OPTION_SET, "one-device", NULL, "all ranks on device 0, to check without several GPUs (with --clusters)",
     FIELD(one_device), 1},
    {OPTION_SET, "no-baselines", NULL, "own kernels only", FIELD(no_baselines), 1},
    {OPTION_SET, "autotune", NULL, "time the candidates first and take the best", FIELD(autotune), 1},
    {OPTION_SET, "copy-engine", NULL, "tuning", FIELD(tuning.mover), PRS_MOVED_BY_COPY_ENGINES},
    {OPTION_SET, "copies-by-ctas", NULL, "tuning", FIELD(tuning.mover), PRS_MOVED_BY_CTAS},
    {OPTION_SET, "paced", NULL, "tuning", FIELD(tuning.paced), PRS_GEMM_PACED},
    {OPTION_SET, "unpaced", NULL, "tuning", FIELD(tuning.paced), PRS_GEMM_UNPACED},
    {OPTION_SET, "fused", NULL, "refuse shapes that would take the unfused path", FIELD(tuning.path),
     PRS_GEMM_PATH_FUSED},
    {OPTION_SET, "ragged", NULL, "MoE: ranks have different numbers of tokens", FIELD(moe.ragged), 1},
    {OPTION_SET, "unfused", NULL, "take the unfused path", FIELD(tuning.path), PRS_GEMM_PATH_UNFUSED},
};

static const struct option_table TABLE = {
    "perseus-fused-bench",
    "usage: perseus-fused-bench --kernel gemm|reduce_scatter|allgather|allreduce|all --shape MxNxK [--shape ...]\n"
    "       perseus-fused-bench --kernel attention --shape BxHqxHkvxSxD [--shape ...] [--causal] [--backward]\n"
    "       perseus-fused-bench --kernel moe --preset NAME [--preset ...] --tokens T [--tokens ...] [--zipf S ...]\n"
    "Times fused kernels, compared with their baselines, and checks their results.\n",
    "Example, two GPUs:\n"
    "  perseus-fused-bench --gpus 2 --kernel reduce_scatter --shape 8192x8192x4096\n",
    ROWS,
    sizeof(ROWS) / sizeof(ROWS[0]),
};

static const char *name_of(uint32_t kernels)
{
    for (uint32_t i = 0; i < 4; i++)
        if (kernels == 1u << i)
            return BENCH_KERNELS[i];
    return "all";
}

/* Each requested kernel needs a shape to run on. */
static void check_kernels(struct bench_options *o)
{
    struct bench_attention_options *a = &o->attention;
    if (!o->kernels && !o->moe.on && !a->on)
        option_table_refuse(&TABLE, "--kernel is missing");
    if (o->moe.on && o->moe.shape_count == 0)
        option_table_refuse(&TABLE, "--kernel moe: --preset NAME is missing");
    if (o->moe.on && o->moe.token_count == 0)
        option_table_refuse(&TABLE, "--kernel moe: --tokens N is missing");
    if (a->on && a->shape_count == 0)
        option_table_refuse(&TABLE, "--kernel attention: --shape BxHqxHkvxSxD is missing");
    if (o->kernels && o->shape_count == 0)
        option_table_refuse(&TABLE, "--kernel %s: --shape MxNxK is missing", name_of(o->kernels));
    if (!o->kernels && o->shape_count != 0)
        option_table_refuse(&TABLE, "--shape MxNxK: want --kernel gemm, reduce_scatter, allgather, allreduce or all");
    if (!a->on && a->shape_count != 0)
        option_table_refuse(&TABLE, "--shape BxHqxHkvxSxD: want --kernel attention");
    if (!o->kernels && (o->dtype || o->wide || o->activation || o->gated || o->bias || o->residual || o->keep_gathered))
        option_table_refuse(
            &TABLE, "--dtype, --c-dtype, --activation, --gated, --bias, --residual, --keep-gathered: want a product");
    if (o->dtype != BENCH_DTYPE_E4M3 && (o->scaling || o->fast))
        option_table_refuse(&TABLE, "--scaling, --fast-accumulation: want --dtype e4m3");
    if (o->dtype == BENCH_DTYPE_E4M3 && o->layouts != 1)
        option_table_refuse(&TABLE, "--dtype e4m3: wants --layout nk");
    if (o->norm && (!o->residual || o->wide || o->gated))
        option_table_refuse(&TABLE, "--norm: wants --residual, and neither --c-dtype fp32 nor --gated");
    if (o->norm && (!o->kernels || (o->kernels >> PRS_GEMM_ALLGATHER & 1) != 0))
        option_table_refuse(&TABLE, "--norm: wants --kernel gemm, reduce_scatter or allreduce");
    if (o->loopback && o->keep_gathered)
        option_table_refuse(&TABLE, "--loopback: not with --keep-gathered, since one rank's rows come from it alone");
    if (a->causal && o->loopback)
        option_table_refuse(&TABLE, "--loopback: not with --causal, whose ranks do not send alike");
    if ((a->causal || a->heads_first || a->backward) && !a->on)
        option_table_refuse(&TABLE, "--causal, --heads-first, --backward: want --kernel attention");
    if ((o->moe.shape_count || o->moe.token_count || o->moe.zipf_count || o->moe.ragged) && !o->moe.on)
        option_table_refuse(&TABLE, "--preset, --tokens, --zipf, --ragged: want --kernel moe");
    if (a->backward && (o->loopback || o->soak || o->replay || o->nodes > 1))
        option_table_refuse(&TABLE, "--backward: not with --loopback, --soak, --replay or --nodes");
    for (uint32_t i = 0; i < a->shape_count; i++) {
        a->shapes[i].causal = a->causal;
        a->shapes[i].heads_first = a->heads_first;
    }
    a->tuning.heads_per_step = o->tuning.tiles_per_signal;
    a->tuning.mover = o->tuning.mover;
    a->tuning.spread = o->tuning.spread;
}

void bench_options_parse(int argc, char **argv, struct bench_options *o)
{
    memset(o, 0, sizeof(*o));
    o->world = 1, o->nodes = 1, o->iterations = 20, o->timeout_ms = 5000, o->samples = 32768, o->commit = "unknown";
    if (option_table_parse(&TABLE, o, argc, argv) < argc)
        option_table_refuse(&TABLE, "'%s' is not an option", argv[argc - 1]);
    check_kernels(o);
    if (o->dtype == BENCH_DTYPE_E4M3)
        o->scaling = o->scaling ? o->scaling : PRS_SCALING_TENSOR;
    if (o->scaling == PRS_SCALING_BLOCKS)
        o->no_baselines = 1;
    o->layouts++; /* a bit for each layout */
    if (o->moe.zipf_count == 0)
        o->moe.zipf_count = 1; /* 0: all experts are equally popular */
    if (o->corrupt > o->iterations)
        option_table_refuse(&TABLE, "--corrupt %u: want a timed launch, 1 to --iterations", o->corrupt);
    if (o->nodes > 1 && o->loopback)
        option_table_refuse(&TABLE, "--loopback: not with --nodes, since it has one node");
}
