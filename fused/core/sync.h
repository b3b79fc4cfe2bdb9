/* SPDX-License-Identifier: Apache-2.0 */
/* The state for waiting that every plan's kernels get: the epoch, the time limit of waits, the fault report. sync.cuh
 * has the device code. */
#ifndef PERSEUS_FUSED_SYNC_H
#define PERSEUS_FUSED_SYNC_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

#include "fused/core/place.h"

struct prs_fused;
struct prs_local;

/* The text of a family's flag, "partial sums" for example; NULL: the flag is not one of this family. */
typedef const char *prs_awaited_fn(uint32_t what);

/* What a flag stands for. The flags of a family have numbers below 64, which no other family uses (a test compares),
 * and prs_plan_steps.awaited() names them. */
enum prs_awaited {
    PRS_AWAIT_PEERS = 4,
    PRS_AWAIT_NETWORK = 5,
    PRS_AWAIT_SWITCH = 6, /* plan_switch.h */
    PRS_AWAIT_CTAS = 19,  /* this rank's own CTAs */
    /* Faults other than a wait that timed out: */
    PRS_FAULT_NEIGHBOUR = 66, /* a rank of this node gave up: what it sent may be wrong */
    PRS_FAULT_ROWS = 67,    /* index: the most rows; want: what rows must be a multiple of; seen: the device's number */
    PRS_FAULT_PATH = 68,    /* MoE: rank `from` runs several kernels, and this rank runs one */
    PRS_FAULT_BOUNDS = 69,  /* packed sequences; index: that of a bound; want: the bound before it; seen: the bound */
    PRS_FAULT_STRIPES = 70, /* stripes that are assigned to ranks; index: a rank; want, seen: how many it has */
    /* Added to what a kernel waited for when it was told to give up: */
    PRS_FAULT_ABORTED = 128
};

/* Added to an alarm: ranks must give up at once, not at their time limits. */
enum { PRS_ALARM_ABORT = 1u << 30 };

/* Symmetric memory of a context, on each rank of a node. */
struct prs_alarm {
    uint32_t raised;   /* 0, or rank + 1 of a neighbour that gave up, with PRS_ALARM_ABORT when it was told to */
    uint32_t launches; /* launches of this rank that have written a word, over all plans of the context */
    /* The words of say_launch(), by the parity of the launch and the writer's number in the node. A rank writes a word
     * again two launches later, when the others have finished this one. */
    uint64_t said[2][PRS_MAX_LOCAL_RANKS];
    uint32_t absent; /* copy of prs_fault.absent for this rank's kernels; bits are only added */
};

/* The size of a launch of attention in its word (say_launch()): 12 bits made from its scale, which are not 0; 12 of the
 * number of sequences; 24 of rows. */
uint64_t prs_said_attention(float scale, uint32_t batch, uint32_t rows);

/* Two ranks of a node said different words for one launch (say_launch()). */
struct prs_difference {
    uint32_t state; /* like that of a fault */
    uint32_t from;  /* the other rank */
    uint64_t mine, other;
};

/* The first fault of any launch on this device. Mapped host memory, written once by the device (state 0 -> 1 -> 2). */
struct prs_fault {
    uint32_t state; /* 0 none, 1 being written, 2 valid */
    uint32_t what;  /* enum prs_awaited */
    uint32_t from;  /* rank that should have raised the flag, or whose input is wrong */
    uint32_t index; /* index of the flag */
    uint32_t want, seen;
    uint64_t waited_ns;
    /* 1: kernels must give up, because the caller said so or the network has failed. Never reset to 0 */
    uint32_t abort;
    uint32_t asked; /* 1: the caller asked for it. The host writes this word and the one before */
    /* May be found after the launch was told to give up; it is more precise. */
    struct prs_difference difference;
    /* Bit r: launches continue without rank r, which can write nothing any more (doc/decisions/0020). Written by the
     * host; bits are only added. */
    uint32_t absent;
};
static_assert(sizeof(struct prs_fault) == 72, "host and device share it while kernels run");

/* Kinds of work that CTAs may claim, each from a counter: the family numbers them. */
enum { PRS_MOST_CLAIMS = 3 };

/* Device words of one plan on one rank. */
struct prs_plan_words {
    uint32_t epoch;    /* launches finished; only grows, so that a captured graph can be replayed */
    uint32_t meetings; /* unfused path: number of barriers of the node's ranks, over all launches */
    /* CTAs that have left the launch, in the high half; the low one: those of them that saw the alarm. Zero between
     * launches. */
    uint64_t left;
    uint32_t aborted; /* a wait gave up: the rest of the launch, and every later one, waits for nothing */
    uint32_t copying; /* epoch whose blocks the copy engines move; they copy this word as their flag */
    uint32_t claimed[PRS_MOST_CLAIMS]; /* how much of each kind of work is taken; zero between launches */
    /* Used after a wait that timed out. The launch continues, so that all its CTAs finish. But the data that it signals
     * from then on may be wrong, so this rank raises its neighbours' alarm. */
    uint32_t rank, neighbours;
    struct prs_alarm *alarm[PRS_MAX_LOCAL_RANKS - 1]; /* that of each neighbour */
    uint64_t said;                                    /* this launch's word (say_launch()); 0: nothing is compared */
    uint64_t *network; /* set to PRS_DEVICE_ABORTED: the command ring takes no more commands; NULL on a single node */
};

struct prs_sync {
    struct prs_plan_words *words;
    struct prs_fault *fault; /* the context's, as the device sees it */
    struct prs_alarm *alarm; /* this rank's; NULL: no neighbours */
    uint64_t limit_ns;
};

#ifdef __cplusplus
extern "C" {
#endif

/* Allocates the words of a plan in *memory, which the plan frees. 0, -ENOMEM or -EIO. */
int prs_sync_open(struct prs_fused *ctx, struct prs_sync *sync, struct prs_local *memory);

/* From now on error texts name the flags of this family. 0 or -ENOSPC. */
int prs_sync_name(struct prs_fused *ctx, prs_awaited_fn *awaited);

/* Whether a kernel gave up, the network failed, or the caller aborted. False if the caller's data is wrong: other ranks
 * then continue. */
bool prs_sync_lost(const struct prs_fused *ctx);

/* 0 when a launch may be enqueued; otherwise the error of a fault in an earlier launch on this context, which is
 * logged. */
int prs_sync_check(struct prs_fused *ctx);

/* 0, or -ECANCELED for a launch that needs all ranks, after prs_fused_leave_out(). */
int prs_sync_check_absent(const struct prs_fused *ctx, const char *name);

#ifdef __cplusplus
}
#endif

#endif
