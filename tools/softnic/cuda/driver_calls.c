/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/cuda/driver_calls.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "tools/softnic/cuda/gpu_wait.h"
#include "tools/softnic/memory/cuda_api.h"

enum {
    LEGACY_STREAM = 1, /* handles of the two default streams, the same in every variant of a function */
    THREAD_STREAM = 2,
    PTDS_FLAG = 2,     /* flag of cuGetProcAddress */
    KNOWN = 12040,     /* the version of the functions below, for cuGetProcAddress */
    PROC_V2 = 12000,   /* from this version on, cuGetProcAddress itself has other parameters */
    STAGED = 64 << 10, /* the driver stages up to this much pageable memory at once, and does not wait */
    TYPE_HOST = 1,
    TYPE_UNIFIED = 4,
};

static struct {
    int (*pointer_attribute)(void *data, int attribute, sn_cu_ptr ptr);
    int (*is_capturing)(void *stream, int *status);
    int (*stream_synchronize)(void *stream);
} driver;

enum kind { PAGEABLE, PINNED, DEVICE };

static enum kind kind_of(uint64_t at)
{
    int type;

    if (driver.pointer_attribute(&type, SN_CU_ATTR_MEMORY_TYPE, at) != SN_CU_OK)
        return PAGEABLE;
    return type == SN_CU_MEMORY_HOST ? PINNED : DEVICE;
}

/* Wait for the stream as the call would, but without the driver's lock. Not while the stream is being captured: the
 * call is recorded, or refused. */
static void wait_stream(void *stream)
{
    int capturing = 0;

    /* An error of is_capturing() means that the call would wait for a captured stream. An error of the wait will be
     * returned by the call itself, too. */
    if (driver.is_capturing(stream, &capturing) == SN_CU_OK && !capturing)
        driver.stream_synchronize(stream);
}

static void before_copy(enum kind to, enum kind from, size_t bytes, void *stream, bool synchronous)
{
    if (synchronous ? from != DEVICE || to != DEVICE : to == PAGEABLE || (from == PAGEABLE && bytes > STAGED))
        wait_stream(stream);
}

static enum kind kind_of_side(int type, const void *host, sn_cu_ptr unified)
{
    if (type == TYPE_HOST)
        return kind_of((uintptr_t)host);
    return type == TYPE_UNIFIED ? kind_of(unified) : DEVICE; /* or an array there */
}

#define KIND(c, side) kind_of_side((c)->side##_type, (c)->side##_host, (c)->side##_device)

/* Before a call that may wait for all work when it is made for the first time, because code is loaded then. */
static void before_first(const char *name, uint64_t a, uint64_t b)
{
    if (sn_gpu_first(a, b))
        sn_gpu_wait(name);
}

static bool is_captured(void *stream, uintptr_t default_stream)
{
    int status = 0;
    return driver.is_capturing(stream ? stream : (void *)default_stream, &status) == SN_CU_OK && status;
}

static uint64_t hash(const char *name)
{
    uint64_t h = 0;
    while (name && *name)
        h = h * 31 + (unsigned char)*name++;
    return h;
}

/* A function that takes the place of the driver's of that name. `before` is done first. */
#define REPLACE(symbol, parameters, arguments, before)                                                                 \
    static int(*real_##symbol) parameters;                                                                             \
    static int our_##symbol parameters                                                                                 \
    {                                                                                                                  \
        before;                                                                                                        \
        return real_##symbol arguments;                                                                                \
    }

/* Synchronous: the default stream is the legacy one, or that of the thread. */
#define REPLACE_DEFAULT(symbol, parameters, arguments, before)                                                         \
    REPLACE(symbol, parameters, arguments, {                                                                           \
        void *stream = (void *)LEGACY_STREAM;                                                                          \
        before;                                                                                                        \
    })                                                                                                                 \
    REPLACE(symbol##_ptds, parameters, arguments, {                                                                    \
        void *stream = (void *)THREAD_STREAM;                                                                          \
        before;                                                                                                        \
    })
#define REPLACE_STREAM(symbol, parameters, arguments, before)                                                          \
    REPLACE(symbol, parameters, arguments, {                                                                           \
        void *stream = given ? given : (void *)LEGACY_STREAM;                                                          \
        before;                                                                                                        \
    })                                                                                                                 \
    REPLACE(symbol##_ptsz, parameters, arguments, {                                                                    \
        void *stream = given ? given : (void *)THREAD_STREAM;                                                          \
        before;                                                                                                        \
    })
REPLACE_DEFAULT(cuMemcpy, (sn_cu_ptr dst, sn_cu_ptr src, size_t bytes), (dst, src, bytes),
                before_copy(kind_of(dst), kind_of(src), bytes, stream, true))
