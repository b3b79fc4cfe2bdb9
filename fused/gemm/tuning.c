/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/gemm/tuning.h"

#include <errno.h>
#include <math.h>

#include "fused/core/machine.h"
#include "fused/core/network.h"
#include "fused/gemm/gather_time.h"
#include "fused/gemm/plan.h"
#include "fused/gemm/table.h"
#include "fused/gemm/unfused/lt.h"
#include "transport/util/error.h"

static const double FLOPS_PER_US = 750e6; /* 16-bit types, on all SMs of an H200, large shapes */
static const double PUSH_GAINS = 1.01;    /* CTAs push only if that is faster by this factor */
/* narrow tiles, which read B more often, are used only if they are faster by this factor */
static const double NARROW_GAINS = 1.05;

enum {
    MOST_SPREAD = 1000, /* percent */
    MOST_TILES_PER_SIGNAL = 1 << 16
};

/* How often an element of the product, or of A, is sent. The result of an all-reduce is sent back. */
static double journeys(const struct prs_gemm_shape *shape)
{
    return shape->op == PRS_GEMM_ALLREDUCE ? 1 + (double)prs_result_columns(shape) / shape->n : 1;
}

/* Bytes of an element that is sent: of A, or of a sum. */
static uint32_t travelling_bytes(const struct prs_gemm_shape *shape)
{
    return shape->op == PRS_GEMM_ALLGATHER ? prs_operand_bytes(shape) : prs_sum_bytes(shape);
}

/* Bytes that one rank sends to the other ranks of its node. A matrix that is first reduced inside a node is sent
 * (locals - 1) / locals times. An all-gather sends this rank's block, and forwards those of the counterparts. */
static double sent_bytes(const struct prs_gemm_shape *shape, const struct prs_place *at)
{
    double elements = shape->op == PRS_GEMM_ALLGATHER ? (double)shape->m * shape->k : (double)shape->m * shape->n;
    double shares = shape->op == PRS_GEMM_ALONE ? 0 : (double)(at->local_ranks - 1) / at->local_ranks;
    return elements * travelling_bytes(shape) * shares * journeys(shape);
}

/* Bytes to other nodes: one block to each, for an all-reduce one each way. */
static double far_bytes(const struct prs_gemm_shape *shape, const struct prs_place *at)
{
    double elements = shape->op == PRS_GEMM_ALLGATHER ? (double)shape->m * shape->k : (double)shape->m * shape->n;
    double shares = shape->op == PRS_GEMM_ALONE ? 0 : (double)(at->nodes - 1) / at->world;
    return elements * travelling_bytes(shape) * shares * journeys(shape);
}

static double compute_us(const struct prs_gemm_shape *shape, uint32_t clusters)
{
    /* The tensor cores take the same time for the same number of bytes. */
    double flops_per_us = FLOPS_PER_US * 2 / prs_operand_bytes(shape);
    return prs_compute_us(2.0 * shape->m * shape->n * shape->k, flops_per_us, 2 * clusters);
}

/* How long the links are busy for each microsecond that the tensor cores are. */
static double link_ratio(const struct prs_gemm_shape *shape, const struct prs_place *at, uint32_t clusters)
{
    return sent_bytes(shape, at) / PRS_STORE_BYTES_PER_US / compute_us(shape, clusters);
}

/* Both paths on a single node, fitted to the times of 210 shapes of 512 to 4096 rows on 2 and 4 x H200 (doc/results/
 * fused-path-4xH200.json), and, for sums by inboxes, 100 shapes of 512 to 2048 rows (fused-path-inbox-4xH200.json). The
 * path that these constants choose is on average at most 1 % slower than the best one, and 17 % slower in the worst
 * case (test_tuning.c). */
struct way_times {
    double unfused, fused; /* us: launches, barriers, first stages, last stores */
    double inbox;          /* replaces `unfused` for sums by inboxes */
    double not_hidden;     /* fused path: the fraction of the shorter of product and transfer that is not hidden */
    double last_unit;      /* fused path: this fraction of a unit's time is added at the end */
};
static const struct way_times GATHER_TIMES = {20, 15, 0, 0.5, 0}, REDUCE_TIMES = {24, 20, 16, 0.4, 0.4};
/* From so many rows of all ranks on, the fused kernel was the faster path in these measurements whenever the model
 * predicted nearly the same times. An exception is an n so small that a wave of units is not full: gradients of
 * DeepSeek-V3's kv_b (8192 x 512 x 8192) and q_b (4096 x 1536 x 6144), doc/results/grid-4xH200.json. */
