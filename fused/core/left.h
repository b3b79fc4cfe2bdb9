/* SPDX-License-Identifier: Apache-2.0 */
/* The memory that a closed context leaves behind, because another rank may still write to it. */
#ifndef PERSEUS_FUSED_LEFT_H
#define PERSEUS_FUSED_LEFT_H

#include <stdint.h>

#include "fused/core/span.h"

struct prs_board;

struct prs_left {
    struct prs_left *next;
    struct prs_board *board; /* NULL: no other rank could reach the memory */
    int device;
    void *host;
    uint32_t count;
    struct prs_span memory[];
};

/* Frees all of it now. */
void prs_left_free(struct prs_left *l);
/* Frees it in a later prs_left_sweep(), when all ranks of its board have left. */
void prs_left_keep(struct prs_left *l);
/* Frees the memory that earlier contexts of this process left on a device, as far as no rank can touch it any more. */
void prs_left_sweep(int device);

#endif
