/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel instances, by type, operation, layout of B and columns of a tile, and their launch. */
#include "fused/gemm/kernels.h"

#include "fused/gemm/engine.cuh"
#include "fused/core/begin_copies.cuh"
#include "fused/core/load.h"

typedef void (*kernel_fn)(const struct prs_kernel_args);

template <int TYPE> static kernel_fn kernel_of_type(uint32_t op, int b_n_major, bool far, uint32_t columns)
{
    static const kernel_fn narrow_gather[2] = {
        fused_kernel<engine<TYPE, PRS_GEMM_ALLGATHER, 0, false, false, PRS_NARROW_N>>,
        fused_kernel<engine<TYPE, PRS_GEMM_ALLGATHER, 1, false, false, PRS_NARROW_N>>};
    static const kernel_fn near_table[4][2] = {
        {fused_kernel<engine<TYPE, PRS_GEMM_ALONE, 0>>, fused_kernel<engine<TYPE, PRS_GEMM_ALONE, 1>>},
        {fused_kernel<engine<TYPE, PRS_GEMM_REDUCE_SCATTER, 0>>,
         fused_kernel<engine<TYPE, PRS_GEMM_REDUCE_SCATTER, 1>>},
        {fused_kernel<engine<TYPE, PRS_GEMM_ALLGATHER, 0>>, fused_kernel<engine<TYPE, PRS_GEMM_ALLGATHER, 1>>},
        {fused_kernel<engine<TYPE, PRS_GEMM_ALLREDUCE, 0>>, fused_kernel<engine<TYPE, PRS_GEMM_ALLREDUCE, 1>>},
    };
    static const kernel_fn far_table[4][2] = {
        {NULL, NULL}, /* nothing is communicated */
        {fused_kernel<engine<TYPE, PRS_GEMM_REDUCE_SCATTER, 0, true>>,
         fused_kernel<engine<TYPE, PRS_GEMM_REDUCE_SCATTER, 1, true>>},
        {fused_kernel<engine<TYPE, PRS_GEMM_ALLGATHER, 0, true>>,
         fused_kernel<engine<TYPE, PRS_GEMM_ALLGATHER, 1, true>>},
        {fused_kernel<engine<TYPE, PRS_GEMM_ALLREDUCE, 0, true>>,
         fused_kernel<engine<TYPE, PRS_GEMM_ALLREDUCE, 1, true>>},
    };
    if (columns == PRS_NARROW_N)
        return far || op != PRS_GEMM_ALLGATHER ? NULL : narrow_gather[b_n_major];
    return far ? far_table[op][b_n_major] : near_table[op][b_n_major];
}

/* B is K-major. Between nodes sums are always promoted. That saves three instances, and the network decides the time
 * there anyway. */
template <bool PROMOTES> static kernel_fn kernel_of_e4m3(uint32_t op, int b_n_major, bool far, uint32_t columns)
{
    static const kernel_fn near_table[4] = {
        fused_kernel<engine<PRS_DTYPE_E4M3, PRS_GEMM_ALONE, 0, false, PROMOTES>>,
        fused_kernel<engine<PRS_DTYPE_E4M3, PRS_GEMM_REDUCE_SCATTER, 0, false, PROMOTES>>,
        fused_kernel<engine<PRS_DTYPE_E4M3, PRS_GEMM_ALLGATHER, 0, false, PROMOTES>>,
        fused_kernel<engine<PRS_DTYPE_E4M3, PRS_GEMM_ALLREDUCE, 0, false, PROMOTES>>,
    };
    static const kernel_fn far_table[4] = {
        NULL, /* nothing is communicated */
        fused_kernel<engine<PRS_DTYPE_E4M3, PRS_GEMM_REDUCE_SCATTER, 0, true, true>>,
        fused_kernel<engine<PRS_DTYPE_E4M3, PRS_GEMM_ALLGATHER, 0, true, true>>,
        fused_kernel<engine<PRS_DTYPE_E4M3, PRS_GEMM_ALLREDUCE, 0, true, true>>,
    };
    if (b_n_major || columns != PRS_TILE_N)
        return NULL;
    return far ? far_table[op] : near_table[op];
}

/* A line for each type of A and B, or two: prs_promotes(). */
static const struct instances {
    uint32_t type; /* enum prs_dtype */
    bool promotes;
    kernel_fn (*kernel)(uint32_t op, int b_n_major, bool far, uint32_t columns);
} instances[] = {
    {PRS_DTYPE_BF16, false, kernel_of_type<PRS_DTYPE_BF16>},
    {PRS_DTYPE_FP16, false, kernel_of_type<PRS_DTYPE_FP16>},
    {PRS_DTYPE_E4M3, false, kernel_of_e4m3<false>},
    {PRS_DTYPE_E4M3, true, kernel_of_e4m3<true>},
};

static const uint32_t widths[] = {PRS_TILE_N, PRS_NARROW_N};

static kernel_fn kernel_of(const struct prs_gemm_shape *s, bool far, uint32_t columns)
{
    for (const struct instances &i : instances)
        if (i.type == s->dtype && i.promotes == prs_promotes(s))
            return i.kernel(s->op, !s->b_transposed, far, columns);
    return NULL;
}

static int load(void)
{
    int r = launch_load(begin_copies);
    for (const struct instances &i : instances)
        for (uint32_t op = PRS_GEMM_ALONE; op <= PRS_GEMM_ALLREDUCE; op++)
            for (uint32_t variant = 0; variant < 8 && r == 0; variant++) {
                kernel_fn kernel = i.kernel(op, variant & 1, (variant >> 1 & 1) != 0, widths[variant >> 2]);
                r = kernel ? launch_load(kernel) : 0;
            }
    return r;
}
static const bool added = prs_load_add(load);

static const struct launch_shape shape = {2, PRS_THREADS, PRS_SMEM_BYTES};

extern "C" int prs_kernels_prepare(const struct prs_gemm_shape *s, bool far, uint32_t *clusters)
{
    int r = -ENOTSUP;
    /* the widest tile comes last: it always exists, and its kernel is asked how many clusters can run */
    for (uint32_t i = 2; i-- > 0;) {
        kernel_fn kernel = kernel_of(s, far, widths[i]);
        r = kernel ? launch_prepare(kernel, &shape, clusters) : -ENOTSUP;
        if (kernel && r)
            return r;
    }
    return r;
}

extern "C" int prs_kernels_launch(const struct prs_gemm_shape *s, const struct prs_kernel_args *args, uint32_t clusters,
                                  cudaStream_t stream)
{
    const struct prs_schedule *schedule = &args->schedule;
    return launch_kernel(kernel_of(s, schedule->place.nodes > 1, schedule->wide), &shape, clusters, stream, *args);
}

extern "C" int prs_kernels_begin_copies(const struct prs_kernel_args *args, cudaStream_t stream)
{
    const struct prs_place *at = &args->schedule.place;
    const struct prs_turns *turns = args->turns[0];
    return launch_begin_copies(
        {args->sync, *at, turns->credit, &turns->copied, NULL, at->world - 1, 1, 1, PRS_AWAIT_PEERS}, stream);
}
