/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/verbs/device.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "transport/nic/verbs/efa.h"
#include "transport/nic/verbs/verbs_nic.h"
#include "transport/util/error.h"
#include "transport/util/log.h"
#include "transport/util/thread.h"

enum { MAX_READS = 16 /* reads and atomics in flight on a queue */ };

/* ---- events ---- */

/* Only events that make the rail unusable count, not a changed GID or LID or a client re-registration. Errors of a
 * queue reach the peer as failed completions; an overrun completion queue delivers no more of them, so its peer must be
 * told. */
static void take_event(struct prs_verbs_device *device, const struct ibv_async_event *event)
{
    struct prs_domain *domain = &device->base;
    const char *name = prs_verbs.event_type_str(event->event_type);
    bool *overrun;

    switch (event->event_type) {
    case IBV_EVENT_CQ_ERR:
        PRS_ERROR("%s: %s: a completion queue is overrun, completions are lost", domain->name, name);
        /* This flag belongs to the peers of this queue. The queue is destroyed only after this event has been
         * acknowledged. */
        overrun = event->element.cq->cq_context;
        /* [overrun] pairs with the load in check_rails(), which reads nothing else */
        __atomic_store_n(overrun, true, __ATOMIC_RELEASE);
        break;
    case IBV_EVENT_DEVICE_FATAL:
        PRS_ERROR("%s: %s: the device is unusable until the driver resets it", domain->name, name);
        prs_domain_lose(domain, name);
        break;
    case IBV_EVENT_PORT_ERR:
        PRS_WARN("%s port %d: %s: link down? retries go on for a while", domain->name, event->element.port_num, name);
        prs_domain_set_port(domain, event->element.port_num, false);
        break;
    case IBV_EVENT_PORT_ACTIVE:
        PRS_INFO("%s port %d: %s", domain->name, event->element.port_num, name);
        prs_domain_set_port(domain, event->element.port_num, true);
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
    struct prs_verbs_device *device = arg;
    struct pollfd fds[2] = {{.fd = device->context->async_fd, .events = POLLIN},
                            {.fd = device->stop_fd, .events = POLLIN}};

    while (poll(fds, 2, -1) >= 0 || errno == EINTR) { /* prs_verbs_close_device() ends the loop through stop_fd */
        struct ibv_async_event event;

        if (fds[1].revents)
            break;
        if (!(fds[0].revents & POLLIN)) {
            if (fds[0].revents)
                break; /* the device is gone */
            continue;
        }
        if (!prs_work_begin())
            break;
        if (!prs_verbs.get_async_event(device->context, &event)) {
            take_event(device, &event);
            prs_verbs.ack_async_event(&event);
        }
        prs_work_end();
    }
    return NULL;
}

static int start_events(struct prs_verbs_device *device)
{
    int flags = fcntl(device->context->async_fd, F_GETFL), r;

    /* poll() may wake for an event that another reader has taken; the read must not block then. */
    if (flags >= 0)
        fcntl(device->context->async_fd, F_SETFL, flags | O_NONBLOCK);
    device->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (device->stop_fd < 0)
        return prs_fail(-errno, "%s: eventfd: %s", device->base.name, strerror(errno));
    r = prs_thread_start(&device->event_thread, "prs-events", watch_events, device);
    if (r) {
        close(device->stop_fd);
        return prs_fail(-r, "%s: cannot start the event thread: %s", device->base.name, strerror(r));
    }
    return 0;
}

static void stop_events(struct prs_verbs_device *device)
{
    uint64_t one = 1;

    if (write(device->stop_fd, &one, sizeof(one)) != sizeof(one))
        PRS_WARN("%s: cannot wake the event thread: %s", device->base.name, strerror(errno));
    pthread_join(device->event_thread, NULL);
    close(device->stop_fd);
}

/* ---- list ---- */

int prs_verbs_devices(const struct prs_config *config, prs_nic_device_fn *fn, void *arg)
{
    struct ibv_device **devices;
    int count = 0, r = prs_verbs_load();

    (void)config;
    if (r)
        return r;
    devices = prs_verbs.get_device_list(&count);
    if (!devices)
        return prs_fail(errno ? -errno : -ENOSYS, "cannot list RDMA devices: %s; is ib_uverbs loaded?",
                        strerror(errno));
    for (int i = 0; i < count; i++) {
        struct prs_nic_device device = {&prs_nic_rc, prs_verbs.get_device_name(devices[i]), devices[i], NULL};

        fn(arg, &device);
    }
    prs_verbs.free_device_list(devices);
    return 0;
}

/* ---- open, close ---- */

static enum prs_atomic_scope claimed_scope(enum ibv_atomic_cap cap)
{
    return cap == IBV_ATOMIC_NONE   ? PRS_ATOMIC_NONE
           : cap == IBV_ATOMIC_HCA  ? PRS_ATOMIC_NIC
           : cap == IBV_ATOMIC_GLOB ? PRS_ATOMIC_CPU
                                    : PRS_ATOMIC_UNKNOWN;
}

/* RC, unless the device is an EFA. */
static void choose_queues(struct prs_verbs_device *device)
{
    struct prs_domain *domain = &device->base;

    domain->nic = &prs_nic_rc;
    domain->ports = device->attr.phys_port_cnt;
    domain->max_registrations = device->attr.max_mr;
    domain->max_send_wr = domain->max_receive_wr = (uint32_t)(device->attr.max_qp_wr > 0 ? device->attr.max_qp_wr : 0);
    if (device->context->device->transport_type == IBV_TRANSPORT_IWARP)
        snprintf(domain->why_not, sizeof(domain->why_not),
                 "an iWARP device: it connects by rdma_cm only; RoCE mode, if the device has it, works");
    else
        prs_efa_claim(device);
    domain->adds = domain->nic->adds && device->attr.atomic_cap != IBV_ATOMIC_NONE;
    domain->atomic_scope = claimed_scope(device->attr.atomic_cap);
}

int prs_verbs_open_device(const struct prs_nic_device *which, struct prs_domain **out)
{
    struct prs_verbs_device *device = calloc(1, sizeof(*device));
    const char *name = which->name;
    int r;

    if (!device)
        return prs_fail(-ENOMEM, "%s: no memory for a device", name);
    snprintf(device->base.name, sizeof(device->base.name), "%s", name);
    errno = 0;
    device->context = prs_verbs.open_device(which->handle);
    if (!device->context) {
        r = prs_fail(errno ? -errno : -EIO, "%s cannot be opened: %s", name, strerror(errno));
        goto free_device;
    }
    if ((r = prs_verbs.query_device(device->context, &device->attr))) {
        r = prs_fail(-r, "%s: query_device: %s", name, strerror(r));
        goto close_device;
    }
    choose_queues(device);
    device->pd = prs_verbs.alloc_pd(device->context);
    if (!device->pd) {
        r = prs_fail(errno ? -errno : -ENOMEM, "%s: alloc_pd: %s; the device allows %d", name, strerror(errno),
                     device->attr.max_pd);
        goto close_device;
    }
    r = start_events(device);
    if (r)
        goto dealloc_pd;
    *out = &device->base;
    return 0;

dealloc_pd:
    prs_verbs.dealloc_pd(device->pd);
close_device:
    prs_verbs.close_device(device->context);
free_device:
    free(device);
    return r;
}

void prs_verbs_close_device(struct prs_domain *domain)
{
    struct prs_verbs_device *device = prs_verbs_device(domain);

    stop_events(device);
    if (prs_verbs.dealloc_pd(device->pd))
        PRS_WARN("%s: the protection domain is still in use at close: a peer was not closed", domain->name);
    else
        prs_verbs.close_device(device->context);
    free(device);
}

uint8_t prs_verbs_reads(const struct prs_verbs_device *device)
{
    return prs_verbs_limit_reads(device->attr.max_qp_rd_atom);
}

uint8_t prs_verbs_limit_reads(int most)
{
    return (uint8_t)(most < 1 ? 1 : most > MAX_READS ? MAX_READS : most);
}
