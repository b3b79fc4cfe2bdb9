/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/domain.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "transport/nic/verbs/efa.h"
#include "transport/nic/nic.h"
#include "transport/util/clock.h"
#include "transport/util/error.h"
#include "transport/util/fork.h"
#include "transport/util/log.h"
#include "transport/util/thread.h"

enum { SCRATCH_BYTES = 4096 };

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER; /* protects domains and their refs */
static struct prs_domain *domains;
PRS_RENEW_IN_CHILD(list, list_lock)

/* ---- events ---- */

/* Only events that make the rail unusable count, not a changed GID or LID or a client re-registration. Errors of a
 * queue reach the peer as failed completions; an overrun completion queue delivers no more of them, so its peer must be
 * told. */
static void take_event(struct prs_domain *domain, const struct ibv_async_event *event)
{
    uint64_t *down_since = &domain->down_since_ns[event->element.port_num % PRS_DOMAIN_PORTS];
    const char *name = prs_verbs.event_type_str(event->event_type);
    bool *overrun;

    switch (event->event_type) {
    case IBV_EVENT_CQ_ERR:
        PRS_ERROR("%s: %s: a completion queue is overrun, completions are lost", domain->name, name);
        /* Of its peers only. The queue is destroyed only after this event was acknowledged. */
        overrun = event->element.cq->cq_context;
        __atomic_store_n(overrun, true, __ATOMIC_RELEASE);
        break;
    case IBV_EVENT_DEVICE_FATAL:
        PRS_ERROR("%s: %s: the device is unusable until the driver resets it", domain->name, name);
        __atomic_store_n(&domain->fatal_event, (int)event->event_type + 1, __ATOMIC_RELAXED);
        break;
    case IBV_EVENT_PORT_ERR:
        PRS_WARN("%s port %d: %s: link down? retries go on for a while", domain->name, event->element.port_num, name);
        __atomic_store_n(down_since, prs_clock_ns(), __ATOMIC_RELAXED);
        break;
    case IBV_EVENT_PORT_ACTIVE:
        PRS_INFO("%s port %d: %s", domain->name, event->element.port_num, name);
        __atomic_store_n(down_since, 0, __ATOMIC_RELAXED);
        break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
        PRS_WARN("%s: %s on a queue of a peer", domain->name, name);
        break;
    default:
        PRS_DEBUG("%s: %s", domain->name, name);
    }
}

static void *watch_events(void *arg)
{
    struct prs_domain *domain = arg;
    struct pollfd fds[2] = {{.fd = domain->context->async_fd, .events = POLLIN},
                            {.fd = domain->stop_fd, .events = POLLIN}};

    while (poll(fds, 2, -1) >= 0 || errno == EINTR) { /* prs_domain_close() ends the loop through stop_fd */
        struct ibv_async_event event;

        if (fds[1].revents)
            break;
        if (!(fds[0].revents & POLLIN)) {
            if (fds[0].revents)
                break; /* the device is gone */
            continue;
        }
        if (prs_verbs.get_async_event(domain->context, &event))
            continue;
        take_event(domain, &event);
        prs_verbs.ack_async_event(&event);
    }
    return NULL;
}

static int start_events(struct prs_domain *domain)
{
    int flags = fcntl(domain->context->async_fd, F_GETFL), r;

    /* poll() may wake for an event that another reader has taken; the read must not block then. */
    if (flags >= 0)
        fcntl(domain->context->async_fd, F_SETFL, flags | O_NONBLOCK);
    domain->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (domain->stop_fd < 0)
        return prs_fail(-errno, "%s: eventfd: %s", domain->name, strerror(errno));
    r = prs_thread_start(&domain->event_thread, "prs-events", watch_events, domain);
    if (r) {
        close(domain->stop_fd);
        return prs_fail(-r, "%s: cannot start the event thread: %s", domain->name, strerror(r));
    }
    return 0;
}

static void stop_events(struct prs_domain *domain)
{
    uint64_t one = 1;

    if (write(domain->stop_fd, &one, sizeof(one)) != sizeof(one))
        PRS_WARN("%s: cannot wake the event thread: %s", domain->name, strerror(errno));
    pthread_join(domain->event_thread, NULL);
    close(domain->stop_fd);
}

