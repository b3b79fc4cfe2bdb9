/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/verbs/efa.h"

#include <dlfcn.h>
#include <infiniband/efadv.h>
#include <stdio.h>
#include <string.h>

#include "transport/nic/verbs/verbs_nic.h"
#include "transport/util/log.h"

/* Capabilities that older headers do not name. */
enum { CAPS_RDMA_READ = 1 << 0, CAPS_RNR_RETRY = 1 << 1, CAPS_RDMA_WRITE = 1 << 3 };

static struct {
    int (*query_device)(struct ibv_context *context, struct efadv_device_attr *attr, uint32_t bytes);
    struct ibv_qp *(*create_qp_ex)(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr,
                                   struct efadv_qp_init_attr *efa, uint32_t bytes);
    int (*query_ah)(struct ibv_ah *ah, struct efadv_ah_attr *attr, uint32_t bytes);
} efa;

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER; /* protects loaded and the filling of efa */
static bool loaded;

static void *find(void *library, const char *name, const char *version)
{
    void *address = dlvsym(library, name, version);

    return address ? address : dlsym(library, name);
}

/* Return false, with the reason in why. */
static bool load_locked(char *why, size_t why_bytes)
{
    /* libibverbs has opened it already, as the device's provider. Never closed, like libibverbs. */
    void *library = dlopen("libefa.so.1", RTLD_NOW | RTLD_GLOBAL), *query, *create, *query_ah;

    if (!library) {
        snprintf(why, why_bytes, "an EFA, but libefa.so.1 cannot be opened (%s): install libefa of rdma-core",
                 dlerror());
        return false;
    }
    query = find(library, "efadv_query_device", "EFA_1.1");
    create = find(library, "efadv_create_qp_ex", "EFA_1.1");
    query_ah = find(library, "efadv_query_ah", "EFA_1.1");
    if (!query || !create || !query_ah || !prs_verbs.qp_to_qp_ex || !prs_verbs.create_ah || !prs_verbs.destroy_ah) {
        snprintf(why, why_bytes, "an EFA, but rdma-core is too old to post to it: 27 or newer is needed");
        return false;
    }
    memcpy(&efa.query_device, &query, sizeof(query));
    memcpy(&efa.create_qp_ex, &create, sizeof(create));
    memcpy(&efa.query_ah, &query_ah, sizeof(query_ah));
    return true;
}

static bool load(char *why, size_t why_bytes)
{
    pthread_mutex_lock(&load_lock);
    if (!loaded)
        loaded = load_locked(why, why_bytes);
    pthread_mutex_unlock(&load_lock);
    return loaded;
}

void prs_efa_claim(struct prs_verbs_device *device)
{
    struct prs_domain *domain = &device->base;
    struct efadv_device_attr attr = {0};
    int r;

    if (device->attr.vendor_id != PRS_EFA_VENDOR)
        return;
    if (!load(domain->why_not, sizeof(domain->why_not)))
        return;
    r = efa.query_device(device->context, &attr, sizeof(attr));
    if (r) {
        snprintf(domain->why_not, sizeof(domain->why_not), "an Amazon device that libefa does not know: %s",
                 strerror(r < 0 ? -r : r));
        return;
    }
    if (!(attr.device_caps & CAPS_RDMA_READ) || !(attr.device_caps & CAPS_RDMA_WRITE)) {
        snprintf(
            domain->why_not, sizeof(domain->why_not),
            "an EFA without RDMA %s (capabilities %#x): an older generation, or rdma-core or its driver is too old",
            attr.device_caps & CAPS_RDMA_READ ? "writes" : "reads", attr.device_caps);
        return;
    }
    domain->nic = &prs_nic_srd;
    domain->max_send_wr = attr.max_sq_wr;
    domain->max_receive_wr = attr.max_rq_wr;
    device->max_message_bytes = attr.max_rdma_size;
    device->rnr_retry = attr.device_caps & CAPS_RNR_RETRY;
}

struct ibv_qp *prs_efa_create_srd(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
    struct efadv_qp_init_attr srd = {.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD};

    attr->qp_type = IBV_QPT_DRIVER;
    return efa.create_qp_ex(context, attr, &srd, sizeof(srd));
}

int prs_efa_handle_number(struct ibv_ah *ah, uint32_t *number)
{
    struct efadv_ah_attr attr = {0};
    int r = efa.query_ah(ah, &attr, sizeof(attr));

    *number = attr.ahn;
    return r > 0 ? -r : r;
}
