/* SPDX-License-Identifier: Apache-2.0 */
/* SRD: what it promises, and what it does not promise. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/softnic/test/srd_support.h"

static struct end a, b;
static struct address at, bt;
static struct ibv_ah *to_b;

static void start(struct sn_config config)
{
    to_b = srd_pair_open(&config, &a, &b);
    at = srd_address(&a);
    bt = srd_address(&b);
}

static uint32_t sent(uint32_t status, const char *what)
{
    struct ibv_wc wc = wait_wc(a.cq, what);

    cr_assert_eq(wc.status, status, "%s: status %s, want %s", what, ibv_wc_status_str(wc.status),
                 ibv_wc_status_str(status));
    return (uint32_t)wc.wr_id;
}

/* Post END_WRS requests, and count how many complete out of order on each side. */
static void flood(enum ibv_wr_opcode opcode, uint32_t length, unsigned *here, unsigned *there)
{
    bool seen[2][END_WRS] = {{0}};

    for (uint64_t i = 0; i < END_WRS; i++)
        cr_assert_eq(post_recv(&b, 0, 1024, i), 0);
    cr_assert_eq(srd_put_all(&a, opcode, to_b, &bt, length, END_WRS), 0);
    for (uint32_t i = 0; i < END_WRS; i++) {
        uint32_t mine = sent(IBV_WC_SUCCESS, "one of a flood"), theirs = wait_wc(b.cq, "its arrival").imm_data;

        cr_assert(!seen[0][mine] && !seen[1][theirs], "%u or %u twice", mine, theirs);
        seen[0][mine] = seen[1][theirs] = true;
        *here += mine != i;
        *there += theirs != i;
    }
}

Test(srd, delivers_in_any_order)
{
    unsigned here = 0, there = 0;

    start(srd_config());
    flood(IBV_WR_RDMA_WRITE_WITH_IMM, 8, &here, &there);
    cr_assert_gt(here, END_WRS / 4, "%u of %d completed out of turn", here, END_WRS);
    cr_assert_gt(there, END_WRS / 4, "%u of %d arrived out of turn", there, END_WRS);
    here = there = 0;
    flood(IBV_WR_SEND_WITH_IMM, 8, &here, &there);
    cr_assert_gt(there, END_WRS / 4, "%u of %d sends arrived out of turn", there, END_WRS);
}

Test(srd, a_flag_overtakes_the_data_it_was_posted_behind)
{
    unsigned overtook = 0;

    start(srd_config());
    for (uint64_t i = 1; i <= 100; i++) {
        cr_assert_eq(srd_put_all(&a, IBV_WR_RDMA_WRITE, to_b, &bt, 64, 2), 0);
        overtook += sent(IBV_WC_SUCCESS, "first") == 1;
        sent(IBV_WC_SUCCESS, "second");
    }
    cr_assert(overtook > 5 && overtook < 95, "%u of 100", overtook);
}

Test(srd, the_model_delays_and_loses_but_delivers_all_once)
{
    struct sn_config config = srd_config();
    unsigned here = 0, there = 0;
    struct sn_world *world;

    config.latency_ns = 20000;
    config.jitter_ns = 20000;
    config.rate_bps = 10000000000ull;
    start(config);
    for (uint32_t i = 0; i < 2; i++) {
        cr_assert_eq(sn_world_open(getenv(SN_WORLD_ENV), &world), 0);
        sn_world_set_loss(world, 0, i ? 50000000 : 0);
        sn_world_close(world);
        flood(IBV_WR_RDMA_WRITE_WITH_IMM, 512, &here, &there);
        cr_assert_gt(there, END_WRS / 4, "%u of %d arrived out of turn", there, END_WRS);
    }
}

enum { CHUNK = 8000 };

