/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of this rank alone. */
#ifndef PERSEUS_FUSED_LOCAL_H
#define PERSEUS_FUSED_LOCAL_H

#include <stdint.h>

struct prs_block;
struct prs_fused;
struct prs_scratch;

/* Device memory of this rank, from the context's arena. */
struct prs_local {
    struct prs_block *block;
    struct prs_scratch *scratch; /* NULL: not shared */
    uint8_t *at;
};

/* The first `clean` bytes are zero. Not collective. */
int prs_local_take(struct prs_fused *ctx, uint64_t bytes, uint64_t clean, struct prs_local *out);
/* The same with any content, and shared: all plans of a context that ask for such memory get the same piece, if it is
 * large enough. Their launches run one after the other. *whole: bytes of the piece. */
int prs_local_share(struct prs_fused *ctx, uint64_t bytes, struct prs_local *out, uint64_t *whole);
void prs_local_give_back(struct prs_fused *ctx, struct prs_local *l);

#endif
