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

#include "fused/core/meeting.h"
#include "test/hopper/ranks.h"
#include "tools/hopper/hopper.h"

/* This is rank 0 of two. Rank 1 is an echo: it contributes to each all-gather what rank 0 contributes, except for its
 * GPU and what the test demands. It tells contributions by length: that of a struct prs_call; an int, which is a word
 * about errors; or longer, which is an offer with process, device and a memory handle. */
struct echo {
    uint32_t words, error_at; /* the word or call in which the echo says -ENOMEM; 0: never */
    uint32_t offers, lost_at; /* the offer in which the echo's device cannot be reached; 0: never */
    uint32_t ignored;         /* offers that rank 0 made after the error */
    uint32_t calls;
    int told, gave; /* the error that the echo reported; the first error that rank 0 reported */
    bool same_gpu;  /* the echo has the GPU of rank 0 */
    bool greeted;
    uint64_t more;           /* added to the first term of the echo's call */
    const char *has, *gives; /* the echo greets with other text in place of this */
};

static int echo_allgather(void *user, const void *mine, void *all, size_t bytes)
{
    struct echo *e = user;
    void *others = (char *)all + bytes;
    bool call = bytes == sizeof(struct prs_call), word = bytes == sizeof(int);
    memcpy(all, mine, bytes);
    memcpy(others, mine, bytes);
    e->calls++;
    if (!e->greeted) { /* node, GPU */
        void *text = e->has ? memmem(others, bytes, e->has, strlen(e->has)) : NULL;
        ((uint64_t *)others)[1] ^= e->same_gpu ? 0 : 1;
        if (text)
            memcpy(text, e->gives, strlen(e->gives));
        e->greeted = true;
        return 0;
    }
    if (word && e->gave == 0)
        e->gave = *(const int *)mine;
    if ((word || call) && ++e->words == e->error_at) {
        e->told = -ENOMEM;
        *(word ? (int32_t *)others : &((struct prs_call *)others)->error) = e->told;
    }
    if (call)
        ((struct prs_call *)others)->term[0] += e->more;
    if (word || call)
        return 0;
    e->ignored += e->told != 0;
    if (++e->offers == e->lost_at) /* of whatever memory it is */
        for (size_t i = 0; i + 8 <= bytes; i += 8)
            if (((int32_t *)mine)[i / 4] == (int32_t)getpid())
                ((int32_t *)others)[i / 4 + 1] = 99;
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

/* The echo would not close its context. */
static void close_with_echo(struct prs_fused *ctx)
{
    prs_fused_abort(ctx);
    prs_fused_close(ctx);
}

static const struct ways {
    struct prs_gemm_shape shape;
    struct prs_gemm_tuning tuning;
} ways[] = {
    {{PRS_GEMM_ALLREDUCE, 1024, 256, 64, 1}, {.path = PRS_GEMM_PATH_FUSED}},
    {{PRS_GEMM_ALLREDUCE, 64, 64, 64, 1}, {.path = PRS_GEMM_PATH_AUTO}}, /* unfused by choice */
    {{PRS_GEMM_ALLGATHER, 1024, 256, 64, 1}, {.mover = 1}},
};
enum { WAYS = sizeof(ways) / sizeof(ways[0]), MEETINGS = 100 };

Test(opening, an_error_of_another_rank_ends_it_here_wherever_it_is_told, .timeout = 300)
{
    for (uint32_t way = 0; way < WAYS; way++) {
        struct echo e = {0};
        struct prs_fused *ctx = open_with_echo(&e);
        for (uint32_t at = 1; at < MEETINGS; at++) {
            struct prs_gemm_plan *plan = NULL;
            int r;
            e = (struct echo){.error_at = at, .greeted = true};
            r = prs_gemm_plan_open(ctx, &ways[way].shape, &ways[way].tuning, &plan);
            cr_assert_eq(r, e.told, "way %u, word %u: %d", way, at, r);
            cr_assert_eq(e.ignored, 0, "way %u, word %u: went on for %u meetings", way, at, e.ignored);
            if (!r) {
                cr_assert_gt(at, 1);
                e.error_at = 0;
                prs_gemm_plan_close(plan);
                break;
            }
            cr_assert_not_null(strstr(prs_fused_error_text(), "rank 1"), "%s", prs_fused_error_text());
        }
        close_with_echo(ctx);
    }
}

Test(opening, a_rank_that_cannot_map_another_tells_the_others, .timeout = 300)
{
    for (uint32_t way = 0; way < WAYS; way++) {
        struct echo e = {0};
        struct prs_fused *ctx = open_with_echo(&e);
        for (uint32_t at = 1; at < MEETINGS; at++) {
            struct prs_gemm_plan *plan = NULL;
            int r;
            e = (struct echo){.lost_at = at, .greeted = true};
            r = prs_gemm_plan_open(ctx, &ways[way].shape, &ways[way].tuning, &plan);
            if (!r) {
                cr_assert_gt(at, 1);
                prs_gemm_plan_close(plan);
                break;
            }
            cr_assert_eq(r, -EXDEV, "way %u, offer %u: %d", way, at, r);
            cr_assert_eq(e.gave, -EXDEV, "way %u, offer %u: told the others %d", way, at, e.gave);
        }
        close_with_echo(ctx);
    }
}

Test(opening, copies_are_refused_where_ranks_share_a_gpu, .timeout = 300)
{
    struct echo e = {.same_gpu = true};
    struct prs_fused *ctx = open_with_echo(&e);
    struct prs_attention_shape shape = {1, 2, 2, 128, 512, 0, 0, 0};
    struct prs_attention_tuning tuning = {.mover = PRS_MOVED_BY_COPY_ENGINES};
    struct prs_attention_plan *attention = NULL;
    struct prs_gemm_plan *plan = NULL;
    cr_assert_eq(prs_gemm_plan_open(ctx, &ways[WAYS - 1].shape, &ways[WAYS - 1].tuning, &plan), -EINVAL);
    cr_assert_not_null(strstr(prs_fused_error_text(), "ranks share a GPU"), "%s", prs_fused_error_text());
    cr_assert_eq(prs_attention_plan_open(ctx, &shape, &tuning, &attention), -EINVAL);
    cr_assert_not_null(strstr(prs_fused_error_text(), "ranks share a GPU"), "%s", prs_fused_error_text());
    close_with_echo(ctx);
}

/* Both ranks must decide alike, so what one would decide differently is named. */
Test(opening, what_differs_between_ranks_is_named, .timeout = 300)
{
    static const char *const want[] = {"rank 1 allocates symmetric memory with bytes 4097, rank 0 with 4096",
                                       "rank 1 opens a matrix product with operation 4, rank 0 with 3",
                                       "rank 1 opens MoE with tokens 65, rank 0 with 64",
                                       "rank 1 opens ring attention with batch 2, rank 0 with 1"};
    struct prs_attention_shape attention_shape = {1, 2, 2, 128, 512, 0, 0, 0};
    struct prs_moe_shape moe_shape = {.tokens = 64, .hidden = 64, .columns = 64, .experts = 4, .top_k = 2};
    struct prs_attention_plan *attention;
    struct prs_gemm_plan *plan;
    struct prs_moe_plan *moe;
    struct echo e = {0};
    struct prs_fused *ctx = open_with_echo(&e);
    void *memory;
    e.more = 1;
    for (uint32_t i = 0; i < 4; i++) {
        int r = i == 0   ? prs_fused_alloc(ctx, 4096, &memory)
                : i == 1 ? prs_gemm_plan_open(ctx, &ways[0].shape, &ways[0].tuning, &plan)
                : i == 2 ? prs_moe_plan_open(ctx, &moe_shape, NULL, &moe)
                         : prs_attention_plan_open(ctx, &attention_shape, NULL, &attention);
        cr_assert_eq(r, -EINVAL, "call %u: %d", i, r);
        cr_assert_not_null(strstr(prs_fused_error_text(), want[i]), "%s", prs_fused_error_text());
    }
    close_with_echo(ctx);
}

/* Ranks that run something else would decide differently, or read each other's words wrongly. */
Test(opening, ranks_with_another_library_or_gpu_are_named, .timeout = 300)
{
    static const struct {
        const char *has, *gives, *want;
    } rows[] = {
        {PRS_VERSION, "9", "rank 1 has version 9"},
        {"emulated Hopper", "imagined Hopper", "rank 1 has a GPU imagined Hopper GPU"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct echo e = {.has = rows[i].has, .gives = rows[i].gives};
        struct prs_fused_config config = {.world = 2, .allgather = echo_allgather, .user = &e};
        struct prs_fused *ctx;
        hopper_setup(1, 4, 0);
        cr_assert_eq(prs_fused_open(&config, &ctx), -EINVAL);
        cr_assert_not_null(strstr(prs_fused_error_text(), rows[i].want), "%s", prs_fused_error_text());
    }
}

/* ---- two ranks ---- */
struct both {
    int result[2];
    char text[2][256];
    struct prs_gemm_info info[2];
    atomic_uint met[2]; /* how many all-gathers each has begun */
    const char *file;
};

static struct prs_fused *open_rank(uint32_t rank, prs_allgather_fn *allgather, void *user)
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
    struct prs_gemm_shape shape = {PRS_GEMM_ALLREDUCE, 512, 256, 64, 1};
    struct prs_fused *ctx = open_rank(rank, ranks_allgather, self);
    struct prs_gemm_tuning best;
    void *a = ranks_upload(1, 512 * 64), *b = ranks_upload(2, 256 * 64), *c, *other;
    cr_assert_eq(prs_fused_alloc(ctx, 512 * 256 * 2, &c), 0);
    cr_assert_eq(cudaMalloc(&other, 512 * 256 * 2), cudaSuccess);
    keep_result(
        user, rank,
        prs_gemm_autotune(ctx, &shape, &(struct prs_gemm_operands){a, b, rank == 1 ? other : c}, 1, NULL, &best));
    (void)prs_fused_free(ctx, c);
    prs_fused_close(ctx);
}

Test(opening, tuning_that_fails_on_one_rank_fails_on_all, .timeout = 300)
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

Test(opening, attention_that_one_rank_refuses_is_refused_by_all, .timeout = 300)
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
    struct prs_gemm_shape shape = {PRS_GEMM_ALLREDUCE, 4096, 256, 64, 1};
    struct prs_fused *ctx = open_rank(rank, counted_allgather, &counted);
    struct prs_gemm_plan *plan = NULL;
    unsigned met = atomic_load(&both->met[0]);
    FILE *f;
    while (rank == 0 && atomic_load(&both->met[1]) <= met)
        usleep(1000);
    if (rank == 0) {
        f = fopen(both->file, "w");
        cr_assert(f && fprintf(f, "v5 emulated_Hopper_GPU 4 3 4096 256 64 1 2 1 : 0 0 1 0 0 0 33 0 0\n") > 0);
        (void)fclose(f);
    }
    keep_result(both, rank, prs_gemm_plan_open(ctx, &shape, NULL, &plan));
    if (both->result[rank] == 0)
        prs_gemm_plan_query(plan, &both->info[rank]);
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

Test(opening, all_ranks_take_what_rank_0_finds_in_the_tuning_file, .timeout = 300)
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

/* Rank 1 has a tuning that rank 0 does not have: the field is named, not only that something differs. */
static void open_with_own_tuning(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_gemm_shape shape = {PRS_GEMM_ALLREDUCE, 2048, 256, 64, 1};
    struct prs_gemm_tuning tuning = {.path = PRS_GEMM_PATH_FUSED, .band = 1 + rank};
    struct prs_fused *ctx = open_rank(rank, ranks_allgather, self);
    struct prs_gemm_plan *plan;
    keep_result(user, rank, prs_gemm_plan_open(ctx, &shape, &tuning, &plan));
    prs_fused_close(ctx);
}

Test(opening, a_tuning_that_differs_is_named, .timeout = 300)
{
    struct both both = {0};
    hopper_setup(2, 4, 0);
    ranks_run(2, open_with_own_tuning, &both);
    for (int rank = 0; rank < 2; rank++) {
        cr_assert_eq(both.result[rank], -EINVAL, "%d", both.result[rank]);
        cr_assert_not_null(strstr(both.text[rank], "opens a matrix product with band"), "%s", both.text[rank]);
    }
}

/* Rank 1 makes another call. */
static void make_another_call(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_gemm_shape shape = {PRS_GEMM_ALLREDUCE, 2048, 256, 64, 1};
    struct prs_fused *ctx = open_rank(rank, ranks_allgather, self);
    struct prs_gemm_plan *plan;
    void *memory;
    keep_result(user, rank,
                rank == 0 ? prs_gemm_plan_open(ctx, &shape, NULL, &plan) : prs_fused_alloc(ctx, 4096, &memory));
    prs_fused_close(ctx);
}

Test(opening, calls_in_another_order_are_named, .timeout = 300)
{
    struct both both = {0};
    hopper_setup(2, 4, 0);
    ranks_run(2, make_another_call, &both);
    cr_assert_eq(both.result[0], -EINVAL, "%d", both.result[0]);
    cr_assert_not_null(strstr(both.text[0], "rank 1 allocates symmetric memory"), "%s", both.text[0]);
    cr_assert_eq(both.result[1], -EINVAL, "%d", both.result[1]);
}

/* ---- a limit of SMs ---- */
static void open_with_few_sms(uint32_t rank, struct ranks_self *self, void *user)
{
    const uint32_t *most = user;
    struct prs_fused_config config = {rank, 2, (int)rank, 0, ranks_allgather, self, 0, most[rank]};
    struct prs_gemm_shape gemm = {PRS_GEMM_ALLREDUCE, 2048, 512, 64, 1};
    struct prs_attention_shape attention = {1, 8, 8, 128, 1024, 0, 0, 0};
    struct prs_moe_shape moe = {.tokens = 64, .hidden = 64, .columns = 512, .experts = 4, .top_k = 2};
    struct prs_attention_info attention_info;
    struct prs_attention_plan *attention_plan;
    struct prs_gemm_info gemm_info;
    struct prs_moe_info moe_info;
    struct prs_gemm_plan *gemm_plan;
    struct prs_moe_plan *moe_plan;
    struct prs_fused *ctx;
    (void)cudaSetDevice((int)rank);
    if (most[0] != most[1]) {
        cr_assert_eq(prs_fused_open(&config, &ctx), -EINVAL);
        cr_assert_not_null(strstr(prs_fused_error_text(), "SMs"), "%s", prs_fused_error_text());
        return;
    }
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, &gemm, NULL, &gemm_plan), 0);
    cr_assert_eq(prs_moe_plan_open(ctx, &moe, NULL, &moe_plan), 0);
    cr_assert_eq(prs_attention_plan_open(ctx, &attention, NULL, &attention_plan), 0);
    prs_gemm_plan_query(gemm_plan, &gemm_info);
    prs_moe_plan_query(moe_plan, &moe_info);
    prs_attention_plan_query(attention_plan, &attention_info);
    cr_assert_leq(2 * gemm_info.tuning.clusters, most[rank], "%u clusters", gemm_info.tuning.clusters);
    cr_assert_leq(moe_info.tuning.ctas, most[rank], "%u CTAs", moe_info.tuning.ctas);
    cr_assert_leq(moe_info.tuning.route_ctas, most[rank], "%u CTAs", moe_info.tuning.route_ctas);
    cr_assert_leq(attention_info.tuning.ctas, most[rank], "%u CTAs", attention_info.tuning.ctas);
    prs_attention_plan_close(attention_plan);
    prs_moe_plan_close(moe_plan);
    prs_gemm_plan_close(gemm_plan);
    prs_fused_close(ctx);
}

