/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/rail.h"

#include <ctype.h>
#include <endian.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "transport/nic/verbs/gid.h"
#include "transport/nic/nic.h"
#include "transport/order/order.h"
#include "transport/util/log.h"

/* Vendor ids that drivers report: a word that such a NIC writes in strict order is seen after all its earlier writes. */
enum { VENDOR_MELLANOX = 0x02c9, VENDOR_SOFTNIC = 0x5052 };

struct code {
    unsigned code, value;
};

static uint32_t lookup(const struct code *table, size_t count, unsigned code)
{
    for (size_t i = 0; i < count; i++)
        if (table[i].code == code)
            return table[i].value;
    return 0;
}

/* Codes of PortInfo in the InfiniBand architecture; RoCE drivers map their Ethernet speeds to them. */
static uint32_t speed_mbps(struct ibv_context *context, uint8_t port, const struct ibv_port_attr *attr,
                           uint32_t speed_ex)
{
    static const struct code lanes[] = {{1, 1}, {2, 4}, {4, 8}, {8, 12}, {16, 2}};
    static const struct code speeds[] = {{1, 2500},   {2, 5000},   {4, 10000},    {8, 10000},   {16, 14000},
                                         {32, 25000}, {64, 50000}, {128, 100000}, {256, 200000}};
    uint64_t hundreds_of_mbps = 0;
    uint32_t mbps = lookup(lanes, sizeof(lanes) / sizeof(*lanes), attr->active_width) *
                    lookup(speeds, sizeof(speeds) / sizeof(*speeds), speed_ex ? speed_ex : attr->active_speed);

    /* Of a bond this is the sum, where the codes are those of one member. */
    if (prs_verbs.query_port_speed && !prs_verbs.query_port_speed(context, port, &hundreds_of_mbps) &&
        hundreds_of_mbps && hundreds_of_mbps < UINT32_MAX / 100)
        return (uint32_t)hundreds_of_mbps * 100;
    return mbps ? mbps : 10000;
}

static int read_number(const char *path, int fallback)
{
    FILE *file = fopen(path, "re");
    int number = fallback;

    if (!file)
        return fallback;
    if (fscanf(file, "%d", &number) != 1)
        number = fallback;
    fclose(file);
    return number;
}

static void fill_pci_slot(struct prs_rail_info *info)
{
    char link[PATH_MAX], real[PATH_MAX], file[PATH_MAX + 16];
    size_t length;

    info->numa_node = -1;
    snprintf(link, sizeof(link), "/sys/class/infiniband/%s/device", info->name);
    if (!realpath(link, real) || strlen(real) >= sizeof(info->pci_path))
        return; /* a virtual device */
    snprintf(file, sizeof(file), "%s/numa_node", real);
    info->numa_node = (int16_t)read_number(file, -1);
    length = strlen(real);
    if (length > 2 && real[length - 2] == '.' && isdigit((unsigned char)real[length - 1]))
        real[length - 1] = '0'; /* the ports of a NIC are functions of one PCI device */
    snprintf(info->pci_path, sizeof(info->pci_path), "%s", real);
}

/* A device may report none, or one that does not tell it from others. */
static uint64_t chip_guid(const struct prs_domain *domain, const struct prs_rail_info *info)
{
    uint64_t guid = be64toh(domain->attr.sys_image_guid ? domain->attr.sys_image_guid : domain->attr.node_guid);
    const char *text = info->pci_path[0] ? info->pci_path : info->name;

    if (guid && domain->nic->chip_guids)
        return guid;
    for (guid = 0xcbf29ce484222325; *text; text++) /* FNV-1a */
        guid = (guid ^ (uint8_t)*text) * 0x100000001b3;
    return guid;
}

static bool peermem_loaded(void)
{
    static const char *const marks[] = {"/sys/kernel/mm/memory_peers/nv_mem/version",
                                        "/sys/kernel/mm/memory_peers/nv_mem_nc/version",
                                        "/sys/module/nvidia_peermem/version"};

    for (size_t i = 0; i < sizeof(marks) / sizeof(*marks); i++)
        if (access(marks[i], F_OK) == 0)
            return true;
    return false;
}

/* Register an invalid file: the error shows whether the feature or only the file is missing. */
static bool dmabuf_works(struct prs_domain *domain)
{
    struct ibv_mr *mr;

    if (!prs_verbs.reg_dmabuf_mr)
        return false;
    errno = 0;
    mr = prs_verbs.reg_dmabuf_mr(domain->pd, 0, 0, 0, -1, 0);
    if (mr) {
        prs_verbs.dereg_mr(mr);
        return false;
    }
    return errno != EOPNOTSUPP && errno != EPROTONOSUPPORT && errno != ENOSYS;
}

static void fill_memory(struct prs_domain *domain, const struct prs_config *config, struct prs_rail_info *info)
{
    bool peermem = peermem_loaded(), dmabuf = config->dmabuf && dmabuf_works(domain);

    info->mem_kinds = PRS_MEM_HOST | (peermem ? PRS_MEM_CUDA : 0u) | (dmabuf ? PRS_MEM_DMABUF : 0u);
    if (!peermem || !dmabuf)
        snprintf(info->mem_note, sizeof(info->mem_note), "%s%s%s", peermem ? "" : "CUDA: nvidia_peermem is not loaded",
                 peermem || dmabuf ? "" : "; ",
                 dmabuf            ? ""
                 : !config->dmabuf ? "DMA-BUF: NCCL_DMABUF_ENABLE=0"
                                   : "DMA-BUF: not supported by device or kernel");
    info->relaxed_ordering = config->relaxed_ordering && prs_verbs.reg_mr_iova2;
    info->strict_is_last = domain->attr.vendor_id == VENDOR_MELLANOX || domain->attr.vendor_id == VENDOR_SOFTNIC;
}

