/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as processes: fork them, collect their status, and after a failure end those that do not end themselves. */
#ifndef TOOLS_COMMON_RANK_PROCESSES_H
#define TOOLS_COMMON_RANK_PROCESSES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { RANK_PROCESSES_MAX = 256, RANK_SKIPPED = 77 /* exit status of a rank that cannot run, and has said why */ };

struct rank_processes {
    const char *program; /* begins each line on stderr */
    uint32_t count;
    int (*run)(uint32_t rank, void *user); /* in the rank's process; returns its exit status */
    void (*give_up)(void *user);           /* a rank failed: ask the others to end; may be NULL */
    uint64_t (*progress)(void *user);      /* grows while the ranks are alive; NULL: limit_s counts from the start */
    void *user;
    uint32_t limit_s; /* ranks that make no progress for so long are killed; 0: never */
    uint32_t grace_s; /* the same limit, once a rank has failed */
    uint32_t may_die; /* 1 + the rank that may die of a signal; 0: none */
};

/* Return 0 when every rank exited with 0, RANK_SKIPPED when the first other status was that, else 1. What failed is on
 * stderr. Ranks die with the thread that calls this. */
int rank_processes_run(const struct rank_processes *processes);

/* Set a variable of the environment to a number. */
void rank_setenv(const char *name, uint32_t value);

#ifdef __cplusplus
}
#endif
#endif
