/* SPDX-License-Identifier: Apache-2.0 */
/* Names that may not be used again yet: those of connections that this side has closed, but the other side perhaps has
 * not. It may still send, and its arrivals would be taken for those of another connection. All are called under the
 * lock of the pools. */
#ifndef TRANSPORT_SRD_LINGER_H
#define TRANSPORT_SRD_LINGER_H

#include "transport/nic/verbs/srd_pool.h"

struct prs_srd_linger {
    struct prs_srd_linger *next;
    uint8_t gid[16];
    uint32_t number;
    int stream_fd; /* ends when the other side has closed; -1: unknown, so the name is never used again */
};

/* Keep the name of an end that leaves in its end->linger. stream_fd: the stream that ends when the other side has
 * closed; -1: none. */
void prs_srd_linger_keep_locked(struct prs_srd_qp *qp, const struct prs_srd_end *end, int stream_fd);
/* May something still arrive from that queue, of a connection of the queue pair that has closed? */
bool prs_srd_linger_has_locked(struct prs_srd_qp *qp, const uint8_t gid[16], uint32_t number);
/* The queue pair is gone, and with it all its names. */
void prs_srd_linger_drop_all(struct prs_srd_qp *qp);

#endif
