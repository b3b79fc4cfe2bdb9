/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/cuda_api.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "tools/softnic/memory/cuda_stream.h"
#include "tools/softnic/world/world.h"

static const struct {
    const char *symbol;
    size_t offset;
    bool newer;
} calls[] = {
#define SN_CUDA_ROW(field, symbol, parameters)       {symbol, offsetof(struct sn_cuda, field), false},
#define SN_CUDA_NEWER_ROW(field, symbol, parameters) {symbol, offsetof(struct sn_cuda, field), true},
    SN_CUDA_CALLS(SN_CUDA_ROW) SN_CUDA_NEWER_CALLS(SN_CUDA_NEWER_ROW)
#undef SN_CUDA_ROW
#undef SN_CUDA_NEWER_ROW
};

/* Protects everything below, and the streams and events of devices. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct sn_cuda table;
static const struct sn_cuda *loaded; /* written once, under mutex */
static bool started;                 /* cuInit was called here, and the devices are listed */
static int dev_count;
static struct sn_cuda_dev devs[SN_CUDA_MAX_DEVS];

static bool load_locked(bool start)
{
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | (start ? 0 : RTLD_NOLOAD));
    if (!lib)
        return false;
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        void *symbol = dlsym(lib, calls[i].symbol);
        if (!symbol && !calls[i].newer) {
            sn_log("libcuda.so.1 has no %s: the driver is too old for device memory (12.0 or newer is needed)",
                   calls[i].symbol);
            dlclose(lib);
            return false;
        }
        memcpy((char *)&table + calls[i].offset, &symbol, sizeof(symbol));
    }
    /* [cuda-table] release; pairs with the acquire in sn_cuda_get: the table is complete. The handle stays open: the
     * table points into it. */
    __atomic_store_n(&loaded, &table, __ATOMIC_RELEASE);
    return true;
}

static void start_locked(void)
{
    if (started)
        return;
    int r = table.init(0); /* harmless when the application has done it */
    if (r == SN_CU_OK)
        r = table.device_count(&dev_count);
    if (r != SN_CU_OK) {
        dev_count = 0;
        sn_cuda_failed(&table, "cuInit", r);
    }
    if (dev_count > SN_CUDA_MAX_DEVS)
        dev_count = SN_CUDA_MAX_DEVS;
    for (int i = 0; i < dev_count; i++) {
        devs[i].ordinal = i;
        table.device_get(&devs[i].dev, i);
        table.device_uuid(&devs[i].uuid, devs[i].dev);
    }
    /* [cuda-devices] release; pairs with the acquire loads below: the list of devices is complete. */
    __atomic_store_n(&started, true, __ATOMIC_RELEASE);
}

const struct sn_cuda *sn_cuda_get(bool start)
{
    const struct sn_cuda *cuda = __atomic_load_n(&loaded, __ATOMIC_ACQUIRE);
    if (cuda && (!start || __atomic_load_n(&started, __ATOMIC_ACQUIRE)))
        return cuda;
    pthread_mutex_lock(&mutex);
    if (!loaded)
        load_locked(start);
    if (loaded && start)
        start_locked();
    cuda = loaded;
    pthread_mutex_unlock(&mutex);
    return cuda;
}

bool sn_cuda_installed(void)
{
    void *lib = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (lib)
        dlclose(lib);
    return lib != NULL;
}

int sn_cuda_failed(const struct sn_cuda *cuda, const char *call, int result)
{
    const char *name = "unknown error";
    cuda->error_name(result, &name);
    sn_log("%s: %s (%d)", call, name ? name : "unknown error", result);
    return -EIO;
}

int sn_cuda_count(const struct sn_cuda *cuda)
{
    if (!cuda)
        return 0;
    if (!__atomic_load_n(&started, __ATOMIC_ACQUIRE)) {
        pthread_mutex_lock(&mutex);
        start_locked();
        pthread_mutex_unlock(&mutex);
    }
    return dev_count;
}

