/* SPDX-License-Identifier: Apache-2.0 */
/* Raises signals at their receiver, where the NIC has no atomics and keeps no order (decisions/0012), or where the rail
 * whose NIC would raise them may be lost (decisions/0014).
 *
 * A word in host memory: the CPU checks key and bounds, as a NIC would, then stores or adds. A word in device memory:
 * the NIC writes it over the loopback queue; for an add it reads the word first. From the read to the end of the write
 * the peer claims the word in the whole process. All adds to words of this process come through here, so two peers that
 * add to one word lose nothing. A peer raises one device word at a time, since two writes could overtake each other.
 *
 * With atomics, the NIC of the first rail that is not lost writes words of device memory. The CPU waits for it before
 * it stores to host memory, so that signals keep their order. */
#ifndef TRANSPORT_RAISE_H
#define TRANSPORT_RAISE_H

#include "transport/order/tally.h"
#include "transport/peer/claim.h"
#include <perseus/perseus.h>

struct prs_peer;

enum prs_raise_stage { PRS_RAISE_IDLE, PRS_RAISE_READING, PRS_RAISE_WRITING };

struct prs_raise {
    enum prs_raise_stage stage;
    struct prs_op op;                /* the read or the write in flight */
    const struct prs_record *record; /* READING: the record to continue with */
    uint64_t key;                    /* READING: the whole key of its word */
    struct prs_claim claim;          /* of the word, unless IDLE */
    /* when the claim was first refused; it is retried at each progress call. 0: not refused */
    uint64_t refused_ns;
    volatile uint64_t *landing; /* the read stores the value here; registered on the first path */
    uint32_t landing_key;
};

/* Start to raise the signal. Return 0 (it takes effect before any signal raised later), PRS_AGAIN or -errno (the peer
 * has failed). */
int prs_raise_signal(struct prs_peer *peer, const struct prs_record *record);

/* Where rails can be replaced: let the first working rail raise the signals in device memory from now on, unless
 * requests of the previous rail are in flight. Sets that were in flight on a rail that is lost are raised again. Return
 * 0 or -errno (the peer has failed). */
int prs_raise_over_living_rail(struct prs_peer *peer);

/* Release the claim if the write is complete. Call it at each progress, since other peers may be waiting. */
void prs_raise_finish(struct prs_raise *raise);

/* The peer has failed or is being closed: drop its claim. */
void prs_raise_drop(struct prs_raise *raise);

#endif
