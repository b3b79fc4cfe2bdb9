/* SPDX-License-Identifier: Apache-2.0 */
/* What librdmacm.so.1 (cm/) needs to know about the world, and cannot learn by verbs. */
#ifndef SOFTNIC_CM_WORLD_H
#define SOFTNIC_CM_WORLD_H

#include <stdint.h>

enum { SN_CM_MAX_DEVS = 64 };

struct sn_cm_world {
    uint64_t id; /* random */
    uint32_t dev_count;
    /* by the number that ibv_get_device_index returns, devices of other nodes included: the link-local GID, and the one
     * of the IPv4 address; all 0 on an EFA, which has no connections */
    uint8_t gid[SN_CM_MAX_DEVS][2][16];
    const uint32_t *port_up[SN_CM_MAX_DEVS]; /* in the world's memory: another process may pull a cable */
};

/* Join the world on first use. 0, or -errno. */
int sn_cm_world_get(struct sn_cm_world *world);

#endif
