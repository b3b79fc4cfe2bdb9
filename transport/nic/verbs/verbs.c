/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/verbs/verbs.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>

#include "transport/util/error.h"
#include "transport/util/log.h"

struct prs_verbs prs_verbs;

struct symbol {
    const char *name;
    const char *version;
    size_t slot;
    int optional;
};

#define SLOT(member) offsetof(struct prs_verbs, member)

static const struct symbol symbols[] = {
    {"ibv_get_device_list", "IBVERBS_1.1", SLOT(get_device_list), 0},
    {"ibv_free_device_list", "IBVERBS_1.1", SLOT(free_device_list), 0},
    {"ibv_get_device_name", "IBVERBS_1.1", SLOT(get_device_name), 0},
    {"ibv_open_device", "IBVERBS_1.1", SLOT(open_device), 0},
    {"ibv_close_device", "IBVERBS_1.1", SLOT(close_device), 0},
    {"ibv_get_async_event", "IBVERBS_1.1", SLOT(get_async_event), 0},
    {"ibv_ack_async_event", "IBVERBS_1.1", SLOT(ack_async_event), 0},
    {"ibv_query_device", "IBVERBS_1.1", SLOT(query_device), 0},
    {"ibv_query_port", "IBVERBS_1.1", SLOT(query_port_legacy), 0},
    {"ibv_query_gid", "IBVERBS_1.1", SLOT(query_gid), 0},
    {"ibv_alloc_pd", "IBVERBS_1.1", SLOT(alloc_pd), 0},
    {"ibv_dealloc_pd", "IBVERBS_1.1", SLOT(dealloc_pd), 0},
    {"ibv_reg_mr", "IBVERBS_1.1", SLOT(reg_mr), 0},
    {"ibv_dereg_mr", "IBVERBS_1.1", SLOT(dereg_mr), 0},
    {"ibv_create_cq", "IBVERBS_1.1", SLOT(create_cq), 0},
    {"ibv_destroy_cq", "IBVERBS_1.1", SLOT(destroy_cq), 0},
    {"ibv_resize_cq", "IBVERBS_1.1", SLOT(resize_cq), 1},
    {"ibv_create_qp", "IBVERBS_1.1", SLOT(create_qp), 0},
    {"ibv_modify_qp", "IBVERBS_1.1", SLOT(modify_qp), 0},
    {"ibv_destroy_qp", "IBVERBS_1.1", SLOT(destroy_qp), 0},
    {"ibv_fork_init", "IBVERBS_1.1", SLOT(fork_init), 0},
    {"ibv_event_type_str", "IBVERBS_1.1", SLOT(event_type_str), 0},
    {"ibv_wc_status_str", "IBVERBS_1.1", SLOT(wc_status_str), 0},
    {"_ibv_query_gid_ex", "IBVERBS_1.11", SLOT(query_gid_ex), 1},
    {"ibv_reg_mr_iova2", "IBVERBS_1.8", SLOT(reg_mr_iova2), 1},
    {"ibv_reg_dmabuf_mr", "IBVERBS_1.12", SLOT(reg_dmabuf_mr), 1},
    {"ibv_create_ah", "IBVERBS_1.1", SLOT(create_ah), 1},
    {"ibv_destroy_ah", "IBVERBS_1.1", SLOT(destroy_ah), 1},
    {"ibv_qp_to_qp_ex", "IBVERBS_1.6", SLOT(qp_to_qp_ex), 1},
    {"ibv_query_ece", "IBVERBS_1.10", SLOT(query_ece), 1},
    {"ibv_set_ece", "IBVERBS_1.10", SLOT(set_ece), 1},
    {"ibv_query_port_speed", "IBVERBS_1.16", SLOT(query_port_speed), 1},
};

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER; /* protects loaded and the filling of prs_verbs */
static int loaded;

static int load_locked(void)
{
    /* Only .so.1: the unversioned name belongs to -dev packages and may have another ABI. Never closed, since providers
     * keep threads and callbacks. */
    void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_GLOBAL);
    int r;

    if (!library)
        return prs_fail(-ENOSYS, "libibverbs.so.1 cannot be opened (%s): install rdma-core", dlerror());
    for (size_t i = 0; i < sizeof(symbols) / sizeof(*symbols); i++) {
        void *address = dlvsym(library, symbols[i].name, symbols[i].version);

        if (!address)
            address = dlsym(library, symbols[i].name);
        if (!address && !symbols[i].optional)
            return prs_fail(-ENOSYS, "libibverbs.so.1 lacks %s@%s: it is older than rdma-core 1.1", symbols[i].name,
                            symbols[i].version);
        memcpy((char *)&prs_verbs + symbols[i].slot, &address, sizeof(address));
    }
    r = prs_verbs.fork_init(); /* before the first verbs object, since data loaders fork later */
    if (r)
        PRS_WARN("ibv_fork_init failed (%s): a fork may corrupt registered memory", strerror(r));
    return 0;
}

int prs_verbs_load(void)
{
    int r = 0;

    pthread_mutex_lock(&load_lock);
    if (!loaded) {
        r = load_locked();
        loaded = r == 0;
    }
    pthread_mutex_unlock(&load_lock);
    return r;
}

int prs_verbs_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, uint32_t *speed_ex)
{
    /* Newer libraries know one field more, which headers may lack. A library fills only what it knows. */
    enum {
        SPEED_EX_AT = (offsetof(struct ibv_port_attr, port_cap_flags2) + sizeof(uint16_t) + 3) / 4 * 4,
        BYTES = SPEED_EX_AT + sizeof(uint32_t),
    };
    union {
        struct ibv_port_attr attr;
        uint8_t bytes[BYTES + sizeof(struct ibv_port_attr)];
    } filled;
    struct verbs_context *extended = verbs_get_ctx_op(context, query_port);
    int r;

    memset(&filled, 0, sizeof(filled));
    if (extended)
        r = extended->query_port(context, port, &filled.attr, BYTES);
    else
        r = prs_verbs.query_port_legacy(context, port, (struct _compat_ibv_port_attr *)&filled.attr);
    *attr = filled.attr;
    if (speed_ex)
        memcpy(speed_ex, filled.bytes + SPEED_EX_AT, sizeof(*speed_ex));
    return r > 0 ? -r : r;
}
