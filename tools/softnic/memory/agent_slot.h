/* SPDX-License-Identifier: Apache-2.0 */
/* The slots in which an agent gets its jobs: shared memory, written by initiators (agent_job.h) and by the agent
 * (agent.h). A word for each slot says whose turn it is:
 *
 *   FREE -> TAKEN (initiator fills in) -> POSTED -> RUNNING (agent) -> DONE (initiator reads the result) -> FREE
 *
 * The word also names the initiator and its job, so a change that comes too late fails. RUNNING -> LEFT: the initiator
 * no longer waits, and the agent frees the slot. */
#ifndef SOFTNIC_AGENT_SLOT_H
#define SOFTNIC_AGENT_SLOT_H

#include "tools/softnic/world/world.h"

enum sn_agent_state {
    SN_AGENT_FREE,
    SN_AGENT_TAKEN,
    SN_AGENT_POSTED,
    SN_AGENT_RUNNING,
    SN_AGENT_DONE,
    SN_AGENT_LEFT,
};

enum { SN_AGENT_STATE_MASK = 0xff };

static inline uint32_t sn_agent_state(uint64_t word)
{
    return word & SN_AGENT_STATE_MASK;
}

/* Move from one state of the same job to another. False: it was not in that state. */
static inline bool sn_agent_turn(uint64_t *word, uint64_t id, uint32_t from, uint32_t to)
{
    uint64_t expected = id | from;

    /* [agent-turn] release and acquire; pairs with itself on the other side: the job is complete once the word is
     * POSTED, the result once it is DONE. */
    return __atomic_compare_exchange_n(word, &expected, to == SN_AGENT_FREE ? SN_AGENT_FREE : id | to, false,
                                       __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);
}

/* Wait until every copy that began before the call has ended. Return 0 or -ETIMEDOUT. */
int sn_agent_wait(const struct sn_agent_shm *shm, uint64_t give_up);

/* Tell the agent that a job was posted. */
void sn_agent_ring(struct sn_agent_shm *shm);

/* Sleep while *word is value, for at most a second; and wake all sleepers. Both work across processes. */
void sn_futex_wait(uint32_t *word, uint32_t value);
void sn_futex_wake(uint32_t *word);

#endif
