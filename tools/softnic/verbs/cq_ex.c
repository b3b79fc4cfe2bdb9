/* SPDX-License-Identifier: Apache-2.0 */
/* The iterator interface of extended completion queues: start_poll ... next_poll ... end_poll, with the mutex held in
 * between. */
#include <errno.h>
#include <time.h>

#include "tools/softnic/verbs/cq.h"
#include "tools/softnic/world/queues.h"

static int cq_next(struct ibv_cq_ex *ex)
{
    struct sn_cq *cq = sn_cq_of_ex(ex);

    if (!sn_cq_take_locked(cq, &cq->current))
        return ENOENT;
    ex->status = cq->current.status;
    ex->wr_id = cq->current.wr_id;
    return 0;
}

static int cq_start(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr)
{
    struct sn_cq *cq = sn_cq_of_ex(ex);
    int r;

    if (attr->comp_mask)
        return EINVAL;
    if (__atomic_load_n(&cq->shm->tail, __ATOMIC_ACQUIRE) == __atomic_load_n(&cq->shm->head, __ATOMIC_RELAXED))
        sn_engine_help(&cq->ctx->engine);
    pthread_mutex_lock(&cq->mutex);
    r = cq_next(ex);
    if (r && __atomic_load_n(&cq->shm->overrun, __ATOMIC_RELAXED))
        r = EIO; /* as sn_cq_poll */
    if (r)
        pthread_mutex_unlock(&cq->mutex);
    return r;
}

static void cq_end(struct ibv_cq_ex *ex)
{
    pthread_mutex_unlock(&sn_cq_of_ex(ex)->mutex);
}

static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *ex)
{
    return sn_cq_of_ex(ex)->current.opcode;
}

static uint32_t read_vendor_err(struct ibv_cq_ex *ex)
{
    return sn_cq_of_ex(ex)->current.vendor_err;
}

static uint32_t read_byte_len(struct ibv_cq_ex *ex)
{
    return sn_cq_of_ex(ex)->current.byte_len;
}

static __be32 read_imm_data(struct ibv_cq_ex *ex)
{
    return sn_cq_of_ex(ex)->current.imm;
}

static uint32_t read_qp_num(struct ibv_cq_ex *ex)
{
    return sn_cq_of_ex(ex)->current.qp_num;
}

static uint32_t read_src_qp(struct ibv_cq_ex *ex)
{
    return sn_cq_of_ex(ex)->current.src_qp;
}

static unsigned int read_wc_flags(struct ibv_cq_ex *ex)
{
    return sn_cq_of_ex(ex)->current.wc_flags;
}

static uint32_t read_slid(struct ibv_cq_ex *ex)
{
    return sn_cqe_slid(&sn_cq_of_ex(ex)->current);
}

static uint8_t read_sl(struct ibv_cq_ex *ex)
{
    return (uint8_t)sn_cq_of_ex(ex)->current.sl;
}

static uint8_t read_dlid_path_bits(struct ibv_cq_ex *ex)
{
    return 0; /* RoCE has none */
}

static uint64_t read_time(struct ibv_cq_ex *ex)
{
    return sn_cq_of_ex(ex)->current.time_ns;
}

/* Time since the epoch of a time stamp, unless the clock was set since. */
static uint64_t read_wallclock(struct ibv_cq_ex *ex)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec -
           (sn_now_ns() - sn_cq_of_ex(ex)->current.time_ns);
}

void sn_cq_ex_fill(struct sn_cq *cq)
{
    struct ibv_cq_ex *ex = &cq->ibv.ex;

    ex->start_poll = cq_start;
    ex->next_poll = cq_next;
    ex->end_poll = cq_end;
    ex->read_opcode = read_opcode;
    ex->read_vendor_err = read_vendor_err;
    ex->read_byte_len = read_byte_len;
    ex->read_imm_data = read_imm_data;
    ex->read_qp_num = read_qp_num;
    ex->read_src_qp = read_src_qp;
    ex->read_wc_flags = read_wc_flags;
    ex->read_slid = read_slid;
    ex->read_sl = read_sl;
    ex->read_dlid_path_bits = read_dlid_path_bits;
    ex->read_completion_ts = read_time;
    ex->read_completion_wallclock_ns = read_wallclock;
}
