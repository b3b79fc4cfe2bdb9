/* SPDX-License-Identifier: Apache-2.0 */
/* libibverbs, opened at run time, so that Perseus can be loaded without it. Functions that verbs.h calls through the
 * device context (post, poll) need no entry here. */
#ifndef TRANSPORT_VERBS_H
#define TRANSPORT_VERBS_H

#include <infiniband/verbs.h>

struct prs_verbs {
    struct ibv_device **(*get_device_list)(int *count);
    void (*free_device_list)(struct ibv_device **list);
    const char *(*get_device_name)(struct ibv_device *device);
    struct ibv_context *(*open_device)(struct ibv_device *device);
    int (*close_device)(struct ibv_context *context);
    int (*get_async_event)(struct ibv_context *context, struct ibv_async_event *event);
    void (*ack_async_event)(struct ibv_async_event *event);
    int (*query_device)(struct ibv_context *context, struct ibv_device_attr *attr);
    int (*query_port_legacy)(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr);
    int (*query_gid)(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid);
    struct ibv_pd *(*alloc_pd)(struct ibv_context *context);
    int (*dealloc_pd)(struct ibv_pd *pd);
    struct ibv_mr *(*reg_mr)(struct ibv_pd *pd, void *addr, size_t length, int access);
    int (*dereg_mr)(struct ibv_mr *mr);
    struct ibv_cq *(*create_cq)(struct ibv_context *context, int cqe, void *cq_context,
                                struct ibv_comp_channel *channel, int comp_vector);
    int (*destroy_cq)(struct ibv_cq *cq);
    struct ibv_qp *(*create_qp)(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
    int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
    int (*destroy_qp)(struct ibv_qp *qp);
    int (*fork_init)(void);
    const char *(*event_type_str)(enum ibv_event_type event);
    const char *(*wc_status_str)(enum ibv_wc_status status);
    /* The following are optional: NULL if the library is too old. */
    int (*resize_cq)(struct ibv_cq *cq, int cqe);
    int (*query_gid_ex)(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
                        uint32_t flags, size_t entry_size);
    struct ibv_mr *(*reg_mr_iova2)(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access);
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                    int access);
    struct ibv_ah *(*create_ah)(struct ibv_pd *pd, struct ibv_ah_attr *attr);
    int (*destroy_ah)(struct ibv_ah *ah);
    struct ibv_qp_ex *(*qp_to_qp_ex)(struct ibv_qp *qp);
    int (*query_ece)(struct ibv_qp *qp, struct ibv_ece *ece);
    int (*set_ece)(struct ibv_qp *qp, struct ibv_ece *ece);
    int (*query_port_speed)(struct ibv_context *context, uint32_t port, uint64_t *hundreds_of_mbps);
};

/* Valid after prs_verbs_load() returned 0. */
extern struct prs_verbs prs_verbs;

/* Open the library once per process and prepare it for fork. Return 0 or -ENOSYS. Any thread. */
int prs_verbs_load(void);

/* Use the extended query if the provider has it, else the old one. Sets every field. speed_ex, unless NULL, gets the
 * code of the speed where it needs more bits than attr has (XDR); else 0. Return 0 or -errno, not logged. */
int prs_verbs_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, uint32_t *speed_ex);

#endif
