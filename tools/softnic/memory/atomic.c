/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/atomic.h"

#include "tools/softnic/memory/device_mem.h"
#include "tools/softnic/memory/local_copy.h"
#include "tools/softnic/world/lock.h"

/* Move 8 bytes between *value here and the target. */
static int copy_word(struct sn_atomic *a, uint64_t *value)
{
    const struct sn_copy *c = a->target;
    struct sn_copy *word = &a->word; /* large, so only members that a copy of one span reads are filled in */
    struct sn_span here = {.addr = (uintptr_t)value, .length = 8, .mr = SN_NONE};
    int r;

    if (a->copying) {
        r = sn_device_mem->copy_poll(word);
    } else {
        word->world = c->world;
        word->self = c->self;
        word->dst_count = word->src_count = 1;
        word->length = 8;
        word->dst_proc = a->writing ? c->dst_proc : c->self;
        word->src_proc = a->writing ? c->self : c->dst_proc;
        word->dst[0] = a->writing ? c->dst[0] : here;
        word->src[0] = a->writing ? here : c->dst[0];
        r = sn_local_copy_start(word);
    }
    a->copying = r == SN_COPY_BUSY;
    return r;
}

unsigned sn_atomic_lock_of(uint32_t proc, uint64_t addr)
{
    return (addr >> 3 ^ proc * 0x9e37u) % SN_ATOMIC_LOCKS;
}

static struct sn_lock *lock_of(const struct sn_copy *c)
{
    return &c->world->atomic_locks[sn_atomic_lock_of(c->dst_proc, c->dst[0].addr)];
}

static void atomic_in_place(struct sn_atomic *a)
{
    uint64_t *word = (uint64_t *)(uintptr_t)a->target->dst[0].addr;

    *a->found = a->compare_add;
    if (!a->cas)
        *a->found = __atomic_fetch_add(word, a->compare_add, __ATOMIC_SEQ_CST);
    else
        __atomic_compare_exchange_n(word, a->found, a->swap, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

int sn_atomic_step(struct sn_atomic *a)
{
    const struct sn_copy *c = a->target;
    int r = 0;

    if (!a->locked)
        a->locked = sn_lock_try(lock_of(c), &a->tries);
    if (!a->locked)
        return SN_COPY_BUSY;
    if (c->dst_proc == c->self && c->dst[0].kind == SN_MEM_HOST) {
        atomic_in_place(a);
        goto unlock;
    }
    if (!a->writing) {
        r = copy_word(a, a->found);
        if (r)
            goto unlock;
        a->value = !a->cas ? *a->found + a->compare_add : *a->found == a->compare_add ? a->swap : *a->found;
        if (a->value == *a->found)
            goto unlock;
        a->writing = true;
    }
    r = copy_word(a, &a->value);
unlock:
    if (r == SN_COPY_BUSY)
        return r;
    sn_lock_drop(lock_of(c));
    a->locked = false;
    return r;
}

void sn_atomic_begin(struct sn_atomic *a, struct sn_copy *target)
{
    a->target = target;
    a->locked = a->copying = a->writing = false;
    a->tries = 0;
}
