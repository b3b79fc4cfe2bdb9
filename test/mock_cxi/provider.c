/* SPDX-License-Identifier: Apache-2.0 */
/* The provider's capabilities, and all its objects except endpoints. */
#include <rdma/providers/fi_prov.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "test/mock_cxi/mock.h"

#define CAPS  (FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE | FI_LOCAL_COMM | FI_REMOTE_COMM)
#define ORDER (FI_ORDER_WAW | FI_ORDER_RMA_WAW)

static bool has(const char *words, const char *word)
{
    const char *at = words ? strstr(words, word) : NULL;
    char after = at ? at[strlen(word)] : 0;

    return at && (at == words || at[-1] == ',') && (!after || after == ',');
}

struct mock_settings mock_settings(void)
{
    const char *words = getenv("MOCK_CXI"), *late = words ? strstr(words, "late=") : NULL;
    const char *most = words ? strstr(words, "endpoints=") : NULL, *lose = words ? strstr(words, "lose=") : NULL;
    const char *rails = words ? strstr(words, "rails=") : NULL;
    const char *addresses = words ? strstr(words, "addresses=") : NULL;

    return (struct mock_settings){.order = !has(words, "no-order"),
                                  .fence = !has(words, "no-fence"),
                                  .false_order = has(words, "false-order"),
                                  .false_fence = has(words, "false-fence"),
                                  .virtual_addresses = has(words, "virtual"),
                                  .prov_keys = has(words, "prov-keys"),
                                  .own_keys = has(words, "own-keys"),
                                  .endpoint = !has(words, "no-endpoint"),
                                  .data = !has(words, "no-data"),
                                  .size = !has(words, "no-size"),
                                  .endpoints = most ? (uint32_t)atoi(most + 10) : 511,
                                  .addresses = addresses ? (uint32_t)atoi(addresses + 10) : UINT32_MAX,
                                  .rails = rails ? (uint32_t)atoi(rails + 6) : 2,
                                  .lose = lose ? (uint32_t)atoi(lose + 5) : 0,
                                  .late_us = late ? (uint32_t)atoi(late + 5) : 100};
}

static int no(void)
{
    return -FI_ENOSYS;
}

static int open_none(struct fid *fid, const char *name, uint64_t flags, void **ops, void *context)
{
    (void)fid, (void)name, (void)flags, (void)ops, (void)context;
    return -FI_ENOSYS;
}

static int bind_none(struct fid *fid, struct fid *other, uint64_t flags)
{
    (void)fid, (void)other, (void)flags;
    return no();
}

static int control_none(struct fid *fid, int command, void *arg)
{
    (void)fid, (void)command, (void)arg;
    return no();
}

#define OPS(close_fn, bind_fn, control_fn)                                                                             \
    {                                                                                                                  \
        .size = sizeof(struct fi_ops), .close = close_fn, .bind = bind_fn, .control = control_fn,                      \
        .ops_open = open_none                                                                                          \
    }

/* ---- what there is ---- */

enum { MR_BASIC = 1 }; /* FI_MR_BASIC, whose name is deprecated in libfabric 2.x */

/* Does the caller support all these mr_mode bits? FI_MR_BASIC is short for the three that are added here. */
static bool accepts(const struct fi_info *hints, int needed)
{
    int offered = hints->domain_attr ? hints->domain_attr->mr_mode : 0;

    if (offered & MR_BASIC)
        offered |= FI_MR_VIRT_ADDR | FI_MR_PROV_KEY | FI_MR_ALLOCATED;
    return !(needed & ~offered);
}

static bool fits(const struct fi_info *hints, const struct mock_settings *set, int mr_mode)
{
    uint64_t caps = CAPS | (set->fence ? FI_FENCE : 0) | (mock_has_gpu() ? FI_HMEM : 0), order = set->order ? ORDER : 0;

    return hints && !(hints->caps & ~caps) && accepts(hints, mr_mode) &&
           (!hints->ep_attr || hints->ep_attr->type == FI_EP_RDM || hints->ep_attr->type == FI_EP_UNSPEC) &&
           (!hints->tx_attr || !(hints->tx_attr->msg_order & ~order));
}

