/* SPDX-License-Identifier: Apache-2.0 */
/* A launch makes progress with any SMs that are left to it: while another library's collective holds some SMs and waits
 * for other ranks, in an order that differs from rank to rank. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

enum { SMS = 4, PLACED_MS = 300 };

/* ---- one launch of any kernel ---- */
enum family { GEMM, MOE, ATTENTION, GRADIENTS };

struct kernel {
    const char *name;
    enum family family;
    enum prs_gemm_op op;
    uint32_t mover, mode;
};

static const struct kernel gemm_kernels[] = {
    {"all-gather by CTAs", GEMM, PRS_GEMM_ALLGATHER, PRS_MOVED_BY_CTAS, 0},
    {"all-gather by copy engines", GEMM, PRS_GEMM_ALLGATHER, PRS_MOVED_BY_COPY_ENGINES, 0},
    {"reduce-scatter", GEMM, PRS_GEMM_REDUCE_SCATTER, 0, 0},
    {"all-reduce", GEMM, PRS_GEMM_ALLREDUCE, 0, 0},
};

/* What MoE launches, as `mode`. THERE_AND_BACK: dispatch, combine, and both again for gradients. ONE: a layer as one
 * kernel. */
enum { PRODUCT, LAYER, THERE_AND_BACK, ONE };

static const struct kernel moe_kernels[] = {{"MoE", MOE, 0, 0, PRODUCT},
                                            {"a layer of MoE", MOE, 0, 0, LAYER},
                                            {"rows of MoE", MOE, 0, 0, THERE_AND_BACK},
                                            {"a layer of MoE as one kernel", MOE, 0, 0, ONE}};

static const struct kernel attention_kernels[] = {
    {"attention by CTAs", ATTENTION, 0, PRS_MOVED_BY_CTAS, PRS_ATTENTION_RESIDENT},
    {"attention by copy engines", ATTENTION, 0, PRS_MOVED_BY_COPY_ENGINES, PRS_ATTENTION_RESIDENT},
    {"attention with two buffers", ATTENTION, 0, PRS_MOVED_BY_CTAS, PRS_ATTENTION_RING},
    {"gradients of attention", GRADIENTS, 0, PRS_MOVED_BY_CTAS, PRS_ATTENTION_RING},
};

/* A plan on one rank, with inputs and results. */
struct work {
    const struct kernel *kernel;
    struct prs_fused *ctx;
    struct prs_gemm_plan *gemm;
    struct prs_moe_plan *moe;
    struct prs_attention_plan *attention;
    struct prs_attention_backward_plan *backward;
    struct prs_attention_gradients gradients;
    struct prs_moe_batch batch;
    struct prs_moe_results combine;
    struct prs_moe_again again;
    struct prs_moe_values values;
    void *a, *b, *result;
    size_t bytes; /* of the result */
};

static int open_gemm(struct work *w, uint32_t rank, uint32_t world)
{
    struct prs_gemm_shape shape = {w->kernel->op, 1024, 512, 128, 1};
    struct prs_gemm_tuning tuning = {.path = PRS_GEMM_PATH_FUSED, .mover = w->kernel->mover, .band = 1};
    bool gathers = shape.op == PRS_GEMM_ALLGATHER, scatters = shape.op == PRS_GEMM_REDUCE_SCATTER;
    int r = prs_gemm_plan_open(w->ctx, &shape, &tuning, &w->gemm);
    w->a = ranks_upload(rank, (uint64_t)shape.m / (gathers ? world : 1) * shape.k);
    w->b = ranks_upload(100 + rank, (uint64_t)shape.n * shape.k);
    w->bytes = (size_t)shape.m / (scatters ? world : 1) * shape.n * 2;
    if (shape.op != PRS_GEMM_ALLREDUCE)
        w->result = ranks_device(w->bytes, 0);
    else if (!r)
        r = prs_fused_alloc(w->ctx, w->bytes, &w->result);
    return r;
}

enum { TOKENS = 120, HIDDEN = 128, COLUMNS = 256, TOP = 2 };

