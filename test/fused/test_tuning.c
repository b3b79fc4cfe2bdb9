/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fused/gemm/plan.h"
#include "fused/gemm/table.h"
#include "fused/gemm/tuning.h"
#include "test/fused/product.h"

static uint32_t nodes = 1;

static struct prs_gemm_info choose(enum prs_gemm_op op, uint32_t m, uint32_t n, uint32_t k,
                                   const struct prs_gemm_tuning *wanted)
{
    struct prs_fused ctx = {.config = {.world = 4}, .place = {.world = 4, .nodes = nodes, .local_ranks = 4 / nodes}};
    struct prs_gemm_shape shape = product(op, m, n, k, 0);
    struct prs_gemm_info info;
    struct prs_table_found found;
    prs_table_find(&ctx, &shape, &found);
    memset(&info, 0, sizeof(info));
    cr_assert_eq(prs_tuning_choose(&ctx, &shape, wanted, &found, CLUSTERS, &info), 0);
    return info;
}

Test(tuning, every_field_is_decided)
{
    for (enum prs_gemm_op op = PRS_GEMM_ALONE; op <= PRS_GEMM_ALLREDUCE; op++) {
        struct prs_gemm_info info = choose(op, 8192, 8192, 2048, NULL);
        cr_assert_eq(info.tuning.path, PRS_GEMM_PATH_FUSED);
        cr_assert_eq(info.tuning.clusters, CLUSTERS);
        cr_assert(info.tuning.band > 0 && info.tuning.segments > 0);
        cr_assert(info.tuning.paced != 0 && info.tuning.spread > 0);
        cr_assert(info.predicted_us > 0 && info.reason != NULL);
    }
}

Test(tuning, what_the_caller_gives_stays)
{
    struct prs_gemm_tuning wanted = {.clusters = 20, .band = 3, .spread = 40, .paced = PRS_GEMM_UNPACED};
    struct prs_gemm_info info = choose(PRS_GEMM_REDUCE_SCATTER, 8192, 8192, 2048, &wanted);
    cr_assert_eq(info.tuning.clusters, 20);
    cr_assert_eq(info.tuning.band, 3);
    cr_assert_eq(info.tuning.spread, 40);
    cr_assert_eq(info.tuning.paced, PRS_GEMM_UNPACED);
}

Test(tuning, more_clusters_than_fit_are_not_used)
{
    struct prs_gemm_tuning wanted = {.clusters = 100};
    cr_assert_eq(choose(PRS_GEMM_ALONE, 4096, 4096, 4096, &wanted).tuning.clusters, CLUSTERS);
}

/* Values as a damaged file could have them. */
Test(tuning, numbers_out_of_range_are_brought_down)
{
    struct prs_gemm_tuning wanted = {
        .band = UINT32_MAX, .segments = UINT32_MAX, .spread = UINT32_MAX, .tiles_per_signal = UINT32_MAX, .mover = 1};
    struct prs_gemm_tuning t = choose(PRS_GEMM_ALLGATHER, 8192, 2048, 8192, &wanted).tuning;
    struct prs_schedule s;
    prs_schedule_init(&s, PRS_GEMM_ALLGATHER, 0, 4, 1, 8192, 2048 / PRS_TILE_N, 8192 / STEP, t.band);
    s.segments = t.segments;
    s.group = t.tiles_per_signal;
    cr_assert(t.segments <= 8192 / STEP, "%u segments", t.segments);
    cr_assert(t.spread <= 1000, "spread %u", t.spread);
    cr_assert_gt(prs_schedule_segment_steps(&s), 0);
    cr_assert_gt(prs_schedule_band_groups(&s), 0);
}

Test(tuning, a_path_that_does_not_exist_is_refused)
{
    struct prs_fused ctx = {.config = {.world = 4}, .place = {.world = 4, .nodes = 1, .local_ranks = 4}};
    struct prs_gemm_shape shape = product(PRS_GEMM_ALLREDUCE, 4096, 4096, 1024, 0);
    struct prs_gemm_tuning wanted = {.path = PRS_GEMM_PATH_UNFUSED + 1};
    struct prs_gemm_info info;
    cr_assert_eq(prs_tuning_choose(&ctx, &shape, &wanted, NULL, CLUSTERS, &info), -EINVAL);
}

Test(tuning, shapes_that_cannot_run_fused_say_why)
{
    cr_assert_eq(choose(PRS_GEMM_ALONE, 100, 30, 64, NULL).tuning.path, PRS_GEMM_PATH_UNFUSED);
    cr_assert_eq(choose(PRS_GEMM_ALLREDUCE, 1001, 256, 64, NULL).tuning.path, PRS_GEMM_PATH_UNFUSED);
    cr_assert(strstr(choose(PRS_GEMM_ALONE, 128, 256, 63, NULL).reason, "multiple of 16 bytes") != NULL);
}

