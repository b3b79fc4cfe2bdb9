/* SPDX-License-Identifier: Apache-2.0 */
/* Give programs a /sys/class/infiniband, in a mount namespace of the calling process and its children. */
#ifndef SOFTNIC_SYSFS_H
#define SOFTNIC_SYSFS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tools/softnic/cli/pci.h"

struct sn_sysfs_nic {
    char name[64];
    uint64_t guid; /* host order */
    uint8_t gid[2][16];
    uint64_t rate_bps; /* 0: not modelled */
    bool efa;
    struct sn_pci_slot slot;
};

/* Enter a private mount namespace (with a user namespace where that avoids needing root, if it may make one) and put
 * the NICs into /sys/class/infiniband. Its former contents are hidden from this process and its children, and only from
 * them. `story` gets one line for the user, without newline: what was done, or what failed and what that means. Return
 * 0, or -errno with the file system unchanged (the mount namespace may be private all the same). */
int sn_sysfs_enter(const struct sn_sysfs_nic *nics, uint32_t count, bool may_make_user_namespace, char *story,
                   size_t story_len);

#endif
