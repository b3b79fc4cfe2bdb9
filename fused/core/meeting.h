/* SPDX-License-Identifier: Apache-2.0 */
/* The all-gather of every collective call. */
#ifndef PERSEUS_FUSED_MEETING_H
#define PERSEUS_FUSED_MEETING_H

#include <stdint.h>

struct prs_fused;

/* What one rank knows and others may not know. When ranks decide differently because of it, they decide again with the
 * same hint. */
struct prs_hint {
    uint32_t flags;      /* all ranks take the flags of any rank */
    uint32_t first[176]; /* all ranks take rank 0's values */
    uint64_t least;      /* all ranks take the smallest value */
};

enum {
    PRS_CALL_NEEDS = 8,
    PRS_CALL_TERMS = 32,
    PRS_CALL_KIND = 48,
    PRS_MOST_HOLDINGS = 4096 /* plans and allocations of a context */
};

struct prs_call {
    char kind[PRS_CALL_KIND]; /* the text for what the rank does: "opens MoE" */
    uint32_t terms;
    int32_t error; /* this rank failed: all ranks fail together */
    struct prs_hint hint;
    uint64_t term[PRS_CALL_TERMS]; /* values that must be the same on all ranks */
    uint64_t need[PRS_CALL_NEEDS]; /* bytes of symmetric memory; all ranks take the largest value */
    uint8_t closed[PRS_MOST_HOLDINGS / 8];
};

/* Adds a term. Its name comes from the table that prs_meet() gets, in the same order. */
static inline void prs_call_term(struct prs_call *c, uint64_t value)
{
    if (c->terms < PRS_CALL_TERMS)
        c->term[c->terms] = value;
    c->terms++;
}

/* Positive result of prs_meet(): decide again, with the hint that *c now has. */
enum { PRS_DECIDE_AGAIN = 1 };

/* Collective. names: the names of the terms. On success *c has the values that all ranks use, and memory that all ranks
 * have closed is free. -errno: a rank failed or differs; the text names it. */
int prs_meet(struct prs_fused *ctx, struct prs_call *c, const char *const *names);

#endif
