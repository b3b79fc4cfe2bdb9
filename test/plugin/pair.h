/* SPDX-License-Identifier: Apache-2.0 */
/* The plugin, loaded as NCCL does, and connections of a process to itself. */
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

/* dlopen and init; skips the test (77) when this machine shows no device. */
struct plugin plugin_open(void);
void plugin_close(struct plugin *plugin);

/* Connect from device to the pair's listen comm, and accept there, in turns, until both have their comms; then close
 * that. Fails the test when it takes too long. */
void pair_connect(const struct plugin *plugin, int device, uint8_t *handle, struct pair *pair);
struct pair pair_open(const struct plugin *plugin, int device);
void pair_close(const struct plugin *plugin, struct pair *pair);

/* Return what test() said when it was done or failed. The limit fails the test. */
net_result finish(const struct plugin *plugin, void *request, int *sizes);
/* Post; isend and irecv until there is a request. */
void *send_bytes(const struct plugin *plugin, struct pair *pair, size_t offset, size_t size, int tag);
void *recv_bytes(const struct plugin *plugin, struct pair *pair, size_t offset, size_t size, int tag);

/* Fails the test when there are more open files than so many for longer than the limit: threads of the software NIC
 * have one open for a moment at times. */
void assert_files_closed(int files);

#endif