/* The result has the tokens' sums, and after them a value for each choice. */
static void open_moe_rows(struct work *w, uint32_t capacity)
{
    size_t sums = (size_t)TOKENS * HIDDEN * 2;
    w->bytes = sums + (size_t)TOKENS * TOP * sizeof(float);
    w->result = ranks_device(w->bytes, 0);
    w->combine = (struct prs_moe_results){.rows = w->batch.out, .out = w->result};
    w->again = (struct prs_moe_again){.tokens = w->batch.tokens,
                                      .out = ranks_device((size_t)capacity * HIDDEN * 2, 0),
                                      .beside = w->batch.out,
                                      .products = ranks_device(capacity * sizeof(float), 0),
                                      .weighted = 1};
    w->values = (struct prs_moe_values){
        .values = w->again.products, .rows = w->batch.rows, .out = (float *)((uint8_t *)w->result + sums)};
}

static int open_moe(struct work *w, uint32_t rank, uint32_t world)
{
    bool one = w->kernel->mode == ONE, layer = one || w->kernel->mode == LAYER;
    struct prs_moe_shape shape = {TOKENS, HIDDEN, COLUMNS, 2 * world, TOP, 0, 1, .layer = layer};
    struct prs_moe_tuning tuning = {.path = one ? PRS_MOE_PATH_ONE : PRS_MOE_PATH_KERNELS};
    struct prs_moe_info info;
    int64_t chosen[TOKENS * TOP];
    float weights[TOKENS * TOP];
    int r = prs_moe_plan_open(w->ctx, &shape, &tuning, &w->moe);
    if (r)
        return r;
    prs_moe_plan_query(w->moe, &info);
    for (uint32_t i = 0; i < TOKENS * TOP; i++) {
        chosen[i] = (i / TOP * 7 + i % TOP * world + rank) % shape.experts;
        weights[i] = ranks_element(200 + rank, i);
    }
    w->bytes = layer ? (size_t)TOKENS * HIDDEN * 2 : (size_t)info.capacity * COLUMNS * 2;
    w->result = ranks_device(w->bytes, 0);
    w->batch =
        (struct prs_moe_batch){.tokens = ranks_upload(rank, TOKENS * HIDDEN),
                               .count = TOKENS,
                               .chosen = ranks_device(sizeof(chosen), 0),
                               .router_weights = ranks_device(sizeof(weights), 0),
                               .weights = ranks_upload(100 + rank, 2 * HIDDEN * COLUMNS),
                               .down = ranks_upload(150 + rank, 2 * HIDDEN * COLUMNS),
                               .out = w->result,
                               .rows = one ? NULL : ranks_device(info.capacity * sizeof(struct prs_moe_row), 0),
                               .expert_rows = one ? NULL : ranks_device(2 * sizeof(struct prs_moe_expert_rows), 0)};
    cr_assert_eq(cudaMemcpy((void *)w->batch.chosen, chosen, sizeof(chosen), cudaMemcpyHostToDevice), cudaSuccess);
    cr_assert_eq(cudaMemcpy((void *)w->batch.router_weights, weights, sizeof(weights), cudaMemcpyHostToDevice),
                 cudaSuccess);
    if (w->kernel->mode == THERE_AND_BACK)
        open_moe_rows(w, info.capacity);
    return 0;
}

static int launch_moe(const struct work *w, cudaStream_t stream)
{
    int r;
    if (w->kernel->mode == PRODUCT)
        return prs_moe_dispatch_gemm(w->moe, &w->batch, stream);
    if (w->kernel->mode == LAYER || w->kernel->mode == ONE)
        return prs_moe_layer(w->moe, &w->batch, stream);
    r = prs_moe_dispatch(w->moe, &w->batch, stream);
    if (!r)
        r = prs_moe_combine(w->moe, &w->combine, stream);
    if (!r)
        r = prs_moe_dispatch_again(w->moe, &w->again, stream);
    return r != 0 ? r : prs_moe_return_values(w->moe, &w->values, stream);
}

