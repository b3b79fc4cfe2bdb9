/* SPDX-License-Identifier: Apache-2.0 */
/* Which path and which tuning a launch takes, by its rows. test/hopper/test_measured.c launches both. */
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fused/gemm/paths.h"
#include "fused/gemm/table.h"
#include "fused/gemm/tuning.h"
#include "transport/util/error.h"

enum { CLUSTERS = 66, WORLD = 4 };

static const struct prs_place PLACE = {.world = WORLD, .nodes = 1, .local_ranks = WORLD};

static const char *shipped =
    "v7 NVIDIA_H200 132 2 2048 2560 8192 1 4 1 : 1 66 1 1 2 2 85 16 180 0 190\n"
    "v7 NVIDIA_H200 132 2 1024 2560 8192 1 4 1 : 2 66 1 1 2 2 85 16 100 0 120\n"
    "v6 NVIDIA_H200 132 2 512 2560 8192 1 4 1 : 2 66 1 1 2 2 85 16 60 0\n"
    "v5 NVIDIA_H200 132 2 256 2560 8192 1 4 1 : 1 66 1 1 2 2 85 16 40\n"
    "v5 NVIDIA_H200 132 2 128 2560 8192 1 4 1 : 0 66 1 1 2 2 85 16 40\n"
    "v7 NVIDIA_H200 132 2 64 2560 8192 1 4 1 : 2 66 1 1 2 2 85 16 100 0 90\n" /* a slower tuning is not used */
    "v8 NVIDIA_H200 132 2 8192 1536 4096 1 4 1 : 1 66 8 1 2 2 85 16 200 0 300 256\n"
    "v8 NVIDIA_H200 132 2 4096 1536 4096 1 4 1 : 1 66 2 2 1 1 85 16 130 0 150 256\n"
    "v8 NVIDIA_H200 132 2 2048 1536 4096 1 4 1 : 1 66 1 2 1 1 1 16 70 0 80 192\n"
    "v8 NVIDIA_H200 132 2 1024 1536 4096 1 4 1 : 1 66 1 2 1 1 1 16 45 0 50 192\n"
    "v8 NVIDIA_H200 132 2 512 1536 4096 1 4 1 : 2 66 1 2 1 1 1 16 30 0 50 256\n"
    "v8 NVIDIA_H200 132 1 1024 8192 8192 1 4 1 : 2 66 1 0 1 1 1 16 200 0 250 256\n"
    "v8 NVIDIA_H200 132 1 512 8192 8192 1 4 1 : 2 66 1 0 1 1 1 16 150 0 200 256\n"
    "v8 NVIDIA_H200 132 1 256 8192 8192 1 4 1 : 1 66 1 0 1 1 40 16 90 0 100 256";

const char *prs_table_shipped(void)
{
    return shipped;
}

static struct prs_gemm_shape product(enum prs_gemm_op op, uint32_t m, uint32_t n, uint32_t k)
{
    struct prs_gemm_shape shape = {op, m, n, k, 1};
    prs_gemm_shape_fill(&shape);
    return shape;
}

Test(paths, a_plan_knows_both_paths_for_its_rows_and_for_fewer)
{
    static const float wanted[PRS_TABLE_CLASSES] = {
        190.0f / 180, 100.0f / 120, PRS_RATIO_UNFUSED, PRS_RATIO_FUSED, 0, 1};
    struct prs_fused ctx = {.config = {.world = WORLD}, .place = PLACE, .sms = 132, .gpu = "NVIDIA H200"};
    struct prs_gemm_shape shape = product(PRS_GEMM_ALLGATHER, 2048, 2560, 8192);
    struct prs_table_found found;
    prs_table_find(&ctx, &shape, &found);
    cr_assert_float_eq(found.us[0], 180, 1e-3);
    cr_assert_float_eq(found.us[1], 100, 1e-3);
    cr_assert(found.tuning[1].path == PRS_GEMM_PATH_UNFUSED && found.tuning[3].path == PRS_GEMM_PATH_FUSED);
    for (uint32_t i = 0; i < PRS_TABLE_CLASSES; i++)
        cr_assert_float_eq(found.ratio[i] / (wanted[i] > 0 ? wanted[i] : 1), wanted[i] > 0, 1e-5, "%u: %g", i,
                           found.ratio[i]);
}

