/* SPDX-License-Identifier: Apache-2.0 */
/* The resources that a process holds. They must not grow when communicators are opened and closed repeatedly. */
#ifndef NETBENCH_HOLDING_H
#define NETBENCH_HOLDING_H

#include <stdbool.h>

struct holding {
    long memory_kb; /* private memory; that of the software NIC's world is shared */
    int descriptors, threads;
};

/* Read those of this process. Return 0, or -errno after printing why. */
int holding_read(struct holding *holding);

/* Whether `now` has more descriptors or threads, or much more memory; prints what has grown. */
bool holding_has_grown(const struct holding *before, const struct holding *now, int rank);

#endif
