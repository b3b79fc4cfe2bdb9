/* SPDX-License-Identifier: Apache-2.0 */
/* Writes between processes that share a system call: their order, and what their immediate data implies. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <string.h>
#include <sys/mman.h>

#include "tools/softnic/test/process_vm.h"
#include "tools/softnic/test/support.h"

enum { PIECES = 20, PIECE_BYTES = 96, PIECE_WORDS = PIECE_BYTES / 8, ROUNDS = 3000, RECEIVES = 12 };
static_assert(RECEIVES < PIECES, "some must wait for a receive");

/* A chain of writes to adjacent pieces of the peer's buffer. */
static void post_pieces(struct end *end, const struct address *peer, enum ibv_wr_opcode opcode)
{
    struct ibv_send_wr wr[PIECES], *bad;
    struct ibv_sge sge[PIECES];

    for (uint32_t i = 0; i < PIECES; i++) {
        sge[i] = (struct ibv_sge){(uintptr_t)end->buf + i * PIECE_BYTES, PIECE_BYTES, end->mr->lkey};
        wr[i] = (struct ibv_send_wr){.wr_id = i,
                                     .next = i + 1 < PIECES ? &wr[i + 1] : NULL,
                                     .sg_list = &sge[i],
                                     .num_sge = 1,
                                     .opcode = opcode,
                                     .imm_data = htonl(i),
                                     .send_flags = i + 1 < PIECES ? 0 : IBV_SEND_SIGNALED};
        wr[i].wr.rdma.remote_addr = peer->addr + i * PIECE_BYTES;
        wr[i].wr.rdma.rkey = peer->rkey;
    }
    cr_assert_eq(ibv_post_send(end->qp, wr, &bad), 0);
}

static uint64_t word_at(const struct end *end, uint32_t index)
{
    return __atomic_load_n((uint64_t *)(void *)end->buf + index, __ATOMIC_ACQUIRE);
}

/* Look from the last piece to the first: when a piece is there, all before it must be there. */
static void watch_last_words(struct end *end, const struct address *peer, int fd)
{
    (void)peer;
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        uint64_t give_up = now_ns() + WAIT_S * 1000000000ull;

        for (uint32_t piece = 0; piece < PIECES; piece++) {
            while (word_at(end, (piece + 1) * PIECE_WORDS - 1) != round)
                require(now_ns() < give_up, "round %lu: piece %u does not come", round, piece);
            for (uint32_t i = 0; i < (piece + 1) * PIECE_WORDS; i++)
                require(word_at(end, i) == round, "round %lu: the last word of piece %u is there, word %u is not",
                        round, piece, i);
        }
        tell(fd, "d", 1);
    }
}

static void write_pieces(void)
{
    struct couple c = couple_open(watch_last_words);
    char byte;

    for (uint64_t round = 1; round <= ROUNDS; round++) {
        for (uint32_t i = 0; i < PIECES * PIECE_WORDS; i++)
            ((uint64_t *)(void *)c.end.buf)[i] = round;
        post_pieces(&c.end, &c.peer, IBV_WR_RDMA_WRITE);
        cr_assert_eq(wait_wc(c.end.cq, "chain").status, IBV_WC_SUCCESS);
        hear(c.fd, &byte, 1);
    }
    reap(c.pid);
    end_close(&c.end);
}

Test(copy, the_last_word_of_a_write_comes_after_all_before_it)
{
    write_pieces();
}

static void need_a_filter(void)
{
    if (!take_process_vm_away())
        cr_skip_test("no filter of system calls");
}

Test(copy, it_goes_on_without_the_calls_for_memory_of_others)
{
    need_a_filter();
    write_pieces();
}

static void leave_a_hole(struct end *end, const struct address *peer, int fd)
{
    char byte;

    (void)peer;
    require(!munmap(end->buf, END_BYTES), "munmap");
    tell(fd, "h", 1);
    hear(fd, &byte, 1);
    require(mmap(end->buf, END_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
                end->buf,
            "mmap");
}

static void write_to_a_hole(void)
{
    struct couple c = couple_open(leave_a_hole);
    char byte;

    hear(c.fd, &byte, 1);
    cr_assert_eq(post(&c.end, IBV_WR_RDMA_WRITE, 0, 8, &c.peer, 0, IBV_SEND_SIGNALED, 1), 0);
    cr_assert_eq(wait_wc(c.end.cq, "write").status, IBV_WC_REM_OP_ERR);
    tell(c.fd, "e", 1);
    reap(c.pid);
    end_close(&c.end);
}

Test(copy, what_is_unmapped_cannot_be_written)
{
    write_to_a_hole();
}

Test(copy, what_is_unmapped_cannot_be_written_without_these_calls)
{
    need_a_filter();
    write_to_a_hole();
}

static void take_with_few_receives(struct end *end, const struct address *peer, int fd)
{
    (void)peer;
    for (uint32_t i = 0; i < RECEIVES; i++)
        require(post_recv(end, 0, 0, i) == 0, "receive %u", i);
    tell(fd, "r", 1);
    for (uint32_t i = 0; i < PIECES; i++) {
        struct ibv_wc wc = wait_wc(end->cq, "immediate");

        require(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.wr_id == i &&
                    ntohl(wc.imm_data) == i && wc.byte_len == PIECE_BYTES,
                "arrival %u: status %d, receive %lu, immediate %u, %u bytes", i, wc.status, wc.wr_id,
                ntohl(wc.imm_data), wc.byte_len);
        require(word_at(end, (i + 1) * PIECE_WORDS - 1) == 7, "arrival %u is told before its data", i);
        if (i + RECEIVES < PIECES)
            require(post_recv(end, 0, 0, i + RECEIVES) == 0, "receive %u", i + RECEIVES);
    }
}

Test(copy, writes_with_immediate_take_receives_in_order_and_wait_for_more)
{
    struct couple c = couple_open(take_with_few_receives);
    char byte;

    hear(c.fd, &byte, 1);
    for (uint32_t i = 0; i < PIECES * PIECE_WORDS; i++)
        ((uint64_t *)(void *)c.end.buf)[i] = 7;
    post_pieces(&c.end, &c.peer, IBV_WR_RDMA_WRITE_WITH_IMM);
    cr_assert_eq(wait_wc(c.end.cq, "chain").status, IBV_WC_SUCCESS);
    reap(c.pid);
    end_close(&c.end);
}