/* us, of MEASURED_ROWS rows in all; 4 and 2 x H200: doc/results/fused-path-4xH200.json, sums
 * fused-path-inbox-4xH200.json. */
enum { MEASURED = 5 };
static const uint32_t MEASURED_ROWS[MEASURED] = {512, 768, 1024, 1536, 2048};
static const struct measured_ways {
    enum prs_gemm_op op;
    uint32_t world, n, k;
    double fused[MEASURED], unfused[MEASURED];
} measured_ways[] = {
    {PRS_GEMM_ALLGATHER, 2, 1024, 512, {19, 20, 20, 21, 21}, {22, 22, 23, 24, 25}},
    {PRS_GEMM_ALLGATHER, 2, 1280, 8192, {98, 98, 100, 102, 111}, {49, 58, 76, 94, 118}},
    {PRS_GEMM_ALLGATHER, 2, 2048, 2048, {36, 38, 40, 42, 44}, {28, 31, 36, 44, 52}},
    {PRS_GEMM_ALLGATHER, 2, 3584, 4096, {62, 65, 61, 96, 99}, {47, 59, 71, 100, 128}},
    {PRS_GEMM_ALLGATHER, 2, 7168, 8192, {110, 182, 186, 269, 354}, {113, 166, 210, 297, 383}},
    {PRS_GEMM_ALLGATHER, 4, 1024, 512, {20, 21, 21, 22, 23}, {23, 23, 25, 25, 27}},
    {PRS_GEMM_ALLGATHER, 4, 1280, 8192, {106, 116, 118, 127, 136}, {55, 68, 91, 114, 143}},
    {PRS_GEMM_ALLGATHER, 4, 2048, 2048, {38, 40, 42, 48, 52}, {30, 34, 39, 49, 58}},
    {PRS_GEMM_ALLGATHER, 4, 3584, 4096, {66, 74, 82, 129, 137}, {48, 64, 78, 110, 142}},
    {PRS_GEMM_ALLGATHER, 4, 7168, 8192, {227, 234, 253, 381, 364}, {120, 176, 224, 318, 410}},
    {PRS_GEMM_ALLREDUCE, 2, 2048, 256, {28, 31, 33, 39, 44}, {22, 28, 31, 38, 48}},
    {PRS_GEMM_ALLREDUCE, 2, 2048, 2048, {44, 47, 49, 55, 62}, {27, 33, 39, 52, 66}},
    {PRS_GEMM_ALLREDUCE, 2, 4096, 3584, {70, 84, 92, 121, 131}, {48, 64, 82, 116, 156}},
    {PRS_GEMM_ALLREDUCE, 2, 8192, 1024, {52, 78, 84, 98, 121}, {56, 80, 104, 133, 168}},
    {PRS_GEMM_ALLREDUCE, 2, 8192, 7168, {153, 218, 230, 264, 347}, {118, 176, 231, 318, 418}},
    {PRS_GEMM_ALLREDUCE, 4, 2048, 256, {39, 41, 42, 56, 60}, {26, 29, 38, 48, 59}},
    {PRS_GEMM_ALLREDUCE, 4, 2048, 2048, {55, 57, 59, 73, 79}, {31, 36, 44, 62, 76}},
    {PRS_GEMM_ALLREDUCE, 4, 4096, 3584, {85, 93, 103, 142, 151}, {53, 72, 93, 130, 172}},
    {PRS_GEMM_ALLREDUCE, 4, 8192, 1024, {89, 95, 102, 155, 173}, {68, 104, 120, 182, 234}},
    {PRS_GEMM_ALLREDUCE, 4, 8192, 7168, {210, 223, 236, 364, 386}, {134, 188, 252, 372, 483}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 2048, 256, {24, 27, 27, 30, 33}, {18, 22, 24, 29, 34}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 2048, 2048, {41, 44, 46, 50, 55}, {23, 28, 32, 43, 51}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 4096, 3584, {64, 74, 80, 114, 126}, {40, 52, 67, 94, 121}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 8192, 1024, {41, 66, 66, 69, 91}, {41, 54, 69, 97, 123}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 8192, 7168, {141, 212, 225, 252, 327}, {104, 153, 196, 284, 373}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 2048, 256, {31, 31, 31, 41, 42}, {21, 23, 26, 34, 40}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 2048, 2048, {48, 48, 48, 59, 59}, {26, 28, 34, 45, 58}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 4096, 3584, {74, 77, 83, 124, 131}, {42, 60, 73, 104, 130}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 8192, 1024, {68, 68, 68, 106, 107}, {48, 64, 80, 127, 154}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 8192, 7168, {201, 212, 224, 324, 333}, {115, 162, 207, 312, 405}},
};

