/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of the unfused path: barriers of a node's ranks, copies and sums over mapped memory, puts between nodes. */
#include "fused/gemm/relay.cuh"
#include "fused/core/load.h"
#include "fused/core/epilogue.cuh"
#include "fused/core/launch.cuh"
#include "fused/core/quantise.cuh"
#include "fused/core/sync.cuh"
#include "fused/gemm/unfused/inbox.cuh"
#include "fused/gemm/unfused/norm.cuh"
#include "fused/gemm/unfused/unfused.h"
#include "fused/gemm/unfused/vector.cuh"

static const struct launch_shape one_warp = {1, 32, 0}, wide_shape = {1, 256, 0};

/* A barrier of the ranks of this node, by one warp: all that they wrote before it is visible after it. */
PRS_DEVICE void meet_neighbours(const struct prs_kernel_args &args)
{
    const struct prs_schedule *s = &args.schedule;
    uint32_t slot = threadIdx.x, count = *(volatile uint32_t *)&args.sync.words->meetings + 1;
    if (slot + 1 < s->place.local_ranks) {
        uint32_t from = (s->place.local_rank + 1 + slot) % s->place.local_ranks, p = slot + 1;
        /* [meeting]: after earlier kernels of this stream, which are complete. Pairs with the wait below, of the other
         * rank. */
        store_release_sys(args.flags[p] + prs_index_after(s->place.local_rank, from, s->place.local_ranks), count);
        /* MUTANT(emulator nodes/unfused_allreduce_is_right) the node's ranks meet: s/wait_flag/if (0) wait_flag/ */
        wait_flag(&args.sync, args.flags[0] + slot, count, PRS_AWAIT_PEERS,
                  prs_place_rank(&s->place, s->place.node, from), slot);
    }
    __syncwarp();
    if (slot == 0)
        *(volatile uint32_t *)&args.sync.words->meetings = count;
}

static __global__ void meet(const __grid_constant__ struct prs_kernel_args args)
{
    meet_neighbours(args);
    __syncwarp();
    /* [gave-up]: a neighbour gave up at an earlier barrier, and arrived at this one. Between nodes finish() checks it,
     * after this rank has waited for its counterparts, because then it can name the one that is lost. */
    if (threadIdx.x == 0 && args.schedule.place.nodes == 1 && alarmed(&args.sync))
        record_alarm(&args.sync);
}

/* VECTOR: 16 bytes, or 2. One kernel copies to all ranks, because each copy by a copy engine would take 4 us. */
template <class VECTOR> static __global__ void copy(const __grid_constant__ struct prs_unfused_copy a)
{
    uint64_t step = (uint64_t)gridDim.x * blockDim.x, i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x;
    for (; i < a.bytes / sizeof(VECTOR); i += step) {
        VECTOR x = ((const VECTOR *)a.from)[i];
        for (uint32_t k = 0; k < a.copies; k++)
            ((VECTOR *)a.to[k])[i] = x;
    }
    for (uint32_t line = blockIdx.x; line < a.scales.lines; line += gridDim.x)
        for (uint32_t j = threadIdx.x; j < a.scales.each; j += blockDim.x) {
            float x = a.scales.from[line * a.scales.from_step + j];
            for (uint32_t k = 0; k < a.scales.copies; k++)
                a.scales.to[k][line * a.scales.to_step + j] = x;
        }
}

/* Adds in fp32 in a fixed order, and rounds once; WIDE: eight elements at a time. */
template <int TYPE, int RESULT, bool WIDE> static __global__ void sum(const __grid_constant__ struct prs_unfused_sum a)
{
    enum { EACH = WIDE ? 8 : 1 };
    uint64_t step = (uint64_t)gridDim.x * blockDim.x, i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x;
    for (; i < a.elements / EACH; i += step) {
        float s[8] = {};
        for (uint32_t k = 0; k < a.near_count + a.far_count; k++) {
            const uint8_t *from = k < a.near_count ? a.near[k] : a.far + (k - a.near_count) * a.far_step;
            if (WIDE)
                add_eight<TYPE>(s, load_eight<TYPE, true>(from, i * 8, 8));
            else
                s[0] += load_element<TYPE>(from, i);
        }
        finish_elements<TYPE, RESULT>(a.epilogue, s, a.first + i * EACH, EACH, a.columns);
        for (uint32_t k = 0; k < a.copies; k++)
            store_eight<RESULT, WIDE>(a.to[k], i * EACH, s, EACH);
    }
}