Test(opening, all_kernels_keep_to_the_most_sms, .timeout = 300)
{
    uint32_t most[2] = {4, 4};
    hopper_setup(2, 8, 0);
    ranks_run(2, open_with_few_sms, most);
}

Test(opening, ranks_that_may_use_other_numbers_of_sms_are_named, .timeout = 300)
{
    uint32_t most[2] = {4, 6};
    hopper_setup(2, 8, 0);
    ranks_run(2, open_with_few_sms, most);
}

/* ---- memory of the caller ---- */
/* The result must be the same, bit by bit, in memory of the library and in memory that the ranks have mapped
 * themselves. */
static void reduce_into_imported_memory(uint32_t rank, struct ranks_self *self, void *user)
{
    enum { ROWS = 512, COLUMNS = 256, K = 64, BYTES = ROWS * COLUMNS * 2 };
    struct prs_gemm_tuning tuning = {.path = *(const enum prs_gemm_path *)user};
    struct prs_gemm_shape shape = {PRS_GEMM_ALLREDUCE, ROWS, COLUMNS, K, 1};
    struct prs_gemm_operands x = {.a = ranks_upload(1 + rank, ROWS * K), .b = ranks_upload(7 + rank, COLUMNS * K)};
    struct prs_fused *ctx = open_rank(rank, ranks_allgather, self);
    static uint16_t want[2][ROWS * COLUMNS], have[2][ROWS * COLUMNS];
    struct prs_gemm_plan *plan;
    void *own, *all[2], *lent;
    cr_assert_eq(cudaMalloc(&own, BYTES), cudaSuccess);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, &tuning, &plan), 0);
    cr_assert_eq(prs_fused_alloc(ctx, BYTES, &lent), 0);
    x.c = own;
    cr_assert_eq(prs_gemm_launch(plan, &x, NULL), -EINVAL, "not symmetric yet");
    (void)ranks_allgather(self, &own, all, sizeof(own));
    cr_assert_eq(prs_fused_import(ctx, all, BYTES), 0, "%s", prs_fused_error_text());
    cr_assert_eq(prs_gemm_launch(plan, &x, NULL), 0, "%s", prs_fused_error_text());
    x.c = lent;
    cr_assert_eq(prs_gemm_launch(plan, &x, NULL), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    cr_assert_eq(cudaMemcpy(want[rank], lent, BYTES, cudaMemcpyDeviceToHost), cudaSuccess);
    cr_assert_eq(cudaMemcpy(have[rank], own, BYTES, cudaMemcpyDeviceToHost), cudaSuccess);
    cr_assert_eq(memcmp(want[rank], have[rank], BYTES), 0, "rank %u: other bits in imported memory", rank);
    cr_assert_eq(prs_fused_free(ctx, own), 0);
    x.c = own;
    cr_assert_eq(prs_gemm_launch(plan, &x, NULL), -EINVAL, "given up");
    cr_assert_eq(prs_fused_free(ctx, own), -EINVAL, "given up twice");
    cr_assert_eq(cudaFree(own), cudaSuccess);
    cr_assert_eq(prs_fused_free(ctx, lent), 0);
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}

