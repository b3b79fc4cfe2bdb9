/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention's protocol (attention_model.h): all data that is read is of this epoch, and all threads end. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

#include "test/fused/attention_model.h"

enum mover { PUSHED, COPIED, BACKWARD };

/* With all CTAs running at once, with one, and with another number on each rank. */
static void run_launches(struct prs_attention_schedule sizes, uint32_t world, enum mover mover,
                         const struct prs_attention_slice *slice, bool varies)
{
    static const uint32_t residents[] = {CTAS, 1, 0};
    for (size_t i = 0; i < sizeof(residents) / sizeof(residents[0]); i++) {
        struct attention_model *model = calloc(1, sizeof(*model));
        model->copied = mover == COPIED;
        model->backward = mover == BACKWARD;
        model->varies = varies;
        model->resident = residents[i];
        attention_model_run(model, &sizes, world, slice, 0);
        cr_assert_eq(watch_load(&model->watch.failed), 0, "%u run: %s", residents[i], model->watch.text);
        for (uint32_t r = 0; r < world; r++)
            attention_model_check_rank(model, r);
        attention_model_close(model, world);
    }
}

static void run(struct prs_attention_schedule sizes, uint32_t world, enum mover mover,
                const struct prs_attention_slice *slice)
{
    run_launches(sizes, world, mover, slice, false);
}

enum { RESIDENT = 64 }; /* buffers: more than any of these shapes needs */

static struct prs_attention_schedule small(uint32_t depth, uint32_t group)
{
    return (struct prs_attention_schedule){
        .tile_rows = 128, .block_rows = 176, .group = group, .depth = depth, .chunk_rows = 32, .slab_chunks = 2};
}

Test(attention_protocol, resident_keys_are_read_in_their_own_epoch, .timeout = 600)
{
    struct prs_attention_slice slice = {1, 2, 2, 0, 200, 1};
    run(small(RESIDENT, 1), 4, PUSHED, &slice);
}

Test(attention_protocol, causal_ranks_get_only_what_they_look_at, .timeout = 600)
{
    struct prs_attention_slice slice = {1, 2, 2, 1, 260, 1};
    run(small(RESIDENT, 1), 4, PUSHED, &slice);
}

Test(attention_protocol, copied_keys_are_read_in_their_own_epoch, .timeout = 600)
{
    struct prs_attention_slice slice = {1, 3, 3, 0, 200, 1};
    run(small(RESIDENT, 2), 4, COPIED, &slice);
}

Test(attention_protocol, copied_causal_keys_are_read_in_their_own_epoch, .timeout = 600)
{
    struct prs_attention_slice slice = {2, 4, 2, 1, 130, 1};
    run(small(RESIDENT, 1), 3, COPIED, &slice);
}

Test(attention_protocol, a_ring_of_two_buffers_is_not_overwritten_before_all_have_read_it, .timeout = 600)
{
    struct prs_attention_slice slice = {1, 10, 5, 0, 100, 1};
    run(small(2, 1), 3, PUSHED, &slice);
}

Test(attention_protocol, a_causal_ring_with_a_short_last_group_comes_to_an_end, .timeout = 600)
{
    struct prs_attention_slice slice = {1, 5, 5, 1, 130, 1};
    run(small(2, 2), 3, PUSHED, &slice);
}

Test(attention_protocol, one_buffer_is_enough, .timeout = 600)
{
    struct prs_attention_slice slice = {1, 3, 3, 0, 70, 1};
    run(small(1, 1), 2, PUSHED, &slice);
}

Test(attention_protocol, nodes_read_each_others_keys_in_their_own_epoch, .timeout = 600)
{
    struct prs_attention_slice slice = {1, 2, 2, 0, 200, 2};
    run(small(RESIDENT, 1), 4, PUSHED, &slice);
}

Test(attention_protocol, nodes_causal_ranks_get_only_what_they_look_at, .timeout = 600)
{
    struct prs_attention_slice slice = {1, 2, 2, 1, 260, 2};
    run(small(RESIDENT, 1), 4, PUSHED, &slice);
}

Test(attention_protocol, nodes_relay_slots_are_written_again_only_with_the_credit_of_all_nodes, .timeout = 600)
{
    struct prs_attention_slice slice = {1, 10, 5, 0, 100, 2};
    run(small(2, 1), 4, PUSHED, &slice);
}

