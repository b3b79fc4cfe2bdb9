/* SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "test/plugin/gin_api.h"

enum { WAIT_SECONDS = 120 };

int gin_api_traffic_class = -1;
const char *gin_api_looks_for;
int gin_api_found;

static void log_line(int level, unsigned long subsystems, const char *file, int line, const char *format, ...)
{
    char text[4096];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    if (gin_api_looks_for && strstr(text, gin_api_looks_for))
        gin_api_found++;
    if (level <= NET_LOG_WARN)
        fprintf(stderr, "%s\n", text);
}

static const void *table_of(struct gin_api *api, const char *name)
{
    const void *table = dlsym(api->plugin, name);

    if (!table)
        fprintf(stderr, "the plugin has no %s\n", name);
    return table;
}

static int load(struct gin_api *api)
{
    const char *file = getenv("PERSEUS_TEST_PLUGIN");

    api->plugin = file ? dlopen(file, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!api->plugin) {
        fprintf(stderr, "PERSEUS_TEST_PLUGIN=%s: %s\n", file ? file : "", file ? dlerror() : "not set");
        return 1;
    }
    api->v11 = table_of(api, "ncclGinPlugin_v11");
    api->v12 = table_of(api, "ncclGinPlugin_v12");
    api->v13 = table_of(api, "ncclGinPlugin_v13");
    api->v14 = table_of(api, "ncclRmaPlugin_v14");
    api->v15 = table_of(api, "ncclRmaPlugin_v15");
    api->v16 = table_of(api, "ncclRmaPlugin_v16");
    api->v17 = table_of(api, "ncclRmaPlugin_v17");
    if (!api->v11 || !api->v12 || !api->v13 || !api->v14 || !api->v15 || !api->v16 || !api->v17)
        return 1;
    api->put = api->version == 15 ? api->v15->iput : api->version == 16 ? api->v16->iput : api->v17->iput;
    api->put_signal = api->version == 15   ? api->v15->iput_signal
                      : api->version == 16 ? api->v16->iput_signal
                                           : api->v17->iput_signal;
    api->get = api->version == 15 ? api->v15->iget : api->version == 16 ? api->v16->iget : api->v17->iget;
    return 0;
}

/* The members before `connect` are the same in all versions. */
static int listen_and_exchange(struct gin_api *api, uint8_t (*handles)[NET_HANDLE_BYTES])
{
    uint8_t mine[NET_HANDLE_BYTES] = {0};
    void *context = NULL;
    int devices = 0;

    if (api->v11->init(&context, 7, log_line) != NET_SUCCESS || api->v11->devices(&devices) != NET_SUCCESS ||
        devices < 1)
        return 77;
    if (api->v11->listen(context, 0, mine, &api->listen_comm) != NET_SUCCESS)
        return 1;
    return ranks_allgather(api->ranks, mine, handles, sizeof(mine)) < 0;
}

static int connect_all(struct gin_api *api, void **handles, int contexts)
{
    struct gin_config_v13 config13 = {.contexts = contexts, .traffic_class = gin_api_traffic_class};
    struct rma_config_v14 config14 = {.contexts = contexts, .traffic_class = gin_api_traffic_class, .rank_stride = 1};
    /* What follows the two members differs between the drafts of v17, and must not be read. */
    struct {
        struct rma_config config;
        uint8_t rest[64];
    } config17 = {.config = {.contexts = contexts, .traffic_class = gin_api_traffic_class}};
    int size = (int)api->size, rank = (int)api->rank;
    void *foreign = (void *)0x1; /* NCCL may pass another vendor's context to connect: it must not be used */
    net_result r;

    switch (api->version) {
    case 11:
        r = api->v11->connect(foreign, handles, size, rank, api->listen_comm, &api->coll);
        api->set = api->coll;
        break;
    case 12:
        r = api->v12->connect(foreign, handles, size, rank, contexts, 64, api->listen_comm, &api->coll);
        api->set = api->coll;
        break;
    case 13:
        r = api->v13->connect(foreign, handles, size, rank, api->listen_comm, &api->coll);
        if (r == NET_SUCCESS)
            r = api->v13->create_context(api->coll, &config13, &api->set, NULL);
        break;
    case 14:
        r = api->v14->connect(foreign, handles, size, rank, api->listen_comm, &api->coll);
        if (r == NET_SUCCESS)
            r = api->v14->create_context(api->coll, &config14, &api->set);
        break;
    case 15:
        r = api->v15->connect(foreign, handles, size, rank, api->listen_comm, &api->coll);
        if (r == NET_SUCCESS)
            r = api->v15->create_context(api->coll, &config14, &api->set);
        break;
    case 16:
        r = api->v16->connect(foreign, handles, size, rank, api->listen_comm, &api->coll);
        if (r == NET_SUCCESS)
            r = api->v16->create_context(api->coll, &config14, &api->set);
        break;
    default:
        memset(config17.rest, 0xff, sizeof(config17.rest));
        r = api->v17->connect(foreign, handles, size, rank, api->listen_comm, &api->coll);
        if (r == NET_SUCCESS)
            r = api->v17->create_context(api->coll, &config17.config, &api->set);
        break;
    }
    return r != NET_SUCCESS;
}

