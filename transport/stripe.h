/* SPDX-License-Identifier: Apache-2.0 */
/* How a large transfer is cut over queues of unequal speed and backlog, so that all finish together. Pure arithmetic.
 */
#ifndef TRANSPORT_STRIPE_H
#define TRANSPORT_STRIPE_H

#include <stdint.h>

enum {
    STRIPE_MIN_BYTES = 32768, /* a smaller part costs more (a request, a receive, a completion) than it saves */
    STRIPE_ALIGN = 4096,      /* parts start where a packet of the largest MTU may start */
};

struct prs_lane {
    float rate;             /* bytes per microsecond; > 0 */
    uint64_t backlog_bytes; /* not yet completed */
    uint64_t share_bytes;   /* result */
};

/* Fill share_bytes of each lane; they add up to len_bytes. A lane that would get less than STRIPE_MIN_BYTES gets none.
 */
void prs_stripe_cut(struct prs_lane *lanes, uint32_t count, uint64_t len_bytes);

/* The lane on which len_bytes would be complete first. */
uint32_t prs_stripe_first(const struct prs_lane *lanes, uint32_t count, uint64_t len_bytes);

#endif
