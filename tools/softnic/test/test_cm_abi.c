/* SPDX-License-Identifier: Apache-2.0 */
/* Compares what librdmacm.so.1 of the software NIC declares itself with the system's header. Compiling is the test. */
#include <rdma/rdma_cma.h>
#include <assert.h>
#include <stddef.h>

#include "tools/softnic/cm/rdma_abi.h"

#define SAME_SIZE(ours, theirs) static_assert(sizeof(struct ours) == sizeof(struct theirs), #theirs)
#define SAME(ours, theirs, field)                                                                                      \
    static_assert(offsetof(struct ours, field) == offsetof(struct theirs, field) &&                                    \
                      sizeof(((struct ours *)0)->field) == sizeof(((struct theirs *)0)->field),                        \
                  #theirs "." #field)
#define ID(field)   SAME(sn_rdma_id, rdma_cm_id, field)
#define CONN(field) SAME(sn_rdma_conn_param, rdma_conn_param, field)
#define UD(field)   SAME(sn_rdma_ud_param, rdma_ud_param, field)
#define INFO(field) SAME(sn_rdma_addrinfo, rdma_addrinfo, field)

SAME_SIZE(sn_rdma_id, rdma_cm_id);
ID(verbs);
ID(channel);
ID(context);
ID(qp);
ID(route.addr.src_storage);
ID(route.addr.dst_storage);
ID(route.path_rec);
ID(route.num_paths);
ID(ps);
ID(port_num);
ID(event);
ID(send_cq_channel);
ID(send_cq);
ID(recv_cq_channel);
ID(recv_cq);
ID(srq);
ID(pd);
ID(qp_type);
static_assert(offsetof(struct sn_rdma_addr, ib.sgid) == offsetof(struct rdma_addr, addr.ibaddr.sgid), "rdma_ib_addr");
static_assert(offsetof(struct sn_rdma_addr, ib.pkey) == offsetof(struct rdma_addr, addr.ibaddr.pkey), "rdma_ib_addr");

SAME_SIZE(sn_rdma_conn_param, rdma_conn_param);
CONN(private_data);
CONN(private_data_len);
CONN(responder_resources);
CONN(initiator_depth);
CONN(flow_control);
CONN(retry_count);
CONN(rnr_retry_count);
CONN(srq);
CONN(qp_num);

SAME_SIZE(sn_rdma_ud_param, rdma_ud_param);
UD(private_data);
UD(private_data_len);
UD(ah_attr);
UD(qp_num);
UD(qkey);

SAME_SIZE(sn_rdma_event, rdma_cm_event);
SAME(sn_rdma_event, rdma_cm_event, id);
SAME(sn_rdma_event, rdma_cm_event, listen_id);
SAME(sn_rdma_event, rdma_cm_event, event);
SAME(sn_rdma_event, rdma_cm_event, status);
SAME(sn_rdma_event, rdma_cm_event, param.conn);
SAME(sn_rdma_event, rdma_cm_event, param.ud);
SAME(sn_rdma_channel, rdma_event_channel, fd);

SAME_SIZE(sn_rdma_addrinfo, rdma_addrinfo);
INFO(ai_flags);
INFO(ai_family);
INFO(ai_qp_type);
INFO(ai_port_space);
INFO(ai_src_len);
INFO(ai_dst_len);
INFO(ai_src_addr);
INFO(ai_dst_addr);
INFO(ai_src_canonname);
INFO(ai_dst_canonname);
INFO(ai_route_len);
INFO(ai_route);
INFO(ai_connect_len);
INFO(ai_connect);
INFO(ai_next);

#define EQUAL(ours, theirs) static_assert((int)(ours) == (int)(theirs), #theirs)
EQUAL(SN_RDMA_CONNECT_REQUEST, RDMA_CM_EVENT_CONNECT_REQUEST);
EQUAL(SN_RDMA_UNREACHABLE, RDMA_CM_EVENT_UNREACHABLE);
EQUAL(SN_RDMA_REJECTED, RDMA_CM_EVENT_REJECTED);
EQUAL(SN_RDMA_ESTABLISHED, RDMA_CM_EVENT_ESTABLISHED);
EQUAL(SN_RDMA_DISCONNECTED, RDMA_CM_EVENT_DISCONNECTED);
EQUAL(SN_RDMA_TIMEWAIT_EXIT, RDMA_CM_EVENT_TIMEWAIT_EXIT);
EQUAL(SN_RDMA_PS_IPOIB, RDMA_PS_IPOIB);
EQUAL(SN_RDMA_PS_TCP, RDMA_PS_TCP);
EQUAL(SN_RDMA_PS_UDP, RDMA_PS_UDP);
EQUAL(SN_RDMA_PS_IB, RDMA_PS_IB);
EQUAL(SN_RDMA_UDP_QKEY, RDMA_UDP_QKEY);
EQUAL(SN_RDMA_MAX_DEPTH, RDMA_MAX_RESP_RES);
EQUAL(SN_RAI_PASSIVE, RAI_PASSIVE);
EQUAL(SN_RAI_NUMERICHOST, RAI_NUMERICHOST);
EQUAL(SN_RAI_NOROUTE, RAI_NOROUTE);
EQUAL(SN_RAI_FAMILY, RAI_FAMILY);
EQUAL(SN_RDMA_OPTION_ID, RDMA_OPTION_ID);
EQUAL(SN_RDMA_ID_REUSEADDR, RDMA_OPTION_ID_REUSEADDR);
EQUAL(SN_RDMA_ID_AFONLY, RDMA_OPTION_ID_AFONLY);
EQUAL(SN_RDMA_ID_ACK_TIMEOUT, RDMA_OPTION_ID_ACK_TIMEOUT);

int main(void)
{
    return 0;
}
