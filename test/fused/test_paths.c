/* SPDX-License-Identifier: Apache-2.0 */
/* Which path a launch takes, by its rows. test/hopper/test_measured.c launches both. */
#include <criterion/criterion.h>
#include <math.h>

#include "fused/gemm/plan.h"
#include "fused/gemm/table.h"
#include "fused/gemm/tuning.h"

enum { CLUSTERS = 66, WORLD = 4 };

static const struct prs_place PLACE = {.world = WORLD, .nodes = 1, .local_ranks = WORLD};

const char *prs_table_shipped(void)
{
    return "v7 NVIDIA_H200 132 2 2048 2560 8192 1 4 1 : 1 66 1 1 2 2 85 16 180 0 190\n"
           "v7 NVIDIA_H200 132 2 1024 2560 8192 1 4 1 : 2 66 1 1 2 2 85 16 100 0 120\n"
           "v6 NVIDIA_H200 132 2 512 2560 8192 1 4 1 : 2 66 1 1 2 2 85 16 60 0\n"
           "v5 NVIDIA_H200 132 2 256 2560 8192 1 4 1 : 1 66 1 1 2 2 85 16 40\n"
           "v5 NVIDIA_H200 132 2 128 2560 8192 1 4 1 : 0 66 1 1 2 2 85 16 40\n"
           "v7 NVIDIA_H200 132 2 64 2560 8192 1 4 1 : 2 66 1 1 2 2 85 16 100 0 90"; /* a slower one is no other way */
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
    cr_assert_float_eq(found.us, 180, 1e-3);
    for (uint32_t i = 0; i < PRS_TABLE_CLASSES; i++)
        cr_assert_float_eq(found.ratio[i] / (wanted[i] > 0 ? wanted[i] : 1), wanted[i] > 0, 1e-5, "%u: %g", i,
                           found.ratio[i]);
}

/* Fused and unfused, us: for the most rows, and for those of a launch. 4 x H200, doc/results/grid-4xH200.json. */
struct ways {
    enum prs_gemm_op op;
    uint32_t most, rows, n, k;
    double of_most[2], of_rows[2];
};
static const struct ways measured[] = {
    {PRS_GEMM_REDUCE_SCATTER, 1024, 1000, 7168, 4608, {131, 142}, {132, 142}},
    {PRS_GEMM_ALLGATHER, 1024, 1000, 9216, 7168, {245, 228}, {246, 226}},
    {PRS_GEMM_ALLGATHER, 1024, 1000, 8192, 512, {27, 27}, {26, 27}},
    {PRS_GEMM_REDUCE_SCATTER, 1024, 1000, 7168, 4096, {121, 130}, {122, 130}},
    {PRS_GEMM_ALLGATHER, 1024, 1000, 6144, 1536, {61, 43}, {60, 44}},
    {PRS_GEMM_REDUCE_SCATTER, 1024, 1000, 8192, 7168, {192, 205}, {192, 203}},
    {PRS_GEMM_ALLGATHER, 1024, 1000, 14336, 8192, {453, 356}, {455, 355}},
    {PRS_GEMM_REDUCE_SCATTER, 1024, 1000, 8192, 2048, {84, 92}, {84, 91}},
    {PRS_GEMM_ALLGATHER, 1024, 1000, 2560, 8192, {126, 103}, {126, 102}},
    {PRS_GEMM_REDUCE_SCATTER, 1024, 1000, 4096, 3584, {81, 65}, {81, 65}},
    {PRS_GEMM_ALLGATHER, 1024, 1000, 7168, 4096, {112, 118}, {112, 117}},
    {PRS_GEMM_REDUCE_SCATTER, 1024, 1000, 4096, 1024, {46, 39}, {46, 39}},
    {PRS_GEMM_ALLGATHER, 1024, 1000, 1536, 4096, {70, 46}, {70, 46}},
    {PRS_GEMM_REDUCE_SCATTER, 1024, 1000, 5120, 6400, {181, 118}, {173, 118}},
    {PRS_GEMM_ALLGATHER, 1024, 1000, 12800, 5120, {278, 222}, {278, 221}},
    {PRS_GEMM_REDUCE_SCATTER, 1024, 1000, 5120, 2048, {83, 61}, {83, 61}},
    {PRS_GEMM_ALLGATHER, 1024, 1000, 2560, 5120, {84, 71}, {84, 70}},
    {PRS_GEMM_REDUCE_SCATTER, 2048, 1544, 7168, 4608, {214, 264}, {213, 227}},
    {PRS_GEMM_ALLGATHER, 2048, 1544, 9216, 7168, {406, 420}, {402, 357}},
    {PRS_GEMM_ALLGATHER, 2048, 1544, 8192, 512, {38, 45}, {36, 43}},
    {PRS_GEMM_REDUCE_SCATTER, 2048, 1544, 7168, 4096, {194, 246}, {193, 209}},
    {PRS_GEMM_ALLGATHER, 2048, 1544, 6144, 1536, {75, 82}, {70, 65}},
    {PRS_GEMM_REDUCE_SCATTER, 2048, 1544, 8192, 7168, {332, 406}, {328, 341}},
    {PRS_GEMM_ALLGATHER, 2048, 1544, 14336, 8192, {656, 702}, {650, 596}},
    {PRS_GEMM_REDUCE_SCATTER, 2048, 1544, 8192, 2048, {127, 194}, {127, 165}},
    {PRS_GEMM_ALLGATHER, 2048, 1544, 2560, 8192, {182, 193}, {178, 152}},
    {PRS_GEMM_REDUCE_SCATTER, 2048, 1544, 4096, 3584, {114, 124}, {113, 119}},
    {PRS_GEMM_ALLGATHER, 2048, 1544, 7168, 4096, {195, 204}, {190, 177}},
    {PRS_GEMM_REDUCE_SCATTER, 2048, 1544, 4096, 1024, {64, 71}, {64, 64}},
    {PRS_GEMM_ALLGATHER, 2048, 1544, 1536, 4096, {84, 80}, {80, 65}},
    {PRS_GEMM_REDUCE_SCATTER, 2048, 1544, 5120, 6400, {216, 244}, {215, 184}},
    {PRS_GEMM_ALLGATHER, 2048, 1544, 12800, 5120, {404, 407}, {394, 333}},
    {PRS_GEMM_REDUCE_SCATTER, 2048, 1544, 5120, 2048, {97, 123}, {96, 90}},
    {PRS_GEMM_ALLGATHER, 2048, 1544, 2560, 5120, {120, 124}, {117, 99}},
};

