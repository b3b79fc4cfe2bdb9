/* SPDX-License-Identifier: Apache-2.0 */
/* The library's table of tunings, and the user's file, which has precedence. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fused/gemm/plan.h"
#include "fused/gemm/table.h"
#include "fused/gemm/tuning.h"
#include "test/fused/product.h"
#include "transport/util/log.h"

/* Replaces the library's table: results of a sweep on 4 x H200. */
const char *prs_table_shipped(void)
{
    return "# operation m n k\n"
           "v5 NVIDIA_H200 132 2 2048 14336 8192 1 4 1 : 1 66 2 1 1 2 85 16 657\n"
           "v5 NVIDIA_H200 132 2 1024 14336 8192 1 4 1 : 1 66 1 1 2 2 85 16 390\n"
           "v5 NVIDIA_H200 132 2 1024 7168 4096 1 4 1 : 1 66 1 1 2 2 85 16 110\n"
           "v5 NVIDIA_H200 132 1 1024 8192 7168 1 4 1 : 1 66 1 0 1 2 1 16 196\n"
           "v5 NVIDIA_H200 132 1 2048 4096 3584 1 4 1 : 1 66 2 0 1 2 1 16 116\n"
           "v5 NVIDIA_H200 132 1 512 4096 3584 1 4 1 : 2 66 0 0 1 2 85 16 40\n"
           "v6 NVIDIA_H200 132 1 512 4096 3584 1 4 1 : 2 66 0 0 1 2 85 16 30 2\n"
           "v6 NVIDIA_H200 132 1 4096 8192 2048 1 4 1 : 1 66 0 0 1 2 85 16 150 2\n"
           "v6 NVIDIA_H200 132 1 4096 8192 2048 1 4 1 : 1 66 0 0 1 2 85 16 160 3\n"
           "v6 NVIDIA_H200 132 1 4096 8192 4096 1 4 1 : 1 66 0 0 1 2 85 16 300\n"
           "v8 NVIDIA_H200 132 1 4096 8192 4096 1 4 1 : 1 66 0 0 1 2 85 16 300 0\n"
           "v7 NVIDIA_H200 132 0 1024 4096 4096 1 1 1 : 1 66 1 0 1 1 1 16 50 0 60";
}

static struct prs_fused four_h200(void)
{
    return (struct prs_fused){
        .config = {.world = 4}, .place = {.world = 4, .nodes = 1, .local_ranks = 4}, .sms = 132, .gpu = "NVIDIA H200"};
}

static struct prs_table_found find(const struct prs_fused *ctx, struct prs_gemm_shape shape)
{
    struct prs_table_found found;
    prs_gemm_shape_fill(&shape);
    prs_table_find(ctx, &shape, &found);
    return found;
}

Test(table, a_shape_takes_the_entry_of_the_nearest_one)
{
    static const struct {
        struct prs_gemm_shape shape;
        double us; /* time of the entry that is taken, 390 with two segments; 0: no entry is taken */
    } cases[] = {{{PRS_GEMM_ALLGATHER, 2048, 14336, 8192, 1}, 657},
                 {{PRS_GEMM_ALLGATHER, 1024, 14336, 8192, 1}, 390},
                 {{PRS_GEMM_ALLGATHER, 1536, 14336, 8192, 1}, 657}, /* distance 0.42 from 2048 rows, 0.58 from 1024 */
                 {{PRS_GEMM_ALLGATHER, 1424, 14336, 8192, 1}, 390}, /* distance 0.48 from 1024 rows, 0.52 from 2048 */
                 {{PRS_GEMM_ALLGATHER, 2048, 14336, 8192, 0}, 657}, /* 1/4 */
                 {{PRS_GEMM_ALLGATHER, 2500, 14336, 8192, 0}, 0},   /* 1/4 + 0.29 */
                 {{PRS_GEMM_ALLGATHER, 2500, 14336, 8192, 1}, 657},
                 {{PRS_GEMM_ALLGATHER, 2500, 14336, 10240, 1}, 0}, /* 0.29 + 0.32 */
                 {{PRS_GEMM_ALLGATHER, 4096, 14336, 8192, 1}, 0},
                 {{PRS_GEMM_ALLGATHER, 1024, 10240, 8192, 1}, 390},
                 {{PRS_GEMM_REDUCE_SCATTER, 1024, 8192, 7168, 1}, 196},
                 {{PRS_GEMM_ALLREDUCE, 1024, 8192, 7168, 1}, 0}};
    struct prs_fused ctx = four_h200();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct prs_gemm_shape *s = &cases[i].shape;
        struct prs_table_found found = find(&ctx, *s);
        bool exact = (s->m == 2048 || s->m == 1024) && s->n == 14336 && s->b_transposed;
        cr_assert_eq(found.source, cases[i].us > 0 ? PRS_TABLE_SHIPPED : PRS_TABLE_NONE, "case %zu", i);
        if (cases[i].us == 657 || cases[i].us == 390)
            cr_assert_eq(found.tuning[0].segments, cases[i].us == 657 ? 1 : 2, "case %zu", i);
        if (exact && cases[i].us > 0)
            cr_assert_float_eq(found.us[0], cases[i].us, 0.01, "case %zu: %f us", i, found.us[0]);
    }
}

