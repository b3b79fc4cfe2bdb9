/* SPDX-License-Identifier: Apache-2.0 */
/* Words that need no flag: a word has arrived when it is not 0. It contains the inverted bits of two elements. So it
 * would be 0 only if all bits of both elements were set. Such an element is a not-a-number, and the sender replaces it
 * by the not-a-number that rounding gives. gemm/unfused/inbox.h and moe/few.h say when such memory is used again. Plain
 * C. */
#ifndef PERSEUS_FUSED_INBOX_WORD_H
#define PERSEUS_FUSED_INBOX_WORD_H

#include "fused/core/geometry.h"

/* The word to send for a word of elements; it is never 0. */
PRS_SHARED uint32_t prs_inbox_sent(uint32_t word)
{
    return word == 0xffffffffu ? ~0x7fff7fffu : ~word;
}

PRS_SHARED uint32_t prs_inbox_received(uint32_t sent)
{
    return ~sent;
}

#endif
