/* SPDX-License-Identifier: Apache-2.0 */
/* Words that need no flag: a word has arrived when it is not 0. It holds two elements, inverted. Only two elements of
 * which all bits are set would give 0. Such an element is a not-a-number, and the sender replaces it by the one that
 * rounding gives. gemm/unfused/inbox.h and moe/few.h say when such memory is used again. Plain C. */
#ifndef PERSEUS_FUSED_INBOX_WORD_H
#define PERSEUS_FUSED_INBOX_WORD_H

#include "fused/core/geometry.h"

/* What is sent for a word: never 0. */
PRS_SHARED uint32_t prs_inbox_sent(uint32_t word)
{
    return word == 0xffffffffu ? ~0x7fff7fffu : ~word;
}

PRS_SHARED uint32_t prs_inbox_received(uint32_t sent)
{
    return ~sent;
}

#endif