static const uint32_t FEW_ROWS = 4096;
/* from there on the unfused path must be faster by this factor, by the model */
static const double UNFUSED_GAINS = 1.1;

static const struct way_times *way_times(const struct prs_gemm_shape *shape)
{
    return shape->op == PRS_GEMM_ALLGATHER ? &GATHER_TIMES : &REDUCE_TIMES;
}

/* time of the second hop of a sum by inboxes; on 4 x H200 it took 0.2 to 1.1 */
static const double SECOND_HOP_US = 1;
/* largest product; its inbox takes 2 to 4 times its bytes, in fp32 up to 6 times */
static const double MOST_INBOX_BYTES = 16 << 20;

static uint32_t at_most(double rows, const struct prs_gemm_shape *shape)
{
    return rows < shape->m ? (uint32_t)rows : shape->m;
}

uint32_t prs_tuning_inbox_rows(const struct prs_gemm_shape *shape, const struct prs_place *at)
{
    bool sums = shape->op == PRS_GEMM_REDUCE_SCATTER || shape->op == PRS_GEMM_ALLREDUCE;
    return sums && at->nodes == 1 && at->world > 1
               ? at_most(MOST_INBOX_BYTES / ((double)shape->n * prs_sum_bytes(shape)), shape)
               : 0;
}

/* An all-reduce in one hop sends every row to every rank; in two, each rank adds up a part of it. */
uint32_t prs_tuning_one_hop_rows(const struct prs_gemm_shape *shape, const struct prs_place *at)
{
    uint32_t most = prs_tuning_inbox_rows(shape, at), rows;
    /* The time of a second hop, in units of the first. A kernel that normalises after it takes about as long as a
     * hop. */
    double back = shape->norm ? 2 : 1;
    double more = (double)shape->n * prs_sum_bytes(shape) * (at->world - 1) * (1 - (1 + back) / at->world);
    if (shape->op != PRS_GEMM_ALLREDUCE || more <= 0)
        return most;
    rows = at_most(SECOND_HOP_US * PRS_STORE_BYTES_PER_US / more, shape);
    return rows < most ? rows : most;
}

static double unfused_sent_bytes(const struct prs_gemm_shape *shape, const struct prs_place *at)
{
    return shape->op == PRS_GEMM_ALLREDUCE && prs_tuning_one_hop_rows(shape, at) == shape->m
               ? (double)shape->m * shape->n * prs_sum_bytes(shape) * (at->world - 1)
               : sent_bytes(shape, at);
}

/* One rank, where nothing travels: cuBLASLt or the fused kernel alone. Fitted to products on one H200:
 * fused-gemm-shapes-1xH200.json, unfused-rounding-1xH200.json, fp8-paths-1xH200.json and paths-one-rank-1xH200.json in
 * doc/results (test_tuning.c).
 * us, and the time of cuBLASLt's products relative to compute_us(). */
static const double LT_ALONE_US = 7.5, FUSED_ALONE_US = 13, LT_COMPUTE = 0.95;
static const double FINISH_US = 3; /* a kernel after cuBLASLt, in addition to its bytes */

/* The kernel that makes C from the product of cuBLASLt; 0: there is none. The product has 16-bit numbers. */
static double finish_us(const struct prs_gemm_shape *shape)
{
    double read = 2.0 * shape->n, written = (double)prs_result_columns(shape) * prs_result_bytes(shape);
    if (!prs_lt_apart(shape) && shape->activation == PRS_ACTIVATION_NONE)
        return 0;
    return FINISH_US + shape->m * (read + written) / PRS_MEMORY_BYTES_PER_US;
}

static double unfused_alone_us(const struct prs_gemm_shape *shape, uint32_t clusters)
{
    double operands = ((double)shape->m + shape->n) * shape->k * prs_operand_bytes(shape);
    double bytes = operands + (double)shape->m * shape->n * prs_sum_bytes(shape);
    return LT_ALONE_US + fmax(LT_COMPUTE * compute_us(shape, clusters), bytes / PRS_MEMORY_BYTES_PER_US) +
           finish_us(shape);
}

