/* SPDX-License-Identifier: Apache-2.0 */
/* The two processes of cuda_rw.c over SRD, where the device is an EFA. */
#ifndef TEST_SOFTNIC_CUDA_SRD_H
#define TEST_SOFTNIC_CUDA_SRD_H

#include "test/softnic/cuda_side.h"

/** Is this world one of EFA devices (softnic-run --efa)? Before the side is opened, and before the fork. */
bool srd_wanted(void);

struct ibv_qp *srd_make(const struct side *side);
/** Ready to send and receive, and the other side's address taken. */
void srd_connect(struct side *side, const union ibv_gid *gid, uint32_t qpn);
/** As post(). */
void srd_post(struct side *side, enum ibv_wr_opcode opcode, const struct buf *buf, size_t offset, size_t bytes,
              struct remote remote);

/** Bursts of writes with immediates to device memory: each comes once, in any order, after its own bytes. */
void immediates_come_after_their_own_bytes(struct side *side, enum memory memory);
/** Bursts of plain writes, with one in them that is refused: the others land. */
void a_refused_write_spares_its_neighbours(struct side *side, enum memory memory);
/** Two queue pairs write, with immediates, to one that has fewer receives than are under way: some wait for theirs. */
void initiators_share_the_receives_of_one_target(struct side *side, enum memory memory);

#endif
