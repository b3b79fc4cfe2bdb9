/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/arena.h"

#include <errno.h>
#include <stdlib.h>

#include "transport/util/error.h"

enum { CUDA_BLOCK_BYTES = 2 << 20, MOST_IN_ADVANCE = 64 << 20 };

static uint64_t round_up(uint64_t bytes, uint64_t to)
{
    return (bytes + to - 1) / to * to;
}

int prs_arena_take(struct prs_arena *a, uint64_t bytes, struct prs_block **out)
{
    struct prs_block **link = &a->used, *block;
    uint64_t at = 0;
    uint32_t chunk = 0;
    bytes = round_up(bytes == 0 ? 1 : bytes, PRS_ARENA_ALIGNMENT);
    for (; chunk < a->chunks; chunk++, at = 0) {
        for (; *link && (*link)->chunk == chunk && (*link)->at - at < bytes; link = &(*link)->next)
            at = (*link)->at + (*link)->bytes;
        if ((*link && (*link)->chunk == chunk) || a->chunk_bytes[chunk] - at >= bytes)
            break;
    }
    if (chunk == a->chunks)
        return -ENOSPC;
    block = malloc(sizeof(*block));
    if (!block)
        return prs_fail(-ENOMEM, "fused: no memory for the description of a block");
    *block = (struct prs_block){*link, chunk, at, bytes};
    *link = block;
    *out = block;
    return 0;
}

void prs_arena_give_back(struct prs_arena *a, struct prs_block *block)
{
    struct prs_block **link = &a->used;
    if (!block)
        return;
    while (*link != block)
        link = &(*link)->next;
    *link = block->next;
    free(block);
}

uint64_t prs_arena_held(const struct prs_arena *a)
{
    uint64_t held = 0;
    for (uint32_t i = 0; i < a->chunks; i++)
        held += a->chunk_bytes[i];
    return held;
}

uint64_t prs_arena_used(const struct prs_arena *a)
{
    uint64_t used = 0;
    for (const struct prs_block *b = a->used; b; b = b->next)
        used += b->bytes;
    return used;
}

uint64_t prs_arena_growth(const struct prs_arena *a, uint64_t bytes)
{
    uint64_t whole = prs_arena_held(a);
    whole = whole < MOST_IN_ADVANCE ? whole : MOST_IN_ADVANCE;
    return round_up(bytes > whole ? bytes : whole, CUDA_BLOCK_BYTES);
}

uint64_t prs_arena_shared(uint64_t bytes, uint64_t largest)
{
    uint64_t more = 2 * largest > bytes ? 2 * largest - bytes : 0;
    return bytes + (more < MOST_IN_ADVANCE ? more : MOST_IN_ADVANCE);
}

int prs_arena_add(struct prs_arena *a, uint64_t bytes)
{
    uint64_t *more = realloc(a->chunk_bytes, (a->chunks + 1) * sizeof(*more));
    if (!more)
        return prs_fail(-ENOMEM, "fused: no memory for the description of a chunk");
    a->chunk_bytes = more;
    a->chunk_bytes[a->chunks++] = bytes;
    return 0;
}

void prs_arena_fini(struct prs_arena *a)
{
    while (a->used)
        prs_arena_give_back(a, a->used);
    free(a->chunk_bytes);
    *a = (struct prs_arena){.chunks = 0};
}