Test(attention_protocol, nodes_causal_ring_with_a_short_last_group_comes_to_an_end, .timeout = 600)
{
    struct prs_attention_slice slice = {1, 5, 5, 1, 130, 2};
    run(small(2, 2), 4, PUSHED, &slice);
}

Test(attention_protocol, nodes_of_one_gpu_with_one_buffer_come_to_an_end, .timeout = 600)
{
    struct prs_attention_slice slice = {1, 3, 3, 1, 140, 3};
    run(small(1, 1), 3, PUSHED, &slice);
}

/* Backward, tasks of the next group come before the last ones of a group, where that cannot make ranks wait in a
 * circle. */
Test(attention_protocol, backward_ring_comes_to_an_end, .timeout = 600)
{
    struct prs_attention_slice slice = {1, 5, 5, 1, 260, 1};
    run(small(2, 1), 3, BACKWARD, &slice);
}

Test(attention_protocol, nodes_backward_ring_comes_to_an_end, .timeout = 600)
{
    struct prs_attention_slice slice = {1, 5, 5, 1, 260, 2};
    run(small(2, 1), 4, BACKWARD, &slice);
    run(small(3, 1), 4, BACKWARD, &slice);
}

Test(attention_protocol, nodes_backward_of_one_gpu_with_one_buffer_comes_to_an_end, .timeout = 600)
{
    struct prs_attention_slice slice = {1, 3, 3, 1, 140, 3};
    run(small(1, 1), 3, BACKWARD, &slice);
}

/* ---- launches with fewer sequences than the plan ---- */
Test(attention_protocol, batches_differ_where_keys_are_resident, .timeout = 600)
{
    struct prs_attention_slice slice = {3, 2, 2, 0, 100, 1};
    run_launches(small(RESIDENT, 1), 3, PUSHED, &slice, true);
}

Test(attention_protocol, batches_differ_where_keys_are_copied, .timeout = 600)
{
    struct prs_attention_slice slice = {4, 3, 3, 1, 130, 1};
    run_launches(small(RESIDENT, 2), 3, COPIED, &slice, true);
}

Test(attention_protocol, batches_differ_in_a_ring, .timeout = 600)
{
    struct prs_attention_slice slice = {4, 2, 1, 0, 100, 1}, of_groups = {3, 3, 3, 1, 130, 1};
    run_launches(small(2, 1), 3, PUSHED, &slice, true);
    run_launches(small(2, 2), 3, PUSHED, &of_groups, true);
}

Test(attention_protocol, batches_differ_in_a_backward_ring, .timeout = 600)
{
    struct prs_attention_slice slice = {4, 1, 1, 1, 260, 1};
    run_launches(small(2, 1), 3, BACKWARD, &slice, true);
    run_launches(small(RESIDENT, 1), 3, BACKWARD, &slice, true);
}

Test(attention_protocol, batches_differ_between_nodes, .timeout = 600)
{
    struct prs_attention_slice slice = {4, 1, 1, 0, 100, 2}, backward = {3, 2, 2, 1, 260, 2};
    run_launches(small(2, 1), 4, PUSHED, &slice, true);
    run_launches(small(RESIDENT, 1), 4, PUSHED, &slice, true);
    run_launches(small(2, 1), 4, BACKWARD, &backward, true);
    run_launches(small(RESIDENT, 1), 4, BACKWARD, &backward, true);
}

/* The ranks of one node stop between two launches: every waiting thread reports the word and the rank that it waits
 * for, and all end. */
Test(attention_protocol, nodes_name_the_lost_one, .timeout = 300)
{
    struct prs_attention_slice slice = {1, 4, 4, 0, 100, 2};
    struct prs_attention_schedule sizes = small(RESIDENT, 1);
    struct attention_model *model = calloc(1, sizeof(*model));
    unsigned waits, awaited;
    model->resident = CTAS;
    attention_model_run(model, &sizes, 4, &slice, 20);
    cr_assert_eq(watch_load(&model->watch.failed), 2);
    cr_assert_eq(sscanf(model->watch.text, "rank %u: %*[^0-9] %*u of rank %u:", &waits, &awaited), 2, "%s",
                 model->watch.text);
    /* The lost rank; or the neighbour, which waits for the lost rank before it sends later groups. */
    cr_assert(waits < 2 && awaited != waits, "%s", model->watch.text);
    for (uint32_t r = 0; r < 4; r++)
        cr_assert_eq(model->ranks[r].epoch - FIRST_EPOCH, 20, "rank %u is at epoch %u", r, model->ranks[r].epoch);
    attention_model_close(model, 4);
}