/* Types (enum prs_dtype). TYPE: of the bias; FROM: of the product; RESULT: of C. */
template <int TYPE, int FROM, int RESULT>
static __global__ void finish_result(const __grid_constant__ struct prs_unfused_finish a)
{
    uint64_t step = (uint64_t)gridDim.x * blockDim.x, i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x;
    for (; i < a.elements; i += step) {
        uint64_t row = i / a.columns, at = a.epilogue.gated ? i + row * a.columns : i;
        float up = a.epilogue.gated ? load_element<FROM>(a.from, at + a.columns) : 0;
        float x = finish_element<TYPE, RESULT>(a.epilogue, load_element<FROM>(a.from, at), up, row,
                                               (uint32_t)(i - row * a.columns), a.columns);
        store_element<RESULT>(a.to, i, x);
    }
}

/* The same, but the result is e4m3 with scales. A warp takes a part of a row. */
template <int TYPE> static __global__ void quantise_result(const __grid_constant__ struct prs_unfused_finish a)
{
    uint32_t parts = prs_ceil_div(a.columns, QUANTISE_PART), warps = gridDim.x * (blockDim.x / 32);
    uint64_t rows = a.elements / a.columns;
    for (uint64_t i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < rows * parts; i += warps) {
        uint64_t row = i / parts, from = row * a.columns * (a.epilogue.gated != 0 ? 2 : 1);
        quantise_part(
            a.columns, (uint32_t)(i % parts) * QUANTISE_PART,
            [&](uint32_t column, float(&x)[8]) {
                float up[8] = {};
                add_eight<TYPE>(x, load_eight<TYPE, true>(a.from, from + column, 8));
                if (a.epilogue.gated != 0)
                    add_eight<TYPE>(up, load_eight<TYPE, true>(a.from, from + a.columns + column, 8));
#pragma unroll
                for (int j = 0; j < 8; j++)
                    x[j] = finish_element<TYPE, TYPE>(a.epilogue, x[j], up[j], row, column + j, a.columns);
            },
            [&](uint32_t column, uint2 packed) {
                *(uint2 *)(a.quantised.to + row * a.quantised.pitch + column) = packed;
            },
            [&](uint32_t block, float scale) {
                /* MUTANT(emulator fp8_results/unfused_results_are_quantised) the scale of each row: s/+ row/+ 0/ */
                a.quantised.scales[block * a.quantised.scales_pitch + row] = scale;
            });
    }
}

/* The kernels for sums of one type and results of another type, or of the same type. The index is `wide`. */
struct instances {
    uint32_t type, result; /* enum prs_dtype */
    void (*sum[2])(const struct prs_unfused_sum);
    void (*inbox[2])(const struct prs_unfused_inbox_sum);
    void (*inbox_rows)(const struct prs_unfused_row_sum);
    void (*norm)(const struct prs_unfused_norm_rows);
    void (*finish)(const struct prs_unfused_finish);     /* for a product of type `result` */
    void (*finish_sum)(const struct prs_unfused_finish); /* for a product of type `type` */
};

template <int TYPE, int RESULT> static constexpr struct instances make(void)
{
    return {TYPE,
            RESULT,
            {sum<TYPE, RESULT, false>, sum<TYPE, RESULT, true>},
            {sum_by_inbox<TYPE, RESULT, false>, sum_by_inbox<TYPE, RESULT, true>},
            sum_rows_by_inbox<TYPE, RESULT>,
            norm_rows<TYPE, RESULT>,
            finish_result<TYPE, RESULT, RESULT>,
            finish_result<TYPE, TYPE, RESULT>};
}

/* Two lines for each type to which sums are rounded. */
static const struct instances instances[] = {
    make<PRS_DTYPE_BF16, PRS_DTYPE_BF16>(),
    make<PRS_DTYPE_BF16, PRS_DTYPE_FP32>(),
    make<PRS_DTYPE_FP16, PRS_DTYPE_FP16>(),
    make<PRS_DTYPE_FP16, PRS_DTYPE_FP32>(),
};