/* Fused and unfused, us: for the most rows of a plan, for half of them, and for those of a launch; where the paths of a
 * launch differ by less than a sixth. 2 and 4 x H200: doc/results/grid-2xH200.json, grid-4xH200.json; the powers of two
 * from fused/gemm/table.txt. */
struct ways {
    enum prs_gemm_op op;
    uint32_t world, most, rows, n, k;
    double of_most[2], of_half[2], of_rows[2];
};
static const struct ways measured[] = {
    {PRS_GEMM_ALLGATHER, 2, 1024, 1000, 3072, 4096, {51, 55}, {47, 33}, {52, 55}},
    {PRS_GEMM_ALLGATHER, 2, 1024, 1000, 5120, 8192, {144, 145}, {84, 81}, {146, 143}},
    {PRS_GEMM_ALLGATHER, 2, 1024, 1000, 5120, 5120, {95, 94}, {62, 57}, {99, 94}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 1024, 1000, 8192, 4096, {123, 128}, {89, 68}, {125, 126}},
    {PRS_GEMM_ALLGATHER, 2, 1024, 1000, 12288, 1536, {62, 71}, {45, 41}, {61, 70}},
    {PRS_GEMM_ALLGATHER, 2, 1024, 1000, 14336, 4096, {186, 181}, {106, 110}, {203, 175}},
    {PRS_GEMM_ALLGATHER, 2, 1024, 1000, 18432, 7168, {420, 397}, {211, 211}, {410, 370}},
    {PRS_GEMM_ALLGATHER, 2, 2048, 1544, 3072, 4096, {80, 100}, {51, 55}, {83, 76}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 2048, 1544, 8192, 4096, {202, 247}, {123, 128}, {196, 189}},
    {PRS_GEMM_ALLGATHER, 2, 2048, 1544, 12288, 1536, {113, 127}, {62, 71}, {113, 97}},
    {PRS_GEMM_ALLGATHER, 2, 2048, 1544, 16384, 512, {59, 71}, {34, 42}, {63, 57}},
    {PRS_GEMM_ALLGATHER, 2, 4096, 3000, 3072, 4096, {146, 196}, {80, 100}, {135, 142}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 4096, 3000, 4096, 2048, {113, 160}, {78, 82}, {105, 122}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 4096, 3000, 4096, 7168, {330, 372}, {183, 189}, {247, 277}},
    {PRS_GEMM_ALLGATHER, 2, 4096, 3000, 5120, 8192, {456, 550}, {264, 275}, {350, 405}},
    {PRS_GEMM_ALLGATHER, 2, 4096, 3000, 5120, 5120, {289, 349}, {170, 178}, {226, 264}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 4096, 3000, 5120, 12800, {719, 774}, {406, 380}, {614, 557}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 4096, 3000, 7168, 8192, {655, 728}, {363, 361}, {524, 547}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 4096, 3000, 7168, 9216, {734, 803}, {407, 402}, {587, 605}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 4096, 3000, 8192, 14336, {1294, 1409}, {639, 679}, {927, 983}},
    {PRS_GEMM_ALLGATHER, 2, 4096, 3000, 12288, 1536, {213, 238}, {113, 127}, {160, 182}},
    {PRS_GEMM_ALLGATHER, 2, 4096, 3000, 14336, 4096, {633, 686}, {322, 349}, {483, 489}},
    {PRS_GEMM_ALLGATHER, 2, 4096, 3000, 18432, 7168, {1510, 1620}, {715, 752}, {1064, 1089}},
    {PRS_GEMM_ALLGATHER, 2, 4096, 3000, 25600, 5120, {1524, 1617}, {726, 758}, {1040, 1090}},
    {PRS_GEMM_ALLGATHER, 2, 4096, 3000, 28672, 8192, {2779, 2920}, {1300, 1350}, {1869, 1966}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 8192, 6000, 4096, 7168, {667, 763}, {330, 372}, {482, 540}},
    {PRS_GEMM_ALLGATHER, 2, 8192, 6000, 5120, 8192, {1003, 1122}, {456, 550}, {704, 799}},
    {PRS_GEMM_ALLGATHER, 2, 8192, 6000, 5120, 5120, {582, 704}, {289, 349}, {441, 505}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 8192, 6000, 5120, 12800, {1567, 1686}, {719, 774}, {1098, 1115}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 8192, 6000, 7168, 8192, {1313, 1487}, {655, 728}, {976, 1027}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 8192, 6000, 7168, 9216, {1587, 1776}, {734, 803}, {1094, 1134}},
    {PRS_GEMM_REDUCE_SCATTER, 2, 8192, 6000, 8192, 14336, {2862, 3192}, {1294, 1409}, {1926, 2074}},
    {PRS_GEMM_ALLGATHER, 2, 8192, 6000, 12288, 1536, {416, 463}, {213, 238}, {307, 343}},
    {PRS_GEMM_ALLGATHER, 2, 8192, 6000, 14336, 4096, {1339, 1369}, {633, 686}, {926, 974}},
    {PRS_GEMM_ALLGATHER, 2, 8192, 6000, 16384, 512, {208, 242}, {109, 128}, {155, 178}},
    {PRS_GEMM_ALLGATHER, 2, 8192, 6000, 18432, 7168, {3063, 3385}, {1510, 1620}, {2125, 2237}},
    {PRS_GEMM_ALLGATHER, 2, 8192, 6000, 25600, 5120, {3114, 3459}, {1524, 1617}, {2078, 2210}},
    {PRS_GEMM_ALLGATHER, 2, 8192, 6000, 28672, 8192, {5459, 5759}, {2779, 2920}, {3869, 4124}},
    {PRS_GEMM_ALLGATHER, 4, 1024, 1000, 2560, 8192, {111, 103}, {104, 58}, {111, 100}},
    {PRS_GEMM_ALLGATHER, 4, 1024, 1000, 2560, 5120, {75, 70}, {68, 41}, {75, 67}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 1024, 1000, 7168, 4096, {122, 130}, {131, 65}, {121, 122}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 1024, 1000, 7168, 4608, {132, 143}, {142, 70}, {132, 133}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 1024, 1000, 8192, 2048, {85, 93}, {85, 50}, {84, 91}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 1024, 1000, 8192, 7168, {193, 206}, {210, 108}, {192, 200}},
    {PRS_GEMM_ALLGATHER, 4, 1024, 1000, 9216, 7168, {219, 230}, {248, 121}, {211, 214}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 2048, 1544, 4096, 1024, {64, 71}, {46, 39}, {64, 56}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 2048, 1544, 5120, 2048, {97, 122}, {83, 61}, {96, 88}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 2048, 1544, 7168, 4096, {196, 247}, {122, 130}, {192, 194}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 2048, 1544, 7168, 4608, {215, 266}, {132, 143}, {212, 206}},
    {PRS_GEMM_REDUCE_SCATTER, 4, 2048, 1544, 8192, 7168, {336, 410}, {193, 206}, {328, 317}},
    {PRS_GEMM_ALLGATHER, 4, 2048, 1544, 8192, 512, {35, 45}, {26, 26}, {38, 42}},
    {PRS_GEMM_ALLGATHER, 4, 4096, 3000, 1536, 4096, {128, 149}, {75, 77}, {113, 111}},
    {PRS_GEMM_ALLGATHER, 4, 4096, 3000, 6144, 1536, {120, 146}, {70, 81}, {102, 113}},
    {PRS_GEMM_ALLGATHER, 4, 4096, 3000, 7168, 4096, {333, 401}, {193, 206}, {278, 311}},
    {PRS_GEMM_ALLGATHER, 4, 4096, 3000, 9216, 7168, {731, 845}, {391, 422}, {556, 614}},
    {PRS_GEMM_ALLGATHER, 4, 4096, 3000, 12800, 5120, {747, 817}, {400, 411}, {564, 586}},
    {PRS_GEMM_ALLGATHER, 4, 4096, 3000, 14336, 8192, {1337, 1448}, {666, 715}, {1029, 1039}},
    {PRS_GEMM_ALLGATHER, 4, 8192, 6000, 7168, 4096, {681, 821}, {333, 401}, {505, 570}},
    {PRS_GEMM_ALLGATHER, 4, 8192, 6000, 9216, 7168, {1555, 1824}, {731, 845}, {1092, 1236}},
    {PRS_GEMM_ALLGATHER, 4, 8192, 6000, 12800, 5120, {1537, 1711}, {747, 817}, {1096, 1168}},
    {PRS_GEMM_ALLGATHER, 4, 8192, 6000, 14336, 8192, {2765, 3088}, {1337, 1448}, {1913, 2054}},
    {PRS_GEMM_ALLGATHER, 4, 16384, 11000, 9216, 7168, {3098, 3771}, {1555, 1824}, {1976, 2272}},
    {PRS_GEMM_ALLGATHER, 4, 16384, 11000, 12800, 5120, {3130, 3622}, {1537, 1711}, {1980, 2177}},
    {PRS_GEMM_ALLGATHER, 4, 16384, 11000, 14336, 8192, {5764, 6372}, {2765, 3088}, {3662, 4006}},
};

