/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <math.h>
#include <string.h>

#include "fused/attention/tuning.h"

enum { SMS = 132 };

struct choice {
    struct prs_attention_info info;
    struct prs_attention_schedule schedule;
    int result;
};

/* As prs_attention_plan_open() does for head_dim 128. */
static struct choice choose_over(uint32_t nodes, const struct prs_attention_shape *shape, uint32_t world,
                                 const struct prs_attention_tuning *wanted)
{
    struct choice c = {.schedule = {.tile_rows = 128, .block_rows = shape->causal != 0 ? 128 : 176}};
    struct prs_place place = {0, world, 0, nodes, 0, world / nodes};
    if (wanted)
        c.info.tuning = *wanted;
    if (c.info.tuning.workspace_limit == 0)
        c.info.tuning.workspace_limit = 60ull << 30;
    c.result = prs_attention_tuning_choose(shape, &place, SMS, &c.info, &c.schedule);
    return c;
}

static struct choice choose(const struct prs_attention_shape *shape, uint32_t world,
                            const struct prs_attention_tuning *wanted)
{
    return choose_over(1, shape, world, wanted);
}

static const struct prs_attention_shape PLAIN = {4, 16, 16, 128, 8192, 0, 0, 0};

Test(attention_tuning, every_field_is_decided)
{
    struct choice c = choose(&PLAIN, 4, NULL);
    const struct prs_attention_tuning *t = &c.info.tuning;
    cr_assert_eq(c.result, 0);
    cr_assert_eq(t->mode, PRS_ATTENTION_RESIDENT);
    cr_assert(t->ctas == SMS && t->mover == PRS_MOVED_BY_COPY_ENGINES);
    cr_assert(t->heads_per_step > 0 && t->slab_rows > 0 && t->spread > 0);
    cr_assert(c.info.predicted_us > 0 && c.info.reason != NULL);
    cr_assert_eq(c.info.sent_bytes, 3ull * 2 * 4 * 16 * 2048 * 128 * 2, "keys and values of the share, to 3 ranks");
}

Test(attention_tuning, a_put_to_another_node_carries_more_than_a_counter_stands_for)
{
    struct prs_attention_shape longer = PLAIN;
    longer.seq = 32768;
    cr_assert_eq(choose_over(2, &longer, 4, NULL).info.tuning.slab_rows, 2048);
    cr_assert_eq(choose(&longer, 4, NULL).info.tuning.slab_rows, 512);
}

Test(attention_tuning, what_the_caller_gives_stays)
{
    struct prs_attention_tuning wanted = {
        .mode = PRS_ATTENTION_RING, .ctas = 100, .heads_per_step = 3, .slab_rows = 128, .spread = 33};
    struct prs_attention_tuning have = choose(&PLAIN, 4, &wanted).info.tuning;
    wanted.mover = PRS_MOVED_BY_CTAS;
    wanted.workspace_limit = have.workspace_limit;
    cr_assert_eq(memcmp(&wanted, &have, sizeof(have)), 0);
}

Test(attention_tuning, what_cannot_be_is_brought_down)
{
    struct prs_attention_tuning wanted = {.ctas = 1000, .heads_per_step = 1000, .slab_rows = 1 << 20};
    struct prs_attention_tuning have = choose(&PLAIN, 4, &wanted).info.tuning;
    cr_assert_eq(have.ctas, SMS);
    cr_assert_eq(have.heads_per_step, 64, "all pairs");
    cr_assert_eq(have.slab_rows, 2048, "the whole share");
}

Test(attention_tuning, memory_decides_between_resident_and_ring)
{
    struct prs_attention_tuning limit = {.workspace_limit = 3ull * 2 * (8 * 8) * 2048 * 128 * 2};
    struct choice c = choose(&PLAIN, 4, &limit);
    cr_assert_eq(c.info.tuning.mode, PRS_ATTENTION_RESIDENT, "8 groups of 8 pairs");
    cr_assert_eq(prs_attention_tuning_staging(&PLAIN, &c.schedule), limit.workspace_limit);
    limit.workspace_limit /= 2;
    c = choose(&PLAIN, 4, &limit);
    cr_assert_eq(c.info.tuning.mode, PRS_ATTENTION_RING);
    cr_assert_eq(c.schedule.depth, 2);
    cr_assert_leq(prs_attention_tuning_staging(&PLAIN, &c.schedule), limit.workspace_limit);
    limit.workspace_limit = 1000;
    cr_assert_eq(choose(&PLAIN, 4, &limit).result, -ENOMEM);
    cr_assert_eq(choose(&PLAIN, 1, &limit).info.tuning.mode, PRS_ATTENTION_ALONE, "one rank needs none");
}

