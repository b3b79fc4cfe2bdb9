/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/test/support.h"

#include <criterion/criterion.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define WAIT_NS (WAIT_S * 1000000000ull)

static char world_path[64];
static pid_t world_maker;

static const struct end_options no_options;

const struct link_options link_default = {
    .rnr_retry = 7, .retry_cnt = 1, .timeout = 10, .min_rnr_timer = 1, .access = ALL_ACCESS, .rd_atomic = 16};

/* A forked child has no copy of the threads through which Criterion's assertions talk to its runner: there they would
 * hang. */
void require(bool ok, const char *format, ...)
{
    char text[256];
    va_list args;

    if (ok)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (getpid() == world_maker)
        cr_assert_fail("%s", text);
    fprintf(stderr, "child: %s\n", text);
    _exit(1);
}

uint64_t now_ns(void)
{
    return sn_now_ns();
}

void test_world_drop(void)
{
    if (world_path[0] && getpid() == world_maker)
        unlink(world_path);
    world_path[0] = 0;
}

struct sn_world *test_world(const struct sn_config *config)
{
    struct sn_config own;
    struct sn_world *world;

    sn_config_default(&own);
    own.nics = 2;
    snprintf(world_path, sizeof(world_path), "/dev/shm/softnic.test.%d", (int)getpid());
    world_maker = getpid();
    unlink(world_path);
    cr_assert_eq(sn_world_create(world_path, config ? config : &own, false, &world), 0, "cannot make %s", world_path);
    setenv(SN_WORLD_ENV, world_path, 1);
    if (!getenv("SOFTNIC_TEST_VERBOSE"))
        setenv("SOFTNIC_LOG", "none", 1); /* most tests provoke errors */
    atexit(test_world_drop);
    return world;
}

static struct ibv_context *open_nth(uint32_t n)
{
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    struct ibv_context *ctx;

    require(list && (int)n < count, "want device %u of %d", n, count);
    ctx = ibv_open_device(list[n]);
    ibv_free_device_list(list);
    require(ctx != NULL, "open_device: %s", strerror(errno));
    return ctx;
}

static void qp_make(struct end *e, const struct end_options *o, uint32_t wrs)
{
    struct ibv_qp_init_attr_ex attr = {.send_cq = e->cq,
                                       .recv_cq = e->cq,
                                       .srq = e->srq,
                                       .cap = {wrs, wrs, 4, 4, 128},
                                       .qp_type = IBV_QPT_RC,
                                       .comp_mask = IBV_QP_INIT_ATTR_PD,
                                       .pd = e->pd};

    if (o->extended) {
        attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        attr.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND |
                              IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
                              IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    }
    e->qp = ibv_create_qp_ex(e->ctx, &attr);
    require(e->qp != NULL, "create_qp_ex: %s", strerror(errno));
}

uint32_t end_begin(struct end *e, const struct end_options *o)
{
    uint32_t wrs;

    o = o ? o : &no_options;
    wrs = o->wrs ? o->wrs : END_WRS;
    memset(e, 0, sizeof(*e));
    e->bytes = o->bytes ? o->bytes : END_BYTES;
    e->ctx = o->ctx ? o->ctx : open_nth(o->dev);
    e->pd = ibv_alloc_pd(e->ctx);
    require(e->pd != NULL, "alloc_pd: %s", strerror(errno));
    e->cq = ibv_create_cq(e->ctx, (int)(o->cqe ? o->cqe : 4 * wrs), NULL, o->channel, 0);
    require(e->cq != NULL, "create_cq: %s", strerror(errno));
    return wrs;
}

void end_register(struct end *e, unsigned int access)
{
    e->buf = aligned_alloc(LARGEST_PAGE, (e->bytes + LARGEST_PAGE - 1) & ~(LARGEST_PAGE - 1ul));
    require(e->buf != NULL, "no memory");
    memset(e->buf, 0, e->bytes);
    e->mr = ibv_reg_mr(e->pd, e->buf, e->bytes, access);
    require(e->mr != NULL, "reg_mr: %s", strerror(errno));
}

