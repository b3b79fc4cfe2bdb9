/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/verbs/port.h"

#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "transport/nic/verbs/device.h"
#include "transport/nic/verbs/gid.h"
#include "transport/util/log.h"

/* Vendor ids that drivers report: a word that such a NIC writes in strict order is seen after all its earlier
 * writes. */
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
static bool dmabuf_works(const struct prs_verbs_device *device)
{
    struct ibv_mr *mr;

    if (!prs_verbs.reg_dmabuf_mr)
        return false;
    errno = 0;
    mr = prs_verbs.reg_dmabuf_mr(device->pd, 0, 0, 0, -1, 0);
    if (mr) {
        prs_verbs.dereg_mr(mr);
        return false;
    }
    return errno != EOPNOTSUPP && errno != EPROTONOSUPPORT && errno != ENOSYS;
}

static void fill_memory(const struct prs_verbs_device *device, const struct prs_config *config,
                        struct prs_rail_info *info)
{
    bool peermem = peermem_loaded(), dmabuf = config->dmabuf && dmabuf_works(device);

    info->mem_kinds = PRS_MEM_HOST | (peermem ? PRS_MEM_CUDA : 0u) | (dmabuf ? PRS_MEM_DMABUF : 0u);
    if (!peermem || !dmabuf)
        snprintf(info->mem_note, sizeof(info->mem_note), "%s%s%s", peermem ? "" : "CUDA: nvidia_peermem is not loaded",
                 peermem || dmabuf ? "" : "; ",
                 dmabuf            ? ""
                 : !config->dmabuf ? "DMA-BUF: NCCL_DMABUF_ENABLE=0"
                                   : "DMA-BUF: not supported by device or kernel");
    info->relaxed_ordering = config->relaxed_ordering && prs_verbs.reg_mr_iova2;
    info->strict_is_last = device->attr.vendor_id == VENDOR_MELLANOX || device->attr.vendor_id == VENDOR_SOFTNIC;
}

/* Return 0, or -errno with the reason in why. */
static int read_address(const struct prs_verbs_device *device, uint8_t port, const struct ibv_port_attr *attr,
                        const struct prs_config *config, struct prs_rail_address *out, char *why, size_t why_bytes)
{
    struct prs_verbs_own_port own;
    struct prs_gid gid;
    int r = prs_gid_query(device->context, port, attr->gid_tbl_len, attr->link_layer == IBV_LINK_LAYER_ETHERNET, config,
                          &gid, why, why_bytes);

    if (r)
        return r;
    own = (struct prs_verbs_own_port){
        .port = {.lid = attr->lid, .mtu = (uint8_t)attr->active_mtu, .reads = prs_verbs_reads(device)},
        .gid_index = gid.index,
        .grh_required = attr->flags & IBV_QPF_GRH_REQUIRED};
    memcpy(own.port.gid, gid.raw, sizeof(own.port.gid));
    prs_verbs_tell_port(&own, out);
    return 0;
}

int prs_verbs_locate(const struct prs_rail *rail, const struct prs_config *config, struct prs_rail_address *out,
                     char *why, size_t why_bytes)
{
    const struct prs_verbs_device *device = prs_verbs_device(rail->domain);
    struct ibv_port_attr attr;

    if (!prs_verbs_query_port(device->context, rail->port, &attr, NULL) && attr.state == IBV_PORT_ACTIVE)
        return read_address(device, rail->port, &attr, config, out, why, why_bytes);
    snprintf(why, why_bytes, "its port is not active");
    return -ENETDOWN;
}

/* Return 0, or 1: the port is unusable, for the reason in why. */
static int check_port(const struct prs_domain *domain, const struct ibv_port_attr *attr, char *why, size_t why_bytes)
{
    if (attr->state != IBV_PORT_ACTIVE) {
        snprintf(why, why_bytes, "port state %d is not active (4): cable, switch or subnet manager?", attr->state);
        return 1;
    }
    if (!domain->nic->network && attr->link_layer != IBV_LINK_LAYER_INFINIBAND &&
        attr->link_layer != IBV_LINK_LAYER_ETHERNET) {
        snprintf(why, why_bytes, "link layer %d is neither InfiniBand nor Ethernet", attr->link_layer);
        return 1;
    }
    return 0;
}

int prs_verbs_probe(const struct prs_config *config, struct prs_rail *rail, char *why, size_t why_bytes)
{
    const struct prs_verbs_device *device = prs_verbs_device(rail->domain);
    struct prs_rail_info *info = &rail->info;
    struct prs_verbs_own_port own;
    struct ibv_port_attr attr;
    uint32_t speed_ex;
    int r = prs_verbs_query_port(device->context, rail->port, &attr, &speed_ex);

    if (r) {
        snprintf(why, why_bytes, "query_port: %s", strerror(-r));
        return 1;
    }
    if (check_port(rail->domain, &attr, why, why_bytes))
        return 1;
    info->is_roce = attr.link_layer == IBV_LINK_LAYER_ETHERNET;
    if (read_address(device, rail->port, &attr, config, &rail->address, why, why_bytes))
        return 1;
    if (!info->is_roce && (config->gid_index >= 0 || config->gid_range_set))
        PRS_INFO("%s:%d is no RoCE port: NCCL_IB_GID_INDEX and NCCL_IB_ADDR_RANGE are ignored", rail->domain->name,
                 rail->port);
    own = prs_verbs_own_port(&rail->address);
    prs_gid_text(own.port.gid, info->gid, sizeof(info->gid));
    info->gid_index = (int16_t)own.gid_index;
    rail->max_message_bytes = device->max_message_bytes ? device->max_message_bytes
                              : attr.max_msg_sz         ? attr.max_msg_sz
                                                        : 1u << 30;
    info->speed_mbps = speed_mbps(device->context, rail->port, &attr, speed_ex);
    info->max_peers = (uint32_t)(device->attr.max_qp > 2 ? device->attr.max_qp / 2 : 1); /* with probe queues */
    info->guid = be64toh(device->attr.sys_image_guid ? device->attr.sys_image_guid : device->attr.node_guid);
    snprintf(info->link, sizeof(info->link), "%s", info->is_roce ? "RoCE" : "InfiniBand");
    info->adaptive_routing = !info->is_roce;
    info->mtu = 128u << attr.active_mtu; /* IBV_MTU_256 is 1 */
    fill_memory(device, config, info);
    return 0;
}