Test(opening, results_may_lie_in_imported_memory, .timeout = 300)
{
    enum prs_gemm_path path = PRS_GEMM_PATH_FUSED;
    hopper_setup(2, 4, 0);
    ranks_run(2, reduce_into_imported_memory, &path);
}

Test(opening, unfused_results_may_lie_in_imported_memory, .timeout = 300)
{
    enum prs_gemm_path path = PRS_GEMM_PATH_UNFUSED;
    hopper_setup(2, 4, 0);
    ranks_run(2, reduce_into_imported_memory, &path);
}

static void import_nothing(uint32_t rank, struct ranks_self *self, void *user)
{
    struct prs_fused *ctx = open_rank(rank, ranks_allgather, self);
    void *at[2] = {ctx, rank == 1 ? NULL : ctx};
    keep_result(user, rank, prs_fused_import(ctx, at, 4096));
    prs_fused_close(ctx);
}

Test(opening, an_import_that_one_rank_cannot_reach_is_refused_by_all, .timeout = 300)
{
    struct both both = {0};
    hopper_setup(2, 4, 0);
    ranks_run(2, import_nothing, &both);
    cr_assert(both.result[0] == -EINVAL && both.result[1] == -EINVAL, "%d and %d", both.result[0], both.result[1]);
    cr_assert_not_null(strstr(both.text[0], "rank 1"), "%s", both.text[0]);
    cr_assert_not_null(strstr(both.text[1], "local rank 1"), "%s", both.text[1]);
}

