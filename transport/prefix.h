/* SPDX-License-Identifier: Apache-2.0 */
/* For NICs that complete each request by itself and in any order: which requests of a queue are complete together with
 * all before them. What goes up is what a NIC that keeps order reports: one event for each signaled request, oldest
 * first. Pure. */
#ifndef TRANSPORT_PREFIX_H
#define TRANSPORT_PREFIX_H

#include <stdbool.h>
#include <stdint.h>

struct prs_prefix {
    uint64_t *done;     /* a bit each position modulo mask + 1: complete */
    uint64_t *signaled; /* to be told of */
    uint32_t mask;
    uint32_t head; /* next to be posted */
    uint32_t tail; /* all before it are complete */
    uint32_t told; /* all signaled before it have been told of; never ahead of tail */
};

/* depth: requests in flight at most, a power of two. Return 0 or -ENOMEM. */
int prs_prefix_init(struct prs_prefix *prefix, uint32_t depth);
void prs_prefix_fini(struct prs_prefix *prefix);

/* The next position was posted. The caller keeps at most depth between what was told and what is posted. */
void prs_prefix_post(struct prs_prefix *prefix, bool signaled);
/* That position is complete. Return 0 or -EPROTO: it is not in flight, or was complete before. */
int prs_prefix_done(struct prs_prefix *prefix, uint32_t position);
/* The next signaled position that is complete with all before it. Return false: there is none now. */
bool prs_prefix_next(struct prs_prefix *prefix, uint32_t *position);

#endif
