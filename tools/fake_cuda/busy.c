/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/fake_cuda/busy.h"

#include <stdio.h>
#include <unistd.h>

enum { NAP_US = 1000, NAPS_MOST = 60000 };

static int busy, waits, lock_held, lock_waits, paused;

void fakeCudaBusy(int begins)
{
    __atomic_store_n(&busy, begins, __ATOMIC_RELEASE);
}

int fakeCudaWaits(void)
{
    return __atomic_load_n(&waits, __ATOMIC_ACQUIRE);
}

void fakeCudaHoldLock(int holds)
{
    __atomic_store_n(&lock_held, holds, __ATOMIC_RELEASE);
}

int fakeCudaLockWaits(void)
{
    return __atomic_load_n(&lock_waits, __ATOMIC_ACQUIRE);
}

void fake_wait_lock(const char *call)
{
    if (!__atomic_load_n(&lock_held, __ATOMIC_ACQUIRE))
        return;
    fprintf(stderr, "fake CUDA: %s waits for the driver's lock\n", call);
    __atomic_fetch_add(&lock_waits, 1, __ATOMIC_ACQ_REL);
    for (int i = 0; i < NAPS_MOST && __atomic_load_n(&lock_held, __ATOMIC_ACQUIRE); i++)
        usleep(NAP_US);
}

void fake_wait_idle(const char *call)
{
    if (!__atomic_load_n(&busy, __ATOMIC_ACQUIRE))
        return;
    fprintf(stderr, "fake CUDA: %s waits for a running kernel\n", call);
    __atomic_fetch_add(&waits, 1, __ATOMIC_ACQ_REL);
    for (int i = 0; i < NAPS_MOST && __atomic_load_n(&busy, __ATOMIC_ACQUIRE); i++)
        usleep(NAP_US);
}

void fake_wait_idle_locked(const char *call)
{
    if (!__atomic_load_n(&busy, __ATOMIC_ACQUIRE))
        return;
    fakeCudaHoldLock(1);
    fake_wait_idle(call);
    fakeCudaHoldLock(0);
}

void fakeCudaPause(int pause)
{
    __atomic_store_n(&paused, pause, __ATOMIC_RELEASE);
}

void fake_wait_paused(void)
{
    while (__atomic_load_n(&paused, __ATOMIC_ACQUIRE))
        usleep(NAP_US);
}