static struct prs_table_found found_of(const struct ways *w, bool half)
{
    struct prs_table_found found = {.source = PRS_TABLE_SHIPPED};
    for (uint32_t i = 0; i <= half; i++) {
        const double *us = i == 0 ? w->of_most : w->of_half;
        found.us[i] = (float)fmin(us[0], us[1]);
        found.tuning[i].path = us[0] < us[1] ? PRS_GEMM_PATH_FUSED : PRS_GEMM_PATH_UNFUSED;
        found.ratio[i] = (float)(us[1] / us[0]);
    }
    return found;
}

/* What the chosen paths take, over the best ones, in the mean; *cells: more than 2 % over them. */
static double lost(bool half, uint32_t *cells, double most)
{
    enum { COUNT = sizeof(measured) / sizeof(*measured) };
    double sum = 0;
    *cells = 0;
    for (size_t i = 0; i < COUNT; i++) {
        const struct ways *w = &measured[i];
        struct prs_place place = {.world = w->world, .nodes = 1, .local_ranks = w->world};
        struct prs_gemm_shape shape = product(w->op, w->most, w->n, w->k);
        struct prs_table_found found = found_of(w, half);
        struct prs_path_times times[PRS_TABLE_CLASSES];
        double one;
        prs_tuning_path_times(&shape, &place, CLUSTERS, &found, times);
        one = w->of_rows[prs_tuning_unfused_is_faster(&shape, w->rows, &place, CLUSTERS, times)] /
              fmin(w->of_rows[0], w->of_rows[1]);
        cr_assert_leq(one, most, "operation %d of %u x %u x %u on %u", (int)w->op, w->rows, w->n, w->k, w->world);
        *cells += one > 1.02;
        sum += one;
    }
    return sum / COUNT;
}

