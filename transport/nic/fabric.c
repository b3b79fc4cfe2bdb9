/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/fabric.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "transport/nic/backends.h"
#include "transport/order/policy.h"
#include "transport/host/socket.h"
#include "transport/util/error.h"
#include "transport/util/fork.h"
#include "transport/util/log.h"
#include "transport/util/pci_path.h"

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER; /* protects fabrics and their refs */
static struct prs_fabric *fabrics;
PRS_RENEW_IN_CHILD(list, list_lock)

/* Add the admitted ports of an open device; each takes a reference to it. */
static void add_ports(struct prs_fabric *fabric, const struct prs_nic_device *device, struct prs_domain *domain)
{
    const struct prs_config *config = &fabric->config;

    for (int port = 1; port <= domain->ports && fabric->rail_count < PRS_FABRIC_RAILS; port++) {
        struct prs_rail *rail = &fabric->rail[fabric->rail_count];
        int item = prs_hca_filter_find(&config->hca, domain->name, port);
        struct prs_domain *again;
        char why[160];

        if (!prs_hca_filter_admits(&config->hca, domain->name, port)) {
            PRS_INFO("%s:%d passed over: NCCL_IB_HCA", domain->name, port);
            continue;
        }
        if (prs_rail_probe(domain, (uint8_t)port, config, rail, why, sizeof(why))) {
            PRS_INFO("%s:%d passed over: %s", domain->name, port, why);
            continue;
        }
        if (prs_domain_open(device, &again))
            continue;
        rail->info.rail_id = (int16_t)(item < 0 || config->hca.exclude ? -1 : config->hca.item[item].rail);
        rail->info.plane_id = (int16_t)(item < 0 || config->hca.exclude ? -1 : config->hca.item[item].plane);
        PRS_INFO("%s:%d usable: %s, %u Mb/s, GID %d %s, NUMA node %d, memory:%s%s%s%s%s%s%s", domain->name, port,
                 rail->info.link, rail->info.speed_mbps, rail->info.gid_index, rail->info.gid, rail->info.numa_node,
                 " host", rail->info.mem_kinds & PRS_MEM_CUDA ? " CUDA" : "",
                 rail->info.mem_kinds & PRS_MEM_DMABUF ? " DMA-BUF" : "",
                 rail->info.relaxed_ordering ? ", relaxed ordering" : "", rail->info.mem_note[0] ? " (" : "",
                 rail->info.mem_note, rail->info.mem_note[0] ? ")" : "");
        fabric->rail_count++;
    }
}

static int compare_rails(const void *a, const void *b)
{
    const struct prs_rail_info *x = &((const struct prs_rail *)a)->info, *y = &((const struct prs_rail *)b)->info;
    int by_path = strcmp(x->pci_path, y->pci_path), by_name = strcmp(x->name, y->name);

    return by_path ? by_path : by_name ? by_name : x->port - y->port;
}

/* The two ports of a card may be two PCI functions, hence two devices, each with a port 1 and the same guid. */
void prs_fabric_number_ports(struct prs_fabric *fabric)
{
    for (int i = 0; i < fabric->rail_count; i++) {
        struct prs_rail_info *info = &fabric->rail[i].info;

        info->chip_port = info->port;
        for (int k = 0; k < i; k++) {
            const struct prs_rail_info *earlier = &fabric->rail[k].info;

            if (earlier->guid == info->guid && earlier->chip_port == info->chip_port) {
                info->chip_port++;
                k = -1; /* this number may be taken too */
            }
        }
    }
}

static void add_device(void *arg, const struct prs_nic_device *device)
{
    struct prs_fabric *fabric = arg;
    struct prs_domain *domain;

    fabric->device_count++;
    if (!fabric->config.hca.exclude && !prs_hca_filter_admits(&fabric->config.hca, device->name, -1)) {
        PRS_INFO("%s passed over: NCCL_IB_HCA", device->name); /* before opening it */
        return;
    }
    if (prs_domain_open(device, &domain))
        return; /* the failure is logged; other devices may still work */
    add_ports(fabric, device, domain);
    prs_domain_close(domain);
}

int prs_fabric_find_rails(struct prs_fabric *fabric, const struct prs_nic_ops *const *backends)
{
    const char *provider = fabric->config.provider;
    int r = -ENOSYS;

    /* A host has the libraries of some back ends. */
    for (; *backends; backends++) {
        bool by_itself = (*backends)->has_providers && !provider[0];
        int found;

        if (by_itself ? fabric->device_count > 0 : provider[0] && !(*backends)->has_providers)
            continue;
        found = (*backends)->devices(&fabric->config, add_device, fabric);
        if (by_itself)
            found = fabric->rail_count ? 0 : r; /* nobody has asked for this back end's library */
        if (r)
            r = found;
    }
    /* The same order in every process, whatever the order of the kernel, because rails are paired by position. */
    qsort(fabric->rail, (size_t)fabric->rail_count, sizeof(*fabric->rail), compare_rails);
    prs_fabric_number_ports(fabric);
    return r;
}

