/* SPDX-License-Identifier: Apache-2.0 */
/* A job for an agent, from the initiator's side: take a slot, fill it in, post it, and give it back when the agent has
 * answered. */
#ifndef SOFTNIC_AGENT_JOB_H
#define SOFTNIC_AGENT_JOB_H

#include "tools/softnic/memory/span.h"

/* Names an agent. Its epoch and process tell whether it has been replaced. */
struct sn_agent_ref {
    struct sn_agent_shm *shm;
    uint32_t epoch;
    uint32_t proc, proc_generation; /* the agent's process */
    bool copier;                    /* the copier's agents take jobs in the order in which they were posted */
};

struct sn_job {
    enum sn_agent_op op;
    uint32_t peer;              /* like in struct sn_agent_slot */
    uint64_t compare_add, swap; /* operands of an atomic */
    uint64_t *found;
    uint64_t patience_ns; /* limit for an agent that does not move; 0: 20 s, or 4 s in a stopped process */
    uint16_t queue;       /* SN_AGENT_ENQUEUE: see struct sn_agent_slot */
    bool queue_is_empty;
    /* private to agent_job.c */
    uint64_t word; /* the slot's word without the state; 0: no slot yet */
    uint32_t slot;
    uint32_t beat;
    uint64_t look_at, give_up;
    bool lost; /* set with -ESRCH: the agent may still use the memory that the job names */
};

/* True when no agent will answer. */
bool sn_job_unanswerable(const struct sn_agent_ref *to, struct sn_world *world);

/* Post a copy as a job. Return 0, or SN_COPY_BUSY: all slots are in use. */
int sn_job_post(const struct sn_agent_ref *to, struct sn_job *job, const struct sn_copy *copy);

/* Return 0 (*result is the agent's), SN_COPY_BUSY, or -ESRCH: the agent is gone, or does not move (logged). May be
 * called before the job is posted, to learn whether waiting for a slot makes sense. */
int sn_job_poll(const struct sn_agent_ref *to, struct sn_job *job, struct sn_world *world, int *result);

#endif