Test(paths, a_launch_takes_the_faster_path_of_its_rows)
{
    uint32_t cells;
    double mean = lost(true, &cells, 1.11);
    cr_assert_leq(mean, 1.0025, "%.4f of what was best, in the mean", mean);
    cr_assert_leq(cells, 2, "%u", cells);
}

Test(paths, without_the_next_class_the_model_says_how_times_depend_on_rows)
{
    uint32_t cells;
    double mean = lost(false, &cells, 1.16);
    cr_assert_leq(mean, 1.006, "%.4f of what was best, in the mean", mean);
    cr_assert_leq(cells, 4, "%u", cells);
}

enum { LINE = 160 };

/* Writes the line of a table that holds these measured times. */
static void write_line(char line[LINE], const struct ways *w, uint32_t rows, const double us[2])
{
    (void)snprintf(line, LINE, "v7 of_these_times %u %d %u %u %u 1 %u 1 : %d %u 1 0 1 2 85 16 %g 0 %g\n", 2 * CLUSTERS,
                   (int)w->op, rows, w->n, w->k, w->world, us[0] < us[1] ? PRS_GEMM_PATH_FUSED : PRS_GEMM_PATH_UNFUSED,
                   CLUSTERS, fmin(us[0], us[1]), fmax(us[0], us[1]));
}

