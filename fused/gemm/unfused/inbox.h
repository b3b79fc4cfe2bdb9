/* SPDX-License-Identifier: Apache-2.0 */
/* A sum over the ranks of a node by one kernel, for few rows: a rank stores its partial sums straight into the inboxes
 * of the ranks that add them up, and each of those adds up what has arrived. In one hop every rank adds up all of the
 * result that it needs. In two, for an all-reduce, each rank adds up a part, and stores its results into the inboxes of
 * the others. There is no flag, no fence and no barrier: the words themselves say that they have arrived.
 *
 * Words. A word is two elements, or a result in fp32, inverted. 0 stands for "nothing yet": it would be one or two
 * not-a-numbers with all bits set, which the sender replaces by those that rounding gives. Everything else, -0
 * included, arrives as it is. The receiver reads 16 bytes at a time, but looks at each word: only a word arrives as a
 * whole.
 *
 * Reuse. An inbox has two banks, which the launches use in turn; all launches of the context that share the memory
 * count (struct prs_inbox), and they run in the same order on all ranks. The thread that has read a word clears it, so
 * a bank is empty when its launch has ended. A sender is in launch t + 2, and writes to the bank of t again, only when
 * it has ended t + 1. For that it needed something of t + 1 from every rank: in one hop, a word for each item; in two,
 * the same for its part, or, where it has none, results to which every rank has sent. A rank sends words of t + 1 when
 * its own launch t has ended: it has then read, and cleared, all words of t. This holds for any number of ranks. It
 * needs nothing of the host, so it holds for graphs that are replayed, for plans that share the inbox, and for any
 * rows. A launch that gave up may leave words behind, but then no later one may use them: its error is final.
 *
 * Any residency. A CTA draws its number when it starts, so those that run are the first ones. It sends its partial sums
 * before it waits, and it waits only for CTAs of the same number. So the lowest number that has not ended everywhere
 * can continue. */
#ifndef PERSEUS_FUSED_INBOX_H
#define PERSEUS_FUSED_INBOX_H

#include "fused/core/inbox_word.h"

enum {
    PRS_INBOX_ITEM = 8,       /* elements that a thread adds up at a time: 16 bytes of partial sums */
    PRS_INBOX_BANKS = 256,    /* where the banks begin, after struct prs_inbox */
    PRS_INBOX_MOST_CTAS = 128 /* at most PRS_INBOX_LAUNCH - 1 */
};

/* At the beginning of the memory; only its own rank touches it. Launches of all plans count: CTAs that have drawn their
 * number in the current one, and PRS_INBOX_LAUNCH for each launch before it. */
struct prs_inbox {
    uint32_t drawn;
};
enum { PRS_INBOX_LAUNCH = 256 };

/* How many items `elements` elements are; the last may be incomplete. */
PRS_SHARED uint64_t prs_inbox_items(uint64_t elements)
{
    return (elements + PRS_INBOX_ITEM - 1) / PRS_INBOX_ITEM;
}

/* A bank has a slot for each of the other ranks of the node, in rank order. Local ranks. */
PRS_SHARED uint32_t prs_inbox_slot(uint32_t from, uint32_t to)
{
    return from < to ? from : from - 1;
}

/* Bytes of a bank, for parts of `elements` elements. vectors: vectors of 16 bytes for each item and rank: one of
 * partial sums, and with two hops those of a result, which may be fp32. */
PRS_SHARED uint64_t prs_inbox_bank_bytes(uint32_t ranks, uint64_t elements, uint32_t vectors)
{
    return (ranks - 1) * prs_inbox_items(elements) * vectors * 16;
}

/* Bytes of an inbox whose banks have bank_bytes each. */
PRS_SHARED uint64_t prs_inbox_bytes(uint64_t bank_bytes)
{
    return PRS_INBOX_BANKS + 2 * bank_bytes;
}

/* The offset of the second bank from the first, in memory of `bytes` bytes that plans of several sizes share. */
PRS_SHARED uint64_t prs_inbox_bank_step(uint64_t bytes)
{
    return (bytes - PRS_INBOX_BANKS) / 2 / 16 * 16;
}

#endif
