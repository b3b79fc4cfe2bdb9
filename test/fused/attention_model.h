/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention's protocol on threads: the schedule, counters and credits of fused/attention/schedule.h, with one word
 * in place of each message, and of each part of a task. Data are plain memory, flags are atomics with the kernel's
 * memory orders, so that ThreadSanitizer finds a wait that is missing or too weak. Each CTA is a thread that reads what
 * its tasks load and a thread that sends; ranks run free, with random delays, through many epochs that begin shortly
 * before the epoch wraps. Between nodes a rank has a NIC (nic.h). The backward pass has its own tasks and walks.
 * With copy engines one thread of a rank sends everything, because all copies are on one stream. Launches may have
 * fewer sequences than the plan. */
#ifndef PERSEUS_TEST_FUSED_ATTENTION_MODEL_H
#define PERSEUS_TEST_FUSED_ATTENTION_MODEL_H

#include "fused/attention/backward/schedule.h"
#include "fused/attention/deal.h"
#include "test/fused/nic.h"

enum { MAX_WORLD = 4, MAX_BATCH = 4, CTAS = 3, ROLES = 2 /* threads of a CTA */, IN_FLIGHT = 2 };

enum { EPOCHS = MODEL_LAUNCHES };

struct attention_rank {
    /* Of this launch, one of those below. */
    struct prs_attention_schedule s;
    struct prs_attention_deal deal;
    struct attention_launch {
        struct prs_attention_schedule s;
        struct prs_attention_deal deal;
    } of[MAX_BATCH];                 /* [sequences - 1] */
    uint64_t pairs, groups;          /* of all launches that have ended */
    struct prs_backward_shape shape; /* backward */
    uint32_t *left;                  /* plain: what each part leaves */
    uint32_t *parts_done;            /* atomic */
    uint32_t *staging;               /* plain: [stage][message of the segment] */
    /* atomic; arrivals: two banks; finished: messages that were read, then read or forwarded */
    uint32_t *arrivals, *credits, *finished;
    uint32_t arrival_words;    /* of a bank */
    uint32_t pieces, messages; /* atomic: claimed in this launch */
    uint32_t before;           /* plain: epoch of the previous launch, */
    uint32_t groups_before;    /* and how many groups it had */
    uint32_t *signals;         /* atomic; between nodes */
    uint32_t epoch, exits;     /* atomic; exits: threads */
    uint32_t ended;            /* atomic: CTAs, over all launches */
    struct nic nic;
};

struct attention_model {
    struct attention_rank ranks[MAX_WORLD];
    struct watch watch;
    bool copied;   /* by copy engines */
    bool backward; /* a backward pass, in which each head has keys of its own */
    bool varies;   /* launches have 1 ... slice->batch sequences, in random order; else as many as the slice */
    /* How many CTAs of a rank run at a time. A CTA of a launch that is not among the first ones starts when another one
     * has left. 0: ranks differ. */
    uint32_t resident;
};

/* Runs all epochs; unless lost_after is 0, the ranks of the last node stop after that many. The model must be zeroed
 * except copied, backward, varies and resident. Errors are in the watch. */
void attention_model_run(struct attention_model *model, const struct prs_attention_schedule *sizes, uint32_t world,
                         const struct prs_attention_slice *slice, uint32_t lost_after);

/* A slice crosses once to each node that reads it, and only the part that is read. */
void attention_model_check_rank(const struct attention_model *model, uint32_t rank);

void attention_model_close(struct attention_model *model, uint32_t world);

#endif
