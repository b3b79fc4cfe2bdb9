/* SPDX-License-Identifier: Apache-2.0 */
#include "util/node.h"

#include <fcntl.h>
#include <unistd.h>

#include "util/env.h"

static uint64_t hash_text(const char *text)
{
    uint64_t hash = 14695981039346656037u;

    for (; *text; text++)
        hash = (hash ^ (uint8_t)*text) * 1099511628211u;
    return hash ? hash : 1;
}

uint64_t prs_node_id(void)
{
    const char *named = prs_env_text("PERSEUS_NODE");
    char boot[64] = "";
    int fd;

    if (named)
        return hash_text(named);
    fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (read(fd, boot, sizeof(boot) - 1) < 0)
            boot[0] = 0;
        close(fd);
    }
    return hash_text(boot);
}
