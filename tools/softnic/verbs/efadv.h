/* SPDX-License-Identifier: Apache-2.0 */
/* The differences between an EFA and other devices: its limits, and the functions that libefa.so.1 calls. */
#ifndef SOFTNIC_EFADV_H
#define SOFTNIC_EFADV_H

#include "tools/softnic/verbs/efa_abi.h"

/* Change the result of ibv_query_device from that of an RC device to that of an EFA. */
void sn_efa_limits(struct ibv_device_attr *attr);

/* libefa.so.1 (stub/libefa.c) calls these. On devices other than EFAs all fail with EOPNOTSUPP. */
int sn_efadv_query_device(struct ibv_context *context, struct sn_efa_device *attr, uint32_t bytes);
struct ibv_qp *sn_efadv_create_driver_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr, uint32_t type);
struct ibv_qp *sn_efadv_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr,
                                     struct sn_efa_qp_init *efa, uint32_t bytes);
int sn_efadv_query_ah(struct ibv_ah *ah, struct sn_efa_ah *attr, uint32_t bytes);
struct ibv_cq_ex *sn_efadv_create_cq(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr,
                                     struct sn_efa_cq_init *efa, uint32_t bytes);
struct sn_efa_cq *sn_efadv_cq_from_ibv_cq_ex(struct ibv_cq_ex *cq);
int sn_efadv_get_max_sq_depth(struct ibv_context *context, void *attr, uint32_t bytes);
int sn_efadv_get_max_rq_depth(struct ibv_context *context, void *attr, uint32_t bytes);
int sn_efadv_query_mr(struct ibv_mr *mr, void *attr, uint32_t bytes);

#endif