/* For a number of rows that no entry has. */
Test(paths, a_plan_for_other_rows_than_an_entry_takes_the_faster_path_of_its_own)
{
    enum { COUNT = sizeof(measured) / sizeof(*measured) };
    double sum = 0;
    for (size_t i = 0; i < COUNT; i++) {
        const struct ways *w = &measured[i];
        struct prs_fused ctx = {.place = {.world = w->world, .nodes = 1, .local_ranks = w->world},
                                .sms = 2 * CLUSTERS,
                                .gpu = "of these times"};
        struct prs_gemm_shape shape = product(w->op, w->rows, w->n, w->k);
        struct prs_table_found found;
        char lines[2 * LINE];
        double one;
        write_line(lines, w, w->most, w->of_most);
        write_line(lines + strlen(lines), w, w->most / 2, w->of_half);
        shipped = lines;
        prs_table_find(&ctx, &shape, &found);
        cr_assert_eq(found.source, PRS_TABLE_SHIPPED);
        one = w->of_rows[found.tuning[0].path == PRS_GEMM_PATH_UNFUSED] / fmin(w->of_rows[0], w->of_rows[1]);
        cr_assert_leq(one, 1.15, "operation %d of %u x %u x %u on %u", (int)w->op, w->rows, w->n, w->k, w->world);
        sum += one;
    }
    cr_assert_leq(sum / COUNT, 1.01, "%.4f of what was best, in the mean", sum / COUNT);
}

/* For half as many rows, and for fewer than the last class has. */
Test(paths, a_class_of_rows_has_its_own_ratio)
{
    struct prs_gemm_shape shape = product(PRS_GEMM_ALLGATHER, 16384, 2560, 8192);
    struct prs_table_found found = {
        .ratio = {PRS_RATIO_FUSED, PRS_RATIO_UNFUSED, PRS_RATIO_FUSED, 0, 0, PRS_RATIO_FUSED}};
    static const struct {
        uint32_t rows;
        bool unfused;
    } cases[] = {{16384, false}, {8196, false}, {8192, true}, {4100, true}, {4096, false},
                 {4, false},     {512, false},  {516, true},  {2048, true}};
    struct prs_path_times times[PRS_TABLE_CLASSES];
    prs_tuning_path_times(&shape, &PLACE, CLUSTERS, &found, times);
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
        cr_assert_eq(prs_tuning_unfused_is_faster(&shape, cases[i].rows, &PLACE, CLUSTERS, times), cases[i].unfused,
                     "%u rows", cases[i].rows);
}

/* ---- plans of a plan ---- */

/* In place of prs_gemm_plan_open_as(), which needs other ranks: makes the same decisions, counts plans, and refuses
 * more than `most_opened`. */
static uint32_t opened, most_opened;

int prs_gemm_plan_open_as(struct prs_fused *ctx, const struct prs_gemm_shape *shape,
                          const struct prs_gemm_tuning *tuning, const struct prs_table_found *measured_before,
                          struct prs_gemm_plan **out)
{
    struct prs_gemm_plan *p = aligned_alloc(_Alignof(struct prs_gemm_plan), sizeof(*p));
    struct prs_table_found found = {.source = PRS_TABLE_NONE};
    if (opened == most_opened) {
        free(p);
        return -ENOMEM;
    }
    memset(p, 0, sizeof(*p));
    p->base.ctx = ctx;
    p->shape = *shape;
    p->args.schedule.place = ctx->place;
    if (measured_before)
        found = *measured_before;
    else if (!tuning)
        prs_table_find(ctx, shape, &found);
    memcpy(p->base.call.hint.first, &found, sizeof(found));
    cr_assert_eq(prs_tuning_choose(ctx, shape, tuning, &found, CLUSTERS, &p->info), 0, "%s", prs_error_last());
    opened++;
    *out = p;
    return 0;
}

static void close_all(struct prs_gemm_plan *p)
{
    while (p) {
        struct prs_gemm_plan *next = p->next;
        free(p);
        p = next;
    }
}

