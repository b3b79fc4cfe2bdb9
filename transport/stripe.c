/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/stripe.h"

uint32_t prs_stripe_first(const struct prs_lane *lanes, uint32_t count, uint64_t len_bytes)
{
    uint32_t best = 0;
    float best_time = 0;

    for (uint32_t i = 0; i < count; i++) {
        float time = (float)(lanes[i].backlog_bytes + len_bytes) / lanes[i].rate;

        if (i == 0 || time < best_time) {
            best = i;
            best_time = time;
        }
    }
    return best;
}

/* When would all used lanes be done, had they to share len_bytes besides their backlog? */
static float common_finish(const struct prs_lane *lanes, uint32_t count, uint64_t used, uint64_t len_bytes)
{
    float rate = 0, bytes = (float)len_bytes;

    for (uint32_t i = 0; i < count; i++) {
        if (used >> i & 1) {
            rate += lanes[i].rate;
            bytes += (float)lanes[i].backlog_bytes;
        }
    }
    return bytes / rate;
}

void prs_stripe_cut(struct prs_lane *lanes, uint32_t count, uint64_t len_bytes)
{
    uint64_t used = count == 64 ? ~0ull : (1ull << count) - 1, left = len_bytes;
    uint32_t best = prs_stripe_first(lanes, count, len_bytes);
    float finish;

    /* Leaving out a lane makes the others finish later, which cannot bring the lane back: so one lane a round. */
    for (;;) {
        uint32_t worst = count;
        float least = STRIPE_MIN_BYTES;

        finish = common_finish(lanes, count, used, len_bytes);
        for (uint32_t i = 0; i < count; i++) {
            float share = finish * lanes[i].rate - (float)lanes[i].backlog_bytes;

            if ((used >> i & 1) && share < least && i != best) {
                worst = i;
                least = share;
            }
        }
        if (worst == count)
            break;
        used &= ~(1ull << worst);
    }
    for (uint32_t i = 0; i < count; i++) {
        float share = finish * lanes[i].rate - (float)lanes[i].backlog_bytes;
        uint64_t bytes = share > 0 ? (uint64_t)share & ~(uint64_t)(STRIPE_ALIGN - 1) : 0;

        lanes[i].share_bytes = used >> i & 1 ? (bytes < left ? bytes : left) : 0;
        left -= lanes[i].share_bytes;
    }
    lanes[best].share_bytes += left; /* what rounding left */
}