Test(srd, an_immediate_comes_after_its_own_bytes)
{
    start(srd_config());
    for (uint32_t round = 1; round <= 20; round++) {
        for (uint64_t i = 0; i < 8; i++) {
            memset(a.buf + i * CHUNK, (int)(round + i), CHUNK);
            cr_assert_eq(post_recv(&b, 0, 0, i), 0);
            cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE_WITH_IMM, to_b, &bt, i * CHUNK, CHUNK, i), 0);
        }
        for (uint32_t n = 0; n < 8; n++) {
            struct ibv_wc wc = wait_wc(b.cq, "an immediate");

            cr_assert_eq(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
            cr_assert_eq(wc.byte_len, CHUNK);
            cr_assert_eq(memcmp(a.buf + wc.imm_data * CHUNK, b.buf + wc.imm_data * CHUNK, CHUNK), 0, "bytes of %u",
                         wc.imm_data);
            sent(IBV_WC_SUCCESS, "its write");
        }
    }
}

#ifdef __SANITIZE_THREAD__ /* with this sanitizer the kernel copies, and the trap makes its copy fail */
enum { TRAPPED = false };
#else
enum { TRAPPED = true };
#endif
enum { LARGE = 8 << 20, PAGE = LARGEST_PAGE };

/* The thread that first touches the first page of a write finds it protected, and checks whether the last word is there
 * already. A thread that polls would need a core at just that moment. */
static struct {
    char *first;
    uint64_t *last;
    uint64_t value; /* the value that is being written; 0: none */
    unsigned out_of_turn;
} trap;

static void on_fault(int sig, siginfo_t *info, void *context)
{
    (void)context;
    if ((char *)info->si_addr < trap.first || (char *)info->si_addr >= trap.first + PAGE ||
        mprotect(trap.first, PAGE, PROT_READ | PROT_WRITE)) {
        signal(sig, SIG_DFL); /* not our page: the fault comes again, and kills the process */
        return;
    }
    trap.out_of_turn += trap.value && __atomic_load_n(trap.last, __ATOMIC_RELAXED) == trap.value;
}

static void trap_set(uint8_t *buf, uint64_t value)
{
    trap.first = (char *)buf;
    trap.last = (uint64_t *)(buf + LARGE - 8);
    trap.value = value;
    cr_assert_eq(mprotect(trap.first, PAGE, PROT_NONE), 0);
}

Test(srd, a_large_write_lands_in_pieces_in_any_order)
{
    enum { WRITES = 20 };
    struct end_options large = {.bytes = LARGE}, other = {.bytes = LARGE, .dev = 1};
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};

    srd_world();
    srd_open(&a, &large);
    srd_open(&b, &other);
    bt = srd_address(&b);
    to_b = srd_ah(&a, &bt);
    cr_assert_eq(sigaction(SIGSEGV, &action, NULL), 0);
    for (int i = 1; i <= WRITES; i++) {
        memset(a.buf, i, LARGE);
        if (TRAPPED)
            trap_set(b.buf, (uint64_t)i * 0x0101010101010101u);
        cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE, to_b, &bt, 0, LARGE, 1), 0);
        sent(IBV_WC_SUCCESS, "a large write");
        trap.value = 0;
        cr_assert_eq(memcmp(a.buf, b.buf, LARGE), 0, "write %d is whole", i);
    }
    cr_assert(!TRAPPED || (trap.out_of_turn && trap.out_of_turn < WRITES),
              "the last word came before the first in %u of %d", trap.out_of_turn, WRITES);
}