static int open_attention(struct work *w, uint32_t rank, uint32_t world)
{
    enum { HEADS = 3, DIM = 64, ROWS = 200 };
    struct prs_attention_shape shape = {1, HEADS, HEADS, DIM, ROWS * world, 0, 0, 0};
    struct prs_attention_tuning tuning = {.mode = w->kernel->mode, .mover = w->kernel->mover, .heads_per_step = 1};
    size_t bytes = (size_t)ROWS * HEADS * DIM * 2;
    w->a = ranks_upload(rank, bytes / 2);
    w->b = ranks_upload(100 + rank, bytes / 2);
    w->bytes = w->kernel->family == GRADIENTS ? 3 * bytes : bytes;
    w->result = ranks_device(w->bytes, 0);
    if (w->kernel->family == ATTENTION)
        return prs_attention_plan_open(w->ctx, &shape, &tuning, &w->attention);
    w->gradients = (struct prs_attention_gradients){.q = w->a,
                                                    .k = w->b,
                                                    .v = w->a,
                                                    .out = w->b,
                                                    .lse = ranks_device(ROWS * HEADS * sizeof(float), 0),
                                                    .dout = w->a,
                                                    .dq = w->result,
                                                    .dk = (uint8_t *)w->result + bytes,
                                                    .dv = (uint8_t *)w->result + 2 * bytes};
    return prs_attention_backward_plan_open(w->ctx, &shape, &tuning, &w->backward);
}

static int open_work(struct work *w, uint32_t rank, uint32_t world)
{
    return w->kernel->family == GEMM  ? open_gemm(w, rank, world)
           : w->kernel->family == MOE ? open_moe(w, rank, world)
                                      : open_attention(w, rank, world);
}

static int launch_work(const struct work *w, cudaStream_t stream)
{
    struct prs_gemm_operands operands = {.a = w->a, .b = w->b, .c = w->result};
    struct prs_attention_operands attention = {.q = w->a, .k = w->b, .v = w->a, .out = w->result};
    switch (w->kernel->family) {
    case GEMM:
        return prs_gemm_launch(w->gemm, &operands, stream);
    case MOE:
        return launch_moe(w, stream);
    case ATTENTION:
        return prs_attention_launch(w->attention, &attention, stream);
    default:
        return prs_attention_backward_launch(w->backward, &w->gradients, stream);
    }
}

static void close_work(struct work *w)
{
    prs_attention_plan_close(w->attention);
    prs_attention_backward_plan_close(w->backward);
    prs_moe_plan_close(w->moe);
    if (w->kernel->family == GEMM && w->kernel->op == PRS_GEMM_ALLREDUCE && w->result)
        (void)prs_fused_free(w->ctx, w->result);
    prs_gemm_plan_close(w->gemm);
    prs_fused_close(w->ctx);
}

