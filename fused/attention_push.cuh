/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention, warp 1: sends the own keys and values to the other ranks, which have given credit for the place. */
#ifndef PERSEUS_FUSED_ATTENTION_PUSH_CUH
#define PERSEUS_FUSED_ATTENTION_PUSH_CUH

#include "fused/attention_far.cuh"

/* Messages that have been sent and not yet counted at the other end, oldest first. */
struct push_queue {
    uint32_t length;
    uint32_t peer[PRS_ATTENTION_PUSH_SLOTS], index[PRS_ATTENTION_PUSH_SLOTS];
};

PRS_DEVICE void queue_message(struct push_queue *q, uint32_t peer, uint32_t index)
{
    if (q->length == 0) { /* registers have no run-time index */
        q->peer[0] = peer;
        q->index[0] = index;
    } else {
        q->peer[1] = peer;
        q->index[1] = index;
    }
    q->length++;
}

/* The oldest has landed: count it there. */
template <class E>
PRS_DEVICE void count_oldest(const struct prs_attention_args &args, uint32_t epoch, struct push_queue *q)
{
    fence_release_sys(); /* R5: the rows before their count. Pairs with the acquire in await_slabs(). */
    if (E::far && q->peer[0] == 0)
        relay_message(args, epoch, q->index[0]);
    else
        add_relaxed_sys(args.arrivals[q->peer[0]] + q->index[0], 1);
    q->peer[0] = q->peer[1];
    q->index[0] = q->index[1];
    q->length--;
}

template <class E>
PRS_DEVICE void count_all(const struct prs_attention_args &args, uint32_t epoch, struct push_queue *q)
{
    bulk_wait_done<0>();
    while (q->length != 0)
        count_oldest<E>(args, epoch, q);
}

/* Until *flag has come. Meanwhile nothing is held back: somebody may be waiting for the last messages before he can
 * raise it. */
template <class E>
PRS_DEVICE void await_flag(const struct prs_attention_args &args, uint32_t epoch, struct push_queue *q,
                           const uint32_t *flag, uint32_t want, uint32_t what, uint32_t from, uint32_t index)
{
    if (prs_flag_reached(load_acquire_sys(flag), want))
        return;
    count_all<E>(args, epoch, q);
    wait_flag(&args.sync, flag, want, what, from, index);
}

/* Until who reads the buffer of this group has finished with what is in it. */
template <class E>
PRS_DEVICE void await_credit(const struct prs_attention_args &args, const struct prs_attention_message &x,
                             uint32_t epoch, struct push_queue *q)
{
    const struct prs_attention_schedule *s = &args.schedule;
    bool earlier;
    uint32_t evicted = prs_attention_evicted(s, x.group, &earlier), want = earlier ? epoch - 1 : epoch;
    if (E::far && x.distance == 0) { /* the relay slot: all counterparts */
        for (uint32_t back = 1; back < s->nodes; back++) {
            uint32_t word = prs_attention_far_credit(s, back, evicted);
            await_flag<E>(args, epoch, q, far_flag(args, word), want, PRS_AWAIT_CREDIT,
                          prs_attention_counterpart(s, s->nodes - back), word);
        }
    } else {
        uint32_t index = prs_attention_credit(s, x.distance, evicted);
        await_flag<E>(args, epoch, q, args.credits[0] + index, want, PRS_AWAIT_CREDIT,
                      s->node * s->locals + (s->local + s->locals - x.distance) % s->locals, index);
    }
    fence_async_global(); /* the credit was read by an ordinary load, the copy engine writes on the strength of it */
}

/* Another node's share: until the slab has come from the counterpart. */
template <class E>
PRS_DEVICE void await_far_slab(const struct prs_attention_args &args, const struct prs_attention_message &x,
                               uint32_t epoch, struct push_queue *q)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t word = prs_attention_far_slab(s, x.way, x.pair, x.kind, x.segment, x.slab);
    await_flag<E>(args, epoch, q, far_flag(args, word), epoch, PRS_AWAIT_KEYS, prs_attention_counterpart(s, x.way),
                  word);
    fence_async_global(); /* the signal was read by an ordinary load, the rows are read by the copy engine */
}

/* Rows into a push slot: own ones, or a counterpart's, which lie in staging memory as they travel. */
template <class E>
PRS_DEVICE void fetch_message(const struct prs_attention_args &args, const struct attention_memory &m, uint32_t slot,
                              const struct prs_attention_message &x)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint8_t *to = m.base + slot * PRS_ATTENTION_PUSH_BYTES;
    struct attention_place at =
        attention_place_of(args, x.pair / s->heads_kv, x.pair % s->heads_kv, s->heads_kv, x.segment);
    if (E::far && x.way != 0) {
        uint32_t stage = prs_attention_stage(s, x.way * s->locals, x.pair, x.kind, x.segment);
        mbarrier_expect(&m.pushed[slot], x.rows * E::head_dim * 2);
        bulk_load(to, args.staging[0] + staging_place(args, stage, x.row), x.rows * E::head_dim * 2, &m.pushed[slot]);
        return;
    }
    mbarrier_expect(&m.pushed[slot], PRS_ATTENTION_PUSH_BYTES);
    tma_load_5d(to, x.kind == PRS_KEYS ? &args.push_k : &args.push_v, &m.pushed[slot], 0, (int32_t)x.row, 0, at.u,
                at.v);
}