static double unfused_us(const struct prs_gemm_shape *shape, const struct prs_place *at, uint32_t clusters)
{
    const struct way_times *times = way_times(shape);
    bool inbox = prs_tuning_inbox_rows(shape, at) == shape->m;
    if (at->world == 1)
        return unfused_alone_us(shape, clusters);
    return (inbox ? times->inbox : times->unfused) + unfused_sent_bytes(shape, at) / PRS_STORE_BYTES_PER_US +
           compute_us(shape, clusters);
}

/* The time of a K step with promoted sums, relative to one without. Fitted to 48 products of 128 to 2048 rows on 4 x
 * H100 (doc/results/grid-fp8-4xH100.json). The path that is chosen is on average at most 1 % slower than the best one,
 * and 9 % slower in the worst case (test_tuning.c). */
static const double PROMOTED_STEP = 1.25;

bool prs_tuning_can_be_narrow(const struct prs_gemm_shape *shape, const struct prs_place *at)
{
    return shape->op == PRS_GEMM_ALLGATHER && !shape->gated && prs_operand_bytes(shape) == 2 && at->nodes == 1 &&
           at->world > 1;
}

/* Pairs of row tiles of all blocks. */
static double pairs_of(uint32_t rows, const struct prs_place *at)
{
    return (double)at->world * prs_ceil_div(prs_ceil_div(rows, at->world), PRS_PAIR_M);
}

/* How many units the busiest cluster computes, with tiles of so many columns. A unit with few rows takes as long as one
 * with many. */
static double waves(const struct prs_gemm_shape *shape, const struct prs_place *at, uint32_t clusters, uint32_t columns)
{
    return ceil(pairs_of(shape->m, at) * prs_column_tiles(shape, columns) / clusters);
}

static double tiled_us(const struct prs_gemm_shape *shape, const struct prs_place *at, uint32_t clusters,
                       uint32_t columns)
{
    const struct way_times *times = way_times(shape);
    double unit = prs_k_steps(shape) * PRS_STEP_US * (prs_promotes(shape) ? PROMOTED_STEP : 1) * columns / PRS_TILE_N;
    double product = waves(shape, at, clusters, columns) * unit;
    double travel = sent_bytes(shape, at) / PRS_STORE_BYTES_PER_US;
    if (at->world == 1)
        return FUSED_ALONE_US + product;
    return times->fused + fmax(product, travel) + times->not_hidden * fmin(product, travel) + times->last_unit * unit;
}

/* With wide tiles, because only those were measured. */
static double fused_us(const struct prs_gemm_shape *shape, const struct prs_place *at, uint32_t clusters)
{
    return tiled_us(shape, at, clusters, PRS_TILE_N);
}

void prs_tuning_carry(const struct prs_gemm_shape *from, const struct prs_gemm_shape *to, const struct prs_place *at,
                      uint32_t clusters, const struct prs_gemm_tuning *t, double us[])
{
    uint32_t columns = t->columns != 0 ? t->columns : PRS_TILE_N;
    if (t->clusters != 0)
        clusters = t->clusters;
    if (at->world > 1 && at->nodes == 1 && t->path != PRS_GEMM_PATH_AUTO) {
        us[PRS_GEMM_PATH_FUSED] *= tiled_us(to, at, clusters, columns) / tiled_us(from, at, clusters, columns);
        us[PRS_GEMM_PATH_UNFUSED] *= unfused_us(to, at, clusters) / unfused_us(from, at, clusters);
    } else {
        for (uint32_t path = PRS_GEMM_PATH_AUTO; path <= PRS_GEMM_PATH_UNFUSED; path++)
            us[path] *= (double)to->m / from->m * ((double)to->n / from->n) * ((double)to->k / from->k);
    }
}

static bool model_takes_unfused(const struct prs_gemm_shape *shape, const struct prs_place *at, uint32_t clusters)
{
    double gains = at->world == 1 || shape->m < FEW_ROWS ? 1 : UNFUSED_GAINS;
    return gains * unfused_us(shape, at, clusters) < fused_us(shape, at, clusters);
}

static struct prs_gemm_shape with_rows(const struct prs_gemm_shape *shape, uint32_t rows)
{
    struct prs_gemm_shape part = *shape;
    part.m = rows;
    return part;
}

