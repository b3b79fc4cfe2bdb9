/* SPDX-License-Identifier: Apache-2.0 */
/* Cut a large transfer over queues of unequal speed and backlog, so that all finish together. Pure arithmetic. */
#ifndef TRANSPORT_STRIPE_H
#define TRANSPORT_STRIPE_H

#include <stdint.h>

enum {
    STRIPE_MIN_BYTES = 32768, /* a smaller part costs more (a request, a receive, a completion) than it saves */
    STRIPE_ALIGN = 4096,      /* parts begin where a packet of the largest MTU may begin */
};

/* What one queue, or one path, carries of the transfer. */
struct prs_stripe {
    float rate;             /* bytes per microsecond; > 0 */
    uint64_t backlog_bytes; /* of earlier transfers, not complete yet */
    uint64_t bytes;         /* result: of this transfer */
};

/* Fill in bytes of each stripe; they add up to len_bytes. A stripe that would get less than STRIPE_MIN_BYTES gets
 * none. */
void prs_stripe_cut(struct prs_stripe *stripes, uint32_t count, uint64_t len_bytes);

/* Return the index of the queue on which the whole transfer would be complete first. */
uint32_t prs_stripe_fastest(const struct prs_stripe *stripes, uint32_t count, uint64_t len_bytes);

#endif
