/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/ofi/device.h"

#include <errno.h>
#include <limits.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "transport/nic/ofi/address.h"
#include "transport/nic/ofi/attend.h"
#include "transport/nic/ofi/status.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum {
    LANDING_BYTES = 4096,
    LONGEST_PART = 1 << 30,
    MOST_KEYS_TRIED = 1 << 16, /* that others have */
    USEFUL_ORDER = 1 << 20,    /* order among shorter writes alone would cut messages into too many */
};

/* ---- open, close ---- */

/* Only what the provider reports counts, never what was asked for. */
static bool keeps_order(const struct fi_info *info)
{
    uint64_t order = info->tx_attr->msg_order & info->rx_attr->msg_order;

    return (order & (FI_ORDER_WAW | FI_ORDER_RMA_WAW)) && info->ep_attr->max_order_waw_size >= USEFUL_ORDER;
}

static int open_domain(struct prs_ofi_device *device)
{
    const char *name = device->base.name;
    int r = prs_ofi.fabric(device->info->fabric_attr, &device->fabric, NULL);

    if (r)
        return prs_fail(prs_ofi_errno(-r), "%s: fi_fabric of %s: %s", name, device->info->fabric_attr->prov_name,
                        prs_ofi.strerror(-r));
    r = fi_domain(device->fabric, device->info, &device->domain, NULL);
    if (r)
        return prs_fail(prs_ofi_errno(-r), "%s: fi_domain of %s: %s", name, device->info->fabric_attr->prov_name,
                        prs_ofi.strerror(-r));
    return 0;
}

static int open_landing(struct prs_ofi_device *device)
{
    int r = prs_own_memory_init(&device->landing, LANDING_BYTES, "requests of no bytes");

    return r ? r : prs_own_memory_register(&device->landing, 0, &device->base, PRS_ACCESS_ALL);
}

static void free_device(struct prs_ofi_device *device)
{
    prs_own_memory_fini(&device->landing);
    if (device->domain && fi_close(&device->domain->fid))
        PRS_WARN("%s: libfabric's domain is still in use at close: a peer was not closed", device->base.name);
    if (device->fabric && fi_close(&device->fabric->fid))
        PRS_WARN("%s: libfabric's fabric is still in use at close", device->base.name);
    for (uint32_t i = 0; i < PRS_OFI_ROWS && device->descriptors[i]; i++)
        free(device->descriptors[i]);
    prs_ofi.freeinfo(device->info);
    pthread_mutex_destroy(&device->lock);
    free(device);
}

int prs_ofi_open_device(const struct prs_nic_device *which, struct prs_domain **out)
{
    struct prs_ofi_device *device = calloc(1, sizeof(*device));
    const struct fi_info *info = which->handle;
    int r;

    if (!device)
        return prs_fail(-ENOMEM, "%s: no memory for a device", which->name);
    snprintf(device->base.name, sizeof(device->base.name), "%s", which->name);
    pthread_mutex_init(&device->lock, NULL);
    device->info = prs_ofi.dupinfo(info);
    if (!device->info) {
        free_device(device);
        return prs_fail(-ENOMEM, "%s: no memory for a device", which->name);
    }
    device->offsets = prs_ofi_uses_offsets(info);
    device->base.nic =
        &prs_ofi_tables[(keeps_order(info) ? PRS_OFI_IN_ORDER : 0) | (info->caps & FI_FENCE ? PRS_OFI_FENCE : 0)];
    device->base.ports = 1;
    device->base.max_send_wr = info->tx_attr->size < UINT_MAX ? (uint32_t)info->tx_attr->size : 0;
    device->base.max_registrations = INT_MAX;
    r = open_domain(device);
    if (!r)
        r = open_landing(device);
    if (!r)
        r = prs_ofi_attend_start(device);
    if (r) {
        free_device(device);
        return r;
    }
    PRS_INFO("%s: libfabric's provider %s, %s%s", which->name, which->variant,
             device->base.nic->in_order ? "writes keep order" : "writes keep no order",
             device->base.nic->fence ? ", with a fence" : "");
    *out = &device->base;
    return 0;
}

