/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/sim/work.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tools/sim/ledger.h"
#include "tools/sim/memory.h"

struct sim_counts work_counts_since(const struct sim_counts *now, const struct sim_counts *before)
{
    struct sim_counts out = *now;
    uint64_t *to = (uint64_t *)&out;
    const uint64_t *from = (const uint64_t *)before;

    for (size_t i = 0; i < sizeof(out) / sizeof(*to); i++)
        to[i] -= from[i];
    return out;
}

/* Resident memory of the process. */
static uint64_t memory_bytes(void)
{
    unsigned long long pages = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");

    if (file) {
        if (fscanf(file, "%llu %llu", &pages, &resident) != 2)
            resident = 0;
        fclose(file);
    }
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

int work_finish(struct sim *sim, struct work_result *result)
{
    result->events = sim->events.taken;
    result->memory_bytes = memory_bytes();
    result->pairs_most = sim->pairs_most;
    if (sim->pairs_open)
        result->side_bytes = (sim_memory_used() - sim->ranks_bytes) / 2 / sim->pairs_open;
    result->lost = sim->lost;
    result->early = sim->ledger->early;
    return sim->error ? sim->error : sim_ledger_check(sim->ledger);
}
