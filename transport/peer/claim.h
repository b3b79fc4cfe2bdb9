/* SPDX-License-Identifier: Apache-2.0 */
/* A claim on a word of device memory: while one peer holds it, no other peer of this process may write the word. */
#ifndef TRANSPORT_CLAIM_H
#define TRANSPORT_CLAIM_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct prs_claim {
    bool held;
    uint64_t word;
    struct prs_claim *next; /* list of all, under its lock */
    pid_t owner;            /* process: a forked child inherits its parent's claims in the list */
};

/* Try to claim the word. */
bool prs_claim_take(struct prs_claim *claim, uint64_t word);
/* Give it back, if it is held. */
void prs_claim_drop(struct prs_claim *claim);

#endif
