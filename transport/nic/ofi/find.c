/* SPDX-License-Identifier: Apache-2.0 */
/* Asking libfabric what there is. */
#include <arpa/inet.h>
#include <errno.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <stdio.h>
#include <string.h>

#include "transport/nic/ofi/address.h"
#include "transport/nic/ofi/device.h"
#include "transport/nic/ofi/ofi_nic.h"
#include "transport/order/policy.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum {
    KEY_BYTES = 8,     /* most bytes of a remote key */
    OWN_KEY_BYTES = 4, /* bytes of a remote key that we choose: each is used once */
    DATA_BYTES = 8,    /* bytes of data with a write: the immediate and the size */
};

/* Can this back end use what the provider offers? Return false with the reason in why. */
static bool is_usable(const struct fi_info *info, char *why, size_t why_bytes)
{
    const struct fi_domain_attr *domain = info->domain_attr;

    /* libfabric has deprecated it, too. Seen with 1.17: a signal record was not there when its completion data came. */
    if (!strcmp(info->fabric_attr->prov_name, "sockets"))
        snprintf(
            why, why_bytes,
            "its writes are announced before their bytes are there; the better one for TCP is \"net\", in 2.x \"tcp\"");
    else if (domain->cq_data_size < DATA_BYTES)
        snprintf(why, why_bytes, "a write carries %zu bytes of completion data: %d are needed", domain->cq_data_size,
                 DATA_BYTES);
    else if (domain->mr_key_size > KEY_BYTES)
        snprintf(why, why_bytes, "its keys have %zu bytes: there is room for %d", domain->mr_key_size, KEY_BYTES);
    else if (prs_ofi_key_is_ours(info) && domain->mr_key_size < OWN_KEY_BYTES)
        snprintf(why, why_bytes, "its keys have %zu bytes: %d are needed", domain->mr_key_size, OWN_KEY_BYTES);
    else if (strlen(info->fabric_attr->prov_name) >= PRS_OFI_PROVIDER_BYTES)
        snprintf(why, why_bytes, "its name is longer than %d bytes", PRS_OFI_PROVIDER_BYTES - 1);
    else if (info->rx_attr->mode & FI_RX_CQ_DATA)
        snprintf(why, why_bytes, "completion data consumes receives (FI_RX_CQ_DATA)");
    else
        return true;
    return false;
}

/* ---- what is asked for ---- */

struct wish {
    bool order, fence, gpu_memory;
    int mr_mode;
};

/* First wish: virtual addresses. Then keys of the provider, since cxi delivers completion data to those only (rows.h).
 * Then keys that we choose, which say where a registration begins (device.h). Software providers have virtual addresses
 * only together with all else that FI_MR_BASIC says. */
static const int modes[] = {PRS_OFI_MR_BASIC, FI_MR_VIRT_ADDR | FI_MR_PROV_KEY, 0};
enum { MODES = sizeof(modes) / sizeof(*modes), WISHES = 8 * MODES };

static struct wish wish_at(int i)
{
    return (struct wish){.gpu_memory = !(i / MODES & 1),
                         .order = !(i / MODES & 2),
                         .fence = !(i / MODES & 4),
                         .mr_mode = modes[i % MODES]};
}

/* Where the CPU moves the bytes, it would do so by CUDA calls. Those wait for running kernels, but NCCL's kernels and
 * the fused ones wait for the bytes. */
static bool moves_by_itself(const struct fi_info *info)
{
    return !(info->caps & FI_HMEM) || !prs_ofi_uses_ip(info);
}

/* Return 0 or a negative error of libfabric. */
static int ask(const struct wish *wish, char *provider, struct fi_info **out)
{
    uint64_t order = wish->order ? FI_ORDER_WAW | FI_ORDER_RMA_WAW : 0;
    struct fi_tx_attr tx = {.msg_order = order, .op_flags = FI_DELIVERY_COMPLETE};
    struct fi_rx_attr rx = {.msg_order = order};
    struct fi_ep_attr ep = {.type = FI_EP_RDM};
    struct fi_domain_attr domain = {.threading = FI_THREAD_SAFE, .resource_mgmt = FI_RM_ENABLED};
    struct fi_fabric_attr fabric = {.prov_name = provider[0] ? provider : NULL};
    /* A user who names a provider may want one that reaches only this host. */
    uint64_t reach = provider[0] ? 0 : FI_LOCAL_COMM | FI_REMOTE_COMM;
    struct fi_info hints = {.caps = FI_RMA | reach | (wish->fence ? FI_FENCE : 0) | (wish->gpu_memory ? FI_HMEM : 0),
                            .mode = FI_CONTEXT | FI_CONTEXT2,
                            .tx_attr = &tx,
                            .rx_attr = &rx,
                            .ep_attr = &ep,
                            .domain_attr = &domain,
                            .fabric_attr = &fabric};

    domain.mr_mode = wish->mr_mode;
    if (wish->mr_mode == PRS_OFI_MR_BASIC)
        hints.mode |= PRS_OFI_LOCAL_MR;
    else
        domain.mr_mode |= FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_ENDPOINT;
    if (wish->gpu_memory)
        domain.mr_mode |= FI_MR_HMEM;
    return prs_ofi.getinfo(PRS_OFI_VERSION, NULL, NULL, 0, &hints, out);
}

