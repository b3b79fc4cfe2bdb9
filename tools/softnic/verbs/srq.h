/* SPDX-License-Identifier: Apache-2.0 */
/* Shared receive queues. */
#ifndef SOFTNIC_SRQ_H
#define SOFTNIC_SRQ_H

#include "tools/softnic/verbs/devices.h"

enum { SN_MAX_SRQ_WR = 32768 };

struct sn_srq {
    struct ibv_srq ibv; /* first */
    struct sn_srq_shm *shm;
    uint32_t index;
    uint32_t max_wr, max_sge;
    uint32_t refs; /* queue pairs */
    uint32_t async_events;
};

#endif
