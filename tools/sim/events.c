/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/sim/events.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_ROOM = 1024, CHILDREN = 4 };

struct sim_heap_entry {
    uint64_t at_ps;
    uint32_t order; /* wraps around: compared by difference, fewer than 2^31 events are waiting */
    uint32_t slot;
};

static bool earlier(const struct sim_heap_entry *a, const struct sim_heap_entry *b)
{
    return a->at_ps != b->at_ps ? a->at_ps < b->at_ps : (int32_t)(a->order - b->order) < 0;
}

static int grow(struct sim_events *events)
{
    uint32_t room = events->room ? 2 * events->room : FIRST_ROOM;
    struct sim_heap_entry *heap = realloc(events->heap, room * sizeof(*heap));
    struct sim_event *slot;
    uint32_t *free_slot;

    if (heap)
        events->heap = heap;
    slot = realloc(events->slot, room * sizeof(*slot));
    if (slot)
        events->slot = slot;
    free_slot = realloc(events->free_slot, room * sizeof(*free_slot));
    if (free_slot)
        events->free_slot = free_slot;
    if (!heap || !slot || !free_slot)
        return -ENOMEM;
    for (uint32_t i = room; i-- > events->room;)
        events->free_slot[events->free_count++] = i;
    events->room = room;
    return 0;
}

int sim_events_init(struct sim_events *events)
{
    memset(events, 0, sizeof(*events));
    return grow(events);
}

void sim_events_fini(struct sim_events *events)
{
    free(events->heap);
    free(events->slot);
    free(events->free_slot);
    memset(events, 0, sizeof(*events));
}

void sim_events_add(struct sim_events *events, uint64_t at_ps, const struct sim_event *event)
{
    struct sim_heap_entry entry = {.at_ps = at_ps > events->now_ps ? at_ps : events->now_ps};
    uint32_t at;

    if (events->count == events->room && grow(events)) {
        fprintf(stderr, "perseus-sim: no memory for %u events\n", events->count);
        exit(1);
    }
    entry.order = events->order++;
    entry.slot = events->free_slot[--events->free_count];
    events->slot[entry.slot] = *event;
    for (at = events->count++; at; at = (at - 1) / CHILDREN) {
        struct sim_heap_entry *parent = &events->heap[(at - 1) / CHILDREN];

        if (!earlier(&entry, parent))
            break;
        events->heap[at] = *parent;
    }
    events->heap[at] = entry;
}

/* Let the last entry sink from the root to its place. */
static void sink(struct sim_events *events)
{
    struct sim_heap_entry entry = events->heap[--events->count];
    uint32_t at = 0;

    for (;;) {
        uint32_t first = at * CHILDREN + 1, best = first;
        uint32_t end = first + CHILDREN < events->count ? first + CHILDREN : events->count;

        if (first >= events->count)
            break;
        for (uint32_t i = first + 1; i < end; i++)
            if (earlier(&events->heap[i], &events->heap[best]))
                best = i;
        if (!earlier(&events->heap[best], &entry))
            break;
        events->heap[at] = events->heap[best];
        at = best;
    }
    events->heap[at] = entry;
}

bool sim_events_take(struct sim_events *events, struct sim_event *out)
{
    struct sim_heap_entry first;

    if (!events->count)
        return false;
    first = events->heap[0];
    *out = events->slot[first.slot];
    events->free_slot[events->free_count++] = first.slot;
    events->now_ps = first.at_ps;
    events->taken++;
    sink(events);
    if (events->count) /* probably the next event; with many connections it is in no cache */
        __builtin_prefetch(events->slot[events->heap[0].slot].object);
    return true;
}