static struct prs_gemm_plan *open_all(struct prs_fused *ctx, struct prs_gemm_shape shape, uint32_t most)
{
    struct prs_gemm_plan *p = NULL;
    opened = 0, most_opened = most;
    cr_assert_eq(prs_gemm_plan_open_as(ctx, &shape, NULL, NULL, &p), 0);
    cr_assert_eq(prs_paths_open(p), 0);
    return p;
}

/* What a launch takes; band 0: the unfused path. */
struct taken {
    uint32_t rows, band, mover, columns, most;
};

static void assert_takes(struct prs_gemm_plan *p, const struct taken *cases, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct prs_gemm_operands x = {.m = cases[i].rows};
        const struct prs_gemm_plan *q = prs_paths_plan(p, &x);
        const struct prs_gemm_tuning *t = &q->info.tuning;
        uint32_t rows = cases[i].rows != 0 ? cases[i].rows : p->shape.m;
        cr_assert_leq(rows, q->shape.m, "%u rows", rows);
        cr_assert_eq(t->path, cases[i].band != 0 ? PRS_GEMM_PATH_FUSED : PRS_GEMM_PATH_UNFUSED, "%u rows", rows);
        cr_assert_eq(prs_gemm_plan_path(p, cases[i].rows), (int)t->path);
        if (cases[i].band != 0)
            cr_assert(t->band == cases[i].band && t->mover == cases[i].mover && t->columns == cases[i].columns &&
                          q->shape.m == cases[i].most,
                      "%u rows: band %u, mover %u, %u columns, of a plan for %u rows", rows, t->band, t->mover,
                      t->columns, q->shape.m);
    }
}

/* Classes of 8192, 4096, 2048 and 1024 rows: the last two have the same tuning. Half way between two classes, by their
 * ratio, are 5792 and 2896 rows. */
Test(paths, a_launch_takes_the_tuning_of_its_rows_class)
{
    static const struct taken cases[] = {{0, 8, 1, 256, 8192},    {8192, 8, 1, 256, 8192}, {5796, 8, 1, 256, 8192},
                                         {5792, 2, 2, 256, 5792}, {4096, 2, 2, 256, 5792}, {2900, 2, 2, 256, 5792},
                                         {2896, 1, 2, 192, 2896}, {2048, 1, 2, 192, 2896}, {1024, 1, 2, 192, 2896},
                                         {512, 0, 0, 0, 0},       {16, 0, 0, 0, 0}};
    struct prs_fused ctx = {.config = {.world = WORLD}, .place = PLACE, .sms = 132, .gpu = "NVIDIA H200"};
    struct prs_gemm_plan *p = open_all(&ctx, product(PRS_GEMM_ALLGATHER, 8192, 1536, 4096), 99);
    struct prs_gemm_operands on_device = {.m_on_device = &opened};
    cr_assert_eq(opened, 4, "%u plans", opened);
    assert_takes(p, cases, sizeof(cases) / sizeof(*cases));
    cr_assert_eq(prs_paths_plan(p, &on_device), p, "the most rows decide");
    close_all(p);
}

Test(paths, classes_of_rows_that_do_not_come_have_no_plan)
{
    static const struct taken cases[] = {{8192, 8, 1, 256, 8192}, {5792, 2, 2, 256, 5792}, {4097, 2, 2, 256, 5792}};
    struct prs_fused ctx = {.config = {.world = WORLD}, .place = PLACE, .sms = 132, .gpu = "NVIDIA H200"};
    struct prs_gemm_shape shape = product(PRS_GEMM_ALLGATHER, 8192, 1536, 4096);
    struct prs_gemm_plan *p;
    shape.fewest_m = 4097;
    p = open_all(&ctx, shape, 99);
    cr_assert_eq(opened, 2, "%u plans", opened);
    assert_takes(p, cases, sizeof(cases) / sizeof(*cases));
    close_all(p);
}

