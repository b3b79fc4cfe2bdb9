/* SPDX-License-Identifier: Apache-2.0 */
/* The consumer's end of a command ring, used by one proxy. The layout and the producers' end are in perseus/ring.h and
 * perseus/device.h. */
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
    uint64_t done;     /* position last published as done */
    size_t map_bytes;
};

/* slot_count: a power of two from 4 to 2^20. Return 0, -EINVAL or -ENOMEM. */
int prs_ring_init(struct prs_ring *ring, uint64_t slot_count);
void prs_ring_fini(struct prs_ring *ring);

/* Copy the next command out. Return 1, or 0 while not all of it has arrived. */
int prs_ring_take(struct prs_ring *ring, struct prs_cmd_fields *out);
/* Give the producers the slots of the commands that were taken. */
void prs_ring_return(struct prs_ring *ring);
/* Publish that all commands below the position are complete. */
void prs_ring_done(struct prs_ring *ring, uint64_t position);
/* End every wait of the producers. Only the first error counts. */
void prs_ring_abort(struct prs_ring *ring, int error);
/* Read the first error of the producers. Return 1 and fill in the report, or return 0: there is none. */
int prs_ring_report(const struct prs_ring *ring, struct prs_device_report *report);
/* Describe a report in one line, for logs. */
void prs_ring_report_text(const struct prs_device_report *r, char *text, size_t bytes);

#endif