/* The same of e4m3 with scales of rows, 4 x H100: doc/results/grid-fp8-4xH100.json. */
static const uint32_t SCALED_ROWS[MEASURED] = {128, 256, 512, 1024, 2048};
static const struct measured_ways scaled_ways[] = {
    {PRS_GEMM_ALLGATHER, 4, 2560, 8192, {67, 70, 76, 82, 126}, {36, 38, 44, 75, 125}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 8192, 2048, {80, 80, 81, 82, 131}, {21, 26, 42, 80, 158}},
    {PRS_GEMM_ALLGATHER, 4, 14336, 8192, {223, 225, 252, 279, 534}, {67, 83, 137, 232, 446}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 8192, 7168, {150, 149, 154, 167, 272}, {39, 46, 74, 160, 291}},
    {PRS_GEMM_ALLGATHER, 4, 1536, 4096, {43, 45, 48, 53, 59}, {25, 26, 29, 33, 55}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 4096, 1024, {46, 46, 46, 47, 67}, {14, 16, 21, 35, 68}},
    {PRS_GEMM_ALLGATHER, 4, 7168, 4096, {74, 80, 87, 111, 136}, {29, 32, 44, 79, 135}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 4096, 3584, {63, 63, 63, 64, 105}, {20, 22, 28, 49, 103}},
};

/* The time of the chosen path, relative to that of the best one. */
static double lost(const struct measured_ways *w, int i, const uint32_t *rows, bool scaled)
{
    struct prs_fused ctx = {.config = {.world = w->world},
                            .place = {.world = w->world, .nodes = 1, .local_ranks = w->world}};
    struct prs_gemm_shape shape = product(w->op, rows[i], w->n, w->k, scaled);
    struct prs_gemm_info info;
    if (scaled)
        shape.dtype = PRS_DTYPE_E4M3, shape.scaling = PRS_SCALING_ROWS;
    memset(&info, 0, sizeof(info));
    cr_assert_eq(prs_tuning_choose(&ctx, &shape, NULL, NULL, CLUSTERS, &info), 0);
    return (info.tuning.path == PRS_GEMM_PATH_FUSED ? w->fused[i] : w->unfused[i]) / fmin(w->fused[i], w->unfused[i]);
}

static void check_ways(const struct measured_ways *ways, size_t count, const uint32_t *rows, bool scaled, double most)
{
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        for (int j = 0; j < MEASURED; j++) {
            double more = lost(&ways[i], j, rows, scaled);
            sum += more;
            cr_assert_leq(more, most, "operation %d of %u x %u x %u on %u", (int)ways[i].op, rows[j], ways[i].n,
                          ways[i].k, ways[i].world);
        }
    cr_assert_leq(sum / (double)(count * MEASURED), 1.01, "%.4f of what was best, in the mean",
                  sum / (double)(count * MEASURED));
}

Test(tuning, of_few_rows_the_faster_way_is_taken)
{
    check_ways(measured_ways, sizeof(measured_ways) / sizeof(*measured_ways), MEASURED_ROWS, false, 1.17);
    check_ways(scaled_ways, sizeof(scaled_ways) / sizeof(*scaled_ways), SCALED_ROWS, true, 1.09);
}

/* One H200, us: bf16 by the kernel and by cuBLASLt (doc/results/fused-gemm-shapes-1xH200.json, of the runs the least),
 * e4m3 with three kinds of scales (fp8-paths-1xH200.json). */
static const struct alone {
    enum prs_gemm_op op;
    uint32_t m, n, k, scaling;
    double fused, unfused;
} alone[] = {
    {PRS_GEMM_ALONE, 4096, 1024, 4096, 0, 48.4, 46.6},
    {PRS_GEMM_ALONE, 4096, 4096, 1024, 0, 50.3, 48.6},
    {PRS_GEMM_ALONE, 4096, 4096, 4096, 0, 174.8, 175.1},
    {PRS_GEMM_ALONE, 8192, 2048, 8192, 0, 336.4, 333.1},
    {PRS_GEMM_ALONE, 8192, 8192, 2048, 0, 342.6, 330.9},
    {PRS_GEMM_ALONE, 8192, 3584, 4096, 0, 321.3, 319.3},
    {PRS_GEMM_ALONE, 8192, 8192, 8192, 0, 1460.5, 1468.8},
    {PRS_GEMM_ALONE, 16384, 16384, 4096, 0, 2727.4, 2707.5},
    {PRS_GEMM_ALONE, 1024, 3584, 4096, 0, 49.0, 40.8},
    {PRS_GEMM_ALONE, 2048, 2048, 8192, 0, 90.0, 85.7},
    {PRS_GEMM_ALONE, 4096, 1024, 4096, 0, 50.3, 46.0},
    {PRS_GEMM_ALONE, 4096, 4608, 4096, 0, 212.8, 193.3},
    {PRS_GEMM_ALONE, 8192, 8192, 2048, 0, 341.3, 355.1},
    {PRS_GEMM_ALLGATHER, 8192, 2048, 8192, PRS_SCALING_TENSOR, 224.4, 185.2},
    {PRS_GEMM_ALLGATHER, 8192, 2048, 8192, PRS_SCALING_ROWS, 225.4, 189.9},
    {PRS_GEMM_ALLGATHER, 8192, 2048, 8192, PRS_SCALING_BLOCKS, 238.8, 202.2},
    {PRS_GEMM_ALLGATHER, 2048, 2048, 8192, PRS_SCALING_TENSOR, 57.8, 48.7},
    {PRS_GEMM_ALLGATHER, 2048, 2048, 8192, PRS_SCALING_ROWS, 57.9, 49.2},
    {PRS_GEMM_ALLGATHER, 2048, 2048, 8192, PRS_SCALING_BLOCKS, 67.5, 53.2},
    {PRS_GEMM_REDUCE_SCATTER, 8192, 2048, 8192, PRS_SCALING_ROWS, 217.8, 189.2},
    {PRS_GEMM_REDUCE_SCATTER, 2048, 2048, 8192, PRS_SCALING_BLOCKS, 72.2, 52.9},
    {PRS_GEMM_ALLREDUCE, 8192, 2048, 8192, PRS_SCALING_BLOCKS, 257.6, 202.5},
    {PRS_GEMM_ALLREDUCE, 2048, 2048, 8192, PRS_SCALING_TENSOR, 62.4, 48.7},
};

