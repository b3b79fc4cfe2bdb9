/* SPDX-License-Identifier: Apache-2.0 */
/* CTAs claim units at run time, because units take different times. The first CTA of a cluster takes the next unit from
 * a counter that all clusters share. It passes the unit to every role of every CTA of the cluster through two slots: to
 * its own roles by a store (compute-sanitizer reports a copy to the CTA itself as out of bounds), to the other CTA by a
 * copy that completes on the barrier there. */
#ifndef PERSEUS_FUSED_UNITS_CUH
#define PERSEUS_FUSED_UNITS_CUH

#include "fused/core/cta.cuh"

/* A kernel's engine has `unit_readers`: how many warps of a CTA take every unit. */
enum { UNIT_SLOTS = 2, UNIT_BYTES = 16 };

/* In shared memory after the barriers of cta.cuh. */
struct unit_memory {
    uint64_t *full, *empty; /* `empty` is used only in the first CTA */
    uint8_t *slot;          /* [UNIT_SLOTS], 16 bytes each: the unit, and what the claiming thread tells about it */
    uint8_t *out;           /* the first CTA sends units from here */
};

/* How many units one role has taken. */
struct unit_pipeline {
    uint32_t taken;
};

PRS_DEVICE struct unit_memory unit_memory_map(const struct cta_memory &m)
{
    struct unit_memory u;
    u.full = m.pushed + PRS_PUSH_SLOTS;
    u.empty = u.full + UNIT_SLOTS;
    u.slot = (uint8_t *)(u.empty + UNIT_SLOTS);
    u.out = u.slot + UNIT_SLOTS * UNIT_BYTES;
    return u;
}
static_assert((2 * PRS_STAGES + 4 + 4 + PRS_PUSH_SLOTS + 2 * UNIT_SLOTS) * 8 + 2 * UNIT_SLOTS * UNIT_BYTES <=
                      PRS_SMEM_LAUNCH - PRS_SMEM_BARRIERS &&
                  (2 * PRS_STAGES + 4 + 4 + PRS_PUSH_SLOTS + 2 * UNIT_SLOTS) * 8 % UNIT_BYTES == 0,
              "barriers and slots fit after the store buffers");

template <class E> PRS_DEVICE void unit_memory_init(const struct unit_memory &u)
{
    for (int i = 0; i < UNIT_SLOTS; i++) {
        mbarrier_init(&u.full[i], 1);
        mbarrier_init(&u.empty[i], E::cluster * E::unit_readers);
    }
}

/* Passes a claimed unit to all roles; `unit` counts in the first CTA only. passed: how many units came before. x: the
 * unit; the other members: what unit_told() also returns. */
template <class E>
PRS_DEVICE void unit_pass(const struct unit_memory &u, const struct cta_position &at, uint32_t passed, uint4 unit)
{
    uint32_t slot = passed % UNIT_SLOTS, phase = passed / UNIT_SLOTS & 1;
    if (at.rank != 0) {
        mbarrier_expect(&u.full[slot], UNIT_BYTES);
        return;
    }
    mbarrier_wait(&u.empty[slot], phase ^ 1);
    if (E::cluster > 1) {
        store_shared_v4(smem_address(u.out + slot * UNIT_BYTES), unit.x, unit.y, unit.z, unit.w);
        fence_async_shared();
        for (uint32_t cta = 1; cta < E::cluster; cta++)
            bulk_send(u.slot + slot * UNIT_BYTES, u.out + slot * UNIT_BYTES, UNIT_BYTES, &u.full[slot], cta);
    }
    store_shared_v4(smem_address(u.slot + slot * UNIT_BYTES), unit.x, unit.y, unit.z, unit.w);
    mbarrier_arrive(&u.full[slot]);
}

/* In every CTA, one thread of the loading warp calls it before it takes the unit itself, or some time earlier, so that
 * the unit is there when it is needed. counter: in device memory, zero before the launch. */
template <class E>
PRS_DEVICE void unit_fetch(uint32_t *counter, const struct unit_memory &u, const struct cta_position &at,
                           uint32_t passed)
{
    unit_pass<E>(u, at, passed, make_uint4(at.rank == 0 ? atomicAdd(counter, 1u) : 0, 0, 0, 0));
}

/* Like unit_take(), but returns everything that was passed. */
PRS_DEVICE uint4 unit_told(const struct unit_memory &u, struct unit_pipeline *ring, bool whole_warp)
{
    uint32_t slot = ring->taken % UNIT_SLOTS, phase = ring->taken / UNIT_SLOTS & 1;
    mbarrier_wait(&u.full[slot], phase);
    uint4 unit = load_shared_v4(smem_address(u.slot + slot * UNIT_BYTES));
    if (whole_warp)
        __syncwarp(); /* as in unit_take() */
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive_at(&u.empty[slot], 0);
    ring->taken++;
    return unit;
}

/* Called by a whole warp, or by one thread if no other thread of its warp reads. */
PRS_DEVICE uint32_t unit_take(const struct unit_memory &u, struct unit_pipeline *ring, bool whole_warp)
{
    uint32_t slot = ring->taken % UNIT_SLOTS, phase = ring->taken / UNIT_SLOTS & 1, unit;
    mbarrier_wait(&u.full[slot], phase);
    unit = *(volatile uint32_t *)(u.slot + slot * UNIT_BYTES);
    if (whole_warp)
        __syncwarp(); /* all lanes have read before one releases */
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive_at(&u.empty[slot], 0);
    ring->taken++;
    return unit;
}

#endif
