/* SPDX-License-Identifier: Apache-2.0 */
/* Memory windows: making and freeing them. Requests bind and invalidate them (window.c). */
#include <errno.h>
#include <stdlib.h>

#include "tools/softnic/verbs/devices.h"
#include "tools/softnic/verbs/qp.h"
#include "tools/softnic/world/object.h"

static uint32_t made; /* whether there has ever been one */

struct ibv_mw *sn_mw_alloc(struct ibv_pd *pd, enum ibv_mw_type type)
{
    struct sn_mr_shm *shm;
    struct ibv_mw *mw;
    uint32_t index;
    int r;

    errno = type == IBV_MW_TYPE_1 || sn_ctx_dev(sn_ctx_of(pd->context))->efa ? EOPNOTSUPP : EINVAL;
    if (type != IBV_MW_TYPE_2 || errno == EOPNOTSUPP) {
        sn_log("alloc_mw on %s: type %d: only type 2 is there, and not on EFA", pd->context->device->name, type);
        return NULL;
    }
    mw = calloc(1, sizeof(*mw));
    if (!mw)
        return NULL;
    r = sn_mr_shm_take(sn_self->world, sn_self->proc, &index);
    if (r < 0) {
        free(mw);
        errno = -r;
        return NULL;
    }
    shm = &sn_self->world->mrs[index];
    shm->pd = pd->handle;
    shm->window = 1;
    *mw = (struct ibv_mw){pd->context, pd, index << 16 | shm->generation, index, type};
    sn_pd_hold(pd);
    __atomic_store_n(&made, 1, __ATOMIC_RELEASE);
    return mw;
}

int sn_mw_dealloc(struct ibv_mw *mw)
{
    struct sn_mr_shm *shm = &sn_self->world->mrs[mw->handle];

    /* [in-use] as in mr.c */
    __atomic_store_n(&shm->key, 0, __ATOMIC_SEQ_CST);
    sn_mr_users_wait(sn_ctx_of(mw->context), mw->rkey);
    sn_mr_shm_give(sn_self->world, mw->handle);
    sn_pd_release(mw->pd);
    free(mw);
    return 0;
}

bool sn_mr_has_windows(const struct ibv_mr *mr)
{
    const struct sn_world *world = sn_self->world;

    if (!__atomic_load_n(&made, __ATOMIC_ACQUIRE))
        return false;
    for (uint32_t i = 0; i < world->mr_slots.fresh; i++)
        if (world->mrs[i].owner == sn_self->proc + 1 && world->mrs[i].window && world->mrs[i].key &&
            world->mrs[i].window_of == mr->handle)
            return true;
    return false;
}