REPLACE_DEFAULT(cuMemcpyHtoD_v2, (sn_cu_ptr dst, const void *src, size_t bytes), (dst, src, bytes),
                before_copy(kind_of(dst), kind_of((uintptr_t)src), bytes, stream, true))
REPLACE_DEFAULT(cuMemcpyDtoH_v2, (void *dst, sn_cu_ptr src, size_t bytes), (dst, src, bytes),
                before_copy(kind_of((uintptr_t)dst), kind_of(src), bytes, stream, true))
REPLACE_DEFAULT(cuMemcpy2D_v2, (const struct sn_cu_copy2d *c), (c),
                if (c) before_copy(KIND(c, dst), KIND(c, src), c->width * c->height, stream, true))
REPLACE_DEFAULT(cuMemcpy2DUnaligned_v2, (const struct sn_cu_copy2d *c), (c),
                if (c) before_copy(KIND(c, dst), KIND(c, src), c->width * c->height, stream, true))
REPLACE_DEFAULT(cuMemcpy3D_v2, (const struct sn_cu_copy3d *c), (c),
                if (c) before_copy(KIND(c, dst), KIND(c, src), c->width * c->height * c->depth, stream, true))
REPLACE_STREAM(cuMemcpyAsync, (sn_cu_ptr dst, sn_cu_ptr src, size_t bytes, void *given), (dst, src, bytes, given),
               before_copy(kind_of(dst), kind_of(src), bytes, stream, false))
REPLACE_STREAM(cuMemcpyHtoDAsync_v2, (sn_cu_ptr dst, const void *src, size_t bytes, void *given),
               (dst, src, bytes, given), before_copy(kind_of(dst), kind_of((uintptr_t)src), bytes, stream, false))
REPLACE_STREAM(cuMemcpyDtoHAsync_v2, (void *dst, sn_cu_ptr src, size_t bytes, void *given), (dst, src, bytes, given),
               before_copy(kind_of((uintptr_t)dst), kind_of(src), bytes, stream, false))
REPLACE_STREAM(cuMemcpy2DAsync_v2, (const struct sn_cu_copy2d *c, void *given), (c, given),
               if (c) before_copy(KIND(c, dst), KIND(c, src), c->width * c->height, stream, false))
REPLACE_STREAM(cuMemcpy3DAsync_v2, (const struct sn_cu_copy3d *c, void *given), (c, given),
               if (c) before_copy(KIND(c, dst), KIND(c, src), c->width * c->height * c->depth, stream, false))

#define REPLACE_GPU(symbol, parameters, arguments) REPLACE(symbol, parameters, arguments, sn_gpu_wait(#symbol))
REPLACE_GPU(cuMemFree_v2, (sn_cu_ptr at), (at))
REPLACE_GPU(cuMemFreeHost, (void *at), (at))
REPLACE_GPU(cuMemHostUnregister, (void *at), (at))
REPLACE_GPU(cuModuleLoad, (void **out, const char *path), (out, path))
REPLACE_GPU(cuModuleLoadData, (void **out, const void *image), (out, image))
REPLACE_GPU(cuModuleLoadDataEx, (void **out, const void *image, unsigned n, int *options, void **values),
            (out, image, n, options, values))
REPLACE_GPU(cuModuleLoadFatBinary, (void **out, const void *image), (out, image))
REPLACE_GPU(cuLibraryLoadData,
            (void **out, const void *code, int *jit, void **jit_values, unsigned n, int *options, void **values,
             unsigned m),
            (out, code, jit, jit_values, n, options, values, m))
REPLACE(cuModuleUnload, (void *module), (module), {
    sn_gpu_wait("cuModuleUnload");
    sn_gpu_forget();
})
REPLACE(cuLibraryUnload, (void *library), (library), {
    sn_gpu_wait("cuLibraryUnload");
    sn_gpu_forget();
})