Test(srd, a_send_tells_who_sent_it)
{
    struct ibv_wc wc;

    start(srd_config());
    memset(a.buf, 7, 100);
    cr_assert_eq(post_recv(&b, 1000, 200, 5), 0);
    cr_assert_eq(srd_put(&a, IBV_WR_SEND_WITH_IMM, to_b, &bt, 0, 100, 77), 0);
    wc = wait_wc(b.cq, "a send");
    cr_assert_eq(wc.status, IBV_WC_SUCCESS);
    cr_assert_eq(wc.opcode, IBV_WC_RECV);
    cr_assert_eq(wc.wr_id, 5);
    cr_assert_eq(wc.src_qp, a.qp->qp_num);
    cr_assert_eq(wc.byte_len, 100);
    cr_assert_eq(wc.wc_flags, IBV_WC_WITH_IMM, "no GRH, and the immediate");
    cr_assert_eq(wc.imm_data, 77);
    cr_assert_eq(memcmp(b.buf + 1000, a.buf, 100), 0, "an EFA puts no header in front");
    wc = wait_wc(a.cq, "its completion");
    cr_assert_eq(wc.opcode, IBV_WC_SEND);
}

Test(srd, one_queue_pair_reaches_many_and_itself)
{
    struct end more[5];
    struct address addresses[7] = {0};
    struct ibv_ah *ah;

    start(srd_config());
    for (uint32_t i = 0; i < 5; i++) {
        struct end_options options = {.dev = i % 2};

        srd_open(&more[i], &options);
        addresses[i] = srd_address(&more[i]);
    }
    addresses[5] = bt;
    addresses[6] = at;
    for (uint64_t i = 0; i < 7; i++) {
        a.buf[i] = (uint8_t)(i + 1);
        ah = srd_ah(&a, &addresses[i]);
        cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE, ah, &addresses[i], i, 1, i), 0);
        cr_assert_eq(ibv_destroy_ah(ah), 0, "not needed once posted");
    }
    for (uint64_t i = 0; i < 7; i++)
        sent(IBV_WC_SUCCESS, "one of seven");
    for (uint32_t i = 0; i < 5; i++)
        cr_assert_eq(more[i].buf[i], i + 1);
    cr_assert_eq(b.buf[5], 6);
}

Test(srd, a_read_brings_the_bytes_and_completes_as_a_send)
{
    struct ibv_wc wc;

    start(srd_config());
    for (uint32_t i = 0; i < 40000; i++)
        b.buf[i] = (uint8_t)(i * 7);
    cr_assert_eq(srd_put(&a, IBV_WR_RDMA_READ, to_b, &bt, 0, 40000, 1), 0);
    wc = wait_wc(a.cq, "a read");
    cr_assert_eq(wc.status, IBV_WC_SUCCESS);
    cr_assert_eq(wc.opcode, IBV_WC_SEND, "as rdma-core's provider has it");
    cr_assert_eq(memcmp(a.buf, b.buf, 40000), 0);
}

Test(srd, a_refused_request_fails_alone)
{
    struct srd_request write = {.opcode = IBV_WR_RDMA_WRITE, .ah = NULL, .qkey = SRD_QKEY, .length = 8};
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;

    start(srd_config());
    write.ah = to_b;
    write.qpn = bt.qpn;
    write.rkey = bt.rkey;
    write.raddr = bt.addr + END_BYTES - 4;
    cr_assert_eq(srd_post(&a, &write), 0);
    sent(IBV_WC_REM_ACCESS_ERR, "beyond the region");
    write.raddr = bt.addr;
    write.rkey = bt.rkey + 1;
    cr_assert_eq(srd_post(&a, &write), 0);
    sent(IBV_WC_REM_ACCESS_ERR, "another key");
    write.rkey = bt.rkey;
    write.qpn = 999;
    cr_assert_eq(srd_post(&a, &write), 0);
    sent(IBV_WC_REM_INV_RD_REQ_ERR, "no such queue pair");
    cr_assert_eq(post_recv(&b, 0, 16, 3), 0);
    cr_assert_eq(srd_put(&a, IBV_WR_SEND, to_b, &bt, 0, 17, 1), 0);
    sent(IBV_WC_REM_INV_REQ_ERR, "longer than the receive");
    cr_assert_eq(wait_wc(b.cq, "that receive").status, IBV_WC_LOC_LEN_ERR);
    cr_assert_eq(srd_put(&a, IBV_WR_SEND, to_b, &bt, 0, 9000, 1), 0);
    sent(IBV_WC_LOC_LEN_ERR, "longer than a packet");
    a.mr->lkey++;
    cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE, to_b, &bt, 0, 8, 1), 0);
    a.mr->lkey--;
    sent(IBV_WC_LOC_PROT_ERR, "another local key");
    cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE, to_b, &bt, 0, 8, 1), 0);
    sent(IBV_WC_SUCCESS, "the queue goes on");
    cr_assert_eq(ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init), 0);
    cr_assert_eq(attr.qp_state, IBV_QPS_RTS);
}

