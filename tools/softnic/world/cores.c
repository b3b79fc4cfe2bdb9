/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/world/cores.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "tools/softnic/world/world.h"

enum {
    MANY = 8, /* enough for a program's pollers and the NIC's threads */
    WAY_NAP_NS = 1000,
};

static unsigned count(void)
{
    const char *text = getenv("SOFTNIC_CORES");
    unsigned long wanted;
    cpu_set_t cores;
    char *end;
    unsigned n = sched_getaffinity(0, sizeof(cores), &cores) ? MANY : (unsigned)CPU_COUNT(&cores);

    if (!text || !*text)
        return n;
    wanted = strtoul(text, &end, 10);
    if (!*end && wanted >= 1 && wanted <= CPU_SETSIZE)
        return (unsigned)wanted;
    sn_log("SOFTNIC_CORES=%s: want a number from 1 to %d; using %u", text, CPU_SETSIZE, n);
    return n;
}

unsigned sn_cores(void)
{
    static unsigned cores; /* 0: not counted yet */
    unsigned known = __atomic_load_n(&cores, __ATOMIC_RELAXED);

    if (!known) {
        known = count();
        __atomic_store_n(&cores, known, __ATOMIC_RELAXED);
    }
    return known;
}

bool sn_cores_are_few(void)
{
    return sn_cores() < MANY;
}

void sn_give_way(void)
{
    struct timespec nap = {0, WAY_NAP_NS};

    if (sn_cores_are_few())
        nanosleep(&nap, NULL);
    else
        sched_yield(); /* costs nothing where no other thread wants the core */
}
