/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/prefix.h"

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

int prs_prefix_init(struct prs_prefix *prefix, uint32_t depth)
{
    size_t words = (depth + WORD_BITS - 1) / WORD_BITS;

    *prefix = (struct prs_prefix){.mask = depth - 1};
    prefix->done = calloc(words, sizeof(*prefix->done));
    prefix->signaled = calloc(words, sizeof(*prefix->signaled));
    if (prefix->done && prefix->signaled)
        return 0;
    prs_prefix_fini(prefix);
    return -ENOMEM;
}

void prs_prefix_fini(struct prs_prefix *prefix)
{
    free(prefix->done);
    free(prefix->signaled);
    prefix->done = prefix->signaled = NULL;
}

void prs_prefix_post(struct prs_prefix *prefix, bool signaled)
{
    uint32_t at = prefix->head++ & prefix->mask;

    put(prefix->done, at, false);
    put(prefix->signaled, at, signaled);
}

int prs_prefix_done(struct prs_prefix *prefix, uint32_t position)
{
    if (position - prefix->tail >= prefix->head - prefix->tail || get(prefix->done, position & prefix->mask))
        return -EPROTO;
    put(prefix->done, position & prefix->mask, true);
    while (prefix->tail != prefix->head && get(prefix->done, prefix->tail & prefix->mask))
        prefix->tail++;
    return 0;
}

bool prs_prefix_next(struct prs_prefix *prefix, uint32_t *position)
{
    while (prefix->told != prefix->tail) {
        *position = prefix->told++;
        if (get(prefix->signaled, *position & prefix->mask))
            return true;
    }
    return false;
}
