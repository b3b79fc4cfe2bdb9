/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory over the software NIC, between two processes (two GPUs where there are two).
 * usage: cuda_rw [--least GBPS]     checks everything, prints figures; fails below that device-to-device bandwidth
 *        cuda_rw --no-process-vm    likewise, without these calls
 * Exit status 77: no GPU. With the driver of fake_cuda everything but kernels and figures is checked. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tools/softnic/test/process_vm.h"
#include "tools/softnic/test/test_cuda_batch.h"
#include "tools/softnic/test/test_cuda_busy.h"
#include "tools/softnic/test/test_cuda_copier.h"
#include "tools/softnic/test/test_cuda_queue.h"
#include "tools/softnic/test/test_cuda_owner.h"
#include "tools/softnic/test/test_cuda_srd.h"

enum { SKIP = 77 };

static const struct row {
    enum ibv_wr_opcode opcode;
    enum memory mine, theirs; /* of the initiator, of the target */
    size_t bytes;
} rows[] = {
    {IBV_WR_RDMA_WRITE, LEGACY, LEGACY, 1},
    {IBV_WR_RDMA_WRITE, LEGACY, LEGACY, 8},
    {IBV_WR_RDMA_WRITE, LEGACY, LEGACY, 4095},
    {IBV_WR_RDMA_WRITE, LEGACY, LEGACY, 3000001},
    {IBV_WR_RDMA_WRITE, VMM, VMM, 5000001}, /* in three allocations */
    {IBV_WR_RDMA_WRITE, VMM, LEGACY, 65537},
    {IBV_WR_RDMA_WRITE, DMABUF, DMABUF, 1048576},
    {IBV_WR_RDMA_WRITE, PAGEABLE, LEGACY, 7},
    {IBV_WR_RDMA_WRITE, PAGEABLE, LEGACY, 16385}, /* one more than a small slot */
    {IBV_WR_RDMA_WRITE, PAGEABLE, VMM, 6000000},  /* more than all staging pieces together */
    {IBV_WR_RDMA_WRITE, PINNED, LEGACY, 2000003},
    {IBV_WR_RDMA_WRITE, LEGACY, PAGEABLE, 5},
    {IBV_WR_RDMA_WRITE, LEGACY, PAGEABLE, 4000001},
    {IBV_WR_RDMA_WRITE, VMM, PINNED, 700000},
    {IBV_WR_RDMA_READ, LEGACY, LEGACY, 3000001},
    {IBV_WR_RDMA_READ, PAGEABLE, LEGACY, 8},
    {IBV_WR_RDMA_READ, PAGEABLE, VMM, 4500000},
    {IBV_WR_RDMA_READ, PINNED, LEGACY, 1000000},
    {IBV_WR_RDMA_READ, LEGACY, PAGEABLE, 3000000},
    {IBV_WR_RDMA_WRITE_WITH_IMM, LEGACY, LEGACY, 100000},
    {IBV_WR_RDMA_WRITE_WITH_IMM, PAGEABLE, VMM, 1200000},
    {IBV_WR_SEND, LEGACY, LEGACY, 70000},
    {IBV_WR_SEND, PAGEABLE, LEGACY, 300},
    {IBV_WR_SEND, LEGACY, PAGEABLE, 2000000},
    {IBV_WR_RDMA_WRITE, PAGEABLE, PAGEABLE, 100000},
    {IBV_WR_RDMA_WRITE, PAGEABLE, PRIVATE, 8}, /* from here on, the owner copies */
    {IBV_WR_RDMA_WRITE, PAGEABLE, PRIVATE, 5000001},
    {IBV_WR_RDMA_WRITE, LEGACY, PRIVATE, 4095},
    {IBV_WR_RDMA_WRITE, VMM, PRIVATE, 3000001},
    {IBV_WR_RDMA_WRITE, PINNED, PRIVATE, 700001},
    {IBV_WR_RDMA_WRITE, PRIVATE, LEGACY, 100000}, /* the initiator can copy */
    {IBV_WR_RDMA_WRITE, PRIVATE, PAGEABLE, 1000001},
    {IBV_WR_RDMA_WRITE, PRIVATE, PRIVATE, 1}, /* neither side can: through host memory, in pieces */
    {IBV_WR_RDMA_WRITE, PRIVATE, PRIVATE, 7340033},
    {IBV_WR_RDMA_READ, PAGEABLE, PRIVATE, 8},
    {IBV_WR_RDMA_READ, VMM, PRIVATE, 2500001},
    {IBV_WR_RDMA_READ, PRIVATE, PRIVATE, 3500001},
    {IBV_WR_RDMA_WRITE_WITH_IMM, PAGEABLE, PRIVATE, 65536},
    {IBV_WR_RDMA_WRITE_WITH_IMM, PRIVATE, PRIVATE, 1200000},
    {IBV_WR_SEND, PAGEABLE, PRIVATE, 300},
    {IBV_WR_SEND, LEGACY, PRIVATE, 2000000},
};