/* Rows with gaps have no unfused path. A band that is a whole block of 1024 rows is one of two pairs for 1448. */
Test(paths, a_product_that_only_one_path_can_run_has_the_tunings_of_its_classes)
{
    static const struct taken cases[] = {
        {8192, 8, 1, 256, 8192}, {4096, 2, 2, 256, 5792}, {2048, 1, 2, 192, 2896}, {512, 2, 2, 192, 1448}};
    struct prs_fused ctx = {.config = {.world = WORLD}, .place = PLACE, .sms = 132, .gpu = "NVIDIA H200"};
    struct prs_gemm_shape shape = product(PRS_GEMM_ALLGATHER, 8192, 1536, 4096);
    struct prs_gemm_plan *p;
    shape.lda = 4104;
    p = open_all(&ctx, shape, 99);
    cr_assert_eq(opened, 4, "%u plans", opened);
    assert_takes(p, cases, sizeof(cases) / sizeof(*cases));
    close_all(p);
}

/* Of 512 and 1024 rows the unfused path is faster, of 256 the fused one. */
Test(paths, a_plan_of_the_unfused_path_has_fused_tunings_of_fewer_rows)
{
    static const struct taken cases[] = {{1024, 0, 0, 0, 0}, {768, 0, 0, 0, 0}, {256, 1, 0, 256, 256}};
    struct prs_fused ctx = {.config = {.world = WORLD}, .place = PLACE, .sms = 132, .gpu = "NVIDIA H200"};
    struct prs_gemm_plan *p = open_all(&ctx, product(PRS_GEMM_REDUCE_SCATTER, 1024, 8192, 8192), 99);
    assert_takes(p, cases, sizeof(cases) / sizeof(*cases));
    close_all(p);
}

Test(paths, without_memory_for_other_plans_the_first_serves_all_rows)
{
    struct prs_fused ctx = {.config = {.world = WORLD}, .place = PLACE, .sms = 132, .gpu = "NVIDIA H200"};
    for (uint32_t most = 1; most <= 3; most++) {
        struct prs_gemm_plan *p = open_all(&ctx, product(PRS_GEMM_ALLGATHER, 8192, 1536, 4096), most);
        for (uint32_t rows = 4; rows <= 8192; rows += 4) {
            struct prs_gemm_operands x = {.m = rows};
            const struct prs_gemm_plan *q = prs_paths_plan(p, &x);
            cr_assert_leq(rows, q->shape.m);
            cr_assert(most > 1 || q == p);
        }
        close_all(p);
    }
}

/* By the model. cuBLASLt is faster for few rows, and only the fused path reads rows from the device. */
Test(paths, of_one_rank_a_plan_has_both_and_rows_on_the_device_take_the_fused_one)
{
    struct prs_fused ctx = {.config = {.world = 1}, .place = {.world = 1, .nodes = 1, .local_ranks = 1}};
    struct prs_gemm_operands on_device = {.m_on_device = &opened}, few = {.m = 512}, half = {.m = 256};
    struct prs_gemm_plan *p = open_all(&ctx, product(PRS_GEMM_ALLGATHER, 8192, 4096, 4096), 99);
    cr_assert_eq(p->info.tuning.path, PRS_GEMM_PATH_FUSED);
    cr_assert_eq(prs_paths_plan(p, &few)->info.tuning.path, PRS_GEMM_PATH_UNFUSED);
    cr_assert_eq(prs_paths_plan(p, &on_device), p);
    close_all(p);
    p = open_all(&ctx, product(PRS_GEMM_ALLREDUCE, 512, 4096, 4096), 99);
    cr_assert_eq(opened, 2);
    cr_assert_eq(p->info.tuning.path, PRS_GEMM_PATH_UNFUSED);
    cr_assert_eq(prs_paths_plan(p, &half), p);
    cr_assert_eq(prs_paths_plan(p, &on_device), p->next);
    cr_assert(p->next->info.tuning.path == PRS_GEMM_PATH_FUSED && p->next->shape.m == 512);
    close_all(p);
    p = open_all(&ctx, product(PRS_GEMM_ALLREDUCE, 512, 4096, 4096), 1); /* no room for another plan */
    cr_assert_eq(prs_paths_plan(p, &on_device), p, "which says that it cannot");
    close_all(p);
}
