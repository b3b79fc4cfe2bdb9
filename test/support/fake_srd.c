/* SPDX-License-Identifier: Apache-2.0 */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "test/support/fake_srd.h"
#include "test/support/fake_verbs.h"
#include "transport/nic/verbs/efa.h"
#include "transport/nic/verbs/srd_pool.h"

enum { RANKS = 64, IDS = 4 };

struct fake_srd fake_srd;

struct fake_handle {
    struct ibv_ah ah;
    uint32_t number;
};

static struct {
    struct prs_verbs_device verbs;
    struct prs_rail rail;
    char scratch[64];
} device[RANKS];
static struct ibv_cq *made_cq; /* the last one made, which its queue pair takes over */
static uint32_t next_number, session_count;
static struct fake_srd_sent now;

/* ---- the device ---- */

static struct fake_srd_qp *of_cq(struct ibv_cq *cq)
{
    return (struct fake_srd_qp *)((char *)cq - offsetof(struct fake_srd_qp, cq));
}

static struct fake_srd_qp *of_qp(struct ibv_qp *qp)
{
    return (struct fake_srd_qp *)qp; /* ex.qp_base is its first member */
}

static struct ibv_cq *make_cq(struct ibv_context *on, int cqe, void *user, struct ibv_comp_channel *channel, int vector)
{
    struct fake_srd_qp *qp = calloc(1, sizeof(*qp));

    cr_assert(qp);
    qp->cq.context = on;
    qp->cq.cq_context = user;
    made_cq = &qp->cq;
    return made_cq;
}

static int drop_cq(struct ibv_cq *cq)
{
    free(of_cq(cq));
    return 0;
}

static int drop_qp(struct ibv_qp *qp)
{
    of_qp(qp)->alive = false;
    fake_srd.alive--;
    return 0;
}

static int change_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    of_qp(qp)->error = attr->qp_state == IBV_QPS_ERR;
    return 0;
}

static struct ibv_qp_ex *to_ex(struct ibv_qp *qp)
{
    return &of_qp(qp)->ex;
}

static int post_receives(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    for (; wr; wr = wr->next, of_qp(qp)->posted_receives++)
        of_qp(qp)->pieces += (uint32_t)wr->num_sge;
    return 0;
}

static int bring(struct ibv_cq *cq, int most, struct ibv_wc *wc)
{
    struct fake_srd_qp *qp = of_cq(cq);
    int count = 0;

    while (count < most && qp->queued_taken < qp->queued_count)
        wc[count++] = qp->queued[qp->queued_taken++ % FAKE_SRD_QUEUED];
    return count;
}

static struct ibv_ah *make_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
    struct fake_handle *handle = calloc(1, sizeof(*handle));

    cr_assert(handle);
    handle->number = attr->grh.dgid.raw[15] + 100u;
    fake_srd.handles++;
    return &handle->ah;
}

static int drop_ah(struct ibv_ah *ah)
{
    fake_srd.handles--;
    free(ah);
    return 0;
}

int prs_efa_handle_number(struct ibv_ah *ah, uint32_t *number)
{
    *number = ((struct fake_handle *)ah)->number;
    return 0;
}

void prs_efa_claim(struct prs_verbs_device *claimed)
{
    (void)claimed;
}

/* ---- posting ---- */

static void start(struct ibv_qp_ex *ex)
{
    session_count = 0;
    fake_srd.aborted = false;
}

static int complete(struct ibv_qp_ex *ex)
{
    fake_srd.sent_count += session_count;
    of_qp(&ex->qp_base)->in_flight += session_count;
    return 0;
}

static void drop(struct ibv_qp_ex *ex)
{
    fake_srd.aborted = true;
}

static void operate(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr)
{
    now = (struct fake_srd_sent){.qp = of_qp(&ex->qp_base), .wr_id = ex->wr_id};
    cr_assert_eq(ex->wr_flags, IBV_SEND_SIGNALED, "EFA takes no other requests");
}

static void operate_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr, __be32 imm)
{
    operate(ex, rkey, remote_addr);
}

static void set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t length)
{
    now.sge = (struct ibv_sge){addr, length, lkey};
}

static void set_addr(struct ibv_qp_ex *ex, struct ibv_ah *to, uint32_t number, uint32_t key)
{
    now.number = number;
    now.key = key;
    fake_srd.sent[(fake_srd.sent_count + session_count++) % FAKE_SRD_SENT] = now;
}

struct ibv_qp *prs_efa_create_srd(struct ibv_context *on, struct ibv_qp_init_attr_ex *attr)
{
    struct fake_srd_qp *qp = of_cq(attr->send_cq);

    cr_assert_eq(attr->send_cq, made_cq);
    qp->ex = (struct ibv_qp_ex){.qp_base = {.context = on, .qp_num = ++next_number},
                                .wr_start = start,
                                .wr_complete = complete,
                                .wr_abort = drop,
                                .wr_rdma_write = operate,
                                .wr_rdma_write_imm = operate_imm,
                                .wr_rdma_read = operate,
                                .wr_set_sge = set_sge,
                                .wr_set_ud_addr = set_addr};
    qp->alive = true;
    fake_srd.alive++;
    return &qp->ex.qp_base;
}

/* ---- for tests ---- */

