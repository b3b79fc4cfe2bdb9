/* SPDX-License-Identifier: Apache-2.0 */
/* The proxy's end of a command ring (layout and the producers' end: include/perseus/ring.h, device.h). One consumer. */
#ifndef TRANSPORT_RING_H
#define TRANSPORT_RING_H

#include <stddef.h>

#include <perseus/ring.h>

struct prs_ring {
    struct prs_ring_control *control;
    struct prs_cmd *slots;
    uint64_t slot_count;
    uint64_t taken;    /* next position to take */
    uint64_t returned; /* credit last published */
    uint64_t done;     /* last published */
    size_t map_bytes;
};

/* slot_count: a power of two from 4 to 2^20. Return 0, -EINVAL or -ENOMEM. */
int prs_ring_init(struct prs_ring *ring, uint64_t slot_count);
void prs_ring_fini(struct prs_ring *ring);

/* Copy the next command out. Return 1, or 0 while it is not there whole. */
int prs_ring_take(struct prs_ring *ring, struct prs_cmd_fields *out);
/* Let the producers have the slots that were taken. */
void prs_ring_return(struct prs_ring *ring);
/* Everything below the position is complete. */
void prs_ring_done(struct prs_ring *ring, uint64_t position);
/* End every wait of the producers. The first reason stays. */
void prs_ring_abort(struct prs_ring *ring, int error);
/* The producers' first error: return 1 and fill report, or 0. */
int prs_ring_report(const struct prs_ring *ring, struct prs_device_report *report);
/* One line about a report, for logs. */
void prs_ring_report_text(const struct prs_device_report *report, char *text, size_t bytes);

#endif
