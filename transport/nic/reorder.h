/* SPDX-License-Identifier: Apache-2.0 */
/* A reorder buffer, for NICs that complete the requests of one queue in any order. It reports what a NIC that keeps
 * order would report: each signaled request, oldest first, once it and all earlier ones are complete. Pure. */
#ifndef TRANSPORT_REORDER_H
#define TRANSPORT_REORDER_H

#include <stdbool.h>
#include <stdint.h>

struct prs_reorder {
    uint64_t *done;     /* one bit for each position modulo mask + 1: complete */
    uint64_t *signaled; /* one bit for each: to be reported */
    uint32_t mask;
    uint32_t head;     /* next position to be posted */
    uint32_t tail;     /* all positions before it are complete */
    uint32_t reported; /* all signaled positions before it have been reported; never ahead of tail */
};

/* depth: the most requests in flight, a power of two. Return 0 or -ENOMEM. */
int prs_reorder_init(struct prs_reorder *reorder, uint32_t depth);
void prs_reorder_fini(struct prs_reorder *reorder);

/* If none is in flight: the next position to be posted is this one. */
void prs_reorder_begin(struct prs_reorder *reorder, uint32_t position);
/* The next position was posted. The caller keeps at most depth positions posted and not yet reported. */
void prs_reorder_post(struct prs_reorder *reorder, bool signaled);
/* This position is complete. Return 0 or -EPROTO: it is not in flight, or was complete before. */
int prs_reorder_complete(struct prs_reorder *reorder, uint32_t position);
/* Take the next position to be reported. Return false: there is none now. */
bool prs_reorder_next(struct prs_reorder *reorder, uint32_t *position);

#endif