/* An entry with another scaling has distance 1/4 more. Entries of 16-bit types do not serve e4m3, nor the reverse. */
Test(table, e4m3_has_entries_of_its_own)
{
    static const struct {
        uint32_t m, n, k, scaling;
        float us;
    } cases[] = {{512, 4096, 3584, PRS_SCALING_NONE, 40},     {512, 4096, 3584, PRS_SCALING_ROWS, 30},
                 {512, 4096, 3584, PRS_SCALING_TENSOR, 30},   {640, 4096, 3584, PRS_SCALING_BLOCKS, 0},
                 {4096, 8192, 2048, PRS_SCALING_BLOCKS, 160}, {4096, 8192, 2048, PRS_SCALING_TENSOR, 160},
                 {4096, 8192, 2048, PRS_SCALING_NONE, 0},     {4096, 8192, 4096, PRS_SCALING_ROWS, 0}};
    struct prs_fused ctx = four_h200();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct prs_gemm_shape shape = product(PRS_GEMM_REDUCE_SCATTER, cases[i].m, cases[i].n, cases[i].k, 1);
        shape.scaling = cases[i].scaling;
        cr_assert_float_eq(find(&ctx, shape).us[0], cases[i].us, 0.01, "case %zu: %g us", i, find(&ctx, shape).us[0]);
    }
}

Test(table, other_ranks_or_other_numbers_of_sms_are_not_near)
{
    struct prs_gemm_shape shape = product(PRS_GEMM_ALLGATHER, 2048, 14336, 8192, 1);
    struct prs_fused ctx = four_h200();
    cr_assert_eq(find(&ctx, shape).source, PRS_TABLE_SHIPPED);
    ctx.sms = 131;
    cr_assert_eq(find(&ctx, shape).source, PRS_TABLE_NONE);
    ctx = four_h200(), ctx.place.world = 2;
    cr_assert_eq(find(&ctx, shape).source, PRS_TABLE_NONE);
    ctx = four_h200(), ctx.place.nodes = 2;
    cr_assert_eq(find(&ctx, shape).source, PRS_TABLE_NONE);
}

/* An H100 has the SMs and links of an H200: its own entries are nearer, and where it has none, those of H200 serve. */
Test(table, another_gpu_with_as_many_sms_is_a_little_further)
{
    struct prs_gemm_shape shape = product(PRS_GEMM_ALLGATHER, 1024, 14336, 8192, 1);
    struct prs_fused ctx = four_h200();
    char path[] = "/tmp/perseus-tuning-XXXXXX";
    int fd = mkstemp(path);
    strcpy(ctx.gpu, "NVIDIA H100 80GB HBM3");
    cr_assert_float_eq(find(&ctx, shape).us[0], 390, 0.01);
    shape.m = 1220; /* 0.25 further */
    cr_assert_eq(find(&ctx, shape).source, PRS_TABLE_NONE);
    cr_assert_gt(dprintf(fd, "v5 NVIDIA_H100_80GB_HBM3 132 2 1200 14336 8192 1 4 1 : 2 66 1 1 2 2 85 16 444\n"), 0);
    (void)close(fd);
    setenv("PERSEUS_FUSED_TUNING", path, 1);
    shape.m = 1024;
    cr_assert_eq(find(&ctx, shape).tuning[0].path, PRS_GEMM_PATH_UNFUSED);
    cr_assert_lt(find(&ctx, shape).us[0], 444);
    unsetenv("PERSEUS_FUSED_TUNING");
    (void)unlink(path);
}

