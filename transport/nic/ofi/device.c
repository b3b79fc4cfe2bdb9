/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/ofi/device.h"

#include <errno.h>
#include <limits.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "transport/host/cuda.h"
#include "transport/nic/ofi/address.h"
#include "transport/nic/ofi/attend.h"
#include "transport/nic/ofi/completion.h"
#include "transport/nic/ofi/link.h"
#include "transport/nic/ofi/status.h"
#include "transport/util/error.h"
#include "transport/util/log.h"
#include "transport/util/patience.h"

enum {
    SHARED_COMPLETIONS = 1 << 17, /* that may wait on an endpoint of all links */
    CHECK_MS = 20000,             /* only a provider that says nothing takes so long */
    CHECK_LOOK_NS = 100000000,    /* see prs_patience_begin() */
    CHECK_BYTES = 5,
    CHECK_DATA = 0x600d,
    LANDING_BYTES = 4096,
    LONGEST_PART = 1 << (PRS_OFI_SIZE_BITS - 1),
    MOST_KEYS_TRIED = 1 << 16, /* that others have */
    PLAIN_BYTES = 1024,        /* longest message that is one write with an immediate over ofi_rxm */
    /* a provider that orders only writes shorter than this would need too many of them for a message */
    USEFUL_ORDER = 1 << 20,
};

/* ---- memory ---- */

static int keep_descriptor(struct prs_ofi_device *device, void *descriptor, uint32_t *key)
{
    struct prs_ofi_descriptor *kept = NULL;
    uint32_t at, chunk;

    pthread_mutex_lock(&device->lock);
    at = device->free_descriptor;
    if (at)
        device->free_descriptor = (uint32_t)(uintptr_t)prs_ofi_descriptor(device, at);
    else
        at = ++device->descriptor_count; /* 0 names none */
    chunk = at / PRS_OFI_CHUNK;
    if (chunk < PRS_OFI_CHUNKS && !device->descriptors[chunk])
        device->descriptors[chunk] = calloc(PRS_OFI_CHUNK, sizeof(*kept));
    if (chunk < PRS_OFI_CHUNKS && device->descriptors[chunk]) {
        kept = prs_ofi_descriptor_at(device, at);
        kept->descriptor = descriptor;
        *key = kept->uses++ << PRS_OFI_INDEX_BITS | at;
        __atomic_store_n(&kept->key, *key, __ATOMIC_RELEASE);
    } else {
        device->descriptor_count--;
    }
    pthread_mutex_unlock(&device->lock);
    return kept ? 0 : -ENOMEM;
}

/* After this no request of the registration is posted any more. Those that wait in a queue until the provider takes
 * them fail when it is their turn. */
static void drop_descriptor(struct prs_ofi_device *device, uint32_t key)
{
    struct prs_ofi_descriptor *kept = prs_ofi_descriptor_at(device, key);

    __atomic_store_n(&kept->key, 0, __ATOMIC_RELEASE);
    prs_ofi_attend_settle(device); /* who has found the key valid has posted by then */
    pthread_mutex_lock(&device->lock);
    kept->descriptor = (void *)(uintptr_t)device->free_descriptor;
    device->free_descriptor = prs_ofi_index(key);
    pthread_mutex_unlock(&device->lock);
}

/* A registration that belongs to an endpoint has its key only once it is bound there. */
static int bind_memory(const struct prs_ofi_device *device, struct fid_mr *mr)
{
    int r = fi_mr_bind(mr, &device->endpoint->ep->fid, 0);

    if (!r)
        r = fi_mr_enable(mr);
    if (r)
        fi_close(&mr->fid);
    return r;
}

/* Give the provider this memory, under a key of ours that no other has or under its own. Return 0 or a negative error
 * of libfabric. */
static int enter(struct prs_ofi_device *device, const struct prs_memory_range *range, uint64_t access,
                 struct fid_mr **out)
{
    struct iovec memory = {(void *)(uintptr_t)range->addr, range->bytes};
    struct fi_mr_attr attr = {.mr_iov = &memory, .iov_count = 1, .access = access, .iface = FI_HMEM_SYSTEM};
    bool ours = prs_ofi_key_is_ours(device->info);
    int r = -FI_ENOKEY;

