/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/host/affinity.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport/util/log.h"

int prs_affinity_parse(const char *list, void *cpu_set)
{
    cpu_set_t *set = cpu_set;

    CPU_ZERO(set);
    while (*list && *list != '\n') {
        char *end;
        long first = strtol(list, &end, 10), last = first;

        if (end == list || first < 0)
            return -EINVAL;
        if (*end == '-') {
            list = end + 1;
            last = strtol(list, &end, 10);
            if (end == list || last < first)
                return -EINVAL;
        }
        for (long cpu = first; cpu <= last && cpu < CPU_SETSIZE; cpu++)
            CPU_SET((int)cpu, set);
        if (*end == ',')
            end++;
        list = end;
    }
    return 0;
}

void prs_affinity_set_node(int node)
{
    char path[96], list[1024] = "";
    cpu_set_t of_node, allowed, both;
    FILE *file;

    if (node < 0)
        return;
    snprintf(path, sizeof(path), "/sys/devices/system/node/node%d/cpulist", node);
    file = fopen(path, "re");
    if (!file)
        return;
    if (!fgets(list, sizeof(list), file))
        list[0] = 0;
    fclose(file);
    if (prs_affinity_parse(list, &of_node) < 0 || sched_getaffinity(0, sizeof(allowed), &allowed) < 0)
        return;
    CPU_AND(&both, &of_node, &allowed);
    if (CPU_COUNT(&both) == 0 || sched_setaffinity(0, sizeof(both), &both) < 0)
        PRS_WARN("proxy thread: cannot run on NUMA node %d (CPUs %s): its CPUs stay as they are", node, list);
}