static struct prs_gemm_info choose_alone(struct prs_gemm_shape shape, const struct prs_gemm_tuning *wanted)
{
    struct prs_fused ctx = {.config = {.world = 1}, .place = {.world = 1, .nodes = 1, .local_ranks = 1}};
    struct prs_gemm_info info = {.reason = NULL};
    cr_assert_eq(prs_tuning_choose(&ctx, &shape, wanted, NULL, CLUSTERS, &info), 0);
    return info;
}

static struct prs_gemm_shape scaled(enum prs_gemm_op op, uint32_t m, uint32_t n, uint32_t k, uint32_t scaling)
{
    struct prs_gemm_shape shape = {op, m, n, k, 1, .dtype = scaling != 0 ? PRS_DTYPE_E4M3 : PRS_DTYPE_BF16};
    shape.scaling = scaling;
    prs_gemm_shape_fill(&shape);
    return shape;
}

Test(tuning, of_one_rank_the_faster_way_is_taken)
{
    double sum = 0;
    for (size_t i = 0; i < sizeof(alone) / sizeof(*alone); i++) {
        const struct alone *x = &alone[i];
        struct prs_gemm_info info = choose_alone(scaled(x->op, x->m, x->n, x->k, x->scaling), NULL);
        double taken = info.tuning.path == PRS_GEMM_PATH_FUSED ? x->fused : x->unfused;
        sum += taken / fmin(x->fused, x->unfused);
        cr_assert_leq(taken, 1.04 * fmin(x->fused, x->unfused), "row %zu", i);
        cr_assert_leq(fabs(info.predicted_us / taken - 1), 0.12, "row %zu: %.1f us", i, info.predicted_us);
    }
    cr_assert_leq(sum / (sizeof(alone) / sizeof(*alone)), 1.01);
}

/* cuBLASLt takes 14.8, 26.4 and 43.2 us (doc/results/unfused-rounding-1xH200.json); a unit of the kernel alone 42. */
Test(tuning, of_one_rank_few_rows_are_cublaslts)
{
    static const uint32_t rows[] = {32, 512, 1024};
    for (int i = 0; i < 3; i++)
        cr_assert_eq(choose_alone(scaled(PRS_GEMM_ALONE, rows[i], 3584, 4096, 0), NULL).tuning.path,
                     PRS_GEMM_PATH_UNFUSED);
}

Test(tuning, of_one_rank_what_is_asked_and_what_only_one_path_can_stay)
{
    struct prs_gemm_tuning fused = {.path = PRS_GEMM_PATH_FUSED}, unfused = {.path = PRS_GEMM_PATH_UNFUSED};
    struct prs_gemm_shape few = scaled(PRS_GEMM_ALLGATHER, 128, 2048, 8192, PRS_SCALING_ROWS), gaps = few, wide = few;
    struct prs_gemm_shape many = scaled(PRS_GEMM_ALONE, 8192, 8192, 8192, 0);
    gaps.lda = 8208;
    wide.c_dtype = PRS_DTYPE_FP32;
    cr_assert_eq(choose_alone(few, &fused).tuning.path, PRS_GEMM_PATH_FUSED);
    cr_assert_eq(choose_alone(many, NULL).tuning.path, PRS_GEMM_PATH_FUSED);
    cr_assert_eq(choose_alone(many, &unfused).tuning.path, PRS_GEMM_PATH_UNFUSED);
    cr_assert_eq(choose_alone(gaps, NULL).tuning.path, PRS_GEMM_PATH_FUSED);
    cr_assert_eq(choose_alone(wide, NULL).tuning.path, PRS_GEMM_PATH_UNFUSED);
}

