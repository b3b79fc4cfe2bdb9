/* SPDX-License-Identifier: Apache-2.0 */
/* Plans that are measured when they open, where no table has an entry. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fused/gemm/paths.h"
#include "test/hopper/ranks.h"
#include "tools/hopper/hopper.h"

struct measured {
    uint32_t scaling; /* enum prs_scaling, with e4m3 */
    struct prs_gemm_info info[2], again[2];
    atomic_uint met[2]; /* how many all-gathers each has begun */
};

struct counted_self {
    struct ranks_self *self;
    atomic_uint *met;
};

static int counted_allgather(void *user, const void *mine, void *all, size_t bytes)
{
    struct counted_self *c = user;
    atomic_fetch_add(c->met, 1);
    return ranks_allgather(c->self, mine, all, bytes);
}

/* Opens a plan of a shape that no table has, twice, and launches it. */
static void open_measured(uint32_t rank, struct ranks_self *self, void *user)
{
    struct measured *found = user;
    struct prs_gemm_shape shape = {PRS_GEMM_REDUCE_SCATTER, 1024, 256, 64, 1};
    struct counted_self counted = {self, &found->met[rank]};
    struct prs_fused_config config = {rank, 2, (int)rank, 300, counted_allgather, &counted};
    struct prs_fused *ctx = NULL;
    struct prs_gemm_plan *plan = NULL, *again = NULL;
    struct prs_gemm_operands x = {0};
    if (found->scaling != PRS_SCALING_NONE)
        shape.dtype = PRS_DTYPE_E4M3, shape.scaling = found->scaling, shape.m = 64, shape.k = 128;
    (void)cudaSetDevice((int)rank);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    x.a = ranks_upload(1, 1024 * 64), x.b = ranks_upload(2, 256 * 64);
    if (found->scaling != PRS_SCALING_NONE)
        x.scale_a = x.a, x.scale_b = x.b;
    cr_assert_eq(cudaMalloc(&x.c, 512 * 256 * 2), cudaSuccess);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, NULL, &plan), 0, "%s", prs_fused_error_text());
    prs_gemm_plan_query(plan, &found->info[rank]);
    cr_assert_eq(prs_gemm_launch(plan, &x, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    prs_gemm_plan_close(plan);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, NULL, &again), 0);
    prs_gemm_plan_query(again, &found->again[rank]);
    prs_gemm_plan_close(again);
    prs_fused_close(ctx);
}

/* limit_ms: the time in which candidates may begin. all: it is enough for all candidates. Returns the number of
 * all-gathers. */
static unsigned measured_in(const char *limit_ms, uint32_t scaling, bool all)
{
    double us, other_us;
    uint32_t of;
    char path[] = "/tmp/perseus-tuning-XXXXXX", line[256], more[256];
    const char *kept = scaling == PRS_SCALING_NONE ? "v8 emulated_Hopper_GPU 4 1 1024 256 64 1 2 1 : "
                                                   : "v8 emulated_Hopper_GPU 4 1 64 256 128 1 2 1 : ";
    struct measured found = {.scaling = scaling};
    FILE *f = fdopen(mkstemp(path), "r");
    cr_assert_not_null(f);
    setenv("PERSEUS_FUSED_TUNING", path, 1);
    setenv("PERSEUS_FUSED_MEASURE_MS", limit_ms, 1);
    hopper_setup(2, 4, 0);
    ranks_run(2, open_measured, &found);
    cr_assert(fgets(line, sizeof(line), f) && !fgets(more, sizeof(more), f), "rank 0 keeps one line");
    cr_assert_eq(strncmp(line, kept, strlen(kept)), 0, "%s", line);
    cr_assert_eq(sscanf(line + strlen(kept), "%*u %*u %*u %*u %*u %*u %*u %*u %lf %u %lf", &us, &of, &other_us), 3);
    cr_assert(us > 0 && of == scaling, "%s", line);
    cr_assert(all ? other_us >= us : other_us == 0, "%s", line);
    for (int rank = 0; rank < 2; rank++) {
        cr_assert_str_eq(found.info[rank].reason, "measured when the plan opened");
        cr_assert_str_eq(found.again[rank].reason, "tuning file");
        cr_assert_eq(memcmp(&found.info[rank].tuning, &found.info[0].tuning, sizeof(struct prs_gemm_tuning)), 0);
        cr_assert_eq(memcmp(&found.again[rank].tuning, &found.info[0].tuning, sizeof(struct prs_gemm_tuning)), 0);
        cr_assert_float_eq(found.info[rank].predicted_us, found.info[0].predicted_us, 1e-6);
    }
    (void)fclose(f);
    (void)unlink(path);
    return atomic_load(&found.met[0]);
}

