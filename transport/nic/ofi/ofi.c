/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/ofi/ofi.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "transport/util/fork.h"
#include "transport/util/log.h"

struct prs_ofi prs_ofi;

/* The symbol versions of libfabric 1.13. Later libraries also have newer versions, whose structures have more members
 * at the end. So structures that we pass may be longer than 1.13's, and of those that we get, only the members of 1.13
 * are read. */
static const struct {
    const char *name, *version;
    size_t slot;
} symbols[] = {
    {"fi_getinfo", "FABRIC_1.3", offsetof(struct prs_ofi, getinfo)},
    {"fi_freeinfo", "FABRIC_1.3", offsetof(struct prs_ofi, freeinfo)},
    {"fi_dupinfo", "FABRIC_1.3", offsetof(struct prs_ofi, dupinfo)},
    {"fi_fabric", "FABRIC_1.1", offsetof(struct prs_ofi, fabric)},
    {"fi_strerror", "FABRIC_1.0", offsetof(struct prs_ofi, strerror)},
    {"fi_version", "FABRIC_1.0", offsetof(struct prs_ofi, version)},
};

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER; /* protects loaded and the filling of prs_ofi */
static bool loaded;
PRS_RENEW_IN_CHILD(load, load_lock)

static int load_locked(char *why, size_t why_bytes)
{
    /* Never closed: its providers leave threads and handlers behind. */
    void *library = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);

    if (!library) {
        snprintf(why, why_bytes, "%s", dlerror());
        return -ENOSYS;
    }
    for (size_t i = 0; i < sizeof(symbols) / sizeof(*symbols); i++) {
        void *address = dlvsym(library, symbols[i].name, symbols[i].version);

        if (!address) {
            snprintf(why, why_bytes, "libfabric.so.1 has no %s of version %s", symbols[i].name, symbols[i].version);
            return -ENOSYS;
        }
        memcpy((char *)&prs_ofi + symbols[i].slot, &address, sizeof(address));
    }
    PRS_INFO("libfabric %u.%u", FI_MAJOR(prs_ofi.version()), FI_MINOR(prs_ofi.version()));
    loaded = true;
    return 0;
}

int prs_ofi_load(char *why, size_t why_bytes)
{
    int r = 0;

    pthread_mutex_lock(&load_lock);
    if (!loaded)
        r = load_locked(why, why_bytes);
    pthread_mutex_unlock(&load_lock);
    return r;
}
