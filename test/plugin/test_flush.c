/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's contract for iflush of device memory, on a CUDA driver without a GPU (tools/fake_cuda/driver.h). */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#include "test/plugin/pair.h"
#include "tools/fake_cuda/driver.h"

enum { DEVICE_BYTES = 1 << 16, MOST = NET_MAX_REQUESTS * 8 };

TestSuite(flush, .timeout = 300);

static struct {
    int (*init)(unsigned), (*retain)(void **, int), (*push)(void *);
    int (*alloc)(uint64_t *, size_t), (*free)(uint64_t), (*copy)(uint64_t, uint64_t, size_t);
    int (*range_handle)(void *, uint64_t, size_t, int, unsigned long long);
    int (*calls)(const char *);
} cu;

/* A pair whose receiver has device memory. */
struct setup {
    struct plugin plugin;
    struct pair pair;
    uint64_t device;
    void *mhandle;
};

static void start_cuda(void)
{
    const struct {
        const char *name;
        void *where;
    } symbols[] = {
        {"cuInit", &cu.init},
        {"cuDevicePrimaryCtxRetain", &cu.retain},
        {"cuCtxPushCurrent_v2", &cu.push},
        {"cuMemAlloc_v2", &cu.alloc},
        {"cuMemFree_v2", &cu.free},
        {"cuMemcpy", &cu.copy},
        {"cuMemGetHandleForAddressRange", &cu.range_handle},
        {"fakeCudaCalls", &cu.calls},
    };
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *context;

    cr_assert_not_null(library, "%s", dlerror());
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *symbol = dlsym(library, symbols[i].name);

        cr_assert_not_null(symbol, "not the driver without a GPU: no %s", symbols[i].name);
        memcpy(symbols[i].where, &symbol, sizeof(symbol));
    }
    cr_assert(cu.init(0) == 0 && cu.retain(&context, 0) == 0 && cu.push(context) == 0);
}

static struct setup setup_open(void)
{
    struct setup s;
    int file = -1;

    start_cuda();
    s.plugin = plugin_open();
    s.pair = pair_open(&s.plugin, 0);
    cr_assert_eq(cu.alloc(&s.device, DEVICE_BYTES), 0);
    cr_assert_eq(cu.range_handle(&file, s.device, DEVICE_BYTES, 1, 0), 0);
    cr_assert_eq(s.plugin.net->reg_dmabuf(s.pair.recv, (void *)(uintptr_t)s.device, DEVICE_BYTES, NET_PTR_CUDA, 0, file,
                                          &s.mhandle),
                 NET_SUCCESS, "%s", last_warning);
    close(file);
    return s;
}

static void setup_close(struct setup *s)
{
    cr_assert_eq(s->plugin.net->dereg(s->pair.recv, s->mhandle), NET_SUCCESS);
    cr_assert_eq(cu.free(s->device), 0);
    pair_close(&s->plugin, &s->pair);
    plugin_close(&s->plugin);
}

static void *at(const struct setup *s, size_t offset)
{
    return (void *)(uintptr_t)(s->device + offset);
}

/* How often anything was copied from or to device memory. */
static int copies(void)
{
    return cu.calls("cuMemcpy") + cu.calls("cuMemcpyAsync") + cu.calls("cuMemcpyBatchAsync_v2");
}

static void *flush(struct setup *s, int n, void **data, int *sizes, void **mhandles)
{
    void *request = NULL;

    cr_assert_eq(s->plugin.net->iflush(s->pair.recv, n, data, sizes, mhandles, &request), NET_SUCCESS, "%s",
                 last_warning);
    return request;
}

static void *flush_one(struct setup *s, size_t offset, int bytes)
{
    void *data = at(s, offset);

    return flush(s, 1, &data, &bytes, &s->mhandle);
}

Test(flush, what_the_nic_wrote_to_device_memory_is_read_back)
{
    enum { BYTES = 5001, OFFSET = 123 };
    struct setup s = setup_open();
    char have[BYTES];
    void *data = at(&s, OFFSET), *recv = NULL, *send, *request;
    size_t size = BYTES;
    int tag = 1, got = 0, before;

    cr_assert_eq(s.plugin.net->irecv(s.pair.recv, 1, &data, &size, &tag, &s.mhandle, NULL, &recv), NET_SUCCESS);
    send = send_bytes(&s.plugin, &s.pair, 7, BYTES, tag);
    cr_assert_eq(finish(&s.plugin, send, NULL), NET_SUCCESS);
    cr_assert_eq(finish(&s.plugin, recv, &got), NET_SUCCESS);
    cr_assert_eq(got, BYTES);
    before = copies();
    request = flush_one(&s, OFFSET, got);
    cr_assert_not_null(request, "device memory was not flushed");
    cr_assert_eq(finish(&s.plugin, request, NULL), NET_SUCCESS, "%s", last_warning);
    cr_assert_gt(copies(), before, "the NIC has read no device memory");
    cr_assert_eq(cu.copy((uintptr_t)have, s.device + OFFSET, BYTES), 0);
    cr_assert_eq(memcmp(have, s.pair.source + 7, BYTES), 0);
    setup_close(&s);
}

