/* SPDX-License-Identifier: Apache-2.0 */
/* The structures that programs exchange with libefa.so.1, declared here: the headers of rdma-core before 43 lack some
 * of them. tools/softnic/test/test_efadv.c compares them with the system's. */
#ifndef SOFTNIC_EFA_ABI_H
#define SOFTNIC_EFA_ABI_H

#include <infiniband/verbs.h>
#include <stdint.h>

enum { SN_EFA_SRD = 0 /* the only driver type of a queue pair */, SN_EFA_WC_WITH_SGID = 1 << 0 };

/* Bit 4, writes whose immediate consumes no receive, is not offered. */
enum sn_efa_caps {
    SN_EFA_RDMA_READ = 1 << 0,
    SN_EFA_RNR_RETRY = 1 << 1,
    SN_EFA_CQ_WITH_SGID = 1 << 2,
    SN_EFA_RDMA_WRITE = 1 << 3,
};

struct sn_efa_device {
    uint64_t comp_mask;
    uint32_t max_sq_wr, max_rq_wr;
    uint16_t max_sq_sge, max_rq_sge;
    uint16_t inline_buf_size;
    uint8_t reserved[2];
    uint32_t device_caps;
    uint32_t max_rdma_size;
};

struct sn_efa_qp_init {
    uint64_t comp_mask;
    uint32_t driver_qp_type;
    uint8_t reserved[4]; /* newer headers: flags, level, both refused here */
};

struct sn_efa_ah {
    uint64_t comp_mask;
    uint16_t ahn;
    uint8_t reserved[6];
};

struct sn_efa_cq {
    uint64_t comp_mask;
    int (*wc_read_sgid)(struct sn_efa_cq *cq, union ibv_gid *sgid);
};

struct sn_efa_cq_init {
    uint64_t comp_mask;
    uint64_t wc_flags;
};

#endif
