/* SPDX-License-Identifier: Apache-2.0 */
/* Atomic operations and fences. Host threads and NICs reach the same words, so they are atomic here too. */
#include "tools/hopper/instructions.h"
#include "tools/hopper/order.h"
#include "tools/hopper/place.h"

namespace hopper
{

static void let_others_run(void)
{
    if (!scheduler_is_here() || !self)
        return;
    self->sleeps = 0;
    thread_yield();
}

/* A thread that reads a word again, with no pause and no other load in between, waits for it. It sleeps, as in a loop
 * with a pause: otherwise such threads would take most turns from threads with work. */
static void let_others_write(const void *p)
{
    if (!scheduler_is_here() || !self)
        return;
    if (self->last_read != p) {
        thread_yield();
        self->last_read = p;
    } else {
        thread_sleep(0);
    }
}

static void weaken(enum order *order, enum scope *scope)
{
    struct place_effect e = place_taken();
    if (e.removed)
        *order = ORDER_RELAXED;
    if (e.widest < *scope)
        *scope = e.widest;
}

static uint64_t load(const void *p, uint32_t bytes)
{
    return bytes == 4 ? __atomic_load_n((const uint32_t *)p, __ATOMIC_ACQUIRE)
                      : __atomic_load_n((const uint64_t *)p, __ATOMIC_ACQUIRE);
}

uint64_t atomic_load(const void *p, uint32_t bytes, enum order order, enum scope scope)
{
    weaken(&order, &scope);
    let_others_write(p);
    order_atomic(p, bytes, ACCESS_READ, scope, CALLER);
    uint64_t seen = load(p, bytes);
    order_acquire(p, bytes, seen, order, scope);
    return seen;
}

void atomic_store(void *p, uint32_t bytes, uint64_t value, enum order order, enum scope scope)
{
    weaken(&order, &scope);
    let_others_run();
    order_atomic(p, bytes, ACCESS_WRITE, scope, CALLER);
    order_release_word(p, bytes, value, order, scope, false);
    if (bytes == 4)
        __atomic_store_n((uint32_t *)p, (uint32_t)value, __ATOMIC_SEQ_CST);
    else
        __atomic_store_n((uint64_t *)p, value, __ATOMIC_SEQ_CST);
}

static bool swap(void *p, uint32_t bytes, uint64_t *old, uint64_t next)
{
    uint32_t small = (uint32_t)*old;
    if (bytes == 8)
        return __atomic_compare_exchange_n((uint64_t *)p, old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    bool done =
        __atomic_compare_exchange_n((uint32_t *)p, &small, (uint32_t)next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    *old = small;
    return done;
}

static bool swap_and_order(void *p, uint32_t bytes, uint64_t *old, uint64_t next, enum order order, enum scope scope,
                           void *from)
{
    order_atomic(p, bytes, ACCESS_WRITE, scope, from);
    bool done = swap(p, bytes, old, next);
    order_acquire(p, bytes, *old, order, scope);
    if (done)
        order_release_word(p, bytes, next, order, scope, true);
    return done;
}

bool atomic_swap(void *p, uint32_t bytes, uint64_t *old, uint64_t next, enum order order, enum scope scope)
{
    weaken(&order, &scope);
    let_others_run();
    return swap_and_order(p, bytes, old, next, order, scope, CALLER);
}

uint64_t atomic_add(void *p, uint32_t bytes, uint64_t value, enum order order, enum scope scope)
{
    weaken(&order, &scope);
    let_others_run();
    uint64_t old = load(p, bytes), most = bytes == 4 ? UINT32_MAX : UINT64_MAX;
    while (!swap_and_order(p, bytes, &old, (old + value) & most, order, scope, CALLER)) {
    }
    return old;
}

void atomic_fence(enum scope scope)
{
    struct place_effect e = place_taken();
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!e.removed)
        order_fence(e.widest < scope ? e.widest : scope);
    let_others_run();
}

} // namespace hopper
