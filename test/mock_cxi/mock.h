/* SPDX-License-Identifier: Apache-2.0 */
/* A provider of libfabric for tests: "mock_cxi" promises what cxi (Slingshot) documents, and keeps no more than that.
 *
 *   order     with FI_ORDER_WAW asked for, the bytes of a write follow those of all earlier writes of its endpoint to
 *             the same one. Within a write, bytes land in any order. Reads keep no order with anything.
 *   no order  requests take effect in any order; only the bytes of a write precede its own completion data
 *   fence     FI_FENCE, if it was asked for as a capability: the request and all later ones of the endpoint, to
 *             whomever, wait until all earlier ones are complete
 *   done      with FI_DELIVERY_COMPLETE when the bytes are there; else as soon as they have left
 *   memory    addressed by offsets; keys from here (64 bits) if the caller allows that, else from the caller (32 bits);
 *             each registration belongs to an endpoint, which does not close before it
 *   data      of completions, 8 bytes: by fi_writedata() to memory with keys from here, as with
 *             FI_CXI_ENABLE_WRITEDATA=1; by fi_writemsg() never. An arrival reports its size
 *   endpoints at most 511
 *   GPU memory (FI_HMEM), where the driver is tools/fake_cuda
 *
 * MOCK_CXI turns promises into others, for providers that are like cxi but for one: words, separated by commas.
 *   no-order, no-fence, virtual (addresses), prov-keys, own-keys (always from the caller), no-endpoint (keys are of the
 *   domain, and fi_writemsg() takes data), no-data (as cxi without that variable), no-size (of arrivals),
 *   endpoints=MOST, addresses=MOST (that an endpoint knows), rails=COUNT (2), late=MICROSECONDS (the longest
 *   delay of a request), false-order, false-fence (it is promised, but not kept: a test must notice), lose=NUMBER (that
 *   write of the process fails and is lost; later ones arrive, as if the provider had connected again)
 *
 * The wire is a datagram socket for each endpoint, in the abstract namespace. A thread for each domain is the NIC: it
 * moves bytes though nobody polls. */
#ifndef TEST_MOCK_CXI_H
#define TEST_MOCK_CXI_H

#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdbool.h>
#include <stdint.h>

enum { MOCK_PACKET = 16384, MOCK_SENDS = 1024, MOCK_KEY_BYTES = 4 };

struct mock_settings {
    bool order, fence, false_order, false_fence, virtual_addresses, prov_keys, own_keys, endpoint, data, size;
    uint32_t late_us, endpoints, addresses, rails, lose;
};

struct mock_name { /* of an endpoint */
    uint32_t nic, number;
};

struct mock_mr {
    struct fid_mr fid; /* first */
    struct mock_mr *next;
    struct mock_domain *domain;
    struct mock_ep *ep; /* bound to it */
    uint8_t *base;
    size_t bytes;
    uint64_t access, key; /* the key is told when it is enabled */
    bool enabled, on_gpu;
};

struct mock_cq {
    struct fid_cq fid; /* first */
    struct mock_domain *domain;
    struct fi_cq_data_entry *entry; /* a ring, which grows */
    size_t room, first, count;
    struct fi_cq_err_entry *error;
    size_t errors;
};

struct mock_av {
    struct fid_av fid; /* first */
    struct mock_domain *domain;
    struct mock_name *name;
    size_t count, kept; /* inserted; and not removed */
};

enum mock_kind { MOCK_WRITE, MOCK_READ, MOCK_ACK, MOCK_ANSWER, MOCK_PING };

struct mock_header { /* of a packet */
    uint32_t kind;   /* enum mock_kind */
    int32_t status;  /* MOCK_ACK: 0 or an error of libfabric */
    struct mock_name from;
    uint64_t id; /* of the request */
    uint64_t address, key, data;
    uint32_t bytes, offset, payload;
    uint32_t has_data;
};

/* Something to send: a request of the endpoint's owner, or an acknowledgement or answer to the other side. */
struct mock_job {
    struct mock_job *next;
    struct mock_header header;
    struct mock_name to;
    uint8_t *local;
    const struct mock_mr *mr; /* of local; NULL: of an answer */
    bool gone;                /* the registration of local has ended before the job was done with it */
    void *context;
    uint64_t due_ns, sent_ns; /* sent_ns 0: not all of it has left */
    uint32_t packets, sent, turn, answered;
    bool fence, delivery, completion, reported, lost;
};

/* A write of the other side, some of whose packets have not arrived. */
struct mock_partial {
    struct mock_partial *next;
    struct mock_name from;
    uint64_t id;
    uint32_t bytes;
};

struct mock_ep {
    struct fid_ep fid; /* first */
    struct mock_ep *next;
    struct mock_domain *domain;
    struct mock_cq *cq;
    struct mock_av *av;
    struct mock_name name;
    bool ordered, fences;
    int socket;
    uint64_t next_id, op_flags;
    uint32_t registrations;    /* that belong to it */
    uint32_t waiting;          /* requests */
    struct mock_job *requests; /* oldest first */
    struct mock_job *answers;
    struct mock_partial *partial;
};

struct mock_domain {
    struct fid_domain fid; /* first */
    pthread_mutex_t lock;  /* protects all of the domain */
    pthread_t thread;
    int wake; /* eventfd */
    bool stop;
    uint32_t nic, next_number;
    uint64_t next_key, random;
    struct mock_ep *eps;
    struct mock_mr *mrs;
    bool virtual_addresses, prov_keys, endpoint, data, size;
};

struct mock_settings mock_settings(void);

int mock_ep_open(struct fid_domain *domain, struct fi_info *info, struct fid_ep **ep, void *context);
/* The thread of a domain. */
void *mock_nic(void *domain);
void mock_wake(struct mock_domain *domain);
uint64_t mock_random(struct mock_domain *domain);
uint64_t mock_now_ns(void);

/* Under the lock of the domain. */
void mock_complete_locked(struct mock_cq *cq, void *context, uint64_t flags, size_t bytes, uint64_t data);
void mock_fail_locked(struct mock_cq *cq, void *context, uint64_t flags, int error);
void mock_forget_locked(struct mock_ep *ep);
/* Nothing uses this memory any more: requests that would have fail. */
void mock_withdraw_locked(struct mock_domain *domain, const struct mock_mr *mr);

/* Is there the driver of tools/fake_cuda? */
bool mock_has_gpu(void);
/* Copy as a NIC does, to or from memory of GPUs, too. */
void mock_copy_locked(struct mock_domain *domain, uint8_t *to, const uint8_t *from, size_t bytes);

#endif