Test(srd, who_does_not_answer_holds_up_nobody)
{
    struct srd_request stray = {.opcode = IBV_WR_RDMA_WRITE, .qkey = SRD_QKEY + 1, .length = 8, .wr_id = 99};
    struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};
    struct sn_config config = srd_config();
    struct sn_world *world;

    config.retry_cap_ns = 2 * WAIT_S * 1000000000ull; /* the stray one still waits, however long the others take */
    start(config);
    stray.ah = to_b;
    stray.qpn = bt.qpn;
    stray.rkey = bt.rkey;
    stray.raddr = bt.addr;
    cr_assert_eq(srd_post(&a, &stray), 0, "with another qkey");
    for (uint64_t i = 0; i < 200; i++) {
        cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE, to_b, &bt, 0, 8, i % 50), 0);
        cr_assert_neq(sent(IBV_WC_SUCCESS, "one that passes"), 99);
    }
    cr_assert_eq(ibv_modify_qp(a.qp, &reset, IBV_QP_STATE), 0);
    cr_assert_eq(sn_world_open(getenv(SN_WORLD_ENV), &world), 0);
    world->config.retry_cap_ns = 50000000; /* the next one gives up soon after it is posted */
    srd_ready(&a, -1);
    cr_assert_eq(srd_post(&a, &stray), 0);
    cr_assert_eq(sent(IBV_WC_RESP_TIMEOUT_ERR, "the stray one"), 99);
    sn_world_close(world);
}

Test(srd, a_pulled_link_is_no_answer)
{
    struct sn_world *world;

    start(srd_config());
    cr_assert_eq(sn_world_open(getenv(SN_WORLD_ENV), &world), 0);
    __atomic_store_n(&world->devs[1].port_up, 0, __ATOMIC_RELEASE);
    cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE, to_b, &bt, 0, 8, 1), 0);
    sent(IBV_WC_RESP_TIMEOUT_ERR, "into a pulled link");
    __atomic_store_n(&world->devs[1].port_up, 1, __ATOMIC_RELEASE);
    cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE, to_b, &bt, 0, 8, 1), 0);
    sent(IBV_WC_SUCCESS, "plugged in again");
}

Test(srd, without_a_receive_a_send_waits_or_fails_as_it_was_told)
{
    struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};

    start(srd_config());
    cr_assert_eq(srd_put(&a, IBV_WR_SEND, to_b, &bt, 0, 8, 1), 0);
    cr_assert(quiet(a.cq, 20000), "for ever, unless told otherwise");
    cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE, to_b, &bt, 0, 8, 2), 0);
    cr_assert_eq(sent(IBV_WC_SUCCESS, "a write meanwhile"), 2);
    cr_assert_eq(post_recv(&b, 0, 16, 3), 0);
    cr_assert_eq(sent(IBV_WC_SUCCESS, "the send"), 1);
    cr_assert_eq(ibv_modify_qp(a.qp, &reset, IBV_QP_STATE), 0);
    srd_ready(&a, 2);
    cr_assert_eq(srd_put(&a, IBV_WR_SEND, to_b, &bt, 0, 8, 4), 0);
    sent(IBV_WC_RNR_RETRY_EXC_ERR, "after two retries");
}

