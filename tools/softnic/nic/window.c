/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/nic/window.h"

#include "tools/softnic/nic/execute.h"
#include "tools/softnic/world/object.h"

enum {
    KEY_TAG = 0xff, /* the part of a window's key that the program chooses */
    WINDOW_ACCESS = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
    NEEDS_WRITE = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
};

int sn_window_bind_fill(const struct sn_qp *qp, struct sn_wqe *w, const struct ibv_mw *mw, uint32_t rkey,
                        const struct ibv_mw_bind_info *info)
{
    const char *why = NULL;

    if (!mw || mw->type != IBV_MW_TYPE_2 || mw->pd->handle != qp->pd)
        why = "no window of type 2 of the queue pair's domain";
    else if ((mw->rkey ^ rkey) & ~(uint32_t)KEY_TAG)
        why = "another key than the window's, apart from its last 8 bits";
    else if (!info->mr || !info->length)
        why = "no memory; IBV_WR_LOCAL_INV invalidates a window";
    if (why) {
        sn_log("queue pair %u: bind of a memory window, key 0x%x: %s", qp->qpn, rkey, why);
        return EINVAL;
    }
    w->rkey = rkey;
    w->raddr = info->addr;
    w->window_bytes = info->length;
    w->window_mr = info->mr->lkey;
    w->window_access = info->mw_access_flags;
    return 0;
}

/* What hardware checks when it executes the request. */
static const char *bind_refusal(const struct sn_qp *qp, const struct sn_wqe *w, const struct sn_mr_shm *mr,
                                const struct sn_mr_shm *window)
{
    if (window->owner != sn_self->proc + 1 || !window->window || window->pd != qp->pd)
        return "there is no such window";
    if (window->key)
        return "it is bound; invalidate it first";
    if (!mr || mr->owner != sn_self->proc + 1 || mr->window || mr->pd != qp->pd || !(mr->access & IBV_ACCESS_MW_BIND))
        return "its registration is gone, of another domain, or lacks IBV_ACCESS_MW_BIND";
    if (mr->kind != SN_MEM_HOST)
        return "windows on GPU memory are not supported";
    if (w->raddr < mr->iova || w->window_bytes > mr->length || w->raddr - mr->iova > mr->length - w->window_bytes)
        return "it leaves the bounds of its registration";
    if ((w->window_access & NEEDS_WRITE) && !(mr->access & IBV_ACCESS_LOCAL_WRITE))
        return "its registration lacks the right to write";
    return NULL;
}

static int bind(struct sn_qp *qp, struct sn_wqe *w)
{
    const struct sn_mr_shm *mr = sn_mr_find(sn_self->world, w->window_mr);
    struct sn_mr_shm *window = &sn_self->world->mrs[w->rkey >> 16];
    const char *why = bind_refusal(qp, w, mr, window);

    if (why) {
        sn_log("queue pair %u: bind of a memory window, key 0x%x: %s", qp->qpn, w->rkey, why);
        w->status = IBV_WC_MW_BIND_ERR;
        return 0;
    }
    window->addr = mr->addr + (w->raddr - mr->iova);
    window->iova = w->window_access & IBV_ACCESS_ZERO_BASED ? 0 : w->raddr;
    window->length = w->window_bytes;
    window->access = w->window_access & WINDOW_ACCESS;
    window->kind = mr->kind;
    window->window_qpn = qp->qpn;
    window->window_of = w->window_mr >> 16;
    __atomic_store_n(&window->key, w->rkey, __ATOMIC_RELEASE); /* valid from here on */
    w->status = IBV_WC_SUCCESS;
    return 0;
}

struct sn_mr_shm *sn_window_find(const struct sn_qp_shm *target, uint32_t key)
{
    struct sn_mr_shm *window = sn_mr_find(sn_self->world, key);

    return window && window->owner == target->owner && window->window && window->window_qpn == target->qpn ? window
                                                                                                           : NULL;
}

/* Has every initiator left that was there when the key was withdrawn? */
static bool users_gone(const struct sn_qp *qp)
{
    for (uint32_t i = 0; i < SN_MAX_INITIATORS; i++)
        if ((uint32_t)qp->window_users[i] &&
            __atomic_load_n(&qp->shm->initiators[i], __ATOMIC_SEQ_CST) == qp->window_users[i])
            return false;
    return true;
}

static int invalidate(struct sn_qp *qp, struct sn_wqe *w)
{
    struct sn_mr_shm *window;

    if (!qp->window_waits) {
        window = sn_window_find(qp->shm, w->rkey);
        if (!window) {
            sn_log("queue pair %u: invalidation of key 0x%x: it is no window that is bound here", qp->qpn, w->rkey);
            w->status = IBV_WC_LOC_QP_OP_ERR;
            return 0;
        }
        /* [in-use] as in mr.c: withdraw first, look for initiators second */
        __atomic_store_n(&window->key, 0, __ATOMIC_SEQ_CST);
        for (uint32_t i = 0; i < SN_MAX_INITIATORS; i++)
            qp->window_users[i] = __atomic_load_n(&qp->shm->initiators[i], __ATOMIC_SEQ_CST);
    }
    qp->window_waits = !users_gone(qp);
    return qp->window_waits ? SN_EXEC_CROWDED : 0;
}

int sn_window_execute(struct sn_qp *qp, struct sn_wqe *w)
{
    return w->opcode == IBV_WR_BIND_MW ? bind(qp, w) : invalidate(qp, w);
}
