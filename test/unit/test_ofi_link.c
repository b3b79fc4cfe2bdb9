/* SPDX-License-Identifier: Apache-2.0 */
/* A link of the libfabric back end over a provider that does what the test says: it refuses requests, fails them, or
 * lets them wait. */
#include <criterion/criterion.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <string.h>

#include "transport/nic/ofi/address.h"
#include "transport/nic/ofi/completion.h"
#include "transport/nic/ofi/device.h"
#include "transport/nic/ofi/link.h"
#include "transport/nic/ofi/ofi_nic.h"
#include "transport/util/clock.h"

/* ---- the provider ---- */

enum { DEPTH = 64, ARRIVALS = 6000 /* far more than a link keeps while it is in use */ };

static struct {
    int refuses;            /* error of the next request, once; 0: none */
    bool full;              /* no request is taken now */
    void *taken[2 * DEPTH]; /* contexts of requests that were taken */
    uint32_t taken_count;
    struct fi_cq_data_entry done[2 * DEPTH + ARRIVALS];
    struct fi_cq_err_entry failed;
    uint32_t done_count, done_read;
    bool has_failed, closed;
    uint32_t crowd; /* arrivals reported before completions */
    uint64_t crowd_data;
    bool endless; /* after the close, there is always something more to read */
} provider;

static ssize_t write_message(struct fid_ep *ep, const struct fi_msg_rma *message, uint64_t flags)
{
    int error = provider.refuses;

    provider.refuses = 0;
    if (provider.full)
        return -FI_EAGAIN;
    if (error)
        return error;
    provider.taken[provider.taken_count++] = message->context;
    return 0;
}

/* Where links share an endpoint. */
static ssize_t write_data(struct fid_ep *at, const void *from, size_t bytes, void *descriptor, uint64_t data,
                          fi_addr_t to, uint64_t addr, uint64_t key, void *context)
{
    const struct fi_msg_rma message = {.context = context};

    return write_message(at, &message, 0);
}

static void complete(uint32_t request)
{
    provider.done[provider.done_count++] = (struct fi_cq_data_entry){.op_context = provider.taken[request]};
}

static void arrive(uint64_t data)
{
    provider.done[provider.done_count++] = (struct fi_cq_data_entry){.flags = FI_REMOTE_CQ_DATA, .data = data};
}

static void fail(uint32_t request, int error)
{
    provider.failed = (struct fi_cq_err_entry){.op_context = provider.taken[request], .err = error};
    provider.has_failed = true;
}

static ssize_t read_cq(struct fid_cq *cq, void *to, size_t most)
{
    struct fi_cq_data_entry *entries = to;
    size_t count = 0;

    if (provider.has_failed || (provider.endless && provider.closed))
        return -FI_EAVAIL;
    for (; count < most && provider.crowd; provider.crowd--)
        entries[count++] = (struct fi_cq_data_entry){.flags = FI_REMOTE_CQ_DATA, .data = provider.crowd_data};
    while (count < most && provider.done_read < provider.done_count)
        entries[count++] = provider.done[provider.done_read++];
    return count ? (ssize_t)count : -FI_EAGAIN;
}

static ssize_t read_error(struct fid_cq *cq, struct fi_cq_err_entry *to, uint64_t flags)
{
    if (!provider.has_failed)
        return -FI_EAGAIN;
    provider.has_failed = false;
    *to = provider.failed;
    return 1;
}

static int get_name(fid_t ep, void *out, size_t *bytes)
{
    memset(out, 1, 8);
    *bytes = 8;
    return 0;
}

static int insert(struct fid_av *av, const void *name, size_t count, fi_addr_t *out, uint64_t flags, void *context)
{
    *out = 0;
    return 1;
}

static int remove_any(struct fid_av *av, fi_addr_t *address, size_t count, uint64_t flags)
{
    return 0;
}

static int close_any(struct fid *fid)
{
    provider.closed |= fid->fclass == FI_CLASS_EP;
    return 0;
}

static int bind_any(struct fid *fid, struct fid *other, uint64_t flags)
{
    return 0;
}

static int control(struct fid *fid, int command, void *arg)
{
    return 0;
}

static struct fi_ops any = {.size = sizeof(any), .close = close_any, .bind = bind_any, .control = control};
static struct fi_ops_rma rma = {
    .size = sizeof(rma), .writemsg = write_message, .readmsg = write_message, .writedata = write_data};