static struct fi_info *describe(const struct fi_info *hints, const struct mock_settings *set, int mr_mode,
                                uint32_t rail)
{
    struct fi_info *info = fi_allocinfo();
    char name[] = "mock0";

    if (!info)
        return NULL;
    name[4] = (char)('0' + rail);
    info->caps = CAPS | (hints->caps & (FI_FENCE | FI_HMEM));
    info->addr_format = FI_FORMAT_UNSPEC;
    info->tx_attr->caps = info->rx_attr->caps = info->caps;
    info->tx_attr->msg_order = hints->tx_attr ? hints->tx_attr->msg_order : 0; /* what was asked for, as cxi does */
    info->rx_attr->msg_order = hints->rx_attr ? hints->rx_attr->msg_order : 0;
    info->tx_attr->size = info->rx_attr->size = MOCK_SENDS;
    info->tx_attr->op_flags = hints->tx_attr ? hints->tx_attr->op_flags : 0;
    info->ep_attr->type = FI_EP_RDM;
    /* Without keys of an endpoint it is not cxi, but has a connection for each pair of endpoints. */
    info->ep_attr->protocol = set->endpoint ? 0x6d6f636b : FI_PROTO_RXM;
    info->ep_attr->max_msg_size = UINT32_MAX;
    info->ep_attr->max_order_waw_size = set->order ? SIZE_MAX : 0;
    info->domain_attr->name = strdup(name);
    info->domain_attr->threading = FI_THREAD_SAFE;
    info->domain_attr->control_progress = info->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    info->domain_attr->resource_mgmt = FI_RM_ENABLED;
    info->domain_attr->av_type = FI_AV_TABLE;
    info->domain_attr->mr_mode = mr_mode;
    info->domain_attr->mr_key_size = mr_mode & FI_MR_PROV_KEY ? 8 : MOCK_KEY_BYTES;
    info->domain_attr->cq_data_size = 8;
    info->domain_attr->ep_cnt = 511;
    info->fabric_attr->name = strdup("mock_cxi");
    return info;
}

static int get_info(uint32_t version, const char *node, const char *service, uint64_t flags,
                    const struct fi_info *hints, struct fi_info **out)
{
    struct mock_settings set = mock_settings();
    bool asked = hints && hints->domain_attr && hints->domain_attr->mr_mode & (FI_MR_PROV_KEY | MR_BASIC);
    bool keys = set.prov_keys || (asked && !set.own_keys);
    int mr_mode = (set.virtual_addresses ? FI_MR_VIRT_ADDR : 0) | (keys ? FI_MR_PROV_KEY : 0) |
                  (set.endpoint ? FI_MR_ENDPOINT : 0) | FI_MR_ALLOCATED;

    (void)version, (void)node, (void)service, (void)flags;
    if (!fits(hints, &set, mr_mode))
        return -FI_ENODATA;
    for (uint32_t rail = 0; rail < set.rails; rail++) {
        *out = describe(hints, &set, mr_mode, rail);
        if (!*out)
            return -FI_ENOMEM;
        out = &(*out)->next;
    }
    return 0;
}

/* ---- memory ---- */

static int close_mr(struct fid *fid)
{
    struct mock_mr *mr = (struct mock_mr *)fid;
    struct mock_mr **at = &mr->domain->mrs;

    pthread_mutex_lock(&mr->domain->lock);
    while (*at != mr)
        at = &(*at)->next;
    *at = mr->next;
    mock_withdraw_locked(mr->domain, mr);
    if (mr->ep)
        mr->ep->registrations--;
    pthread_mutex_unlock(&mr->domain->lock);
    free(mr);
    return 0;
}

static int bind_mr(struct fid *fid, struct fid *other, uint64_t flags)
{
    struct mock_mr *mr = (struct mock_mr *)fid;

    (void)flags;
    if (other->fclass != FI_CLASS_EP || mr->ep || ((struct mock_ep *)other)->socket < 0) /* not enabled yet */
        return -FI_EINVAL;
    pthread_mutex_lock(&mr->domain->lock);
    mr->ep = (struct mock_ep *)other;
    mr->ep->registrations++;
    pthread_mutex_unlock(&mr->domain->lock);
    return 0;
}

