/* SPDX-License-Identifier: Apache-2.0 */
/* Why an EFA is not used. libefa is the test's: it is linked with --wrap=dlopen, dlsym and dlvsym. */
#include <criterion/criterion.h>
#include <errno.h>
#include <infiniband/efadv.h>
#include <string.h>

#include "test/support/fake_verbs.h"
#include "transport/nic/verbs/efa.h"
#include "transport/nic/verbs/verbs_nic.h"

static const char *missing; /* a symbol of libefa or libibverbs, or "libefa" */
static int query_error;
static uint32_t caps;

void *__wrap_dlopen(const char *name, int flags);
void *__wrap_dlsym(void *library, const char *name);
void *__wrap_dlvsym(void *library, const char *name, const char *version);
char *__wrap_dlerror(void);

static int query_device(struct ibv_context *context, struct efadv_device_attr *attr, uint32_t bytes)
{
    (void)context;
    (void)bytes;
    *attr =
        (struct efadv_device_attr){.max_sq_wr = 11, .max_rq_wr = 22, .max_rdma_size = 33 << 20, .device_caps = caps};
    return query_error;
}

static bool is_missing(const char *name)
{
    return missing && !strcmp(missing, name);
}

void *__wrap_dlopen(const char *name, int flags)
{
    cr_assert(strstr(name, "libefa"), "%s", name);
    (void)flags;
    return is_missing("libefa") ? NULL : &caps;
}

void *__wrap_dlsym(void *library, const char *name)
{
    (void)library;
    if (is_missing(name))
        return NULL;
    return (void *)(uintptr_t)query_device; /* only this one is called */
}

void *__wrap_dlvsym(void *library, const char *name, const char *version)
{
    (void)version;
    return !strcmp(name, "efadv_query_ah") ? NULL : __wrap_dlsym(library, name); /* older: without versions */
}

char *__wrap_dlerror(void)
{
    static char text[] = "it was not packaged";

    return text;
}

/* The order matters: a library that was loaded stays loaded. */
Test(efa, each_reason_not_to_use_one_is_named_and_a_good_one_is_used)
{
    enum { READ = 1, RNR_RETRY = 2, WRITE = 8 };
    static const struct {
        const char *missing;
        int error;
        uint32_t caps;
        const char *why; /* NULL: it is used */
    } rows[] = {
        {"libefa", 0, READ | WRITE, "cannot be opened (it was not packaged)"},
        {"efadv_query_device", 0, READ | WRITE, "rdma-core is too old"},
        {"efadv_create_qp_ex", 0, READ | WRITE, "rdma-core is too old"},
        {"efadv_query_ah", 0, READ | WRITE, "rdma-core is too old"},
        {"ibv_qp_to_qp_ex", 0, READ | WRITE, "rdma-core is too old"},
        {"ibv_create_ah", 0, READ | WRITE, "rdma-core is too old"},
        {"ibv_destroy_ah", 0, READ | WRITE, "rdma-core is too old"},
        {NULL, EOPNOTSUPP, READ | WRITE, "libefa does not know: Operation not supported"},
        {NULL, -EINVAL, READ | WRITE, "libefa does not know: Invalid argument"},
        {NULL, 0, WRITE, "without RDMA reads (capabilities 0x8)"},
        {NULL, 0, READ | RNR_RETRY, "without RDMA writes (capabilities 0x3)"},
        {NULL, 0, 0, "without RDMA reads"},
        {NULL, 0, READ | WRITE, NULL},
        {NULL, 0, READ | WRITE | RNR_RETRY, NULL},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct prs_verbs_device device = {.base.nic = &prs_nic_rc, .attr.vendor_id = PRS_EFA_VENDOR};
        struct prs_domain *domain = &device.base;

        missing = rows[i].missing;
        fake_verbs_install();
        if (is_missing("ibv_qp_to_qp_ex"))
            prs_verbs.qp_to_qp_ex = NULL;
        if (is_missing("ibv_create_ah"))
            prs_verbs.create_ah = NULL;
        if (is_missing("ibv_destroy_ah"))
            prs_verbs.destroy_ah = NULL;
        query_error = rows[i].error;
        caps = rows[i].caps;
        prs_efa_claim(&device);
        if (rows[i].why) {
            cr_expect_eq(domain->nic, &prs_nic_rc, "row %zu: it is used", i);
            cr_expect(strstr(domain->why_not, rows[i].why), "row %zu: %s", i, domain->why_not);
            continue;
        }
        cr_expect_eq(domain->nic, &prs_nic_srd, "row %zu: %s", i, domain->why_not);
        cr_expect(domain->max_send_wr == 11 && domain->max_receive_wr == 22 && device.max_message_bytes == 33 << 20);
        cr_expect_eq(device.rnr_retry, (caps & RNR_RETRY) != 0, "row %zu", i);
    }
}

Test(efa, other_devices_are_left_alone)
{
    struct prs_verbs_device device = {.base.nic = &prs_nic_rc, .attr.vendor_id = 0x15b3};

    prs_efa_claim(&device);
    cr_assert(device.base.nic == &prs_nic_rc && !device.base.why_not[0]);
}