void end_open(struct end *e, const struct end_options *o)
{
    uint32_t wrs = end_begin(e, o);

    o = o ? o : &no_options;
    if (o->with_srq) {
        struct ibv_srq_init_attr init = {.attr = {.max_wr = wrs, .max_sge = 2}};

        e->srq = ibv_create_srq(e->pd, &init);
        require(e->srq != NULL, "create_srq: %s", strerror(errno));
    }
    qp_make(e, o, wrs);
    end_register(e, ALL_ACCESS);
}

void end_leave(struct end *e)
{
    require(ibv_destroy_qp(e->qp) == 0, "destroy_qp");
    if (e->srq)
        require(ibv_destroy_srq(e->srq) == 0, "destroy_srq");
    require(ibv_dereg_mr(e->mr) == 0, "dereg_mr");
    require(ibv_destroy_cq(e->cq) == 0, "destroy_cq");
    require(ibv_dealloc_pd(e->pd) == 0, "dealloc_pd");
    free(e->buf);
}

void end_close(struct end *e)
{
    end_leave(e);
    require(ibv_close_device(e->ctx) == 0, "close_device");
}

struct address end_address(const struct end *e)
{
    struct address a = {.qpn = e->qp->qp_num, .rkey = e->mr->rkey, .addr = (uintptr_t)e->buf};

    require(ibv_query_gid(e->ctx, 1, 1, &a.gid) == 0, "query_gid");
    return a;
}