/* Get the interfaces of the first wish that has a usable one; else those of the last wish that found any. The caller
 * frees *out, which may be NULL. Return 0 or the last error. */
static int find(const struct prs_config *config, struct fi_info **out)
{
    char provider[sizeof(config->provider)], why[128];
    int r = -FI_ENODATA;

    *out = NULL;
    memcpy(provider, config->provider, sizeof(provider));
    for (int i = 0; i < WISHES; i++) {
        struct wish wish = wish_at(i);
        struct fi_info *found;

        /* A fence may cost speed, so ask for it only if the policy needs it. */
        if (wish.fence && config->policy != PRS_POLICY_NIC_FENCE)
            continue;
        r = ask(&wish, provider, &found);
        if (r)
            continue;
        prs_ofi.freeinfo(*out);
        *out = found;
        for (const struct fi_info *info = found; info; info = info->next)
            if (moves_by_itself(info) && is_usable(info, why, sizeof(why)))
                return 0;
    }
    return *out ? 0 : r;
}

/* ---- which of them ---- */

static bool is_loopback(const struct fi_info *info)
{
    const struct sockaddr_in *v4 = info->src_addr;
    const struct sockaddr_in6 *v6 = info->src_addr;

    if (!info->src_addr)
        return false;
    return (info->addr_format == FI_SOCKADDR_IN && ntohl(v4->sin_addr.s_addr) >> 24 == 127) ||
           (info->addr_format == FI_SOCKADDR_IN6 && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr));
}

static bool is_wanted(const struct prs_config *config, const struct fi_info *info)
{
    const char *name = info->domain_attr->name;
    char why[128];

    if (!is_usable(info, why, sizeof(why))) {
        PRS_WARN("%s passed over: libfabric's provider %s: %s", name, info->fabric_attr->prov_name, why);
        return false;
    }
    if (!config->provider[0] && prs_ofi_uses_ip(info)) {
        PRS_INFO("%s: libfabric's provider %s is used only if PERSEUS_PROVIDER names it", name,
                 info->fabric_attr->prov_name);
        return false;
    }
    if (is_loopback(info) && (config->hca.exclude || prs_hca_filter_find(&config->hca, name, 1) < 0)) {
        PRS_INFO("%s passed over: it reaches only this host; NCCL_IB_HCA=%s uses it all the same", name, name);
        return false;
    }
    return true;
}

/* An interface has an entry for each of its addresses, and for each provider. */
static bool has_come(const struct fi_info *first, const struct fi_info *info)
{
    while (first != info && strcmp(first->domain_attr->name, info->domain_attr->name))
        first = first->next;
    return first != info;
}

static int explain(const struct prs_config *config, int error)
{
    return prs_fail(
        -ENODEV,
        "PERSEUS_PROVIDER=%s: libfabric offers no such provider with one-sided writes between connectionless "
        "endpoints and their delivery: %s; fi_info -l lists the providers that there are",
        config->provider, prs_ofi.strerror(-error));
}

int prs_ofi_devices(const struct prs_config *config, prs_nic_device_fn *fn, void *arg)
{
    struct fi_info *found;
    char why[192];
    int r = prs_ofi_load(why, sizeof(why));

    if (r && config->provider[0])
        return prs_fail(r, "PERSEUS_PROVIDER=%s: cannot open libfabric: %s", config->provider, why);
    if (r)
        return 0;
    r = find(config, &found);
    if (r)
        return config->provider[0] ? explain(config, r) : 0;
    for (struct fi_info *info = found; info; info = info->next) {
        struct prs_nic_device device = {&prs_nic_ofi, info->domain_attr->name, info, info->fabric_attr->prov_name};

        if (!has_come(found, info) && is_wanted(config, info))
            fn(arg, &device);
    }
    prs_ofi.freeinfo(found);
    return 0;
}
