/* SPDX-License-Identifier: Apache-2.0 */
/* Carrying out what other processes ask for: of device memory that this process alone can reach, or, in the copier
 * (copier.h), of any.
 *
 * An initiator (request.c) takes a slot, describes the copy and rings the bell. The owner has slots for each opened
 * device with registered device memory, the copier for each process. The agent, a thread, makes the copy as if it were
 * a request of its own process, so everything that place.h can do is at hand: host memory of others is read and written
 * by process_vm through pinned staging, their device memory is mapped. A word for each slot says whose turn it is:
 *
 *   FREE -> TAKEN (initiator fills in) -> POSTED -> RUNNING (agent) -> DONE (initiator reads the result) -> FREE
 *
 * A word also names the initiator and its request, so a change by whoever comes too late fails. RUNNING -> LEFT: the
 * initiator waits no longer, the agent frees the slot.
 *
 * The copier's agents begin requests in the order in which they were posted. Flights (place.h) are requests, too: those
 * of a queue pair have a lane, in which each is behind the one before. One that cannot fly is copied when the lane is
 * empty, and holds up what comes behind; when its memory cannot be opened here it is refused, and with it all behind it
 * until the initiator, who then knows, begins the lane anew. */
#ifndef SOFTNIC_AGENT_H
#define SOFTNIC_AGENT_H

#include "tools/softnic/world/world.h"

struct sn_agent;

/** Start the agent of an opened device, unless *agent already runs: called before the key of device memory is valid.
 * Return 0 or -errno (logged). */
int sn_agent_start(uint32_t ctx, struct sn_agent **agent);

/** What is running is finished first, for a second at most; what is posted later gets no answer, which its initiators
 * notice by the epoch. */
void sn_agent_stop(struct sn_agent **agent);

/** An agent of the copier; the slots are as new. Return 0 or -errno (logged). */
int sn_agent_open(struct sn_agent_shm *shm, struct sn_agent **out);
/** As sn_agent_stop. */
void sn_agent_close(struct sn_agent *agent);

#endif
