/* SPDX-License-Identifier: Apache-2.0 */
/* A rank of MoE is lost. The survivors open a smaller world and continue with the experts that they hold: a map says
 * which of them serve whom, and which experts are gone. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

enum { RANKS = 3, ROOM = 3, PLACES = RANKS * ROOM, EXPERTS = 6, REPLICAS = 2, TOP = 3, TOKENS = 40, HIDDEN = 72 };
enum { LOST = 1, WEIGHTS = HIDDEN * HIDDEN };

/* One world of ranks. A rank that gets another number keeps its GPU and its experts. */
struct world {
    uint32_t ranks, before[RANKS]; /* [rank]: its number in the first world */
    int32_t placement[EXPERTS][REPLICAS];
    const int32_t *held; /* [place of the first world]: an expert */
    bool loses_one;
    struct prs_fused *hanging;
    struct prs_fused_error error[RANKS];
    struct prs_moe_status status[RANKS];
    uint32_t wrong[RANKS];
};

/* Of the rank with this number in the first world. */
static uint32_t count_of(uint32_t rank)
{
    return TOKENS - 7 * rank;
}

static int64_t choice_of(uint32_t rank, uint32_t token, uint32_t slot)
{
    return token % 7 == 3 && slot == 1 ? -1 : (int64_t)(token * 5 + rank + slot * (1 + token % 2)) % EXPERTS;
}

static float weight_of(uint32_t rank, uint32_t token, uint32_t slot)
{
    return ranks_element(900 + rank, token * TOP + slot);
}

static double product(uint32_t rank, uint32_t token, uint32_t expert, uint32_t column, double *size)
{
    double sum = *size = 0;
    for (uint32_t h = 0; h < HIDDEN; h++) {
        double x = (double)ranks_element(rank, token * HIDDEN + h) * ranks_element(500 + expert, column * HIDDEN + h);
        sum += x, *size += fabs(x);
    }
    return sum;
}

static bool has_place(const struct world *w, int64_t expert)
{
    for (uint32_t i = 0; i < REPLICAS && expert >= 0; i++)
        if (w->placement[expert][i] >= 0)
            return true;
    return false;
}

/* The definition, without the experts that have no place. */
static uint32_t wrong_results(const struct world *w, uint32_t rank, const uint16_t *have)
{
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < count_of(rank) * HIDDEN; i++) {
        uint32_t token = i / HIDDEN;
        double want = 0, slack = 1e-30;
        for (uint32_t slot = 0; slot < TOP; slot++) {
            int64_t expert = choice_of(rank, token, slot);
            double weight = weight_of(rank, token, slot), size, y;
            if (!has_place(w, expert))
                continue;
            y = product(rank, token, (uint32_t)expert, i % HIDDEN, &size);
            want += weight * y;
            slack += fabs(weight) * (fabs(y) * 0x1p-6 + size * 0x1p-19); /* rounded as a row, and as a sum */
        }
        wrong += !(fabs(ranks_float(have[i]) - want) <= slack + fabs(want) * 0x1p-7);
    }
    return wrong;
}

static uint32_t absent_choices(const struct world *w, uint32_t rank)
{
    uint32_t absent = 0;
    for (uint32_t i = 0; i < count_of(rank) * TOP; i++) {
        int64_t expert = choice_of(rank, i / TOP, i % TOP);
        absent += expert >= 0 && !has_place(w, expert);
    }
    return absent;
}

