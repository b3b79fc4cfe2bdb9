/* SPDX-License-Identifier: Apache-2.0 */
/* A word of device memory that one peer of this process alone may write. */
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
