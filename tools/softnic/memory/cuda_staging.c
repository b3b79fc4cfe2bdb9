/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/cuda_staging.h"

#include <pthread.h>

#include "tools/softnic/memory/device_mem.h"

/* For each process 16 MiB and 1 MiB, enough for four long transfers of eight pieces each, and 4 MiB for copies that
 * neither side can make alone. */
enum { LARGE_SLOTS = 32, SMALL_SLOTS = 64, BOUNCES = 16 };

static_assert((int)SN_BOUNCE_BYTES <= (int)SN_STAGING_LARGE, "the owner stages it in one piece");

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* protects all below */
static bool ready;
static struct sn_staging_slot slots[LARGE_SLOTS + SMALL_SLOTS];
static struct sn_staging_slot *free_slots[2];
static void *free_bounces[BOUNCES];
static unsigned bounces_left;

int sn_staging_init(const struct sn_cuda *cuda)
{
    int r = 0;
    void *host;

    if (__atomic_load_n(&ready, __ATOMIC_ACQUIRE))
        return 0;
    pthread_mutex_lock(&mutex);
    if (!ready) {
        r = cuda->host_alloc(&host,
                             (size_t)LARGE_SLOTS * SN_STAGING_LARGE + (size_t)BOUNCES * SN_BOUNCE_BYTES +
                                 (size_t)SMALL_SLOTS * SN_STAGING_SMALL,
                             SN_CU_HOST_PORTABLE);
        if (r == SN_CU_OK) {
            char *at = host;
            for (int i = 0; i < LARGE_SLOTS + SMALL_SLOTS; i++) {
                struct sn_staging_slot *slot = &slots[i];
                slot->large = i < LARGE_SLOTS;
                slot->host = at;
                slot->next = free_slots[slot->large];
                free_slots[slot->large] = slot;
                at += slot->large ? SN_STAGING_LARGE : SN_STAGING_SMALL;
            }
            for (; bounces_left < BOUNCES; at += SN_BOUNCE_BYTES)
                free_bounces[bounces_left++] = at;
            __atomic_store_n(&ready, true, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&mutex);
    return r == SN_CU_OK ? 0 : sn_cuda_failed(cuda, "cuMemHostAlloc of the staging ring", r);
}

struct sn_staging_slot *sn_staging_take(size_t bytes)
{
    bool large = bytes > SN_STAGING_SMALL;
    pthread_mutex_lock(&mutex);
    struct sn_staging_slot *slot = free_slots[large];
    if (slot)
        free_slots[large] = slot->next;
    pthread_mutex_unlock(&mutex);
    return slot;
}

void sn_staging_give(struct sn_staging_slot *slot)
{
    pthread_mutex_lock(&mutex);
    slot->next = free_slots[slot->large];
    free_slots[slot->large] = slot;
    pthread_mutex_unlock(&mutex);
}

void *sn_staging_bounce_take(void)
{
    pthread_mutex_lock(&mutex);
    void *bounce = bounces_left ? free_bounces[--bounces_left] : NULL;
    pthread_mutex_unlock(&mutex);
    return bounce;
}

void sn_staging_bounce_give(void *bounce)
{
    pthread_mutex_lock(&mutex);
    free_bounces[bounces_left++] = bounce;
    pthread_mutex_unlock(&mutex);
}
