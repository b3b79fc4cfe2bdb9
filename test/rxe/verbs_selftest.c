/* SPDX-License-Identifier: Apache-2.0 */
/* verbs-selftest DEVICE DEVICE: checks what the transport relies on, on a verbs stack that is not ours, with plain
 * verbs and none of our code. If it passes, a failure of another test is ours and not the stack's. Two queue pairs in
 * one process, fresh ones for each check. Exit 0 when every check holds. */
#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <infiniband/verbs.h>

enum { BUFFER_BYTES = 64 * 1024, QUEUE_DEPTH = 64, INLINE_BYTES = 32, PORT = 1, WAIT_MS = 60000, FENCE_ROUNDS = 100 };
enum {
    ALL_RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC
};

struct end {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_mr *mr;
    struct ibv_qp *qp;
    uint8_t *buffer;
    union ibv_gid gid;
    int gid_index;
};

struct pair {
    struct end near, far;
};

#define FAIL(...) (printf("    " __VA_ARGS__), printf("\n"), false)
#define EXPECT(condition, ...)                                                                                         \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return FAIL(__VA_ARGS__);                                                                                  \
    } while (0)

/* RoCE over IPv4 has an address of the form ::ffff:a.b.c.d. The link-local address of the device reaches nothing over a
 * routed pair. */
static bool gid_choose(struct end *end)
{
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    struct ibv_port_attr port;

    EXPECT(ibv_query_port(end->context, PORT, &port) == 0, "ibv_query_port: %s", strerror(errno));
    EXPECT(port.state == IBV_PORT_ACTIVE, "port state is %d, not active", port.state);
    for (end->gid_index = 0; end->gid_index < port.gid_tbl_len; end->gid_index++)
        if (ibv_query_gid(end->context, PORT, end->gid_index, &end->gid) == 0 && !memcmp(end->gid.raw, mapped, 12))
            return true;
    return FAIL("none of %d GIDs is an IPv4 address", port.gid_tbl_len);
}

static bool device_open(struct end *end, const char *name)
{
    struct ibv_device **list = ibv_get_device_list(NULL);

    for (struct ibv_device **at = list; at && *at && !end->context; at++)
        if (strcmp(ibv_get_device_name(*at), name) == 0)
            end->context = ibv_open_device(*at);
    ibv_free_device_list(list);
    EXPECT(end->context, "no device %s, or it does not open: %s", name, strerror(errno));
    EXPECT((end->pd = ibv_alloc_pd(end->context)), "ibv_alloc_pd: %s", strerror(errno));
    return gid_choose(end);
}

static bool end_init(struct end *end, int rights, uint32_t receives)
{
    struct ibv_qp_init_attr init = {.qp_type = IBV_QPT_RC,
                                    .cap = {.max_send_wr = QUEUE_DEPTH,
                                            .max_recv_wr = receives,
                                            .max_send_sge = 1,
                                            .max_recv_sge = 1,
                                            .max_inline_data = INLINE_BYTES}};

    end->buffer = aligned_alloc(4096, BUFFER_BYTES);
    memset(end->buffer, 0, BUFFER_BYTES);
    EXPECT((end->mr = ibv_reg_mr(end->pd, end->buffer, BUFFER_BYTES, rights)), "ibv_reg_mr: %s", strerror(errno));
    EXPECT((end->cq = ibv_create_cq(end->context, 2 * QUEUE_DEPTH, NULL, NULL, 0)), "ibv_create_cq: %s",
           strerror(errno));
    init.send_cq = init.recv_cq = end->cq;
    EXPECT((end->qp = ibv_create_qp(end->pd, &init)), "ibv_create_qp: %s", strerror(errno));
    return true;
}

static void end_fini(struct end *end)
{
    if (end->qp)
        ibv_destroy_qp(end->qp);
    if (end->cq)
        ibv_destroy_cq(end->cq);
    if (end->mr)
        ibv_dereg_mr(end->mr);
    free(end->buffer);
    end->qp = NULL;
    end->cq = NULL;
    end->mr = NULL;
    end->buffer = NULL;
}