int prs_domain_check(const struct prs_domain *domain, int port, uint64_t patience_ns, const char **event)
{
    int fatal = __atomic_load_n(&domain->fatal_event, __ATOMIC_RELAXED);
    uint64_t down_since = __atomic_load_n(&domain->down_since_ns[port % PRS_DOMAIN_PORTS], __ATOMIC_RELAXED);

    if (fatal)
        *event = prs_verbs.event_type_str((enum ibv_event_type)(fatal - 1));
    else if (down_since && prs_clock_ns() - down_since > patience_ns)
        *event = prs_verbs.event_type_str(IBV_EVENT_PORT_ERR);
    else
        return 0;
    return -EIO;
}

/* ---- open, close ---- */

static int open_scratch(struct prs_domain *domain)
{
    int r = prs_own_memory_init(&domain->scratch, SCRATCH_BYTES, "flushes");

    if (!r && domain->nic)
        r = prs_own_memory_register(&domain->scratch, 0, domain, PRS_ACCESS_LOCAL);
    if (r)
        prs_own_memory_fini(&domain->scratch);
    return r;
}

/* RC, unless the device is an EFA. */
static void choose_nic(struct prs_domain *domain)
{
    if (domain->context->device->transport_type == IBV_TRANSPORT_IWARP) {
        snprintf(domain->why_not, sizeof(domain->why_not),
                 "an iWARP device: it connects by rdma_cm only; RoCE mode, if the device has it, works");
        return;
    }
    domain->nic = &prs_nic_rc;
    domain->max_send_wr = domain->max_receive_wr = (uint32_t)(domain->attr.max_qp_wr > 0 ? domain->attr.max_qp_wr : 0);
    prs_efa_claim(domain);
    domain->adds = domain->nic && domain->nic->adds && domain->attr.atomic_cap != IBV_ATOMIC_NONE;
}

static int open_new(struct ibv_device *device, struct prs_domain **out)
{
    struct prs_domain *domain = calloc(1, sizeof(*domain));
    const char *name = prs_verbs.get_device_name(device);
    int r;

    if (!domain)
        return prs_fail(-ENOMEM, "%s: no memory for a domain", name);
    snprintf(domain->name, sizeof(domain->name), "%s", name);
    domain->refs = 1;
    domain->owner = getpid();
    prs_mr_cache_init(&domain->mrs);
    errno = 0;
    domain->context = prs_verbs.open_device(device);
    if (!domain->context) {
        r = prs_fail(errno ? -errno : -EIO, "%s cannot be opened: %s", name, strerror(errno));
        goto free_domain;
    }
    if ((r = prs_verbs.query_device(domain->context, &domain->attr))) {
        r = prs_fail(-r, "%s: query_device: %s", name, strerror(r));
        goto close_device;
    }
    choose_nic(domain);
    domain->pd = prs_verbs.alloc_pd(domain->context);
    if (!domain->pd) {
        r = prs_fail(errno ? -errno : -ENOMEM, "%s: alloc_pd: %s; the device allows %d", name, strerror(errno),
                     domain->attr.max_pd);
        goto close_device;
    }
    r = open_scratch(domain);
    if (r)
        goto dealloc_pd;
    r = start_events(domain);
    if (r)
        goto close_scratch;
    *out = domain;
    return 0;

close_scratch:
    prs_own_memory_fini(&domain->scratch);
dealloc_pd:
    prs_verbs.dealloc_pd(domain->pd);
close_device:
    prs_verbs.close_device(domain->context);
free_domain:
    prs_mr_cache_fini(&domain->mrs, NULL, NULL);
    free(domain);
    return r;
}

int prs_domain_open(struct ibv_device *device, struct prs_domain **out)
{
    const char *name = prs_verbs.get_device_name(device);
    struct prs_domain *domain;
    int r = 0;

    pthread_mutex_lock(&list_lock);
    for (domain = domains; domain; domain = domain->next)
        if (!strcmp(domain->name, name) && domain->owner == getpid())
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
    uint32_t leaked;

    stop_events(domain);
    leaked = prs_mr_cache_fini(&domain->mrs, release, domain);
    if (leaked)
        PRS_WARN("%s: %u registrations were not released before close", domain->name, leaked);
    prs_own_memory_fini(&domain->scratch);
    if (prs_verbs.dealloc_pd(domain->pd))
        PRS_WARN("%s: the protection domain is still in use at close: a peer was not closed", domain->name);
    else
        prs_verbs.close_device(domain->context);
    free(domain);
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
