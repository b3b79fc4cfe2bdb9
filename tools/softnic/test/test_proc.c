/* SPDX-License-Identifier: Apache-2.0 */
/* Several processes: atomics between them, a killed peer, what a process leaves after its end. */
#include <criterion/criterion.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/softnic/test/support.h"
#include "test/support/open_files.h"
#include "tools/softnic/world/proc.h"
#include "tools/softnic/world/wake.h"

Test(proc, data_crosses_processes_and_the_target_need_not_run)
{
    struct couple c = couple_open(wait_for_word);

    cr_assert_eq(kill(c.pid, SIGSTOP), 0); /* the target cannot run */
    for (uint32_t size = 1; size <= 60000; size = size * 3 + 1) {
        memset(c.end.buf, (int)size, size);
        memset(c.end.buf + size, 0, c.end.bytes - size);
        cr_assert_eq(post(&c.end, IBV_WR_RDMA_WRITE, 0, size, &c.peer, 0, IBV_SEND_SIGNALED, 1), 0);
        cr_assert_eq(wait_wc(c.end.cq, "write to a stopped process").status, IBV_WC_SUCCESS);
        memset(c.end.buf, 0, size);
        cr_assert_eq(post(&c.end, IBV_WR_RDMA_READ, 0, size, &c.peer, 0, IBV_SEND_SIGNALED, 2), 0);
        cr_assert_eq(wait_wc(c.end.cq, "read from a stopped process").status, IBV_WC_SUCCESS);
        for (uint32_t i = 0; i < size; i++)
            require(c.end.buf[i] == (uint8_t)size, "byte %u of %u", i, size);
    }
    kill(c.pid, SIGCONT);
    tell(c.fd, "q", 1);
    reap(c.pid);
    end_close(&c.end);
}

/* Writes of 1, 2, 3 ... bytes, 64 bytes apart, to the same offsets of the other end; the last one is signaled. */
static void fill_chain(const struct couple *c, struct ibv_send_wr *wr, struct ibv_sge *sge, uint32_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        memset(c->end.buf + i * 64, (int)i + 1, 64);
        sge[i] = (struct ibv_sge){(uintptr_t)c->end.buf + i * 64, (uint32_t)i + 1, c->end.mr->lkey};
        wr[i] = (struct ibv_send_wr){.wr_id = i,
                                     .next = i + 1 < count ? &wr[i + 1] : NULL,
                                     .sg_list = &sge[i],
                                     .num_sge = 1,
                                     .opcode = IBV_WR_RDMA_WRITE,
                                     .send_flags = i + 1 < count ? 0 : IBV_SEND_SIGNALED};
        wr[i].wr.rdma.remote_addr = c->peer.addr + i * 64;
        wr[i].wr.rdma.rkey = c->peer.rkey;
    }
}

/* The short writes of a chain share system calls; a bad one in the middle must not affect those before it. */
Test(proc, a_chain_across_processes_fails_at_its_bad_request)
{
    enum { BAD = 37 };
    struct couple c = couple_open(wait_for_word);
    struct ibv_send_wr wr[BAD + 1], *bad;
    struct ibv_sge sge[BAD + 1];

    fill_chain(&c, wr, sge, BAD + 1);
    for (uint32_t i = 0; i < BAD; i++)
        wr[i].send_flags = IBV_SEND_SIGNALED;
    wr[BAD].wr.rdma.rkey ^= 1;
    cr_assert_eq(ibv_post_send(c.end.qp, wr, &bad), 0);
    for (uint64_t i = 0; i < BAD; i++) {
        struct ibv_wc wc = wait_wc(c.end.cq, "write of a chain");

        cr_assert(wc.wr_id == i && wc.status == IBV_WC_SUCCESS);
    }
    cr_assert_eq(wait_wc(c.end.cq, "bad write").status, IBV_WC_REM_ACCESS_ERR);
    tell(c.fd, "q", 1);
    reap(c.pid);
    end_close(&c.end);
}

