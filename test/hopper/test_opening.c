/* SPDX-License-Identifier: Apache-2.0 */
/* Opening plans while one rank fails or has other data: no other rank may wait for ever or decide differently. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

/* This is rank 0 of two. Rank 1 is an echo: it gives what rank 0 gives, except for its GPU and what the test demands.
 * An all-gather of one int is a word about errors; a longer one with a memory handle, after process and device, is an
 * offer. */
struct echo {
    uint32_t words, error_at; /* the word in which the echo says -ENOMEM; 0: never */
    uint32_t offers, lost_at; /* the offer in which the echo's device cannot be reached; 0: never */
    uint32_t ignored;         /* offers that rank 0 made after the error */
    int told, gave;           /* the error of the echo; the first error of rank 0 */
    bool same_gpu;            /* the echo has the GPU of rank 0 */
};

static int echo_allgather(void *user, const void *mine, void *all, size_t bytes)
{
    struct echo *e = user;
    bool offer = bytes >= sizeof(cudaIpcMemHandle_t);
    memcpy(all, mine, bytes);
    memcpy((char *)all + bytes, mine, bytes);
    if (bytes == 3 * sizeof(uint64_t)) /* node, GPU, error */
        ((uint64_t *)((char *)all + bytes))[1] ^= e->same_gpu ? 0 : 1;
    if (bytes == sizeof(int) && e->gave == 0)
        e->gave = *(const int *)mine;
    if (bytes == sizeof(int) && ++e->words == e->error_at)
        ((int *)all)[1] = e->told = -ENOMEM;
    if (offer && e->told != 0)
        e->ignored++;
    if (offer && ++e->offers == e->lost_at)
        ((int32_t *)((char *)all + bytes))[1] = 99;
    return 0;
}