void prs_ofi_close_device(struct prs_domain *domain)
{
    struct prs_ofi_device *device = prs_ofi_device(domain);

    prs_ofi_attend_stop(device);
    free_device(device);
}

/* ---- the port ---- */

static uint32_t speed_mbps(const struct fi_info *info)
{
    char path[128];
    int mbps = 0;
    FILE *file;

    if (info->nic && info->nic->link_attr && info->nic->link_attr->speed >= 1000000)
        return (uint32_t)(info->nic->link_attr->speed / 1000000);
    snprintf(path, sizeof(path), "/sys/class/net/%.64s/speed", info->domain_attr->name);
    file = fopen(path, "re");
    if (file) {
        if (fscanf(file, "%d", &mbps) != 1) /* a virtual interface has none */
            mbps = 0;
        fclose(file);
    }
    return mbps > 0 ? (uint32_t)mbps : 10000;
}

static void read_host(const struct fi_info *info, uint8_t host[16])
{
    bool is_ip =
        info->addr_format == FI_SOCKADDR || info->addr_format == FI_SOCKADDR_IN || info->addr_format == FI_SOCKADDR_IN6;

    prs_ofi_read_host(is_ip ? info->src_addr : NULL, host);
}

int prs_ofi_locate(const struct prs_rail *rail, const struct prs_config *config, struct prs_rail_address *out,
                   char *why, size_t why_bytes)
{
    const struct prs_ofi_device *device = prs_ofi_device(rail->domain);
    const struct fi_info *info = device->info;
    struct prs_ofi_port port = {.landing = (uintptr_t)device->landing.addr,
                                .landing_key = prs_own_memory_remote_key(&device->landing, 0),
                                .protocol = info->ep_attr->protocol,
                                .protocol_version = (uint16_t)info->ep_attr->protocol_version,
                                .format = (uint16_t)(info->addr_format | (device->offsets ? PRS_OFI_OFFSETS : 0))};

    (void)config, (void)why, (void)why_bytes;
    snprintf(port.provider, sizeof(port.provider), "%s", info->fabric_attr->prov_name);
    read_host(info, port.host);
    prs_ofi_tell_port(&port, &out->told);
    out->own = 0;
    return 0;
}

int prs_ofi_probe(const struct prs_config *config, struct prs_rail *rail, char *why, size_t why_bytes)
{
    const struct fi_info *info = prs_ofi_device(rail->domain)->info;
    struct prs_rail_info *out = &rail->info;
    uint64_t longest = info->ep_attr->max_msg_size;
    uint8_t host[16];

    if (rail->domain->nic->in_order && info->ep_attr->max_order_waw_size < longest)
        longest = info->ep_attr->max_order_waw_size;
    rail->max_message_bytes = longest < LONGEST_PART ? longest : LONGEST_PART;
    out->speed_mbps = speed_mbps(info);
    out->gid_index = -1;
    out->max_peers = info->domain_attr->ep_cnt < UINT_MAX ? (uint32_t)info->domain_attr->ep_cnt : UINT_MAX;
    out->mem_kinds = PRS_MEM_HOST;
    snprintf(out->mem_note, sizeof(out->mem_note), "Perseus uses libfabric for host memory only");
    snprintf(out->link, sizeof(out->link), "%s", info->fabric_attr->prov_name);
    read_host(info, host);
    prs_ofi_host_text(host, out->gid, sizeof(out->gid));
    return prs_ofi_locate(rail, config, &rail->address, why, why_bytes);
}

/* ---- memory ---- */

