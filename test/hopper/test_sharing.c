/* SPDX-License-Identifier: Apache-2.0 */
/* Plans of MoE and of attention share the memory of a context: what other ranks write (core/plan_switch.h), and what
 * one launch leaves on its own rank (prs_plan_scratch()). Each launch among those of other plans must give the bits
 * that it gave when nothing else ran. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "test/hopper/ranks.h"
#include "tools/hopper/hopper.h"

enum { KINDS = 2, MOST_PLANS = 6, MOST_LAUNCHES = 40, SMS = 4, LONGEST_PAUSE_US = 20000 };

enum what { ATTENTION, LAYER, COMBINE, AGAIN };

/* A plan; COMBINE and AGAIN launch along the maps of dispatches that came before. */
struct plan_row {
    enum what what;
    struct prs_moe_shape moe;
    struct prs_attention_shape attention;
    struct prs_attention_tuning tuning;
};

struct turns {
    uint32_t world, nodes, plans, launches;
    bool graphs, reopens; /* reopens: the first plan is closed and opened again, while the others live */
    struct plan_row plan[MOST_PLANS];
};

/* A plan of a rank, and what it works on: inputs of two kinds. */
struct item {
    const struct plan_row *row;
    struct prs_moe_plan *moe;
    struct prs_attention_plan *attention;
    struct prs_attention_operands tensors[KINDS];
    struct prs_moe_batch batch[KINDS];
    struct prs_moe_results results[KINDS];
    struct prs_moe_again again[KINDS];
    size_t bytes; /* of a result */
    uint8_t *want[KINDS];
};

static uint32_t mix(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t x = a * 2654435761u ^ b * 40503u ^ c * 69069u;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    return x;
}

