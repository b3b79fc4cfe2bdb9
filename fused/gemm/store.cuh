/* SPDX-License-Identifier: Apache-2.0 */
/* Warps 1 and 2: one per consumer warpgroup; they store finished slabs at their destination, and raise flags once a
 * tile has landed. */
#ifndef PERSEUS_FUSED_STORE_CUH
#define PERSEUS_FUSED_STORE_CUH

#include "fused/core/partial_sums.cuh"
#include "fused/gemm/relay.cuh"
#include "fused/gemm/unit.cuh"

/* The slot for this rank's sums, at the rank of this node that adds up a block's sums. */
template <class E> PRS_DEVICE uint32_t partial_slot(const struct prs_schedule *s, uint32_t block)
{
    if (E::far && prs_schedule_part(s, block) == PRS_PART_RELAY)
        return prs_schedule_relay_slot(s, block / s->place.local_ranks);
    return E::far ? prs_schedule_send_slot(s, s->place.rank, block) : prs_schedule_slot(s, s->place.rank, block);
}

template <class E>
PRS_DEVICE void store_slab(const struct prs_kernel_args &args, const struct cta_position &at, const struct prs_unit &u,
                           const uint8_t *slab, uint32_t half, uint32_t quarter)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    if (E::reduces && u.block != s->place.rank) {
        uint32_t peer = prs_place_neighbour_index(&s->place, u.block), slot = partial_slot<E>(s, u.block);
        uint8_t *bank = args.staging[peer] + staging_bank(args);
        uint64_t where = prs_layout_partial(s, slot, prs_schedule_tile(s, &u, at.rank), quarter);
        store_partial_slab(bank + where, slab, half);
        return;
    }
    int32_t x = (int32_t)(u.column * prs_epilogue_columns(&args.epilogue, E::columns) + quarter * E::slab_columns);
    int32_t y = (int32_t)(u.pair * PRS_PAIR_M + at.rank * PRS_TILE_M + half * 64);
    int32_t z = E::op == PRS_GEMM_REDUCE_SCATTER ? 0 : (int32_t)u.block;
    if (x >= (int32_t)args.n || y >= (int32_t)s->block_rows)
        return;
    if (E::op >= PRS_GEMM_ALLGATHER && args.whole != 0) {
        y += z * (int32_t)s->block_rows;
        z = 0;
    }
    for (uint32_t p = 0; p < (E::broadcasts ? s->place.local_ranks : 1); p++)
        tma_store_3d(&args.c[p], slab, x, y, z);
}

/* Signals the ranks that wait for the tile, which has landed. */
template <class E>
PRS_DEVICE void signal_tile(const struct prs_kernel_args &args, const struct cta_position &at, const struct prs_unit &u,
                            uint32_t half)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    if (E::far && prs_schedule_part(s, u.block) == PRS_PART_RELAY) {
        relay_tile(args, at.epoch, u.block, prs_schedule_tile(s, &u, at.rank));
    } else if (u.block != s->place.rank) {
        uint32_t tile = prs_schedule_tile(s, &u, at.rank);
        store_release_sys(args.flags[prs_place_neighbour_index(&s->place, u.block)] +
                              prs_schedule_partial_flag(s, partial_slot<E>(s, u.block), tile, half),
                          at.epoch);
    } else if (E::broadcasts) {
        fence_release_sys(); /* [broadcast-tile]: one fence for all ranks, before the counts in await_broadcast() */
        count_broadcast(args, at.epoch);
        if (E::far)
            put_rows<E>(args, at.epoch, u.pair * 2 + at.rank);
    }
}

template <class E>
PRS_DEVICE void store_tiles(const struct prs_kernel_args &args, const struct cta_memory &m,
                            const struct cta_position &at, uint32_t half)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    struct unit_memory queue = unit_memory_map(m);
    struct unit_pipeline taken = {0};
    uint32_t stored = 0;
    int64_t next = 0;
    struct prs_cursor cursor = {0, 0};
    for (typename unit_taken<E::told>::unit unit; number_of(unit = take_unit<E>(queue, &taken, false)) < s->units;) {
        struct prs_unit u;
        if (E::quantises && args.quantised.to) /* the consumers have stored it */
            continue;
        find_unit(s, &cursor, unit, &u);
        uint32_t quarters = E::slabs_per_tile;
        if (args.epilogue.gated != 0 && (!E::reduces || u.block == s->place.rank))
            quarters = E::slabs_per_tile / 2;
        for (uint32_t quarter = 0; quarter < quarters; quarter++, stored++) {
            uint32_t slab = half * E::slabs + stored % E::slabs, phase = stored / E::slabs & 1;
            mbarrier_wait(&m.c_full[slab], phase);
            if (E::reduces && u.block != s->place.rank) {
                sleep_until(next);
                next = clock64() + args.store_gap;
            }
            store_slab<E>(args, at, u, m.base + E::slab_place + slab * PRS_SLAB, half, quarter);
            bulk_commit();
            /* MUTANT(emulator allgather_is_right) bulk_wait_read before a slab is given back:
             * s/bulk_wait_read<E::slabs == 1 ? 0 : 1>()// */
            if (args.paced)
                bulk_wait_done<0>();
            else
                bulk_wait_read<E::slabs == 1 ? 0 : 1>();
            /* Releases the slab that the bulk store has read: this one, or the one before it. */
            if (E::slabs == 1)
                mbarrier_arrive(&m.c_empty[slab]);
            else if (quarter != 0)
                mbarrier_arrive(&m.c_empty[half * E::slabs + (stored - 1) % E::slabs]);
        }
        bulk_wait_read<0>();
        if (E::slabs != 1)
            mbarrier_arrive(&m.c_empty[half * E::slabs + (stored - 1) % E::slabs]);
        if (E::reduces) {
            /* MUTANT(emulator allreduce_is_right) bulk_wait_done before the broadcast is signalled: delete */
            /* MUTANT(emulator reduce_scatter_is_right) bulk_wait_done before signal_tile: delete */
            bulk_wait_done<0>();
            signal_tile<E>(args, at, u, half);
        }
    }
    bulk_wait_done<0>();
}

#endif