Test(srd, the_error_state_flushes_receives_and_takes_no_sends)
{
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};

    start(srd_config());
    cr_assert_eq(post_recv(&a, 0, 8, 1), 0);
    cr_assert_eq(ibv_modify_qp(a.qp, &error, IBV_QP_STATE), 0);
    cr_assert_eq(wait_wc(a.cq, "the receive").status, IBV_WC_WR_FLUSH_ERR);
    cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE, to_b, &bt, 0, 8, 1), EINVAL);
    cr_assert_eq(post_recv(&a, 0, 8, 2), 0);
    cr_assert_eq(wait_wc(a.cq, "a later one").status, IBV_WC_WR_FLUSH_ERR);
}

Test(srd, the_error_state_flushes_what_waits_for_a_receive)
{
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};

    start(srd_config());
    for (uint64_t i = 0; i < 3; i++)
        cr_assert_eq(srd_put(&a, IBV_WR_SEND, to_b, &bt, 0, 8, i), 0);
    cr_assert(quiet(a.cq, 2000));
    cr_assert_eq(ibv_modify_qp(a.qp, &error, IBV_QP_STATE), 0);
    for (uint64_t i = 0; i < 3; i++)
        sent(IBV_WC_WR_FLUSH_ERR, "a waiting send");
}

Test(srd, a_full_queue_refuses_a_post_until_completions_are_polled)
{
    start(srd_config());
    for (uint64_t i = 0; i < END_WRS; i++)
        cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE, to_b, &bt, 0, 8, i), 0);
    cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE, to_b, &bt, 0, 8, 99), ENOMEM);
    for (uint64_t i = 0; i < 3; i++)
        sent(IBV_WC_SUCCESS, "one of a full queue");
    for (uint64_t i = 0; i < 3; i++)
        cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE, to_b, &bt, 0, 8, i), 0, "each completion frees one");
    cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE, to_b, &bt, 0, 8, 99), ENOMEM);
    for (uint64_t i = 0; i < END_WRS; i++)
        sent(IBV_WC_SUCCESS, "one of the rest");
}

/* More senders at the same time than a target has slots for. */
enum { SENDERS = 12, PUTS = 200 };

static void *sender_main(void *arg)
{
    struct end *end = arg;
    struct ibv_ah *ah = srd_ah(end, &bt);

    for (uint64_t i = 0; i < PUTS; i++) {
        require(srd_put(end, IBV_WR_RDMA_WRITE_WITH_IMM, ah, &bt, 0, 4096, i) == 0, "a put");
        require(wait_wc(end->cq, "a put among many").status == IBV_WC_SUCCESS, "its status");
    }
    require(ibv_destroy_ah(ah) == 0, "destroy_ah");
    return NULL;
}

Test(srd, many_may_send_to_one)
{
    struct end_options options = {.dev = 1, .wrs = SENDERS * PUTS};
    struct end ends[SENDERS];
    pthread_t threads[SENDERS];

    srd_world();
    srd_open(&b, &options);
    bt = srd_address(&b);
    for (uint64_t i = 0; i < SENDERS * PUTS; i++)
        cr_assert_eq(post_recv(&b, 0, 0, i), 0);
    for (uint32_t i = 0; i < SENDERS; i++) {
        srd_open(&ends[i], NULL);
        cr_assert_eq(pthread_create(&threads[i], NULL, sender_main, &ends[i]), 0);
    }
    for (uint32_t i = 0; i < SENDERS * PUTS; i++)
        cr_assert_eq(wait_wc(b.cq, "an arrival from one of many").status, IBV_WC_SUCCESS);
    for (uint32_t i = 0; i < SENDERS; i++)
        pthread_join(threads[i], NULL);
    cr_assert_eq(ibv_dereg_mr(b.mr), 0, "nobody is left there");
}

