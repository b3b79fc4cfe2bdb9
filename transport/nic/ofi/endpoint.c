/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/ofi/endpoint.h"

#include <errno.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <stdlib.h>

#include "transport/nic/ofi/attend.h"
#include "transport/nic/ofi/device.h"
#include "transport/nic/ofi/link.h"
#include "transport/nic/ofi/status.h"
#include "transport/util/error.h"
#include "transport/util/log.h"
#include "transport/util/spin.h"

int prs_ofi_fail(const struct prs_ofi_device *device, int error, const char *what)
{
    return prs_fail(prs_ofi_errno(error), "%s: %s: %s: %s", device->base.name, device->info->fabric_attr->prov_name,
                    what, prs_ofi.strerror(error));
}

/* ---- open, close ---- */

static int open_objects(struct prs_ofi_endpoint *endpoint, uint32_t completions)
{
    struct prs_ofi_device *device = endpoint->device;
    struct fi_cq_attr cq = {.size = completions, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE};
    struct fi_av_attr av = {.type = device->info->domain_attr->av_type, .count = 2};
    int r = fi_cq_open(device->domain, &cq, &endpoint->cq, NULL);

    if (r)
        return prs_ofi_fail(device, -r, "fi_cq_open");
    r = fi_av_open(device->domain, &av, &endpoint->av, NULL);
    if (r)
        return prs_ofi_fail(device, -r, "fi_av_open");
    r = fi_endpoint(device->domain, device->info, &endpoint->ep, NULL);
    if (r)
        return prs_ofi_fail(device, -r, "fi_endpoint; are there too many of them, or of descriptors (ulimit -n)?");
    r = fi_ep_bind(endpoint->ep, &endpoint->cq->fid, FI_TRANSMIT | FI_RECV);
    if (!r)
        r = fi_ep_bind(endpoint->ep, &endpoint->av->fid, 0);
    if (r)
        return prs_ofi_fail(device, -r, "fi_ep_bind");
    r = fi_enable(endpoint->ep);
    return r ? prs_ofi_fail(device, -r, "fi_enable") : 0;
}

int prs_ofi_endpoint_open(struct prs_ofi_device *device, bool shared, uint32_t completions,
                          struct prs_ofi_endpoint **out)
{
    struct prs_ofi_endpoint *endpoint = calloc(1, sizeof(*endpoint));
    int r;

    if (!endpoint)
        return prs_fail(-ENOMEM, "%s: no memory for an endpoint", device->base.name);
    endpoint->device = device;
    endpoint->shared = shared;
    r = open_objects(endpoint, completions);
    if (r) {
        prs_ofi_endpoint_close(endpoint);
        return r;
    }
    *out = endpoint;
    return 0;
}

void prs_ofi_endpoint_close(struct prs_ofi_endpoint *endpoint)
{
    int r;

    if (!endpoint)
        return;
    prs_ofi_attend_remove(endpoint);
    r = endpoint->ep ? fi_close(&endpoint->ep->fid) : 0;
    if (!r)
        r = endpoint->cq ? fi_close(&endpoint->cq->fid) : 0;
    if (!r)
        r = endpoint->av ? fi_close(&endpoint->av->fid) : 0;
    if (r)
        PRS_WARN("%s: cannot close an endpoint, its completion queue or address vector: %s",
                 endpoint->device->base.name, prs_ofi.strerror(-r));
    for (struct prs_ofi_link *link = endpoint->dead, *next; link; link = next) {
        next = link->next_dead;
        link->free(link);
    }
    free(endpoint->place);
    free(endpoint);
}

/* ---- places ---- */

static int grow_locked(struct prs_ofi_endpoint *endpoint)
{
    uint32_t places = endpoint->places ? 2 * endpoint->places : 1;
    struct prs_ofi_place *place;

    if (places >= 1u << PRS_OFI_PLACE_BITS)
        return -ENOMEM;
    place = realloc(endpoint->place, places * sizeof(*place));
    if (!place)
        return -ENOMEM;
    for (uint32_t i = endpoint->places; i < places; i++)
        place[i] = (struct prs_ofi_place){0};
    endpoint->place = place;
    endpoint->places = places;
    return 0;
}

int prs_ofi_endpoint_join(struct prs_ofi_endpoint *endpoint, struct prs_ofi_link *link, uint32_t *number)
{
    uint32_t at = 0;
    int r = 0;

    prs_spin_lock(&endpoint->locked);
    while (at < endpoint->places && endpoint->place[at].link)
        at++;
    if (at == endpoint->places)
        r = grow_locked(endpoint);
    if (!r) {
        endpoint->place[at].link = link;
        *number = endpoint->place[at].turn << PRS_OFI_PLACE_BITS | at;
    }
    prs_spin_unlock(&endpoint->locked);
    return r ? prs_fail(r, "%s: no room for another connection on an endpoint", endpoint->device->base.name) : 0;
}

static void forget(struct prs_ofi_endpoint *endpoint, fi_addr_t *address)
{
    if (*address != FI_ADDR_UNSPEC)
        (void)fi_av_remove(endpoint->av, address, 1, 0); /* a provider that cannot remove it keeps it until the end */
}

bool prs_ofi_endpoint_leave(struct prs_ofi_endpoint *endpoint, struct prs_ofi_link *link)
{
    struct prs_ofi_place *place;
    bool dead;

    prs_spin_lock(&endpoint->locked);
    place = &endpoint->place[link->number & ((1u << PRS_OFI_PLACE_BITS) - 1)];
    place->link = NULL;
    place->turn++;
    dead = link->in_flight;
    if (!dead)
        forget(endpoint, &link->to);
    if (!dead && link->base.loopback)
        forget(endpoint, &prs_ofi_queue_of(link->base.loopback)->to);
    if (dead) {
        link->next_dead = endpoint->dead;
        endpoint->dead = link;
    }
    prs_spin_unlock(&endpoint->locked);
    return !dead;
}

/* ---- addresses ---- */

size_t prs_ofi_endpoint_name(struct prs_ofi_endpoint *endpoint, uint8_t *out, size_t room)
{
    size_t bytes = room;
    int r = -FI_ECANCELED;

    prs_spin_lock(&endpoint->locked);
    if (endpoint->ep)
        r = fi_getname(&endpoint->ep->fid, out, &bytes);
    prs_spin_unlock(&endpoint->locked);
    return r && r != -FI_ETOOSMALL ? 0 : bytes;
}

int prs_ofi_endpoint_insert(struct prs_ofi_endpoint *endpoint, const uint8_t *name, fi_addr_t *out)
{
    int r;

    prs_spin_lock(&endpoint->locked);
    r = endpoint->ep ? fi_av_insert(endpoint->av, name, 1, out, 0, NULL) : -FI_ECANCELED;
    prs_spin_unlock(&endpoint->locked);
    return r == 1 ? 0
                  : prs_ofi_fail(endpoint->device, r < 0 ? -r : FI_EINVAL, "fi_av_insert of the other side's address");
}