void prs_tuning_path_times(const struct prs_gemm_shape *shape, const struct prs_place *at, uint32_t clusters,
                           const struct prs_table_found *found, struct prs_path_times *times)
{
    for (uint32_t i = 0; i < PRS_TABLE_CLASSES; i++) {
        struct prs_gemm_shape part = with_rows(shape, shape->m >> i);
        float ratio = found->ratio[i], us = found->us[i];
        times[i] = (struct prs_path_times){0};
        times[i].unfused_more = (float)(ratio * fused_us(&part, at, clusters) / unfused_us(&part, at, clusters));
        if (ratio <= PRS_RATIO_UNFUSED || ratio >= PRS_RATIO_FUSED)
            continue; /* the time of one path only, or none */
        times[i].fused_us = found->tuning[i].path == PRS_GEMM_PATH_FUSED ? us : us / ratio;
        times[i].unfused_us = times[i].fused_us * ratio;
    }
}

/* high, low: the times of two classes, and their rows. */
static bool unfused_is_faster_between(const struct prs_path_times *high, double high_rows,
                                      const struct prs_path_times *low, double low_rows, uint32_t rows,
                                      const struct prs_place *at)
{
    double part = (rows - low_rows) / (high_rows - low_rows);
    double first = pairs_of((uint32_t)low_rows, at), last = pairs_of((uint32_t)high_rows, at);
    double tall = last > first ? (pairs_of(rows, at) - first) / (last - first) : part;
    return low->unfused_us + part * (high->unfused_us - low->unfused_us) <
           low->fused_us + tall * (high->fused_us - low->fused_us);
}

bool prs_tuning_unfused_is_faster(const struct prs_gemm_shape *shape, uint32_t rows, const struct prs_place *at,
                                  uint32_t clusters, const struct prs_path_times *times)
{
    struct prs_gemm_shape part = with_rows(shape, rows);
    uint32_t i = 0;
    while (i + 1 < PRS_TABLE_CLASSES && shape->m >> (i + 1) >= rows)
        i++;
    if (i + 1 < PRS_TABLE_CLASSES && times[i].fused_us > 0 && times[i + 1].fused_us > 0)
        return unfused_is_faster_between(&times[i], shape->m >> i, &times[i + 1], shape->m >> (i + 1), rows, at);
    if (times[i].unfused_more <= 0)
        return model_takes_unfused(&part, at, clusters);
    return times[i].unfused_more * unfused_us(&part, at, clusters) < fused_us(&part, at, clusters);
}

/* The time of a product is that of the busiest cluster. */
static uint32_t default_columns(const struct prs_gemm_shape *shape, const struct prs_place *at, uint32_t clusters)
{
    double wide = waves(shape, at, clusters, PRS_TILE_N) * PRS_TILE_N;
    double narrow = waves(shape, at, clusters, PRS_NARROW_N) * PRS_NARROW_N;
    return prs_tuning_can_be_narrow(shape, at) && NARROW_GAINS * narrow < wide ? PRS_NARROW_N : PRS_TILE_N;
}

static uint32_t default_band(const struct prs_gemm_shape *shape, const struct prs_place *at,
                             const struct prs_gemm_tuning *t)
{
    uint32_t clusters = t->clusters, columns = prs_column_tiles(shape, t->columns);
    uint32_t world = at->world, pairs = prs_ceil_div(shape->m / world, PRS_PAIR_M);
    double ratio = link_ratio(shape, at, clusters);
    uint32_t band;
    if (shape->op == PRS_GEMM_ALONE || world == 1)
        return PRS_RASTER; /* nothing is communicated */
    if (shape->op == PRS_GEMM_ALLGATHER) {
        /* A band should have as many units as clusters compute at a time. */
        band = prs_ceil_div(clusters, (world - 1) * columns);
        return band < 2 ? 2 : band > pairs ? pairs : band;
    }
    /* Small bands spread the traffic, which busy links need; large bands read A and B less often. With few bands the
     * rounds in which only the links or only the tensor cores work cost more than either. */
    band = pairs <= 4 ? pairs : ratio > 1.2 ? 1 : ratio <= 0.6 ? 4 : shape->op == PRS_GEMM_ALLREDUCE ? 2 : 1;
    /* In a round, clusters compute units while sums of the previous round travel. With less than two units for each
     * cluster, they wait. 2 x H200, reduce-scatter 12288 x 8192 x 1376: 540 us with bands of 1, 428 with 2; all-reduce
     * 624, 631; 6144 x 4096 x 1376 174, 136; 200, 184. */
    if (band == 1 && 10 * world * columns < 19 * clusters)
        band = 2;
    return band > pairs ? pairs : band;
}

