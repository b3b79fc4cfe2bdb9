/* SPDX-License-Identifier: Apache-2.0 */
/* Words that say themselves that they have arrived, two elements each: inverted, so that 0 stands for "nothing yet".
 * Inverted it would be one or two not-a-numbers with all bits set, which the sender replaces by those that rounding
 * gives. gemm/unfused/inbox.h and moe/few.h say when such memory is used again. Plain C. */
#ifndef PERSEUS_FUSED_INBOX_WORD_H
#define PERSEUS_FUSED_INBOX_WORD_H

#include "fused/core/geometry.h"

/* What travels for a word: never 0. */
PRS_SHARED uint32_t prs_inbox_sent(uint32_t word)
{
    return word == 0xffffffffu ? ~0x7fff7fffu : ~word;
}

PRS_SHARED uint32_t prs_inbox_received(uint32_t sent)
{
    return ~sent;
}

#endif