/* Each candidate takes all-gathers: to open its plan, and to exchange its times. 1 ms is enough for the first candidate
 * only. */
Test(measured, a_plan_without_an_entry_is_measured_for_so_long_and_kept, .timeout = 200)
{
    unsigned all = measured_in("60000", PRS_SCALING_NONE, true), first = measured_in("1", PRS_SCALING_NONE, false);
    cr_assert(all >= first + 15, "%u all-gathers with all candidates, %u with the first", all, first);
}

Test(measured, scales_are_made_for_the_candidates_of_e4m3, .timeout = 200)
{
    for (uint32_t scaling = PRS_SCALING_TENSOR; scaling <= PRS_SCALING_BLOCKS; scaling++)
        (void)measured_in("1", scaling, false);
}

struct unkept {
    int result[2];
    char text[2][256];
};

static void open_unkept(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct prs_gemm_shape shape = {PRS_GEMM_REDUCE_SCATTER, 1024, 256, 64, 1};
    struct unkept *found = user;
    struct prs_gemm_plan *plan = NULL;
    struct prs_fused *ctx = NULL;
    cr_assert_eq(ranks_open(self, 0, 300, &ctx), 0);
    found->result[rank] = prs_gemm_plan_open(ctx, &shape, NULL, &plan);
    (void)snprintf(found->text[rank], sizeof(found->text[rank]), "%s", prs_fused_error_text());
    cr_expect_null(plan);
    prs_fused_close(ctx);
}

/* Only the first rank writes the file. If that fails, no rank may use the measured tunings. */
Test(measured, a_file_that_cannot_be_written_is_named_and_no_rank_has_a_plan, .timeout = 200)
{
    struct unkept found = {.result = {0}};
    setenv("PERSEUS_FUSED_TUNING", "/nonexistent/tunings", 1);
    setenv("PERSEUS_FUSED_MEASURE_MS", "1", 1);
    hopper_setup(2, 4, 0);
    ranks_run(2, open_unkept, &found);
    cr_assert_eq(found.result[0], -ENOENT, "%d", found.result[0]);
    cr_assert_not_null(strstr(found.text[0], "/nonexistent/tunings, which cannot be written"), "%s", found.text[0]);
    cr_assert_lt(found.result[1], 0);
    cr_assert_not_null(strstr(found.text[1], "rank 0"), "%s", found.text[1]);
}

static _Thread_local bool no_events;

/* Replaces the emulator's call, which never fails (-Wl,--wrap). */
cudaError_t __real_cudaEventCreate(cudaEvent_t *event);
cudaError_t __wrap_cudaEventCreate(cudaEvent_t *event);
cudaError_t __wrap_cudaEventCreate(cudaEvent_t *event)
{
    return no_events ? cudaErrorMemoryAllocation : __real_cudaEventCreate(event);
}

/* The second rank can make no event. */
static void open_without_events(uint32_t rank, struct ranks_self *self, void *user)
{
    no_events = rank == 1;
    open_unkept(rank, self, user);
}

