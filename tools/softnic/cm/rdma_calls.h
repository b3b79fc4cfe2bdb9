/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of librdmacm.so.1; the manual pages of rdma-core are the contract. Apart from rdma_abi.h, because a
 * test compares that one with <rdma/rdma_cma.h>, which declares the same names with its own types. */
#ifndef SOFTNIC_RDMA_CALLS_H
#define SOFTNIC_RDMA_CALLS_H

#include "tools/softnic/cm/rdma_abi.h"

struct sn_rdma_channel *rdma_create_event_channel(void);
void rdma_destroy_event_channel(struct sn_rdma_channel *channel);
int rdma_get_cm_event(struct sn_rdma_channel *channel, struct sn_rdma_event **event);
int rdma_ack_cm_event(struct sn_rdma_event *event);
const char *rdma_event_str(enum sn_rdma_event_type event);

int rdma_create_id(struct sn_rdma_channel *channel, struct sn_rdma_id **id, void *context, enum sn_rdma_port_space ps);
int rdma_destroy_id(struct sn_rdma_id *id);
int rdma_migrate_id(struct sn_rdma_id *id, struct sn_rdma_channel *channel);
int rdma_set_option(struct sn_rdma_id *id, int level, int name, void *value, size_t bytes);
__be16 rdma_get_src_port(struct sn_rdma_id *id);
__be16 rdma_get_dst_port(struct sn_rdma_id *id);
struct ibv_context **rdma_get_devices(int *count);
void rdma_free_devices(struct ibv_context **list);

int rdma_bind_addr(struct sn_rdma_id *id, struct sockaddr *addr);
int rdma_resolve_addr(struct sn_rdma_id *id, struct sockaddr *src, struct sockaddr *dst, int timeout_ms);
int rdma_resolve_route(struct sn_rdma_id *id, int timeout_ms);
int rdma_getaddrinfo(const char *node, const char *service, const struct sn_rdma_addrinfo *hints,
                     struct sn_rdma_addrinfo **res);
void rdma_freeaddrinfo(struct sn_rdma_addrinfo *res);
int rdma_create_ep(struct sn_rdma_id **id, struct sn_rdma_addrinfo *res, struct ibv_pd *pd,
                   struct ibv_qp_init_attr *attr);
void rdma_destroy_ep(struct sn_rdma_id *id);

int rdma_listen(struct sn_rdma_id *id, int backlog);
int rdma_get_request(struct sn_rdma_id *listen, struct sn_rdma_id **id);
int rdma_connect(struct sn_rdma_id *id, struct sn_rdma_conn_param *param);
int rdma_establish(struct sn_rdma_id *id);
int rdma_accept(struct sn_rdma_id *id, struct sn_rdma_conn_param *param);
int rdma_reject(struct sn_rdma_id *id, const void *data, uint8_t len);
int rdma_reject_ece(struct sn_rdma_id *id, const void *data, uint8_t len);
int rdma_notify(struct sn_rdma_id *id, enum ibv_event_type event);
int rdma_disconnect(struct sn_rdma_id *id);

int rdma_create_qp(struct sn_rdma_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
int rdma_create_qp_ex(struct sn_rdma_id *id, struct ibv_qp_init_attr_ex *attr);
void rdma_destroy_qp(struct sn_rdma_id *id);
int rdma_create_srq(struct sn_rdma_id *id, struct ibv_pd *pd, struct ibv_srq_init_attr *attr);
int rdma_create_srq_ex(struct sn_rdma_id *id, struct ibv_srq_init_attr_ex *attr);
void rdma_destroy_srq(struct sn_rdma_id *id);
int rdma_init_qp_attr(struct sn_rdma_id *id, struct ibv_qp_attr *attr, int *mask);

int rdma_join_multicast(struct sn_rdma_id *id, struct sockaddr *addr, void *context);
int rdma_join_multicast_ex(struct sn_rdma_id *id, void *attr, void *context);
int rdma_leave_multicast(struct sn_rdma_id *id, struct sockaddr *addr);
int rdma_set_local_ece(struct sn_rdma_id *id, struct ibv_ece *ece);
int rdma_get_remote_ece(struct sn_rdma_id *id, struct ibv_ece *ece);

#endif
