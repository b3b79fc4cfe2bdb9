/* SPDX-License-Identifier: Apache-2.0 */
/* Raising a signal at its receiver where the NIC has no atomics and keeps no order (decisions/0012).
 *
 * A word in host memory: the CPU stores or adds, after the key and the bounds that a NIC would have looked at. A word
 * in device memory: the NIC writes it, over the queue to itself; for an add it reads it first. From the read to the end
 * of the write the word is claimed, process-wide: all that is added to a word of this process comes through here, so
 * two peers that add to one word lose nothing. A peer raises one word of a device at a time, since two writes would
 * pass each other. */
#ifndef TRANSPORT_RAISE_H
#define TRANSPORT_RAISE_H

#include <sys/types.h>

#include "transport/tally.h"
#include <perseus/perseus.h>

struct prs_peer;

enum prs_raise_stage { PRS_RAISE_IDLE, PRS_RAISE_READING, PRS_RAISE_WRITING };

struct prs_raise {
    enum prs_raise_stage stage;
    struct prs_op op;                /* the read or the write under way */
    const struct prs_record *record; /* READING: to go on with, whatever else may be raised by now */
    uint64_t word;                   /* claimed, unless IDLE */
    struct prs_raise *next;          /* list of the claimed, under its lock */
    pid_t owner;                     /* what a forked child finds on the list is its parent's */
    uint64_t refused_ns;             /* since when a claim is: each progress tries again, whether anything has come or
                                        not; 0: it is not */
    volatile uint64_t *landing;      /* what the read brings; registered on the first path */
    uint32_t landing_key;
};

/* Start to raise it. Return 0 (it will be done before anything that is raised later), PRS_AGAIN or -errno (the peer has
 * failed). */
int prs_raise_signal(struct prs_peer *peer, const struct prs_record *record);

/* Let others have the word, if what was written there has landed. At each progress: they may be waiting. */
void prs_raise_finish(struct prs_raise *raise);

/* The peer has failed or is being closed: nothing of its own will take effect any more. */
void prs_raise_drop(struct prs_raise *raise);

#endif
