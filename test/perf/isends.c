/* SPDX-License-Identifier: Apache-2.0 */
/* Messages through the plugin, both ends in this thread, so that their instructions can be counted: the calls of NCCL
 * happen in use() (callgrind --toggle-collect=use). RAILS devices are merged into one, as NCCL does with the ports of a
 * NIC. Exits with 77 if there is no device.
 *
 * usage: isends PLUGIN MESSAGES BYTES [RAILS] */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plugin/abi.h"

enum { AT_A_TIME = 8, MOST_BYTES = 1 << 20, TAG = 7 };

static const struct net_v12 *net;
static void *send_comm, *recv_comm, *source_handle, *target_handle;
static char *source, *target;

static void stop(const char *what)
{
    fprintf(stderr, "isends: %s failed\n", what);
    exit(1);
}

static void say(int level, unsigned long subsystems, const char *file, int line, const char *format, ...)
{
    (void)level;
    (void)subsystems;
    (void)file;
    (void)line;
    (void)format;
}

/* Return whether the request is done. NULL: it is not. */
static int is_done(void *request)
{
    int done = 0;

    if (request && net->test(request, &done, NULL) != NET_SUCCESS)
        stop("test");
    return done;
}

/* Transfer this many messages, up to AT_A_TIME of them in flight. */
static __attribute__((noinline)) void use(int messages, size_t bytes)
{
    for (int first = 0; first < messages; first += AT_A_TIME) {
        int count = messages - first < AT_A_TIME ? messages - first : AT_A_TIME, sent = 0, received = 0;
        void *sends[AT_A_TIME] = {NULL}, *recvs[AT_A_TIME] = {NULL};

        for (int i = 0; i < count; i++) {
            void *data = target;
            size_t size = bytes;
            int tag = TAG;

            if (net->irecv(recv_comm, 1, &data, &size, &tag, &target_handle, NULL, &recvs[i]) != NET_SUCCESS)
                stop("irecv");
        }
        while (sent < count || received < count) {
            for (int i = sent; i < count; i++)
                if (!sends[i] &&
                    net->isend(send_comm, source, bytes, TAG, source_handle, NULL, &sends[i]) != NET_SUCCESS)
                    stop("isend");
            while (sent < count && is_done(sends[sent]))
                sent++;
            while (received < count && is_done(recvs[received]))
                received++;
        }
    }
}

/* The number of a device that has the first `rails` devices as members. */
static int merge(int rails)
{
    struct net_vdevice_v12 members = {.count = rails};
    int device = 0;

    for (int i = 0; i < rails; i++)
        members.device[i] = i;
    if (rails > 1 && net->make_vdevice(&device, &members) != NET_SUCCESS)
        stop("merging devices");
    return device;
}

int main(int argc, char **argv)
{
    int messages = argc >= 4 ? atoi(argv[2]) : 0, rails = argc == 5 ? atoi(argv[4]) : 1, devices = 0, device;
    size_t bytes = argc >= 4 ? (size_t)atol(argv[3]) : 0;
    struct net_config config = {.traffic_class = NET_UNDEFINED};
    uint8_t handle[NET_HANDLE_BYTES];
    void *library, *context, *listen;

    if (messages < 1 || bytes < 1 || bytes > MOST_BYTES || rails < 1 || rails > NET_VDEVICE_MAX_V12) {
        fprintf(stderr, "usage: isends PLUGIN MESSAGES BYTES [RAILS]; at most %d bytes\n", MOST_BYTES);
        return 2;
    }
    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    net = library ? dlsym(library, "ncclNetPlugin_v12") : NULL;
    if (!net || net->init(&context, 1, &config, say, NULL) != NET_SUCCESS)
        stop("opening the plugin");
    if (net->devices(&devices) != NET_SUCCESS || devices < rails)
        return 77;
    device = merge(rails);
    if (net->listen(context, device, handle, &listen) != NET_SUCCESS)
        stop("listen");
    while (!send_comm || !recv_comm) {
        if (!send_comm && net->connect(context, device, handle, &send_comm, NULL) != NET_SUCCESS)
            stop("connect");
        if (!recv_comm && net->accept(listen, &recv_comm, NULL) != NET_SUCCESS)
            stop("accept");
    }
    source = aligned_alloc(4096, MOST_BYTES);
    target = aligned_alloc(4096, MOST_BYTES);
    if (!source || !target)
        stop("aligned_alloc");
    memset(source, 'p', MOST_BYTES);
    memset(target, 0, MOST_BYTES);
    if (net->reg(send_comm, source, MOST_BYTES, NET_PTR_HOST, &source_handle) != NET_SUCCESS ||
        net->reg(recv_comm, target, MOST_BYTES, NET_PTR_HOST, &target_handle) != NET_SUCCESS)
        stop("registering");
    use(messages, bytes);
    if (memcmp(source, target, bytes))
        stop("the comparison of what arrived");
    _Exit(0); /* faster than closing everything */
}
