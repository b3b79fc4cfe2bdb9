/* SPDX-License-Identifier: Apache-2.0 */
/* Initialization, devices, contexts, and the attributes of an address. */
#include <stdio.h>
#include <string.h>

#include "tools/fake_cuda/state.h"

enum { STACK = 16 };

static bool started;
static int contexts[DEVICES]; /* how often each was retained */
static __thread void *stack[STACK];
static __thread int depth;

bool fake_started(void)
{
    return __atomic_load_n(&started, __ATOMIC_ACQUIRE); /* pairs with the release in cuInit() */
}

int fake_current(void)
{
    return depth ? (int)((int *)stack[depth - 1] - contexts) : -1;
}

int cuInit(unsigned flags)
{
    __atomic_store_n(&started, true, __ATOMIC_RELEASE); /* pairs with the acquire in fake_started() */
    return OK;
}

int cuGetErrorName(int result, const char **name)
{
    static __thread char text[32];
    snprintf(text, sizeof(text), "FAKE_CUDA_%d", result);
    *name = text;
    return OK;
}

int cuGetErrorString(int result, const char **text)
{
    return cuGetErrorName(result, text);
}

int cuDeviceGetCount(int *count)
{
    *count = DEVICES;
    return fake_started() ? OK : NOT_INITIALIZED;
}

int cuDeviceGet(int *dev, int ordinal)
{
    *dev = ordinal;
    if (!fake_started())
        return NOT_INITIALIZED;
    return ordinal < DEVICES ? OK : INVALID_VALUE;
}

int cuDeviceGetAttribute(int *value, int attribute, int dev)
{
    *value = attribute == 124; /* DMA_BUF_SUPPORTED */
    return fake_started() ? OK : NOT_INITIALIZED;
}

int cuDeviceGetUuid(void *uuid, int dev)
{
    memset(uuid, 0x40 + dev, 16);
    return OK;
}

int cuDevicePrimaryCtxRetain(void **ctx, int dev)
{
    *ctx = &contexts[dev];
    __atomic_fetch_add(&contexts[dev], 1, __ATOMIC_RELAXED);
    return fake_started() ? OK : NOT_INITIALIZED;
}

int cuDevicePrimaryCtxGetState(int dev, unsigned *flags, int *active)
{
    *flags = 0;
    *active = __atomic_load_n(&contexts[dev], __ATOMIC_RELAXED) > 0;
    return OK;
}

int cuCtxPushCurrent_v2(void *ctx)
{
    if (depth == STACK)
        return INVALID_VALUE;
    stack[depth++] = ctx;
    return OK;
}

int cuCtxPopCurrent_v2(void **ctx)
{
    if (!depth)
        return INVALID_CONTEXT;
    *ctx = stack[--depth];
    return OK;
}

int cuCtxGetCurrent(void **ctx)
{
    *ctx = depth ? stack[depth - 1] : NULL;
    return fake_started() ? OK : NOT_INITIALIZED;
}

int cuCtxSetCurrent(void *ctx)
{
    depth = depth ? depth : 1;
    stack[depth - 1] = ctx;
    return OK;
}

int cuCtxGetDevice(int *dev)
{
    *dev = fake_current();
    return *dev < 0 ? INVALID_CONTEXT : OK;
}

int cuThreadExchangeStreamCaptureMode(int *mode)
{
    static __thread int current;
    int old = current;
    current = *mode;
    *mode = old;
    return OK;
}

static int attribute_locked(const struct range *range, void *data, int attribute)
{
    if (!range)
        return INVALID_VALUE;
    if (attribute == 2) /* MEMORY_TYPE */
        *(int *)data = range->kind == PINNED || range->kind == REGISTERED ? 1 : 2;
    else if (attribute == 7) /* BUFFER_ID */
        *(uint64_t *)data = range->id;
    else if (attribute == 8) /* IS_MANAGED */
        *(int *)data = 0;
    else if (attribute == 9) /* DEVICE_ORDINAL */
        *(int *)data = range->dev;
    else if (attribute == 10) /* IS_LEGACY_CUDA_IPC_CAPABLE */
        *(int *)data = range->kind == LEGACY;
    else
        return NOT_SUPPORTED;
    return OK;
}

int cuPointerGetAttribute(void *data, int attribute, uint64_t va)
{
    if (!fake_started())
        return NOT_INITIALIZED;
    pthread_mutex_lock(&fake_mutex);
    int r = attribute_locked(fake_find(va), data, attribute);
    pthread_mutex_unlock(&fake_mutex);
    return r;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t va)
{
    pthread_mutex_lock(&fake_mutex);
    struct range *range = fake_find(va);
    if (range && !fake_has_access(range, fake_current()))
        range = NULL; /* two H200 behave in this way */
    if (range) {
        *base = range->va;
        *bytes = range->bytes;
    }
    pthread_mutex_unlock(&fake_mutex);
    return range ? OK : INVALID_VALUE;
}

int cuModuleLoadData(void **module, const void *image)
{
    return NOT_SUPPORTED; /* no kernels */
}