/* Return 0, or -errno with the reason in why. */
static int read_address(const struct prs_domain *domain, uint8_t port, const struct ibv_port_attr *attr,
                        const struct prs_config *config, struct prs_rail_address *out, char *why, size_t why_bytes)
{
    struct prs_gid gid;
    int r = prs_gid_query(domain->context, port, attr->gid_tbl_len, attr->link_layer == IBV_LINK_LAYER_ETHERNET, config,
                          &gid, why, why_bytes);

    if (r)
        return r;
    *out = (struct prs_rail_address){.gid_index = gid.index,
                                     .lid = attr->lid,
                                     .mtu = (uint8_t)attr->active_mtu,
                                     .grh_required = attr->flags & IBV_QPF_GRH_REQUIRED};
    memcpy(out->gid, gid.raw, sizeof(out->gid));
    return 0;
}

void prs_rail_locate(const struct prs_rail *rail, const struct prs_config *config, struct prs_rail_address *out)
{
    struct ibv_port_attr attr;
    char why[160] = "its port is not active", gid[64];

    *out = rail->address;
    if (prs_verbs_query_port(rail->domain->context, rail->port, &attr, NULL) || attr.state != IBV_PORT_ACTIVE ||
        read_address(rail->domain, rail->port, &attr, config, out, why, sizeof(why)))
        PRS_INFO("%s:%d: %s; connecting with the address that it had before", rail->info.name, rail->port, why);
    else if (memcmp(out->gid, rail->address.gid, sizeof(out->gid)) || out->gid_index != rail->address.gid_index ||
             out->lid != rail->address.lid) {
        prs_gid_text(out->gid, gid, sizeof(gid));
        PRS_INFO("%s:%d has moved: now GID %d %s, LID %u", rail->info.name, rail->port, out->gid_index, gid, out->lid);
    }
}

int prs_rail_probe(struct prs_domain *domain, uint8_t port, const struct prs_config *config, struct prs_rail *out,
                   char *why, size_t why_bytes)
{
    struct ibv_port_attr attr;
    uint32_t speed_ex;
    int r = prs_verbs_query_port(domain->context, port, &attr, &speed_ex);

    *out = (struct prs_rail){.domain = domain, .port = port};
    if (!domain->nic) {
        snprintf(why, why_bytes, "%s", domain->why_not);
        return 1;
    }
    if (r) {
        snprintf(why, why_bytes, "query_port: %s", strerror(-r));
        return 1;
    }
    if (attr.state != IBV_PORT_ACTIVE) {
        snprintf(why, why_bytes, "port state %d is not active (4): cable, switch or subnet manager?", attr.state);
        return 1;
    }
    if (!domain->nic->network && attr.link_layer != IBV_LINK_LAYER_INFINIBAND &&
        attr.link_layer != IBV_LINK_LAYER_ETHERNET) {
        snprintf(why, why_bytes, "link layer %d is neither InfiniBand nor Ethernet", attr.link_layer);
        return 1;
    }
    snprintf(out->info.name, sizeof(out->info.name), "%s", domain->name);
    out->info.is_roce = attr.link_layer == IBV_LINK_LAYER_ETHERNET;
    if (read_address(domain, port, &attr, config, &out->address, why, why_bytes))
        return 1;
    if (!out->info.is_roce && (config->gid_index >= 0 || config->gid_range_set))
        PRS_INFO("%s:%d is no RoCE port: NCCL_IB_GID_INDEX and NCCL_IB_ADDR_RANGE are ignored", domain->name, port);
    prs_gid_text(out->address.gid, out->info.gid, sizeof(out->info.gid));
    out->info.gid_index = (int16_t)out->address.gid_index;
    out->max_message_bytes = domain->max_message_bytes ? domain->max_message_bytes
                             : attr.max_msg_sz         ? attr.max_msg_sz
                                                       : 1u << 30;
    out->info.max_put_bytes = PRS_ORDER_SURE_PARTS * out->max_message_bytes;
    out->info.speed_mbps = speed_mbps(domain->context, port, &attr, speed_ex);
    out->info.max_peers = (uint32_t)(domain->attr.max_qp > 2 ? domain->attr.max_qp / 2 : 1); /* with probe queues */
    out->info.latency_us = 1;
    out->info.port = port;
    snprintf(out->info.queue_kind, sizeof(out->info.queue_kind), "%s", domain->nic->name);
    snprintf(out->info.link, sizeof(out->info.link), "%s",
             domain->nic->network ? domain->nic->network
             : out->info.is_roce  ? "RoCE"
                                  : "InfiniBand");
    out->info.in_order = domain->nic->in_order;
    out->info.adaptive_routing = config->adaptive_routing < 0 ? !out->info.is_roce : config->adaptive_routing;
    out->info.atomics = domain->adds;
    fill_pci_slot(&out->info);
    out->info.guid = chip_guid(domain, &out->info);
    fill_memory(domain, config, &out->info);
    return 0;
}
