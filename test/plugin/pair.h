/* SPDX-License-Identifier: Apache-2.0 */
/* The plugin, loaded as NCCL loads it, and connections of a process to itself. */
#ifndef TEST_PLUGIN_PAIR_H
#define TEST_PLUGIN_PAIR_H

#include <stdbool.h>

#include "plugin/abi.h"
#include "test/support/open_files.h"
#include "transport/util/clock.h"

enum { PAIR_LIMIT_MS = 60000, PAIR_BYTES = 1 << 20 };

struct plugin {
    void *library;
    const struct net_v12 *net;
    void *context;
};

struct pair {
    void *listen, *send, *recv;
    char *source, *target; /* PAIR_BYTES each */
    void *source_mhandle, *target_mhandle;
};

/* The last warning of the plugin, and how many there were. */
extern char last_warning[1024];
extern int warnings;
net_log_fn keep_warning;

/* dlopen and init. The test fails if either does. */
struct plugin plugin_open(void);
void plugin_close(struct plugin *plugin);

/* Call connect on device and accept on the pair's listen comm in turn until both have returned a comm. Then close the
 * listen comm. The test fails if this takes too long. */
void pair_connect(const struct plugin *plugin, int device, uint8_t *handle, struct pair *pair);
struct pair pair_open(const struct plugin *plugin, int device);
void pair_close(const struct plugin *plugin, struct pair *pair);

/* Call test() until the request is done or fails; return its result. The test fails if this takes too long. */
net_result finish(const struct plugin *plugin, void *request, int *sizes);
/* Post a send, as often as it takes to get a request, and a receive. */
void *send_bytes(const struct plugin *plugin, struct pair *pair, size_t offset, size_t size, int tag);
void *recv_bytes(const struct plugin *plugin, struct pair *pair, size_t offset, size_t size, int tag);

/* The test fails if more than `files` files stay open. Waits, since the software NIC's threads open some for a
 * moment. */
void assert_files_closed(int files);

#endif