/* Chooses what moves an all-gather's blocks on a single node, and in which pieces: whatever is faster. Copies are
 * simulated, pushing CTAs estimated. Returns the time of the choice. */
static double default_copies(const struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                             const struct prs_place *at, struct prs_gemm_tuning *t)
{
    uint32_t band = t->band, segments = t->segments;
    double spread = t->spread > 1 ? compute_us(shape, t->clusters) * t->spread / 100 : 0, copied, pushed;
    struct prs_schedule s;
    prs_schedule_init(&s, PRS_GEMM_ALLGATHER, 0, at->world, at->nodes, shape->m, prs_column_tiles(shape, t->columns),
                      prs_k_steps(shape), 1);
    s.wide = t->columns;
    pushed = prs_gather_pushed_us(&s, t->clusters, spread);
    if (ctx->shared_device)
        t->mover = PRS_MOVED_BY_CTAS;
    if (t->mover == PRS_MOVED_BY_CTAS)
        return pushed;
    copied = prs_gather_best_pieces(&s, t->clusters, &band, &segments);
    if (t->mover == 0 && PUSH_GAINS * pushed < copied) {
        t->mover = PRS_MOVED_BY_CTAS;
        return pushed;
    }
    t->mover = PRS_MOVED_BY_COPY_ENGINES;
    t->band = band, t->segments = segments;
    return copied;
}

/* Traffic is spread over the compute time that can hide it; a link that is the bottleneck is kept full. In an
 * all-gather whose link is busy most of the time, bursts were better (8192: 422 us, spread 490). If the link is mostly
 * idle, they were worse (16384: 3347 us, spread 2974). */
static void default_pace(const struct prs_gemm_shape *shape, const struct prs_place *at, struct prs_gemm_tuning *t)
{
    double ratio = link_ratio(shape, at, t->clusters);
    bool bursts = shape->op == PRS_GEMM_ALLGATHER && ratio > 0.6;
    if (t->paced == 0)
        t->paced = bursts ? PRS_GEMM_UNPACED : PRS_GEMM_PACED;
    if (t->spread == 0)
        t->spread = ratio < 1 ? 85 : 1;
}

/* gather_us: the time of an all-gather on a single node; 0 for others. */
static void predict(const struct prs_fused *ctx, const struct prs_gemm_shape *shape, const struct prs_place *at,
                    double gather_us, struct prs_gemm_info *info)
{
    int rails = ctx->network ? ctx->network->rails.count : 1;
    bool unfused = info->tuning.path == PRS_GEMM_PATH_UNFUSED;
    double sent = unfused ? unfused_sent_bytes(shape, at) : sent_bytes(shape, at), far = far_bytes(shape, at);
    double compute = compute_us(shape, info->tuning.clusters);
    double travel = sent / PRS_STORE_BYTES_PER_US, longest = compute > travel ? compute : travel;
    info->sent_bytes = (uint64_t)sent;
    info->far_bytes = (uint64_t)far;
    far /= PRS_PORT_BYTES_PER_US * rails;
    if (unfused)
        info->predicted_us = unfused_us(shape, at, info->tuning.clusters) + far;
    else if (gather_us > 0)
        info->predicted_us = gather_us;
    else
        info->predicted_us = PRS_START_US + (longest > far ? longest : far);
}

void prs_tuning_gaps(const struct prs_gemm_shape *shape, const struct prs_gemm_tuning *t, const struct prs_schedule *s,
                     uint32_t *push, uint32_t *store)
{
    double clocks = compute_us(shape, t->clusters) * t->spread / 100 * PRS_CLOCKS_PER_US;
    double tiles = prs_ceil_div(s->units, t->clusters), chunks;
    *push = *store = 0;
    if (t->spread <= 1 || s->place.world == 1)
        return;
    *store = (uint32_t)(clocks / (tiles * s->wide / prs_element_step(shape->sum_dtype)));
    if (s->op == PRS_GEMM_ALLGATHER && !prs_tuning_copies(t)) {
        chunks = prs_ceil_div(prs_schedule_chunks(s) * s->place.nodes, 2 * t->clusters); /* forwarded ones too */
        *push = (uint32_t)(clocks / (t->paced == PRS_GEMM_PACED && s->place.local_ranks > 1
                                         ? chunks * (s->place.local_ranks - 1)
                                         : chunks));
    }
}

