/* SPDX-License-Identifier: Apache-2.0 */
/* What opening a plan costs: exchanges, allocations, synchronisations and memory. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <string.h>

#include "test/hopper/ranks.h"
#include "tools/hopper/hopper.h"

/* Of the calling thread, which is a rank. The linker redirects every call here. */
static __thread struct cost {
    uint32_t exchanges, allocations, synchronisations;
    uint64_t bytes;
} cost;

cudaError_t __real_cudaMalloc(void **out, size_t bytes);
cudaError_t __wrap_cudaMalloc(void **out, size_t bytes);
cudaError_t __wrap_cudaMalloc(void **out, size_t bytes)
{
    cost.allocations++;
    cost.bytes += bytes;
    return __real_cudaMalloc(out, bytes);
}

cudaError_t __real_cudaFree(void *memory);
cudaError_t __wrap_cudaFree(void *memory);
cudaError_t __wrap_cudaFree(void *memory)
{
    cost.synchronisations++;
    return __real_cudaFree(memory);
}

cudaError_t __real_cudaDeviceSynchronize(void);
cudaError_t __wrap_cudaDeviceSynchronize(void);
cudaError_t __wrap_cudaDeviceSynchronize(void)
{
    cost.synchronisations++;
    return __real_cudaDeviceSynchronize();
}

static int costly_allgather(void *user, const void *mine, void *all, size_t bytes)
{
    cost.exchanges++;
    return ranks_allgather(user, mine, all, bytes);
}

/* One of each kind. */
static int open_kind(struct prs_fused *ctx, uint32_t kind, void **plan)
{
    static const struct prs_gemm_shape gemm = {PRS_GEMM_ALLREDUCE, 512, 256, 64, 1};
    static const struct prs_gemm_shape gather = {PRS_GEMM_ALLGATHER, 512, 256, 64, 1};
    static const struct prs_gemm_tuning fused = {.path = PRS_GEMM_PATH_FUSED},
                                        unfused = {.path = PRS_GEMM_PATH_UNFUSED};
    static const struct prs_gemm_tuning copies = {.path = PRS_GEMM_PATH_FUSED, .mover = PRS_MOVED_BY_COPY_ENGINES};
    static const struct prs_attention_shape attention = {1, 2, 2, 128, 512, 0, 0, 0};
    static const struct prs_moe_shape moe = {.tokens = 64, .hidden = 64, .columns = 64, .experts = 4, .top_k = 2};
    switch (kind) {
    case 0:
        return prs_gemm_plan_open(ctx, &gemm, &fused, (struct prs_gemm_plan **)plan);
    case 1:
        return prs_gemm_plan_open(ctx, &gemm, &unfused, (struct prs_gemm_plan **)plan);
    case 2:
        return prs_gemm_plan_open(ctx, &gather, &copies, (struct prs_gemm_plan **)plan);
    case 3:
        return prs_moe_plan_open(ctx, &moe, NULL, (struct prs_moe_plan **)plan);
    case 4:
        return prs_attention_plan_open(ctx, &attention, NULL, (struct prs_attention_plan **)plan);
    default:
        return prs_fused_alloc(ctx, 4096, plan);
    }
}
enum { KINDS = 6 };

static void close_kind(struct prs_fused *ctx, uint32_t kind, void *plan)
{
    if (kind <= 2)
        prs_gemm_plan_close(plan);
    else if (kind == 3)
        prs_moe_plan_close(plan);
    else if (kind == 4)
        prs_attention_plan_close(plan);
    else
        cr_assert_eq(prs_fused_free(ctx, plan), 0);
}

static void open_twice(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_fused_config config = {rank, 2, (int)rank, 300, costly_allgather, self};
    struct prs_fused *ctx;
    void *plan;
    (void)cudaSetDevice((int)rank);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        struct cost opened, closed;
        cr_assert_eq(open_kind(ctx, kind, &plan), 0, "kind %u: %s", kind, prs_fused_error_text());
        close_kind(ctx, kind, plan);
        cost = (struct cost){0};
        cr_assert_eq(open_kind(ctx, kind, &plan), 0, "kind %u: %s", kind, prs_fused_error_text());
        opened = cost;
        close_kind(ctx, kind, plan);
        closed = cost;
        cr_assert_eq(opened.exchanges, 1, "kind %u: %u exchanges", kind, opened.exchanges);
        cr_assert_eq(opened.allocations, 0, "kind %u: %u allocations", kind, opened.allocations);
        cr_assert_eq(opened.synchronisations, 0, "kind %u: %u synchronisations", kind, opened.synchronisations);
        cr_assert_eq(memcmp(&opened, &closed, sizeof(opened)), 0, "closing kind %u costs something", kind);
    }
    prs_fused_close(ctx);
}

Test(opening, where_memory_is_there_it_costs_one_exchange, .timeout = 60)
{
    hopper_setup(2, 4, 0);
    ranks_run(2, open_twice, NULL);
}

/* The layers of a 70B Llama on four GPUs, at 67 batch sizes, by the paths that the plans choose and by one path. */
struct batch_sizes {
    struct prs_gemm_tuning tuning;
    struct cost cost[4];
};

static void open_every_batch_size(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct prs_gemm_shape layers[] = {{PRS_GEMM_ALLGATHER, 0, 2560, 8192, 1},
                                                   {PRS_GEMM_REDUCE_SCATTER, 0, 8192, 2048, 1},
                                                   {PRS_GEMM_ALLGATHER, 0, 14336, 8192, 1},
                                                   {PRS_GEMM_REDUCE_SCATTER, 0, 8192, 7168, 1}};
    static struct prs_gemm_plan *plans[4][4 * 67];
    struct prs_fused_config config = {rank, 4, (int)rank, 0, costly_allgather, self};
    struct prs_fused *ctx;
    struct batch_sizes *sizes = user;
    uint32_t count = 0;
    (void)cudaSetDevice((int)rank);
    cost = (struct cost){0};
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    for (uint32_t size = 8; size <= 67 * 8; size += 8)
        for (uint32_t i = 0; i < 4; i++) {
            struct prs_gemm_shape shape = layers[i];
            shape.m = size;
            cr_assert_eq(prs_gemm_plan_open(ctx, &shape, &sizes->tuning, &plans[rank][count++]), 0, "%s",
                         prs_fused_error_text());
        }
    sizes->cost[rank] = cost;
    while (count > 0)
        prs_gemm_plan_close(plans[rank][--count]);
    prs_fused_close(ctx);
}

Test(opening, plans_of_many_batch_sizes_share_memory, .timeout = 300)
{
    hopper_setup(4, 132, 0);
    for (uint32_t path = PRS_GEMM_PATH_AUTO; path <= PRS_GEMM_PATH_UNFUSED; path++) {
        struct batch_sizes sizes = {.tuning = {.path = path}};
        ranks_run(4, open_every_batch_size, &sizes);
        for (int rank = 0; rank < 4; rank++) {
            cr_assert_leq(sizes.cost[rank].bytes, 1ull << 30, "path %u, rank %d: %llu MB", path, rank,
                          (unsigned long long)sizes.cost[rank].bytes >> 20);
            cr_assert_leq(sizes.cost[rank].exchanges, 4 * 67 + 40, "path %u, rank %d: %u exchanges", path, rank,
                          sizes.cost[rank].exchanges);
        }
    }
}
