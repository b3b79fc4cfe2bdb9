/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/verbs/cm_world.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "tools/softnic/memory/copier_client.h"
#include "tools/softnic/world/self.h"

static_assert((int)SN_CM_MAX_DEVS == (int)SN_MAX_DEVS, "a row for each device");

int sn_cm_world_get(struct sn_cm_world *world)
{
    struct sn_self *self = sn_self_get(sn_device_mem_choose);

    if (!self)
        return -errno;
    *world = (struct sn_cm_world){.id = self->world->id, .dev_count = self->world->dev_count};
    for (uint32_t i = 0; i < world->dev_count; i++) {
        if (!self->world->devs[i].efa)
            memcpy(world->gid[i], self->world->devs[i].gid, sizeof(world->gid[i]));
        world->port_up[i] = &self->world->devs[i].port_up;
    }
    return 0;
}
