/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/agent_slot.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { WAIT_NAP_US = 20 };

void sn_futex_wait(uint32_t *word, uint32_t value)
{
    struct timespec limit = {1, 0};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

void sn_futex_wake(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void sn_agent_ring(struct sn_agent_shm *shm)
{
    /* [agent-bell] first the bell, then asleep; pairs with agent_rest. */
    __atomic_fetch_add(&shm->bell, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&shm->asleep, __ATOMIC_SEQ_CST))
        sn_futex_wake(&shm->bell);
}

int sn_agent_wait(const struct sn_agent_shm *shm, uint64_t give_up)
{
    for (unsigned i = 0; i < SN_AGENT_SLOTS; i++) {
        const uint64_t *at = &shm->words[i];
        uint64_t first = __atomic_load_n(at, __ATOMIC_SEQ_CST), word = first;

        while ((sn_agent_state(word) == SN_AGENT_RUNNING || sn_agent_state(word) == SN_AGENT_LEFT) &&
               (word | SN_AGENT_STATE_MASK) == (first | SN_AGENT_STATE_MASK)) {
            if (sn_now_ns() > give_up)
                return -ETIMEDOUT;
            usleep(WAIT_NAP_US);
            word = __atomic_load_n(at, __ATOMIC_SEQ_CST);
        }
    }
    return 0;
}
