/* SPDX-License-Identifier: Apache-2.0 */
/* GEMM + reduce-scatter, the second half of a tensor-parallel MLP: each rank multiplies its part of k, and gets its
 * rows of the sum over all ranks. One kernel per rank: finished tiles travel while others are computed.
 *
 *     nvcc gemm_reduce_scatter.c $(pkg-config --cflags --libs perseus-fused) -lm -o gemm_reduce_scatter
 *     nvcc -ccbin mpicc -DWITH_MPI gemm_reduce_scatter.c $(pkg-config --cflags --libs perseus-fused) -lm
 * The second is for mpirun -np 2. */
#include <perseus/gemm.h>

#include "ranks.h"

enum { M = 512, N = 256, K = 128, LAUNCHES = 3 }; /* K: of each rank */

static void check(uint32_t rank, const uint16_t *c)
{
    for (uint32_t row = 0; row < M / RANKS; row++)
        for (uint32_t column = row % 5; column < N; column += 5) { /* a fifth of all */
            double sum = 0;

            for (uint32_t r = 0; r < RANKS; r++)
                for (uint32_t i = 0; i < K; i++)
                    sum += (double)number(r, (uint64_t)(rank * M / RANKS + row) * K + i) *
                           number(100 + r, (uint64_t)column * K + i);
            compare("reduce-scatter", rank, row, column, from_bf16(c[row * N + column]), sum);
        }
}

static void body(struct rank *rank)
{
    struct prs_fused_config config = {
        .rank = rank->index, .world = RANKS, .device = rank->device, .allgather = allgather, .user = rank};
    /* B is [n, k], as torch.nn.Linear keeps its weight. */
    struct prs_gemm_shape shape = {.op = PRS_GEMM_REDUCE_SCATTER, .m = M, .n = N, .k = K, .b_transposed = 1};
    /* For so small a product the plan would choose separate steps. A program passes NULL instead. */
    struct prs_gemm_tuning tuning = {.path = PRS_GEMM_PATH_FUSED};
    struct prs_fused_error error;
    struct prs_gemm_plan *plan;
    struct prs_fused *ctx;
    cudaStream_t stream;
    uint16_t *host;
    void *a, *b, *c;

    CHECK(prs_fused_open(&config, &ctx), prs_fused_error_text());                   /* collective: all ranks call it */
    CHECK(prs_gemm_plan_open(ctx, &shape, &tuning, &plan), prs_fused_error_text()); /* collective */

    a = upload(rank->index, (uint64_t)M * K);
    b = upload(100 + rank->index, (uint64_t)N * K);
    CHECK_CUDA(cudaMalloc(&c, (size_t)M / RANKS * N * 2));
    CHECK_CUDA(cudaStreamCreate(&stream));

    /* No step of the host is needed between launches; they may also be captured into a graph. */
    for (int i = 0; i < LAUNCHES; i++) {
        struct prs_gemm_operands operands = {.a = a, .b = b, .c = c};

        CHECK(prs_gemm_launch(plan, &operands, stream), prs_fused_error_text());
    }
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK(prs_fused_poll_error(ctx, &error), error.text); /* did every wait for another rank end? */

    host = (uint16_t *)download(c, (uint64_t)M / RANKS * N * 2);
    check(rank->index, host);
    printf("GEMM + reduce-scatter: %d x %d x %d, the %d rows of rank %u are right\n", M, N, K, M / RANKS, rank->index);
    free(host);
    CHECK_CUDA(cudaFree(a));
    CHECK_CUDA(cudaFree(b));
    CHECK_CUDA(cudaFree(c));
    CHECK_CUDA(cudaStreamDestroy(stream));
    prs_gemm_plan_close(plan); /* collective */
    prs_fused_close(ctx);
}

int main(void)
{
    run_ranks(body);
    return 0;
}
