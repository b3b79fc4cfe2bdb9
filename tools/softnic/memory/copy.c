/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/copy.h"

#include "tools/softnic/memory/device_mem.h"
#include "tools/softnic/memory/local_copy.h"
#include "tools/softnic/memory/owner_copy.h"

enum { LOCK_TRIES = 200 /* about the time that an atomic on host memory holds the lock */ };

int sn_copy_start(struct sn_copy *c)
{
    int r = sn_local_copy_start(c);

    return r == SN_COPY_OWNER ? sn_owner_copy_start(c) : r;
}

static int atomic_poll(struct sn_copy *c)
{
    struct sn_atomic *a = c->async;
    int r;

    do
        r = sn_atomic_step(a);
    while (r == SN_COPY_BUSY && !a->locked && a->tries < LOCK_TRIES);
    /* Let the owner take the lock. A thread that waited for the owner with the lock in hand could wait for ever: the
     * owner may need the same lock for another initiator. */
    return r == SN_COPY_OWNER ? sn_owner_copy_atomic(c, a->cas, a->compare_add, a->swap, a->found) : r;
}

int sn_copy_atomic(struct sn_copy *c, struct sn_atomic *a)
{
    sn_atomic_begin(a, c);
    c->async = a;
    c->by = SN_BY_STEPS;
    return atomic_poll(c);
}

int sn_copy_poll(struct sn_copy *c)
{
    switch (c->by) {
    case SN_BY_OWNER:
        return sn_owner_copy_poll(c);
    case SN_BY_STEPS:
        return atomic_poll(c);
    default:
        return sn_device_mem->copy_poll(c);
    }
}
