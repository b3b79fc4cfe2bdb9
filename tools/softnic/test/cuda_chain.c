/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/test/cuda_chain.h"

#include <stdio.h>
#include <string.h>

void chain_open(struct side *side, struct chain *chain)
{
    memset(chain, 0, sizeof(*chain));
    chain->side = side;
    buf_make(side, &chain->results, PAGEABLE, MOST * 8);
}

void chain_close(struct chain *chain)
{
    buf_free(&chain->results);
}

static struct ibv_send_wr *chain_next(struct chain *chain, enum ibv_wr_opcode opcode)
{
    int i = chain->count++;

    MUST(i < MOST);
    chain->sge[i] = (struct ibv_sge){chain->results.addr + 8 * (size_t)i, 8, chain->results.mr->lkey};
    chain->wr[i] = (struct ibv_send_wr){.wr_id = (uint64_t)i,
                                        .sg_list = &chain->sge[i],
                                        .num_sge = 1,
                                        .opcode = opcode,
                                        .send_flags = IBV_SEND_SIGNALED};
    if (i)
        chain->wr[i - 1].next = &chain->wr[i];
    return &chain->wr[i];
}

void add(struct chain *chain, struct remote words, size_t word, uint64_t value)
{
    struct ibv_send_wr *wr = chain_next(chain, IBV_WR_ATOMIC_FETCH_AND_ADD);

    wr->wr.atomic.remote_addr = words.addr + 8 * word;
    wr->wr.atomic.rkey = words.rkey;
    wr->wr.atomic.compare_add = value;
}

void swap(struct chain *chain, struct remote words, size_t word, uint64_t compare, uint64_t value)
{
    add(chain, words, word, compare);
    chain->wr[chain->count - 1].opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
    chain->wr[chain->count - 1].wr.atomic.swap = value;
}

void write_piece(struct chain *chain, const struct buf *from, size_t offset, uint32_t bytes, struct remote to)
{
    struct ibv_send_wr *wr = chain_next(chain, IBV_WR_RDMA_WRITE);

    *wr->sg_list = (struct ibv_sge){from->addr + offset, bytes, from->mr->lkey};
    wr->wr.rdma.remote_addr = to.addr + offset;
    wr->wr.rdma.rkey = to.rkey;
}

void flag(struct chain *chain, struct remote words, size_t word, uint64_t value)
{
    ((uint64_t *)(uintptr_t)chain->results.addr)[chain->count] = value;
    struct ibv_send_wr *wr = chain_next(chain, IBV_WR_RDMA_WRITE);

    wr->wr.rdma.remote_addr = words.addr + 8 * word;
    wr->wr.rdma.rkey = words.rkey;
}

void chain_post(struct chain *chain)
{
    struct ibv_send_wr *bad;

    MUST(!ibv_post_send(chain->side->qp, chain->wr, &bad));
}

void chain_expect(struct chain *chain)
{
    for (int i = 0; i < chain->count; i++) {
        struct ibv_wc wc = side_poll(chain->side);

        if (wc.status != IBV_WC_SUCCESS || wc.wr_id != (uint64_t)i)
            fprintf(stderr, "request %d of %d: wr_id %d, %s\n", i, chain->count, (int)wc.wr_id,
                    ibv_wc_status_str(wc.status));
        MUST(wc.status == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)i);
    }
    chain->count = 0;
}

void chain_run(struct chain *chain)
{
    chain_post(chain);
    chain_expect(chain);
}

uint64_t result(const struct chain *chain, int i)
{
    return ((const uint64_t *)(uintptr_t)chain->results.addr)[i];
}

uint64_t word_read(const struct buf *words, size_t word)
{
    uint64_t value;

    buf_read(words, 8 * word, &value, 8);
    return value;
}

struct remote words_open(struct side *side, struct side *by, struct buf *words, enum memory memory, bool own)
{
    buf_make(side, words, memory, WORDS_BYTES);
    buf_zero(words);
    struct remote theirs = swap_remote(side, words);
    *by = *side;
    if (own)
        side_loop(side, by);
    return own ? (struct remote){words->addr, words->mr->rkey} : theirs;
}

void words_close(struct side *side, struct side *by, struct buf *words)
{
    side_barrier(side);
    if (by->qp != side->qp)
        MUST(!ibv_destroy_qp(by->qp));
    buf_free(words);
}