static struct fi_ops_cm cm = {.size = sizeof(cm), .getname = get_name};
static struct fi_ops_cq cq_ops = {.size = sizeof(cq_ops), .read = read_cq, .readerr = read_error};
static struct fi_ops_av av_ops = {.size = sizeof(av_ops), .insert = insert, .remove = remove_any};
static struct fid_ep ep = {.fid = {.fclass = FI_CLASS_EP, .ops = &any}, .cm = &cm, .rma = &rma};
static struct fid_cq cq = {.fid = {.fclass = FI_CLASS_CQ, .ops = &any}, .ops = &cq_ops};
static struct fid_av av = {.fid = {.fclass = FI_CLASS_AV, .ops = &any}, .ops = &av_ops};

static int open_ep(struct fid_domain *domain, struct fi_info *info, struct fid_ep **out, void *context)
{
    *out = &ep;
    return 0;
}

static int open_cq(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **out, void *context)
{
    *out = &cq;
    return 0;
}

static int open_av(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **out, void *context)
{
    *out = &av;
    return 0;
}

/* ---- a link ---- */

static struct prs_ofi_device device;
static struct prs_rail rail = {.domain = &device.base, .port = 1, .info = {.name = "fake"}};
static struct prs_wr ring[DEPTH];
static struct prs_event events[PRS_POLL_MOST];
static struct prs_link *link_;

static const char *error_text(int error)
{
    return "an error";
}

/* queues: of the link, with ids 0, 1, ...; the loopback queue is after them. timeout_ms: as PERSEUS_TIMEOUT_MS. A
 * device that has an endpoint shares it. */
static void open_patient_link(uint32_t queues, uint32_t timeout_ms)
{
    static struct fi_ops_domain domain_ops = {
        .size = sizeof(domain_ops), .cq_open = open_cq, .av_open = open_av, .endpoint = open_ep};
    static struct fid_domain domain = {.fid = {.fclass = FI_CLASS_DOMAIN, .ops = &any}, .ops = &domain_ops};
    static struct fi_domain_attr domain_attr = {.av_type = FI_AV_TABLE};
    static struct fi_fabric_attr fabric_attr = {.prov_name = (char *)"fake"};
    static struct fi_ep_attr ep_attr;
    static struct fi_info info = {.domain_attr = &domain_attr, .fabric_attr = &fabric_attr, .ep_attr = &ep_attr};
    static struct prs_ofi_descriptor descriptors[PRS_OFI_CHUNK];
    static char scratch[64];
    const struct prs_config config = {.timeout_ms = timeout_ms, .timeout = 20, .retry_count = 7};
    static const uint32_t ids[] = {0, 1};
    static const struct prs_ofi_port port = {.provider = "fake"};
    struct prs_rail_address own;
    struct prs_nic_address name;
    struct prs_queue *loopback;
    struct prs_link_options options = {.rail = &rail,
                                       .own = &own,
                                       .config = &config,
                                       .queues = queues,
                                       .ids = ids,
                                       .depth = DEPTH,
                                       .loopback_depth = DEPTH,
                                       .receive_depth = DEPTH,
                                       .remote_port = &own.told};
    int error;

    prs_ofi.strerror = error_text;
    device.info = &info;
    device.domain = &domain;
    device.descriptors[0] = descriptors;
    device.base.scratch.addr = scratch;
    device.base.nic = &prs_ofi_tables[PRS_OFI_IN_ORDER | PRS_OFI_FAILS_OVER];
    pthread_mutex_init(&device.attend_lock, NULL);
    pthread_cond_init(&device.changed, NULL);
    prs_ofi_tell_port(&port, &own.told);
    cr_assert_eq(device.base.nic->open(&options, &link_), 0);
    link_->ops->address(link_->queue[0], &name);
    for (uint32_t k = 0; k < queues; k++)
        cr_assert_eq(link_->ops->connect(link_->queue[k], &name, &own.told, &error), 0);
    cr_assert_eq(link_->ops->loopback(link_, queues, &loopback), 0);
    for (uint32_t i = 0; i < DEPTH; i++)
        ring[i] = (struct prs_wr){.opcode = PRS_WR_WRITE_IMM, .flags = PRS_WR_SIGNALED, .imm = i};
}

static void open_link(uint32_t queues)
{
    open_patient_link(queues, 600000);
}

static void close_link(void)
{
    link_->ops->close(link_);
}

static void post(const struct prs_queue *queue, uint32_t first, uint32_t count)
{
    cr_assert_eq(link_->ops->post((struct prs_queue *)queue, ring, DEPTH - 1, first, count), 0);
}

static int poll_link(void)
{
    return link_->ops->poll(link_, events);
}

/* ---- a request that the provider does not take ---- */

