/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/reorder.h"

#include <errno.h>
#include <stdlib.h>

enum { WORD_BITS = 64 };

static bool get(const uint64_t *bits, uint32_t at)
{
    return bits[at / WORD_BITS] >> (at % WORD_BITS) & 1;
}

static void put(uint64_t *bits, uint32_t at, bool value)
{
    uint64_t bit = 1ull << (at % WORD_BITS);

    bits[at / WORD_BITS] = value ? bits[at / WORD_BITS] | bit : bits[at / WORD_BITS] & ~bit;
}

int prs_reorder_init(struct prs_reorder *reorder, uint32_t depth)
{
    size_t words = (depth + WORD_BITS - 1) / WORD_BITS;

    *reorder = (struct prs_reorder){.mask = depth - 1};
    reorder->done = calloc(words, sizeof(*reorder->done));
    reorder->signaled = calloc(words, sizeof(*reorder->signaled));
    if (reorder->done && reorder->signaled)
        return 0;
    prs_reorder_fini(reorder);
    return -ENOMEM;
}

void prs_reorder_fini(struct prs_reorder *reorder)
{
    free(reorder->done);
    free(reorder->signaled);
    reorder->done = reorder->signaled = NULL;
}

void prs_reorder_begin(struct prs_reorder *reorder, uint32_t position)
{
    if (reorder->tail == reorder->head && reorder->reported == reorder->tail)
        reorder->head = reorder->tail = reorder->reported = position;
}

void prs_reorder_post(struct prs_reorder *reorder, bool signaled)
{
    uint32_t at = reorder->head++ & reorder->mask;

    put(reorder->done, at, false);
    put(reorder->signaled, at, signaled);
}

int prs_reorder_complete(struct prs_reorder *reorder, uint32_t position)
{
    if (position - reorder->tail >= reorder->head - reorder->tail || get(reorder->done, position & reorder->mask))
        return -EPROTO;
    put(reorder->done, position & reorder->mask, true);
    while (reorder->tail != reorder->head && get(reorder->done, reorder->tail & reorder->mask))
        reorder->tail++;
    return 0;
}

bool prs_reorder_next(struct prs_reorder *reorder, uint32_t *position)
{
    while (reorder->reported != reorder->tail) {
        *position = reorder->reported++;
        if (get(reorder->signaled, *position & reorder->mask))
            return true;
    }
    return false;
}
