/* SPDX-License-Identifier: Apache-2.0 */
/* Protection domains, and parent domains: other names for one. Thread domains promise the NIC that an object has one
 * user at a time, which helps nothing here. */
#include <errno.h>
#include <stdlib.h>

#include "tools/softnic/verbs/devices.h"

static uint32_t newest_pd; /* handles are unique in the process: a key of one device is not valid on another */

static struct ibv_pd *pd_make(struct ibv_context *context, uint32_t handle)
{
    struct sn_pd *pd = calloc(1, sizeof(*pd));

    if (!pd)
        return NULL;
    pd->ibv.context = context;
    pd->ibv.handle = handle;
    return &pd->ibv;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    return pd_make(context, __atomic_add_fetch(&newest_pd, 1, __ATOMIC_RELAXED));
}

struct ibv_pd *ibv_import_pd(struct ibv_context *context, uint32_t handle)
{
    if (handle - 1 < __atomic_load_n(&newest_pd, __ATOMIC_RELAXED))
        return pd_make(context, handle);
    errno = EINVAL;
    return NULL;
}

void ibv_unimport_pd(struct ibv_pd *pd)
{
    free(pd);
}

/* Objects of the domain under any of its names. */
static bool handle_in_use(uint32_t handle)
{
    const struct sn_world *world = sn_self->world;

    for (uint32_t i = 0; i < world->mr_slots.fresh; i++)
        if (world->mrs[i].owner == sn_self->proc + 1 && world->mrs[i].pd == handle && world->mrs[i].key)
            return true;
    for (uint32_t i = 0; i < world->qp_slots.fresh; i++)
        if (world->qps[i].owner == sn_self->proc + 1 && world->qps[i].pd == handle && world->qps[i].qpn)
            return true;
    for (uint32_t i = 0; i < world->srq_slots.fresh; i++)
        if (world->srqs[i].owner == sn_self->proc + 1 && world->srqs[i].pd == handle)
            return true;
    return false;
}

int ibv_dealloc_pd(struct ibv_pd *ibv)
{
    struct sn_pd *pd = sn_pd_of(ibv);

    if (__atomic_load_n(&pd->users, __ATOMIC_ACQUIRE) || (!pd->parent && handle_in_use(ibv->handle)))
        return EBUSY;
    if (pd->parent)
        sn_pd_release(&pd->parent->ibv);
    if (pd->td)
        __atomic_fetch_sub(&pd->td->users, 1, __ATOMIC_RELEASE);
    free(pd);
    return 0;
}

struct ibv_td *sn_td_alloc(struct ibv_context *context, struct ibv_td_init_attr *attr)
{
    struct sn_td *td = attr->comp_mask ? NULL : calloc(1, sizeof(*td));

    if (attr->comp_mask)
        errno = EINVAL;
    if (td)
        td->ibv.context = context;
    return td ? &td->ibv : NULL;
}

int sn_td_dealloc(struct ibv_td *ibv)
{
    struct sn_td *td = (struct sn_td *)ibv;

    if (__atomic_load_n(&td->users, __ATOMIC_ACQUIRE))
        return EBUSY;
    free(td);
    return 0;
}

/* The allocators are for memory that a NIC and a program share, of which there is none. */
struct ibv_pd *sn_parent_domain_alloc(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr)
{
    enum { KNOWN = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT };
    struct ibv_pd *pd;

    errno = EINVAL;
    if (!attr->pd || attr->pd->context != context || sn_pd_of(attr->pd)->parent ||
        (attr->td && attr->td->context != context))
        return NULL;
    errno = EOPNOTSUPP;
    if (attr->comp_mask & ~(uint32_t)KNOWN)
        return NULL;
    pd = pd_make(context, attr->pd->handle);
    if (!pd)
        return NULL;
    sn_pd_hold(attr->pd);
    sn_pd_of(pd)->parent = sn_pd_of(attr->pd);
    sn_pd_of(pd)->td = (struct sn_td *)attr->td;
    if (attr->td)
        __atomic_fetch_add(&sn_pd_of(pd)->td->users, 1, __ATOMIC_RELAXED);
    return pd;
}
