/* SPDX-License-Identifier: Apache-2.0 */
/* Plans that are measured when they open, where no table has an entry. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/* limit_ms: of the time in which candidates may begin. Returns how many all-gathers there were. */
static unsigned measured_in(const char *limit_ms, uint32_t scaling)
{
    char path[] = "/tmp/perseus-tuning-XXXXXX", line[256], more[256];
    const char *kept = scaling == PRS_SCALING_NONE ? "v6 emulated_Hopper_GPU 4 1 1024 256 64 1 2 1 : "
                                                   : "v6 emulated_Hopper_GPU 4 1 64 256 128 1 2 1 : ";
    struct measured found = {.scaling = scaling};
    FILE *f = fdopen(mkstemp(path), "r");
    cr_assert_not_null(f);
    setenv("PERSEUS_FUSED_TUNING", path, 1);
    setenv("PERSEUS_FUSED_MEASURE_MS", limit_ms, 1);
    hopper_setup(2, 4, 0);
    ranks_run(2, open_measured, &found);
    cr_assert(fgets(line, sizeof(line), f) && !fgets(more, sizeof(more), f), "rank 0 keeps one line");
    cr_assert_eq(strncmp(line, kept, strlen(kept)), 0, "%s", line);
    cr_assert_eq(line[strlen(line) - 2], (char)('0' + scaling), "%s", line);
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

/* A candidate is a plan that opens, and times that are exchanged. In 1 ms there is time for the first only. */
Test(measured, a_plan_without_an_entry_is_measured_for_so_long_and_kept, .timeout = 200)
{
    unsigned all = measured_in("60000", PRS_SCALING_NONE), first = measured_in("1", PRS_SCALING_NONE);
    cr_assert(all >= first + 15, "%u all-gathers with all candidates, %u with the first", all, first);
}

Test(measured, scales_are_made_for_the_candidates_of_e4m3, .timeout = 200)
{
    for (uint32_t scaling = PRS_SCALING_TENSOR; scaling <= PRS_SCALING_BLOCKS; scaling++)
        (void)measured_in("1", scaling);
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
Test(measured, a_product_of_an_unknown_type_is_refused_by_name, .timeout = 60)
{
    struct refused refused = {0};
    hopper_setup(2, 4, 0);
    ranks_run(2, tune_unknown_type, &refused);
    for (uint32_t rank = 0; rank < 2; rank++) {
        cr_assert_eq(refused.result[rank], -EINVAL, "%d", refused.result[rank]);
        cr_assert(strstr(refused.text[rank], "dtype 77 (not a type that is known)"), "%s", refused.text[rank]);
    }
}
