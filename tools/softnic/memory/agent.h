/* SPDX-License-Identifier: Apache-2.0 */
/* An agent is a thread that does jobs for other processes: on device memory that only this process can reach,
 * or, in the copier (copier.h), on any device memory.
 *
 * An initiator (agent_job.h) takes a slot (agent_slot.h), describes the copy and rings the bell. An owner has slots for
 * each opened device with registered device memory; the copier has slots for each process. The agent makes the copy as
 * if its own process had asked for it: it reads and writes host memory of others by process_vm through pinned staging,
 * and maps their device memory.
 *
 * An owner's agent also looks every second whether copies of the process's other threads stand still (device_mem.h,
 * watch).
 *
 * The copier's agents begin jobs in the order in which they were posted. Queued copies (device_mem.h) are jobs, too:
 * each queue pair has a queue here, in which each copy follows the previous one. A copy that cannot be queued waits
 * until the queue is empty, is made directly, and holds up those after it. If its memory cannot be opened here, it is
 * refused, and so are all after it, until the initiator, which has learned of it, starts with an empty queue again. */
#ifndef SOFTNIC_AGENT_H
#define SOFTNIC_AGENT_H

#include "tools/softnic/world/world.h"

struct sn_agent;

/* Start the agent of an opened device, unless *agent already runs: called before the key of device memory is valid.
 * Return 0 or -errno (logged). */
int sn_agent_start(uint32_t ctx, struct sn_agent **agent);

/* Stop the agent. Running jobs are finished first, for at most a second. Jobs posted later get no answer; their
 * initiators notice that by the epoch. */
void sn_agent_stop(struct sn_agent **agent);

/* Start an agent of the copier, with empty slots. Return 0 or -errno (logged). */
int sn_agent_open(struct sn_agent_shm *shm, struct sn_agent **out);
/* Stop an agent of the copier, as above. */
void sn_agent_close(struct sn_agent *agent);

#endif
