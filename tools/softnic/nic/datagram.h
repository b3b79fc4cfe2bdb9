/* SPDX-License-Identifier: Apache-2.0 */
/* Requests that name their target by an address handle: unreliable datagrams (UD), and SRD (srd.h). This file has the
 * handles, and the differences of UD from RC (run.c, execute.c). */
#ifndef SOFTNIC_DATAGRAM_H
#define SOFTNIC_DATAGRAM_H

#include "tools/softnic/nic/queue_pair.h"

enum {
    SN_UD_MAX_SEND = 4096, /* bytes: one packet of the port's active MTU */
    SN_HOP_LIMIT = 64,
};

/* An address handle. */
struct sn_ah {
    struct ibv_ah ibv; /* first: programs hold a pointer to it */
    uint32_t dev;      /* SN_NONE: no device has that address; datagrams get lost, requests of SRD time out */
    struct sn_route route;
};

/* Set the target of a request. A qkey with the highest bit set stands for that of the queue pair. */
void sn_wqe_to(const struct sn_qp *qp, struct sn_wqe *w, const struct ibv_ah *ah, uint32_t qpn, uint32_t qkey);

/* Does UD take this request? Return 0 or EINVAL, logged; errors that only the device finds are set in w->status. The
 * caller holds the mutex. */
int sn_ud_check(const struct sn_qp *qp, struct sn_wqe *w);

/* The kind of packet, which a receiver finds in the completion's sl, as with mlx5: Ethernet has no service levels, and
 * UCX looks for the GID of the receiver where this says. */
enum { SN_UD_ROCE_V1 = 0, SN_UD_ROCE_V2_IPV4 = 2 };
uint32_t sn_ud_packet(const struct sn_wqe *w);

/* Make the header that precedes the data in the receive: a GRH, or the IPv4 header in its last 20 bytes (RoCE v2).
 * The caller is the runner. */
void sn_ud_header(struct sn_qp *qp, const struct sn_qp_shm *target, const struct sn_wqe *w);

/* The sender's and the receiver's GIDs, and the class, label and hop limit, from such a header. */
void sn_ud_header_read(const uint8_t header[SN_GRH_BYTES], struct ibv_global_route *to_sender, uint8_t receiver[16]);

#endif
