/* SPDX-License-Identifier: Apache-2.0 */
/* Signals that arrive as records: under the counted policy, and under any policy if the NIC has no atomics. This holds
 * the memory that the peer writes records and credits to, and raises the signals: by our own NIC, which checks keys and
 * bounds and reaches CUDA memory too, or as described in raise.h. */
#ifndef TRANSPORT_RECORDS_H
#define TRANSPORT_RECORDS_H

#include "transport/nic/own_memory.h"
#include "transport/peer/handshake.h"
#include "transport/peer/raise.h"
#include "transport/order/tally.h"

struct prs_peer;

struct prs_records {
    struct prs_own_memory memory;  /* the ring of records, then the word for credits */
    struct prs_wire_window credit; /* where the peer takes credits */
    uint32_t credits_sent;
    bool credits_wanted; /* the peer waits for credits, even for a few */
    struct prs_raise raise;
    /* Flushes: reads that make data visible before a signal in device memory is raised (see flush_before()). */
    uint64_t unordered;             /* arrivals of data that needs a flush */
    uint64_t flushed, flush_covers; /* how many of them are visible now, and will be when the flush is done */
    uint64_t *ready_at; /* [PRS_RECORDS]: unordered + 1 when the record was first found complete; 0: not yet */
    uint64_t flushes;
    bool flushing;
    struct prs_op flush;
    struct prs_counts counts; /* last member, since most of its pages are not touched until they are used */
};

/* Allocate and register what this side needs to send or receive records, unless done. Return 0 or -errno. */
int prs_records_open(struct prs_peer *peer);
void prs_records_close(struct prs_peer *peer);
/* The memory that the peer may write. */
void prs_records_window(const struct prs_peer *peer, struct prs_wire_window *records, struct prs_wire_window *credit);

/* Handle a counted put, or a record, that has arrived over that path. Return 0 or -EPROTO. */
int prs_records_arrive(struct prs_peer *peer, const struct prs_imm *imm, uint32_t path);
/* Raise all signals that are ready. Return 0 or -errno (the peer has failed). */
int prs_records_raise(struct prs_peer *peer);
/* Is a signal being raised, or has one arrived together with all puts that it follows? */
bool prs_records_busy(const struct prs_peer *peer);

#endif