Test(attention_tuning, steps_are_small_where_the_mask_would_waste_much_of_them)
{
    struct prs_place one = {0, 1, 0, 1, 0, 1}, four = {0, 4, 0, 1, 0, 4}, nodes = {0, 4, 0, 2, 0, 2};
    struct prs_attention_shape shape = PLAIN;
    cr_assert_eq(prs_attention_tuning_block(&shape, &four), 176);
    shape.causal = 1;
    cr_assert_eq(prs_attention_tuning_block(&shape, &one), 176);
    cr_assert_eq(prs_attention_tuning_block(&shape, &four), 128, "2048 rows a rank");
    cr_assert_eq(prs_attention_tuning_block(&shape, &nodes), 0, "only one is built");
    shape.causal = 0;
    shape.head_dim = 64;
    cr_assert_eq(prs_attention_tuning_block(&shape, &one), 128, "with tiles of 192 rows");
}

Test(attention_tuning, an_earlier_maximum_is_kept_where_there_are_many_keys)
{
    struct prs_place one = {0, 1, 0, 1, 0, 1}, nodes = {0, 4, 0, 2, 0, 2};
    struct prs_attention_shape shape = PLAIN;
    shape.seq = 8192;
    cr_assert_eq(prs_attention_tuning_overlap(&shape, &one), 0);
    shape.seq = 16384;
    cr_assert_eq(prs_attention_tuning_overlap(&shape, &one), 7);
    cr_assert_eq(prs_attention_tuning_overlap(&shape, &nodes), 0, "only one is built");
    shape.head_dim = 64;
    shape.seq = 4096;
    cr_assert_eq(prs_attention_tuning_overlap(&shape, &one), 7);
}

Test(attention_tuning, causal_ranks_push_less)
{
    struct prs_attention_shape causal = PLAIN;
    struct prs_attention_tuning pushed = {.mover = PRS_MOVED_BY_CTAS}, copied = {.mover = PRS_MOVED_BY_COPY_ENGINES};
    uint64_t all = choose(&PLAIN, 4, &pushed).info.sent_bytes, half;
    causal.causal = 1;
    half = choose(&causal, 4, &pushed).info.sent_bytes;
    cr_assert_eq(half, all / 2, "rank 0's second chunk is the last of the sequence: nobody looks at it");
    cr_assert_eq(choose(&causal, 4, &copied).info.sent_bytes, all, "all ranks send as much, which keeps them in step");
}

/* Times in us from doc/results/attention-copies-4xH200.json: pushed, and copied in groups of 1/2, 1/4 and 1/8 of the
 * pairs. The plan must choose the fastest, or one that is less than 2 % slower. */