/* ---- ranks ---- */
static void *upload(const void *from, size_t bytes)
{
    void *p = ranks_device(bytes, 0);
    cr_assert_eq(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    return p;
}

/* before: the rank's number in the first world. */
static void make_batch(const struct world *w, uint32_t before, uint32_t capacity, struct prs_moe_batch *b)
{
    int64_t chosen[TOKENS * TOP];
    float router[TOKENS * TOP];
    uint8_t *weights = ranks_device(ROOM * WEIGHTS * 2, 0);
    for (uint32_t i = 0; i < count_of(before) * TOP; i++) {
        chosen[i] = choice_of(before, i / TOP, i % TOP);
        router[i] = weight_of(before, i / TOP, i % TOP);
    }
    for (uint32_t i = 0; i < ROOM; i++)
        cr_assert_eq(cudaMemcpy(weights + i * WEIGHTS * 2,
                                ranks_upload(500 + (uint32_t)w->held[before * ROOM + i], WEIGHTS), WEIGHTS * 2,
                                cudaMemcpyDeviceToDevice),
                     cudaSuccess);
    *b = (struct prs_moe_batch){.tokens = ranks_upload(before, TOKENS * HIDDEN),
                                .count = count_of(before),
                                .chosen = upload(chosen, sizeof(chosen)),
                                .router_weights = upload(router, sizeof(router)),
                                .weights = weights,
                                .out = ranks_device((size_t)capacity * HIDDEN * 2, 0),
                                .rows = ranks_device(capacity * sizeof(*b->rows), 0),
                                .expert_rows = ranks_device(ROOM * sizeof(*b->expert_rows), 0),
                                .status = ranks_device(sizeof(*b->status), 0),
                                .placement = upload(w->placement, sizeof(w->placement))};
    (void)cudaDeviceSynchronize();
}

static void check_results(struct world *w, uint32_t rank, const struct prs_moe_batch *b, const void *out)
{
    static __thread uint16_t have[TOKENS * HIDDEN];
    (void)cudaMemcpy(have, out, sizeof(have), cudaMemcpyDeviceToHost);
    (void)cudaMemcpy(&w->status[rank], b->status, sizeof(w->status[rank]), cudaMemcpyDeviceToHost);
    w->wrong[rank] = wrong_results(w, w->before[rank], have);
}

static void rank_body(uint32_t rank, struct ranks_self *self, void *user)
{
    struct world *w = user;
    struct prs_fused_config config = {.rank = rank,
                                      .world = w->ranks,
                                      .device = (int)w->before[rank],
                                      .timeout_ms = w->loses_one ? RANKS_LOST_MS : 60000,
                                      .allgather = ranks_allgather,
                                      .user = self};
    struct prs_moe_shape shape = {.tokens = TOKENS,
                                  .hidden = HIDDEN,
                                  .columns = HIDDEN,
                                  .experts = w->ranks * ROOM,
                                  .top_k = TOP,
                                  .weights_transposed = 1,
                                  .logical_experts = EXPERTS,
                                  .replicas = REPLICAS};
    struct prs_moe_results results = {.out = NULL};
    struct prs_moe_plan *plan;
    struct prs_moe_batch b;
    struct prs_moe_info info;
    struct prs_fused *ctx;
    (void)cudaSetDevice(config.device);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0, "%s", prs_fused_error_text());
    cr_assert_eq(prs_moe_plan_open(ctx, &shape, NULL, &plan), 0, "%s", prs_fused_error_text());
    if (w->loses_one && rank == LOST) {
        w->hanging = ctx;
        return;
    }
    prs_moe_plan_query(plan, &info);
    make_batch(w, w->before[rank], info.capacity, &b);
    results.rows = b.out, results.out = ranks_device(TOKENS * HIDDEN * 2, 0);
    cr_assert_eq(prs_moe_dispatch_gemm(plan, &b, NULL), 0, "%s", prs_fused_error_text());
    cr_assert_eq(prs_moe_combine(plan, &results, NULL), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    (void)prs_fused_poll_error(ctx, &w->error[rank]);
    check_results(w, rank, &b, results.out);
    prs_moe_plan_close(plan);
    prs_fused_close(ctx);
}

static void assert_right(const struct world *w)
{
    for (uint32_t r = 0; r < w->ranks; r++) {
        cr_assert_eq(w->error[r].code, 0, "rank %u: %s", r, w->error[r].text);
        cr_assert_eq(w->wrong[r], 0, "rank %u: %u elements wrong (HOPPER_SEED=%llu)", r, w->wrong[r],
                     (unsigned long long)hopper_seed());
        cr_assert_eq(w->status[r].absent_choices, absent_choices(w, w->before[r]), "rank %u", r);
        cr_assert(w->status[r].wrong_choices == 0 && w->status[r].wrong_places == 0);
    }
}

/* What survivors do: the same places of the same ranks, whose numbers are smaller now. */
static void leave_out(const struct world *w, uint32_t lost, struct world *smaller)
{
    *smaller = (struct world){.ranks = w->ranks - 1, .held = w->held};
    for (uint32_t r = 0; r < smaller->ranks; r++)
        smaller->before[r] = w->before[r < lost ? r : r + 1];
    for (uint32_t i = 0; i < EXPERTS * REPLICAS; i++) {
        int32_t place = w->placement[i / REPLICAS][i % REPLICAS], rank = place < 0 ? -1 : place / ROOM;
        smaller->placement[i / REPLICAS][i % REPLICAS] = rank == (int32_t)lost || rank < 0 ? -1
                                                         : rank > (int32_t)lost            ? place - ROOM
                                                                                           : place;
    }
}

/* Three experts have two places; the lost rank holds one of each of two, and the only one of another. */
Test(moe_placement, survivors_of_a_lost_rank_go_on_without_its_experts, .timeout = 300)
{
    static const double loads[EXPERTS] = {9, 5, 1, 1, 3, 1};
    int32_t held[PLACES];
    struct world all = {.ranks = RANKS, .before = {0, 1, 2}, .held = held}, lost, smaller;
    struct prs_moe_loads balance = {.world = RANKS,
                                    .experts = PLACES,
                                    .logical_experts = EXPERTS,
                                    .replicas = REPLICAS,
                                    .loads = loads,
                                    .placement = all.placement[0],
                                    .held = held};
    uint32_t gone = 0;
    cr_assert_eq(prs_moe_balance(&balance), 0, "%s", prs_fused_error_text());
    hopper_setup(RANKS, 4, 0);
    hopper_forgive_late_writes();
    ranks_run(RANKS, rank_body, &all);
    assert_right(&all);
    cr_assert_eq(all.status[0].absent_choices, 0);

    lost = all;
    lost.loses_one = true;
    ranks_run(RANKS, rank_body, &lost);
    for (uint32_t r = 0; r < RANKS; r++)
        cr_assert(r == LOST || (lost.error[r].code == -ETIMEDOUT && lost.error[r].from_rank == LOST), "rank %u: %s", r,
                  lost.error[r].text);

    leave_out(&all, lost.error[0].from_rank, &smaller);
    for (int64_t e = 0; e < EXPERTS; e++)
        gone += !has_place(&smaller, e);
    cr_assert_eq(gone, 1);
    ranks_run(RANKS - 1, rank_body, &smaller);
    assert_right(&smaller);
    cr_assert_gt(smaller.status[0].absent_choices, 0);
    prs_fused_abort(lost.hanging);
    prs_fused_close(lost.hanging);
}