void fake_srd_install(void)
{
    fake_verbs_install();
    fake_srd = (struct fake_srd){.max_send_wr = 4096, .max_receive_wr = 4096};
    fake_verbs.extended.context.ops.post_recv = post_receives;
    fake_verbs.extended.context.ops.poll_cq = bring;
    prs_verbs.create_cq = make_cq;
    prs_verbs.destroy_cq = drop_cq;
    prs_verbs.modify_qp = change_qp;
    prs_verbs.destroy_qp = drop_qp;
    prs_verbs.qp_to_qp_ex = to_ex;
    prs_verbs.create_ah = make_ah;
    prs_verbs.destroy_ah = drop_ah;
}

static void gid_of(uint32_t rank, uint8_t gid[16])
{
    memset(gid, 0, 16);
    gid[0] = 0xfe;
    gid[1] = 0x80;
    gid[15] = (uint8_t)(rank + 1);
}

const struct prs_rail *fake_srd_rail(uint32_t rank)
{
    struct prs_domain *domain = &device[rank].verbs.base;

    device[rank].verbs.context = &fake_verbs.extended.context;
    domain->scratch = (struct prs_own_memory){
        .addr = device[rank].scratch, .bytes = sizeof(device[rank].scratch), .at = {{.registered.local_key = 77}}};
    domain->max_send_wr = fake_srd.max_send_wr;
    domain->max_receive_wr = fake_srd.max_receive_wr;
    device[rank].rail.domain = domain;
    device[rank].rail.port = 1;
    return &device[rank].rail;
}

struct prs_link *fake_srd_open(uint32_t rank, uint32_t other, uint32_t queues, const struct prs_nic_address *remote)
{
    static const struct prs_config config;
    static const uint32_t ids[IDS] = {3, 2, 1, 0};
    struct prs_verbs_own_port port = {.port = {.mtu = 5, .reads = 1}};
    struct prs_rail_address own, remote_port;
    struct prs_link_options options = {.rail = fake_srd_rail(rank),
                                       .own = &own,
                                       .config = &config,
                                       .queues = queues,
                                       .ids = ids,
                                       .remote_port = &remote_port.told,
                                       .remote = remote,
                                       .depth = FAKE_SRD_DEPTH,
                                       .loopback_depth = FAKE_SRD_DEPTH};
    struct prs_link *link;

    gid_of(rank, port.port.gid);
    prs_verbs_tell_port(&port, &own);
    gid_of(other, port.port.gid);
    prs_verbs_tell_port(&port, &remote_port);
    cr_assert_eq(prs_nic_srd.open(&options, &link), 0, "a link from %u to %u", rank, other);
    return link;
}

struct fake_srd_pair fake_srd_connect(uint32_t acceptor, uint32_t connector)
{
    struct prs_nic_address address[IDS] = {{0}}, answer;
    struct fake_srd_pair pair;
    int error;

    pair.accepting = fake_srd_open(acceptor, connector, 1, NULL);
    prs_nic_srd.address(pair.accepting->queue[0], &address[3]);
    pair.connecting = fake_srd_open(connector, acceptor, 1, address);
    cr_assert_eq(prs_nic_srd.connect(pair.connecting->queue[0], &address[3], NULL, &error), 0);
    prs_nic_srd.address(pair.connecting->queue[0], &answer);
    cr_assert_eq(prs_nic_srd.connect(pair.accepting->queue[0], &answer, NULL, &error), 0);
    return pair;
}

void fake_srd_close(struct prs_link *link, int stream_fd)
{
    link->stream_fd = stream_fd;
    prs_nic_srd.close(link);
}

struct prs_verbs_queue fake_srd_address(const struct prs_link *link)
{
    struct prs_nic_address told;
    struct prs_verbs_queue queue;

    prs_nic_srd.address(link->queue[0], &told);
    cr_assert_eq(prs_verbs_read_queue(&told, &queue), 0);
    return queue;
}

struct fake_srd_qp *fake_srd_qp_of(const struct prs_link *link)
{
    return of_qp(((struct prs_srd_end *)link->queue[0])->qp->qp);
}

int fake_srd_post(struct prs_link *link, uint32_t first, uint32_t count)
{
    static struct prs_wr ring[FAKE_SRD_DEPTH]; /* the same for all, since all slots are equal */

    for (uint32_t i = 0; i < FAKE_SRD_DEPTH; i++)
        ring[i] = (struct prs_wr){.len_bytes = 8, .opcode = PRS_WR_WRITE, .flags = PRS_WR_SIGNALED};
    return prs_nic_srd.post(link->queue[0], ring, FAKE_SRD_DEPTH - 1, first, count);
}

void fake_srd_complete(struct fake_srd_qp *qp, struct ibv_wc wc)
{
    cr_assert_lt(qp->queued_count - qp->queued_taken, (uint32_t)FAKE_SRD_QUEUED);
    qp->queued[qp->queued_count++ % FAKE_SRD_QUEUED] = wc;
}

void fake_srd_finish(const struct fake_srd_sent *sent, enum ibv_wc_status status)
{
    sent->qp->in_flight--;
    fake_srd_complete(
        sent->qp,
        (struct ibv_wc){.wr_id = sent->wr_id, .status = status, .vendor_err = 6, .opcode = IBV_WC_RDMA_WRITE});
}

void fake_srd_arrive(const struct prs_link *to, const struct prs_link *from, uint32_t imm, uint32_t bytes)
{
    fake_srd_complete(fake_srd_qp_of(to),
                      (struct ibv_wc){.wr_id = 1ull << 63,
                                      .opcode = IBV_WC_RECV_RDMA_WITH_IMM,
                                      .imm_data = htonl(imm),
                                      .byte_len = bytes,
                                      .src_qp = from->queue[0]->number,
                                      .slid = (uint16_t)(prs_verbs_own_port(&from->own).port.gid[15] + 100u)});
}
