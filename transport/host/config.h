/* SPDX-License-Identifier: Apache-2.0 */
/* The settings of the environment, read and checked once per fabric. Names and ranges are NCCL's; PERSEUS_* variables
 * exist only for settings that NCCL does not have. */
#ifndef TRANSPORT_CONFIG_H
#define TRANSPORT_CONFIG_H

#include <sys/socket.h>

#include "transport/host/hca_filter.h"
#include <perseus/perseus.h>

enum { PRS_FAILOVER_UNSET = -1 }; /* each connection's options decide */

struct prs_config {
    struct prs_hca_filter hca;    /* NCCL_IB_HCA */
    struct prs_hca_filter ifname; /* NCCL_SOCKET_IFNAME */
    int socket_family;            /* NCCL_SOCKET_FAMILY: AF_UNSPEC, AF_INET, AF_INET6 */
    int comm_id_family;           /* of comm_id; 0: none */
    uint8_t comm_id[16];          /* the address in NCCL_COMM_ID */
    bool disabled;                /* NCCL_IB_DISABLE */
    char provider[64];            /* PERSEUS_PROVIDER: libfabric's name of it; "": none is asked for */
    int gid_index;                /* of a RoCE port; -1: choose */
    int flid_gid_index;           /* of an InfiniBand port that routers reach; -1: none */
    int gid_family;               /* AF_INET or AF_INET6 */
    int roce_version;             /* 1 or 2 */
    bool gid_range_set;           /* NCCL_IB_ADDR_RANGE, a CIDR */
    uint8_t gid_range[16];
    int gid_range_bits;
    int service_level; /* -1: the traffic class of the communicator on InfiniBand, else 0 */
    int traffic_class;
    int pkey_index;
    int timeout;
    int retry_count;
    int queues_per_rail;
    int split_queues;
    int relaxed_ordering; /* 0 off, 1 on, 2 on where supported */
    int adaptive_routing; /* -1: by link layer */
    int mqp_retry_count;
    int mqp_retry_ms;
    int return_async_events;
    int ece;
    int failover; /* NCCL_IB_RESILIENCY_PORT_FAILOVER: 0, 1 or PRS_FAILOVER_UNSET */
    int standby;  /* PERSEUS_STANDBY_RAIL */
    int recovery; /* NCCL_IB_RESILIENCY_PORT_RECOVERY */
    int recovery_ms;
    int ar_bytes; /* NCCL_IB_AR_THRESHOLD */
    int policy;   /* PERSEUS_ORDER, enum prs_policy */
    bool dmabuf;
    uint32_t timeout_ms;
};

/* Bad numbers in NCCL's variables are clamped, with a warning. Return 0 or -EINVAL: a list of devices or interfaces, or
 * a variable of our own, has an impossible value. */
int prs_config_read(const struct prs_fabric_options *options, struct prs_config *out);

/* How long a reliable queue retries: a link that is back sooner has lost nothing. */
uint64_t prs_config_patience_ns(const struct prs_config *config);

/* Warn about each variable that is set and has no effect: those that only NCCL's own transport uses, and names that
 * begin with PERSEUS_ and are not known. */
void prs_config_warn_ignored(void);

#endif
