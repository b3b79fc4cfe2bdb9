/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention between nodes: puts slabs of this rank's slice to the counterparts, and gives the counterparts credit
 * for what they put here. The functions that put or signal run rarely, are out of line and take plain numbers, so that
 * they cost the roles no registers. */
#ifndef PERSEUS_FUSED_ATTENTION_FAR_CUH
#define PERSEUS_FUSED_ATTENTION_FAR_CUH

#include "fused/attention/backward/layout.h"
#include "fused/attention/cta.cuh"
#include "fused/core/far.cuh"

/* Bytes from the beginning of staging memory. */
PRS_DEVICE uint64_t staging_place(const struct prs_attention_args &args, uint32_t stage, uint32_t row)
{
    /* MUTANT(emulator attention_lengths/that_are_pushed_have_the_bits_of_their_own_plan) stages keep their places:
     * s/room_rows/segment_rows/ */
    return ((uint64_t)stage * args.schedule.room_rows + row) * args.row_bytes;
}

/* ---- backward: the terms of a slab's queries travel with it, before it is signalled or counted [terms] ---- */
/* The offset in staging memory of the terms of rows from `row` on. It is the same at the rank that has the rows and at
 * all ranks that receive them. */
PRS_DEVICE uint64_t terms_place(const struct prs_attention_args &args, uint32_t epoch, uint32_t rank, uint32_t pair,
                                uint32_t segment, uint32_t row)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint64_t term = prs_backward_term(s, prs_backward_bank(epoch), rank, pair, segment) + row;
    return prs_attention_staged_bytes(s, args.row_bytes) + term * sizeof(struct prs_backward_term);
}

/* Bytes of the terms that travel with so many rows. With the last rows of a segment, the zeros that fill its last tile
 * travel too. */
PRS_DEVICE uint32_t terms_bytes(const struct prs_attention_args &args, uint32_t row, uint32_t rows)
{
    uint32_t end = row + rows == args.schedule.segment_rows ? prs_backward_term_rows(&args.schedule) : row + rows;
    /* MUTANT(emulator attention_backward_nodes/two_nodes_give_what_one_does) terms of rows that fill a tile travel:
     * s/end - row/rows/ */
    return (end - row) * (uint32_t)sizeof(struct prs_backward_term);
}

/* ---- slabs ---- */
/* Called when a message has landed in the relay slot; index: of its arrival counter. The call for a slab's last message
 * puts the slab to the counterparts that read it. The slot may be written again only with their credit for it, which
 * says that the puts are done. */
template <class E>
PRS_DEVICE_OUTLINED void relay_message(const struct prs_attention_args &args, uint32_t epoch, uint32_t index)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t slab = index % s->room_slabs, tensor = index / s->room_slabs / s->segments;
    uint32_t segment = index / s->room_slabs % s->segments, kind = tensor % 2, pair = tensor / 2 % s->room_pairs;
    uint32_t row = slab * s->slab_chunks * s->chunk_rows, rows = s->segment_rows - row;
    if (!arrives_last(arrival_at(args, 0, epoch, index), prs_attention_arrivals(s, slab)))
        return;
    rows = rows < s->slab_chunks * s->chunk_rows ? rows : s->slab_chunks * s->chunk_rows;
    for (uint32_t back = 1; back < s->place.nodes; back++) {
        uint32_t peer = prs_place_counterpart(&s->place, s->place.nodes - back);
        uint32_t from = prs_attention_stage(s, s->place.world, pair, kind, segment);
        uint32_t to = prs_attention_stage(s, back * s->place.local_ranks, pair, kind, segment);
        if (segment >= prs_attention_interest(s, s->place.rank, peer))
            continue;
        if (E::terms && kind == PRS_KEYS) {
            uint64_t terms = terms_place(args, epoch, s->place.rank, pair, segment, row);
            put_far(args, peer, args.far.staging_window, terms, terms, terms_bytes(args, row, rows), index);
        }
        put_far(args, peer, args.far.staging_window, staging_place(args, from, row), staging_place(args, to, row),
                rows * args.row_bytes, index);
        signal_far(args, peer, prs_attention_far_slab(s, back, pair, kind, segment, slab), epoch, index);
    }
}

/* Called for each piece of a group that has been read, and for each of its messages that has been forwarded. The last
 * call gives the counterparts credit for what they put here. */
PRS_DEVICE_OUTLINED void count_for_far(const struct prs_attention_args &args, uint32_t epoch, uint32_t group)
{
    const struct prs_attention_schedule *s = &args.schedule;
    if (!arrives_last(args.finished + 2 * s->groups + group, args.pieces_of[group] + prs_attention_forwards(s, group)))
        return;
    for (uint32_t way = 1; way < s->place.nodes; way++)
        signal_far(args, prs_place_counterpart(&s->place, way), prs_attention_far_credit(s, way, group), epoch, group);
}

#endif
