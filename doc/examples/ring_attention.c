/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: a sequence is split among the ranks, and each gets the rows of the result that belong to its queries,
 * as if it had seen all keys and values. They travel while the kernel computes.
 *
 *     nvcc ring_attention.c $(pkg-config --cflags --libs perseus-fused) -lm -o ring_attention */
#include <perseus/attention.h>

#include "ranks.h"

enum { SEQ = 512, ROWS = SEQ / RANKS, HEADS = 2, DIM = 64 };
enum { QUERIES = 0, KEYS = 100, VALUES = 200 };

/* Element of a tensor [position of the whole sequence, head, dim]; the rank that has the position made it. */
static double element(uint32_t tensor, uint32_t position, uint32_t head, uint32_t i)
{
    return number(tensor + position / ROWS, ((uint64_t)(position % ROWS) * HEADS + head) * DIM + i);
}

static void check(uint32_t rank, const uint16_t *out)
{
    for (uint32_t row = 0; row < ROWS; row += 17)
        for (uint32_t head = 0; head < HEADS; head++) {
            double sum[DIM] = {0}, total = 0;

            for (uint32_t key = 0; key < SEQ; key++) {
                double score = 0;

                for (uint32_t i = 0; i < DIM; i++)
                    score += element(QUERIES, rank * ROWS + row, head, i) * element(KEYS, key, head, i);
                score = exp(score / sqrt(DIM));
                total += score;
                for (uint32_t i = 0; i < DIM; i++)
                    sum[i] += score * element(VALUES, key, head, i);
            }
            for (uint32_t i = 0; i < DIM; i++)
                compare("attention", rank, row, head * DIM + i, from_bf16(out[(row * HEADS + head) * DIM + i]),
                        sum[i] / total);
        }
}

static void body(struct rank *rank)
{
    struct prs_fused_config config = {
        .rank = rank->index, .world = RANKS, .device = rank->device, .allgather = allgather, .user = rank};
    struct prs_attention_shape shape = {.batch = 1, .heads_q = HEADS, .heads_kv = HEADS, .head_dim = DIM, .seq = SEQ};
    uint64_t count = (uint64_t)ROWS * HEADS * DIM;
    struct prs_attention_plan *plan;
    struct prs_attention_info info;
    struct prs_attention_operands x = {.lse = NULL};
    struct prs_fused_error error;
    struct prs_fused *ctx;
    cudaStream_t stream;
    uint16_t *host;

    CHECK(prs_fused_open(&config, &ctx), prs_fused_error_text());
    CHECK(prs_attention_plan_open(ctx, &shape, NULL, &plan), prs_fused_error_text());
    prs_attention_plan_query(plan, &info);

    x.q = upload(QUERIES + rank->index, count); /* [batch, rows, heads, head_dim] */
    x.k = upload(KEYS + rank->index, count);
    x.v = upload(VALUES + rank->index, count);
    CHECK_CUDA(cudaMalloc(&x.out, count * 2));
    CHECK_CUDA(cudaStreamCreate(&stream));

    CHECK(prs_attention_launch(plan, &x, stream), prs_fused_error_text());
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK(prs_fused_poll_error(ctx, &error), error.text);

    host = (uint16_t *)download(x.out, count * 2);
    check(rank->index, host);
    if (rank->index == 0)
        printf("ring attention: %d keys on %d ranks, right (%s)\n", SEQ, RANKS, info.reason);
    free(host);
    prs_attention_plan_close(plan);
    prs_fused_close(ctx);
}

int main(void)
{
    run_ranks(body);
    return 0;
}
