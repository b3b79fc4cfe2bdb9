/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as processes of one machine, which exchange data and pass barriers in shared memory. Every wait has a limit. */
#ifndef TOOLS_COMMON_RANKS_H
#define TOOLS_COMMON_RANKS_H

#include <stddef.h>
#include <stdint.h>

enum { RANKS_WORDS = 64, RANKS_BLOCK_BYTES = 1024 };

struct ranks;

/* Words that every rank may read and write (with __atomic builtins); zero at first, and free for the program to use. */
uint64_t *ranks_words(struct ranks *ranks);

/* A prs_allgather_fn: user is the struct ranks. Fails with -ECONNRESET when a rank failed, -ETIMEDOUT after the
 * limit. */
int ranks_allgather(void *user, const void *mine, void *all, size_t bytes);
int ranks_barrier(struct ranks *ranks);
uint32_t ranks_rank(const struct ranks *ranks);
/* Wait until a word is at least value. Return as ranks_allgather(). idle (may be NULL) is called between looks:
 * negative ends the wait and is returned; positive says that it had work, and the word is read again at once. */
int ranks_wait_word(struct ranks *ranks, uint64_t *word, uint64_t value, int (*idle)(void *), void *user);

/* Fork size ranks, spread over `nodes` emulated nodes, and run body in each. RANK, WORLD_SIZE and, with several nodes,
 * SOFTNIC_NODE and PERSEUS_NODE are set in its environment. Return 0 when every body returned 0 within timeout_s, 77
 * when the first other result was 77, else 1; which rank failed, and how, is on stderr. */
int ranks_run(uint32_t size, uint32_t nodes, uint32_t timeout_s, int (*body)(struct ranks *ranks, void *user),
              void *user);

#endif