/* A later request might arrive, and the receiver would count it as the refused one. */
Test(ofi_link, after_a_refused_request_nothing_is_posted)
{
    open_link(2);
    post(link_->queue[0], 0, 1);
    provider.refuses = -FI_EHOSTUNREACH;
    post(link_->queue[0], 1, 1);
    cr_assert_eq(provider.taken_count, 1);
    post(link_->queue[0], 2, 3);
    post(link_->queue[1], 0, 1);
    cr_assert_eq(provider.taken_count, 1, "%u requests after one that was refused", provider.taken_count - 1);
    complete(0);
    cr_assert_eq(poll_link(), 2);
    cr_assert_eq(events[0].kind, PRS_EVENT_ERROR);
    cr_assert_eq(events[0].error, -ETIMEDOUT, "%d: not what the first one failed of", events[0].error);
    cr_assert(events[1].kind == PRS_EVENT_DONE && events[1].value == 0);
    close_link();
}

/* The requests before it may never end. That is no reason to end the peer: nothing was posted after it. */
Test(ofi_link, a_link_that_refused_a_request_stops_at_once)
{
    open_link(1);
    post(link_->queue[0], 0, 2);
    provider.refuses = -FI_EHOSTUNREACH;
    post(link_->queue[0], 2, 1);
    complete(0);
    link_->ops->stop(link_);
    cr_assert(provider.closed);
    while (!link_->ops->drained(link_))
        cr_assert_geq(poll_link(), 0);
    cr_assert_eq(link_->ops->taken(link_->queue[0]), 0);
    close_link();
}

Test(ofi_link, a_refused_flush_leaves_the_other_queues_alone)
{
    open_link(1);
    provider.refuses = -FI_EHOSTUNREACH;
    post(link_->loopback, 0, 1);
    post(link_->loopback, 1, 1);
    cr_assert_eq(provider.taken_count, 0, "a later flush would be counted as the earlier one");
    post(link_->queue[0], 0, 1);
    cr_assert_eq(provider.taken_count, 1);
    close_link();
}

/* ---- a provider that takes nothing for long ---- */

static void wait_ms(uint32_t ms)
{
    uint64_t until = prs_clock_ms() + ms;

    while (prs_clock_ms() < until)
        ;
}

Test(ofi_link, a_provider_that_never_takes_anything_cannot_connect)
{
    open_patient_link(2, 5);
    provider.full = true;
    post(link_->queue[1], 0, 1);
    wait_ms(10);
    cr_assert_eq(poll_link(), 1);
    cr_assert(events[0].kind == PRS_EVENT_ERROR && events[0].error == -ETIMEDOUT);
    close_link();
}

/* The other queue of the link has filled the provider. */
Test(ofi_link, a_queue_that_was_never_used_waits_for_a_slow_receiver)
{
    open_patient_link(2, 5);
    post(link_->queue[0], 0, 2);
    complete(0);
    cr_assert_eq(poll_link(), 1);
    provider.full = true;
    post(link_->queue[1], 0, 1);
    wait_ms(10);
    cr_assert_eq(poll_link(), 0, "%d: %s", events[0].error, events[0].text);
    complete(1);
    provider.full = false;
    cr_assert_eq(poll_link(), 1);
    cr_assert_eq(provider.taken_count, 3);
    close_link();
}

/* ---- requests that fail, and what has arrived ---- */

/* The provider has connected again by itself. */
Test(ofi_link, a_request_done_after_a_failed_one_leaves_no_count)
{
    int r = 0;

    open_link(1);
    post(link_->queue[0], 0, 3);
    fail(1, ECONNRESET);
    cr_assert_eq(poll_link(), 1);
    cr_assert(events[0].kind == PRS_EVENT_ERROR && events[0].error == -ETIMEDOUT);
    post(link_->queue[0], 3, 1);
    cr_assert_eq(provider.taken_count, 3, "posted after a failure");
    complete(2);
    for (int i = 0; i < 10 && r >= 0; i++)
        r = poll_link();
    cr_assert_eq(r, -EPROTO);
    close_link();
}

static uint64_t data_of(uint32_t queue, uint32_t imm)
{
    return (uint64_t)(queue << 28 | 5) << 32 | imm;
}

/* Its owner has not polled for long. */
Test(ofi_link, all_that_has_arrived_is_counted_when_a_link_stops)
{
    uint32_t arrivals = 0;

    open_link(2);
    for (uint32_t i = 0; i < ARRIVALS; i++)
        arrive(data_of(i % 4 == 0, i));
    while (!prs_ofi_link_of(link_)->crowded) /* as the thread of attend.c does */
        prs_ofi_progress(prs_ofi_link_of(link_)->endpoint);
    link_->ops->stop(link_);
    while (!link_->ops->drained(link_)) {
        int count = poll_link();

        cr_assert_geq(count, 0);
        for (int i = 0; i < count; i++)
            if (events[i].kind == PRS_EVENT_ARRIVAL) {
                cr_assert_eq(events[i].value, arrivals);
                cr_assert_eq(events[i].queue, arrivals % 4 == 0);
                cr_assert_eq(events[i].bytes, 5);
                arrivals++;
            }
    }
    cr_assert_eq(arrivals, ARRIVALS);
    cr_assert_eq(link_->ops->taken(link_->queue[0]), ARRIVALS - ARRIVALS / 4);
    cr_assert_eq(link_->ops->taken(link_->queue[1]), ARRIVALS / 4);
    close_link();
}