static void child_main(int fd, void *arg)
{
    struct end_options options = {.dev = 1};
    struct address mine, peer;
    struct ibv_ah *ah;
    struct end end;
    char go;

    (void)arg;
    srd_open(&end, &options);
    mine = srd_address(&end);
    for (uint64_t i = 0; i < 8; i++)
        require(post_recv(&end, 0, 0, i) == 0, "a receive");
    tell(fd, &mine, sizeof(mine));
    hear(fd, &peer, sizeof(peer));
    ah = srd_ah(&end, &peer);
    for (uint32_t i = 0; i < 8; i++)
        require(wait_wc(end.cq, "an arrival from the parent").status == IBV_WC_SUCCESS, "its status");
    require(end.buf[8 * 4096 - 1] == 9, "its bytes");
    require(srd_put(&end, IBV_WR_RDMA_WRITE, ah, &peer, 0, 8 * 4096, 1) == 0, "a write back");
    require(wait_wc(end.cq, "the write back").status == IBV_WC_SUCCESS, "its status");
    tell(fd, "d", 1);
    hear(fd, &go, 1); /* until killed */
}

Test(srd, another_process_is_reached_and_when_it_dies_missed)
{
    uint32_t status;
    char done;
    pid_t pid;
    int fd;

    srd_world();
    pid = spawn(child_main, NULL, &fd);
    srd_open(&a, NULL);
    at = srd_address(&a);
    hear(fd, &bt, sizeof(bt));
    to_b = srd_ah(&a, &bt);
    memset(a.buf, 9, 8 * 4096);
    for (uint64_t i = 0; i < 8; i++)
        cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE_WITH_IMM, to_b, &bt, i * 4096, 4096, i), 0);
    for (uint64_t i = 0; i < 8; i++)
        sent(IBV_WC_SUCCESS, "a write to another process");
    memset(a.buf, 0, 8 * 4096);
    tell(fd, &at, sizeof(at));
    hear(fd, &done, 1);
    cr_assert_eq(a.buf[0], 9);
    kill(pid, SIGKILL);
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
    cr_assert_eq(srd_put(&a, IBV_WR_RDMA_WRITE, to_b, &bt, 0, 8, 1), 0);
    status = wait_wc(a.cq, "a write to the dead").status;
    cr_assert(status == IBV_WC_RESP_TIMEOUT_ERR || status == IBV_WC_REM_INV_RD_REQ_ERR, "%s",
              ibv_wc_status_str(status));
}

static void wait_main(int fd, void *arg)
{
    struct end_options options = {.dev = 1};
    struct address mine;
    struct end end;
    char c;

    srd_open(&end, &options);
    mine = srd_address(&end);
    tell(fd, &mine, sizeof(mine));
    hear(fd, &c, 1);
    end_close(&end);
}

/* Short writes to another process share a system call, but each one's key is checked. */
Test(srd, a_write_with_another_key_does_not_slip_in_with_others)
{
    enum { WRITES = 40 };
    struct srd_request q = {.opcode = IBV_WR_RDMA_WRITE, .length = 8};
    pid_t pid;
    int fd;

    srd_world();
    pid = spawn(wait_main, NULL, &fd);
    srd_open(&a, NULL);
    hear(fd, &bt, sizeof(bt));
    q.ah = to_b = srd_ah(&a, &bt);
    q.qpn = bt.qpn;
    q.rkey = bt.rkey;
    q.raddr = bt.addr;
    for (q.wr_id = 0; q.wr_id < WRITES; q.wr_id++) {
        q.qkey = SRD_QKEY + q.wr_id % 2;
        cr_assert_eq(srd_post(&a, &q), 0);
    }
    for (int i = 0; i < WRITES; i++) {
        struct ibv_wc wc = wait_wc(a.cq, "a write");

        cr_assert_eq(wc.status, wc.wr_id % 2 ? IBV_WC_RESP_TIMEOUT_ERR : IBV_WC_SUCCESS, "write %d: %s", (int)wc.wr_id,
                     ibv_wc_status_str(wc.status));
    }
    tell(fd, "q", 1);
    reap(pid);
}
