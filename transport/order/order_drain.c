/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/order/order_drain.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <perseus/perseus.h>
#include "transport/util/error.h"

int prs_order_drain_init(struct prs_order_drain *drain, bool enabled, uint32_t rank_count, uint32_t group_count)
{
    memset(drain, 0, sizeof(*drain));
    if (!enabled)
        return 0;
    drain->unfenced = calloc(rank_count, sizeof(*drain->unfenced));
    if (!drain->unfenced)
        return prs_fail(-ENOMEM, "order: no memory to drain %u ranks", rank_count);
    drain->rank_count = rank_count;
    drain->group_count = group_count;
    return 0;
}

void prs_order_drain_fini(struct prs_order_drain *drain)
{
    for (uint32_t rank = 0; rank < drain->rank_count; rank++)
        free(drain->unfenced[rank]);
    free(drain->unfenced);
    memset(drain, 0, sizeof(*drain));
}

int prs_order_drain_admit_put(struct prs_order_drain *drain, uint32_t rank, uint32_t group)
{
    uint64_t **unfenced = &drain->unfenced[rank];

    if (!*unfenced)
        *unfenced = calloc(drain->group_count / 64, sizeof(**unfenced));
    if (!*unfenced)
        return prs_fail(-ENOMEM, "order: no memory for the groups of rank %u", rank);
    /* MUTANT(order) a put makes its group wait before a signal: delete */
    (*unfenced)[group / 64] |= 1ull << group % 64;
    return 0;
}

int prs_order_drain_admit_signal(struct prs_order_drain *drain, uint32_t rank, uint32_t group, uint64_t position)
{
    uint64_t bit = 1ull << group % 64, *unfenced = drain->unfenced[rank];

    /* MUTANT(order) a signal waits for puts of its group only: s#|| !(unfenced[group / 64] & bit)## */
    if (!unfenced || !(unfenced[group / 64] & bit))
        return 0;
    /* MUTANT(order) signals in a row to one group wait once: delete */
    unfenced[group / 64] &= ~bit;
    /* MUTANT(order) a proxy's signal waits for all ranks: s/true/false/ */
    drain->waits = true;
    drain->signal_position = position;
    return PRS_BUSY;
}

bool prs_order_drain_release(struct prs_order_drain *drain, uint64_t completed)
{
    /* MUTANT(order) a proxy's signal waits for every earlier command: s/|| completed < drain->signal_position// */
    if (!drain->waits || completed < drain->signal_position)
        return false;
    /* MUTANT(order) a proxy's signal goes once: delete */
    drain->waits = false;
    return true;
}