    /* Tests pass host memory as GPU memory where there is no GPU. */
    if (range->kind == PRS_MEM_CUDA && device->gpu_memory) {
        attr.iface = FI_HMEM_CUDA;
        if (prs_cuda_device_of(range->addr, &attr.device.cuda))
            return -FI_EINVAL;
    }

    /* Keys come again after 2^28 registrations. No process has so many at a time. */
    for (int tries = 0; r == -FI_ENOKEY && tries < MOST_KEYS_TRIED; tries++) {
        uint32_t key = ours ? __atomic_add_fetch(&device->next_key, 1, __ATOMIC_RELAXED) : 0;

        attr.requested_key = key % (1u << PRS_OFI_KEY_BITS);
        r = fi_mr_regattr(device->domain, &attr, 0, out);
        if (!r && device->endpoint)
            r = bind_memory(device, *out);
    }
    return r;
}

/* ---- open, close ---- */

/* Only what the provider reports counts, never what was asked for. */
static bool keeps_order(const struct fi_info *info)
{
    uint64_t order = info->tx_attr->msg_order & info->rx_attr->msg_order;

    return (order & (FI_ORDER_WAW | FI_ORDER_RMA_WAW)) && info->ep_attr->max_order_waw_size >= USEFUL_ORDER;
}

/* Has this provider atomics on this device? The transport asks for none, so `info` does not say. libfabric promises
 * that they do not mix with others of the same device, and nothing about those of the CPU (fi_atomic(3)). */
static enum prs_atomic_scope claimed_scope(const struct fi_info *info)
{
    struct fi_info *hints = prs_ofi.dupinfo(info), *found = NULL;
    enum prs_atomic_scope scope = PRS_ATOMIC_UNKNOWN;

    if (!hints)
        return scope;
    hints->caps |= FI_ATOMIC;
    hints->tx_attr->caps = hints->rx_attr->caps = 0;           /* whatever `caps` needs */
    hints->tx_attr->msg_order = hints->rx_attr->msg_order = 0; /* of writes; ofi_rxm has none of atomics */
    scope = prs_ofi.getinfo(PRS_OFI_VERSION, NULL, NULL, 0, hints, &found) ? PRS_ATOMIC_NONE : PRS_ATOMIC_NIC;
    prs_ofi.freeinfo(found);
    prs_ofi.freeinfo(hints);
    return scope;
}

/* Why a lost rail cannot be replaced; NULL: it can. It must be possible to end an endpoint alone, while others use its
 * device, and with it every request to and from it. */