static int control_mr(struct fid *fid, int command, void *arg)
{
    struct mock_mr *mr = (struct mock_mr *)fid;

    (void)arg;
    if (command != FI_ENABLE || (mr->domain->endpoint && !mr->ep))
        return -FI_EINVAL;
    pthread_mutex_lock(&mr->domain->lock);
    mr->enabled = true;
    mr->fid.key = mr->key;
    pthread_mutex_unlock(&mr->domain->lock);
    return 0;
}

static int choose_key_locked(struct mock_mr *mr, uint64_t requested)
{
    if (mr->domain->prov_keys) {
        mr->key = 1ull << 63 | mock_random(mr->domain) << 32 | ++mr->domain->next_key;
        mr->fid.key = mr->enabled ? mr->key : FI_KEY_NOTAVAIL; /* until it is bound and enabled, as cxi has it */
        return 0;
    }
    if (requested > UINT32_MAX)
        return -FI_EKEYREJECTED;
    for (const struct mock_mr *other = mr->domain->mrs; other; other = other->next)
        if (other->key == requested)
            return -FI_ENOKEY;
    mr->fid.key = mr->key = requested;
    return 0;
}

static int register_attr(struct fid *fid, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **out)
{
    static struct fi_ops ops = OPS(close_mr, bind_mr, control_mr);
    struct mock_domain *domain = (struct mock_domain *)fid;
    struct mock_mr *mr = calloc(1, sizeof(*mr));
    int r;

    if (!mr)
        return -FI_ENOMEM;
    if (flags || attr->iov_count != 1 ||
        (attr->iface != FI_HMEM_SYSTEM && (attr->iface != FI_HMEM_CUDA || !mock_has_gpu()))) {
        free(mr);
        return -FI_EINVAL;
    }
    mr->fid.fid = (struct fid){.fclass = FI_CLASS_MR, .context = attr->context, .ops = &ops};
    mr->fid.mem_desc = mr;
    mr->domain = domain;
    mr->base = attr->mr_iov[0].iov_base;
    mr->bytes = attr->mr_iov[0].iov_len;
    mr->access = attr->access;
    mr->on_gpu = attr->iface == FI_HMEM_CUDA;
    mr->enabled = !domain->endpoint;
    pthread_mutex_lock(&domain->lock);
    r = choose_key_locked(mr, attr->requested_key);
    if (!r) {
        mr->next = domain->mrs;
        domain->mrs = mr;
    }
    pthread_mutex_unlock(&domain->lock);
    if (r)
        free(mr);
    else
        *out = &mr->fid;
    return r;
}

static int register_vector(struct fid *fid, const struct iovec *iov, size_t count, uint64_t access, uint64_t offset,
                           uint64_t key, uint64_t flags, struct fid_mr **out, void *context)
{
    struct fi_mr_attr attr = {.mr_iov = iov,
                              .iov_count = count,
                              .access = access,
                              .offset = offset,
                              .requested_key = key,
                              .context = context};

    return register_attr(fid, &attr, flags, out);
}

static int register_one(struct fid *fid, const void *base, size_t bytes, uint64_t access, uint64_t offset, uint64_t key,
                        uint64_t flags, struct fid_mr **out, void *context)
{
    struct iovec iov = {(void *)(uintptr_t)base, bytes};

    return register_vector(fid, &iov, 1, access, offset, key, flags, out, context);
}

/* ---- completion queues ---- */

static int close_cq(struct fid *fid)
{
    struct mock_cq *cq = (struct mock_cq *)fid;

    free(cq->entry);
    free(cq->error);
    free(cq);
    return 0;
}

void mock_complete_locked(struct mock_cq *cq, void *context, uint64_t flags, size_t bytes, uint64_t data)
{
    if (cq->count == cq->room) {
        size_t room = cq->room ? cq->room * 2 : 256;
        struct fi_cq_data_entry *entry = calloc(room, sizeof(*entry));

        for (size_t i = 0; i < cq->count; i++)
            entry[i] = cq->entry[(cq->first + i) % cq->room];
        free(cq->entry);
        cq->entry = entry;
        cq->room = room;
        cq->first = 0;
    }
    cq->entry[(cq->first + cq->count++) % cq->room] =
        (struct fi_cq_data_entry){.op_context = context, .flags = flags, .len = bytes, .data = data};
}

