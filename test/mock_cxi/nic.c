/* SPDX-License-Identifier: Apache-2.0 */
/* Endpoints: requests, packets, and the thread that is the NIC. */
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "test/mock_cxi/mock.h"

enum {
    RETRY_NS = 50000,         /* until a full socket is tried again */
    ASK_NS = 50000000,        /* after this silence ask whether the other side's endpoint is there */
    OVERTAKEN_NS = 100000000, /* a false promise: so much later do data leave than the signals after them */
    MOST_ENDPOINTS = 1024,
    SIGNAL_BYTES = 64, /* no signal has more */
};

uint64_t mock_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

uint64_t mock_random(struct mock_domain *domain)
{
    domain->random = domain->random * 6364136223846793005ull + 1442695040888963407ull;
    return domain->random >> 33;
}

void mock_wake(struct mock_domain *domain)
{
    eventfd_write(domain->wake, 1);
}

/* Find what a packet addresses. Return NULL: no such key of this endpoint, or outside of it. */
static uint8_t *find_memory(const struct mock_ep *ep, uint64_t key, uint64_t address, uint64_t bytes, uint64_t access)
{
    for (const struct mock_mr *mr = ep->domain->mrs; mr; mr = mr->next) {
        uint64_t at = ep->domain->virtual_addresses ? address - (uintptr_t)mr->base : address;

        if (mr->key != key || !mr->enabled || (ep->domain->endpoint && mr->ep != ep))
            continue;
        return mr->access & access && at <= mr->bytes && bytes <= mr->bytes - at ? mr->base + at : NULL;
    }
    return NULL;
}

/* ---- sending ---- */