static struct figure {
    struct prs_attention_shape shape;
    uint32_t group; /* 0: pushed */
} figures[] = {
    {{4, 16, 16, 128, 2048, 1, 0, 0}, 0},  /* 203, 214, 310, 405 */
    {{4, 16, 16, 128, 4096, 1, 0, 0}, 32}, /* 435, 366, 556, 585 */
    {{4, 16, 16, 128, 8192, 1, 0, 0}, 16}, /* 887, 783, 784, 1016 */
    {{4, 16, 16, 128, 16384, 1, 0, 0}, 8}, /* 2019, 2291, 2015, 1971 */
    {{4, 16, 16, 128, 32768, 1, 0, 0}, 8}, /* 7730, 8679, 8182, 7482 */
    {{1, 8, 8, 128, 8192, 1, 0, 0}, 0},    /* 150, 195, 229, 346 */
    {{1, 8, 8, 128, 16384, 1, 0, 0}, 0},   /* 335, 350, 462, 509 */
    {{1, 32, 8, 128, 32768, 1, 0, 0}, 2},  /* 4031, 3308, 3281, 3285 */
    {{1, 32, 8, 128, 8192, 1, 0, 0}, 4},   /* 344, 285, 279, 358 */
    {{4, 16, 16, 128, 2048, 0, 0, 0}, 0},  /* 187, 202, 329, 383 */
    {{4, 16, 16, 128, 4096, 0, 0, 0}, 0},  /* 374, 399, 442, 561 */
    {{4, 16, 16, 128, 8192, 0, 0, 0}, 16}, /* 994, 1078, 988, 1096 */
    {{4, 16, 16, 128, 16384, 0, 0, 0}, 8}, /* 3409, 3683, 3452, 3357 */
    {{4, 16, 16, 128, 32768, 0, 0, 0}, 8}, /* 14631, 14763, 14163, 14351 */
    {{1, 8, 8, 128, 8192, 0, 0, 0}, 0},    /* 140, 178, 230, 329 */
    {{1, 32, 8, 128, 8192, 0, 0, 0}, 4},   /* 543, 491, 516, 528 */
};

ParameterizedTestParameters(attention_tuning, who_moves_keys_and_values_in_which_groups)
{
    return cr_make_param_array(struct figure, figures, sizeof(figures) / sizeof(figures[0]));
}

ParameterizedTest(struct figure *f, attention_tuning, who_moves_keys_and_values_in_which_groups)
{
    struct prs_attention_tuning have = choose(&f->shape, 4, NULL).info.tuning;
    uint32_t group = have.mover == PRS_MOVED_BY_COPY_ENGINES ? have.heads_per_step : 0;
    cr_assert_eq(group, f->group, "%ux%ux%ux%u causal %u: %u, not %u", f->shape.batch, f->shape.heads_q,
                 f->shape.heads_kv, f->shape.seq, f->shape.causal, group, f->group);
}

/* With two buffers, or with other nodes, data waits for credit inside the launch. */
Test(attention_tuning, copy_engines_move_what_waits_for_nothing_in_the_launch)
{
    struct prs_attention_tuning asked = {.mover = PRS_MOVED_BY_COPY_ENGINES}, ring = {.mode = PRS_ATTENTION_RING},
                                unknown = {.mover = PRS_MOVED_BY_CTAS + 1};
    ring.mover = PRS_MOVED_BY_COPY_ENGINES;
    cr_assert_eq(choose(&PLAIN, 4, &ring).info.tuning.mover, PRS_MOVED_BY_CTAS);
    cr_assert_eq(choose_over(2, &PLAIN, 4, &asked).info.tuning.mover, PRS_MOVED_BY_CTAS);
    cr_assert_eq(choose(&PLAIN, 1, &asked).info.tuning.mover, 0, "nothing to move");
    cr_assert_eq(choose(&PLAIN, 4, &unknown).result, -EINVAL);
}

Test(attention_tuning, copy_engines_move_values_of_another_width)
{
    struct prs_attention_shape wide = {4, 16, 16, 192, 16384, 1, 1, 0, .value_dim = 128};
    struct choice c = choose(&wide, 4, NULL);
    cr_assert(c.result == 0 && c.info.tuning.mover == PRS_MOVED_BY_COPY_ENGINES, "%d, mover %u", c.result,
              c.info.tuning.mover);
}

/* More groups than when they are pushed: there must be memory for all of them. */
Test(attention_tuning, what_is_copied_is_resident_in_any_groups)
{
    struct prs_attention_tuning asked = {.mover = PRS_MOVED_BY_COPY_ENGINES, .heads_per_step = 1};
    struct choice c = choose(&PLAIN, 4, &asked);
    cr_assert(c.schedule.groups == 64 && c.schedule.depth == 64, "%u groups, %u buffers", c.schedule.groups,
              c.schedule.depth);
    asked.heads_per_step = 0;
    c = choose(&PLAIN, 4, &asked);
    cr_assert_eq(c.schedule.depth, c.schedule.groups);
}