/* Which buffers of a receive make a flush: the last one that is in device memory and not empty. */
Test(flush, only_bytes_in_device_memory_are_flushed)
{
    enum { HOST, DEVICE, NONE };
    static const struct {
        int where[3], sizes[3];
        bool flushed;
    } rows[] = {
        {{DEVICE, DEVICE, DEVICE}, {8, 8, 8}, true}, {{DEVICE, HOST, NONE}, {8, 8, 8}, true},
        {{HOST, HOST, DEVICE}, {8, 8, 1}, true},     {{DEVICE, DEVICE, DEVICE}, {8, 0, 0}, true},
        {{DEVICE, DEVICE, HOST}, {0, 0, 8}, false},  {{HOST, HOST, HOST}, {8, 8, 8}, false},
        {{NONE, NONE, NONE}, {8, 8, 8}, false},
    };
    struct setup s = setup_open();

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        void *data[3], *mhandles[3], *request;
        int sizes[3];

        for (int k = 0; k < 3; k++) {
            data[k] = rows[i].where[k] == DEVICE ? at(&s, (size_t)k * 64) : s.pair.target;
            mhandles[k] = rows[i].where[k] == DEVICE ? s.mhandle : rows[i].where[k] ? NULL : s.pair.target_mhandle;
            sizes[k] = rows[i].sizes[k];
        }
        request = flush(&s, 3, data, sizes, mhandles);
        cr_assert_eq(request != NULL, rows[i].flushed, "row %zu", i);
        if (request)
            cr_assert_eq(finish(&s.plugin, request, NULL), NET_SUCCESS, "row %zu: %s", i, last_warning);
    }
    setup_close(&s);
}

/* More than the queue of a rail holds: the rest waits until it has room. A request more is an error, since NCCL takes
 * no request for nothing to flush. */
Test(flush, as_many_flushes_as_requests_may_be_out)
{
    struct setup s = setup_open();
    void *data = at(&s, 0), *request[MOST], *more = s.mhandle;
    int bytes = 8, done = 1;

    for (int i = 0; i < MOST; i++) {
        request[i] = flush_one(&s, (size_t)i * 8, 8);
        cr_assert_not_null(request[i], "flush %d", i);
    }
    cr_assert_eq(s.plugin.net->iflush(s.pair.recv, 1, &data, &bytes, &s.mhandle, &more), NET_INVALID_ARGUMENT);
    cr_assert_null(more);
    cr_assert(strstr(last_warning, "all 256 requests are in use"), "%s", last_warning);
    cr_assert_eq(s.plugin.net->test(request[MOST - 1], &done, NULL), NET_SUCCESS);
    cr_assert_eq(done, 0, "the last one was not even posted");
    for (int i = MOST; i-- > 0;) /* the last first: they were the ones to wait */
        cr_assert_eq(finish(&s.plugin, request[i], NULL), NET_SUCCESS, "flush %d: %s", i, last_warning);
    cr_assert_eq(finish(&s.plugin, flush_one(&s, 0, 8), NULL), NET_SUCCESS, "a request is free again");
    setup_close(&s);
}

Test(flush, a_sender_that_has_closed_does_not_end_it)
{
    struct setup s = setup_open();
    void *request;

    cr_assert_eq(s.plugin.net->dereg(s.pair.send, s.pair.source_mhandle), NET_SUCCESS);
    s.pair.source_mhandle = NULL;
    cr_assert_eq(s.plugin.net->close_send(s.pair.send), NET_SUCCESS);
    s.pair.send = NULL;
    request = flush_one(&s, 4096, 64);
    cr_assert_eq(finish(&s.plugin, request, NULL), NET_SUCCESS, "%s", last_warning);
    setup_close(&s);
}

Test(flush, an_address_outside_its_registration_is_an_error)
{
    struct setup s = setup_open();
    void *data[2] = {at(&s, 0), at(&s, DEVICE_BYTES + 4096)}, *mhandles[2] = {s.mhandle, s.mhandle};
    void *request;
    int sizes[2] = {64, 64};

    request = flush(&s, 2, data, sizes, mhandles); /* of the last */
    cr_assert_neq(finish(&s.plugin, request, NULL), NET_SUCCESS);
    cr_assert_gt(warnings, 0);
    cr_assert_neq(s.plugin.net->iflush(s.pair.recv, 1, data, sizes, mhandles, &request), NET_SUCCESS,
                  "the error of the connection stays");
    cr_assert_null(request);
    setup_close(&s);
}
