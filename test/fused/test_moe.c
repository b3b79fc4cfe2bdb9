/* SPDX-License-Identifier: Apache-2.0 */
/* The protocol of MoE dispatch on threads, through thousands of launches: see moe_model.h. */
#include <criterion/criterion.h>
#include <stdio.h>

#include "test/fused/moe_model.h"

enum { EPOCHS = MODEL_LAUNCHES };

static struct model *run_soundly(uint32_t nodes, uint32_t put, uint32_t group, uint32_t blocks_of_last,
                                 uint32_t resident)
{
    struct model *m = model_run(&(struct model_run){nodes, put, group, blocks_of_last, EPOCHS, 0, resident});
    cr_assert_eq(watch_load(&m->watch.failed), 0, "%s", m->watch.text);
    for (uint32_t r = 0; r < WORLD; r++)
        cr_assert_eq(m->ranks[r].epoch, FIRST_EPOCH + EPOCHS, "rank %u stopped at epoch %u", r, m->ranks[r].epoch);
    return m;
}

/* With all CTAs running at once, with one or two, and with another number on each rank. */
static void run_without_drops(uint32_t nodes, uint32_t put, uint32_t group)
{
    static const uint32_t residents[] = {CTAS, 1, 2, 0};
    for (size_t i = 0; i < sizeof(residents) / sizeof(residents[0]); i++) {
        struct model *m = run_soundly(nodes, put, group, BLOCKS, residents[i]);
        for (uint32_t r = 0; r < WORLD; r++)
            cr_assert_eq(m->ranks[r].drops, 0);
        model_close(m);
    }
}

/* Dropped rows must not leave the others waiting, nor later launches wrong. */
static void run_with_drops(uint32_t nodes, uint32_t put, uint32_t group, uint32_t blocks)
{
    struct model *m = run_soundly(nodes, put, group, blocks, 0);
    cr_assert_gt(m->ranks[WORLD - 1].drops, 0, "this test must see drops");
    cr_assert_eq(m->ranks[0].drops, 0);
    model_close(m);
}

Test(moe, every_row_of_every_epoch_is_in_its_expert_once_and_multiplied, .timeout = 600)
{
    run_without_drops(1, 8, 8);
}

Test(moe, a_rank_without_room_does_not_hold_up_the_others, .timeout = 600)
{
    run_with_drops(1, 8, 8, LOCAL);
}

Test(moe, nodes_get_each_token_once_and_each_rank_its_rows, .timeout = 600)
{
    run_without_drops(2, 8, 8);
}

Test(moe, nodes_with_a_signal_for_several_puts, .timeout = 600)
{
    run_without_drops(2, 8, 24);
}

Test(moe, nodes_hand_on_what_came_while_own_rows_are_still_going_out, .timeout = 600)
{
    struct model *m = run_soundly(2, 4, 4, BLOCKS, CTAS);
    for (uint32_t r = 0; r < WORLD; r++)
        cr_assert_gt(m->ranks[r].early, EPOCHS, "rank %u: %u rows", r, m->ranks[r].early);
    model_close(m);
}

/* Such a rank still forwards other nodes' rows to its neighbour. */
Test(moe, nodes_with_a_rank_without_room_do_not_hold_up_the_others, .timeout = 600)
{
    run_with_drops(2, 8, 56, LOCAL - 1); /* the last rank drops rows often, while its neighbour gets rows */
}

Test(moe, nodes_of_one_gpu_get_their_rows, .timeout = 600)
{
    run_without_drops(4, 4, 16);
}

/* The ranks of one node stop between two launches: the others name one of them, and end. */
Test(moe, nodes_name_the_lost_one, .timeout = 300)
{
    struct model *m = model_run(&(struct model_run){2, 8, 8, BLOCKS, 100, 20, CTAS});
    unsigned waits, awaited;
    cr_assert_eq(watch_load(&m->watch.failed), 2);
    cr_assert_eq(sscanf(m->watch.text, "rank %u: %*[^0-9] %*u of rank %u:", &waits, &awaited), 2, "%s", m->watch.text);
    cr_assert(waits < 2 && awaited >= 2, "%s", m->watch.text);
    for (uint32_t r = 0; r < WORLD; r++)
        cr_assert_eq(m->ranks[r].epoch - FIRST_EPOCH, 20, "rank %u is at epoch %u", r, m->ranks[r].epoch);
    model_close(m);
}