Test(attention_tuning, a_gap_spreads_the_messages_over_the_time)
{
    struct prs_attention_tuning wanted = {.spread = 50, .mover = PRS_MOVED_BY_CTAS};
    struct choice c = choose(&PLAIN, 4, &wanted);
    double messages = (double)c.info.sent_bytes / 8192 / SMS;
    double clocks = prs_attention_tuning_gap(&c.info) * messages;
    cr_assert_float_eq(clocks / (c.info.predicted_us * 1600 * 0.5), 1, 0.01);
    c.info.tuning.spread = 1;
    cr_assert_eq(prs_attention_tuning_gap(&c.info), 0);
    wanted.mover = PRS_MOVED_BY_COPY_ENGINES;
    c = choose(&PLAIN, 4, &wanted);
    cr_assert_eq(prs_attention_tuning_gap(&c.info), 0, "nobody pushes");
}

Test(attention_tuning, the_busier_the_links_the_more_evenly_is_pushed)
{
    struct prs_attention_shape causal = PLAIN, longer = PLAIN;
    uint32_t first, last;
    causal.seq = 16384, causal.causal = 1;
    longer.seq = 32768;
    first = choose(&causal, 4, NULL).info.tuning.spread;
    last = choose(&longer, 4, NULL).info.tuning.spread;
    cr_assert(first == 90 && last == 60, "%u and %u", first, last);
    cr_assert_eq(choose_over(2, &longer, 4, NULL).info.tuning.spread, 1, "what crosses between nodes does not wait");
}

struct row {
    struct prs_attention_shape shape;
    uint32_t world;
    int result;
};

static struct row rows[] = {
    {{1, 8, 8, 128, 1024, 0, 0, 0}, 4, 0},
    {{1, 8, 2, 64, 1000, 1, 0, 0}, 4, 0},
    {{1, 8, 8, 128, 1001, 1, 0, 0}, 1, 0}, /* one rank takes any length */
    {{1, 8, 8, 96, 1024, 0, 0, 0}, 4, 0},
    {{1, 8, 8, 80, 1024, 0, 0, 0}, 4, -EINVAL},
    {{1, 8, 8, 192, 1024, 0, 0, 0, .value_dim = 128}, 4, 0},
    {{1, 8, 8, 192, 1024, 0, 0, 0}, 4, -EINVAL},
    {{1, 8, 8, 128, 1024, 0, 0, 0, .value_dim = 64}, 4, -EINVAL},
    {{1, 8, 8, 128, 1024, 0, 0, 0, .value_dim = 128 + (1ull << 32)}, 4, -EINVAL},
    {{1, 8, 3, 128, 1024, 0, 0, 0}, 4, -EINVAL},
    {{0, 8, 8, 128, 1024, 0, 0, 0}, 4, -EINVAL},
    {{1, 8, 8, 128, 0, 0, 0, 0}, 4, -EINVAL},
    {{1, 0, 0, 128, 1024, 0, 0, 0}, 4, -EINVAL},
    {{1, 8, 8, 128, 1002, 0, 0, 0}, 4, -EINVAL},
    {{1, 8, 8, 128, 1004, 1, 0, 0}, 4, -EINVAL}, /* 8 chunks */
    {{1, 8, 8, 128, 1024, 0, 0, -1}, 4, -EINVAL},
    {{1, 8, 8, 128, 1024, 0, 0, NAN}, 4, -EINVAL},
    {{1, 8, 8, 128, 1024, 0, 0, INFINITY}, 4, -EINVAL},
    /* more pairs than 32 bits can count */
    {{65536, 65536, 65536, 128, 1024, 0, 0, 0}, 4, -EINVAL},
};

ParameterizedTestParameters(attention_tuning, shapes_that_cannot_run_are_refused)
{
    return cr_make_param_array(struct row, rows, sizeof(rows) / sizeof(rows[0]));
}

ParameterizedTest(struct row *row, attention_tuning, shapes_that_cannot_run_are_refused)
{
    cr_assert_eq(prs_attention_tuning_check(&row->shape, row->world), row->result);
}

Test(attention_tuning, too_many_messages_are_refused)
{
    struct prs_attention_shape huge = {1024, 128, 128, 128, 1 << 20, 0, 0, 0};
    cr_assert_eq(choose(&huge, 4, NULL).result, -EINVAL);
}