static bool end_connect(struct end *end, const struct end *to)
{
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = PORT, .qp_access_flags = ALL_RIGHTS};
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_4096,
                              .dest_qp_num = to->qp->qp_num,
                              .max_dest_rd_atomic = 8,
                              .min_rnr_timer = 12,
                              .ah_attr = {.is_global = 1,
                                          .port_num = PORT,
                                          .grh = {.dgid = to->gid, .sgid_index = end->gid_index, .hop_limit = 64}}};
    /* 1 s, eight times: an answer may take that long while the other CPU gets no core; no packet is ever lost here. */
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 8};
    int r;

    r = ibv_modify_qp(end->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    EXPECT(r == 0, "to INIT: %s", strerror(r));
    r = ibv_modify_qp(end->qp, &rtr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    EXPECT(r == 0, "to RTR: %s", strerror(r));
    r = ibv_modify_qp(end->qp, &rts,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                          IBV_QP_MAX_QP_RD_ATOMIC);
    EXPECT(r == 0, "to RTS: %s", strerror(r));
    return true;
}

/* A work request from near's buffer at `from` to far's at `to`; the caller then changes single fields. */
struct request {
    struct ibv_send_wr wr;
    struct ibv_sge sge;
};

static struct request request_make(struct pair *p, enum ibv_wr_opcode opcode, uint32_t from, uint32_t to,
                                   uint32_t bytes)
{
    struct request request = {
        .wr = {.wr_id = opcode, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED, .num_sge = bytes > 0},
        .sge = {.addr = (uintptr_t)p->near.buffer + from, .length = bytes, .lkey = p->near.mr->lkey}};
    bool atomic = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_ATOMIC_CMP_AND_SWP;

    if (atomic) {
        request.wr.wr.atomic.remote_addr = (uintptr_t)p->far.buffer + to;
        request.wr.wr.atomic.rkey = p->far.mr->rkey;
    } else {
        request.wr.wr.rdma.remote_addr = (uintptr_t)p->far.buffer + to;
        request.wr.wr.rdma.rkey = p->far.mr->rkey;
    }
    return request;
}

static bool post(struct pair *p, struct request *request)
{
    struct ibv_send_wr *bad;
    int r;

    request->wr.sg_list = &request->sge;
    r = ibv_post_send(p->near.qp, &request->wr, &bad);
    EXPECT(r == 0, "ibv_post_send (opcode %d): %s", request->wr.opcode, strerror(r));
    return true;
}

static bool post_receive(struct end *end, uint64_t id, uint32_t bytes)
{
    struct ibv_sge sge = {.addr = (uintptr_t)end->buffer, .length = bytes, .lkey = end->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = bytes > 0}, *bad;
    int r = ibv_post_recv(end->qp, &wr, &bad);

    EXPECT(r == 0, "ibv_post_recv: %s", strerror(r));
    return true;
}

static int64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static bool completion_take(struct end *end, struct ibv_wc *wc)
{
    int64_t give_up = now_ms() + WAIT_MS;
    int n;

    while ((n = ibv_poll_cq(end->cq, 1, wc)) == 0) {
        EXPECT(now_ms() < give_up, "no completion in %d ms", WAIT_MS);
        sched_yield(); /* soft-RoCE works on these same two CPUs */
    }
    EXPECT(n == 1, "ibv_poll_cq: %d", n);
    return true;
}

static bool completion_expect(struct end *end, uint64_t id, enum ibv_wc_status status)
{
    struct ibv_wc wc;

    if (!completion_take(end, &wc))
        return FAIL("waited for the completion of request %" PRIu64, id);
    EXPECT(wc.wr_id == id, "completion of request %" PRIu64 ", expected %" PRIu64, wc.wr_id, id);
    EXPECT(wc.status == status, "request %" PRIu64 ": %s, expected %s", id, ibv_wc_status_str(wc.status),
           ibv_wc_status_str(status));
    return true;
}

static bool run_one(struct pair *p, enum ibv_wr_opcode opcode, uint32_t from, uint32_t to, uint32_t bytes)
{
    struct request request = request_make(p, opcode, from, to, bytes);

    return post(p, &request) && completion_expect(&p->near, opcode, IBV_WC_SUCCESS);
}

static void fill(uint8_t *at, uint32_t bytes, uint32_t seed)
{
    for (uint32_t i = 0; i < bytes; i++)
        at[i] = (uint8_t)((i + seed) * 2654435761u >> 24);
}

static uint64_t word_at(const uint8_t *at)
{
    uint64_t word;

    memcpy(&word, at, sizeof(word));
    return word;
}

static bool write_puts_every_byte_and_no_more(struct pair *p)
{
    enum { BYTES = 20001 }; /* several packets, the last one odd */

    fill(p->near.buffer, BYTES, 1);
    p->far.buffer[7 + BYTES] = 0x5a;
    if (!run_one(p, IBV_WR_RDMA_WRITE, 0, 7, BYTES))
        return false;
    EXPECT(!memcmp(p->near.buffer, p->far.buffer + 7, BYTES), "the data differ");
    EXPECT(p->far.buffer[6] == 0 && p->far.buffer[7 + BYTES] == 0x5a, "bytes around the write changed");
    return true;
}

static bool read_gets_every_byte(struct pair *p)
{
    enum { BYTES = 20001 };

    fill(p->far.buffer + 3, BYTES, 2);
    if (!run_one(p, IBV_WR_RDMA_READ, 64, 3, BYTES))
        return false;
    EXPECT(!memcmp(p->near.buffer + 64, p->far.buffer + 3, BYTES), "the data differ");
    return true;
}

static bool send_fills_a_receive(struct pair *p)
{
    struct request request = request_make(p, IBV_WR_SEND, 0, 0, 100);
    struct ibv_wc wc;

    fill(p->near.buffer, 100, 3);
    if (!post_receive(&p->far, 9, 4096) || !post(p, &request) || !completion_take(&p->far, &wc))
        return false;
    EXPECT(wc.status == IBV_WC_SUCCESS && wc.wr_id == 9 && wc.opcode == IBV_WC_RECV && wc.byte_len == 100,
           "receive: %s, id %" PRIu64 ", opcode %d, %u bytes", ibv_wc_status_str(wc.status), wc.wr_id, wc.opcode,
           wc.byte_len);
    EXPECT(!memcmp(p->near.buffer, p->far.buffer, 100), "the data differ");
    return completion_expect(&p->near, IBV_WR_SEND, IBV_WC_SUCCESS);
}

static bool write_imm_once(struct pair *p, uint32_t bytes, uint32_t imm, bool receive_late)
{
    struct request request = request_make(p, IBV_WR_RDMA_WRITE_WITH_IMM, 0, 512, bytes);
    struct ibv_wc wc;

    fill(p->near.buffer, bytes, imm);
    request.wr.imm_data = htobe32(imm);
    if (!receive_late && !post_receive(&p->far, imm, 0))
        return false;
    if (!post(p, &request))
        return false;
    if (receive_late) {
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        EXPECT(ibv_poll_cq(p->near.cq, 1, &wc) == 0, "completed though no receive was posted");
        if (!post_receive(&p->far, imm, 0))
            return false;
    }
    if (!completion_take(&p->far, &wc))
        return false;
    EXPECT(wc.status == IBV_WC_SUCCESS && wc.wr_id == imm && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM &&
               (wc.wc_flags & IBV_WC_WITH_IMM) && be32toh(wc.imm_data) == imm && wc.byte_len == bytes,
           "receive: %s, id %" PRIu64 ", opcode %d, immediate %#x, %u bytes; expected %#x, %u",
           ibv_wc_status_str(wc.status), wc.wr_id, wc.opcode, be32toh(wc.imm_data), wc.byte_len, imm, bytes);
    EXPECT(!memcmp(p->near.buffer, p->far.buffer + 512, bytes), "the data were not there before the immediate");
    return completion_expect(&p->near, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WC_SUCCESS);
}

static bool write_imm_tells_length_and_number(struct pair *p)
{
    return write_imm_once(p, 9000, 0xabcd1234, false) && write_imm_once(p, 1, 1, false);
}

static bool write_imm_of_no_bytes_still_notifies(struct pair *p)
{
    return write_imm_once(p, 0, 0xffffffff, false);
}

static bool write_imm_waits_for_a_late_receive(struct pair *p)
{
    return write_imm_once(p, 64, 77, true);
}

static bool atomics_return_the_old_value(struct pair *p)
{
    struct request add = request_make(p, IBV_WR_ATOMIC_FETCH_AND_ADD, 8, 64, 8);
    struct request swap = request_make(p, IBV_WR_ATOMIC_CMP_AND_SWP, 16, 64, 8);
    struct request miss = request_make(p, IBV_WR_ATOMIC_CMP_AND_SWP, 24, 64, 8);
    uint64_t start = 0x1122334455667788;

    memcpy(p->far.buffer + 64, &start, 8);
    add.wr.wr.atomic.compare_add = 0x100000001;
    swap.wr.wr.atomic.compare_add = start + 0x100000001;
    swap.wr.wr.atomic.swap = 42;
    miss.wr.wr.atomic.compare_add = 43;
    miss.wr.wr.atomic.swap = 44;
    if (!post(p, &add) || !completion_expect(&p->near, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WC_SUCCESS) ||
        !post(p, &swap) || !completion_expect(&p->near, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WC_SUCCESS) || !post(p, &miss) ||
        !completion_expect(&p->near, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WC_SUCCESS))
        return false;
    EXPECT(word_at(p->near.buffer + 8) == start, "fetch-add returned %#" PRIx64, word_at(p->near.buffer + 8));
    EXPECT(word_at(p->near.buffer + 16) == start + 0x100000001, "swap returned %#" PRIx64,
           word_at(p->near.buffer + 16));
    EXPECT(word_at(p->near.buffer + 24) == 42, "a swap that must miss returned %" PRIu64, word_at(p->near.buffer + 24));
    EXPECT(word_at(p->far.buffer + 64) == 42, "the word is %" PRIu64 ", expected 42", word_at(p->far.buffer + 64));
    return true;
}

static bool inline_data_is_taken_at_post(struct pair *p)
{
    for (uint64_t i = 1; i <= 32; i++) {
        struct request request = request_make(p, IBV_WR_RDMA_WRITE, 0, 8 * (uint32_t)i, 8);

        memcpy(p->near.buffer, &i, 8);
        request.wr.send_flags |= IBV_SEND_INLINE;
        request.sge.lkey = 0; /* not used for inline data */
        if (!post(p, &request))
            return false;
        memset(p->near.buffer, 0xee, 8);
    }
    for (int i = 0; i < 32; i++)
        if (!completion_expect(&p->near, IBV_WR_RDMA_WRITE, IBV_WC_SUCCESS))
            return false;
    for (uint64_t i = 1; i <= 32; i++)
        EXPECT(word_at(p->far.buffer + 8 * i) == i, "write %" PRIu64 " carried %#" PRIx64, i,
               word_at(p->far.buffer + 8 * i));
    return true;
}

/* Selective signaling: the completion of a signaled request also frees the slots of those before it. */
static bool one_completion_retires_the_unsignaled_before_it(struct pair *p)
{
    for (uint64_t i = 1; i <= 4 * QUEUE_DEPTH; i++) {
        struct request request = request_make(p, IBV_WR_RDMA_WRITE, 0, 8 * (uint32_t)(i % 512), 8);

        request.wr.wr_id = i;
        request.wr.send_flags = IBV_SEND_INLINE | (i % 16 ? 0 : IBV_SEND_SIGNALED);
        memcpy(p->near.buffer, &i, 8);
        if (!post(p, &request) || (i % 16 == 0 && !completion_expect(&p->near, i, IBV_WC_SUCCESS)))
            return false;
    }
    for (uint64_t i = 1; i <= 4 * QUEUE_DEPTH; i++)
        EXPECT(word_at(p->far.buffer + 8 * i) == i, "write %" PRIu64 " is not there", i);
    return true;
}

static bool a_fenced_write_sends_what_the_read_before_it_brought(struct pair *p)
{
    for (uint64_t i = 1; i <= FENCE_ROUNDS; i++) {
        struct request read = request_make(p, IBV_WR_RDMA_READ, 0, 0, 8);
        struct request write = request_make(p, IBV_WR_RDMA_WRITE, 0, 64, 8);

        memcpy(p->far.buffer, &i, 8);
        read.wr.send_flags = 0;
        write.wr.send_flags |= IBV_SEND_FENCE;
        if (!post(p, &read) || !post(p, &write) || !completion_expect(&p->near, IBV_WR_RDMA_WRITE, IBV_WC_SUCCESS))
            return false;
        EXPECT(word_at(p->far.buffer + 64) == i, "round %" PRIu64 ": wrote %" PRIu64, i, word_at(p->far.buffer + 64));
    }
    return true;
}

/* Expect the refused request, then the unsignaled one after it, which has a completion only because it was flushed. */
static bool refused(struct pair *p, struct request *request)
{
    struct request behind = request_make(p, IBV_WR_RDMA_WRITE, 0, 0, 8);
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;

    behind.wr.wr_id = 1000;
    behind.wr.send_flags = 0;
    if (!post(p, request) || !completion_expect(&p->near, request->wr.wr_id, IBV_WC_REM_ACCESS_ERR) ||
        !post(p, &behind) || !completion_expect(&p->near, 1000, IBV_WC_WR_FLUSH_ERR))
        return false;
    EXPECT(ibv_query_qp(p->near.qp, &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_ERR,
           "queue pair is in state %d, not in error", attr.qp_state);
    for (int i = 0; i < BUFFER_BYTES; i++)
        EXPECT(p->far.buffer[i] == 0, "byte %d of the far buffer changed", i);
    return true;
}

static bool a_wrong_rkey_is_refused_and_flushes_what_follows(struct pair *p)
{
    struct request request = request_make(p, IBV_WR_RDMA_WRITE, 0, 0, 8);

    memset(p->near.buffer, 1, 8);
    request.wr.wr.rdma.rkey ^= 0x5500;
    return refused(p, &request);
}

static bool a_write_past_the_end_is_refused(struct pair *p)
{
    struct request request = request_make(p, IBV_WR_RDMA_WRITE, 0, BUFFER_BYTES - 7, 8);

    memset(p->near.buffer, 1, 8);
    return refused(p, &request);
}

static bool a_write_without_the_right_is_refused(struct pair *p)
{
    struct request request = request_make(p, IBV_WR_RDMA_WRITE, 0, 0, 8);

    memset(p->near.buffer, 1, 8);
    return refused(p, &request);
}

/* A flush of local memory: a read through the NIC, on a queue that has no receives and is its own peer. */
static bool a_queue_may_be_connected_to_itself(struct pair *p)
{
    struct pair self = {.near = {.context = p->near.context, .pd = p->near.pd, .gid = p->near.gid}};
    bool ok;

    self.near.gid_index = p->near.gid_index;
    ok = end_init(&self.near, ALL_RIGHTS, 0) && end_connect(&self.near, &self.near);
    if (ok) {
        self.far = self.near;
        fill(self.near.buffer, 4096, 5);
        ok =
            run_one(&self, IBV_WR_RDMA_READ, 8192, 0, 4096) && !memcmp(self.near.buffer, self.near.buffer + 8192, 4096);
    }
    end_fini(&self.near);
    return ok;
}

#define CHECK(name, rights)                                                                                            \
    {                                                                                                                  \
#        name, name, rights                                                                                            \
    }
static const struct {
    const char *name;
    bool (*holds)(struct pair *p);
    int far_rights;
} checks[] = {
    CHECK(write_puts_every_byte_and_no_more, ALL_RIGHTS),
    CHECK(read_gets_every_byte, ALL_RIGHTS),
    CHECK(send_fills_a_receive, ALL_RIGHTS),
    CHECK(write_imm_tells_length_and_number, ALL_RIGHTS),
    CHECK(write_imm_of_no_bytes_still_notifies, ALL_RIGHTS),
    CHECK(write_imm_waits_for_a_late_receive, ALL_RIGHTS),
    CHECK(atomics_return_the_old_value, ALL_RIGHTS),
    CHECK(inline_data_is_taken_at_post, ALL_RIGHTS),
    CHECK(one_completion_retires_the_unsignaled_before_it, ALL_RIGHTS),
    CHECK(a_fenced_write_sends_what_the_read_before_it_brought, ALL_RIGHTS),
    CHECK(a_queue_may_be_connected_to_itself, ALL_RIGHTS),
    CHECK(a_wrong_rkey_is_refused_and_flushes_what_follows, ALL_RIGHTS),
    CHECK(a_write_past_the_end_is_refused, ALL_RIGHTS),
    CHECK(a_write_without_the_right_is_refused, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ),
};

int main(int argc, char **argv)
{
    struct pair p = {0};
    int failed = 0;

    if (argc != 3) {
        fprintf(stderr, "usage: %s DEVICE DEVICE\n", argv[0]);
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!device_open(&p.near, argv[1]) || !device_open(&p.far, argv[2]))
        return 1;
    for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]); i++) {
        bool ok = end_init(&p.near, ALL_RIGHTS, QUEUE_DEPTH) && end_init(&p.far, checks[i].far_rights, QUEUE_DEPTH) &&
                  end_connect(&p.near, &p.far) && end_connect(&p.far, &p.near) && checks[i].holds(&p);

        printf("%s %s\n", ok ? "ok  " : "FAIL", checks[i].name);
        failed += !ok;
        end_fini(&p.near);
        end_fini(&p.far);
    }
    ibv_dealloc_pd(p.near.pd);
    ibv_dealloc_pd(p.far.pd);
    ibv_close_device(p.near.context);
    ibv_close_device(p.far.context);
    return failed ? 1 : 0;
}