/* Both products of gradients are measured in doc/results/grid-4xH200.json. */
Test(tuning, the_fused_kernel_is_taken_from_4096_rows_on_but_for_few_columns)
{
    for (enum prs_gemm_op op = PRS_GEMM_REDUCE_SCATTER; op <= PRS_GEMM_ALLREDUCE; op++)
        for (uint32_t n = 2048; n <= 16384; n += 256)
            cr_assert_eq(choose(op, 4096, n, 4096, NULL).tuning.path, PRS_GEMM_PATH_FUSED, "%u columns", n);
    cr_assert_eq(choose(PRS_GEMM_REDUCE_SCATTER, 4096, 512, 8192, NULL).tuning.path, PRS_GEMM_PATH_UNFUSED);
    cr_assert_eq(choose(PRS_GEMM_REDUCE_SCATTER, 8192, 512, 8192, NULL).tuning.path, PRS_GEMM_PATH_UNFUSED);
    cr_assert_eq(choose(PRS_GEMM_REDUCE_SCATTER, 4096, 1536, 6144, NULL).tuning.path, PRS_GEMM_PATH_UNFUSED);
    cr_assert_eq(choose(PRS_GEMM_REDUCE_SCATTER, 8192, 1536, 6144, NULL).tuning.path, PRS_GEMM_PATH_FUSED);
}

static uint32_t hops(uint32_t world, uint32_t nodes_, enum prs_gemm_op op, uint32_t m, uint32_t n)
{
    struct prs_place at = {.world = world, .nodes = nodes_, .local_ranks = world / nodes_};
    struct prs_gemm_shape shape = product(op, m, n, 1024, 1);
    if (prs_tuning_inbox_rows(&shape, &at) < m)
        return 0;
    return prs_tuning_one_hop_rows(&shape, &at) < m ? 2 : 1;
}

/* A second hop saves bytes only with more than two ranks; inboxes have a limit. */
Test(tuning, few_rows_are_summed_in_one_hop_and_more_in_two)
{
    cr_assert_eq(hops(2, 1, PRS_GEMM_ALLREDUCE, 1024, 8192), 1);
    cr_assert_eq(hops(2, 1, PRS_GEMM_ALLREDUCE, 1025, 8192), 0, "16 MB of sums");
    cr_assert_eq(hops(4, 1, PRS_GEMM_ALLREDUCE, 8, 8192), 1);
    cr_assert_eq(hops(4, 1, PRS_GEMM_ALLREDUCE, 32, 8192), 2, "4 x H200: 15.6 us, and 17.6 in one hop");
    cr_assert_eq(hops(8, 1, PRS_GEMM_ALLREDUCE, 4, 8192), 1);
    cr_assert_eq(hops(8, 1, PRS_GEMM_ALLREDUCE, 8, 8192), 2);
    cr_assert_eq(hops(8, 1, PRS_GEMM_REDUCE_SCATTER, 1024, 8192), 1, "each rank needs a part only");
    cr_assert_eq(hops(8, 1, PRS_GEMM_ALLGATHER, 8, 8192), 0);
    cr_assert_eq(hops(4, 2, PRS_GEMM_ALLREDUCE, 8, 8192), 0, "between nodes");
    cr_assert_eq(hops(1, 1, PRS_GEMM_ALLREDUCE, 8, 8192), 0, "alone");
}

Test(tuning, a_demanded_fused_path_is_refused_when_it_cannot_run)
{
    struct prs_fused ctx = {.config = {.world = 4}, .place = {.world = 4, .nodes = 1, .local_ranks = 4}};
    struct prs_gemm_shape shape = product(PRS_GEMM_ALONE, 128, 256, 63, 0),
                          odd = product(PRS_GEMM_ALLREDUCE, 1024, 1028, 64, 0);
    struct prs_gemm_tuning wanted = {.path = PRS_GEMM_PATH_FUSED};
    struct prs_gemm_info info;
    cr_assert_eq(prs_tuning_choose(&ctx, &shape, &wanted, NULL, CLUSTERS, &info), -EINVAL);
    ctx.place.nodes = 2, ctx.place.local_ranks = 2;
    cr_assert_eq(prs_tuning_choose(&ctx, &odd, &wanted, NULL, CLUSTERS, &info), -EINVAL);
}

