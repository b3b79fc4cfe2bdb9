/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/ofi/attend.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "transport/nic/ofi/device.h"
#include "transport/nic/ofi/completion.h"
#include "transport/util/error.h"
#include "transport/util/spin.h"
#include "transport/util/thread.h"

enum { PERIOD_NS = 1000000 };

static void wait_for_next(struct prs_ofi_device *device)
{
    struct timespec until;

    if (!device->attended) {
        /* for an endpoint, or for the close of the device */
        pthread_cond_wait(&device->changed, &device->attend_lock);
        return;
    }
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += PERIOD_NS;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    pthread_cond_timedwait(&device->changed, &device->attend_lock, &until);
}

static void *attend(void *arg)
{
    struct prs_ofi_device *device = arg;

    pthread_mutex_lock(&device->attend_lock);
    while (!device->stop && prs_work_begin()) {
        for (struct prs_ofi_endpoint *endpoint = device->attended; endpoint; endpoint = endpoint->next)
            prs_ofi_progress(endpoint);
        prs_work_end();
        wait_for_next(device);
    }
    pthread_mutex_unlock(&device->attend_lock);
    return NULL;
}

int prs_ofi_attend_start(struct prs_ofi_device *device)
{
    pthread_condattr_t attr;
    int r;

    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&device->changed, &attr);
    pthread_condattr_destroy(&attr);
    r = prs_thread_start(&device->attendant, "prs-ofi", attend, device);
    if (!r)
        return 0;
    pthread_cond_destroy(&device->changed);
    return prs_fail(-r, "%s: cannot start a thread: %s", device->base.name, strerror(r));
}

void prs_ofi_attend_stop(struct prs_ofi_device *device)
{
    pthread_mutex_lock(&device->attend_lock);
    device->stop = true;
    pthread_cond_signal(&device->changed);
    pthread_mutex_unlock(&device->attend_lock);
    pthread_join(device->attendant, NULL);
    pthread_cond_destroy(&device->changed);
}

void prs_ofi_attend_add(struct prs_ofi_endpoint *endpoint)
{
    struct prs_ofi_device *device = endpoint->device;

    pthread_mutex_lock(&device->attend_lock);
    endpoint->next = device->attended;
    device->attended = endpoint;
    endpoint->attended = true;
    pthread_cond_signal(&device->changed);
    pthread_mutex_unlock(&device->attend_lock);
}

void prs_ofi_attend_remove(struct prs_ofi_endpoint *endpoint)
{
    struct prs_ofi_device *device = endpoint->device;
    struct prs_ofi_endpoint **at = &device->attended;

    if (!endpoint->attended)
        return;
    pthread_mutex_lock(&device->attend_lock);
    while (*at != endpoint)
        at = &(*at)->next;
    *at = endpoint->next;
    endpoint->attended = false;
    pthread_mutex_unlock(&device->attend_lock);
}

void prs_ofi_attend_settle(struct prs_ofi_device *device)
{
    pthread_mutex_lock(&device->attend_lock);
    for (struct prs_ofi_endpoint *endpoint = device->attended; endpoint; endpoint = endpoint->next) {
        prs_spin_lock(&endpoint->locked);
        prs_spin_unlock(&endpoint->locked);
    }
    pthread_mutex_unlock(&device->attend_lock);
}
