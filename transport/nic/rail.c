/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/rail.h"

#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "transport/nic/nic.h"
#include "transport/order/order.h"
#include "transport/util/log.h"

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
    static const char *const classes[] = {"infiniband", "net"};
    char link[PATH_MAX], real[PATH_MAX] = "", file[PATH_MAX + 16];
    size_t length;

    info->numa_node = -1;
    for (size_t i = 0; i < sizeof(classes) / sizeof(*classes) && !real[0]; i++) {
        snprintf(link, sizeof(link), "/sys/class/%s/%s/device", classes[i], info->name);
        if (!realpath(link, real))
            real[0] = '\0';
    }
    if (!real[0] || strlen(real) >= sizeof(info->pci_path))
        return; /* a virtual device */
    snprintf(file, sizeof(file), "%s/numa_node", real);
    info->numa_node = (int16_t)read_number(file, -1);
    length = strlen(real);
    if (length > 2 && real[length - 2] == '.' && isdigit((unsigned char)real[length - 1]))
        real[length - 1] = '0'; /* the ports of a NIC are functions of one PCI device */
    snprintf(info->pci_path, sizeof(info->pci_path), "%s", real);
}

/* A device may report no guid, or one that it shares with other devices. */
static uint64_t chip_guid(const struct prs_domain *domain, const struct prs_rail_info *info)
{
    const char *text = info->pci_path[0] ? info->pci_path : info->name;
    uint64_t guid = 0xcbf29ce484222325;

    if (info->guid && domain->nic->chip_guids)
        return info->guid;
    for (; *text; text++) /* FNV-1a */
        guid = (guid ^ (uint8_t)*text) * 0x100000001b3;
    return guid;
}

void prs_rail_locate(const struct prs_rail *rail, const struct prs_config *config, struct prs_rail_address *out)
{
    char why[160] = "", text[64];

    if (rail->domain->nic->locate(rail, config, out, why, sizeof(why))) {
        *out = rail->address;
        PRS_INFO("%s:%d: %s; connecting with the address that it had before", rail->info.name, rail->port, why);
    } else if (memcmp(&out->told, &rail->address.told, sizeof(out->told)) || out->own != rail->address.own) {
        rail->domain->nic->address_text(&out->told, text, sizeof(text));
        PRS_INFO("%s:%d has moved: now %s", rail->info.name, rail->port, text);
    }
}

int prs_rail_probe(struct prs_domain *domain, uint8_t port, const struct prs_config *config, struct prs_rail *out,
                   char *why, size_t why_bytes)
{
    struct prs_rail_info *info = &out->info;

    *out = (struct prs_rail){.domain = domain, .port = port};
    if (domain->why_not[0]) {
        snprintf(why, why_bytes, "%s", domain->why_not);
        return 1;
    }
    if (domain->nic->probe(config, out, why, why_bytes))
        return 1;
    snprintf(info->name, sizeof(info->name), "%s", domain->name);
    snprintf(info->queue_kind, sizeof(info->queue_kind), "%s", domain->nic->name);
    if (domain->nic->network)
        snprintf(info->link, sizeof(info->link), "%s", domain->nic->network);
    info->max_put_bytes = PRS_ORDER_SURE_PARTS * out->max_message_bytes;
    info->latency_us = 1;
    info->port = port;
    info->in_order = domain->nic->in_order;
    if (config->adaptive_routing >= 0)
        info->adaptive_routing = config->adaptive_routing;
    info->atomics = domain->adds;
    info->atomic_scope = domain->atomic_scope;
    info->traffic_class = (uint32_t)config->traffic_class;
    fill_pci_slot(info);
    info->guid = chip_guid(domain, info);
    return 0;
}