Test(tuning, the_last_line_of_the_file_that_fits_wins)
{
    char path[] = "/tmp/perseus-tuning-XXXXXX";
    int fd = mkstemp(path);
    struct prs_gemm_shape shape = product(PRS_GEMM_ALLREDUCE, 4096, 4096, 1024, 0),
                          other = product(PRS_GEMM_ALLREDUCE, 4096, 4096, 1032, 0);
    struct prs_gemm_tuning first = {.band = 1}, second = {.band = 2, .spread = 33}, third = {.band = 4};
    struct prs_gemm_info info;
    struct prs_fused here = {.place = {.world = 4, .nodes = 1, .local_ranks = 4}};
    cr_assert(fd >= 0);
    close(fd);
    setenv("PERSEUS_FUSED_TUNING", path, 1);
    cr_assert_eq(prs_table_append(&here, &shape, &first, 1, 0), 0);
    cr_assert_eq(prs_table_append(&here, &shape, &second, 1, 0), 0);
    cr_assert_eq(prs_table_append(&here, &other, &third, 1, 0), 0);
    here.place.world = 2;
    cr_assert_eq(prs_table_append(&here, &shape, &third, 1, 0), 0, "another world");
    here.place.world = 4, here.place.nodes = 2;
    cr_assert_eq(prs_table_append(&here, &shape, &third, 1, 0), 0, "other nodes");
    here.place.nodes = 1, here.sms = 100;
    cr_assert_eq(prs_table_append(&here, &shape, &third, 1, 0), 0, "fewer SMs");
    here.sms = 0, strcpy(here.gpu, "NVIDIA H800");
    cr_assert_eq(prs_table_append(&here, &shape, &third, 1, 0), 0, "another GPU");
    info = choose(PRS_GEMM_ALLREDUCE, 4096, 4096, 1024, NULL);
    cr_assert_eq(info.tuning.band, 2);
    cr_assert_eq(info.tuning.spread, 33);
    unlink(path);
}

/* ---- gaps ---- */

Test(tuning, gaps_add_up_to_the_share_of_the_compute_time)
{
    struct prs_gemm_shape shape = product(PRS_GEMM_ALLGATHER, 16384, 4096, 16384, 0);
    struct prs_gemm_tuning t = {.clusters = CLUSTERS, .spread = 50, .paced = PRS_GEMM_UNPACED};
    struct prs_schedule s;
    uint32_t push, store, half;
    prs_schedule_init(&s, PRS_GEMM_ALLGATHER, 0, 4, 1, 16384, 4096 / PRS_TILE_N, 16384 / STEP, 2);
    prs_tuning_gaps(&shape, &t, &s, &push, &store);
    half = push;
    t.spread = 100;
    prs_tuning_gaps(&shape, &t, &s, &push, &store);
    cr_assert(push > 2 * half - 3 && push < 2 * half + 3, "%u and %u", half, push);
    t.spread = 1;
    prs_tuning_gaps(&shape, &t, &s, &push, &store);
    cr_assert_eq(push, 0);
}

Test(tuning, between_nodes_what_cannot_run_fused_says_why_and_the_rest_is_fused)
{
    struct prs_gemm_tuning wanted = {.mover = 1, .path = PRS_GEMM_PATH_UNFUSED};
    struct prs_gemm_info info;
    nodes = 2;
    info = choose(PRS_GEMM_ALLREDUCE, 1024, 1028, 64, NULL);
    cr_assert_eq(info.tuning.path, PRS_GEMM_PATH_UNFUSED);
    cr_assert(strstr(info.reason, "multiple of 16 bytes") != NULL, "%s", info.reason);
    cr_assert_gt(info.predicted_us, choose(PRS_GEMM_ALLREDUCE, 1024, 1024, 64, NULL).predicted_us, "nothing overlaps");
    info = choose(PRS_GEMM_ALLREDUCE, 1026, 1024, 64, NULL);
    cr_assert_eq(info.tuning.path, PRS_GEMM_PATH_UNFUSED);
    cr_assert(strstr(info.reason, "do not divide m") != NULL, "%s", info.reason);
    cr_assert_eq(choose(PRS_GEMM_ALLREDUCE, 1024, 1024, 64, &wanted).tuning.path, PRS_GEMM_PATH_UNFUSED, "as demanded");
    info = choose(PRS_GEMM_ALLREDUCE, 256, 256, 64, NULL); /* 64 rows per rank */
    cr_assert_eq(info.tuning.path, PRS_GEMM_PATH_UNFUSED);
    cr_assert(strstr(info.reason, "256 rows") != NULL, "%s", info.reason);
    cr_assert_eq(choose(PRS_GEMM_ALLGATHER, 256, 256, 64, NULL).tuning.path, PRS_GEMM_PATH_FUSED,
                 "faster all the same");
    wanted.path = PRS_GEMM_PATH_AUTO;
    cr_assert_eq(choose(PRS_GEMM_ALLGATHER, 8192, 2048, 8192, &wanted).tuning.mover, PRS_MOVED_BY_CTAS);
}

