/* SPDX-License-Identifier: Apache-2.0 */
/* The virtual clock and the events to come, earliest first; events of one time in the order in which they were added.
 * Nothing here depends on addresses or on the real clock, so equal inputs give equal runs. */
#ifndef SIM_EVENTS_H
#define SIM_EVENTS_H

#include <stdbool.h>
#include <stdint.h>

enum { SIM_PS_PER_NS = 1000 };

/* What an event is about; sim.c says which function handles which kind. */
struct sim_event {
    void *object;
    uint32_t kind;
    uint32_t a;
    uint64_t b;
};

struct sim_events {
    struct sim_heap_entry *heap; /* a heap of four children a node, one cache line */
    struct sim_event *slot;
    uint32_t *free_slot;
    uint32_t count, room, free_count;
    uint32_t order;  /* order of the next event among those of one time */
    uint64_t now_ps; /* time of the event that was taken last */
    uint64_t taken;
};

/* Return 0 or -ENOMEM. */
int sim_events_init(struct sim_events *events);
void sim_events_fini(struct sim_events *events);
/* Add an event. A time in the past counts as now. No memory ends the program. */
void sim_events_add(struct sim_events *events, uint64_t at_ps, const struct sim_event *event);
/* Take the earliest event, and let the clock go there. Return false when there is none. */
bool sim_events_take(struct sim_events *events, struct sim_event *out);

#endif
