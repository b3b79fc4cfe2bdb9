/* SPDX-License-Identifier: Apache-2.0 */
/* This process in its world: the mapping, its index, and the local objects by their shared numbers. */
#ifndef SOFTNIC_SELF_H
#define SOFTNIC_SELF_H

#include "tools/softnic/world/world.h"

struct sn_qp;
struct sn_cq;
struct sn_srq;

struct sn_self {
    struct sn_world *world;
    uint32_t proc;
    uint64_t nonce;
    char path[256];
    /* By table index. An index belongs to one object at a time. Polling threads read these. */
    struct sn_qp *qps[SN_MAX_QPS];
    struct sn_cq *cqs[SN_MAX_CQS];
    struct sn_srq *srqs[SN_MAX_SRQS];
};

/* Join the world on first use; joined(world) is then called once, before any thread sees the result. Return it, or NULL
 * with errno set and the reason logged. */
struct sn_self *sn_self_get(void (*joined)(const struct sn_world *world));

/* The joined world; only after sn_self_get succeeded. */
extern struct sn_self *sn_self;

#endif
