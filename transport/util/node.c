/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/util/node.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "transport/util/env.h"

static uint64_t hash_text(const char *text)
{
    uint64_t hash = 14695981039346656037u;

    for (; *text; text++)
        hash = (hash ^ (uint8_t)*text) * 1099511628211u;
    return hash ? hash : 1;
}

/* Ranks pass memory over abstract UNIX sockets, which work only inside one network namespace. Pods of one machine have
 * one boot id but cannot reach each other's sockets. */
static uint64_t network_id(void)
{
    struct stat net;

    return !stat("/proc/self/ns/net", &net) ? (uint64_t)net.st_ino : 0;
}

uint64_t prs_node_id(void)
{
    const char *named = prs_env_text("PERSEUS_NODE");
    char boot[64] = "", text[96];
    int fd;

    if (named)
        return hash_text(named);
    fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (read(fd, boot, sizeof(boot) - 1) < 0)
            boot[0] = 0;
        close(fd);
    }
    snprintf(text, sizeof(text), "%s %" PRIx64, boot, network_id());
    return hash_text(text);
}
