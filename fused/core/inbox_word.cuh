/* SPDX-License-Identifier: Apache-2.0 */
/* The words of inbox_word.h, four at a time. */
#ifndef PERSEUS_FUSED_INBOX_WORD_CUH
#define PERSEUS_FUSED_INBOX_WORD_CUH

#include "fused/core/inbox_word.h"
#include "fused/core/ptx.cuh"

PRS_DEVICE uint4 sent_vector(uint4 x)
{
    return make_uint4(prs_inbox_sent(x.x), prs_inbox_sent(x.y), prs_inbox_sent(x.z), prs_inbox_sent(x.w));
}

PRS_DEVICE uint4 received_vector(uint4 x)
{
    return make_uint4(prs_inbox_received(x.x), prs_inbox_received(x.y), prs_inbox_received(x.z),
                      prs_inbox_received(x.w));
}

PRS_DEVICE bool has_arrived(uint4 x)
{
    /* MUTANT(emulator few_rows_are_summed_in_one_hop) every word of a vector arrives by itself: s/x.x != 0 &&// */
    return x.x != 0 && x.y != 0 && x.z != 0 && x.w != 0;
}

#endif