/* Non-blocking streams: they neither wait for the application's default stream nor hold it up. */
static int make_ready_locked(struct sn_cuda_dev *dev)
{
    void *ctx, *popped;
    int r = table.primary_retain(&ctx, dev->dev);
    if (r != SN_CU_OK)
        return sn_cuda_failed(&table, "cuDevicePrimaryCtxRetain", r);
    r = table.ctx_push(ctx);
    if (r != SN_CU_OK)
        return sn_cuda_failed(&table, "cuCtxPushCurrent", r);
    r = sn_cuda_streams_open(&table, dev);
    table.ctx_pop(&popped);
    if (r)
        return r;
    /* [cuda-streams] release; pairs with the acquire in sn_cuda_dev_get: the streams are there. */
    __atomic_store_n(&dev->ctx, ctx, __ATOMIC_RELEASE);
    return 0;
}

struct sn_cuda_dev *sn_cuda_dev_get(const struct sn_cuda *cuda, int ordinal)
{
    struct sn_cuda_dev *dev = ordinal >= 0 && ordinal < sn_cuda_count(cuda) ? &devs[ordinal] : NULL;
    int mode = SN_CU_CAPTURE_RELAXED;

    if (!dev || __atomic_load_n(&dev->ctx, __ATOMIC_ACQUIRE))
        return dev;
    pthread_mutex_lock(&mutex);
    cuda->capture_mode(&mode);
    if (!dev->ctx && make_ready_locked(dev))
        dev = NULL;
    cuda->capture_mode(&mode);
    pthread_mutex_unlock(&mutex);
    return dev;
}

int sn_cuda_dev_find(const struct sn_cuda *cuda, const struct sn_cu_uuid *uuid)
{
    int count = sn_cuda_count(cuda);
    for (int i = 0; i < count; i++)
        if (!memcmp(&devs[i].uuid, uuid, sizeof(*uuid)))
            return i;
    return -1;
}

int sn_cuda_dev_prefer(const struct sn_cuda *cuda, int liked)
{
    int count = sn_cuda_count(cuda);
    for (int i = -1; i < count; i++) {
        int candidate = i < 0 ? liked : i;
        if (candidate >= 0 && __atomic_load_n(&devs[candidate].ctx, __ATOMIC_ACQUIRE))
            return candidate;
    }
    for (int i = -1; i < count; i++) {
        int candidate = i < 0 ? liked : i, active = 0;
        unsigned flags;
        if (candidate >= 0 && cuda->primary_state(devs[candidate].dev, &flags, &active) == SN_CU_OK && active)
            return candidate;
    }
    return liked >= 0 ? liked : 0;
}

int sn_cuda_enter(const struct sn_cuda *cuda, struct sn_cuda_dev *dev, int *saved_mode)
{
    int r = cuda->ctx_push(dev->ctx);
    if (r != SN_CU_OK)
        return sn_cuda_failed(cuda, "cuCtxPushCurrent", r);
    *saved_mode = SN_CU_CAPTURE_RELAXED;
    cuda->capture_mode(saved_mode);
    return 0;
}

void sn_cuda_leave(const struct sn_cuda *cuda, int saved_mode)
{
    void *popped;
    cuda->capture_mode(&saved_mode);
    cuda->ctx_pop(&popped);
}

void *sn_cuda_event_take(const struct sn_cuda *cuda, struct sn_cuda_dev *dev)
{
    void *event = NULL;
    pthread_mutex_lock(&mutex);
    if (dev->saved_events)
        event = dev->events[--dev->saved_events];
    pthread_mutex_unlock(&mutex);
    if (event)
        return event;
    int r = cuda->event_create(&event, SN_CU_EVENT_DISABLE_TIMING);
    if (r != SN_CU_OK) {
        sn_cuda_failed(cuda, "cuEventCreate", r);
        return NULL;
    }
    return event;
}

void sn_cuda_event_give(struct sn_cuda_dev *dev, void *event)
{
    pthread_mutex_lock(&mutex);
    /* Keep as many events as are needed at a time. Further ones of a burst are leaked, because destroying an event
     * could block. */
    if (dev->saved_events < (int)(sizeof(dev->events) / sizeof(dev->events[0])))
        dev->events[dev->saved_events++] = event;
    pthread_mutex_unlock(&mutex);
}
