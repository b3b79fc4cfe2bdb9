/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>

#include "fused/core/arena.h"

enum { BLOCKS = 64, STEPS = 20000, CHUNK = 1 << 20 };

static void assert_apart(const struct prs_arena *a)
{
    for (const struct prs_block *b = a->used; b; b = b->next) {
        cr_assert_eq(b->at % PRS_ARENA_ALIGNMENT, 0);
        cr_assert_leq(b->at + b->bytes, a->chunk_bytes[b->chunk]);
        if (b->next && b->next->chunk == b->chunk)
            cr_assert_leq(b->at + b->bytes, b->next->at);
        else if (b->next)
            cr_assert_lt(b->chunk, b->next->chunk);
    }
}

/* Two ranks make the same calls, and neither knows of the other. */
Test(arena, the_same_calls_give_the_same_blocks, .timeout = 60)
{
    struct prs_arena two[2] = {{0}, {0}};
    struct prs_block *blocks[2][BLOCKS] = {{NULL}};
    uint32_t refused = 0;
    srand(7);
    for (int i = 0; i < 2; i++)
        for (int c = 0; c < 2; c++)
            cr_assert_eq(prs_arena_add(&two[i], CHUNK), 0);
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t at = (uint32_t)rand() % BLOCKS;
        uint64_t bytes = (uint64_t)rand() % (CHUNK / 8);
        int r[2] = {0};
        for (int i = 0; i < 2; i++) {
            if (blocks[i][at]) {
                prs_arena_give_back(&two[i], blocks[i][at]);
                blocks[i][at] = NULL;
            } else {
                r[i] = prs_arena_take(&two[i], bytes, &blocks[i][at]);
            }
        }
        cr_assert_eq(r[0], r[1]);
        refused += r[0] == -ENOSPC;
        if (blocks[0][at])
            cr_assert(blocks[0][at]->chunk == blocks[1][at]->chunk && blocks[0][at]->at == blocks[1][at]->at);
        assert_apart(&two[0]);
    }
    cr_assert_gt(refused, 0, "the arena was never full: the test tests less than it could");
    for (int i = 0; i < 2; i++)
        prs_arena_fini(&two[i]);
}

Test(arena, what_is_given_back_is_taken_again)
{
    struct prs_arena a = {0};
    struct prs_block *first, *whole;
    cr_assert_eq(prs_arena_add(&a, CHUNK), 0);
    cr_assert_eq(prs_arena_take(&a, CHUNK / 2, &first), 0);
    cr_assert_eq(prs_arena_take(&a, CHUNK, &whole), -ENOSPC);
    prs_arena_give_back(&a, first);
    cr_assert_eq(prs_arena_take(&a, CHUNK, &whole), 0);
    cr_assert_eq(whole->at, 0);
    prs_arena_fini(&a);
}

/* Few chunks for an arena that grows by small blocks, and none that is larger than asked for where one block is
 * large. */
Test(arena, chunks_grow_with_the_arena)
{
    struct prs_arena a = {0};
    struct prs_block *block;
    uint64_t taken = 0;
    for (; taken < 256ull << 20; taken += 1 << 20) {
        if (prs_arena_take(&a, 1 << 20, &block) == 0)
            continue;
        cr_assert_eq(prs_arena_add(&a, prs_arena_growth(&a, 1 << 20)), 0);
        cr_assert_eq(prs_arena_take(&a, 1 << 20, &block), 0);
    }
    cr_assert_leq(a.chunks, 12, "%u chunks", a.chunks);
    cr_assert_eq(prs_arena_used(&a), taken);
    cr_assert_geq(prs_arena_held(&a), taken);
    cr_assert_eq(prs_arena_growth(&a, 300ull << 20), 300ull << 20);
    prs_arena_fini(&a);
}

/* Twice as large as the largest one before, but never much larger than what is asked for. */
Test(arena, shared_pieces_grow_with_the_plans_that_share_them)
{
    cr_assert_eq(prs_arena_shared(3 << 20, 0), 3 << 20);
    cr_assert_eq(prs_arena_shared(4 << 20, 3 << 20), 6 << 20);
    cr_assert_eq(prs_arena_shared(7 << 20, 3 << 20), 7 << 20);
    cr_assert_eq(prs_arena_shared(1100ull << 20, 1000ull << 20), 1164ull << 20);
}