static void transfer_row(struct side *side, const struct row *row, uint32_t seed)
{
    char what[128];
    struct buf buf;
    bool takes_receive = row->opcode == IBV_WR_SEND || row->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    bool is_read = row->opcode == IBV_WR_RDMA_READ;

    snprintf(what, sizeof(what), "opcode %d, %s to %s, %zu bytes", row->opcode, memory_names[row->mine],
             memory_names[row->theirs], row->bytes);
    buf_make(side, &buf, side->initiator ? row->mine : row->theirs, row->bytes + 64);
    if (side->initiator != is_read)
        buf_fill(&buf, seed);
    else
        buf_zero(&buf);
    if (!side->initiator && takes_receive) {
        struct ibv_sge sge = {buf.addr, (uint32_t)row->bytes, buf.mr->lkey};
        struct ibv_recv_wr *bad, wr = {.sg_list = &sge, .num_sge = row->opcode == IBV_WR_SEND};
        MUST(!ibv_post_recv(side->qp, &wr, &bad));
    }
    struct remote remote = swap_remote(side, &buf);
    if (side->initiator) {
        post(side, row->opcode, &buf, 0, row->bytes, remote);
        expect_success(side, what);
    } else if (takes_receive) {
        struct ibv_wc wc = side_poll(side);
        MUST(wc.status == IBV_WC_SUCCESS && wc.byte_len == row->bytes);
        MUST(row->opcode == IBV_WR_SEND || wc.imm_data == htonl(IMM));
        MUST(buf_check(&buf, row->bytes, seed, what)); /* at once: the completion promises the data */
    }
    side_barrier(side);
    if (side->initiator == is_read)
        MUST(buf_check(&buf, row->bytes, seed, what));
    side_barrier(side);
    buf_free(&buf);
}

/* Each side changes a word on the other's GPU, at the same time; results go to host memory and to device memory. */
static void atomics(struct side *side, enum memory memory)
{
    enum { ADDS = 40 };
    struct buf word, result;
    uint64_t value;

    buf_make(side, &word, memory, 64);
    buf_zero(&word);
    buf_make(side, &result, side->initiator ? PAGEABLE : memory, 64);
    struct remote remote = swap_remote(side, &word);
    if (!side->initiator) /* each side has its own words, because the values are checked */
        remote.addr += 8;
    struct ibv_sge sge = {result.addr, 8, result.mr->lkey};
    struct ibv_send_wr *bad,
        wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .send_flags = IBV_SEND_SIGNALED};
    wr.wr.atomic.remote_addr = remote.addr;
    wr.wr.atomic.rkey = remote.rkey;
    wr.wr.atomic.compare_add = 3;
    for (uint64_t i = 0; i < ADDS; i++) {
        MUST(!ibv_post_send(side->qp, &wr, &bad));
        expect_success(side, "fetch and add");
        buf_read(&result, 0, &value, 8);
        MUST(value == 3 * i);
    }
    wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
    wr.wr.atomic.compare_add = 3 * ADDS;
    wr.wr.atomic.swap = 7;
    MUST(!ibv_post_send(side->qp, &wr, &bad));
    expect_success(side, "compare and swap");
    side_barrier(side);
    buf_read(&word, side->initiator ? 8 : 0, &value, 8);
    MUST(value == 7);
    side_barrier(side);
    buf_free(&word);
    buf_free(&result);
}

/* Memory that is freed and allocated again often has the same address: the old mapping must not be used for it. */
static void a_new_allocation_is_mapped_anew(struct side *side)
{
    for (uint32_t i = 0; i < 12; i++)
        transfer_row(side, &(struct row){IBV_WR_RDMA_WRITE, LEGACY, i % 2 ? LEGACY : VMM, 100000}, 1000 + i);
}

