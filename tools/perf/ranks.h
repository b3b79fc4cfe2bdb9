/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as forked processes that meet in shared memory: a launcher for one machine, bounded in everything. */
#ifndef TOOLS_PERF_RANKS_H
#define TOOLS_PERF_RANKS_H

#include <stddef.h>
#include <stdint.h>

enum { RANKS_WORDS = 64, RANKS_BLOCK_BYTES = 1024 };

struct ranks;

/* Words that every rank may read and write (with __atomic builtins): counters of a program, by its own meaning. */
uint64_t *ranks_words(struct ranks *ranks);

/* A prs_allgather_fn: user is the struct ranks. Fails with -ECONNRESET when a rank died, -ETIMEDOUT after the limit. */
int ranks_allgather(void *user, const void *mine, void *all, size_t bytes);
int ranks_barrier(struct ranks *ranks);
uint32_t ranks_rank(const struct ranks *ranks);
/* Wait until a word is at least value. Return as ranks_allgather(). idle (may be NULL) is called between looks; when it
 * returns negative the wait ends with that, and when positive, it had something to do, the next look comes at once. */
int ranks_wait_word(struct ranks *ranks, uint64_t *word, uint64_t value, int (*idle)(void *), void *user);

/*
 * Fork size ranks, spread over `nodes` emulated nodes (the environment's RANK, WORLD_SIZE, SOFTNIC_NODE, PERSEUS_NODE
 * say so to each), and run body in each. Return 0 when every body returned 0 within timeout_s, 77 when the first that
 * did not returned 77, else 1; who failed, and how, is on stderr.
 */
int ranks_run(uint32_t size, uint32_t nodes, uint32_t timeout_s, int (*body)(struct ranks *ranks, void *user),
              void *user);

#endif