/* ---- invalid arguments ---- */
Test(opening, dimensions_beyond_what_a_tile_s_place_can_say_are_refused, .timeout = 300)
{
    struct prs_fused_config config = {.world = 1};
    struct prs_gemm_shape shape = {PRS_GEMM_ALONE, 8, UINT32_MAX - 7, 8, 1};
    struct prs_gemm_plan *plan;
    struct prs_fused *ctx;
    hopper_setup(1, 4, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, NULL, &plan), -EINVAL);
    shape.n = 8, shape.m = 1u << 31;
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, NULL, &plan), -EINVAL);
    prs_fused_close(ctx);
}

Test(opening, no_pointer_of_a_product_may_be_null, .timeout = 300)
{
    struct prs_fused_config config = {.world = 1};
    struct prs_gemm_shape shape = {PRS_GEMM_ALONE, 8, 8, 8, 1};
    struct prs_gemm_tuning tuning = {.path = PRS_GEMM_PATH_UNFUSED};
    struct prs_gemm_plan *plan;
    struct prs_fused *ctx;
    void *x;
    hopper_setup(1, 4, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    cr_assert_eq(prs_gemm_plan_open(ctx, &shape, &tuning, &plan), 0);
    cr_assert_eq(cudaMalloc(&x, 128), cudaSuccess);
    cr_assert_eq(prs_gemm_launch(plan, &(struct prs_gemm_operands){NULL, x, x}, NULL), -EINVAL);
    cr_assert_eq(prs_gemm_launch(plan, &(struct prs_gemm_operands){x, NULL, x}, NULL), -EINVAL);
    cr_assert_eq(prs_gemm_launch(plan, &(struct prs_gemm_operands){x, x, NULL}, NULL), -EINVAL);
    prs_gemm_plan_close(plan);
    prs_fused_close(ctx);
}