/* The driver packs small allocations into one block: each must be found at its own offset. */
static void small_neighbours_are_told_apart(struct side *side)
{
    enum { NEIGHBOURS = 6, BYTES = 512 };
    struct buf here, there[NEIGHBOURS];
    struct remote remote[NEIGHBOURS];

    buf_make(side, &here, PAGEABLE, BYTES);
    for (int i = 0; i < NEIGHBOURS; i++) {
        buf_make(side, &there[i], LEGACY, BYTES);
        buf_zero(&there[i]);
        remote[i] = swap_remote(side, &there[i]);
    }
    for (uint32_t i = 0; side->initiator && i < NEIGHBOURS; i++) {
        buf_fill(&here, 50 + i);
        post(side, IBV_WR_RDMA_WRITE, &here, 0, BYTES, remote[i]);
        expect_success(side, "write to small neighbours");
    }
    side_barrier(side);
    for (uint32_t i = 0; !side->initiator && i < NEIGHBOURS; i++)
        MUST(buf_check(&there[i], BYTES, 50 + i, "small neighbours"));
    side_barrier(side);
    for (int i = 0; i < NEIGHBOURS; i++)
        buf_free(&there[i]);
    buf_free(&here);
}

/* A registration that begins and ends inside allocations, and covers parts of two out of three. */
static void a_part_of_a_segment_is_found(struct side *side)
{
    enum { OFFSET = (1 << 20) + 4096, BYTES = 2 << 20 };
    struct buf segment, here;
    struct remote mine, theirs;
    uint8_t *have = malloc(BYTES), *want = malloc(BYTES), before;

    MUST(have && want);
    buf_make(side, &segment, VMM, 6 << 20);
    buf_zero(&segment);
    buf_make(side, &here, PAGEABLE, BYTES);
    buf_fill(&here, 9);
    buf_read(&here, 0, want, BYTES);
    struct ibv_mr *part = ibv_reg_mr(side->pd, (void *)(uintptr_t)(segment.addr + OFFSET), BYTES,
                                     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    MUST(part);
    mine = (struct remote){segment.addr + OFFSET, part->rkey};
    side_exchange(side, &mine, &theirs, sizeof(mine));
    if (side->initiator) {
        post(side, IBV_WR_RDMA_WRITE, &here, 0, BYTES, theirs);
        expect_success(side, "write to a part of a segment");
    }
    side_barrier(side);
    if (!side->initiator) {
        buf_read(&segment, OFFSET, have, BYTES);
        MUST(!memcmp(have, want, BYTES));
        buf_read(&segment, OFFSET - 1, &before, 1);
        MUST(before == 0);
    }
    side_barrier(side);
    MUST(!ibv_dereg_mr(part));
    buf_free(&segment);
    buf_free(&here);
    free(have);
    free(want);
}

/* On both GPUs a kernel of the application spins on the legacy default stream until the other side's write arrives. The
 * write is the first to name its registration: neither it nor its mapping may wait for that stream. */
static void spinning_kernels_are_reached(struct side *side, enum memory memory)
{
    uint64_t words[2];
    struct buf flag, one;
    char mine, theirs;

    buf_make(side, &flag, memory, 64);
    buf_zero(&flag);
    buf_make(side, &one, PAGEABLE, 64);
    *(uint64_t *)(uintptr_t)one.addr = 1;
    struct remote remote = swap_remote(side, &flag);
    mine = spin_start(flag.addr) ? 'y' : 'n';
    side_exchange(side, &mine, &theirs, 1);
    MUST(mine == theirs);
    if (mine == 'y') {
        post(side, IBV_WR_RDMA_WRITE, &one, 0, 8, remote);
        expect_success(side, "write to a spinning kernel");
        spin_wait();
        buf_read(&flag, 0, words, sizeof(words));
        MUST(words[0] == 1 && words[1] == 1); /* 2: the kernel gave up */
    } else if (side->initiator) {
        printf("  (no kernels here: spinning ones were not tried)\n");
    }
    side_barrier(side);
    buf_free(&flag);
    buf_free(&one);
}

/* When a call of the driver fails, the request that needed it fails, and only its queue pair. */
static void a_driver_error_is_a_completion_error(struct side *side)
{
    static const struct {
        const char *call;
        enum memory theirs;
        bool carried; /* succeeds, because the owner copies what cannot be opened */
    } failures[] = {{"cuMemcpyAsync", LEGACY, false},
                    {"cuEventQuery", LEGACY, false},
                    {"cuIpcOpenMemHandle_v2", LEGACY, true},
                    {"cuMemImportFromShareableHandle", VMM, true}};

    for (size_t i = 0; i < sizeof(failures) / sizeof(failures[0]); i++) {
        struct buf buf;
        buf_make(side, &buf, failures[i].theirs, 4096);
        if (side->initiator)
            buf_fill(&buf, 70);
        else
            buf_zero(&buf);
        struct remote remote = swap_remote(side, &buf);
        if (side->initiator) {
            fail_next(failures[i].call, 700);
            post(side, IBV_WR_RDMA_WRITE, &buf, 0, 4096, remote);
            struct ibv_wc wc = side_poll(side);
            printf("  %s fails: completion status %d (%s)\n", failures[i].call, wc.status,
                   ibv_wc_status_str(wc.status));
            MUST((wc.status == IBV_WC_SUCCESS) == failures[i].carried);
        }
        side_barrier(side);
        side_connect(side);
        if (!side->initiator && failures[i].carried)
            MUST(buf_check(&buf, 4096, 70, failures[i].call));
        transfer_row(side, &rows[3], 77);
        buf_free(&buf);
    }
}

static void what_cannot_be_shared_is_refused(struct side *side)
{
    errno = 0;
    MUST(!ibv_reg_dmabuf_mr(side->pd, 0, 4096, 0, -1, IBV_ACCESS_LOCAL_WRITE) &&
         errno == EBADF); /* DMA-BUFs are supported */
    int fd = open("/dev/null", O_RDONLY);
    MUST(!ibv_reg_dmabuf_mr(side->pd, 0, 4096, 0x1000, fd, IBV_ACCESS_LOCAL_WRITE) && errno == EOPNOTSUPP);
    close(fd);
    struct buf buf;
    buf_make(side, &buf, DMABUF, 65536);
    MUST(!ibv_reg_dmabuf_mr(side->pd, 1ull << 40, 65536, buf.addr, buf.dmabuf, IBV_ACCESS_LOCAL_WRITE) &&
         errno == EINVAL); /* longer than the buffer */
    buf_free(&buf);
}

static double bandwidth(struct side *side, enum memory mine, enum memory theirs, size_t message)
{
    enum { WINDOW = 16 };
    size_t total = side->fake ? 16 << 20 : 2048ul << 20, count = total / message, posted = 0, done = 0;
    struct buf buf;

    buf_make(side, &buf, side->initiator ? mine : theirs, message);
    buf_fill(&buf, 5);
    struct remote remote = swap_remote(side, &buf);
    double start = now_s();
    if (side->initiator) {
        post(side, IBV_WR_RDMA_WRITE, &buf, 0, message, remote); /* makes the mappings */
        expect_success(side, "first write");
        for (start = now_s(); done < count; done++) {
            for (; posted < count && posted < done + WINDOW; posted++)
                post(side, IBV_WR_RDMA_WRITE, &buf, 0, message, remote);
            expect_success(side, "bandwidth");
        }
    }
    double gbytes = (double)(count * message) / (now_s() - start) / 1e9;
    side_barrier(side);
    buf_free(&buf);
    if (side->initiator)
        printf("  %-8s to %-8s %8zu bytes: %7.2f GB/s\n", memory_names[mine], memory_names[theirs], message, gbytes);
    return gbytes;
}

static void latency(struct side *side, enum memory mine, enum memory theirs, size_t bytes)
{
    static double us[TIMES_MOST];
    size_t rounds = side->fake ? 50 : TIMES_MOST;
    struct buf buf;
    char what[80];

    buf_make(side, &buf, side->initiator ? mine : theirs, bytes);
    struct remote remote = swap_remote(side, &buf);
    for (size_t i = 0; side->initiator && i <= rounds; i++) {
        double start = now_s();
        post(side, IBV_WR_RDMA_WRITE, &buf, 0, bytes, remote);
        expect_success(side, "latency");
        if (i) /* the first one makes the mappings */
            us[i - 1] = (now_s() - start) * 1e6;
    }
    snprintf(what, sizeof(what), "%s to %s, %zu bytes", memory_names[mine], memory_names[theirs], bytes);
    if (side->initiator)
        times_print(what, us, rounds);
    side_barrier(side);
    buf_free(&buf);
}

/* As NCCL's iflush: a read of one byte of this process's own device memory, over a queue pair to itself. */
static void flush_latency(struct side *side)
{
    static double us[TIMES_MOST];
    size_t rounds = side->fake ? 50 : TIMES_MOST;
    struct side loop;
    struct buf device, host;

    side_loop(side, &loop);
    buf_make(side, &device, LEGACY, 64);
    buf_make(side, &host, PAGEABLE, 64);
    struct remote own = {device.addr, device.mr->rkey};
    for (size_t i = 0; side->initiator && i < rounds; i++) {
        double start = now_s();
        post(&loop, IBV_WR_RDMA_READ, &host, 0, 1, own);
        expect_success(&loop, "flush");
        us[i] = (now_s() - start) * 1e6;
    }
    if (side->initiator)
        times_print("a byte of own memory read, as a flush does", us, rounds);
    side_barrier(side);
    MUST(!ibv_destroy_qp(loop.qp));
    buf_free(&device);
    buf_free(&host);
}

/* Atomics, alone and in batches. */
static void change_words(struct side *side)
{
    atomics(side, LEGACY);
    atomics(side, PRIVATE);
    atomics_of_many_queue_pairs_add_up(side, LEGACY);
    atomics_of_many_queue_pairs_add_up(side, PRIVATE);
    atomics_of_two_queue_pairs_on_one_word_lose_nothing(side, LEGACY);
    atomics_of_two_queue_pairs_on_one_word_lose_nothing(side, PRIVATE);
    adds_to_one_word_each_return_the_value_before_them(side, LEGACY);
    adds_to_one_word_each_return_the_value_before_them(side, PRIVATE);
    words_far_apart_are_changed_like_neighbours(side);
    words_in_between_are_left_alone(side);
    an_atomic_behind_a_write_to_its_word_finds_it(side);
    an_atomic_finds_what_the_word_was_when_it_was_posted(side);
    for (int way = 0; way < 8; way++)
        signals_and_writes_are_seen_in_their_order(side, way & 1, way & 2, way & 4);
    requests_that_meet_keep_their_order(side);
    flags_among_reads_atomics_and_fences_keep_their_order(side);
    a_batch_ends_before_an_atomic_that_is_refused(side);
}

/* Kinds of memory, how other processes reach them, and what a receiver may see. */
static void move_data(struct side *side)
{
    a_new_allocation_is_mapped_anew(side);
    small_neighbours_are_told_apart(side);
    a_part_of_a_segment_is_found(side);
    spinning_kernels_are_reached(side, LEGACY);
    spinning_kernels_are_reached(side, PRIVATE);
    a_busy_owner_copies(side);
    more_queue_pairs_than_slots_are_served(side);
    a_queue_pair_may_go_while_a_copy_is_under_way(side, true);
    a_queue_pair_may_go_while_a_copy_is_under_way(side, false);
    a_deregistered_region_is_refused(side);
    what_cannot_be_shared_is_refused(side);
    a_signal_comes_after_its_data(side);
    an_immediate_comes_after_its_data(side);
    completions_come_in_order(side);
}

/* Tests that need a driver that fails or stops on request, or a process that copies. */
static void disturb(struct side *side)
{
    if (side->fake) {
        no_transfer_waits_for_a_running_kernel(side, LEGACY);
        no_transfer_waits_for_a_running_kernel(side, VMM);
        if (!side->copier) {
            a_burst_is_given_away_at_once(side);
            atomics_behind_each_other_share_their_copies(side);
            a_driver_error_in_a_batch_gives_its_locks_back(side);
        }
        an_error_in_a_burst_flushes_what_is_behind(side);
    }
    if (side->copier)
        kernels_are_reached_while_a_copy_waits_for_them(side);
    if (side->fake && side->copier) {
        copies_go_on_while_the_application_holds_the_drivers_lock(side);
        deregistered_memory_is_closed_soon(side);
    }
}

/* Return the device-to-device bandwidth, GB/s. */
static double figures(struct side *side)
{
    double gbytes;

    latency(side, PAGEABLE, LEGACY, 8);
    latency(side, LEGACY, LEGACY, 8);
    latency(side, PAGEABLE, LEGACY, 4096);
    latency(side, PAGEABLE, PRIVATE, 8);
    flush_latency(side);
    owner_figures(side);
    flight_figures(side);
    batch_figures(side);
    bandwidth(side, LEGACY, LEGACY, 65536);
    gbytes = bandwidth(side, LEGACY, LEGACY, 1 << 20);
    bandwidth(side, VMM, VMM, 1 << 20);
    bandwidth(side, PINNED, LEGACY, 1 << 20);
    bandwidth(side, PAGEABLE, LEGACY, 1 << 20);
    bandwidth(side, LEGACY, PAGEABLE, 1 << 20);
    bandwidth(side, LEGACY, PRIVATE, 1 << 20);
    bandwidth(side, PAGEABLE, PRIVATE, 1 << 20);
    bandwidth(side, PRIVATE, PRIVATE, 1 << 20);
    return gbytes;
}

/* Tests after which the process differs: failed events, two GPUs in use, no copier. */
static void finish(struct side *side)
{
    if (side->fake) {
        a_driver_error_is_a_completion_error(side);
        a_signal_comes_after_its_data(side); /* now with events */
        an_immediate_comes_after_its_data(side);
        completions_come_in_order(side);
    }
    words_on_another_gpu_of_the_process_are_changed(side, LEGACY);
    words_on_another_gpu_of_the_process_are_changed(side, VMM); /* last: the driver refuses something for good */
    memory_of_two_gpus_that_see_only_their_own_is_copied(side);
    apart_figures(side);
    if (side->fake && !side->copier)
        what_the_driver_refuses_is_copied_alone(side);
    if (side->copier)
        a_killed_copier_ends_in_errors_soon(side);
}

static int run_srd(struct side *side)
{
    for (enum memory memory = 0; memory < MEMORY_KINDS; memory++) {
        immediates_come_after_their_own_bytes(side, memory);
        a_refused_write_spares_its_neighbours(side, memory);
        initiators_share_the_receives_of_one_target(side, memory);
    }
    MUST(!ibv_destroy_qp(side->qp) && !ibv_destroy_ah(side->ah) && !ibv_destroy_cq(side->cq));
    MUST(!ibv_dealloc_pd(side->pd) && !ibv_close_device(side->context));
    return 0;
}

static int run(struct side *side, double least)
{
    char mine, theirs;
    double gbytes;

    if (!side_open(side))
        return SKIP;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        if (!side->srd || rows[i].opcode != IBV_WR_SEND || rows[i].bytes <= 8928)
            transfer_row(side, &rows[i], (uint32_t)i + 1);
    if (side->srd)
        return run_srd(side);
    change_words(side);
    move_data(side);
    disturb(side);
    gbytes = figures(side);
    finish(side);
    mine = side->initiator && !side->fake && gbytes < least ? 'n' : 'y';
    side_exchange(side, &mine, &theirs, 1);
    if (mine == 'n')
        fprintf(stderr, "device to device: %.2f GB/s, at least %.2f were asked for\n", gbytes, least);
    ibv_destroy_qp(side->qp);
    ibv_destroy_cq(side->cq);
    ibv_dealloc_pd(side->pd);
    ibv_close_device(side->context);
    return mine == 'n';
}

/* Start the other process. It must be before CUDA, which does not survive a fork. */
static pid_t other_start(struct side *side)
{
    int sockets[2];

    MUST(!socketpair(AF_UNIX, SOCK_STREAM, 0, sockets));
    pid_t child = fork();
    MUST(child >= 0);
    *side = (struct side){.initiator = child != 0, .socket = sockets[child ? 0 : 1]};
    close(sockets[child ? 1 : 0]);
    return child;
}

int main(int argc, char **argv)
{
    double least = argc == 3 && !strcmp(argv[1], "--least") ? atof(argv[2]) : 0;
    struct side side, victim_side;
    int status;
    if (argc == 2 && !strcmp(argv[1], "--no-process-vm") && !take_process_vm_away())
        return SKIP;
    pid_t child = other_start(&side);
    pid_t victim = child && !srd_wanted() ? other_start(&victim_side) : -1;

    if (!victim) {
        if (!side_open(&victim_side))
            return SKIP;
        a_stopped_owner_ends_in_retry_exceeded(&victim_side, 0);
        a_killed_owner_ends_in_retry_exceeded(&victim_side);
        return 1;
    }
    int r = run(&side, least);
    if (!child)
        return r;
    if (victim < 0) { /* with SRD no process is killed */
        MUST(waitpid(child, &status, 0) == child && WIFEXITED(status));
        return r ? r : WEXITSTATUS(status);
    }
    if (!r && side_open(&victim_side)) {
        a_stopped_owner_ends_in_retry_exceeded(&victim_side, victim);
        a_killed_owner_ends_in_retry_exceeded(&victim_side);
    }
    close(side.socket);
    close(victim_side.socket);
    MUST(waitpid(child, &status, 0) == child);
    MUST(WIFEXITED(status));
    r = r ? r : WEXITSTATUS(status);
    MUST(waitpid(victim, &status, 0) == victim);
    MUST(r || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
    return r;
}