static const struct instances *instances_of(uint32_t type, uint32_t result)
{
    for (const struct instances &i : instances)
        if (i.type == type && i.result == result)
            return &i;
    return NULL; /* never: plans refuse types that have no line */
}

struct exchange_args {
    struct prs_kernel_args args;
    struct prs_exchange x;
};

/* One warp, with a lane for each counterpart. The kernels that wrote the data came earlier in this stream, and are
 * complete. */
static __global__ void cross(const __grid_constant__ struct exchange_args a)
{
    const struct prs_schedule *s = &a.args.schedule;
    const struct prs_sync *sync = &a.args.sync;
    uint32_t epoch = launch_epoch(sync);
    for (uint32_t i = threadIdx.x; i + 1 < s->place.nodes; i += 32) {
        struct prs_exchange_part p = prs_exchange_with(s, &a.x, i);
        /* MUTANT(emulator nodes/unfused_allgather_is_right)
         * credit before another node's memory is written again (rows): s/a.x.credit/0/ */
        /* MUTANT(emulator nodes/unfused_epochs_run_into_each_other)
         * credit before another node's memory is written again (sums): s/a.x.credit/0/ */
        if (a.x.credit)
            wait_flag(sync, far_flag(a.args, p.credit), epoch - 1, PRS_AWAIT_PEERS, p.peer, p.credit);
        if (p.bytes != 0)
            put_far(a.args, p.peer, a.x.window, p.from, p.to, p.bytes, a.x.word);
        /* MUTANT(emulator fp8_nodes/fp8_unfused_products_are_right) scales cross with rows: s/!= 0/> ~0u/ */
        if (a.x.beside_bytes != 0) {
            uint64_t at = a.x.beside + s->place.rank * a.x.beside_bytes;
            put_far(a.args, p.peer, a.x.window, at, at, a.x.beside_bytes, a.x.word);
        }
        signal_far(a.args, p.peer, p.signal, epoch, a.x.word);
    }
    for (uint32_t i = threadIdx.x; i + 1 < s->place.nodes; i += 32) {
        struct prs_exchange_part p = prs_exchange_with(s, &a.x, i);
        /* MUTANT(emulator nodes/unfused_allreduce_is_right) wait for what crosses, results:
         * s/wait_flag/if (0) wait_flag/ */
        /* MUTANT(emulator nodes/unfused_allgather_is_right) wait for what crosses, rows:
         * s/wait_flag/if (0) wait_flag/ */
        /* MUTANT(emulator nodes/unfused_reduce_scatter_is_right) wait for what crosses, sums:
         * s/wait_flag/if (0) wait_flag/ */
        wait_flag(sync, far_flag(a.args, p.awaited), epoch, a.x.what, p.peer, p.awaited);
    }
}

struct finish_args {
    struct prs_kernel_args args;
    uint32_t credit;
};

static __global__ void finish(const __grid_constant__ struct finish_args a)
{
    const struct prs_schedule *s = &a.args.schedule;
    uint32_t epoch = launch_epoch(&a.args.sync);
    struct prs_exchange nothing = {};
    nothing.word = PRS_EXCHANGE_BACK;
    /* A launch of other rows has its slices elsewhere. So before this rank's memory is written again, by neighbours or
     * by counterparts, the network has read what this rank put, and the neighbours have read all that is here. */
    /* MUTANT(emulator nodes/unfused_launches_of_other_rows_run_into_each_other)
     * what is put has been read before it is written again: s/network_quiet/if (0) network_quiet/ */
    if (threadIdx.x == 0)
        network_quiet(&a.args.sync, &a.args.far.device);
    __syncwarp();
    /* MUTANT(emulator nodes/unfused_launches_of_other_rows_run_into_each_other) credit when the neighbours have read:
     * s/meet/if (!a.credit) meet/ */
    meet_neighbours(a.args);
    __syncwarp();
    for (uint32_t i = threadIdx.x; a.credit && i + 1 < s->place.nodes; i += 32) {
        struct prs_exchange_part p = prs_exchange_with(s, &nothing, i);
        signal_far(a.args, p.peer, p.signal, epoch, PRS_EXCHANGE_BACK);
    }
    if (threadIdx.x == 0) {
        if (alarmed(&a.args.sync))
            record_alarm(&a.args.sync);
        *(volatile uint32_t *)&a.args.sync.words->epoch = epoch;
    }
}

