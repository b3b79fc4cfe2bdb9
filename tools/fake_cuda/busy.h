/* SPDX-License-Identifier: Apache-2.0 */
/* Emulate a running kernel without a GPU: calls that wait for the GPU wait for the kernel's end. */
#ifndef TEST_SOFTNIC_FAKE_CUDA_BUSY_H
#define TEST_SOFTNIC_FAKE_CUDA_BUSY_H

#pragma GCC visibility push(default)

/* Begin (1) or end (0) the kernel. */
void fakeCudaBusy(int busy);

/* Return how many calls have waited for it so far. */
int fakeCudaWaits(void);

/* Return how often a thread has waited for a stream or a context so far. */
int fakeCudaSynchronized(void);

/* Let a thread of this process begin (1) or end (0) to wait for a stream while it holds the driver's lock; and count
 * the copies that have waited for the lock so far. */
void fakeCudaHoldLock(int holds);
int fakeCudaLockWaits(void);

/* Stop the copy engines (1), whatever copies they have, or let them continue (0). */
void fakeCudaPause(int pause);

#pragma GCC visibility pop

/* Called by calls that wait for the GPU. */
void fake_wait_idle(const char *call);

/* As fake_wait_idle(), but with the driver's lock held. */
void fake_wait_idle_locked(const char *call);

/* Called before a copy is given to a stream. */
void fake_wait_lock(const char *call);

/* Called before a copy is carried out. */
void fake_wait_paused(void);

#endif