#define REPLACE_FIRST(symbol, parameters, arguments, a, b)                                                             \
    REPLACE(symbol, parameters, arguments, before_first(#symbol, (uintptr_t)(a), (b)))
REPLACE_FIRST(cuModuleGetFunction, (void **out, void *module, const char *name), (out, module, name), module,
              hash(name))
REPLACE_FIRST(cuModuleGetGlobal_v2, (sn_cu_ptr * out, size_t *bytes, void *module, const char *name),
              (out, bytes, module, name), module, hash(name))
REPLACE_FIRST(cuLibraryGetGlobal, (sn_cu_ptr * out, size_t *bytes, void *library, const char *name),
              (out, bytes, library, name), library, hash(name))
REPLACE_FIRST(cuLibraryGetModule, (void **out, void *library), (out, library), library, 0)
REPLACE_FIRST(cuKernelGetFunction, (void **out, void *kernel), (out, kernel), kernel, 0)
REPLACE_FIRST(cuFuncLoad, (void *f), (f), f, 0)
/* The 1 marks launches: a call that loads a function may leave some work to its launch. */
#define REPLACE_LAUNCH(symbol, parameters, arguments)                                                                  \
    REPLACE_FIRST(symbol, parameters, arguments, f, 1)                                                                 \
    REPLACE_FIRST(symbol##_ptsz, parameters, arguments, f, 1)
REPLACE_LAUNCH(cuLaunchKernel,
               (void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                void *stream, void **arguments, void **extra),
               (f, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra))
REPLACE_LAUNCH(cuLaunchCooperativeKernel,
               (void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                void *stream, void **arguments),
               (f, gx, gy, gz, bx, by, bz, shared, stream, arguments))
REPLACE_LAUNCH(cuLaunchKernelEx, (const void *config, void *f, void **arguments, void **extra),
               (config, f, arguments, extra))
/* While a stream is captured nothing may wait for all work. */
#define REPLACE_CAPTURE(symbol, parameters, arguments, default_stream)                                                 \
    static int(*real_##symbol) parameters;                                                                             \
    static int our_##symbol parameters                                                                                 \
    {                                                                                                                  \
        bool before = is_captured(given, default_stream);                                                              \
        int r = real_##symbol arguments;                                                                               \
        sn_gpu_captures((int)is_captured(given, default_stream) - (int)before);                                        \
        return r;                                                                                                      \
    }
#define REPLACE_CAPTURE_BOTH(symbol, parameters, arguments)                                                            \
    REPLACE_CAPTURE(symbol, parameters, arguments, LEGACY_STREAM)                                                      \
    REPLACE_CAPTURE(symbol##_ptsz, parameters, arguments, THREAD_STREAM)
REPLACE_CAPTURE_BOTH(cuStreamBeginCapture_v2, (void *given, int mode), (given, mode))
REPLACE_CAPTURE_BOTH(cuStreamBeginCaptureToGraph,
                     (void *given, void *graph, const void *dependencies, const void *data, size_t n, int mode),
                     (given, graph, dependencies, data, n, mode))
REPLACE_CAPTURE_BOTH(cuStreamEndCapture, (void *given, void **graph), (given, graph))

static int our_cuGetProcAddress(const char *name, void **out, int version, uint64_t flags);
static int our_cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status);
static int (*real_cuGetProcAddress)(const char *name, void **out, int version, uint64_t flags);
static int (*real_cuGetProcAddress_v2)(const char *name, void **out, int version, uint64_t flags, int *status);

/* name: as cuGetProcAddress knows it; symbol: as the library exports it; suffix: of the variant with a default stream
 * of each thread. */
#define CALLS(ONE, BOTH)                                                                                               \
    BOTH(cuMemcpy, cuMemcpy, _ptds)                                                                                    \
    BOTH(cuMemcpyHtoD, cuMemcpyHtoD_v2, _ptds)                                                                         \
    BOTH(cuMemcpyDtoH, cuMemcpyDtoH_v2, _ptds)                                                                         \
    BOTH(cuMemcpy2D, cuMemcpy2D_v2, _ptds)                                                                             \
    BOTH(cuMemcpy2DUnaligned, cuMemcpy2DUnaligned_v2, _ptds)                                                           \
    BOTH(cuMemcpy3D, cuMemcpy3D_v2, _ptds)                                                                             \
    BOTH(cuMemcpyAsync, cuMemcpyAsync, _ptsz)                                                                          \
    BOTH(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, _ptsz)                                                               \
    BOTH(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, _ptsz)                                                               \
    BOTH(cuMemcpy2DAsync, cuMemcpy2DAsync_v2, _ptsz)                                                                   \
    BOTH(cuMemcpy3DAsync, cuMemcpy3DAsync_v2, _ptsz)                                                                   \
    ONE(cuMemFree, cuMemFree_v2)                                                                                       \
    ONE(cuMemFreeHost, cuMemFreeHost)                                                                                  \
    ONE(cuMemHostUnregister, cuMemHostUnregister)                                                                      \
    ONE(cuModuleLoad, cuModuleLoad)                                                                                    \
    ONE(cuModuleLoadData, cuModuleLoadData)                                                                            \
    ONE(cuModuleLoadDataEx, cuModuleLoadDataEx)                                                                        \
    ONE(cuModuleLoadFatBinary, cuModuleLoadFatBinary)                                                                  \
    ONE(cuLibraryLoadData, cuLibraryLoadData)                                                                          \
    ONE(cuModuleUnload, cuModuleUnload)                                                                                \
    ONE(cuLibraryUnload, cuLibraryUnload)                                                                              \
    ONE(cuModuleGetFunction, cuModuleGetFunction)                                                                      \
    ONE(cuModuleGetGlobal, cuModuleGetGlobal_v2)                                                                       \
    ONE(cuLibraryGetGlobal, cuLibraryGetGlobal)                                                                        \
    ONE(cuLibraryGetModule, cuLibraryGetModule)                                                                        \
    ONE(cuKernelGetFunction, cuKernelGetFunction)                                                                      \
    ONE(cuFuncLoad, cuFuncLoad)                                                                                        \
    BOTH(cuLaunchKernel, cuLaunchKernel, _ptsz)                                                                        \
    BOTH(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel, _ptsz)                                                  \
    BOTH(cuLaunchKernelEx, cuLaunchKernelEx, _ptsz)                                                                    \
    BOTH(cuStreamBeginCapture, cuStreamBeginCapture_v2, _ptsz)                                                         \
    BOTH(cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph, _ptsz)                                              \
    BOTH(cuStreamEndCapture, cuStreamEndCapture, _ptsz)

static const struct hook {
    const char *name, *symbol;
    void *ours;
    void *real; /* the address of the pointer to the driver's function */
} hooks[] = {
#define HOOK(name, symbol) {#name, #symbol, (void *)our_##symbol, &real_##symbol},
#define HOOK_BOTH(name, symbol, suffix)                                                                                \
    HOOK(name, symbol){#name, #symbol #suffix, (void *)our_##symbol##suffix, &real_##symbol##suffix},
    CALLS(HOOK, HOOK_BOTH){"", "cuGetProcAddress", (void *)our_cuGetProcAddress, &real_cuGetProcAddress},
    {"", "cuGetProcAddress_v2", (void *)our_cuGetProcAddress_v2, &real_cuGetProcAddress_v2},
};
enum { HOOKS = sizeof(hooks) / sizeof(hooks[0]) };

static bool real_known(const struct hook *hook)
{
    void *real;
    memcpy(&real, hook->real, sizeof(real));
    return real != NULL;
}

/* The function to return instead of the one that the driver found. A function of another version may have other
 * parameters, and is returned unchanged. */
static void *replacement(const char *name, void *found, int version, uint64_t flags)
{
    if (!strcmp(name, "cuGetProcAddress"))
        return version >= PROC_V2 ? (void *)our_cuGetProcAddress_v2 : (void *)our_cuGetProcAddress;
    for (int i = 0; i < HOOKS; i++) {
        const struct hook *hook = &hooks[i];
        bool both = i + 1 < HOOKS && !strcmp(hooks[i + 1].name, hook->name);
        void *known = NULL;

        if (strcmp(hook->name, name) || !real_known(hook) || (both && (flags & PTDS_FLAG)))
            continue;
        return real_cuGetProcAddress(name, &known, KNOWN, flags) == SN_CU_OK && known == found ? hook->ours : found;
    }
    return found;
}

static int our_cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
    int r = real_cuGetProcAddress(name, out, version, flags);
    if (r == SN_CU_OK && out && *out)
        *out = replacement(name, *out, version, flags);
    return r;
}

static int our_cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    int r = real_cuGetProcAddress_v2(name, out, version, flags, status);
    if (r == SN_CU_OK && out && *out)
        *out = replacement(name, *out, version, flags);
    return r;
}

static bool ready;

static bool find(void *library, const char *symbol, void *field)
{
    void *found = dlsym(library, symbol);
    memcpy(field, &found, sizeof(found));
    return found != NULL;
}

static void open_driver(void)
{
    struct sn_gpu_wait_calls wait;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);

    for (int i = 0; library && i < HOOKS; i++)
        find(library, hooks[i].symbol, hooks[i].real);
    ready = library && find(library, "cuPointerGetAttribute", &driver.pointer_attribute) &&
            find(library, "cuStreamIsCapturing", &driver.is_capturing) &&
            find(library, "cuStreamSynchronize", &driver.stream_synchronize) &&
            find(library, "cuCtxGetCurrent", &wait.ctx_get) && find(library, "cuCtxSetCurrent", &wait.ctx_set) &&
            find(library, "cuCtxSynchronize", &wait.ctx_synchronize);
    if (ready)
        sn_gpu_wait_open(&wait);
}

void *softnic_driver_call(const char *symbol)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, open_driver);
    for (int i = 0; ready && i < HOOKS; i++)
        if (!strcmp(hooks[i].symbol, symbol) && real_known(&hooks[i]))
            return hooks[i].ours;
    return NULL;
}
