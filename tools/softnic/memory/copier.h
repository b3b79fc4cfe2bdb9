/* SPDX-License-Identifier: Apache-2.0 */
/* The copier: a process of the NIC's own that copies device memory for all others of its world (softnic-run --copier).
 *
 * The CUDA driver of a process may hold a lock while one of its threads waits for a stream, and then makes no copy for
 * any other; what the stream waits for may be such a copy. In a process where the NIC alone calls the driver nobody
 * waits for a stream. Whoever registers device memory, or names any in a request, gets an agent here (agent.h), a
 * thread with slots of its own; copied.h is how processes ask it. Registered memory is opened when it is registered, so
 * that what may wait for kernels is done by then. */
#ifndef SOFTNIC_COPIER_H
#define SOFTNIC_COPIER_H

/** Join the world of SOFTNIC_WORLD as its copier, write a byte to ready_fd, close it, and serve. Returns only if it
 * cannot: -errno, logged. Exported, for softnic-run. */
int softnic_copier(int ready_fd);

#endif
