/* SPDX-License-Identifier: Apache-2.0 */
/* MoE dispatch with the grouped product on emulated GPUs. Every map entry and every row of every launch is checked
 * against the definition. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "test/hopper/moe_rows.h"
#include "test/hopper/ranks.h"
#include "tools/hopper/hopper.h"

Test(moe, rows_of_one_rank_are_sorted_and_multiplied, .timeout = 600)
{
    static const struct row rows[] = {
        {1, 150, 128, 512, 4, 2, 1, 2, EVEN, 0, {0}},
        {1, 150, 136, 264, 4, 2, 0, 2, EVEN, 0, {0}}, /* H and N are no multiples of a tile */
        {1, 40, 72, 8, 8, 3, 1, 1, SOME_NONE, 0, {0}},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe, tokens_of_all_ranks_come_to_their_experts, .timeout = 900)
{
    static const struct row rows[] = {
        {2, 90, 128, 256, 8, 3, 1, 3, EVEN, 0, {0}},
        /* one tile in the last pair */
        {2, 100, 200, 776, 6, 2, 0, 3, SOME_NONE, 0, {.cluster = 2}},
        {4, 60, 128, 264, 8, 3, 1, 4, EVEN, 0, {.cluster = 2, .route_ctas = 3}},
        {4, 50, 72, 256, 16, 4, 0, 3, SOME_NONE, 0, {.cluster = 1, .route_ctas = 1}},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Every access checked for its order (memory_order.py). */
Test(moe_order, of_rows_that_come_to_their_experts, .timeout = 600)
{
    static const struct row rows[] = {{2, 24, 72, 256, 4, 2, 1, 3, EVEN, 0, {.cluster = 2, .route_ctas = 2}}};
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Every count of ranks that a node may have; with room for all rows, and without. */
Test(moe, up_to_eight_ranks_of_a_node_get_their_rows, .timeout = 900)
{
    static const struct row rows[] = {
        {5, 40, 72, 264, 10, 3, 1, 3, EVEN, 0, {.cluster = 2}},
        {6, 30, 136, 64, 12, 4, 0, 3, SOME_NONE, 0, {.route_ctas = 5}},
        {7, 40, 72, 64, 14, 2, 1, 3, HALF_EMPTY, 0, {0}},
        {8, 40, 72, 264, 16, 4, 1, 6, SOME_NONE, 128, {0}},
        {8, 60, 72, 64, 8, 3, 0, 6, EVEN, 0, {0}},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* ---- graphs ---- */
enum { MOST_TOKENS = 48 }; /* fewer than the inputs have */

struct replays {
    uint32_t counts[4], mapped;
    int32_t maps[4][4];  /* of a launch: the place of each expert */
    uint64_t rows[4][2]; /* of the experts of each rank */
    struct prs_moe_status status[4][2];
};

static void replay_on_rank(uint32_t rank, struct ranks_self *self, void *user)
{
    static const struct row w = {2, 50, 72, 64, 4, 2, 1, 1, EVEN, 0, {0}};
    struct prs_moe_shape shape = {MOST_TOKENS, w.hidden, w.columns, w.experts, w.top_k, 0, w.n_h};
    struct replays *x = user;
    struct prs_moe_expert_rows experts[2];
    struct prs_fused_error error;
    struct prs_moe_plan *plan;
    struct prs_moe_batch b;
    struct prs_moe_info info;
    struct prs_fused *ctx;
    uint32_t *count = ranks_device(sizeof(*count), 0), all[2];
    int32_t *map = ranks_device(sizeof(x->maps[0]), 0);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    shape.logical_experts = x->mapped ? w.experts : 0, shape.replicas = x->mapped;
    cr_assert_eq(ranks_open(self, 0, 60000, &ctx), 0);
    cr_assert_eq(prs_moe_plan_open(ctx, &shape, NULL, &plan), 0);
    prs_moe_plan_query(plan, &info);
    make_batch(&w, rank, 0, info.capacity, ranks_upload(key_of_weights(rank), 2ull * w.hidden * w.columns), &b);
    b.count_on_device = count;
    b.placement = x->mapped ? map : NULL;
    (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cr_assert_eq(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    cr_assert_eq(prs_moe_dispatch_gemm(plan, &b, stream), 0);
    cr_assert_eq(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cr_assert_eq(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (uint32_t i = 0; i < 4; i++) {
        cr_assert_eq(cudaMemcpy(count, &x->counts[i], sizeof(*count), cudaMemcpyHostToDevice), cudaSuccess);
        cr_assert_eq(cudaMemcpy(map, x->maps[i], sizeof(x->maps[i]), cudaMemcpyHostToDevice), cudaSuccess);
        cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
        cr_assert_eq(cudaGraphLaunch(exec, stream), cudaSuccess);
        cr_assert_eq(cudaStreamSynchronize(stream), cudaSuccess);
        (void)cudaMemcpy(experts, b.expert_rows, sizeof(experts), cudaMemcpyDeviceToHost);
        (void)cudaMemcpy(&x->status[i][rank], b.status, sizeof(*b.status), cudaMemcpyDeviceToHost);
        x->rows[i][rank] = experts[0].rows + experts[1].rows;
        (void)ranks_allgather(self, &rank, all, sizeof(rank));
    }
    cr_assert_eq(prs_fused_poll_error(ctx, &error), 0, "%s", error.text);
    prs_moe_plan_close(plan);
    prs_fused_close(ctx);
}

/* More than the plan's most are not dispatched. */
Test(moe, a_graph_serves_any_count, .timeout = 600)
{
    struct replays x = {.counts = {MOST_TOKENS, 0, 7, 60}};
    hopper_setup(2, 4, 0);
    ranks_run(2, replay_on_rank, &x);
    for (uint32_t i = 0; i < 4; i++) {
        uint64_t dispatched = x.counts[i] < MOST_TOKENS ? x.counts[i] : MOST_TOKENS;
        cr_assert_eq(x.rows[i][0] + x.rows[i][1], dispatched * 2 * 2, "launch %u: %llu and %llu rows", i,
                     (unsigned long long)x.rows[i][0], (unsigned long long)x.rows[i][1]);
        for (uint32_t rank = 0; rank < 2; rank++)
            cr_assert_eq(x.status[i][rank].tokens_dropped, x.counts[i] - dispatched);
    }
}

/* Experts move from rank to rank, and are lost, between launches of one graph. */
Test(moe, a_graph_reads_its_map_anew, .timeout = 600)
{
    struct replays x = {
        .counts = {30, 30, 30, 30}, .mapped = 1, .maps = {{0, 0, 1, 1}, {3, 2, 2, 3}, {-1, -1, -1, -1}, {1, 1, 1, 0}}};
    static const uint32_t rows[4][2] = {{120, 0}, {0, 120}, {0, 0}, {120, 0}};
    hopper_setup(2, 4, 0);
    ranks_run(2, replay_on_rank, &x);
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t rank = 0; rank < 2; rank++) {
            cr_assert_eq(x.rows[i][rank], rows[i][rank], "launch %u: rank %u has %llu rows", i, rank,
                         (unsigned long long)x.rows[i][rank]);
            cr_assert_eq(x.status[i][rank].absent_choices, i == 2 ? 60 : 0);
        }
}

Test(moe, skewed_choices_are_right, .timeout = 900)
{
    static const struct row rows[] = {
        {4, 120, 72, 264, 8, 2, 1, 3, ONE_EXPERT, 0, {0}},
        {4, 90, 72, 264, 8, 4, 0, 3, HALF_EMPTY, 0, {0}},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* More K steps than stages, and after each full block one whose second half has no rows. The warpgroup of that half
 * must not hold back stages while the other warpgroup waits for a store. */
Test(moe, blocks_of_few_rows_follow_full_ones, .timeout = 900)
{
    static const struct row rows[] = {
        {1, 330, 1024, 512, 2, 1, 1, 2, EVEN, 0, {.ctas = 1, .cluster = 1}},
        {1, 700, 640, 512, 4, 1, 0, 2, EVEN, 0, {.ctas = 2, .cluster = 2}},
    };
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* The buffer of a row holds 8 KB. */
Test(moe, rows_longer_than_a_buffer_travel_in_pieces, .timeout = 900)
{
    static const struct row rows[] = {{2, 20, 7168, 64, 4, 2, 1, 2, EVEN, 0, {0}},
                                      {2, 12, 4104, 64, 4, 2, 0, 2, EVEN, 0, {0}}};
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* Launches that need more rows than others, in which some experts lose all rows, some rows, or none. */
Test(moe, rows_beyond_capacity_are_dropped_and_the_next_launch_is_right, .timeout = 600)
{
    static const struct row rows[] = {
        {2, 100, 72, 64, 4, 2, 1, 4, EVEN, 128, {0}},
        {2, 300, 72, 264, 8, 2, 0, 4, EVEN, 384, {.cluster = 2}},
        {3, 120, 72, 64, 6, 3, 1, 4, SOME_NONE, 256, {0}},
        {2, 200, 72, 64, 4, 2, 1, 2, ONE_EXPERT, 128, {0}}, /* of rank 0 */
    };
    uint64_t dropped = 0;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct run run;
        run_right(&rows[i], i, &run);
        dropped += run.dropped;
    }
    cr_assert_gt(dropped, 0);
}

/* The launch continues without it: check_status() looks for it in every launch. */
Test(moe, an_expert_that_does_not_exist_is_counted_and_its_token_named, .timeout = 600)
{
    static const struct row row = {2, 40, 72, 64, 4, 2, 1, 3, NO_EXPERT, 0, {0}};
    assert_right(&row, 1);
}

/* Each launch and each rank has its own map; more experts than places, and fewer. */
Test(moe, tokens_go_where_the_map_of_their_rank_says, .timeout = 900)
{
    static const struct row rows[] = {
        {1, 150, 72, 64, 4, 2, 1, 2, EVEN, 0, {0}, 0, 0, 6, 1},
        {2, 90, 128, 256, 8, 3, 1, 3, EVEN, 0, {0}, 0, 0, 5, 3},
        {4, 60, 72, 64, 8, 3, 0, 4, SOME_NONE, 0, {.route_ctas = 3}, 0, 0, 20, 2},
        {3, 120, 72, 64, 6, 2, 1, 3, NO_EXPERT, 256, {0}, 0, 0, 4, 8},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct run run;
        run_right(&rows[i], i, &run);
        cr_assert(run.outside == 0 && (run.absent != 0 || rows[i].replicas == 8));
    }
}

/* check_status() looks for the count and the token. Other choices of the tokens continue. */
Test(moe, a_place_that_does_not_exist_is_counted_and_its_token_named, .timeout = 600)
{
    static const struct row row = {2, 40, 72, 64, 4, 2, 1, 3, NO_PLACE, 0, {0}, 0, 0, 6, 2};
    struct run run;
    run_right(&row, 0, &run);
    cr_assert_gt(run.outside, 0);
}

Test(moe, a_rank_that_does_not_come_is_named, .timeout = 600)
{
    static const struct row row = {3, 40, 72, 64, 6, 2, 1, 2, EVEN, 0, {0}, 1};
    struct run run;
    run_row(&row, &run);
    for (uint32_t r = 0; r < 2; r++) {
        cr_assert_eq(run.error[r].code, -ETIMEDOUT, "%s", run.error[r].text);
        cr_assert(run.error[r].from_rank == 2 && run.error[r].want == 2, "%s", run.error[r].text);
        cr_assert_not_null(strstr(run.error[r].text, "counts and routes of rank 2"), "%s", run.error[r].text);
    }
    cr_assert_eq(run.error[2].code, 0, "%s", run.error[2].text);
}

/* A put moves half a megabyte, or one row if that is longer; a signal stands for whole puts. */
Test(moe, puts_are_as_long_as_a_link_needs, .timeout = 300)
{
    static const struct choice {
        uint32_t tokens, hidden, group, put, want_group, want_put;
    } rows[] = {
        {8192, 7168, 0, 0, 256, 32},   {2048, 7168, 0, 0, 128, 32},  {100, 7168, 0, 0, 128, 32},
        {20, 7168, 0, 0, 20, 20},      {2048, 16384, 0, 0, 128, 16}, {8192, 7168, 8, 0, 8, 8},
        {512, 7168, 100, 48, 144, 48},
    };
    struct prs_fused_config config = {.world = 1};
    struct prs_fused *ctx = NULL;
    hopper_setup(1, 4, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        const struct choice *c = &rows[i];
        struct prs_moe_shape shape = {c->tokens, c->hidden, 64, 4, 1, 128, 1};
        struct prs_moe_tuning tuning = {.rows_per_signal = c->group, .rows_per_put = c->put};
        struct prs_moe_plan *plan = NULL;
        struct prs_moe_info info;
        cr_assert_eq(prs_moe_plan_open(ctx, &shape, &tuning, &plan), 0);
        prs_moe_plan_query(plan, &info);
        cr_assert(info.tuning.rows_per_signal == c->want_group && info.tuning.rows_per_put == c->want_put,
                  "row %zu: groups of %u, puts of %u", i, info.tuning.rows_per_signal, info.tuning.rows_per_put);
        prs_moe_plan_close(plan);
    }
    prs_fused_close(ctx);
}

/* ---- several nodes: the real transport, over any verbs device (softnic in the suite) ---- */
Test(moe_nodes, tokens_cross_between_nodes_and_are_given_to_all_who_want_them, .timeout = 900)
{
    static const struct row rows[] = {
        {4, 60, 128, 264, 8, 3, 1, 3, EVEN, 0, {.rows_per_signal = 8}, 0, 2},
        {4, 60, 72, 512, 16, 4, 0, 3, SOME_NONE, 0, {.rows_per_signal = 24, .rows_per_put = 8, .route_ctas = 3}, 0, 2},
        {2, 90, 72, 64, 4, 2, 1, 3, EVEN, 0, {0}, 0, 2},
        {6, 40, 72, 64, 12, 4, 0, 2, EVEN, 0, {.rows_per_signal = 16, .rows_per_put = 4}, 0, 3},
        {3, 40, 72, 64, 6, 2, 1, 2, SOME_NONE, 0, {0}, 0, 3},
    };
    ranks_need_a_device();
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_nodes, tokens_cross_to_where_the_map_of_their_rank_says, .timeout = 900)
{
    static const struct row rows[] = {
        {4, 60, 72, 64, 8, 3, 1, 3, EVEN, 0, {.rows_per_signal = 8}, 0, 2, 6, 3},
        {2, 90, 72, 64, 4, 2, 0, 3, SOME_NONE, 0, {0}, 0, 2, 7, 2},
    };
    ranks_need_a_device();
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_nodes, skew_and_long_rows_cross_too, .timeout = 900)
{
    static const struct row rows[] = {
        {4, 100, 72, 64, 8, 2, 1, 3, ONE_EXPERT, 0, {0}, 0, 2},
        {4, 60, 72, 64, 8, 4, 0, 3, HALF_EMPTY, 0, {.rows_per_signal = 8}, 0, 2},
        {4, 12, 7168, 64, 4, 2, 1, 2, EVEN, 0, {0}, 0, 2},
    };
    ranks_need_a_device();
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

/* tools/dev/faults takes a rail meanwhile, and sets how many launches there are. */
Test(moe_nodes, launches_go_on, .timeout = 300)
{
    const char *launches = getenv("PRS_TEST_LAUNCHES");
    struct row row = {2, 40, 128, 64, 4, 2, 1, 2, EVEN, 0, {.rows_per_signal = 8}, 0, 2};
    ranks_need_a_device();
    if (launches)
        row.epochs = (uint32_t)atoi(launches);
    assert_right(&row, 1);
}

/* Blocks of this node's rows, of other nodes' rows, and of both; in two passes and in one. */
Test(moe_nodes, experts_with_many_rows_of_all_nodes_are_right, .timeout = 900)
{
    static const struct row rows[] = {
        {2, 500, 72, 520, 4, 2, 1, 3, EVEN, 0, {.rows_per_signal = 64, .rows_per_put = 16, .passes = 2}, 0, 2},
        {2, 400, 72, 64, 4, 2, 0, 2, SOME_NONE, 0, {.passes = 1}, 0, 2},
        {4, 300, 72, 264, 8, 2, 1, 2, HALF_EMPTY, 0, {.cluster = 2, .passes = 2}, 0, 2},
        {3, 400, 72, 64, 6, 2, 0, 2, EVEN, 0, {.passes = 2}, 0, 3},
    };
    ranks_need_a_device();
    assert_right(rows, sizeof(rows) / sizeof(*rows));
}

Test(moe_nodes, a_rank_of_another_node_that_does_not_come_is_named, .timeout = 600)
{
    static const struct row row = {2, 40, 72, 64, 4, 2, 1, 2, EVEN, 0, {0}, 1, 2};
    struct run run;
    ranks_need_a_device();
    run_row(&row, &run);
    cr_assert_eq(run.error[0].code, -ETIMEDOUT, "%s", run.error[0].text);
    cr_assert_not_null(strstr(run.error[0].text, "counts and routes of rank 1"), "%s", run.error[0].text);
}