/* Why the fused kernel cannot run this shape; NULL: it can. */
static const char *obstacle(const struct prs_gemm_shape *shape, uint32_t world)
{
    uint32_t operands = prs_element_vector(shape->dtype), results = prs_element_vector(shape->sum_dtype);
    if (shape->k == 0)
        return "k is 0: there is no product";
    if ((!shape->b_transposed && shape->n % operands != 0) || shape->k % operands != 0 ||
        prs_result_columns(shape) % results != 0)
        return "rows of A, B or C are no multiple of 16 bytes, as the copy engine needs";
    if (shape->c_dtype == PRS_DTYPE_FP32)
        return "C is fp32, and the fused kernels store 16-bit results only";
    if (shape->op != PRS_GEMM_ALONE && shape->m % world != 0)
        return "the ranks do not divide m";
    return NULL;
}

bool prs_tuning_can_fuse(const struct prs_gemm_shape *shape, uint32_t world)
{
    return !obstacle(shape, world);
}

/* Why the unfused path should be faster; NULL: it should not. */
static const char *why_unfused(const struct prs_gemm_shape *shape, const struct prs_place *at, uint32_t clusters)
{
    /* 512 rows, 2 nodes of 2, fused and unfused: reduce-scatter 160 and 115 us, all-gather 115 and 128. */
    if (at->nodes > 1)
        return shape->m / at->world < PRS_PAIR_M && shape->op != PRS_GEMM_ALLGATHER
                   ? "blocks of less than 256 rows: clusters would be half empty"
                   : NULL;
    if (!model_takes_unfused(shape, at, clusters))
        return NULL;
    if (at->world == 1)
        return "one rank: nothing travels, and cuBLASLt alone should be faster";
    return shape->m < FEW_ROWS ? "few rows: product and travel one after the other should be faster"
                               : "few columns: product and travel one after the other should be faster";
}

/* The feature of the shape that the unfused path does not support; NULL: none. */
static const char *only_fused(const struct prs_gemm_shape *shape)
{
    uint32_t vector = prs_element_vector(shape->dtype);
    if (shape->dtype == PRS_DTYPE_E4M3 && (shape->n % vector != 0 || shape->k % vector != 0))
        return "of e4m3, with an n or k that is no multiple of 16,";
    if (shape->scaling == PRS_SCALING_BLOCKS && shape->n % PRS_SCALE_BLOCK != 0)
        return "with scales of blocks, and an n that is no multiple of 128,";
    if (prs_has_gaps(shape))
        return "with gaps between rows";
    if (shape->gated && shape->op != PRS_GEMM_ALONE && shape->op != PRS_GEMM_ALLGATHER)
        return "gated, with a sum over ranks,";
    return NULL;
}

bool prs_tuning_can_unfuse(const struct prs_gemm_shape *shape)
{
    return !only_fused(shape);
}

/* Drops values that were found for a near shape and do not fit this one. */
static void drop_misfits(const struct prs_gemm_shape *shape, const struct prs_place *at, struct prs_gemm_tuning *t)
{
    if ((t->path == PRS_GEMM_PATH_FUSED && obstacle(shape, at->world)) ||
        (t->path == PRS_GEMM_PATH_UNFUSED && only_fused(shape)))
        t->path = PRS_GEMM_PATH_AUTO;
    if (t->columns != PRS_TILE_N && !prs_tuning_can_be_narrow(shape, at))
        t->columns = 0;
}

