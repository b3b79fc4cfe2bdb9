/* SPDX-License-Identifier: Apache-2.0 */
/* Waits for the GPU's work, first launches of kernels, captures of streams: the calls that tools/softnic/cuda
 * intercepts between the application and the driver. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "tools/fake_cuda/busy.h"
#include "tools/fake_cuda/state.h"

enum { CAPTURE_INVALIDATED = 901, NOT_FOUND = 500, FUNCTIONS = 64 };

static void *captured;
static bool invalidated;
static int synchronized;
static void *launched[FUNCTIONS];

int fakeCudaSynchronized(void)
{
    return __atomic_load_n(&synchronized, __ATOMIC_ACQUIRE);
}

static void synchronize(const char *call)
{
    __atomic_fetch_add(&synchronized, 1, __ATOMIC_ACQ_REL);
    fake_wait_idle(call);
}

int cuCtxSynchronize(void)
{
    if (fake_current() < 0)
        return INVALID_CONTEXT;
    if (captured)
        invalidated = true;
    synchronize(__func__);
    return OK;
}

int cuStreamSynchronize(void *stream)
{
    (void)stream;
    synchronize(__func__);
    return OK;
}

int cuStreamIsCapturing(void *stream, int *status)
{
    *status = stream && stream == captured;
    return OK;
}

int cuStreamBeginCapture_v2(void *stream, int mode)
{
    (void)mode;
    captured = stream;
    invalidated = false;
    return OK;
}

int cuStreamEndCapture(void *stream, void **graph)
{
    if (stream != captured)
        return INVALID_VALUE;
    captured = NULL;
    *graph = NULL;
    return invalidated ? CAPTURE_INVALIDATED : OK;
}

/* The first launch of a function loads it. */
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra)
{
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)parameters, (void)extra;
    if (fake_current() < 0)
        return INVALID_CONTEXT;
    for (int i = 0; i < FUNCTIONS; i++) {
        if (launched[i] == function)
            return OK;
        if (launched[i])
            continue;
        launched[i] = function;
        if (!stream || stream != captured)
            fake_wait_idle_locked(__func__);
        return OK;
    }
    return OUT_OF_MEMORY;
}

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    char versioned[64];
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);

    (void)version, (void)flags;
    snprintf(versioned, sizeof(versioned), "%s_v2", name);
    *out = dlsym(self, versioned);
    if (!*out)
        *out = dlsym(self, name);
    if (status)
        *status = *out ? 0 : 1;
    return *out ? OK : NOT_FOUND;
}

int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}