Test(measured, a_rank_that_cannot_time_is_an_error_of_all_ranks, .timeout = 60)
{
    struct unkept found = {.result = {0}};
    setenv("PERSEUS_FUSED_MEASURE_MS", "1", 1);
    hopper_setup(2, 4, 0);
    ranks_run(2, open_without_events, &found);
    cr_assert(found.result[0] == -ENOMEM && found.result[1] == -ENOMEM, "%d, %d", found.result[0], found.result[1]);
    cr_assert_not_null(strstr(found.text[0], "rank 1 failed"), "%s", found.text[0]);
    cr_assert_not_null(strstr(found.text[1], "cudaEventCreate failed"), "%s", found.text[1]);
}

/* The second rank looks for the tuning file in another folder than the first. */
static void open_elsewhere(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct prs_gemm_shape shape = {PRS_GEMM_REDUCE_SCATTER, 1024, 256, 64, 1};
    int *result = user;
    struct prs_gemm_plan *plan = NULL;
    struct prs_fused *ctx = NULL;
    cr_assert_eq(unshare(CLONE_FS), 0, "a folder of this thread alone");
    cr_assert_eq(chdir(rank == 0 ? "/tmp" : "/"), 0);
    cr_assert_eq(ranks_open(self, 0, 300, &ctx), 0);
    result[rank] = prs_gemm_plan_open(ctx, &shape, NULL, &plan);
    cr_expect_eq(result[rank], 0, "%s", prs_fused_error_text());
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

/* The entry says what the model says too, so the ranks agree at once. */
Test(measured, ranks_that_do_not_see_the_file_of_the_first_measure_nothing, .timeout = 60)
{
    char path[] = "/tmp/perseus-tuning-XXXXXX", more[8];
    int result[2] = {-1, -1};
    FILE *f = fdopen(mkstemp(path), "w+");
    cr_assert_not_null(f);
    fprintf(f, "v8 emulated_Hopper_GPU 4 1 1024 256 64 1 2 1 : 2 0 0 0 0 0 0 0 100 0 0 256\n");
    (void)fflush(f);
    setenv("PERSEUS_FUSED_TUNING", strrchr(path, '/') + 1, 1);
    setenv("PERSEUS_FUSED_MEASURE_MS", "1", 1);
    hopper_setup(2, 4, 0);
    ranks_run(2, open_elsewhere, result);
    cr_assert(result[0] == 0 && result[1] == 0, "%d, %d", result[0], result[1]);
    cr_assert_null(fgets(more, sizeof(more), f), "a line was added");
    (void)fclose(f);
    (void)unlink(path);
}

/* ---- both paths under one plan ---- */

struct two_paths {
    uint32_t op;
    uint64_t fewest_m;
    int path[2][2]; /* of 1024 and 520 rows */
};

static void open_two_paths(uint32_t rank, struct ranks_self *self, void *user)
{
    struct two_paths *found = user;
    struct prs_gemm_shape shape = {found->op, 1024, 256, 64, 1, .fewest_m = found->fewest_m};
    struct prs_gemm_plan *plan = NULL;
    struct prs_fused *ctx = NULL;
    cr_assert_eq(ranks_open(self, 0, 300, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, NULL, &plan), 0, "%s", prs_fused_error_text());
    found->path[rank][0] = prs_gemm_plan_path(plan, 0);
    found->path[rank][1] = prs_gemm_plan_path(plan, 520);
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

/* A file in which the fused path of 1024 rows takes 100 us, and the unfused one other_us. */
static void two_paths_file(char *path, uint32_t op, double other_us)
{
    FILE *f = fdopen(mkstemp(path), "w");
    cr_assert_not_null(f);
    fprintf(f, "v7 emulated_Hopper_GPU 4 %u 1024 256 64 1 2 1 : 1 0 0 0 0 0 0 0 100 0 %g\n", op, other_us);
    (void)fclose(f);
    setenv("PERSEUS_FUSED_TUNING", path, 1);
}

/* The model says of 2 ranks with 4 SMs that 520 rows take 0.94 of the time of 1024 on the unfused path, and as long on
 * the fused one. */
Test(measured, a_plan_has_the_other_path_where_it_is_faster_for_rows_that_come, .timeout = 300)
{
    static const struct {
        uint32_t op;
        double other_us;
        uint64_t fewest_m;
        bool both;
    } cases[] = {{PRS_GEMM_REDUCE_SCATTER, 101, 0, true},
                 {PRS_GEMM_ALLGATHER, 101, 0, true},
                 {PRS_GEMM_ALLREDUCE, 101, 0, true},
                 {PRS_GEMM_REDUCE_SCATTER, 101, 1000, false},
                 {PRS_GEMM_REDUCE_SCATTER, 300, 0, false}};
    hopper_setup(2, 4, 0);
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        char path[] = "/tmp/perseus-tuning-XXXXXX";
        struct two_paths found = {cases[i].op, cases[i].fewest_m, {{0}}};
        two_paths_file(path, cases[i].op, cases[i].other_us);
        ranks_run(2, open_two_paths, &found);
        for (int rank = 0; rank < 2; rank++) {
            cr_assert_eq(found.path[rank][0], PRS_GEMM_PATH_FUSED);
            cr_assert_eq(found.path[rank][1], cases[i].both ? PRS_GEMM_PATH_UNFUSED : PRS_GEMM_PATH_FUSED, "%zu", i);
        }
        (void)unlink(path);
    }
}

/* Launches of both paths follow each other, also in a graph, and each has its own barriers and memory. */
Test(measured, launches_of_one_plan_take_turns_on_both_paths, .timeout = 300)
{
    static const uint32_t rows[] = {1024, 520, 520, 1024, 514, 1024, 1024, 520};
    for (uint32_t op = PRS_GEMM_REDUCE_SCATTER; op <= PRS_GEMM_ALLREDUCE; op++)
        for (uint32_t replays = 0; replays <= 2; replays += 2) {
            char path[] = "/tmp/perseus-tuning-XXXXXX";
            two_paths_file(path, op, 101);
            ranks_assert_right(&(struct ranks_product){.shape = {op, 1024, 256, 64, 1},
                                                       .chosen = true,
                                                       .world = 2,
                                                       .epochs = 8,
                                                       .replays = replays,
                                                       .rows = rows});
            (void)unlink(path);
        }
}

/* ---- tunings of several classes of rows under one plan ---- */

enum { CLASS_ROWS = 1024, CLASS_N = 384, CLASS_K = 128 };

/* Tilings that differ in all that a class can choose: who moves rows, in which bands and pieces, at which pace, by how
 * many clusters, in tiles of which width. Of 64 rows the unfused path is faster. */
static void classes_file(char *path, uint32_t op)
{
    static const struct {
        uint32_t rows, path, clusters, band, mover, segments, paced, spread, columns;
    } of[] = {{1024, 1, 2, 1, 1, 2, 1, 1, 256},
              {512, 1, 1, 1, 2, 1, 2, 40, 192},
              {256, 1, 2, 1, 1, 1, 1, 85, 256},
              {128, 1, 2, 1, 2, 1, 2, 1, 192},
              {64, 2, 2, 1, 2, 1, 1, 1, 256}};
    FILE *f = fdopen(mkstemp(path), "w");
    cr_assert_not_null(f);
    for (size_t i = 0; i < sizeof(of) / sizeof(*of); i++)
        fprintf(f, "v8 emulated_Hopper_GPU 4 %u %u %u %u 1 2 1 : %u %u %u %u %u %u %u 16 %u 0 %u %u\n", op, of[i].rows,
                CLASS_N, CLASS_K, of[i].path, of[i].clusters, of[i].band, of[i].mover, of[i].segments, of[i].paced,
                of[i].spread, of[i].rows, of[i].rows * 2, op == PRS_GEMM_ALLGATHER ? of[i].columns : 256);
    (void)fclose(f);
    setenv("PERSEUS_FUSED_TUNING", path, 1);
}

struct classes {
    uint32_t op;
    struct prs_gemm_tuning tuning[2][6]; /* of CLASS_ROWS, 724, 362, 128 and 64 rows, and with the rows on the device */
};

static void open_classes(uint32_t rank, struct ranks_self *self, void *user)
{
    static const uint32_t rows[] = {CLASS_ROWS, 724, 362, 128, 64};
    struct classes *found = user;
    struct prs_gemm_shape shape = {found->op, CLASS_ROWS, CLASS_N, CLASS_K, 1};
    struct prs_gemm_operands x = {.m_on_device = rows};
    struct prs_gemm_plan *plan = NULL;
    struct prs_fused *ctx = NULL;
    cr_assert_eq(ranks_open(self, 0, 300, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, NULL, &plan), 0, "%s", prs_fused_error_text());
    found->tuning[rank][5] = prs_paths_plan(plan, &x)->info.tuning;
    x.m_on_device = NULL;
    for (uint32_t i = 0; i < 5; i++) {
        x.m = rows[i];
        found->tuning[rank][i] = prs_paths_plan(plan, &x)->info.tuning;
    }
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

Test(measured, a_plan_has_the_tunings_of_the_classes_of_its_rows, .timeout = 300)
{
    static const uint32_t bands[] = {1, 2, 1, 1}, clusters[] = {2, 1, 2, 2}, spreads[] = {1, 40, 85, 1};
    hopper_setup(2, 4, 0);
    for (uint32_t op = PRS_GEMM_REDUCE_SCATTER; op <= PRS_GEMM_ALLREDUCE; op++) {
        char path[] = "/tmp/perseus-tuning-XXXXXX";
        struct classes found = {.op = op};
        classes_file(path, op);
        ranks_run(2, open_classes, &found);
        (void)unlink(path);
        for (uint32_t i = 0; i < 8; i++) {
            const struct prs_gemm_tuning *t = &found.tuning[i / 4][i % 4];
            cr_assert(t->path == PRS_GEMM_PATH_FUSED && t->band == bands[i % 4] && t->clusters == clusters[i % 4] &&
                          t->spread == spreads[i % 4],
                      "operation %u, class %u: path %u, band %u, %u clusters, spread %u", op, i % 4, t->path, t->band,
                      t->clusters, t->spread);
            if (op == PRS_GEMM_ALLGATHER)
                cr_assert(t->mover == 1 + i % 2 && t->columns == (i % 2 == 0 ? 256 : 192), "class %u", i % 4);
        }
        for (uint32_t rank = 0; rank < 2; rank++) {
            cr_assert_eq(found.tuning[rank][4].path, PRS_GEMM_PATH_UNFUSED);
            cr_assert_eq(memcmp(&found.tuning[rank][5], &found.tuning[rank][0], sizeof(struct prs_gemm_tuning)), 0,
                         "rows on the device: the most decide");
        }
    }
}

/* Launches of all classes follow each other, with the fewest and the most rows of each, also in graphs. */
Test(measured, launches_of_one_plan_take_turns_on_the_tunings_of_their_rows, .timeout = 600)
{
    static const uint32_t rows[] = {1024, 128, 724, 256, 1024, 726, 362, 180, 182, 64, 1024, 364, 512, 2};
    for (uint32_t op = PRS_GEMM_REDUCE_SCATTER; op <= PRS_GEMM_ALLREDUCE; op++)
        for (uint32_t replays = 0; replays <= 2; replays += 2) {
            char path[] = "/tmp/perseus-tuning-XXXXXX";
            classes_file(path, op);
            ranks_assert_right(&(struct ranks_product){.shape = {op, CLASS_ROWS, CLASS_N, CLASS_K, 1},
                                                       .chosen = true,
                                                       .keeps = op == PRS_GEMM_ALLGATHER,
                                                       .world = 2,
                                                       .epochs = sizeof(rows) / sizeof(*rows),
                                                       .replays = replays,
                                                       .rows = rows});
            (void)unlink(path);
        }
}

/* The unfused path is faster for 512 rows and 128, of e4m3 with scales of blocks. */
static void scaled_classes_file(char *path, uint32_t op)
{
    FILE *f = fdopen(mkstemp(path), "w");
    cr_assert_not_null(f);
    for (uint32_t i = 0; i < 4; i++)
        fprintf(f, "v8 emulated_Hopper_GPU 4 %u %u 256 384 1 2 1 : %u %u 1 %u 1 %u 1 16 %u %u %u 256\n", op, 1024 >> i,
                1 + i % 2, 1 + i % 2, 2 - i % 2, 1 + i % 2, 1000 >> i, PRS_SCALING_BLOCKS, 1500 >> i);
    (void)fclose(f);
    setenv("PERSEUS_FUSED_TUNING", path, 1);
}

/* Each plan copies the scales of blocks to memory that all share, where its own most rows put them. */
Test(measured, scales_are_found_by_all_plans_of_one, .timeout = 600)
{
    static const uint32_t rows[] = {1024, 520, 8, 256, 1024, 72, 520, 128};
    for (uint32_t op = PRS_GEMM_REDUCE_SCATTER; op <= PRS_GEMM_ALLREDUCE; op++) {
        char path[] = "/tmp/perseus-tuning-XXXXXX";
        scaled_classes_file(path, op);
        ranks_assert_right(&(struct ranks_product){
            .shape = {op, 1024, 256, 384, 1, .dtype = PRS_DTYPE_E4M3, .scaling = PRS_SCALING_BLOCKS},
            .chosen = true,
            .scale_a_pitch = 1024,
            .world = 2,
            .epochs = sizeof(rows) / sizeof(*rows),
            .replays = op == PRS_GEMM_ALLGATHER ? 2 : 0,
            .rows = rows});
        (void)unlink(path);
    }
}

/* Ranks whose rows belong to different classes, and so launch different plans under the one that they opened. */
struct apart {
    uint32_t op;
    struct prs_fused_error error[2];
};

static void launch_another_class(uint32_t rank, struct ranks_self *self, void *user)
{
    struct apart *found = user;
    struct prs_gemm_shape shape = {found->op, CLASS_ROWS, CLASS_N, CLASS_K, 1, .c_anywhere = 1};
    struct prs_gemm_operands x = {.m = rank == 0 ? CLASS_ROWS : 512};
    struct prs_gemm_plan *plan = NULL;
    struct prs_fused *ctx = NULL;
    cr_assert_eq(ranks_open(self, 0, 10000, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, NULL, &plan), 0, "%s", prs_fused_error_text());
    x.a = ranks_upload(1, CLASS_ROWS * CLASS_K), x.b = ranks_upload(2, CLASS_N * CLASS_K);
    x.c = ranks_device(CLASS_ROWS * CLASS_N * 2, 0);
    cr_assert_eq(prs_gemm_launch(plan, &x, NULL), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    (void)prs_fused_poll_error(ctx, &found->error[rank]);
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

Test(measured, ranks_that_launch_rows_of_different_classes_are_told_the_rows, .timeout = 120)
{
    hopper_setup(2, 4, 0);
    hopper_forgive_late_writes();
    for (uint32_t op = PRS_GEMM_REDUCE_SCATTER; op <= PRS_GEMM_ALLREDUCE; op++) {
        char path[] = "/tmp/perseus-tuning-XXXXXX";
        struct apart found = {.op = op};
        classes_file(path, op);
        ranks_run(2, launch_another_class, &found);
        (void)unlink(path);
        for (uint32_t rank = 0; rank < 2; rank++) {
            cr_expect_eq(found.error[rank].code, -EINVAL, "operation %u: %d", op, found.error[rank].code);
            cr_expect(strstr(found.error[rank].text, "1024 rows") && strstr(found.error[rank].text, "512 rows"),
                      "operation %u: %s", op, found.error[rank].text);
        }
    }
}

struct refused {
    int result[2];
    char text[2][256];
};

static void tune_unknown_type(uint32_t rank, struct ranks_self *self, void *user)
{
    struct refused *refused = user;
    struct prs_gemm_shape shape = {PRS_GEMM_ALLREDUCE, 512, 256, 64, 1, .dtype = 77};
    struct prs_gemm_tuning best;
    struct prs_fused *ctx;
    void *a;
    cr_assert_eq(ranks_open(self, 0, 300, &ctx), 0);
    a = ranks_upload(1, 512 * 64);
    refused->result[rank] = prs_gemm_autotune(ctx, &shape, &(struct prs_gemm_operands){a, a, a}, 1, NULL, &best);
    (void)snprintf(refused->text[rank], sizeof(refused->text[rank]), "%s", prs_fused_error_text());
    prs_fused_close(ctx);
}

/* Candidates are listed by the shape, before a plan of it is opened. */
Test(measured, a_product_of_an_unknown_type_is_refused_by_name, .timeout = 300)
{
    struct refused refused = {0};
    hopper_setup(2, 4, 0);
    ranks_run(2, tune_unknown_type, &refused);
    for (uint32_t rank = 0; rank < 2; rank++) {
        cr_assert_eq(refused.result[rank], -EINVAL, "%d", refused.result[rank]);
        cr_assert(strstr(refused.text[rank], "dtype 77 (not a type that is known)"), "%s", refused.text[rank]);
    }
}

/* A line has the time of the other path only if both were timed. */
Test(measured, of_one_rank_both_paths_are_timed, .timeout = 100)
{
    char path[] = "/tmp/perseus-tuning-XXXXXX", line[256];
    struct prs_gemm_shape shape = {PRS_GEMM_ALONE, 128, 256, 64, 1};
    struct prs_gemm_operands x = {0};
    struct prs_gemm_tuning best = {0};
    FILE *f = fdopen(mkstemp(path), "r");
    struct prs_fused *ctx;
    double us, other_us;
    cr_assert_not_null(f);
    setenv("PERSEUS_FUSED_TUNING", path, 1);
    ctx = ranks_open_alone();
    x.a = ranks_upload(1, 128 * 64), x.b = ranks_upload(2, 256 * 64), x.c = ranks_device((size_t)128 * 256 * 2, 0);
    cr_assert_eq(prs_gemm_autotune(ctx, &shape, &x, 1, NULL, &best), 0, "%s", prs_fused_error_text());
    cr_assert(best.path == PRS_GEMM_PATH_FUSED || best.path == PRS_GEMM_PATH_UNFUSED);
    cr_assert_not_null(fgets(line, sizeof(line), f));
    cr_assert_eq(sscanf(strchr(line, ':') + 1, "%*u %*u %*u %*u %*u %*u %*u %*u %lf %*u %lf", &us, &other_us), 2);
    cr_assert(us > 0 && other_us >= us, "%s", line);
    prs_fused_close(ctx);
    (void)fclose(f);
    (void)unlink(path);
}

/* The model takes cuBLASLt for all rows, which cannot read them from the device. */
Test(measured, of_one_rank_rows_on_the_device_are_right, .timeout = 100)
{
    static const uint32_t rows[] = {128, 70};
    for (int i = 0; i < 2; i++)
        ranks_assert_right(&(struct ranks_product){.shape = {i ? PRS_GEMM_ALLREDUCE : PRS_GEMM_ALONE, 128, 256, 64, 1},
                                                   .world = 1,
                                                   .epochs = 2,
                                                   .chosen = true,
                                                   .rows = rows,
                                                   .on_device = true});
}
