/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass, warps 2 and 3: adds what the CTA computes of dq to the sums in memory. The tasks of a head add to
 * a block of queries in their order, one after the other, so the result is the same each time. */
#ifndef PERSEUS_FUSED_ATTENTION_BACKWARD_ADD_CUH
#define PERSEUS_FUSED_ATTENTION_BACKWARD_ADD_CUH

#include "fused/attention/backward/load.cuh"
#include "fused/attention/credit.cuh"

/* Waits until the earlier tasks have added to this block. This wait needs no time limit: those tasks run on this GPU,
 * and their own waits for data have limits. */
PRS_DEVICE void await_turn(const uint64_t *turn, uint32_t want)
{
    while (prs_load_acquire_gpu(turn) < want) { /* [dq-turn]: what the task before has added */
    }
    fence_async_global(); /* the turn was read by an ordinary load, the sums are written by TMA */
}

/* For the block that a walk has reached: the number of its sum of dq, and how many tasks add to that sum before this
 * one. */
struct backward_turn {
    uint64_t sum;
    uint32_t want;
};

template <class E>
PRS_DEVICE struct backward_turn turn_of(const struct prs_backward_args &args, const struct prs_attention_task &t,
                                        const struct prs_attention_walk &w)
{
    const struct prs_attention_schedule *s = &args.stream.schedule;
    uint32_t span = prs_backward_span(s, &args.shape, &w, E::far);
    uint64_t sum = prs_backward_sum(s, args.pairs_q, span / s->segments, prs_backward_pair(&args.shape, &t, &w),
                                    span % s->segments, w.block);
    return {sum, prs_backward_turn(s, &t, &w)};
}

template <class E>
PRS_DEVICE struct backward_turn turn_of(const struct prs_backward_args &args, const struct prs_attention_task &t,
                                        const struct prs_stripe_walk &w)
{
    const struct prs_attention_schedule *s = &args.stream.schedule;
    struct prs_stripe_walk at = w;
    uint32_t position = prs_stripe_look(&args.stream.stripes, s, &at);
    uint64_t sum = prs_backward_sum(s, args.pairs_q, w.order, t.pair + w.head, w.at.span % s->segments, w.at.block);
    return {sum, prs_backward_stripe_turn(&args.stream.stripes, s, &t, position)};
}

/* step: how many blocks came before. */
template <class E>
PRS_DEVICE void add_block(const struct prs_backward_args &args, const struct attention_memory &m,
                          const struct backward_turn &x, uint32_t step)
{
    float *to = args.sums.sums + x.sum * PRS_BACKWARD_BLOCK;
    uint32_t buffer = step % PRS_BACKWARD_SUMS, phase = step / PRS_BACKWARD_SUMS & 1;
    const uint8_t *from = m.base + E::at_sums + buffer * E::warpgroups * E::sum_bytes;
    /* MUTANT(emulator attention_backward/causal_alone_is_right) tasks add in turn: delete */
    await_turn(args.sums.turns + x.sum, x.want);
    mbarrier_wait(&m.sum_full[buffer], phase);
    if (x.want == 0) /* the sum has no value yet */
        bulk_store(to, from, E::warpgroups * E::sum_bytes);
    else
        bulk_add_f32(to, from, E::warpgroups * E::sum_bytes);
    bulk_commit();
    bulk_wait_read<0>();
    mbarrier_arrive(&m.sum_empty[buffer]);
    bulk_wait_done<0>();
    prs_store_release_gpu(args.sums.turns + x.sum, x.want + 1); /* [dq-turn] */
}

/* Called by one thread of warp 2 (which = 0) and one of warp 3 (which = 1). Each adds every second block, because an
 * add takes as long as a step. */
template <class E>
PRS_DEVICE void add_queries(const struct prs_backward_args &args, const struct attention_memory &m, uint32_t which)
{
    uint32_t step = 0, at;
    static_assert(PRS_BACKWARD_SUMS == 2, "each has a buffer");
    for (uint32_t turn = 0; (at = await_piece(m, turn)) < args.stream.pieces_count; turn++) {
        const struct prs_attention_piece *piece = &args.stream.pieces[at];
        struct prs_attention_task t = piece->task;
        typename walk_of<E::striped>::type w;
        begin_pass(args, *piece, &w);
        do {
            if (step % 2 == which)
                add_block<E>(args, m, turn_of<E>(args, t, w), step);
            step++;
        } while (next_in_pass<E>(args, t, &w));
        if (which == 0)
            count_piece<E>(args.stream, m, launch_epoch(&args.stream.sync), turn, t.group);
        else
            mbarrier_arrive(&m.piece_empty[turn % PRS_ATTENTION_PIECE_SLOTS]);
        (void)add_acq_rel_gpu(args.stream.finished + args.stream.schedule.groups + t.group, 1); /* [dq-group] */
    }
}

#endif