static uint8_t *result_of(const struct work *w)
{
    uint8_t *host = malloc(w->bytes);
    cr_assert_eq(cudaMemcpy(host, w->result, w->bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    ranks_fill(w->result, 0, w->bytes);
    return host;
}

/* ---- while a collective of another library runs ---- */
struct crossing {
    const struct kernel *kernel;
    uint32_t world, rounds;
    uint32_t collective_first; /* ranks, as a mask: the others launch ours first */
    uint32_t held;             /* SMs of a rank that the collective holds */
    bool cold;                 /* nothing was launched before */
    struct hopper_collective *collective[4];
    struct prs_fused_error error[RANKS_MAX];
    int result[RANKS_MAX];
    bool differs[RANKS_MAX];
};

/* Waits until the previous launch is on this many SMs, or seems unable to get them. */
static void await_placed(uint32_t rank, uint32_t sms)
{
    for (int ms = 0; ms < PLACED_MS && hopper_busy_sms((int)rank) < sms; ms++)
        usleep(1000);
}

static int cross(struct crossing *x, uint32_t rank, struct work *w, cudaStream_t ours, cudaStream_t other)
{
    int r = 0;
    for (uint32_t i = 0; i < x->rounds && r == 0; i++) {
        if (x->collective_first >> rank & 1) {
            cr_assert(hopper_collective_launch(x->collective[i], other));
            await_placed(rank, x->held);
            r = launch_work(w, ours);
        } else {
            r = launch_work(w, ours);
            await_placed(rank, SMS);
            cr_assert(hopper_collective_launch(x->collective[i], other));
        }
        (void)cudaStreamSynchronize(ours);
        (void)cudaStreamSynchronize(other);
    }
    return r;
}

static void cross_on_rank(uint32_t rank, struct ranks_self *self, void *user)
{
    struct crossing *x = user;
    struct work w = {.kernel = x->kernel};
    cudaStream_t ours, other;
    uint8_t *beside, *alone;
    int r = ranks_open(self, 0, RANKS_PATIENCE_MS, &w.ctx);
    if (!r)
        r = open_work(&w, rank, x->world);
    cr_assert_eq(r, 0, "%s: %s", x->kernel->name, prs_fused_error_text());
    cr_assert_eq(cudaStreamCreateWithFlags(&ours, cudaStreamNonBlocking), cudaSuccess);
    cr_assert_eq(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    if (!x->cold) {
        r = launch_work(&w, ours);
        cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    }
    if (!r)
        r = cross(x, rank, &w, ours, other);
    (void)prs_fused_poll_error(w.ctx, &x->error[rank]);
    x->result[rank] = r;
    beside = result_of(&w);
    if (r == 0 && x->error[rank].code == 0) {
        (void)launch_work(&w, ours);
        (void)cudaDeviceSynchronize();
        alone = result_of(&w);
        x->differs[rank] = memcmp(beside, alone, w.bytes) != 0;
        free(alone);
    }
    free(beside);
    close_work(&w);
}

static void assert_no_circle(const struct crossing *wanted, const struct kernel *kernels, size_t count)
{
    hopper_setup(RANKS_MAX, SMS, 0);
    hopper_forgive_late_writes();
    for (size_t k = 0; k < count; k++) {
        struct crossing x = *wanted;
        x.kernel = &kernels[k];
        for (uint32_t i = 0; i < x.rounds; i++)
            x.collective[i] = hopper_collective_open(x.world, x.held);
        ranks_run(x.world, cross_on_rank, &x);
        for (uint32_t rank = 0; rank < x.world; rank++) {
            cr_expect(x.result[rank] == 0 && x.error[rank].code == 0, "%s, rank %u: %d, %s (HOPPER_SEED=%llu)",
                      x.kernel->name, rank, x.result[rank], x.error[rank].text, (unsigned long long)hopper_seed());
            cr_expect_not(x.differs[rank], "%s, rank %u: wrong result (HOPPER_SEED=%llu)", x.kernel->name, rank,
                          (unsigned long long)hopper_seed());
        }
        for (uint32_t i = 0; i < x.rounds; i++) {
            cr_expect(hopper_collective_met(x.collective[i]));
            hopper_collective_close(x.collective[i]);
        }
    }
}

#define ALL_OF(kernels) kernels, sizeof(kernels) / sizeof(kernels[0])

static const struct crossing two_ranks = {.world = 2, .rounds = 2, .collective_first = 1, .held = 2};
/* Two ranks hold back SMs from the launches of all four. */
static const struct crossing four_ranks = {.world = 4, .rounds = 1, .collective_first = 3, .held = 2};
static const struct crossing first_launch = {.world = 2, .rounds = 1, .collective_first = 1, .held = 2, .cold = true};
/* The few SMs that a collective leaves when it takes nearly all of them. */
static const struct crossing few_sms = {.world = 3, .rounds = 1, .collective_first = 5, .held = 3};

/* Each family has a process of its own: whether a kernel is loaded is a matter of the process. */
#define BESIDE_A_COLLECTIVE(family)                                                                                    \
    Test(progress, family##_when_it_comes_first_on_one_of_two_ranks, .timeout = 600)                                   \
    {                                                                                                                  \
        assert_no_circle(&two_ranks, ALL_OF(family##_kernels));                                                        \
    }                                                                                                                  \
    Test(progress, family##_when_it_comes_first_on_two_of_four_ranks, .timeout = 600)                                  \
    {                                                                                                                  \
        assert_no_circle(&four_ranks, ALL_OF(family##_kernels));                                                       \
    }                                                                                                                  \
    Test(progress, family##_when_it_is_beside_the_first_launch, .timeout = 600)                                        \
    {                                                                                                                  \
        assert_no_circle(&first_launch, ALL_OF(family##_kernels));                                                     \
    }

BESIDE_A_COLLECTIVE(gemm)
BESIDE_A_COLLECTIVE(moe)
BESIDE_A_COLLECTIVE(attention)

/* Not GEMM: a cluster of two CTAs needs two SMs. */
Test(progress, moe_when_one_sm_is_left, .timeout = 600)
{
    assert_no_circle(&few_sms, ALL_OF(moe_kernels));
}

Test(progress, attention_when_one_sm_is_left, .timeout = 600)
{
    assert_no_circle(&few_sms, ALL_OF(attention_kernels));
}