enum { ROW_MOST_BYTES = 200 << 10 }; /* of shared memory */
static_assert((ROW_MOST_BYTES - ROW_ITEMS) / ROW_ITEM_BYTES * PRS_INBOX_ITEM * ROW_MOST_CTAS >= PRS_NORM_MOST_COLUMNS,
              "the longest row fits a cluster");

static int load(void)
{
    const struct launch_shape most = {1, ROW_MOST_WARPS * 32, ROW_MOST_BYTES};
    uint32_t clusters;
    int r = launch_load(meet);
    r = r ? r : launch_load(copy<uint16_t>);
    r = r ? r : launch_load(copy<uint4>);
    for (const struct instances &i : instances) {
        for (int wide = 0; wide < 2; wide++) {
            r = r ? r : launch_load(i.sum[wide]);
            r = r ? r : launch_load(i.inbox[wide]);
        }
        r = r ? r : launch_prepare(i.inbox_rows, &most, &clusters);
        r = r ? r : launch_prepare(i.norm, &most, &clusters);
        r = r ? r : launch_load(i.finish);
        r = r ? r : launch_load(i.finish_sum);
    }
    r = r ? r : launch_load(quantise_result<PRS_DTYPE_BF16>);
    r = r ? r : launch_load(cross);
    return r ? r : launch_load(finish);
}
static const bool added = prs_load_add(load);

extern "C" int prs_unfused_meet(const struct prs_kernel_args *args, cudaStream_t stream)
{
    return launch_kernel(meet, &one_warp, 1, stream, *args);
}

/* The number of blocks for one thread per item, at most `most`. */
static uint32_t wide_blocks(uint64_t items, uint32_t most)
{
    uint64_t blocks = (items + wide_shape.threads - 1) / wide_shape.threads;
    return (uint32_t)(blocks < most ? blocks : most);
}

extern "C" int prs_unfused_copy(const struct prs_unfused_copy *a, cudaStream_t stream)
{
    uint64_t misaligned = a->bytes % 16 | (uintptr_t)a->from % 16;
    uint64_t scales = a->scales.copies != 0 ? (uint64_t)a->scales.lines * a->scales.each : 0;
    for (uint32_t k = 0; k < a->copies; k++)
        misaligned |= (uintptr_t)a->to[k] % 16;
    if ((a->copies != 0 ? a->bytes | scales : scales) == 0)
        return 0;
    if (misaligned)
        return launch_kernel(copy<uint16_t>, &wide_shape, wide_blocks(a->bytes / 2 + scales, 1056), stream, *a);
    return launch_kernel(copy<uint4>, &wide_shape, wide_blocks(a->bytes / 16 + scales, 528), stream, *a);
}

extern "C" int prs_unfused_add(const struct prs_unfused_sum *a, cudaStream_t stream)
{
    uint64_t misaligned = a->elements % 8 | (a->far_count != 0 ? ((uintptr_t)a->far | a->far_step) % 16 : 0);
    for (uint32_t k = 0; k < a->near_count; k++)
        misaligned |= (uintptr_t)a->near[k] % 16;
    for (uint32_t k = 0; k < a->copies; k++)
        misaligned |= (uintptr_t)a->to[k] % 16;
    if (a->elements == 0)
        return 0;
    if (misaligned)
        return launch_kernel(instances_of(a->type, a->result)->sum[0], &wide_shape, wide_blocks(a->elements, 1056),
                             stream, *a);
    return launch_kernel(instances_of(a->type, a->result)->sum[1], &wide_shape, wide_blocks(a->elements / 8, 528),
                         stream, *a);
}

/* Each CTA has 32 items or more, unless there are fewer in all, and a thread for each item that it sends, up to
 * MOST_THREADS. */