Test(paths, a_launch_takes_the_faster_path_of_its_rows)
{
    enum { COUNT = sizeof(measured) / sizeof(*measured) };
    double sum = 0;
    for (size_t i = 0; i < COUNT; i++) {
        const struct ways *w = &measured[i];
        struct prs_gemm_shape shape = product(w->op, w->most, w->n, w->k);
        float ratio[PRS_TABLE_CLASSES] = {(float)(w->of_most[1] / w->of_most[0])}, more[PRS_TABLE_CLASSES];
        double lost;
        prs_tuning_correct(&shape, &PLACE, CLUSTERS, ratio, more);
        lost = w->of_rows[prs_tuning_unfused_is_faster(&shape, w->rows, &PLACE, CLUSTERS, more)] /
               fmin(w->of_rows[0], w->of_rows[1]);
        cr_assert_leq(lost, 1.07, "operation %d of %u x %u x %u", (int)w->op, w->rows, w->n, w->k);
        sum += lost;
    }
    cr_assert_leq(sum / COUNT, 1.006, "%.4f of what was best, in the mean", sum / COUNT);
}

/* Of half as many rows, and of fewer than the last class has rows. */
Test(paths, a_class_of_rows_has_its_own_ratio)
{
    struct prs_gemm_shape shape = product(PRS_GEMM_ALLGATHER, 16384, 2560, 8192);
    float ratio[PRS_TABLE_CLASSES] = {PRS_RATIO_FUSED, PRS_RATIO_UNFUSED, PRS_RATIO_FUSED, 0, 0, PRS_RATIO_FUSED};
    static const struct {
        uint32_t rows;
        bool unfused;
    } cases[] = {{16384, false}, {8196, false}, {8192, true}, {4100, true}, {4096, false},
                 {4, false},     {512, false},  {516, true},  {2048, true}};
    float more[PRS_TABLE_CLASSES];
    prs_tuning_correct(&shape, &PLACE, CLUSTERS, ratio, more);
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
        cr_assert_eq(prs_tuning_unfused_is_faster(&shape, cases[i].rows, &PLACE, CLUSTERS, more), cases[i].unfused,
                     "%u rows", cases[i].rows);
}
