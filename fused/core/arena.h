/* SPDX-License-Identifier: Apache-2.0 */
/* Divides chunks of memory into blocks. It touches no memory, and the same calls give the same blocks: so ranks that
 * take and give back blocks in the same order need not tell each other where the blocks are. Plain C, no CUDA. */
#ifndef PERSEUS_FUSED_ARENA_H
#define PERSEUS_FUSED_ARENA_H

#include <stdint.h>

enum { PRS_ARENA_ALIGNMENT = 512 };

/* A part of a chunk that is in use. */
struct prs_block {
    struct prs_block *next; /* in order of chunk and place */
    uint32_t chunk;
    uint64_t at, bytes; /* at: offset in the chunk; bytes: rounded up to the alignment */
};

struct prs_arena {
    struct prs_block *used;
    uint64_t *chunk_bytes; /* [chunks] */
    uint32_t chunks;
};

/* Takes the first place that is large enough. 0, -ENOSPC (no chunk has room; not logged) or -ENOMEM. */
int prs_arena_take(struct prs_arena *a, uint64_t bytes, struct prs_block **out);
/* NULL does nothing. */
void prs_arena_give_back(struct prs_arena *a, struct prs_block *block);

/* The size of a new chunk for a block of `bytes` bytes: at least that of all chunks so far (up to a limit), so that an
 * arena that grows block by block has few chunks. */
uint64_t prs_arena_growth(const struct prs_arena *a, uint64_t bytes);
/* The size of a new piece that plans share, if the largest one so far is too small for `bytes`: twice that size (up to
 * a limit), so that plans that are opened in order of size need few pieces. */
uint64_t prs_arena_shared(uint64_t bytes, uint64_t largest);
/* Add a chunk; its number is how many there were before. 0 or -ENOMEM. */
int prs_arena_add(struct prs_arena *a, uint64_t bytes);

/* Bytes of all chunks, and of the blocks that are in use. */
uint64_t prs_arena_held(const struct prs_arena *a);
uint64_t prs_arena_used(const struct prs_arena *a);

void prs_arena_fini(struct prs_arena *a);

#endif