Test(tuning, copy_engines_move_the_blocks_where_they_can)
{
    struct prs_fused ctx = {
        .config = {.world = 4}, .place = {.world = 4, .nodes = 1, .local_ranks = 4}, .shared_device = true};
    struct prs_gemm_shape shape = product(PRS_GEMM_ALLGATHER, 8192, 2048, 8192, 0);
    struct prs_gemm_tuning unknown = {.mover = PRS_MOVED_BY_CTAS + 1}, demanded = {.mover = PRS_MOVED_BY_COPY_ENGINES};
    struct prs_table_found found = {.source = PRS_TABLE_FILE};
    struct prs_gemm_info info = choose(PRS_GEMM_ALLGATHER, 8192, 2048, 8192, NULL);
    cr_assert_eq(info.tuning.mover, PRS_MOVED_BY_COPY_ENGINES);
    cr_assert_eq(choose(PRS_GEMM_ALLREDUCE, 8192, 8192, 2048, NULL).tuning.mover, 0);
    memset(&info, 0, sizeof(info));
    cr_assert_eq(prs_tuning_choose(&ctx, &shape, NULL, NULL, CLUSTERS, &info), 0);
    cr_assert_eq(info.tuning.mover, PRS_MOVED_BY_CTAS, "a GPU's copies to itself need an SM");
    cr_assert_eq(prs_tuning_choose(&ctx, &shape, &unknown, NULL, CLUSTERS, &info), -EINVAL);
    cr_assert_eq(prs_tuning_choose(&ctx, &shape, &demanded, NULL, CLUSTERS, &info), -EINVAL);
    cr_assert_not_null(strstr(prs_error_last(), "ranks share a GPU"), "%s", prs_error_last());
    found.tuning[0] = demanded;
    cr_assert_eq(prs_tuning_choose(&ctx, &shape, NULL, &found, CLUSTERS, &info), 0, "a file knows no GPUs");
    cr_assert_eq(info.tuning.mover, PRS_MOVED_BY_CTAS);
}

/* 4 x 16 units of a band of 1 are less than two for each of 66 clusters, 4 x 32 are not. */
Test(tuning, a_round_of_sums_has_work_for_all_clusters)
{
    cr_assert_eq(choose(PRS_GEMM_REDUCE_SCATTER, 8192, 4096, 1024, NULL).tuning.band, 2);
    cr_assert_eq(choose(PRS_GEMM_REDUCE_SCATTER, 8192, 8192, 2048, NULL).tuning.band, 1);
}

struct gather {
    uint32_t gpus, m, n, k, mover, band, segments; /* 0: any */
    double least_us, most_us;                      /* limits of the predicted time, around the measured one */
};

/* doc/results/allgather-turns-4xH200.json, allgather-choice-2xH200.json, allgather-pieces-2xH200.json. */
Test(tuning, an_allgathers_blocks_go_as_was_measured_fastest)
{
    static const struct gather rows[] = {
        {4, 4096, 1024, 4096, PRS_MOVED_BY_CTAS, 4, 1, 102, 113}, /* 128 us at best by copy engines */
        {4, 8192, 2048, 8192, PRS_MOVED_BY_COPY_ENGINES, 8, 2, 360, 371},
        {4, 16384, 4096, 16384, PRS_MOVED_BY_COPY_ENGINES, 16, 1, 2870, 2970},
        {2, 512, 512, 512, PRS_MOVED_BY_CTAS, 0, 1, 20, 30},
        {2, 1024, 1024, 1024, PRS_MOVED_BY_CTAS, 0, 1, 26, 37},
        {2, 2048, 2048, 4096, PRS_MOVED_BY_COPY_ENGINES, 4, 4, 65, 74},
        {2, 4096, 2048, 4096, PRS_MOVED_BY_COPY_ENGINES, 8, 2, 99, 107},
        {2, 6144, 768, 4096, PRS_MOVED_BY_COPY_ENGINES, 12, 0, 107, 120},
        {2, 8192, 1024, 8192, PRS_MOVED_BY_COPY_ENGINES, 16, 0, 237, 250},
        {2, 8192, 4096, 8192, PRS_MOVED_BY_COPY_ENGINES, 16, 1, 700, 710},
        {2, 12288, 1280, 8192, PRS_MOVED_BY_COPY_ENGINES, 0, 0, 349, 370},
        {2, 24576, 2816, 16384, PRS_MOVED_BY_COPY_ENGINES, 0, 1, 2861, 2960},
        {2, 16384, 8192, 16384, PRS_MOVED_BY_COPY_ENGINES, 0, 1, 5961, 6400},
    };
    static const struct prs_gemm_tuning fused = {.path = PRS_GEMM_PATH_FUSED, .columns = PRS_TILE_N};
    for (uint32_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const struct gather *r = &rows[i];
        struct prs_fused ctx = {.config = {.world = r->gpus},
                                .place = {.world = r->gpus, .nodes = 1, .local_ranks = r->gpus}};
        struct prs_gemm_shape shape = product(PRS_GEMM_ALLGATHER, r->m, r->n, r->k, 0);
        struct prs_gemm_info info = {.predicted_us = 0};
        const struct prs_gemm_tuning *t = &info.tuning;
        cr_assert_eq(prs_tuning_choose(&ctx, &shape, &fused, NULL, CLUSTERS, &info), 0);
        cr_assert_eq(t->mover, r->mover, "row %u: %u", i, t->mover);
        cr_assert((r->band == 0 || t->band == r->band) && (r->segments == 0 || t->segments == r->segments),
                  "row %u: %u:%u", i, t->band, t->segments);
        cr_assert(info.predicted_us >= r->least_us && info.predicted_us <= r->most_us, "row %u: %.1f us", i,
                  info.predicted_us);
    }
}