static socklen_t socket_name(const struct mock_name *name, struct sockaddr_un *out)
{
    int length;

    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    length = snprintf(out->sun_path + 1, sizeof(out->sun_path) - 1, "perseus-mock-cxi-%u-%u", name->nic, name->number);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

/* Return 0 or an errno; EAGAIN: try again later. */
static int send_packet(const struct mock_ep *ep, const struct mock_name *to, const struct mock_header *header,
                       const uint8_t *payload)
{
    static uint8_t packet[sizeof(*header) + MOCK_PACKET]; /* under the lock: domains share it */
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    struct sockaddr_un address;
    socklen_t length = socket_name(to, &address);
    ssize_t r;

    pthread_mutex_lock(&lock);
    memcpy(packet, header, sizeof(*header));
    mock_copy_locked(ep->domain, packet + sizeof(*header), payload, header->payload);
    r = sendto(ep->socket, packet, sizeof(*header) + header->payload, MSG_NOSIGNAL, (struct sockaddr *)&address,
               length);
    pthread_mutex_unlock(&lock);
    return r >= 0 ? 0 : errno == ENOBUFS ? EAGAIN : errno;
}

/* Packets of one job leave out of order: from one in the middle to the last, then from the first. */
static int send_job(struct mock_ep *ep, struct mock_job *job)
{
    while (job->sent < job->packets) {
        struct mock_header header = job->header;
        uint32_t at = (job->turn + job->sent) % job->packets;
        bool carries = header.kind == MOCK_WRITE || header.kind == MOCK_ANSWER;
        int r;

        if (carries) {
            header.offset = at * MOCK_PACKET;
            header.payload = header.bytes - header.offset < MOCK_PACKET ? header.bytes - header.offset : MOCK_PACKET;
        }
        r = send_packet(ep, &job->to, &header, carries ? job->local + header.offset : NULL);
        if (r)
            return r;
        job->sent++;
    }
    job->sent_ns = mock_now_ns();
    return 0;
}

static void finish(struct mock_ep *ep, struct mock_job **at, int error)
{
    struct mock_job *job = *at;
    uint64_t flags = FI_RMA | (job->header.kind == MOCK_READ ? FI_READ : FI_WRITE);

    *at = job->next;
    ep->waiting--;
    if (error)
        mock_fail_locked(ep->cq, job->context, flags, error);
    else if (job->completion && !job->reported)
        mock_complete_locked(ep->cq, job->context, flags, 0, 0);
    free(job);
}

static bool same(const struct mock_name *a, const struct mock_name *b)
{
    return a->nic == b->nic && a->number == b->number;
}

/* Must this request wait for an earlier write that has not left? */
static bool is_behind(const struct mock_ep *ep, const struct mock_job *job)
{
    if (!ep->ordered || job->header.kind != MOCK_WRITE)
        return false;
    for (const struct mock_job *earlier = ep->requests; earlier != job; earlier = earlier->next)
        if (earlier->header.kind == MOCK_WRITE && !earlier->sent_ns && same(&earlier->to, &job->to))
            return true;
    return false;
}

/* Without FI_DELIVERY_COMPLETE a request is done when it has left. */
static void report_early(struct mock_ep *ep, struct mock_job *job)
{
    if (job->delivery || job->header.kind != MOCK_WRITE || !job->completion)
        return;
    mock_complete_locked(ep->cq, job->context, FI_RMA | FI_WRITE, 0, 0);
    job->reported = true;
}

/* Send all requests that may leave now. Return the ns until the next try. */
static uint64_t send_requests(struct mock_ep *ep)
{
    uint64_t now = mock_now_ns(), next = ASK_NS;

    for (struct mock_job **at = &ep->requests, *job; (job = *at);) {
        int r = 0;

        if (job->gone || job->lost) {
            finish(ep, at, job->lost ? FI_ECONNRESET : FI_ECANCELED);
            continue;
        }
        if (job->fence && job != ep->requests)
            break; /* it holds back all that come after it, too */
        if (job->sent_ns && now > job->sent_ns + ASK_NS) {
            struct mock_header ping = {.kind = MOCK_PING, .from = ep->name};

            r = send_packet(ep, &job->to, &ping, NULL);
            job->sent_ns = now;
        } else if (!job->sent_ns && job->due_ns > now) {
            next = job->due_ns - now < next ? job->due_ns - now : next;
        } else if (!job->sent_ns && !is_behind(ep, job)) {
            r = send_job(ep, job);
            if (!r)
                report_early(ep, job);
        }
        if (r == EAGAIN)
            next = RETRY_NS;
        else if (r)
            finish(ep, at, FI_EHOSTUNREACH);
        if (!r || r == EAGAIN)
            at = &job->next;
    }
    return next;
}

static uint64_t send_answers(struct mock_ep *ep)
{
    while (ep->answers) {
        struct mock_job *job = ep->answers;

        if (!job->gone && send_job(ep, job) == EAGAIN)
            return RETRY_NS;
        ep->answers = job->next; /* if the asker is gone, so is the answer */
        free(job);
    }
    return ASK_NS;
}

/* ---- receiving ---- */

static void answer(struct mock_ep *ep, const struct mock_header *to, enum mock_kind kind, int status, uint8_t *local)
{
    struct mock_job *job = calloc(1, sizeof(*job)), **at = &ep->answers;

    job->header = (struct mock_header){.kind = kind, .status = status, .from = ep->name, .id = to->id};
    job->to = to->from;
    job->local = local;
    job->packets = 1;
    if (kind == MOCK_ANSWER) {
        job->header.bytes = to->bytes;
        job->packets = to->bytes ? (to->bytes + MOCK_PACKET - 1) / MOCK_PACKET : 1;
    }
    while (*at)
        at = &(*at)->next;
    *at = job;
}

/* Count the bytes of a write. Return true when all are here. */
static bool is_whole(struct mock_ep *ep, const struct mock_header *header)
{
    struct mock_partial **at = &ep->partial, *partial;

    if (header->payload == header->bytes)
        return true;
    while (*at && ((*at)->id != header->id || !same(&(*at)->from, &header->from)))
        at = &(*at)->next;
    if (!*at) {
        *at = calloc(1, sizeof(**at));
        (*at)->from = header->from;
        (*at)->id = header->id;
    }
    partial = *at;
    partial->bytes += header->payload;
    if (partial->bytes < header->bytes)
        return false;
    *at = partial->next;
    free(partial);
    return true;
}

static void take_write(struct mock_ep *ep, const struct mock_header *header, const uint8_t *payload)
{
    uint8_t *to = find_memory(ep, header->key, header->address, header->bytes, FI_REMOTE_WRITE);

    if (to)
        mock_copy_locked(ep->domain, to + header->offset, payload, header->payload);
    if (!is_whole(ep, header))
        return;
    if (to && header->has_data)
        mock_complete_locked(ep->cq, NULL, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA,
                             ep->domain->size ? header->bytes : 0, header->data);
    answer(ep, header, MOCK_ACK, to ? 0 : FI_EINVAL, NULL);
}

static void take_answer(struct mock_ep *ep, const struct mock_header *header, const uint8_t *payload)
{
    struct mock_job **at = &ep->requests;

    while (*at && (*at)->header.id != header->id)
        at = &(*at)->next;
    if (!*at)
        return;
    if (header->kind == MOCK_ANSWER && !(*at)->gone) {
        mock_copy_locked(ep->domain, (*at)->local + header->offset, payload, header->payload);
        (*at)->answered += header->payload;
        if ((*at)->answered < header->bytes)
            return;
    }
    finish(ep, at, header->status);
}

static void take_packet(struct mock_ep *ep, const struct mock_header *header, const uint8_t *payload)
{
    uint8_t *from;

    switch (header->kind) {
    case MOCK_WRITE:
        take_write(ep, header, payload);
        break;
    case MOCK_READ:
        from = find_memory(ep, header->key, header->address, header->bytes, FI_REMOTE_READ);
        answer(ep, header, from ? MOCK_ANSWER : MOCK_ACK, from ? 0 : FI_EINVAL, from);
        break;
    case MOCK_ACK:
    case MOCK_ANSWER:
        take_answer(ep, header, payload);
        break;
    default: /* MOCK_PING: taking it from the socket is answer enough */
        break;
    }
}

static void receive(struct mock_ep *ep, uint8_t *packet)
{
    struct mock_header header;

    for (;;) {
        ssize_t bytes = recv(ep->socket, packet, sizeof(header) + MOCK_PACKET, MSG_DONTWAIT);

        if (bytes < (ssize_t)sizeof(header))
            return;
        memcpy(&header, packet, sizeof(header));
        take_packet(ep, &header, packet + sizeof(header));
    }
}

/* ---- the thread ---- */

void *mock_nic(void *arg)
{
    struct mock_domain *domain = arg;
    struct pollfd *poll_fds = calloc(MOST_ENDPOINTS + 1, sizeof(*poll_fds));
    uint8_t *packet = aligned_alloc(64, 64 + sizeof(struct mock_header) + MOCK_PACKET + 64);
    eventfd_t count;

    pthread_mutex_lock(&domain->lock);
    while (!domain->stop) {
        uint64_t next = ASK_NS;
        nfds_t fds = 1;

        poll_fds[0] = (struct pollfd){.fd = domain->wake, .events = POLLIN};
        for (struct mock_ep *ep = domain->eps; ep && fds <= MOST_ENDPOINTS; ep = ep->next) {
            uint64_t again, answers;

            if (ep->socket < 0)
                continue;
            receive(ep, packet);
            again = send_requests(ep);
            answers = send_answers(ep);
            again = answers < again ? answers : again;
            next = again < next ? again : next;
            poll_fds[fds++] = (struct pollfd){.fd = ep->socket, .events = POLLIN};
        }
        pthread_mutex_unlock(&domain->lock);
        ppoll(poll_fds, fds, &(struct timespec){0, (long)next}, NULL);
        (void)eventfd_read(domain->wake, &count);
        pthread_mutex_lock(&domain->lock);
    }
    pthread_mutex_unlock(&domain->lock);
    free(packet);
    free(poll_fds);
    return NULL;
}

/* ---- posting ---- */

static ssize_t post(struct mock_ep *ep, const struct fi_msg_rma *message, uint64_t flags, enum mock_kind kind)
{
    static uint32_t writes; /* of bytes */
    struct mock_settings set = mock_settings();
    const struct mock_mr *mr = message->desc[0];
    struct mock_job *job, **at = &ep->requests;
    uint8_t *local = message->msg_iov[0].iov_base;
    size_t bytes = message->msg_iov[0].iov_len;

    if (message->iov_count != 1 || message->rma_iov_count != 1 || message->rma_iov[0].len != bytes ||
        message->addr >= ep->av->count || (flags & FI_FENCE && !ep->fences) || (mr && mr->domain != ep->domain) ||
        (mr && (local < mr->base || local + bytes > mr->base + mr->bytes)))
        return -FI_EINVAL;
    if (ep->waiting >= MOCK_SENDS)
        return -FI_EAGAIN;
    job = calloc(1, sizeof(*job));
    if (!job)
        return -FI_ENOMEM;
    job->header = (struct mock_header){.kind = kind,
                                       .from = ep->name,
                                       .id = ++ep->next_id,
                                       .address = message->rma_iov[0].addr,
                                       .key = message->rma_iov[0].key,
                                       .data = message->data,
                                       .bytes = (uint32_t)bytes,
                                       .has_data = (flags & FI_REMOTE_CQ_DATA) != 0};
    job->to = ep->av->name[message->addr];
    job->local = local;
    job->mr = mr;
    job->context = message->context;
    job->packets = kind == MOCK_WRITE && bytes ? (uint32_t)((bytes + MOCK_PACKET - 1) / MOCK_PACKET) : 1;
    job->turn = (uint32_t)mock_random(ep->domain) % job->packets;
    job->due_ns = mock_now_ns() + (set.late_us ? mock_random(ep->domain) % (set.late_us * 1000ull) : 0);
    if ((set.false_order || set.false_fence) && bytes > SIGNAL_BYTES)
        job->due_ns += OVERTAKEN_NS; /* else a signal overtakes its data only by chance */
    job->fence = flags & FI_FENCE && !set.false_fence;
    job->delivery = flags & FI_DELIVERY_COMPLETE;
    job->completion = flags & FI_COMPLETION;
    job->lost = kind == MOCK_WRITE && bytes && __atomic_add_fetch(&writes, 1, __ATOMIC_RELAXED) == set.lose;
    while (*at)
        at = &(*at)->next;
    *at = job;
    ep->waiting++;
    return 0;
}

static ssize_t post_locked(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags, enum mock_kind kind)
{
    struct mock_ep *ep = (struct mock_ep *)fid;
    ssize_t r;

    pthread_mutex_lock(&ep->domain->lock);
    r = post(ep, message, flags, kind);
    pthread_mutex_unlock(&ep->domain->lock);
    if (!r)
        mock_wake(ep->domain);
    return r;
}

static ssize_t write_message(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags)
{
    if (((struct mock_ep *)fid)->domain->endpoint && flags & FI_REMOTE_CQ_DATA)
        return -FI_EBADFLAGS; /* as cxi */
    return post_locked(fid, message, flags, MOCK_WRITE);
}

static ssize_t read_message(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags)
{
    return post_locked(fid, message, flags, MOCK_READ);
}

static ssize_t write_data(struct fid_ep *fid, const void *from, size_t bytes, void *descriptor, uint64_t data,
                          fi_addr_t to, uint64_t address, uint64_t key, void *context)
{
    const struct mock_ep *ep = (struct mock_ep *)fid;
    struct iovec local = {(void *)(uintptr_t)from, bytes};
    struct fi_rma_iov remote = {address, bytes, key};
    struct fi_msg_rma message = {.msg_iov = &local,
                                 .desc = &descriptor,
                                 .iov_count = 1,
                                 .addr = to,
                                 .rma_iov = &remote,
                                 .rma_iov_count = 1,
                                 .context = context,
                                 .data = data};

    if (!ep->domain->data)
        return -FI_ENOSYS;
    if (ep->domain->endpoint && !ep->domain->prov_keys)
        return -FI_EINVAL; /* as cxi: only the provider's keys say that a write may carry data */
    return post_locked(fid, &message, ep->op_flags | FI_COMPLETION | FI_REMOTE_CQ_DATA, MOCK_WRITE);
}

static ssize_t read_one(struct fid_ep *fid, void *to, size_t bytes, void *descriptor, fi_addr_t from, uint64_t address,
                        uint64_t key, void *context)
{
    struct iovec local = {to, bytes};
    struct fi_rma_iov remote = {address, bytes, key};
    struct fi_msg_rma message = {.msg_iov = &local,
                                 .desc = &descriptor,
                                 .iov_count = 1,
                                 .addr = from,
                                 .rma_iov = &remote,
                                 .rma_iov_count = 1,
                                 .context = context};

    return post_locked(fid, &message, FI_COMPLETION, MOCK_READ);
}

/* ---- life ---- */

void mock_withdraw_locked(struct mock_domain *domain, const struct mock_mr *mr)
{
    for (struct mock_ep *ep = domain->eps; ep; ep = ep->next) {
        struct mock_job *lists[] = {ep->requests, ep->answers};

        for (int i = 0; i < 2; i++)
            for (struct mock_job *job = lists[i]; job; job = job->next) {
                bool uses = job->header.kind == MOCK_READ || !job->sent_ns;

                job->gone |= uses && job->header.bytes && (!job->mr || job->mr == mr) && job->local >= mr->base &&
                             job->local < mr->base + mr->bytes;
            }
    }
}

void mock_forget_locked(struct mock_ep *ep)
{
    struct mock_job *lists[] = {ep->requests, ep->answers};

    for (int i = 0; i < 2; i++)
        for (struct mock_job *job = lists[i], *next; job; job = next) {
            next = job->next;
            free(job);
        }
    for (struct mock_partial *partial = ep->partial, *next; partial; partial = next) {
        next = partial->next;
        free(partial);
    }
    ep->requests = ep->answers = NULL;
    ep->partial = NULL;
}

static int close_ep(struct fid *fid)
{
    struct mock_ep *ep = (struct mock_ep *)fid, **at;

    pthread_mutex_lock(&ep->domain->lock);
    if (ep->registrations) {
        pthread_mutex_unlock(&ep->domain->lock);
        return -FI_EBUSY;
    }
    for (at = &ep->domain->eps; *at != ep;)
        at = &(*at)->next;
    *at = ep->next;
    mock_forget_locked(ep);
    if (ep->socket >= 0)
        close(ep->socket);
    pthread_mutex_unlock(&ep->domain->lock);
    mock_wake(ep->domain);
    free(ep);
    return 0;
}

static int bind_ep(struct fid *fid, struct fid *other, uint64_t flags)
{
    struct mock_ep *ep = (struct mock_ep *)fid;

    (void)flags;
    if (other->fclass == FI_CLASS_CQ)
        ep->cq = (struct mock_cq *)other;
    else if (other->fclass == FI_CLASS_AV)
        ep->av = (struct mock_av *)other;
    else
        return -FI_EINVAL;
    return 0;
}

static int control_ep(struct fid *fid, int command, void *arg)
{
    struct mock_ep *ep = (struct mock_ep *)fid;
    struct sockaddr_un address;
    int socket_fd, r = 0;

    (void)arg;
    if (command != FI_ENABLE || !ep->cq || !ep->av)
        return -FI_EINVAL;
    socket_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (socket_fd < 0)
        return -errno;
    pthread_mutex_lock(&ep->domain->lock);
    ep->name = (struct mock_name){ep->domain->nic, ++ep->domain->next_number};
    if (bind(socket_fd, (struct sockaddr *)&address, socket_name(&ep->name, &address)))
        r = -errno;
    else
        ep->socket = socket_fd;
    pthread_mutex_unlock(&ep->domain->lock);
    if (r)
        close(socket_fd);
    mock_wake(ep->domain);
    return r;
}

static int get_name(fid_t fid, void *out, size_t *bytes)
{
    const struct mock_ep *ep = (struct mock_ep *)fid;
    bool fits = *bytes >= sizeof(ep->name);

    memcpy(out, &ep->name, fits ? sizeof(ep->name) : *bytes);
    *bytes = sizeof(ep->name);
    return fits ? 0 : -FI_ETOOSMALL;
}

int mock_ep_open(struct fid_domain *fid, struct fi_info *info, struct fid_ep **out, void *context)
{
    static struct fi_ops ops = {.size = sizeof(ops), .close = close_ep, .bind = bind_ep, .control = control_ep};
    static struct fi_ops_cm cm = {.size = sizeof(cm), .getname = get_name};
    static struct fi_ops_rma rma = {.size = sizeof(rma),
                                    .writemsg = write_message,
                                    .readmsg = read_message,
                                    .writedata = write_data,
                                    .read = read_one};
    struct mock_domain *domain = (struct mock_domain *)fid;
    struct mock_ep *ep = calloc(1, sizeof(*ep));
    uint32_t count = 0;

    if (!ep)
        return -FI_ENOMEM;
    ep->fid.fid = (struct fid){.fclass = FI_CLASS_EP, .context = context, .ops = &ops};
    ep->fid.cm = &cm;
    ep->fid.rma = &rma;
    ep->domain = domain;
    ep->socket = -1;
    ep->ordered = info->tx_attr->msg_order & info->rx_attr->msg_order & (FI_ORDER_WAW | FI_ORDER_RMA_WAW) &&
                  !mock_settings().false_order;
    ep->fences = info->caps & FI_FENCE;
    ep->op_flags = info->tx_attr->op_flags;
    pthread_mutex_lock(&domain->lock);
    for (const struct mock_ep *other = domain->eps; other; other = other->next)
        count++;
    if (count >= mock_settings().endpoints) {
        pthread_mutex_unlock(&domain->lock);
        free(ep);
        return -FI_ENOSPC;
    }
    ep->next = domain->eps;
    domain->eps = ep;
    pthread_mutex_unlock(&domain->lock);
    *out = &ep->fid;
    return 0;
}
