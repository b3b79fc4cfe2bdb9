/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/domain.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "transport/nic/nic.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"
#include "transport/util/fork.h"
#include "transport/util/log.h"

enum { SCRATCH_BYTES = 4096 };

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER; /* protects domains and their refs */
static struct prs_domain *domains;
PRS_RENEW_IN_CHILD(list, list_lock)

/* ---- health ---- */

void prs_domain_lose(struct prs_domain *domain, const char *event)
{
    __atomic_store_n(&domain->fatal, event, __ATOMIC_RELAXED);
}

void prs_domain_set_port(struct prs_domain *domain, int port, bool up)
{
    __atomic_store_n(&domain->down_since_ns[port % PRS_DOMAIN_PORTS], up ? 0 : prs_clock_ns(), __ATOMIC_RELAXED);
}

int prs_domain_check(const struct prs_domain *domain, int port, uint64_t patience_ns, const char **event)
{
    uint64_t down_since = __atomic_load_n(&domain->down_since_ns[port % PRS_DOMAIN_PORTS], __ATOMIC_RELAXED);

    *event = __atomic_load_n(&domain->fatal, __ATOMIC_RELAXED);
    if (*event)
        return -EIO;
    if (!down_since || prs_clock_ns() - down_since <= patience_ns)
        return 0;
    *event = "port error";
    return -EIO;
}

/* ---- open, close ---- */

static int open_scratch(struct prs_domain *domain)
{
    int r = prs_own_memory_init(&domain->scratch, SCRATCH_BYTES, "flushes");

    if (!r)
        r = prs_own_memory_register(&domain->scratch, 0, domain, PRS_ACCESS_LOCAL);
    if (r)
        prs_own_memory_fini(&domain->scratch);
    return r;
}

static int open_new(const struct prs_nic_device *device, struct prs_domain **out)
{
    struct prs_domain *domain;
    int r = device->nic->open_device(device, &domain);

    if (r)
        return r;
    domain->refs = 1;
    domain->owner = getpid();
    domain->lister = device->nic;
    snprintf(domain->name, sizeof(domain->name), "%s", device->name);
    snprintf(domain->variant, sizeof(domain->variant), "%s", device->variant ? device->variant : "");
    prs_mr_cache_init(&domain->mrs);
    r = open_scratch(domain);
    if (r) {
        prs_mr_cache_fini(&domain->mrs, NULL, NULL);
        domain->nic->close_device(domain);
        return r;
    }
    *out = domain;
    return 0;
}

static bool is_of(const struct prs_domain *domain, const struct prs_nic_device *device)
{
    return domain->lister == device->nic && !strcmp(domain->name, device->name) &&
           !strcmp(domain->variant, device->variant ? device->variant : "") && domain->owner == getpid();
}

int prs_domain_open(const struct prs_nic_device *device, struct prs_domain **out)
{
    struct prs_domain *domain;
    int r = 0;

    pthread_mutex_lock(&list_lock);
    for (domain = domains; domain; domain = domain->next)
        if (is_of(domain, device))
            break;
    if (domain) {
        domain->refs++;
        *out = domain;
    } else {
        r = open_new(device, out);
        if (!r) {
            (*out)->next = domains;
            domains = *out;
        }
    }
    pthread_mutex_unlock(&list_lock);
    return r;
}

static int release(void *arg, struct prs_registration *registered)
{
    struct prs_domain *domain = arg;

    return domain->nic->release_memory(domain, registered);
}

static void close_last(struct prs_domain *domain)
{
    uint32_t leaked = prs_mr_cache_fini(&domain->mrs, release, domain);

    if (leaked)
        PRS_WARN("%s: %u registrations were not released before close", domain->name, leaked);
    prs_own_memory_fini(&domain->scratch);
    domain->nic->close_device(domain);
}

void prs_domain_close(struct prs_domain *domain)
{
    if (domain->owner != getpid())
        return;
    pthread_mutex_lock(&list_lock);
    if (--domain->refs == 0) {
        struct prs_domain **at = &domains;

        while (*at != domain)
            at = &(*at)->next;
        *at = domain->next;
        close_last(domain);
    }
    pthread_mutex_unlock(&list_lock);
}
