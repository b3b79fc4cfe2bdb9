/* SPDX-License-Identifier: Apache-2.0 */
/* Where a unit lies. That takes many divisions. With E::told the thread that claims the unit does them and tells all
 * roles; otherwise consumers would do them between two tiles, while the tensor cores wait. In other instances each role
 * does them for itself. */
#ifndef PERSEUS_FUSED_GEMM_UNIT_CUH
#define PERSEUS_FUSED_GEMM_UNIT_CUH

#include "fused/core/units.cuh"
#include "fused/gemm/launch.cuh"

/* What a role takes: the number of a unit, and where it lies if E::told. */
template <bool TOLD> struct unit_taken {
    typedef uint32_t unit;
};
template <> struct unit_taken<true> {
    typedef uint4 unit;
};

PRS_DEVICE uint32_t number_of(uint32_t unit)
{
    return unit;
}
PRS_DEVICE uint32_t number_of(uint4 unit)
{
    return unit.x;
}

/* Passes a claimed unit to all roles. One lane of the loading warp calls it. cursor: its own. */
template <class E>
PRS_DEVICE void pass_unit(const struct unit_memory &queue, const struct cta_position &at, struct prs_cursor *cursor,
                          uint32_t passed, uint32_t unit)
{
    const struct prs_schedule *s = &launch_here()->schedule;
    struct prs_unit u = {0, 0, 0};
    if (E::told && at.rank == 0 && unit < s->units)
        prs_schedule_unit(s, cursor, unit, &u);
    unit_pass<E>(queue, at, passed, make_uint4(unit, u.block, u.pair, u.column));
}

/* As unit_take(). */
template <class E>
PRS_DEVICE typename unit_taken<E::told>::unit take_unit(const struct unit_memory &queue, struct unit_pipeline *ring,
                                                        bool whole_warp)
{
    if constexpr (E::told)
        return unit_told(queue, ring, whole_warp);
    else
        return unit_take(queue, ring, whole_warp);
}

PRS_DEVICE void find_unit(const struct prs_schedule *s, struct prs_cursor *cursor, uint32_t unit, struct prs_unit *u)
{
    prs_schedule_unit(s, cursor, unit, u);
}
PRS_DEVICE void find_unit(const struct prs_schedule *, struct prs_cursor *, uint4 unit, struct prs_unit *u)
{
    *u = {unit.y, unit.z, unit.w};
}

#endif