void mock_fail_locked(struct mock_cq *cq, void *context, uint64_t flags, int error)
{
    cq->error = realloc(cq->error, (cq->errors + 1) * sizeof(*cq->error));
    cq->error[cq->errors++] = (struct fi_cq_err_entry){.op_context = context, .flags = flags, .err = error};
}

static bool unloaded;

static ssize_t read_cq(struct fid_cq *fid, void *out, size_t count)
{
    struct mock_cq *cq = (struct mock_cq *)fid;
    struct fi_cq_data_entry *entry = out;
    size_t taken = 0;
    ssize_t r;

    if (__atomic_load_n(&unloaded, __ATOMIC_ACQUIRE)) {
        fprintf(stderr, "mock_cxi: a queue is read after libfabric has unloaded its providers\n");
        abort();
    }
    pthread_mutex_lock(&cq->domain->lock);
    for (; !cq->errors && taken < count && cq->count; cq->count--) {
        entry[taken++] = cq->entry[cq->first];
        cq->first = (cq->first + 1) % cq->room;
    }
    r = taken ? (ssize_t)taken : cq->errors ? -FI_EAVAIL : -FI_EAGAIN;
    pthread_mutex_unlock(&cq->domain->lock);
    return r;
}

static ssize_t read_error(struct fid_cq *fid, struct fi_cq_err_entry *out, uint64_t flags)
{
    struct mock_cq *cq = (struct mock_cq *)fid;
    ssize_t r = -FI_EAGAIN;

    (void)flags;
    pthread_mutex_lock(&cq->domain->lock);
    if (cq->errors) {
        *out = cq->error[0];
        memmove(cq->error, cq->error + 1, --cq->errors * sizeof(*cq->error));
        r = 1;
    }
    pthread_mutex_unlock(&cq->domain->lock);
    return r;
}

static int open_cq(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **out, void *context)
{
    static struct fi_ops ops = OPS(close_cq, bind_none, control_none);
    static struct fi_ops_cq cq_ops = {.size = sizeof(cq_ops), .read = read_cq, .readerr = read_error};
    struct mock_cq *cq = calloc(1, sizeof(*cq));

    if (!cq || attr->format != FI_CQ_FORMAT_DATA || attr->wait_obj != FI_WAIT_NONE) {
        free(cq);
        return -FI_ENOSYS;
    }
    cq->fid.fid = (struct fid){.fclass = FI_CLASS_CQ, .context = context, .ops = &ops};
    cq->fid.ops = &cq_ops;
    cq->domain = (struct mock_domain *)domain;
    *out = &cq->fid;
    return 0;
}

/* ---- addresses ---- */

static int close_av(struct fid *fid)
{
    struct mock_av *av = (struct mock_av *)fid;

    free(av->name);
    free(av);
    return 0;
}

static int insert(struct fid_av *fid, const void *address, size_t count, fi_addr_t *out, uint64_t flags, void *context)
{
    struct mock_av *av = (struct mock_av *)fid;

    (void)flags, (void)context;
    pthread_mutex_lock(&av->domain->lock);
    if (av->kept + count > mock_settings().addresses) {
        pthread_mutex_unlock(&av->domain->lock);
        return -FI_ENOMEM;
    }
    av->name = realloc(av->name, (av->count + count) * sizeof(*av->name));
    memcpy(av->name + av->count, address, count * sizeof(*av->name));
    for (size_t i = 0; i < count; i++)
        out[i] = av->count++;
    av->kept += count;
    pthread_mutex_unlock(&av->domain->lock);
    return (int)count;
}

static int forget(struct fid_av *fid, fi_addr_t *address, size_t count, uint64_t flags)
{
    struct mock_av *av = (struct mock_av *)fid;

    (void)address, (void)flags; /* an address is not used again */
    pthread_mutex_lock(&av->domain->lock);
    av->kept -= count;
    pthread_mutex_unlock(&av->domain->lock);
    return 0;
}

