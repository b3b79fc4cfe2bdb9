/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/order/stripe.h"

uint32_t prs_stripe_fastest(const struct prs_stripe *stripes, uint32_t count, uint64_t len_bytes)
{
    uint32_t best = 0;
    float best_time = 0;

    for (uint32_t i = 0; i < count; i++) {
        float time = (float)(stripes[i].backlog_bytes + len_bytes) / stripes[i].rate;

        if (i == 0 || time < best_time) {
            best = i;
            best_time = time;
        }
    }
    return best;
}

/* When would the used stripes be done with their backlogs and with len_bytes, if all were done at once? */
static float common_finish(const struct prs_stripe *stripes, uint32_t count, uint64_t used, uint64_t len_bytes)
{
    float rate = 0, bytes = (float)len_bytes;

    for (uint32_t i = 0; i < count; i++) {
        if (used >> i & 1) {
            rate += stripes[i].rate;
            bytes += (float)stripes[i].backlog_bytes;
        }
    }
    return bytes / rate;
}

void prs_stripe_cut(struct prs_stripe *stripes, uint32_t count, uint64_t len_bytes)
{
    uint64_t used = count == 64 ? ~0ull : (1ull << count) - 1, left = len_bytes;
    uint32_t best = prs_stripe_fastest(stripes, count, len_bytes);
    float finish;

    /* Each round leaves out one stripe. The others then finish later, so a stripe that was left out stays out. */
    for (;;) {
        uint32_t worst = count;
        float least = STRIPE_MIN_BYTES;

        finish = common_finish(stripes, count, used, len_bytes);
        for (uint32_t i = 0; i < count; i++) {
            float part = finish * stripes[i].rate - (float)stripes[i].backlog_bytes;

            if ((used >> i & 1) && part < least && i != best) {
                worst = i;
                least = part;
            }
        }
        if (worst == count)
            break;
        used &= ~(1ull << worst);
    }
    for (uint32_t i = 0; i < count; i++) {
        float part = finish * stripes[i].rate - (float)stripes[i].backlog_bytes;
        uint64_t bytes = part > 0 ? (uint64_t)part & ~(uint64_t)(STRIPE_ALIGN - 1) : 0;

        stripes[i].bytes = used >> i & 1 ? (bytes < left ? bytes : left) : 0;
        left -= stripes[i].bytes;
    }
    stripes[best].bytes += left; /* what rounding has left over */
}
