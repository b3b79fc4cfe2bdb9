/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that the program uses at the same time, as a NIC reads and writes it. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "test/mock_cxi/mock.h"

static struct {
    pthread_once_t once;
    int (*retain)(void **context, int device), (*push)(void *context), (*pop)(void **context);
    int (*copy)(uint64_t to, uint64_t from, size_t bytes);
    bool found;
} gpu = {.once = PTHREAD_ONCE_INIT};

static void find_gpu(void)
{
    static const struct {
        const char *name;
        void *where;
    } symbols[] = {{"cuDevicePrimaryCtxRetain", &gpu.retain},
                   {"cuCtxPushCurrent_v2", &gpu.push},
                   {"cuCtxPopCurrent_v2", &gpu.pop},
                   {"cuMemcpy", &gpu.copy}};
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

    if (!library || !dlsym(library, "fakeCudaCounts"))
        return;
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *symbol = dlsym(library, symbols[i].name);

        memcpy(symbols[i].where, &symbol, sizeof(symbol));
    }
    gpu.found = true;
}

bool mock_has_gpu(void)
{
    pthread_once(&gpu.once, find_gpu);
    return gpu.found;
}

static void copy_on_gpu(uint8_t *to, const uint8_t *from, size_t bytes)
{
    void *context;

    if (gpu.retain(&context, 0) || gpu.push(context) || gpu.copy((uintptr_t)to, (uintptr_t)from, bytes) ||
        gpu.pop(&context))
        abort(); /* registered memory must exist until its registration ends */
}

__attribute__((no_sanitize("thread", "address"))) static void copy(uint8_t *to, const uint8_t *from, size_t bytes)
{
    if (bytes == 8 && (uintptr_t)to % 8 == 0 && (uintptr_t)from % 8 == 0) { /* words are written at once */
        __atomic_store_n((uint64_t *)(void *)to, *(const uint64_t *)(const void *)from, __ATOMIC_RELEASE);
        return;
    }
    for (size_t i = 0; i < bytes; i++)
        *(volatile uint8_t *)(to + i) = *(const volatile uint8_t *)(from + i);
}

void mock_copy_locked(struct mock_domain *domain, uint8_t *to, const uint8_t *from, size_t bytes)
{
    for (const struct mock_mr *mr = domain->mrs; bytes && mr; mr = mr->next)
        if (mr->on_gpu &&
            ((to >= mr->base && to < mr->base + mr->bytes) || (from >= mr->base && from < mr->base + mr->bytes))) {
            copy_on_gpu(to, from, bytes);
            return;
        }
    copy(to, from, bytes);
}