static int open_new(const struct prs_config *config, struct prs_fabric **out)
{
    struct prs_fabric *fabric = calloc(1, sizeof(*fabric));
    int r = 0;

    if (!fabric)
        return prs_fail(-ENOMEM, "no memory for a fabric");
    fabric->refs = 1;
    fabric->owner = getpid();
    fabric->config = *config;
    prs_config_warn_ignored();
    if (config->disabled)
        PRS_INFO("NCCL_IB_DISABLE=1: no rails are used");
    else
        r = prs_fabric_find_rails(fabric, prs_backends);
    if (r) {
        free(fabric);
        return r;
    }
    *out = fabric;
    return 0;
}

int prs_fabric_open(const struct prs_fabric_options *options, struct prs_fabric **out)
{
    struct prs_config config; /* prs_config_read() zeroes all of it, so memcmp() works */
    struct prs_fabric *fabric;
    int r = prs_config_read(options, &config);

    if (r)
        return r;
    pthread_mutex_lock(&list_lock);
    for (fabric = fabrics; fabric; fabric = fabric->next)
        if (fabric->owner == getpid() && !memcmp(&fabric->config, &config, sizeof(config)))
            break;
    if (fabric) {
        fabric->refs++;
        *out = fabric;
    } else {
        r = open_new(&config, out);
        if (!r) {
            (*out)->next = fabrics;
            fabrics = *out;
        }
    }
    pthread_mutex_unlock(&list_lock);
    return r;
}

void prs_fabric_close(struct prs_fabric *fabric)
{
    if (!fabric || fabric->owner != getpid())
        return;
    pthread_mutex_lock(&list_lock);
    if (--fabric->refs == 0) {
        struct prs_fabric **at = &fabrics;

        while (*at != fabric)
            at = &(*at)->next;
        *at = fabric->next;
        for (int i = 0; i < fabric->rail_count; i++)
            prs_domain_close(fabric->rail[i].domain);
        free(fabric);
    }
    pthread_mutex_unlock(&list_lock);
}

int prs_fabric_rails(const struct prs_fabric *fabric)
{
    return fabric->rail_count;
}

int prs_rail_query(const struct prs_fabric *fabric, int rail, struct prs_rail_info *out)
{
    if (rail < 0 || rail >= fabric->rail_count)
        return prs_fail(-EINVAL, "rail %d does not exist: the fabric has %d", rail, fabric->rail_count);
    *out = fabric->rail[rail].info;
    return 0;
}

int prs_fabric_check_set(const struct prs_fabric *fabric, const struct prs_rail_set *rails, const char *caller)
{
    const struct prs_nic_ops *nic = NULL;
    uint64_t seen = 0;

    if (rails->count < 1 || rails->count > PRS_MAX_RAILS)
        return prs_fail(-EINVAL, "%s: %d rails: must be 1 to %d", caller, rails->count, PRS_MAX_RAILS);
    for (int i = 0; i < rails->count; i++) {
        int rail = rails->rail[i];

        if (rail < 0 || rail >= fabric->rail_count || (seen >> rail & 1))
            return prs_fail(-EINVAL, "%s: rail %d is named twice or does not exist (the fabric has %d)", caller, rail,
                            fabric->rail_count);
        seen |= 1ull << rail;
        if (nic && fabric->rail[rail].domain->nic != nic)
            return prs_fail(-EINVAL, "%s: %s has %s queues, %s has %s: one peer cannot use both; NCCL_IB_HCA chooses",
                            caller, fabric->rail[rails->rail[0]].info.name,
                            fabric->rail[rails->rail[0]].info.queue_kind, fabric->rail[rail].info.name,
                            fabric->rail[rail].info.queue_kind);
        nic = fabric->rail[rail].domain->nic;
    }
    return 0;
}

static bool can_stand_by(const struct prs_rail *rail, const struct prs_rail *other)
{
    const struct prs_rail_info *x = &rail->info, *y = &other->info;

    return other->domain != rail->domain && !(x->guid && x->guid == y->guid) &&
           other->domain->nic == rail->domain->nic && x->is_roce == y->is_roce &&
           (x->plane_id < 0 || y->plane_id < 0 || x->plane_id == y->plane_id) && (x->mem_kinds & ~y->mem_kinds) == 0 &&
           x->atomics == y->atomics;
}

bool prs_fabric_add_standby(const struct prs_fabric *fabric, const struct prs_rail_set *rails, enum prs_policy policy,
                            struct prs_rail_set *out)
{
    const struct prs_rail *rail = &fabric->rail[rails->rail[0]];
    int best = -1, nearest = -1;

