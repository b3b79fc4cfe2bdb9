/* SPDX-License-Identifier: Apache-2.0 */
/* Signals that come as records (the counted policy; any policy where the NIC has no atomics): memory that records and
 * credits are written to, and the raising of the signals by our own NIC, which checks keys and bounds and reaches CUDA
 * memory as well, or as raise.h has it. */
#ifndef TRANSPORT_RECORDS_H
#define TRANSPORT_RECORDS_H

#include "transport/handshake.h"
#include "transport/raise.h"
#include "transport/tally.h"

struct prs_peer;

struct prs_records {
    struct prs_counts counts;
    uint8_t *memory;                  /* registered strictly: the ring of records, then the word for credits */
    struct ibv_mr *mr[PRS_MAX_RAILS]; /* by path */
    struct prs_wire_window credit;    /* the peer's */
    uint32_t credits_sent;
    bool asked; /* the peer waits for credits, however few */
    struct prs_raise raise;
    /* Reads behind data that the NIC that raises signals does not keep in front of them (records.c). */
    uint64_t others;                /* arrivals of such data */
    uint64_t flushed, flush_covers; /* so many of them are visible in device memory; will be when flush is done */
    uint64_t ready_at[PRS_RECORDS]; /* others when the record was first found complete, plus 1; 0: it was not */
    uint64_t flushes;
    bool flushing;
    struct prs_op flush;
};

/* Make what this side needs: it is counted itself, or the peer is. Once per peer. Return 0 or -errno. */
int prs_records_open(struct prs_peer *peer);
void prs_records_close(struct prs_peer *peer);
/* Where the peer may write. */
void prs_records_window(const struct prs_peer *peer, struct prs_wire_window *records, struct prs_wire_window *credit);

/* An arrival over that path counts for a tag, or a record has come to a slot. Return 0 or -EPROTO. */
int prs_records_arrive(struct prs_peer *peer, const struct prs_imm *imm, uint32_t path);
/* Raise what may be raised. Return 0 or -errno (the peer has failed). */
int prs_records_raise(struct prs_peer *peer);
/* Is a signal being raised, or about to be: one that has come, with all that it stands for? */
bool prs_records_busy(const struct prs_peer *peer);

#endif
