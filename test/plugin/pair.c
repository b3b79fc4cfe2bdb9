/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "test/plugin/pair.h"
#include "test/support/bytes.h"

char last_warning[1024];
int warnings;

void keep_warning(int level, unsigned long subsystems, const char *file, int line, const char *format, ...)
{
    va_list args;

    (void)subsystems;
    (void)file;
    (void)line;
    if (level != NET_LOG_WARN)
        return;
    va_start(args, format);
    vsnprintf(last_warning, sizeof(last_warning), format, args);
    va_end(args);
    warnings++;
}

void assert_files_closed(int files)
{
    uint64_t give_up = prs_clock_ms() + PAIR_LIMIT_MS;
    int now;

    while ((now = open_files()) > files && prs_clock_ms() < give_up)
        usleep(1000);
    cr_assert_leq(now, files, "%d files more", now - files);
}

struct plugin plugin_open(void)
{
    struct net_config config = {.traffic_class = NET_UNDEFINED};
    struct plugin plugin = {.context = NULL};
    net_result result;

    plugin.library = dlopen(getenv("PERSEUS_TEST_PLUGIN"), RTLD_NOW | RTLD_LOCAL);
    cr_assert_not_null(getenv("PERSEUS_TEST_PLUGIN"), "PERSEUS_TEST_PLUGIN must name the plugin");
    cr_assert_not_null(plugin.library, "%s", dlerror());
    plugin.net = dlsym(plugin.library, "ncclNetPlugin_v12");
    cr_assert_not_null(plugin.net);
    result = plugin.net->init(&plugin.context, 1, &config, keep_warning, NULL);
    cr_assert_eq(result, NET_SUCCESS, "init: %d, %s", result, last_warning);
    return plugin;
}

void plugin_close(struct plugin *plugin)
{
    cr_assert_eq(plugin->net->finalize(plugin->context), NET_SUCCESS);
    dlclose(plugin->library);
}

void pair_connect(const struct plugin *plugin, int device, uint8_t *handle, struct pair *pair)
{
    uint64_t give_up = prs_clock_ms() + PAIR_LIMIT_MS;

    while (!pair->send || !pair->recv) {
        if (!pair->send)
            cr_assert_eq(plugin->net->connect(plugin->context, device, handle, &pair->send, NULL), NET_SUCCESS, "%s",
                         last_warning);
        if (!pair->recv)
            cr_assert_eq(plugin->net->accept(pair->listen, &pair->recv, NULL), NET_SUCCESS, "%s", last_warning);
        cr_assert_lt(prs_clock_ms(), give_up, "no connection after %d ms", PAIR_LIMIT_MS);
    }
    cr_assert_eq(plugin->net->close_listen(pair->listen), NET_SUCCESS);
    pair->listen = NULL;
}

static uint8_t source_byte(uint32_t seed, size_t at)
{
    return (uint8_t)(at * 7 + at / 251);
}

struct pair pair_open(const struct plugin *plugin, int device)
{
    struct pair pair = {.listen = NULL};
    uint8_t handle[NET_HANDLE_BYTES];

    cr_assert_eq(plugin->net->listen(plugin->context, device, handle, &pair.listen), NET_SUCCESS, "%s", last_warning);
    pair_connect(plugin, device, handle, &pair);
    pair.source = aligned_alloc(4096, PAIR_BYTES);
    pair.target = aligned_alloc(4096, PAIR_BYTES);
    bytes_fill((uint8_t *)pair.source, PAIR_BYTES, source_byte, 0);
    cr_assert_eq(plugin->net->reg(pair.send, pair.source, PAIR_BYTES, NET_PTR_HOST, &pair.source_mhandle), NET_SUCCESS);
    cr_assert_eq(plugin->net->reg(pair.recv, pair.target, PAIR_BYTES, NET_PTR_HOST, &pair.target_mhandle), NET_SUCCESS);
    return pair;
}

/* In NCCL's order: registrations, memory, queues. */
void pair_close(const struct plugin *plugin, struct pair *pair)
{
    cr_assert_eq(plugin->net->dereg(pair->send, pair->source_mhandle), NET_SUCCESS);
    cr_assert_eq(plugin->net->dereg(pair->recv, pair->target_mhandle), NET_SUCCESS);
    free(pair->source);
    free(pair->target);
    cr_assert_eq(plugin->net->close_send(pair->send), NET_SUCCESS);
    cr_assert_eq(plugin->net->close_recv(pair->recv), NET_SUCCESS);
}

net_result finish(const struct plugin *plugin, void *request, int *sizes)
{
    uint64_t give_up = prs_clock_ms() + PAIR_LIMIT_MS;
    net_result result;
    int done = 0;

    for (;;) {
        result = plugin->net->test(request, &done, sizes);
        if (result != NET_SUCCESS || done)
            return result;
        cr_assert_lt(prs_clock_ms(), give_up, "a request is not done after %d ms", PAIR_LIMIT_MS);
    }
}

void *send_bytes(const struct plugin *plugin, struct pair *pair, size_t offset, size_t size, int tag)
{
    uint64_t give_up = prs_clock_ms() + PAIR_LIMIT_MS;
    void *request = NULL;

    while (!request) {
        cr_assert_eq(
            plugin->net->isend(pair->send, pair->source + offset, size, tag, pair->source_mhandle, NULL, &request),
            NET_SUCCESS, "%s", last_warning);
        cr_assert_lt(prs_clock_ms(), give_up, "isend gave no request for %d ms", PAIR_LIMIT_MS);
    }
    return request;
}

void *recv_bytes(const struct plugin *plugin, struct pair *pair, size_t offset, size_t size, int tag)
{
    void *data = pair->target + offset, *request = NULL;

    cr_assert_eq(plugin->net->irecv(pair->recv, 1, &data, &size, &tag, &pair->target_mhandle, NULL, &request),
                 NET_SUCCESS, "%s", last_warning);
    return request;
}
