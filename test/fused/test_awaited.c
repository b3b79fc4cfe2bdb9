/* SPDX-License-Identifier: Apache-2.0 */
/* Each flag has a number of its own, whichever family awaits it: error texts name flags by their numbers. */
#include <criterion/criterion.h>

#include "fused/attention/schedule.h"
#include "fused/core/sync.h"
#include "fused/gemm/schedule.h"
#include "fused/moe/route.h"

Test(awaited, no_two_flags_have_the_same_number)
{
    static const uint32_t all[] = {PRS_AWAIT_PEERS,  PRS_AWAIT_NETWORK, PRS_AWAIT_CTAS,      PRS_AWAIT_PARTIAL,
                                   PRS_AWAIT_CHUNK,  PRS_AWAIT_KEYS,    PRS_AWAIT_BROADCAST, PRS_AWAIT_CREDIT,
                                   PRS_AWAIT_ROUTES, PRS_AWAIT_TOKEN,   PRS_AWAIT_BLOCK,     PRS_AWAIT_END,
                                   PRS_AWAIT_SUM,    PRS_AWAIT_EXPERT,  PRS_AWAIT_QUERIES,   PRS_AWAIT_GRADIENTS};
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) {
        cr_assert(all[i] != 0 && all[i] < 64, "%u", all[i]);
        for (size_t j = 0; j < i; j++)
            cr_assert_neq(all[i], all[j], "%zu and %zu are %u", i, j, all[i]);
    }
}
