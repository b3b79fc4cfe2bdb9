/* SPDX-License-Identifier: Apache-2.0 */
/* The copier: a process of the NIC's own that copies device memory for all others of its world (softnic-run --copier).
 *
 * The CUDA driver of a process may hold a lock while one of its threads waits for a stream, and then makes no copy for
 * any other thread; the stream may be waiting for such a copy. In a process where only the NIC calls the driver,
 * nothing waits for a stream. A process that registers device memory, or names any in a request, gets an agent here
 * (agent.h), a thread with slots of its own; copier_client.h posts the jobs. Memory is opened when it is registered, so
 * whatever waits for kernels is done by then. */
#ifndef SOFTNIC_COPIER_H
#define SOFTNIC_COPIER_H

/* Join the world of SOFTNIC_WORLD as its copier, write a byte to ready_fd, close it, and serve. Returns only on
 * failure: -errno, logged. Exported for softnic-run. */
int softnic_copier(int ready_fd);

#endif
