/* SPDX-License-Identifier: Apache-2.0 */
/* libfabric, opened at run time. All other functions are reached through the objects that these return. */
#ifndef TRANSPORT_OFI_H
#define TRANSPORT_OFI_H

#include <rdma/fabric.h>

/* FI_MR_BASIC and FI_LOCAL_MR: the headers of 2.x warn of these names, and there is still no other way to ask software
 * providers for virtual addresses. */
enum { PRS_OFI_MR_BASIC = 1 };
#define PRS_OFI_LOCAL_MR (1ull << 55)

/* FI_PROTO_RXM_TCP and FI_PROTO_XNET, which older headers lack. */
enum { PRS_OFI_PROTO_RXM_TCP = 22, PRS_OFI_PROTO_XNET = 25 };

/* The interface that is asked for. Later libraries still have it. */
#define PRS_OFI_VERSION FI_VERSION(1, 13)

struct prs_ofi {
    int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
                   struct fi_info **info);
    void (*freeinfo)(struct fi_info *info);
    struct fi_info *(*dupinfo)(const struct fi_info *info);
    int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
    const char *(*strerror)(int error);
    uint32_t (*version)(void);
};

extern struct prs_ofi prs_ofi;

/* Open it once in a process. Return 0 or -ENOSYS, not logged, with the reason in why. */
int prs_ofi_load(char *why, size_t why_bytes);

#endif
