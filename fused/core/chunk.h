/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks of symmetric memory: allocated, mapped by the ranks of the node, and registered with the network. */
#ifndef PERSEUS_FUSED_CHUNK_H
#define PERSEUS_FUSED_CHUNK_H

#include "fused/core/symmetric.h"

struct prs_keys;

/* Collective: adds a chunk to each arena whose more[] is not 0. */
int prs_chunk_grow(struct prs_fused *ctx, const uint64_t *more);

/* Collective: allocates the memory of these chunks, one of each use or NULL, and maps that of the other ranks. Chunks
 * that are asleep wake at their old addresses. error: this rank has failed already. All ranks fail together; the caller
 * then undoes what was made. */
int prs_chunk_make(struct prs_fused *ctx, struct prs_chunk *const *chunk, int error);
/* Gives the memory back and keeps its addresses. No rank may use it. */
int prs_chunk_sleep(const struct prs_fused *ctx, struct prs_chunk *c);

/* Between nodes registers the memory of the chunk on this rank and gives its keys; otherwise does nothing. */
int prs_chunk_register(struct prs_fused *ctx, struct prs_chunk *c, enum prs_symmetric_use use, struct prs_keys *keys);

/* Undoes the mapping and the registration. */
void prs_chunk_unmap(const struct prs_fused *ctx, struct prs_chunk *c);

#endif
