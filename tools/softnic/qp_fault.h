/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SOFTNIC_QP_FAULT_H
#define SOFTNIC_QP_FAULT_H

#include "tools/softnic/world.h"

/** Put a queue pair of any process into the error state and tell its owner (QP_FATAL). Return 0 or -ENOENT. */
int sn_qp_fault(struct sn_world *world, uint32_t qpn);

#endif
