/* SPDX-License-Identifier: Apache-2.0 */
/* Table indices and ring space of a world. Rings are powers of two times 4 KiB. Freed rings are kept by size, and the
 * pages that are theirs alone are given back; a kernel's pages may be larger than a ring. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tools/softnic/world/lock.h"

#ifndef MADV_POPULATE_WRITE
#    define MADV_POPULATE_WRITE 23 /* Linux 5.14; glibc has it since 2.35 */
#endif

enum { ARENA_UNIT = 4096, SLOT_REST = 64 /* this many other indices are freed before one is reused */ };

static int arena_class(uint64_t bytes)
{
    int order = 0;

    while (order < SN_ARENA_CLASSES && ((uint64_t)ARENA_UNIT << order) < bytes)
        order++;
    return order;
}

static uintptr_t page_bytes(void)
{
    return (uintptr_t)sysconf(_SC_PAGESIZE);
}

int sn_world_populate(void *at, uint64_t bytes, const char *what)
{
    uintptr_t from = (uintptr_t)at & ~(page_bytes() - 1);

    if (!madvise((void *)from, (uintptr_t)at + bytes - from, MADV_POPULATE_WRITE) ||
        (errno != EFAULT && errno != ENOMEM))
        return 0;
    sn_log("%s, %llu bytes: /dev/shm is full (mount it larger, e.g. docker --shm-size)", what,
           (unsigned long long)bytes);
    return -ENOSPC;
}

int sn_arena_alloc(struct sn_world *world, uint64_t bytes, uint64_t *off)
{
    int order = arena_class(bytes);
    uint64_t size = (uint64_t)ARENA_UNIT << order, *at;
    bool used;

    *off = 0;
    if (order >= SN_ARENA_CLASSES)
        return -ENOMEM;
    sn_lock_take(&world->arena_lock);
    at = sn_ring_at(world, world->arena_free[order], size);
    used = at;
    if (at) {
        *off = world->arena_free[order];
        world->arena_free[order] = *at;
    } else {
        at = sn_ring_at(world, world->arena_next, size);
        if (at && !sn_world_populate(at, ARENA_UNIT, "ring")) { /* for the link in sn_arena_free */
            *off = world->arena_next;
            world->arena_next += size;
        }
    }
    sn_lock_drop(&world->arena_lock);
    if (!*off)
        return -ENOMEM;
    if (sn_world_populate(at, size, "ring")) {
        sn_arena_free(world, *off, bytes);
        return -ENOMEM;
    }
    if (used) /* clear all of it, since a part that shares a page with other rings was not given back */
        memset(at, 0, size);
    return 0;
}

void sn_arena_free(struct sn_world *world, uint64_t off, uint64_t bytes)
{
    int order = arena_class(bytes);
    uint64_t size = (uint64_t)ARENA_UNIT << order, *at = off ? sn_ring_at(world, off, size) : NULL;
    uintptr_t page = page_bytes(), from = ((uintptr_t)at + ARENA_UNIT + page - 1) & ~(page - 1),
              to = ((uintptr_t)at + size) & ~(page - 1);

    if (off && (!at || order >= SN_ARENA_CLASSES || off % ARENA_UNIT))
        sn_log("a ring of %llu bytes at offset 0x%llx: the world is damaged; its space is lost",
               (unsigned long long)bytes, (unsigned long long)off);
    if (!at || order >= SN_ARENA_CLASSES || off % ARENA_UNIT)
        return;
    if (from < to)
        madvise((void *)from, to - from, MADV_REMOVE);
    sn_lock_take(&world->arena_lock);
    *at = world->arena_free[order];
    world->arena_free[order] = off;
    sn_lock_drop(&world->arena_lock);
}

/* Every process looks at entries below fresh, so populate an entry before counting it. */
static int fresh_take_locked(struct sn_slots *slots, void *table, size_t entry_bytes, uint32_t *index)
{
    if (sn_world_populate((uint8_t *)table + slots->fresh * entry_bytes, entry_bytes, "entry of a table"))
        return -ENOMEM;
    *index = slots->fresh++;
    return 0;
}

int sn_slot_take(struct sn_slots *slots, const uint32_t *free_ring, uint32_t capacity, void *table, size_t entry_bytes,
                 uint32_t *index)
{
    int r = 0;

    sn_lock_take(&slots->lock);
    if (slots->free_tail - slots->free_head > SLOT_REST ||
        (slots->fresh == capacity && slots->free_tail != slots->free_head))
        *index = free_ring[slots->free_head++ % capacity];
    else if (slots->fresh < capacity)
        r = fresh_take_locked(slots, table, entry_bytes, index);
    else
        r = -ENOMEM;
    sn_lock_drop(&slots->lock);
    if (!r && *index >= capacity) {
        sn_log("index %u of a table of %u: the world is damaged", *index, capacity);
        r = -ENOMEM;
    }
    return r;
}

void sn_slot_give(struct sn_slots *slots, uint32_t *free_ring, uint32_t capacity, uint32_t index)
{
    sn_lock_take(&slots->lock);
    free_ring[slots->free_tail % capacity] = index;
    slots->free_tail++;
    sn_lock_drop(&slots->lock);
}