static int open_av(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **out, void *context)
{
    static struct fi_ops ops = OPS(close_av, bind_none, control_none);
    static struct fi_ops_av av_ops = {.size = sizeof(av_ops), .insert = insert, .remove = forget};
    struct mock_av *av = calloc(1, sizeof(*av));

    (void)attr;
    if (!av)
        return -FI_ENOMEM;
    av->fid.fid = (struct fid){.fclass = FI_CLASS_AV, .context = context, .ops = &ops};
    av->fid.ops = &av_ops;
    av->domain = (struct mock_domain *)domain;
    *out = &av->fid;
    return 0;
}

/* ---- fabric and domain ---- */

static int close_domain(struct fid *fid)
{
    struct mock_domain *domain = (struct mock_domain *)fid;

    if (domain->eps || domain->mrs)
        return -FI_EBUSY;
    pthread_mutex_lock(&domain->lock);
    domain->stop = true;
    pthread_mutex_unlock(&domain->lock);
    mock_wake(domain);
    pthread_join(domain->thread, NULL);
    close(domain->wake);
    pthread_mutex_destroy(&domain->lock);
    free(domain);
    return 0;
}

static int open_domain(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **out, void *context)
{
    static struct fi_ops ops = OPS(close_domain, bind_none, control_none);
    static struct fi_ops_domain domain_ops = {
        .size = sizeof(domain_ops), .av_open = open_av, .cq_open = open_cq, .endpoint = mock_ep_open};
    static struct fi_ops_mr mr_ops = {
        .size = sizeof(mr_ops), .reg = register_one, .regv = register_vector, .regattr = register_attr};
    struct mock_domain *domain = calloc(1, sizeof(*domain));

    (void)fabric;
    if (!domain)
        return -FI_ENOMEM;
    domain->fid.fid = (struct fid){.fclass = FI_CLASS_DOMAIN, .context = context, .ops = &ops};
    domain->fid.ops = &domain_ops;
    domain->fid.mr = &mr_ops;
    domain->virtual_addresses = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    domain->prov_keys = info->domain_attr->mr_mode & FI_MR_PROV_KEY;
    domain->endpoint = info->domain_attr->mr_mode & FI_MR_ENDPOINT;
    domain->data = mock_settings().data;
    domain->size = mock_settings().size;
    domain->random = mock_now_ns() ^ (uint64_t)getpid() << 32;
    domain->nic = (uint32_t)mock_random(domain);
    domain->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pthread_mutex_init(&domain->lock, NULL);
    if (domain->wake < 0 || pthread_create(&domain->thread, NULL, mock_nic, domain)) {
        free(domain);
        return -FI_ENOMEM;
    }
    *out = &domain->fid;
    return 0;
}

static int close_fabric(struct fid *fid)
{
    free(fid);
    return 0;
}

static int open_fabric(struct fi_fabric_attr *attr, struct fid_fabric **out, void *context)
{
    static struct fi_ops ops = OPS(close_fabric, bind_none, control_none);
    static struct fi_ops_fabric fabric_ops = {.size = offsetof(struct fi_ops_fabric, domain2), .domain = open_domain};
    struct fid_fabric *fabric = calloc(1, sizeof(*fabric));

    (void)attr;
    if (!fabric)
        return -FI_ENOMEM;
    fabric->fid = (struct fid){.fclass = FI_CLASS_FABRIC, .context = context, .ops = &ops};
    fabric->ops = &fabric_ops;
    *out = fabric;
    return 0;
}

/* By the destructor of libfabric. A thread that still reads is given the time to do so. */
static void cleanup(void)
{
    struct timespec while_others_read = {0, 20000000};

    __atomic_store_n(&unloaded, true, __ATOMIC_RELEASE);
    nanosleep(&while_others_read, NULL);
}

/* libfabric looks for this symbol. */
__attribute__((visibility("default"))) struct fi_provider *fi_prov_ini(void);
struct fi_provider *fi_prov_ini(void)
{
    static struct fi_provider provider = {.version = FI_VERSION(1, 0),
                                          .fi_version = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION),
                                          .name = "mock_cxi",
                                          .getinfo = get_info,
                                          .fabric = open_fabric,
                                          .cleanup = cleanup};

    return &provider;
}
