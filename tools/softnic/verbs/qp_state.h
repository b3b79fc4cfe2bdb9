/* SPDX-License-Identifier: Apache-2.0 */
/* Which state may follow which, with which attributes: the table of the InfiniBand specification for RC, and EFA's for
 * SRD. */
#ifndef SOFTNIC_QP_STATE_H
#define SOFTNIC_QP_STATE_H

#include <infiniband/verbs.h>

/* Return 0, or EINVAL after logging what is wrong: the transition, or attributes that are missing or not allowed. */
int sn_qp_state_check(uint32_t qpn, uint32_t transport, enum ibv_qp_state from, enum ibv_qp_state to, int mask);

#endif
