/* SPDX-License-Identifier: Apache-2.0 */
/* Warp 3: pushes this rank's block of A to the other ranks (all-gather), or waits for their results (all-reduce). */
#ifndef PERSEUS_FUSED_PUSH_CUH
#define PERSEUS_FUSED_PUSH_CUH

#include "fused/gemm/relay.cuh"

/* A chunk of this rank's block, or of a counterpart's block that this rank forwards. */
struct pushed_chunk {
    struct prs_chunk c;
    uint32_t block;
};

/* The chunk at a position: first those of this rank's block, then the counterparts'. */
template <class E> PRS_DEVICE struct pushed_chunk find_chunk(const struct prs_schedule *s, uint32_t at)
{
    struct pushed_chunk k = {{0, 0}, s->place.rank};
    uint32_t own = prs_schedule_chunks(s);
    if (!E::far || at < own)
        prs_schedule_chunk(s, at, &k.c);
    else
        k.block = prs_schedule_forward(s, at - own, &k.c);
    return k;
}

/* Two chunks are in flight at any time. A chunk is signalled two chunks later, when it has landed everywhere. */
struct pusher {
    uint32_t landed, before; /* positions of the older and the newer chunk that are not signalled yet */
    uint32_t pending, count; /* how many are not signalled; chunks so far in this launch */
    int64_t next;            /* when the next store may be issued, SM clock */
};

/* The offset within its slot. */
PRS_DEVICE uint64_t chunk_place(const struct prs_schedule *s, uint32_t slot, const struct prs_chunk &c)
{
    return prs_layout_gathered(s, slot, c.row / PRS_TILE_M, c.step) +
           c.row % PRS_TILE_M / PRS_PUSH_ROWS * PRS_PUSH_BYTES;
}

/* Stores the scales of a chunk at the other ranks of the node, and in the memory from which they are put to other
 * nodes. They are signalled with the chunk, and read when the chunk's stage is full. */
template <class E> PRS_DEVICE void push_scales(const struct prs_kernel_args &args, const struct pushed_chunk &k)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    const struct prs_chunk &c = k.c;
    bool own = !E::far || k.block == s->place.rank;
    const float *from = args.scales.a + c.step * args.scales.a_pitch + c.row;
    uint32_t rows = s->block_rows - c.row < PRS_PUSH_ROWS ? s->block_rows - c.row : PRS_PUSH_ROWS;
    if (!own)
        from = (const float *)(args.staging[0] + staging_bank(args) +
                               prs_layout_scales(s, args.scales.sent, prs_schedule_slot(s, k.block, s->place.rank),
                                                 c.step, c.row));
    for (uint32_t p = E::far && own ? 0 : 1; p < s->place.local_ranks; p++) {
        uint32_t slot = prs_schedule_slot(s, k.block, prs_place_neighbour(&s->place, p)), i = 0;
        float *to = (float *)(args.staging[p] + staging_bank(args) +
                              prs_layout_scales(s, args.scales.sent, slot, c.step, c.row));
        for (; i + 4 <= rows; i += 4)
            *(float4 *)(to + i) = *(const float4 *)(from + i);
        for (; i < rows; i++)
            to[i] = from[i];
    }
}

/* Sends a chunk to all other ranks of the node at once; paced: to one after the other at even intervals, so that the
 * SM's own loads find room between the stores. */
template <class E>
PRS_DEVICE void push_chunk(const struct prs_kernel_args &args, const struct cta_position &at, const uint8_t *buffer,
                           const struct pushed_chunk &k, int64_t *next)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint64_t bank = staging_bank(args);
    for (uint32_t p = 1; p < s->place.local_ranks; p++) {
        uint32_t owner = prs_place_neighbour(&s->place, p);
        if (args.paced || p == 1) {
            sleep_until(*next);
            *next = clock64() + args.push_gap;
        }
        bulk_store(args.staging[p] + bank + chunk_place(s, prs_schedule_slot(s, k.block, owner), k.c), buffer,
                   PRS_PUSH_BYTES);
    }
    /* MUTANT(emulator fp8/fp8_scales_travel_with_their_rows) the scales of every block of K:
     * s/k.c.step < args.scales.sent/k.c.step < 1/ */
    if (E::scaled && k.c.step < args.scales.sent)
        push_scales<E>(args, k);
    if (E::far && k.block == s->place.rank) /* it is put to other nodes from there */
        bulk_store(args.staging[0] + bank + chunk_place(s, prs_schedule_slot(s, s->place.rank, s->place.rank), k.c),
                   buffer, PRS_PUSH_BYTES);
    bulk_commit();
}

template <class E>
PRS_DEVICE void signal_chunk(const struct prs_kernel_args &args, const struct cta_position &at, uint32_t position)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    struct pushed_chunk k = find_chunk<E>(s, position);
    uint32_t row_tile = k.c.row / PRS_TILE_M, strip = k.c.step / PRS_STRIP_STEPS;
    fence_release_sys(); /* [pushed-chunk]: one fence for all ranks, before the counts in await_strips() */
    for (uint32_t p = 1; p < s->place.local_ranks; p++) {
        uint32_t owner = prs_place_neighbour(&s->place, p);
        add_relaxed_sys(arrivals_at(args, at.epoch, p,
                                    prs_schedule_arrival(s, prs_schedule_slot(s, k.block, owner), row_tile, strip)),
                        1);
    }
    if (E::far && k.block == s->place.rank)
        relay_chunk<E::scaled>(args, at.epoch, row_tile, strip);
    else if (E::far) /* the block came over the network; the loader counts its chunks like those of any other rank */
        add_relaxed_sys(
            arrivals_at(args, at.epoch, 0,
                        prs_schedule_arrival(s, prs_schedule_slot(s, k.block, s->place.rank), row_tile, strip)),
            1);
}

