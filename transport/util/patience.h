/* SPDX-License-Identifier: Apache-2.0 */
/* A time limit for a loop that looks again and again at what another thread, process or NIC does. A look that took long
 * counts only in part: this thread was off its core then, or its process was stopped, and so may have been the one that
 * it waits for. */
#ifndef TRANSPORT_UTIL_PATIENCE_H
#define TRANSPORT_UTIL_PATIENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "transport/util/clock.h"

struct prs_patience {
    uint64_t last_ns, waited_ns;
    uint64_t look_ns;
};

/* look_ns: one look counts as at most this long. */
static inline struct prs_patience prs_patience_begin(uint64_t look_ns)
{
    return (struct prs_patience){.last_ns = prs_clock_ns(), .look_ns = look_ns};
}

/* To be called once a look. Has the loop waited for longer than limit_ms? */
static inline bool prs_patience_is_over(struct prs_patience *patience, uint64_t limit_ms)
{
    uint64_t now_ns = prs_clock_ns(), look_ns = now_ns - patience->last_ns;

    patience->waited_ns += look_ns < patience->look_ns ? look_ns : patience->look_ns;
    patience->last_ns = now_ns;
    return patience->waited_ns > limit_ms * 1000000;
}

#endif