int gin_api_open(struct gin_api *api, struct ranks *ranks, uint32_t size, int version, int contexts)
{
    uint8_t(*handles)[NET_HANDLE_BYTES] = calloc(size, sizeof(*handles));
    void **pointers = calloc(size, sizeof(*pointers));
    int r = 1;

    memset(api, 0, sizeof(*api));
    api->version = version;
    api->ranks = ranks;
    api->rank = ranks_rank(ranks);
    api->size = size;
    if (handles && pointers && load(api) == 0)
        r = listen_and_exchange(api, handles);
    for (uint32_t i = 0; !r && i < size; i++)
        pointers[i] = handles[i];
    if (!r)
        r = connect_all(api, pointers, contexts);
    free(pointers);
    free(handles);
    return r;
}

void gin_api_close(struct gin_api *api)
{
    if (api->version == 13)
        api->v13->destroy_context(api->set);
    if (api->version >= 14)
        api->v14->destroy_context(api->set);
    api->v11->close_coll(api->coll);
    api->v11->close_listen(api->listen_comm);
}

/* Transfers use the handle that NCCL's kernels put into their commands, if the version has one. */
net_result gin_api_reg(struct gin_api *api, void *data, size_t size, uint64_t flags, void **mhandle)
{
    void *host = NULL;

    if (api->version >= 14)
        return api->v14->reg(api->coll, data, size, NET_PTR_HOST, flags, mhandle);
    return api->v13->reg(api->coll, data, size, NET_PTR_HOST, flags, &host, mhandle);
}

net_result gin_api_dereg(struct gin_api *api, void *mhandle)
{
    return api->v11->dereg(api->coll, mhandle);
}

static net_result put_signal(struct gin_api *api, const struct gin_call *c, void **request)
{
    switch (api->version) {
    case 11:
        return api->v11->iput_signal(api->set, c->src_offset, c->src, c->size, c->dst_offset, c->dst, c->rank,
                                     c->signal_offset, c->signal, c->value, c->operation, request);
    case 12:
        return api->v12->iput_signal(api->set, c->src_offset, c->src, c->size, c->dst_offset, c->dst, c->rank,
                                     c->signal_offset, c->signal, c->value, c->operation, c->context, request);
    case 13:
        return api->v13->iput_signal(api->set, c->context, c->src_offset, c->src, c->size, c->dst_offset, c->dst,
                                     c->rank, c->signal_offset, c->signal, c->value, c->operation, request);
    case 14:
        return api->v14->iput_signal(api->set, c->context, c->src_offset, c->src, c->size, c->dst_offset, c->dst,
                                     c->rank, c->signal_offset, c->signal, c->value, c->operation, !c->weak, request);
    default:
        return api->put_signal(api->set, c->context, c->src_offset, c->src, c->size, c->dst_offset, c->dst, c->rank,
                               c->signal_offset, c->signal, c->value, c->operation, !c->weak,
                               c->more ? RMA_TRANSFER_MORE : 0, request);
    }
}

net_result gin_api_put(struct gin_api *api, const struct gin_call *c, void **request)
{
    if (c->operation != 0)
        return put_signal(api, c, request);
    switch (api->version) {
    case 11:
        return api->v11->iput(api->set, c->src_offset, c->src, c->size, c->dst_offset, c->dst, c->rank, request);
    case 12:
        return api->v12->iput(api->set, c->src_offset, c->src, c->size, c->dst_offset, c->dst, c->rank, c->context,
                              request);
    case 13:
        return api->v13->iput(api->set, c->context, c->src_offset, c->src, c->size, c->dst_offset, c->dst, c->rank,
                              request);
    case 14:
        return api->v14->iput(api->set, c->context, c->src_offset, c->src, c->size, c->dst_offset, c->dst, c->rank,
                              request);
    default:
        return api->put(api->set, c->context, c->src_offset, c->src, c->size, c->dst_offset, c->dst, c->rank,
                        c->more ? RMA_TRANSFER_MORE : 0, request);
    }
}

net_result gin_api_get(struct gin_api *api, const struct gin_call *c, void **request)
{
    gin_get_v13 *get = api->version == 13 ? api->v13->iget : api->v14->iget;

    if (api->version >= 15)
        return api->get(api->set, c->context, c->src_offset, c->src, c->size, c->dst_offset, c->dst, c->rank,
                        c->more ? RMA_TRANSFER_MORE : 0, request);
    return get(api->set, c->context, c->src_offset, c->src, c->size, c->dst_offset, c->dst, c->rank, request);
}

net_result gin_api_flush(struct gin_api *api, void *mhandle, uint32_t rank, void **request)
{
    gin_flush_v13 *flush = api->version == 13 ? api->v13->iflush : api->v14->iflush;

    return flush(api->set, 0, mhandle, rank, request);
}

net_result gin_api_test(struct gin_api *api, void *request, int *done)
{
    return api->v11->test(api->coll, request, done);
}

net_result gin_api_progress(struct gin_api *api)
{
    return api->v11->progress(api->set);
}

bool gin_api_has_error(struct gin_api *api)
{
    bool has_error = false;

    api->v11->query_last_error(api->set, &has_error);
    return has_error;
}

bool gin_api_signal_flushes(struct gin_api *api)
{
    rma_properties_v16_fn *get = api->version == 16 ? api->v16->rma_properties : api->v17->rma_properties;
    struct rma_properties_v16 properties = {false};

    return get(api->coll, &properties) == NET_SUCCESS && properties.signal_flushes_all_puts;
}

int gin_api_wait(struct gin_api *api, void *request)
{
    time_t give_up = time(NULL) + WAIT_SECONDS;
    int done = 0;

    for (;;) {
        net_result r = gin_api_test(api, request, &done);

        if (r != NET_SUCCESS)
            return r;
        if (done)
            return 0;
        if (time(NULL) > give_up)
            return -1;
        sched_yield();
    }
}