/* Waits until everything in flight has landed, and signals it. */
template <class E>
PRS_DEVICE void push_drain(const struct prs_kernel_args &args, const struct cta_position &at, struct pusher *p)
{
    bulk_wait_done<0>();
    if (p->pending > 1)
        signal_chunk<E>(args, at, p->landed);
    if (p->pending > 0)
        signal_chunk<E>(args, at, p->before);
    p->pending = 0;
}

template <class E>
PRS_DEVICE void push_next(const struct prs_kernel_args &args, const struct cta_memory &m, const struct cta_position &at,
                          struct pusher *p, uint32_t position)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    struct pushed_chunk k = find_chunk<E>(s, position);
    uint32_t slot = p->count % PRS_PUSH_SLOTS, phase = p->count / PRS_PUSH_SLOTS & 1;
    uint8_t *buffer = m.base + PRS_SMEM_PUSH + slot * PRS_PUSH_BYTES;
    p->count++;
    /* MUTANT(emulator allgather_is_right) wait before a push buffer is loaded again: s/- 1// */
    bulk_wait_read<PRS_PUSH_SLOTS - 1>();
    mbarrier_expect(&m.pushed[slot], PRS_PUSH_BYTES);
    if (!E::far || k.block == s->place.rank)
        tma_load_2d(buffer, &args.push_source, &m.pushed[slot], (int32_t)(k.c.step * element<E::type>::in_row),
                    (int32_t)k.c.row);
    else
        bulk_load(buffer,
                  args.staging[0] + staging_bank(args) +
                      chunk_place(s, prs_schedule_slot(s, k.block, s->place.rank), k.c),
                  PRS_PUSH_BYTES, &m.pushed[slot]);
    if (p->pending == 2) { /* a fence and a fetch take about 2 us each, so they overlap */
        /* MUTANT(emulator allgather_is_right) bulk_wait_done before signal_chunk: delete */
        bulk_wait_done<PRS_PUSH_SLOTS - 1>();
        signal_chunk<E>(args, at, p->landed);
    }
    mbarrier_wait(&m.pushed[slot], phase);
    push_chunk<E>(args, at, buffer, k, &p->next);
    p->landed = p->before;
    p->before = position;
    p->pending = p->pending < 2 ? p->pending + 1 : 2;
}

/* Waits for a counterpart's chunk before it is forwarded. Signals everything in flight first, because a rank may wait
 * for that before it puts the chunk. */
template <class E>
PRS_DEVICE void await_chunk(const struct prs_kernel_args &args, const struct cta_position &at, struct pusher *p,
                            uint32_t position)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    struct pushed_chunk k = find_chunk<E>(s, position);
    uint32_t from = prs_index_after(k.block / s->place.local_ranks, s->place.node, s->place.nodes);
    uint32_t word =
        prs_schedule_group_word(s, from, prs_schedule_group(s, k.c.row / PRS_TILE_M, k.c.step / PRS_STRIP_STEPS).index);
    if (!prs_flag_reached(load_acquire_sys(far_flag(args, word)), at.epoch)) {
        /* MUTANT(emulator nodes/allgather_is_right) everything signalled before another node is waited for: delete */
        push_drain<E>(args, at, p);
        /* MUTANT(emulator nodes/allgather_is_right) wait for other nodes' rows: delete */
        wait_flag(&args.sync, far_flag(args, word), at.epoch, PRS_AWAIT_CHUNK, k.block, word);
    }
    fence_async_global(); /* the signal was read by an ordinary load, the chunk is read by TMA */
}

PRS_DEVICE uint32_t claim_chunk(const struct prs_kernel_args &args)
{
    return atomicAdd(claim_counter(args, PRS_CLAIM_CHUNKS), 1u);
}

/* Pushes this rank's block, and then the counterparts' blocks that were put here, to the other ranks of this node.
 * Returns how many chunks went through the push buffers. */
template <class E>
PRS_DEVICE uint32_t push_blocks(const struct prs_kernel_args &args, const struct cta_memory &m,
                                const struct cta_position &at)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t own = prs_schedule_chunks(s), all = E::far ? s->place.nodes * own : own;
    struct pusher p = {};
    if (s->segments != 0 || s->place.world == 1)
        return 0;
    /* The next chunk is claimed before this one is sent, so that no claim is waited for. A chunk needs only earlier
     * ones, and so does every claimed chunk that waits for its turn here. */
    for (uint32_t i = claim_chunk(args), next; i < all; i = next) {
        next = claim_chunk(args);
        if (E::far && i >= own)
            await_chunk<E>(args, at, &p, i);
        if (E::far && i >= own && s->place.local_ranks == 1)
            signal_chunk<E>(args, at, i);
        else
            push_next<E>(args, m, at, &p, i);
    }
    push_drain<E>(args, at, &p);
    return p.count;
}

/* All-reduce: the launch must not end before the other ranks' results have landed here. [broadcast-tile] and
 * [broadcast-row]: data that is counted has landed. */
PRS_DEVICE void await_broadcast(const struct prs_kernel_args &args, const struct cta_position &at)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    uint32_t slot = threadIdx.x % 32;
    const uint32_t *done = args.done[0] + (at.epoch & 1) * s->place.local_ranks + slot;
    if (slot + 1 < s->place.local_ranks)
        wait_flag(&args.sync, done, prs_schedule_broadcasts(s), PRS_AWAIT_BROADCAST,
                  prs_place_neighbour(&s->place, 1 + slot), slot);
}

#endif
