/* SPDX-License-Identifier: Apache-2.0 */
/* Objects in the world: taking and freeing them. The owner frees its own objects, and a sweeper those of a dead
 * process. */
#ifndef SOFTNIC_OBJECT_H
#define SOFTNIC_OBJECT_H

#include "tools/softnic/world/world.h"

/* Take an index for process proc and fill in the identity (owner, generation, key or number). Return 0 or -ENOMEM. */
int sn_ctx_shm_take(struct sn_world *world, uint32_t proc, uint32_t dev, uint32_t *index);
int sn_cq_shm_take(struct sn_world *world, uint32_t proc, uint32_t ctx, uint32_t entries, uint32_t *index);
int sn_qp_shm_take(struct sn_world *world, uint32_t proc, uint32_t *index);
int sn_srq_shm_take(struct sn_world *world, uint32_t proc, uint32_t *index);
int sn_mr_shm_take(struct sn_world *world, uint32_t proc, uint32_t *index);

/* Give a completion queue room for that many entries. The caller keeps its consumers away. Return 0, -EINVAL: more are
 * unread, or -ENOMEM. */
int sn_cq_shm_resize(struct sn_world *world, uint32_t index, uint32_t entries);

/* Free it. The owner, or the sweeper, makes sure that nobody is using it. */
void sn_ctx_shm_give(struct sn_world *world, uint32_t index);
void sn_cq_shm_give(struct sn_world *world, uint32_t index);
void sn_qp_shm_give(struct sn_world *world, uint32_t index);
void sn_srq_shm_give(struct sn_world *world, uint32_t index);
void sn_mr_shm_give(struct sn_world *world, uint32_t index);

/* Take back the numbers and keys of process proc, so that nobody finds its queue pairs or memory any more. */
void sn_objects_hide(struct sn_world *world, uint32_t proc);

/* Free everything that process proc owns. It must be hidden, and unused. */
void sn_objects_free(struct sn_world *world, uint32_t proc);

/* Allocate the space of a receive ring. entries is rounded up to a power of two. */
int sn_rq_shm_init(struct sn_world *world, struct sn_rq_shm *rq, uint32_t entries, uint32_t max_sge);
void sn_rq_shm_fini(struct sn_world *world, struct sn_rq_shm *rq);

static inline uint32_t sn_qpn_index(uint32_t qpn)
{
    return qpn & (SN_MAX_QPS - 1);
}

/* The live queue pair with that number, or NULL. */
static inline struct sn_qp_shm *sn_qp_find(struct sn_world *world, uint32_t qpn)
{
    struct sn_qp_shm *qp = &world->qps[sn_qpn_index(qpn)];

    return qpn != 0 && __atomic_load_n(&qp->qpn, __ATOMIC_ACQUIRE) == qpn ? qp : NULL;
}

/* Are the values of its fields possible? In a damaged world they may not be. */
static inline bool sn_qp_is_sound(const struct sn_world *world, const struct sn_qp_shm *qp)
{
    return qp->owner - 1 < SN_MAX_PROCS && qp->dev < world->dev_count && qp->ctx < SN_MAX_CTXS &&
           qp->scq < SN_MAX_CQS && qp->rcq < SN_MAX_CQS && (qp->srq == SN_NONE || qp->srq < SN_MAX_SRQS);
}

/* The registered memory with that key, or NULL. */
static inline struct sn_mr_shm *sn_mr_find(struct sn_world *world, uint32_t key)
{
    struct sn_mr_shm *mr = &world->mrs[key >> 16];

    /* [in-use] after the caller has announced itself. An acquire alone may come before an earlier store. */
    return key != 0 && __atomic_load_n(&mr->key, __ATOMIC_SEQ_CST) == key ? mr : NULL;
}

#endif