/* Rows of one head lie without gaps in staging memory: one contiguous store. */
template <class E>
PRS_DEVICE void send_message(const struct prs_attention_args &args, const uint8_t *from,
                             const struct prs_attention_message &x, struct push_queue *q)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t order = prs_attention_order(s, x.way, x.distance), peer = x.distance == 0 ? 0 : s->locals - x.distance;
    uint32_t stage = prs_attention_stage(s, order, x.pair, x.kind, x.segment);
    bulk_store(args.staging[peer] + staging_place(args, stage, x.row), from, x.rows * E::head_dim * 2);
    bulk_commit();
    queue_message(q, peer, prs_attention_arrival(s, order, x.pair, x.kind, x.segment, x.slab));
}

/* A counterpart's rows, which are here already, for this rank's own loader. */
PRS_DEVICE void announce_message(const struct prs_attention_args &args, const struct prs_attention_message &x)
{
    const struct prs_attention_schedule *s = &args.schedule;
    fence_release_sys(); /* R7: what the signal said, before the count. Pairs with the acquire in await_slabs(). */
    add_relaxed_sys(args.arrivals[0] + prs_attention_arrival(s, x.way * s->locals, x.pair, x.kind, x.segment, x.slab),
                    1);
}

/* This CTA sends no more of the groups before `to`. */
template <class E>
PRS_DEVICE void pass_groups(const struct prs_attention_args &args, uint32_t epoch, struct push_queue *q,
                            uint32_t *passed, uint32_t to)
{
    if (*passed < to)
        count_all<E>(args, epoch, q);
    for (; *passed < to; ++*passed)
        add_acq_rel_gpu(args.finished + args.schedule.groups + *passed, 1);
}

/* What is to be waited for before a message may be sent. credited: for which buffer there is credit. */
template <class E>
PRS_DEVICE void await_message(const struct prs_attention_args &args, const struct prs_attention_message &x,
                              uint32_t epoch, struct push_queue *q, uint32_t *credited)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t buffer = x.group * s->locals + x.distance;
    if (E::far && x.way != 0)
        await_far_slab<E>(args, x, epoch, q);
    if (*credited != buffer && (!E::far || x.way == 0 || x.distance != 0))
        await_credit<E>(args, x, epoch, q);
    *credited = buffer;
}

/* Two messages are under way at any time; one is counted at the other end once it has landed, two messages later. */
template <class E> PRS_DEVICE void push_share(const struct prs_attention_args &args, struct attention_memory m)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t epoch = launch_epoch(&args.sync), count = 0, credited = ~0u, passed = 0;
    struct push_queue queue = {0, {0, 0}, {0, 0}};
    int64_t next = 0;
    if (blockIdx.x >= args.push_ctas)
        return;
    m.base += E::at_push;
    for (uint32_t i = blockIdx.x; i < prs_attention_messages(s); i += args.push_ctas) {
        struct prs_attention_message x;
        uint32_t slot = count % PRS_ATTENTION_PUSH_SLOTS, phase = count / PRS_ATTENTION_PUSH_SLOTS & 1;
        if (!prs_attention_message_at(s, i, &x))
            continue;
        if (E::far)
            pass_groups<E>(args, epoch, &queue, &passed, x.turn);
        else
            x.way = 0; /* known to the compiler */
        await_message<E>(args, x, epoch, &queue, &credited);
        if (E::far && x.way != 0 && x.distance == 0) {
            announce_message(args, x);
            continue;
        }
        bulk_wait_read<PRS_ATTENTION_PUSH_SLOTS - 1>();
        fetch_message<E>(args, m, slot, x);
        mbarrier_wait(&m.pushed[slot], phase);
        sleep_until(next);
        next = clock64() + args.push_gap;
        if (queue.length == PRS_ATTENTION_PUSH_SLOTS) {
            bulk_wait_done<PRS_ATTENTION_PUSH_SLOTS - 1>();
            count_oldest<E>(args, epoch, &queue);
        }
        send_message<E>(args, m.base + slot * PRS_ATTENTION_PUSH_BYTES, x, &queue);
        count++;
    }
    if (E::far)
        pass_groups<E>(args, epoch, &queue, &passed, s->groups);
    count_all<E>(args, epoch, &queue);
}

#endif