static int keep_descriptor(struct prs_ofi_device *device, void *descriptor, uint32_t *key)
{
    uint32_t at, row;

    pthread_mutex_lock(&device->lock);
    at = device->free_descriptor;
    if (at)
        device->free_descriptor = (uint32_t)(uintptr_t)prs_ofi_descriptor(device, at);
    else
        at = ++device->descriptor_count; /* 0 names none */
    row = at / PRS_OFI_ROW;
    if (row < PRS_OFI_ROWS && !device->descriptors[row])
        device->descriptors[row] = calloc(PRS_OFI_ROW, sizeof(void *));
    if (row < PRS_OFI_ROWS && device->descriptors[row]) {
        device->descriptors[row][at % PRS_OFI_ROW] = descriptor;
    } else {
        device->descriptor_count--;
        at = 0;
    }
    pthread_mutex_unlock(&device->lock);
    *key = at;
    return at ? 0 : -ENOMEM;
}

static void drop_descriptor(struct prs_ofi_device *device, uint32_t key)
{
    pthread_mutex_lock(&device->lock);
    device->descriptors[key / PRS_OFI_ROW][key % PRS_OFI_ROW] = (void *)(uintptr_t)device->free_descriptor;
    device->free_descriptor = key;
    pthread_mutex_unlock(&device->lock);
}

/* Give the provider this memory under a key of ours that no other has, or under its own. Return 0 or an error of
 * libfabric. */
static int enter(struct prs_ofi_device *device, const struct prs_memory_range *range, uint64_t access,
                 struct fid_mr **out)
{
    void *start = (void *)(uintptr_t)range->addr;
    bool ours = prs_ofi_key_is_ours(device->info);
    int r = -FI_ENOKEY;

    /* Keys come again after 2^28 registrations. No process has so many at a time. */
    for (int tries = 0; r == -FI_ENOKEY && tries < MOST_KEYS_TRIED; tries++) {
        uint32_t key = ours ? __atomic_add_fetch(&device->next_key, 1, __ATOMIC_RELAXED) : 0;

        r = fi_mr_reg(device->domain, start, range->bytes, access, 0, key % (1u << PRS_OFI_KEY_BITS), 0, out, NULL);
    }
    return r;
}

int prs_ofi_register_memory(struct prs_domain *domain, const struct prs_memory_range *range,
                            struct prs_registration *out)
{
    static const uint64_t access[] = {[PRS_ACCESS_LOCAL] = FI_READ | FI_WRITE,
                                      [PRS_ACCESS_WRITTEN] = FI_READ | FI_WRITE | FI_REMOTE_WRITE,
                                      [PRS_ACCESS_ALL] = FI_READ | FI_WRITE | FI_REMOTE_WRITE | FI_REMOTE_READ};
    struct prs_ofi_device *device = prs_ofi_device(domain);
    struct fid_mr *mr;
    int r;

    /* Software providers look at no memory before they use it. This asks the kernel whether all of it is mapped. Host
     * memory: mem_kinds has no other. */
    if (msync((void *)(uintptr_t)range->addr, range->bytes, MS_ASYNC))
        return -EFAULT;
    if (device->offsets && range->addr >> (64 - PRS_OFI_KEY_BITS + PRS_OFI_PAGE_BITS))
        return -EOPNOTSUPP; /* beyond the 48 bits of an address that a key has room for */
    r = enter(device, range, access[range->access], &mr);
    if (r)
        return prs_ofi_errno(-r);
    *out = (struct prs_registration){.remote_key = fi_mr_key(mr), .object = mr};
    if (device->offsets)
        out->remote_key = prs_ofi_tell_key(range->addr, out->remote_key);
    r = keep_descriptor(device, fi_mr_desc(mr), &out->local_key);
    if (r)
        fi_close(&mr->fid);
    return r;
}

int prs_ofi_release_memory(struct prs_domain *domain, struct prs_registration *registered)
{
    struct prs_ofi_device *device = prs_ofi_device(domain);
    struct fid_mr *mr = registered->object;

    drop_descriptor(device, registered->local_key);
    return prs_ofi_errno(-fi_close(&mr->fid));
}
