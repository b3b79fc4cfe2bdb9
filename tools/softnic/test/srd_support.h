/* SPDX-License-Identifier: Apache-2.0 */
/* Ends that use SRD and are not connected. */
#ifndef TEST_SOFTNIC_SRD_SUPPORT_H
#define TEST_SOFTNIC_SRD_SUPPORT_H

#include <infiniband/efadv.h>

#include "tools/softnic/test/support.h"

enum { SRD_QKEY = 0x11, SRD_OPS = 31 /* IBV_QP_EX_WITH_: write, write and send with and without immediate, read */ };

/* The configuration of a world of two EFA devices; the caller may change it before use. */
struct sn_config srd_config(void);
struct sn_world *srd_world(void);

/* As end_open, but with SRD, and ready to send and to receive. Close it with end_close. */
void srd_open(struct end *end, const struct end_options *options);
/* Make its queue pair; then bring it to the state in which it can send and receive. */
void srd_queue_make(struct end *end, uint32_t wrs);
void srd_ready(struct end *end, int rnr_retry /* -1: not given */);
/* Open both ends in a new world, on devices 0 and 1. Return a's handle for b. */
struct ibv_ah *srd_pair_open(const struct sn_config *config, struct end *a, struct end *b);
struct address srd_address(const struct end *end);
struct ibv_ah *srd_ah(struct end *end, const struct address *to);

/* One request, and the call that posts it with ibv_wr_* and returns the result of ibv_wr_complete. */
struct srd_request {
    enum ibv_wr_opcode opcode;
    struct ibv_ah *ah; /* NULL: none is set */
    uint32_t qpn, qkey, rkey;
    uint64_t raddr;
    uint64_t offset; /* offset in end's buffer */
    uint32_t length;
    uint32_t pieces;    /* number of buffers; 0: one */
    unsigned int flags; /* in addition to signaled; IBV_SEND_INLINE: with inline data */
    bool unsignaled;
    uint64_t wr_id; /* also the immediate */
};
int srd_post(struct end *end, const struct srd_request *request);

/* Post a write or send of bytes of end's buffer to the same offset of to's buffer. */
int srd_put(struct end *end, enum ibv_wr_opcode opcode, struct ibv_ah *ah, const struct address *to, uint64_t offset,
            uint32_t length, uint64_t wr_id);
/* Post count of them, at adjacent offsets and numbered from 0, with one doorbell: so even a slow thread posts them
 * together, and they can overtake each other. */
int srd_put_all(struct end *end, enum ibv_wr_opcode opcode, struct ibv_ah *ah, const struct address *to,
                uint32_t length, uint32_t count);

#endif
