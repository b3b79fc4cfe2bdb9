/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention, warp 1: sends the own keys and values to the other ranks, which have given credit for the place. */
#ifndef PERSEUS_FUSED_ATTENTION_PUSH_CUH
#define PERSEUS_FUSED_ATTENTION_PUSH_CUH

#include "fused/attention_cta.cuh"

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
PRS_DEVICE void count_oldest(const struct prs_attention_args &args, struct push_queue *q)
{
    fence_release_sys(); /* R5: the rows before their count. Pairs with the acquire in await_slabs(). */
    add_relaxed_sys(args.arrivals[q->peer[0]] + q->index[0], 1);
    q->peer[0] = q->peer[1];
    q->index[0] = q->index[1];
    q->length--;
}

PRS_DEVICE void count_all(const struct prs_attention_args &args, struct push_queue *q)
{
    bulk_wait_done<0>();
    while (q->length != 0)
        count_oldest(args, q);
}

/* Until the other rank has finished with what is in the buffer of this group. Meanwhile nothing is held back: the other
 * rank may be waiting for the last messages before it can finish. */
PRS_DEVICE void await_credit(const struct prs_attention_args &args, const struct prs_attention_message &x,
                             uint32_t epoch, struct push_queue *q)
{
    const struct prs_attention_schedule *s = &args.schedule;
    bool earlier;
    uint32_t index = prs_attention_credit(s, x.distance, prs_attention_evicted(s, x.group, &earlier));
    uint32_t want = earlier ? epoch - 1 : epoch;
    if (!prs_flag_reached(load_acquire_sys(args.credits[0] + index), want)) {
        count_all(args, q);
        wait_flag(&args.sync, args.credits[0] + index, want, PRS_AWAIT_CREDIT,
                  (s->rank + s->world - x.distance) % s->world, index);
    }
    fence_async_global(); /* the credit was read by an ordinary load, the copy engine writes on the strength of it */
}

/* Own rows into a push slot. */
PRS_DEVICE void fetch_message(const struct prs_attention_args &args, const struct attention_memory &m, uint32_t slot,
                              const struct prs_attention_message &x)
{
    const struct prs_attention_schedule *s = &args.schedule;
    struct attention_place at =
        attention_place_of(args, x.pair / s->heads_kv, x.pair % s->heads_kv, s->heads_kv, x.segment);
    mbarrier_expect(&m.pushed[slot], PRS_ATTENTION_PUSH_BYTES);
    tma_load_5d(m.base + slot * PRS_ATTENTION_PUSH_BYTES, x.kind == PRS_KEYS ? &args.push_k : &args.push_v,
                &m.pushed[slot], 0, (int32_t)x.row, 0, at.u, at.v);
}

/* Rows of one head lie without gaps in staging memory: one contiguous store. */
template <class E>
PRS_DEVICE void send_message(const struct prs_attention_args &args, const uint8_t *from,
                             const struct prs_attention_message &x)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint64_t stage = prs_attention_stage(s, x.distance, x.pair, x.kind, x.segment);
    uint8_t *to = args.staging[s->world - x.distance] + (stage * s->segment_rows + x.row) * (E::head_dim * 2);
    bulk_store(to, from, x.rows * E::head_dim * 2);
    bulk_commit();
}

/* Two messages are under way at any time; one is counted at the other end once it has landed, two messages later. */
template <class E> PRS_DEVICE void push_share(const struct prs_attention_args &args, struct attention_memory m)
{
    const struct prs_attention_schedule *s = &args.schedule;
    uint32_t epoch = launch_epoch(&args.sync), all = prs_attention_messages(s), count = 0, credited = ~0u;
    struct push_queue queue = {0, {0, 0}, {0, 0}};
    int64_t next = 0;
    m.base += E::at_push;
    for (uint32_t i = blockIdx.x; blockIdx.x < args.push_ctas && i < all; i += args.push_ctas) {
        struct prs_attention_message x;
        uint32_t slot = count % PRS_ATTENTION_PUSH_SLOTS, phase = count / PRS_ATTENTION_PUSH_SLOTS & 1;
        if (!prs_attention_message_at(s, i, &x))
            continue;
        if (credited != x.group * s->world + x.distance)
            await_credit(args, x, epoch, &queue);
        credited = x.group * s->world + x.distance;
        bulk_wait_read<PRS_ATTENTION_PUSH_SLOTS - 1>();
        fetch_message(args, m, slot, x);
        mbarrier_wait(&m.pushed[slot], phase);
        sleep_until(next);
        next = clock64() + args.push_gap;
        send_message<E>(args, m.base + slot * PRS_ATTENTION_PUSH_BYTES, x);
        bulk_wait_done<PRS_ATTENTION_PUSH_SLOTS>();
        if (queue.length == PRS_ATTENTION_PUSH_SLOTS)
            count_oldest(args, &queue);
        queue_message(&queue, s->world - x.distance,
                      prs_attention_arrival(s, x.distance, x.pair, x.kind, x.segment, x.slab));
        count++;
    }
    count_all(args, &queue);
}

#endif
