/* SPDX-License-Identifier: Apache-2.0 */
/* What programs exchange with librdmacm.so.1, declared here, so that a build needs no librdmacm-dev. Names follow those
 * of <rdma/rdma_cma.h>, with sn_ in front; its manual pages are the contract. tools/softnic/test/test_cm_abi.c compares
 * the two. */
#ifndef SOFTNIC_RDMA_ABI_H
#define SOFTNIC_RDMA_ABI_H

#include <infiniband/sa.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <stdint.h>
#include <sys/socket.h>

enum sn_rdma_event_type {
    SN_RDMA_ADDR_RESOLVED,
    SN_RDMA_ADDR_ERROR,
    SN_RDMA_ROUTE_RESOLVED,
    SN_RDMA_ROUTE_ERROR,
    SN_RDMA_CONNECT_REQUEST,
    SN_RDMA_CONNECT_RESPONSE,
    SN_RDMA_CONNECT_ERROR,
    SN_RDMA_UNREACHABLE,
    SN_RDMA_REJECTED,
    SN_RDMA_ESTABLISHED,
    SN_RDMA_DISCONNECTED,
    SN_RDMA_DEVICE_REMOVAL,
    SN_RDMA_MULTICAST_JOIN,
    SN_RDMA_MULTICAST_ERROR,
    SN_RDMA_ADDR_CHANGE,
    SN_RDMA_TIMEWAIT_EXIT,
    SN_RDMA_EVENTS
};

enum sn_rdma_port_space {
    SN_RDMA_PS_IPOIB = 0x2,
    SN_RDMA_PS_TCP = 0x106,
    SN_RDMA_PS_UDP = 0x111,
    SN_RDMA_PS_IB = 0x13f
};

enum { SN_RDMA_UDP_QKEY = 0x01234567, SN_RDMA_MAX_DEPTH = 0xff /* "as many as the device has" */ };
enum { SN_RAI_PASSIVE = 1, SN_RAI_NUMERICHOST = 2, SN_RAI_NOROUTE = 4, SN_RAI_FAMILY = 8 };
enum { SN_RDMA_OPTION_ID = 0, SN_RDMA_OPTION_IB = 1 };
enum { SN_RDMA_ID_TOS, SN_RDMA_ID_REUSEADDR, SN_RDMA_ID_AFONLY, SN_RDMA_ID_ACK_TIMEOUT };

struct sn_rdma_addr {
    union {
        struct sockaddr src_addr;
        struct sockaddr_storage src_storage;
    };
    union {
        struct sockaddr dst_addr;
        struct sockaddr_storage dst_storage;
    };
    struct {
        union ibv_gid sgid, dgid;
        __be16 pkey;
    } ib;
};

struct sn_rdma_route {
    struct sn_rdma_addr addr;
    struct ibv_sa_path_rec *path_rec;
    int num_paths;
};

struct sn_rdma_channel {
    int fd;
};

struct sn_rdma_event;

struct sn_rdma_id {
    struct ibv_context *verbs;
    struct sn_rdma_channel *channel;
    void *context;
    struct ibv_qp *qp;
    struct sn_rdma_route route;
    enum sn_rdma_port_space ps;
    uint8_t port_num;
    struct sn_rdma_event *event;
    struct ibv_comp_channel *send_cq_channel;
    struct ibv_cq *send_cq;
    struct ibv_comp_channel *recv_cq_channel;
    struct ibv_cq *recv_cq;
    struct ibv_srq *srq;
    struct ibv_pd *pd;
    enum ibv_qp_type qp_type;
};

struct sn_rdma_conn_param {
    const void *private_data;
    uint8_t private_data_len;
    uint8_t responder_resources;
    uint8_t initiator_depth;
    uint8_t flow_control;
    uint8_t retry_count;
    uint8_t rnr_retry_count;
    uint8_t srq;
    uint32_t qp_num;
};

struct sn_rdma_ud_param {
    const void *private_data;
    uint8_t private_data_len;
    struct ibv_ah_attr ah_attr;
    uint32_t qp_num;
    uint32_t qkey;
};

struct sn_rdma_event {
    struct sn_rdma_id *id;
    struct sn_rdma_id *listen_id;
    enum sn_rdma_event_type event;
    int status;
    union {
        struct sn_rdma_conn_param conn;
        struct sn_rdma_ud_param ud;
    } param;
};

struct sn_rdma_addrinfo {
    int ai_flags;
    int ai_family;
    int ai_qp_type;
    int ai_port_space;
    socklen_t ai_src_len;
    socklen_t ai_dst_len;
    struct sockaddr *ai_src_addr;
    struct sockaddr *ai_dst_addr;
    char *ai_src_canonname;
    char *ai_dst_canonname;
    size_t ai_route_len;
    void *ai_route;
    size_t ai_connect_len;
    void *ai_connect;
    struct sn_rdma_addrinfo *ai_next;
};

#endif