static const char *ends_because(const struct fi_info *info)
{
    if (!keeps_order(info))
        return "writes keep no order, so a count does not say which have arrived";
    if (info->domain_attr->mr_mode & FI_MR_ENDPOINT)
        return "connections share an endpoint, whose keys are valid for all";
    switch (info->ep_attr->protocol) {
    case FI_PROTO_RXM:
    case PRS_OFI_PROTO_RXM_TCP:
        return NULL; /* connections of its own, and a queue of their events */
    case PRS_OFI_PROTO_XNET:
        return "it uses freed memory if an endpoint closes while another connects to it";
    default:
        return "datagrams may arrive after the end of an endpoint";
    }
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

/* The address for requests of no bytes, as the provider counts addresses. */
static struct fi_rma_iov own_landing(const struct prs_ofi_device *device)
{
    struct fid_mr *registered = device->landing.at[0].registered.object;
    bool from_start = device->offsets || device->rows.used;

    return (struct fi_rma_iov){from_start ? 0 : (uintptr_t)device->landing.addr, 0, fi_mr_key(registered)};
}

static int open_rows(struct prs_ofi_device *device)
{
    struct prs_ofi_rows *rows = &device->rows;
    struct prs_memory_range table = {.bytes = PRS_OFI_TABLE_ROWS * sizeof(struct prs_ofi_row), .kind = PRS_MEM_HOST};
    int r = prs_own_memory_init(&rows->table, table.bytes, "keys of the provider");

    if (!r)
        r = prs_own_memory_init(&rows->slots, PRS_OFI_ROW_READS * sizeof(struct prs_ofi_row), "keys of other ranks");
    if (!r)
        r = prs_own_memory_register(&rows->slots, 0, &device->base, PRS_ACCESS_LOCAL);
    if (r)
        return r;
    table.addr = (uintptr_t)rows->table.addr;
    r = enter(device, &table, FI_REMOTE_READ, &rows->registered);
    if (r)
        return prs_ofi_fail(device, -r, "registering the table of keys");
    rows->used = true;
    device->base.max_registrations = PRS_OFI_TABLE_ROWS;
    return 0;
}

/* Write a few bytes to ourselves. Return 0 or a negative error of libfabric. */
static int try_data(struct prs_ofi_device *device)
{
    struct prs_ofi_endpoint *endpoint = device->endpoint;
    struct fi_rma_iov to = own_landing(device);
    struct prs_ofi_request request = {0};
    void *descriptor = prs_ofi_descriptor(device, prs_own_memory_local_key(&device->landing, 0));
    struct prs_patience patience = prs_patience_begin(CHECK_LOOK_NS);
    uint8_t name[256];
    fi_addr_t self;
    int r = 0;

    (void)prs_ofi_endpoint_name(endpoint, name, sizeof(name));
    if (prs_ofi_endpoint_insert(endpoint, name, &self))
        return -FI_EADDRNOTAVAIL;
    do
        r = (int)fi_writedata(endpoint->ep, device->landing.addr, CHECK_BYTES, descriptor,
                              (uint64_t)PRS_OFI_OWN_NUMBER << 32 | CHECK_DATA, self, to.addr + LANDING_BYTES / 2,
                              to.key, &request.space);
    while (r == -FI_EAGAIN && !prs_patience_is_over(&patience, CHECK_MS));
    while (!r && !(endpoint->own_done && endpoint->own_arrived)) {
        prs_ofi_read_completions(endpoint);
        sched_yield();
        if (endpoint->broken || prs_patience_is_over(&patience, CHECK_MS))
            r = -FI_ETIMEDOUT;
    }
    return r;
}

/* No attribute says whether writes may carry completion data to memory of this kind, and arrivals their size: cxi
 * reports 8 bytes of data in any case, and takes none unless a variable allows it. */
static int check_data(struct prs_ofi_device *device)
{
    const struct prs_ofi_endpoint *endpoint = device->endpoint;
    const char *provider = device->info->fabric_attr->prov_name;
    int r = try_data(device);

    if (r)
        return prs_fail(prs_ofi_errno(-r),
                        "%s: libfabric's provider %s delivers no completion data of writes, which Perseus needs: %s; "
                        "cxi does with FI_CXI_ENABLE_WRITEDATA=1 only",
                        device->base.name, provider, prs_ofi.strerror(-r));
    if (endpoint->own_bytes != CHECK_BYTES || (uint32_t)endpoint->own_data != CHECK_DATA)
        return prs_fail(-EOPNOTSUPP,
                        "%s: libfabric's provider %s reports %zu bytes and data %#llx of a write of %d bytes with data "
                        "%#x",
                        device->base.name, provider, endpoint->own_bytes, (unsigned long long)endpoint->own_data,
                        CHECK_BYTES, CHECK_DATA);
    return 0;
}

/* What registrations need comes first. */
static int open_parts(struct prs_ofi_device *device)
{
    const struct fi_info *info = device->info;
    bool shared = info->domain_attr->mr_mode & FI_MR_ENDPOINT, from_start = prs_ofi_uses_offsets(info);
    int r = open_domain(device);

    if (!r && shared)
        r = prs_ofi_endpoint_open(device, true, SHARED_COMPLETIONS, &device->endpoint);
    device->offsets = from_start && prs_ofi_key_is_ours(info);
    if (!r && from_start && !device->offsets)
        r = open_rows(device);
    if (!r)
        r = open_landing(device);
    if (!r && shared)
        r = check_data(device);
    if (!r)
        r = prs_ofi_attend_start(device);
    if (!r && shared)
        prs_ofi_attend_add(device->endpoint);
    return r;
}

static void free_device(struct prs_ofi_device *device)
{
    prs_own_memory_fini(&device->landing);
    prs_own_memory_fini(&device->rows.slots);
    if (device->rows.registered)
        fi_close(&device->rows.registered->fid);
    prs_own_memory_fini(&device->rows.table);
    prs_ofi_endpoint_close(device->endpoint);
    if (device->domain && fi_close(&device->domain->fid))
        PRS_WARN("%s: libfabric's domain is still in use at close: a peer was not closed", device->base.name);
    if (device->fabric && fi_close(&device->fabric->fid))
        PRS_WARN("%s: libfabric's fabric is still in use at close", device->base.name);
    for (uint32_t i = 0; i < PRS_OFI_CHUNKS && device->descriptors[i]; i++)
        free(device->descriptors[i]);
    prs_ofi.freeinfo(device->info);
    pthread_mutex_destroy(&device->attend_lock);
    pthread_mutex_destroy(&device->lock);
    free(device);
}

int prs_ofi_open_device(const struct prs_nic_device *which, struct prs_domain **out)
{
    struct prs_ofi_device *device = calloc(1, sizeof(*device));
    const struct fi_info *info = which->handle;
    const char *why = ends_because(info);
    int r;

    if (!device)
        return prs_fail(-ENOMEM, "%s: no memory for a device", which->name);
    snprintf(device->base.name, sizeof(device->base.name), "%s", which->name);
    pthread_mutex_init(&device->lock, NULL);
    pthread_mutex_init(&device->attend_lock, NULL);
    device->info = prs_ofi.dupinfo(info);
    if (!device->info) {
        free_device(device);
        return prs_fail(-ENOMEM, "%s: no memory for a device", which->name);
    }
    device->gpu_memory = info->caps & FI_HMEM && !prs_ofi_uses_ip(info);
    device->base.nic = &prs_ofi_tables[(keeps_order(info) ? PRS_OFI_IN_ORDER : 0) |
                                       (info->caps & FI_FENCE ? PRS_OFI_FENCE : 0) | (why ? 0 : PRS_OFI_FAILS_OVER)];
    device->base.ports = 1;
    device->base.max_send_wr = info->tx_attr->size < UINT_MAX ? (uint32_t)info->tx_attr->size : 0;
    device->base.max_registrations = INT_MAX;
    device->base.atomic_scope = claimed_scope(info);
    r = open_parts(device);
    if (r) {
        free_device(device);
        return r;
    }
    PRS_INFO("%s: libfabric's provider %s, %s%s, a lost rail %s%s", which->name, which->variant,
             device->base.nic->in_order ? "writes keep order" : "writes keep no order",
             device->base.nic->fence ? ", with a fence" : "", why ? "ends the peer: " : "is replaced", why ? why : "");
    *out = &device->base;
    return 0;
}

void prs_ofi_close_device(struct prs_domain *domain)
{
    struct prs_ofi_device *device = prs_ofi_device(domain);

    if (device->endpoint)
        prs_ofi_attend_remove(device->endpoint);
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
    prs_ofi_read_host(prs_ofi_uses_ip(info) ? info->src_addr : NULL, host);
}

int prs_ofi_locate(const struct prs_rail *rail, const struct prs_config *config, struct prs_rail_address *out,
                   char *why, size_t why_bytes)
{
    const struct prs_ofi_device *device = prs_ofi_device(rail->domain);
    const struct fi_info *info = device->info;
    struct fi_rma_iov landing = own_landing(device);
    struct prs_ofi_port port = {.landing = device->rows.used ? fi_mr_key(device->rows.registered) : landing.addr,
                                .landing_key = landing.key,
                                .protocol = info->ep_attr->protocol,
                                .protocol_version = (uint16_t)info->ep_attr->protocol_version,
                                .format = (uint16_t)(info->addr_format | (device->offsets ? PRS_OFI_OFFSETS : 0) |
                                                     (device->rows.used ? PRS_OFI_ROWS : 0) |
                                                     (device->endpoint ? PRS_OFI_SHARED : 0))};

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
    /* If a connection ends while a write with an immediate is received, ofi_rxm over tcp may end the process
     * (decisions/0019). A short write is received quickly, so a connection seldom ends during it. */
    if (info->ep_attr->protocol == FI_PROTO_RXM || info->ep_attr->protocol == PRS_OFI_PROTO_RXM_TCP)
        rail->plain_bytes = PLAIN_BYTES;
    out->speed_mbps = speed_mbps(info);
    out->gid_index = -1;
    out->max_peers = info->domain_attr->ep_cnt < UINT_MAX ? (uint32_t)info->domain_attr->ep_cnt : UINT_MAX;
    if (prs_ofi_device(rail->domain)->endpoint)
        out->max_peers = 1u << (PRS_OFI_PLACE_BITS - 1);
    out->mem_kinds = PRS_MEM_HOST | (prs_ofi_device(rail->domain)->gpu_memory ? PRS_MEM_CUDA : 0);
    snprintf(out->mem_note, sizeof(out->mem_note), "%s",
             prs_ofi_uses_ip(info)           ? "the CPU moves the bytes of this provider, and takes none of GPUs"
             : out->mem_kinds & PRS_MEM_CUDA ? "GPU memory by its address (FI_HMEM), not by DMA-BUF"
                                             : "libfabric's provider reports no FI_HMEM");
    snprintf(out->link, sizeof(out->link), "%s", info->fabric_attr->prov_name);
    read_host(info, host);
    prs_ofi_host_text(host, out->gid, sizeof(out->gid));
    return prs_ofi_locate(rail, config, &rail->address, why, why_bytes);
}

/* ---- memory of others ---- */

/* The key that others are told. Return 0 or -ENOMEM. */
static int tell_key(struct prs_ofi_device *device, uint64_t start, uint64_t key, struct prs_registration *out)
{
    out->remote_key = key;
    if (device->offsets)
        out->remote_key = prs_ofi_tell_key(start, key);
    if (device->rows.used)
        out->remote_key = prs_ofi_rows_add(device, prs_ofi_index(out->local_key), start, key);
    if (device->rows.used && !out->remote_key) {
        drop_descriptor(device, out->local_key);
        return -ENOMEM;
    }
    return 0;
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

    /* Software providers do not check memory before they use it. This asks the kernel whether all of it is mapped. */
    if ((range->kind == PRS_MEM_HOST || !device->gpu_memory) &&
        msync((void *)(uintptr_t)range->addr, range->bytes, MS_ASYNC))
        return -EFAULT;
    if (device->offsets && range->addr >> (64 - PRS_OFI_KEY_BITS + PRS_OFI_PAGE_BITS))
        return -EOPNOTSUPP; /* beyond the 48 bits of an address that a key has room for */
    r = enter(device, range, access[range->access], &mr);
    if (r)
        return prs_ofi_errno(-r);
    *out = (struct prs_registration){.object = mr};
    r = keep_descriptor(device, fi_mr_desc(mr), &out->local_key);
    if (!r && range->access != PRS_ACCESS_LOCAL)
        r = tell_key(device, range->addr, fi_mr_key(mr), out);
    if (r)
        fi_close(&mr->fid);
    return r;
}

int prs_ofi_release_memory(struct prs_domain *domain, struct prs_registration *registered)
{
    struct prs_ofi_device *device = prs_ofi_device(domain);
    struct fid_mr *mr = registered->object;

    if (device->rows.used)
        prs_ofi_rows_drop(device, prs_ofi_index(registered->local_key));
    drop_descriptor(device, registered->local_key);
    return prs_ofi_errno(-fi_close(&mr->fid));
}