Test(proc, a_chain_across_processes_arrives)
{
    enum { CHAIN = 40 };
    struct couple c = couple_open(wait_for_word);
    struct ibv_send_wr wr[CHAIN], *bad;
    struct ibv_sge sge[CHAIN];

    fill_chain(&c, wr, sge, CHAIN);
    cr_assert_eq(ibv_post_send(c.end.qp, wr, &bad), 0);
    cr_assert_eq(wait_wc(c.end.cq, "chain").wr_id, CHAIN - 1);
    cr_assert_eq(post(&c.end, IBV_WR_RDMA_READ, 8192, CHAIN * 64, &c.peer, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(wait_wc(c.end.cq, "read back").status, IBV_WC_SUCCESS);
    for (int i = 0; i < CHAIN * 64; i++)
        require(c.end.buf[8192 + i] == (i % 64 <= i / 64 ? i / 64 + 1 : 0), "byte %d is %u", i, c.end.buf[8192 + i]);
    tell(c.fd, "q", 1);
    reap(c.pid);
    end_close(&c.end);
}

enum { ADDS = 2000 };

static void add_to_peer(struct end *end, const struct address *peer, int fd)
{
    for (int i = 0; i < ADDS; i++) {
        require(post(end, IBV_WR_ATOMIC_FETCH_AND_ADD, 8, 8, peer, 0, IBV_SEND_SIGNALED, 1) == 0, "post");
        require(wait_wc(end->cq, "fetch and add").status == IBV_WC_SUCCESS, "completion");
    }
    tell(fd, "d", 1);
}

Test(proc, atomics_of_two_processes_add_up)
{
    struct couple c = couple_open(add_to_peer);
    struct address self;
    struct end own;
    char byte;

    end_open(&own, NULL); /* this end adds to the same word over a queue pair connected to itself */
    self = end_address(&own);
    end_connect(&own, &self, &link_default);
    cr_assert_eq(ibv_dereg_mr(own.mr), 0);
    free(own.buf);
    own.buf = c.end.buf;
    own.mr = ibv_reg_mr(own.pd, own.buf, own.bytes, ALL_ACCESS);
    self = end_address(&own);
    for (int i = 0; i < ADDS; i++) {
        cr_assert_eq(post(&own, IBV_WR_ATOMIC_FETCH_AND_ADD, 4096, 8, &self, 0, IBV_SEND_SIGNALED, 1), 0);
        cr_assert_eq(wait_wc(own.cq, "fetch and add").status, IBV_WC_SUCCESS);
    }
    hear(c.fd, &byte, 1);
    cr_assert_eq(*(uint64_t *)c.end.buf, 2 * ADDS);
    reap(c.pid);
}

/* Write words whose eight bytes are all equal, until the other side sends a byte. Half of them are the last but one of
 * a page: a "rep movsb" of the kernel that reads there may store byte by byte. */
static void write_words(struct end *end, const struct address *peer, int fd)
{
    struct pollfd stop = {fd, POLLIN, 0};

    for (unsigned i = 0; i % 64 || poll(&stop, 1, 0) == 0; i++) {
        size_t at = i % 2 ? 4096 - 16 : 0;

        memset(end->buf + at, (int)(i & 0xff), 8);
        require(post(end, IBV_WR_RDMA_WRITE, at, 8, peer, 64, IBV_SEND_SIGNALED | (at ? 0 : IBV_SEND_INLINE), 1) == 0,
                "post");
        require(wait_wc(end->cq, "word").status == IBV_WC_SUCCESS, "completion");
    }
}

Test(proc, an_aligned_word_is_never_torn)
{
    enum { CHANGES = 100000 };
    struct couple c = couple_open(write_words);
    uint64_t began, seen = 0, last = 0;

    /* For 3 s, or longer until the writer made some changes, in case it had no core. */
    for (began = now_ns(); seen < CHANGES && now_ns() < began + (seen > 10 ? 3 : WAIT_S) * 1000000000ull;) {
        uint64_t v = __atomic_load_n((volatile uint64_t *)(c.end.buf + 64), __ATOMIC_RELAXED);

        require(v == (v & 0xff) * 0x0101010101010101ull, "torn: 0x%016lx", v);
        seen += v != last;
        last = v;
    }
    tell(c.fd, "s", 1);
    cr_assert_gt(seen, 10, "the writer did not run in %d s", WAIT_S);
    reap(c.pid);
    end_close(&c.end);
}

enum { MESSAGES_LEAST = 20 };

/* Write messages whose last word is a count that all bytes before it carry too. */
static void write_messages(struct end *end, const struct address *peer, int fd)
{
    uint64_t until = now_ns() + 400000000;
    char c;

    for (uint64_t i = 1; i <= MESSAGES_LEAST || now_ns() < until; i++) {
        memset(end->buf, (int)(i & 0xff), 2040);
        *(uint64_t *)(end->buf + 2040) = i;
        require(post(end, IBV_WR_RDMA_WRITE, 0, 2048, peer, 0, IBV_SEND_SIGNALED, 1) == 0, "post");
        require(wait_wc(end->cq, "message").status == IBV_WC_SUCCESS, "completion");
        hear(fd, &c, 1);
    }
    *(uint64_t *)(end->buf + 2040) = UINT64_MAX;
    require(post(end, IBV_WR_RDMA_WRITE, 0, 2048, peer, 0, IBV_SEND_SIGNALED, 1) == 0, "post");
    wait_wc(end->cq, "last message");
}

Test(proc, the_last_bytes_come_last)
{
    struct couple c = couple_open(write_messages);
    uint64_t expect = 1, v;

    for (;;) {
        uint64_t give_up = now_ns() + WAIT_S * 1000000000ull;

        do
            v = __atomic_load_n((volatile uint64_t *)(c.end.buf + 2040), __ATOMIC_ACQUIRE);
        while (v != expect && v != UINT64_MAX && now_ns() < give_up);
        if (v == UINT64_MAX)
            break;
        cr_assert_eq(v, expect);
        for (int i = 0; i < 2040; i++)
            require(c.end.buf[i] == (uint8_t)expect, "message %lu: byte %d came after the last word", expect, i);
        expect++;
        tell(c.fd, "n", 1);
    }
    cr_assert_gt(expect, MESSAGES_LEAST);
    reap(c.pid);
}

static void write_for_ever(struct end *end, const struct address *peer, int fd)
{
    for (;;) {
        post(end, IBV_WR_RDMA_WRITE, 0, 30000, peer, 0, IBV_SEND_SIGNALED, 1);
        wait_wc(end->cq, "write");
    }
}

static void kill_and_reap(pid_t pid)
{
    int status;

    cr_assert_eq(kill(pid, SIGKILL), 0);
    cr_assert_eq(waitpid(pid, &status, 0), pid);
}

Test(proc, a_killed_peer_exceeds_the_retries_in_bounded_time)
{
    struct couple c = couple_open(write_for_ever);
    uint64_t before;

    usleep(20000);
    kill_and_reap(c.pid);
    before = now_ns();
    cr_assert_eq(post(&c.end, IBV_WR_RDMA_WRITE, 0, 8, &c.peer, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(wait_wc(c.end.cq, "write to a killed peer").status, IBV_WC_RETRY_EXC_ERR);
    /* The time-out is 8 ms; the rest is for a machine that runs other work meanwhile. */
    cr_assert_lt(now_ns() - before, 20000000000);
    end_close(&c.end); /* also when the child died in the middle of a write to us */
}

Test(proc, an_empty_message_notices_a_killed_peer_too)
{
    struct couple c = couple_open(wait_for_word);

    kill_and_reap(c.pid);
    cr_assert_eq(post(&c.end, IBV_WR_RDMA_WRITE, 0, 0, &c.peer, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(wait_wc(c.end.cq, "empty write").status, IBV_WC_RETRY_EXC_ERR);
}

Test(proc, what_the_dead_left_is_swept)
{
    struct couple c = couple_open(wait_for_word);
    struct sn_world *world = c.world;
    uint32_t owner = 0;

    for (uint32_t i = 0; i < SN_MAX_PROCS; i++)
        if (world->procs[i].state == SN_PROC_LIVE && world->procs[i].pid == (uint32_t)c.pid)
            owner = i + 1;
    cr_assert_gt(owner, 0);
    kill_and_reap(c.pid);
    cr_assert_eq(sn_proc_sweep(world), 1);
    for (uint32_t i = 0; i < SN_MAX_QPS; i++)
        cr_assert_neq(world->qps[i].owner, owner);
    for (uint32_t i = 0; i < SN_MAX_MRS; i++)
        cr_assert_neq(world->mrs[i].owner, owner);
    for (uint32_t i = 0; i < SN_MAX_CQS; i++)
        cr_assert_neq(world->cqs[i].owner, owner);
    cr_assert_eq(world->procs[owner - 1].state, SN_PROC_FREE);
    end_close(&c.end);
}

/* The only queue pair of the other process, as the world stores it. */
static struct sn_qp_shm *queue_pair_of(const struct couple *c)
{
    for (uint32_t i = 0; i < SN_MAX_QPS; i++) {
        uint32_t owner = c->world->qps[i].owner;

        if (owner && c->world->procs[owner - 1].pid == (uint32_t)c->pid)
            return &c->world->qps[i];
    }
    cr_assert_fail("process %d has no queue pair", (int)c->pid);
    return NULL;
}

/* An initiator that has copied to a process that died then completes on its completion queue: until then nobody else
 * may get that ring. The thread enters itself as sn_responder_enter does, since a copy that is long enough for the test
 * would take too long. */
static void *end_when_told(void *arg)
{
    char word;

    hear(*(int *)arg, &word, 1);
    _exit(0);
}

static void leave_the_rest_to_another_thread(int fd, void *arg)
{
    static int told;
    pthread_t thread;

    told = fd;
    require(!pthread_create(&thread, NULL, end_when_told, &told), "thread");
    pthread_exit(NULL);
}

static char state_of(pid_t pid)
{
    char path[40], line[64], state = 0;
    FILE *status;

    snprintf(path, sizeof(path), "/proc/%d/status", pid);
    status = fopen(path, "r");
    while (status && !state && fgets(line, sizeof(line), status))
        sscanf(line, "State: %c", &state);
    if (status)
        fclose(status);
    return state;
}

static void ask_of_parents_device(int fd, void *context)
{
    struct ibv_device_attr attr;

    cr_assert_eq(ibv_query_device(context, &attr), 0);
    tell(fd, &attr, sizeof(attr));
}

Test(proc, a_forked_child_asks_what_its_parents_device_can_do)
{
    struct ibv_device_attr attr, of_child;
    struct end end;
    pid_t pid;
    int fd;

    end_open(&end, NULL);
    cr_assert_eq(ibv_query_device(end.ctx, &attr), 0);
    pid = spawn(ask_of_parents_device, end.ctx, &fd);
    hear(fd, &of_child, sizeof(of_child));
    cr_assert_eq(memcmp(&of_child, &attr, sizeof(attr)), 0);
    reap(pid);
    close(fd);
    end_close(&end);
}

Test(proc, a_process_lives_as_long_as_one_of_its_threads)
{
    uint64_t give_up = now_ns() + WAIT_S * 1000000000ull;
    int fd;
    pid_t pid = spawn(leave_the_rest_to_another_thread, NULL, &fd);

    while (state_of(pid) != 'Z' && now_ns() < give_up)
        usleep(1000);
    cr_assert_eq(state_of(pid), 'Z', "its first thread has ended");
    cr_assert(sn_pid_runs((uint32_t)pid), "another runs");
    tell(fd, "q", 1);
    while (sn_pid_runs((uint32_t)pid) && now_ns() < give_up)
        usleep(1000);
    cr_assert_not(sn_pid_runs((uint32_t)pid), "all have ended, though nobody has reaped it");
    reap(pid);
}

Test(proc, the_rings_of_the_dead_wait_for_who_is_at_work_on_them)
{
    struct couple c = couple_open(wait_for_word);
    struct sn_qp_shm *qp = queue_pair_of(&c);
    struct sn_world *world = c.world;
    uint32_t owner = qp->owner, cq = qp->rcq;

    __atomic_store_n(&qp->initiators[0], 1ull << 32 | (uint32_t)getpid(), __ATOMIC_SEQ_CST);
    kill_and_reap(c.pid);
    cr_assert_eq(sn_proc_sweep(world), 0);
    cr_assert_eq(world->cqs[cq].owner, owner);
    cr_assert_eq(qp->qpn, 0, "who comes now does not find it");
    __atomic_store_n(&qp->initiators[0], 1ull << 32, __ATOMIC_SEQ_CST);
    cr_assert_eq(sn_proc_sweep(world), 1);
    cr_assert_eq(world->cqs[cq].owner, 0);
    cr_assert_eq(world->procs[owner - 1].state, SN_PROC_FREE);
    end_close(&c.end);
}

static void end_at_once(struct end *end, const struct address *peer, int fd)
{
    char c;

    hear(fd, &c, 1);
    _exit(0);
}

/* While a program exits, its other threads still run, and so do the NIC's: they may complete requests that are under
 * way. */
Test(proc, the_rings_of_a_program_that_exits_are_its_own_until_its_end)
{
    struct couple c = couple_open(end_at_once);
    struct sn_qp_shm *qp = queue_pair_of(&c);
    struct sn_world *world = c.world;
    uint32_t owner = qp->owner, cq = qp->rcq;

    sn_proc_leave(world, owner - 1, getenv(SN_WORLD_ENV)); /* as its destructors do */
    cr_assert_eq(sn_proc_sweep(world), 0);
    cr_assert_eq(world->cqs[cq].owner, owner);
    cr_assert_eq(qp->qpn, 0, "nobody reaches a program that exits");
    tell(c.fd, "q", 1);
    reap(c.pid);
    cr_assert_eq(sn_proc_sweep(world), 1);
    cr_assert_eq(world->cqs[cq].owner, 0);
    end_close(&c.end);
}

Test(proc, a_thousand_cycles_leave_nothing, .timeout = 500)
{
    struct sn_world *world = test_world(NULL);
    uint64_t arena = 0;
    int fds = 0;

    for (int i = 0; i < 1000; i++) {
        struct address bt;
        struct end a, b;

        pair_open(&a, &b);
        bt = end_address(&b);
        cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, i % 2 ? 8 : 30000, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
        wait_wc(a.cq, "write");
        end_close(&a);
        end_close(&b);
        if (i == 10) {
            fds = open_files();
            arena = world->arena_next;
        }
    }
    cr_assert_eq(open_files(), fds);
    /* Indices of queue pairs are not reused at once, but their rings are. */
    cr_assert_eq(world->arena_next, arena);
    for (uint32_t i = 0; i < SN_MAX_CTXS; i++)
        cr_assert_eq(world->ctxs[i].owner, 0);
}

static void inherit_and_exit(int fd, void *arg)
{
    tell(fd, "x", 1);
}

Test(proc, a_forked_child_that_exits_takes_nothing_with_it)
{
    struct address bt;
    struct end a, b;
    pid_t pid;
    int fd;
    char c;

    test_world(NULL);
    pair_open(&a, &b);
    bt = end_address(&b);
    pid = spawn(inherit_and_exit, NULL, &fd);
    hear(fd, &c, 1);
    reap(pid); /* its destructors ran */
    cr_assert_eq(post(&a, IBV_WR_RDMA_WRITE, 0, 8, &bt, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(wait_wc(a.cq, "write after a child's exit").status, IBV_WC_SUCCESS);
    end_close(&a);
    end_close(&b);
}

/* Two threads use one queue pair and one completion queue, as verbs allow. */
struct poster {
    struct end *end;
    struct address to;
    int count;
};

static void *post_many(void *arg)
{
    struct poster *p = arg;

    for (int i = 0; i < p->count;) {
        struct ibv_wc wc;

        i += post(p->end, IBV_WR_RDMA_WRITE, 0, i % 8 ? 8 : 20000, &p->to, 0, IBV_SEND_SIGNALED, 1) == 0;
        if (ibv_poll_cq(p->end->cq, 1, &wc) == 1) {
            __atomic_fetch_add((uint32_t *)(p->end->buf + 60000), 1, __ATOMIC_RELAXED);
            if (wc.status != IBV_WC_SUCCESS)
                return "failed";
        }
    }
    return NULL;
}

Test(proc, two_threads_may_share_a_queue_pair)
{
    enum { EACH = 3000 };
    struct poster p;
    struct end a, b;
    pthread_t threads[2];
    struct ibv_wc wc;
    uint32_t *polled;
    void *failed;

    test_world(NULL);
    pair_open(&a, &b);
    p = (struct poster){&a, end_address(&b), EACH};
    for (int i = 0; i < 2; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, post_many, &p), 0);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], &failed);
        cr_assert_null(failed);
    }
    polled = (uint32_t *)(a.buf + 60000);
    for (uint64_t give_up = now_ns() + WAIT_S * 1000000000ull; *polled < 2 * EACH && now_ns() < give_up;)
        *polled += ibv_poll_cq(a.cq, 1, &wc) == 1;
    cr_assert_eq(*polled, 2 * EACH, "every request completes once");
    end_close(&a);
    end_close(&b);
}

/* Between finding a world abandoned and removing its file, another process may have removed it and made another. */
Test(proc, a_path_that_names_another_world_by_now_is_left_alone)
{
    struct sn_world *old = test_world(NULL), *young;
    const char *path = getenv(SN_WORLD_ENV);
    struct sn_config config;

    sn_config_default(&config);
    unlink(path);
    cr_assert_eq(sn_world_create(path, &config, false, &young), 0);
    cr_assert_not(sn_world_remove(old, path, true));
    cr_assert_eq(access(path, F_OK), 0, "the other world's file was removed");
    cr_assert_not(sn_world_remove(young, path, false), "its creator lives");
    cr_assert(sn_world_remove(young, path, true));
    cr_assert_eq(access(path, F_OK), -1);
    sn_world_close(old);
    sn_world_close(young);
}

Test(proc, a_world_that_a_process_has_joined_is_not_removed)
{
    struct sn_world *world = test_world(NULL);
    const char *path = getenv(SN_WORLD_ENV);
    uint32_t index;
    uint64_t nonce = 1;

    world->creator_start++; /* the creator is gone, and another process has its number */
    cr_assert_eq(sn_proc_enter(world, nonce, &nonce, 0, &index), 0);
    cr_assert_not(sn_world_remove(world, path, false));
    sn_proc_leave(world, index, path);
    cr_assert_eq(access(path, F_OK), 0, "it is the launcher's, or a sweep's, to remove");
    cr_assert(sn_world_remove(world, path, false));
    sn_world_close(world);
}
