/* SPDX-License-Identifier: Apache-2.0 */
/* A kernel that runs, as far as a driver without a GPU can have one: calls that wait for the GPU wait for its end. */
#ifndef TEST_SOFTNIC_FAKE_CUDA_BUSY_H
#define TEST_SOFTNIC_FAKE_CUDA_BUSY_H

#pragma GCC visibility push(default)

/* A kernel begins (1), or ends (0). */
void fakeCudaBusy(int busy);

/* How many calls had to wait for it so far. */
int fakeCudaWaits(void);

/* A thread of this process begins (1) to wait for a stream with the driver's lock in hand, or ends (0); and how many
 * copies had to wait for the lock so far. */
void fakeCudaHoldLock(int holds);
int fakeCudaLockWaits(void);

/* The copy engines stand still (1), whatever they are given, or go on (0). */
void fakeCudaPause(int pause);

#pragma GCC visibility pop

/* A call that waits for the GPU is made. */
void fake_wait_idle(const char *call);

/* A copy is given to a stream. */
void fake_wait_lock(const char *call);

/* A copy is to be made. */
void fake_wait_paused(void);

#endif
