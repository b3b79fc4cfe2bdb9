/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that every rank allocates and all map. */
#ifndef PERSEUS_FUSED_SYMMETRIC_H
#define PERSEUS_FUSED_SYMMETRIC_H

#include "fused/context.h"

/* One symmetric allocation. */
struct prs_symmetric {
    struct prs_symmetric *next;
    size_t bytes;
    uint8_t *at[PRS_MAX_WORLD]; /* [p]: the allocation of rank + p; [0] own */
    bool opened[PRS_MAX_WORLD]; /* [p]: mapped from another process */
};

/* Collective. Zeroed on every rank before any of them gets it. */
int prs_symmetric_open(struct prs_fused *ctx, size_t bytes, struct prs_symmetric **out);
void prs_symmetric_close(struct prs_fused *ctx, struct prs_symmetric *s);

/* The allocation that holds ptr .. ptr + bytes, or NULL. */
const struct prs_symmetric *prs_symmetric_find(const struct prs_fused *ctx, const void *ptr, size_t bytes);

#endif
