/* SPDX-License-Identifier: Apache-2.0 */
/* MoE dispatch with the experts' product: each rank has tokens and its router's choices, and gets the rows of its own
 * experts, multiplied, with the origin of every row.
 *
 *     nvcc moe.c $(pkg-config --cflags --libs perseus-fused) -lm -o moe */
#include <perseus/moe.h>

#include "ranks.h"

enum { TOKENS = 48, HIDDEN = 64, COLUMNS = 64, EXPERTS = 4, TOP_K = 2, OWN = EXPERTS / RANKS };

/* A token's choices: two neighbouring experts. A real router gives what torch.topk returns. */
static int64_t choice(uint32_t rank, uint32_t token, uint32_t slot)
{
    return (rank + token / 3 + slot) % EXPERTS;
}

static float weight(uint32_t token, uint32_t slot)
{
    return slot == 0 ? 0.75f : 0.25f + (float)(token % 2) / 8;
}

static void check_expert(uint32_t rank, uint32_t own, const struct prs_moe_expert_rows *part,
                         const struct prs_moe_row *rows, const uint16_t *out)
{
    for (uint32_t i = part->first_row; i < part->first_row + part->rows; i++) {
        const struct prs_moe_row *from = &rows[i];

        if (from->rank >= RANKS || from->token >= TOKENS || from->slot >= TOP_K ||
            choice(from->rank, from->token, from->slot) != rank * OWN + own ||
            from->weight != weight(from->token, from->slot)) {
            fprintf(stderr, "rank %u, row %u: token %u of rank %u does not belong to expert %u\n", rank, i, from->token,
                    from->rank, rank * OWN + own);
            exit(1);
        }
        for (uint32_t column = i % 7; column < COLUMNS; column += 7) {
            double sum = 0;

            for (uint32_t h = 0; h < HIDDEN; h++)
                sum += (double)number(from->rank, (uint64_t)from->token * HIDDEN + h) *
                       number(100 + rank, ((uint64_t)own * COLUMNS + column) * HIDDEN + h);
            compare("MoE", rank, i, column, from_bf16(out[(uint64_t)i * COLUMNS + column]), sum);
        }
    }
}

/* The choices and weights of this rank's tokens, in device memory. */
static void route(uint32_t rank, int64_t **chosen, float **weights)
{
    int64_t chosen_host[TOKENS * TOP_K];
    float weights_host[TOKENS * TOP_K];

    for (uint32_t token = 0; token < TOKENS; token++)
        for (uint32_t slot = 0; slot < TOP_K; slot++) {
            chosen_host[token * TOP_K + slot] = choice(rank, token, slot);
            weights_host[token * TOP_K + slot] = weight(token, slot);
        }
    CHECK_CUDA(cudaMalloc((void **)chosen, sizeof(chosen_host)));
    CHECK_CUDA(cudaMalloc((void **)weights, sizeof(weights_host)));
    CHECK_CUDA(cudaMemcpy(*chosen, chosen_host, sizeof(chosen_host), cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(*weights, weights_host, sizeof(weights_host), cudaMemcpyHostToDevice));
}

static void body(struct rank *rank)
{
    struct prs_fused_config config = {
        .rank = rank->index, .world = RANKS, .device = rank->device, .allgather = allgather, .user = rank};
    struct prs_moe_shape shape = {.tokens = TOKENS, /* the most of any rank in one launch */
                                  .hidden = HIDDEN,
                                  .columns = COLUMNS,
                                  .experts = EXPERTS,
                                  .top_k = TOP_K,
                                  .weights_transposed = 1};
    struct prs_moe_expert_rows *parts;
    struct prs_moe_batch batch = {0};
    struct prs_fused_error error;
    struct prs_moe_plan *plan;
    struct prs_moe_info info;
    struct prs_moe_row *rows;
    struct prs_fused *ctx;
    cudaStream_t stream;
    float *router_weights;
    int64_t *chosen;
    uint16_t *out;
    uint32_t count = 0;

    CHECK(prs_fused_open(&config, &ctx), prs_fused_error_text());
    CHECK(prs_moe_plan_open(ctx, &shape, NULL, &plan), prs_fused_error_text());
    prs_moe_plan_query(plan, &info); /* how many rows `out` and `rows` must have */

    route(rank->index, &chosen, &router_weights);
    batch.tokens = upload(rank->index, (uint64_t)TOKENS * HIDDEN);
    batch.count = TOKENS; /* of this launch */
    batch.chosen = chosen;
    batch.router_weights = router_weights;
    batch.weights = upload(100 + rank->index, (uint64_t)OWN * COLUMNS * HIDDEN);
    CHECK_CUDA(cudaMalloc(&batch.out, (size_t)info.capacity * COLUMNS * 2));
    CHECK_CUDA(cudaMalloc((void **)&batch.rows, info.capacity * sizeof(*batch.rows)));
    CHECK_CUDA(cudaMalloc((void **)&batch.expert_rows, OWN * sizeof(*batch.expert_rows)));
    CHECK_CUDA(cudaStreamCreate(&stream));

    CHECK(prs_moe_dispatch_gemm(plan, &batch, stream), prs_fused_error_text());
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK(prs_fused_poll_error(ctx, &error), error.text);

    out = (uint16_t *)download(batch.out, (uint64_t)info.capacity * COLUMNS * 2);
    rows = (struct prs_moe_row *)download(batch.rows, info.capacity * sizeof(*rows));
    parts = (struct prs_moe_expert_rows *)download(batch.expert_rows, OWN * sizeof(*parts));
    for (uint32_t own = 0; own < OWN; own++) {
        check_expert(rank->index, own, &parts[own], rows, out);
        count += parts[own].rows;
    }
    printf("MoE: rank %u multiplied %u rows for its %d experts, right\n", rank->index, count, OWN);
    free(out);
    free(rows);
    free(parts);
    prs_moe_plan_close(plan);
    prs_fused_close(ctx);
}

int main(void)
{
    run_ranks(body);
    return 0;
}