    *out = *rails;
    if (!fabric->config.failover || !fabric->config.standby || rails->count != 1 || !rail->domain->nic->fails_over ||
        (policy != PRS_POLICY_AUTO && policy != PRS_POLICY_COUNTED))
        return false;
    /* Among equally near rails take the next one by number, so that each rail of a node has a different standby
     * rail. */
    for (int k = 1; k < fabric->rail_count; k++) {
        int i = (rails->rail[0] + k) % fabric->rail_count;
        int near = prs_pci_path_common(rail->info.pci_path, fabric->rail[i].info.pci_path);

        if (can_stand_by(rail, &fabric->rail[i]) && near > nearest) {
            nearest = near;
            best = i;
        }
    }
    if (best < 0)
        return false;
    out->rail[out->count++] = best;
    return true;
}

void prs_fabric_all_rails(const struct prs_fabric *fabric, const struct prs_rail_set *rails, struct prs_rail_set *all)
{
    (void)prs_fabric_add_standby(fabric, rails, (enum prs_policy)fabric->config.policy, all);
}

int prs_fabric_check_rail(const struct prs_fabric *fabric, int index, uint64_t patience_ns)
{
    const struct prs_rail *rail = &fabric->rail[index];
    const char *event;
    char text[160];

    if (!fabric->config.return_async_events || !prs_domain_check(rail->domain, rail->port, patience_ns, &event))
        return 0;
    snprintf(text, sizeof(text), "%s:%d: %s", rail->info.name, rail->port, event);
    return prs_error_repeat(-EIO, text); /* the event thread has logged it */
}

int prs_fabric_check(const struct prs_fabric *fabric, const struct prs_rail_set *rails)
{
    int r = 0;

    for (int i = 0; i < rails->count && !r; i++)
        r = prs_fabric_check_rail(fabric, rails->rail[i], prs_config_patience_ns(&fabric->config));
    return r;
}

static int choose_policy(const struct prs_fabric *fabric, const struct prs_rail_set *asked, enum prs_policy *policy,
                         char *why, size_t bytes)
{
    struct prs_policy_facts facts = {.in_order = true, .fence = true};
    int r = prs_fabric_check_set(fabric, asked, "policy");
    struct prs_rail_set all;
    const struct prs_rail_set *rails = &all;

    if (r)
        return r;
    (void)prs_fabric_add_standby(fabric, asked, (enum prs_policy)fabric->config.policy, &all);
    for (int i = 0; i < rails->count; i++) {
        const struct prs_rail_info *info = &fabric->rail[rails->rail[i]].info;

        facts.in_order &= info->in_order;
        facts.fence &= fabric->rail[rails->rail[i]].domain->nic->fence;
        facts.adaptive_routing |= info->adaptive_routing;
        facts.relaxed_ordering |= info->relaxed_ordering;
    }
    facts.queues = (uint32_t)(rails->count * fabric->config.queues_per_rail);
    return prs_policy_choose((enum prs_policy)fabric->config.policy, &facts, policy, why, bytes);
}

int prs_fabric_policy(const struct prs_fabric *fabric, const struct prs_rail_set *rails, char *text, size_t bytes)
{
    enum prs_policy policy;
    char why[128];
    int r = choose_policy(fabric, rails, &policy, why, sizeof(why));

    if (!r)
        snprintf(text, bytes, "%s (%s)", prs_policy_names[policy], why);
    return r;
}

int prs_fabric_interface(const struct prs_fabric *fabric, char *text, size_t bytes)
{
    const struct prs_hca_filter *filter = &fabric->config.ifname;
    const char *why = "first by preference: running, then IP over InfiniBand, then the subnet of NCCL_COMM_ID";
    union prs_address address;
    char name[64], host[PRS_ADDRESS_TEXT];
    int r = prs_socket_interface(&fabric->config, &address, name, sizeof(name));

    if (r)
        return r;
    prs_address_text(&address, host);
    *strrchr(host, ':') = '\0'; /* the port */
    if (filter->count && !filter->exclude)
        why = "admitted by NCCL_SOCKET_IFNAME";
    else if (!strcmp(name, "lo"))
        why = "no other is up with an address, so only ranks of this host can connect";
    snprintf(text, bytes, "%s %s (%s)", name, host, why);
    return 0;
}

int prs_fabric_receiver_raises(const struct prs_fabric *fabric, const struct prs_rail_set *rails)
{
    enum prs_policy policy;
    bool adds = true;
    char why[128];
    int r = choose_policy(fabric, rails, &policy, why, sizeof(why));

    if (r)
        return r;
    for (int i = 0; i < rails->count; i++)
        adds &= fabric->rail[rails->rail[i]].domain->adds;
    return prs_policy_signals_are_records(policy, adds);
}