void end_connect(struct end *e, const struct address *to, const struct link_options *o)
{
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = o->access};
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_4096,
        .dest_qp_num = to->qpn,
        .max_dest_rd_atomic = o->rd_atomic,
        .min_rnr_timer = o->min_rnr_timer,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = to->gid, .sgid_index = 1, .hop_limit = 1}}};
    struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS,
                              .timeout = o->timeout,
                              .retry_cnt = o->retry_cnt,
                              .rnr_retry = o->rnr_retry,
                              .max_rd_atomic = o->rd_atomic};

    require(ibv_modify_qp(e->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0,
            "to INIT");
    require(ibv_modify_qp(e->qp, &rtr,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0,
            "to RTR");
    require(ibv_modify_qp(e->qp, &rts,
                          IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                              IBV_QP_MAX_QP_RD_ATOMIC) == 0,
            "to RTS");
}

void pair_open_with(struct end *a, struct end *b, const struct end_options *ao, const struct end_options *bo,
                    const struct link_options *link)
{
    struct address at, bt;

    end_open(a, ao);
    end_open(b, bo);
    at = end_address(a);
    bt = end_address(b);
    end_connect(a, &bt, link);
    end_connect(b, &at, link);
}

void pair_open(struct end *a, struct end *b)
{
    struct end_options other = {.dev = 1};

    pair_open_with(a, b, NULL, &other, &link_default);
}

int post(struct end *e, enum ibv_wr_opcode opcode, size_t off, uint32_t length, const struct address *to, size_t to_off,
         unsigned int flags, uint64_t wr_id)
{
    struct ibv_sge sge = {(uintptr_t)e->buf + off, length, e->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = wr_id,
                             .sg_list = &sge,
                             .num_sge = 1,
                             .opcode = opcode,
                             .send_flags = flags,
                             .imm_data = (uint32_t)wr_id},
                       *bad;

    if (to && (opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)) {
        wr.wr.atomic.remote_addr = to->addr + to_off;
        wr.wr.atomic.rkey = to->rkey;
        wr.wr.atomic.compare_add = 1;
    } else if (to) {
        wr.wr.rdma.remote_addr = to->addr + to_off;
        wr.wr.rdma.rkey = to->rkey;
    }
    return ibv_post_send(e->qp, &wr, &bad);
}

int post_recv(struct end *e, size_t off, uint32_t length, uint64_t wr_id)
{
    struct ibv_sge sge = {(uintptr_t)e->buf + off, length, e->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;

    return e->srq ? ibv_post_srq_recv(e->srq, &wr, &bad) : ibv_post_recv(e->qp, &wr, &bad);
}

struct ibv_wc wait_wc(struct ibv_cq *cq, const char *what)
{
    uint64_t give_up = now_ns() + WAIT_NS;
    struct ibv_wc wc;
    int n = 0;

    while (n == 0 && now_ns() < give_up)
        n = ibv_poll_cq(cq, 1, &wc);
    require(n == 1, "no completion within %d s: %s (poll_cq said %d)", WAIT_S, what, n);
    return wc;
}

bool quiet(struct ibv_cq *cq, unsigned us)
{
    uint64_t until = now_ns() + us * 1000ull;
    struct ibv_wc wc;

    while (now_ns() < until)
        if (ibv_poll_cq(cq, 1, &wc) != 0)
            return false;
    return true;
}

pid_t spawn(void (*child)(int fd, void *arg), void *arg, int *fd)
{
    int pair[2];
    pid_t pid;

#ifdef __SANITIZE_THREAD__
    cr_skip_test("ThreadSanitizer cannot follow a child forked by Criterion's threaded worker, nor see what two "
                 "processes share");
#endif
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    pid = fork();
    cr_assert_geq(pid, 0);
    if (pid == 0) {
        close(pair[0]);
        child(pair[1], arg);
        exit(0); /* runs destructors, as a program would */
    }
    close(pair[1]);
    *fd = pair[0];
    return pid;
}

void tell(int fd, const void *data, size_t bytes)
{
    require(write(fd, data, bytes) == (ssize_t)bytes, "the other process went away");
}

void hear(int fd, void *data, size_t bytes)
{
    struct pollfd p = {fd, POLLIN, 0};

    for (size_t got = 0; got < bytes;) {
        ssize_t n;

        require(poll(&p, 1, WAIT_S * 1000) == 1, "the other process said nothing for %d s", WAIT_S);
        n = read(fd, (uint8_t *)data + got, bytes - got);
        require(n > 0, "the other process went away");
        got += (size_t)n;
    }
}

void reap(pid_t pid)
{
    uint64_t give_up = now_ns() + WAIT_NS;
    int status = -1;
    pid_t r;

    while ((r = waitpid(pid, &status, WNOHANG)) == 0 && now_ns() < give_up)
        usleep(1000);
    if (r == 0)
        kill(pid, SIGKILL);
    require(r == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0, "child %d ended with %d, status 0x%x", pid, r,
            status);
}

static void child_main(int fd, void *act)
{
    struct end_options options = {.dev = 1};
    struct address mine, peer;
    struct end end;
    char go;

    end_open(&end, &options);
    mine = end_address(&end);
    tell(fd, &mine, sizeof(mine));
    hear(fd, &peer, sizeof(peer));
    end_connect(&end, &peer, &link_default);
    tell(fd, "c", 1);
    hear(fd, &go, 1); /* until the other side is connected, writes would time out */
    (*(act_fn **)act)(&end, &peer, fd);
    end_close(&end);
}

struct couple couple_open(act_fn *act)
{
    struct couple c = {.world = test_world(NULL)};
    struct address address;
    char ready;

    c.pid = spawn(child_main, &act, &c.fd); /* before this process joins: the child joins by itself */
    end_open(&c.end, NULL);
    address = end_address(&c.end);
    tell(c.fd, &address, sizeof(address));
    hear(c.fd, &c.peer, sizeof(c.peer));
    end_connect(&c.end, &c.peer, &link_default);
    hear(c.fd, &ready, 1);
    tell(c.fd, &ready, 1);
    return c;
}

void wait_for_word(struct end *end, const struct address *peer, int fd)
{
    char c;

    hear(fd, &c, 1);
}
