/* SPDX-License-Identifier: Apache-2.0 */
/* librdmacm.so.1 without a connection manager: there is no /dev/infiniband/rdma_cm. The real library is linked BIND_NOW
 * against private parts of its own libibverbs, so it cannot be used. rsockets are absent. */
#include "tools/softnic/stub/stub.h"

const char *rdma_event_str(int event);
const char *rdma_event_str(int event)
{
    (void)event;
    return "no connection manager in the software NIC";
}

unsigned short rdma_get_src_port(void *id);
unsigned short rdma_get_src_port(void *id)
{
    (void)id;
    return 0;
}

unsigned short rdma_get_dst_port(void *id);
unsigned short rdma_get_dst_port(void *id)
{
    (void)id;
    return 0;
}

/* The real library returns a NULL-terminated list. Callers take NULL as "none" and read the count. */
void **rdma_get_devices(int *num_devices);
void **rdma_get_devices(int *num_devices)
{
    if (num_devices)
        *num_devices = 0;
    errno = ENODEV;
    return NULL;
}

STUB_PTR(rdma_create_event_channel)
STUB_VOID(rdma_destroy_event_channel)
STUB_VOID(rdma_free_devices)
STUB_VOID(rdma_freeaddrinfo)
STUB_VOID(rdma_destroy_ep)
STUB_VOID(rdma_destroy_qp)
STUB_VOID(rdma_destroy_srq)
STUB_MINUS1(rdma_accept)
STUB_MINUS1(rdma_ack_cm_event)
STUB_MINUS1(rdma_bind_addr)
STUB_MINUS1(rdma_connect)
STUB_MINUS1(rdma_create_ep)
STUB_MINUS1(rdma_create_id)
STUB_MINUS1(rdma_create_qp)
STUB_MINUS1(rdma_create_qp_ex)
STUB_MINUS1(rdma_create_srq)
STUB_MINUS1(rdma_create_srq_ex)
STUB_MINUS1(rdma_destroy_id)
STUB_MINUS1(rdma_disconnect)
STUB_MINUS1(rdma_establish)
STUB_MINUS1(rdma_getaddrinfo)
STUB_MINUS1(rdma_get_cm_event)
STUB_MINUS1(rdma_get_remote_ece)
STUB_MINUS1(rdma_get_request)
STUB_MINUS1(rdma_init_qp_attr)
STUB_MINUS1(rdma_join_multicast)
STUB_MINUS1(rdma_join_multicast_ex)
STUB_MINUS1(rdma_leave_multicast)
STUB_MINUS1(rdma_listen)
STUB_MINUS1(rdma_migrate_id)
STUB_MINUS1(rdma_notify)
STUB_MINUS1(rdma_reject)
STUB_MINUS1(rdma_reject_ece)
STUB_MINUS1(rdma_resolve_addr)
STUB_MINUS1(rdma_resolve_route)
STUB_MINUS1(rdma_set_local_ece)
STUB_MINUS1(rdma_set_option)