/* Measured on 4 x H200, with wide and with narrow tiles: 91 and 81 us; 149 and 127; 192 and 175; 115 and 127. */
Test(tuning, tiles_are_narrow_where_that_keeps_more_clusters_busy)
{
    static const struct {
        struct prs_gemm_shape shape;
        uint32_t nodes, columns;
    } rows[] = {
        {{PRS_GEMM_ALLGATHER, 2048, 1536, 4096, 1}, 1, 192},
        {{PRS_GEMM_ALLGATHER, 4096, 1536, 4096, 1}, 1, 192},
        {{PRS_GEMM_ALLGATHER, 2048, 2560, 8192, 1}, 1, 192},
        {{PRS_GEMM_ALLGATHER, 1024, 7168, 4096, 1}, 1, 256},
        {{PRS_GEMM_ALLGATHER, 2048, 1536, 4096, 1}, 2, 256},
        {{PRS_GEMM_REDUCE_SCATTER, 2048, 1536, 4096, 1}, 1, 256},
        {{PRS_GEMM_ALLGATHER, 2048, 1536, 4096, 1, .gated = 1}, 1, 256},
    };
    struct prs_gemm_tuning fused = {.path = PRS_GEMM_PATH_FUSED};
    for (uint32_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct prs_fused ctx = {.config = {.world = 4}, .place = {.world = 4, .nodes = rows[i].nodes}};
        struct prs_gemm_shape shape = rows[i].shape;
        struct prs_gemm_info info = {.predicted_us = 0};
        bool can = rows[i].columns == 192 || i == 3;
        ctx.place.local_ranks = 4 / rows[i].nodes;
        prs_gemm_shape_fill(&shape);
        fused.columns = 0;
        cr_assert_eq(prs_tuning_choose(&ctx, &shape, &fused, NULL, CLUSTERS, &info), 0);
        cr_assert_eq(info.tuning.columns, rows[i].columns, "row %u: %u", i, info.tuning.columns);
        fused.columns = 192;
        cr_assert_eq(prs_tuning_choose(&ctx, &shape, &fused, NULL, CLUSTERS, &info), can ? 0 : -EINVAL, "row %u", i);
        fused.columns = 128;
        cr_assert_eq(prs_tuning_choose(&ctx, &shape, &fused, NULL, CLUSTERS, &info), -EINVAL);
    }
}

Test(tuning, what_the_caller_says_of_copies_stays)
{
    struct prs_gemm_tuning band = {.band = 3, .mover = PRS_MOVED_BY_COPY_ENGINES}, engines = {.mover = 1},
                           pieces = {.band = 1, .segments = 5, .mover = PRS_MOVED_BY_COPY_ENGINES};
    struct prs_gemm_info info = choose(PRS_GEMM_ALLGATHER, 8192, 2048, 8192, &band);
    cr_assert_eq(info.tuning.band, 3);
    cr_assert_float_eq(info.predicted_us, 412, 12, "%.1f", info.predicted_us);
    info = choose(PRS_GEMM_ALLGATHER, 4096, 1024, 4096, &engines);
    cr_assert_eq(info.tuning.mover, PRS_MOVED_BY_COPY_ENGINES, "though CTAs are faster");
    cr_assert_float_eq(info.predicted_us, 143, 10, "%.1f", info.predicted_us);
    info = choose(PRS_GEMM_ALLGATHER, 8192, 2048, 8192, &pieces);
    cr_assert(info.tuning.band == 1 && info.tuning.segments == 5, "%u:%u", info.tuning.band, info.tuning.segments);
    engines.segments = 4;
    cr_assert_eq(choose(PRS_GEMM_ALLGATHER, 8192, 2048, 64, &engines).tuning.segments, 1, "as many as there are steps");
}

/* Each block crosses once: 2 nodes of 2, so a quarter of the matrix goes from each rank to the other node. */
Test(tuning, what_crosses_between_nodes_is_the_least_that_must)
{
    uint64_t quarter = 8192ull * 8192 * 2 / 4;
    nodes = 2;
    cr_assert_eq(choose(PRS_GEMM_REDUCE_SCATTER, 8192, 8192, 2048, NULL).far_bytes, quarter);
    cr_assert_eq(choose(PRS_GEMM_ALLREDUCE, 8192, 8192, 2048, NULL).far_bytes, 2 * quarter);
    cr_assert_eq(choose(PRS_GEMM_ALLGATHER, 8192, 2048, 8192, NULL).far_bytes, quarter);
    nodes = 1;
    cr_assert_eq(choose(PRS_GEMM_ALLREDUCE, 8192, 8192, 2048, NULL).far_bytes, 0);
}
