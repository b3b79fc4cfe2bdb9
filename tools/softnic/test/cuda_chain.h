/* SPDX-License-Identifier: Apache-2.0 */
/* Requests posted with one call, mostly atomics, and the words that they change. */
#ifndef TEST_SOFTNIC_CUDA_CHAIN_H
#define TEST_SOFTNIC_CUDA_CHAIN_H

#include "tools/softnic/test/cuda_side.h"

enum { MOST = 40, WORDS_BYTES = 256 << 10, PIECE = 4096 };

/* A chain of requests, and the buffer of their results. */
struct chain {
    struct side *side;
    struct buf results; /* a word for each request, in host memory */
    int count;
    struct ibv_sge sge[MOST];
    struct ibv_send_wr wr[MOST];
};

void chain_open(struct side *side, struct chain *chain);
void chain_close(struct chain *chain);

/* Append a request: an atomic on the word of that index, or a write to the same offset. */
void add(struct chain *chain, struct remote words, size_t word, uint64_t value);
void swap(struct chain *chain, struct remote words, size_t word, uint64_t compare, uint64_t value);
void write_piece(struct chain *chain, const struct buf *from, size_t offset, uint32_t bytes, struct remote to);
/* Append a write of one word from host memory. */
void flag(struct chain *chain, struct remote words, size_t word, uint64_t value);

void chain_post(struct chain *chain);
/* Expect that all succeed, in order; then empty the chain. */
void chain_expect(struct chain *chain);
/* Post the chain, then chain_expect(). */
void chain_run(struct chain *chain);
/* The old value that the i-th request fetched. */
uint64_t result(const struct chain *chain, int i);

uint64_t word_read(const struct buf *words, size_t word);

/* Allocate zeroed words on each side, and connect a queue pair to them: from the initiator to the other side or, with
 * `own`, from each side to itself. */
struct remote words_open(struct side *side, struct side *by, struct buf *words, enum memory memory, bool own);
void words_close(struct side *side, struct side *by, struct buf *words);

#endif