static int choose_path(const struct prs_gemm_shape *shape, const struct prs_place *at, uint32_t clusters,
                       struct prs_gemm_info *info)
{
    const char *why = obstacle(shape, at->world), *only = only_fused(shape);
    if (only && (why || info->tuning.path == PRS_GEMM_PATH_UNFUSED))
        return prs_fail(-EINVAL, "fused: %u x %u x %u %s needs the fused path, which cannot take it: %s", shape->m,
                        shape->n, shape->k, only, why ? why : "the tuning forces the unfused one");
    if (only)
        info->tuning.path = PRS_GEMM_PATH_FUSED;
    if (info->tuning.path == PRS_GEMM_PATH_FUSED && why)
        return prs_fail(-EINVAL, "fused: %u x %u x %u cannot take the fused path, which the tuning forces: %s",
                        shape->m, shape->n, shape->k, why);
    if (info->tuning.path == PRS_GEMM_PATH_AUTO && !why)
        why = why_unfused(shape, at, clusters);
    if (info->tuning.path == PRS_GEMM_PATH_AUTO)
        info->tuning.path = !why ? PRS_GEMM_PATH_FUSED : PRS_GEMM_PATH_UNFUSED;
    if (why)
        info->reason = why;
    return 0;
}

/* Limits absurd values, from the caller or a damaged file, before derived quantities overflow. */
static void limit(const struct prs_gemm_shape *shape, struct prs_gemm_tuning *t)
{
    uint32_t steps = prs_k_steps(shape);
    t->segments = t->segments > steps ? steps : t->segments;
    t->spread = t->spread > MOST_SPREAD ? MOST_SPREAD : t->spread;
    t->tiles_per_signal = t->tiles_per_signal > MOST_TILES_PER_SIGNAL ? MOST_TILES_PER_SIGNAL : t->tiles_per_signal;
}

int prs_tuning_choose(const struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                      const struct prs_gemm_tuning *wanted, const struct prs_table_found *found, uint32_t clusters,
                      struct prs_gemm_info *info)
{
    const struct prs_place *at = prs_table_place(ctx, shape);
    struct prs_gemm_tuning *t = &info->tuning;
    double gather_us = 0;
    int r;
    info->reason = "analytic default";
    if (wanted) {
        *t = *wanted;
        info->reason = "given by the caller, the rest by default";
    } else if (found && found->source != PRS_TABLE_NONE) {
        *t = found->tuning[0];
        drop_misfits(shape, at, t);
        info->reason = found->source == PRS_TABLE_FILE      ? "tuning file"
                       : found->source == PRS_TABLE_SHIPPED ? "table of the library"
                                                            : "measured when the plan opened";
    }
    if (t->path > PRS_GEMM_PATH_UNFUSED)
        return prs_fail(-EINVAL, "fused: path %u of the tuning does not exist", t->path);
    if (t->mover > PRS_MOVED_BY_CTAS)
        return prs_fail(-EINVAL, "fused: mover %u of the tuning does not exist", t->mover);
    if (t->columns != 0 && t->columns != PRS_TILE_N &&
        (t->columns != PRS_NARROW_N || !prs_tuning_can_be_narrow(shape, at)))
        return prs_fail(-EINVAL,
                        "fused: tiles of %u columns: there are %u, and %u for an all-gather of 16-bit types on one "
                        "node that is not gated",
                        t->columns, PRS_TILE_N, PRS_NARROW_N);
    r = choose_path(shape, at, clusters, info);
    if (r == 0 && shape->op == PRS_GEMM_ALLGATHER && prs_tuning_copies(t) && wanted)
        r = prs_context_check_copies(ctx);
    if (r)
        return r;
    if (t->clusters == 0 || t->clusters > clusters)
        t->clusters = clusters;
    limit(shape, t);
    if (t->columns == 0)
        t->columns = default_columns(shape, at, t->clusters);
    default_pace(shape, at, t);
    if (shape->op != PRS_GEMM_ALLGATHER || at->world == 1)
        t->mover = 0;
    else if (at->nodes > 1)
        t->mover = PRS_MOVED_BY_CTAS;
    else
        gather_us = default_copies(ctx, shape, at, t);
    if (t->band == 0)
        t->band = default_band(shape, at, t);
    if (t->segments == 0)
        t->segments = 1;
    if (t->tiles_per_signal == 0)
        t->tiles_per_signal = 16; /* 1 MB was best: 1077 us at 8192, where 8 tiles take 1128 and 32 take 1166 */
    predict(ctx, shape, at, gather_us, info);
    if (!wanted && found && found->us[0] > 0)
        info->predicted_us = found->us[0];
    return 0;
}