static void *upload(const void *from, size_t bytes)
{
    void *p = ranks_device(bytes, 0xff);
    cr_assert_eq(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    return p;
}

/* ---- one plan ---- */
static void open_plan(struct prs_fused *ctx, struct item *x)
{
    const struct plan_row *row = x->row;
    int r = row->what == ATTENTION ? prs_attention_plan_open(ctx, &row->attention, &row->tuning, &x->attention)
                                   : prs_moe_plan_open(ctx, &row->moe, NULL, &x->moe);
    cr_assert_eq(r, 0, "%s", prs_fused_error_text());
}

static void close_plan(struct item *x)
{
    prs_attention_plan_close(x->attention);
    prs_moe_plan_close(x->moe);
}

static void make_tensors(struct item *x, uint32_t key, uint32_t world, uint32_t kind)
{
    const struct prs_attention_shape *s = &x->row->attention;
    uint64_t rows = (uint64_t)s->batch * (s->seq / world), q = rows * s->heads_q * s->head_dim,
             kv = rows * s->heads_kv * s->head_dim;
    x->tensors[kind] = (struct prs_attention_operands){
        .q = ranks_upload(key, q), .k = ranks_upload(key + 1, kv), .v = ranks_upload(key + 2, kv)};
    x->bytes = q * 2;
}

/* The tokens of rank 0 choose experts of the first two ranks only. So it does not wait for the others, and is soon in
 * the launch after. */
static void make_batch(struct item *x, uint32_t key, uint32_t rank, uint32_t world, uint32_t kind)
{
    const struct prs_moe_shape *s = &x->row->moe;
    struct prs_moe_batch *b = &x->batch[kind];
    struct prs_moe_info info;
    uint32_t choices = s->tokens * s->top_k, local = s->experts / world, step = s->experts / s->top_k;
    int64_t *chosen = calloc(choices, sizeof(*chosen));
    float *weights = calloc(choices, sizeof(*weights));
    prs_moe_plan_query(x->moe, &info);
    for (uint32_t i = 0; i < choices; i++) {
        uint32_t first = mix(key, i / s->top_k, 5);
        chosen[i] =
            (first + i % s->top_k * step + mix(first, i, 6) % step) % (rank == 0 && world > 1 ? 2 * local : s->experts);
        weights[i] = ranks_element(key + 3, i);
    }
    b->tokens = ranks_upload(key, (uint64_t)s->tokens * s->hidden);
    b->count = s->tokens;
    b->chosen = upload(chosen, choices * sizeof(*chosen));
    b->router_weights = upload(weights, choices * sizeof(*weights));
    b->maps = ranks_device(info.maps_bytes, 0xff);
    x->bytes = (size_t)b->count * s->hidden * 2;
    if (x->row->what == LAYER) {
        b->weights = ranks_upload(key + 1, (uint64_t)local * s->hidden * s->columns);
        b->down = ranks_upload(key + 2, (uint64_t)local * s->columns * s->hidden);
    } else {
        b->out = ranks_device((size_t)info.capacity * s->hidden * 2, 0xff);
        b->expert_rows = ranks_device(local * sizeof(*b->expert_rows), 0xff);
        cr_assert_eq(prs_moe_dispatch(x->moe, b, NULL), 0, "%s", prs_fused_error_text());
        x->results[kind] = (struct prs_moe_results){.rows = ranks_upload(key + 4, (uint64_t)info.capacity * s->hidden),
                                                    .maps = b->maps};
        x->again[kind] = (struct prs_moe_again){.tokens = b->tokens, .maps = b->maps, .weighted = 1, .clear_fill = 1};
    }
    if (x->row->what == AGAIN)
        x->bytes = (size_t)info.capacity * s->hidden * 2;
    free(chosen);
    free(weights);
}

static int launch(struct item *x, uint32_t kind, void *out, cudaStream_t stream)
{
    switch (x->row->what) {
    case ATTENTION:
        x->tensors[kind].out = out;
        return prs_attention_launch(x->attention, &x->tensors[kind], stream);
    case LAYER:
        x->batch[kind].out = out;
        return prs_moe_layer(x->moe, &x->batch[kind], stream);
    case COMBINE:
        x->results[kind].out = out;
        return prs_moe_combine(x->moe, &x->results[kind], stream);
    default:
        x->again[kind].out = out;
        return prs_moe_dispatch_again(x->moe, &x->again[kind], stream);
    }
}

/* Opens a plan, and launches it with nothing else. */
static void open_item(struct prs_fused *ctx, const struct plan_row *row, uint32_t rank, uint32_t world, struct item *x)
{
    *x = (struct item){.row = row};
    open_plan(ctx, x);
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        uint32_t key = 1 + 8 * (rank + 16 * (kind + KINDS * (uint32_t)row->what));
        void *out;
        if (row->what == ATTENTION)
            make_tensors(x, key, world, kind);
        else
            make_batch(x, key, rank, world, kind);
        out = ranks_device(x->bytes, 0xff);
        x->want[kind] = malloc(x->bytes);
        cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
        cr_assert_eq(launch(x, kind, out, NULL), 0, "%s", prs_fused_error_text());
        cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
        cr_assert_eq(cudaMemcpy(x->want[kind], out, x->bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    }
}

/* ---- plans by turns ---- */
/* A launch: of which plan, with which inputs. All ranks choose alike. */
struct turn {
    uint32_t plan, kind;
    void *out;
};

static struct turn choose(const struct turns *t, uint32_t i)
{
    uint32_t x = mix((uint32_t)hopper_seed(), i, 7);
    return (struct turn){.plan = x % t->plans, .kind = x / 256 % KINDS};
}

static void pause_sometimes(uint32_t rank, uint32_t i)
{
    uint32_t x = mix((uint32_t)hopper_seed() + rank, i, 8);
    if (x % 3 == 0)
        (void)usleep(x / 16 % LONGEST_PAUSE_US);
}

static void check(const struct item *items, const struct turn *x, uint32_t rank, uint32_t i)
{
    const struct item *of = &items[x->plan];
    uint8_t *have = malloc(of->bytes);
    cr_assert_eq(cudaMemcpy(have, x->out, of->bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    cr_assert_eq(memcmp(have, of->want[x->kind], of->bytes), 0,
                 "rank %u: elements are wrong in launch %u, of plan %u (HOPPER_SEED=%llu)", rank, i, x->plan,
                 (unsigned long long)hopper_seed());
    free(have);
    (void)cudaFree(x->out);
}

static void launch_by_turns(const struct turns *t, struct item *items, uint32_t rank, uint32_t first)
{
    struct turn x[MOST_LAUNCHES];
    for (uint32_t i = 0; i < t->launches; i++) {
        x[i] = choose(t, first + i);
        x[i].out = ranks_device(items[x[i].plan].bytes, 0xff);
    }
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    for (uint32_t i = 0; i < t->launches; i++) {
        pause_sometimes(rank, i);
        cr_assert_eq(launch(&items[x[i].plan], x[i].kind, x[i].out, NULL), 0, "%s", prs_fused_error_text());
    }
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    for (uint32_t i = 0; i < t->launches; i++)
        check(items, &x[i], rank, i);
}

/* A graph of a launch of each kind, by which it writes to out[kind]. */
struct graph {
    cudaGraphExec_t exec;
    void *out[KINDS];
};

static void capture(struct item *x, struct graph *g, cudaStream_t stream)
{
    cudaGraph_t graph;
    for (uint32_t kind = 0; kind < KINDS; kind++)
        g->out[kind] = ranks_device(x->bytes, 0xff);
    cr_assert_eq(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    for (uint32_t kind = 0; kind < KINDS; kind++)
        cr_assert_eq(launch(x, kind, g->out[kind], stream), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cr_assert_eq(cudaGraphInstantiate(&g->exec, graph, 0), cudaSuccess);
    (void)cudaGraphDestroy(graph);
}

static void replay_by_turns(const struct turns *t, struct item *items, struct graph *graphs, uint32_t rank,
                            cudaStream_t stream)
{
    struct turn x[MOST_LAUNCHES];
    for (uint32_t i = 0; i < t->launches; i++) {
        x[i] = choose(t, i);
        x[i].out = ranks_device(items[x[i].plan].bytes, 0xff);
    }
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    for (uint32_t i = 0; i < t->launches; i++) {
        struct graph *g = &graphs[x[i].plan];
        pause_sometimes(rank, i);
        cr_assert_eq(cudaGraphLaunch(g->exec, stream), cudaSuccess);
        (void)cudaMemcpyAsync(x[i].out, g->out[x[i].kind], items[x[i].plan].bytes, cudaMemcpyDeviceToDevice, stream);
    }
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    for (uint32_t i = 0; i < t->launches; i++)
        check(items, &x[i], rank, i);
    for (uint32_t i = 0; i < t->plans; i++)
        (void)cudaGraphExecDestroy(graphs[i].exec);
}

/* Graphs are captured when later plans are not open yet. */
static void run_rank(uint32_t rank, struct ranks_self *self, void *user)
{
    const struct turns *t = user;
    struct item items[MOST_PLANS];
    struct graph graphs[MOST_PLANS];
    struct prs_fused_error error;
    struct prs_fused *ctx;
    cudaStream_t stream;
    cr_assert_eq(ranks_open(self, t->nodes, 60000, &ctx), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    for (uint32_t i = 0; i < t->plans; i++) {
        open_item(ctx, &t->plan[i], rank, t->world, &items[i]);
        if (t->graphs)
            capture(&items[i], &graphs[i], stream);
    }
    if (t->graphs)
        replay_by_turns(t, items, graphs, rank, stream);
    launch_by_turns(t, items, rank, 0);
    if (t->reopens) {
        close_plan(&items[0]);
        open_plan(ctx, &items[0]);
        launch_by_turns(t, items, rank, t->launches);
    }
    cr_assert_eq(prs_fused_poll_error(ctx, &error), 0, "%s", error.text);
    for (uint32_t i = 0; i < t->plans; i++)
        close_plan(&items[i]);
    (void)cudaStreamDestroy(stream);
    prs_fused_close(ctx);
}

static void assert_right(struct turns t)
{
    hopper_setup(RANKS_MAX, SMS, 0);
    ranks_run(t.world, run_rank, &t);
}

#define PUSHED                                                                                                         \
    {                                                                                                                  \
        ATTENTION, .attention = {1, 2, 2, 64, 240, 0, 0, 0}, .tuning = {.mover = PRS_MOVED_BY_CTAS }                   \
    }
#define PUSHED_LONG                                                                                                    \
    {                                                                                                                  \
        ATTENTION, .attention = {1, 3, 3, 64, 480, 1, 0, 0}, .tuning = {.mover = PRS_MOVED_BY_CTAS }                   \
    }
#define COPIED                                                                                                         \
    {                                                                                                                  \
        ATTENTION, .attention = {1, 2, 2, 64, 360, 1, 0, 0}, .tuning = {.mover = PRS_MOVED_BY_COPY_ENGINES }           \
    }
#define RING                                                                                                           \
    {                                                                                                                  \
        ATTENTION, .attention = {1, 3, 3, 64, 240, 0, 0, 0}, .tuning = {                                               \
            .mode = PRS_ATTENTION_RING,                                                                                \
            .heads_per_step = 1,                                                                                       \
            .mover = PRS_MOVED_BY_CTAS                                                                                 \
        }                                                                                                              \
    }
#define SMALL_LAYER                                                                                                    \
    {                                                                                                                  \
        LAYER, .moe = {.tokens = 24, .hidden = 72, .columns = 72, .experts = 12, .top_k = 2, .layer = 1 }              \
    }
#define LAYER_OF_40                                                                                                    \
    {                                                                                                                  \
        LAYER, .moe = {.tokens = 40, .hidden = 136, .columns = 72, .experts = 12, .top_k = 3, .layer = 1 }             \
    }
#define SUMS                                                                                                           \
    {                                                                                                                  \
        COMBINE, .moe = {.tokens = 40, .hidden = 136, .experts = 12, .top_k = 3 }                                      \
    }
#define SMALL_SUMS                                                                                                     \
    {                                                                                                                  \
        COMBINE, .moe = {.tokens = 30, .hidden = 72, .experts = 12, .top_k = 2 }                                       \
    }
#define ROWS_AGAIN                                                                                                     \
    {                                                                                                                  \
        AGAIN, .moe = {.tokens = 36, .hidden = 72, .experts = 12, .top_k = 3 }                                         \
    }

Test(sharing, attention_plans_by_turns_are_right, .timeout = 600)
{
    assert_right((struct turns){.world = 3, .plans = 4, .launches = 20, .plan = {PUSHED, PUSHED_LONG, COPIED, RING}});
}

Test(sharing, moe_plans_by_turns_are_right, .timeout = 600)
{
    assert_right((struct turns){
        .world = 3, .plans = 5, .launches = 30, .plan = {SUMS, SMALL_SUMS, ROWS_AGAIN, LAYER_OF_40, SMALL_LAYER}});
}

Test(sharing, a_plan_that_is_opened_in_the_place_of_another_is_one_of_its_own, .timeout = 600)
{
    assert_right((struct turns){.world = 2, .plans = 2, .launches = 12, .reopens = true, .plan = {SUMS, SMALL_SUMS}});
    assert_right((struct turns){.world = 2, .plans = 2, .launches = 8, .reopens = true, .plan = {PUSHED, RING}});
}

Test(sharing, graphs_may_be_replayed_in_any_order, .timeout = 600)
{
    assert_right((struct turns){.world = 3,
                                .plans = 6,
                                .launches = 12,
                                .graphs = true,
                                .plan = {PUSHED, SUMS, RING, ROWS_AGAIN, COPIED, SMALL_LAYER}});
}

/* ---- every access checked for its order (memory_order.py) ---- */
Test(sharing_order, of_attention, .timeout = 600)
{
    assert_right((struct turns){.world = 2, .plans = 2, .launches = 6, .plan = {PUSHED, RING}});
}

Test(sharing_order, of_moe, .timeout = 600)
{
    assert_right((struct turns){.world = 2, .plans = 2, .launches = 6, .plan = {SUMS, SMALL_SUMS}});
}

/* ---- several nodes: the real transport, over any verbs device (softnic in the suite) ---- */
Test(sharing_nodes, plans_by_turns_are_right, .timeout = 900)
{
    ranks_need_a_device();
    assert_right((struct turns){.world = 4,
                                .nodes = 2,
                                .plans = 5,
                                .launches = 6,
                                .graphs = true,
                                .reopens = true,
                                .plan = {SUMS, PUSHED, RING, SMALL_SUMS, LAYER_OF_40}});
}

/* ---- memory ---- */
/* Checks what a context reports of its memory, before and after a plan was opened. least: the sum of what the open
 * plans report. */
static void expect_memory(const struct prs_fused_memory *before, const struct prs_fused_memory *after, uint64_t least)
{
    cr_assert(after->used >= least && after->used <= after->held, "%llu of %llu bytes are used, by plans %llu",
              (unsigned long long)after->used, (unsigned long long)after->held, (unsigned long long)least);
    cr_assert_geq(after->held, before->held);
}

static void open_many(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct plan_row rows[] = {
        {LAYER, .moe = {.tokens = 512, .hidden = 512, .columns = 512, .experts = 4, .top_k = 2, .layer = 1}},
        {LAYER, .moe = {.tokens = 400, .hidden = 512, .columns = 256, .experts = 4, .top_k = 2, .layer = 1}},
        {LAYER, .moe = {.tokens = 512, .hidden = 512, .columns = 512, .experts = 4, .top_k = 2, .layer = 1}},
        {LAYER, .moe = {.tokens = 256, .hidden = 512, .columns = 512, .experts = 4, .top_k = 1, .layer = 1}},
        {ATTENTION, .attention = {1, 4, 4, 128, 2048, 1, 0, 0}},
        {ATTENTION, .attention = {1, 4, 4, 128, 1024, 1, 0, 0}},
        {ATTENTION, .attention = {1, 4, 4, 128, 2048, 0, 0, 0}},
    };
    enum { COUNT = sizeof(rows) / sizeof(*rows) };
    struct item items[COUNT] = {0};
    uint64_t shared[2] = {0, 0}, own = 0;
    struct prs_fused_memory before, memory;
    struct prs_fused *ctx;
    (void)rank, (void)user;
    cr_assert_eq(ranks_open(self, 0, 60000, &ctx), 0);
    for (uint32_t i = 0; i < COUNT; i++) {
        struct prs_moe_info moe = {.shared_bytes = 0};
        struct prs_attention_info attention = {.shared_bytes = 0};
        uint64_t *first = &shared[rows[i].what == ATTENTION], now;
        items[i].row = &rows[i];
        prs_fused_memory(ctx, &before);
        open_plan(ctx, &items[i]);
        prs_fused_memory(ctx, &memory);
        if (rows[i].what == ATTENTION)
            prs_attention_plan_query(items[i].attention, &attention);
        else
            prs_moe_plan_query(items[i].moe, &moe);
        now = moe.shared_bytes + attention.shared_bytes;
        own += moe.workspace_bytes + attention.workspace_bytes;
        *first = *first == 0 ? now : *first;
        cr_assert(now <= *first, "plan %u shares %llu bytes, the largest %llu: more were taken", i,
                  (unsigned long long)now, (unsigned long long)*first);
        /* MoE and attention share the memory of this rank alone, which both report. */
        expect_memory(&before, &memory, (shared[0] > shared[1] ? shared[0] : shared[1]) + own);
    }
    cr_assert_gt(shared[0], 4 << 20);
    cr_assert_lt(own, shared[0] / 2, "%llu bytes are of single plans, %llu shared", (unsigned long long)own,
                 (unsigned long long)shared[0]);
    for (uint32_t i = 0; i < COUNT; i++)
        close_plan(&items[i]);
    open_plan(ctx, &items[3]);
    prs_fused_memory(ctx, &before);
    cr_assert(before.used < memory.used && before.held == memory.held, "%llu of %llu bytes are used after closing",
              (unsigned long long)before.used, (unsigned long long)before.held);
    close_plan(&items[3]);
    prs_fused_close(ctx);
}

Test(sharing, memory_is_that_of_the_largest_plan, .timeout = 600)
{
    hopper_setup(2, SMS, 0);
    ranks_run(2, open_many, NULL);
}

/* ---- errors ---- */
/* The last rank launches one plan, and not the next. */
static void launch_unless_lost(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct plan_row rows[] = {PUSHED, RING};
    struct prs_fused_error *error = (struct prs_fused_error *)user + rank;
    struct item items[2];
    struct prs_fused *ctx;
    cr_assert_eq(ranks_open(self, 0, RANKS_LOST_MS, &ctx), 0);
    open_item(ctx, &rows[0], rank, 3, &items[0]);
    open_item(ctx, &rows[1], rank, 3, &items[1]);
    if (rank != 2)
        cr_assert_eq(launch(&items[0], 0, ranks_device(items[0].bytes, 0xff), NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    (void)prs_fused_poll_error(ctx, error);
    close_plan(&items[0]);
    close_plan(&items[1]);
    prs_fused_close(ctx);
}

Test(sharing, a_rank_that_does_not_come_to_a_switch_is_named, .timeout = 600)
{
    struct prs_fused_error error[3];
    hopper_setup(3, SMS, 0);
    hopper_forgive_late_writes();
    ranks_run(3, launch_unless_lost, error);
    for (int rank = 0; rank < 2; rank++) {
        cr_assert_eq(error[rank].code, -ETIMEDOUT, "rank %d: %d", rank, error[rank].code);
        cr_assert_not_null(strstr(error[rank].text, "for the end of another plan's launch of rank 2: flag "), "%s",
                           error[rank].text);
    }
    cr_assert_eq(error[2].code, 0);
}

/* A product that takes the unfused path, which copies its scales to scratch memory. */
static void multiply_with_scales(struct prs_fused *ctx)
{
    static const struct prs_gemm_shape shape = {
        PRS_GEMM_ALONE, 64, 128, 128, 1, .dtype = PRS_DTYPE_E4M3, .scaling = PRS_SCALING_BLOCKS};
    static const struct prs_gemm_tuning unfused = {.path = PRS_GEMM_PATH_UNFUSED};
    struct prs_gemm_plan *plan = NULL;
    struct prs_gemm_operands x = {
        .a = ranks_device(64 * 128, 0xff), .b = ranks_device(128 * 128, 0xff), .c = ranks_device(64 * 128 * 2, 0xff)};
    x.scale_a = ranks_device(64 * sizeof(float), 0xff), x.scale_b = ranks_device(sizeof(float), 0xff);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, &unfused, &plan), 0, "%s", prs_fused_error_text());
    cr_assert_eq(prs_gemm_launch(plan, &x, NULL), 0, "%s", prs_fused_error_text());
    prs_gemm_plan_close(plan);
}

static void multiply_late(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct plan_row row = {
        LAYER, .moe = {.tokens = 24, .hidden = 72, .columns = 72, .experts = 4, .top_k = 2, .layer = 1}};
    struct item x, other;
    struct prs_moe_info info;
    struct prs_fused *ctx;
    (void)user;
    cr_assert_eq(ranks_open(self, 0, 60000, &ctx), 0);
    open_item(ctx, &row, rank, 1, &x);
    open_item(ctx, &row, rank, 1, &other);
    prs_moe_plan_query(x.moe, &info);
    x.batch[0].out = ranks_device((size_t)info.capacity * 72 * 2, 0xff);
    x.batch[0].rows = ranks_device(info.capacity * sizeof(*x.batch[0].rows), 0xff);
    x.batch[0].expert_rows = ranks_device(4 * sizeof(*x.batch[0].expert_rows), 0xff);
    cr_assert_eq(prs_moe_gemm(x.moe, &x.batch[0], NULL), -EINVAL);
    cr_assert_not_null(strstr(prs_fused_error_text(), "rows that are no longer there"), "%s", prs_fused_error_text());
    cr_assert_eq(prs_moe_dispatch_gemm(x.moe, &x.batch[0], NULL), 0);
    cr_assert_eq(prs_moe_gemm(x.moe, &x.batch[0], NULL), 0);
    cr_assert_eq(launch(&other, 0, ranks_device(other.bytes, 0xff), NULL), 0);
    cr_assert_eq(prs_moe_gemm(x.moe, &x.batch[0], NULL), -EINVAL);
    cr_assert_eq(prs_moe_dispatch_gemm(x.moe, &x.batch[0], NULL), 0);
    multiply_with_scales(ctx);
    cr_assert_eq(prs_moe_gemm(x.moe, &x.batch[0], NULL), -EINVAL);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    close_plan(&x);
    close_plan(&other);
    prs_fused_close(ctx);
}

Test(sharing, a_product_of_rows_that_another_plan_has_overwritten_is_refused, .timeout = 600)
{
    hopper_setup(1, SMS, 0);
    ranks_run(1, multiply_late, NULL);
}
