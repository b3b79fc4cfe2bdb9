/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/attention/copies.h"

#include "fused/attention/tensors.h"

/* The pairs that one 2D copy moves: rows of equal length at equal distance. */
struct run {
    uint64_t begin;        /* offset in the tensor, in bytes */
    uint64_t pitch, bytes; /* of a row of the copy; in bytes */
    uint32_t rows, pairs;
};

/* The longest run from `pair` on, up to `end`. row_bytes: of one position of one head. */
static struct run run_at(const struct prs_attention_args *a, uint32_t row_bytes, uint32_t pair, uint32_t end)
{
    const struct prs_attention_schedule *s = &a->schedule;
    uint64_t rows = (uint64_t)s->segments * s->segment_rows;
    uint32_t heads = a->heads_first != 0 ? 1 : s->heads_kv, head = pair % heads, left = end - pair;
    struct run run;
    if (head == 0 && left >= heads) { /* pairs, or whole batches, each without gaps */
        run.begin = pair * rows * row_bytes;
        run.pairs = left / heads * heads;
        run.pitch = run.bytes = run.pairs * rows * row_bytes;
        run.rows = 1;
    } else { /* heads of one batch entry: a row has them at one position */
        run.begin = (pair / heads * rows * heads + head) * row_bytes;
        run.pitch = (uint64_t)heads * row_bytes;
        run.pairs = left < heads - head ? left : heads - head;
        run.bytes = (uint64_t)run.pairs * row_bytes;
        run.rows = (uint32_t)rows;
    }
    return run;
}

/* Sends the keys or values of the pairs from `pair` up to `end` to the rank `distance` places before this one. */
static int copy_pairs(struct prs_copy_stream *c, const struct prs_attention_shape *shape,
                      const struct prs_attention_args *a, const uint8_t *from, uint32_t distance, uint32_t kind,
                      uint32_t pair, uint32_t end)
{
    const struct prs_attention_schedule *s = &a->schedule;
    uint8_t *to = a->staging[s->place.world - distance] + prs_attention_copied_at(shape, s, distance, kind);
    uint32_t row_bytes = prs_attention_kind_bytes(shape, kind);
    int r = 0;
    while (pair < end && r == 0) {
        struct run run = run_at(a, row_bytes, pair, end);
        r = prs_copy_stream_rows(c, to + run.begin, run.pitch, from + run.begin, run.pitch, run.bytes, run.rows);
        pair += run.pairs;
    }
    return r;
}

/* The rank before this one reads this slice first, so it gets it first. All ranks get the whole slice, also the half
 * that a causal rank never reads. So all ranks send the same amount to each rank, and no two of them send to the same
 * rank at the same time. When ranks sent only what was needed, it took 787 to 838 us instead of 690 (4 x H200, 8192
 * keys, causal): the rank that sends most sets the time, and copies of other ranks got in its way. */
int prs_attention_copies_enqueue(struct prs_copy_stream *c, const struct prs_attention_shape *shape,
                                 const struct prs_attention_args *a, const void *k, const void *v)
{
    const struct prs_attention_schedule *s = &a->schedule;
    int r = 0;
    for (uint32_t group = 0; group < s->groups && r == 0; group++) {
        uint32_t pair = group * s->group, end = pair + prs_attention_group_pairs(s, group);
        for (uint32_t distance = 1; distance < s->place.world && r == 0; distance++) {
            uint32_t *flag = a->arrivals[s->place.world - distance] + prs_attention_copied(s, distance, group);
            r = copy_pairs(c, shape, a, k, distance, PRS_KEYS, pair, end);
            if (!r)
                r = copy_pairs(c, shape, a, v, distance, PRS_VALUES, pair, end);
            if (!r)
                r = prs_copy_stream_word(c, flag, &a->sync.words->copying);
        }
    }
    return r;
}
