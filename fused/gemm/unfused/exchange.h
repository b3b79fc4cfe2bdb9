/* SPDX-License-Identifier: Apache-2.0 */
/* What a rank of the unfused path puts to its counterparts on other nodes, and which signal it sends and awaits. Plain
 * C shared by host, kernels and the CPU protocol test (test/fused). */
#ifndef PERSEUS_FUSED_EXCHANGE_H
#define PERSEUS_FUSED_EXCHANGE_H

#include "fused/gemm/schedule.h"

/* alignment of slots, so that they have whole cache lines and vectors of 16 bytes */
enum { PRS_EXCHANGE_ALIGNMENT = 256 };

/* How the ranks divide a matrix of `all` elements, in rank order: `each` per rank, and the rest for the last ranks. */
struct prs_slice {
    uint64_t all, each;
};

/* The same in bytes. A type of its own, so that the compiler tells one from the other. */
struct prs_slice_bytes {
    uint64_t all_bytes, each_bytes;
};

/* Every slice begins at a multiple of `step` elements. */
PRS_SHARED struct prs_slice prs_slice_of(uint64_t all, uint32_t world, uint32_t step)
{
    struct prs_slice s;
    s.all = all;
    s.each = ((all + world - 1) / world + step - 1) / step * step;
    return s;
}

PRS_SHARED struct prs_slice_bytes prs_slice_scale(const struct prs_slice *s, uint32_t element_bytes)
{
    struct prs_slice_bytes b;
    b.all_bytes = s->all * element_bytes;
    b.each_bytes = s->each * element_bytes;
    return b;
}

PRS_SHARED uint64_t prs_slice_begin(uint64_t all, uint64_t each, uint32_t rank)
{
    /* MUTANT(model unfused) the last slice is what is left: s/< all ? each * rank : all// */
    return each * rank < all ? each * rank : all;
}

PRS_SHARED uint64_t prs_slice_first(const struct prs_slice *s, uint32_t rank)
{
    return prs_slice_begin(s->all, s->each, rank);
}

PRS_SHARED uint64_t prs_slice_count(const struct prs_slice *s, uint32_t rank)
{
    return prs_slice_first(s, rank + 1) - prs_slice_first(s, rank);
}

PRS_SHARED uint64_t prs_slice_offset(const struct prs_slice_bytes *s, uint32_t rank)
{
    return prs_slice_begin(s->all_bytes, s->each_bytes, rank);
}

PRS_SHARED uint64_t prs_slice_len(const struct prs_slice_bytes *s, uint32_t rank)
{
    return prs_slice_offset(s, rank + 1) - prs_slice_offset(s, rank);
}

/* Sums need slots after the product: this node's sums for each counterpart, then each counterpart's sums for this
 * rank's slice. to, from: prs_index_after() of its node. */
PRS_SHARED uint64_t prs_exchange_slot_bytes(const struct prs_slice_bytes *s)
{
    return (s->each_bytes + PRS_EXCHANGE_ALIGNMENT - 1) / PRS_EXCHANGE_ALIGNMENT * PRS_EXCHANGE_ALIGNMENT;
}

PRS_SHARED uint64_t prs_exchange_sent(const struct prs_slice_bytes *s, uint32_t to)
{
    uint64_t begin = (s->all_bytes + PRS_EXCHANGE_ALIGNMENT - 1) / PRS_EXCHANGE_ALIGNMENT * PRS_EXCHANGE_ALIGNMENT;
    return begin + to * prs_exchange_slot_bytes(s);
}

PRS_SHARED uint64_t prs_exchange_received(const struct prs_slice_bytes *s, uint32_t nodes, uint32_t from)
{
    return prs_exchange_sent(s, nodes - 1 + from);
}

/* Kinds of signal words; there is one of each kind for every counterpart. */
enum prs_exchange_words {
    PRS_EXCHANGE_THERE, /* the counterpart's sums for this rank's slice, or its rows of A, are here */
    PRS_EXCHANGE_BACK,  /* the counterpart's memory may be written again; all-reduce: its slice of the result is here */
    PRS_EXCHANGE_WORDS
};

/* from: prs_index_after() of the counterpart's node. */
PRS_SHARED uint32_t prs_exchange_word(const struct prs_schedule *s, uint32_t kind, uint32_t from)
{
    /* MUTANT(model unfused) slices and credit have words of their own: s/(s->place.nodes - 1)/0/ */
    return kind * (s->place.nodes - 1) + from;
}

/* With slots: puts the slice of counterpart i from slot i at `source` into this rank's slot at `target` there. Without
 * slots: puts this rank's slice of the matrix at `source` to the same offset there. */
struct prs_exchange {
    struct prs_slice_bytes slice;
    uint64_t source, target; /* in the window */
    uint64_t slot_bytes;     /* 0: without slots */
    uint32_t window;
    uint32_t word;   /* enum prs_exchange_words: kind of the signal */
    uint32_t what;   /* enum prs_awaited */
    uint32_t credit; /* 1: nothing is put before PRS_EXCHANGE_BACK of the last launch has arrived */
    /* Further data that is put with this rank's slice, to the same offset there: beside_bytes bytes of each rank, in
     * rank order from `beside` on; or 0. */
    uint64_t beside, beside_bytes;
};

/* The part of an exchange with one counterpart. */
struct prs_exchange_part {
    uint64_t from, to, bytes; /* offsets in the window, here and there; bytes may be 0 */
    uint32_t peer;
    uint32_t signal;          /* word there */
    uint32_t awaited, credit; /* words here */
};

PRS_SHARED struct prs_exchange_part prs_exchange_with(const struct prs_schedule *s, const struct prs_exchange *x,
                                                      uint32_t i)
{
    uint32_t node = (s->place.node + 1 + i) % s->place.nodes,
             mine = prs_index_after(s->place.node, node, s->place.nodes);
    struct prs_exchange_part p;
    p.peer = prs_place_rank(&s->place, node, s->place.local_rank);
    /* MUTANT(model unfused) a signal names its sender: s/mine/i/ */
    p.signal = prs_exchange_word(s, x->word, mine);
    p.awaited = prs_exchange_word(s, x->word, i);
    p.credit = prs_exchange_word(s, PRS_EXCHANGE_BACK, i);
    /* MUTANT(model unfused) sums are as long as the receiver's slice: s/x->slot_bytes != 0 ? p.peer :// */
    p.bytes = prs_slice_len(&x->slice, x->slot_bytes != 0 ? p.peer : s->place.rank);
    /* MUTANT(model unfused) a slot here is that of its receiver: s/? i/? mine/ */
    p.from = x->source + (x->slot_bytes != 0 ? i * x->slot_bytes : prs_slice_offset(&x->slice, s->place.rank));
    /* MUTANT(model unfused) each sender has a slot of its own there: s#*#/ 2 *# */
    p.to = x->slot_bytes != 0 ? x->target + mine * x->slot_bytes : p.from;
    return p;
}

#endif