static struct prs_fused *open_with_echo(struct echo *e)
{
    struct prs_fused_config config = {.world = 2, .allgather = echo_allgather, .user = e};
    struct prs_fused *ctx = NULL;
    hopper_setup(1, 4, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    return ctx;
}

static const struct ways {
    struct prs_fused_shape shape;
    struct prs_fused_tuning tuning;
} ways[] = {
    {{PRS_FUSED_ALLREDUCE, 1024, 256, 64, 1}, {.path = PRS_PATH_FUSED}},
    {{PRS_FUSED_ALLREDUCE, 64, 64, 64, 1}, {.path = PRS_PATH_AUTO}}, /* unfused by choice */
    {{PRS_FUSED_ALLGATHER, 1024, 256, 64, 1}, {.mover = 1}},
};
enum { WAYS = sizeof(ways) / sizeof(ways[0]), MEETINGS = 100 };

Test(opening, an_error_of_another_rank_ends_it_here_wherever_it_is_told, .timeout = 60)
{
    struct echo e = {0};
    struct prs_fused *ctx = open_with_echo(&e);
    for (uint32_t way = 0; way < WAYS; way++) {
        for (uint32_t at = 1; at < MEETINGS; at++) {
            struct prs_fused_plan *plan = NULL;
            int r;
            e = (struct echo){.error_at = at};
            r = prs_fused_plan_open(ctx, &ways[way].shape, &ways[way].tuning, &plan);
            cr_assert_eq(r, e.told, "way %u, word %u: %d", way, at, r);
            cr_assert_eq(e.ignored, 0, "way %u, word %u: went on for %u meetings", way, at, e.ignored);
            if (!r) {
                cr_assert_gt(at, 1);
                e.error_at = 0;
                prs_fused_plan_close(plan);
                break;
            }
            cr_assert_not_null(strstr(prs_fused_error_text(), "rank 1"), "%s", prs_fused_error_text());
        }
    }
    prs_fused_close(ctx);
}

Test(opening, a_rank_that_cannot_map_another_tells_the_others, .timeout = 60)
{
    struct echo e = {0};
    struct prs_fused *ctx = open_with_echo(&e);
    for (uint32_t way = 0; way < WAYS; way++) {
        for (uint32_t at = 1; at < MEETINGS; at++) {
            struct prs_fused_plan *plan = NULL;
            int r;
            e = (struct echo){.lost_at = at};
            r = prs_fused_plan_open(ctx, &ways[way].shape, &ways[way].tuning, &plan);
            if (!r) {
                cr_assert_gt(at, 1);
                prs_fused_plan_close(plan);
                break;
            }
            cr_assert_eq(r, -EXDEV, "way %u, offer %u: %d", way, at, r);
            cr_assert_eq(e.gave, -EXDEV, "way %u, offer %u: told the others %d", way, at, e.gave);
        }
    }
    prs_fused_close(ctx);
}

Test(opening, copies_are_refused_where_ranks_share_a_gpu, .timeout = 60)
{
    struct echo e = {.same_gpu = true};
    struct prs_fused *ctx = open_with_echo(&e);
    struct prs_attention_shape shape = {1, 2, 2, 128, 512, 0, 0, 0};
    struct prs_attention_tuning tuning = {.mover = PRS_MOVED_BY_COPY_ENGINES};
    struct prs_attention_plan *attention = NULL;
    struct prs_fused_plan *plan = NULL;
    cr_assert_eq(prs_fused_plan_open(ctx, &ways[WAYS - 1].shape, &ways[WAYS - 1].tuning, &plan), -EINVAL);
    cr_assert_not_null(strstr(prs_fused_error_text(), "ranks share a GPU"), "%s", prs_fused_error_text());
    cr_assert_eq(prs_attention_plan_open(ctx, &shape, &tuning, &attention), -EINVAL);
    cr_assert_not_null(strstr(prs_fused_error_text(), "ranks share a GPU"), "%s", prs_fused_error_text());
    prs_fused_close(ctx);
}

/* ---- two ranks ---- */
struct both {
    int result[2];
    char text[2][256];
    struct prs_fused_plan_info info[2];
    atomic_uint met[2]; /* how many all-gathers each has begun */
    const char *file;
};

static struct prs_fused *open_rank(uint32_t rank, prs_fused_allgather_fn *allgather, void *user)
{
    struct prs_fused_config config = {rank, 2, (int)rank, 300, allgather, user};
    struct prs_fused *ctx = NULL;
    (void)cudaSetDevice((int)rank);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    return ctx;
}

static void keep_result(struct both *both, uint32_t rank, int r)
{
    both->result[rank] = r;
    (void)snprintf(both->text[rank], sizeof(both->text[rank]), "%s", prs_fused_error_text());
}

/* The result of an all-reduce must lie in symmetric memory. */
static void tune_into_wrong_memory(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_fused_shape shape = {PRS_FUSED_ALLREDUCE, 512, 256, 64, 1};
    struct prs_fused *ctx = open_rank(rank, ranks_allgather, self);
    struct prs_fused_tuning best;
    void *a = ranks_upload(1, 512 * 64), *b = ranks_upload(2, 256 * 64), *c, *other;
    cr_assert_eq(prs_fused_alloc(ctx, 512 * 256 * 2, &c), 0);
    cr_assert_eq(cudaMalloc(&other, 512 * 256 * 2), cudaSuccess);
    keep_result(user, rank,
                prs_autotune(ctx, &shape, &(struct prs_fused_operands){a, b, rank == 1 ? other : c}, 1, NULL, &best));
    (void)prs_fused_free(ctx, c);
    prs_fused_close(ctx);
}

Test(opening, tuning_that_fails_on_one_rank_fails_on_all, .timeout = 60)
{
    struct both both = {0};
    hopper_setup(2, 4, 0);
    hopper_forgive_late_writes();
    ranks_run(2, tune_into_wrong_memory, &both);
    cr_assert_eq(both.result[1], -EINVAL, "%d", both.result[1]);
    cr_assert_eq(both.result[0], -EINVAL, "%d", both.result[0]);
    cr_assert_not_null(strstr(both.text[0], "rank 1"), "%s", both.text[0]);
}

/* Rank 1 demands a kernel that does not exist. */
static void open_unknown_attention(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_attention_shape shape = {1, 2, 2, 128, 512, 0, 0, 0};
    struct prs_attention_tuning tuning = {.block_rows = rank == 1 ? 100 : 0};
    struct prs_fused *ctx = open_rank(rank, ranks_allgather, self);
    struct prs_attention_plan *plan;
    keep_result(user, rank, prs_attention_plan_open(ctx, &shape, &tuning, &plan));
    prs_fused_close(ctx);
}

Test(opening, attention_that_one_rank_refuses_is_refused_by_all, .timeout = 60)
{
    struct both both = {0};
    hopper_setup(2, 4, 0);
    ranks_run(2, open_unknown_attention, &both);
    cr_assert_eq(both.result[1], -EINVAL, "%d", both.result[1]);
    cr_assert_eq(both.result[0], -EINVAL, "%d", both.result[0]);
    cr_assert_not_null(strstr(both.text[0], "rank 1"), "%s", both.text[0]);
}

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

/* Rank 0 writes the tuning file after rank 1 has read it, as tuning does. */
static void open_while_file_changes(uint32_t rank, struct ranks_self *self, void *user)
{
    struct both *both = user;
    struct counted_self counted = {self, &both->met[rank]};
    struct prs_fused_shape shape = {PRS_FUSED_ALLREDUCE, 2048, 256, 64, 1};
    struct prs_fused *ctx = open_rank(rank, counted_allgather, &counted);
    struct prs_fused_plan *plan = NULL;
    unsigned met = atomic_load(&both->met[0]);
    FILE *f;
    while (rank == 0 && atomic_load(&both->met[1]) <= met)
        usleep(1000);
    if (rank == 0) {
        f = fopen(both->file, "w");
        cr_assert(f && fprintf(f, "v2 3 2048 256 64 1 2 1 : 0 1 0 0 0 0 33 0\n") > 0);
        (void)fclose(f);
    }
    keep_result(both, rank, prs_fused_plan_open(ctx, &shape, NULL, &plan));
    if (both->result[rank] == 0)
        prs_fused_plan_query(plan, &both->info[rank]);
    prs_fused_plan_close(plan);
    prs_fused_close(ctx);
}

Test(opening, all_ranks_take_what_rank_0_finds_in_the_tuning_file, .timeout = 60)
{
    char path[] = "/tmp/perseus-tuning-XXXXXX";
    struct both both = {.file = path};
    int fd = mkstemp(path);
    cr_assert(fd >= 0);
    (void)close(fd);
    setenv("PERSEUS_FUSED_TUNING", path, 1);
    hopper_setup(2, 4, 0);
    ranks_run(2, open_while_file_changes, &both);
    (void)unlink(path);
    cr_assert(both.result[0] == 0 && both.result[1] == 0, "%d and %d", both.result[0], both.result[1]);
    cr_assert_str_eq(both.info[0].reason, "tuning file");
    cr_assert_eq(both.info[0].tuning.band, 1);
    cr_assert_eq(both.info[1].tuning.band, 1, "rank 1 took %u", both.info[1].tuning.band);
    cr_assert_eq(both.info[1].tuning.spread, 33, "rank 1 took %u", both.info[1].tuning.spread);
}

/* ---- invalid arguments ---- */
Test(opening, dimensions_beyond_what_a_tile_s_place_can_say_are_refused, .timeout = 60)
{
    struct prs_fused_config config = {.world = 1};
    struct prs_fused_shape shape = {PRS_FUSED_GEMM, 8, UINT32_MAX - 7, 8, 1};
    struct prs_fused_plan *plan;
    struct prs_fused *ctx;
    hopper_setup(1, 4, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    cr_assert_eq(prs_fused_plan_open(ctx, &shape, NULL, &plan), -EINVAL);
    shape.n = 8, shape.m = 1u << 31;
    cr_assert_eq(prs_fused_plan_open(ctx, &shape, NULL, &plan), -EINVAL);
    prs_fused_close(ctx);
}

Test(opening, no_pointer_of_a_product_may_be_null, .timeout = 60)
{
    struct prs_fused_config config = {.world = 1};
    struct prs_fused_shape shape = {PRS_FUSED_GEMM, 8, 8, 8, 1};
    struct prs_fused_tuning tuning = {.path = PRS_PATH_UNFUSED};
    struct prs_fused_plan *plan;
    struct prs_fused *ctx;
    void *x;
    hopper_setup(1, 4, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    cr_assert_eq(prs_fused_plan_open(ctx, &shape, &tuning, &plan), 0);
    cr_assert_eq(cudaMalloc(&x, 128), cudaSuccess);
    cr_assert_eq(prs_fused_launch(plan, &(struct prs_fused_operands){NULL, x, x}, NULL), -EINVAL);
    cr_assert_eq(prs_fused_launch(plan, &(struct prs_fused_operands){x, NULL, x}, NULL), -EINVAL);
    cr_assert_eq(prs_fused_launch(plan, &(struct prs_fused_operands){x, x, NULL}, NULL), -EINVAL);
    prs_fused_plan_close(plan);
    prs_fused_close(ctx);
}