/* A provider that says for ever that there is an error, and has none, must not keep the thread that stops the link. */
Test(ofi_link, a_provider_that_never_reports_an_end_leaves_no_count, .timeout = 30)
{
    uint64_t start = prs_clock_ms();

    open_link(1);
    post(link_->queue[0], 0, 1);
    provider.endless = true;
    link_->ops->stop(link_);
    cr_assert_lt(prs_clock_ms() - start, 20000u);
    cr_assert_eq(poll_link(), -EPROTO, "nothing tells what has arrived");
    close_link();
}

/* ---- links that share an endpoint ---- */

static struct prs_link *open_shared_pair(uint32_t timeout_ms)
{
    struct prs_link *other;

    open_patient_link(1, timeout_ms); /* fills the device in */
    close_link();
    cr_assert_eq(prs_ofi_endpoint_open(&device, true, DEPTH, &device.endpoint), 0);
    open_patient_link(1, timeout_ms);
    other = link_;
    open_patient_link(1, timeout_ms);
    provider.crowd_data = (uint64_t)prs_ofi_link_of(other)->number << 32;
    provider.crowd = 2 * PRS_OFI_SHARED_ARRIVALS; /* and nobody polls it */
    return other;
}

static void close_shared_pair(struct prs_link *other)
{
    if (link_)
        close_link();
    other->ops->close(other);
    prs_ofi_endpoint_close(device.endpoint);
    device.endpoint = NULL;
}

static int poll_until_done(uint32_t most_ms)
{
    uint64_t until = prs_clock_ms() + most_ms;
    int r;

    while ((r = poll_link()) == 0 && prs_clock_ms() < until)
        ;
    return r;
}

Test(ofi_link, one_that_is_not_polled_stops_the_others_for_a_limited_time, .timeout = 60)
{
    struct prs_link *other = open_shared_pair(3000);

    post(link_->queue[0], 0, 1);
    complete(provider.taken_count - 1);
    cr_assert_eq(poll_until_done(20), 0, "the other one is polled soon, perhaps");
    cr_assert_eq(poll_until_done(20000), 1, "the others go on");
    cr_assert_eq(events[0].kind, PRS_EVENT_DONE);
    cr_assert_eq(other->ops->poll(other, events), -ENOBUFS, "what it has missed is lost, so it ends");
    close_shared_pair(other);
}

Test(ofi_link, one_that_is_polled_in_time_misses_nothing, .timeout = 60)
{
    struct prs_link *other = open_shared_pair(60000);
    uint32_t arrivals = 0;
    int count;

    post(link_->queue[0], 0, 1);
    complete(provider.taken_count - 1);
    while (provider.crowd > PRS_OFI_SHARED_ARRIVALS + PRS_POLL_MOST)
        cr_assert_eq(poll_link(), 0);
    while (arrivals < 2 * PRS_OFI_SHARED_ARRIVALS) {
        count = other->ops->poll(other, events);
        cr_assert_geq(count, 0);
        arrivals += (uint32_t)count;
    }
    cr_assert_eq(poll_until_done(20000), 1);
    close_shared_pair(other);
}

/* A closing link waits for its requests in flight, whose completions must be read meanwhile. */
Test(ofi_link, one_that_closes_does_not_wait_for_one_that_is_not_polled, .timeout = 60)
{
    struct prs_link *other = open_shared_pair(60000);

    post(link_->queue[0], 0, 1);
    while (provider.crowd > PRS_OFI_SHARED_ARRIVALS + PRS_POLL_MOST)
        cr_assert_eq(poll_link(), 0);
    cr_assert_eq(poll_link(), 0);
    complete(provider.taken_count - 1);
    close_link();
    link_ = NULL;
    cr_assert_eq(device.endpoint->broken, 0, "the endpoint has ended for all");
    close_shared_pair(other);
}

Test(ofi_link, an_arrival_names_a_queue_that_there_is)
{
    open_link(2);
    arrive(data_of(2, 0));
    cr_assert_eq(poll_link(), -EPROTO);
    close_link();
}
