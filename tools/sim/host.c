/* SPDX-License-Identifier: Apache-2.0 */
/* What the transport needs of its host: clock, pages, raising by the CPU. The transport's sources are compiled with
 * host.h included first. */
#include "tools/sim/host.h"

#include <errno.h>

#include "tools/sim/sim.h"
#include "transport/peer/peer.h"
#include "transport/peer/raise.h"
#include "transport/peer/watch.h"

static uint64_t now_ns;

/* ---- clock ---- */

void sim_clock_set(uint64_t ps)
{
    now_ns = ps / SIM_PS_PER_NS;
}

int sim_clock_gettime(clockid_t clock, struct timespec *out)
{
    (void)clock;
    out->tv_sec = (time_t)(now_ns / 1000000000u);
    out->tv_nsec = (long)(now_ns % 1000000000u);
    return 0;
}

/* ---- pages ---- */

void *sim_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    void *memory = flags & MAP_PRIVATE ? sim_malloc(bytes) : sim_calloc(1, bytes);

    (void)address, (void)protection, (void)fd, (void)offset;
    if (memory)
        return memory;
    errno = ENOMEM;
    return MAP_FAILED;
}

int sim_munmap(void *memory, size_t bytes)
{
    (void)bytes;
    sim_free(memory);
    return 0;
}

/* ---- the thread of watch.c ---- */

/* Every rank polls all its connections. */
void prs_watch_add(struct prs_peer *peer)
{
    (void)peer;
}

void prs_watch_lose_stream(struct prs_peer *peer)
{
    (void)peer;
}

void prs_watch_remove(struct prs_peer *peer)
{
    (void)peer;
}

/* ---- raising ---- */

/* A NIC without adds: the CPU raises the signal. */
int prs_raise_signal(struct prs_peer *peer, const struct prs_record *record)
{
    struct sim_end *end = sim_end_of(peer);

    end->rank->cpu_ps += sim_ps(end->rank->sim->cluster.raise_ns);
    sim_raise(end->rank->sim, record->addr);
    return 0;
}

int prs_raise_over_living_rail(struct prs_peer *peer)
{
    (void)peer;
    return 0;
}

void prs_raise_finish(struct prs_raise *raise)
{
    (void)raise;
}

void prs_raise_drop(struct prs_raise *raise)
{
    (void)raise;
}
