/* SPDX-License-Identifier: Apache-2.0 */
/* The two processes of test_cuda_rw.c with SRD, if the device is an EFA device. */
#ifndef TEST_SOFTNIC_CUDA_SRD_H
#define TEST_SOFTNIC_CUDA_SRD_H

#include "tools/softnic/test/cuda_side.h"

/* True if this world has EFA devices (softnic-run --efa). Call it before side_open() and before the fork. */
bool srd_wanted(void);

struct ibv_qp *srd_make(const struct side *side);
/* Make the queue pair ready to send and receive, and store the other side's address. */
void srd_connect(struct side *side, const union ibv_gid *gid, uint32_t qpn);
/* As post(), with SRD. */
void srd_post(struct side *side, enum ibv_wr_opcode opcode, const struct buf *buf, size_t offset, size_t bytes,
              struct remote remote);

/* Bursts of writes with immediates to device memory: each immediate comes once, in any order, after its own bytes. */
void immediates_come_after_their_own_bytes(struct side *side, enum memory memory);
/* Bursts of plain writes, one of which is refused: the others arrive. */
void a_refused_write_spares_its_neighbours(struct side *side, enum memory memory);
/* Two queue pairs write, with immediates, to one that has fewer receives than writes under way: some writes wait for a
 * receive. */
void initiators_share_the_receives_of_one_target(struct side *side, enum memory memory);

#endif
