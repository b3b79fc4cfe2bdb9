/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention, warp 2: counts the pieces that have been read, and gives the senders credit for a group when all its
 * pieces have been read. A thread of its own, because each count takes as long as a step. */
#ifndef PERSEUS_FUSED_ATTENTION_CREDIT_CUH
#define PERSEUS_FUSED_ATTENTION_CREDIT_CUH

#include "fused/attention/far.cuh"

/* turn: pieces before. */
template <class E>
PRS_DEVICE void count_piece(const struct prs_attention_args &args, const struct attention_memory &m, uint32_t epoch,
                            uint32_t turn, uint32_t group)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t slot = turn % PRS_ATTENTION_PIECE_SLOTS;
    mbarrier_wait(&m.piece_read[slot], turn / PRS_ATTENTION_PIECE_SLOTS & 1);
    mbarrier_arrive(&m.piece_empty[slot]); /* not before: else piece_read could complete two phases meanwhile */
    if (E::far)
        count_for_far(args, epoch, group);
    if (!arrives_last(args.finished + group, args.pieces_of[group]))
        return;
    fence_release_sys(); /* [slab-credit]: all pieces are read, before the credit that await_credit() waits for */
    for (uint32_t p = 1; p < s->place.local_ranks; p++)
        store_release_sys(args.credits[p] + prs_attention_credit(s, p, group), epoch);
}

/* One thread of each CTA calls it. */
template <class E> PRS_DEVICE void count_pieces(const struct prs_attention_args &args, const struct attention_memory &m)
{
    uint32_t epoch = launch_epoch(&args.sync), piece;
    for (uint32_t turn = 0; (piece = await_piece(m, turn)) < args.pieces_count; turn++)
        count_piece<E>(args, m, epoch, turn, args.pieces[piece].task.group);
}

#endif