/* With PRS_GEMM_ALONE both paths take longer by the same factor. */
Test(table, a_product_alone_keeps_the_path_of_its_entry)
{
    struct prs_fused ctx = four_h200();
    struct prs_table_found found = find(&ctx, product(PRS_GEMM_ALONE, 1400, 4096, 4096, 1));
    cr_assert_eq(found.tuning[0].path, PRS_GEMM_PATH_FUSED);
    cr_assert_float_eq(found.us[0], 50 * 1400 / 1024.0, 0.01);
    cr_assert_float_eq(found.ratio[0], 1.2, 1e-5);
}

Test(table, the_file_wins_over_the_library_where_both_are_as_near)
{
    char path[] = "/tmp/perseus-tuning-XXXXXX";
    int fd = mkstemp(path);
    struct prs_fused ctx = four_h200();
    struct prs_gemm_shape shape = product(PRS_GEMM_ALLGATHER, 2048, 14336, 8192, 1), near = shape;
    struct prs_gemm_tuning mine = {.path = PRS_GEMM_PATH_FUSED, .band = 1, .mover = PRS_MOVED_BY_CTAS};
    cr_assert(fd >= 0);
    close(fd);
    setenv("PERSEUS_FUSED_TUNING", path, 1);
    near.m = 2304;
    cr_assert_eq(prs_table_append(&ctx, &near, &mine, 700, 0), 0);
    cr_assert_eq(find(&ctx, shape).source, PRS_TABLE_SHIPPED, "the file's is further");
    cr_assert_eq(find(&ctx, near).source, PRS_TABLE_FILE);
    cr_assert_eq(prs_table_append(&ctx, &shape, &mine, 650, 0), 0);
    cr_assert_eq(find(&ctx, shape).source, PRS_TABLE_FILE);
    cr_assert_float_eq(find(&ctx, shape).us[0], 650, 0.1);
    cr_assert_eq(find(&ctx, shape).tuning[0].mover, PRS_MOVED_BY_CTAS);
    unlink(path);
}

static void keep(void *user, int level, const char *file, int line, const char *text)
{
    (void)level, (void)file, (void)line;
    (void)snprintf(user, 256, "%s", text);
}

/* A device without an end, a pipe that nobody writes to, a folder, and a file that takes long. */
Test(table, what_cannot_be_read_to_its_end_is_named_and_not_read, .timeout = 20)
{
    char folder[] = "perseus-tuning-XXXXXX", pipe[64], large[64], said[256];
    const char *const paths[] = {"/dev/zero", pipe, folder, large};
    struct prs_gemm_shape shape = product(PRS_GEMM_ALLGATHER, 4096, 14336, 8192, 1);
    struct prs_gemm_tuning mine = {.path = PRS_GEMM_PATH_FUSED};
    struct prs_fused ctx = four_h200();
    cr_assert_not_null(mkdtemp(folder));
    (void)snprintf(pipe, sizeof(pipe), "%s/pipe", folder);
    (void)snprintf(large, sizeof(large), "%s/large", folder);
    cr_assert_eq(mkfifo(pipe, 0600), 0);
    setenv("PERSEUS_FUSED_TUNING", large, 1);
    cr_assert_eq(prs_table_append(&ctx, &shape, &mine, 650, 0), 0);
    cr_assert_eq(find(&ctx, shape).source, PRS_TABLE_FILE);
    cr_assert_eq(truncate(large, 1l << 40), 0);
    prs_log_sink(keep, said);
    for (size_t i = 0; i < sizeof(paths) / sizeof(*paths); i++) {
        said[0] = 0;
        setenv("PERSEUS_FUSED_TUNING", paths[i], 1);
        cr_expect_eq(find(&ctx, shape).source, PRS_TABLE_NONE, "%s", paths[i]);
        cr_expect(strstr(said, "PERSEUS_FUSED_TUNING") && strstr(said, paths[i]), "%s: '%s'", paths[i], said);
    }
    setenv("PERSEUS_FUSED_TUNING", pipe, 1);
    cr_expect_eq(prs_table_append(&ctx, &shape, &mine, 650, 0), -ENXIO, "nobody reads it");
    prs_log_sink(NULL, NULL);
    (void)unlink(pipe);
    (void)unlink(large);
    (void)rmdir(folder);
}