extern "C" int prs_unfused_sum_by_inbox(const struct prs_unfused_inbox_sum *a, cudaStream_t stream)
{
    enum { MOST_THREADS = 512 };
    uint64_t items = prs_inbox_items(a->part), ctas = (items + 31) / 32, sent;
    ctas = ctas < a->most_ctas ? ctas : a->most_ctas;
    ctas = ctas < PRS_INBOX_MOST_CTAS ? ctas : PRS_INBOX_MOST_CTAS;
    sent = (items + ctas - 1) / ctas * (a->place.local_ranks - 1);
    const struct launch_shape shape = {1, sent < MOST_THREADS ? (uint32_t)(sent + 31) / 32 * 32 : MOST_THREADS,
                                       sizeof(uint32_t)};
    bool wide = a->part % PRS_INBOX_ITEM == 0 && a->all % PRS_INBOX_ITEM == 0;
    return launch_kernel(instances_of(a->type, a->result)->inbox[wide], &shape, (uint32_t)ctas, stream, *a);
}

static uint32_t row_bytes(const struct prs_row_norm *n, uint32_t ctas)
{
    return ROW_ITEMS + row_step(n->columns / PRS_INBOX_ITEM, ctas) * ROW_ITEM_BYTES;
}

/* Chooses clusters of several CTAs if there are few rows, so that a row takes less time, or if a row does not fit one
 * CTA. Returns how many clusters have work; together they have at most `most` CTAs, but there is at least one
 * cluster. */
static uint32_t choose_clusters(struct prs_row_norm *n, uint32_t rows, uint32_t most, struct launch_shape *shape)
{
    enum { LEAST_ITEMS = 64 /* of a CTA */ };
    uint32_t items = n->columns / PRS_INBOX_ITEM, clusters, threads;
    n->ctas = 1;
    while (n->ctas < ROW_MOST_CTAS && (row_bytes(n, n->ctas) > ROW_MOST_BYTES ||
                                       (2 * n->ctas * (uint64_t)rows <= most && 2 * n->ctas * LEAST_ITEMS <= items)))
        n->ctas *= 2;
    threads = prs_ceil_div(row_step(items, n->ctas), 32) * 32;
    *shape = {n->ctas, threads < ROW_MOST_WARPS * 32 ? threads : ROW_MOST_WARPS * 32, row_bytes(n, n->ctas)};
    clusters = most / n->ctas != 0 ? most / n->ctas : 1;
    clusters = prs_ceil_div(rows, prs_ceil_div(rows, clusters));
    return clusters;
}

extern "C" int prs_unfused_sum_rows_by_inbox(struct prs_unfused_row_sum *a, cudaStream_t stream)
{
    struct launch_shape shape;
    uint32_t most = a->sum.most_ctas < PRS_INBOX_MOST_CTAS ? a->sum.most_ctas : PRS_INBOX_MOST_CTAS;
    uint32_t clusters = choose_clusters(&a->norm, a->sum.part / a->norm.columns, most, &shape);
    return launch_kernel(instances_of(a->sum.type, a->sum.result)->inbox_rows, &shape, clusters, stream, *a);
}

extern "C" int prs_unfused_norm_rows(struct prs_unfused_norm_rows *a, cudaStream_t stream)
{
    struct launch_shape shape;
    uint32_t clusters = choose_clusters(&a->norm, a->rows, 528, &shape);
    return launch_kernel(instances_of(a->type, a->result)->norm, &shape, clusters, stream, *a);
}

extern "C" int prs_unfused_finish_result(const struct prs_unfused_finish *a, cudaStream_t stream)
{
    const struct instances *i = instances_of(a->type, a->result);
    if (a->quantised.to)
        return launch_kernel(quantise_result<PRS_DTYPE_BF16>, &wide_shape, wide_blocks(a->elements / 8, 1056), stream,
                             *a);
    return launch_kernel(a->from_type == a->result ? i->finish : i->finish_sum, &wide_shape,
                         wide_blocks(a->elements, 1056), stream, *a);
}

extern "C" int prs_unfused_cross(const struct prs_kernel_args *args, const struct prs_exchange *exchange,
                                 cudaStream_t stream)
{
    const struct exchange_args a = {*args, *exchange};
    return launch_kernel(cross, &one_warp, 1, stream, a);
}

extern "C" int prs_unfused_finish(const struct prs_kernel_args *args, int credit, cudaStream_t stream)
{
    const struct finish_args a = {*args, credit != 0};
    return launch_kernel(finish, &one_warp, 1, stream, a);
}