Test(table, narrow_tiles_are_kept_and_older_entries_had_wide_ones)
{
    char path[] = "/tmp/perseus-tuning-XXXXXX";
    int fd = mkstemp(path);
    struct prs_fused ctx = four_h200();
    struct prs_gemm_shape shape = product(PRS_GEMM_ALLGATHER, 2048, 14336, 8192, 1), gated = shape;
    struct prs_gemm_tuning mine = {.path = PRS_GEMM_PATH_FUSED, .columns = PRS_NARROW_N};
    struct prs_gemm_info info = {.predicted_us = 0};
    struct prs_table_found found = find(&ctx, shape);
    cr_assert_eq(found.tuning[0].columns, PRS_TILE_N);
    cr_assert(fd >= 0);
    close(fd);
    setenv("PERSEUS_FUSED_TUNING", path, 1);
    cr_assert_eq(prs_table_append(&ctx, &shape, &mine, 650, 0), 0);
    found = find(&ctx, shape);
    cr_assert_eq(found.tuning[0].columns, PRS_NARROW_N);
    gated.gated = 1;
    cr_assert_eq(prs_tuning_choose(&ctx, &gated, NULL, &found, CLUSTERS, &info), 0);
    cr_assert_eq(info.tuning.columns, PRS_TILE_N, "no kernel of gated products has narrow tiles");
    unlink(path);
}

/* Entries with 1 and 2 pairs per rank. */
Test(table, a_band_that_is_a_whole_block_stays_one)
{
    struct prs_fused ctx = four_h200();
    cr_assert_eq(find(&ctx, product(PRS_GEMM_ALLGATHER, 2800, 14336, 8192, 1)).tuning[0].band, 3);
    cr_assert_eq(find(&ctx, product(PRS_GEMM_ALLGATHER, 1400, 14336, 8192, 1)).tuning[0].band, 2);
}

Test(table, a_plan_takes_what_was_measured_and_predicts_it)
{
    struct prs_fused ctx = four_h200();
    struct prs_gemm_shape shape = product(PRS_GEMM_REDUCE_SCATTER, 512, 4096, 3584, 1);
    struct prs_table_found found = find(&ctx, shape);
    struct prs_gemm_info info;
    memset(&info, 0, sizeof(info));
    cr_assert_eq(prs_tuning_choose(&ctx, &shape, NULL, &found, CLUSTERS, &info), 0);
    cr_assert_eq(info.tuning.path, PRS_GEMM_PATH_UNFUSED);
    cr_assert_float_eq(info.predicted_us, 40, 0.01);
    cr_assert_str_eq(info.reason, "table of the library");
    shape.ldc = 4104; /* with gaps: only fused */
    cr_assert_eq(prs_tuning_choose(&ctx, &shape, NULL, &found, CLUSTERS, &info), 0);
    cr_assert_eq(info.tuning.path, PRS_GEMM_PATH_FUSED);
    shape = product(PRS_GEMM_ALLGATHER, 2048, 14337, 8192, 1); /* only unfused */
    found = find(&ctx, shape);
    cr_assert_eq(found.tuning[0].path, PRS_GEMM_PATH_FUSED);
    cr_assert_eq(prs_tuning_choose(&ctx, &shape, NULL, &found, CLUSTERS, &info), 0);
    cr_assert_eq(info.tuning.path, PRS_GEMM_PATH_UNFUSED);
}
